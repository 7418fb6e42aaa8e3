"""Writing down: the second half of a store. Blocks go from the tier that has them to every tier below it.

Tiers with ``write="through"`` get them now. For those with ``write="back"`` they wait where they are, and the cleaner
writes them. They stay leased until the last tier has let go of their memory; a tier that is late is counted as failed
and not waited for, but keeps what it was lent.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.history import Fate
from tiered_kv.catalog.leases import Lease, Reservation
from tiered_kv.memory.copies import copy_rows
from tiered_kv.memory.lanes import LaneCopy
from tiered_kv.tiers.base import Mask
from tiered_kv.tiers.batch import Batch
from tiered_kv.tiers.budget import Kind, Waiter
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.fills import Fill
from tiered_kv.tiers.memory import MemoryTier
from tiered_kv.tiers.reports import WriteReport
from tiered_kv.tiers.storage import StorageTier
from tiered_kv.transfers.tally import Tally

_MOST_TRIES: Final = 3
"""How often the cleaner tries to write a block before it counts as failed."""


class WriteDown:
    """The blocks of one window, leased in the tier that has them, on their way down."""

    def __init__(
        self,
        chain: Chain,
        tally: Tally,
        tier: MemoryTier,
        batch: Batch,
        slots: NDArray[np.int64],
        lease: Lease,
        came: int,
        *,
        to: Sequence[StorageTier] | None = None,
        kind: Kind = Kind.STORE,
    ) -> None:
        """Take over ``lease``, which holds ``batch`` in ``slots`` of ``tier``.

        Args:
            chain: The tiers.
            tally: Counts what becomes of the blocks.
            tier: Where they are.
            batch: The blocks.
            slots: Where in ``tier`` each is.
            lease: Released in the end.
            came: When they came, see `Unwritten`.
            to: The storage tiers to write to; those whose turn it is by their policies if left out.
            kind: `Kind.CLEAN` for blocks that waited: what fails then waits again.
        """
        self._chain = chain
        self._tally = tally
        self._tier = tier
        self._batch = batch
        self._slots = slots
        self._lease = lease
        self._came = came
        self._to = to
        self._kind = kind
        self._moved: list[NDArray[np.int64]] = []

    def let_wait(self) -> None:
        """Let the blocks wait here for the tiers that get them later, if it is here that they wait for those."""
        chain, tier = self._chain, self._tier
        if tier is chain.gpu and chain.host.index.max_slots and not chain.host.write_back:
            return  # on the host
        later = chain.later(tier)
        self._to = [] if chain.host in later else chain.through
        if not later:
            return
        stays = ~tier.index.is_transient(self._slots)
        num_passing = int(np.count_nonzero(~stays))
        for each in later:
            self._tally.add(each, deferred=len(self._batch) - num_passing, dropped=num_passing)
        wanted = chain.admitted(later, self._batch)
        chain.unwritten.has_lost |= bool((wanted & ~stays).any())
        wanted &= stays
        if wanted.any():
            chain.waiting[tier].add(self._batch[wanted], self._slots[wanted], self._lease, self._came)

    @property
    def is_done(self) -> bool:
        """Whether nothing is to be written now."""
        return not len(self._batch) or (self._to is not None and not self._to)

    def give_up(self) -> None:
        """Write nothing, and let go."""
        n = len(self._batch)
        if not self.is_done:
            self._chain.ledger.note(self._batch.names, Fate.DROPPED, "queue full")
            self._lose(self._batch)
        if self._to is None:
            self._tally.add_below(self._tier, dropped=n)
        for storage in self._to or ():
            self._tally.add(storage, dropped=n)
        self._chain.release(self._lease)

    async def run(self) -> None:
        """Write to the tiers below. Returns when each has the blocks or is given up; never raises for a tier."""
        chain = self._chain
        try:
            if self._tier is chain.gpu:
                await self._copy_to_host(chain.gpu)
            if self._to is None:
                self.let_wait()
        except BaseException:
            if self._kind is Kind.CLEAN:  # the cache is closing, which counts what was not written
                chain.waiting[self._tier].put_back(self._batch, self._slots, self._lease, self._came)
            else:
                self._lose(self._batch)
            chain.release(self._lease)
            raise
        to = self._to or ()
        if not to or not len(self._batch):
            chain.release(self._lease)
            return
        left = [len(to)]

        def let_go() -> None:
            left[0] -= 1
            if not left[0]:
                self._leave_host()
                chain.release(self._lease)

        settled = {self._write_to(storage, let_go) for storage in to}
        while not all(each.done() for each in settled):
            with suppress(asyncio.CancelledError):  # the cache is closing: the writes are cancelled too, and settle
                await asyncio.wait(settled)

    async def _copy_to_host(self, gpu: MemoryTier) -> None:
        """Copy blocks of the GPU pool to the host, and hold those that are there then instead."""
        chain, host, n = self._chain, self._chain.host, len(self._batch)
        reservation = await self._reserve_host()
        if reservation is None:
            if self._kind is Kind.CLEAN:
                chain.waiting[gpu].put_back(self._batch, self._slots, self._lease, self._came)
            else:
                self._lose(self._batch)
                self._tally.add_below(gpu, dropped=n)
            self._batch, self._slots = self._batch[:0], self._slots[:0]
            return
        fresh = reservation.slots >= 0
        fill = Fill(n, Waiter(self._kind))
        chain.fills.announce(fill, reservation)
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
            chain.fills.conclude(fill, reservation)
        held = host.index.lease(self._batch.names)
        num_filled = 0
        if filled is not None:
            num_filled = int(np.count_nonzero(filled.slots >= 0))
            filled.release()
        there = held.slots >= 0
        num_again = self._wait_again(gpu, ~there)
        chain.release(self._lease)
        num_failed = n - int(np.count_nonzero(there)) - num_again
        num_passing = int(np.count_nonzero(host.index.is_transient(held.slots)))
        counts = {"dropped": num_passing, "written": max(0, num_filled - num_passing), "failed": num_failed}
        self._tally.add(host, present=n - num_again - sum(counts.values()), deferred=num_again, **counts)
        self._tally.add_below(host, failed=num_failed)
        self._tier, self._lease, self._slots, self._batch = host, held, held.slots[there], self._batch[there]

    def _wait_again(self, gpu: MemoryTier, absent: Mask) -> int:
        """Let blocks that waited, and were not copied to the host, wait for another try; say how many do."""
        if not absent.any():
            return 0
        slots, _ = gpu.index.find(self._batch.names)
        at = np.flatnonzero(absent & (slots == self._slots))  # the others were evicted by name
        again = np.zeros(len(at), np.bool_)
        if self._kind is Kind.CLEAN:
            line = self._chain.waiting[gpu]
            again = line.again(self._batch[at], self._slots[at], self._lease, most_tries=_MOST_TRIES)
        self._lose(self._batch[at[~again]])
        return int(np.count_nonzero(again))

    def _is_for(self, storage: StorageTier, batch: Batch) -> Mask:
        """Say which blocks are for this cache to write to a tier."""
        mine = self._chain.admitted([storage], batch)
        return mine & self._chain.naming.shard.writes(batch.positions) if storage.is_shared else mine

    def _lose(self, batch: Batch) -> None:
        """Take note that blocks go no further, if a tier below was to get one of them."""
        chain = self._chain
        if self._to is None and chain.host.can_keep:
            is_lost = len(batch) > 0
        else:
            is_lost = any(self._is_for(each, batch).any() for each in (chain.written if self._to is None else self._to))
        chain.unwritten.has_lost |= is_lost

    async def _reserve_host(self) -> Reservation | None:
        """Reserve host slots; wait for them only where something below the host is to have the blocks now."""
        chain = self._chain
        if not (chain.through if self._to is None else self._to):
            return chain.reserve(chain.host, self._batch)
        try:
            async with asyncio.timeout(chain.limits.store_timeout_s):
                return await chain.reserve_host(self._batch, Waiter(self._kind), keep=self._to is None)
        except TimeoutError:
            return None

    def _write_to(self, storage: StorageTier, let_go: Callable[[], None]) -> "asyncio.Future[None]":
        """Write blocks to one tier. The future resolves when it is settled: written, given up, or late."""
        chain, batch, slots = self._chain, self._batch, self._slots
        chain.ledger.note(batch.names[~chain.admitted([storage], batch)], Fate.UNADMITTED, storage.name)
        mine = self._is_for(storage, batch)
        if not mine.all():
            self._tally.add(storage, deferred=int(np.count_nonzero(~mine)))
            batch, slots = batch[mine], slots[mine]
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle(report: WriteReport | None) -> None:
            if settled.done():
                return
            self._settle(storage, batch, slots, report or WriteReport.failure_of(len(batch)))
            settled.set_result(None)

        def is_wanted() -> NDArray[np.bool_]:
            found, _ = chain.host.index.find(batch.names)
            return np.equal(found, slots)  # what was evicted by name since must not come back from below

        async def write() -> None:
            try:
                with chain.host.slab.blocks(slots) as blocks:
                    settle(await storage.write(batch, blocks, is_wanted, lambda: settle(None), self._kind))
            finally:
                settle(None)
                let_go()

        if storage.health.is_shedding or not len(batch):
            settle(WriteReport.nothing_of(len(batch)))
            let_go()
        else:
            chain.tasks.spawn(write(), f"write {len(batch)} blocks to {storage.name}")
        return settled

    def _settle(self, storage: StorageTier, batch: Batch, slots: NDArray[np.int64], report: WriteReport) -> None:
        """Count what became of the blocks in one tier; what waited for it and failed waits again."""
        has_waited = self._kind is Kind.CLEAN and storage.is_written_back  # else it only passes by, from the GPU pool
        waiting = self._chain.waiting.get(self._tier) if has_waited else None
        num_again = 0
        if waiting is not None:
            again = waiting.again(batch[report.failed], slots[report.failed], self._lease, most_tries=_MOST_TRIES)
            num_again = int(np.count_nonzero(again))
            report.failed[np.flatnonzero(report.failed)[again]] = False
            if all(each.health.is_shedding for each in self._to or ()):  # nobody tried, or wants it now
                waiting.put_back(batch[report.dropped], slots[report.dropped], self._lease, self._came)
                num_again += int(np.count_nonzero(report.dropped))
                report.dropped[:] = False
        if (lost := report.dropped | report.failed).any():
            found, _ = self._chain.host.index.find(batch.names[lost])
            self._chain.unwritten.has_lost |= bool((found == slots[lost]).any())  # the others were evicted by name
        self._tally.add(storage, deferred=num_again, **report.counts())
        self._chain.ledger.note(batch.names[report.dropped], Fate.DROPPED, storage.name)
        self._chain.ledger.note(batch.names[report.failed], Fate.FAILED, storage.name)
        if storage.is_exclusive:
            self._moved.append(slots[report.written | report.present])

    def _leave_host(self) -> None:
        """Remove what an exclusive tier has now from the host, unless it was removed and stored again meanwhile."""
        for moved in self._moved:
            index, at = self._chain.host.index, np.isin(self._slots, moved)
            names = self._batch.names[at]
            found, _ = index.find(names)
            index.remove(names[found == self._slots[at]])


def write_down(
    chain: Chain,
    tally: Tally,
    tier: MemoryTier,
    batch: Batch,
    slots: NDArray[np.int64],
    lease: Lease,
    came: int,
    ended: Callable[[], None],
) -> None:
    """Send new blocks of a tier on to those below: now, later, or not at all if the store queue is full.

    Args:
        chain: The tiers.
        tally: Counts what becomes of the blocks.
        tier: Where they are.
        batch: The blocks.
        slots: Where in ``tier`` each is.
        lease: Over them; taken over.
        came: When they came, see `Unwritten`.
        ended: Called once nothing of this is under way any more.
    """
    down = WriteDown(chain, tally, tier, batch, slots, lease, came)
    down.let_wait()
    _start(chain, down, len(batch), ended)


def write_admitted(chain: Chain, storage: StorageTier, batch: Batch, came: int | None) -> None:
    """Send blocks that are used often enough now on to a tier that did not have them, from the memory they are in.

    They came when that use did: now if not said, see `Unwritten`.
    """
    batch = batch[storage.lacks(batch)]
    for tier in reversed(chain.memory):
        if not len(batch):
            return
        lease = tier.index.lease(batch.names)
        there = (lease.slots >= 0) & ~tier.index.is_transient(lease.slots)
        part, slots = batch[there], lease.slots[there]
        if storage.is_written_back and (waiting := chain.waiting.get(tier)) is not None:
            waiting.add(part, slots, lease, came)
            chain.release(lease)
        elif storage.is_written_back:
            chain.release(lease)
        else:
            begun = chain.unwritten.begin(came)
            down = WriteDown(chain, Tally(chain.tiers), tier, part, slots, lease, begun, to=[storage])
            _start(chain, down, len(part), partial(chain.unwritten.end, begun))
        batch = batch[~there]


def _start(chain: Chain, down: WriteDown, n: int, ended: Callable[[], None]) -> None:
    num_bytes = n * chain.stride_bytes

    async def run() -> None:
        try:
            await down.run()
        finally:
            chain.limits.store_queue.done(num_bytes)
            ended()

    if not down.is_done and chain.limits.store_queue.accept(num_bytes):
        chain.tasks.spawn(run(), f"write down {n} blocks")
    else:
        down.give_up()
        ended()


async def _ended(copy: LaneCopy) -> BaseException | None:
    """Wait until a copy between slots of ours has ended, and return its error. The slots stay ours until then."""
    while not copy.ended.done():
        try:
            await asyncio.wait({copy.ended})
        except asyncio.CancelledError:
            copy.revoke()  # the cache is closing
    return copy.ended.exception()
