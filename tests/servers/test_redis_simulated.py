"""The ``redis`` medium, its own protocol code included, against a server in memory in virtual time.

By a seed, connections answer late, in pieces, not at all, or are cut within a reply, whether the command was done or
not; the server is loading, full, or says that keys are elsewhere; calls are cancelled. What is answered is true all the
same: no block has another's bytes, and none is said to be there, stored, gone or missing that was not so at any moment
of the call.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, Final

import pytest
from redis.asyncio.cluster import ClusterNode

from tests.support.virtual import VirtualLoop
from tiered_kv.media.backend import BackendContext, Block, Outcome
from tiered_kv.testing import block_key, make_block
from tiered_kv.testing.helpers import GROUPS
from tiered_kv.values.errors import BackendUnavailableError
from tiered_kv.values.keys import BlockKey
from tiered_kv_backends.connecting import Address
from tiered_kv_backends.redis import RedisBackend
from tiered_kv_backends.redis.resp import Pool, RESPConnection, Socket, command, log_in
from tiered_kv_backends.redis.servers import Server, Servers

NUM_SEEDS: Final = 40
NUM_CALLS: Final = 60
NUM_KEYS: Final = 12
AT_ONCE: Final = 4
TIMEOUT_S: Final = 2.0
SIZE: Final = 3000
KEYS: Final = [block_key(n) for n in range(NUM_KEYS)]
BLOCKS: Final = [make_block(bytes([n]) * SIZE, KEYS[n]) for n in range(NUM_KEYS)]
ERRORS: Final = (
    b"LOADING it is",
    b"OOM command not allowed",
    b"MOVED 7 10.0.0.9:6379",
    b"ERR no",
    b"BUSY a script runs",
)


class SimulatedServer:
    """Keeps records, and what was there when.

    Attributes:
        sockets: All that were ever connected.
        well_from: When nothing goes wrong any more.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.sockets: list[SimulatedSocket] = []
        self.well_from = float("inf")
        self.moment = 0
        self._records: dict[bytes, bytes] = {}
        self._changes: defaultdict[bytes, list[tuple[int, str]]] = defaultdict(lambda: [(0, "missing")])
        self._odds = self.rng.choice((0.0, 0.01, 0.05, 0.2))

    def fails(self) -> bool:
        """Say whether something goes wrong now."""
        return asyncio.get_running_loop().time() < self.well_from and self.rng.random() < self._odds

    def was(self, key: int, state: str, since: int) -> bool:
        """Say whether a block was ``"there"`` or ``"missing"`` at any moment from one on."""
        name = b"tiered_kv/" + KEYS[key].path.encode()
        changes = self._changes[name]
        before = [what for at, what in changes if at <= since][-1]
        return state in {before, *(what for at, what in changes if at > since)}

    def execute(self, words: list[bytes]) -> bytes:
        """Do a command, and return the reply."""
        self.moment += 1
        if self.fails():
            return b"-%b\r\n" % self.rng.choice(ERRORS)
        verb, name = words[0], words[1]
        if verb in {b"GET", b"GETEX"}:
            record = self._records.get(name)
            return b"$-1\r\n" if record is None else b"$%d\r\n%b\r\n" % (len(record), record)
        if verb == b"EXISTS":
            return b":%d\r\n" % (name in self._records)
        if verb == b"SET":
            self._records[name] = words[2]
            self._changes[name].append((self.moment, "there"))
            return b"+OK\r\n"
        assert verb == b"UNLINK"
        self._changes[name].append((self.moment, "missing"))
        return b":%d\r\n" % (self._records.pop(name, None) is not None)


class SimulatedSocket:
    """One connection, with what `Socket` has for its user."""

    def __init__(self, server: SimulatedServer) -> None:
        self.is_closed = False
        self._server = server
        self._latency_s = server.rng.choice((0.0, 0.001, 0.05, 0.4))
        self._sent, self._replies = bytearray(), bytearray()
        self._due = 0.0
        self._is_cut = self._is_hung = False
        self._waiting: asyncio.Future[None] | None = None
        server.sockets.append(self)

    async def send(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Send; the server gets each command when it is whole, and does one after the other."""
        for piece in pieces:
            self._check()
            self._sent += piece
            while (words := _taken(self._sent)) is not None:
                loop = asyncio.get_running_loop()
                self._due = max(self._due + 1e-6, loop.time() + self._latency_s)
                loop.call_at(self._due, self._do, words)
            await asyncio.sleep(self._server.rng.choice((0.0, 0.0, 0.0, 0.001)))

    async def receive(self, into: memoryview) -> int:
        """Receive some of what has come."""
        while not self._replies:
            self._check()
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        n = self._server.rng.randint(1, min(len(into), len(self._replies)))
        into[:n] = self._replies[:n]
        del self._replies[:n]
        return n

    def is_silent(self) -> bool:
        """Say whether there is nothing to receive, and the server has not left."""
        return not (self._replies or self._is_cut or self.is_closed)

    def close(self) -> None:
        """Drop it."""
        self.is_closed = True
        self._wake()

    def _check(self) -> None:
        if self.is_closed:
            raise ConnectionAbortedError("closed meanwhile")
        if self._is_cut:
            raise ConnectionResetError("the server closed the connection")

    def _do(self, words: list[bytes]) -> None:
        """Have the server do a command, unless it never came; it may leave before, within or after the reply."""
        server = self._server
        self._is_hung |= server.fails() and server.rng.random() < 0.2
        if self._is_cut or self._is_hung:
            return
        if server.fails():
            self._is_cut = True
            reply = b"" if server.rng.random() < 0.5 else server.execute(words)
            self._replies += reply[: server.rng.randint(0, len(reply))]
        else:
            self._replies += server.execute(words)
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def _taken(sent: bytearray) -> list[bytes] | None:
    """Take the first command that is whole, if any."""
    at, words = sent.find(b"\r\n"), list[bytes]()
    if at < 0:
        return None
    num_words, at = int(sent[1:at]), at + 2
    for _ in range(num_words):
        if (end := sent.find(b"\r\n", at)) < 0:
            return None
        start, size = end + 2, int(sent[at + 1 : end])
        if len(sent) < start + size + 2:
            return None
        words.append(bytes(sent[start : start + size]))
        at = start + size + 2
    del sent[:at]
    return words


@asynccontextmanager
async def opened(server: SimulatedServer, patch: pytest.MonkeyPatch, **changes: object) -> AsyncIterator[RedisBackend]:
    """Yield a backend whose connections are the server's."""

    async def connect(*_: object) -> Any:  # noqa: ANN401 - what has a socket's methods
        await asyncio.sleep(server.rng.choice((0.0, 0.01)))
        if server.fails():
            raise ConnectionRefusedError("nobody listens")
        return SimulatedSocket(server)

    patch.setattr(Socket, "connect", connect)
    settings = {"url": "redis://a.server:1", "timeout_s": TIMEOUT_S, "connections": 2, "ttl_s": 60}
    backend = RedisBackend(settings | changes)
    odds, server._odds = server._odds, 0.0  # noqa: SLF001 - it opens well
    await backend.open(BackendContext(GROUPS, lambda _: None, asyncio.get_running_loop().time))  # type: ignore[arg-type, return-value]  # no threads
    server._odds = odds  # noqa: SLF001 - and then it is as it is
    try:
        yield backend
    finally:
        await backend.aclose()


class Caller:
    """Makes calls, and sees that what they answer is true."""

    def __init__(self, server: SimulatedServer, backend: RedisBackend) -> None:
        self._server = server
        self._backend = backend

    async def call(self) -> None:
        """Make one, which may be cancelled."""
        rng, loop = self._server.rng, asyncio.get_running_loop()
        keys = rng.sample(range(NUM_KEYS), rng.randint(1, 6))
        started = loop.time()
        make = rng.choice((self.read, self.read, self.write, self.write, self.lookup, self.delete))
        task = asyncio.ensure_future(make(keys))
        if rng.random() < 0.2:
            await asyncio.sleep(rng.choice((0.0, 0.001, 0.05, 0.3)))
            task.cancel()
        await asyncio.wait({task})
        assert loop.time() <= started + TIMEOUT_S + 0.01, "a call goes on past its time"
        if not task.cancelled() and not isinstance(task.exception(), BackendUnavailableError):
            task.result()

    async def read(self, keys: list[int]) -> list[Outcome]:
        """Read blocks."""
        since, into = self._server.moment, [Block.empty(SIZE) for _ in keys]
        outcomes = await self._backend.read([KEYS[key] for key in keys], into)
        self._check(keys, outcomes, since, {Outcome.HIT: "there", Outcome.MISS: "missing"})
        for key, block, outcome in zip(keys, into, outcomes, strict=True):
            assert outcome is not Outcome.HIT or bytes(block) == bytes(BLOCKS[key]), "another block's bytes"
        return outcomes

    async def write(self, keys: list[int]) -> list[Outcome]:
        """Write blocks."""
        since = self._server.moment
        outcomes = await self._backend.write([KEYS[key] for key in keys], [BLOCKS[key] for key in keys])
        self._check(keys, outcomes, since, {Outcome.STORED: "there"})
        return outcomes

    async def lookup(self, keys: list[int]) -> list[Outcome]:
        """Look blocks up."""
        since = self._server.moment
        outcomes = await self._backend.lookup([KEYS[key] for key in keys])
        self._check(keys, outcomes, since, {Outcome.HIT: "there", Outcome.MISS: "missing"})
        return outcomes

    async def delete(self, keys: list[int]) -> None:
        """Delete blocks."""
        since = self._server.moment
        await self._backend.delete([KEYS[key] for key in keys])
        assert all(self._server.was(key, "missing", since) for key in keys), "gone, it says, and never was"

    def _check(self, keys: list[int], outcomes: list[Outcome], since: int, said: dict[Outcome, str]) -> None:
        assert Outcome.CORRUPT not in outcomes, "nothing there is damaged"
        for key, outcome in zip(keys, outcomes, strict=True):
            assert outcome not in said or self._server.was(key, said[outcome], since), f"{key} was never {outcome}"


def simulate(seed: int, patch: pytest.MonkeyPatch) -> None:
    """Make calls, several at once, on connections that fail; then on some that do not."""

    async def main() -> None:
        server = SimulatedServer(seed)
        async with opened(server, patch) as backend:
            caller = Caller(server, backend)

            async def calls() -> None:
                for _ in range(NUM_CALLS // AT_ONCE):
                    await caller.call()

            async with asyncio.TaskGroup() as tasks:
                for _ in range(AT_ONCE):
                    tasks.create_task(calls())
            assert sum(not each.is_closed for each in server.sockets) <= 4, "more connections than there may be"
            server.well_from = 0.0
            await asyncio.sleep(5.0)
            everything = list(range(NUM_KEYS))
            outcomes: list[Outcome] = []
            for make in (*2 * (caller.write,), *2 * (caller.read,)):  # one on a connection that hangs since is late
                with suppress(BackendUnavailableError):
                    outcomes = await make(everything)
            assert outcomes == [Outcome.HIT] * NUM_KEYS, "well again, and not in use"
        assert all(each.is_closed for each in server.sockets), "a connection is left"

    loop = VirtualLoop()
    loop.is_busy = lambda: False
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


def simulate_all(seeds: Iterable[int], patch: pytest.MonkeyPatch) -> None:
    """Run some seeds."""
    for seed in seeds:
        try:
            simulate(seed, patch)
        except* AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 10))
def test_what_is_answered_is_true_whatever_becomes_of_connections(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ten seeds each; a failure names its own."""
    simulate_all(range(first, first + 10), monkeypatch)


def test_a_server_that_took_no_connection_is_asked_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """When to ask a single server again is for its tier to decide: no pause of the medium's own is added to that."""

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        server = SimulatedServer(0)
        server.well_from = 0.0
        async with opened(server, monkeypatch, connect_timeout_s=1) as backend:
            for each in server.sockets:
                each.close()
            with monkeypatch.context() as patch:
                patch.setattr(Socket, "connect", never)
                with pytest.raises(BackendUnavailableError, match="no answer in time"):
                    await backend.lookup(KEYS)
            assert await backend.lookup(KEYS) == [Outcome.MISS] * NUM_KEYS

    loop = VirtualLoop()
    loop.is_busy = lambda: False
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


class SimulatedCluster:
    """What redis-py says of two nodes, which hold the keys in turn.

    Attributes:
        is_closed: Whether its connections were closed.
    """

    def __init__(self, may_answer: asyncio.Event | None = None) -> None:
        """Answer who asks, or once it may."""
        self.is_closed = False
        self._may_answer = may_answer
        self._nodes = [ClusterNode(f"node{n}", 6379) for n in range(2)]
        self.nodes_manager = SimpleNamespace(slots_cache={n: [node] for n, node in enumerate(self._nodes)})

    async def initialize(self) -> None:
        """Find out who holds which keys."""
        if self._may_answer is not None:
            await self._may_answer.wait()

    async def aclose(self) -> None:
        """Close every connection."""
        self.is_closed = True

    def get_primaries(self) -> list[ClusterNode]:
        """Return the nodes."""
        return self._nodes

    def keyslot(self, name: bytes) -> int:
        """Return which node holds a key."""
        return sum(name) % 2


def test_a_node_that_hangs_is_asked_again_by_one_call_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that one waits beside the pause, all others are answered; cancelled, it is followed by another."""
    num_asking = 0

    async def main() -> None:
        server = SimulatedServer(0)
        server.well_from = 0.0
        monkeypatch.setattr(Servers, "_make_cluster", lambda _: SimulatedCluster())
        async with opened(server, monkeypatch, cluster=True, timeout_s=20.0, connect_timeout_s=20.0) as backend:
            connect = Socket.connect

            async def connect_or_hang(address: Address, *args: Any) -> Any:  # noqa: ANN401 - as it is
                nonlocal num_asking
                if address.host == "node0":
                    return await connect(address, *args)
                num_asking += 1
                try:
                    await asyncio.Event().wait()
                finally:
                    num_asking -= 1

            for each in server.sockets:
                each.close()
            monkeypatch.setattr(Socket, "connect", connect_or_hang)
            expected = await backend.lookup(KEYS)
            assert set(expected) == {Outcome.MISS, Outcome.FAILED}
            for _ in range(3):
                most, looking = 0, list[asyncio.Task[list[Outcome]]]()
                for _ in range(70):  # seven seconds: more than one pause, and less than one node may take
                    await asyncio.sleep(0.1)
                    looking.append(asyncio.create_task(backend.lookup(KEYS)))
                    most = max(most, num_asking)
                assert most == 1
                (waiting,) = [each for each in looking[:-1] if not each.done()]
                assert all(each.result() == expected for each in looking[:-1] if each is not waiting)
                waiting.cancel()
                await asyncio.wait(looking)
                assert num_asking == 0

    loop = VirtualLoop()
    loop.is_busy = lambda: False
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


class MovingServer(SimulatedServer):
    """Nothing goes wrong in it, but that one block is elsewhere."""

    def __init__(self) -> None:
        super().__init__(0)
        self.well_from = 0.0

    def execute(self, words: list[bytes]) -> bytes:
        """Do a command, and return the reply."""
        if words[1].endswith(KEYS[0].path.encode()):
            return b"-MOVED 1 node1:6379\r\n"
        return super().execute(words)


@pytest.mark.parametrize("end", ["answered", "closed", "cancelled"])
def test_while_a_cluster_is_asked_who_holds_which_keys_it_is_used(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """By all calls but that which met a key elsewhere; closed or cancelled then, it ends, and nothing stays open."""
    clusters: list[SimulatedCluster] = []

    async def main() -> None:
        server, may_answer = MovingServer(), asyncio.Event()

        def make_cluster(_: Servers) -> SimulatedCluster:
            clusters.append(SimulatedCluster(may_answer))
            return clusters[-1]

        may_answer.set()
        monkeypatch.setattr(Servers, "_make_cluster", make_cluster)
        async with opened(server, monkeypatch, cluster=True, timeout_s=60.0) as backend:
            may_answer.clear()
            elsewhere = asyncio.create_task(backend.lookup(KEYS[:2]))
            await asyncio.sleep(1.0)
            for _ in range(3):
                assert await backend.lookup(KEYS[1:]) == [Outcome.MISS] * (NUM_KEYS - 1)
            assert not elsewhere.done()
            if end == "cancelled":
                elsewhere.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await elsewhere
                assert [each.is_closed for each in clusters] == [True, False, True], "all but the one that is used"
            elif end == "closed":
                await backend.aclose()
                may_answer.set()
                with pytest.raises(BackendUnavailableError, match="the tier is closed"):
                    await elsewhere
            else:
                may_answer.set()
                assert await elsewhere == [Outcome.FAILED, Outcome.MISS]
        assert all(each.is_closed for each in server.sockets)

    loop = VirtualLoop()
    loop.is_busy = lambda: False
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
    assert len(clusters) == 3
    assert all(each.is_closed for each in clusters)


@pytest.mark.parametrize("hangs", ["answer", "connect"])
def test_closing_ends_calls_that_have_no_connection_yet(hangs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait for another's, or for the server to take one: at once, and none connects any more."""

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        server, time = SimulatedServer(0), asyncio.get_running_loop().time
        server.well_from = 0.0
        hour: dict[str, object] = {"timeout_s": 3600, "connect_timeout_s": 3600}
        async with opened(server, monkeypatch, connections=1, **hour) as backend:
            if hangs == "connect":
                for each in server.sockets:
                    each.close()
                monkeypatch.setattr(Socket, "connect", never)
            else:
                monkeypatch.setattr(SimulatedSocket, "_do", lambda *_: None)
            calls = [asyncio.create_task(backend.lookup(KEYS)) for _ in range(3)]
            await asyncio.sleep(1.0)
            num_connected, since = len(server.sockets), time()
            await backend.aclose()
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, BackendUnavailableError)
                assert "closed" in str(error)
            assert time() < since + 1.0
            assert len(server.sockets) == num_connected
        assert all(each.is_closed for each in server.sockets)

    loop = VirtualLoop()
    loop.is_busy = lambda: False
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


def test_a_write_that_may_be_carried_out_yet_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose connection was lost: it has failed, so that whoever evicts the block knows that it may come back."""
    do, held = SimulatedSocket._do, list[list[bytes]]()  # noqa: SLF001 - what a server makes of a command

    def hold(connected: SimulatedSocket, words: list[bytes]) -> None:
        if words[0] == b"SET" and not held:
            held.append(words)
            connected._is_cut = True  # noqa: SLF001 - as a proxy does that has passed it on
            connected._wake()  # noqa: SLF001 - likewise
        else:
            do(connected, words)

    async def main() -> None:
        server = SimulatedServer(0)
        server.well_from = 0.0
        async with opened(server, monkeypatch) as backend:
            monkeypatch.setattr(SimulatedSocket, "_do", hold)
            with pytest.raises(BackendUnavailableError, match="the server closed the connection"):
                await backend.write(KEYS[:2], BLOCKS[:2])
            await backend.delete(KEYS[:2])
            server.execute(held[0])
            assert await backend.lookup(KEYS[:2]) == [Outcome.HIT, Outcome.MISS]
            assert await backend.write(KEYS[:2], BLOCKS[:2]) == [Outcome.STORED] * 2

    loop = VirtualLoop()
    loop.is_busy = lambda: False
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("bug", ["a connection is used again", "an error counts as gone"])
def test_what_is_broken_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the same seeds: a connection whose call was cancelled has half of its replies to come."""
    if bug == "a connection is used again":
        monkeypatch.setattr(Pool, "connection", _used_again)
        monkeypatch.setattr(RESPConnection, "is_clean", lambda _: True)
    else:
        monkeypatch.setattr(RedisBackend, "delete", _deleted_anyhow)
    with pytest.raises((ExceptionGroup, AssertionError)):
        simulate_all(range(NUM_SEEDS), monkeypatch)


@asynccontextmanager
async def _used_again(pool: Pool) -> AsyncIterator[RESPConnection]:
    async with pool._room:  # noqa: SLF001 - in the place of its own method
        connection = pool._take_idle() or await log_in(pool.address, pool._login)  # noqa: SLF001 - the same
        try:
            yield connection
        finally:
            pool._idle.append(connection)  # noqa: SLF001 - the same


async def _deleted_anyhow(backend: RedisBackend, keys: Sequence[BlockKey]) -> None:
    names = backend._names(keys)  # noqa: SLF001 - in the place of its own method

    async def unlink(server: Server, which: list[int]) -> list[Outcome | str]:
        await server.count([command(b"UNLINK", names[i]) for i in which])
        return [Outcome.MISS] * len(which)

    await backend._ask_all("delete", names, unlink)  # noqa: SLF001 - the same
