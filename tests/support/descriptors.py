"""What this process has open, and mapped."""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

_MOST = 1024


@contextlib.contextmanager
def descriptors_left(num_left: int) -> Iterator[None]:
    """Have this process be able to open so many files, and no more."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_MOST, limits[0]), limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/", os.O_RDONLY))
        for _ in range(num_left):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in taken:
            os.close(each)


def num_open_in(path: Path) -> int:
    """Count the descriptors that this process has of a folder and what is in it."""
    num_open = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed by now
            num_open += str(each.readlink()).startswith(str(path))
    return num_open


def slabs() -> set[int]:
    """Return the inodes of slabs of host memory that this process has mapped or open."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    inodes = {int(line.split()[4]) for line in lines if "/memfd:tiered_kv-" in line}
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed by now
            if "/memfd:tiered_kv-" in str(each.readlink()):
                inodes.add(each.stat().st_ino)
    return inodes
