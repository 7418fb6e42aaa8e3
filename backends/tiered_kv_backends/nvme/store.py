"""`Store`: slots in preallocated files of one directory, moved by direct, vectored I/O in threads of its own."""

import asyncio
import contextlib
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiered_kv.backend import Block, Outcome, RecordShape, Workers, check_lengths
from tiered_kv.errors import BackendUnavailableError, ClosedError, ConfigurationError, LayoutMismatchError
from tiered_kv.keys import Names
from tiered_kv.specs import FileLoadStoreSpec
from tiered_kv_backends.nvme.calls import Calls
from tiered_kv_backends.nvme.directory import HOLDER, Directory
from tiered_kv_backends.nvme.group import EMPTY, ERASING, HELD, WRITING, Group
from tiered_kv_backends.nvme.ledger import Entries, Ledger, Order, Slots
from tiered_kv_backends.nvme.own_files import open_file
from tiered_kv_backends.nvme.probe import page_problem, probe_direct_io
from tiered_kv_backends.nvme.rebuild import rebuild
from tiered_kv_backends.nvme.settings import NVMeSettings
from tiered_kv_backends.nvme.slab import Moved, Slab

T = TypeVar("T")


_MAX_GROWTH_BYTES = 256 << 20
"""How far ahead of its use, at most, a slab is given its place on the disk."""
_GONE = {errno.EBADF, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ESHUTDOWN}
"""What says that the whole medium is gone, not one place of it."""
_NUM_ERASING_THREADS = 2
"""At once for one call: the others go on writing."""


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
        self._num_damaged = self._num_rebuilt = 0
        self._facts: dict[str, object] = {}

    async def open(self, groups: Sequence[RecordShape]) -> list[Entries]:
        """Take the directory; return what it holds of each group, each name once, the last written last.

        That is in its ledgers; where those are damaged, in the headers of the records.

        Raises:
            ConfigurationError: It cannot be written to, is not this user's alone, is held by another process, or is too
                small for one block.
        """
        found = await self._clerk.run(self._open, groups)
        try:
            recovered = [
                await self._recover(*each) for each in zip(self._groups, *zip(*found, strict=True), strict=True)
            ]
        except BaseException:
            await self.aclose()
            raise
        self._facts["num_recovered"] = sum(len(each.slots) for each in recovered)
        return recovered

    async def locate(self, group: int, slots: Slots) -> FileLoadStoreSpec:
        """Say which bytes of the slab are the records in these slots."""
        shape = self._group(group, slots).slab.shape
        path = self.path.absolute() / shape.folder / "slab"
        lengths = np.full(len(slots), shape.record_bytes)
        return FileLoadStoreSpec(np.zeros_like(slots), (str(path),), slots * shape.stride_bytes, lengths)

    async def read(self, group: int, slots: Slots, into: Sequence[Block]) -> list[Outcome]:
        """Fill ``into[i]`` from ``slots[i]``: HIT, MISS where nothing was ever written, or FAILED each.

        Raises:
            BackendUnavailableError: The disk is gone.
        """
        slab = self._group(group, slots, into).slab
        return await self._move(self._readers, slab, slab.read, slots, into)

    async def peek(self, group: int, slots: Slots, into: Sequence[Block]) -> list[Outcome]:
        """See `SlotBackend.peek`: slots that are gone by now are misses.

        Raises:
            BackendUnavailableError: The disk is gone.
        """
        num_slots = self._group(group, slots[:0]).slab.num_slots
        there = np.flatnonzero(slots < num_slots)
        outcomes = [Outcome.MISS] * len(slots)
        found = await self.read(group, slots[there], [into[i] for i in there.tolist()])
        for i, outcome in zip(there.tolist(), found, strict=True):
            outcomes[i] = outcome
        return outcomes

    async def write(
        self, group: int, slots: Slots, names: Names, blocks: Sequence[Block], sequences: NDArray[np.uint64]
    ) -> list[Outcome]:
        """Write ``blocks[i]`` to ``slots[i]`` and remember that it is ``names[i]``: STORED or FAILED each.

        A slot whose write fails holds nothing.

        Raises:
            BackendUnavailableError: The disk or the directory is gone.
        """
        files = self._group(group, slots, blocks)
        check_lengths(names, blocks)
        await files.until_erased(slots)
        files.mark(slots, WRITING)
        try:
            if len(slots) and (last := int(slots.max())) >= files.slab.num_allocated:
                await self._run(self._clerk, self._grow, files.slab, last + 1)
            outcomes = await self._move(self._writers, files.slab, files.slab.write, slots, blocks)
            stored = np.array([outcome is Outcome.STORED for outcome in outcomes], np.bool_)
            try:
                here = names[stored], slots[stored], sequences[stored]
                await self._run(self._clerk, files.remember, *here, slots[~stored])
            except OSError as error:  # written, but not to be found again
                self._last_error = error
                if error.errno in _GONE:
                    raise BackendUnavailableError(f"{self.path}: {error.strerror}") from error
                return [Outcome.FAILED] * len(outcomes)
        finally:
            files.mark(slots, HELD)
        return outcomes

    async def forget(self, group: int, slots: Slots) -> None:
        """Make sure that what these slots hold is not found after a restart.

        Their headers are overwritten, so that no damage of the ledger brings them back; whole records, if the settings
        say ``erase``. What is being written to one of them now is forgotten as far as the ledger goes.

        Raises:
            BackendUnavailableError: The disk did not take it.
        """
        files = self._group(group, slots)
        with _translated(f"forget {len(slots)} slots of {self.path}"):
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
        with _translated(f"remember {len(slots)} blocks in {self.path}"):
            # before a later write to one of the slots
            remembered = self._run(self._clerk, files.remember, names, slots, sequences)
            await self._forget(files, dropped)
            await remembered
            if sync:
                await self._run(self._writers, files.slab.sync)
                await self._run(self._clerk, self._sync, files.ledger)

    async def resize(self, num_slots: int) -> None:
        """See `SlotBackend.resize`: what is given up is free on the disk when this returns.

        Raises:
            BackendUnavailableError: The disk is too small, or fails. To be as it was it has to be resized again.
        """
        with _translated(f"resize {self.path}"):
            await self._run(self._clerk, self._resize, num_slots)
        for files in self._groups:
            files.resize_states(num_slots)

    async def problem(self) -> str:
        """Say why the disk does not work at all, by a page written and read back; empty if it does."""
        with contextlib.suppress(BackendUnavailableError):
            return await self._run(self._clerk, self._problem)
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
        return self._facts | {
            "allocated_bytes": sum(files.slab.num_allocated * files.slab.shape.stride_bytes for files in self._groups),
            "ledger_bytes": sum(Ledger.num_bytes(files.ledger.num_slots) for files in self._groups),
            "own_bytes_written": sum(files.ledger.bytes_written for files in self._groups),
            "reclaimed_fingerprints": self._directory.num_reclaimed,
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
        """Forget slots and overwrite what they hold, save those that are being written."""
        await files.until_erased(slots)
        slots = slots[slots < len(files.states)]
        to_erase = slots[files.states[slots] != WRITING]
        files.mark(to_erase, ERASING)
        erased = asyncio.ensure_future(self._erase(files, slots, to_erase))
        files.erasures.add(erased)
        erased.add_done_callback(_look_at)
        erased.add_done_callback(files.erasures.discard)
        await asyncio.shield(erased)  # a write to one of these slots waits for it, whoever waits here

    async def _erase(self, files: Group, slots: Slots, to_erase: Slots) -> None:
        state = HELD
        try:
            await self._run(self._clerk, files.ledger.clear, slots)
            shares = np.array_split(np.sort(to_erase), _NUM_ERASING_THREADS)
            jobs = [self._run(self._writers, files.slab.erase, share.tolist(), self.settings.erase) for share in shares]
            await asyncio.wait(jobs)
            for job in jobs:
                job.result()
            state = EMPTY
        finally:
            files.mark(to_erase, state)

    async def _move(
        self,
        workers: Workers,
        slab: Slab,
        function: Callable[[list[int], Sequence[Block]], Moved],
        slots: Slots,
        blocks: Sequence[Block],
    ) -> list[Outcome]:
        """Share a batch out among the threads, neighbours together; return one outcome per block, in its order.

        Threads that are free get equal shares. While none is, calls are as long as they may be: a disk is as busy with
        few long ones, and each costs a thread's turn at the interpreter.
        """
        order = np.argsort(slots, kind="stable").tolist()
        sorted_slots, sorted_blocks = slots[order].tolist(), [blocks[i] for i in order]
        num_free = max(1, self.settings.num_threads - self._num_moving[workers])
        share = min(slab.call_blocks, -(-len(order) // num_free)) or 1
        jobs = [
            self._run(workers, function, sorted_slots[start : start + share], sorted_blocks[start : start + share])
            for start in range(0, len(order), share)
        ]
        self._num_moving[workers] += len(jobs)
        for job in jobs:
            job.add_done_callback(partial(self._moved, workers))
        if jobs:
            await asyncio.wait(jobs)  # for all, whatever one raises: the blocks are lent until this call returns
        moved = [job.result() for job in jobs]
        outcomes = [Outcome.FAILED] * len(order)
        for i, outcome in zip(order, chain.from_iterable(part.outcomes for part in moved), strict=True):
            outcomes[i] = outcome
        if errors := [part.error for part in moved if part.error is not None]:
            self._last_error = errors[-1]
            if errors[-1].errno in _GONE and all(outcome is Outcome.FAILED for outcome in outcomes):
                raise BackendUnavailableError(f"{self.path}: {errors[-1].strerror}") from errors[-1]
        return outcomes

    def _moved(self, workers: Workers, _: "asyncio.Future[Moved]") -> None:
        self._num_moving[workers] -= 1

    def _run(self, workers: Workers, function: Callable[..., T], *args: object) -> "asyncio.Future[T]":
        assert self._calls is not None  # noqa: S101 - `_group` has raised before
        future = asyncio.ensure_future(workers.run(self._calls.guarded, function, *args))
        future.add_done_callback(_look_at)
        return future

    def _grow(self, slab: Slab, num_slots: int) -> None:
        """Give slots their place on the disk, some ahead of their use. Those that get none will fail to be written."""
        if num_slots <= slab.num_allocated:
            return
        ahead = min(_MAX_GROWTH_BYTES // slab.shape.stride_bytes, slab.num_slots // 32)
        for wanted in (min(slab.num_slots, num_slots + ahead), num_slots):
            try:
                slab.grow(wanted, self._directory.allocate)
            except OSError as error:
                self._last_error = error
            else:
                return

    def _resize(self, num_slots: int) -> None:
        self._directory.resize(num_slots)
        for files in self._groups:
            files.ledger.grow(num_slots, self._directory.allocate)
        for files in self._groups:
            self._directory.give_back(files.slab.resize(num_slots) + files.ledger.shrink(num_slots))
        self._facts |= {"capacity_bytes": self._directory.capacity_bytes, "num_slots": num_slots}

    def _problem(self) -> str:
        flags = os.O_DIRECT if self._facts["io"] == "direct" else 0
        return page_problem(self._directory.fd, flags, HOLDER)

    def _sync(self, ledger: Ledger) -> None:
        ledger.sync()
        self._directory.sync()

    def _open(self, groups: Sequence[RecordShape]) -> list[tuple[Entries, Slots]]:
        """Open all files; return for each group what its ledger says, and the slots of which it can say nothing."""
        path = self.path
        with contextlib.ExitStack() as opened:
            self._directory = directory = Directory(path, self.settings.capacity, groups)
            opened.callback(directory.close)
            flags, reason = probe_direct_io(directory.fd, self.settings.direct, HOLDER)
            if reason and self.settings.direct == "always":
                raise ConfigurationError(f"{path} has no direct I/O ({reason}): set direct='auto'")
            self._groups, found = [], []
            try:
                for folder_fd, shape in zip(directory.folder_fds, groups, strict=True):
                    slab = Slab(open_file(folder_fd, "slab", flags), shape, directory.num_slots)
                    opened.callback(slab.close)
                    ledger = Ledger(open_file(folder_fd, "ledger"), self._order)
                    opened.callback(ledger.close)
                    ledger.shrink(directory.num_slots)  # before it is read: a file may be of any length
                    self._groups.append(Group(slab, ledger))
                    found.append(ledger.read(slab.num_allocated))
                self._take_room(directory)
            except OSError as error:
                name = f"{path}: {error.filename}" if error.filename else f"{path}"
                raise ConfigurationError(f"{name}: {error.strerror}") from error
            self._facts = {
                "path": str(path),
                "capacity_bytes": int(self.settings.capacity),
                "num_slots": directory.num_slots,
                "io": "buffered" if reason else "direct",
                "io_reason": reason,
            }
            self._calls = Calls(opened.pop_all().close)
        return found

    def _take_room(self, directory: Directory) -> None:
        """Have the directory count what is there, and every slot its entry in a ledger."""
        is_known = all(files.ledger.num_slots >= directory.num_slots for files in self._groups)
        num_bytes = 0
        for files in self._groups:
            num_bytes += files.slab.num_allocated * files.slab.shape.stride_bytes
            num_bytes += Ledger.num_bytes(files.ledger.num_slots)
        directory.take(num_bytes, is_known=is_known)
        for files in self._groups:
            files.ledger.grow(directory.num_slots, directory.allocate)
            files.resize_states(directory.num_slots)

    async def _recover(self, files: Group, entries: Entries, damaged: Slots) -> Entries:
        """Return what a group holds; look into the slab for what the ledger cannot say, and write that down."""
        if len(damaged):
            rebuilt = await rebuild(files.slab, damaged, partial(self._run, self._readers))
            self._num_damaged += len(damaged)
            self._num_rebuilt += len(rebuilt.slots)
            entries = Entries.joined(rebuilt, entries)
        latest, replaced = entries.latest()
        files.mark(entries.slots, HELD)
        if len(damaged) or len(replaced):
            is_rebuilt = np.isin(latest.slots, damaged)
            empty = np.concatenate([np.setdiff1d(damaged, latest.slots), replaced])
            try:
                await self._run(self._clerk, files.ledger.clear, empty)
                await self._run(
                    self._clerk, files.ledger.write_oldest, latest.names[is_rebuilt], latest.slots[is_rebuilt]
                )
            except OSError as error:
                self._last_error = error  # what is damaged in the file is found again at the next start
        return latest


def _look_at(future: "asyncio.Future[Any]") -> None:
    """Take note of an error, so that one whose waiter was cancelled is not logged as forgotten."""
    if not future.cancelled():
        future.exception()


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BackendUnavailableError(f"{doing}: {error.strerror}") from error
