"""Fills: host slots on their way to be readable. One per block at a time; whoever else wants the block joins it."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.books import SlotState
from tiered_kv.catalog.leases import Lease, Reservation
from tiered_kv.catalog.table import Slots, hash_names
from tiered_kv.tiers.gate import Kind, Priority, Room, Waiter
from tiered_kv.tiers.storage import StorageTier
from tiered_kv.tiers.tier import Batch, HostTier, ReadReport
from tiered_kv.values.errors import Reason, TierFault
from tiered_kv.values.integers import Mask
from tiered_kv.values.keys import Names

_PENDING: Final = int(SlotState.PENDING)


class Fill:
    """Host slots on their way to be readable, from storage tiers or from the engine.

    Attributes:
        names: ``(n, 4)``, of its blocks.
        is_done: Whether nothing more will arrive in time.
        arrived: By position of the batch, what came in time and right; its slot may have been given up since.
        slots: By position, where what arrived is held for those who wait; -1 of what did not come, or was removed.
        gone: By position, what its tier did not have any more when it was read.
        refused: Why, by position, of what is sealed otherwise than its tier's keys say.
        errors: By tier, why it could not read what it was to bring, in words.
        source: By position, which tier it comes from (a number that the chain gives tiers), or -1.
        waiter: Its place in the lines of the tiers; a joiner may hurry it.
        ends_unwanted: Whether it begins no read any more once nobody waits for it: the cache is closing.
        num_open: How many tiers are neither done nor late.
        num_reading: How many have not let go of their slots.
    """

    def __init__(self, names: Names, waiter: Waiter, source: NDArray[np.int8] | None = None) -> None:
        """Make one of blocks that come from the engine, unless it is said which tier is their ``source``."""
        n, self.names = len(names), names
        self.is_done = False
        self._then: list[Callable[[Fill], object]] = []
        self.arrived: Mask = np.zeros(n, np.bool_)
        self.slots: Slots = np.empty(n, np.int64)
        self.slots.fill(-1)
        self.gone: Mask = np.zeros(n, np.bool_)
        self.refused: dict[int, str] = {}
        self.errors: dict[str, str] = {}
        self.source = np.full(n, -1, np.int8) if source is None else source
        self.waiter = waiter
        self.late_tiers: set[str] = set()
        self.ends_unwanted = False
        self.num_open = self.num_reading = 0
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

    def are_among(self, names: Names) -> Mask:
        """Say of each of its blocks whether it is one of these."""
        return np.isin(hash_names(self.names), hash_names(names))

    def keep(self, lease: Lease) -> None:
        """Hold what arrived, so that blocks in bounce slots live until those who wait have leased them."""
        if self._num_waiting:
            self._leases.append(lease)
        else:
            lease.release()

    @property
    def is_in_time(self) -> bool:
        """Whether it is done, and was not given up."""
        return self.is_done and not self.late_tiers

    def add_done_callback(self, callback: Callable[["Fill"], object]) -> None:
        """Call ``callback`` when nothing more will arrive in time: now, if that is so."""
        if self.is_done:
            callback(self)
        else:
            self._then.append(callback)

    def remove_done_callback(self, callback: Callable[["Fill"], object]) -> None:
        """Do not call it any more."""
        self._then = [each for each in self._then if each != callback]

    def finish(self) -> None:
        """Tell everyone who waits for this fill, also if one of them raises: an interrupt of the program's, perhaps."""
        self.is_done = True
        told, self._then = self._then, []
        raised: BaseException | None = None
        for each in told:
            try:
                each(self)
            except BaseException as error:  # noqa: BLE001 - raised once all are told
                raised = raised or error
        if raised is not None:
            raise raised


class Fills:
    """The fills of one chain. For the event loop's thread."""

    def __init__(self, host: HostTier, tiers: Sequence[StorageTier | None], room: Room) -> None:
        """Begin without fills.

        Args:
            host: Whose slots are filled.
            tiers: By the number that the chain gives them, those to read from; None for those in memory.
            room: Who waits for host slots.
        """
        self._host = host
        self._tiers = tiers
        self._room = room
        self._pending: dict[int, Fill] = {}  # by slot
        # By slot, the tier that it is read from, or -1. The last one answers for slot -1.
        self._sources = np.full(host.index.max_slots + host.index.num_bounce + 1, -1, np.int8)
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

    def are_coming(self, names: Names) -> Mask:
        """Say which blocks are on their way in a fill that may be joined: what a worker copies out is in none."""
        slots, _ = self._host.index.find(names)
        return np.array([slot in self._pending for slot in slots.tolist()], np.bool_)

    def make_way(self, names: Names) -> None:
        """Have blocks come that are at hand, though a worker has slots to copy them out to: it may hang for days.

        What that brings to these is dropped.
        """
        index = self._host.index
        pending = names[index.find(names)[1] == _PENDING]
        if len(pending):
            index.remove(pending[~self.are_coming(pending)])

    def overtake(self, names: Names, *, workers: bool = False, may_pass: Callable[[], bool] | None = None) -> None:
        """Have blocks be stored though they are being read for nobody: a tier too slow for a load may hang, or fail.

        What that brings to these is dropped, if there are other slots for all of them now; else it is to bring them.

        Args:
            names: Theirs.
            workers: Do so too where a worker has slots to copy them out to.
            may_pass: Where they may go by bounce slots to the tiers below, says whether there are such for all of
                them now. Of what is read into bounce slots nothing would stay: that is left to no read then.
        """
        index = self._host.index
        slots, states = index.find(names)
        if not (is_pending := np.equal(states, _PENDING)).any():
            return
        is_read = self._sources[slots] >= 0
        is_read[is_read] = [not self._pending[slot].is_wanted for slot in slots[is_read].tolist()]
        is_other = is_read | (is_pending & ~self.are_coming(names)) if workers else is_read
        if index.fits(names, int(np.count_nonzero(is_other))):
            index.remove(names[is_other])
        elif may_pass is not None and is_read.any():
            index.remove(names[is_read if may_pass() else is_read & index.is_bounce(slots)])

    def coming_from(self, batch: Batch) -> NDArray[np.int8]:
        """By position, the number of the storage tier that a pending block is being read from; -1 for none."""
        slots, _ = self._host.index.find(batch.names)
        return self._sources[slots]

    def announce(self, fill: Fill, reservation: Reservation) -> None:
        """Let others find and join a fill of host slots."""
        is_filled = reservation.slots >= 0
        slots = reservation.slots[is_filled]
        self._pending.update(dict.fromkeys(slots.tolist(), fill))
        self._sources[slots] = fill.source[is_filled]

    def close(self) -> None:
        """Begin no read from now on that nobody waits for: its turn may come late where a tier has a rate."""
        self._is_closing = True
        for fill in {id(fill): fill for fill in self._pending.values()}.values():
            fill.ends_unwanted = True
            if not fill.is_wanted:
                fill.waiter.give_up()

    def part_ended(self, fill: Fill, reservation: Reservation) -> None:
        """Take note that a tier has let go of its part: the slots of the last one are given back."""
        if not fill.num_reading:
            self.conclude(fill, reservation)
            return
        if not fill.num_open:
            fill.finish()
        self._room.changed()  # nobody may want these any more, and the other tiers may take long

    def conclude(self, fill: Fill, reservation: Reservation) -> None:
        """End a fill: give back what did not arrive, wake who joined."""
        self.forget(fill, reservation.slots)
        reservation.close()
        self._room.changed()
        fill.finish()

    def forget(self, fill: Fill, slots: Slots) -> None:
        """Take note that none of these slots is on its way in a fill any more: others may have them. -1 is none."""
        for slot in slots.tolist():
            if self._pending.get(slot) is fill:
                del self._pending[slot]
                self._sources[slot] = -1

    def start(self, batch: Batch, sources: NDArray[np.int8], reservation: Reservation, waiter: Waiter) -> Fill:
        """Start to read blocks into reserved host slots, each from its tier. The fill is the cache's, whoever waits."""
        fill = Fill(batch.names, waiter, sources)
        fill.ends_unwanted = self._is_closing
        self.announce(fill, reservation)
        parts: list[_TierRead] = []
        for number in sorted({*sources.tolist()} - {-1}):
            tier = self._tiers[number]
            assert tier is not None  # noqa: S101 - blocks are read from storage
            at = ((sources == number) & (reservation.slots >= 0)).nonzero()[0]
            parts.append(_TierRead(self, self._host, tier, fill, batch, at, reservation))
        fill.num_reading = fill.num_open = len(parts)
        for part in parts:
            part.start()
        return fill

    def faults_of(self, fill: Fill, wanted: Names | None = None) -> list[TierFault]:
        """Name what kept blocks of a fill from arriving; what befell the first one of them comes last.

        Args:
            fill: Which one.
            wanted: The blocks that are meant; all of them by default.
        """
        if not fill.is_done or not len((~fill.arrived).nonzero()[0]):
            return []
        faults: list[tuple[int, TierFault]] = []  # each with the first block that it befell
        is_lost = (fill.source >= 0) & ~fill.arrived
        if wanted is not None and is_lost.any():
            is_lost &= fill.are_among(wanted)
        for number in np.unique(fill.source[is_lost]):
            tier = self._tiers[number]
            assert tier is not None  # noqa: S101 - blocks are read from storage
            lost = is_lost & (fill.source == number)
            if tier.name in fill.late_tiers:
                reasons = {Reason.TIMEOUT: lost}
            else:
                is_gone, refused = lost & fill.gone, [i for i in fill.refused if lost[i]]
                is_gone[refused] = False
                if refused:
                    fault = TierFault(tier.name, Reason.REFUSED, len(refused), fill.refused[refused[0]])
                    faults.append((min(refused), fault))
                    lost[refused] = False
                reasons = {Reason.GONE: is_gone, Reason.UNREADABLE: lost & ~is_gone}
            for reason, blocks in reasons.items():
                if num_blocks := int(np.count_nonzero(blocks)):
                    detail = fill.errors.get(tier.name, "") if reason is Reason.UNREADABLE else ""
                    faults.append((int(np.argmax(blocks)), TierFault(tier.name, reason, num_blocks, detail)))
        return [fault for _, fault in sorted(faults, key=itemgetter(0), reverse=True)]


class _TierRead:
    """The part of a fill that one tier brings."""

    def __init__(
        self,
        fills: Fills,
        host: HostTier,
        tier: StorageTier,
        fill: Fill,
        batch: Batch,
        at: NDArray[np.intp],
        reservation: Reservation,
    ) -> None:
        """Lend the slots at some positions of the reservation; `start` is called next."""
        self._fills = fills
        self._host = host
        self._tier = tier
        self._fill = fill
        self._batch = batch if len(at) == len(reservation.slots) else batch[at]
        self._at = at
        self._reservation = reservation
        self._blocks = host.slab.lend_blocks(reservation.slots[at])

    def start(self) -> None:
        """Have the tier read, once it is its turn."""
        self._tier.start_read(self._batch, self._blocks, self._fill.waiter, self._late, self._end)

    def _late(self) -> None:
        fill, names, index = self._fill, self._batch.names, self._host.index
        if self._tier.name in fill.late_tiers:
            return
        fill.late_tiers.add(self._tier.name)
        # From now on others may read these blocks from another tier: the slots are doomed, not the names.
        slots, _ = index.find(names)
        index.remove(names[slots == self._reservation.slots[self._at]])
        fill.num_open -= 1
        if not fill.num_open:
            fill.finish()

    def _end(self, report: ReadReport) -> None:
        """Take note of what came, now that the tier has let go of the slots."""
        fill, host, is_late = self._fill, self._host, self._tier.name in self._fill.late_tiers
        self._blocks.give_back()
        arrived = np.zeros(len(fill.source), np.bool_)
        arrived[self._at], fill.gone[self._at] = report.right, report.gone
        if report.refused:
            fill.refused |= {int(self._at[i]): why for i, why in report.refused.items()}
        if report.error:
            fill.errors[self._tier.name] = report.error
        lease = self._reservation.commit(arrived)
        self._fills.forget(fill, lease.slots)  # though it goes on: what nobody holds may be evicted
        if host.index.num_slots:
            kept = (lease.slots >= 0) & ~host.index.is_bounce(lease.slots)
            host.counters.promoted += len(kept.nonzero()[0])
        fill.keep(lease)
        if not is_late:
            fill.arrived |= arrived
            fill.slots[self._at] = lease.slots[self._at]
            fill.num_open -= 1
        fill.num_reading -= 1
        self._fills.part_ended(fill, self._reservation)
