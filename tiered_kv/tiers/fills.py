"""Fills: host slots on their way to be readable. One per block at a time; whoever else wants the block joins it.

What of a chain is not written to the tiers below yet: the one answer, for flush, drain, resize and close.

Blocks wait in a line of the memory tier that they are in; what writes them, or brings more, is under way. Both are
counted by when they came, so that whoever wants all of it written waits for what was there, and for nothing later.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.books import Change, SlotState
from tiered_kv.catalog.leases import Lease, Reservation
from tiered_kv.catalog.table import Slots
from tiered_kv.tiers.gate import Kind, Priority, Room, Waiter
from tiered_kv.tiers.storage import StorageTier
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.tiers.tier import Batch, HostTier, Mask, MemoryTier, ReadReport
from tiered_kv.values.errors import Reason, TierFault


class Unwritten:
    """What of one chain is not written yet. For the event loop's thread.

    Everything *came* at some time: time goes on at each `mark`. What is made of something, as the blocks that a store
    lets wait, came when that did. What a tier was to take and failed to take came anew then.

    Attributes:
        now: When what comes now comes.
        num_failed: How often a block that had waited was to be written, and was not: it waits again, or is lost.
        has_lost: Whether, since the cache was opened, a tier below was to get some block and will not: it was dropped
            or failed on its way, or its slot was given up while it waited. What was evicted by name, cleared or
            expired meanwhile does not count: nobody wants it below.
        waiting: The lines, by the memory tier in which blocks wait.
    """

    def __init__(self, tiers: Sequence[MemoryTier], clock: Callable[[], float]) -> None:
        """Begin with nothing, and a line for each of ``tiers``."""
        self.now = 0
        self.num_failed = 0
        self.has_lost = False
        self._under_way: dict[int, int] = {}  # how much came when; not a Counter, which Python is slow to count with
        self._has_ended: asyncio.Event | None = None  # of those who wait, if anyone does
        self.waiting = {tier: Waiting(tier, clock, self) for tier in tiers}

    @property
    def num_under_way(self) -> int:
        """How many stores and writes have not ended."""
        return sum(self._under_way.values())

    @property
    def num_blocks(self) -> int:
        """How many blocks wait, or were taken from a line and are being written."""
        return sum(len(line) + line.num_taken for line in self.waiting.values())

    def mark(self) -> int:
        """Return a mark: what is there now came before it, and what comes from now on did not."""
        self.now += 1
        return self.now

    def begin(self, came: int | None = None) -> int:
        """Count one more store or write under way, until `end`; return when it came: now if not said."""
        came = self.now if came is None else came
        self._under_way[came] = self._under_way.get(came, 0) + 1
        return came

    def end(self, came: int) -> None:
        """Count it no longer. What it leaves to be written waits already."""
        left = self._under_way[came] = self._under_way[came] - 1
        if not left:
            del self._under_way[came]
        if self._has_ended is not None:
            self._has_ended.set()
            self._has_ended = None

    async def one_ended(self) -> None:
        """Wait until something that is under way has ended."""
        self._has_ended = self._has_ended or asyncio.Event()
        await self._has_ended.wait()

    def is_under_way(self, mark: int) -> bool:
        """Whether anything is that came before a mark."""
        return any(came < mark for came in self._under_way)

    def is_written(self, mark: int) -> bool:
        """Whether nothing that came before a mark is under way or waits."""
        return not self.is_under_way(mark) and not any(line.num_before(mark) for line in self.waiting.values())


class Waiting:
    """The dirty blocks of one memory tier, the one that waits longest first. Takes 29 bytes a slot of the tier.

    The books of the tier say which blocks are dirty; a block's name alone is not enough to write its record, so its
    namespace and position are kept here, by slot.

    Attributes:
        num_taken: Blocks that were taken and are being written.
    """

    def __init__(self, tier: MemoryTier, clock: Callable[[], float], unwritten: Unwritten) -> None:
        """Make an empty line; the tier's index must be made for dirty blocks."""
        self.num_taken = 0
        self._index = tier.index
        self._index.on_undirtied = self._forgotten
        self._clock = clock
        self._unwritten = unwritten
        self._namespaces = np.full(tier.index.max_slots, None, dtype=object)  # no array is walked by the collector
        self._positions = np.full(tier.index.max_slots, 0, dtype=np.int64)
        self._since_s = np.full(tier.index.max_slots, 0.0)
        self._came = np.full(tier.index.max_slots, 0, dtype=np.int32)
        self._num_tries = np.full(tier.index.max_slots, 0, dtype=np.uint8)
        self._num_by_came = Counter[int]()
        self.on_add: Callable[[], object] = lambda: None
        """Called when blocks have come, once there is someone who writes them."""

    def __len__(self) -> int:
        return self._index.num_dirty

    def num_before(self, mark: int) -> int:
        """Count the blocks that came before a mark, see `Unwritten`."""
        return sum(n for came, n in self._num_by_came.items() if came < mark)

    def add(self, batch: Batch, slots: NDArray[np.int64], lease: Lease, came: int | None = None) -> None:
        """Let blocks wait: ``batch`` lies in ``slots``, own ones of the tier, which ``lease`` holds."""
        self._line_up(batch, slots, lease, self._unwritten.now if came is None else came)
        self._num_tries[slots] = 0
        self.on_add()

    def again(self, batch: Batch, slots: NDArray[np.int64], lease: Lease, *, most_tries: int) -> NDArray[np.bool_]:
        """Let blocks that could not be written wait for another try, behind all others; say which are to have one."""
        self._num_tries[slots] += 1
        self._unwritten.num_failed += len(slots)
        again: NDArray[np.bool_] = self._num_tries[slots] < most_tries
        self._line_up(batch[again], slots[again], lease, self._unwritten.now)
        return again

    def put_back(self, batch: Batch, slots: NDArray[np.int64], lease: Lease, came: int) -> None:
        """Let blocks that nobody tried to write wait again."""
        self._line_up(batch, slots, lease, came)

    def take(self, most: int) -> tuple[Batch, Lease, int]:
        """Take up to ``most`` of the blocks that wait longest, whoever's they are, of one time, to write them.

        They are under way until `ended`.

        Returns:
            The blocks, the lease, and when they came.
        """
        slots = self._index.oldest_dirty(most)
        came = int(self._came[slots[0]])
        others = (self._came[slots] != came).nonzero()[0]
        n = int(others[0]) if len(others) else len(slots)
        names, lease = self._index.take_dirty(n)
        _take(self._num_by_came, came, n)
        self.num_taken += n
        self._unwritten.begin(came)
        spaces = self._namespaces[lease.slots]
        is_mixed = bool(np.any(spaces != spaces[0]))
        batch = Batch(spaces[0], names, self._positions[lease.slots], spaces if is_mixed else None)
        return batch, lease, came

    def ended(self, n: int, came: int) -> None:
        """Take note that ``n`` blocks of one `take` are written, given up, or wait again."""
        self.num_taken -= n
        self._unwritten.end(came)

    def oldest_s(self) -> float:
        """Return for how long the first in the line waits; 0 if there is none."""
        slots = self._index.oldest_dirty(1)
        return self._clock() - float(self._since_s[slots[0]]) if len(slots) else 0.0

    def _line_up(self, batch: Batch, slots: NDArray[np.int64], lease: Lease, came: int) -> None:
        self._namespaces[slots] = batch.namespace if batch.spaces is None else batch.spaces
        self._positions[slots] = batch.positions
        self._since_s[slots] = self._clock()
        fresh = self._index.mark_dirty(lease, slots)
        self._came[fresh] = came
        self._num_by_came[came] += len(fresh)

    def _forgotten(self, slots: Slots, why: Change) -> None:
        """Take note that blocks left the line and were not taken."""
        for came, n in Counter(self._came[slots].tolist()).items():
            _take(self._num_by_came, came, n)
        if why is Change.EVICTED:  # by resizing: need evicts no dirty block
            self._unwritten.has_lost = True


def _take(counts: Counter[int], came: int, n: int) -> None:
    """Count ``n`` fewer; what is none at all takes no place."""
    counts[came] -= n
    if not counts[came]:
        del counts[came]


_PENDING: Final = int(SlotState.PENDING)


class Fill:
    """Host slots on their way to be readable, from storage tiers or from the engine.

    Attributes:
        is_done: Whether nothing more will arrive in time.
        arrived: By position of the batch, what came in time and right; its slot may have been given up since.
        gone: By position, what its tier did not have any more when it was read.
        refused: Why, by position, of what is sealed otherwise than its tier's keys say.
        source: By position, which tier it comes from (a number that the chain gives tiers).
        waiter: Its place in the lines of the tiers; a joiner may hurry it.
        ends_unwanted: Whether it begins no read any more once nobody waits for it: the cache is closing.
        num_open: How many tiers are neither done nor late.
        num_reading: How many have not let go of their slots.
    """

    def __init__(self, n: int, waiter: Waiter) -> None:
        self.is_done = False
        self._then: list[Callable[[], object]] = []
        self.arrived: Mask = np.zeros(n, np.bool_)
        self.gone: Mask = np.zeros(n, np.bool_)
        self.refused: dict[int, str] = {}
        self.source: NDArray[np.int8] = np.full(n, -1, np.int8)
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

    def keep(self, lease: Lease) -> None:
        """Hold what arrived, so that transient blocks live until those who wait have leased them."""
        if self._num_waiting:
            self._leases.append(lease)
        else:
            lease.release()

    @property
    def is_in_time(self) -> bool:
        """Whether it is done, and was not given up."""
        return self.is_done and not self.late_tiers

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` when nothing more will arrive in time: now, if that is so."""
        if self.is_done:
            callback()
        else:
            self._then.append(callback)

    def done(self) -> "asyncio.Future[None]":
        """Return what is done then."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def tell() -> None:
            if not done.done():
                done.set_result(None)

        self.when_done(tell)
        return done

    def finish(self) -> None:
        """Tell everyone who waits for this fill, also if one of them raises: an interrupt of the program's, perhaps."""
        self.is_done = True
        told, self._then = self._then, []
        raised: BaseException | None = None
        for each in told:
            try:
                each()
            except BaseException as error:  # noqa: BLE001 - raised once all are told
                raised = raised or error
        if raised is not None:
            raise raised


class Fills:
    """The fills of one chain. For the event loop's thread."""

    def __init__(
        self,
        host: HostTier,
        tiers: Sequence[StorageTier | None],
        room: Room,
        tasks: Tasks,
    ) -> None:
        """Make one without fills.

        Args:
            host: Whose slots are filled.
            tiers: By the number that the chain gives them, those to read from; None for those in memory.
            room: Who waits for host slots.
            tasks: Of the cache.
        """
        self._host = host
        self._tiers = tiers
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
        slots = reservation.slots[reservation.slots >= 0]
        for slot in slots.tolist():
            self._pending.pop(slot, None)
        self._sources[slots] = -1
        reservation.close()
        self._room.changed()
        fill.finish()

    def start(self, batch: Batch, sources: NDArray[np.int8], reservation: Reservation, waiter: Waiter) -> Fill:
        """Start to read blocks into reserved host slots, each from its tier. The fill is the cache's, whoever waits."""
        fill = Fill(len(batch), waiter)
        fill.source[:] = sources
        fill.ends_unwanted = self._is_closing
        self.announce(fill, reservation)
        parts = [self._part(number, fill, batch, reservation) for number in sorted({*sources.tolist()} - {-1})]
        fill.num_reading = fill.num_open = len(parts)
        if later := [part for part in parts if not part.begin()]:
            self._tasks.spawn(_read_each(later), f"fill {len(batch)} blocks")
        return fill

    def _part(self, number: int, fill: Fill, batch: Batch, reservation: Reservation) -> "_TierRead":
        tier = self._tiers[number]
        assert tier is not None  # noqa: S101 - blocks are read from storage
        at = ((fill.source == number) & (reservation.slots >= 0)).nonzero()[0]
        return _TierRead(self, self._host, tier, fill, batch, at, reservation)

    def faults_of(self, fill: Fill) -> list[TierFault]:
        """Name what kept blocks of a fill from arriving; what befell the first one of them comes last."""
        if not fill.is_done or fill.arrived.all():
            return []
        faults: list[tuple[int, TierFault]] = []  # each with the first block that it befell
        is_lost = (fill.source >= 0) & ~fill.arrived
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
                    faults.append((int(np.argmax(blocks)), TierFault(tier.name, reason, num_blocks)))
        return [fault for _, fault in sorted(faults, key=itemgetter(0), reverse=True)]


class _TierRead:
    """What one tier brings of a fill."""

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
        """Lend the slots at some positions of the reservation; `begin` or `read` is called next."""
        self._fills = fills
        self._host = host
        self._tier = tier
        self._fill = fill
        self._batch = batch if len(at) == len(batch) else batch[at]
        self._at = at
        self._reservation = reservation
        self._blocks = host.slab.lend_blocks(reservation.slots[at])

    def begin(self) -> bool:
        """Have the tier read without a task; False if it has to wait for anything."""
        return self._tier.begin_read(self._batch, self._blocks, self._fill.waiter, self._late, self._end)

    async def read(self) -> None:
        """Have the tier read, and wait until it has let go of the slots."""
        report = None
        try:
            report = await self._tier.read(self._batch, list(self._blocks), self._fill.waiter, self._late)
        finally:
            self._end(report)

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

    def _end(self, report: ReadReport | None) -> None:
        """Take note of what came; None: nobody knows."""
        fill, host, is_late = self._fill, self._host, self._tier.name in self._fill.late_tiers
        self._blocks.give_back()
        if report is not None:
            arrived = np.zeros(len(fill.source), np.bool_)
            arrived[self._at], fill.gone[self._at] = report.right, report.gone
            if report.refused:
                fill.refused |= {int(self._at[i]): why for i, why in report.refused.items()}
            if not is_late:
                fill.arrived |= arrived
            lease = self._reservation.commit(arrived)
            if host.can_keep:
                kept = (lease.slots >= 0) & ~host.index.is_transient(lease.slots)
                host.counters.promoted += int(np.count_nonzero(kept))
            fill.keep(lease)
        if not is_late:
            fill.num_open -= 1
        fill.num_reading -= 1
        self._fills.part_ended(fill, self._reservation)


async def _read_each(parts: Sequence[_TierRead]) -> None:
    """Read several parts at once; all of them end, whatever one raises."""
    ended = await asyncio.gather(*(part.read() for part in parts), return_exceptions=True)
    for error in ended:
        if error is not None:
            raise error
