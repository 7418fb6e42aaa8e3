"""`SharedFSBackend`: a file per block in a directory that many engines on many hosts share.

    sweeper.lock                                             made when a cache first opens the directory
    <fingerprint>/<epoch>/<shard>/<salt>/<abc>/<hash>        one record; <abc> are the first digits of its hash
    <fingerprint>/<epoch>/<shard>/<salt>/<abc>/.<id>.tmp     one that is being written

A file gets its name when it is whole and closed, by a rename, so readers need no lock and writers of one key do not
meet. Its mtime says when it was last used; whoever writes also sweeps, oldest first (`shared_fs_sweeper`).
"""
# ruff: noqa: PTH102, PTH103, PTH108, PTH116, PTH120 - a stat(2) or open(2) per block: making a Path would cost as much again

import asyncio
import contextlib
import errno
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import aiofiles
import aiofiles.os
import structlog
from aiofiles.threadpool.binary import AsyncFileIO
from pydantic import ByteSize, Field

from tiered_kv.backend import Backend, BackendContext, Block, Outcome, TierSettings, Workers, check_lengths
from tiered_kv.errors import BackendUnavailableError, ClosedError, ConfigurationError
from tiered_kv.keys import BlockKey
from tiered_kv_backends.shared_fs_sweeper import FOLDER_DIGITS, LOCK_NAME, Sweeper, Swept

P = ParamSpec("P")
T = TypeVar("T")
_Move = Callable[[BlockKey, Block], Awaitable[Outcome]]

_log = structlog.get_logger("tiered_kv")

_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
"""What says that a file is not there; ESTALE: another host removed or replaced it while it was open here."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NEVER = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP}
"""What opening the directory again would not change."""
_USED_AGAIN_NS = 600 * 10**9
"""How old a file's last use may get before a read renews it: one call in ten minutes, however hot the block is."""
_HEAD_START_NS = 10**6
"""How much longer ago each further block of a prompt counts as used: of a prompt used at once, the tail goes first."""
_FREE_SPACE_AGE_S = 1.0
_SWEEP_AFTER = 1 / 64
"""A process that has written this part of the capacity sweeps, however lately it has."""
_WAIT_AFTER = 1 / 32
"""A process that has written this part of it, and has not been swept behind, writes no more until it is."""


class SharedFSBackend(Backend):
    """Keeps records as files on NFS, Lustre, CephFS or any filesystem with an atomic rename.

    Nothing is forced to the medium and nothing is repaired: a file that a crash of the server has cut is found by its
    length or its checksum, and deleted. The byte limit is kept by sweeping down to nine tenths of it; between two
    sweeps each process adds a 16th of it at most.

    Args:
        settings: See `Settings`.
        wall_clock_ns: What files are dated with; hosts that share a directory should roughly agree on it.
    """

    class Settings(TierSettings):
        """``{"medium": "shared_fs", "path": "/mnt/shared/kv", "capacity": "20TiB"}``."""

        medium: str = "shared_fs"
        path: Path
        """A directory for nothing else, made if need be; its parent has to be there."""
        capacity: ByteSize = Field(gt=0)
        """Bytes of all records together, of every model and host. Where processes disagree, the smallest counts."""
        num_threads: int = Field(default=16, ge=1, le=256)
        """Calls under way at once, in each direction: reads never queue behind writes."""
        min_free_fraction: float = Field(default=0.05, ge=0, lt=1)
        """Part of the filesystem that is left free: nothing is written, and the oldest is deleted, to keep it so."""
        sweep_interval_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
        """How often, at most, a process that writes looks for what to delete, unless it writes much."""

    def __init__(
        self, settings: Settings | Mapping[str, Any] | str, wall_clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self.settings = settings = self.Settings.of(settings)
        self._wall_clock_ns = wall_clock_ns
        self._root = str(settings.path.absolute())
        self._sweeper: Sweeper | None = None

    async def open(self, context: BackendContext) -> None:
        """Make the directory if need be, and try whether it can be written to.

        Raises:
            ConfigurationError: It cannot be written to, or ``capacity`` is too small for one block.
            BackendUnavailableError: The filesystem fails, or does not answer within ``timeout_s``.
        """
        largest = max((shape.stride_bytes for shape in context.groups), default=0)
        if largest > self.settings.capacity:
            raise ConfigurationError(f"a capacity of {self.settings.capacity} bytes for blocks of {largest}")
        n = self.settings.num_threads
        readers, writers = context.workers(n), context.workers(n)
        self._readers, self._writers, self._clerk = _Threads(readers), _Threads(writers), context.workers(1)
        self._read_turns, self._write_turns = asyncio.Semaphore(n), asyncio.Semaphore(n)
        self._clock = context.clock
        self._free_bytes, self._free_bytes_until = 0.0, float("-inf")
        try:
            probe = asyncio.ensure_future(self._writers.run(_probe, self._root))
            await asyncio.wait_for(probe, self.settings.timeout_s)
        except TimeoutError as error:
            raise BackendUnavailableError(f"{self._root} did not answer within {self.settings.timeout_s} s") from error
        except OSError as error:
            kind = ConfigurationError if error.errno in _NEVER | {errno.ENOENT} else BackendUnavailableError
            raise kind(f"{error.filename or self._root}: {error.strerror}") from error
        settings = self.settings
        self._sweeper = Sweeper(self._root, settings.capacity, settings.min_free_fraction, self._wall_clock_ns)
        self._sweeping: asyncio.Future[None] | None = None
        self._written_bytes, self._next_sweep = 0, float("-inf")
        self._sweep_if_due()

    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Say HIT or MISS for each key, by one stat(2) each.

        Raises:
            BackendUnavailableError: The filesystem fails.
        """
        self._check_open()
        paths = [self._path(key) for key in keys]
        share = -(-len(paths) // self.settings.num_threads) or 1
        calls = [self._readers.run(_which_exist, paths[start : start + share]) for start in range(0, len(paths), share)]
        found = await _all(calls)
        if errors := [each for each in found if isinstance(each, Exception)]:
            raise BackendUnavailableError(f"{self._root}: {_text(errors[0])}") from errors[0]
        return list(chain.from_iterable(each for each in found if isinstance(each, list)))

    async def lookup_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Count the leading keys that are there, asking for few at a time: of 1,000 keys 45, in 3 rounds.

        A hole that is not asked for counts as there; reading will tell.

        Raises:
            BackendUnavailableError: The filesystem fails.
        """
        there, not_there = 0, len(keys)  # keys before `there` are, the key at `not_there` is not
        while there < not_there:
            step = -(-(not_there - there) // self.settings.num_threads)
            asked = range(there + step - 1, not_there, step)
            outcomes = await self.lookup([keys[i] for i in asked])
            hits = outcomes.index(Outcome.MISS) if Outcome.MISS in outcomes else len(outcomes)
            there = asked[hits - 1] + 1 if hits else there
            not_there = asked[hits] if hits < len(asked) else not_there
        return there

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Read the files: HIT, MISS, CORRUPT (wrong length) or FAILED each. A hit counts as use.

        Raises:
            BackendUnavailableError: Every file failed.
        """
        return await self._each(self._read_one, keys, into, self._read_turns)

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Write the files: STORED, REFUSED (no room, or the sweeper is behind) or FAILED each.

        Raises:
            BackendUnavailableError: Every file failed, or the directory is gone.
        """
        self._check_open()
        check_lengths(keys, blocks)
        num_bytes = sum(block.num_bytes for block in blocks)
        has_room = await self._has_room(num_bytes)
        if has_room and self._written_bytes < self.settings.capacity * _WAIT_AFTER:
            outcomes = await self._each(self._write_one, keys, blocks, self._write_turns)
            self._written_bytes += num_bytes
            self._free_bytes -= num_bytes
        else:
            outcomes = [Outcome.REFUSED] * len(blocks)
        self._sweep_if_due(is_full=Outcome.REFUSED in outcomes)
        return outcomes

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Unlink the files.

        Raises:
            BackendUnavailableError: The filesystem fails.
        """
        self._check_open()
        results = await _all([self._writers.run(_unlink, self._path(key)) for key in keys])
        if errors := [each for each in results if isinstance(each, Exception)]:
            raise BackendUnavailableError(f"{self._root}: {_text(errors[0])}") from errors[0]

    async def sweep(self) -> Swept | None:
        """Delete what is over the limit, and temporary files that dead writers have left; it also happens by itself.

        Returns:
            What was done; None if another process is at it, or has done it since this one last looked.

        Raises:
            BackendUnavailableError: The filesystem fails.
        """
        sweeper = self._check_open()
        self._next_sweep = self._clock() + self.settings.sweep_interval_s
        written_bytes = self._written_bytes
        try:
            swept = await self._clerk.run(sweeper.sweep)
        except OSError as error:
            raise BackendUnavailableError(f"cannot sweep {self._root}: {_text(error)}") from error
        self._written_bytes -= min(written_bytes, self._written_bytes)
        self._free_bytes_until = float("-inf")
        return swept

    async def aclose(self) -> None:
        """Stop sweeping. Calls still under way end by themselves; nothing else is held."""
        if self._sweeper is not None:
            self._sweeper.stop()
            self._sweeper = None
            if self._sweeping is not None:
                await asyncio.wait(
                    [self._sweeping], timeout=1.0
                )  # it stops at the next file, if the filesystem answers

    def _check_open(self) -> Sweeper:
        if self._sweeper is None:
            raise ClosedError(f"the shared filesystem tier at {self._root} is not open")
        return self._sweeper

    def _path(self, key: BlockKey) -> str:
        digits = key.hash.hex()
        return f"{self._root}/{key.namespace.path}/{digits[:FOLDER_DIGITS]}/{digits}"

    async def _each(
        self, move: _Move, keys: Sequence[BlockKey], blocks: Sequence[Block], turns: asyncio.Semaphore
    ) -> list[Outcome]:
        """Move some files at a time, to their end; if none of them can be moved, the medium has failed."""
        self._check_open()
        check_lengths(keys, blocks)

        async def move_one(key: BlockKey, block: Block) -> Outcome:
            async with turns:  # bounds open files, not only threads
                return await move(key, block)

        moved = await _all([move_one(key, block) for key, block in zip(keys, blocks, strict=True)])
        errors = [each for each in moved if isinstance(each, Exception)]
        if errors and len(errors) == len(moved):
            raise BackendUnavailableError(f"{self._root}: {_text(errors[-1])}") from errors[-1]
        return [each if isinstance(each, Outcome) else Outcome.FAILED for each in moved]

    async def _read_one(self, key: BlockKey, into: Block) -> Outcome:
        path = self._path(key)
        try:
            file = await aiofiles.open(path, "rb", buffering=0, executor=self._readers)
            try:
                return await self._read_file(file, key, into)
            finally:
                await file.close()  # not by `async with`, which closes in a thread that is not ours
        except OSError as error:
            if error.errno in _GONE:
                return Outcome.MISS
            raise

    async def _read_file(self, file: AsyncFileIO, key: BlockKey, into: Block) -> Outcome:
        status = await self._readers.run(os.fstat, file.fileno())
        if status.st_size != into.num_bytes:
            return Outcome.CORRUPT
        for segment in into.segments:
            left = segment
            while left:
                if not (num_bytes := await file.readinto(left)):
                    return Outcome.CORRUPT
                left = left[num_bytes:]
        used_ns = self._used_ns(key)
        if used_ns - status.st_mtime_ns > _USED_AGAIN_NS:
            with contextlib.suppress(OSError):  # the bytes are right, on a filesystem that became read-only too
                await self._readers.run(os.utime, file.fileno(), ns=(used_ns, used_ns))
        return Outcome.HIT

    async def _write_one(self, key: BlockKey, block: Block) -> Outcome:
        path = self._path(key)
        folder = os.path.dirname(path)
        temporary = f"{folder}/.{uuid.uuid4().hex}.tmp"
        try:
            file = await self._create(temporary)
            try:
                for segment in block.segments:
                    left = segment
                    while left:
                        left = left[await file.write(left) :]
                used_ns = self._used_ns(key)
                await self._writers.run(os.utime, file.fileno(), ns=(used_ns, used_ns))
            finally:
                await file.close()  # NFS sends what is left, and says what it could not: only then is the file whole
            await aiofiles.os.replace(temporary, path, executor=self._writers)
        except OSError as error:
            with contextlib.suppress(OSError):  # else the sweeper finds it
                await self._writers.run(_unlink, temporary)
            if error.errno in _FULL:
                return Outcome.REFUSED
            raise
        return Outcome.STORED

    async def _create(self, temporary: str) -> AsyncFileIO:
        for _ in range(3):  # a sweeper may remove the folder again before there is a file in it
            with contextlib.suppress(FileNotFoundError):
                return await aiofiles.open(temporary, "xb", buffering=0, opener=_private, executor=self._writers)
            await self._writers.run(_make_folder, self._root, os.path.dirname(temporary))
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), temporary)

    def _used_ns(self, key: BlockKey) -> int:
        return self._wall_clock_ns() - key.position * _HEAD_START_NS

    async def _has_room(self, num_bytes: int) -> bool:
        """Say whether the filesystem has ``num_bytes`` above what is to be left free; asks at most once a second."""
        if self._clock() >= self._free_bytes_until:
            try:
                self._free_bytes = await self._writers.run(_free_bytes, self._root, self.settings.min_free_fraction)
            except OSError as error:
                raise BackendUnavailableError(f"{self._root}: {_text(error)}") from error
            self._free_bytes_until = self._clock() + _FREE_SPACE_AGE_S
        return num_bytes <= self._free_bytes

    def _sweep_if_due(self, *, is_full: bool = False) -> None:
        """Start sweeping in the background. No timer does: where nothing is written, nothing has to be deleted."""
        wrote_much = self._written_bytes >= self.settings.capacity * _SWEEP_AFTER
        is_due = wrote_much or (is_full and self._written_bytes > 0) or self._clock() >= self._next_sweep
        if is_due and (self._sweeping is None or self._sweeping.done()):
            self._sweeping = asyncio.ensure_future(self._sweep_and_log())

    async def _sweep_and_log(self) -> None:
        try:
            swept = await self.sweep()
        except ClosedError:
            return
        except BackendUnavailableError as error:
            _log.warning("shared_fs.sweep_failed", path=self._root, error=str(error))
        else:
            if swept is not None and (swept.num_deleted or swept.num_temporaries):
                _log.info("shared_fs.swept", path=self._root, **vars(swept))


class _Threads(Executor):
    """The tier's own threads, in the shape that aiofiles wants.

    They are daemons: a call that is stuck on a dead server keeps neither asyncio's default threads nor the
    interpreter's exit waiting.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "asyncio.Future[T]":
        """Run ``function`` in one of the threads."""
        return asyncio.ensure_future(self._workers.run(partial(function, *args, **kwargs)))

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Do the same for `loop.run_in_executor`, which passes an asyncio future on as it is."""
        return cast("Future[T]", self.run(function, *args, **kwargs))


async def _all(calls: Sequence[Awaitable[T]]) -> list[T | Exception]:
    """Wait for every call, and leave them running if this is cancelled: buffers are lent until the last one ends."""
    futures = [asyncio.ensure_future(call) for call in calls]
    if futures:
        await asyncio.wait(futures)
    results: list[T | Exception] = []
    for future in futures:
        error = future.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        results.append(future.result() if error is None else error)
    return results


def _probe(root: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(root, 0o700)
    os.close(os.open(f"{root}/{LOCK_NAME}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    if not os.access(root, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), root)


def _check_mounted(root: str) -> None:
    """Raise unless the marker is there: the folder that a filesystem was mounted on must not be filled instead."""
    try:
        os.stat(f"{root}/{LOCK_NAME}")
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "is missing: is the filesystem mounted?", error.filename) from error


def _make_folder(root: str, folder: str) -> None:
    _check_mounted(root)
    os.makedirs(folder, 0o700, exist_ok=True)


def _free_bytes(root: str, min_free_fraction: float) -> float:
    _check_mounted(root)
    status = os.statvfs(root)
    if not status.f_blocks:  # a filesystem that does not say
        return float("inf")
    return (status.f_bavail - status.f_blocks * min_free_fraction) * status.f_frsize


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _which_exist(paths: Sequence[str]) -> list[Outcome]:
    return [Outcome.HIT if _exists(path) else Outcome.MISS for path in paths]


def _exists(path: str) -> bool:
    try:
        os.stat(path)
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise
    return True


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError as error:
        if error.errno not in _GONE:
            raise


def _text(error: Exception) -> str:
    return f"{error.filename or ''} {error.strerror}".strip() if isinstance(error, OSError) else str(error)
