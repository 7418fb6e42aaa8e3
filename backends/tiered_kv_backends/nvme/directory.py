"""The directory of one process: its lock, a folder per fingerprint, and a limit over all that lies in it.

    lock                    held by flock(2) as long as the tier is open; names the holder
    <fingerprint>/slab      records at a fixed stride
    <fingerprint>/journal   which record is where

Used by one thread at a time.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ByteSize

from tiered_kv.backend import RecordShape
from tiered_kv.errors import ConfigurationError
from tiered_kv_backends.nvme.journal import Journal

_FINGERPRINT = re.compile(r"[0-9a-f]{64}(-\d+of\d+)?")
_FIXED_BYTES = 64 << 10  # lock, probe, the directories themselves
_FIXED_BYTES_PER_GROUP = 64 << 10
_SLAB_BYTES_PER_METADATA_BYTE = 4096  # extents of a large file are counted as its own


@dataclass(frozen=True)
class _Foreign:
    """Blocks of another fingerprint: another model, or this one as it was before a change."""

    path: Path
    used_ns: int
    num_bytes: int


class Directory:
    """A directory taken for this process alone. `close` gives it back.

    Args:
        path: Made if need be, for its owner only.
        capacity_bytes: Limit over everything in it.
        groups: The records that will be kept. Folders of other fingerprints are foreign: they go when room is needed.

    Attributes:
        num_slots: Slots of each group.
        capacity_bytes: The limit.
        num_reclaimed: Foreign folders deleted to make room.

    Raises:
        ConfigurationError: Not a directory, not writable, held by another process, or too small.
    """

    def __init__(self, path: Path, capacity_bytes: int, groups: Sequence[RecordShape]) -> None:
        self.path = path
        self.num_reclaimed = 0
        self.capacity_bytes = capacity_bytes
        self._groups = groups
        self._allocated_bytes = 0
        self.num_slots = fit(capacity_bytes, groups)
        self._reserved_bytes = self._reserved_for(self.num_slots)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = _lock(path)
        except OSError as error:
            raise ConfigurationError(
                f"{path}: {error.strerror}; the NVMe tier needs a directory it can write to"
            ) from error
        try:
            self.folders = [path / shape.folder for shape in groups]
            for folder in self.folders:
                folder.mkdir(mode=0o700, exist_ok=True)
                os.utime(folder)
            self._foreign = _find_foreign(path, self.folders)
        except OSError as error:
            os.close(self._lock_fd)
            raise ConfigurationError(f"{path}: {error.strerror}; is it the NVMe tier's alone?") from error

    def close(self) -> None:
        """Let other processes take the directory."""
        with contextlib.suppress(OSError):
            for folder in self.folders:
                os.utime(folder)  # the folder last used is the last to make room for others
        os.close(self._lock_fd)

    def take(self, num_bytes: int, wanted_bytes: int) -> None:
        """Count ``num_bytes`` that slabs have on the disk already, and check that there is a place for all they want.

        Raises:
            ConfigurationError: The filesystem is too small.
        """
        self._allocated_bytes += num_bytes
        self._reclaim_for(0)
        stats = os.statvfs(self.path)
        free_bytes = stats.f_bavail * stats.f_frsize + sum(foreign.num_bytes for foreign in self._foreign)
        missing_bytes = wanted_bytes - num_bytes + self._reserved_bytes
        if missing_bytes > free_bytes:
            raise ConfigurationError(
                f"{self.path}: capacity={_size(self.capacity_bytes)} needs {_size(missing_bytes)} more than are there, "
                f"and its filesystem has {_size(free_bytes)}: lower capacity by at least "
                f"{_size(missing_bytes - free_bytes)}"
            )

    def resize(self, num_slots: int, num_freed_bytes: int) -> None:
        """Have another limit: as many bytes as so many slots of each group need.

        Args:
            num_slots: Of each group.
            num_freed_bytes: That the caller will take from slabs at once.

        Raises:
            OSError: The filesystem has no place for them.
        """
        if num_slots > self.num_slots:
            stride = sum(group.stride_bytes for group in self._groups)
            wanted_bytes = num_slots * stride - self._allocated_bytes
            stats = os.statvfs(self.path)
            free_bytes = stats.f_bavail * stats.f_frsize + sum(foreign.num_bytes for foreign in self._foreign)
            if wanted_bytes > free_bytes:
                raise OSError(errno.ENOSPC, f"{wanted_bytes} bytes more are wanted, its filesystem has {free_bytes}")
        self.num_slots = num_slots
        self.capacity_bytes = _needed(num_slots, self._groups)
        self._reserved_bytes = self._reserved_for(num_slots)
        self._allocated_bytes -= num_freed_bytes
        self._reclaim_for(0)

    def allocate(self, fd: int, offset: int, num_bytes: int) -> None:
        """Extend a file, within the limit: foreign folders go, oldest first, as far as they are in the way.

        Raises:
            OSError: The disk is full.
        """
        self._reclaim_for(num_bytes)
        while True:
            try:
                os.posix_fallocate(fd, offset, num_bytes)
                break
            except OSError as error:
                if error.errno in {errno.EOPNOTSUPP, errno.EINVAL}:
                    os.ftruncate(fd, offset + num_bytes)  # a filesystem that cannot preallocate
                    break
                if error.errno != errno.ENOSPC or not self._foreign:
                    os.ftruncate(fd, offset)
                    raise
                self._reclaim_oldest()
        self._allocated_bytes += num_bytes

    def _reserved_for(self, num_slots: int) -> int:
        """Bytes for everything but the slabs."""
        return _needed(num_slots, self._groups) - num_slots * sum(group.stride_bytes for group in self._groups)

    def _reclaim_for(self, num_bytes: int) -> None:
        ours = self._reserved_bytes + self._allocated_bytes + num_bytes
        while self._foreign and ours + sum(foreign.num_bytes for foreign in self._foreign) > self.capacity_bytes:
            self._reclaim_oldest()

    def _reclaim_oldest(self) -> None:
        shutil.rmtree(self._foreign.pop(0).path, ignore_errors=True)
        self.num_reclaimed += 1


def _needed(num_slots: int, groups: Iterable[RecordShape]) -> int:
    """Bytes on disk, at most, for so many slots of each group."""
    total = _FIXED_BYTES
    for shape in groups:
        slab = num_slots * shape.stride_bytes
        total += (
            _FIXED_BYTES_PER_GROUP + slab + slab // _SLAB_BYTES_PER_METADATA_BYTE + Journal.reserved_bytes(num_slots)
        )
    return total


def _size(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({ByteSize(num_bytes).human_readable(separator=' ')})"


def fit(capacity_bytes: int, groups: Sequence[RecordShape]) -> int:
    """Return how many slots of each group fit."""
    one, fixed = _needed(1, groups), _needed(0, groups)
    if capacity_bytes < one:
        raise ConfigurationError(
            f"capacity={_size(capacity_bytes)} holds no block: one of each KV group, with what is kept about them, "
            f"takes {_size(one)}"
        )
    num_slots = (capacity_bytes - fixed) // (one - fixed)
    while _needed(num_slots, groups) > capacity_bytes:  # by rounding
        num_slots -= 1
    return num_slots


def _lock(path: Path) -> int:
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise ConfigurationError(
            f"{path} is held by another NVMe tier, of process {holder or 'unknown'}: each needs a directory of its own"
        ) from None
    except OSError:
        os.close(fd)
        raise
    return fd


def _find_foreign(path: Path, ours: Sequence[Path]) -> list[_Foreign]:
    """Return the folders of other fingerprints, the one used least recently first."""
    found = []
    for folder in path.iterdir():
        if folder not in ours and _FINGERPRINT.fullmatch(folder.name) and not folder.is_symlink():
            num_bytes = sum(file.lstat().st_blocks * 512 for file in (folder, *folder.rglob("*")))
            found.append(_Foreign(folder, folder.stat().st_mtime_ns, num_bytes))
    return sorted(found, key=lambda foreign: foreign.used_ns)
