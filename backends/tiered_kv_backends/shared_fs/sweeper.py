"""Keeps a shared directory of block files within its limits. Runs in a thread of any process that writes to it.

And what lies there, for operators, who `walk` through its folders as a sweep does.

One process sweeps at a time, whoever has the lock, and dates it meanwhile; that of one which was stopped at it is
replaced. No limit depends on that: the ledger lets nobody write more than fits, and a sweep makes room. What does not
look like ours is never touched, and no link is followed.
"""

import asyncio
import contextlib
import errno
import math
import os
import re
import stat
import threading
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.media.inventory import Found, Inventory, Place, in_thread
from tiered_kv.values.errors import BackendUnavailableError, BlockCorruptError
from tiered_kv_backends.paths import HASH, NAMESPACE
from tiered_kv_backends.shared_fs.bytes_ledger import ByteLedger, try_lock
from tiered_kv_backends.shared_fs.files import (
    FILE_FLAGS,
    FOLDER_DIGITS,
    FOLDER_FLAGS,
    FULL,
    LOCK_NAME,
    free_bytes,
    open_own,
    unless,
)

FOLDERS = (*NAMESPACE, re.compile(f"[0-9a-f]{{{FOLDER_DIGITS}}}"))
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp")
_DEAD_NS, _STALE_NS = 600 * 10**9, 60 * 10**9
"""Age of a temporary file at which its writer is taken to be dead; and at which it goes before any record does, where
something has to go. A writer that was only slow drops its block. Likewise of the lock, where it was not dated for so
long by who has it; and how often that is done."""
_NEXT_LOCK_NAME = f"{LOCK_NAME}.new"
KEPT_FRACTION = 0.9
"""Of the capacity: the rest is room for what is written until the next sweep."""
_DUE_FRACTION = 15 / 16
"""Of the capacity: with more there is a sweep."""
_FREED_FRACTION = 0.05
"""Of the filesystem, where too little is left free: likewise, beyond that. Of all there is, where it takes no more."""
_MOST_FREED_FRACTION = 0.25
"""Of all there is, for that room: a tier that is a small part of the filesystem keeps the rest."""
_LONGEST_PAUSE_NS = 3600 * 10**9
"""Sweeps are due after this time in any case: for what dead writers left, and what others deleted."""
_NO_FOLDER = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE}


@dataclass(frozen=True)
class Swept:
    """What a sweep found and did.

    Attributes:
        num_bytes: Of all records and temporary files, before.
        num_deleted: Records deleted.
        num_deleted_bytes: Their bytes.
        num_temporaries: Temporary files deleted.
        num_over_quota: Records deleted because their salt has too many; they are among ``num_deleted``.
    """

    num_bytes: int
    num_deleted: int
    num_deleted_bytes: int
    num_temporaries: int
    num_over_quota: int = 0


class Sweeper:
    """Deletes the files used longest ago while there are too many. Used by one thread at a time, but for `stop`.

    A sweep looks at each file once, and at each again if any have to go; it holds 24 bytes a file meanwhile.

    Args:
        root: The directory; ``LOCK_NAME`` is in it.
        ledger: Told what is there.
        unwritten: As `ByteLedger.begin_sweep` wants it.
        capacity: Bytes that all files may have together.
        room_bytes: What must have room after a sweep, however large it is beside the capacity.
        min_free_fraction: Part of the filesystem that has to stay free.
        wall_clock_ns: What files are dated with.
        salt_quota: Bytes that the records of one salt may have together.

    Attributes:
        salt_bytes: What each salt's records had when it last swept, by the salt's folder.
    """

    def __init__(
        self,
        root: str,
        ledger: ByteLedger,
        unwritten: Callable[[], int],
        capacity: int,
        room_bytes: int,
        min_free_fraction: float,
        wall_clock_ns: Callable[[], int],
        salt_quota: int | None = None,
    ) -> None:
        self._root = root
        self._ledger = ledger
        self._salt_quota = salt_quota
        self.salt_bytes: dict[str, int] = {}
        self._unwritten = unwritten
        self._capacity = capacity
        self._kept_bytes = min(int(capacity * KEPT_FRACTION), capacity - room_bytes)
        self._min_free_fraction = min_free_fraction
        self._wall_clock_ns = wall_clock_ns
        self._stopped = threading.Event()
        self._dated_ns = 0  # the lock, when it was last ours

    def stop(self) -> None:
        """Let a sweep end at its next folder. For good, and from any thread."""
        self._stopped.set()

    def is_due(self) -> bool:
        """Say whether there is something to do: little room, or a long time since anybody looked.

        Raises:
            OSError: The filesystem failed.
        """
        books = self._ledger.read()
        return (
            books is None
            or books.total > self._capacity * _DUE_FRACTION
            or books.swept_ns < self._wall_clock_ns() - _LONGEST_PAUSE_NS
            or free_bytes(self._root, self._min_free_fraction) < 0
        )

    def sweep(
        self, unless_after: int | None = None, *, is_full: bool = False, wanted: Collection[int] = ()
    ) -> Swept | None:
        """Delete what is over the limits and what dead writers have left.

        Args:
            unless_after: Do nothing if the directory has been swept more often than this by now.
            is_full: The filesystem takes no more, whatever it says is free: a share of all goes, below the limits too.
            wanted: Bytes of each call that was refused, as too little would have been left free.

        Returns:
            What was done; None if another process is sweeping, or has.

        Raises:
            OSError: The filesystem failed; what was deleted until then is. If it was in deleting, all else is done.
        """
        failed = deque[OSError](maxlen=1)
        with contextlib.ExitStack() as held:
            if (lock := self._take_lock(held)) is None:
                return None
            begun = self._ledger.begin_sweep(self._unwritten)
            if unless_after is not None and begun.num_sweeps > unless_after:
                self._ledger.num_sweeps = begun.num_sweeps  # who is refused from now on has not been helped by these
                return None
            swept = self._sweep(lock, failed, wanted, is_full=is_full)
            if not self._stopped.is_set():  # else not all was counted
                self._ledger.end_sweep(begun, swept.num_bytes - swept.num_deleted_bytes)
        if failed:
            raise failed[-1]
        return swept

    def _take_lock(self, held: contextlib.ExitStack) -> int | None:
        """Return the lock, which is let go of with ``held``; None if another process has it."""
        lock = open_own(self._root, LOCK_NAME)
        held.callback(os.close, lock)
        if not try_lock(lock):
            if os.fstat(lock).st_mtime_ns > self._wall_clock_ns() - _DEAD_NS:
                return None
            lock = open_own(self._root, _NEXT_LOCK_NAME, os.O_CREAT)
            held.callback(os.close, lock)
            if not try_lock(lock):
                return None
            with contextlib.suppress(FileNotFoundError):  # who had it just now has put it there
                Path(self._root, _NEXT_LOCK_NAME).rename(Path(self._root, LOCK_NAME))
        self._date(lock)
        return lock

    def _date(self, lock: int) -> None:
        now_ns = self._wall_clock_ns()
        with unless(FULL):  # it is tried again at each folder, until enough is deleted
            os.utime(lock, ns=(now_ns, now_ns))
            self._dated_ns = now_ns

    def _visit(self, lock: int, visit: Callable[[int, str], bool]) -> None:
        for each in walk(self._root, FOLDERS, self._stopped):
            if self._wall_clock_ns() > self._dated_ns + _STALE_NS:
                self._date(lock)
            each.has_deleted = visit(each.fd, each.path[-2])

    def _sweep(self, lock: int, failed: deque[OSError], wanted: Collection[int], *, is_full: bool) -> Swept:
        count = _Count(self._wall_clock_ns(), failed)
        count.num_temporaries = self._unlink_left_by_openings(count)
        self._visit(lock, count.visit)
        share = math.ceil(count.num_bytes * _FREED_FRACTION) if is_full else 0
        over = max(count.num_bytes - self._kept_bytes, self._missing_free_bytes(wanted, count.num_bytes), share)
        deletion = _Deletion(over, count, self._salt_quota)
        if deletion.is_needed:
            self._visit(lock, deletion.visit)
        self.salt_bytes = {salt: count.of_salt[salt] - deletion.of_salt[salt] for salt in count.of_salt}
        num_temporaries = count.num_temporaries + deletion.num_temporaries
        return Swept(
            count.num_bytes, deletion.num_records, deletion.num_bytes, num_temporaries, deletion.num_over_quota
        )

    def _unlink_left_by_openings(self, count: "_Count") -> int:
        """Delete the files of openings that were killed, of a page at most, which lie in the root; return how many."""
        top = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return sum(
                _unlink(name, top, count.failed)
                for name, status in _files(top, (_TEMPORARY,))
                if status.st_mtime_ns < count.now_ns - _DEAD_NS
            )
        finally:
            os.close(top)

    def _missing_free_bytes(self, wanted: Collection[int], num_bytes: int) -> int:
        """Say how many of the bytes there are have to go so that enough is left free; if any, with room for more."""
        free = free_bytes(self._root, self._min_free_fraction)
        # For what wants more there is not enough to delete.
        wanted_bytes = max((each for each in wanted if each - free <= num_bytes), default=0)
        if free >= wanted_bytes:
            return 0
        status = os.statvfs(self._root)
        room = min(status.f_blocks * status.f_frsize * _FREED_FRACTION, num_bytes * _MOST_FREED_FRACTION)
        return math.ceil(wanted_bytes - free + room)


class _Count:
    """Counts what lies in the directory, and deletes temporaries of dead writers; errors are kept in ``failed``."""

    def __init__(self, now_ns: int, failed: deque[OSError]) -> None:
        self.now_ns = now_ns
        self.failed = failed
        self.num_bytes = self.num_temporaries = self.stale_bytes = 0
        self.used_ns, self.sizes, self.salts = array("q"), array("q"), array("l")
        self.of_salt = Counter[str]()
        self.numbers: dict[str, int] = {}

    def visit(self, folder: int, salt: str) -> bool:
        """Count one folder; say whether anything was deleted."""
        before = self.num_temporaries
        number = self.numbers.setdefault(salt, len(self.numbers))
        for name, status in _files(folder):
            if HASH.fullmatch(name):
                self.used_ns.append(status.st_mtime_ns)
                self.sizes.append(status.st_size)
                self.salts.append(number)
                self.of_salt[salt] += status.st_size
            elif status.st_mtime_ns < self.now_ns - _DEAD_NS and _unlink(name, folder, self.failed):
                self.num_temporaries += 1
                continue
            elif status.st_mtime_ns < self.now_ns - _STALE_NS:
                self.stale_bytes += status.st_size
            self.num_bytes += status.st_size
        return self.num_temporaries > before


class _Excess:
    """Bytes that have to go, of the records used longest ago: those up to a time, until there were enough."""

    def __init__(self, num_bytes: int, times: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        self._num_left = num_bytes
        self.cutoff_ns = _cutoff(times, sizes, num_bytes) if num_bytes > 0 and len(times) else -1

    def takes(self, status: os.stat_result) -> bool:
        """Say whether a record has to go."""
        return self._num_left > 0 and status.st_mtime_ns <= self.cutoff_ns

    def is_gone(self, num_bytes: int) -> None:
        """Count one that went."""
        self._num_left -= num_bytes


class _Deletion:
    """Deletes what salts have over their quota; then at least ``over`` bytes in all, if there are so many.

    That is stale temporaries, then records used longest ago, of whichever salt.

    Attributes:
        is_needed: Whether anything has to go.
        of_salt: Bytes of records deleted, by the salt's folder.
    """

    def __init__(self, over: int, count: _Count, quota: int | None) -> None:
        times, sizes = np.frombuffer(count.used_ns, np.int64), np.frombuffer(count.sizes, np.int64)
        salts = np.frombuffer(count.salts, np.int64)
        others = np.ones(len(times), np.bool_)  # what no quota takes
        self._of_salts: dict[str, _Excess] = {}
        for salt, num_bytes in count.of_salt.items():
            if quota is not None and num_bytes > quota:
                mine = salts == count.numbers[salt]
                excess = num_bytes - int(quota * KEPT_FRACTION)
                of_salt = self._of_salts[salt] = _Excess(excess, times[mine], sizes[mine])
                others &= ~mine | (times > of_salt.cutoff_ns)
                over -= excess
        self._failed = count.failed
        self._stale_ns = count.now_ns - _STALE_NS if over > 0 else 0
        self._of_all = _Excess(over - count.stale_bytes, times[others], sizes[others])
        self.is_needed = over > 0 or bool(self._of_salts)
        self.num_records = self.num_temporaries = self.num_bytes = self.num_over_quota = 0
        self.of_salt = Counter[str]()

    def visit(self, folder: int, salt: str) -> bool:
        """Delete what has to go from one folder; say whether anything did."""
        before, of_salt = self.num_bytes, self._of_salts.get(salt)
        for name, status in _files(folder):
            if not HASH.fullmatch(name):
                if status.st_mtime_ns < self._stale_ns and _unlink(name, folder, self._failed):
                    self.num_temporaries += 1
                    self.num_bytes += status.st_size
                continue
            is_over_quota = of_salt is not None and of_salt.takes(status)
            excess = of_salt if of_salt is not None and is_over_quota else self._of_all
            if excess.takes(status) and _unlink(name, folder, self._failed):
                excess.is_gone(status.st_size)
                self.num_over_quota += is_over_quota
                self.num_records += 1
                self.num_bytes += status.st_size
                self.of_salt[salt] += status.st_size
        return self.num_bytes > before


def holds_blocks(root: str) -> bool:
    """Say whether there may be blocks below a root.

    Raises:
        OSError: The filesystem failed.
    """
    return any(FOLDERS[0].fullmatch(entry.name) for entry in Path(root).iterdir())


@dataclass
class OpenFolder:
    """A folder of records. Whoever deletes something from it says so in ``has_deleted``: it may be empty then.

    Attributes:
        fd: Its descriptor, until the next one is asked for.
        path: The names that lead to it.
    """

    fd: int
    path: tuple[str, ...]
    has_deleted: bool = False


def walk(
    root: str,
    names: Sequence[re.Pattern[str] | str],
    stopped: threading.Event,
    failed: deque[OSError] | None = None,
) -> Iterator[OpenFolder]:
    """Yield the folders of records until told to stop, and remove those that have been emptied meanwhile.

    Args:
        root: The directory.
        names: Of the folders, level by level: what they are like, or one that need not be looked for.
        stopped: Says when to stop.
        failed: Gets the errors of folders that cannot be opened, and the others are still visited; else one is raised.

    Raises:
        OSError: The filesystem failed.
    """

    def descend(folder: int, path: tuple[str, ...]) -> Generator[OpenFolder, None, bool]:
        if len(path) == len(names):
            yield (here := OpenFolder(folder, path))
            return here.has_deleted
        has_deleted, wanted = False, names[len(path)]
        for name in [wanted] if isinstance(wanted, str) else filter(wanted.fullmatch, os.listdir(folder)):
            if stopped.is_set():
                break
            has_deleted |= yield from enter(folder, (*path, name))
        return has_deleted

    def enter(parent: int, path: tuple[str, ...]) -> Generator[OpenFolder, None, bool]:
        try:
            folder = os.open(path[-1], os.O_RDONLY | FOLDER_FLAGS, dir_fd=parent)
        except OSError as error:
            if error.errno in _NO_FOLDER:
                return False
            error.filename = "/".join((root, *path))
            if failed is None:
                raise
            failed.append(error)
            return False
        try:
            has_deleted = yield from descend(folder, path)
        finally:
            os.close(folder)
        if has_deleted:
            with contextlib.suppress(OSError):  # not empty, most often
                os.rmdir(path[-1], dir_fd=parent)
        return has_deleted

    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield from descend(top, ())
    finally:
        os.close(top)


class SharedFSInventory(Inventory):
    """What lies in a directory, whoever uses it meanwhile; temporary files, too, which are no blocks."""

    def __init__(self, root: str) -> None:
        self._root = root

    @override
    async def found(self, salt: str = "") -> AsyncIterator[list[Found]]:
        """List folder by folder, those of one salt alone if one is given."""
        names, failed = FOLDERS if not salt else (*NAMESPACE[:-1], salt, FOLDERS[-1]), deque[OSError](maxlen=1)
        folders = walk(self._root, names, threading.Event(), failed)
        with _failing(self._root):
            async for some in in_thread(map(self._in, folders)):
                yield some
            if failed:
                raise failed[-1]

    @override
    async def read(self, found: Found) -> bytes | None:
        """Read a file, if it is one still."""
        return b"" if found.is_too_long else await asyncio.to_thread(_read, found)

    @override
    async def delete(self, found: Sequence[Found]) -> None:
        """Unlink files, and the folders that this has emptied."""
        with _failing(self._root):
            await asyncio.to_thread(self._delete, found)

    def _in(self, folder: OpenFolder) -> list[Found]:
        where, place = "/".join((self._root, *folder.path)), Place(*folder.path[:-1])
        return [
            Found(f"{where}/{name}", place, status.st_size, int(name[0] != "."), status.st_mtime)
            for name, status in _files(folder.fd)
            if stat.S_ISREG(status.st_mode)
        ]

    def _delete(self, found: Sequence[Found]) -> None:
        failed = deque[OSError](maxlen=1)
        _check_used(self._root)  # again: what is away would come back
        names = defaultdict[str, list[str]](list)
        for each in found:
            path, _, name = each.where.removeprefix(f"{self._root}/").rpartition("/")
            names[path].append(name)
        for path, of_folder in names.items():
            for folder in walk(self._root, path.split("/"), threading.Event(), failed):
                for name in of_folder:
                    folder.has_deleted |= _unlink(name, folder.fd, failed)
        if failed:
            raise failed[-1]


@contextlib.asynccontextmanager
async def open_inventory(root: str) -> AsyncIterator[SharedFSInventory]:
    """Yield the inventory of a directory.

    Raises:
        BackendUnavailableError: No tier has used it: its filesystem may not be mounted; or that fails.
    """
    with _failing(root):
        await asyncio.to_thread(_check_used, root)
    yield SharedFSInventory(root)


@contextlib.contextmanager
def _failing(root: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BackendUnavailableError(f"{error.filename or root}: {error.strerror}") from error


def is_used(root: str) -> bool:
    """Say whether a directory is a tier's, or what is in one was copied there."""
    return Path(root, LOCK_NAME).exists() or (Path(root).is_dir() and holds_blocks(root))


def _check_used(root: str) -> None:
    if not is_used(root):
        raise BackendUnavailableError(f"no tier has used {root}: is the filesystem mounted?")


def _read(found: Found) -> bytes | None:
    try:
        with os.fdopen(os.open(found.where, os.O_RDONLY | FILE_FLAGS), "rb") as file:
            return file.read(found.num_bytes) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    except FileNotFoundError:
        return None  # evicted meanwhile
    except OSError as error:
        if error.errno == errno.EIO:
            raise BlockCorruptError(f"cannot be read: {error.strerror}") from error
        raise BackendUnavailableError(f"{found.where}: {error.strerror}") from error


def _cutoff(times: NDArray[np.int64], sizes: NDArray[np.int64], excess: int) -> int:
    """Return the time such that the files not used after it have at least ``excess`` bytes, or all there are."""
    order = np.argsort(times)
    freed = np.cumsum(sizes[order])
    return int(times[order[min(int(np.searchsorted(freed, excess)), len(order) - 1)]])


def _files(folder: int, names: Sequence[re.Pattern[str]] = (HASH, _TEMPORARY)) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files of a folder that are ours, listed whole, so that deleting cannot hide any from us."""
    for name in os.listdir(folder):
        if not any(each.fullmatch(name) for each in names):
            continue
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(status.st_mode):
            yield name, status


def _unlink(name: str, folder: int, failed: deque[OSError]) -> bool:
    """Remove a file; False if another has, or if it cannot be removed: that must keep no others."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    except OSError as error:
        failed.append(error)
        return False
    return True
