"""Adaptive replacement: recency and frequency, balanced by what their evictions turn out to have cost.

Source: N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. Departures: batches
instead of single blocks (a batch adapts once, by the sum of its blocks); parked blocks take no part until they are
back; a block removed by hand leaves no ghost.
"""

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.policies.base import Policy
from tiered_kv.catalog.slots import FreeSlots, SlotQueue
from tiered_kv.catalog.table import NameTable, Slots
from tiered_kv.values.keys import Names


class ARCPolicy(Policy):
    """Evicts from the blocks used once or from those used again, whichever lately proved the smaller loss.

    ``target`` is the number of slots meant for blocks used once (the paper's p). It grows when a ghost of such a block
    is asked for, and shrinks when a ghost of a block used again is. Takes about 130 bytes a slot, most of it for the
    ghosts.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.target = 0.0
        self._cold, self._recent, self._frequent = SlotQueue.several(num_slots, 3)
        self._is_cold = np.full(num_slots, fill_value=False)  # whether it was put there when it was unparked
        self._is_frequent = np.full(
            num_slots, fill_value=False
        )  # to which of the others a block, parked or not, belongs
        self._ghosts = _Ghosts(num_slots)

    def __len__(self) -> int:
        return len(self._cold) + len(self._recent) + len(self._frequent)

    @property
    def num_ghosts(self) -> int:
        """Count the evicted blocks that are remembered: never more than there are slots."""
        return self._ghosts.num_recent + self._ghosts.num_frequent

    def add(self, slots: Slots, names: Names) -> None:
        """Adapt to the ghosts among the new blocks: those are no strangers, and start among the frequent."""
        num_recent, num_frequent = self._ghosts.num_recent, self._ghosts.num_frequent
        was_recent, was_frequent = self._ghosts.take(names)
        if hits := np.count_nonzero(was_recent):
            self.target += hits * max(1.0, num_frequent / num_recent)
        if hits := np.count_nonzero(was_frequent):
            self.target -= hits * max(1.0, num_recent / num_frequent)
        self.target = min(max(self.target, 0.0), float(self.num_slots))
        self._is_frequent[slots] = was_recent | was_frequent

    def use(self, slots: Slots) -> None:
        """Count blocks that are used again among the frequent."""
        self._is_frequent[slots] = True

    def park(self, slots: Slots) -> None:
        """Take blocks out of their queues."""
        self._cold.remove(slots[self._is_cold[slots]])
        slots = slots[~self._is_cold[slots]]
        frequent = self._is_frequent[slots]
        self._recent.remove(slots[~frequent])
        self._frequent.remove(slots[frequent])

    def unpark(self, slots: Slots, *, cold: bool = False) -> None:
        """Put blocks at the hot ends of their queues; if ``cold``, at the cold end of what goes first."""
        self._is_cold[slots] = cold
        if cold:
            self._cold.push_cold(slots)
            return
        frequent = self._is_frequent[slots]
        self._recent.push(slots[~frequent])
        self._frequent.push(slots[frequent])

    def victims(self, n: int, keep: Slots) -> Slots:
        """Choose what goes first, what the recent have over their target, then from the frequent, then the recent."""
        cold = self._cold.head(n, skip=keep)
        n -= len(cold)
        surplus = min(n, max(0, len(self._recent) - int(self.target)))
        recent = self._recent.head(surplus, skip=keep)
        frequent = self._frequent.head(n - len(recent), skip=keep)
        if len(recent) + len(frequent) < n:
            recent = self._recent.head(n - len(frequent), skip=keep)
        return np.concatenate((cold, recent, frequent))

    def evict(self, slots: Slots, names: Names) -> None:
        """Take blocks out of their queues and remember their names."""
        self.park(slots)
        frequent = self._is_frequent[slots]
        self._ghosts.add(
            names[~frequent], names[frequent], max_recent=self.num_slots - len(self._recent), limit=self.num_slots
        )

    def order(self) -> Slots:
        """Return the blocks that go first, those used once, then those used again."""
        return np.concatenate([queue.head(len(queue)) for queue in (self._cold, self._recent, self._frequent)])

    def clear(self) -> None:
        """Empty the queues and forget all ghosts."""
        self.target = 0.0
        self._cold.clear()
        self._recent.clear()
        self._frequent.clear()
        self._ghosts.clear()


class _Ghosts:
    """Names of up to ``capacity`` blocks lately evicted, in two queues: were they used once (B1), or again (B2)?"""

    def __init__(self, capacity: int) -> None:
        self._table = NameTable(capacity)
        self._free = FreeSlots(capacity, range(capacity))
        self._recent = SlotQueue(capacity)
        self._frequent = SlotQueue(capacity)
        self._is_frequent = np.full(capacity, fill_value=False)

    @property
    def num_recent(self) -> int:
        return len(self._recent)

    @property
    def num_frequent(self) -> int:
        return len(self._frequent)

    def add(self, recent: Names, frequent: Names, *, max_recent: int, limit: int) -> None:
        """Remember names that are no ghosts yet, the oldest first; the oldest ghosts make room."""
        recent = recent[max(0, len(recent) - max_recent) :]
        self._forget(self._recent, self.num_recent + len(recent) - max_recent)
        max_before = limit - len(recent) - len(frequent)
        self._forget(self._frequent, self.num_recent + self.num_frequent - max_before)
        self._forget(self._recent, self.num_recent + self.num_frequent - max_before)
        for queue, names, is_frequent in ((self._recent, recent, False), (self._frequent, frequent, True)):
            ghosts = self._free.take(len(names))
            self._table.insert(names, ghosts)
            self._is_frequent[ghosts] = is_frequent
            queue.push(ghosts)

    def take(self, names: Names) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Forget those of the names that are ghosts; return which were in B1 and which in B2."""
        ghosts = self._table.find(names)
        found = ghosts >= 0
        was_frequent = found.copy()
        was_frequent[found] = self._is_frequent[ghosts[found]]
        was_recent = found & ~was_frequent
        self._drop(self._recent, ghosts[was_recent])
        self._drop(self._frequent, ghosts[was_frequent])
        return was_recent, was_frequent

    def clear(self) -> None:
        self._table.clear()
        self._free.reset(np.arange(self._table.capacity))
        self._recent.clear()
        self._frequent.clear()

    def _forget(self, queue: SlotQueue, n: int) -> None:
        self._drop(queue, queue.head(n))

    def _drop(self, queue: SlotQueue, ghosts: Slots) -> None:
        queue.remove(ghosts)
        self._table.remove(ghosts)
        self._free.give(ghosts)
