"""Opening files and folders that must be this user's alone: by descriptor of their folder, never through a link.

A directory may have been prepared by somebody else: with symbolic links, FIFOs or hard links under the names that we
write to. What is not ours alone is refused before anything is read from it or written to it.
"""

import contextlib
import errno
import os
import stat
from pathlib import Path

from tiered_kv.system import files

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def open_root(path: Path) -> int:
    """Return a descriptor of the directory that ``path`` leads to; it is made if need be, for its owner only.

    Raises:
        OSError: It cannot be opened, is another user's, or others may write to it.
    """
    files().make_folders(path, 0o700)
    return _ours(files().open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), str(path))


def open_folder(parent_fd: int, name: str) -> int:
    """Return a descriptor of the folder ``name``; it is made if need be, for its owner only.

    Raises:
        OSError: It cannot be opened, is a symbolic link or another user's, or others may write to it.
    """
    with contextlib.suppress(FileExistsError):
        files().mkdir(name, 0o700, dir_fd=parent_fd)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return _ours(files().open(name, flags, dir_fd=parent_fd), name)


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
    if status.st_mode & _OTHERS_MAY_WRITE:
        files().close(fd)
        raise _refused(name, f"has mode {stat.S_IMODE(status.st_mode):04o}, others may write to it")
    return fd


def _refused(name: str, why: str) -> OSError:
    return PermissionError(errno.EPERM, why, name)
