"""Prefetches: blocks copied up before anyone waits for them, with a quota, never through bounce slots.

What a plan is to load is copied up in the same way; as somebody waits for it, without the quota and until a deadline.
What has come is held until all has: so a prefix that fits beside what is leased comes whole, whatever the policy.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.leases import Lease
from tiered_kv.memory.copies import copy_rows
from tiered_kv.memory.lanes import RevokedError
from tiered_kv.tiers.chain import Chain, Head
from tiered_kv.tiers.gate import Kind, Waiter
from tiered_kv.tiers.tier import Batch, MemoryTier
from tiered_kv.transfers.handles import Handle, Revocable, cancel_each
from tiered_kv.transfers.window import Bringer, Said, WindowResult
from tiered_kv.values.errors import ConfigurationError, Reason, TierFault, in_words
from tiered_kv.values.events import BlocksPrefetched
from tiered_kv.values.results import PrefetchResult

_LONG_S: Final = 3600.0
"""What a window may take that nobody waits for; its tiers have time limits of their own."""
PrefetchHandle = Handle[PrefetchResult]


class HostLease:
    """A prefix held in host memory: readable in place until the ``async with`` block ends.

    Attributes:
        num_blocks: The prefix that is held.
        views: One read-only view per block, of its bytes as they are kept: the payload's, or what a codec made of it.
            Not to be used after the ``async with`` block has ended.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.num_blocks = len(views)
        self.views = views

    def __repr__(self) -> str:
        return f"HostLease(num_blocks={self.num_blocks})"


class Brought(Head):
    """What became of each block that was to be in memory, by position in the call; those that are there are held.

    Whoever started it leases what it wants of them, and then has them let go.

    Attributes:
        source: ``(n,)`` int8, the number of the tier that had it; -1 where it was not brought.
        arrived: ``(n,)``, when it was there, on the loop's clock; 0 where that was before the call.
        faults: What kept blocks from being brought, as in `LoadResult`; complete once what brings them has ended.
        befell: Where it went on behind what was not brought, why that was not, by position; None where it did not: then
            the last fault says so.
    """

    def __init__(self, chain: Chain, num_blocks: int) -> None:
        """Begin with nothing brought."""
        super().__init__(chain)
        self.source = np.full(num_blocks, -1, np.int8)
        self.arrived = np.zeros(num_blocks)
        self.faults: list[TierFault] = []
        self.befell: dict[int, Reason] | None = None

    def note(self, at: NDArray[np.int64] | slice, source: NDArray[np.int8]) -> None:
        """Take note of blocks that have arrived now, from these tiers."""
        self.source[at], self.arrived[at] = source, asyncio.get_running_loop().time()


class Prefetch(Revocable):
    """A prefetch: it brings the longest prefix into a memory tier, as far as that fits beside leased blocks."""

    def __init__(
        self,
        chain: Chain,
        batch: Batch,
        target: MemoryTier,
        said: Said | None = None,
        deadline: float | None = None,
    ) -> None:
        """Prepare a prefetch. With a deadline, on the loop's clock, somebody waits for it until then, as for a load."""
        super().__init__()
        self._chain = chain
        self._batch = batch
        self._target = target
        gpu = target if target is chain.gpu else None
        self._deadline = deadline
        kind = Kind.PREFETCH if deadline is None else Kind.LOAD
        self.brought = Brought(chain, len(batch))
        self._bringer = Bringer(chain, batch, kind, keep=True, may_pass=False, gpu=gpu, said=said)
        self._room = target.index.room_for(batch.names)
        self._num_moved = 0

    async def run(self) -> PrefetchResult:
        """Move the blocks, window by window; never raises for a tier."""
        started, done = asyncio.get_running_loop().time(), 0
        try:
            while not self.revoked and done < len(self._batch):
                part = self._batch[done : done + self._chain.next_window(done, len(self._batch) - done)]
                arrived = await self._bring(done, part)
                done += arrived
                if arrived < len(part):
                    break
        except TimeoutError:
            self._bringer.faults.append(TierFault("", Reason.DEADLINE, len(self._batch)))
        except asyncio.CancelledError:
            self.revoked = True
        finally:
            self._bringer.close()
            await self.drain_copies()
        self.brought.faults += self._bringer.faults
        done = self._target.index.ready_prefix(self._batch.names)
        took_ms = (asyncio.get_running_loop().time() - started) * 1e3
        self._chain.emit(BlocksPrefetched(done, self._num_moved, self._target.name, took_ms))
        return PrefetchResult(done, self._num_moved, tuple(self._bringer.faults))

    async def _bring(self, start: int, part: Batch) -> int:
        chain = self._chain
        missing = int(np.count_nonzero(~self._target.index.ready(part.names)))
        if missing > self._room:
            part = part[: self._room]
        self._room -= missing
        if not len(part):
            return 0
        with ExitStack() as stack:
            if self._deadline is None:
                quota = chain.quotas.prefetches
                # As of a load: a prefetch has a part of what it shares with loads, and all of this is prefetches'.
                stack.callback(await quota.take(len(part) * chain.stride_bytes, Waiter(Kind.LOAD)))
            self.brought.hold_rest(chain.host, self._batch.names[start:])
            async with asyncio.timeout_at(self._deadline):
                window = await self._bringer.begin(start, part, may_wait=False)
            if window is None:
                return 0
            stack.callback(self._bringer.abandon, window)
            landed = await self._bringer.land(window, self._deadline or asyncio.get_running_loop().time() + _LONG_S)
            stack.callback(chain.release, *landed.leases)
            self.brought.note(slice(start, start + landed.num_blocks), landed.window.source[: landed.num_blocks])
            num_there = landed.num_blocks
            if self._target is chain.gpu:
                num_there = await self._copy_up(landed)
            elif window.own is not None:
                self._num_moved += int(np.count_nonzero(window.own.arrived))
            self.brought.hold(self._target, landed.window.batch.names[:num_there])
            return num_there

    async def _copy_up(self, landed: WindowResult) -> int:
        chain, gpu = self._chain, self._target
        at = landed.to_promote(chain.host.index)
        if len(at):
            self.brought.hold_rest(gpu, self._batch.names[landed.window.start :])
        reservation = chain.reserve(gpu, landed.window.batch[at])
        if reservation is None:
            return 0
        with reservation:
            fresh = reservation.slots >= 0
            slots, sources = reservation.slots[fresh], landed.host[at[fresh]]
            if len(slots):
                errors: list[BaseException | None] = []
                work = partial(copy_rows, chain.host.rows, sources, gpu.rows, slots)
                self.watch(chain.copy(chain.h2d.take(), work), errors.append)
                await self.drain_copies()
                if (error := errors[0]) is not None:
                    if not isinstance(error, RevokedError):
                        reason = Reason.COPY_FAILED if chain.h2d.device.error is None else Reason.DEVICE_UNUSABLE
                        self._bringer.faults.append(TierFault(gpu.name, reason, len(slots), in_words(error)))
                    return 0
            reservation.keep()
            self._num_moved += len(slots)
            gpu.counters.promoted += len(slots)
        return landed.num_blocks


def start_prefetch(parts: Sequence[tuple[Chain, Batch]], to: str) -> PrefetchHandle:
    """Start to copy blocks up to the memory tier of this name, those of each rank.

    Raises:
        ConfigurationError: There is none that keeps any.
    """
    first, *others = handles = [_start(chain, batch, to) for chain, batch in parts]
    if not others:
        return first

    async def all_of_them() -> PrefetchResult:
        results = [await each for each in handles]
        faults = tuple(fault for each in results for fault in each.faults)
        num_blocks = min(each.num_blocks for each in results)
        return PrefetchResult(num_blocks, sum(each.num_moved for each in results), faults)

    chain, batch = parts[0]
    task = chain.tasks.spawn(all_of_them(), f"prefetch {len(batch)} blocks of {len(parts)} ranks")
    return Handle(task, partial(cancel_each, handles))


def _start(chain: Chain, batch: Batch, to: str) -> PrefetchHandle:
    target = next((tier for tier in chain.memory if tier.name == to and tier.index.num_slots), None)
    if target is None:
        known = ", ".join(tier.name for tier in chain.memory if tier.index.num_slots) or "none"
        raise ConfigurationError(f"prefetch goes to a memory tier; here: {known}; not {to!r}")
    prefetch = Prefetch(chain, batch, target)
    task = chain.tasks.spawn(prefetch.run(), f"prefetch {len(batch)} blocks")
    task.add_done_callback(lambda _: prefetch.brought.let_go())
    return prefetch.start(task)


def start_bringing(
    parts: Sequence[tuple[Chain, Batch]], said: Sequence[Said | None] | None = None, deadline: float | None = None
) -> tuple[list[Brought], list[PrefetchHandle]]:
    """Start to copy up what is below the CPU tier, as far as it fits; for several ranks at once.

    Args:
        parts: By rank, the tiers and the blocks.
        said: By rank, what shared tiers have been asked just before.
        deadline: As for `Prefetch`.

    Returns:
        For each rank, what becomes of its blocks, filled in as they arrive. And what to wait for, with `bringing`:
        nothing if all is there, and then nothing is held.
    """
    handles: list[PrefetchHandle] = []
    brought = []
    for (chain, batch), known in zip(parts, said or [None] * len(parts), strict=True):
        if chain.host.index.ready(batch.names).all():
            brought.append(Brought(chain, len(batch)))
            brought[-1].source[:] = len(chain.memory) - 1
        else:
            prefetch = Prefetch(chain, batch, chain.host, known, deadline)
            brought.append(prefetch.brought)
            handles.append(prefetch.start(chain.tasks.spawn(prefetch.run(), f"bring {len(batch)} blocks")))
    if handles:
        for each, (chain, batch) in zip(brought, parts, strict=True):
            each.hold_rest(chain.host, batch.names)
    return brought, handles


@asynccontextmanager
async def bringing(brought: Sequence[Brought], handles: Sequence[PrefetchHandle]) -> AsyncGenerator[Sequence[Brought]]:
    """Wait until all has arrived that will; yield it, which is held until the ``async with`` block ends.

    Cancelled meanwhile, stop it, without waiting: it touches no memory but ours.
    """
    try:
        try:
            for handle in handles:
                await handle
        except asyncio.CancelledError:
            cancel_each(handles)
            raise
        yield brought
    finally:
        for each in brought:
            each.let_go()


def lease_prefix(parts: Sequence[tuple[Chain, Batch]]) -> list[Lease]:
    """Lease the prefix that is in host memory for every rank; all leases are of one length."""
    leases = [chain.host.index.lease(batch.names) for chain, batch in parts]
    n = min(lease.num_prefix for lease in leases)
    if all(len(lease.slots) == n for lease in leases):
        return leases
    shorter = [chain.host.index.lease(batch.names[:n]) for chain, batch in parts]
    for (chain, _), lease in zip(parts, leases, strict=True):
        chain.release(lease)
    return shorter


def lease_each(parts: Sequence[tuple[Chain, Batch]]) -> tuple[list[Lease], NDArray[np.int64]]:
    """Lease every block that is in host memory for every rank; return the leases, and which blocks these are."""
    ready = [chain.host.index.ready(batch.names) for chain, batch in parts]
    at = np.logical_and.reduce(ready).nonzero()[0]
    return [chain.host.index.lease(batch.names[at]) for chain, batch in parts], at


@asynccontextmanager
async def hold_on_host(chain: Chain, batch: Batch) -> AsyncGenerator[HostLease]:
    """Bring a prefix to host memory, and hold it there for the time of the ``async with`` block."""
    async with bringing(*start_bringing([(chain, batch)])):
        (lease,) = lease_prefix([(chain, batch)])
    try:
        yield HostLease([chain.host.slab.payload(int(slot)).toreadonly() for slot in lease.slots])
    finally:
        chain.release(lease)
