"""What this process has open."""

import contextlib
from pathlib import Path


def num_open_in(path: Path) -> int:
    """Count the descriptors that this process has of a folder and what is in it."""
    num_open = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed by now
            num_open += str(each.readlink()).startswith(str(path))
    return num_open
