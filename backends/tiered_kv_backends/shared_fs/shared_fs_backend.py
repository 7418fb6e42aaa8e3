"""`SharedFSBackend`: a file per block in a directory that many engines on many hosts share.

    sweeper.lock                                             made when a cache first opens the directory
    ledger                                                   how many bytes may still be written (`ledger.py`)
    <fingerprint>/<epoch>/<shard>/<salt>/<abc>/<hash>        one record; <abc> are the first digits of its hash
    <fingerprint>/<epoch>/<shard>/<salt>/<abc>/.<id>.tmp     one that is being written

A file gets its name when it is whole and closed, by a rename, so readers need no lock and writers of one key do not
meet. Its mtime says when it was last used; sweeps delete the oldest first (`sweeper.py`). A thread moves a block
in one go (`files.py`). Beside the caches `sweep` is a job for operators.
"""

import asyncio
import contextlib
import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

import aiofiles.os
from pydantic import Field
from typing_extensions import override

from tiered_kv.media.backend import Backend, BackendContext, Block, Outcome, check_lengths
from tiered_kv.media.inventory import Inventory
from tiered_kv.settings.tier_settings import Size, SizeOrNone, StorageTierSettings, default_size
from tiered_kv.values.errors import BackendUnavailableError, ClosedError, ConfigurationError
from tiered_kv.values.keys import BlockKey
from tiered_kv.values.log import log
from tiered_kv.values.specs import FileLoadStoreSpec
from tiered_kv_backends.paths import salt_folder
from tiered_kv_backends.shared_fs import files
from tiered_kv_backends.shared_fs.bytes_ledger import LEDGER_NAME, ByteLedger, DirectoryRoom
from tiered_kv_backends.shared_fs.files import FileThreads, Moved, OverdueError, Work, each_of, look_at, text_of
from tiered_kv_backends.shared_fs.sweeper import KEPT_FRACTION, Sweeper, Swept, holds_blocks, is_used, open_inventory

T = TypeVar("T")


_NEVER = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}
_NEVER |= {errno.ELOOP, errno.ENOTSUP, errno.ENOSYS}
"""What opening the directory again would not change; the last two: a filesystem without locks."""
_HEAD_START_NS = 10**6
"""How much longer ago each further block of a prompt counts as used: of a prompt used at once, the tail goes first."""
_CLOSE_S = 1.0
_WORTH_S = 3e-4
"""Of looking for files: to wake a thread for less, and to hear of it, takes longer than that."""
_FORGOTTEN = 1.1
"""How much longer to look for a file may take than it did, from one lookup to the next."""
_LEAST_LOOK_S = 1e-6

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

    class Settings(StorageTierSettings):
        """``{"medium": "shared_fs", "path": "/mnt/shared/kv", "capacity": "20TiB"}``."""

        medium: str = "shared_fs"
        path: Path = Field(examples=["/mnt/kv"])
        """A directory for nothing else, made if need be; its parent has to be there."""
        capacity: Size = Field(gt=0, examples=["1TiB"])
        """Bytes of all records together, of every model and host. Where processes disagree, each writes up to its own,
        and its sweeps delete down to that, whoever has written."""
        num_threads: int = Field(default=16, ge=1, le=256)
        """Calls under way at once, in each direction: reads never queue behind writes."""
        direct: Literal["auto", "always", "never"] = "auto"
        """Whether to pass by the page cache (O_DIRECT). ``auto``: where the filesystem can."""
        min_free_fraction: float = Field(default=0.05, ge=0, lt=1)
        """Part of the filesystem that is left free: nothing is written, and the oldest is deleted, to keep it so."""
        salt_quota: SizeOrNone = Field(default=default_size(None), gt=0)
        """Bytes that the blocks of one salt may have, of every model and host; sweeps delete what is more, used
        longest ago first. No limit if left out."""
        sweep_interval_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
        """How often each process looks whether a sweep is due, which one of them then makes."""

    @classmethod
    @override
    def inventory(cls, settings: Settings) -> AbstractAsyncContextManager[Inventory]:
        return open_inventory(str(settings.path.absolute()))

    @classmethod
    @override
    def has_used(cls, path: Path) -> bool:
        return is_used(str(path))

    def __init__(
        self, settings: Settings | Mapping[str, Any] | str, wall_clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self.settings = settings = self.Settings.of(settings)
        self._wall_clock_ns = wall_clock_ns
        self._root = str(settings.path.absolute())
        self._sweeper: Sweeper | None = None
        self._io_reason = ""
        self._look_s = _WORTH_S  # how long it takes to look for one file, at best: threads wait for the interpreter too

    async def open(self, context: BackendContext) -> None:
        """Make the directory if need be, and try whether it can be written to; or whether there is one to read.

        Raises:
            ConfigurationError: It cannot be written to, or read, it knows no locks, or ``capacity`` is below one block.
            BackendUnavailableError: The filesystem fails, or does not answer within ``timeout_s``.
        """
        settings = self.settings
        largest = max((shape.stride_bytes for shape in context.groups), default=0)
        if largest > settings.capacity:
            raise ConfigurationError(
                f"the shared_fs tier's capacity of {settings.capacity} bytes is below one block of {largest} bytes: "
                "give it more, or leave it out"
            )
        n = settings.num_threads
        self._readers, self._writers = FileThreads(context.workers(n)), FileThreads(context.workers(n))
        self._clerk = FileThreads(context.workers(1))
        self._context, self._clock = context, context.clock
        self._ledger = ByteLedger(self._root, settings.capacity, self._wall_clock_ns, settings.timeout_s)
        self._room = DirectoryRoom(
            self._root, self._ledger, settings.capacity, settings.min_free_fraction, self._writers, self._clock
        )
        self._written, self._is_full = Counter[str](), False  # since this process has swept last
        self._num_made_room = 0  # how many sweeps have, for what was refused
        try:
            probe = (self._readers if settings.read_only else self._writers).run(_probe, settings, self._ledger)
            self._io_reason = await asyncio.wait_for(probe, settings.timeout_s)
        except TimeoutError as error:
            raise BackendUnavailableError(f"{self._root} did not answer within {settings.timeout_s} s") from error
        except OSError as error:
            kind = ConfigurationError if error.errno in _NEVER else BackendUnavailableError
            raise kind(self._what_to_do(error)) from error
        if self._io_reason and settings.direct == "always":
            raise ConfigurationError(f"{self._root} has no direct I/O ({self._io_reason}): set direct='auto'")
        if self._io_reason and settings.direct == "auto":
            log("info", "shared_fs.not_direct", path=self._root, reason=self._io_reason)
        self._direct = 0 if self._io_reason else os.O_DIRECT
        self._sweeper = Sweeper(
            self._root,
            self._ledger,
            lambda: self._room.unwritten,
            settings.capacity,
            largest,
            settings.min_free_fraction,
            self._wall_clock_ns,
            settings.salt_quota,
        )
        self._sweeping: asyncio.Future[None] | None = None
        self._timer = None if settings.read_only else asyncio.ensure_future(self._sweep_regularly())

    @override
    def describe(self) -> dict[str, object]:
        """Say how files are moved: ``io`` is "direct" or "buffered", ``io_reason`` says why not direct."""
        if self._sweeper is None:
            return super().describe()
        io = "buffered" if self._io_reason else "direct"
        return {"io": io, "io_reason": self._io_reason, **super().describe()}

    def _what_to_do(self, error: OSError) -> str:
        """Say why the directory cannot be used, and what would help. A file that was only tried in it has no name."""
        match error.errno:
            case errno.ENOENT:
                return f"{error.filename or self._root}: {error.strerror}; mount it, or make the directory above it"
            case errno.EACCES | errno.EROFS if self.settings.read_only:
                return f"{self._root}: {error.strerror}; let user {os.geteuid()} read it"
            case errno.EACCES | errno.EROFS:
                return (
                    f"{self._root}: {error.strerror}; give the tier a directory that user {os.geteuid()} can write to, "
                    "or read_only=true"
                )
        return f"{error.filename or self._root}: {error.strerror}"

    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Say HIT or MISS for each key, by one stat(2) each: in as many threads as there are, if that takes a while.

        Raises:
            BackendUnavailableError: The filesystem fails.
        """
        self._check_open()
        shares = self._shares(keys, least=int(_WORTH_S / self._look_s))
        calls = [self._readers.run(self._which_exist, share) for share in shares]
        found = self._unless_failed(await each_of(calls))
        return list(chain.from_iterable(found))

    def _which_exist(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        began_s = self._clock()
        outcomes = files.which_exist(self._root, keys)
        look_s = (self._clock() - began_s) / len(keys)
        self._look_s = max(_LEAST_LOOK_S, min(look_s, self._look_s * _FORGOTTEN))
        return outcomes

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
        # no coroutine of aiofiles, and so no task, for each: that was a tenth of the time of a hot block
        reads = [self._readers.run(files.read_records, self._root, each, self._direct) for each in shares]
        return self._outcomes(await each_of(reads))

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Write the files: STORED, REFUSED (no room, or nobody knows how much there is) or FAILED each.

        Raises:
            BackendUnavailableError: Every file failed, or the directory is gone.
        """
        self._check_open()
        work, num_made_room = self._work(keys, blocks), self._num_made_room
        try:
            num_taken = await self._room.take(blocks, self._sweep_soon)
        except BackendUnavailableError as error:
            if not isinstance(cause := error.__cause__, OSError) or cause.errno != errno.EDQUOT:
                raise  # also ENOSPC, where the filesystem has just said that there is room
            num_taken, self._is_full = 0, self._is_full or num_made_room == self._num_made_room
        writes = [self._write_share(each) for each in self._shares(work[:num_taken])]
        written = self._outcomes(await each_of(writes), if_full=Outcome.REFUSED)
        outcomes = written + [Outcome.REFUSED] * (len(work) - num_taken)
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
        self._unless_failed(await each_of(calls))

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
        ending: list[asyncio.Future[None]] = [self._writers.run(self._room.return_all)]
        if self._sweeping is not None:
            ending.append(self._sweeping)
        for each in ending:
            each.add_done_callback(look_at)
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

    def _shares(self, items: Sequence[T], least: int = 1) -> list[Sequence[T]]:
        """Cut a batch into as many shares as there are threads, at most, of so many or more."""
        size = max(-(-len(items) // self.settings.num_threads), least, 1)
        return [items[start : start + size] for start in range(0, len(items), size)]

    def _unless_failed(self, results: Sequence[T | Exception]) -> list[T]:
        for each in results:
            if isinstance(each, Exception):
                raise BackendUnavailableError(f"{self._root}: {text_of(each)}") from each
        return [each for each in results if not isinstance(each, Exception)]

    def _outcomes(self, results: Sequence[list[Moved] | Exception], if_full: Outcome | None = None) -> list[Outcome]:
        """Say what became of each block; if none of them could be moved, the medium has failed."""
        moved: list[Moved] = list(chain(*self._unless_failed(results)))
        if if_full is not None:
            moved = [if_full if _is_full(each) else each for each in moved]
        errors = [each for each in moved if not isinstance(each, Outcome)]
        if errors:
            why = f"{self._root}: {text_of(errors[-1])}"
            if len(errors) == len(moved):
                raise BackendUnavailableError(why) from errors[-1]
            self.last_error = why
        return [each if isinstance(each, Outcome) else Outcome.FAILED for each in moved]

    def _write_share(self, share: Sequence[Work]) -> "asyncio.Future[list[Moved]]":
        """Begin to write some blocks; the room of those that were not stored can be used again."""
        writing = self._writers.run(files.write_records, self._root, share, self._direct)
        settle = partial(self._settle_room, share, self._num_made_room)
        writing.add_done_callback(settle)  # also if nobody waits for it any more
        return writing

    def _settle_room(self, share: Sequence[Work], num_made_room: int, writing: "asyncio.Future[list[Moved]]") -> None:
        if not writing.cancelled() and writing.exception() is None:
            salts = set[str]()
            for work, moved in zip(share, writing.result(), strict=True):
                is_settled = moved is Outcome.STORED or isinstance(moved, OverdueError)
                self._room.settle(work.block.num_bytes, is_written=is_settled)
                self._is_full |= _is_full(moved) and num_made_room == self._num_made_room
                if moved is Outcome.STORED and self.settings.salt_quota is not None:
                    salts.add(salt := salt_folder(work.key.namespace.salt))
                    self._written[salt] += work.block.num_bytes
            if self._is_over_quota(salts):
                self._sweep_soon()

    def _is_over_quota(self, salts: Iterable[str]) -> bool:
        """Say whether what was written since this process has swept last may have brought one over its quota.

        Of one that was not counted yet it is not known what others have written for it: most of the quota, it may be.
        """
        quota, sweeper = self.settings.salt_quota, self._sweeper
        if quota is None or sweeper is None:
            return False
        known, unknown = sweeper.salt_bytes, int(quota * KEPT_FRACTION)
        return any(known.get(salt, unknown) + self._written[salt] > quota for salt in salts)

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
            if self._is_over_quota(self._written):
                swept = await self._sweep()
                while swept is not None and self._is_over_quota(self._written):  # by what was written meanwhile
                    swept = await self._sweep()
            elif is_full or await self._clerk.run(sweeper.is_due):
                swept = await self._sweep(seen)
            else:
                return
        except ClosedError:
            return
        except (BackendUnavailableError, OSError) as error:
            log("warning", "shared_fs.sweep_failed", path=self._root, error=text_of(error))
        else:
            if swept is not None and (swept.num_deleted or swept.num_temporaries):
                log("info", "shared_fs.swept", path=self._root, **vars(swept))

    async def _sweep(self, unless_after: int | None = None) -> Swept | None:
        sweeper, swept = self._check_open(), None
        written, self._written = self._written, Counter()
        is_full, self._is_full = self._is_full, False
        refused, self._room.refused_bytes = self._room.refused_bytes, set()
        try:
            swept = await self._clerk.run(sweeper.sweep, unless_after, is_full=is_full, wanted=refused)
        except OSError as error:
            raise BackendUnavailableError(f"cannot sweep {self._root}: {text_of(error)}") from error
        finally:
            if swept is None:
                self._written += written
            elif is_full:  # what was refused meanwhile has room now, too, whenever it hears of it
                self._is_full, self._num_made_room = False, self._num_made_room + 1
        self._room.forget_free()
        return swept


def _is_full(moved: Moved) -> bool:
    return isinstance(moved, OSError) and moved.errno in files.FULL


async def sweep(settings: SharedFSBackend.Settings | Mapping[str, Any] | str) -> Swept | None:
    """Delete what is over the limit, and what dead writers have left, at once: each process does it now and then.

    Returns:
        What was done; None if another process is at it.

    Raises:
        ConfigurationError: No settings of this medium, or ``read_only``.
        BackendUnavailableError: No cache has used the directory yet, or the filesystem failed.
    """
    settings = SharedFSBackend.Settings.of(settings)
    if settings.read_only:
        raise ConfigurationError(f"the tier at {settings.path} is read_only: another process sweeps")
    root = str(settings.path.absolute())
    capacity, clock_ns = settings.capacity, time.time_ns
    ledger = ByteLedger(root, capacity, clock_ns)
    sweeper = Sweeper(root, ledger, lambda: 0, capacity, 0, settings.min_free_fraction, clock_ns, settings.salt_quota)
    try:
        return await asyncio.to_thread(sweeper.sweep)
    except OSError as error:
        raise BackendUnavailableError(f"cannot sweep {root}: {error.strerror}") from error


def _probe(settings: SharedFSBackend.Settings, ledger: ByteLedger) -> str:
    """See whether the directory can be used, and say why not by direct I/O, if that is wanted."""
    root = str(settings.path.absolute())
    if settings.read_only:
        files.probe_reading(root)
    else:
        files.probe(root)
        with contextlib.suppress(BlockingIOError):  # then it is there
            ledger.create(is_empty=not holds_blocks(root))
    if settings.direct == "never":
        return "direct='never'"
    return files.direct_problem(root, LEDGER_NAME, is_read_only=settings.read_only)
