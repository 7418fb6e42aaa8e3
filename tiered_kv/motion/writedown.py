"""Writing down: the second half of a store. Blocks go from the tier that has them to every tier below it.

They stay leased where they are until the last tier has let go of their memory; a tier that is late is counted as failed
and not waited for, but keeps what it was lent.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.history import Fate
from tiered_kv.catalog.rights import Lease, Reservation
from tiered_kv.memory.copies import copy_rows
from tiered_kv.motion.budget import Priority, Ticket
from tiered_kv.motion.chain import Chain, Fill
from tiered_kv.motion.handles import Copy
from tiered_kv.motion.storage import OwnedTier, StorageTier, WriteReport
from tiered_kv.motion.tiers import Batch, MemoryTier, Tier
from tiered_kv.results import TierStore


class Tally:
    """What became of a store's blocks, tier by tier, counted for the store and for the tier at once.

    Covers the tiers that can keep blocks: a host tier with bounce slots only is passed over.
    """

    def __init__(self, chain: Chain) -> None:
        self._tiers: list[Tier] = [
            tier for tier in chain.tiers if not isinstance(tier, MemoryTier) or tier.index.num_slots
        ]
        self._order = {tier.name: place for place, tier in enumerate(chain.tiers)}
        self._counts = {tier.name: Counter[str]() for tier in self._tiers}

    def add(
        self, tier: Tier, *, written: int = 0, present: int = 0, deferred: int = 0, dropped: int = 0, failed: int = 0
    ) -> None:
        """Count blocks in one tier."""
        if tier.name not in self._counts:
            return
        self._counts[tier.name].update(
            written=written, present=present, deferred=deferred, dropped=dropped, failed=failed
        )
        tier.counters.written += written
        tier.counters.dropped += dropped
        tier.counters.failed += failed

    def add_all(self, *, present: int = 0, dropped: int = 0) -> None:
        """Count blocks in every tier."""
        for tier in self._tiers:
            self.add(tier, present=present, dropped=dropped)

    def add_above(self, tier: Tier, *, dropped: int) -> None:
        """Count blocks in every tier above one."""
        for each in self._tiers:
            if self._order[each.name] < self._order[tier.name]:
                self.add(each, dropped=dropped)

    def add_below(self, tier: Tier, *, dropped: int = 0, failed: int = 0) -> None:
        """Count blocks in every tier below one."""
        for each in self._tiers:
            if self._order[each.name] > self._order[tier.name]:
                self.add(each, dropped=dropped, failed=failed)

    def results(self) -> tuple[TierStore, ...]:
        """What became of the blocks, fastest tier first."""
        return tuple(TierStore(tier, **counts) for tier, counts in self._counts.items())


class WriteDown:
    """The blocks of one window, leased in the tier that has them, on their way down."""

    def __init__(
        self, chain: Chain, tally: Tally, tier: MemoryTier, batch: Batch, slots: NDArray[np.int64], lease: Lease
    ) -> None:
        """Take over ``lease``, which holds ``batch`` in ``slots`` of ``tier``."""
        self._chain = chain
        self._tally = tally
        self._tier = tier
        self._batch = batch
        self._slots = slots
        self._lease = lease

    async def run(self) -> None:
        """Write to all tiers below. Returns when each has the blocks or is given up; never raises for a tier."""
        chain = self._chain
        try:
            if self._tier is chain.gpu:
                await self._copy_to_host(chain.gpu)
        except BaseException:
            chain.release(self._lease)
            raise
        if not chain.storage or not len(self._batch):
            chain.release(self._lease)
            return
        left = [len(chain.storage)]

        def let_go() -> None:
            left[0] -= 1
            if not left[0]:
                chain.release(self._lease)

        settled = {self._write_to(storage, let_go) for storage in chain.storage}
        while not all(each.done() for each in settled):
            with suppress(asyncio.CancelledError):  # the cache is closing: the writes are cancelled too, and settle
                await asyncio.wait(settled)

    async def _copy_to_host(self, gpu: MemoryTier) -> None:
        """Copy blocks of the GPU pool to the host, and hold those that are there then instead."""
        chain, host, n = self._chain, self._chain.host, len(self._batch)
        reservation = await self._reserve_host()
        if reservation is None:
            self._tally.add_below(gpu, dropped=n)
            self._batch = self._batch[:0]
            return
        fresh = reservation.slots >= 0
        fill = Fill(n, Ticket(Priority.STORE))
        chain.announce(fill, reservation)
        filled: Lease | None = None
        try:
            if fresh.any():
                source, target = self._slots[fresh], reservation.slots[fresh]
                copy = chain.copy(chain.d2h.take(), lambda: copy_rows(gpu.rows, source, host.rows, target))
                if await _ended(copy) is None:
                    # What was evicted from the pool meanwhile was evicted by name: it goes no further.
                    slots, _ = gpu.index.find(self._batch.names)
                    filled = reservation.commit(fresh & (slots == self._slots))
        finally:
            chain.conclude(fill, reservation)
        held = host.index.lease(self._batch.names)
        num_filled = 0
        if filled is not None:
            num_filled = int(np.count_nonzero(filled.slots >= 0))
            filled.release()
        chain.release(self._lease)
        there = held.slots >= 0
        num_there = int(np.count_nonzero(there))
        num_passing = int(np.count_nonzero(host.index.is_transient(held.slots)))
        counts = {"dropped": num_passing, "written": max(0, num_filled - num_passing), "failed": n - num_there}
        self._tally.add(host, present=n - sum(counts.values()), **counts)
        self._tally.add_below(host, failed=n - num_there)
        self._tier, self._lease, self._slots, self._batch = host, held, held.slots[there], self._batch[there]

    async def _reserve_host(self) -> Reservation | None:
        """Reserve host slots; wait for them only where something is below the host."""
        chain = self._chain
        if not chain.storage:
            return chain.reserve(chain.host, self._batch)
        try:
            async with asyncio.timeout(chain.limits.store_timeout_s):
                return await chain.reserve_host(self._batch, Ticket(Priority.STORE), keep=True)
        except TimeoutError:
            return None

    def _write_to(self, storage: StorageTier, let_go: Callable[[], None]) -> "asyncio.Future[None]":
        """Write blocks to one tier. The future resolves when it is settled: written, given up, or late."""
        chain, batch, slots = self._chain, self._batch, self._slots
        if not isinstance(storage, OwnedTier):
            mine = chain.naming.shard.writes(batch.positions)
            self._tally.add(storage, deferred=int(np.count_nonzero(~mine)))
            batch, slots = batch[mine], slots[mine]
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle(report: WriteReport | None) -> None:
            if settled.done():
                return
            if report is None:
                self._tally.add(storage, failed=len(batch))
                chain.ledger.note(batch.names, Fate.FAILED, storage.name)
            else:
                self._tally.add(storage, **report.counts())
                chain.ledger.note(batch.names[report.dropped], Fate.DROPPED, storage.name)
                chain.ledger.note(batch.names[report.failed], Fate.FAILED, storage.name)
            settled.set_result(None)

        def is_wanted() -> NDArray[np.bool_]:
            found, _ = chain.host.index.find(batch.names)
            return np.equal(found, slots)  # what was evicted by name since must not come back from below

        async def write() -> None:
            try:
                with chain.host.slab.blocks(slots) as blocks:
                    settle(await storage.write(batch, blocks, is_wanted, lambda: settle(None)))
            finally:
                settle(None)
                let_go()

        if storage.health.is_shedding or not len(batch):
            settle(WriteReport.nothing_of(len(batch)))
            let_go()
        else:
            chain.tasks.spawn(write(), f"write {len(batch)} blocks to {storage.name}")
        return settled


async def _ended(copy: Copy) -> BaseException | None:
    """Wait until a copy between slots of ours has ended, and return its error. The slots stay ours until then."""
    while not copy.ended.done():
        try:
            await asyncio.wait({copy.ended})
        except asyncio.CancelledError:
            copy.revoke()  # the cache is closing
    return copy.ended.exception()
