"""What a client of ill will can do to a server: end its own connection, and no more."""

import asyncio
import gc
import os
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.host.processes import flooding, started
from tests.support.any_layout import LIMITS, MODEL, SMALL, AnyEngine, cpu, prompt
from tests.support.caches import Recorder, until
from tests.support.serving import attached, serving
from tiered_kv import (
    CacheLimits,
    ConfigurationError,
    GPULoadStoreSpec,
    KVGroup,
    KVLayout,
    Shard,
    TieredKVError,
    TieredKVServer,
    TieredKVSettings,
)
from tiered_kv.host import handshake, protocol, wire
from tiered_kv.host.protocol import AHEAD, Attach, Attached, Follow, Introduce, Keys, Taken
from tiered_kv.host.wire import Link

KEYS = prompt(12)
OPENING = Attach.of("stranger", MODEL, SMALL, (Shard(),), is_read_only=False)
UNREAD = wire.frame(protocol.Ping(7)) * 1000


class Wire(asyncio.Transport):
    """A transport that keeps what is written, and whether it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Of no meaning here."""

    def is_closing(self) -> bool:
        """Say that it is open."""
        return False

    def pause_reading(self) -> None:
        """Read no more."""
        self.is_paused = True

    def resume_reading(self) -> None:
        """Read on."""
        self.is_paused = False


@contextmanager
def stranger(server: TieredKVServer, said: bytes = b"") -> Iterator[socket.socket]:
    """Connect, say something, and stay."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.fspath(server.path))  # waits for its place in the queue
        connection.settimeout(60)
        connection.sendall(said)
        yield connection


@contextmanager
def attached_stranger(server: TieredKVServer) -> Iterator[tuple[socket.socket, Attached]]:
    """Attach, without a client's good manners."""
    connection, answer, descriptors = handshake.begin(os.fspath(server.path), OPENING, 60.0)
    try:
        assert isinstance(answer, Attached)
        yield connection, answer
    finally:
        handshake.give_back(connection, descriptors)


def answering() -> tuple[Link[Any], list[int], list[bool]]:
    """Return a link that answers each call, and ends writing where one cannot be; the calls that it took; its loss."""
    taken: list[int] = []
    lost: list[bool] = []

    def take(asked: protocol.Call) -> None:
        taken.append(asked.id)
        made.send(protocol.Answered(asked.id, b"\xc0"))

    made: Link[Any] = Link(protocol.request_from, take, lambda: lost.append(True), broken=lambda _: made.end_writing())
    return made, taken, lost


def an_array(depth: int) -> bytes:
    """Return arrays in arrays."""
    return b"\x91" * depth + b"\xc0"


def reply_on(connection: socket.socket) -> Any:  # noqa: ANN401 - any of them
    """Wait for the next message of a server."""
    return protocol.reply_from(received(connection, int.from_bytes(received(connection, 4), "little")))


def received(connection: socket.socket, num_bytes: int) -> bytes:
    """Wait for so many bytes, or the end of what comes."""
    came = b""
    while len(came) < num_bytes and (part := connection.recv(num_bytes - len(came))):
        came += part
    return came


@pytest.mark.parametrize("said", [b"", wire.greeting(), wire.greeting() + b"\xff\xff"])
async def test_connections_that_say_nothing_are_few(
    said: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many wait without a word, or with half of one: a client attaches and is served; descriptors stay few."""
    monkeypatch.setattr("tiered_kv.host.reception.OPENING_S", 600.0)
    engine = AnyEngine()
    with serving(tmp_path, cpu(24)) as server, ExitStack() as stack:
        before = server.health()["num_descriptors"]
        for _ in range(300):
            stack.enter_context(stranger(server, said))
        async with attached(server, engine) as kv:
            await kv.store(KEYS, engine.fill(KEYS, range(12)))
            assert (await kv.load(KEYS, engine.spec(range(12)))).num_blocks == 12
        # 300 are the strangers' own, in this process.
        await until(lambda: server.health()["num_descriptors"] <= before + 300 + 70)


@pytest.mark.parametrize(
    "changed",
    [
        {"groups": ({"num_layers": "x"},)},
        {"groups": ({},)},
        {"groups": ()},
        {"groups": ({**asdict(SMALL.groups[0]), "num_layers": 10**15},)},
        {"groups": ({**asdict(SMALL.groups[0]), "num_layers": -1},)},
        {"groups": ({**asdict(SMALL.groups[0]), "num_kv_heads": None},)},
        {"groups": ({**asdict(SMALL.groups[0]), "order": "back"},)},
        {"groups": ({**asdict(SMALL.groups[0]), "dtype": [1]},)},
        {"groups": ({**asdict(SMALL.groups[0]), "window_tokens": "x"},)},
        {"groups": tuple({**asdict(SMALL.groups[0])} for _ in range(1000))},
        {"shards": ()},
        {"shards": ((0, 10**9, False),)},
        {"shards": ((-1, 2, False),)},
        {"shards": ((0, 2, False), (0, 3, False))},
        {"shards": tuple((n, 300, False) for n in range(300))},
        {"shards": ((0, 2, False), (0, 2, False))},
        {"shards": ((1, 2, False), (0, 2, False))},
        {"shards": ((0, 2, True), (1, 2, True))},
        {"shards": ((0, 1, False),) * 1000},
        {"model": "", "weights": ""},
        {"name": "x" * (2 << 20)},
    ],
    ids=lambda changed: str(changed)[:60],
)
async def test_who_attaches_as_what_cannot_be_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    """Whatever is in the first message: an error by name, or a closed connection; nobody's share has changed."""
    engine = AnyEngine()
    opening = Attach(**{**{name: getattr(OPENING, name) for name in Attach.__struct_fields__}, **changed})
    with serving(tmp_path, cpu(24)) as server:
        async with attached(server, engine) as kv:
            await kv.store(KEYS, engine.fill(KEYS, range(12)))
            with pytest.raises(TieredKVError):
                await asyncio.to_thread(handshake.begin, os.fspath(server.path), opening, 60.0)
            assert kv.stats()["cpu"].num_slots == 24
            assert (await kv.lookup(KEYS)).num_blocks == 12
            assert len(server.health()["clients"]) == 1


async def test_one_that_goes_without_goodbye_is_forgotten_at_once(tmp_path: Path) -> None:
    """A process that lives on may attach again and again: a connection that it closes holds no place."""
    with serving(tmp_path, cpu(24), host={"clients": 2}) as server:
        for _ in range(5):
            with attached_stranger(server) as (connection, _):
                connection.sendall(b"\x05\0\0\0ab")  # half a message
            await until(lambda: server.health()["clients"] == [])


async def test_workers_that_are_announced_and_do_not_come_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often a client says that descriptors of its workers come: few wait for them, and others plan."""
    monkeypatch.setattr("tiered_kv.host.admission.OPENING_S", 600.0)
    with serving(tmp_path, cpu(24)) as server, attached_stranger(server) as (_, attached_), ExitStack() as stack:
        before = server.health()["num_descriptors"]
        said = wire.greeting() + wire.frame(Introduce(attached_.token, ((0, 1),)))
        for _ in range(300):
            stack.enter_context(stranger(server, said))
        async with attached(server, AnyEngine()) as kv:
            kv.planner().register_worker()
            assert (await kv.planner().plan_store(KEYS).planned()).num_blocks == 12
        # 300 are the strangers' own, in this process.
        await until(lambda: server.health()["num_descriptors"] <= before + 300 + 70)


async def test_who_says_nothing_a_hundred_times_pushes_out_no_other(tmp_path: Path) -> None:
    """Of silent connections those of the process that has most of them go: a worker is made known however many come."""
    with serving(tmp_path, cpu(24)) as server, attached_stranger(server) as (_, attached_as):
        said = wire.greeting() + wire.frame(Introduce(attached_as.token, ((0, os.getpid()),)))
        with started(flooding, server.path, 100) as flood, ExitStack() as stack:
            await asyncio.to_thread(flood.hear)
            connection = stack.enter_context(stranger(server, said))  # now: what says nothing has its time, too
            flood.say("go")
            await asyncio.to_thread(flood.hear)
            await asyncio.to_thread(TieredKVServer.health_at, server.path)  # accepted after all of those
            pidfd = os.pidfd_open(os.getpid())
            try:
                socket.send_fds(connection, [b"\0"], [pidfd])
            finally:
                os.close(pidfd)
            answered = wire.greeting() + wire.frame(protocol.Introduced())
            assert await asyncio.to_thread(received, connection, len(answered)) == answered


def _eventfd() -> int:
    return os.eventfd(0)


def _memory() -> int:
    return os.memfd_create("memory")


def _socket() -> int:
    return socket.socket(socket.AF_UNIX).detach()


@pytest.mark.parametrize("what", [_eventfd, _memory, _socket])
async def test_what_is_no_process_is_no_worker(what: Callable[[], int], tmp_path: Path) -> None:
    """It would never end, and so would nothing that is held for its part of a job: it is refused, and closed."""
    with serving(tmp_path, cpu(24)) as server, attached_stranger(server) as (connection, attached_as):
        before = server.health()["num_descriptors"]
        path, introduction = os.fspath(server.path), Introduce(attached_as.token, ((0, os.getpid()),))
        given = what()
        try:
            with pytest.raises(ConfigurationError, match="a pidfd is wanted"):
                await asyncio.to_thread(handshake.begin, path, introduction, 60.0, given=[given])
        finally:
            os.close(given)
        keys = Keys.of(KEYS, bytes(32))
        connection.sendall(wire.frame(protocol.PlanJob(1, "store", keys, (), gaps=False, is_bound=True, hint=None)))
        reply = await asyncio.to_thread(reply_on, connection)
        assert isinstance(reply, protocol.Failed)
        assert "plans need a worker" in reply.why
        await until(lambda: server.health()["num_descriptors"] <= before)


async def test_clients_beyond_their_number_are_refused(tmp_path: Path) -> None:
    """Many that attach at the same moment count as well."""
    with serving(tmp_path, cpu(24), host={"clients": 3}) as server, ExitStack() as stack:

        def attach() -> bool:
            try:
                stack.enter_context(attached_stranger(server))
            except ConfigurationError:
                return False
            return True

        assert sum(await asyncio.gather(*(asyncio.to_thread(attach) for _ in range(12)))) == 3


@pytest.mark.both_loops
@pytest.mark.parametrize(
    "body",
    [
        wire.encoded(protocol.Call(1, "stats", b"")).replace(b"stats", b"st\xff\xfes"),
        wire.encoded(protocol.Copied(1, 1, "error")).replace(b"error", b"\xff\xfe\xfd\xfc\xfb"),
        an_array(1_000_000),
        wire.encoded(protocol.Lease(1, Keys(bytes(32), 0, 4, 0, bytes(32), bytes(33)))),
        wire.encoded(protocol.Call(1, "stats", wire.encoded(()), (bytes(33),))),
    ],
    ids=["a name", "an error", "an array", "weights", "past weights"],
)
async def test_what_no_message_can_be_ends_its_client(body: bytes, tmp_path: Path) -> None:
    """Texts and digests that are none, arrays without end: it is told nothing any more, and is forgotten once gone."""
    with serving(tmp_path, cpu(24)) as server:
        with attached_stranger(server) as (connection, _):
            connection.sendall(wire.LENGTH.pack(len(body)) + body)
            assert await asyncio.to_thread(connection.recv, 100) == b""
        await until(lambda: server.health()["clients"] == [])


async def test_what_the_server_cannot_take_ends_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a fault of the server's own, too: others are served, and who sent it is forgotten when it closes its end."""
    engine = AnyEngine()

    def crash(*_: object) -> None:
        raise ZeroDivisionError

    with serving(tmp_path, cpu(24)) as server:
        async with attached(server, engine) as kv:
            with attached_stranger(server) as (connection, _), monkeypatch.context() as patched:
                patched.setattr("tiered_kv.host.session_transfers.SessionTransfers.copied", crash)
                connection.sendall(wire.frame(protocol.Copied(1, 1, "")) * 3)
                assert await asyncio.to_thread(connection.recv, 100) == b""
            await until(lambda: len(server.health()["clients"]) == 1)
            await kv.store(KEYS, engine.fill(KEYS, range(12)))
            assert (await kv.load(KEYS, engine.spec(range(12)))).num_blocks == 12


async def test_a_flood_is_read_as_it_is_looked_at() -> None:
    """What has come and waits its turn is bounded, and in the end all of it is taken, in order."""
    taken: list[int] = []
    made: Link[Any] = Link(protocol.request_from, lambda asked: taken.append(asked.id), lambda: None, broken=print)
    transport = Wire()
    made.connection_made(transport)
    sent = 0
    while not transport.is_paused:
        made.data_received(b"".join(wire.frame(protocol.Ping(sent + each)) for each in range(10_000)))
        sent += 10_000
        assert sent < 1_000_000
    await until(lambda: len(taken) == sent and not transport.is_paused)
    assert taken == list(range(sent))


async def test_what_was_said_in_part_goes_with_who_said_it(tmp_path: Path) -> None:
    """Clients that begin the longest message and leave: nothing of it stays, whenever garbage is collected."""
    part = wire.LENGTH.pack(wire.MOST_FRAME_BYTES) + bytes(8 << 20)
    with serving(tmp_path, cpu(24)) as server:
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(4):
                with attached_stranger(server) as (connection, _):
                    await asyncio.to_thread(connection.sendall, part)
                await until(lambda: not server.health()["clients"])
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()
    assert after - before < len(part)


async def test_nothing_is_taken_of_one_that_reads_no_answers() -> None:
    """Until it has read them it is told nothing more."""
    taken: list[object] = []
    made: Link[Any] = Link(protocol.request_from, taken.append, lambda: None, broken=print)
    transport = Wire()
    made.connection_made(transport)
    made.pause_writing()
    made.data_received(UNREAD)
    for _ in range(150):
        await asyncio.sleep(0)
    assert (len(taken), transport.is_paused) == (0, True)
    made.resume_writing()
    for _ in range(150):
        await asyncio.sleep(0)
    assert (len(taken), transport.is_paused) == (1000, False)


async def test_who_is_told_that_nothing_comes_any_more_is_sent_nothing() -> None:
    """What was due before that arrives; what is said later is no error, and nothing is taken twice."""
    made, taken, lost = answering()
    ours, theirs = socket.socketpair()
    with theirs:
        ours.settimeout(0.0)
        await made.start(ours)
        theirs.sendall(wire.frame(protocol.Ping(1)) + b"\3\0\0\0abc")
        came = b""
        while part := await asyncio.to_thread(theirs.recv, 4096):
            came += part
        assert came == wire.frame(protocol.Answered(1, b"\xc0"))
        made.send(protocol.Answered(2, b"\xc0"))
        assert not lost
    await until(lambda: lost == [True])
    assert taken == [1]


@pytest.mark.both_loops
async def test_who_says_what_cannot_be_and_leaves_is_lost() -> None:
    """An answer to what it said before fails then: it is forgotten all the same, and nothing is taken twice."""
    made, taken, lost = answering()
    ours, theirs = socket.socketpair()
    theirs.sendall(wire.frame(protocol.Ping(1)) + b"\3\0\0\0abc")
    theirs.close()
    ours.settimeout(0.0)
    await made.start(ours)
    await until(lambda: lost == [True])
    assert taken == [1]


@pytest.mark.both_loops
async def test_what_was_said_is_taken_though_an_answer_fails() -> None:
    """The other side has closed its end after its last words, and these are not read yet when a write to it fails."""
    taken: list[object] = []
    lost: list[bool] = []
    made: Link[Any] = Link(protocol.request_from, taken.append, lambda: lost.append(True), broken=print)
    ours, theirs = socket.socketpair()
    ours.settimeout(0.0)
    await made.start(ours)
    theirs.sendall(UNREAD + wire.frame(protocol.Bye()))
    theirs.close()
    made.send(protocol.Answered(1, b"\xc0"))
    await until(lambda: lost == [True])
    assert len(taken) == 1001
    assert isinstance(taken[-1], protocol.Bye)


class Followed(socket.socket):
    """An end of a connection of which the other side writes more whenever this one reads."""

    theirs: socket.socket
    num_reads = 0

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Read, once there is something."""
        self.num_reads += 1
        assert self.num_reads < 100
        with suppress(BrokenPipeError):
            self.theirs.sendall(UNREAD)
        return super().recv(bufsize, flags)


async def test_who_reads_no_answers_and_writes_on_is_not_read_on_and_on() -> None:
    """A write to it fails: what it had said by then is taken, and no more."""
    taken: list[object] = []
    lost: list[bool] = []
    made: Link[Any] = Link(protocol.request_from, taken.append, lambda: lost.append(True), broken=print)
    ours, theirs = socket.socketpair()
    followed = Followed(fileno=ours.detach())
    followed.settimeout(0.0)
    followed.theirs = theirs
    with theirs:
        await made.start(followed)
        theirs.sendall(UNREAD)
        theirs.shutdown(socket.SHUT_RD)
        made.send(protocol.Answered(1, b"\xc0"))
        await until(lambda: lost == [True])
    assert len(taken) == 1000


async def test_changes_that_were_not_sent_cannot_be_taken(tmp_path: Path) -> None:
    """A client that says so has no more room for it: the server sends no further ahead than to others."""
    with serving(tmp_path, cpu(24)) as server, attached_stranger(server) as (connection, _):
        connection.settimeout(60)
        connection.sendall(wire.frame(Follow(5)) + wire.frame(Taken(5, AHEAD)) * 2)
        replies: list[object] = []
        while not any(isinstance(reply, protocol.Failed) for reply in replies):
            length = int.from_bytes(await asyncio.to_thread(connection.recv, 4, socket.MSG_WAITALL), "little")
            replies.append(protocol.reply_from(connection.recv(length, socket.MSG_WAITALL)))
        assert {reply.id for reply in replies if isinstance(reply, protocol.Failed)} == {5}


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("aclose", wire.encoded(())),
        ("__aenter__", wire.encoded(())),
        ("_open", wire.encoded(())),
        ("resize", wire.encoded(("cpu", 0))),
        ("advance_epoch", wire.encoded(("w",))),
        ("", b""),
        ("stats", wire.encoded((1,))),
        ("stats", b""),
        ("flush", wire.encoded(("yes",))),
        ("flush", wire.encoded((True, True))),
        ("lookup", wire.encoded(())),
        ("lookup", wire.encoded((None,))),
        ("lookup", wire.encoded(((b"\0" * 32, 0, 16, 0, b"", b""),))),
        ("lookup", wire.encoded(((b"\0" * 31, 0, 16, 0, bytes(32), bytes(32)),))),
        ("lookup", wire.encoded(((b"\0" * 32, 0, 16, 10**9, bytes(32), bytes(32)),))),
        ("lookup", wire.encoded(((b"\0" * 32, 2**63, 4, 0, bytes(32), bytes(32)),))),
        ("lookup", wire.encoded(((b"\0" * 32, 0, 4, 0, bytes(32), bytes(33)),))),
        ("pin", wire.encoded(((b"\0" * 32, 0, 16, 0, bytes(32), bytes(32)), -1.0))),
        ("pin", wire.encoded(((b"\0" * 32, 0, 16, 0, bytes(32), bytes(32)), "60"))),
        ("touch", wire.encoded(((b"\0" * 32, 0, 16, 0, bytes(32), bytes(32)), {"probability": 7}))),
        ("membership", an_array(100_000)),
        ("evict", b"\xdd\xff\xff\xff\xff"),
    ],
)
async def test_a_call_that_cannot_be_is_refused_alone(name: str, args: bytes, tmp_path: Path) -> None:
    """Names that no client may call, arguments of other types than the face says: an error; the next is answered."""
    with serving(tmp_path, cpu(24)) as server, attached_stranger(server) as (connection, _):
        connection.settimeout(60)
        unheard = wire.frame(protocol.Call(0, name, args))
        connection.sendall(unheard + wire.frame(protocol.Call(1, name, args)) + wire.frame(protocol.Ping(2)))
        replies: dict[int, object] = {}
        while not {1, 2} <= replies.keys():
            length = int.from_bytes(await asyncio.to_thread(connection.recv, 4, socket.MSG_WAITALL), "little")
            reply = protocol.reply_from(connection.recv(length, socket.MSG_WAITALL))
            replies[reply.id] = reply
        assert isinstance(replies[1], protocol.Failed)
        assert replies[1].kind in {"ConfigurationError", "LayoutMismatchError"}
        assert isinstance(replies[2], protocol.Answered)
        assert replies.keys() == {1, 2}


async def test_a_job_of_more_prompts_than_an_engine_has_is_not_looked_at(tmp_path: Path) -> None:
    """Without a key each, so that all of them pass in one message: the others would wait for seconds."""
    none = Keys(b"", 0, 4, 0, bytes(32), bytes(32))
    job = protocol.PlanJob(1, "store", none, (none,) * (1 << 14), gaps=False, is_bound=True, hint=None)
    with serving(tmp_path, cpu(24)) as server, attached_stranger(server) as (connection, _):
        await asyncio.to_thread(connection.sendall, wire.frame(job))
        reply = await asyncio.to_thread(reply_on, connection)
        assert isinstance(reply, protocol.Failed)
        assert "a job of 16385 prompts, 16384 at most" in reply.why


async def test_a_plan_is_made_of_keys_however_many_pages_a_block_has(tmp_path: Path) -> None:
    """Which pages they are the client knows: a server that counted them out would need a list of millions."""
    num_pages = 1 << 16
    layout = KVLayout((KVGroup(1, 1, 1, "uint8", num_pages, page_size=1),))
    keys = prompt(32, block_size=num_pages)
    blocks = GPULoadStoreSpec(np.arange(32 * num_pages))
    with serving(tmp_path, cpu(64, layout.groups[0].stride_bytes), limits=CacheLimits()) as server:
        async with attached(server, layout=layout) as kv:
            kv.planner().register_worker()
            tracemalloc.start()
            try:
                await kv.planner().plan_load(keys, blocks).ended()
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert peak < 8 << 20


async def test_a_stream_that_takes_the_number_of_another_ends_with_its_client(tmp_path: Path) -> None:
    """Begun before the one of this number is quite over: it counts, and nothing of it stays."""
    settings = TieredKVSettings(tiers=[cpu(24)], limits=LIMITS, host={"socket": tmp_path / "kv.sock"})
    async with TieredKVServer(settings, emit=Recorder()) as server:
        connection, _, descriptors = await asyncio.to_thread(handshake.begin, os.fspath(server.path), OPENING, 60.0)
        try:
            connection.sendall(wire.frame(Follow(5)) + wire.frame(protocol.Cancel(5)) + wire.frame(Follow(5)))
            await asyncio.to_thread(reply_on, connection)
            assert server.health()["clients"][0]["streams"] == 1
        finally:
            handshake.give_back(connection, descriptors)
        await until(lambda: not server.health()["clients"])
        await until(lambda: "tell of changes" not in {task.get_name() for task in asyncio.all_tasks()})


async def test_leases_asked_for_at_once_are_counted(tmp_path: Path) -> None:
    """A client that asks for many leases in one message after the other gets no more than it may have."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(24), host={"leases_per_client": 2}) as server:
        async with attached(server, engine) as kv:
            await kv.store(KEYS, engine.fill(KEYS, range(12)))
            said = Keys.of(KEYS[:1], kv.namespace().epoch)
            with attached_stranger(server) as (connection, _):
                connection.sendall(b"".join(wire.frame(protocol.Lease(number, said)) for number in range(50)))
                for _ in range(50):
                    length = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")
                    connection.recv(length, socket.MSG_WAITALL)
                (client,) = [each for each in server.health()["clients"] if each["leases"]]
                assert client["leases"] == 2
                connection.sendall(wire.frame(protocol.Bye()))
            await until(lambda: kv.stats()["cpu"].leased == 0)


async def test_a_server_without_descriptors_goes_on_when_it_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the system refuses for a moment is tried again soon."""
    refused = iter([OSError(24, "Too many open files")] * 3)
    with serving(tmp_path, cpu(24)) as server:
        accept = asyncio.selector_events.BaseSelectorEventLoop.sock_accept

        async def sometimes(self: Any, listener: socket.socket) -> Any:  # noqa: ANN401 - of asyncio's
            for error in refused:
                raise error
            return await accept(self, listener)

        monkeypatch.setattr(asyncio.selector_events.BaseSelectorEventLoop, "sock_accept", sometimes)
        for _ in range(3):
            async with attached(server) as kv:
                assert (await kv.lookup(KEYS)).num_blocks == 0
