import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest
from typing_extensions import Buffer

from ports import deaf_port, hung_resolver
from tests.support.caches import until
from tiered_kv.media.backend import Block, Outcome
from tiered_kv.testing import make_block
from tiered_kv_backends import connecting
from tiered_kv_backends.connecting import Address
from tiered_kv_backends.redis.resp import Login, Pool, ProtocolError, RESPConnection, Socket, command, log_in

BLOCK = make_block(bytes(range(256)) * 20)
BULK = b"$%d\r\n%b\r\n" % (BLOCK.num_bytes, bytes(BLOCK))


@contextmanager
def serving(pieces: Iterable[bytes], *, then_ends: bool = True) -> Iterator[Address]:
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
                    if then_ends:
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
async def answering(pieces: Iterable[bytes]) -> AsyncIterator[RESPConnection]:
    """Yield a connection to a server that says these pieces, and no more."""
    with serving(pieces) as address:
        connection = await log_in(address, Login())
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
    "reply",
    [
        b"+OK\r\n",
        b"$x\r\n",
        b":1\r\n",
        b"*1\r\n",
        b"\r\n",
        BULK[:-2] + b"xx\r\n",
        b"x" * 9000,
        pytest.param(b"$" + b"1" * 5000 + b"\r\n", id="digits"),
    ],
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


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (b"-ERR no room here\r\n", "ERR no room here"),
        (b":1\r\n-ERR no room here\r\n", "ERR no room here"),
        (b"-ERR no room here\r\n:1\r\n", "the server closed the connection"),
    ],
)
async def test_last_words_say_why_a_server_left(stream: bytes, said: str) -> None:
    """One that has all the clients it takes answers the first of several questions, and hangs up."""
    async with answering([stream]) as connection:
        with pytest.raises(ConnectionResetError, match=said):
            await connection.count([command(b"EXISTS", b"k")] * 3)


async def test_last_words_of_another_call_say_nothing() -> None:
    """An error that was an answer is not why the next call has none."""
    async with answering([b"-OOM no room\r\n"]) as connection:
        assert await connection.set([b"k"], [BLOCK]) == ["OOM no room"]
        for ask in (
            lambda: connection.get([command(b"GET", b"k")], [Block.empty(len(BLOCK.payload))]),
            lambda: connection.count([command(b"EXISTS", b"k")]),
        ):
            with pytest.raises(ConnectionResetError, match="the server closed the connection"):
                await ask()


class EndlessSocket(socket.socket):
    """Says ``beginning``, then the byte x for ever, faster than anybody reads."""

    def __init__(self, beginning: bytes) -> None:
        super().__init__()
        self.beginning = beginning
        self.num_reads = 0

    def send(self, data: Buffer, flags: int = 0) -> int:
        """Take all."""
        return len(memoryview(data))

    def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:
        """Fill the buffer at once, but not more often than a reader that lets others run would ask for."""
        self.num_reads += 1
        if self.num_reads > 100_000:
            raise AssertionError("the event loop never got its turn")
        view = memoryview(buffer).cast("B")
        said, self.beginning = self.beginning[: len(view)], self.beginning[len(view) :]
        view[: len(said)] = said
        view[len(said) :] = b"x" * (len(view) - len(said))
        return len(view)


async def test_a_body_without_end_does_not_keep_the_event_loop() -> None:
    """However much more than the block a server sends, others run meanwhile, and the call can be given up."""
    connection = RESPConnection(Socket(EndlessSocket(b"$999999999999999\r\n")))
    reading = asyncio.ensure_future(connection.get([command(b"GET", b"k")], [Block.empty(1)]))
    for _ in range(1000):
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    connection.close()


@pytest.mark.parametrize(
    "reply",
    [
        b"$2147483000\r\nxxxx",
        b"*2\r\n:1\r\n:1\r\n",
        b"+1\r\n",
        b":x\r\n",
        b"x" * 9000,
        pytest.param(b":" + b"1" * 5000 + b"\r\n", id="digits"),
    ],
)
async def test_no_number(reply: bytes) -> None:
    """What is no number where one must be is an error of the connection, and is not kept however long it is."""
    async with answering([reply]) as connection:
        with pytest.raises(ProtocolError):
            await connection.count([command(b"EXISTS", b"k")])


async def test_numbers_and_errors() -> None:
    """Each question has its own answer, as many as there are."""
    replies = b"".join(b":%d\r\n-OOM\r\n" % n for n in range(500))
    async with answering([replies]) as connection:
        answers = await connection.count([command(b"EXISTS", b"k")] * 1000)
    assert answers == [each for n in range(500) for each in (n, "OOM")]


@pytest.mark.parametrize("said", [[b"+OK\r\n+OK\r\n"], [b"+OK\r\n"]], ids=["a reply too many", "the end"])
async def test_a_connection_that_said_more_is_not_used_again(said: list[bytes]) -> None:
    """A reply that nobody asked for is never taken for the next call's, and a connection that ended is not tried."""
    with serving(said) as address:
        pool = Pool(address, Login(), size=1, connect_timeout_s=5)
        used = []
        for _ in range(3):
            async with pool.connection() as connection:
                used.append(connection)
                assert await connection.set([b"k"], [BLOCK]) == [Outcome.STORED]
            await until(lambda: not connection.is_clean())
        pool.close()
    assert len(set(used)) == 3


async def test_a_failed_call_closes_its_connection() -> None:
    """What was raised while a connection was lent ends it, and its place in the pool is free again."""
    with serving([], then_ends=False) as address:
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


async def test_a_resolver_that_hangs_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many callers give up; in a thread of its own, as the loop's threads are the program's."""
    with serving([], then_ends=False) as there:
        address = Address("a.server", there.port)
        with hung_resolver(monkeypatch) as (asked, may_answer):
            for _ in range(20):
                given_up = asyncio.ensure_future(log_in(address, Login()))
                await asyncio.sleep(0)
                given_up.cancel()
                await asyncio.wait([given_up])
            await until(lambda: bool(asked))
            logging_in = asyncio.ensure_future(log_in(address, Login()))
            assert await asyncio.to_thread(lambda: len(asked)) == 1
            may_answer.set()
            (await logging_in).close()
            (await log_in(there, Login())).close()
    assert len(asked) == 1


async def test_a_host_that_cannot_be_is_not_reachable() -> None:
    """A name that no resolver takes is an error like any other of the network."""
    with pytest.raises(OSError, match=r"x+\.example: "):
        await log_in(Address("x" * 70 + ".example", 6379), Login())


async def test_an_address_that_does_not_answer_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that refuses: a host whose first address leads nowhere is reached at the next one."""
    monkeypatch.setattr(connecting, "ADDRESS_S", 0.05)
    with serving([], then_ends=False) as there, deaf_port() as deaf:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", where) for where in (("127.0.0.1", deaf), tuple(there))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        (await log_in(Address("a.server", 6379), Login())).close()
