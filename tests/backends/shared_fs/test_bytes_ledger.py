"""What a shared directory may still take: all processes' ledger, one's room in it, and when a sweep is due."""

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from anyio.lowlevel import checkpoint

from tiered_kv.media.backend import Block
from tiered_kv.testing.helpers import ended
from tiered_kv.values.errors import BackendUnavailableError
from tiered_kv.values.keys import BlockKey, Namespace
from tiered_kv_backends.shared_fs import bytes_ledger
from tiered_kv_backends.shared_fs.bytes_ledger import ByteLedger, DirectoryRoom, LedgerCounts
from tiered_kv_backends.shared_fs.files import FileThreads, probe
from tiered_kv_backends.shared_fs.sweeper import Sweeper, Swept

CAPACITY = 1000 * 8192
BLOCK = 8192
MINUTE_NS = 60 * 10**9


class Clock:
    """Both clocks, which a test turns."""

    def __init__(self) -> None:
        self.now_ns = 10**9 * 1_700_000_000

    def ns(self) -> int:
        """Return the wall clock's time."""
        return self.now_ns

    def s(self) -> float:
        """Return the monotonic one's."""
        return self.now_ns / 10**9


@pytest.fixture
def clock() -> Clock:
    """One that stands still."""
    return Clock()


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A directory that a cache has opened."""
    probe(str(tmp_path))
    return str(tmp_path)


def ledger_in(root: str, clock: Clock, capacity: int = CAPACITY) -> ByteLedger:
    """Return the hand of one more process."""
    ledger = ByteLedger(root, capacity, clock.ns)
    ledger.create(is_empty=True)
    return ledger


def books_of(ledger: ByteLedger) -> LedgerCounts:
    """Return what it says."""
    books = ledger.read()
    assert books is not None
    return books


def test_no_more_is_taken_than_there_is(root: str, clock: Clock) -> None:
    """By however many processes; what one gives back another may take."""
    one, other = ledger_in(root, clock), ledger_in(root, clock)
    assert one.take(CAPACITY - 100, 0) == CAPACITY - 100
    assert other.take(300, 0) == 100
    assert other.take(300, 100) == 0
    one.give_back(50, CAPACITY - 150)
    assert other.take(300, 100) == 50
    assert books_of(one).total == CAPACITY
    assert sorted(unwritten for unwritten, _ in books_of(one).writers.values()) == [150, CAPACITY - 150]


def test_who_may_have_less_takes_none_away(root: str, clock: Clock) -> None:
    """A process with a smaller capacity than what is there gets nothing, and the sum stays right."""
    large, small = ledger_in(root, clock), ledger_in(root, clock, CAPACITY // 2)
    assert large.take(CAPACITY, 0) == CAPACITY
    assert small.take(1, 0) == 0
    assert books_of(small).total == CAPACITY


def test_what_a_host_has_cached_is_not_believed(root: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FUSE client, as GlusterFS', keeps pages for a second, though another host has changed the file under a lock."""
    one, other = ledger_in(root, clock), ledger_in(root, clock)
    cached = Path(root, "ledger").read_bytes()
    monkeypatch.setattr(os, "pread", lambda _file, num_bytes, at: cached[at : at + num_bytes])
    assert one.take(CAPACITY - 100, 0) == CAPACITY - 100
    assert other.take(300, 0) == 100
    ledger_in(root, clock)  # which does not take it for new
    assert books_of(one).total == CAPACITY


def test_a_sweep_counts_what_is_still_to_be_written(root: str, clock: Clock) -> None:
    """What others had taken when it began, and what they took since; of those that are dead, nothing."""
    writing, dead, sweeping = (ledger_in(root, clock) for _ in range(3))
    dead.take(7000, 0)
    clock.now_ns += 11 * MINUTE_NS
    writing.take(500, 0)
    begun = sweeping.begin_sweep(lambda: 30)
    assert sorted(unwritten for unwritten, _ in begun.writers.values()) == [30, 500]
    writing.take(60, 500)
    clock.now_ns += 1
    sweeping.end_sweep(begun, 4000)
    books = books_of(sweeping)
    assert (books.total, books.num_sweeps, books.swept_ns) == (4000 + 500 + 30 + 60, 1, clock.now_ns)
    assert Path(root, "ledger").read_bytes().count(b"\n") == 1


def test_who_has_written_all_is_no_longer_named(root: str, clock: Clock) -> None:
    """Else the file would grow with every process that ever wrote."""
    for _ in range(20):
        one = ledger_in(root, clock)
        one.take(100, 0)
        one.give_back(100, 0)
    longest = Path(root, "ledger").stat().st_size
    assert books_of(one).total == 0
    assert not one.begin_sweep(lambda: 0).writers
    assert Path(root, "ledger").stat().st_size < longest // 4


def test_what_cannot_be_known_is_full_until_it_is_counted(root: str, clock: Clock) -> None:
    """A ledger that was damaged gives nothing; nor does one that is damaged again as it is counted."""
    ledger, path = ledger_in(root, clock), Path(root, "ledger")
    path.write_bytes(b"rubbish")
    assert ledger.read() is None
    assert ledger.take(1, 0) is None
    begun = ledger.begin_sweep(lambda: 0)
    assert ledger.take(1, 0) == 0
    path.write_bytes(b"rubbish")
    ledger.end_sweep(begun, 0)
    assert ledger.read() is None
    ledger.end_sweep(ledger.begin_sweep(lambda: 0), CAPACITY - 5)
    assert ledger.take(10, 0) == 5
    assert ledger.num_sweeps == 1


class AtOnce:
    """Workers that run a call where it is made, having let a test see it."""

    def __init__(self) -> None:
        self.seen: Callable[[], object] = lambda: None

    def run(self, function: Callable[..., Any], *args: object) -> "asyncio.Future[Any]":
        """Run a call."""
        future = asyncio.get_running_loop().create_future()
        self.seen()
        try:
            future.set_result(function(*args))
        except OSError as error:
            future.set_exception(error)
        return future

    def begin_each(self, calls: Sequence[Callable[[], Any]], then: Callable[[Callable[[], list[Any]]], object]) -> None:
        """Run calls."""
        asyncio.ensure_future(ended(*[self.run(call) for call in calls])).add_done_callback(
            lambda each: then(each.result)
        )


def room_in(root: str, clock: Clock, ledger: ByteLedger, workers: AtOnce | None = None) -> DirectoryRoom:
    """Return a process's room, of which it takes eight blocks ahead."""
    return DirectoryRoom(root, ledger, 1024 * 8 * BLOCK, 0.0, FileThreads(workers or AtOnce()), clock.s)


def blocks(n: int) -> list[Block]:
    """Return blocks of 8 KiB with their headers."""
    return [Block.empty(BLOCK - 4096) for _ in range(n)]


async def test_room_is_taken_ahead_and_used_again(root: str, clock: Clock) -> None:
    """Few writes ask the ledger; what was not written is written later, and is given back in the end."""
    ledger, times = ledger_in(root, clock), [0]

    def count() -> None:
        times[0] += 1

    room = room_in(root, clock, ledger)
    for num_times in (1, 1, 1, 1, 2):
        assert await room.take(blocks(2), count) == 2
        room.settle(BLOCK, is_written=True)
        room.settle(BLOCK, is_written=False)
        room.settle(-BLOCK, is_written=False)  # as if the second had been written later on
        room.settle(BLOCK, is_written=True)
        assert times == [num_times]
    assert books_of(ledger).total == 16 * BLOCK
    assert room.unwritten == 6 * BLOCK
    room.return_all()
    assert books_of(ledger).total == 10 * BLOCK
    assert [unwritten for unwritten, _ in books_of(ledger).writers.values()] == [0]


class StuckTaking(AtOnce):
    """Workers that end no call of the ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stuck = asyncio.Event()

    def run(self, function: Callable[..., Any], *args: object) -> "asyncio.Future[Any]":
        """Begin a call."""
        if not isinstance(getattr(getattr(function, "func", function), "__self__", None), ByteLedger):
            return super().run(function, *args)
        self.is_stuck.set()
        return asyncio.get_running_loop().create_future()


async def test_a_write_that_is_given_up_while_it_takes_room_has_none(root: str, clock: Clock) -> None:
    """Else each of them would take from the capacity for as long as the process lives."""
    workers = StuckTaking()
    room = room_in(root, clock, ledger_in(root, clock), workers)
    taking = asyncio.create_task(room.take(blocks(2), lambda: None))
    await workers.is_stuck.wait()
    assert room.unwritten
    taking.cancel()
    await asyncio.wait({taking})
    assert (taking.cancelled(), room.unwritten) == (True, 0)


async def test_room_that_lies_unused_is_taken_anew(root: str, clock: Clock) -> None:
    """After a minute others may take this process for dead, and a sweep no longer counts what it had taken."""
    ledger = ledger_in(root, clock)
    room = room_in(root, clock, ledger)
    assert await room.take(blocks(1), lambda: None) == 1
    assert books_of(ledger).total == room.unwritten == 8 * BLOCK
    clock.now_ns += MINUTE_NS - 10**6
    assert await room.take(blocks(1), lambda: None) == 1
    assert books_of(ledger).total == room.unwritten == 8 * BLOCK
    clock.now_ns += 10**6
    assert await room.take(blocks(1), lambda: None) == 1
    assert books_of(ledger).total == 16 * BLOCK
    assert room.unwritten == 10 * BLOCK  # two that are being written, and what was taken now


async def test_room_that_a_sweep_no_longer_counts_is_not_given_back(root: str, clock: Clock) -> None:
    """A process that closes after an idle night leaves a ledger that says no less than there is."""
    ledger, others = ledger_in(root, clock), ledger_in(root, clock)
    room = room_in(root, clock, ledger)
    assert await room.take(blocks(1), lambda: None) == 1
    room.settle(BLOCK, is_written=True)
    clock.now_ns += 11 * MINUTE_NS
    others.end_sweep(others.begin_sweep(lambda: 0), BLOCK)
    assert books_of(others).total == BLOCK
    room.return_all()
    assert books_of(others).total == BLOCK
    assert [unwritten for unwritten, _ in books_of(others).writers.values()] == [0]


async def test_room_being_taken_is_seen_by_a_sweep(root: str, clock: Clock) -> None:
    """It may begin before the answer is here; of a call that failed nothing is kept."""
    ledger, workers, seen = ledger_in(root, clock), AtOnce(), list[int]()
    room = room_in(root, clock, ledger, workers)
    await room.take([], lambda: None)  # it knows how much is free
    workers.seen = lambda: seen.append(room.unwritten)
    assert await room.take(blocks(9), lambda: None) == 9
    assert seen == [9 * BLOCK]
    shutil.rmtree(root)
    with pytest.raises(BackendUnavailableError, match="is the filesystem mounted"):
        await room.take(blocks(1), lambda: None)
    assert room.unwritten == 9 * BLOCK


async def test_as_many_leading_blocks_as_there_is_room_for(root: str, clock: Clock) -> None:
    """What does not fit is refused, and what is left serves smaller ones."""
    ledger = ledger_in(root, clock, 3 * BLOCK)
    room = room_in(root, clock, ledger)
    assert await room.take(blocks(5), lambda: None) == 3
    assert await room.take(blocks(1), lambda: None) == 0
    room.settle(BLOCK, is_written=False)
    assert await room.take(blocks(2), lambda: None) == 1


@pytest.mark.parametrize(("num_free", "num_blocks"), [(4, 4), (3, 0)])
async def test_what_is_to_be_left_free_is(
    root: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, num_free: int, num_blocks: int
) -> None:
    """It is asked of the filesystem once a second, and counted down meanwhile; after a sweep at once."""
    asked = list[str]()

    def statvfs(path: str) -> os.statvfs_result:
        asked.append(path)
        return os.statvfs_result((BLOCK, BLOCK, 100, 0, num_free + 10, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    room = DirectoryRoom(root, ledger_in(root, clock), CAPACITY, 0.1, FileThreads(AtOnce()), clock.s)
    assert await room.take(blocks(4), lambda: None) == num_blocks
    assert await room.take(blocks(4), lambda: None) == 0
    assert asked == [root]
    clock.now_ns += 10**9
    assert await room.take(blocks(4), lambda: None) == num_blocks
    room.forget_free()
    assert await room.take(blocks(4), lambda: None) == num_blocks
    assert asked == [root] * 3


async def test_a_filesystem_that_does_not_say_is_written_to(
    root: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network filesystems know of no size: there the tier's own capacity is the limit."""
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((BLOCK, BLOCK, 0, 0, 0, 0, 0, 0, 0, 255)))
    room = DirectoryRoom(root, ledger_in(root, clock), CAPACITY, 0.5, FileThreads(AtOnce()), clock.s)
    assert await room.take(blocks(2), lambda: None) == 2


def sweeper_in(root: str, clock: Clock, ledger: ByteLedger, min_free_fraction: float = 0.0) -> Sweeper:
    """Return one of the directory."""
    return Sweeper(root, ledger, lambda: 0, CAPACITY, BLOCK, min_free_fraction, clock.ns)


def test_a_sweep_is_due_when_there_is_something_to_do(root: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little room, a ledger that says nothing, too little free space, or an hour since anybody looked."""
    ledger = ledger_in(root, clock)
    sweeper = sweeper_in(root, clock, ledger)
    assert not sweeper.is_due()
    clock.now_ns += 60 * MINUTE_NS
    assert not sweeper.is_due()
    clock.now_ns += 1
    assert sweeper.is_due()
    assert sweeper.sweep() == Swept(0, 0, 0, 0)
    assert not sweeper.is_due()
    ledger.take(CAPACITY * 15 // 16, 0)
    assert not sweeper.is_due()
    ledger.take(1, 0)
    assert sweeper.is_due()
    ledger.give_back(2, 0)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((BLOCK, BLOCK, 100, 0, 10, 0, 0, 0, 0, 255)))
    assert not sweeper_in(root, clock, ledger, 0.1).is_due()
    assert sweeper_in(root, clock, ledger, 0.11).is_due()
    Path(root, "ledger").unlink()
    assert sweeper.is_due()


def test_a_sweep_that_is_stopped_sets_nothing_right(root: str, clock: Clock) -> None:
    """It has not counted all: what it did is said, and the ledger goes on with what it had."""
    ledger = ledger_in(root, clock)
    ledger.take(5000, 0)
    sweeper = sweeper_in(root, clock, ledger)
    sweeper.stop()
    assert sweeper.sweep() == Swept(0, 0, 0, 0)
    assert (books_of(ledger).total, books_of(ledger).num_sweeps) == (5000, 0)


@contextlib.contextmanager
def stopped(root: str, clock: Clock) -> Iterator[int]:
    """Have a process be stopped while it has the ledger locked, which was written just now; yield its descriptor."""
    with Path(root, "ledger").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(file.fileno(), ns=(0, clock.now_ns))
        yield file.fileno()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nobody wait long for a lock."""
    monkeypatch.setattr(bytes_ledger, "_LOCK_S", 0.0)


@pytest.mark.usefixtures("hurried")
def test_a_process_that_was_stopped_with_the_ledger_keeps_it_for_a_minute(root: str, clock: Clock) -> None:
    """From then on the others go on with what it had written, and any of them may be stopped the same way."""
    ledger, other = ledger_in(root, clock), ledger_in(root, clock)
    assert ledger.take(100, 0) == 100
    for num_taken in (100, 101):
        with stopped(root, clock):
            clock.now_ns += MINUTE_NS - 1
            with pytest.raises(BlockingIOError, match="others keep it locked"):
                other.take(1, 0)
            clock.now_ns += 1
            assert books_of(ledger).total == num_taken
            assert other.take(1, 0) == 1
            assert books_of(ledger).total == num_taken + 1


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("when", ["before it wrote", "behind that"])
def test_what_a_process_takes_that_goes_on_too_late_is_not_taken(
    root: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Whenever it was stopped: never do two have the same bytes."""
    late, other = ledger_in(root, clock), ledger_in(root, clock)
    pwrite, is_first, has_written = os.pwrite, True, when == "behind that"

    def be_stopped(file: int, data: bytes, offset: int) -> int:
        nonlocal is_first
        was_first, is_first = is_first, False
        if was_first and has_written:
            pwrite(file, data, offset)
        if was_first:
            os.utime(file, ns=(0, clock.now_ns))
            clock.now_ns += MINUTE_NS
            assert other.take(CAPACITY, 0) == CAPACITY - (300 if has_written else 0)
        return pwrite(file, data, offset)

    monkeypatch.setattr(os, "pwrite", be_stopped)
    with pytest.raises(BlockingIOError):
        late.take(300, 0)
    assert books_of(other).total == CAPACITY
    assert late.take(300, 0) == 0


class InTurn(AtOnce):
    """Workers that run calls at the next turn of the loop."""

    def run(self, function: Callable[..., Any], *args: object) -> "asyncio.Future[Any]":
        """Run a call."""

        async def later() -> object:
            await checkpoint()
            return await AtOnce.run(self, function, *args)

        return asyncio.ensure_future(later())


@pytest.mark.usefixtures("hurried")
async def test_who_waits_behind_others_for_the_ledger_does_not_wait_as_long_again(root: str, clock: Clock) -> None:
    """Else the last of many stores would be late, and the tier bypassed for it. What was taken ahead is used."""
    ledger, workers, asked = ledger_in(root, clock), InTurn(), list[int]()
    room = room_in(root, clock, ledger, workers)
    assert await room.take(blocks(7), lambda: None) == 7
    workers.seen = lambda: asked.append(1)

    async def take_three_times() -> list[int]:
        return await asyncio.gather(*(room.take(blocks(2), lambda: None) for _ in range(3)))

    with stopped(root, clock):
        assert await take_three_times() == [1, 0, 0]
        assert len(asked) == 1
        assert await take_three_times() == [0, 0, 0]
        assert len(asked) == 2
        assert room.unwritten == 8 * BLOCK
    assert await take_three_times() == [2, 2, 2]


def make_records(root: str, salt: int, num_records: int) -> None:
    """Have a directory hold so many, each used later than the one before."""
    for n in range(num_records):
        key = BlockKey(Namespace(bytes(32), bytes(32), bytes([salt] * 32)), bytes([n] * 32))
        file = Path(root, key.namespace.path, key.hash.hex()[:3], key.hash.hex())
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes(BLOCK))
        os.utime(file, ns=(0, n))


def test_a_process_that_was_stopped_in_a_sweep_keeps_nobody_from_the_next_ones(root: str, clock: Clock) -> None:
    """Nor does it set anything right once it goes on: what others took after their sweep stays taken."""
    make_records(root, 1, 4)
    stopped, ledger = ledger_in(root, clock), ledger_in(root, clock)
    with Path(root, "sweeper.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(lock.fileno(), ns=(0, clock.now_ns))
        ledger.take(900 * BLOCK, 0)
        begun = stopped.begin_sweep(lambda: 0)
        clock.now_ns += 10 * MINUTE_NS - 1
        assert sweeper_in(root, clock, ledger).sweep() is None  # it may be at it still
        clock.now_ns += 1
        for num_sweeps in (1, 2):
            assert sweeper_in(root, clock, ledger).sweep() == Swept(4 * BLOCK, 0, 0, 0)
            assert (books_of(ledger).total, books_of(ledger).num_sweeps) == (4 * BLOCK, num_sweeps)
    ledger.take(7, 0)
    stopped.end_sweep(begun, 4 * BLOCK)
    assert (books_of(ledger).total, books_of(ledger).num_sweeps) == (4 * BLOCK + 7, 2)


def test_a_sweep_that_goes_on_for_long_is_left_to_it(root: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many folders there are: each of them that it looks into shows that it has not been stopped."""
    make_records(root, 1, 20)
    sweeper, other = (sweeper_in(root, clock, ledger_in(root, clock)) for _ in range(2))
    looked_into: list[Swept | None] = []
    stat = os.stat

    def look_slowly(path: str | int, **options: Any) -> os.stat_result:  # noqa: ANN401 - whatever it takes
        if isinstance(path, str) and len(path) == 64:
            clock.now_ns += MINUTE_NS + 1
            looked_into.append(other.sweep())
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", look_slowly)
    assert sweeper.sweep() == Swept(20 * BLOCK, 0, 0, 0)
    assert looked_into == [None] * 20


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_sweep_makes_room_where_there_is_none_for_the_ledger(
    root: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Some filesystems write nothing in place: one that is full takes no ledger until something was deleted."""
    make_records(root, 1, 20)
    ledger, pwrite = ledger_in(root, clock), os.pwrite
    ledger.take(20 * BLOCK, 0)

    def write_unless_full(file: int, data: bytes, offset: int) -> int:
        if len(list(Path(root).rglob("???/" + "?" * 64))) == 20:
            raise OSError(number, os.strerror(number))
        return pwrite(file, data, offset)

    monkeypatch.setattr(os, "pwrite", write_unless_full)
    assert sweeper_in(root, clock, ledger).sweep(is_full=True) == Swept(20 * BLOCK, 1, BLOCK, 0)
    assert books_of(ledger).total == 19 * BLOCK


def test_a_sweep_knows_what_it_leaves_of_each_tenant(root: str, clock: Clock) -> None:
    """By that the process which swept tells whether what it writes next is over a quota."""
    for salt, num_there in ((1, 10), (2, 3)):
        make_records(root, salt, num_there)
    ledger = ledger_in(root, clock)
    sweeper = Sweeper(root, ledger, lambda: 0, CAPACITY, BLOCK, 0.0, clock.ns, 5 * BLOCK)
    assert sweeper.sweep() == Swept(13 * BLOCK, 6, 6 * BLOCK, 0, 6)
    assert sorted(sweeper.salt_bytes.values()) == [3 * BLOCK, 4 * BLOCK]
    assert books_of(ledger).total == 7 * BLOCK
