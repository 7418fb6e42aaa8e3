"""What of a chain is not written to the tiers below yet: the one answer, for flush, drain, resize and close.

Blocks wait in a line of the memory tier that they are in; what writes them, or brings more, is under way. Both are
counted by when they came, so that whoever wants all of it written waits for what was there, and for nothing later.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.books import Change
from tiered_kv.catalog.leases import Lease
from tiered_kv.catalog.table import Slots, hash_names
from tiered_kv.tiers.tier import Batch, MemoryTier, Prompt
from tiered_kv.values.integers import Mask
from tiered_kv.values.keys import Names

_LEAST_UNWANTED: Final = 1 << 16
"""Blocks of a tier that are remembered as evicted there, the last ones, where stores go on without end: so many, and
twice as many as there can be in memory."""


class Unwritten:
    """What one chain has not written yet: stores under way, and blocks that wait. For the event loop's thread.

    Everything *came* at some time, and time goes on at each `mark`. What comes out of something else, as waiting blocks
    come out of a store, came when that did. A block that a tier failed to take came anew at that time.

    Attributes:
        now: When what comes now comes.
        num_late: Stores that a flush waits for no more, and that have not ended: what they keep comes only then.
        held: Stores of workers that have not answered: they count as under way only then. Each with what is called when
            the host gives up its slots from one on.
        num_failed: How often a block that had waited was to be written, and was not: it waits again, or is lost.
        has_lost: Whether, since the cache was opened, a tier below was to get some block and will not: it was dropped
            or failed on its way, or its slot was given up while it waited. What was evicted by name, cleared or
            expired meanwhile does not count: nobody wants it below.
        waiting: The lines, by the memory tier in which blocks wait.
    """

    def __init__(self, tiers: Sequence[MemoryTier], clock: Callable[[], float]) -> None:
        """Begin with nothing, and a line for each of ``tiers``."""
        self.now = 0
        self.num_late = 0
        self.held: dict[object, Callable[[int], None]] = {}
        self.num_failed = 0
        self.has_lost = False
        self._under_way: dict[int, int] = {}  # by when it came, how much is under way; not a Counter, which is slow
        self._most_unwanted = _LEAST_UNWANTED + 2 * sum(tier.index.max_slots for tier in tiers)
        self._has_ended: asyncio.Event | None = None  # of those who wait, if anyone does
        self._unwanted: dict[str, dict[int, int]] = {}  # by tier and hash, the mark of when a block was evicted there
        self.waiting = {tier: Waiting(tier, clock, self) for tier in tiers}

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
        """Count a store or write no longer. What it leaves to be written waits already."""
        left = self._under_way[came] = self._under_way[came] - 1
        if not left:
            del self._under_way[came]
        self._tell()

    def is_late(self, came: int) -> None:
        """Count a store no longer as under way, but as late, until `late_ended`."""
        self.num_late += 1
        self.end(came)

    def late_ended(self) -> None:
        """Count a late store no longer: it has ended, or what it has copied is under way from now on."""
        self.num_late -= 1
        self._tell()

    def evict(self, tier: str, names: Names) -> None:
        """Have no copy of these blocks come to a tier that is, or is made of, what came until now."""
        marks, mark = self._unwanted.setdefault(tier, {}), self.mark()
        for each in hash_names(names).tolist():
            marks.pop(each, None)  # the last one stands behind all others
            marks[each] = mark
        for each in list(islice(marks, max(0, len(marks) - self._most_unwanted))):
            del marks[each]

    def want(self, tier: str, names: Names, came: int | None) -> None:
        """Have what waits of these blocks come to a tier after all, for a use that came then: now if not said."""
        marks = self._unwanted.get(tier, {})
        for each in hash_names(names).tolist() if marks else ():
            if marks.get(each, self.now + 1) <= (self.now if came is None else came):
                del marks[each]

    def is_wanted(self, tier: str, names: Names, came: int) -> Mask:
        """Say which of some blocks, that came then, were not evicted from a tier since."""
        marks = self._unwanted.get(tier)
        if not marks:
            return np.ones(len(names), np.bool_)
        return np.array([marks.get(each, 0) <= came for each in hash_names(names).tolist()], np.bool_)

    def comes_anew(self, names: Names, came: int) -> None:
        """Take note that what came before comes now: where it was evicted since, it is evicted yet."""
        for tier in self._unwanted:
            self.evict(tier, names[~self.is_wanted(tier, names, came)])

    def _tell(self) -> None:
        if self._unwanted and not self.num_late and not self.held and self.is_written(self.now):
            self._unwanted.clear()
        if self._has_ended is not None:
            self._has_ended.set()
            self._has_ended = None

    async def one_ended(self) -> None:
        """Wait until something that is under way, or late, has ended."""
        self._has_ended = self._has_ended or asyncio.Event()
        await self._has_ended.wait()

    def is_under_way(self, mark: int) -> bool:
        """Whether anything is that came before a mark."""
        return any(came < mark for came in self._under_way)

    def is_written(self, mark: int) -> bool:
        """Whether nothing that came before a mark is under way or waits."""
        return not self.is_under_way(mark) and not any(line.num_before(mark) for line in self.waiting.values())


class Waiting:
    """The dirty blocks of one memory tier, the one that waits longest first. Takes 41 bytes a slot of the tier.

    The books of the tier say which blocks are dirty; a block's name alone is not enough to write its record, so its
    namespace and position are kept here, by slot; and its prompt, as long as it waits.

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
        self._prompts = np.full(tier.index.max_slots, None, dtype=object)
        self._positions = np.full(tier.index.max_slots, 0, dtype=np.int64)
        self._since_s = np.full(tier.index.max_slots, 0.0)
        self._came = np.full(tier.index.max_slots, 0, dtype=np.int64)
        self._num_tries = np.full(tier.index.max_slots, 0, dtype=np.uint8)
        self._num_by_came = Counter[int]()
        self.on_add: Callable[[], object] = lambda: None
        """Called when blocks have come, once there is someone who writes them."""
        self.on_wait: Callable[[Names], object] = lambda _: None
        """Called with blocks that wait now."""
        self.on_lost: Callable[[Names], object] = lambda _: None
        """Called with blocks that left the line and were not taken, unless all were cleared: another tier of memory may
        have them yet."""

    def __len__(self) -> int:
        return self._index.num_dirty

    def num_before(self, mark: int) -> int:
        """Count the blocks that came before a mark, see `Unwritten`."""
        return sum(n for came, n in self._num_by_came.items() if came < mark)

    def add(
        self,
        batch: Batch,
        slots: NDArray[np.int64],
        lease: Lease,
        came: int | None = None,
        prompt: Prompt | None = None,
    ) -> None:
        """Let blocks wait: ``batch`` lies in ``slots``, own ones of the tier, which ``lease`` holds.

        They are of ``prompt``, unless the batch says of what prompt each is.
        """
        self._prompts[slots] = prompt if batch.prompts is None else batch.prompts
        self.put_back(batch, slots, lease, self._unwritten.now if came is None else came)
        self._num_tries[slots] = 0
        self.on_add()

    def again(
        self, batch: Batch, slots: NDArray[np.int64], lease: Lease, came: int, *, most_tries: int
    ) -> NDArray[np.bool_]:
        """Let blocks that could not be written wait for another try, behind all others; say which are to have one."""
        self._unwritten.comes_anew(batch.names, came)
        self._num_tries[slots] += 1
        self._unwritten.num_failed += len(slots)
        again: NDArray[np.bool_] = self._num_tries[slots] < most_tries
        self.put_back(batch[again], slots[again], lease, self._unwritten.now)
        return again

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
        is_mixed = spaces.tolist().count(spaces[0]) < n  # which asks those that are not the same object, and no others
        prompts, self._prompts[lease.slots] = self._prompts[lease.slots], None
        batch = Batch(spaces[0], names, self._positions[lease.slots], spaces if is_mixed else None, prompts)
        return batch, lease, came

    def ended(self, n: int, came: int) -> None:
        """Take note that ``n`` blocks of one `take` are written, given up, or wait again."""
        self.num_taken -= n
        self._unwritten.end(came)

    def oldest_s(self) -> float:
        """Return for how long the first in the line waits; 0 if there is none."""
        slots = self._index.oldest_dirty(1)
        return self._clock() - float(self._since_s[slots[0]]) if len(slots) else 0.0

    def put_back(self, batch: Batch, slots: NDArray[np.int64], lease: Lease, came: int) -> None:
        """Let blocks wait that came then, as those do again that nobody tried to write."""
        self._namespaces[slots] = batch.namespace if batch.spaces is None else batch.spaces
        self._positions[slots] = batch.positions
        if batch.prompts is not None:
            self._prompts[slots] = batch.prompts
        fresh = self._index.mark_dirty(lease, slots)
        self._since_s[fresh] = self._clock()  # what waits already keeps its place, and its time
        self._came[fresh] = came
        self._num_by_came[came] += len(fresh)
        self.on_wait(batch.names if len(fresh) == len(batch) else batch.names[self._index.is_dirty(batch.names)])

    def _forgotten(self, names: Names, slots: Slots, why: Change) -> None:
        """Take note that blocks left the line and were not taken."""
        self._prompts[slots] = None
        for came, n in Counter(self._came[slots].tolist()).items():
            _take(self._num_by_came, came, n)
        if why is Change.EVICTED:  # by resizing: need evicts no dirty block
            self._unwritten.has_lost = True
        if why is not Change.CLEARED:
            self.on_lost(names)


def _take(counts: Counter[int], came: int, n: int) -> None:
    """Count ``n`` fewer; what is none at all takes no place."""
    counts[came] -= n
    if not counts[came]:
        del counts[came]
