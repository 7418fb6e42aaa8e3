"""`NVMeBackend`: numbered slots in preallocated files, moved by direct, vectored I/O in threads of its own."""

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ByteSize, Field, model_validator

from tiered_kv.backend import (
    BackendContext,
    Block,
    Outcome,
    OwnedTierSettings,
    RecordShape,
    Recovered,
    SlotBackend,
    Workers,
    check_lengths,
)
from tiered_kv.errors import BackendUnavailableError, ClosedError, ConfigurationError, LayoutMismatchError
from tiered_kv.keys import Names
from tiered_kv_backends.nvme.directory import Directory, fit
from tiered_kv_backends.nvme.journal import Journal
from tiered_kv_backends.nvme.slab import Moved, Slab, probe_direct_io

T = TypeVar("T")
Slots = NDArray[np.int64]

_MAX_GROWTH_BYTES = 256 << 20
"""How far ahead of its use, at most, a slab is given its place on the disk."""
_GONE = {errno.EBADF, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ESHUTDOWN}
"""What says that the whole medium is gone, not one place of it."""


class NVMeBackend(SlotBackend):
    """A directory on a local disk that one process owns and that outlives it.

    Blocks of neighbouring slots move in one call. A block is stored when it is in the slab and then its entry in the
    journal. Neither is forced to the medium: a loss of power may cost blocks. The end of this process costs only those
    that were being written, however sudden it is.
    """

    class Settings(OwnedTierSettings):
        """``{"medium": "nvme", "path": "/mnt/kv", "capacity": "1TiB"}``."""

        medium: str = "nvme"
        path: Path
        """A directory of this process alone, made if need be."""
        capacity: ByteSize = Field(gt=0)
        """Limit over everything under ``path``, blocks of other models included."""
        max_capacity: ByteSize | None = None
        """The most that `TieredKV.resize` may make of it; the capacity if left out. Costs 100 bytes of host memory a
        block, and no place on the disk."""
        num_threads: int = Field(default=8, ge=1, le=256)
        """Calls under way at once, in each direction: reads never queue behind writes."""
        direct: Literal["auto", "always", "never"] = "auto"
        """Whether to pass by the page cache (O_DIRECT). ``auto``: where the filesystem can."""

        @model_validator(mode="after")
        def _check_max_capacity(self) -> Self:
            if self.max_capacity is not None and self.max_capacity < self.capacity:
                raise ValueError("max_capacity is below capacity")
            return self

    def __init__(self, settings: Settings | Mapping[str, Any] | str) -> None:
        self.settings = settings = self.Settings.of(settings)
        self._slabs: list[Slab] = []
        self._journals: list[Journal] = []
        self._calls: _Calls | None = None
        self._last_error: OSError | None = None
        self._facts: dict[str, object] = {}

    async def open(self, context: BackendContext) -> list[Recovered]:
        """Take the directory and replay its journals.

        Raises:
            ConfigurationError: It cannot be written to, is held by another process, or is too small for one block.
        """
        self._readers = context.workers(self.settings.num_threads)
        self._writers = context.workers(self.settings.num_threads)
        self._clerk = context.workers(1)  # the only thread that touches journals and the directory
        return await self._clerk.run(self._open, context.groups)

    async def read(self, group: int, slots: Slots, into: Sequence[Block]) -> list[Outcome]:
        """Fill ``into[i]`` from ``slots[i]``: HIT, MISS where nothing was ever written, or FAILED each.

        Raises:
            BackendUnavailableError: The disk is gone.
        """
        slab = self._slab(group, slots, into)
        return await self._move(self._readers, slab, slab.read, slots, into)

    async def write(self, group: int, slots: Slots, names: Names, blocks: Sequence[Block]) -> list[Outcome]:
        """Write ``blocks[i]`` to ``slots[i]`` and remember that it is ``names[i]``: STORED or FAILED each.

        Raises:
            BackendUnavailableError: The disk is gone.
        """
        slab = self._slab(group, slots, blocks)
        check_lengths(names, blocks)
        if len(slots) and (last := int(slots.max())) >= slab.num_allocated:
            await self._run(self._clerk, self._grow, slab, last + 1)
        outcomes = await self._move(self._writers, slab, slab.write, slots, blocks)
        stored = np.array([outcome is Outcome.STORED for outcome in outcomes], np.bool_)
        if stored.any():
            try:
                await self._run(self._clerk, self._journals[group].append, names[stored], slots[stored])
            except OSError as error:  # written, but not to be found again
                self._last_error = error
                return [Outcome.FAILED] * len(outcomes)
        return outcomes

    async def forget(self, group: int, slots: Slots) -> None:
        """Make sure that what these slots hold is not found after a restart.

        Raises:
            BackendUnavailableError: The journal could not be written.
        """
        self._slab(group, slots)
        with _translated(f"forget {len(slots)} slots of {self.settings.path}"):
            nothing = np.zeros((len(slots), 4), np.uint64)
            await self._run(self._clerk, self._journals[group].append, nothing, slots)

    async def checkpoint(self, group: int, names: Names, slots: Slots, *, sync: bool = False) -> None:
        """Remember exactly these blocks, least recently used first; with ``sync``, survive a loss of power.

        A block whose write returns while this is called, and is not among ``names``, may be forgotten.

        Raises:
            BackendUnavailableError: The disk did not take it. What was remembered before still is.
        """
        slab = self._slab(group, slots)
        with _translated(f"remember {len(slots)} blocks in {self.settings.path}"):
            if sync:
                await self._run(self._writers, slab.sync)
            await self._run(self._clerk, lambda: self._journals[group].rewrite(names, slots, sync=sync))

    def fit(self, capacity_bytes: int) -> int:
        """See `SlotBackend.fit`: up to ``max_capacity``."""
        if not self._slabs:
            raise ConfigurationError(f"the NVMe tier at {self.settings.path} is not open yet: resize it later")
        most_bytes = self.settings.max_capacity or self.settings.capacity
        if capacity_bytes > most_bytes:
            raise ConfigurationError(
                f"{self.settings.path} takes {most_bytes} bytes at most, got {capacity_bytes}: set max_capacity"
            )
        return fit(capacity_bytes, [slab.shape for slab in self._slabs])

    async def resize(self, num_slots: int) -> None:
        """See `SlotBackend.resize`: what is given up is free on the disk when this returns.

        Raises:
            BackendUnavailableError: The disk is too small, or fails.
        """
        with _translated(f"resize {self.settings.path}"):
            await self._run(self._clerk, self._resize, num_slots)

    async def aclose(self) -> None:
        """Close the files and release the directory, or leave that to the last call still under way."""
        self._slabs, self._journals = [], []
        if self._calls is not None:
            self._calls.close()

    def describe(self) -> dict[str, object]:
        """Return where and how blocks are kept: ``io`` is "direct" or "buffered", ``io_reason`` says why not direct."""
        if not self._slabs:
            return {}
        return self._facts | {
            "allocated_bytes": sum(slab.num_allocated * slab.shape.stride_bytes for slab in self._slabs),
            "journal_bytes": sum(journal.num_bytes for journal in self._journals),
            "reclaimed_fingerprints": self._directory.num_reclaimed,
            "last_error": str(self._last_error or ""),
        }

    def _slab(self, group: int, slots: Slots, blocks: Sequence[Block] | None = None) -> Slab:
        """Return the group's slab, if the call makes sense for it."""
        if not self._slabs:
            raise ClosedError(f"the NVMe tier at {self.settings.path} is not open")
        slab = self._slabs[group]
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < slab.num_slots:
            raise ConfigurationError(f"slots {slots.min()} to {slots.max()} of a slab of {slab.num_slots}")
        if blocks is not None:
            check_lengths(slots, blocks)
            for block in blocks:
                if len(block.padded) != slab.shape.padded_bytes:
                    raise LayoutMismatchError(
                        f"a block of {len(block.padded)} padded bytes for slots of {slab.shape.padded_bytes}"
                    )
        return slab

    async def _move(
        self,
        workers: Workers,
        slab: Slab,
        function: Callable[[list[int], Sequence[Block]], Moved],
        slots: Slots,
        blocks: Sequence[Block],
    ) -> list[Outcome]:
        """Share a batch out among the threads, neighbours together; return one outcome per block, in its order."""
        order = np.argsort(slots, kind="stable").tolist()
        sorted_slots, sorted_blocks = slots[order].tolist(), [blocks[i] for i in order]
        share = min(slab.call_blocks, -(-len(order) // self.settings.num_threads)) or 1
        jobs = [
            self._run(workers, function, sorted_slots[start : start + share], sorted_blocks[start : start + share])
            for start in range(0, len(order), share)
        ]
        if jobs:
            await asyncio.wait(
                jobs
            )  # for all of them, whatever one raises: the blocks are lent until this call returns
        moved = [job.result() for job in jobs]
        outcomes = [Outcome.FAILED] * len(order)
        for i, outcome in zip(order, chain.from_iterable(part.outcomes for part in moved), strict=True):
            outcomes[i] = outcome
        if errors := [part.error for part in moved if part.error is not None]:
            self._last_error = errors[-1]
            if errors[-1].errno in _GONE and all(outcome is Outcome.FAILED for outcome in outcomes):
                raise BackendUnavailableError(f"{self.settings.path}: {errors[-1].strerror}") from errors[-1]
        return outcomes

    def _run(self, workers: Workers, function: Callable[..., T], *args: object) -> "asyncio.Future[T]":
        assert self._calls is not None  # noqa: S101 - `_slab` has raised before
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
        num_freed_bytes = sum(max(0, slab.num_allocated - num_slots) * slab.shape.stride_bytes for slab in self._slabs)
        self._directory.resize(num_slots, num_freed_bytes)
        for slab, journal in zip(self._slabs, self._journals, strict=True):
            slab.resize(num_slots)
            journal.resize(num_slots)
        self._facts |= {"capacity_bytes": self._directory.capacity_bytes, "num_slots": num_slots}

    def _most_slots(self, groups: Sequence[RecordShape]) -> int:
        return fit(self.settings.max_capacity or self.settings.capacity, groups)

    def _open(self, groups: Sequence[RecordShape]) -> list[Recovered]:
        with contextlib.ExitStack() as opened:
            self._directory = directory = Directory(self.settings.path, self.settings.capacity, groups)
            opened.callback(directory.close)
            flags, reason = probe_direct_io(directory.path, self.settings.direct)
            if reason and self.settings.direct == "always":
                raise ConfigurationError(f"{directory.path} has no direct I/O ({reason}): set direct='auto'")
            num_slots, most_slots = directory.num_slots, max(directory.num_slots, self._most_slots(groups))
            self._slabs, self._journals, recovered = [], [], []
            try:
                for folder, shape in zip(directory.folders, groups, strict=True):
                    slab = Slab(folder / "slab", shape, num_slots, flags)
                    opened.callback(slab.close)
                    self._slabs.append(slab)
                    journal = Journal(folder / "journal", stride_bytes=shape.stride_bytes, num_slots=num_slots)
                    opened.callback(journal.close)
                    self._journals.append(journal)
                    names, slots = journal.recover()
                    there = slots < slab.num_allocated
                    recovered.append(Recovered(num_slots, names[there], slots[there], most_slots))
            except OSError as error:
                raise ConfigurationError(f"{error.filename or directory.path}: {error.strerror}") from error
            strides = [slab.shape.stride_bytes for slab in self._slabs]
            directory.take(
                sum(slab.num_allocated * slab.shape.stride_bytes for slab in self._slabs), num_slots * sum(strides)
            )
            self._facts = {
                "path": str(directory.path),
                "capacity_bytes": int(self.settings.capacity),
                "num_slots": num_slots,
                "io": "buffered" if reason else "direct",
                "io_reason": reason,
                "num_recovered": sum(len(found.slots) for found in recovered),
            }
            self._calls = _Calls(opened.pop_all().close)
        return recovered


def _look_at(future: "asyncio.Future[object]") -> None:
    """Take note of an error, so that one whose waiter was cancelled is not logged as forgotten."""
    if not future.cancelled():
        future.exception()


class _Calls:
    """The calls under way in threads. Files close behind the last: a descriptor may be another file's by then."""

    def __init__(self, close_files: Callable[[], None]) -> None:
        self._close_files = close_files
        self._lock = threading.Lock()
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
        """Let no more calls start, and close the files now or behind the last."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            is_last = not was_closed and not self._num_running
        if is_last:
            self._close_files()


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BackendUnavailableError(f"{doing}: {error.strerror}") from error
