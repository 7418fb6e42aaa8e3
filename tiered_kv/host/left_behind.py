"""Directories of models on disks: which there are, and how one goes that nobody uses any more.

What is deleted is what an NVMe tier has made and nobody holds: a directory of this user's alone, with a holder file,
folders of blocks, the page that its disk is probed by and what it says of itself, and nothing else. Anything of others
in it, or a tier that has it open, keeps it whole.
"""

import fcntl
import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

DIRECTORY_DIGITS: Final = 32
_DIRECTORY: Final = re.compile(f"[0-9a-f]{{{DIRECTORY_DIGITS}}}")
_HOLDER: Final = "holder"
_FILES: Final = frozenset({_HOLDER, "probe", "member", "member.new"})
_FOLDER: Final = re.compile(r"[0-9a-f]{64}(-\d+of\d+)?")
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def left_in(path: Path) -> list[str]:
    """Name the directories of models in a directory; others' are none, whatever they are called."""
    with suppress(OSError):
        return [each.name for each in path.iterdir() if _DIRECTORY.fullmatch(each.name) and _is_a_models(each)]
    return []


def delete(path: Path) -> bool:
    """Delete a model's directory; return whether it is gone. Blocks the thread for as long as its files take."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which an open tier has
        if not _is_a_models(path) or not _is_ours(fd):
            return False
        for name in os.listdir(fd):  # noqa: PTH208 - a Path has no descriptors
            if name not in _FILES:
                shutil.rmtree(name, dir_fd=fd)
            elif name != _HOLDER:
                os.unlink(name, dir_fd=fd)
        os.unlink(_HOLDER, dir_fd=fd)  # the last: without it this would be no model's at the next start
        path.rmdir()
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)


def _is_a_models(path: Path) -> bool:
    with suppress(OSError):
        return not path.is_symlink() and stat.S_ISREG((path / _HOLDER).lstat().st_mode)
    return False


def _is_ours(fd: int) -> bool:
    """Say whether all that lies in a directory is what a tier of this user's keeps there."""
    about = os.fstat(fd)
    if about.st_uid != os.geteuid() or about.st_mode & _OTHERS_MAY_WRITE:
        return False
    with os.scandir(fd) as entries:
        return all(
            each.is_dir(follow_symlinks=False)
            if _FOLDER.fullmatch(each.name)
            else each.name in _FILES and each.is_file(follow_symlinks=False)
            for each in entries
        )
