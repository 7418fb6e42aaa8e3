"""The files of one directory: a slab and a ledger for each KV group. Opened, grown, resized and closed by one thread.

Blocks are moved in slabs by any threads meanwhile.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tiered_kv.backend import RecordShape
from tiered_kv.errors import ConfigurationError
from tiered_kv_backends.nvme.directory import HOLDER, Directory
from tiered_kv_backends.nvme.group import Group
from tiered_kv_backends.nvme.ledger import Entries, Ledger, Order, Slots
from tiered_kv_backends.nvme.own_files import open_file
from tiered_kv_backends.nvme.probe import page_problem, probe_direct_io
from tiered_kv_backends.nvme.settings import NVMeSettings
from tiered_kv_backends.nvme.slab import Slab

_MAX_GROWTH_BYTES = 256 << 20
"""How far ahead of its use, at most, a slab is given its place on the disk."""


class Files:
    """What is open in a directory that is this process's, until `close`.

    Attributes:
        groups: In the order of their shapes.
        found: Of each group, what its ledger says, and the slots of which it can say nothing.
        close: Closes all of them and releases the directory. No call may be under way.
    """

    def __init__(self, path: Path, settings: NVMeSettings, shapes: Sequence[RecordShape], order: Order) -> None:
        """Open them.

        Raises:
            ConfigurationError: The directory is another's, cannot be written to, is too small, or has no direct I/O
                although that is wanted.
        """
        self.groups: list[Group] = []
        self.found: list[tuple[Entries, Slots]] = []
        self._path = path
        with ExitStack() as opened:
            self._directory = Directory(path, settings.capacity, shapes)
            opened.callback(self._directory.close)
            flags, self._io_reason = probe_direct_io(self._directory.fd, settings.direct, HOLDER)
            if self._io_reason and settings.direct == "always":
                raise ConfigurationError(f"{path} has no direct I/O ({self._io_reason}): set direct='auto'")
            try:
                for folder_fd, shape in zip(self._directory.folder_fds, shapes, strict=True):
                    slab = Slab(open_file(folder_fd, "slab", flags), shape, self._directory.num_slots)
                    opened.callback(slab.close)
                    ledger = Ledger(open_file(folder_fd, "ledger"), order)
                    opened.callback(ledger.close)
                    ledger.shrink(self._directory.num_slots)  # before it is read: a file may be of any length
                    self.groups.append(Group(slab, ledger))
                    self.found.append(ledger.read(slab.num_allocated))
                self._take_room()
            except OSError as error:
                name = f"{path}: {error.filename}" if error.filename else f"{path}"
                raise ConfigurationError(f"{name}: {error.strerror}") from error
            self.close = opened.pop_all().close

    def describe(self) -> dict[str, object]:
        """Return where and how blocks are kept, see `Store.describe`."""
        return {
            "path": str(self._path),
            "capacity_bytes": int(self._directory.capacity_bytes),
            "num_slots": self._directory.num_slots,
            "io": "buffered" if self._io_reason else "direct",
            "io_reason": self._io_reason,
            "allocated_bytes": sum(each.slab.num_allocated * each.slab.shape.stride_bytes for each in self.groups),
            "ledger_bytes": sum(Ledger.num_bytes(each.ledger.num_slots) for each in self.groups),
            "own_bytes_written": sum(each.ledger.bytes_written for each in self.groups),
            "reclaimed_fingerprints": self._directory.num_reclaimed,
        }

    def grow(self, slab: Slab, num_slots: int) -> OSError | None:
        """Give slots their place on the disk, some ahead of their use.

        Returns:
            Why there was not as much as wanted. Slots that get no place will fail to be written.
        """
        if num_slots <= slab.num_allocated:
            return None
        problem = None
        ahead = min(_MAX_GROWTH_BYTES // slab.shape.stride_bytes, slab.num_slots // 32)
        for wanted in (min(slab.num_slots, num_slots + ahead), num_slots):
            try:
                slab.grow(wanted, self._directory.allocate)
            except OSError as error:
                problem = error
            else:
                break
        return problem

    def resize(self, num_slots: int) -> None:
        """Have so many slots in each group. What is given up is free on the disk when this returns.

        Raises:
            OSError: The disk is too small, or fails. To be as it was it has to be resized again.
        """
        self._directory.resize(num_slots)
        for each in self.groups:
            each.ledger.grow(num_slots, self._directory.allocate)
        for each in self.groups:
            self._directory.give_back(each.slab.resize(num_slots) + each.ledger.shrink(num_slots))

    def sync(self, ledger: Ledger) -> None:
        """Return when what a ledger says survives a loss of power.

        Raises:
            OSError: The disk fails.
        """
        ledger.sync()
        self._directory.sync()

    def problem(self) -> str:
        """Say why the disk does not work at all, by a page written and read back; empty if it does."""
        return page_problem(self._directory.fd, 0 if self._io_reason else os.O_DIRECT, HOLDER)

    def _take_room(self) -> None:
        """Have the directory count what is there, and every slot its entry in a ledger."""
        directory = self._directory
        is_known = all(each.ledger.num_slots >= directory.num_slots for each in self.groups)
        num_bytes = 0
        for each in self.groups:
            num_bytes += each.slab.num_allocated * each.slab.shape.stride_bytes
            num_bytes += Ledger.num_bytes(each.ledger.num_slots)
        directory.take(num_bytes, is_known=is_known)
        for each in self.groups:
            each.ledger.grow(directory.num_slots, directory.allocate)
            each.resize_states(directory.num_slots)
