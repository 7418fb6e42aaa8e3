"""Keeps a shared directory of block files within its limits. Runs in a thread of any process that writes to it.

Two sweepers at once would delete the same oldest files, so the lock saves work and the limits do not depend on it: on a
filesystem without flock(2) each process sweeps. What does not look like ours is never touched.
"""
# ruff: noqa: PTH106, PTH108, PTH120 - a stat(2) or unlink(2) per block: making a Path would cost as much again

import contextlib
import errno
import fcntl
import os
import re
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tiered_kv_backends.paths import HASH, NAMESPACE

LOCK_NAME = "sweeper.lock"
FOLDER_DIGITS = 3
"""So many digits of a block's hash name its folder: 4096 folders for the blocks of one namespace."""

_FOLDERS = (*NAMESPACE, re.compile(f"[0-9a-f]{{{FOLDER_DIGITS}}}"))
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp")
_STALE_NS = 3600 * 10**9
"""Age at which a temporary file's writer is taken to be dead."""
_KEPT_FRACTION = 0.9
"""Of the capacity: the rest is room for what is written until the next sweep."""
_FREED_FRACTION = 0.05
"""Of the filesystem, beyond what is to be left free: likewise."""
_NO_LOCKS = {errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL}


@dataclass(frozen=True)
class Swept:
    """What a sweep found and did.

    Attributes:
        num_bytes: Of all records and temporary files, before.
        num_deleted: Records deleted.
        num_deleted_bytes: Their bytes.
        num_temporaries: Temporary files deleted.
    """

    num_bytes: int
    num_deleted: int
    num_deleted_bytes: int
    num_temporaries: int


class Sweeper:
    """Deletes the files used longest ago while there are too many. Used by one thread at a time, but for `stop`.

    A sweep looks at each file once, and at each again if any have to go; it holds 16 bytes a file meanwhile.

    Args:
        root: The directory; ``LOCK_NAME`` is in it.
        capacity: Bytes that all files may have together.
        min_free_fraction: Part of the filesystem that has to stay free.
        wall_clock_ns: What files are dated with.
    """

    def __init__(self, root: str, capacity: int, min_free_fraction: float, wall_clock_ns: Callable[[], int]) -> None:
        self._root = root
        self._capacity = capacity
        self._min_free_fraction = min_free_fraction
        self._wall_clock_ns = wall_clock_ns
        self._stopped = threading.Event()
        self._last_sweep_ns = 0

    def stop(self) -> None:
        """Let a sweep end at its next file. For good, and from any thread."""
        self._stopped.set()

    def sweep(self) -> Swept | None:
        """Delete what is over the limits and what dead writers have left.

        Returns:
            What was done; None if another process is sweeping, or has swept since this one last looked.

        Raises:
            OSError: The filesystem failed; what was deleted until then is.
        """
        with contextlib.ExitStack() as held:
            lock = os.open(f"{self._root}/{LOCK_NAME}", os.O_RDWR | os.O_CLOEXEC)
            held.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            seen_ns, self._last_sweep_ns = self._last_sweep_ns, os.fstat(lock).st_mtime_ns
            if seen_ns not in (0, self._last_sweep_ns):  # another's sweep dated it, whatever that host's clock says
                return None
            swept = self._sweep()
            os.utime(lock)
            self._last_sweep_ns = os.fstat(lock).st_mtime_ns
            return swept

    def _sweep(self) -> Swept:
        used_ns, sizes = array("q"), array("q")
        num_bytes = num_temporaries = 0
        stale_ns = self._wall_clock_ns() - _STALE_NS
        for folder in self.folders():
            for entry, status in _files(folder):
                if HASH.fullmatch(entry.name):
                    used_ns.append(status.st_mtime_ns)
                    sizes.append(status.st_size)
                elif not _TEMPORARY.fullmatch(entry.name):
                    continue
                elif status.st_mtime_ns < stale_ns:
                    num_temporaries += _unlink(entry.path)
                    continue
                num_bytes += status.st_size
        excess = max(num_bytes - int(self._capacity * _KEPT_FRACTION), self._missing_free_bytes())
        num_deleted = num_deleted_bytes = 0
        if excess > 0 and len(sizes):
            num_deleted, num_deleted_bytes = self._delete(_cutoff(used_ns, sizes, excess), excess)
        return Swept(num_bytes, num_deleted, num_deleted_bytes, num_temporaries)

    def _delete(self, cutoff_ns: int, excess: int) -> tuple[int, int]:
        """Delete records not used after ``cutoff_ns``, and then folders that are empty; return how many, and bytes."""
        num_deleted = num_bytes = 0
        for folder in self.folders():
            before = num_deleted
            for entry, status in _files(folder):
                is_old = status.st_mtime_ns <= cutoff_ns and HASH.fullmatch(entry.name)
                if is_old and num_bytes < excess and not self._stopped.is_set() and _unlink(entry.path):
                    num_deleted += 1
                    num_bytes += status.st_size
            if num_deleted > before:
                self.remove_empty(folder)
        return num_deleted, num_bytes

    def _missing_free_bytes(self) -> int:
        status = os.statvfs(self._root)
        wanted = int(status.f_blocks * min(1.0, self._min_free_fraction + _FREED_FRACTION))
        return (wanted - status.f_bavail) * status.f_frsize

    def folders(self) -> Iterator[str]:
        """Yield the folders that hold files of ours, until told to stop."""
        return self._folders(self._root)

    def _folders(self, folder: str, depth: int = 0) -> Iterator[str]:
        if depth == len(_FOLDERS):
            yield folder
            return
        for entry in _scan(folder):
            if self._stopped.is_set():
                return
            if _FOLDERS[depth].fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield from self._folders(entry.path, depth + 1)

    def remove_empty(self, folder: str) -> None:
        """Remove a folder of records, and those it is in, as far as nothing is in them."""
        with contextlib.suppress(OSError):  # not empty, most often
            for _ in _FOLDERS:
                os.rmdir(folder)
                folder = os.path.dirname(folder)


def delete_folders(root: str, salt_folder: str) -> int:
    """Delete the records in every folder of one salt, and the folders; return how many records. Locks nothing.

    Raises:
        OSError: The filesystem failed.
    """
    walk = Sweeper(root, 0, 0.0, lambda: 0)
    num_deleted = 0
    for folder in walk.folders():
        if folder.split("/")[-2] == salt_folder:
            for entry, _ in _files(folder):
                if HASH.fullmatch(entry.name) or _TEMPORARY.fullmatch(entry.name):
                    num_deleted += _unlink(entry.path) and bool(HASH.fullmatch(entry.name))
            walk.remove_empty(folder)
    return num_deleted


def _cutoff(used_ns: "array[int]", sizes: "array[int]", excess: int) -> int:
    """Return the time such that the files not used after it have at least ``excess`` bytes, or all there are."""
    times = np.frombuffer(used_ns, np.int64)
    order = np.argsort(times)
    freed = np.cumsum(np.frombuffer(sizes, np.int64)[order])
    return int(times[order[min(int(np.searchsorted(freed, excess)), len(order) - 1)]])


def _files(folder: str) -> Iterator[tuple["os.DirEntry[str]", os.stat_result]]:
    for entry in _scan(folder):
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        yield entry, status


def _scan(folder: str) -> "list[os.DirEntry[str]]":
    """List a folder whole, so that deleting cannot hide entries from us; empty if it is gone."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _unlink(path: str) -> bool:
    """Remove a file; False if another sweeper has."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True
