"""A medium that fails on demand, for programs that know nothing of it: `medium.c` loaded before their libc."""

import mmap
import os
import pathlib
import shutil
import struct
import subprocess
from collections.abc import Mapping
from typing import Final

SOURCE: Final = pathlib.Path(__file__).with_name("medium.c")
_ORDER: Final = struct.Struct("4i")
_FINE, _EIO_READ, _ENOSPC_WRITE, _HANG_READ, _LATE_READ, _LIE_WRITE, _KILL_WRITE = range(7)


def built(folder: pathlib.Path) -> pathlib.Path | None:
    """Return the library, built in a folder; None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "medium.so"
    if not library.exists():
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def variables(library: pathlib.Path, folder: pathlib.Path) -> Mapping[str, str]:
    """Return what a process must find in its environment for files under ``folder/data`` to be on the medium."""
    (folder / "data").mkdir()
    order = folder / "order"
    order.write_bytes(bytes(_ORDER.size))
    return {"LD_PRELOAD": str(library), "FAULTS_ORDER": str(order), "FAULTS_UNDER": str(folder / "data")}


class Medium:
    """Gives the orders, from within the process or from outside; forks share it."""

    def __init__(self, order: pathlib.Path) -> None:
        """Take the file that `variables` made."""
        fd = os.open(order, os.O_RDWR)
        self._order = mmap.mmap(fd, _ORDER.size)
        os.close(fd)

    def be_fine(self) -> int:
        """End any order; return how many calls it was carried out on."""
        num_hits: int = _ORDER.unpack(self._order[: _ORDER.size])[2]
        self._give(_FINE)
        return num_hits

    def fail_reads(self) -> None:
        """Have reads fail with EIO."""
        self._give(_EIO_READ)

    def be_full(self) -> None:
        """Have writes fail with ENOSPC."""
        self._give(_ENOSPC_WRITE)

    def hang_reads(self) -> None:
        """Have reads not return before the order ends."""
        self._give(_HANG_READ)

    def delay_reads(self, seconds: float) -> None:
        """Have reads take so much longer."""
        self._give(_LATE_READ, delay_ms=int(seconds * 1000))

    def lie(self) -> None:
        """Have writes of blocks answer that all is written, and write zeros."""
        self._give(_LIE_WRITE)

    def kill_at_write(self, number: int) -> None:
        """End the process by SIGKILL in the middle of the ``number``-th write of a block from now, from 0 on."""
        self._give(_KILL_WRITE, countdown=number)

    @property
    def num_hits(self) -> int:
        """How many calls the order was carried out on so far."""
        num_hits: int = _ORDER.unpack(self._order[: _ORDER.size])[2]
        return num_hits

    def _give(self, what: int, *, countdown: int = 0, delay_ms: int = 0) -> None:
        self._order[4 : _ORDER.size] = _ORDER.pack(what, countdown, 0, delay_ms)[4:]
        self._order[:4] = struct.pack("i", what)
