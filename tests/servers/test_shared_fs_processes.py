"""Several processes on one directory, and a filesystem that fails. Run as a script this file is one such process."""

import asyncio
import contextlib
import fcntl
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from anyio import fail_after

from tests.support.caches import until
from tests.support.programs import Program, started
from tiered_kv.media.backend import Block, Outcome
from tiered_kv.media.record import verify
from tiered_kv.testing import GROUPS, block_key, make_block, open_backend, open_context
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError
from tiered_kv_backends.shared_fs.shared_fs_backend import SharedFSBackend

GROUP = len(GROUPS) - 1
SIZE = GROUPS[GROUP].payload_bytes
RECORD = 4096 + SIZE
SMALL_RECORD = 4096 + GROUPS[0].payload_bytes
BATCH = 8
HOUR_NS = 3600 * 10**9
Start = Callable[[str, Path, int], Program]


def content(n: int, life: int = 0) -> bytes:
    """Return bytes of block ``n`` that differ from life to life."""
    return np.random.default_rng([n, life]).bytes(SIZE)


@asynccontextmanager
async def opened(path: Path, **settings: object) -> AsyncIterator[SharedFSBackend]:
    """Open a tier of 100 blocks, unless settings say otherwise."""
    given = {"path": path, "capacity": 100 * RECORD, "min_free_fraction": 0, "num_threads": 4, **settings}
    backend = SharedFSBackend(SharedFSBackend.Settings.model_validate(given), time.time_ns)
    async with open_backend(backend, GROUPS[GROUP]):
        yield backend


async def store(backend: SharedFSBackend, numbers: list[int], life: int = 0) -> list[Outcome]:
    """Write blocks by number."""
    keys = [block_key(n, GROUP) for n in numbers]
    return await backend.write(keys, [make_block(content(n, life), key) for n, key in zip(numbers, keys, strict=True)])


async def load(backend: SharedFSBackend, numbers: list[int]) -> dict[int, bytes]:
    """Read blocks by number; return what those found hold, and check that their records are right."""
    keys, into = [block_key(n, GROUP) for n in numbers], [Block.empty(SIZE) for _ in numbers]
    outcomes = await backend.read(keys, into)
    assert set(outcomes) <= {Outcome.HIT, Outcome.MISS}
    found = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.HIT]
    assert [verify(keys[i], into[i]) for i in found] == [Outcome.HIT] * len(found)
    return {numbers[i]: bytes(into[i].payload) for i in found}


def records_in(path: Path) -> list[Path]:
    """Return the files that are served."""
    return [file for file in path.rglob("*") if file.is_file() and len(file.name) == 64]


def temporaries_in(path: Path) -> list[Path]:
    """Return the files that are being written, or were."""
    return list(path.rglob(".*.tmp"))


def total_bytes(path: Path) -> int:
    """Return what the limit is on: of files that were all there when the last of them was looked at.

    What goes meanwhile does not count beside what has come in its place.
    """
    seen: dict[Path, os.stat_result] = {}
    for folder, _, names in os.walk(path):
        for file in (Path(folder, name) for name in names if len(name) >= 37):
            with suppress(FileNotFoundError):
                seen[file] = file.stat()
    num_bytes = 0
    for file, status in seen.items():
        with suppress(FileNotFoundError):
            now = file.stat()
            is_same = (now.st_ino, now.st_mtime_ns) == (status.st_ino, status.st_mtime_ns)
            num_bytes += status.st_size if is_same else 0
    return num_bytes


# What a process of its own does. Each prints a line when it is under way.


async def write_one_key(path: Path, life: int) -> None:
    """Write the same block again and again, each time with this process's bytes."""
    async with opened(path, capacity="1GiB") as backend:
        for _ in range(8):
            assert await store(backend, [0, 0], life) == [Outcome.STORED] * 2


async def write_many_keys(path: Path, life: int) -> None:
    """Write twice as many small blocks as may be there."""
    async with opened(path, capacity=400 * SMALL_RECORD) as backend:
        for start in range(0, 800, BATCH):
            keys = [block_key(life * 10_000 + start + i, 0) for i in range(BATCH)]
            blocks = [make_block(bytes(4096), key) for key in keys]
            while await backend.write(keys, blocks) != [Outcome.STORED] * BATCH:
                await backend.sweep()


async def write_until_killed(path: Path, life: int, acknowledged: int) -> None:
    """Write batches of new blocks, and a byte to a pipe after each."""
    async with opened(path, capacity="1GiB") as backend:
        for start in range(0, 1_000_000, BATCH):
            outcomes = await store(backend, [life * 1_000_000 + start + i for i in range(BATCH)])
            assert outcomes == [Outcome.STORED] * BATCH
            os.write(acknowledged, b"x")


def die_before_name(number: int) -> None:
    """Have this process killed when it is about to give its ``number``-th record its name."""
    replace, numbers = os.replace, itertools.count(1)

    def replace_or_die(temporary: str, name: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(temporary, name, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    setattr(os, "replace", replace_or_die)  # noqa: B010 - narrower than what it stands for


def run_lives(path: Path, _: int) -> None:
    """For each line read, start a writer, have it killed, say how many batches were acknowledged.

    A line is how long after its first batch it is killed, in seconds, or less than 0: in which of its records, before
    that has its name.
    """
    for life, line in enumerate(sys.stdin):
        moment = float(line)
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            if moment < 0:
                die_before_name(int(-moment))
            asyncio.run(write_until_killed(path, life, writer))
        os.close(writer)
        num_acknowledged = len(os.read(reader, 1))
        if moment >= 0:
            time.sleep(moment)  # nothing waits for it
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while received := os.read(reader, 65536):
            num_acknowledged += len(received)
        os.close(reader)
        sys.stdout.write(f"{num_acknowledged}\n")
        sys.stdout.flush()


def hold_the_lock(path: Path, life: int) -> None:
    """Be a sweeper that never ends."""
    with (path / "sweeper.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(sys.stdout.fileno(), b"x")
        signal.pause()


@pytest.fixture
def start() -> Iterator[Start]:
    """A function that starts one of the above in a process of its own, which ends with the test."""
    with ExitStack() as stack:
        yield lambda what, path, life: stack.enter_context(started(__file__, what, path, str(life)))


@pytest.mark.slow
async def test_many_writers_of_one_key(tmp_path: Path, start: Start) -> None:
    """Whoever reads while processes write the same block gets one writer's record whole, and nothing is left over."""
    writers = [start("write_one_key", tmp_path, life) for life in range(3)]
    allowed = {content(0, life) for life in range(3)}
    async with opened(tmp_path) as backend:
        num_hits = 0
        while any(writer.is_running for writer in writers):
            found = await load(backend, [0] * BATCH)
            assert set(found.values()) <= allowed
            num_hits += len(found)
        assert num_hits
        assert [writer.wait() for writer in writers] == [0] * 3
        assert set((await load(backend, [0])).values()) <= allowed
    assert len(records_in(tmp_path)) == 1
    assert not temporaries_in(tmp_path)


@pytest.mark.slow
def test_processes_keep_one_limit(tmp_path: Path, start: Start) -> None:
    """Processes that write six times the capacity at once never exceed it."""
    writers = [start("write_many_keys", tmp_path, life) for life in range(3)]
    while any(writer.is_running for writer in writers):
        assert total_bytes(tmp_path) <= 400 * SMALL_RECORD
    assert [writer.wait() for writer in writers] == [0] * 3
    assert total_bytes(tmp_path) >= 300 * SMALL_RECORD
    assert not temporaries_in(tmp_path)


async def test_one_sweeper_at_a_time(tmp_path: Path, start: Start) -> None:
    """While a process sweeps no other one does; one that is killed at it is followed by the next."""
    async with opened(tmp_path) as backend:
        holder = start("hold_the_lock", tmp_path, 0)
        assert holder.stdout.read(1)
        await store(backend, list(range(120)))
        assert await backend.sweep() is None
        assert total_bytes(tmp_path) == 100 * RECORD
        holder.kill()
        swept = await backend.sweep()
        assert swept is not None
        assert swept.num_deleted == 10
        assert total_bytes(tmp_path) == 90 * RECORD


async def test_a_sweep_is_not_repeated_by_the_next_process(tmp_path: Path) -> None:
    """However many sweep one after another, as they are refused or it is due, no more goes than for one of them."""
    async with opened(tmp_path, capacity=10 * RECORD) as a, opened(tmp_path, capacity=10 * RECORD) as b:
        await store(a, list(range(10)))
        for n, backend in ((20, a), (21, b)):  # not one block twice: while it is replaced, both of it count
            while await store(backend, [n]) == [Outcome.REFUSED]:
                await backend.sweep()
        assert total_bytes(tmp_path) >= 8 * RECORD  # after a sweep there is room for one, padded to whole pages


async def test_a_ledger_that_others_use_is_waited_for(tmp_path: Path) -> None:
    """Somebody who is stopped for a while with the ledger in hand fails neither a write nor a sweep."""
    async with opened(tmp_path) as backend:
        for use in (partial(store, backend, [0]), backend.sweep):
            with (tmp_path / "ledger").open("r+") as ledger:
                fcntl.flock(ledger, fcntl.LOCK_EX)
                using = asyncio.ensure_future(use())
                await asyncio.wait([using], timeout=0.5)  # how long they are stopped
                assert not using.done()
            assert await using not in (None, [Outcome.REFUSED])


@pytest.mark.slow
def test_killed_writers_leave_nothing_that_is_served(tmp_path: Path, start: Start) -> None:
    """Whenever a writer dies, what it knew to be stored is there, all that is there is whole, and the rest is swept."""
    path = tmp_path / "kv"
    lives = start("run_lives", path, 0)
    delays = np.random.default_rng(50).uniform(0, 0.05, 40).tolist()
    for life, moment in enumerate([*delays, *range(-BATCH - 10, -BATCH)]):
        lives.stdin.write(f"{moment}\n")
        lives.stdin.flush()
        num_batches = int(lives.stdout.readline())
        assert num_batches
        asyncio.run(check_life(path, life, num_batches))
        assert temporaries_in(path) or moment >= 0
        asyncio.run(sweep_in_two_hours(path))
        assert not temporaries_in(path)


async def check_life(path: Path, life: int, num_batches: int) -> None:
    """Compare what is served with what the writer wrote: ``num_batches`` and perhaps some of the next one."""
    numbers = [life * 1_000_000 + i for i in range((num_batches + 1) * BATCH)]
    async with opened(path, capacity="1GiB") as backend:
        found = await load(backend, numbers)
    assert all(held == content(n) for n, held in found.items())
    assert set(numbers[:-BATCH]) <= found.keys()


async def sweep_in_two_hours(path: Path) -> None:
    """Sweep when what is being written now is stale."""
    settings = SharedFSBackend.Settings(path=path, capacity="1GiB", min_free_fraction=0)
    async with open_backend(SharedFSBackend(settings, lambda: time.time_ns() + 2 * HOUR_NS), GROUPS[GROUP]) as backend:
        assert await backend.sweep() is not None


def run(program: str, *args: object) -> bool:
    """Run a program and say whether it succeeded."""
    found = shutil.which(program)
    return (
        found is not None and not subprocess.run([found, *map(str, args)], check=False, capture_output=True).returncode
    )


@pytest.fixture
def small_filesystem(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 4 MiB."""
    path = tmp_path / "mounted"
    path.mkdir()
    if not run("mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tiered_kv-test", path):
        pytest.skip("no right to mount a tmpfs: run the tests as root")
    try:
        yield path
    finally:
        assert run("umount", "--lazy", path)


async def test_a_full_filesystem_refuses_and_recovers(small_filesystem: Path) -> None:
    """Blocks that find no room are refused and leave nothing behind; once there is room, storing goes on."""
    async with opened(small_filesystem) as backend:
        assert await store(backend, [0, 1]) == [Outcome.STORED] * 2
        free = os.statvfs(small_filesystem)
        ballast = small_filesystem / "ballast"
        ballast.write_bytes(bytes(free.f_bavail * free.f_frsize - 3 * RECORD // 2))  # the tier asked a moment ago
        assert Outcome.REFUSED in await store(backend, list(range(2, 8)))
        assert not temporaries_in(small_filesystem)
        ballast.unlink()
        await backend.sweep()
        assert await store(backend, [10, 11]) == [Outcome.STORED] * 2
        assert (await load(backend, [10, 11])).keys() == {10, 11}


async def test_a_filesystem_without_room_for_a_file_is_opened(small_filesystem: Path) -> None:
    """What is there is loaded; stores are refused until there is room."""
    async with opened(small_filesystem) as backend:
        assert await store(backend, [0, 1]) == [Outcome.STORED] * 2
    assert run("mount", "-o", "remount,nr_inodes=64", small_filesystem)
    ballast = [small_filesystem / f"ballast{n}" for n in range(64)]
    with contextlib.suppress(OSError):
        for each in ballast:
            each.touch()
    async with opened(small_filesystem) as backend:
        assert (await load(backend, [0, 1])).keys() == {0, 1}
        assert await store(backend, [2]) == [Outcome.REFUSED]
        ballast[0].unlink()
        ballast[1].unlink()  # of a folder, too
        assert await store(backend, [2]) == [Outcome.STORED]


async def test_a_filesystem_smaller_than_the_capacity_is_swept(small_filesystem: Path) -> None:
    """Where the filesystem is full before the limit is reached, the oldest blocks make room all the same."""
    async with opened(small_filesystem, capacity="1GiB") as backend:
        for n in range(100):
            while await store(backend, [n]) == [Outcome.REFUSED]:
                await backend.sweep()
        assert len(await load(backend, list(range(80, 100)))) >= 18
        assert not await load(backend, list(range(50)))


async def test_a_filesystem_that_others_fill_is_swept(small_filesystem: Path) -> None:
    """Nobody asks for it and the tier is far below its limit: the oldest blocks go until enough is free again."""
    status = os.statvfs(small_filesystem)
    num_bytes = status.f_blocks * status.f_frsize
    num_blocks = num_bytes // 2 // RECORD
    settings: dict[str, object] = {"capacity": "1GiB", "min_free_fraction": 0.2, "sweep_interval_s": 0.01}
    async with opened(small_filesystem, **settings) as backend:
        for n in range(num_blocks):
            assert await store(backend, [n]) == [Outcome.STORED]
        (small_filesystem / "ballast").write_bytes(bytes(int(free_in(small_filesystem) - 0.1 * num_bytes)))
        with fail_after(60):
            while free_in(small_filesystem) < 0.2 * num_bytes:  # noqa: ASYNC110 - a sweep tells nobody
                await asyncio.sleep(0)
        await backend.sweep()  # after the one that is at it
        found = await load(backend, list(range(num_blocks)))
    assert sorted(found) == list(range(num_blocks - len(found), num_blocks))
    assert 0.25 * num_bytes <= free_in(small_filesystem) < 0.25 * num_bytes + 2 * RECORD  # a twentieth beyond a fifth


def free_in(path: Path) -> int:
    """Return how many bytes a filesystem has left."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


async def test_a_filesystem_that_turns_read_only(small_filesystem: Path) -> None:
    """Reads go on, writes say that the tier has failed, and all works again when the filesystem does."""
    async with opened(small_filesystem) as backend:
        await store(backend, [0])
        await until(lambda: run("mount", "-o", "remount,ro", small_filesystem))  # whoever is writing there yet ends
        with pytest.raises(BackendUnavailableError, match="Read-only"):
            await store(backend, [1])
        with pytest.raises(BackendUnavailableError, match="Read-only"):
            await backend.delete([block_key(0, GROUP)])
        assert (await load(backend, [0])).keys() == {0}
        with open_context() as context, pytest.raises(ConfigurationError, match="Read-only"):
            await SharedFSBackend(backend.settings).open(context)
        assert run("mount", "-o", "remount,rw", small_filesystem)
        assert await store(backend, [1]) == [Outcome.STORED]


if __name__ == "__main__":
    running = globals()[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
    if asyncio.iscoroutine(running):
        asyncio.run(running)
