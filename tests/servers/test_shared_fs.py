import asyncio
import contextlib
import errno
import fcntl
import gc
import hashlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from anyio import fail_after
from anyio.lowlevel import checkpoint

from tests.support.any_layout import AnyEngine, open_any, prompt
from tests.support.caches import a_while, until
from tests.support.descriptors import num_open_in
from tiered_kv.media.backend import BackendContext, Block, Outcome
from tiered_kv.settings.chain_settings import tier_from
from tiered_kv.testing import GROUPS, BackendTests, block_key, make_block, open_backend, open_context
from tiered_kv.testing.helpers import ended
from tiered_kv.values.errors import BackendUnavailableError, ClosedError, ConfigurationError
from tiered_kv.values.keys import BlockKey, salt_digest
from tiered_kv_backends.paths import Opener
from tiered_kv_backends.shared_fs import SharedFSBackend, bytes_ledger, files, sweep, sweeper
from tiered_kv_backends.shared_fs.bytes_ledger import ByteLedger
from tiered_kv_backends.shared_fs.files import Work, direct_problem, probe, write_records

SIZE = GROUPS[0].payload_bytes
RECORD = 4096 + SIZE
DAY_NS = 24 * 3600 * 10**9


class TestSharedFSBackend(BackendTests):
    capacity_bytes = 128 << 20
    survives_reopening = True

    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[SharedFSBackend]:
        """One in the tests' folder."""
        async with open_backend(backend_at(tmp_path / "kv", capacity="128MiB")) as backend:
            yield backend


class Clock:
    """Wall clock that a test turns."""

    def __init__(self) -> None:
        self.now_ns = 10**9 * 1_700_000_000

    def __call__(self) -> int:
        """Return its time."""
        return self.now_ns


def backend_at(path: Path, clock: Clock | None = None, **settings: object) -> SharedFSBackend:
    """Return a tier of 64 MiB that leaves no space free, unless settings say otherwise."""
    given = {"path": path, "capacity": "64MiB", "min_free_fraction": 0, **settings}
    return SharedFSBackend(SharedFSBackend.Settings.model_validate(given), clock or Clock())


def opened(path: Path, clock: Clock | None = None, **settings: object) -> AbstractAsyncContextManager[SharedFSBackend]:
    """Open such a tier for small blocks."""
    return open_backend(backend_at(path, clock, **settings), GROUPS[0])


def keys_of(*numbers: int) -> list[BlockKey]:
    """Return keys by number."""
    return [block_key(n) for n in numbers]


async def store(backend: SharedFSBackend, keys: list[BlockKey]) -> list[Outcome]:
    """Write a block of zeros under each key."""
    return await backend.write(keys, [make_block(bytes(SIZE), key) for key in keys])


async def load(backend: SharedFSBackend, keys: list[BlockKey]) -> list[Outcome]:
    """Read each key's block."""
    return await backend.read(keys, [Block.empty(SIZE) for _ in keys])


def file_of(path: Path, key: BlockKey) -> Path:
    """Return where a block's record lies."""
    return path / key.namespace.path / key.hash.hex()[:3] / key.hash.hex()


def files_in(path: Path) -> set[Path]:
    """Return all files under ``path`` but the two of the root."""
    own = {path / "sweeper.lock", path / "ledger"}
    return {file for file in path.rglob("*") if file.is_file() and file not in own}


async def test_a_file_is_the_record(tmp_path: Path) -> None:
    """Any tool can read a block: its file holds the header, then the payload, and is named by its key alone."""
    async with opened(tmp_path) as backend:
        (key,) = keys_of(1)
        await store(backend, [key])
        assert files_in(tmp_path) == {file_of(tmp_path, key)}
        assert file_of(tmp_path, key).read_bytes() == bytes(make_block(bytes(SIZE), key))
        assert file_of(tmp_path, key).stat().st_mode & 0o777 == 0o600


async def test_a_hit_is_dated_at_most_once_in_ten_minutes(tmp_path: Path) -> None:
    """Hot blocks cost the filesystem no write per read."""
    clock = Clock()
    async with opened(tmp_path, clock) as backend:
        keys = keys_of(1)
        await store(backend, keys)
        written_ns = clock.now_ns
        for seconds, dated_ns in ((300, written_ns), (601, written_ns + 601 * 10**9)):
            clock.now_ns = written_ns + seconds * 10**9
            assert await load(backend, keys) == [Outcome.HIT]
            assert file_of(tmp_path, keys[0]).stat().st_mtime_ns == dated_ns


async def test_a_lookup_is_no_use(tmp_path: Path) -> None:
    """Asking for a block dates nothing."""
    clock = Clock()
    async with opened(tmp_path, clock) as backend:
        keys = keys_of(1)
        await store(backend, keys)
        written_ns, clock.now_ns = clock.now_ns, clock.now_ns + DAY_NS
        assert await backend.lookup_prefix(keys) == 1
        assert file_of(tmp_path, keys[0]).stat().st_mtime_ns == written_ns


@pytest.mark.parametrize("num_there", [0, 1, 2, 15, 16, 17, 99, 100])
async def test_a_prefix_is_counted(tmp_path: Path, num_there: int) -> None:
    """The number of leading keys is exact where there are no holes, whatever number that is."""
    async with opened(tmp_path, num_threads=4) as backend:
        keys = keys_of(*range(100))
        await store(backend, keys[:num_there])
        assert await backend.lookup_prefix(keys) == num_there
        assert await backend.lookup_prefix(keys[:num_there]) == num_there


async def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    """A sweep deletes in order of use, a read being one, until a tenth of the capacity is free."""
    clock = Clock()
    async with opened(tmp_path, clock, capacity=10 * RECORD) as backend:
        keys = keys_of(*range(12))
        for key in keys:
            clock.now_ns += DAY_NS
            await store(backend, [key])
            await backend.sweep()
            await load(backend, keys[:1])
        assert await backend.lookup(keys) == [Outcome.HIT] + [Outcome.MISS] * 3 + [Outcome.HIT] * 8


async def test_the_tail_of_a_prompt_goes_before_its_head(tmp_path: Path) -> None:
    """Of blocks that were stored together those further from the prompt's beginning are deleted first."""
    namespace = block_key(0).namespace
    keys = [BlockKey(namespace, hashlib.sha256(b"%d" % n).digest(), position=n) for n in range(12)]
    async with opened(tmp_path) as backend:  # with room for all: where there is none, threads choose what is refused
        assert await store(backend, keys) == [Outcome.STORED] * 12
    await sweep({"medium": "shared_fs", "path": str(tmp_path), "capacity": 10 * RECORD, "min_free_fraction": 0})
    async with opened(tmp_path) as backend:
        assert await backend.lookup_prefix(keys) == 9


def keys_of_salt(salt: bytes, *numbers: int) -> list[BlockKey]:
    """Return keys of one tenant."""
    return [BlockKey(replace(key.namespace, salt=salt * 32), key.hash) for key in keys_of(*numbers)]


async def test_a_sweep_keeps_salts_within_their_quota(tmp_path: Path) -> None:
    """Of one that has more, what was used longest ago goes, down to nine tenths; nobody else loses a block by it."""
    clock = Clock()
    ann, bob = keys_of_salt(b"a", *range(20)), keys_of_salt(b"b", *range(8))
    async with opened(tmp_path, clock) as backend:
        for key in (*bob, *ann):
            clock.now_ns += 10**9
            assert await store(backend, [key]) == [Outcome.STORED]
    settings = {"medium": "shared_fs", "path": str(tmp_path), "capacity": "64MiB", "min_free_fraction": 0}
    swept = await sweep({**settings, "salt_quota": 10 * RECORD})
    assert swept is not None
    assert (swept.num_deleted, swept.num_over_quota) == (11, 11)
    async with opened(tmp_path, clock) as backend:
        assert await backend.lookup(bob) == [Outcome.HIT] * 8
        assert await backend.lookup(ann) == [Outcome.MISS] * 11 + [Outcome.HIT] * 9


async def test_who_writes_much_for_a_salt_has_it_swept(tmp_path: Path) -> None:
    """Nobody asks for it: what a process writes beyond a quota is deleted by itself."""
    clock, ann = Clock(), keys_of_salt(b"a", *range(60))
    async with opened(tmp_path, clock, salt_quota=10 * RECORD) as backend:
        for key in ann:
            clock.now_ns += 10**9
            await store(backend, [key])
        while (await backend.lookup(ann)).count(Outcome.HIT) > 10:
            await checkpoint()
        assert (await backend.lookup(ann))[-1] is Outcome.HIT


async def test_a_sweep_that_fails_forgets_nothing_of_a_quota(tmp_path: Path) -> None:
    """What was written before it counts after it."""
    clock, ann = Clock(), keys_of_salt(b"a", *range(11))
    async with opened(tmp_path, clock, salt_quota=10 * RECORD) as backend:
        await store(backend, ann[:9])
        await backend.sweep()
        await store(backend, ann[9:10])
        lock = (tmp_path / "sweeper.lock").rename(tmp_path / "aside")
        (tmp_path / "sweeper.lock").mkdir()
        with pytest.raises(BackendUnavailableError, match="cannot sweep"):
            await backend.sweep()
        (tmp_path / "sweeper.lock").rmdir()
        lock.rename(tmp_path / "sweeper.lock")
        await store(backend, ann[10:])
        with fail_after(60):
            while (await backend.lookup(ann)).count(Outcome.HIT) > 10:
                await checkpoint()


@pytest.mark.parametrize("capacity", [30, 12])
async def test_quota_and_capacity_hold_together(tmp_path: Path, capacity: int) -> None:
    """Whichever is less: a sweep leaves no salt more than its quota, and all no more than the capacity."""
    clock, ann, bob = Clock(), keys_of_salt(b"a", *range(20)), keys_of_salt(b"b", *range(20))
    async with opened(tmp_path, clock) as backend:
        for key in (*ann, *bob):
            clock.now_ns += 10**9
            await store(backend, [key])
    settings = {"medium": "shared_fs", "path": str(tmp_path), "min_free_fraction": 0}
    await sweep({**settings, "capacity": capacity * RECORD, "salt_quota": 10 * RECORD})
    async with opened(tmp_path, clock) as backend:
        counts = [(await backend.lookup(keys)).count(Outcome.HIT) for keys in (ann, bob)]
    assert max(counts) <= 10
    assert sum(counts) <= capacity


def test_a_quota_that_a_medium_cannot_keep_is_refused() -> None:
    """With what to do instead."""
    for given in ("redis://127.0.0.1?salt_quota=1MiB", "file:///nowhere?capacity=1GiB&salt_quota=1MiB"):
        with pytest.raises(ConfigurationError, match="keep_quota"):
            tier_from(given)


async def test_a_sweep_by_command_needs_no_cache(tmp_path: Path) -> None:
    """It does what a process of the caches would do, and not while one of them does it; nor where none has been."""
    settings = {"path": tmp_path / "kv", "capacity": 40 * RECORD, "min_free_fraction": 0}
    with pytest.raises(BackendUnavailableError, match="No such file"):
        await sweep(settings)
    async with opened(tmp_path / "kv", capacity=40 * RECORD) as backend:
        assert await store(backend, keys_of(*range(12))) == [Outcome.STORED] * 12
        smaller = settings | {"capacity": 10 * RECORD}
        with (tmp_path / "kv" / "sweeper.lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert await sweep(smaller) is None
        swept = await sweep(smaller)
        assert swept is not None
        assert swept.num_deleted == 3
        assert len(files_in(tmp_path / "kv")) == 9
    with pytest.raises(ConfigurationError, match="read_only"):
        await sweep(settings | {"read_only": True})


async def test_a_process_that_writes_sweeps_by_itself(tmp_path: Path) -> None:
    """The limit is kept without anybody asking, and nothing is left over at the end."""
    async with opened(tmp_path, capacity=20 * RECORD) as backend:
        for n in range(100):
            await store(backend, keys_of(n))
        await backend.sweep()
    assert sum(file.stat().st_size for file in files_in(tmp_path)) <= 20 * RECORD


async def test_a_store_that_is_refused_makes_room_for_those_after_it(tmp_path: Path) -> None:
    """By a sweep in the background, though those before it left the directory less full than makes one due."""
    async with opened(tmp_path, capacity=int(10.9 * RECORD)) as backend:
        await backend.sweep()
        assert await store(backend, keys_of(*range(10))) == [Outcome.STORED] * 10
        with fail_after(60):
            while await store(backend, keys_of(10)) == [Outcome.REFUSED]:  # noqa: ASYNC110 - a sweep tells nobody
                await asyncio.sleep(0)
        assert await load(backend, keys_of(10)) == [Outcome.HIT]


def take_few_files(path: Path, monkeypatch: pytest.MonkeyPatch, most: int, number: int) -> None:
    """Have the filesystem make no more than so many files below a directory: with an error of this number."""
    open_any_file = os.open

    def open_few(path_: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_EXCL and len(files_in(path)) >= most:
            raise OSError(number, os.strerror(number))
        return open_any_file(path_, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", open_few)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_a_filesystem_that_takes_no_more_files_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """Though there is room for bytes: a twentieth of what lies there goes, used longest ago, and stores go on."""
    caplog.set_level("INFO")
    keys, clock = keys_of(*range(40)), Clock()
    async with opened(tmp_path, clock) as backend:
        for key in keys:
            clock.now_ns += DAY_NS // 1440  # in less than an hour, after which a sweep is due
            assert await store(backend, [key]) == [Outcome.STORED]
        take_few_files(tmp_path, monkeypatch, len(keys), number)
        with fail_after(60):
            while await store(backend, keys_of(40)) == [Outcome.REFUSED]:  # noqa: ASYNC110 - a sweep tells nobody
                await asyncio.sleep(0)
            while "shared_fs.swept" not in caplog.text:  # with one block gone there is room, and one is to go yet
                await a_while()
        assert await load(backend, keys_of(40)) == [Outcome.HIT]
        assert await backend.lookup(keys) == [Outcome.MISS] * 2 + [Outcome.HIT] * 38


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
async def test_a_filesystem_that_takes_no_write_over_another_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_late: bool
) -> None:
    """Where writes copy, one whose quota is reached has no room for the ledger either, nor for a date.

    Some have it only a while after that: what is counted then is too much, until the next sweep.
    """
    caplog.set_level("INFO")
    keys, calls = keys_of(*range(40)), {name: getattr(os, name) for name in ("pwrite", "utime")}
    async with opened(tmp_path) as backend:
        for key in keys:
            assert await store(backend, [key]) == [Outcome.STORED]

    def unless_full(name: str) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:  # noqa: ANN401 - as the call has it
            num_there = sum(each.name[0] != "." for each in files_in(tmp_path))
            if num_there >= len(keys) or (is_late and "shared_fs.swept" not in caplog.text):
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            return calls[name](*args, **more)

        return call

    for name in calls:
        monkeypatch.setattr(os, name, unless_full(name))
    async with opened(tmp_path) as backend:
        with fail_after(60):
            while await store(backend, keys_of(40)) == [Outcome.REFUSED]:  # noqa: ASYNC110 - a sweep tells nobody
                await asyncio.sleep(0)
        assert await load(backend, keys_of(40)) == [Outcome.HIT]
        assert (await backend.lookup(keys)).count(Outcome.HIT) >= 36
    assert "sweep_failed" not in caplog.text


async def test_a_lock_that_could_not_be_dated_is_as_soon_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it looks as if who has it had been stopped, so that another process would sweep beside it."""
    clock, date, calls = Clock(), os.utime, list[object]()

    def full_at_first(*args: Any, **more: Any) -> None:  # noqa: ANN401 - as the call has it
        calls.append(args)
        if len(calls) == 1:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        date(*args, **more)

    async with opened(tmp_path, clock) as backend:
        await store(backend, keys_of(*range(4)))
        await backend.sweep()
        clock.now_ns += DAY_NS
        monkeypatch.setattr(os, "utime", full_at_first)
        await backend.sweep()
        assert (tmp_path / files.LOCK_NAME).stat().st_mtime_ns == clock.now_ns


async def test_a_full_filesystem_is_swept_though_another_process_swept_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which knew nothing of it, and made no room: stores that are refused after that ask for a sweep of their own."""
    keys, clock = keys_of(*range(40)), Clock()
    async with opened(tmp_path, clock) as backend, opened(tmp_path, clock) as other:
        assert await store(backend, keys) == [Outcome.STORED] * 40
        take_few_files(tmp_path, monkeypatch, len(keys), errno.EDQUOT)
        with (tmp_path / "sweeper.lock").open("r+") as lock:  # the other's, which begins
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert await store(backend, keys_of(40)) == [Outcome.REFUSED]
            for _ in range(9):
                await a_while()
        while await other.sweep() is None:  # noqa: ASYNC110 - the one at opening tells nobody
            await asyncio.sleep(0)
        assert await backend.lookup(keys) == [Outcome.HIT] * 40
        with fail_after(30):
            while await store(backend, keys_of(40)) == [Outcome.REFUSED]:  # noqa: ASYNC110 - a sweep tells nobody
                await asyncio.sleep(0)
        assert await load(backend, keys_of(40)) == [Outcome.HIT]


async def test_what_is_refused_while_a_sweep_makes_room_costs_no_more_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The room is there when that is done: the next sweep, whenever it is due, finds nothing to make it for."""
    caplog.set_level("INFO")
    async with opened(tmp_path) as backend:
        while await backend.sweep() is None:  # the one at opening tells nobody
            await a_while()
        assert await store(backend, keys_of(*range(40))) == [Outcome.STORED] * 40
        take_few_files(tmp_path, monkeypatch, 40, errno.EDQUOT)
        with (tmp_path / "sweeper.lock").open("r+") as lock:  # so that what was taken from the ledger is not used
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert await store(backend, keys_of(40)) == [Outcome.REFUSED]
            for _ in range(9):
                await a_while()
        with (tmp_path / "ledger").open("r+") as ledger:  # which the sweep waits for
            fcntl.flock(ledger, fcntl.LOCK_EX)
            for _ in range(30):
                assert await store(backend, keys_of(40)) == [Outcome.REFUSED]
        with fail_after(60):
            while "shared_fs.swept" not in caplog.text:
                await store(backend, keys_of(40))
        while (swept := await backend.sweep()) is None:
            await a_while()
        assert swept.num_deleted == 0


async def test_what_no_sweep_would_help_costs_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may not write files as long as a record deletes none of others for it."""
    async with opened(tmp_path) as backend:
        assert await store(backend, keys_of(1, 2)) == [Outcome.STORED] * 2
        take_few_files(tmp_path, monkeypatch, 0, errno.EFBIG)
        assert await store(backend, keys_of(3)) == [Outcome.REFUSED]
        while await backend.sweep() is None:  # noqa: ASYNC110 - the one that the refused store has begun tells nobody
            await asyncio.sleep(0)
        assert await backend.lookup(keys_of(1, 2)) == [Outcome.HIT] * 2


async def test_a_sweep_that_fails_is_said_and_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Something that is no lock lies where the sweepers' lock should: the tier serves on what it has."""
    async with opened(tmp_path, capacity=3 * RECORD) as backend:
        await backend.sweep()
        with (tmp_path / "sweeper.lock").open("r+") as held:  # a sweep that begins meanwhile makes no room
            fcntl.flock(held, fcntl.LOCK_EX)
            assert await store(backend, keys_of(0, 1, 2)) == [Outcome.STORED] * 3
            lock = (tmp_path / "sweeper.lock").rename(tmp_path / "aside")
            (tmp_path / "sweeper.lock").mkdir()
            with fail_after(60):
                while "shared_fs.sweep_failed" not in caplog.text:  # a sweep tells nobody else
                    assert await store(backend, keys_of(3)) == [Outcome.REFUSED]
        assert await load(backend, keys_of(2)) == [Outcome.HIT]
        (tmp_path / "sweeper.lock").rmdir()
        lock.rename(tmp_path / "sweeper.lock")
        with fail_after(60):
            while await store(backend, keys_of(3)) == [Outcome.REFUSED]:  # noqa: ASYNC110 - likewise
                await asyncio.sleep(0)


async def test_the_limit_is_kept_at_every_moment(tmp_path: Path) -> None:
    """However much is written, and whoever keeps others from sweeping, no more is there than the capacity."""
    async with opened(tmp_path, capacity=20 * RECORD) as one, opened(tmp_path, capacity=20 * RECORD) as other:
        with (tmp_path / "sweeper.lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for n in range(30):
                outcomes = await store(one, keys_of(2 * n)), await store(other, keys_of(2 * n + 1))
                assert sum(file.stat().st_size for file in files_in(tmp_path)) <= 20 * RECORD
            assert outcomes == ([Outcome.REFUSED], [Outcome.REFUSED])
            assert len(files_in(tmp_path)) == 20  # while nobody can sweep
        while await store(other, keys_of(100)) == [Outcome.REFUSED]:  # until whoever is at it has swept
            await one.sweep()


async def test_each_process_has_a_capacity_of_its_own(tmp_path: Path) -> None:
    """It writes up to that, beyond what another has; and its sweep deletes down to that, whoever has written."""
    async with opened(tmp_path, capacity=40 * RECORD) as large, opened(tmp_path, capacity=10 * RECORD) as small:
        await until(lambda: all(each._sweeping is not None and each._sweeping.done() for each in (large, small)))  # noqa: SLF001 - what opening has begun
        assert await store(large, keys_of(*range(20))) == [Outcome.STORED] * 20
        swept = await small.sweep()
        assert swept is not None
        assert swept.num_deleted == 11
        assert await store(large, keys_of(20)) == [Outcome.STORED]


@pytest.mark.parametrize("text", [b"", b"00000000 {}\n", b"x" * 5000])
async def test_where_usage_is_unknown_nothing_is_written(tmp_path: Path, text: bytes) -> None:
    """A ledger that was lost or damaged is made anew by a sweep; until then stores are refused, and loads go on."""
    async with opened(tmp_path) as backend:
        await store(backend, keys_of(1))
        await backend.sweep()
    (tmp_path / "ledger").write_bytes(text)
    with (tmp_path / "sweeper.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        async with opened(tmp_path) as backend:
            assert await store(backend, keys_of(2)) == [Outcome.REFUSED]
            assert await load(backend, keys_of(1)) == [Outcome.HIT]
            fcntl.flock(lock, fcntl.LOCK_UN)
            await backend.sweep()
            assert await store(backend, keys_of(2)) == [Outcome.STORED]


async def test_a_held_ledger_makes_no_store_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the tier's time is: for a store that is late the tier is bypassed, by loads too."""
    monkeypatch.setattr(bytes_ledger, "_LOCK_S", 3600.0)
    async with opened(tmp_path, timeout_s=4) as backend:
        with (tmp_path / "ledger").open("r+") as ledger:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            assert await store(backend, keys_of(1)) == [Outcome.REFUSED]


async def test_a_held_ledger_refuses_stores(tmp_path: Path) -> None:
    """Who locks the ledger for good stops stores, and switches no limit off."""
    async with opened(tmp_path) as backend:
        with (tmp_path / "ledger").open("r+") as ledger:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            assert await store(backend, keys_of(1)) == [Outcome.REFUSED]
        assert await store(backend, keys_of(1)) == [Outcome.STORED]


async def test_what_is_no_file_is_corrupt_and_never_waited_for(tmp_path: Path) -> None:
    """A FIFO, a link or a socket under a block's name is no hit and stops no thread; a store replaces it."""
    async with opened(tmp_path, num_threads=1) as backend:
        keys = keys_of(1, 2, 3, 4)
        await store(backend, keys)
        fifo, link, listening, _ = (file_of(tmp_path, key) for key in keys)
        target = tmp_path / "target"
        link.rename(target)
        os.utime(target, ns=(0, 0))
        link.symlink_to(target)
        fifo.unlink()
        os.mkfifo(fifo)
        listening.unlink()
        with socket.socket(socket.AF_UNIX) as sock, contextlib.chdir(listening.parent):
            sock.bind(listening.name)
        assert await load(backend, keys) == [Outcome.CORRUPT] * 3 + [Outcome.HIT]
        assert await backend.lookup(keys) == [Outcome.MISS] * 3 + [Outcome.HIT]
        assert target.stat().st_mtime_ns == 0
        assert await store(backend, keys) == [Outcome.STORED] * 4
        assert await load(backend, keys) == [Outcome.HIT] * 4
        assert target.stat().st_mtime_ns == 0


@pytest.mark.parametrize("depth", range(5))
async def test_no_link_leads_out(tmp_path: Path, depth: int) -> None:
    """Where a folder is a link to somewhere else nothing is written, read, dated or deleted there."""
    root, outside = tmp_path / "kv", tmp_path / "outside"
    (key,) = keys_of(1)
    async with opened(root) as backend:
        await store(backend, [key])
        parts = file_of(root, key).relative_to(root).parts
        folder = root.joinpath(*parts[: depth + 1])
        folder.rename(outside)
        folder.symlink_to(outside)
        held = outside.joinpath(*parts[depth + 1 :])
        os.utime(held, ns=(0, 0))
        assert await load(backend, [key]) == [Outcome.MISS]
        with pytest.raises(BackendUnavailableError, match="Not a directory"):
            await store(backend, [key])
        await backend.delete([key])
        await backend.sweep()
        assert files_in(outside) == {held}
        assert held.stat().st_mtime_ns == 0
    assert await SharedFSBackend.delete_tenant(backend.settings, b"") == 0
    assert files_in(outside) == {held}


@pytest.mark.parametrize("name", ["sweeper.lock", "ledger"])
async def test_a_planted_link_is_not_opened(tmp_path: Path, name: str) -> None:
    """A link in the place of a file of ours makes opening fail, and what it leads to stays as it is."""
    root, victim = tmp_path / "kv", tmp_path / "victim"
    root.mkdir()
    victim.write_text("precious")
    (root / name).symlink_to(victim)
    with open_context() as context, pytest.raises(ConfigurationError, match=name):
        await backend_at(root).open(context)
    assert victim.read_text() == "precious"


def modes_in(path: Path) -> set[tuple[bool, int]]:
    """Return the modes of folders, with True, and of files."""
    return {(each.is_dir(), each.stat().st_mode & 0o777) for each in path.rglob("*")}


async def test_folders_are_closed_to_strangers(tmp_path: Path) -> None:
    """Whatever the umask, only the owner may enter a folder or read a file."""
    before = os.umask(0)
    try:
        async with opened(tmp_path / "kv") as backend:
            await store(backend, keys_of(1))
    finally:
        os.umask(before)
    assert modes_in(tmp_path) == {(True, 0o700), (False, 0o600)}


async def test_closing_in_a_stall_is_quiet(tmp_path: Path) -> None:
    """Calls that end after the tier was closed, and whoever waited for them has gone, are complained of nowhere."""
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    backend, stall = backend_at(tmp_path), StalledWorkers()
    await backend.open(BackendContext(GROUPS, lambda _: stall, time.monotonic))
    stall.is_stalled = True
    calls = [asyncio.ensure_future(call) for call in (store(backend, keys_of(1, 2)), load(backend, keys_of(1, 2)))]
    for _ in range(10):
        await asyncio.sleep(0)
    assert stall.waiting
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await backend.aclose()
    stall.fail()
    for _ in range(100):
        await asyncio.sleep(0)
    stall.waiting.clear()
    del calls, call
    gc.collect()
    assert not complaints


class StalledWorkers:
    """Runs calls at once, until they are to stall."""

    def __init__(self) -> None:
        self.is_stalled = False
        self.waiting: list[asyncio.Future[Any]] = []

    def run(self, function: Callable[..., Any], *args: object) -> "asyncio.Future[Any]":
        """Run a call, or keep it waiting."""
        future = asyncio.get_running_loop().create_future()
        if self.is_stalled:
            self.waiting.append(future)
        else:
            future.set_result(function(*args))
        return future

    def begin_each(self, calls: Sequence[Callable[[], Any]], then: Callable[[Callable[[], list[Any]]], object]) -> None:
        """Run calls, or keep them waiting."""
        asyncio.ensure_future(ended(*[self.run(call) for call in calls])).add_done_callback(
            lambda each: then(each.result)
        )

    def fail(self) -> None:
        """End what waits, as a dead server does in the end."""
        for future in self.waiting:
            if not future.done():
                future.set_exception(OSError(5, "Input/output error"))


async def test_stale_temporary_files_are_deleted(tmp_path: Path) -> None:
    """What a dead writer has left, or a killed opening in the root, goes after ten minutes; no younger one does."""
    clock = Clock()
    async with opened(tmp_path, clock) as backend:
        await store(backend, keys_of(1))
        places = (file_of(tmp_path, block_key(1)).parent, tmp_path)
        olds, news = ([place / f".{letter * 32}.tmp" for place in places] for letter in "ab")
        for each in (*olds, *news):
            each.write_bytes(b"half" if each.parent != tmp_path else b"")
        clock.now_ns = news[0].stat().st_mtime_ns + 300 * 10**9
        for old in olds:
            os.utime(old, ns=(0, clock.now_ns - 601 * 10**9))
        await backend.sweep()
        await backend.sweep()
        assert files_in(tmp_path) == {file_of(tmp_path, block_key(1)), *news}


async def test_temporary_files_of_dead_writers_push_out_no_records(tmp_path: Path) -> None:
    """A writer that crashes again and again fills the directory with what goes before any block does."""
    clock = Clock()
    async with opened(tmp_path, clock, capacity=10 * RECORD) as backend:
        keys = keys_of(*range(8))
        await store(backend, keys)
        for n in range(5):
            half = file_of(tmp_path, keys[0]).parent / f".{n:032}.tmp"
            half.write_bytes(bytes(RECORD))
            os.utime(half, ns=(0, clock.now_ns - 120 * 10**9))
        await backend.sweep()
        assert files_in(tmp_path) == {file_of(tmp_path, key) for key in keys}


async def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """A sweep touches no file that this backend cannot have made, wherever it lies and however old it is."""
    async with opened(tmp_path, capacity=2 * RECORD) as backend:
        await store(backend, keys_of(1))
        folder = file_of(tmp_path, block_key(1)).parent
        foreign = {tmp_path / "notes.txt", tmp_path / ("a" * 64), folder / "README", folder / "x.tmp"}
        for file in foreign:
            file.write_bytes(bytes(100_000))
            os.utime(file, ns=(0, 0))
        await store(backend, keys_of(2, 3, 4))
        await backend.sweep()
        assert foreign <= files_in(tmp_path)


async def test_empty_folders_are_removed_and_made_again(tmp_path: Path) -> None:
    """Models that nobody uses leave no folders behind."""
    clock = Clock()
    async with opened(tmp_path, clock, capacity=400 * RECORD) as backend:
        keys, others = keys_of(*range(40)), [block_key(n, 1) for n in range(400)]
        await store(backend, keys)
        await backend.sweep()
        clock.now_ns += DAY_NS
        await store(backend, others)
        await backend.sweep()
        assert not (tmp_path / keys[0].namespace.fingerprint.hex()).exists()
        assert await store(backend, keys[:1]) == [Outcome.STORED]


async def test_a_writer_that_was_taken_for_dead_drops_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep has deleted its file and counts its bytes no more: written again they would be beyond the limit."""
    replace_file, num_replaced = os.replace, 0

    def replace_late(temporary: str, name: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        nonlocal num_replaced
        num_replaced += 1
        if num_replaced == 1:
            os.unlink(temporary, dir_fd=src_dir_fd)
        replace_file(temporary, name, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "replace", replace_late)
    async with opened(tmp_path, capacity=4 * RECORD) as backend:
        with pytest.raises(BackendUnavailableError, match="taken for dead: do clocks differ"):
            await store(backend, keys_of(1))
        outcomes = await store(backend, keys_of(2, 3, 4, 5))
        assert outcomes.count(Outcome.STORED) == num_replaced - 1 == 3
        await backend.sweep()
        assert len(files_in(tmp_path)) <= 4


async def test_space_is_left_free(tmp_path: Path) -> None:
    """Nothing is written to a filesystem that has less free space than it is to have."""
    async with opened(tmp_path, min_free_fraction=0.999_999) as backend:
        assert await store(backend, keys_of(1, 2)) == [Outcome.REFUSED] * 2
        assert not files_in(tmp_path)


class SharedDisk:
    """A filesystem of 1,000 records, of which other programs leave so many free beside what lies in a directory."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_free = 1000
        self._path = path
        monkeypatch.setattr(os, "statvfs", self._statvfs)

    def _statvfs(self, _: object) -> os.statvfs_result:
        num_free = self.num_free - len(files_in(self._path))
        return os.statvfs_result((RECORD, RECORD, 1000, 0, num_free, 0, 0, 0, 0, 255))


@pytest.mark.parametrize(
    ("num_blocks", "num_free", "num_left"),
    [(40, 149, 40), (40, 100, 40), (40, 98, 28), (40, 61, 0), (300, 98, 248)],
    ids=["enough is free", "just enough", "a small tier", "not enough without it", "a large tier"],
)
async def test_a_sweep_leaves_what_helps_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: int, num_free: int, num_left: int
) -> None:
    """With too little free some goes for what comes next: a twentieth of the filesystem, or of the tier a quarter."""
    disk, keys = SharedDisk(tmp_path, monkeypatch), keys_of(*range(num_blocks))
    async with opened(tmp_path, min_free_fraction=0.1) as backend:
        assert await store(backend, keys) == [Outcome.STORED] * num_blocks
        disk.num_free = num_free + num_blocks
        await backend.sweep()
        assert (await backend.lookup(keys)).count(Outcome.HIT) == num_left


async def test_what_is_refused_where_enough_is_free_has_room_made_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If what lies there is enough for that: else all of it would go for nothing."""
    disk, keys = SharedDisk(tmp_path, monkeypatch), keys_of(*range(100))
    async with opened(tmp_path, min_free_fraction=0.1) as backend:
        assert await store(backend, keys[:40]) == [Outcome.STORED] * 40
        disk.num_free = 103 + 40
        await backend.sweep()
        assert await store(backend, keys[40:90]) == [Outcome.REFUSED] * 50
        await backend.sweep()  # after the one that it has asked for, or in its place
        assert await backend.lookup(keys[:40]) == [Outcome.HIT] * 40
        with fail_after(60):
            while Outcome.REFUSED in await store(backend, keys[90:98]):
                await checkpoint()
        assert (await backend.lookup(keys)).count(Outcome.HIT) == 40 - (5 + 10) + 8


async def test_what_no_sweep_would_help_keeps_no_room_from_what_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of more than there can be room for is refused, again and again, and the smaller one beside it is not."""
    disk, keys = SharedDisk(tmp_path, monkeypatch), keys_of(*range(100))
    async with opened(tmp_path, min_free_fraction=0.1) as backend:
        assert await store(backend, keys[:40]) == [Outcome.STORED] * 40
        disk.num_free = 103 + 40
        await backend.sweep()
        for has_room in (False, True):
            assert await store(backend, keys[40:90]) == [Outcome.REFUSED] * 50
            assert await store(backend, keys[90:98]) == [Outcome.STORED if has_room else Outcome.REFUSED] * 8
            await backend.sweep()
        assert (await backend.lookup(keys)).count(Outcome.HIT) == 40 - (5 + 10) + 8


async def test_a_prefix_costs_few_questions(tmp_path: Path) -> None:
    """Of a thousand keys at most 45 are looked at, in three rounds."""
    asked = list[int]()

    class Counting(SharedFSBackend):
        async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
            asked.append(len(keys))
            return await super().lookup(keys)

    async with open_backend(Counting({"path": tmp_path, "capacity": "1GiB", "min_free_fraction": 0})) as backend:
        keys = keys_of(*range(1000))
        await store(backend, keys[:10])
        assert await backend.lookup_prefix(keys) == 10
        assert sum(asked) <= 45
        assert len(asked) == 3


async def test_files_that_are_found_at_once_are_looked_for_in_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To wake a thread for each takes longer; where a server answers slowly, each is asked for by its own, again."""
    now_s, takes_s, shares, look = [0.0], [1e-6], list[int](), files.which_exist

    def looked(root: str, keys: Sequence[BlockKey]) -> list[Outcome]:
        shares.append(len(keys))
        now_s[0] += takes_s[0] * len(keys)
        return look(root, keys)

    monkeypatch.setattr(files, "which_exist", looked)
    async with opened(tmp_path) as backend:
        monkeypatch.setattr(backend, "_clock", lambda: now_s[0])
        keys = keys_of(*range(8))
        await store(backend, keys[:4])

        async def asked() -> list[int]:
            shares.clear()
            assert await backend.lookup(keys) == [Outcome.HIT] * 4 + [Outcome.MISS] * 4
            return shares

        assert await asked() == [1] * 8, "not known yet"
        assert await asked() == [8]
        takes_s[0] = 1e-3
        for _ in range(100):
            await asked()
        assert shares == [1] * 8


@pytest.mark.parametrize("num_bytes", [100, 8192, 10240])
@pytest.mark.parametrize("where", ["", "/dev/shm"])  # noqa: S108 - a tmpfs
async def test_how_files_are_moved_shows_in_none(tmp_path: Path, where: str, num_bytes: int) -> None:
    """Whether or not by direct I/O, in whole pages or not, a file is the record, and every process reads it."""
    with tempfile.TemporaryDirectory(dir=where or tmp_path) as folder:
        root, keys = Path(folder, "kv"), keys_of(1, 2)
        async with opened(root) as one, opened(root, direct="never") as other:
            for writer, key in ((one, keys[0]), (other, keys[1])):
                block = make_block(os.urandom(num_bytes), key)
                assert await writer.write([key], [block.read_only()]) == [Outcome.STORED]
                assert file_of(root, key).read_bytes() == bytes(block)
                for reader in (one, other):
                    into = Block.empty(num_bytes)
                    assert await reader.read([key], [into]) == [Outcome.HIT]
                    assert bytes(into) == bytes(block)
            assert len(files_in(root)) == 2


@pytest.mark.parametrize("direct", ["auto", "always", "never"])
async def test_whole_pages_pass_by_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: str) -> None:
    """All but what is behind the last one when it is written, where the filesystem can; with ``never`` none."""
    moved: list[tuple[str, int, bool]] = []

    def watch(name: str) -> None:
        call = getattr(os, name)

        def move(file: int, parts: Sequence[memoryview]) -> int:
            moved.append((name, sum(map(len, parts)), bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)))
            return int(call(file, parts))

        monkeypatch.setattr(os, name, move)

    (key,) = keys_of(1)
    is_direct = direct != "never"
    if is_direct and direct_problem(str(tmp_path), "ledger", is_read_only=False):
        pytest.skip("no O_DIRECT here: set TMPDIR to a folder on a disk")
    async with opened(tmp_path, direct=direct) as backend:
        says = {"io": "direct", "io_reason": ""} if is_direct else {"io": "buffered", "io_reason": "direct='never'"}
        assert backend.describe() == says
        watch("writev")
        watch("readv")
        await backend.write([key], [make_block(bytes(8192 + 100), key)])
        await backend.read([key], [Block.empty(8192 + 100)])
    written = [("writev", 12288, True), ("writev", 100, False)] if is_direct else [("writev", 12388, False)]
    assert moved == [*written, ("readv", 16384, is_direct)]


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_filesystem_without_direct_io_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, read_only: bool
) -> None:
    """An event says why; who wants it always is told at opening, and no file is left of trying."""
    keys = keys_of(1)
    async with opened(tmp_path) as backend:
        await store(backend, keys)
    there = files_in(tmp_path)
    refuse_direct_io(monkeypatch)
    caplog.set_level("INFO")
    caplog.clear()
    async with opened(tmp_path, read_only=read_only) as backend:
        assert caplog.text.count("shared_fs.not_direct") == 1
        assert backend.describe() == {"io": "buffered", "io_reason": "Invalid argument"}
        assert await load(backend, keys) == [Outcome.HIT]
        assert files_in(tmp_path) == there
    with pytest.raises(ConfigurationError, match="no direct I/O"):
        async with opened(tmp_path, direct="always", read_only=read_only):
            pass
    assert files_in(tmp_path) == there


async def test_a_file_that_direct_io_is_refused_for_goes_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some filesystems refuse it for some files, and all for memory that is not aligned. No temporary file stays."""
    memory = memoryview(bytearray(4096 + SIZE + 1))[1:]
    crooked = Block(memory[:4096], memory[4096:], SIZE)
    first, second = keys_of(1, 2)
    block = make_block(os.urandom(SIZE), first)
    crooked.fill(bytes(block))
    async with opened(tmp_path) as backend:
        assert await backend.write([first], [crooked]) == [Outcome.STORED]
        memory[:] = bytes(len(memory))
        assert await backend.read([first], [crooked]) == [Outcome.HIT]
        assert bytes(crooked) == bytes(block)
        refuse_direct_io(monkeypatch)
        assert await store(backend, [second]) == [Outcome.STORED]
        assert await load(backend, [first, second]) == [Outcome.HIT] * 2
        assert files_in(tmp_path) == {file_of(tmp_path, first), file_of(tmp_path, second)}


def refuse_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files not be opened so, as Linux does it: one that is to be made is made all the same."""
    open_file = os.open

    def refuses(name: str, flags: int, *args: int, **kwargs: int) -> int:
        file = open_file(name, flags & ~os.O_DIRECT, *args, **kwargs)
        if flags & os.O_DIRECT:
            os.close(file)
            raise OSError(errno.EINVAL, "Invalid argument")
        return file

    opener = Opener(os.O_RDONLY)
    opener.is_there = False
    monkeypatch.setattr(files, "_OPENERS", {0: opener, os.O_DIRECT: opener})
    monkeypatch.setattr(os, "open", refuses)


@pytest.mark.parametrize("read_only", [True, False])
async def test_a_filesystem_of_larger_blocks_is_known_where_no_page_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, read_only: bool
) -> None:
    """As it is only read, or full: one that has direct I/O of 16 KiB alone says nothing as an empty file is read."""
    async with opened(tmp_path) as backend:
        await store(backend, keys := keys_of(1))
    readv = os.readv

    def read_in_large_blocks(file: int, parts: Sequence[memoryview]) -> int:
        is_direct = bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
        if is_direct and os.fstat(file).st_size and sum(map(len, parts)) % 16384:
            raise OSError(errno.EINVAL, "Invalid argument")
        return readv(file, parts)

    def take_nothing(file: int, parts: Sequence[memoryview]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "readv", read_in_large_blocks)
    monkeypatch.setattr(os, "writev", take_nothing)
    async with opened(tmp_path, read_only=read_only) as backend:
        assert backend.describe() == {"io": "buffered", "io_reason": "Invalid argument"}
        assert await load(backend, keys) == [Outcome.HIT]
    with pytest.raises(ConfigurationError, match="no direct I/O"):
        async with opened(tmp_path, direct="always", read_only=read_only):
            pass
    (tmp_path / "ledger").unlink()
    async with opened(tmp_path, read_only=True) as backend:
        assert await load(backend, keys) == [Outcome.HIT]


async def test_what_is_moved_in_parts_is_moved_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem may take or give less than it is asked for at once."""
    readv = os.readv
    monkeypatch.setattr(os, "writev", lambda file, parts: os.write(file, parts[0][:5000]))
    monkeypatch.setattr(os, "readv", lambda file, parts: readv(file, [parts[0][:3000]]))
    async with opened(tmp_path) as backend:
        (key,) = keys_of(1)
        block, into = make_block(os.urandom(SIZE), key), Block.empty(SIZE)
        assert await backend.write([key], [block]) == [Outcome.STORED]
        assert file_of(tmp_path, key).read_bytes() == bytes(block)
        assert await backend.read([key], [into]) == [Outcome.HIT]
        assert bytes(into) == bytes(block)


async def test_a_folder_that_goes_between_two_blocks_is_made_again(tmp_path: Path) -> None:
    """A sweep may remove what a call has open: of the first block, here, with all that was in it."""
    first, second = keys_of(1, 2)
    probe(str(tmp_path))

    class Swept(list[Work]):
        def __iter__(self) -> Iterator[Work]:
            for work in super().__iter__():
                yield work
                shutil.rmtree(tmp_path / first.namespace.path)

    share = Swept(Work(key, make_block(bytes(SIZE), key), 1) for key in (first, second, second))
    assert write_records(str(tmp_path), share, 0) == [Outcome.STORED] * 3
    assert not files_in(tmp_path)


async def test_every_call_gives_back_what_it_opens(tmp_path: Path) -> None:
    """Files, and folders of several tenants, whether they are there or not, or are what they should not be."""
    settings = {"path": tmp_path, "capacity": 20 * RECORD, "min_free_fraction": 0}
    keys = [*keys_of_salt(b"a", *range(4)), *keys_of_salt(b"b", *range(4))]
    async with opened(tmp_path, capacity=20 * RECORD, num_threads=1) as backend:
        for _ in range(2):
            await store(backend, keys)
            file_of(tmp_path, keys[0]).unlink()
            file_of(tmp_path, keys[1]).write_bytes(b"short")
            file_of(tmp_path, keys[2]).unlink()
            file_of(tmp_path, keys[2]).mkdir()
            outcomes = await load(backend, [*keys, *keys_of(7)])
            assert outcomes[:3] == [Outcome.MISS, Outcome.CORRUPT, Outcome.FAILED]
            await backend.lookup(keys)
            await store(backend, keys)
            await backend.sweep()
            await backend.delete([*keys[:2], *keys[3:]])
            await sweep(settings)
            await SharedFSBackend.delete_tenant(settings, "nobody")
            file_of(tmp_path, keys[2]).rmdir()
            assert num_open_in(tmp_path) == 0


async def test_closing_gives_back_what_was_not_written(tmp_path: Path) -> None:
    """The ledger then says just what is there, and nothing of the tier runs on."""
    tasks = asyncio.all_tasks()
    async with opened(tmp_path, capacity=2000 * RECORD) as backend:
        await store(backend, keys_of(1, 2, 3))
    books = ByteLedger(str(tmp_path), 1, time.time_ns).read()
    assert books is not None
    assert books.total == 3 * RECORD
    assert [num_bytes for num_bytes, _ in books.writers.values()] == [0]
    await until(lambda: asyncio.all_tasks() <= tasks)


async def test_what_cannot_be_deleted_keeps_no_others(tmp_path: Path) -> None:
    """It is said that something was not; all else of the call is gone."""
    keys = keys_of(*range(4))
    async with opened(tmp_path / "kv", num_threads=1) as backend:
        await store(backend, keys)
        file = tmp_path / "kv" / files.path_of(keys[1])
        file.unlink()
        file.mkdir()
        with pytest.raises(BackendUnavailableError, match="directory"):
            await backend.delete(keys)
        assert await backend.lookup(keys) == [Outcome.MISS] * 4
        assert file.exists()


async def test_a_file_that_cannot_be_deleted_keeps_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep makes room all the same, and a tenant's other blocks are deleted; both say that one could not be."""
    keys, unlink, clock = keys_of(*range(4)), os.unlink, Clock()

    def refuse(name: str, *, dir_fd: int | None = None) -> None:
        if name == keys[0].hash.hex():
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), name)
        unlink(name, dir_fd=dir_fd)

    async with opened(tmp_path, clock) as backend:
        for key in keys:
            clock.now_ns += DAY_NS
            await store(backend, [key])
    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(BackendUnavailableError, match="not permitted"):
        await sweep({"path": tmp_path, "capacity": 3 * RECORD, "min_free_fraction": 0})
    async with opened(tmp_path, clock) as backend:
        assert await backend.lookup(keys) == [Outcome.HIT, Outcome.MISS, Outcome.HIT, Outcome.HIT]
        with pytest.raises(BackendUnavailableError, match="not permitted"):
            await SharedFSBackend.delete_tenant(backend.settings, "")
        assert await backend.lookup(keys) == [Outcome.HIT] + [Outcome.MISS] * 3


async def test_a_folder_that_cannot_be_opened_keeps_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant's other blocks are deleted, and those that were found before; both say which folder it was."""
    keys, open_ = keys_of(*range(4)), os.open
    async with opened(tmp_path) as backend:
        for by_tenant in (True, False):
            await store(backend, keys)
            async with SharedFSBackend.inventory(backend.settings) as inventory:
                found = [each async for some in inventory.found() for each in some]
                closed = Path(found[0].where).parent

                def refuse(
                    path: str | Path,
                    flags: int,
                    mode: int = 0o777,
                    *,
                    dir_fd: int | None = None,
                    name: str = closed.name,
                ) -> int:
                    if Path(path).name == name:
                        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
                    return open_(path, flags, mode, dir_fd=dir_fd)

                with monkeypatch.context() as patched:
                    patched.setattr(os, "open", refuse)
                    with pytest.raises(BackendUnavailableError, match=f"{closed}: Permission denied"):
                        await (
                            SharedFSBackend.delete_tenant(backend.settings, "")
                            if by_tenant
                            else inventory.delete(found)
                        )
            left = [file_of(tmp_path, key) for key in keys if file_of(tmp_path, key).exists()]
            assert {each.parent for each in left} == {closed}
            assert len(left) < len(keys)


async def test_a_filesystem_that_fails_at_once_is_said_as_later_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has a tenant deleted need not know what a system raises."""

    def fail(_: str) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(sweeper, "holds_blocks", fail)
    with pytest.raises(BackendUnavailableError, match=f"{tmp_path}: Input/output error"):
        await SharedFSBackend.delete_tenant({"path": tmp_path, "capacity": "1MiB"}, "ann")


async def test_a_directory_that_is_no_more(tmp_path: Path) -> None:
    """There is nothing in it; nothing is stored, and nobody knows what will be there once it is back: both are said."""
    path = tmp_path / "kv"
    async with opened(path) as backend:
        await store(backend, keys_of(1))
        shutil.rmtree(path)
        assert await load(backend, keys_of(1)) == [Outcome.MISS]
        assert await backend.lookup(keys_of(1)) == [Outcome.MISS]
        with pytest.raises(BackendUnavailableError, match="is the filesystem mounted"):
            await backend.delete(keys_of(1))
        with pytest.raises(BackendUnavailableError, match="is the filesystem mounted"):
            await store(backend, keys_of(2))
        with pytest.raises(BackendUnavailableError, match="No such file"):
            await backend.sweep()
        with pytest.raises(BackendUnavailableError, match="is the filesystem mounted"):
            await SharedFSBackend.delete_tenant(backend.settings, "ann")
    assert not path.exists()


async def test_a_directory_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    """An unmounted filesystem is unavailable, not an empty folder to fill; when it is back it is used again."""
    path, elsewhere = tmp_path / "kv", tmp_path / "elsewhere"
    clock = Clock()
    async with opened(path, clock) as backend:
        await store(backend, keys_of(1))
        path.rename(elsewhere)
        path.mkdir()
        with pytest.raises(BackendUnavailableError, match="is the filesystem mounted"):
            await store(backend, keys_of(1, 2))
        assert await load(backend, keys_of(1)) == [Outcome.MISS]
        assert not list(path.iterdir())
        path.rmdir()
        elsewhere.rename(path)
        assert await store(backend, keys_of(2)) == [Outcome.STORED]
        assert await load(backend, keys_of(1, 2)) == [Outcome.HIT] * 2


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o770])
async def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    """Who may make a folder there could have forged records served; to read alone is no better."""
    path = tmp_path / "kv"
    async with opened(path) as backend:
        await store(backend, keys_of(1))
    path.chmod(mode)
    for read_only in (False, True):
        with open_context() as context, pytest.raises(ConfigurationError, match=f"{mode:04o}, others may write to it"):
            await backend_at(path, read_only=read_only).open(context)
    path.chmod(0o755)
    async with opened(path) as backend:
        assert await load(backend, keys_of(1)) == [Outcome.HIT]


async def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    """It was made before us by somebody who knew where; nothing is made in it."""
    if os.geteuid():
        pytest.skip("no right to give files away: run as root")
    path = tmp_path / "kv"
    path.mkdir(0o700)
    os.chown(path, 65534, 65534)
    with open_context() as context, pytest.raises(ConfigurationError, match="belongs to user 65534"):
        await backend_at(path).open(context)
    assert not list(path.iterdir())


@pytest.mark.parametrize("how", ["no folder", "an empty folder"])
async def test_what_is_evicted_while_the_filesystem_is_away_stays_away(tmp_path: Path, how: str) -> None:
    """It is deleted once it is back, and found by nobody here until then; to delete a tenant is no success either."""
    path, elsewhere, engine, keys = tmp_path / "kv", tmp_path / "elsewhere", AnyEngine(), prompt(8, salt="ann")
    tier = {"medium": "shared_fs", "path": path, "capacity": "64MiB", "min_free_fraction": 0}
    async with open_any(engine, tier) as kv:
        await kv.store(keys, engine.fill(keys, range(8)))
        await kv.flush()
        path.rename(elsewhere)
        if how == "an empty folder":
            path.mkdir()
        await kv.evict(keys)
        with pytest.raises(BackendUnavailableError, match="is the filesystem mounted"):
            await SharedFSBackend.delete_tenant(tier, "ann")
        assert not await kv.drain(timeout_s=1)
        if how == "an empty folder":
            path.rmdir()
        elsewhere.rename(path)
        assert (await kv.lookup(keys)).num_blocks == 0
        await until(lambda: not [each for each in path.rglob("*") if each.is_file() and len(each.name) == 64])
        assert (await kv.lookup(keys)).num_blocks == 0
        await until(lambda: kv.stats().transfers == 0)
        assert await kv.drain()


async def test_a_cut_file_is_corrupt(tmp_path: Path) -> None:
    """A file that lost its end, as by a crash of the server, is never a hit, and storing repairs it."""
    async with opened(tmp_path) as backend:
        keys = keys_of(1, 2)
        await store(backend, keys)
        with file_of(tmp_path, keys[0]).open("r+b") as file:
            file.truncate(5000)
        assert await load(backend, keys) == [Outcome.CORRUPT, Outcome.HIT]
        await store(backend, keys)
        assert await load(backend, keys) == [Outcome.HIT, Outcome.HIT]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_a_read_is_never_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Whatever the filesystem says as a file is read or closed: no reader wants room, and no answer of it says so."""
    async with opened(tmp_path) as backend:
        await store(backend, keys_of(1, 2))

        def fail(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "readv", fail)
        with pytest.raises(BackendUnavailableError, match=os.strerror(number)):
            await load(backend, keys_of(1, 2))
        assert await load(backend, keys_of(1, 3)) == [Outcome.FAILED, Outcome.MISS]


async def test_files_that_cannot_be_read_fail_one_by_one(tmp_path: Path) -> None:
    """What is wrong with one file leaves the others of its batch alone; if all fail, the tier has."""
    async with opened(tmp_path) as backend:
        keys = keys_of(1, 2)
        await store(backend, keys[1:])
        file_of(tmp_path, keys[0]).mkdir(parents=True)
        assert "last_error" not in backend.describe()
        for call, well in ((load, Outcome.HIT), (store, Outcome.STORED)):
            backend.last_error = ""
            assert await call(backend, keys) == [Outcome.FAILED, well]
            assert "Is a directory" in str(backend.describe()["last_error"])
        with pytest.raises(BackendUnavailableError):
            await load(backend, keys[:1])
        assert not {file for file in files_in(tmp_path) if file.suffix == ".tmp"}


async def test_a_closed_tier_says_so(tmp_path: Path) -> None:
    """Calls after closing are an error of ours."""
    async with opened(tmp_path) as backend:
        pass
    for call in (backend.lookup(keys_of(1)), load(backend, keys_of(1)), store(backend, keys_of(1))):
        with pytest.raises(ClosedError):
            await call


@pytest.mark.parametrize(
    ("folder", "settings", "message"),
    [
        ("no/such", {}, "No such file or directory; mount it, or make the directory above it"),
        ("file", {}, "/file: it is no directory"),
        ("file", {"read_only": True}, "/file: it is no directory"),
        ("file/kv", {}, "/file/kv: Not a directory"),
        ("kv", {"capacity": 5000}, "5000 bytes is below one block of 106496"),
    ],
)
async def test_what_can_never_work_is_refused_at_opening(
    tmp_path: Path, folder: str, settings: dict[str, object], message: str
) -> None:
    """A directory that cannot be made, or a capacity too small for a block, is an error that says so."""
    (tmp_path / "file").touch()
    with open_context() as context, pytest.raises(ConfigurationError, match=message):
        await backend_at(tmp_path / folder, None, **settings).open(context)


@pytest.mark.parametrize(("read_only", "advice"), [(False, "can write to, or read_only=true"), (True, "read it")])
async def test_a_directory_that_may_not_be_used_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read_only: bool,  # noqa: FBT001 - a case
    advice: str,
) -> None:
    """And not a file of a random name that was only tried in it; and what would help is said."""

    def refuse(root: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"{root}/.33fd13a9.tmp")

    for name in ("probe", "probe_reading"):
        monkeypatch.setattr(files, name, refuse)
    with open_context() as context, pytest.raises(ConfigurationError) as raised:
        await backend_at(tmp_path, None, read_only=read_only).open(context)
    assert str(raised.value).startswith(f"{tmp_path}: Permission denied; ")
    assert str(raised.value).endswith(advice)
    assert f"user {os.geteuid()}" in str(raised.value)


@pytest.mark.parametrize("settings", [{}, {"path": "/kv"}, {"path": "/kv", "capacity": 1, "min_free_fraction": 1}])
def test_settings_are_checked(settings: dict[str, object]) -> None:
    """Path and capacity are needed, and a fraction is less than all."""
    with pytest.raises(ConfigurationError):
        SharedFSBackend.Settings.model_validate(settings)


async def test_reading_only_leaves_no_trace(tmp_path: Path) -> None:
    """A ``read_only`` tier finds and reads; it makes, renews, removes and sweeps nothing, also over its capacity."""

    def seen() -> list[tuple[str, int, int]]:
        paths = sorted(tmp_path.rglob("*"))
        return [(str(path), path.lstat().st_mtime_ns, path.lstat().st_size) for path in paths]

    path, clock = tmp_path / "kv", Clock()
    with open_context() as context, pytest.raises(ConfigurationError, match="is missing"):
        await backend_at(path, read_only=True).open(context)
    assert not path.exists()
    async with opened(path, clock) as writer:
        await store(writer, keys_of(1, 2))
    before = seen()
    clock.now_ns += DAY_NS
    async with opened(path, clock, read_only=True, capacity=RECORD + 4096, sweep_interval_s=0.01) as backend:
        assert await load(backend, keys_of(1, 2, 3)) == [Outcome.HIT, Outcome.HIT, Outcome.MISS]
        assert await backend.lookup(keys_of(1, 3)) == [Outcome.HIT, Outcome.MISS]
        with pytest.raises(ConfigurationError, match="read_only"):
            await backend.sweep()
    assert seen() == before


async def test_a_tenant_is_deleted_and_no_other(tmp_path: Path) -> None:
    """Those of one salt go, whatever their model; others stay."""
    anns, bobs = ([replace_salt(key, salt) for key in keys_of(1, 2)] for salt in ("ann", "bob"))
    async with opened(tmp_path) as backend:
        await store(backend, [*anns, *bobs])
        assert await SharedFSBackend.delete_tenant(backend.settings, "nobody") == 0
        assert await SharedFSBackend.delete_tenant(backend.settings, "ann") == 2
        assert await load(backend, anns) == [Outcome.MISS] * 2
        assert await load(backend, bobs) == [Outcome.HIT] * 2


def replace_salt(key: BlockKey, salt: str) -> BlockKey:
    """Return the key of another tenant's block of the same hash."""
    return BlockKey(replace(key.namespace, salt=salt_digest(salt)), key.hash, key.position)
