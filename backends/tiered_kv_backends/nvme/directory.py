"""The directory of one process: its lock, a folder per fingerprint, and a limit over all that lies in it.

    holder                  the process id of the holder, for messages
    <fingerprint>/slab      records at a fixed stride
    <fingerprint>/ledger    which record is where

The lock is a flock(2) on the directory itself, held as long as the tier is open: nobody can delete it or put another in
its place. All that lies in the directory is reached by its descriptor: were the directory removed, and made anew by
another process, this one would write to its own still. Used by one thread at a time.

A directory may have been prepared by somebody else, with symbolic links, FIFOs or hard links under the names that we
write to. So files and folders are opened by the descriptor of their folder, never through a link, and what is not this
user's alone is refused before anything is read from it or written to it.

Whether a disk works, and how, is found out by a page that is written to a file of its own and read back
(`probe_direct_io`, `page_problem`).
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import ClassVar, Final, Literal

from typing_extensions import override

from tiered_kv.media.backend import Block, RecordShape
from tiered_kv.settings.setting_errors import size_in_words
from tiered_kv.settings.tier_settings import real_path
from tiered_kv.system import FolderEntry, files, system
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.layout import PAGE_BYTES, blocks_within
from tiered_kv.values.log import log
from tiered_kv_backends.nvme.ledger import Ledger, cut
from tiered_kv_backends.paths import NVME_MARK, SHARED_FS_MARK

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def open_root(path: Path) -> int:
    """Return a descriptor of the directory that ``path`` leads to; it is made if need be, for its owner only.

    Then its name survives a loss of power: whatever is in it would be lost with that.

    Raises:
        OSError: It cannot be opened, is another user's, or others may write to it.
    """
    missing = list(takewhile(lambda each: not files().exists(each), (path, *path.parents)))
    files().make_folders(path, 0o700)
    if len(missing) > 1:  # where a mount point is misspelt, it is on another disk than was meant
        log("warning", "nvme.parents_made", path=str(path), first=str(missing[-1]))
    for each in missing:
        with contextlib.suppress(PermissionError):  # who may not list a folder may make others in it
            parent = files().open(each.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                files().fsync(parent)
            finally:
                files().close(parent)
    return _ours(files().open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), str(path))


def open_folder(parent_fd: int, name: str) -> int:
    """Return a descriptor of the folder ``name``; it is made if need be, for its owner only.

    Raises:
        OSError: It cannot be opened, is a symbolic link or another user's, or others may write to it.
    """
    with contextlib.suppress(FileExistsError):
        files().mkdir(name, 0o700, dir_fd=parent_fd)
    return _ours(files().open(name, _FOLDER, dir_fd=parent_fd), name)


def open_file(parent_fd: int, name: str, flags: int = 0) -> int:
    """Return a descriptor, to read and write, of the file ``name``; it is made if need be, for its owner only.

    Args:
        parent_fd: Its folder.
        name: Without a slash.
        flags: More of them for `os.open`, e.g. ``os.O_DIRECT``.

    Raises:
        OSError: It cannot be opened, is a link or no regular file, is another user's, or others may write to it.
    """
    flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO would hang without it
    try:
        fd = files().open(name, flags, 0o600, dir_fd=parent_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refused(name, "is a symbolic link") from error
        raise
    status = files().fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        files().close(fd)
        raise _refused(name, "is no regular file" if status.st_nlink <= 1 else "has another name elsewhere")
    return _ours(fd, name)


def _ours(fd: int, name: str) -> int:
    status = files().fstat(fd)
    if status.st_uid != files().geteuid():
        files().close(fd)
        raise _refused(name, f"belongs to user {status.st_uid}, not to user {files().geteuid()}")
    if status.st_mode & OTHERS_MAY_WRITE:
        files().close(fd)
        raise _refused(name, f"has mode {stat.S_IMODE(status.st_mode):04o}, others may write to it")
    return fd


def _refused(name: str, why: str) -> OSError:
    return PermissionError(errno.EPERM, why, name)


FINGERPRINT = re.compile(r"[0-9a-f]{64}(-\d+of\d+)?")
_FIXED_BYTES = 64 << 10  # holder, probe, the directories themselves
_FIXED_BYTES_PER_GROUP = 64 << 10
_SLAB_BYTES_PER_METADATA_BYTE = 4096  # extents of a large file are counted as its own
HOLDER = NVME_MARK
MEMBER: Final = "member"
"""Which each directory of a tier has from its opening on, see `disks.Member`."""
IN_FOLDER: Final = ("slab", "ledger", "journal.new", "journal")
"""What a tier makes in a folder, or made in an earlier format; the records first."""
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
EXCLUSIVE: Final = fcntl.LOCK_EX | fcntl.LOCK_NB
"""How a directory is locked by who has it open."""


@dataclass(frozen=True)
class _Foreign:
    """Blocks of another fingerprint: another model, or this one as it was before a change."""

    name: str
    used_ns: int
    num_bytes: int


NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""What an error says then of the process, or the machine, and of no disk."""
FULL: Final = {errno.ENOSPC, errno.EDQUOT}
"""What a disk says that has no more room, of its own or for whoever this is."""


@dataclass(frozen=True)
class DirectoryShape(RecordShape):
    """Records of which each of several directories has a part: all together have a tier's slots, and no more."""

    num_directories: int = 1

    @classmethod
    def of(cls, kind: RecordShape, num_directories: int) -> "DirectoryShape":
        """Return what so many directories have of a tier's records."""
        return cls(**{each.name: getattr(kind, each.name) for each in fields(kind)}, num_directories=num_directories)

    @override
    def num_slots(self, num_blocks: int) -> int:
        """Return how many slots one directory has, where each holds so many blocks of prompts."""
        return -(-super().num_slots(num_blocks * self.num_directories) // self.num_directories)


class Directory:
    """A directory taken for this process alone, as long as it is ``held``.

    Args:
        path: Made if need be, for its owner only.
        capacity_bytes: Limit over everything in it.
        groups: The records that will be kept. Folders of other fingerprints are foreign: they go when room is needed.

    Attributes:
        fd: Its descriptor.
        folder_fds: Of each group.
        num_blocks: Blocks of prompts that it holds; each group has `RecordShape.num_slots` of that.
        capacity_bytes: The limit.
        held: Ends with it, and then other processes may take it; by an error, if its opening fails.
        num_reclaimed: Foreign folders deleted to make room.

    Raises:
        ConfigurationError: Not a directory, not this user's alone, not writable, held by another process, or too small.
    """

    def __init__(self, path: Path, capacity_bytes: int, groups: Sequence[RecordShape]) -> None:
        self.path = path
        self.num_reclaimed = 0
        self.capacity_bytes = capacity_bytes
        self._groups = groups
        self._allocated_bytes = 0
        self._kept_bytes = 0  # of foreign folders that could not be deleted
        self.num_blocks = fit(capacity_bytes, groups)
        self._reserved_bytes = self._reserved_for(self.num_blocks)
        self.folder_fds: list[int] = []
        with contextlib.ExitStack() as opened:
            self.fd = opened.enter_context(taken(path))
            with explained(path, "is it the NVMe tier's alone?"):
                for shape in groups:
                    self.folder_fds.append(open_folder(self.fd, shape.folder))
                    opened.callback(files().close, self.folder_fds[-1])
                    _drop_old_format(self.folder_fds[-1])
                    with contextlib.suppress(OSError):  # on a full disk: only an order depends on it
                        files().utime(self.folder_fds[-1])  # the folder last used is the last to make room for others
                self._foreign = _find_foreign(self.fd, {shape.folder for shape in groups})
            self.held = opened.pop_all()

    def take(self, num_bytes: int, *, is_known: bool) -> None:
        """Count ``num_bytes`` that files have on the disk already, and check that there is a place for the rest.

        Args:
            num_bytes: Of all slabs and ledgers.
            is_known: The tier had this capacity before. Then it opens even where others have made the disk full since:
                what lies there is served, and blocks that find no place fail until there is one.

        Raises:
            ConfigurationError: The filesystem is too small.
        """
        self._allocated_bytes += num_bytes
        self._reclaim_for(0)
        missing_bytes = _bytes_in_files(self.num_blocks, self._groups) - num_bytes
        if is_known or missing_bytes <= 0:
            return
        missing_bytes += self._reserved_bytes
        if missing_bytes > (free_bytes := self._free_bytes()):
            raise ConfigurationError(
                f"{self.path}: capacity={_size(self.capacity_bytes)} needs {_size(missing_bytes)} more than are there, "
                f"and its filesystem has {_size(free_bytes)}: lower capacity by at least "
                f"{_size(missing_bytes - free_bytes)}"
            )

    def resize(self, num_blocks: int) -> None:
        """Have another limit: as many bytes as so many blocks of prompts need.

        Raises:
            OSError: The filesystem has no place for them. Nothing has changed.
        """
        if num_blocks > self.num_blocks:
            wanted_bytes = _bytes_in_files(num_blocks, self._groups) - self._allocated_bytes
            if wanted_bytes > (free_bytes := self._free_bytes()):
                raise OSError(errno.ENOSPC, f"{wanted_bytes} bytes more are wanted, its filesystem has {free_bytes}")
        self.num_blocks = num_blocks
        self.capacity_bytes = _needed(num_blocks, self._groups)
        self._reserved_bytes = self._reserved_for(num_blocks)

    def give_back(self, num_bytes: int) -> None:
        """Count bytes that the caller has cut off its files."""
        self._allocated_bytes -= num_bytes
        self._reclaim_for(0)

    def allocate(self, fd: int, offset: int, num_bytes: int) -> None:
        """Extend a file, within the limit: foreign folders go, oldest first, as far as they are in the way.

        Raises:
            OSError: The disk is full, or the limit reached: a foreign folder could not be deleted.
        """
        if not self._reclaim_for(num_bytes):
            raise OSError(errno.ENOSPC, f"{self._kept_bytes} bytes of other models could not be deleted")
        self.extend(fd, offset, num_bytes)

    def extend(self, fd: int, offset: int, num_bytes: int) -> None:
        """Extend a file as `allocate` does, but also beyond the limit where a foreign folder could not be deleted.

        Raises:
            OSError: The disk is full.
        """
        self._reclaim_for(num_bytes)
        while True:
            try:
                files().posix_fallocate(fd, offset, num_bytes)
                break
            except OSError as error:
                if error.errno in {errno.EOPNOTSUPP, errno.EINVAL}:
                    files().ftruncate(fd, offset + num_bytes)  # a filesystem that cannot preallocate
                    break
                if error.errno not in FULL or not self._foreign:
                    cut(fd, offset)
                    raise
                self._reclaim_oldest()
        self._allocated_bytes += num_bytes

    def sync(self) -> None:
        """Return when the names of all files survive a loss of power."""
        for fd in (*self.folder_fds, self.fd):
            files().fsync(fd)

    def _free_bytes(self) -> int:
        """What the filesystem has, and would have without foreign folders."""
        return files().free_bytes(self.fd) + sum(foreign.num_bytes for foreign in self._foreign)

    def _reserved_for(self, num_blocks: int) -> int:
        """Bytes for everything but slabs and ledgers."""
        return _needed(num_blocks, self._groups) - _bytes_in_files(num_blocks, self._groups)

    def _reclaim_for(self, num_bytes: int) -> bool:
        """Delete foreign folders, oldest first, until there is room for so many bytes; say whether there is."""
        while (is_over := self._used_bytes() + num_bytes > self.capacity_bytes) and self._foreign:
            self._reclaim_oldest()
        return not is_over

    def _used_bytes(self) -> int:
        foreign_bytes = self._kept_bytes + sum(foreign.num_bytes for foreign in self._foreign)
        return self._reserved_bytes + self._allocated_bytes + foreign_bytes

    def _reclaim_oldest(self) -> None:
        foreign = self._foreign.pop(0)
        try:
            remove_folder(self.fd, foreign.name)
        except OSError as error:
            self._kept_bytes += foreign.num_bytes
            log("error", "nvme.directory_failed", path=str(self.path), error=f"{foreign.name}: {error.strerror}")
            return
        log("info", "nvme.reclaimed", path=str(self.path), folder=foreign.name, num_bytes=foreign.num_bytes)
        self.num_reclaimed += 1


def _bytes_in_files(num_blocks: int, groups: Iterable[RecordShape]) -> int:
    """Bytes in slabs and ledgers for so many blocks of prompts."""
    return sum(shape.num_slots(num_blocks) * (shape.stride_bytes + Ledger.num_bytes(1)) for shape in groups)


def _needed(num_blocks: int, groups: Iterable[RecordShape]) -> int:
    """Bytes on disk, at most, for so many blocks of prompts."""
    total = _FIXED_BYTES
    for shape in groups:
        num_slots = shape.num_slots(num_blocks)
        slab = num_slots * shape.stride_bytes
        total += _FIXED_BYTES_PER_GROUP + slab + slab // _SLAB_BYTES_PER_METADATA_BYTE + Ledger.num_bytes(num_slots)
    return total


def _size(num_bytes: int) -> str:
    return f"{size_in_words(num_bytes)} ({num_bytes} bytes)"


@contextlib.contextmanager
def taken(path: Path) -> Iterator[int]:
    """Take a directory for this process alone, and yield its descriptor; it is made if need be, for its owner only.

    Raises:
        ConfigurationError: It is none, not this user's alone, not writable, a shared_fs tier's, held by another
            process, or another tier's is above it or in it.
    """
    with contextlib.ExitStack() as opened:
        with explained(path):
            fd = open_root(path)
            opened.callback(files().close, fd)
            opened.callback(DirectoryLock(path, fd).release)
            is_new = _check_whose(path, fd)
            _name_holder(fd)
            files().close(open_file(fd, MEMBER))
            opened.push(partial(_unmark, fd))
            if is_new:  # again: each tier makes its marks before it looks for others', so that one of two sees both
                try:
                    _check_apart(path, fd)
                    _check_not_shared(path)
                except ConfigurationError:
                    files().unlink(HOLDER, dir_fd=fd)
                    raise
        yield fd


def check_place(path: Path) -> None:
    """See `NVMeBackend.check_place`."""
    with explained(path):
        if not files().exists(path):
            _check_apart(path)
            return
        fd = files().open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _check_whose(path, fd)
        finally:
            files().close(fd)


def _check_whose(path: Path, fd: int) -> bool:
    """Refuse a directory that is another tier's, or right above or in one; return whether no tier has had this one."""
    _check_apart(path, fd)
    if is_new := not _is_a_tiers(path):  # so is one whose opening has failed, with a holder all the same
        _check_not_shared(path)
    return is_new


def _check_apart(path: Path, fd: int | None = None) -> None:
    """Refuse a directory right above or in another tier's, as a host's server has them: neither counts the other's."""
    above = real_path(path).parent
    folders = [] if fd is None else [path / each.name for each in files().entries(fd) if each.is_folder]
    if nested := next((each for each in (above, *folders) if _is_a_tiers(each)), None):
        where = "in" if nested == above else "above"
        raise ConfigurationError(
            f"{path} is {where} {nested}, which is an NVMe tier's too, and neither would count what the other keeps: "
            "choose another directory, or, if no tier uses that one any more, delete what it has made there and nothing"
            f" else ({HOLDER}, {MEMBER}, {PROBE}, folders of 64 digits)"
        )


def _unmark(fd: int, kind: type[BaseException] | None, *_: object) -> None:
    """Take the mark off a directory that says nothing of itself, if its opening has failed."""
    with contextlib.suppress(OSError):
        if kind is None:
            return
        member = open_file(fd, MEMBER)
        try:
            if not files().fstat(member).st_size:
                files().unlink(MEMBER, dir_fd=fd)
        finally:
            files().close(member)


def _is_a_tiers(folder: Path) -> bool:
    with contextlib.suppress(OSError):  # what is another user's, such as lost+found, is not looked into
        return all(files().exists(folder / name) for name in (HOLDER, MEMBER))
    return False


def _check_not_shared(path: Path) -> None:
    if files().exists(path / SHARED_FS_MARK):
        raise ConfigurationError(
            f"{path} is a shared_fs tier's, whose {SHARED_FS_MARK} is in it: each needs a directory of its own"
        )


def folders_in(fd: int) -> list[str]:
    """Name the folders of a directory that hold blocks, of whichever model."""
    return sorted(each.name for each in _folders(fd))


def _folders(fd: int) -> list[FolderEntry]:
    """Return the folders that a tier has made. Other programs call theirs by 64 digits too, container engines do."""
    found = [each for each in files().entries(fd) if each.is_folder and FINGERPRINT.fullmatch(each.name)]
    return [each for each in found if _is_ours(fd, each.name)]


def remove_folder(parent_fd: int, name: str) -> None:
    """Delete what a tier has made in a folder, and the folder if nothing else is in it.

    The records are the first to go: what is left by a process that is killed meanwhile brings none of them back. Nor
    does a loss of power, once this has returned.

    Raises:
        OSError: It cannot be deleted.
    """
    fd = files().open(name, _FOLDER, dir_fd=parent_fd)
    try:
        for each in IN_FOLDER:
            with contextlib.suppress(FileNotFoundError):
                files().unlink(each, dir_fd=fd)
        files().fsync(fd)
        is_empty = not files().entries(fd)
    finally:
        files().close(fd)
    if is_empty:
        files().remove_tree(name, dir_fd=parent_fd)


def _is_ours(parent_fd: int, name: str) -> bool:
    """Say whether a tier has made a folder: by its slab and what goes with it, or as nothing else is in it.

    An open finds records without a ledger. Of one that is empty nobody knows whose it is, and nothing is lost.

    Raises:
        OSError: There is no descriptor left to look into it.
    """
    try:
        fd = files().open(name, _FOLDER, dir_fd=parent_fd)
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return False
    try:
        there = {each.name: each.is_folder for each in files().entries(fd)}
    finally:
        files().close(fd)
    of_tier = {name for name in IN_FOLDER if there.get(name) is False}
    return bool(of_tier) and (len(of_tier) == len(there) or ("slab" in of_tier and len(of_tier) > 1))


def fit(capacity_bytes: int, groups: Sequence[RecordShape]) -> int:
    """Return how many blocks of prompts have room."""
    num_blocks = blocks_within(capacity_bytes, lambda n: _needed(n, groups))
    if not num_blocks:
        raise ConfigurationError(
            f"capacity={_size(capacity_bytes)} holds no block: one of each KV group, with what is kept about them, "
            f"takes {_size(_needed(1, groups))}"
        )
    return num_blocks


class DirectoryLock:
    """A flock(2) on a directory, by a descriptor of its own: children that this process forks give up theirs.

    A forked child shares a lock with its parent for as long as either has the descriptor, so that one that outlives its
    parent would keep the directory from everybody.
    """

    _held: ClassVar[set["DirectoryLock"]] = set()

    def __init__(self, path: Path, fd: int) -> None:
        self._fd = files().open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
        self._held.add(self)
        try:
            files().flock(self._fd, EXCLUSIVE)
        except BlockingIOError:
            self.release()
            raise ConfigurationError(
                f"{path} is held by another NVMe tier, of process {holder(fd)}: each needs a directory of its own"
            ) from None
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Let go of the directory, once."""
        if self in self._held:
            self._held.remove(self)
            files().close(self._fd)

    @classmethod
    def after_fork(cls) -> None:
        """Give up what the parent holds."""
        for lock in list(cls._held):
            lock.release()


os.register_at_fork(after_in_child=DirectoryLock.after_fork)


def _name_holder(fd: int) -> None:
    holder_fd = open_file(fd, HOLDER)
    try:
        with contextlib.suppress(OSError):  # on a full disk: the name is for messages only
            files().ftruncate(holder_fd, 0)
            files().pwrite(holder_fd, f"{system().getpid()}\n".encode(), 0)
    finally:
        files().close(holder_fd)


def holder(fd: int) -> str:
    """Return the number of the process that has a directory, or had it last, in words for messages."""
    try:
        holder_fd = open_file(fd, HOLDER)
    except OSError:
        return "unknown"
    try:
        return files().pread(holder_fd, 32, 0).decode(errors="replace").strip() or "unknown"
    finally:
        files().close(holder_fd)


def _drop_old_format(folder_fd: int) -> None:
    """Begin anew where an earlier version kept a journal: nothing says which of its records were evicted."""
    if "journal" in (there := {each.name for each in files().entries(folder_fd)}):
        for name in sorted(there & {"journal.new", "slab", "journal"}, reverse=True):  # the journal last
            files().unlink(name, dir_fd=folder_fd)


def _find_foreign(fd: int, ours: set[str]) -> list[_Foreign]:
    """Return the folders of other fingerprints, the one used least recently first."""
    found = [
        _Foreign(entry.name, entry.used_ns, files().disk_usage(entry.name, dir_fd=fd))
        for entry in _folders(fd)
        if entry.name not in ours
    ]
    return sorted(found, key=lambda foreign: foreign.used_ns)


@contextlib.contextmanager
def explained(
    path: Path, advice: str = "the NVMe tier needs a directory that it can write to, and nobody else"
) -> Iterator[None]:
    """Raise `ConfigurationError` for an `OSError` about a directory or what is in it."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            advice = "raise the limit of open files (ulimit -n)"
        elif error.errno in FULL:
            advice = "make room there, or choose a directory that has some"
        name = f"{path}" if error.filename in {None, str(path)} else f"{path / str(error.filename)}"
        if error.errno in {errno.EACCES, errno.EROFS} and name != str(path):
            name = f"{path}: no {error.filename!r} can be opened or made in it"
        why = error.strerror
        if isinstance(error, FileExistsError):
            why = "it is a file" if Path(name).exists() else "it is a link that leads nowhere"
        raise ConfigurationError(f"{name}: {why}; {advice}") from error


PROBE: Final = "probe"


def probe_direct_io(folder_fd: int, mode: Literal["auto", "always", "never"], spare: str) -> tuple[int, str]:
    """Find out by a page written and read back whether a folder has O_DIRECT.

    Args:
        folder_fd: The folder.
        mode: The setting.
        spare: A file there, which is opened instead where the disk is full: that says nothing about how it writes.

    Returns:
        Flags for `os.open`, and why there are none; empty if there are.

    Raises:
        OSError: As `page_problem` raises it.
    """
    if mode == "never":
        return 0, "direct='never'"
    problem = page_problem(folder_fd, os.O_DIRECT, spare)
    return (0, f"a page written and read: {problem}") if problem else (os.O_DIRECT, "")


def page_problem(folder_fd: int, flags: int, spare: str) -> str:
    """Write a page to a file of its own in a folder, read it back, and say what is wrong; empty if nothing is.

    The file stays, so that its page has a place on a disk that is full.

    Args:
        folder_fd: The folder.
        flags: For `os.open`.
        spare: A file there, which is read instead where there is no room for a page.

    Raises:
        OSError: There is no descriptor left, which says nothing of the disk.
    """
    page, back = Block.empty(PAGE_BYTES).padded, Block.empty(PAGE_BYTES).padded
    page[:] = bytes(range(256)) * (PAGE_BYTES // 256)
    try:
        try:
            fd = open_file(folder_fd, PROBE, flags)
            try:
                num_written = files().pwritev(fd, [page], 0)
                files().fsync(fd)  # else a page cache would answer for the disk
                files().forget_cached(fd)
                is_whole = num_written == files().preadv(fd, [back], 0) == PAGE_BYTES and back == page
            finally:
                files().close(fd)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return _read_problem(folder_fd, flags, spare)
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return error.strerror or str(error)
    return "" if is_whole else "it was not read back"


def _read_problem(folder_fd: int, flags: int, name: str) -> str:
    """Read the first page of a file that is there already, and say what is wrong."""
    fd = open_file(folder_fd, name, flags)
    try:
        files().forget_cached(fd)
        files().preadv(fd, [Block.empty(PAGE_BYTES).padded], 0)
    finally:
        files().close(fd)
    return ""
