"""Servers that say more to redis-py than it is to keep, or lead somewhere else."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest

from ports import hung_resolver
from tiered_kv.media.backend import Block
from tiered_kv.testing import block_key, make_block, open_context
from tiered_kv.values.errors import BackendUnavailableError, TieredKVError
from tiered_kv_backends.redis import RedisBackend
from tiered_kv_backends.redis.servers import MOST_BYTES

MUCH_BYTES = 4 * MOST_BYTES
"""After which the server gives up; what lies in buffers of the system is far less."""
REPLIES = {"a string": b"$%d\r\n" % MUCH_BYTES, "an array": b"*20000000\r\n", "a line": b"+"}


@contextmanager
def talkative(reply: bytes) -> Iterator[tuple[int, list[int]]]:
    """Yield the port of a server that answers whatever is asked by a reply without end, and what each client took."""
    taken: list[int] = []

    def serve() -> None:
        with suppress(OSError):  # the listener's end is the server's
            while True:
                client, _ = listener.accept()
                number = len(taken)
                taken.append(0)
                with client, suppress(OSError):
                    client.recv(65536)
                    said = reply + b":1\r\n" * (1 << 14) if reply.startswith(b"*") else reply + b"x" * (1 << 16)
                    while said and taken[number] < MUCH_BYTES:
                        num_sent = client.send(said)
                        taken[number] += num_sent
                        said = said[num_sent:] or said[len(reply) :]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1], taken
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("kind", ["cluster", "sentinel", "tenant"])
async def test_no_reply_is_kept_that_does_not_end(kind: str, reply: str) -> None:
    """Whoever answers questions about the whole of a server, the connection ends before much is kept of it."""
    with talkative(REPLIES[reply]) as (port, taken), pytest.raises(TieredKVError):
        await ask(kind, {"url": f"redis://127.0.0.1:{port}", "connect_timeout_s": 20})
    assert taken
    assert max(taken) < MUCH_BYTES


@pytest.mark.parametrize("kind", ["cluster", "sentinel", "tenant"])
async def test_a_resolver_that_hangs_takes_no_thread_of_the_program(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often somebody gives up who asks: a name is asked for once, in a thread of our own."""
    with hung_resolver(monkeypatch) as (asked, _):
        for _ in range(20):
            with pytest.raises(TieredKVError):
                await ask(kind, {"url": "redis://a.server:1", "connect_timeout_s": 0.02})
        assert len(asked) == 1
        assert await asyncio.to_thread(len, asked) == 1


async def ask(kind: str, settings: dict[str, object]) -> None:
    """Ask something that redis-py asks for us."""
    if kind == "tenant":
        await RedisBackend.delete_tenant(settings, "ann")
        return
    settings |= {"cluster": True, "timeout_s": 200} if kind == "cluster" else {"sentinel_master": "kv"}
    with open_context() as context:
        await RedisBackend(settings).open(context)


@asynccontextmanager
async def answering(answer: Callable[[bytes], bytes]) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Yield the port of a server that answers commands by their first word, and the words that came."""
    came: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while line := await reader.readline():
                words = [await _word(reader) for _ in range(int(line[1:]))]
                came.append(words[0].upper())
                is_probe = came[-1] == b"GETEX" and b"open/" in words[1]
                writer.write(b"$4097\r\n" + bytes(4097) + b"\r\n" if is_probe else answer(came[-1]))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], came


async def _word(reader: asyncio.StreamReader) -> bytes:
    length = int((await reader.readline())[1:])
    return (await reader.readexactly(length + 2))[:-2]


@pytest.mark.parametrize("verb", [b"SET", b"GETEX"])
async def test_a_server_leads_nobody_to_another_host(verb: bytes) -> None:
    """What is no cluster has no other nodes: our blocks and our password go where they were meant to go."""
    async with answering(lambda _: b"+OK\r\n") as (other, came):
        is_asked = False

        def answer(word: bytes) -> bytes:
            if is_asked and word == verb:
                return b"-ASK 1 127.0.0.1:%d\r\n" % other
            return {b"EXISTS": b":0\r\n", b"UNLINK": b":0\r\n", b"GETEX": b"$-1\r\n"}.get(word, b"+OK\r\n")

        async with answering(answer) as (port, _):
            settings = {"medium": "redis", "url": f"redis://kv:secret@127.0.0.1:{port}", "timeout_s": 5}
            with open_context() as context:
                backend = RedisBackend(settings)
                await backend.open(context)
                is_asked = True
                writing, reading = ([block_key(0)], [make_block(b"1")]), ([block_key(0)], [Block.empty(1)])
                with pytest.raises(BackendUnavailableError, match="ASK"):
                    await (backend.write(*writing) if verb == b"SET" else backend.read(*reading))
                await backend.aclose()
    assert came == []
