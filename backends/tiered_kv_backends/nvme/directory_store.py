"""`DirectoryStore`: slots in preallocated files of one directory, moved by direct, vectored I/O in threads of its own.

`FileCalls` keeps the files open until the last call in a thread has ended; `_Write` is one batch on its way to a slab.
"""

import asyncio
import contextlib
import errno
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiered_kv.media.backend import Block, Ended, Make, Outcome, RecordShape, Then, Verify, Workers, check_lengths
from tiered_kv.system import system
from tiered_kv.values.errors import BackendUnavailableError, ClosedError, ConfigurationError, LayoutMismatchError
from tiered_kv.values.keys import Names
from tiered_kv_backends.nvme.ledger import Damaged, Entries, Order, Slots
from tiered_kv_backends.nvme.nvme_settings import NVMeSettings
from tiered_kv_backends.nvme.open_files import HELD, WRITING, Group, OpenFiles, look_at, rebuild
from tiered_kv_backends.nvme.slab import Moved, Slab

T = TypeVar("T")


class FileCalls:
    """The calls under way in threads. Files close after the last: a descriptor may be another file's by then."""

    def __init__(self, close_files: Callable[[], None]) -> None:
        self._close_files = close_files
        self._lock = system().lock()
        self._num_running = 0
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether no more calls start."""
        return self._closed

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


_LEAST_READ_BYTES = 128 << 10
"""Of a batch, for one thread: some 50 us of a disk's time, which is what it takes to wake another."""
_LEAST_WRITE_BYTES = 2 << 20
"""Likewise, where nobody waits: each thread takes the interpreter from the engine's for some tenths of a ms."""
_Ended = Callable[[], list[Moved]]
_Move = Callable[[list[int], list[int], Sequence[Block]], Moved]
_GONE = {errno.EBADF, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ESHUTDOWN}
"""What says that the whole medium is gone, not one place of it."""


@dataclass(frozen=True)
class DirectoryThreads:
    """What the calls of one directory run in: made once, whichever store has the directory.

    Attributes:
        clerk: The only thread that touches ledgers and the directory.
    """

    readers: Workers
    writers: Workers
    clerk: Workers


class DirectoryStore:
    """One directory on a local disk that one process owns and that outlives it.

    Blocks of neighbouring slots move in one call. A block is stored when it is in the slab and then its entry in the
    ledger. Neither is forced to the medium: a loss of power may cost blocks. The end of this process costs only those
    that were being written, however sudden it is.

    Args:
        path: Of the directory.
        settings: The tier's.
        threads: Of this directory.
        order: Of all that is written to the tier.
        on_room: Is called on the event loop once there is no room for some slots, or room again.
    """

    def __init__(
        self,
        path: Path,
        settings: NVMeSettings,
        threads: DirectoryThreads,
        order: Order,
        on_room: Callable[[], object] = lambda: None,
    ) -> None:
        self.path = path
        self._on_room = on_room
        self.settings = settings
        self._order = order
        self._readers, self._writers, self._clerk = threads.readers, threads.writers, threads.clerk
        self._num_moving = Counter[Workers]()  # calls queued or running
        self._groups: list[Group] = []
        self._calls: FileCalls | None = None
        self._is_closed = False
        self._last_error: OSError | None = None
        self._num_recovered = self._num_damaged = self._num_rebuilt = 0

    async def open(self, groups: Sequence[RecordShape]) -> list[Entries]:
        """Take the directory; return what it holds of each group, each name once, the last written last.

        That is in its ledgers; where those are damaged, in the headers of the records.

        Raises:
            ConfigurationError: It cannot be written to, is not this user's alone, is held by another process, or is too
                small for one block.
        """
        try:
            files = await self._clerk.run(self._open, groups)
            self._groups = files.groups
            recovered = [
                await self._recover(each, *found) for each, found in zip(files.groups, files.found, strict=True)
            ]
        except BaseException:
            await self.aclose()
            raise
        self._num_recovered = sum(len(each.slots) for each in recovered)
        return recovered

    async def read(
        self, group: int, slots: Slots, into: Sequence[Block], verify: Verify | None = None
    ) -> list[Outcome]:
        """Fill ``into[i]`` from ``slots[i]``: what ``verify`` says, or HIT, MISS where nothing was written, or FAILED.

        Raises:
            BackendUnavailableError: The disk is gone.
        """
        self._group(group, slots, into)
        return await _outcomes(partial(self.begin_read, group, slots, into, verify=verify))

    def begin_read(
        self, group: int, slots: Slots, into: Sequence[Block], then: Then, verify: Verify | None = None
    ) -> None:
        """Have threads begin to read, see `read`."""
        slab = self._group(group, slots).slab

        def read(at: list[int], part: list[int], blocks: Sequence[Block]) -> Moved:
            moved = slab.read(part, blocks)
            if verify is not None:
                moved.outcomes = verify(at, moved.outcomes)
            return moved

        self._begin(self._readers, slab, read, slots, into, then, least_bytes=_LEAST_READ_BYTES)

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
        files = self._group(group, slots, None if make else blocks)  # else they are looked at where they are made
        check_lengths(names, blocks)
        await files.until_erased(slots)
        files.mark(slots, WRITING)
        try:
            enters = not files.num_checkpoints
            write = _Write(self._files, self._open_calls, files, slots, names, sequences, make, enters=enters)
            begin = partial(self._begin, least_bytes=_LEAST_WRITE_BYTES)
            outcomes = await _outcomes(partial(begin, self._writers, files.slab, write, slots, blocks))
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
        then: Then,
        make: Make | None = None,
    ) -> bool:
        """Have threads begin to write, see `write`; False if slots are being erased, or the clerk is to enter it."""
        files = self._group(group, slots)
        if files.num_checkpoints or files.are_erased(slots):
            return False
        files.mark(slots, WRITING)
        write = _Write(self._files, self._open_calls, files, slots, names, sequences, make, enters=True)

        def moved(ended: Ended) -> None:
            files.mark(slots, HELD)
            then(lambda: self._written(write, ended()))

        self._begin(self._writers, files.slab, write, slots, blocks, moved, least_bytes=_LEAST_WRITE_BYTES)
        return True

    def _written(self, write: "_Write", outcomes: list[Outcome]) -> list[Outcome]:
        """Return the outcomes of a write; of one that could not be entered none of it is to be found again."""
        self._last_error = write.problem or self._last_error
        self._see_room(write.files)
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

    def checkpoint(
        self, group: int, names: Names, slots: Slots, sequences: NDArray[np.uint64], *, sync: bool = False
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """Remember exactly these blocks, used in this order; with ``sync``, survive a loss of power.

        It begins when this is called, and goes on with what this returns: what is written to one of the slots from the
        call on is entered behind. A block whose write begins before it has ended may be remembered too.

        Raises:
            BackendUnavailableError: The disk did not take it. Any of these and of those remembered before may be.
        """
        files = self._group(group, slots)
        dropped = files.held_beside(slots)
        remembered = self._run(self._clerk, files.remember, names, slots, sequences)
        files.num_checkpoints += 1
        remembered.add_done_callback(files.end_checkpoint)

        async def checkpoint() -> None:
            with self._translated(f"remember {len(slots)} blocks in {self.path}"):
                await self._forget(files, dropped)
                await remembered
                if sync:
                    await self._run(self._writers, files.slab.sync)
                    await self._run(self._clerk, self._files.sync, files.ledger)

        return checkpoint

    async def resize(self, num_blocks: int) -> None:
        """See `SlotBackend.resize`: what is given up is free on the disk when this returns.

        Raises:
            BackendUnavailableError: The disk is too small, or fails. To be as it was it has to be resized again.
        """
        growing = [files for files in self._groups if files.slab.shape.num_slots(num_blocks) > len(files.states)]
        if erasing := {each for files in growing for each in files.erasures}:
            await asyncio.wait(erasing)  # of slots that were given up meanwhile: what is put there would be erased
        with self._translated(f"resize {self.path}"):
            await self._run(self._clerk, self._files.resize, num_blocks)
        for files in self._groups:
            files.resize_states()
        with self._translated(f"resize {self.path}"):  # what was erased behind the end meanwhile
            await self._run(self._clerk, self._files.cut_off)
        for each in {each for files in self._groups for each in files.erasures}:
            each.add_done_callback(self._cut_off)

    def _cut_off(self, _: "asyncio.Future[None]") -> None:
        """Have files end with their slots again: something was erased behind these. If it fails the next start does."""
        self._run(self._clerk, self._files.cut_off)

    @property
    def is_full(self) -> bool:
        """Whether its disk had no room for some slots when it was asked last."""
        return any(files.was_full for files in self._groups)

    def num_with_room(self, group: int) -> int | None:
        """Return how many slots have room, the first of all; None if all may have."""
        files = self._groups[group] if self._groups else None
        return None if files is None or not files.was_full else files.slab.num_allocated

    def find_room(self) -> None:
        """Look whether a disk that was full has room for another slot by now; nobody waits for it."""
        for files in self._groups:
            if files.was_full:
                looked = self._run(self._clerk, self._files.grow, files.slab, files.slab.num_allocated + 1)
                looked.add_done_callback(partial(self._see_room, files))

    def _see_room(self, files: Group, _: object = None) -> None:
        if files.slab.is_full != files.was_full:
            files.was_full = files.slab.is_full
            self._on_room()

    async def problem(self) -> str:
        """Say why the disk does not work at all, by a page written and read back; empty if it does."""
        with contextlib.suppress(BackendUnavailableError):
            return await self._run(self._clerk, self._files.problem)
        return "it was closed"

    async def aclose(self) -> None:
        """Close the files and release the directory, or leave that to the last call still under way."""
        self._is_closed, self._groups = True, []
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
        if len(slots) and not 0 <= np.minimum.reduce(slots) <= np.maximum.reduce(slots) < slab.num_slots:
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

    def _begin(
        self,
        workers: Workers,
        slab: Slab,
        move: "_Move",
        slots: Slots,
        blocks: Sequence[Block],
        then: Then,
        *,
        least_bytes: int,
    ) -> None:
        """Share a batch out among the threads, neighbours together; there is one outcome per block, in its order.

        ``move`` gets positions of the batch, their slots, ascending, and their blocks.

        Threads that are free get equal shares, of which none is so small that to wake a thread takes longer. While none
        is, calls are as long as they may be: a disk is as busy with few long ones, and each costs a thread's turn at
        the interpreter.
        """
        sorted_slots = slots.tolist()
        positions, end = sorted(range(len(slots)), key=sorted_slots.__getitem__), len(slots)
        sorted_slots.sort()
        num_free = max(1, self.settings.num_threads - self._num_moving[workers])
        share = max(-(-end // num_free), least_bytes // slab.shape.stride_bytes, 1)
        share = min(share, slab.call_blocks)
        guarded = self._open_calls.guarded

        def move_part(at: list[int], part: list[int]) -> Moved:
            return move(at, part, [blocks[i] for i in at])

        jobs = [
            partial(guarded, move_part, positions[start : start + share], sorted_slots[start : start + share])
            for start in range(0, end, share)
        ]
        if not jobs:
            then(list)
            return

        def outcomes(ended: _Ended) -> list[Outcome]:
            outcomes: list[Outcome] = []
            error: OSError | None = None
            for part in ended():
                outcomes += part.outcomes
                error = part.error or error
            if positions != list(range(end)):
                outcomes = [outcome for _, outcome in sorted(zip(positions, outcomes, strict=True))]
            return self._seen(outcomes, error)

        def moved(ended: _Ended) -> None:
            self._num_moving[workers] -= len(jobs)
            then(partial(outcomes, ended))

        self._num_moving[workers] += len(jobs)
        workers.begin_each(jobs, moved)

    def _seen(self, outcomes: list[Outcome], error: OSError | None) -> list[Outcome]:
        """Return the outcomes of a batch, or raise if the error that came with them says that the disk is gone."""
        if error is not None:
            self._last_error = error
            if error.errno in _GONE and all(outcome is Outcome.FAILED for outcome in outcomes):
                raise BackendUnavailableError(f"{self.path}: {error.strerror}") from error
        return outcomes

    @contextlib.contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._last_error = error
            raise BackendUnavailableError(f"{doing}: {error.strerror}") from error

    @property
    def _open_calls(self) -> FileCalls:
        assert self._calls is not None  # noqa: S101 - `_group` has raised before
        return self._calls

    def _run(self, workers: Workers, function: Callable[..., T], *args: object) -> "asyncio.Future[T]":
        future = asyncio.ensure_future(workers.run(self._open_calls.guarded, function, *args))
        future.add_done_callback(look_at)
        return future

    def _open(self, groups: Sequence[RecordShape]) -> OpenFiles:
        """Open all files. In the clerk's thread, which closes them again if nobody waits for it any more."""
        self._files = files = OpenFiles(self.path, self.settings, groups, self._order)
        self._calls = calls = FileCalls(files.close)
        if self._is_closed:  # asked after `_calls` is set, which `aclose` asks for after it has set this
            calls.close()
        return files

    async def _recover(self, files: Group, entries: Entries, damaged: Damaged) -> Entries:
        """Return what a group holds; look into the slab for what the ledger cannot say, and write that down."""
        if len(damaged.slots):
            run, is_blank = partial(self._run, self._readers), files.ledger.is_blank
            rebuilt, num_damaged = await rebuild(files.slab, damaged, run, is_blank=is_blank)
            self._num_damaged += num_damaged
            self._num_rebuilt += len(rebuilt.slots)
            entries = Entries.joined(rebuilt, entries)
        latest, replaced = entries.latest()
        files.mark(entries.slots, HELD)
        if len(damaged.slots) or len(replaced):
            is_rebuilt = np.isin(latest.slots, damaged.slots)
            try:
                await self._run(self._clerk, files.ledger.clear, np.setdiff1d(damaged.slots, latest.slots))
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
        files: Of its KV group.
        enters: Whether a thread that writes enters it; else whoever has waited for it does.
        problem: Why not all of its slots have a place on the disk, if they have not.
        error: Why it could not be entered: it is written, but not to be found again.
    """

    def __init__(
        self,
        opened: OpenFiles,
        calls: FileCalls,
        files: Group,
        slots: Slots,
        names: Names,
        sequences: NDArray[np.uint64],
        make: Make | None,
        *,
        enters: bool,
    ) -> None:
        self.enters = enters
        self.problem: OSError | None = None
        self._opened, self._calls = opened, calls
        self._end = int(np.maximum.reduce(slots)) + 1 if len(slots) else 0
        self.error: OSError | None = None
        self.files = files
        self._slots, self._names, self._sequences = slots, names, sequences
        self._make = make
        self._lock, self._num_left = system().lock(), len(slots)
        self._stored = np.zeros(len(slots), np.bool_)

    def __call__(self, at: list[int], part: list[int], blocks: Sequence[Block]) -> Moved:
        """Make and write some records, in any thread; whichever comes first has the files grow."""
        self.problem = self._opened.grow(self.files.slab, self._end) or self.problem
        if self._make is not None:
            self._make(at)
        moved = self.files.slab.write(part, blocks)
        self._stored[at] = [outcome is Outcome.STORED for outcome in moved.outcomes]
        with self._lock:
            self._num_left -= len(at)
            is_last = not self._num_left
        if is_last and self.enters:
            self.enter()
        return moved

    def enter(self) -> None:
        """Enter what was stored in the ledger, unless the store was closed: nobody could have it forgotten any more."""
        if self._calls.is_closed:
            self.error = OSError(errno.ESHUTDOWN, "the NVMe tier was closed")
            return
        is_stored, slots = self._stored, self._slots
        try:
            self.files.remember(self._names[is_stored], slots[is_stored], self._sequences[is_stored], slots[~is_stored])
        except OSError as error:
            self.error = error


async def _outcomes(begin: Callable[[Then], object]) -> list[Outcome]:
    """Begin, wait for threads, and return the outcomes. Cancelled, it leaves the threads to themselves."""
    told: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

    def then(ended: Ended) -> None:
        if not told.done():
            told.set_result(ended)

    begin(then)
    return (await told)()
