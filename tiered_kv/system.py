"""What lies outside of a cache: time, chance, threads and files. All of it is asked for here, and nowhere else.

So one place can be given another world: `tiered_kv.testing.simulation` runs the code that is shipped in virtual time,
on threads that take turns and on disks that lose power. ``tests/testing/test_seam.py`` holds the library to it.
"""

import ctypes
import fcntl
import os
import queue
import random
import secrets
import select
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Lock(Protocol):
    """Held by one thread at a time."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Condition(Lock, Protocol):
    """A lock to wait in until somebody says that something has changed."""

    def wait(self, timeout: float | None = None) -> bool:
        """Let go of the lock until somebody notifies, at most so many seconds; False if nobody did."""
        ...

    def notify_all(self) -> None:
        """Wake all who wait."""
        ...


class Queue(Protocol[T]):
    """Passes things from thread to thread, in order."""

    def put(self, item: T) -> None:
        """Append one; never waits."""
        ...

    def get(self) -> T:
        """Wait for the first, and take it."""
        ...


class Thread(Protocol):
    """A thread that was started."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, at most so many seconds."""
        ...

    def is_alive(self) -> bool:
        """Whether the thread has not ended."""
        ...


@dataclass(frozen=True)
class FolderEntry:
    """What is in a folder.

    Attributes:
        name: Without a slash.
        is_folder: Whether it is one, and no link to one.
        used_ns: When it was changed last.
    """

    name: str
    is_folder: bool
    used_ns: int


class Files:
    """Calls of the kernel about files, named as in `os`. Any thread may make them; all raise OSError."""

    def open(self, path: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """See `os.open`."""
        return os.open(path, flags, mode, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        """See `os.close`."""
        os.close(fd)

    def dup(self, fd: int) -> int:
        """See `os.dup`."""
        return os.dup(fd)

    def lines(self, path: Path) -> list[str]:
        """Return the lines of what the system says of itself somewhere; none where it says nothing."""
        try:
            return path.read_text().splitlines()
        except OSError:
            return []

    def exists(self, path: Path) -> bool:
        """Whether there is anything at a path."""
        return path.exists()

    def make_folders(self, path: Path, mode: int) -> None:
        """Make a folder and those above it, as far as they are not there."""
        path.mkdir(mode=mode, parents=True, exist_ok=True)

    def mkdir(self, name: str, mode: int, *, dir_fd: int) -> None:
        """See `os.mkdir`."""
        os.mkdir(name, mode, dir_fd=dir_fd)

    def fstat(self, fd: int) -> os.stat_result:
        """See `os.fstat`."""
        return os.fstat(fd)

    def is_on_system_disk(self, fd: int) -> bool:
        """Whether a folder is on the filesystem of ``/``, and not on one that is mounted."""
        return os.fstat(fd).st_dev == os.stat("/").st_dev  # noqa: PTH116 - as all calls here

    def geteuid(self) -> int:
        """See `os.geteuid`."""
        return os.geteuid()

    def entries(self, fd: int) -> list[FolderEntry]:
        """List a folder."""
        with os.scandir(fd) as found:
            return [
                FolderEntry(each.name, each.is_dir(follow_symlinks=False), each.stat(follow_symlinks=False).st_mtime_ns)
                for each in found
            ]

    def disk_usage(self, name: str, *, dir_fd: int) -> int:
        """Return what lies in a folder, in bytes on the disk."""
        num_blocks = 0
        for _, _, names, folder_fd in os.fwalk(name, dir_fd=dir_fd):
            num_blocks += os.fstat(folder_fd).st_blocks
            for each in names:
                num_blocks += os.stat(each, dir_fd=folder_fd, follow_symlinks=False).st_blocks
        return num_blocks * 512

    def utime(self, fd: int) -> None:
        """Say that a file or folder was changed now."""
        os.utime(fd)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        """See `os.unlink`."""
        os.unlink(name, dir_fd=dir_fd)

    def rename(self, name: str, other: str, *, dir_fd: int) -> None:
        """Give a file of a folder another name there, in the place of whatever has that."""
        os.rename(name, other, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def rmdir(self, path: Path) -> None:
        """See `os.rmdir`."""
        path.rmdir()

    def remove_tree(self, name: str, *, dir_fd: int) -> None:
        """Remove a folder and all that is in it."""
        shutil.rmtree(name, dir_fd=dir_fd)

    def flock(self, fd: int, operation: int) -> None:
        """See `fcntl.flock`."""
        fcntl.flock(fd, operation)

    def free_bytes(self, fd: int) -> int:
        """Return what the filesystem of a file has left."""
        stats = os.statvfs(fd)
        return stats.f_bavail * stats.f_frsize

    def ftruncate(self, fd: int, length: int) -> None:
        """See `os.ftruncate`."""
        os.ftruncate(fd, length)

    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        """See `os.posix_fallocate`."""
        os.posix_fallocate(fd, offset, length)

    def fallocate(self, fd: int, mode: int, offset: int, length: int) -> bool:
        """Ask the filesystem to zero or drop a range, as ``mode`` says; False if it cannot."""
        return not _LIBC.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length))

    def forget_cached(self, fd: int) -> None:
        """Have later reads ask the medium, as far as the kernel does so."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def fsync(self, fd: int) -> None:
        """See `os.fsync`."""
        os.fsync(fd)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        """See `os.pread`."""
        return os.pread(fd, length, offset)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        """See `os.pwrite`."""
        return os.pwrite(fd, data, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `os.preadv`."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `os.pwritev`."""
        return os.pwritev(fd, buffers, offset)


class System:
    """Time, chance and threads, and the files of the machine.

    Attributes:
        files: See `Files`.
    """

    files: Files = Files()

    def monotonic(self) -> float:
        """Return seconds that only grow."""
        return time.monotonic()

    def token_bytes(self, n: int) -> bytes:
        """Return bytes that nobody can guess."""
        return secrets.token_bytes(n)

    def random(self) -> random.Random:
        """Return a source of numbers for what is no secret."""
        return random.Random()  # noqa: S311 - spreads probes over time

    def getpid(self) -> int:
        """Return the number of this process."""
        return os.getpid()

    def pidfd_open(self, pid: int) -> int:
        """Return a descriptor that is readable once a process has ended; `Files.close` closes it."""
        return os.pidfd_open(pid)

    def has_ended(self, pidfd: int) -> bool:
        """Say whether the process of a descriptor has ended, as far as is known now."""
        ended = select.poll()  # select() takes no descriptor above 1,023
        ended.register(pidfd, select.POLLIN)
        return bool(ended.poll(0))

    def is_of_a_process(self, fd: int) -> bool:
        """Say whether a descriptor is of a process, one that has ended too, and not of something else."""
        try:
            os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # of a process, and none of this one's
            return True
        except OSError:
            return False
        return True

    def get_ident(self) -> int:
        """Return a number of this thread."""
        return threading.get_ident()

    def start_thread(self, target: Callable[[], None], name: str) -> Thread:
        """Start a daemon thread."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def lock(self) -> Lock:
        """Make a lock."""
        return threading.Lock()

    def rlock(self) -> Lock:
        """Make a lock that a thread may take again."""
        return threading.RLock()

    def condition(self) -> Condition:
        """Make a condition with a lock that a thread may take again."""
        return threading.Condition()

    def queue(self) -> Queue[T]:
        """Make a queue without bound."""
        return queue.SimpleQueue()


class _Current(Generic[T]):
    def __init__(self) -> None:
        self.system = System()


_LIBC = ctypes.CDLL(None)
_current: "_Current[None]" = _Current()


def system() -> System:
    """Return what this program runs in: the machine, or a simulation."""
    return _current.system


def files() -> Files:
    """Return the files of what this program runs in."""
    return _current.system.files


@contextmanager
def running_in(other: System) -> Iterator[None]:
    """Have every thread run in another system meanwhile."""
    before, _current.system = _current.system, other
    try:
        yield
    finally:
        _current.system = before
