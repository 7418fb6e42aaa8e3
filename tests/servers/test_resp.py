import socket
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest

from tiered_kv.backend import Block, Outcome
from tiered_kv.testing import make_block
from tiered_kv_backends.resp import Address, Connection, Login, Pool, ProtocolError, command

BLOCK = make_block(bytes(range(256)) * 20)
BULK = b"$%d\r\n%b\r\n" % (BLOCK.num_bytes, bytes(BLOCK))


@contextmanager
def serving(pieces: Iterable[bytes]) -> Iterator[Address]:
    """Yield where a server says these pieces, apart from each other, to one client after another, and hears it out."""
    said = list(pieces)

    def serve() -> None:
        with suppress(OSError):  # the listener's end is the server's
            while True:
                client, _ = listener.accept()
                with client, suppress(ConnectionError):
                    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    for piece in said:
                        client.sendall(piece)
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(65536):
                        pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Address(*listener.getsockname())
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@asynccontextmanager
async def answering(pieces: Iterable[bytes]) -> AsyncIterator[Connection]:
    """Yield a connection to a server that says these pieces, and no more."""
    with serving(pieces) as address:
        connection = await Connection.open(address, Login())
        try:
            yield connection
        finally:
            connection.close()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 4095, 4096, 4097, 100_000])
async def test_replies_in_pieces(size: int) -> None:
    """However a stream of replies is cut, each block gets its own bytes and its own outcome."""
    stream = BULK + b"$-1\r\n" + b"-OOM no room\r\n" + b"$5\r\nshort\r\n" + BULK
    into = [Block.empty(len(BLOCK.payload)) for _ in range(5)]
    async with answering(stream[at : at + size] for at in range(0, len(stream), size)) as connection:
        answers = await connection.get([command(b"GET", b"k")] * 5, into)
    assert answers == [Outcome.HIT, Outcome.MISS, "OOM no room", Outcome.CORRUPT, Outcome.HIT]
    assert bytes(into[0]) == bytes(into[4]) == bytes(BLOCK)


@pytest.mark.parametrize(
    "reply", [b"+OK\r\n", b"$x\r\n", b":1\r\n", b"*1\r\n", b"\r\n", BULK[:-2] + b"xx\r\n", b"x" * 9000]
)
async def test_no_bulk_string(reply: bytes) -> None:
    """What is no bulk string where one must be is an error of the connection, never a hit."""
    async with answering([reply]) as connection:
        with pytest.raises(ProtocolError):
            await connection.get([command(b"GET", b"k")], [Block.empty(len(BLOCK.payload))])


@pytest.mark.parametrize("length", [0, 3, 100, 5000, len(BULK) - 1])
async def test_a_stream_that_ends(length: int) -> None:
    """A connection lost anywhere in a reply is an error of the connection, never a hit."""
    async with answering([BULK[:length]]) as connection:
        with pytest.raises(ConnectionError):
            await connection.get([command(b"GET", b"k")], [Block.empty(len(BLOCK.payload))])


async def test_a_failed_call_closes_its_connection() -> None:
    """What was raised while a connection was lent ends it, and its place in the pool is free again."""
    with serving([]) as address:
        pool = Pool(address, Login(), size=1, connect_timeout_s=5)
        async with pool.connection() as first:
            pass
        with pytest.raises(RuntimeError):
            async with pool.connection() as second:
                raise RuntimeError
        async with pool.connection() as third:
            pass
        pool.close()
    assert first is second
    assert third is not second
