"""The chain of tiers of one KV group, and the three things every transfer does with it: find, fill and copy.

Blocks reach the engine's memory only from rows that copies reach (the GPU pool, the host slab). What lies in storage is
first *filled* into host slots: own ones of the CPU tier where it is to stay, else transient ones, which live as long as
somebody leases them. One fill per block at a time: whoever else wants the block joins the fill.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.books import SlotState
from tiered_kv.catalog.index import TierIndex
from tiered_kv.catalog.leases import Lease, Reservation
from tiered_kv.catalog.locate import locate
from tiered_kv.catalog.uses import Admission
from tiered_kv.errors import CapacityError
from tiered_kv.events import Emit
from tiered_kv.layout import KVGroup
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.memory.codec import Codec
from tiered_kv.memory.lanes import Lane, LaneCopy, Lanes
from tiered_kv.results import TierFault, TierRun
from tiered_kv.tiers.base import BookedTier, Mask, Tier
from tiered_kv.tiers.batch import Batch, Naming
from tiered_kv.tiers.budget import Bandwidth, Budget, Kind, Priority, Room, Ticket
from tiered_kv.tiers.dirty import Waiting
from tiered_kv.tiers.ledger import Ledger
from tiered_kv.tiers.memory import HostTier, MemoryTier
from tiered_kv.tiers.owned import OwnedTier
from tiered_kv.tiers.shared import SharedTier
from tiered_kv.tiers.storage import StorageTier
from tiered_kv.tiers.tasks import Tasks

_PENDING: Final = int(SlotState.PENDING)
_NOTHING: Final = None, -1
_ASKED_AT_ONCE: Final = 1024
_LEAST_USES: Final = 1 << 12
_MOST_USES: Final = 1 << 20
"""Remembered for admission: 16 to 32 bytes each."""
RESIDENT_WINDOWS: Final = 4
"""Windows moved as one where no storage tier takes part."""


class Fill:
    """Host slots on their way to be readable, from storage tiers or from the engine.

    Attributes:
        done: Resolves when nothing more will arrive in time; its result is True unless the wait was given up.
        arrived: By position of the batch, what can be read by now.
        source: By position, which tier it comes from (a number that the chain gives tiers).
        ticket: Its place in the lines of the tiers; a joiner may hurry it.
    """

    def __init__(self, n: int, ticket: Ticket) -> None:
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.arrived: Mask = np.zeros(n, np.bool_)
        self.source: NDArray[np.int8] = np.full(n, -1, np.int8)
        self.ticket = ticket
        self.late_tiers: set[str] = set()
        self._leases: list[Lease] = []
        self._num_waiting = 1

    def join(self) -> None:
        """Wait for this fill too: what arrives is held until everyone who waits has let go."""
        self._num_waiting += 1

    def let_go(self) -> None:
        """Wait no longer: what was wanted is leased, or not wanted any more."""
        self._num_waiting -= 1
        if not self._num_waiting:
            for lease in self._leases:
                lease.release()
            self._leases.clear()

    def keep(self, lease: Lease) -> None:
        """Hold what arrived, so that transient blocks live until those who wait have leased them."""
        if self._num_waiting:
            self._leases.append(lease)
        else:
            lease.release()

    def finish(self) -> None:
        """Wake everyone who waits for this fill."""
        if not self.done.done():
            self.done.set_result(not self.late_tiers)


@dataclass
class Limits:
    """What bounds the transfers of one cache; shared by its chains."""

    window_bytes: int
    reads_in_flight: int
    promote: bool
    store_timeout_s: float
    store_queue: "Backlog"
    prefetches: Budget
    low_water: float
    clean_after_s: float
    clean_bandwidth: Bandwidth
    takes_stores: bool = True


@dataclass
class Backlog:
    """Bytes of stores that are accepted and not yet written to every tier."""

    limit: int
    num_bytes: int = 0

    def accept(self, num_bytes: int) -> bool:
        """Count more bytes, unless that would be too many. A backlog that is empty accepts anything."""
        if self.num_bytes and self.num_bytes + num_bytes > self.limit:
            return False
        self.num_bytes += num_bytes
        return True

    def done(self, num_bytes: int) -> None:
        """Count bytes off."""
        self.num_bytes -= num_bytes


@dataclass
class Chain:
    """All tiers of one KV group on one rank, fastest first: perhaps a GPU pool, always a host tier, then storage.

    Attributes:
        naming: What its blocks are called.
        owned, shared: The storage tiers by kind, each fastest first; ``storage`` has them all in order.
        codec: How they are kept in every tier, if not as the engine has them.
        h2d: Streams from the host to the engine's device.
        d2h: Streams back.
        pending: The fill that each pending host slot belongs to, and the number of the tier it is read from, or -1.
        settling: One future per store that is not in every tier yet.
        through: The storage tiers that get blocks when they are stored.
        back: Those that get them later, from the cleaner.
        waiting: The blocks that wait, by the memory tier in which they do.
        on_admitted: Called with this chain and blocks that have now been used often enough for a tier that may lack
            them.
        ledger: Of the whole cache.
    """

    group: KVGroup
    naming: Naming
    gpu: MemoryTier | None
    host: HostTier
    owned: Sequence[OwnedTier]
    shared: Sequence[SharedTier]
    storage: Sequence[StorageTier]
    h2d: Lanes
    d2h: Lanes
    loop_calls: LoopCalls
    tasks: Tasks
    emit: Emit
    limits: Limits
    codec: Codec | None
    ledger: Ledger
    on_admitted: Callable[["Chain", StorageTier, Batch], None]
    pending: dict[int, tuple[Fill, int]] = field(default_factory=dict)
    settling: set["asyncio.Future[Any]"] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.room = Room()
        self.memory: list[MemoryTier] = [self.gpu, self.host] if self.gpu else [self.host]
        self.tiers: list[Tier] = [*self.memory, *self.storage]
        self.booked: list[BookedTier] = [*self.memory, *self.owned]
        self.names = [tier.name for tier in self.tiers]
        self.through = [tier for tier in self.storage if not tier.is_written_back]
        self.back = [tier for tier in self.storage if tier.is_written_back]
        least_uses = [1] * len(self.memory) + [tier.settings.admit_after for tier in self.storage]
        window = min(max(_LEAST_USES, 4 * self.host.index.max_slots), _MOST_USES)
        self._admission = Admission(least_uses, window)
        clock = asyncio.get_running_loop().time
        self.waiting = {tier: Waiting(tier, clock) for tier in self.memory if tier.index.max_slots and self.later(tier)}
        transient = self.host.index.num_transient
        self.window_blocks = max(1, min(self.limits.window_bytes // self.stride_bytes, transient // 4))

    @property
    def stride_bytes(self) -> int:
        """Bytes of a host slot."""
        return self.host.slab.stride_bytes

    # Finding.

    def indexes(self) -> list[TierIndex]:
        """The books of the owned tiers that are in use, fastest first."""
        return [tier.index for tier in self.in_use()]

    def in_use(self) -> list[BookedTier]:
        """The tiers of which this cache has books, as far as they can be read now, fastest first."""
        return [tier for tier in self.booked if tier.is_in_use]

    def locate(self, batch: Batch) -> list[TierRun]:
        """Find the longest prefix that owned tiers can read."""
        tiers = self.in_use()
        located = locate([tier.index for tier in tiers], batch.names)
        return [TierRun(tiers[run.tier].name, run.start, run.stop) for run in located.runs]

    def may_be_longer(self, batch: Batch, runs: Sequence[TierRun]) -> bool:
        """Say whether there are tiers to ask for what comes after the prefix that `locate` found."""
        return bool(self.shared) and (runs[-1].stop if runs else 0) < len(batch)

    async def locate_on(self, batch: Batch, runs: Sequence[TierRun]) -> list[TierRun]:
        """Go on where `locate` ended: ask shared tiers, for what owned ones do not have."""
        runs, start = list(runs), runs[-1].stop if runs else 0
        while start < len(batch) and self.shared:
            part = batch[start : start + _ASKED_AT_ONCE]
            numbers = np.full(len(part), -1, np.int8)
            for number, memory in enumerate(self.memory):
                numbers[(numbers < 0) & memory.index.ready(part.names)] = number
            left = np.flatnonzero(numbers < 0)
            numbers[left] = await self.sources(part[left])
            num_blocks = _prefix(numbers >= 0)
            runs += [TierRun(self.names[numbers[i]], start + i, start + i + 1) for i in range(num_blocks)]
            start += num_blocks
            if num_blocks < len(part):
                break
        return _merged(runs)

    async def sources(self, batch: Batch, *, until: float | None = None) -> NDArray[np.int8]:
        """Say which storage tier, by its number in the chain, to read each block from; -1 for nowhere.

        Args:
            batch: The blocks.
            until: How long to wait for shared tiers, on the loop's clock; the tier's time limit if left out.
        """
        numbers = np.full(len(batch), -1, np.int8)
        for position, tier in enumerate(self.storage, start=len(self.memory)):
            left = np.flatnonzero(numbers < 0)
            if not len(left):
                break
            found = await tier.find(batch[left], until=until)
            numbers[left[found]] = position
        return numbers

    def touch(self, batch: Batch, *, leased: MemoryTier | None = None) -> None:
        """Count a use of the blocks in every tier that has them, so that hot heads do not rot below.

        In ``leased`` the lease that ends counts it.
        """
        for memory in self.memory:
            if memory is not leased:
                memory.index.touch(batch.names)
        for storage in self.storage:
            storage.touch(batch)
        self.count_use(batch)

    def count_use(self, batch: Batch) -> None:
        """Count one use of the blocks, for the tiers that want some before they take a block."""
        for number, admitted in self._admission.use(batch.names):
            if admitted.any():
                self.on_admitted(self, self.storage[number - len(self.memory)], batch[admitted])

    def later(self, tier: MemoryTier) -> list[Tier]:
        """Name the tiers below for which blocks wait in ``tier``: the CPU tier and all below it, or storage tiers."""
        if tier is self.gpu and self.host.index.max_slots:
            return [self.host, *self.storage] if self.host.write_back else []
        return list(self.back)

    def admitted(self, tiers: Sequence[Tier], batch: Batch) -> Mask:
        """Say which blocks at least one of the tiers is to have."""
        admitted = np.zeros(len(batch), np.bool_)
        for tier in tiers:
            admitted |= self._admission.admits(self.tiers.index(tier), batch.names)
        return admitted

    # Slots of the host.

    def reserve(self, tier: MemoryTier, batch: Batch, *, transient: bool = False) -> Reservation | None:
        """Reserve slots for what is missing of a batch now, or return None."""
        try:
            reservation = tier.index.reserve(batch.names, transient=transient)
        except CapacityError:
            return None
        tier.counters.evicted += len(reservation.evicted)
        return reservation

    def reserve_host_now(self, batch: Batch, ticket: Ticket, *, keep: bool) -> Reservation | None:
        """Reserve host slots: own ones if the blocks are to stay and there is room, else transient ones, or None.

        Only what has the priority of loads may take the last half of the transient slots.
        """
        if keep and (reservation := self.reserve(self.host, batch)) is not None:
            return reservation
        if keep and ticket.kind is Kind.PREFETCH:
            return None  # nobody waits for these blocks: passing through would be for nothing
        free = self.host.index.statistics().transient_free
        usable = free if ticket.priority is Priority.LOAD else free - self.host.index.num_transient // 2
        if usable < min(len(batch), self.window_blocks):
            return None
        return self.reserve(self.host, batch, transient=True)

    async def reserve_host(self, batch: Batch, ticket: Ticket, *, keep: bool) -> Reservation:
        """Wait for host slots. Whoever calls this holds none that it could not give back without these."""
        return await self.room.acquire(
            lambda: self.reserve_host_now(batch, ticket, keep=keep), ticket, lambda got: got.close(), len(batch)
        )

    def release(self, *leases: Lease) -> None:
        """Give leases back, and let whoever waits for slots have them."""
        for lease in leases:
            lease.release()
        self.room.changed()

    def fills_of(self, batch: Batch, kind: Kind, priority: Priority) -> list[Fill]:
        """The fills under way that pending blocks of the batch belong to; joining one hurries it."""
        slots, states = self.host.index.find(batch.names)
        fills = {
            id(fill): fill for slot in slots[states == _PENDING] if (fill := self.pending.get(int(slot), _NOTHING)[0])
        }
        for fill in fills.values():
            fill.ticket.hurry(kind, priority)
        return list(fills.values())

    def coming_from(self, batch: Batch) -> NDArray[np.int8]:
        """By position, the number of the storage tier that a pending block is being read from; -1 for none."""
        slots, _ = self.host.index.find(batch.names)
        return np.array([self.pending.get(slot, _NOTHING)[1] for slot in slots.tolist()], np.int8)

    def announce(self, fill: Fill, reservation: Reservation) -> None:
        """Let others find and join a fill of host slots."""
        for slot, source in zip(reservation.slots.tolist(), fill.source.tolist(), strict=True):
            if slot >= 0:
                self.pending[slot] = fill, source

    def conclude(self, fill: Fill, reservation: Reservation) -> None:
        """End a fill: give back what did not arrive, wake who joined."""
        for slot in reservation.slots[reservation.slots >= 0]:
            self.pending.pop(int(slot), None)
        reservation.close()
        fill.finish()
        self.room.changed()

    def start_fill(self, batch: Batch, sources: NDArray[np.int8], reservation: Reservation, ticket: Ticket) -> Fill:
        """Start to read blocks into reserved host slots, each from its tier. The fill is the cache's, whoever waits."""
        fill = Fill(len(batch), ticket)
        fill.source[:] = sources
        self.announce(fill, reservation)
        self.tasks.spawn(self._fill(fill, batch, sources, reservation), f"fill {len(batch)} blocks")
        return fill

    async def _fill(self, fill: Fill, batch: Batch, sources: NDArray[np.int8], reservation: Reservation) -> None:
        open_tiers = {int(number) for number in np.unique(sources[sources >= 0])}

        async def read_from(number: int) -> None:
            tier = self.storage[number - len(self.memory)]
            at = np.flatnonzero((sources == number) & (reservation.slots >= 0))

            def on_late() -> None:
                fill.late_tiers.add(tier.name)
                # From now on others may read these blocks from another tier: the slots are doomed, not the names.
                slots, _ = self.host.index.find(batch.names[at])
                self.host.index.remove(batch.names[at[slots == reservation.slots[at]]])
                open_tiers.discard(number)
                if not open_tiers:
                    fill.finish()

            with self.host.slab.blocks(reservation.slots[at]) as blocks:
                right = await tier.read(batch[at], blocks, fill.ticket, on_late)
            arrived = np.zeros(len(batch), np.bool_)
            arrived[at] = right
            lease = reservation.commit(arrived)
            fill.arrived |= lease.slots >= 0
            kept = int(np.count_nonzero((lease.slots >= 0) & ~self.host.index.is_transient(lease.slots)))
            self.host.counters.promoted += kept
            if kept and tier.is_exclusive:
                self._take_over(tier, batch, lease)
            fill.keep(lease)
            open_tiers.discard(number)
            if not open_tiers:
                fill.finish()

        try:
            # All of them end before the slots are given back, whatever one of them raises.
            ended = await asyncio.gather(*(read_from(number) for number in sorted(open_tiers)), return_exceptions=True)
            for error in ended:
                if error is not None:
                    raise error
        finally:
            self.conclude(fill, reservation)

    def _take_over(self, tier: StorageTier, batch: Batch, lease: Lease) -> None:
        """Have blocks that were read from an exclusive tier on the host only, where they wait to go back."""
        kept = (lease.slots >= 0) & ~self.host.index.is_transient(lease.slots)
        self.waiting[self.host].add(batch[kept], lease.slots[kept], lease)
        self.tasks.spawn(tier.forget(batch[kept]), f"forget what left {tier.name}")

    # Copies.

    def copy(self, lane: Lane, work: Callable[[], None]) -> LaneCopy:
        """Submit a copy, behind what was submitted to the lane before."""
        copy = LaneCopy(work)
        try:
            copy.event = lane.submit(copy, lambda error: self.loop_calls.call(copy.resolve, error))
        except Exception as error:  # noqa: BLE001 - one that cannot be submitted has failed as any other that fails
            copy.resolve(error)
        return copy

    def faults_of(self, fill: Fill) -> list[TierFault]:
        """Name what kept blocks of a fill from arriving."""
        faults = []
        lost = fill.source[(fill.source >= 0) & ~fill.arrived]
        for number in np.unique(lost) if fill.done.done() else ():
            name = self.names[number]
            reason = "timeout" if name in fill.late_tiers else "unreadable"
            faults.append(TierFault(name, reason, int(np.count_nonzero(lost == number))))
        return faults


def _prefix(mask: Mask) -> int:
    holes = np.flatnonzero(~mask)
    return int(holes[0]) if len(holes) else len(mask)


def _merged(runs: list[TierRun]) -> list[TierRun]:
    merged: list[TierRun] = []
    for run in runs:
        if merged and merged[-1].tier == run.tier:
            run = TierRun(run.tier, merged.pop().start, run.stop)  # noqa: PLW2901 - the run that replaces both
        merged.append(run)
    return merged
