"""What the threads of a shared directory do: one function for some blocks, from the first system call to the last.

Below the root no symbolic link is followed, folder by folder, and only regular files are read or counted: who may write
to the directory can neither lead us out of it nor make a call wait for ever.

``direct`` is O_DIRECT where bytes are to pass by the page cache, which costs a copy, and 0 where not. What lies behind
a record's last whole page is written through it, and so is a record that cannot be moved otherwise.

The threads of a shared directory's calls, and how the event loop waits for them.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import stat
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import NamedTuple, ParamSpec, Self, TypeVar, cast

from tiered_kv.media.backend import Block, Outcome, Workers
from tiered_kv.values.keys import BlockKey
from tiered_kv.values.layout import PAGE_BYTES
from tiered_kv_backends.paths import NVME_MARK, SHARED_FS_MARK, Opener

# ruff: noqa: PTH116 - calls relative to open folders, which Path has not


LOCK_NAME = SHARED_FS_MARK
"""Locked by whoever sweeps. It also says that the filesystem is mounted."""
FOLDER_DIGITS = 3
"""So many digits of a block's hash name its folder: 4096 folders for the blocks of one namespace."""
FOLDER_FLAGS = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Opening never waits: a FIFO would have us wait for whoever writes to it."""
_READ_FLAGS = os.O_RDONLY | FILE_FLAGS
_OPENERS = {direct: Opener(_READ_FLAGS | direct) for direct in (0, os.O_DIRECT)}

_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
"""What says that a file is not there; ESTALE: another host removed or replaced it while it was open here."""
_NO_FILE = {errno.ELOOP, errno.ENXIO}
"""What opening a link and a socket gives."""
FULL = {errno.ENOSPC, errno.EDQUOT}
"""What says that the filesystem takes no more: bytes, files, or what a quota leaves of them."""
NOT_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP}
"""What direct I/O gives where a filesystem has none, and for memory or a folder that it cannot be done with."""
_USED_AGAIN_NS = 600 * 10**9
"""How old a file's last use may get before a read renews it: one call in ten minutes, however hot the block is."""
_TRIES = 3
"""A sweeper may remove a folder again before there is a file in it."""


class Work(NamedTuple):
    """One block to move, and when it counts as used."""

    key: BlockKey
    block: Block
    used_ns: int
    """0: reading it is no use that is written down."""


class OverdueError(OSError):
    """A record's writer was taken for dead as it wrote: the file is deleted, and nobody counts its bytes any more."""


Moved = Outcome | OSError
"""What became of one block."""


def read_records(root: str, share: Sequence[Work], direct: int) -> list[Moved]:
    """Fill the blocks: HIT, MISS or CORRUPT (another length, no file) each, or what failed."""
    return _each(root, share, direct, _read, if_gone=Outcome.MISS)


def write_records(root: str, share: Sequence[Work], direct: int) -> list[Moved]:
    """Write the blocks: STORED or REFUSED (longer than files may be) each, or what failed."""
    return _each(root, share, direct, _write)


def which_exist(root: str, keys: Sequence[BlockKey]) -> list[Outcome]:
    """Say HIT or MISS for each key.

    Raises:
        OSError: The filesystem fails.
    """
    with _Folders.opened(root) as folders:
        return [Outcome.HIT if folders is not None and folders.has(key) else Outcome.MISS for key in keys]


def unlink_records(root: str, keys: Sequence[BlockKey]) -> None:
    """Remove the keys' files, as far as they are there; the others, too, if one cannot be removed.

    Raises:
        OSError: The filesystem fails, or is not mounted: nobody knows what is there once it is again.
    """
    failed: OSError | None = None
    with _Folders.opened(root) as folders:
        check_mounted(root)
        if folders is None:  # it has come back in between
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), root)
        for key in keys:
            try:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError), folders.of(key) as folder:
                    os.unlink(key.hash.hex(), dir_fd=folder)
            except OSError as error:
                failed = error
    if failed is not None:
        raise failed


def probe_reading(root: str) -> None:
    """See whether the directory is there and can be read.

    Raises:
        OSError: It cannot, no cache has written to it yet, or others may write to it.
    """
    _check_folder(root)
    check_mounted(root)
    _check_alone(root)
    if not os.access(root, os.R_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), root)


def probe(root: str) -> None:
    """Make the directory and its lock, if need be, and see whether it can be written to, by us and by nobody else.

    Raises:
        OSError: It cannot, is another user's, or others may write to it: what they make there would be served.
    """
    with contextlib.suppress(FileExistsError):
        Path(root).mkdir(0o700)
    _check_folder(root)
    _check_alone(root, _owner_of_ours(root))
    os.close(open_own(root, LOCK_NAME, os.O_CREAT))
    _check_folder(root)  # again: an NVMe tier makes its mark before it looks for ours, so that one of us sees both
    if not os.access(root, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), root)


def direct_problem(root: str, spare: str, *, is_read_only: bool) -> str:
    """Move a page past the page cache, and say why that cannot be done; empty if it can, or is not known.

    Args:
        root: The directory.
        spare: A file there, which is read instead where nothing is to be written, or there is no room. Of one that is
            empty nothing is learned: filesystems look at how they are asked only where there is something to read.
        is_read_only: Whether nothing is to be written.

    Raises:
        OSError: The filesystem fails.
    """
    page = Block.empty(PAGE_BYTES).padded
    try:
        if is_read_only or not _has_moved(root, page):
            with contextlib.suppress(FileNotFoundError), _opened(f"{root}/{spare}", _READ_FLAGS | os.O_DIRECT) as file:
                os.readv(file, [page])
    except OSError as error:
        if error.errno in NOT_DIRECT or is_read_only:
            return os.strerror(error.errno or 0)
        raise
    return ""


def _has_moved(root: str, page: memoryview) -> bool:
    """Write a page to a file of its own, and read it back; False if there is no room for it."""
    path = f"{root}/.{uuid.uuid4().hex}.tmp"
    try:
        with _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | FILE_FLAGS | os.O_DIRECT) as file:
            os.writev(file, [page])
            os.preadv(file, [page], 0)
    except OSError as error:
        if error.errno not in FULL:
            raise
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):  # where it cannot be opened so it may be made all the same
            Path(path).unlink()
    return True


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    file = os.open(path, flags, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def open_own(root: str, name: str, flags: int = 0) -> int:
    """Open one of the two files in the root, which are ours alone, for reading and writing.

    Raises:
        OSError: It is not there, or no file.
    """
    path = f"{root}/{name}"
    file = os.open(path, os.O_RDWR | FILE_FLAGS | flags, 0o600)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EEXIST, "is no file", path)


def check_mounted(root: str) -> None:
    """Raise unless the marker is there: the folder that a filesystem was mounted on must not be filled instead."""
    path = f"{root}/{LOCK_NAME}"
    try:
        os.stat(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "is missing: is the filesystem mounted?", path) from error


def _check_folder(root: str) -> None:
    """Raise if something else than a directory is there, or one of an NVMe tier."""
    path = Path(root)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is no directory, which a shared_fs tier needs for its own", root)
    if (mark := path / NVME_MARK).exists():
        raise FileExistsError(errno.EEXIST, "an NVMe tier has this directory: each needs one of its own", str(mark))


def _check_alone(root: str, owner: int | None = None) -> None:
    """Raise if others than the owner may write to a directory, or if it has another owner than it should."""
    status = os.stat(root)
    if owner not in {None, status.st_uid}:
        raise PermissionError(errno.EPERM, f"belongs to user {status.st_uid}, not to user {owner}", root)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"has mode {stat.S_IMODE(status.st_mode):04o}, others may write to it: a shared_fs tier's is one user's"
        raise PermissionError(errno.EPERM, why, root)


def _owner_of_ours(root: str) -> int:
    """Return whose what we make in a directory is: a file server may call us by another number."""
    path = f"{root}/.{uuid.uuid4().hex}.tmp"
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FILE_FLAGS, 0o600)
    except OSError as error:
        if error.errno in FULL and os.stat(root).st_uid == os.geteuid():
            return os.geteuid()  # with no room for a file more, loads and sweeps go on
        raise
    try:
        return os.fstat(file).st_uid
    finally:
        os.close(file)
        Path(path).unlink()


def path_of(key: BlockKey) -> str:
    """Return where below the root a block's file is."""
    digits = key.hash.hex()
    return f"{key.namespace.path}/{digits[:FOLDER_DIGITS]}/{digits}"


def free_bytes(root: str, min_free_fraction: float) -> float:
    """Return how many bytes are free beyond what is to be left free.

    Raises:
        OSError: The filesystem fails, or is not mounted.
    """
    check_mounted(root)
    status = os.statvfs(root)
    if not status.f_blocks:  # a filesystem that does not say
        return float("inf")
    return (status.f_bavail - status.f_blocks * min_free_fraction) * status.f_frsize


class _Folders:
    """The folders below a root, each opened from the one before. Keeps that of one namespace open."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # links are the operator's
        self._namespace = ""
        self._fd = -1

    @classmethod
    @contextlib.contextmanager
    def opened(cls, root: str) -> Iterator[Self | None]:
        """Yield the folders of a root, or nothing if it is gone."""
        try:
            folders = cls(root)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            yield None
            return
        try:
            yield folders
        finally:
            folders.leave()
            os.close(folders._root_fd)

    def has(self, key: BlockKey) -> bool:
        """Say whether there is a file for a block. An estimate: a load decides."""
        digits = key.hash.hex()
        with unless(_GONE):
            self._enter(key, make=False)
            status = os.stat(f"{digits[:FOLDER_DIGITS]}/{digits}", dir_fd=self._fd, follow_symlinks=False)
            return stat.S_ISREG(status.st_mode)
        return False

    def open_file(self, key: BlockKey, direct: int) -> int:
        """Open a block's file for reading."""
        if (file := _OPENERS[direct].open(path_of(key), self._root_fd)) >= 0:
            return file
        with self.of(key) as folder:
            return os.open(key.hash.hex(), _READ_FLAGS | direct, dir_fd=folder)

    @contextlib.contextmanager
    def of(self, key: BlockKey, *, make: bool = False) -> Iterator[int]:
        """Yield a descriptor of the folder that a block's file is in."""
        self._enter(key, make=make)
        folder = self._step(self._fd, key.hash.hex()[:FOLDER_DIGITS], make=make)
        try:
            yield folder
        finally:
            os.close(folder)

    def _enter(self, key: BlockKey, *, make: bool) -> None:
        namespace = key.namespace.path
        if namespace == self._namespace:
            return
        self.leave()
        at = os.dup(self._root_fd)
        for name in namespace.split("/"):
            try:
                below = self._step(at, name, make=make)
            finally:
                os.close(at)
            at = below
        self._fd, self._namespace = at, namespace

    def leave(self) -> None:
        """Close the folder of the namespace: it is opened anew for the next block."""
        if self._namespace:
            os.close(self._fd)
            self._namespace = ""

    def _step(self, parent: int, name: str, *, make: bool) -> int:
        try:
            return os.open(name, os.O_PATH | FOLDER_FLAGS, dir_fd=parent)
        except FileNotFoundError:
            if not make:
                raise
        check_mounted(self._root)
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        return os.open(name, os.O_PATH | FOLDER_FLAGS, dir_fd=parent)


_Move = Callable[[_Folders, Work, int], Outcome]


def _each(root: str, share: Sequence[Work], direct: int, move: _Move, if_gone: Outcome | None = None) -> list[Moved]:
    try:
        with _Folders.opened(root) as folders:
            if folders is not None:
                return [_tried(move, folders, work, direct) for work in share]
            if if_gone is None:
                check_mounted(root)
    except OSError as error:
        return [error] * len(share)
    return [if_gone or Outcome.FAILED] * len(share)


def _tried(move: _Move, folders: _Folders, work: Work, direct: int) -> Moved:
    try:
        return move(folders, work, direct)
    except OSError as error:
        if not direct or error.errno not in NOT_DIRECT:
            return error
    return _tried(move, folders, work, 0)  # which shows what else is wrong, if anything


def _read(folders: _Folders, work: Work, direct: int) -> Outcome:
    try:
        file = folders.open_file(work.key, direct)
        try:
            return _read_file(file, work)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in _GONE:
            return Outcome.MISS
        if error.errno in _NO_FILE:
            return Outcome.CORRUPT
        raise


def _read_file(file: int, work: Work) -> Outcome:
    status, num_left = os.fstat(file), work.block.num_bytes
    if stat.S_ISDIR(status.st_mode):  # which no store would replace
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), work.key.path)
    if not stat.S_ISREG(status.st_mode) or status.st_size != num_left:
        return Outcome.CORRUPT
    left = [work.block.header, work.block.padded]  # whole pages, of which the last may be more than there is
    while num_left > 0:
        if not (num_bytes := os.readv(file, left)):
            return Outcome.CORRUPT
        left, num_left = _behind(left, num_bytes), num_left - num_bytes
    if work.used_ns - status.st_mtime_ns > _USED_AGAIN_NS:
        with contextlib.suppress(OSError):  # the bytes are right, on a filesystem that became read-only too
            os.utime(file, ns=(work.used_ns, work.used_ns))
    return Outcome.HIT


def _write(folders: _Folders, work: Work, direct: int) -> Outcome:
    """Write a record, in a folder that another may remove meanwhile: then it is made again."""
    temporary = f".{uuid.uuid4().hex}.tmp"
    for left in reversed(range(_TRIES)):
        try:
            with folders.of(work.key, make=True) as folder:
                file = _make_file(folder, temporary, direct)
                return _write_file(folder, file, temporary, work, direct)
        except FileNotFoundError:
            folders.leave()
            if not left:
                raise
        except OSError as error:
            if error.errno == errno.EFBIG:
                return Outcome.REFUSED
            raise
    raise AssertionError  # the last try has returned or raised


def _make_file(folder: int, name: str, direct: int) -> int:
    try:
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FILE_FLAGS | direct, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno in NOT_DIRECT:  # it may have been made all the same
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
        raise


def _write_file(folder: int, file: int, temporary: str, work: Work, direct: int) -> Outcome:
    """Write a record to a file, and give that its name.

    Raises:
        OverdueError: A sweep has deleted the file meanwhile.
        OSError: The filesystem fails.
    """
    try:
        try:
            _fill_file(file, work.block, direct)
            os.utime(file, ns=(work.used_ns, work.used_ns))
        finally:
            os.close(file)  # NFS sends what is left, and says what it could not: only then is the file whole
        os.replace(temporary, work.key.hash.hex(), src_dir_fd=folder, dst_dir_fd=folder)
    except FileNotFoundError as error:
        raise OverdueError(errno.ETIMEDOUT, "its writer was taken for dead: do clocks differ?", temporary) from error
    except BaseException:
        with contextlib.suppress(OSError):  # else the sweeper finds it
            os.unlink(temporary, dir_fd=folder)
        raise
    return Outcome.STORED


def _fill_file(file: int, block: Block, direct: int) -> None:
    payload = block.payload
    cut = len(payload) - (len(payload) % PAGE_BYTES if direct else 0)
    _write_all(file, [block.header, payload[:cut]])
    if cut < len(payload):
        fcntl.fcntl(file, fcntl.F_SETFL, 0)
        _write_all(file, [payload[cut:]])


def _write_all(file: int, left: list[memoryview]) -> None:
    while left:
        left = _behind(left, os.writev(file, left))


def _behind(segments: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of the segments after so many bytes of them were moved."""
    left = []
    for segment in segments:
        if num_bytes < len(segment):
            left.append(segment[num_bytes:])
        num_bytes = max(0, num_bytes - len(segment))
    return left


@contextlib.contextmanager
def unless(numbers: Collection[int]) -> Iterator[None]:
    """Go on where the filesystem answers with one of these errors, and what was to be done is not."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


P = ParamSpec("P")
T = TypeVar("T")


class FileThreads(Executor):
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
        """Run ``function`` in a thread, for `loop.run_in_executor`, which passes an asyncio future on as it is."""
        return cast("Future[T]", self.run(function, *args, **kwargs))


async def each_of(calls: Sequence[Awaitable[T]]) -> list[T | Exception]:
    """Wait for every call, and leave them running if this is cancelled: buffers are lent until the last one ends."""
    futures = [asyncio.ensure_future(call) for call in calls]
    for future in futures:
        future.add_done_callback(look_at)
    if futures:
        await asyncio.wait(futures)
    results: list[T | Exception] = []
    for future in futures:
        error = future.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        results.append(future.result() if error is None else error)
    return results


def look_at(future: "asyncio.Future[T]") -> None:
    """Have asyncio not complain of an error that nobody waited for: whoever did has given up."""
    if not future.cancelled():
        future.exception()


def text_of(error: Exception) -> str:
    """Return what an error says, for messages."""
    return f"{error.filename or ''} {error.strerror}".strip() if isinstance(error, OSError) else str(error)
