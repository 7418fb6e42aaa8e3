"""`SharedFSBackend`: a file per block in a directory that many engines on many hosts share.

    sweeper.lock                                             made when a cache first opens the directory
    ledger                                                   how many bytes may still be written (`shared_fs_ledger`)
    <fingerprint>/<epoch>/<shard>/<salt>/<abc>/<hash>        one record; <abc> are the first digits of its hash
    <fingerprint>/<epoch>/<shard>/<salt>/<abc>/.<id>.tmp     one that is being written

A file gets its name when it is whole and closed, by a rename, so readers need no lock and writers of one key do not
meet. Its mtime says when it was last used; sweeps delete the oldest first (`shared_fs_sweeper`). A thread moves a block
in one go (`shared_fs_files`).
"""

import asyncio
import contextlib
import errno
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import aiofiles.os
from pydantic import ByteSize, Field

from tiered_kv.backend import Backend, BackendContext, Block, Outcome, TierSettings, Workers, check_lengths
from tiered_kv.errors import BackendUnavailableError, ClosedError, ConfigurationError
from tiered_kv.keys import BlockKey
from tiered_kv.log import log
from tiered_kv.specs import FileLoadStoreSpec
from tiered_kv_backends import shared_fs_files as files
from tiered_kv_backends.shared_fs_files import Moved, Work
from tiered_kv_backends.shared_fs_ledger import ALLOWANCE_S, Ledger
from tiered_kv_backends.shared_fs_sweeper import Sweeper, Swept, holds_blocks

P = ParamSpec("P")
T = TypeVar("T")


_NEVER = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}
_NEVER |= {errno.ELOOP, errno.ENOTSUP, errno.ENOSYS}
"""What opening the directory again would not change; the last two: a filesystem without locks."""
_HEAD_START_NS = 10**6
"""How much longer ago each further block of a prompt counts as used: of a prompt used at once, the tail goes first."""
_FREE_SPACE_AGE_S = 1.0
_TAKEN_FRACTION, _TAKEN_BYTES = 1 / 1024, 256 << 20
"""Of the capacity, and at most: what is taken from the ledger at once, ahead of what is written now."""
_CLOSE_S = 1.0

_read_records = aiofiles.os.wrap(files.read_records)
_write_records = aiofiles.os.wrap(files.write_records)
_which_exist = aiofiles.os.wrap(files.which_exist)
_unlink_records = aiofiles.os.wrap(files.unlink_records)


class SharedFSBackend(Backend):
    """Keeps records as files on NFS, Lustre, CephFS or any filesystem with an atomic rename.

    Nothing is forced to the medium and nothing is repaired: a file that a crash of the server has cut is found by its
    length or its checksum, and deleted. The byte limit is never exceeded: what is written is first taken from a ledger
    that all processes share. Sweeps make room, down to nine tenths of the limit.

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
        """How often each process looks whether a sweep is due, which one of them then makes."""

    def __init__(
        self, settings: Settings | Mapping[str, Any] | str, wall_clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self.settings = settings = self.Settings.of(settings)
        self._wall_clock_ns = wall_clock_ns
        self._root = str(settings.path.absolute())
        self._sweeper: Sweeper | None = None

    async def open(self, context: BackendContext) -> None:
        """Make the directory if need be, and try whether it can be written to; or whether there is one to read.

        Raises:
            ConfigurationError: It cannot be written to, or read, it knows no locks, or ``capacity`` is below one block.
            BackendUnavailableError: The filesystem fails, or does not answer within ``timeout_s``.
        """
        settings = self.settings
        largest = max((shape.stride_bytes for shape in context.groups), default=0)
        if largest > settings.capacity:
            raise ConfigurationError(f"a capacity of {settings.capacity} bytes for blocks of {largest}")
        n = settings.num_threads
        readers, writers = context.workers(n), context.workers(n)
        self._readers, self._writers, self._clerk = _Threads(readers), _Threads(writers), _Threads(context.workers(1))
        self._context, self._clock = context, context.clock
        self._ledger = Ledger(self._root, settings.capacity, self._wall_clock_ns)
        self._taking = asyncio.Lock()
        self._allowance, self._allowance_until = 0, float("-inf")
        self._unwritten = 0  # taken or being taken from the ledger, and not in a file; read by the sweeping thread
        self._free_bytes, self._free_bytes_until = 0.0, float("-inf")
        try:
            if settings.read_only:
                probe = self._readers.run(files.probe_reading, self._root)
            else:
                probe = self._writers.run(_probe, self._root, self._ledger)
            await asyncio.wait_for(probe, settings.timeout_s)
        except TimeoutError as error:
            raise BackendUnavailableError(f"{self._root} did not answer within {settings.timeout_s} s") from error
        except OSError as error:
            kind = ConfigurationError if error.errno in _NEVER else BackendUnavailableError
            raise kind(f"{error.filename or self._root}: {error.strerror}") from error
        self._sweeper = Sweeper(
            self._root,
            self._ledger,
            lambda: self._unwritten,
            settings.capacity,
            largest,
            settings.min_free_fraction,
            self._wall_clock_ns,
        )
        self._sweeping: asyncio.Future[None] | None = None
        self._timer = None if settings.read_only else asyncio.ensure_future(self._sweep_regularly())

    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Say HIT or MISS for each key, by one stat(2) each.

        Raises:
            BackendUnavailableError: The filesystem fails.
        """
        self._check_open()
        calls = [_which_exist(self._root, share, executor=self._readers) for share in self._shares(keys)]
        found = self._unless_failed(await _all(calls))
        return list(chain.from_iterable(found))

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

    async def locate(self, keys: Sequence[BlockKey]) -> FileLoadStoreSpec:
        """Say which files the records are. Looks at none of them."""
        self._check_open()
        n, paths = len(keys), [f"{self._root}/{files.path_of(key)}" for key in keys]
        return FileLoadStoreSpec(range(n), paths, [0] * n, self._context.record_lengths(keys))

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Read the files: HIT, MISS, CORRUPT (wrong length, no file) or FAILED each. A hit counts as use.

        Raises:
            BackendUnavailableError: Every file failed.
        """
        self._check_open()
        shares = self._shares(self._work(keys, into))
        return self._outcomes(await _all([_read_records(self._root, each, executor=self._readers) for each in shares]))

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Write the files: STORED, REFUSED (no room, or nobody knows how much there is) or FAILED each.

        Raises:
            BackendUnavailableError: Every file failed, or the directory is gone.
        """
        self._check_open()
        work = self._work(keys, blocks)
        num_taken = await self._take_room(blocks) if await self._has_room(blocks) else 0
        writes = [asyncio.ensure_future(self._write_share(each)) for each in self._shares(work[:num_taken])]
        outcomes = self._outcomes(await _all(writes)) + [Outcome.REFUSED] * (len(work) - num_taken)
        if Outcome.REFUSED in outcomes:
            self._sweep_soon(is_full=True)
        return outcomes

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Unlink the files.

        Raises:
            BackendUnavailableError: The filesystem fails.
        """
        self._check_open()
        calls = [_unlink_records(self._root, share, executor=self._writers) for share in self._shares(keys)]
        self._unless_failed(await _all(calls))

    async def sweep(self) -> Swept | None:
        """Delete what is over the limit, and temporary files that dead writers have left; it also happens by itself.

        Returns:
            What was done; None if another process is at it.

        Raises:
            BackendUnavailableError: The filesystem fails.
            ConfigurationError: The tier is ``read_only``.
        """
        if self.settings.read_only:
            raise ConfigurationError(f"the tier at {self._root} is read_only: another process sweeps")
        return await self._sweep()

    async def aclose(self) -> None:
        """Stop sweeping, return room that was taken. Calls still under way end by themselves; nothing else is held."""
        if self._sweeper is None:
            return
        self._sweeper.stop()
        self._sweeper = None
        if self._timer is None:
            return
        self._timer.cancel()
        ending: list[asyncio.Future[None]] = [self._writers.run(self._return_room)]
        if self._sweeping is not None:
            ending.append(self._sweeping)
        for each in ending:
            each.add_done_callback(_look_at)
        await asyncio.wait(ending, timeout=_CLOSE_S)  # soon, if the filesystem answers

    def _check_open(self) -> Sweeper:
        if self._sweeper is None:
            raise ClosedError(f"the shared filesystem tier at {self._root} is not open")
        return self._sweeper

    def _work(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Work]:
        check_lengths(keys, blocks)
        pairs = zip(keys, blocks, strict=True)
        if self.settings.read_only:
            return [Work(key, block, used_ns=0) for key, block in pairs]
        now_ns = self._wall_clock_ns()
        return [Work(key, block, now_ns - key.position * _HEAD_START_NS) for key, block in pairs]

    def _shares(self, items: Sequence[T]) -> list[Sequence[T]]:
        """Cut a batch into as many shares as there are threads, at most."""
        size = -(-len(items) // self.settings.num_threads) or 1
        return [items[start : start + size] for start in range(0, len(items), size)]

    def _unless_failed(self, results: Sequence[T | Exception]) -> list[T]:
        for each in results:
            if isinstance(each, Exception):
                raise BackendUnavailableError(f"{self._root}: {_text(each)}") from each
        return [each for each in results if not isinstance(each, Exception)]

    def _outcomes(self, results: Sequence[list[Moved] | Exception]) -> list[Outcome]:
        """Say what became of each block; if none of them could be moved, the medium has failed."""
        moved = list(chain.from_iterable(self._unless_failed(results)))
        errors = [each for each in moved if not isinstance(each, Outcome)]
        if errors and len(errors) == len(moved):
            raise BackendUnavailableError(f"{self._root}: {_text(errors[-1])}") from errors[-1]
        return [each if isinstance(each, Outcome) else Outcome.FAILED for each in moved]

    async def _write_share(self, share: Sequence[Work]) -> list[Moved]:
        """Write some blocks; the room of those that were not stored can be used again."""
        writing = asyncio.ensure_future(_write_records(self._root, share, executor=self._writers))
        writing.add_done_callback(partial(self._settle_room, share))  # also if nobody waits for it any more
        return await asyncio.shield(writing)

    def _settle_room(self, share: Sequence[Work], writing: "asyncio.Future[list[Moved]]") -> None:
        if not writing.cancelled() and writing.exception() is None:
            for work, moved in zip(share, writing.result(), strict=True):
                if moved is Outcome.STORED:
                    self._unwritten -= work.block.num_bytes
                else:
                    self._allowance += work.block.num_bytes

    async def _take_room(self, blocks: Sequence[Block]) -> int:
        """Take room for as many of the leading blocks as there is; return how many that is."""
        needed = sum(block.num_bytes for block in blocks)
        async with self._taking:
            if self._clock() >= self._allowance_until:
                self._unwritten -= self._allowance
                self._allowance = 0
            if self._allowance < needed:
                ahead = min(int(self.settings.capacity * _TAKEN_FRACTION), _TAKEN_BYTES)
                await self._take(max(needed, ahead) - self._allowance)
                self._sweep_soon()
            num_blocks = 0
            for block in blocks:
                if block.num_bytes > self._allowance:
                    break
                self._allowance -= block.num_bytes
                num_blocks += 1
        return num_blocks

    async def _take(self, wanted: int) -> None:
        before = self._unwritten
        self._unwritten += wanted  # first: a sweep may begin meanwhile
        try:
            taken = await self._writers.run(self._ledger.take, wanted, before) or 0
        except OSError as error:
            self._unwritten -= wanted
            raise BackendUnavailableError(f"{self._root}: {_text(error)}") from error
        self._unwritten -= wanted - taken
        self._allowance += taken
        self._allowance_until = self._clock() + ALLOWANCE_S

    def _return_room(self) -> None:
        with contextlib.suppress(OSError):  # the next sweep finds that it is not used
            self._ledger.give_back(self._allowance, self._unwritten - self._allowance)

    async def _has_room(self, blocks: Sequence[Block]) -> bool:
        """Say whether the filesystem has room above what is to be left free; asks at most once a second."""
        if self._clock() >= self._free_bytes_until:
            try:
                self._free_bytes = await self._writers.run(
                    files.free_bytes, self._root, self.settings.min_free_fraction
                )
            except OSError as error:
                raise BackendUnavailableError(f"{self._root}: {_text(error)}") from error
            self._free_bytes_until = self._clock() + _FREE_SPACE_AGE_S
        num_bytes = sum(block.num_bytes for block in blocks)
        if num_bytes > self._free_bytes:
            return False
        self._free_bytes -= num_bytes
        return True

    async def _sweep_regularly(self) -> None:
        while True:
            self._sweep_soon()
            await asyncio.sleep(self.settings.sweep_interval_s)

    def _sweep_soon(self, *, is_full: bool = False) -> None:
        """Sweep in the background if it is due, or something was refused."""
        if self._sweeper is not None and (self._sweeping is None or self._sweeping.done()):
            self._sweeping = asyncio.ensure_future(self._sweep_and_log(is_full=is_full))

    async def _sweep_and_log(self, *, is_full: bool) -> None:
        try:
            sweeper, seen = self._check_open(), self._ledger.num_sweeps
            if not is_full and not await self._clerk.run(sweeper.is_due):
                return
            swept = await self._sweep(seen)
        except ClosedError:
            return
        except (BackendUnavailableError, OSError) as error:
            log("warning", "shared_fs.sweep_failed", path=self._root, error=_text(error))
        else:
            if swept is not None and (swept.num_deleted or swept.num_temporaries):
                log("info", "shared_fs.swept", path=self._root, **vars(swept))

    async def _sweep(self, unless_after: int | None = None) -> Swept | None:
        sweeper = self._check_open()
        try:
            swept = await self._clerk.run(sweeper.sweep, unless_after)
        except OSError as error:
            raise BackendUnavailableError(f"cannot sweep {self._root}: {_text(error)}") from error
        self._free_bytes_until = float("-inf")
        return swept


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
    for future in futures:
        future.add_done_callback(_look_at)
    if futures:
        await asyncio.wait(futures)
    results: list[T | Exception] = []
    for future in futures:
        error = future.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        results.append(future.result() if error is None else error)
    return results


def _look_at(future: "asyncio.Future[T]") -> None:
    """Have asyncio not complain of an error that nobody waited for: whoever did has given up."""
    if not future.cancelled():
        future.exception()


def _probe(root: str, ledger: Ledger) -> None:
    files.probe(root)
    with contextlib.suppress(BlockingIOError):  # then it is there
        ledger.create(is_empty=not holds_blocks(root))


def _text(error: Exception) -> str:
    return f"{error.filename or ''} {error.strerror}".strip() if isinstance(error, OSError) else str(error)
