"""Several directories as one tier: one that fails, or is away, takes only its blocks, and brings none back."""

import asyncio
import contextlib
import errno
import itertools
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from tests.support.any_layout import AnyEngine, cpu, nvme, open_any, prompt
from tests.support.caches import Recorder, until
from tests.support.descriptors import descriptors_left
from tests.support.nvme_tier import MIB, Tier, backend_at, count_up, key_of, read_member, shape_of, slab_of, slots_of
from tiered_kv.media.backend import Outcome
from tiered_kv.media.record import MAGIC
from tiered_kv.system import Files
from tiered_kv.testing import SlotBackendTests, block_names, open_backend, open_context
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError
from tiered_kv.values.events import TierFailed
from tiered_kv_backends.nvme import NVMeBackend, disks
from tiered_kv_backends.nvme import slab as slabs
from tiered_kv_backends.nvme.directory_store import DirectoryStore
from tiered_kv_backends.nvme.disks import Member, make_empty, next_turn, place_of, were_away, write_member

HIT, MISS, FAILED, STORED = Outcome.HIT, Outcome.MISS, Outcome.FAILED, Outcome.STORED
N = 12


class TestSeveralDirectories(SlotBackendTests):
    @pytest.fixture
    async def backend(self, paths: list[Path]) -> AsyncIterator[NVMeBackend]:
        """One over three folders."""
        backend = NVMeBackend({"path": paths, "capacity": 32 * MIB})
        async with open_backend(backend) as backend:
            yield backend


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Three places for directories."""
    return [tmp_path / name for name in "abc"]


@asynccontextmanager
async def opened(paths: Sequence[Path], now: list[float] | None = None) -> AsyncIterator[Tier]:
    """Yield a tier over these directories, whose clock is at ``now[0]``."""
    backend = backend_at(tuple(paths))
    with open_context(shape_of("a")) as context:
        (found,) = await backend.open(replace(context, clock=lambda: now[0] if now else 0.0))
        try:
            yield Tier(backend, found, "a")
        finally:
            await backend.aclose()


def take_away(path: Path) -> None:
    """Have a directory be none, as a disk that is not mounted where nothing can be made."""
    path.rename(path.with_name("elsewhere"))
    path.touch()


def bring_back(path: Path) -> None:
    """Undo `take_away`."""
    path.unlink()
    path.with_name("elsewhere").rename(path)


def break_disk(path: Path) -> None:
    """Have every call on what is open below a directory fail, and the directory be gone."""
    fail_calls(path)
    shutil.rmtree(path)


def fail_calls(path: Path) -> None:
    """Have every call on a file that is open, or on those below a directory, fail."""
    folder = os.open(path.parent, os.O_RDONLY)
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # one that is closed by now
            target = each.readlink()
            if path in target.parents or (target == path and path.is_file()):
                os.dup2(folder, int(each.name))
    os.close(folder)


async def until_back(backend: NVMeBackend) -> None:
    """Wait until nothing is missing."""
    await until(lambda: backend.missing(0) is None)


def missing_slots(tier: Tier) -> list[int]:
    """Return the slots that cannot be used."""
    missing = tier.backend.missing(0)
    return [] if missing is None else np.flatnonzero(missing.slots[:N]).tolist()


async def test_neighbours_lie_on_different_disks(paths: list[Path]) -> None:
    """Each has its own capacity, and the records are where `locate` says."""
    async with opened(paths[:1]) as one:
        num_slots = one.found.num_slots
    async with opened(paths) as tier:
        assert tier.found.num_slots == tier.found.max_slots == 3 * num_slots
        assert await tier.write(count_up(N)) == [STORED] * N
        spec = await tier.backend.locate(0, slots_of(count_up(N)))
        assert [Path(spec.names[i]).parents[1] for i in spec.ids] == [paths[n % 3] for n in range(N)]
        slabs = [slab_of(path).read_bytes() for path in paths]
        assert all(slabs[i][at:].startswith(MAGIC) for i, at in zip(spec.ids, spec.offsets, strict=True))
        facts: dict[str, Any] = tier.backend.describe()
        assert facts["num_slots"] == 3 * num_slots
        assert facts["capacity_bytes"] == 12 * MIB
        assert list(facts["directories"]) == [str(path) for path in paths]
    async with opened(paths) as tier:
        assert tier.recovered(N) == count_up(N)
        assert tier.found.slots.tolist() == list(range(N))
        assert await tier.verified(count_up(N)) == [HIT] * N


async def test_one_that_is_away_takes_only_its_blocks(paths: list[Path]) -> None:
    """The others are served, and written; its slots are named as missing, and are no blocks."""
    async with opened(paths) as tier:
        await tier.write(count_up(N))
    take_away(paths[1])
    async with opened(paths) as tier:
        there = {n: n for n in range(N) if n % 3 != 1}
        assert tier.recovered(N) == there
        assert missing_slots(tier) == [1, 4, 7, 10]
        missing = tier.backend.missing(0)
        assert missing is not None
        assert str(paths[1]) in missing.why
        assert await tier.verified(there) == [HIT] * 8
        assert await tier.verified({1: 1, 2: 2}) == [FAILED, HIT]
        assert await tier.write({2: 22, 4: 24}) == [STORED, FAILED]
        await tier.backend.forget(0, slots_of({0: 0, 1: 1}))
        facts: dict[str, Any] = tier.backend.describe()
        assert "away" in facts["directories"][str(paths[1])]
        assert facts["last_error"] == f"{paths[1]} is away: {facts['directories'][str(paths[1])]['away']}"
    bring_back(paths[1])
    async with opened(paths) as tier:
        assert tier.recovered(N + 24) == {slot: n for slot, n in (there | {2: 22}).items() if slot}
        assert missing_slots(tier) == []


async def test_what_was_evicted_while_a_disk_was_away_does_not_come_back(paths: list[Path]) -> None:
    """One that missed a run begins empty, of every model; one that missed none has all it had."""
    async with opened(paths[:2]) as tier:
        await tier.write(count_up(N))
    async with opened(paths[:2]) as tier:
        assert tier.recovered(N) == count_up(N)
    async with opened(paths[:1]) as tier:
        assert len(tier.found.slots) == N // 2
    async with opened(paths[:2]) as tier:
        assert tier.recovered(N) == {n: n for n in range(0, N, 2)}
    async with opened(paths) as tier:
        assert set(tier.recovered(N).values()) == set(range(0, N, 2))


async def leave_one_out(paths: Sequence[Path]) -> None:
    """Have blocks in two directories, and a run of the first alone."""
    async with opened(paths[:2]) as tier:
        await tier.write(count_up(N))
    async with opened(paths[:1]):
        pass


async def test_a_disk_is_emptied_of_what_has_no_ledger(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A start would find the blocks by their headers; what was killed while it emptied is gone on with."""
    await leave_one_out(paths)
    slab_of(paths[1]).with_name("ledger").unlink()

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(Files, "remove_tree", fail)
        async with opened(paths[:2]) as tier:
            assert missing_slots(tier) == list(range(1, N, 2))
    assert not slab_of(paths[1]).exists()
    async with opened(paths[:2]) as tier:
        assert tier.recovered(N) == {n: n for n in range(0, N, 2)}
        assert missing_slots(tier) == []


async def test_what_is_emptied_is_told(paths: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    """A disk that missed a run loses its blocks: the log says of which disk and which models; of a new one nothing."""
    await leave_one_out(paths)
    async with opened(paths):
        pass
    (told,) = [each for each in caplog.messages if each.startswith("nvme.directory_emptied")]
    assert str(paths[1]) in told
    assert shape_of("a").fingerprint.hex() in told


async def test_what_is_emptied_is_so_for_good_before_it_is_named(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power must not leave the blocks beside a note that the directory was in use."""
    await leave_one_out(paths)
    forced = list[Path]()
    with monkeypatch.context() as patch:
        before_calls(patch, paths[1], lambda fd: forced.append(Path(f"/proc/self/fd/{fd}").readlink()), ("fsync",))
        async with opened(paths[:2]):
            pass
    assert forced.index(slab_of(paths[1]).parent) < forced.index(paths[1] / "member")


async def test_none_is_taken_for_empty_that_could_not_be_looked_into(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have all descriptors for a moment, just then: what was evicted meanwhile would come back."""
    await leave_one_out(paths)
    do_open, failed = Files.open, list[str]()

    def fail_once(files: Files, path: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        is_folder = path == slab_of(paths[1]).parent.name
        if is_folder and not failed and Path(f"/proc/self/fd/{dir_fd}").readlink() == paths[1]:
            failed.append(str(path))
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return do_open(files, path, flags, mode, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(Files, "open", fail_once)
        with pytest.raises(BackendUnavailableError, match=f"{paths[1]} could not be emptied: Too many open files"):
            async with opened(paths[:2]):
                pass
    async with opened(paths[:2]) as tier:
        assert tier.recovered(N) == {n: n for n in range(0, N, 2)}


async def test_none_is_none(paths: list[Path]) -> None:
    """Where no directory can be used, or one for what is not its disk's fault, the tier does not open."""
    async with opened(paths[:1]):
        with pytest.raises(ConfigurationError, match="process"):
            async with opened(paths[:2]):
                pass
    async with opened(paths[1:2]):
        pass
    paths[0].chmod(0o777)
    with pytest.raises(ConfigurationError, match="others may write"):
        async with opened(paths[:2]):
            pass
    paths[0].chmod(0o700)
    for path in paths[:2]:
        shutil.rmtree(path)
        path.touch()
    with pytest.raises(ConfigurationError, match=str(paths[0])):
        async with opened(paths[:2]):
            pass


def underway(backend: NVMeBackend) -> bool:
    """Say whether a call of any disk is; one that has just ended may not have been taken off the list."""
    return any(not call.done() for disk in backend._disks for call in disk.underway)  # noqa: SLF001 - the test's own


@pytest.mark.parametrize("finds_out", ["read", "write", "forget", "checkpoint", "grow", "shrink"])
async def test_one_that_fails_is_let_go_of(paths: list[Path], finds_out: str) -> None:
    """Whichever call fails, at once: the others go on. It comes back empty, by itself, and is used again."""
    now = [0.0]
    async with opened(paths, now) as tier:
        await tier.write(count_up(N))
        break_disk(paths[0])
        if finds_out == "read":
            assert await tier.verified(count_up(N)) == [FAILED, HIT, HIT] * 4
        elif finds_out == "write":
            assert await tier.write(count_up(3)) == [FAILED, STORED, STORED]
        elif finds_out == "forget":
            await tier.backend.forget(0, slots_of({0: 0}))
        elif finds_out in {"grow", "shrink"}:
            await tier.backend.resize(tier.found.num_slots + (3 if finds_out == "grow" else -3))
        else:
            await tier.backend.checkpoint(0, tier.found.names, tier.found.slots, sync=True)
        assert missing_slots(tier) == [0, 3, 6, 9]
        if finds_out != "checkpoint":
            assert await tier.verified({1: 1, 2: 2}) == [HIT, HIT]
        await until(lambda: not underway(tier.backend))  # what the call has left to do elsewhere
        tier.backend.try_again()
        assert not underway(tier.backend)  # not so soon
        assert missing_slots(tier) == [0, 3, 6, 9]
        now[0] += 6
        tier.backend.try_again()
        await until_back(tier.backend)
        assert await tier.verified({0: 0, 3: 3}) == [MISS, MISS]
        assert await tier.write({0: 30, 1: 31}) == [STORED, STORED]
    async with opened(paths) as tier:
        assert {0: 30, 1: 31}.items() <= tier.recovered(N + 31).items()
        assert not {3, 6, 9}.intersection(tier.recovered(N + 31))


async def test_a_bad_place_is_no_bad_disk(paths: list[Path]) -> None:
    """Where a page can be written and read, only the blocks that failed are lost."""
    async with opened(paths[:2]) as tier:
        await tier.write(count_up(4))
        fail_calls(slab_of(paths[0]))
        assert await tier.verified(count_up(4)) == [FAILED, HIT] * 2
        assert missing_slots(tier) == []


async def test_that_no_descriptor_is_left_is_no_disk_s_fault(paths: list[Path]) -> None:
    """While others have them all, a start is refused, or is one of all directories; and what fails fails alone."""
    async with opened(paths[:2]) as tier:
        await tier.write(count_up(4))
    for num_left in itertools.count():
        with contextlib.suppress(ConfigurationError), descriptors_left(num_left):
            async with opened(paths[:2]) as tier:
                assert missing_slots(tier) == []
                break
    async with opened(paths[:2]) as tier:
        assert tier.recovered(4) == count_up(4)
        fail_calls(slab_of(paths[0]))
        with descriptors_left(0):
            assert await tier.verified(count_up(4)) == [FAILED, HIT] * 2
        assert missing_slots(tier) == []


_CALLS = ("pread", "preadv", "pwrite", "pwritev", "fsync", "ftruncate", "listdir")


def before_calls(
    monkeypatch: pytest.MonkeyPatch, path: Path, act: Callable[[int], object], calls: Sequence[str] = _CALLS
) -> None:
    """Have every call on an open file or folder at or below a path preceded by ``act(descriptor)``."""

    def acting(call: Callable[..., Any]) -> Callable[..., Any]:
        def then_call(fd: int, *args: Any) -> Any:  # noqa: ANN401 - whatever the call takes and gives
            target = Path(f"/proc/self/fd/{fd}").readlink()
            if path in (target, *target.parents):
                act(fd)
            return call(fd, *args)

        return then_call

    for name in calls:
        monkeypatch.setattr(os, name, acting(getattr(os, name)))
    for name in ("_READ", "_WRITE"):
        way = getattr(slabs, name)
        monkeypatch.setattr(slabs, name, way._replace(call=acting(way.call)))


async def test_a_full_disk_that_fails_is_let_go_of(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """That there is no room for anything new hides no failure of what is there."""

    def fail(fd: int) -> None:
        raise OSError(errno.EIO if os.fstat(fd).st_blocks else errno.ENOSPC, "it was to fail")

    async with opened(paths[:2]) as tier:
        await tier.write(count_up(4))
        before_calls(monkeypatch, paths[0], fail)
        assert await tier.verified(count_up(4)) == [FAILED, HIT] * 2
        assert missing_slots(tier) == list(range(0, N, 2))


@contextlib.contextmanager
def hanging(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Have every call on files below a directory hang until the event is set, as on a disk that does not answer."""
    may_go_on = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(disks, "_ANSWER_S", 0.2)
        before_calls(patch, path, lambda _: may_go_on.wait())
        try:
            yield may_go_on
        finally:
            may_go_on.set()


@pytest.mark.parametrize("doing", ["read", "write", "forget", "checkpoint"])
async def test_one_that_hangs_is_let_go_of(paths: list[Path], monkeypatch: pytest.MonkeyPatch, doing: str) -> None:
    """Found by a page it does not write. What has buffers lent ends with the disk's call, all else at once."""
    now = [0.0]
    async with opened(paths, now) as tier:
        await tier.write(count_up(N))
        with hanging(paths[0], monkeypatch) as may_go_on:
            everywhere: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
                "read": lambda: tier.verified(count_up(N)),
                "write": lambda: tier.write(count_up(N)),
                "forget": lambda: tier.backend.forget(0, slots_of(count_up(N))),
                "checkpoint": lambda: tier.backend.checkpoint(0, tier.found.names, tier.found.slots, sync=True),
            }
            stuck = asyncio.ensure_future(everywhere[doing]())
            others = {n: n for n in range(20, 40) if n % 3}
            assert set(await tier.write(others)) == {STORED}
            await until(lambda: not any(disk.underway for disk in tier.backend._disks if disk.number))  # noqa: SLF001 - else these would have to write a page in a fifth of a second
            now[0] += 11
            tier.backend.find_hung()
            await until(lambda: missing_slots(tier) == [0, 3, 6, 9])
            assert set(await tier.verified(others)) == {HIT}
            assert await tier.verified({0: 0, 20: 20}) == [FAILED, HIT]
            if doing in {"forget", "checkpoint"}:
                await stuck
            tier.backend.try_again()
            assert stuck.done() == (doing in {"forget", "checkpoint"})
            assert missing_slots(tier) == [0, 3, 6, 9]
            may_go_on.set()
            answer = await stuck
            if doing == "read":
                assert answer == [HIT] * N

        def is_back() -> bool:
            now[0] += 6
            tier.backend.try_again()
            return tier.backend.missing(0) is None

        await until(is_back)  # not before its calls have ended
        assert await tier.verified({0: 0, 20: 20}) == [MISS, HIT]


async def test_that_all_hang_is_no_disk_s_fault(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that stood still, and disks that are slow, cost no block."""
    now = [0.0]
    async with opened(paths[:2], now) as tier:
        await tier.write(count_up(N))
        with hanging(paths[0].parent, monkeypatch) as may_go_on:
            stuck = asyncio.ensure_future(tier.verified(count_up(N)))
            await checkpoint()
            now[0] += 11
            tier.backend.find_hung()
            await asyncio.wait([task for task in asyncio.all_tasks() if task.get_name() == "find what hangs"])
            assert missing_slots(tier) == []
            may_go_on.set()
            assert await stuck == [HIT] * N


async def test_one_that_hangs_at_the_start_is_away(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are opened without it."""
    async with opened(paths[:2]) as tier:
        await tier.write(count_up(N))
    backend = backend_at(tuple(paths[:2]), timeout_s=2.0)  # the other one has to answer in it
    with open_context(shape_of("a")) as context, hanging(paths[0], monkeypatch):
        (found,) = await backend.open(context)
        assert Tier(backend, found, "a").recovered(N) == {n: n for n in range(1, N, 2)}
        assert "hangs" in str(backend.describe())
        await backend.aclose()


@pytest.mark.parametrize("doing", ["load", "store"])
async def test_a_cache_goes_on_while_a_disk_hangs(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, doing: str
) -> None:
    """One call is late; then the blocks of that disk are misses, and all else is loaded and stored."""
    engine, recorder = AnyEngine(), Recorder()
    settings = {**nvme(paths[0]), "path": paths[:2], "timeout_s": 0.5}
    first, second, third = prompt(N), prompt(N, 1), prompt(N, 2)
    async with open_any(engine, settings, emit=recorder) as kv:
        await kv.store(first, engine.fill(first, range(N)))
        await kv.flush()
        with hanging(paths[0], monkeypatch):
            if doing == "load":
                engine.wipe()
                await kv.load(first, engine.spec(range(N)))
            else:
                await kv.store(second, engine.fill(second, range(N)))
            await until(lambda: bool([each for each in recorder.of(TierFailed) if "hangs" in each.error]))
            num_loaded = 0
            while num_loaded < N:  # at first the tier is paused, as after any late call
                await kv.store(third, engine.fill(third, range(N)))
                await kv.flush()
                engine.wipe()
                num_loaded = (await kv.load(third, engine.spec(range(N)))).num_blocks
                assert engine.count_right(third, range(N)) == num_loaded


async def test_a_block_that_is_on_two_disks_is_evicted_from_both(paths: list[Path]) -> None:
    """A restart finds it once, and never again after it was forgotten."""
    async with opened(paths[:2]) as tier:
        await tier.write({0: 5, 2: 6})
        await tier.write({1: 5})
    async with opened(paths[:2]) as tier:
        (slot,) = [slot for slot, n in tier.recovered(N).items() if n == 5]
        await tier.backend.forget(0, slots_of({slot: 5}))
    async with opened(paths[:2]) as tier:
        assert tier.recovered(N) == {2: 6}


async def test_one_that_comes_back_as_all_are_resized(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has as many slots as the others, though it was made ready with another number."""
    now = [0.0]
    is_ready, may_go_on, resize = asyncio.Event(), asyncio.Event(), DirectoryStore.resize

    async def resize_and_wait(store: DirectoryStore, num_slots: int) -> None:
        await resize(store, num_slots)
        if store.path == paths[1]:
            is_ready.set()
            await may_go_on.wait()

    backend = backend_at(tuple(paths), max_capacity=8 * MIB)
    paths[1].touch()
    with open_context(shape_of("a")) as context:
        (found,) = await backend.open(replace(context, clock=lambda: now[0]))
        tier = Tier(backend, found, "a")
        paths[1].unlink()
        monkeypatch.setattr(DirectoryStore, "resize", resize_and_wait)
        backend.try_again()
        await is_ready.wait()
        await backend.resize(backend.fit(8 * MIB))
        may_go_on.set()

        def is_back() -> bool:
            now[0] += 6
            backend.try_again()
            return backend.missing(0) is None

        await until(is_back)
        last = 3 * (backend.fit(8 * MIB) // 3) - 3
        there = {n: n for n in range(last, last + 3)}
        assert await tier.write(there) == [STORED] * 3
        assert await tier.verified(there) == [HIT] * 3
        await backend.aclose()


async def test_all_are_resized(paths: list[Path]) -> None:
    """One that comes back later as well; one that cannot grow has the others stay as they were."""
    now = [0.0]
    backend = NVMeBackend({"path": paths[:2], "capacity": 2 * MIB, "max_capacity": 4 * MIB})
    with open_context(shape_of("a")) as context:
        (found,) = await backend.open(replace(context, clock=lambda: now[0]))
        assert backend.fit(4 * MIB) == found.max_slots
        assert backend.fit(4 * MIB) > found.num_slots
        break_disk(paths[0])
        tier = Tier(backend, found, "a")
        await tier.write({0: 0, 1: 1})
        await backend.resize(backend.fit(4 * MIB))
        now[0] += 6
        backend.try_again()
        await until_back(backend)
        last = backend.fit(4 * MIB) - 1
        assert await tier.write({last: 7, last - 1: 8}) == [STORED] * 2
        await backend.aclose()


async def test_a_cache_goes_on_with_the_disks_that_work(paths: list[Path]) -> None:
    """Blocks of a disk that failed are misses, and told of; new ones all find a place, and a restart has them."""
    engine, recorder = AnyEngine(), Recorder()
    settings = {**nvme(paths[0]), "path": paths[:2]}
    first, second = prompt(N), prompt(N, 1)
    async with open_any(engine, settings) as kv:
        await kv.store(first, engine.fill(first, range(N)))
    async with open_any(engine, settings, emit=recorder) as kv:
        assert (await kv.lookup(first)).num_blocks == N
        break_disk(paths[1])
        engine.wipe()
        loaded = await kv.load(first, engine.spec(range(N)))
        assert loaded.num_blocks == engine.count_right(first, range(N)) == 1
        assert (await kv.lookup(first)).num_blocks == 1
        assert kv.stats()["nvme"].ready == N // 2
        await kv.store(second, engine.fill(second, range(N)))
        await kv.flush(sync=True)
        (lost,) = [event for event in recorder.of(TierFailed) if event.doing == "keep"]
        assert lost.blocks == N // 2
        assert all(f"{paths[1]} is away: " in event.error for event in recorder.of(TierFailed))
    async with open_any(engine, settings) as kv:
        engine.wipe()
        loaded = await kv.load(second, engine.spec(range(N)))
        assert loaded.num_blocks == engine.count_right(second, range(N)) == N


@pytest.mark.parametrize("is_new", [True, False])
async def test_a_drain_says_that_a_disk_has_failed_with_what_was_stored(paths: list[Path], *, is_new: bool) -> None:
    """However long ago it was written there. What the disk had at the opening is a loss, and no store's."""
    engine, keys = AnyEngine(), prompt(N)
    settings = {**nvme(paths[0]), "path": paths[:2]}
    async with contextlib.AsyncExitStack() as opened_caches:
        kv = await opened_caches.enter_async_context(open_any(engine, settings))
        await kv.store(keys, engine.fill(keys, range(N)))
        assert await kv.flush(sync=True)
        if not is_new:
            await opened_caches.aclose()
            kv = await opened_caches.enter_async_context(open_any(engine, settings))
        break_disk(paths[1])
        assert not await kv.drain()  # which finds out
        assert kv.stats()["nvme"].ready == N // 2
        assert await kv.drain() is not is_new


async def test_a_tenant_is_deleted_from_all_or_it_is_said(paths: list[Path]) -> None:
    """One that is away would bring the tenant's blocks back: the others are done, and it is named."""
    engine = AnyEngine()
    settings = {**nvme(paths[0]), "path": paths[:2]}
    keys = prompt(N, salt="ann")
    async with open_any(engine, settings) as kv:
        await kv.store(keys, engine.fill(keys, range(N)))
    paths[1].rename(paths[2])
    with pytest.raises(BackendUnavailableError, match=str(paths[1])):
        await NVMeBackend.delete_tenant(settings, "ann")
    paths[2].rename(paths[1])
    assert await NVMeBackend.delete_tenant(settings, "ann") == N // 2
    assert await NVMeBackend.delete_tenant(settings, "ann") == 0


def test_a_path_is_given_once(paths: list[Path]) -> None:
    """And at least one is."""
    for wrong in ((), (paths[0], paths[0])):
        with pytest.raises(ConfigurationError, match="path"):
            backend_at(wrong)


@pytest.mark.parametrize("num_written", [0, 1, 2, 3])
def test_killed_while_it_is_noted_who_is_there(paths: list[Path], num_written: int) -> None:
    """Whichever of them have heard of the new turn, those that were in use stay; the one that was not begins empty."""
    old = [Member(name) for name in "abc"]
    before = next_turn(old)
    now = next_turn(before[:2])
    said = [now[n] if n < min(num_written, 2) else before[n] for n in range(3)]
    for path, member in zip(paths, said, strict=True):
        write_member(path, member)
    assert [read_member(path) for path in paths] == said
    assert were_away(said) == [False, False, num_written > 0]
    (paths[0] / "member").write_bytes(b"{")
    assert read_member(paths[0]).turn == 0


def take_no_note(patch: pytest.MonkeyPatch, full: Path) -> None:
    """Have a directory's disk be full: nothing can be said there of who is in use."""
    write = disks.write_member

    def write_elsewhere(path: Path, member: Member) -> None:
        if path == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, member)

    patch.setattr(disks, "write_member", write_elsewhere)


@pytest.mark.parametrize("was_alone", ["whole", "without its name"])
async def test_one_that_was_alone_stays_where_another_is_added(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, was_alone: str
) -> None:
    """Though its disk takes nothing new meanwhile: a directory that nobody could know by its name was not away."""
    async with opened(paths[:1]) as tier:
        await tier.write(count_up(N))
    if was_alone == "without its name":
        (paths[0] / "member").unlink()
    there = {2 * n: n for n in range(N)}
    with monkeypatch.context() as patch:
        take_no_note(patch, paths[0])
        async with opened(paths[:2]) as tier:
            assert tier.recovered(N) == there
    for _ in range(2):
        async with opened(paths[:2]) as tier:
            assert tier.recovered(N) == there


@pytest.mark.parametrize("first", [0, 1])
async def test_of_directories_that_were_used_apart_one_goes_on(paths: list[Path], first: int) -> None:
    """What was evicted in it does not come back from the other, which begins empty, and no block is in both."""
    for path in paths[:2]:
        async with opened([path]) as tier:
            await tier.write(count_up(3))
    async with opened([paths[first]]) as tier:
        await tier.backend.forget(0, slots_of({0: 0}))
    together = [paths[first], paths[1 - first]]
    for _ in range(2):
        async with opened(together) as tier:
            assert tier.recovered(3) == {2: 1, 4: 2}


async def test_what_was_evicted_in_one_comes_back_from_none_that_was_used_apart(paths: list[Path]) -> None:
    """Those of one tier that were there in turn, the other away each time: all begin empty. Then all is as ever."""
    async with opened(paths[:2]) as tier:
        await tier.write(count_up(N))
    for there, num_starts in ((1, 2), (0, 1)):
        for _ in range(num_starts):
            take_away(paths[1 - there])
            async with opened(paths[:2]) as tier:
                assert set(tier.recovered(N).values()) == set(range(there, N, 2))
            bring_back(paths[1 - there])
    async with opened(paths[:2]) as tier:
        assert tier.recovered(N) == {}
        await tier.write(count_up(N))
    async with opened(paths[:2]) as tier:
        assert tier.recovered(N) == count_up(N)


@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("num_behind", [0, 1])
async def test_what_was_evicted_beside_one_that_nobody_knows_does_not_come_back(
    paths: list[Path], num_before: int, num_behind: int
) -> None:
    """It was away when another was first used with it: at its place it begins empty, though it is the first of two."""
    async with opened(paths[:1]) as tier:
        await tier.write(count_up(3))
    for _ in range(num_before):
        async with opened(paths[1:2]):
            pass
    take_away(paths[0])
    async with opened(paths[:2]) as tier:
        await tier.write({1: 0, 3: 3})
        await tier.backend.forget(0, slots_of({1: 0}))
    bring_back(paths[0])
    for _ in range(num_behind):
        async with opened(paths[1:2]):
            pass
    for _ in range(2):
        async with opened(paths[:2]) as tier:
            assert tier.recovered(4) == {3: 3}
            assert missing_slots(tier) == []


async def test_places_are_noted_within_a_note(paths: list[Path], tmp_path: Path) -> None:
    """However many directories were away beside one, it says who is in use, and of which the last were away."""
    for n in range(40):
        (tmp_path / f"absent{n}").touch()
        async with opened([tmp_path / f"absent{n}", paths[0]]):
            pass
    said = read_member(paths[0])
    assert said.ids == {said.id}
    assert said.away == tuple(place_of(tmp_path / f"absent{n}") for n in range(8, 40))
    assert (paths[0] / "member").stat().st_size == 8192


async def use_apart(paths: Sequence[Path], num_tiers: int = 1) -> None:
    """Have two directories that are full of blocks, and each of which was used while the other was away."""
    for together in [paths] if num_tiers == 1 else [[path] for path in paths]:
        async with opened(together) as tier:
            await tier.write(count_up(N))
    for there in (1, 0):
        take_away(paths[1 - there])
        async with opened(paths):
            pass
        bring_back(paths[1 - there])


@pytest.mark.parametrize("num_steps", range(7))
@pytest.mark.parametrize("num_tiers", [1, 2])
async def test_killed_while_those_that_were_used_apart_are_emptied(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, num_tiers: int, num_steps: int
) -> None:
    """Before whichever step: the one that was not yet emptied is no tier that goes on, whose blocks would be found."""
    steps = iter(range(num_steps))

    def until_killed(step: Callable[..., None]) -> Callable[..., None]:
        def step_until_killed(*args: object) -> None:
            if next(steps, None) is None:
                raise RuntimeError("killed")
            step(*args)

        return step_until_killed

    await use_apart(paths[:2], num_tiers)
    with monkeypatch.context() as patch, contextlib.suppress(RuntimeError):
        for step in (make_empty, write_member):
            patch.setattr(disks, step.__name__, until_killed(step))
        async with opened(paths[:2]):
            pass
    for _ in range(2):
        async with opened([paths[1], paths[0]]) as tier:
            assert tier.recovered(N) == {}


@pytest.mark.parametrize("num_tiers", [1, 2])
async def test_one_that_could_not_be_emptied_brings_nothing_back(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, num_tiers: int
) -> None:
    """Where all were to be, those that are empty go on as the tier that they were: it is no other one's, to be kept."""
    empty, failing = disks.make_empty, set(paths[:2])

    def empty_unless_failing(path: Path, said: Member | None) -> None:
        if path in failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        empty(path, said)

    await use_apart(paths[:2], num_tiers)
    with monkeypatch.context() as patch:
        patch.setattr(disks, "make_empty", empty_unless_failing)
        with pytest.raises(BackendUnavailableError, match="could not be emptied"):
            async with opened(paths[:2]):
                pass
        failing.remove(paths[0])
        async with opened(paths[:2]) as tier:
            assert missing_slots(tier) == list(range(1, N, 2))
            await tier.write({0: N})
    async with opened([paths[1], paths[0]]) as tier:
        assert tier.recovered(N + 1) == {1: N}


async def test_one_that_was_left_behind_costs_no_other_its_blocks(paths: list[Path], tmp_path: Path) -> None:
    """Directories that were replaced one after the other: the first that comes back begins empty, the last does not."""
    a, b, c = paths
    d = tmp_path / "d"
    for together in ([a, b], [a, c], [c, d]):
        async with opened(together) as tier:
            await tier.write(count_up(N))
    async with opened([b, d]) as tier:
        assert tier.recovered(N) == {n: n for n in range(1, N, 2)}


async def test_one_that_could_not_say_whom_it_was_used_with_knows_who_was_away(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named by another alone: whoever is used without that one says so, though to itself all is as it was before."""
    async with opened(paths[:1]):
        pass
    with monkeypatch.context() as patch:
        take_no_note(patch, paths[0])
        async with opened(paths[:2]) as tier:
            await tier.write(count_up(N))
    async with opened(paths[:1]):
        pass  # in which a block of the other may be evicted
    async with opened(paths[:2]) as tier:
        assert tier.recovered(N) == {n: n for n in range(0, N, 2)}


async def test_one_that_comes_back_from_elsewhere_is_known_by_its_new_name(paths: list[Path]) -> None:
    """However much later it was used there than the others here: at the next start it was not away."""
    async with opened(paths[:2]):
        pass
    take_away(paths[1])
    now = [0.0]
    async with opened(paths[:2], now) as tier:
        bring_back(paths[1])
        for _ in range(5):
            async with opened(paths[1:2]):
                pass
        now[0] += 6
        tier.backend.try_again()
        await until_back(tier.backend)
        await tier.write(count_up(N))
    async with opened(paths[:2]) as tier:
        assert tier.recovered(N) == count_up(N)


@pytest.mark.parametrize("num_more", [0, 3])
def test_of_two_that_named_a_third_one_apart_the_third_goes_on(num_more: int) -> None:
    """Killed before that one had it said to it: each of the others was away while it was used without the other."""
    a, b, c = next_turn([Member(name) for name in "abc"])
    for _ in range(1 + num_more):
        a, _ = next_turn([a, b])
    b, c = next_turn([b, c])
    assert were_away([a, b, c]) == [True, False, True]
    assert were_away([a, b]) == [True, False]


def test_turns_that_nobody_remembers_came_before() -> None:
    """After however many: one that was away begins empty, and those that were in use go on."""
    first = there = next_turn([Member(name) for name in "abc"])
    for _ in range(1000):
        there = next_turn(there[:2])
    assert were_away([*there, first[2]]) == [False, False, True]
    assert len(there[0].before) < 100


async def test_a_start_that_is_refused_empties_nothing(paths: list[Path]) -> None:
    """Where directories are another process's, one of one's own that would begin empty beside them keeps its blocks."""
    async with opened(paths[:1]) as tier:
        await tier.write(count_up(N))
    async with opened(paths[1:]):
        with pytest.raises(ConfigurationError, match="held by another"):
            async with opened(paths):
                pass
    async with opened(paths[:1]) as tier:
        assert tier.recovered(N) == count_up(N)


async def test_a_start_that_is_refused_for_one_place_leaves_nothing_in_the_others(paths: list[Path]) -> None:
    """Else these were a tier's from then on, and refused to a server, and to who chooses a directory in them."""
    async with opened(paths[:1]):
        pass
    with pytest.raises(ConfigurationError, match="which is an NVMe tier's too"):
        async with opened([paths[1], paths[0] / "more"]):
            pass
    assert not list(paths[1].iterdir())


async def test_one_that_another_tier_had_is_added_empty(paths: list[Path], tmp_path: Path) -> None:
    """However often directories came and went there: of two tiers' directories the larger number stays."""
    async with opened(paths[:2]) as tier:
        await tier.write(count_up(N))
    other = tmp_path / "other"
    for together in ([other], [other, paths[2]], [other]):
        async with opened(together) as tier:
            await tier.write({0: N})
    for _ in range(2):
        async with opened([other, *paths[:2]]) as tier:
            assert set(tier.recovered(N + 1).values()) == set(range(N))


async def test_a_copy_brings_nothing_back_while_the_other_is_away(paths: list[Path]) -> None:
    """A directory and its copy have one identity: of the two, the one that was in use is believed."""
    async with opened(paths[:1]) as tier:
        await tier.write(count_up(N))
    shutil.copytree(paths[0], paths[1])
    paths[1].chmod(0o700)
    take_away(paths[0])
    async with opened(paths[:2]) as tier:
        await tier.backend.forget(0, tier.found.slots)
        assert await tier.write({1: 100, 3: 101}) == [STORED] * 2
    bring_back(paths[0])
    for _ in range(2):
        async with opened(paths[:2]) as tier:
            assert tier.recovered(102) == {1: 100, 3: 101}


async def test_a_copy_is_a_directory_of_its_own(paths: list[Path]) -> None:
    """From when it is used with the other: each is known by its own name at the next start, and was not away."""
    async with opened(paths[:1]) as tier:
        await tier.write(count_up(N))
    shutil.copytree(paths[0], paths[1])
    paths[1].chmod(0o700)
    async with opened(paths[:2]) as tier:
        assert set(tier.recovered(N).values()) == set(range(N))
        await tier.write({0: 100, 1: 101})
    assert read_member(paths[0]).ids == {read_member(path).id for path in paths[:2]}
    async with opened(paths[:2]) as tier:
        assert {0: 100, 1: 101}.items() <= tier.recovered(102).items()


@pytest.mark.parametrize("num_said", [1, 2])
def test_a_copy_that_has_a_name_of_its_own_has_no_other(paths: list[Path], num_said: int) -> None:
    """Killed before anyone names it, it has the new identity, not that of which it is a copy."""
    for said in (*[Member("a")] * num_said, Member("b")):
        write_member(paths[0], said)
    assert read_member(paths[0]) == Member("b")


@pytest.mark.parametrize("how", ["is slow", "fails once"])
async def test_one_that_is_named_late_is_noted_then(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A disk that is added, and does not take its name at first, is no stranger at the next start."""
    write, may_go_on, is_first = disks.write_member, threading.Event(), True

    def write_late(path: Path, member: Member) -> None:
        nonlocal is_first
        if path == paths[2] and is_first:
            is_first = False
            if how == "fails once":
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            may_go_on.wait()
        write(path, member)

    async with opened(paths[:2]):
        pass
    now = [0.0]
    with monkeypatch.context() as patch:
        patch.setattr(disks, "write_member", write_late)
        patch.setattr(disks, "_ANSWER_S", 0.1)
        async with opened(paths, now) as tier:
            await tier.write(count_up(N))
            may_go_on.set()
            if how == "fails once":
                now[0] += 6
                tier.backend.try_again()
            await until(lambda: len(read_member(paths[0]).ids) == 3)
    async with opened(paths) as tier:
        assert tier.recovered(N) == count_up(N)


async def test_one_that_takes_no_name_keeps_nothing_from_being_noted(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk cannot say who it is: that another is away is noted all the same. That it cannot is told once."""
    take_no_note(monkeypatch, paths[2])
    now = [0.0]
    async with opened(paths, now) as tier:
        await tier.write(count_up(N))
        await tier.backend.checkpoint(0, tier.found.names, tier.found.slots)
        for _ in range(3):
            now[0] += 6
            tier.backend.try_again()
            await until(lambda: not underway(tier.backend))
        assert {read_member(path).turn for path in paths} == {0}  # else the next start would empty the third
        break_disk(paths[1])
        await tier.backend.forget(0, slots_of({0: 0, 1: 1}))
        await tier.backend.checkpoint(0, tier.found.names, tier.found.slots, sync=True)
        assert missing_slots(tier) == list(range(1, N, 3))
        assert read_member(paths[0]).ids == {read_member(paths[0]).id}
    assert len([each for each in caplog.messages if each.startswith("nvme.directory_failed")]) == 1


async def test_a_tier_remembers_though_a_disk_was_never_there(paths: list[Path]) -> None:
    """Who is in use is noted from the first start on: the one that is there can be told what to keep."""
    paths[1].touch()
    async with opened(paths[:2]) as tier:
        await tier.write({0: 0})
        await tier.backend.checkpoint(0, block_names([key_of(0)]), slots_of({0: 0}), sync=True)
    paths[1].unlink()
    async with opened(paths[:2]) as tier:
        assert tier.recovered(1) == {0: 0}


def test_what_is_noted_once_is_noted_on_a_full_disk_too(small_disk: Path) -> None:
    """It has its place: others' files on the disk must not bring back what was evicted."""
    before = Member("a", 1, frozenset("abc"))
    write_member(small_disk / "kv", before)
    with pytest.raises(OSError, match="No space"):
        (small_disk / "filler").write_bytes(bytes(17 * MIB))
    for turn in range(2, 6):
        write_member(small_disk / "kv", replace(before, turn=turn, ids=frozenset("ab")))
        assert read_member(small_disk / "kv") == Member("a", turn, frozenset("ab"))


@pytest.mark.parametrize("num_bytes", [0, 1, 20, 60])
def test_a_note_that_was_cut_leaves_the_one_before(tmp_path: Path, num_bytes: int) -> None:
    """Killed, or without power, at any byte of it: the directory says what it said last."""
    turns = [Member("a", turn, frozenset("abc"[:turn])) for turn in (1, 2, 3)]
    for member in turns[:2]:
        write_member(tmp_path, member)
    before = (tmp_path / "member").read_bytes()
    write_member(tmp_path, turns[2])
    after = (tmp_path / "member").read_bytes()
    assert len(before) == len(after)
    at = next(at for at in range(len(after)) if before[at] != after[at])
    (tmp_path / "member").write_bytes(after[: at + num_bytes] + before[at + num_bytes :])
    assert read_member(tmp_path) == turns[1]


async def test_a_disk_that_is_not_mounted_is_not_filled_below_its_mount_point(
    small_disk: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty folder on the system's disk, where the others have disks of their own, is away until it is mounted.

    A disk that is new is used, and so is a folder there for a tier that begins.
    """
    system = tmp_path_factory.mktemp("system")
    monkeypatch.setattr(Files, "is_on_system_disk", lambda _, fd: os.fstat(fd).st_dev == system.stat().st_dev)
    own, absent = small_disk / "a", system / "b"
    now = [0.0]
    async with opened([own, small_disk / "b"]) as tier:
        await tier.write(count_up(N))
    async with opened([own, absent], now) as tier:
        missing = tier.backend.missing(0)
        assert missing is not None
        assert "is its own mounted" in missing.why
        now[0] += 5
        tier.backend.try_again()
        for _ in range(100):
            await checkpoint()
        assert tier.recovered(N) == {n: n for n in range(0, N, 2)}
        assert not list(absent.iterdir())
    async with opened([own, small_disk / "c"]) as tier:
        assert tier.backend.missing(0) is None
    async with opened([small_disk / "d", system / "d"]) as tier:
        assert tier.backend.missing(0) is None


async def test_what_no_disk_could_note_is_not_done(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is forgotten of a disk that is away before another has noted that it is: it is owed, and made good."""
    now = [0.0]
    async with opened(paths, now) as tier:
        await tier.write(count_up(N))
        break_disk(paths[2])

        def write_to_full(path: Path, _: Member) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        with monkeypatch.context() as patch:
            patch.setattr(disks, "write_member", write_to_full)
            for _ in range(2):
                with pytest.raises(BackendUnavailableError, match="could note"):
                    await tier.backend.forget(0, slots_of({2: 2, 0: 0}))
        paths[2].touch()  # it does not come back
        now[0] += 5
        tier.backend.try_again()
        await until(lambda: read_member(paths[0]).ids == {read_member(path).id for path in paths[:2]})
        await tier.backend.forget(0, slots_of({2: 2, 0: 0}))


async def test_what_hangs_is_not_forgotten_before_another_has_noted_it(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That its disk is let go of ends the wait, and does not say that a restart finds none of it."""

    def write_to_full(path: Path, _: Member) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    now = [0.0]
    async with opened(paths, now) as tier:
        await tier.write(count_up(N))
        with hanging(paths[0], monkeypatch), monkeypatch.context() as patch:
            patch.setattr(disks, "write_member", write_to_full)
            forgetting = asyncio.ensure_future(tier.backend.forget(0, slots_of({0: 0})))
            await until(lambda: underway(tier.backend))
            now[0] += 11
            tier.backend.find_hung()
            with pytest.raises(BackendUnavailableError, match="could note"):
                await forgetting


async def test_a_note_of_before_another_was_added_says_nothing_of_it(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a disk that takes none since: that it was in use alone once does not say that the other is away now."""
    async with opened(paths[:1]):
        pass
    with monkeypatch.context() as patch:
        take_no_note(patch, paths[0])
        async with opened(paths[:2]) as tier:
            await tier.write(count_up(N))
            break_disk(paths[1])
            with pytest.raises(BackendUnavailableError, match="could note"):
                await tier.backend.forget(0, slots_of({1: 1}))


async def test_what_is_evicted_beside_none_that_is_away_is_owed_too(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no directory takes a note of who is in use, others of the tier would go on with what they have of it."""
    async with opened(paths[:2]) as tier:
        await tier.write({1: 0})
    now = [0.0]
    with monkeypatch.context() as patch:
        take_no_note(patch, paths[0])
        async with opened(paths[:1], now) as tier:
            await tier.write({0: 0})
            with pytest.raises(BackendUnavailableError, match="no directory could note"):
                await tier.backend.forget(0, slots_of({0: 0}))
            patch.undo()
            now[0] += 6
            tier.backend.try_again()
            await until(lambda: read_member(paths[0]).ids == {read_member(paths[0]).id})
            await tier.backend.forget(0, slots_of({0: 0}))
    async with opened(paths[:2]) as tier:
        assert tier.recovered(1) == {}


async def test_what_was_noted_in_vain_counts_no_more(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A note that fails may be on the disk: the next one is a later one, and a disk that missed that was away."""
    write, fails = disks.write_member, True

    def write_and_fail(path: Path, member: Member) -> None:
        write(path, member)
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with opened(paths) as tier:
        await tier.write(count_up(N))
        with monkeypatch.context() as patch:
            patch.setattr(disks, "write_member", write_and_fail)
            before_calls(patch, paths[2], fail)
            await tier.verified({2: 2})
            fails = False
            before_calls(patch, paths[0], fail)
            await tier.verified({0: 0})
            assert missing_slots(tier) == [n for n in range(N) if n % 3 != 1]
            await tier.backend.forget(0, slots_of({0: 0, 2: 2}))
    async with opened(paths) as tier:
        assert tier.recovered(N) == {n: n for n in range(1, N, 3)}


async def test_no_turn_is_said_again_that_a_disk_has_which_does_not_open(paths: list[Path]) -> None:
    """The latest note may be on it alone: it is away from now on, and begins empty."""
    async with opened(paths[:2]) as tier:
        await tier.write(count_up(N))
    said = read_member(paths[0])
    write_member(paths[0], replace(said, turn=said.turn + 1))
    folder = slab_of(paths[0]).parent
    folder.rename(paths[2])
    folder.touch()
    async with opened(paths[:2]) as tier:
        assert missing_slots(tier) == list(range(0, N, 2))
    folder.unlink()
    paths[2].rename(folder)
    async with opened(paths[:2]) as tier:
        assert tier.recovered(N) == {n: n for n in range(1, N, 2)}


def test_what_is_made_empty_says_nothing_of_itself(tmp_path: Path) -> None:
    """It is another directory from now on: who knew the former one takes it for none of theirs."""
    said = Member(turn=3, ids=frozenset({"a" * 16}))
    write_member(tmp_path, said)
    assert read_member(tmp_path) == said
    make_empty(tmp_path)
    make_empty(tmp_path)
    assert (read_member(tmp_path).turn, read_member(tmp_path).ids) == (0, frozenset())


@pytest.mark.parametrize("num_disks", [1, 2])
async def test_others_that_fill_a_disk_cost_the_places_that_it_has_no_room_for(
    small_disk: Path, tmp_path_factory: pytest.TempPathFactory, num_disks: int
) -> None:
    """Blocks go where there is room, in the place of the oldest, and everywhere again once there is room."""
    engine, paths = AnyEngine(), [small_disk / "a", tmp_path_factory.mktemp("b")]
    tier = {"medium": "nvme", "path": paths[:num_disks], "capacity": "8MiB"}
    async with open_any(engine, cpu(0), tier) as kv:

        async def kept(first: int, last: int) -> int:
            for seed in range(first, last):
                keys = prompt(16, seed)
                await (await kv.store(keys, engine.fill(keys, range(16)))).settled()
            return sum([(await kv.lookup(prompt(16, seed))).num_blocks for seed in range(first, last)])

        assert await kept(0, 4) == 64
        room = os.statvfs(small_disk)
        filler = small_disk / "filler"
        filler.write_bytes(bytes(room.f_bavail * room.f_frsize - (1 << 20)))
        await kept(4, 104)
        assert await kept(104, 108) == 64
        assert kv.stats()["nvme"].withheld > 0
        filler.unlink()
        await until(lambda: not kv.stats()["nvme"].withheld)
        assert await kept(108, 140) == 512
