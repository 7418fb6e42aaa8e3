"""Opening a file by a path of several names, none of which may be a symbolic link, with one system call.

Folder by folder it takes three calls a name, each of which gives up the interpreter: of many threads at once half their
time went there. Linux has ``openat2`` since 5.6; elsewhere, and where a sandbox refuses it, callers go step by step.
"""

import ctypes
import errno
import os
from typing import Final

_OPENAT2: Final = ctypes.c_long(437)
"""Its number, on every architecture."""
_RESOLVE_NO_SYMLINKS: Final = 0x04
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class Opener:
    """Opens files for one purpose. Any thread may use it.

    Attributes:
        is_there: Whether the system knows the call, as far as was seen.
    """

    def __init__(self, flags: int) -> None:
        self._how = _How(flags, 0, _RESOLVE_NO_SYMLINKS)
        self.is_there = True

    def open(self, path: str, folder_fd: int) -> int:
        """Return a descriptor of the file at ``path`` below a folder; -1 where that takes a step for each name.

        Raises:
            FileNotFoundError: There is none.
        """
        if not self.is_there:
            return -1
        how, size = ctypes.byref(self._how), ctypes.c_size_t(ctypes.sizeof(_How))
        fd = int(_LIBC.syscall(_OPENAT2, ctypes.c_int(folder_fd), path.encode(), how, size))
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code == errno.ENOENT:
            raise FileNotFoundError(code, os.strerror(code), path)
        if code in {errno.ENOSYS, errno.EPERM}:
            self.is_there = False
        return -1  # whatever is in the way, step by step it shows which
