"""Stores: blocks copied out of the engine into the first tier that has room, then written down to every tier below.

The source is free again after the first copy. What follows is the cache's: a block is leased where it is until each
lower tier has written it or given it up. A full queue drops what would go below, and counts it; it never delays a load.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.rights import Lease, Reservation
from tiered_kv.events import BlocksSettled, BlocksStored
from tiered_kv.memory.caches import PagedCaches
from tiered_kv.memory.copies import copy_rows, gather_blocks
from tiered_kv.motion.budget import Priority, Ticket
from tiered_kv.motion.chain import Chain, Fill
from tiered_kv.motion.handles import Revocable, RevokedError
from tiered_kv.motion.storage import StorageTier, WriteReport
from tiered_kv.motion.tiers import Batch, MemoryTier
from tiered_kv.results import StoreResult, TierStore


@dataclass
class _Tally:
    """What became of a store's blocks, by tier."""

    tiers: Sequence[str]
    counts: dict[str, Counter[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = {tier: Counter() for tier in self.tiers}

    def add(self, tier: str, **counts: int) -> None:
        self.counts[tier].update(counts)

    def add_below(self, tier: str | None, **counts: int) -> None:
        """Count for every tier below one; for all, if it is None."""
        start = 0 if tier is None else self.tiers.index(tier) + 1
        for each in self.tiers[start:]:
            self.add(each, **counts)

    def results(self) -> tuple[TierStore, ...]:
        return tuple(TierStore(tier, **self.counts[tier]) for tier in self.tiers)


class Store(Revocable):
    """One store of one KV group."""

    def __init__(self, chain: Chain, batch: Batch, caches: PagedCaches, pages: NDArray[np.int64]) -> None:
        """Prepare a store; nothing moves before `run`.

        Args:
            chain: The tiers.
            batch: What to store, in the namespace of the weights that computed it.
            caches: The engine's tensors.
            pages: ``(n, pages_per_block)`` page ids, in key order.
        """
        super().__init__()
        self._chain = chain
        self._batch = batch
        self._caches = caches
        self._pages = pages
        self._keeps = any(tier.index.num_slots for tier in chain.memory)
        has_own = chain.host.index.num_slots > 0
        self._tiers = [tier.name for tier in chain.tiers if tier is not chain.host or has_own]
        self._tally = _Tally(self._tiers)
        # A store longer than a tier must not evict its own head: past this many, blocks go to the next tier.
        books = {tier.name: tier.index.statistics() for tier in chain.memory}
        self._may_keep = {tier.name: books[tier.name].free + books[tier.name].evictable for tier in chain.memory}
        self._num_stored = self._num_present = 0
        self._dropped: Counter[str] = Counter()
        self._settled: asyncio.Future[tuple[TierStore, ...]] = asyncio.get_running_loop().create_future()
        self._num_open = 1  # windows still on their way down, and run itself
        chain.settling.add(self._settled)
        self._settled.add_done_callback(chain.settling.discard)

    async def run(self) -> StoreResult:
        """Copy the blocks out. Ends when the source may be reused; never raises for a tier."""
        loop = asyncio.get_running_loop()
        started, done = loop.time(), 0
        deadline = started + self._chain.limits.store_timeout_s
        try:
            while done < len(self._batch):
                stop = done + self._window()
                part, pages = self._batch[done:stop], self._pages[done:stop]
                await asyncio.sleep(0)  # where there is room nothing waits: let others run between windows
                async with asyncio.timeout_at(deadline):
                    if not self._keeps:
                        known = await self._known_below(part)
                        self._count_present(int(np.count_nonzero(known)))
                        part, pages = part[~known], pages[~known]
                    placed = await self._place(part)
                if placed is None:
                    self._drop(len(self._batch) - done, "no room")
                    break
                self._copy_out(*placed, part, pages)
                done = min(stop, len(self._batch))
        except TimeoutError:
            self._drop(len(self._batch) - done, "deadline")
        except asyncio.CancelledError:
            self.revoked = True
            self._drop(len(self._batch) - done, "revoked")
        finally:
            await self.drain_copies()
            self._close_one()
        result = StoreResult(
            len(self._batch),
            self._num_stored,
            self._num_present,
            self._dropped.total(),
            dict(self._dropped),
            self._wait,
        )
        self._chain.emit(
            BlocksStored(
                result.num_stored,
                result.num_present,
                result.num_dropped,
                result.drop_reasons,
                (loop.time() - started) * 1e3,
            )
        )
        return result

    async def _wait(self) -> tuple[TierStore, ...]:
        return await asyncio.shield(self._settled)

    def _window(self) -> int:
        """Blocks of the next window: no more than the fastest tier that can keep any has room for."""
        room = next((n for n in self._may_keep.values() if n > 0), self._chain.window_blocks)
        return min(room, self._chain.window_blocks)

    async def _place(self, part: Batch) -> tuple[MemoryTier, Reservation] | None:
        """Reserve slots in the fastest tier that has room; wait for transient ones only if something is below them."""
        chain = self._chain
        for tier in chain.memory:
            if self._may_keep[tier.name] and (reservation := chain.reserve(tier, part)) is not None:
                self._may_keep[tier.name] -= int(np.count_nonzero(reservation.slots >= 0))
                return tier, reservation
        if not chain.storage:
            return None
        return chain.host, await chain.reserve_host(part, Ticket(Priority.STORE), keep=False)

    async def _known_below(self, part: Batch) -> NDArray[np.bool_]:
        """Which blocks every storage tier has already: asked only where no tier above them keeps any."""
        known = np.ones(len(part), np.bool_)
        for tier in self._chain.storage:
            known &= await tier.find(part)
        return known

    def _count_present(self, n: int) -> None:
        self._num_present += n
        self._tally.add_below(None, present=n)

    def _copy_out(self, tier: MemoryTier, reservation: Reservation, part: Batch, pages: NDArray[np.int64]) -> None:
        """Put the copy of a window's new blocks on the stream."""
        chain = self._chain
        fresh = reservation.slots >= 0
        n = int(np.count_nonzero(fresh))
        self._count_present(len(part) - n)
        if not n:
            reservation.close()
            return
        slots, chosen = reservation.slots[fresh], pages[fresh].ravel()
        batch, fill = part[fresh], None
        if tier is chain.host:
            fill = Fill(n, Ticket(Priority.STORE))
            chain.announce(fill, reservation)
        self._num_open += 1
        caches = self._caches
        copy = chain.copy(chain.d2h, lambda: gather_blocks(caches, chosen, tier.rows, slots))
        self.watch(copy, lambda error: self._copied_out(error, tier, reservation, batch, fresh, fill))

    def _copied_out(
        self,
        error: BaseException | None,
        tier: MemoryTier,
        reservation: Reservation,
        batch: Batch,
        fresh: NDArray[np.bool_],
        fill: Fill | None,
    ) -> None:
        chain, n = self._chain, len(batch)
        lease = reservation.commit(fresh) if error is None else None
        if fill is not None:
            chain.conclude(fill, reservation)
        else:
            reservation.close()
        if lease is None:
            self._drop(n, "revoked" if isinstance(error, RevokedError) else "copy failed")
            chain.room.changed()
            self._close_one()
            return
        self._num_stored += n
        tier.counters.written += n
        if tier.name in self._tally.counts:
            self._tally.add(tier.name, written=n)
        num_bytes = n * chain.group.stride_bytes
        goes_down = bool(chain.storage) or (tier is chain.gpu and chain.host.index.num_slots > 0)
        slots = lease.slots[fresh]
        live = slots >= 0
        if not live.all():  # evicted by name while they were copied: they go no further
            gone = int(np.count_nonzero(~live))
            self._tally.add_below(tier.name if tier.name in self._tally.counts else None, dropped=gone)
            batch, slots, n = batch[live], slots[live], n - gone
            num_bytes = n * chain.group.stride_bytes
        if goes_down and n and chain.limits.store_queue.accept(num_bytes):
            chain.tasks.spawn(self._write_down(tier, batch, slots, lease, num_bytes), f"write down {n} blocks")
            return
        if goes_down:
            self._tally.add_below(tier.name if tier.name in self._tally.counts else None, dropped=n)
            self._count_dropped_below(tier, n)
        chain.release(lease)
        self._close_one()

    async def _write_down(
        self, tier: MemoryTier, batch: Batch, slots: NDArray[np.int64], lease: Lease, num_bytes: int
    ) -> None:
        """Write blocks to every tier below the one that has them, and let them go."""
        chain = self._chain
        try:
            host, host_slots = lease, slots
            if tier is chain.gpu:
                copied = await self._copy_to_host(batch, slots, lease)
                if copied is None:
                    return
                host, host_slots, batch = copied
            if not chain.storage:
                chain.release(host)
                return
            # The blocks stay leased until the last tier has let go of their memory, late ones included.
            left = [len(chain.storage)]

            def one_done() -> None:
                left[0] -= 1
                if not left[0]:
                    chain.release(host)

            settled = [self._write_to(storage, batch, host_slots, one_done) for storage in chain.storage]
            await asyncio.gather(*settled)
        finally:
            chain.limits.store_queue.done(num_bytes)
            self._close_one()

    async def _copy_to_host(
        self, batch: Batch, slots: NDArray[np.int64], lease: Lease
    ) -> tuple[Lease, NDArray[np.int64], Batch] | None:
        """Copy blocks of the GPU pool to the host. Returns a lease over those that are there then, or None."""
        chain, n = self._chain, len(batch)
        host, gpu = chain.host, chain.gpu
        assert gpu is not None  # noqa: S101 - the caller has just seen it
        has_own = host.index.num_slots > 0
        try:
            async with asyncio.timeout(chain.limits.store_timeout_s):
                if has_own and not chain.storage:
                    reservation = chain.reserve(host, batch)
                else:
                    reservation = await chain.reserve_host(batch, Ticket(Priority.STORE), keep=has_own)
        except TimeoutError:
            reservation = None
        if reservation is None:
            self._tally.add_below(gpu.name, dropped=n)
            self._count_dropped_below(gpu, n)
            chain.release(lease)
            return None
        fresh = reservation.slots >= 0
        fill = Fill(n, Ticket(Priority.STORE))
        chain.announce(fill, reservation)
        errors: list[BaseException | None] = [None]
        filled: Lease | None = None
        try:
            if fresh.any():
                source, target = slots[fresh], reservation.slots[fresh]
                copy = chain.copy(chain.d2h, lambda: copy_rows(gpu.rows, source, host.rows, target))
                copy.ended.add_done_callback(lambda done: errors.__setitem__(0, done.exception()))
                while not copy.ended.done():
                    try:
                        await asyncio.wait({copy.ended})
                    except asyncio.CancelledError:
                        copy.revoke()  # the cache is closing; the slots stay ours until the copy has ended
            if errors[0] is None:
                # Blocks that were evicted from the pool meanwhile were evicted by name: they go no further.
                filled = reservation.commit(fresh & (gpu.index.find(batch.names)[0] == slots))
        finally:
            chain.conclude(fill, reservation)
            chain.release(lease)
        there = host.index.lease(batch.names)
        num_filled = 0 if filled is None else int(np.count_nonzero(filled.slots >= 0))
        if filled is not None:
            filled.release()
        held = there.slots >= 0
        if has_own:
            num_present = int(np.count_nonzero(held)) - num_filled
            self._tally.add(host.name, written=num_filled, present=num_present, failed=n - num_filled - num_present)
            host.counters.written += num_filled
        self._tally.add_below(host.name if has_own else gpu.name, failed=n - int(np.count_nonzero(held)))
        return there, there.slots[held], batch[held]

    def _write_to(
        self, storage: StorageTier, batch: Batch, slots: NDArray[np.int64], done: Callable[[], None]
    ) -> "asyncio.Future[None]":
        """Write blocks to one tier. The future resolves when it is settled: written, given up, or late."""
        chain = self._chain
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle(report: WriteReport | None) -> None:
            if settled.done():
                return
            counts = {"failed": len(batch)}
            if report is not None:
                counts = {
                    each: int(np.count_nonzero(getattr(report, each)))
                    for each in ("written", "present", "dropped", "failed")
                }
            self._tally.add(storage.name, **counts)
            storage.counters.written += counts.get("written", 0)
            storage.counters.dropped += counts.get("dropped", 0)
            storage.counters.failed += counts["failed"]
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
                done()

        if storage.health.is_bypassed or not len(batch):
            nothing = np.zeros(len(batch), np.bool_)
            settle(WriteReport(nothing, nothing, ~nothing))
            done()
        else:
            chain.tasks.spawn(write(), f"write {len(batch)} blocks to {storage.name}")
        return settled

    def _drop(self, n: int, reason: str) -> None:
        if n:
            self._dropped[reason] += n
            self._tally.add_below(None, dropped=n)
            self._count_dropped_below(None, n)

    def _count_dropped_below(self, tier: MemoryTier | None, n: int) -> None:
        tiers = self._chain.tiers
        below = tiers[tiers.index(tier) + 1 :] if tier is not None else tiers
        for each in below:
            each.counters.dropped += n

    def _close_one(self) -> None:
        self._num_open -= 1
        if not self._num_open and not self._settled.done():
            self._settled.set_result(self._tally.results())
            written = {tier: counts["written"] for tier, counts in self._tally.counts.items()}
            lost = {tier: counts["dropped"] + counts["failed"] for tier, counts in self._tally.counts.items()}
            self._chain.emit(BlocksSettled(written, {tier: n for tier, n in lost.items() if n}))
