"""`Store`: slots in preallocated files of one directory, moved by direct, vectored I/O in threads of its own."""

import asyncio
import contextlib
import errno
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
from tiered_kv_backends.nvme.files import Files
from tiered_kv_backends.nvme.group import HELD, WRITING, Group
from tiered_kv_backends.nvme.ledger import Entries, Order, Slots
from tiered_kv_backends.nvme.rebuild import rebuild
from tiered_kv_backends.nvme.settings import NVMeSettings
from tiered_kv_backends.nvme.slab import Moved, Slab

T = TypeVar("T")


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
                problem = await self._run(self._clerk, self._files.grow, files.slab, last + 1)
                self._last_error = problem or self._last_error
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
                await self._run(self._clerk, self._files.sync, files.ledger)

    async def resize(self, num_slots: int) -> None:
        """See `SlotBackend.resize`: what is given up is free on the disk when this returns.

        Raises:
            BackendUnavailableError: The disk is too small, or fails. To be as it was it has to be resized again.
        """
        with _translated(f"resize {self.path}"):
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

    def _open(self, groups: Sequence[RecordShape]) -> Files:
        """Open all files. In the clerk's thread, which leaves them here even if nobody waits for it any more."""
        self._files = files = Files(self.path, self.settings, groups, self._order)
        self._calls = Calls(files.close)
        self._groups = files.groups
        return files

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
