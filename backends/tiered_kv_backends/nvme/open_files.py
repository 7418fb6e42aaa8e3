"""What is open in a directory: the slab, the ledger and the states of the slots of each KV group.

A `Group` is these three of one KV group; `OpenFiles` opens, grows, resizes and closes those of all groups, in one
thread, while any threads move blocks in slabs; `rebuild` reads from headers what a ledger cannot say.
"""

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered_kv.media.backend import RecordShape
from tiered_kv.media.record import key_in
from tiered_kv.system import system
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.keys import BlockKey, Names
from tiered_kv.values.log import log
from tiered_kv_backends.nvme.directory import FULL, HOLDER, Directory, open_file, page_problem, probe_direct_io
from tiered_kv_backends.nvme.ledger import Damaged, Entries, Ledger, Order, Slots
from tiered_kv_backends.nvme.nvme_settings import NVMeSettings
from tiered_kv_backends.nvme.slab import Erase, Slab

EMPTY, HELD, WRITING, ERASING = range(4)
"""States of a slot: it has no header of a record, or may have one; a call is writing it; one is overwriting it."""

_NUM_ERASING_THREADS = 2
"""At once for one call: the others go on writing."""
Run = Callable[..., "asyncio.Future[Any]"]
_NO_SLOTS: Slots = np.empty(0, np.int64)


class Group:
    """A slab, its ledger, and the states of its slots, which are the event loop's.

    No slot is written while it is erased: a write waits for the erasure, and an erasure leaves out what is being
    written.

    Attributes:
        states: Of each slot, ``(num_slots,)`` after `resize_states`.
        erasures: Those under way.
        num_checkpoints: Those that have not entered all that they remember.
        was_full: Whether `Slab.is_full` was set when the event loop looked last.
    """

    def __init__(self, slab: Slab, ledger: Ledger) -> None:
        self.slab = slab
        self.ledger = ledger
        self.states = np.empty(0, np.uint8)
        self.erasures: set[asyncio.Future[None]] = set()
        self.num_checkpoints = 0
        self.was_full = False

    def end_checkpoint(self, _: object) -> None:
        """Count a checkpoint off."""
        self.num_checkpoints -= 1

    def mark(self, slots: Slots, state: int) -> None:
        """Give slots a state, as far as they still exist."""
        self.states[slots[slots < len(self.states)]] = state

    def resize_states(self) -> None:
        """Have states of as many slots as the slab; those that come are empty."""
        was, num_slots = self.states, self.slab.num_slots
        self.states = np.full(num_slots, EMPTY, np.uint8)
        num_kept = min(len(was), num_slots)
        self.states[:num_kept] = was[:num_kept]

    def held_beside(self, slots: Slots) -> Slots:
        """Return the slots that may hold a record, are not being written, and are not among ``slots``."""
        is_held = self.states == HELD
        is_held[slots] = False
        held: Slots = is_held.nonzero()[0]
        return held

    def are_erased(self, slots: Slots) -> bool:
        """Say whether one of these is being erased."""
        return len(self.erasures) > 0 and bool((self.states[slots[slots < len(self.states)]] == ERASING).any())

    async def until_erased(self, slots: Slots) -> None:
        """Return when none of these is being erased."""
        while self.are_erased(slots):
            await asyncio.wait(self.erasures, return_when=asyncio.FIRST_COMPLETED)

    async def forget(self, slots: Slots, erase: Erase, in_clerk: Run, in_writers: Run) -> None:
        """Forget slots and overwrite what they hold, save those that are being written.

        Args:
            slots: Which.
            erase: How much of their records.
            in_clerk: Runs a call in the ledger's thread.
            in_writers: Runs one in any that may write.

        Raises:
            OSError: The disk did not take it.
        """
        await self.until_erased(slots)
        slots = slots[slots < len(self.states)]
        to_erase = slots[self.states[slots] != WRITING]
        self.mark(to_erase, ERASING)
        erased = asyncio.ensure_future(self._erase(slots, to_erase, erase, in_clerk, in_writers))
        self.erasures.add(erased)
        erased.add_done_callback(look_at)
        erased.add_done_callback(self.erasures.discard)
        await asyncio.shield(erased)  # a write to one of these slots waits for it, whoever waits here

    async def _erase(self, slots: Slots, to_erase: Slots, erase: Erase, in_clerk: Run, in_writers: Run) -> None:
        state = HELD
        try:
            await in_clerk(self.ledger.clear, slots)
            shares = np.array_split(np.sort(to_erase), _NUM_ERASING_THREADS)
            jobs = [in_writers(self.slab.erase, share.tolist(), erase) for share in shares]
            await asyncio.wait(jobs)
            for job in jobs:
                job.result()
            state = EMPTY
        finally:
            self.mark(to_erase, state)

    def remember(self, names: Names, slots: Slots, sequences: NDArray[np.uint64], failed: Slots = _NO_SLOTS) -> None:
        """Enter what was written, in which order, and that slots whose write has failed hold nothing.

        In any thread: of one slot there is never more than one call at a time, see `num_checkpoints`.

        Raises:
            OSError: It cannot be, or would be in vain.
        """
        if len(failed):
            with contextlib.suppress(OSError):  # then a restart finds what was there before, if it is whole
                self.ledger.clear(failed)
        if self.slab.is_removed or self.ledger.is_removed:
            raise OSError(errno.ESTALE, "the files of this tier were deleted")
        self.ledger.write(names, slots, sequences)


_MAX_GROWTH_BYTES = 256 << 20
"""How far ahead of its use, at most, a slab is given its place on the disk."""


class OpenFiles:
    """The open files of a directory that is this process's, until `close`.

    Attributes:
        groups: In the order of their shapes.
        found: Of each group, what its ledger says, and the slots of which it can say nothing.
        close: Closes all of them and releases the directory. No call may be under way.
    """

    def __init__(self, path: Path, settings: NVMeSettings, shapes: Sequence[RecordShape], order: Order) -> None:
        """Open the directory's files.

        Raises:
            ConfigurationError: The directory is another's, cannot be written to, is too small, or has no direct I/O
                although that is wanted.
        """
        self.groups: list[Group] = []
        self.found: list[tuple[Entries, Damaged]] = []
        self._path = path
        self._growing = system().lock()  # files grow in whichever thread writes first to a new place
        with ExitStack() as opened:
            self._directory = Directory(path, settings.capacity, shapes)
            opened.push(self._directory.held)
            try:
                flags, self._io_reason = probe_direct_io(self._directory.fd, settings.direct, HOLDER)
                if self._io_reason and settings.direct == "always":
                    raise ConfigurationError(f"{path} has no direct I/O ({self._io_reason}): set direct='auto'")
                for folder_fd, shape in zip(self._directory.folder_fds, shapes, strict=True):
                    num_slots = shape.num_slots(self._directory.num_blocks)
                    slab = Slab(open_file(folder_fd, "slab", flags), shape, num_slots)
                    opened.callback(slab.close)
                    ledger = Ledger(open_file(folder_fd, "ledger"), order)
                    opened.callback(ledger.close)
                    ledger.shrink(num_slots)  # before it is read: a file may be of any length
                    self.groups.append(Group(slab, ledger))
                    self.found.append(ledger.read(slab.num_allocated))
                self._take_room()
            except OSError as error:
                name = f"{path}: {error.filename}" if error.filename else f"{path}"
                raise ConfigurationError(f"{name}: {error.strerror}") from error
            self.close = opened.pop_all().close

    def describe(self) -> dict[str, object]:
        """Return where and how blocks are kept, see `DirectoryStore.describe`."""
        return {
            "path": str(self._path),
            "capacity_bytes": int(self._directory.capacity_bytes),
            "num_slots": sum(each.slab.num_slots for each in self.groups),
            "io": "buffered" if self._io_reason else "direct",
            "io_reason": self._io_reason,
            "allocated_bytes": sum(each.slab.num_allocated * each.slab.shape.stride_bytes for each in self.groups),
            "ledger_bytes": sum(Ledger.num_bytes(each.ledger.num_slots) for each in self.groups),
            "own_bytes_written": sum(each.ledger.bytes_written for each in self.groups),
            "reclaimed_fingerprints": self._directory.num_reclaimed,
        }

    def grow(self, slab: Slab, num_slots: int) -> OSError | None:
        """Give slots their place on the disk, some ahead of their use; in any thread.

        Returns:
            Why there was not as much as wanted. Slots that get no place will fail to be written.
        """
        if num_slots <= slab.num_allocated:
            return None
        with self._growing:
            return self._grow(slab, num_slots)

    def _grow(self, slab: Slab, num_slots: int) -> OSError | None:
        if num_slots <= slab.num_allocated:
            return None  # by whoever had the lock
        problem = None
        ahead = min(_MAX_GROWTH_BYTES // slab.shape.stride_bytes, slab.num_slots // 32)
        for wanted in (min(slab.num_slots, num_slots + ahead), num_slots):
            try:
                slab.grow(wanted, self._directory.allocate)
            except OSError as error:
                problem = error
                slab.is_full = error.errno in FULL
            else:
                break
        return problem

    def resize(self, num_blocks: int) -> None:
        """Have slots for so many blocks of prompts. What is given up is free on the disk when this returns.

        Raises:
            OSError: The disk is too small, or fails. To be as it was it has to be resized again.
        """
        with self._growing:
            self._directory.resize(num_blocks)
            for each in self.groups:
                each.ledger.grow(each.slab.shape.num_slots(num_blocks), self._directory.allocate)
            for each in self.groups:
                num_slots = each.slab.shape.num_slots(num_blocks)
                self._directory.give_back(each.slab.resize(num_slots))
                self._directory.give_back(each.ledger.shrink(num_slots))

    def cut_off(self) -> None:
        """Have files end with their slots: what erases some while they are given up makes them longer again."""
        with self._growing:
            for each in self.groups:
                each.slab.cut_off()
                each.ledger.shrink(each.ledger.num_slots)

    def sync(self, ledger: Ledger) -> None:
        """Return when what a ledger says survives a loss of power.

        Raises:
            OSError: The disk fails.
        """
        ledger.sync()
        self._directory.sync()

    def problem(self) -> str:
        """Say why the disk does not work at all, by a page written and read back; empty if it does."""
        with contextlib.suppress(OSError):  # no descriptor is left: the disk may well work
            return page_problem(self._directory.fd, 0 if self._io_reason else os.O_DIRECT, HOLDER)
        return ""

    def _take_room(self) -> None:
        """Have the directory count what is there, and every slot its entry in a ledger."""
        directory = self._directory
        is_known = all(each.ledger.num_slots >= each.slab.num_slots for each in self.groups)
        num_bytes = 0
        for each in self.groups:
            num_bytes += each.slab.num_allocated * each.slab.shape.stride_bytes
            num_bytes += Ledger.num_bytes(each.ledger.num_slots)
        directory.take(num_bytes, is_known=is_known)
        for each in self.groups:  # also where foreign folders cannot go: blocks find no place then
            each.ledger.grow(each.slab.num_slots, directory.extend)
            each.resize_states()


_SLOTS_PER_JOB = 4096


async def rebuild(
    slab: Slab, damaged: Damaged, run: Callable[..., "asyncio.Future[Entries]"], *, is_blank: bool
) -> tuple[Entries, int]:
    """Return the blocks in these slots by the headers there, and how many of the slots are damaged; log it.

    Args:
        slab: Where to look: one page of I/O a slot. Payloads are verified when they are read.
        damaged: Slots of which nothing else is known, and what is left of their entries.
        run: Runs a function in a thread that may read.
        is_blank: Whether nothing was ever written of them, as far as is known: none is damaged if nothing is found.
    """
    started, slots = system().monotonic(), damaged.slots
    starts = range(0, len(slots), _SLOTS_PER_JOB)
    jobs = [run(_entries_in, slab, slots[start : start + _SLOTS_PER_JOB].tolist()) for start in starts]
    await asyncio.wait(jobs)
    found = Entries.joined(*(job.result() for job in jobs))
    if is_blank and not len(found.slots):
        return found, 0
    is_right = ~damaged.deny(found)
    rebuilt = Entries(found.names[is_right], found.slots[is_right], found.sequences[is_right])
    log(
        "warning",
        "nvme.ledger_damaged",
        folder=slab.shape.folder,
        damaged=len(slots),
        rebuilt=len(rebuilt.slots),
        took_ms=round(1000 * (system().monotonic() - started), 1),
    )
    return rebuilt, len(slots)


def _entries_in(slab: Slab, slots: list[int]) -> Entries:
    headers, _ = slab.headers(slots)
    return entries_of({slot: key_in(header.data) for slot, header in zip(slots, headers, strict=True)}, slab.shape)


def entries_of(keys: Mapping[int, BlockKey | None], shape: RecordShape) -> Entries:
    """Return what slots hold by their headers alone: of ``shape``, and used nobody knows when."""
    found = {
        slot: key for slot, key in keys.items() if key is not None and key.namespace.fingerprint == shape.fingerprint
    }
    hashes = np.frombuffer(b"".join(key.hash for key in found.values()), np.uint64).reshape(-1, 4)
    masks = np.array([key.namespace.mask for key in found.values()], np.uint64).reshape(-1, 4)
    return Entries(hashes ^ masks, np.array([*found], np.int64), np.zeros(len(found), np.uint64))


def look_at(future: "asyncio.Future[Any]") -> None:
    """Take note of an error, so that one whose waiter was cancelled is not logged as forgotten."""
    if not future.cancelled():
        future.exception()
