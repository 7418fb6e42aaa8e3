"""Fills: host slots on their way to be readable. One per block at a time; whoever else wants the block joins it."""

import asyncio
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.books import SlotState
from tiered_kv.catalog.leases import Lease, Reservation
from tiered_kv.results import TierFault
from tiered_kv.tiers.base import Mask
from tiered_kv.tiers.batch import Batch
from tiered_kv.tiers.budget import Kind, Priority, Room, Waiter
from tiered_kv.tiers.dirty import Waiting
from tiered_kv.tiers.memory import HostTier
from tiered_kv.tiers.storage import StorageTier
from tiered_kv.tiers.tasks import Tasks

_PENDING: Final = int(SlotState.PENDING)


class Fill:
    """Host slots on their way to be readable, from storage tiers or from the engine.

    Attributes:
        done: Resolves when nothing more will arrive in time; its result is True unless the wait was given up.
        arrived: By position of the batch, what can be read by now.
        source: By position, which tier it comes from (a number that the chain gives tiers).
        waiter: Its place in the lines of the tiers; a joiner may hurry it.
        ends_unwanted: Whether it begins no read any more once nobody waits for it: the cache is closing.
    """

    def __init__(self, n: int, waiter: Waiter) -> None:
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.arrived: Mask = np.zeros(n, np.bool_)
        self.source: NDArray[np.int8] = np.full(n, -1, np.int8)
        self.waiter = waiter
        self.late_tiers: set[str] = set()
        self.ends_unwanted = False
        self._leases: list[Lease] = []
        self._num_waiting = 1

    def join(self) -> None:
        """Wait for this fill too: what arrives is held until everyone who waits has let go."""
        self._num_waiting += 1

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for it."""
        return self._num_waiting > 0

    def let_go(self) -> None:
        """Wait no longer: what was wanted is leased, or not wanted any more."""
        self._num_waiting -= 1
        if not self._num_waiting:
            for lease in self._leases:
                lease.release()
            self._leases.clear()
            self.waiter.nobody_waits()  # loads that are given up must not hold up those that come after them
            if self.ends_unwanted:
                self.waiter.give_up()

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


class Fills:
    """The fills of one chain. For the event loop's thread."""

    def __init__(
        self,
        host: HostTier,
        tiers: Sequence[StorageTier | None],
        waiting: Waiting | None,
        room: Room,
        tasks: Tasks,
    ) -> None:
        """Make one without fills.

        Args:
            host: Whose slots are filled.
            tiers: By the number that the chain gives them, those to read from; None for those in memory.
            waiting: Where blocks wait that have left an exclusive tier.
            room: Who waits for host slots.
            tasks: Of the cache.
        """
        self._host = host
        self._tiers = tiers
        self._waiting = waiting
        self._room = room
        self._tasks = tasks
        self._pending: dict[int, Fill] = {}  # by slot
        # By slot, the tier that it is read from, or -1. The last one answers for slot -1.
        self._sources = np.full(host.index.max_slots + host.index.num_transient + 1, -1, np.int8)
        self._is_closing = False

    def __len__(self) -> int:
        """Count the slots that are being filled."""
        return len(self._pending)

    def of(self, batch: Batch, kind: Kind, priority: Priority) -> list[Fill]:
        """The fills under way that pending blocks of the batch belong to; joining one hurries it."""
        slots, states = self._host.index.find(batch.names)
        pending = slots[states == _PENDING].tolist()
        fills = {id(fill): fill for slot in pending if (fill := self._pending.get(slot)) is not None}
        for fill in fills.values():
            fill.waiter.hurry(kind, priority)
        return list(fills.values())

    def coming_from(self, batch: Batch) -> NDArray[np.int8]:
        """By position, the number of the storage tier that a pending block is being read from; -1 for none."""
        slots, _ = self._host.index.find(batch.names)
        return self._sources.take(slots)

    def announce(self, fill: Fill, reservation: Reservation) -> None:
        """Let others find and join a fill of host slots."""
        is_filled = reservation.slots >= 0
        slots = reservation.slots[is_filled]
        self._pending.update(dict.fromkeys(slots.tolist(), fill))
        self._sources[slots] = fill.source[is_filled]

    def close(self) -> None:
        """From now on begin no read that nobody waits for: its turn may come late where a tier has a rate."""
        self._is_closing = True
        for fill in {id(fill): fill for fill in self._pending.values()}.values():
            fill.ends_unwanted = True
            if not fill.is_wanted:
                fill.waiter.give_up()

    def conclude(self, fill: Fill, reservation: Reservation) -> None:
        """End a fill: give back what did not arrive, wake who joined."""
        slots = reservation.slots[reservation.slots >= 0]
        for slot in slots.tolist():
            self._pending.pop(slot, None)
        self._sources[slots] = -1
        reservation.close()
        fill.finish()
        self._room.changed()

    def start(self, batch: Batch, sources: NDArray[np.int8], reservation: Reservation, waiter: Waiter) -> Fill:
        """Start to read blocks into reserved host slots, each from its tier. The fill is the cache's, whoever waits."""
        fill = Fill(len(batch), waiter)
        fill.source[:] = sources
        fill.ends_unwanted = self._is_closing
        self.announce(fill, reservation)
        self._tasks.spawn(self._fill(fill, batch, sources, reservation), f"fill {len(batch)} blocks")
        return fill

    async def _fill(self, fill: Fill, batch: Batch, sources: NDArray[np.int8], reservation: Reservation) -> None:
        open_tiers = {int(number) for number in np.unique(sources[sources >= 0])}

        async def read_from(number: int) -> None:
            tier = self._tiers[number]
            assert tier is not None  # noqa: S101 - blocks are read from storage
            at = np.flatnonzero((sources == number) & (reservation.slots >= 0))

            def on_late() -> None:
                fill.late_tiers.add(tier.name)
                # From now on others may read these blocks from another tier: the slots are doomed, not the names.
                slots, _ = self._host.index.find(batch.names[at])
                self._host.index.remove(batch.names[at[slots == reservation.slots[at]]])
                open_tiers.discard(number)
                if not open_tiers:
                    fill.finish()

            with self._host.slab.blocks(reservation.slots[at]) as blocks:
                right = await tier.read(batch[at], blocks, fill.waiter, on_late)
            arrived = np.zeros(len(batch), np.bool_)
            arrived[at] = right
            lease = reservation.commit(arrived)
            fill.arrived |= lease.slots >= 0
            kept = int(np.count_nonzero((lease.slots >= 0) & ~self._host.index.is_transient(lease.slots)))
            self._host.counters.promoted += kept
            if kept and tier.is_exclusive:
                self._take_over(tier, batch, lease)
            fill.keep(lease)
            self._room.changed()  # nobody may want these any more, and the other tiers may take long
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
        kept = (lease.slots >= 0) & ~self._host.index.is_transient(lease.slots)
        assert self._waiting is not None  # noqa: S101 - such a tier is written back, from the host
        self._waiting.add(batch[kept], lease.slots[kept], lease)
        self._tasks.spawn(tier.forget(batch[kept]), f"forget what left {tier.name}")

    def faults_of(self, fill: Fill) -> list[TierFault]:
        """Name what kept blocks of a fill from arriving."""
        faults = []
        lost = fill.source[(fill.source >= 0) & ~fill.arrived]
        for number in np.unique(lost) if fill.done.done() else ():
            tier = self._tiers[number]
            assert tier is not None  # noqa: S101 - blocks are read from storage
            name = tier.name
            reason = "timeout" if name in fill.late_tiers else "unreadable"
            faults.append(TierFault(name, reason, int(np.count_nonzero(lost == number))))
        return faults
