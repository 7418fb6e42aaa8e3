"""What this process has open, and mapped."""

import contextlib
from pathlib import Path


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
