"""The chain of tiers of one KV group, and what every transfer does with it: find blocks, take host slots, copy.

Blocks reach the engine's memory only from rows that copies reach (the GPU pool, the host slab). What lies in storage is
first *filled* into host slots: own ones of the CPU tier where it is to stay, else bounce slots, which live as long as
somebody leases them. One fill per block at a time: whoever else wants the block joins the fill.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from tiered_kv.catalog.books import SlotState
from tiered_kv.catalog.index import TierIndex
from tiered_kv.catalog.leases import Lease, Reservation
from tiered_kv.catalog.locate import append_runs, locate
from tiered_kv.catalog.table import names_at
from tiered_kv.catalog.uses import AdmissionFilter, Fate, said_of
from tiered_kv.memory.codec import Codec
from tiered_kv.memory.lanes import Lane, LaneCopy, Lanes, submit_copy
from tiered_kv.settings.settings import CacheLimits
from tiered_kv.tiers.fates import Fates
from tiered_kv.tiers.fills import Fills
from tiered_kv.tiers.gate import Bandwidth, Budget, Priority, Room, Waiter
from tiered_kv.tiers.owned import OwnedTier
from tiered_kv.tiers.shared import SharedTier
from tiered_kv.tiers.storage import StorageTier
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.tiers.tier import Batch, BookedTier, Expected, HostTier, MemoryTier, Naming, Tier, prefix_of
from tiered_kv.tiers.unwritten import Unwritten
from tiered_kv.values.errors import CapacityError
from tiered_kv.values.events import Emit
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.integers import Mask
from tiered_kv.values.keys import Names
from tiered_kv.values.layout import KVGroup
from tiered_kv.values.loop_calls import LoopCalls
from tiered_kv.values.results import TierRun, num_found

FROM_ENGINE: Final = 0
"""As a source of blocks, among the numbers of storage tiers: none of these."""
_ASKED_AT_ONCE: Final = 1024
_LAST_WINDOWS: Final = 4
"""In no less than so many what is left goes."""
_LONGEST: Final = 2
"""Times a usual window: two of them are what one tier reads at once, and with fewer under way a disk waits."""
_LEAST_USES: Final = 1 << 12
_MOST_USES: Final = 1 << 20
"""Remembered for admission: 16 to 32 bytes each."""
_RESIDENT_WINDOWS, _MOST_RESIDENT_WINDOWS, _FEW_BLOCKS = 4, 64, 256
"""How many windows are moved as one where no storage tier takes part; more only of so few blocks."""


class Quotas:
    """The limits of one cache that the transfers of all its chains share.

    Attributes:
        store_queue: Of bytes of stores that are accepted and not yet written to every tier: nobody waits for it.
        prefetches: Of their bytes in flight.
        clean_bandwidth: Of what has waited to be written.
        takes_stores: False once the cache drains.
    """

    def __init__(self, limits: CacheLimits, clock: Callable[[], float]) -> None:
        self.store_queue = Budget(limits.store_queue)
        self.prefetches = Budget(limits.prefetch_quota)
        self.clean_bandwidth = Bandwidth(limits.clean_bandwidth, clock)
        self.takes_stores = True


@dataclass(eq=False)
class Chain:
    """All tiers of one KV group on one rank, fastest first: perhaps a GPU pool, always a host tier, then storage.

    Attributes:
        naming: What its blocks are called.
        owned, shared: The storage tiers by kind, each fastest first; ``storage`` has them all in order.
        codec: How they are kept in every tier, if not as the engine has them.
        h2d: Streams from the host to the engine's device.
        d2h: Streams back.
        fills: Of its host slots.
        through: The storage tiers that get blocks when they are stored.
        back: Those that get them later, from the cleaner.
        unwritten: What the tiers below do not have yet.
        waiting: The blocks of it that wait, by the memory tier in which they do.
        expected: What stores that wait for their turn have not placed in any tier yet.
        sought: What loads may read from storage, as they were told that it is there.
        stride_bytes: Of a host slot.
        on_admitted: Called with this chain and blocks that have now been used often enough for a tier that may lack
            them, and when that use came, see `Unwritten`.
        fates: Of the whole cache.
    """

    group: KVGroup
    naming: Naming
    gpu: MemoryTier | None
    host: HostTier
    storage: Sequence[StorageTier]
    h2d: Lanes
    d2h: Lanes
    loop_calls: LoopCalls
    tasks: Tasks
    emit: Emit
    limits: CacheLimits
    quotas: Quotas
    codec: Codec | None
    fates: Fates
    on_admitted: Callable[["Chain", StorageTier, Batch, int | None], None]

    def __post_init__(self) -> None:
        self.room = Room()
        self.stride_bytes = self.host.slab.stride_bytes
        self.expected = Expected()
        self.sought = Expected()
        self.memory: list[MemoryTier] = [self.gpu, self.host] if self.gpu else [self.host]
        self.owned = [tier for tier in self.storage if isinstance(tier, OwnedTier)]
        self.shared = [tier for tier in self.storage if isinstance(tier, SharedTier)]
        self.tiers: list[Tier] = [*self.memory, *self.storage]
        self.booked: list[BookedTier] = [*self.memory, *self.owned]
        self.names = [tier.name for tier in self.tiers]
        self.written = [tier for tier in self.storage if tier.can_keep]
        self.through = [tier for tier in self.written if not tier.is_written_back]
        self.back = [tier for tier in self.written if tier.is_written_back]
        least_uses = [1] * len(self.memory) + [tier.settings.admit_after for tier in self.storage]
        window = min(max(_LEAST_USES, 4 * self.host.index.max_slots), _MOST_USES)
        self._admission = AdmissionFilter(least_uses, window)
        clock = asyncio.get_running_loop().time
        self.unwritten = Unwritten([tier for tier in self.memory if tier.index.max_slots and self.later(tier)], clock)
        self.waiting = self.unwritten.waiting
        for tier, line in self.waiting.items():
            line.on_wait, line.on_lost = partial(self._are_to_come, tier), partial(self._come_no_more, tier)
        sources = [*[None for _ in self.memory], *self.storage]
        self.fills = Fills(self.host, sources, self.room)
        num_bounce, num_takers = self.host.index.num_bounce, len(self.storage) + 1
        most = num_bounce // max(4, num_takers)
        self.window_blocks = size = max(1, min(self.limits.window // self.stride_bytes, most))
        self.most_window = max(size, min(_LONGEST * size, most))
        self._least_share = size if num_takers * size <= num_bounce else 0
        # Between two copies a thread waits for the interpreter, which is at the books of the next: 0.6 ms a window.
        self.resident_blocks = max(_RESIDENT_WINDOWS * size, min(_MOST_RESIDENT_WINDOWS * size, _FEW_BLOCKS))

    def next_window(self, num_done: int, num_left: int) -> int:
        """Return how many blocks the next window of a transfer has at most, which has moved some and has some left.

        Each window costs the loop about as much, however many blocks are in it, so a long transfer goes in larger ones:
        but for its first and its last, which nothing overlaps.
        """
        return max(self.window_blocks, min(num_done, num_left // _LAST_WINDOWS, self.most_window))

    # Finding.

    def books(self) -> dict[str, TierIndex]:
        """The books of the owned tiers that are in use, by tier, fastest first."""
        return {tier.name: tier.index for tier in self.booked if tier.is_in_use}

    def books_in_use(self) -> list[TierIndex]:
        """The books of the owned tiers that are in use, fastest first."""
        return [tier.index for tier in self.booked if tier.is_in_use]

    def has(self, batch: Batch) -> Mask:
        """Say of each block whether an owned tier can read it now."""
        ready: Mask = np.logical_or.reduce([index.ready(batch.names) for index in self.books_in_use()])
        return ready

    def has_or_brings(self, tier: MemoryTier, names: Names) -> Mask:
        """Say which blocks are in a memory tier, or come there by what the cache itself does: that soon ends.

        A worker that has slots for blocks may hang for days, and who has planned them may cancel.
        """
        _, states = tier.index.find(names)
        known, at = np.equal(states, SlotState.READY), np.equal(states, SlotState.PENDING).nonzero()[0]
        if len(at):
            known[at] = tier is not self.host or self.fills.are_coming(names_at(names, at))
        return known

    def locate(self, batch: Batch) -> list[TierRun]:
        """Find the longest prefix that owned tiers can read."""
        return locate(self.books(), batch.names)

    def may_be_longer(self, batch: Batch, runs: Sequence[TierRun]) -> bool:
        """Say whether there are tiers to ask for what comes after the prefix that `locate` found."""
        return bool(self.shared) and num_found(runs) < len(batch)

    async def locate_on(self, batch: Batch, runs: Sequence[TierRun]) -> list[TierRun]:
        """Go on where `locate` ended: ask shared tiers, for what owned ones do not have."""
        runs, start = list(runs), num_found(runs)
        while start < len(batch) and self.shared:
            part = batch[start : start + _ASKED_AT_ONCE]
            numbers = np.full(len(part), -1, np.int8)
            for number, memory in enumerate(self.memory):
                numbers[(numbers < 0) & memory.index.ready(part.names)] = number
            for number, tier in enumerate(self.storage, start=len(self.memory)):
                left = (numbers < 0).nonzero()[0]
                if not len(left):
                    break
                numbers[left[await tier.find(part[left])]] = number
            num_blocks = prefix_of(numbers >= 0)
            append_runs(runs, self.names, numbers[:num_blocks], start)
            start += num_blocks
            if num_blocks < len(part):
                break
        return runs

    async def find_each(self, batch: Batch) -> Mask:
        """Say of each block whether some tier could read it; shared tiers are asked for what owned ones lack."""
        found = self.has(batch)
        for tier in self.shared:
            left = np.flatnonzero(~found)
            if len(left):
                found[left] = await tier.find_each(batch[left])
        return found

    def why_missing(self, block: Batch) -> str:
        """Say in a few fixed words why one block could not be read just now."""
        for tier in self.booked:
            slots, states = tier.index.find(block.names)
            if slots[0] >= 0:  # it is there, or on its way
                is_written = isinstance(tier, StorageTier) and states[0] == SlotState.PENDING
                return "being written" if is_written else "not in time" if tier.is_in_use else "tier away"
        for shared in self.shared:
            if why := shared.suspects.why(block.names)[0]:
                return why
        fate = self.fates.of(block.names)[0][0]
        if fate is Fate.UNKNOWN and any(tier.health.is_bypassed for tier in self.storage):
            return "tier away"
        return said_of(fate)

    def hint(self, batch: Batch, hint: ReuseHint) -> None:
        """Tell every tier that chooses its victims itself what a caller says of the blocks that it has."""
        for memory in self.memory:
            memory.index.hint(batch.names, hint)
        for storage in self.storage:
            storage.hint(batch, hint)

    def touch(self, batch: Batch, came: int | None = None, *, but: Tier | None = None) -> None:
        """Count a use of the blocks in every tier, see `touch_there` and `count_use`."""
        self.touch_there(batch, but=but)
        self.count_use(batch, came)

    def touch_there(self, batch: Batch, *, but: Tier | None = None) -> None:
        """Count a use of the blocks in every tier with books that has them, so that hot heads do not rot below.

        In ``but`` it is counted already. Shared media keep their own recency, by what is read.
        """
        if not len(batch.names):
            return
        for booked in self.booked:
            if booked is not but:
                booked.index.touch(batch.names)

    def count_use(self, batch: Batch, came: int | None = None) -> None:
        """Count one use of the blocks, for the tiers that want some before they take a block.

        What these get then came when the use did: now if not said, see `Unwritten`.
        """
        if not self._admission.is_wanted:
            return
        for number, admitted in self._admission.use(batch.names):
            if admitted.any():
                self.on_admitted(self, self.storage[number - len(self.memory)], batch[admitted], came)

    def has_missed(self, storage: StorageTier, batch: Batch) -> None:
        """Have the next store or use bring to a tier what of these blocks it was to have before, and did not get."""
        storage.miss(batch.names)
        number = self.tiers.index(storage)
        self._admission.again(number, batch.names[self._admission.admits(number, batch.names)])

    def send_lacking(self, tier: StorageTier, batch: Batch, came: int) -> int:
        """Send a tier what it lacks of blocks that memory has, as it failed to get it, say; return how many it lacks.

        They were stored again: that is when they came, see `Unwritten`.
        """
        lacking = batch[tier.missed(batch)]
        if len(lacking) and tier.can_keep and not tier.health.is_shedding:
            # What is on its way is not sent twice, nor what the store's use has sent, for which there was no room.
            waits = self._admission.waits(self.tiers.index(tier), lacking.names)
            is_sent = self.admitted([tier], lacking) & ~tier.is_coming(lacking) & ~waits
            self.on_admitted(self, tier, lacking[is_sent], came)
        return len(lacking)

    def later(self, tier: MemoryTier) -> list[Tier]:
        """Name the tiers below for which blocks wait in ``tier``: the CPU tier and all below it, or storage tiers."""
        if tier is self.gpu and self.host.index.max_slots:
            return [self.host, *self.written] if self.host.write_back else []
        return list(self.back)

    def _are_to_come(self, tier: MemoryTier, names: Names) -> None:
        """Take note that blocks wait in ``tier`` for those below it: nobody else need send them there."""
        for each in self.later(tier):
            if isinstance(each, StorageTier):
                each.miss_no_more(names)

    def _come_no_more(self, tier: MemoryTier, names: Names) -> None:
        """Take note that blocks wait in ``tier`` no more, and go nowhere but by another store or use."""
        for each in self.later(tier):
            if isinstance(each, StorageTier):
                each.miss(names)

    def admitted(self, tiers: Sequence[Tier], batch: Batch) -> Mask:
        """Say which blocks at least one of the tiers is to have."""
        admitted = np.zeros(len(batch), np.bool_)
        for tier in tiers:
            admitted |= self._admission.admits(self.tiers.index(tier), batch.names)
        return admitted

    # Slots of the host.

    def reserve(
        self, tier: MemoryTier, batch: Batch, *, bounce: bool = False, source: int = FROM_ENGINE
    ) -> Reservation | None:
        """Reserve slots for what is missing of a batch now, or return None."""
        try:
            reservation = tier.index.reserve(batch.names, bounce=bounce, taker=source)
        except CapacityError:
            return None
        tier.counters.evicted += len(reservation.evicted)
        return reservation

    def reserve_host_now(
        self, batch: Batch, waiter: Waiter, *, keep: bool, may_pass: bool = True, source: int = FROM_ENGINE
    ) -> Reservation | None:
        """Reserve host slots: own ones if the blocks are to stay and there is room, else bounce slots, or None.

        Only what has the priority of loads may take the last half of the bounce slots. And whatever is read from
        one storage tier, or comes from the engine, leaves a window of them to each other storage tier that has less:
        so no load waits for slots that are held up by a tier which it does not need.

        Args:
            batch: The blocks.
            waiter: Who wants them.
            keep: Whether they are to stay.
            may_pass: Whether blocks that are to stay may have bounce slots where there is no room.
            source: The number of the storage tier that they come from; of several, the lowest one's.
        """
        if keep and (reservation := self.reserve(self.host, batch)) is not None:
            return reservation
        if keep and not may_pass:
            return None
        if not self.can_pass(len(batch.names), waiter, source):
            return None
        return self.reserve(self.host, batch, bounce=True, source=source)

    def can_pass(self, num_blocks: int, waiter: Waiter, source: int = FROM_ENGINE) -> bool:
        """Say whether so many blocks may have bounce slots now; see `reserve_host_now`."""
        index = self.host.index
        kept = 0 if waiter.priority is Priority.LOAD else index.num_bounce // 2
        return index.bounce_free.num - max(kept, self._set_aside(source)) >= min(num_blocks, self.most_window)

    async def reserve_host(self, batch: Batch, waiter: Waiter, *, keep: bool, source: int = FROM_ENGINE) -> Reservation:
        """Wait for host slots, see `reserve_host_now`, in a line of its own for each source.

        Whoever calls this holds none that it could not give back without these.
        """

        def attempt() -> Reservation | None:
            return self.reserve_host_now(batch, waiter, keep=keep, source=source)

        return await self.room.acquire(attempt, waiter, lambda got: got.close(), len(batch), lane=source)

    def _set_aside(self, source: int) -> int:
        """Count the bounce slots that are left to the storage tiers other than ``source``."""
        left = 0
        for number in range(len(self.memory), len(self.tiers)):
            if number != source:
                left += max(0, self._least_share - self.host.index.num_bounce_taken(number))
        return left

    def release(self, *leases: Lease, is_use: bool = False) -> None:
        """Give leases back, see `Lease.release`, and let whoever waits for slots have them."""
        for lease in leases:
            lease.release(is_use=is_use)
        self.room.changed()

    # Copies.

    def copy(self, lane: Lane, work: Callable[[], None]) -> LaneCopy:
        """Submit a copy, after what was submitted to the lane before."""
        return submit_copy(lane, work, self.loop_calls)


class Head:
    """The blocks that a transfer has in memory already, held as long as more of its blocks are to come there.

    Else a policy might evict them for those: a prefix on its way would lose its head to its own tail, or the tail that
    was there to its own head, or either to blocks that others bring meanwhile.
    """

    def __init__(self, chain: Chain) -> None:
        """Hold nothing yet."""
        self._chain = chain
        self._leases: list[Lease] | None = []
        self._rest: dict[MemoryTier, Lease] = {}

    def hold(self, tier: MemoryTier, names: Names) -> None:
        """Hold these blocks where they have the tier's own slots, unless no more is to come."""
        if self._leases is not None:
            self._leases.append(_lease_own(tier, names))

    def hold_rest(self, tier: MemoryTier, names: Names) -> None:
        """Hold all blocks still wanted, once for each tier, as the transfer begins or before the first comes there.

        Holds as many as the tier has room for. Blocks behind these may be evicted, as the head is of more use.
        """
        if self._leases is not None and tier not in self._rest:
            self._rest[tier] = _lease_own(tier, names[: tier.index.num_fitting(names)])

    def let_go(self) -> None:
        """Hold nothing any more, nor what comes later."""
        leases, self._leases = self._leases or [], None
        # The head is the most useful: release it last. Blocks of `_rest` that have come by now are in `leases` too.
        self._chain.release(*self._rest.values(), *reversed(leases))


def _lease_own(tier: MemoryTier, names: Names) -> Lease:
    slots, _ = tier.index.find(names)  # bounce slots are what others wait for
    return tier.index.lease(names_at(names, (slots >= 0) & ~tier.index.is_bounce(slots)))
