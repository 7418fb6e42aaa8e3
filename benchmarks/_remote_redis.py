"""The ``redis`` medium and bare asyncio sockets, on a redis-server of its own."""

import asyncio
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from redis.asyncio import Redis

from _remote_common import Bare, MissingError, Sides, counted, share
from tiered_kv.media.backend import Block
from tiered_kv_backends.redis.redis_backend import RedisBackend
from tiered_kv_backends.redis.servers import RedisSettings, Server

sys.path.append(str(Path(__file__).parent.parent / "tests" / "servers"))
from redis_server import find_binary, run_redis

NUM_SOCKETS = 8
Move = Callable[[socket.socket, str, Block], Awaitable[None]]


@asynccontextmanager
async def serve() -> AsyncIterator[Sides]:
    """Yield both sides while a server runs.

    Raises:
        MissingError: There is no redis-server.
    """
    try:
        binary = find_binary("redis-server")
    except pytest.skip.Exception as missing:
        raise MissingError(str(missing)) from None
    with tempfile.TemporaryDirectory(prefix="redis-benchmark-") as folder, run_redis(binary, Path(folder)) as server:
        sockets = [await connect(server.port) for _ in range(NUM_SOCKETS)]
        client = Redis(port=server.port, protocol=2)

        async def count_present(names: Sequence[str]) -> int:
            async with client.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.execute_command("EXISTS", name)
                return sum(await pipeline.execute())

        def all_of(move: Move) -> Bare:
            return lambda names, blocks, concurrency: share(
                [partial(move, each) for each in sockets[:concurrency]], names, blocks
            )

        try:
            settings = RedisSettings.model_validate({"url": server.url, "connections": NUM_SOCKETS, "ttl_s": None})
            backend = RedisBackend(settings)
            with counted(Server, "count") as num_questions:
                yield Sides(backend, "sockets", all_of(bare_set), all_of(bare_get), count_present, num_questions)
        finally:
            await client.aclose()
            for each in sockets:
                each.close()


async def connect(port: int) -> socket.socket:
    """Return a connected socket."""
    sock = socket.socket()
    sock.setblocking(False)  # noqa: FBT003 - the only argument
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return sock


async def bare_set(sock: socket.socket, name: str, block: Block) -> None:
    """Send one SET, the payload from where it is."""
    loop = asyncio.get_running_loop()
    key = name.encode()
    head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, block.num_bytes)
    await loop.sock_sendall(sock, head + block.header)
    await loop.sock_sendall(sock, block.payload)
    await loop.sock_sendall(sock, b"\r\n")
    if await loop.sock_recv(sock, 64) != b"+OK\r\n":
        raise OSError("a SET failed")


async def bare_get(sock: socket.socket, name: str, block: Block) -> None:
    """Send one GET and receive the record where it goes; its length is known."""
    loop, key = asyncio.get_running_loop(), name.encode()
    await loop.sock_sendall(sock, b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
    start, end = bytearray(len(b"$%d\r\n" % block.num_bytes)), bytearray(2)
    for part in (memoryview(start), *block.segments, memoryview(end)):
        rest = part
        while rest:
            rest = rest[await loop.sock_recv_into(sock, rest) :]
