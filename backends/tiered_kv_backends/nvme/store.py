"""`Store`: slots in preallocated files of one directory, moved by direct, vectored I/O in threads of its own.

From the bottom: `Calls` keeps the files open until the last call in a thread has ended; a `Group` is the slab, the
ledger and the states of the slots of one KV group; `Files` opens, grows, resizes and closes those of all groups, in one
thread, while any threads move blocks in slabs; `rebuild` reads from headers what a ledger cannot say.
"""

import asyncio
import contextlib
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiered_kv.media.backend import Begun, Block, Make, Outcome, RecordShape, Verify, Workers, check_lengths
from tiered_kv.media.record import key_in
from tiered_kv.system import system
from tiered_kv.values.errors import BackendUnavailableError, ClosedError, ConfigurationError, LayoutMismatchError
from tiered_kv.values.keys import Names
from tiered_kv.values.log import log
from tiered_kv.values.specs import FileLoadStoreSpec
from tiered_kv_backends.nvme.directory import HOLDER, Directory, open_file, page_problem, probe_direct_io
from tiered_kv_backends.nvme.ledger import Entries, Ledger, Order, Slots
from tiered_kv_backends.nvme.settings import NVMeSettings
from tiered_kv_backends.nvme.slab import Erase, Moved, Slab

T = TypeVar("T")


class Calls:
    """The calls under way in threads. Files close after the last: a descriptor may be another file's by then."""

    def __init__(self, close_files: Callable[[], None]) -> None:
        self._close_files = close_files
        self._lock = system().lock()
        self._num_running = 0
        self._closed = False

    def guarded(self, function: Callable[..., T], *args: object) -> T:
        """Call ``function(*args)`` with the files open, or raise `BackendUnavailableError`."""
        with self._lock:
            if self._closed:
                raise BackendUnavailableError("the NVMe tier was closed")
            self._num_running += 1
        try:
            return function(*args)
        finally:
            with self._lock:
                self._num_running -= 1
                is_last = self._closed and not self._num_running
            if is_last:
                self._close_files()

    def close(self) -> None:
        """Let no more calls start, and close the files now or after the last."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            is_last = not was_closed and not self._num_running
        if is_last:
            self._close_files()


EMPTY, HELD, WRITING, ERASING = range(4)
"""States of a slot: it has no header of a record, or may have one; a call is writing it; one is overwriting it."""

_LEAST_SHARE_BYTES = 128 << 10
"""Of a batch, for one thread: some 50 us of a disk's time, which is what it takes to wake another."""
_NUM_ERASING_THREADS = 2
"""At once for one call: the others go on writing."""
Run = Callable[..., "asyncio.Future[Any]"]
_Move = Callable[[list[int], list[int], Sequence[Block]], Moved]
_NO_SLOTS: Slots = np.empty(0, np.int64)


class Group:
    """A slab, its ledger, and the states of its slots, which are the event loop's.

    No slot is written while it is erased: a write waits for the erasure, and an erasure leaves out what is being
    written.

    Attributes:
        states: Of each slot, ``(num_slots,)`` after `resize_states`.
        erasures: Those under way.
        num_checkpoints: Those that have not entered all that they remember.
    """

    def __init__(self, slab: Slab, ledger: Ledger) -> None:
        self.slab = slab
        self.ledger = ledger
        self.states = np.empty(0, np.uint8)
        self.erasures: set[asyncio.Future[None]] = set()
        self.num_checkpoints = 0

    def end_checkpoint(self, _: object) -> None:
        """Count one off."""
        self.num_checkpoints -= 1

    def mark(self, slots: Slots, state: int) -> None:
        """Give slots a state, as far as they still exist."""
        self.states[slots[slots < len(self.states)]] = state

    def resize_states(self, num_slots: int) -> None:
        """Have states of so many slots; those that come are empty."""
        was = self.states
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
        erased.add_done_callback(_look_at_group)
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


def _look_at_group(erased: "asyncio.Future[None]") -> None:
    """Take note of an error, so that one whose waiter was cancelled is not logged as forgotten."""
    if not erased.cancelled():
        erased.exception()


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


_SLOTS_PER_JOB = 4096


async def rebuild(
    slab: Slab, damaged: Slots, run: Callable[..., "asyncio.Future[Entries]"], *, is_blank: bool
) -> tuple[Entries, int]:
    """Return the blocks in these slots by the headers there, and how many of the slots are damaged; log it.

    Args:
        slab: Where to look: one page of I/O a slot. Payloads are verified when they are read.
        damaged: Slots of which nothing else is known.
        run: Runs a function in a thread that may read.
        is_blank: Whether nothing was ever written of them, as far as is known: none is damaged if nothing is found.
    """
    started = system().monotonic()
    starts = range(0, len(damaged), _SLOTS_PER_JOB)
    jobs = [run(_entries_in, slab, damaged[start : start + _SLOTS_PER_JOB].tolist()) for start in starts]
    await asyncio.wait(jobs)
    rebuilt = Entries.joined(*(job.result() for job in jobs))
    if is_blank and not len(rebuilt.slots):
        return rebuilt, 0
    log(
        "warning",
        "nvme.ledger_damaged",
        folder=slab.shape.folder,
        damaged=len(damaged),
        rebuilt=len(rebuilt.slots),
        took_ms=round(1000 * (system().monotonic() - started), 1),
    )
    return rebuilt, len(damaged)


def _entries_in(slab: Slab, slots: list[int]) -> Entries:
    hashes, masks, found = [], [], []
    for slot, header in zip(slots, slab.headers(slots), strict=True):
        key = key_in(header.data)
        if key is not None and key.namespace.fingerprint == slab.shape.fingerprint:
            hashes.append(key.hash)
            masks.append(key.namespace.mask)
            found.append(slot)
    names = np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, 4) ^ np.array(masks, np.uint64).reshape(-1, 4)
    return Entries(names, np.array(found, np.int64), np.zeros(len(found), np.uint64))


_GONE = {errno.EBADF, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ESHUTDOWN}
"""What says that the whole medium is gone, not one place of it."""


@dataclass(frozen=True)
class Threads:
    """What the calls of one directory run in: made once, whichever store has the directory.

    Attributes:
        clerk: The only thread that touches ledgers and the directory.
    """

    readers: Workers
    writers: Workers
    clerk: Workers


class Store:
    """One directory on a local disk that one process owns and that outlives it.

    Blocks of neighbouring slots move in one call. A block is stored when it is in the slab and then its entry in the
    ledger. Neither is forced to the medium: a loss of power may cost blocks. The end of this process costs only those
    that were being written, however sudden it is.

    Args:
        path: Of the directory.
        settings: The tier's.
        threads: Of this directory.
        order: Of all that is written to the tier.
    """

    def __init__(self, path: Path, settings: NVMeSettings, threads: Threads, order: Order) -> None:
        self.path = path
        self.settings = settings
        self._order = order
        self._readers, self._writers, self._clerk = threads.readers, threads.writers, threads.clerk
        self._num_moving = Counter[Workers]()  # calls queued or running
        self._groups: list[Group] = []
        self._calls: Calls | None = None
        self._last_error: OSError | None = None
        self._num_recovered = self._num_damaged = self._num_rebuilt = 0

    async def open(self, groups: Sequence[RecordShape]) -> list[Entries]:
        """Take the directory; return what it holds of each group, each name once, the last written last.

        That is in its ledgers; where those are damaged, in the headers of the records.

        Raises:
            ConfigurationError: It cannot be written to, is not this user's alone, is held by another process, or is too
                small for one block.
        """
        files = await self._clerk.run(self._open, groups)
        try:
            recovered = [
                await self._recover(each, *found) for each, found in zip(files.groups, files.found, strict=True)
            ]
        except BaseException:
            await self.aclose()
            raise
        self._num_recovered = sum(len(each.slots) for each in recovered)
        return recovered

    async def locate(self, group: int, slots: Slots) -> FileLoadStoreSpec:
        """Say which bytes of the slab are the records in these slots."""
        shape = self._group(group, slots).slab.shape
        path = self.path.absolute() / shape.folder / "slab"
        lengths = np.full(len(slots), shape.record_bytes)
        return FileLoadStoreSpec(np.zeros_like(slots), (str(path),), slots * shape.stride_bytes, lengths)

    async def read(
        self, group: int, slots: Slots, into: Sequence[Block], verify: Verify | None = None
    ) -> list[Outcome]:
        """Fill ``into[i]`` from ``slots[i]``: what ``verify`` says, or HIT, MISS where nothing was written, or FAILED.

        Raises:
            BackendUnavailableError: The disk is gone.
        """
        self._group(group, slots, into)
        return await _outcomes(self.begin_read(group, slots, into, verify))

    def begin_read(self, group: int, slots: Slots, into: Sequence[Block], verify: Verify | None = None) -> Begun:
        """Have threads begin to read, see `read`."""
        slab = self._group(group, slots).slab

        def read(at: list[int], part: list[int], blocks: Sequence[Block]) -> Moved:
            moved = slab.read(part, blocks)
            if verify is not None:
                moved.outcomes = verify(at, moved.outcomes)
            return moved

        return self._begin(self._readers, slab, read, slots, into)

    async def peek(self, group: int, slots: Slots, into: Sequence[Block]) -> list[Outcome]:
        """See `SlotBackend.peek`: slots that are gone by now are misses.

        Raises:
            BackendUnavailableError: The disk is gone.
        """
        num_slots = self._group(group, slots[:0]).slab.num_slots
        there = (slots < num_slots).nonzero()[0]
        outcomes = [Outcome.MISS] * len(slots)
        found = await self.read(group, slots[there], [into[i] for i in there.tolist()])
        for i, outcome in zip(there.tolist(), found, strict=True):
            outcomes[i] = outcome
        return outcomes

    async def write(
        self,
        group: int,
        slots: Slots,
        names: Names,
        blocks: Sequence[Block],
        sequences: NDArray[np.uint64],
        make: Make | None = None,
    ) -> list[Outcome]:
        """Write ``blocks[i]`` to ``slots[i]`` and remember that it is ``names[i]``: STORED or FAILED each.

        A slot whose write fails holds nothing. One call of a thread makes the records of a part and writes them; the
        last of them enters all in the ledger: while a part hangs a restart finds none of the batch, as nobody could
        have the others forgotten. Behind a checkpoint the clerk enters them, once what that remembers is there.

        Raises:
            BackendUnavailableError: The disk or the directory is gone.
        """
        files = self._group(group, slots, blocks)
        check_lengths(names, blocks)
        await files.until_erased(slots)
        if (begun := self.begin_write(group, slots, names, blocks, sequences, make)) is not None:
            return await _outcomes(begun)
        files.mark(slots, WRITING)
        try:
            if self._are_beyond(files, slots):
                problem = await self._run(self._clerk, self._files.grow, files.slab, int(slots.max()) + 1)
                self._last_error = problem or self._last_error
            write = _Write(files, slots, names, sequences, make, enters=not files.num_checkpoints)
            outcomes = await _outcomes(self._begin(self._writers, files.slab, write, slots, blocks))
            if not write.enters:
                await self._run(self._clerk, write.enter)
        finally:
            files.mark(slots, HELD)
        return self._written(write, outcomes)

    def begin_write(
        self,
        group: int,
        slots: Slots,
        names: Names,
        blocks: Sequence[Block],
        sequences: NDArray[np.uint64],
        make: Make | None = None,
    ) -> Begun | None:
        """Have threads begin to write, see `write`; None if the files must grow first, or the clerk is to enter it."""
        files = self._group(group, slots)
        if files.num_checkpoints or self._are_beyond(files, slots) or files.are_erased(slots):
            return None
        files.mark(slots, WRITING)
        write = _Write(files, slots, names, sequences, make, enters=True)
        begun = self._begin(self._writers, files.slab, write, slots, blocks)

        def outcomes() -> list[Outcome]:
            try:
                return self._written(write, begun.outcomes())
            finally:
                files.mark(slots, HELD)

        return Begun(begun.ended, outcomes)

    def _are_beyond(self, files: Group, slots: Slots) -> bool:
        """Say whether some slots have no place on the disk yet."""
        return len(slots) > 0 and int(slots.max()) >= files.slab.num_allocated

    def _written(self, write: "_Write", outcomes: list[Outcome]) -> list[Outcome]:
        """Return the outcomes of a write; of one that could not be entered none of it is to be found again."""
        return self._seen([Outcome.FAILED] * len(outcomes), write.error) if write.error else outcomes

    async def forget(self, group: int, slots: Slots) -> None:
        """Make sure that what these slots hold is not found after a restart.

        Their headers are overwritten, so that no damage of the ledger brings them back; whole records, if the settings
        say ``erase``. What is being written to one of them now is forgotten as far as the ledger goes.

        Raises:
            BackendUnavailableError: The disk did not take it.
        """
        files = self._group(group, slots)
        with self._translated(f"forget {len(slots)} slots of {self.path}"):
            await self._forget(files, slots)

    async def checkpoint(
        self, group: int, names: Names, slots: Slots, sequences: NDArray[np.uint64], *, sync: bool = False
    ) -> None:
        """Remember exactly these blocks, used in this order; with ``sync``, survive a loss of power.

        A block whose write begins while this is called may be remembered too.

        Raises:
            BackendUnavailableError: The disk did not take it. Any of these and of those remembered before may be.
        """
        files = self._group(group, slots)
        dropped = files.held_beside(slots)
        with self._translated(f"remember {len(slots)} blocks in {self.path}"):
            remembered = self._run(self._clerk, files.remember, names, slots, sequences)
            files.num_checkpoints += 1  # what is written to one of the slots from now on is entered behind
            remembered.add_done_callback(files.end_checkpoint)
            await self._forget(files, dropped)
            await remembered
            if sync:
                await self._run(self._writers, files.slab.sync)
                await self._run(self._clerk, self._files.sync, files.ledger)

    async def resize(self, num_slots: int) -> None:
        """See `SlotBackend.resize`: what is given up is free on the disk when this returns.

        Raises:
            BackendUnavailableError: The disk is too small, or fails. To be as it was it has to be resized again.
        """
        with self._translated(f"resize {self.path}"):
            await self._run(self._clerk, self._files.resize, num_slots)
        for files in self._groups:
            files.resize_states(num_slots)

    async def problem(self) -> str:
        """Say why the disk does not work at all, by a page written and read back; empty if it does."""
        with contextlib.suppress(BackendUnavailableError):
            return await self._run(self._clerk, self._files.problem)
        return "it was closed"

    async def aclose(self) -> None:
        """Close the files and release the directory, or leave that to the last call still under way."""
        self._groups = []
        if self._calls is not None:
            self._calls.close()

    def describe(self) -> dict[str, object]:
        """Return where and how blocks are kept: ``io`` is "direct" or "buffered", ``io_reason`` says why not direct."""
        if not self._groups:
            return {}
        return self._files.describe() | {
            "num_recovered": self._num_recovered,
            "num_damaged": self._num_damaged,
            "num_rebuilt": self._num_rebuilt,
            "last_error": str(self._last_error or ""),
        }

    def _group(self, group: int, slots: Slots, blocks: Sequence[Block] | None = None) -> Group:
        """Return the group's files, if the call makes sense for it."""
        if not self._groups:
            raise ClosedError(f"the NVMe tier at {self.path} is not open")
        files = self._groups[group]
        slab = files.slab
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < slab.num_slots:
            raise ConfigurationError(f"slots {slots.min()} to {slots.max()} of a slab of {slab.num_slots}")
        if blocks is not None:
            check_lengths(slots, blocks)
            for block in blocks:
                if len(block.padded) != slab.shape.padded_bytes:
                    raise LayoutMismatchError(
                        f"a block of {len(block.padded)} padded bytes for slots of {slab.shape.padded_bytes}"
                    )
        return files

    async def _forget(self, files: Group, slots: Slots) -> None:
        in_clerk, in_writers = partial(self._run, self._clerk), partial(self._run, self._writers)
        await files.forget(slots, self.settings.erase, in_clerk, in_writers)

    def _begin(self, workers: Workers, slab: Slab, move: "_Move", slots: Slots, blocks: Sequence[Block]) -> Begun:
        """Share a batch out among the threads, neighbours together; there is one outcome per block, in its order.

        ``move`` gets positions of the batch, their slots, ascending, and their blocks.

        Threads that are free get equal shares, of which none is so small that to wake a thread takes longer. While none
        is, calls are as long as they may be: a disk is as busy with few long ones, and each costs a thread's turn at
        the interpreter.
        """
        order = np.argsort(slots, kind="stable")
        sorted_slots, positions, end = slots[order].tolist(), order.tolist(), len(order)
        num_free = max(1, self.settings.num_threads - self._num_moving[workers])
        share = max(-(-end // num_free), _LEAST_SHARE_BYTES // slab.shape.stride_bytes, 1)
        share = min(share, slab.call_blocks)
        assert self._calls is not None  # noqa: S101 - `_group` has raised before
        guarded = self._calls.guarded

        def move_part(at: list[int], part: list[int]) -> Moved:
            return move(at, part, [blocks[i] for i in at])

        jobs = [
            partial(guarded, move_part, positions[start : start + share], sorted_slots[start : start + share])
            for start in range(0, end, share)
        ]
        if not jobs:
            nothing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            nothing.set_result(None)
            return Begun(nothing, list)
        moving = asyncio.ensure_future(workers.run_each(jobs))
        self._num_moving[workers] += len(jobs)
        moving.add_done_callback(partial(self._moved, workers, len(jobs)))

        def outcomes() -> list[Outcome]:
            outcomes, error = [Outcome.FAILED] * end, None
            moved = moving.result()
            for i, outcome in zip(positions, chain.from_iterable(part.outcomes for part in moved), strict=True):
                outcomes[i] = outcome
            for part in moved:
                error = part.error or error
            return self._seen(outcomes, error)

        return Begun(moving, outcomes)

    def _seen(self, outcomes: list[Outcome], error: OSError | None) -> list[Outcome]:
        """Return the outcomes of a batch, or raise if the error that came with them says that the disk is gone."""
        if error is not None:
            self._last_error = error
            if error.errno in _GONE and all(outcome is Outcome.FAILED for outcome in outcomes):
                raise BackendUnavailableError(f"{self.path}: {error.strerror}") from error
        return outcomes

    def _moved(self, workers: Workers, num_calls: int, _: object) -> None:
        self._num_moving[workers] -= num_calls

    @contextlib.contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._last_error = error
            raise BackendUnavailableError(f"{doing}: {error.strerror}") from error

    def _run(self, workers: Workers, function: Callable[..., T], *args: object) -> "asyncio.Future[T]":
        assert self._calls is not None  # noqa: S101 - `_group` has raised before
        future = asyncio.ensure_future(workers.run(self._calls.guarded, function, *args))
        future.add_done_callback(_look_at)
        return future

    def _open(self, groups: Sequence[RecordShape]) -> Files:
        """Open all files. In the clerk's thread, which leaves them here even if nobody waits for it any more."""
        self._files = files = Files(self.path, self.settings, groups, self._order)
        self._calls = Calls(files.close)
        self._groups = files.groups
        return files

    async def _recover(self, files: Group, entries: Entries, damaged: Slots) -> Entries:
        """Return what a group holds; look into the slab for what the ledger cannot say, and write that down."""
        if len(damaged):
            run, is_blank = partial(self._run, self._readers), files.ledger.is_blank
            rebuilt, num_damaged = await rebuild(files.slab, damaged, run, is_blank=is_blank)
            self._num_damaged += num_damaged
            self._num_rebuilt += len(rebuilt.slots)
            entries = Entries.joined(rebuilt, entries)
        latest, replaced = entries.latest()
        files.mark(entries.slots, HELD)
        if len(damaged) or len(replaced):
            is_rebuilt = np.isin(latest.slots, damaged)
            try:
                await self._run(self._clerk, files.ledger.clear, np.setdiff1d(damaged, latest.slots))
                await self._forget(files, replaced)  # its header too: it must not come back without the ledger
                await self._run(
                    self._clerk, files.ledger.write_oldest, latest.names[is_rebuilt], latest.slots[is_rebuilt]
                )
            except OSError as error:
                self._last_error = error  # what is damaged in the file is found again at the next start
        return latest


class _Write:
    """One batch on its way to a slab: threads make its records and write them, and the last of them enters all.

    While a part hangs a restart finds none of the batch, as nobody could have the others forgotten.

    Attributes:
        enters: Whether a thread that writes enters it; else whoever has waited for it does.
        error: Why it could not be entered: it is written, but not to be found again.
    """

    def __init__(
        self,
        files: Group,
        slots: Slots,
        names: Names,
        sequences: NDArray[np.uint64],
        make: Make | None,
        *,
        enters: bool,
    ) -> None:
        self.enters = enters
        self.error: OSError | None = None
        self._files = files
        self._slots, self._names, self._sequences = slots, names, sequences
        self._make = make
        self._lock, self._num_left = system().lock(), len(slots)
        self._stored = np.zeros(len(slots), np.bool_)

    def __call__(self, at: list[int], part: list[int], blocks: Sequence[Block]) -> Moved:
        """Make and write some records, in any thread."""
        if self._make is not None:
            self._make(at)
        moved = self._files.slab.write(part, blocks)
        self._stored[at] = [outcome is Outcome.STORED for outcome in moved.outcomes]
        with self._lock:
            self._num_left -= len(at)
            is_last = not self._num_left
        if is_last and self.enters:
            self.enter()
        return moved

    def enter(self) -> None:
        """Enter what was stored in the ledger."""
        is_stored, slots = self._stored, self._slots
        try:
            self._files.remember(
                self._names[is_stored], slots[is_stored], self._sequences[is_stored], slots[~is_stored]
            )
        except OSError as error:
            self.error = error


async def _outcomes(begun: Begun) -> list[Outcome]:
    """Wait for threads, and return the outcomes. Cancelled, it leaves the threads to themselves."""
    try:
        await begun.ended
    finally:
        outcomes = begun.outcomes()
    return outcomes


def _look_at(future: "asyncio.Future[Any]") -> None:
    """Take note of an error, so that one whose waiter was cancelled is not logged as forgotten."""
    if not future.cancelled():
        future.exception()
