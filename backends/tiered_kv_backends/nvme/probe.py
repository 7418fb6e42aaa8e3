"""Whether a disk works, and how: by a page that is written to a file of its own and read back."""

import errno
import os
from typing import Final, Literal

from tiered_kv.backend import Block
from tiered_kv.layout import PAGE_BYTES
from tiered_kv.system import files
from tiered_kv_backends.nvme.own_files import open_file

_PROBE: Final = "probe"
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}


def probe_direct_io(folder_fd: int, mode: Literal["auto", "always", "never"], spare: str) -> tuple[int, str]:
    """Find out by a page written and read back whether a folder has O_DIRECT.

    Args:
        folder_fd: The folder.
        mode: The setting.
        spare: A file there, which is opened instead where the disk is full: that says nothing about how it writes.

    Returns:
        Flags for `os.open`, and why there are none; empty if there are.
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
    """
    page, back = Block.empty(PAGE_BYTES).padded, Block.empty(PAGE_BYTES).padded
    page[:] = bytes(range(256)) * (PAGE_BYTES // 256)
    try:
        try:
            fd = open_file(folder_fd, _PROBE, flags)
            try:
                num_written = files().pwritev(fd, [page], 0)
                files().fsync(fd)  # else a page cache would answer for the disk
                files().forget_cached(fd)
                is_whole = num_written == files().preadv(fd, [back], 0) == PAGE_BYTES and back == page
            finally:
                files().close(fd)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return _read_problem(folder_fd, flags, spare)
    except OSError as error:
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
