"""S3-FIFO: a small queue on trial, a main queue with second chances, and a memory of who failed the trial.

Source: J. Yang, Y. Zhang, Z. Qiu, Y. Yue and R. Vigfusson, "FIFO Queues are All You Need for Cache Eviction", SOSP
2023. Departures: batches instead of single blocks; of a main queue whose blocks were all used lately only the front is
looked at; a parked block keeps its place until the front of its queue comes by, and then goes to the end.
"""

from typing import Final

import numpy as np

from tiered_kv.catalog.policies.base import Policy
from tiered_kv.catalog.policies.ghosts import Ghosts
from tiered_kv.catalog.slots import SlotQueue
from tiered_kv.catalog.table import Slots
from tiered_kv.values.keys import Names

_ON_TRIAL: Final = 0.1
"""The part of the slots that is meant for blocks on trial; the paper's number."""
_MOST_USES: Final = 3
_LOOKED_AT: Final = 64


class S3FIFOPolicy(Policy):
    """Evicts blocks that were used once at most while they went through a short queue; of the others, the idle ones.

    A use moves nothing, it is only counted. Takes about 40 bytes a slot.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._small, self._main = SlotQueue.several(num_slots, 2)
        self._is_main = np.full(num_slots, fill_value=False)
        self._is_parked = np.full(num_slots, fill_value=True)
        self._is_victim = np.full(num_slots, fill_value=False)
        self._num_uses = np.full(num_slots, 0, dtype=np.uint8)  # since the block came, or last got another chance
        self._ghosts = Ghosts(max(1, num_slots))
        self._num_evicted = 0
        self._num_small = self._num_main = 0  # evictable; the queues may hold parked blocks as well

    def __len__(self) -> int:
        return self._num_small + self._num_main

    def add(self, slots: Slots, names: Names) -> None:
        """Put those that failed the trial lately into the main queue at once, the others on trial."""
        self._detach(slots)  # where a block was removed by hand its slot may still be in its place
        was_here, evicted_at, _ = self._ghosts.recall(names)
        self._is_main[slots] = (was_here > 0) & (self._num_evicted - evicted_at < self.num_slots)
        self._num_uses[slots] = 0

    def use(self, slots: Slots) -> None:
        """Count, up to three."""
        self._num_uses[slots] = np.minimum(self._num_uses[slots] + 1, _MOST_USES)

    def park(self, slots: Slots) -> None:
        """Mark blocks; they keep their places."""
        self._is_parked[slots] = True
        self._count(slots, -1)

    def unpark(self, slots: Slots, *, cold: bool = False) -> None:
        """Unmark blocks, and give places to those that have none; if ``cold``, at the front of the queue on trial."""
        self._is_parked[slots] = False
        if cold:
            self._detach(slots)
            self._is_main[slots] = False
            self._small.push_cold(slots)
        else:
            new = slots[~self._small.holds(slots)]
            is_main = self._is_main[new]
            self._small.push(new[~is_main])
            self._main.push(new[is_main])
        self._count(slots, 1)

    def victims(self, n: int, keep: Slots) -> Slots:
        """Choose what is too much on trial and was used once at most, then the least used of the first in main."""
        self._is_parked[keep] = True
        small, main = self._front(self._small, n + _LOOKED_AT), self._front(self._main, 4 * n + _LOOKED_AT)
        self._is_parked[keep] = False
        failed = np.flatnonzero(self._num_uses[small] <= 1)[: self._surplus]
        idle_first = main[np.argsort(self._num_uses[main], kind="stable")]
        return np.concatenate((small[failed], idle_first, np.delete(small, failed)))[:n]

    def evict(self, slots: Slots, names: Names) -> None:
        """Take blocks out, remember who failed the trial, and give those that were passed over another chance."""
        is_main = self._is_main[slots]
        self._is_victim[slots] = True
        passed = self._passed(self._small, int(np.count_nonzero(~is_main)))
        self._move_up(passed[self._num_uses[passed] > 1])
        looked_at = self._front(self._small, min(self._surplus, len(slots) + _LOOKED_AT))
        self._move_up(looked_at[(self._num_uses[looked_at] > 1) & ~self._is_victim[looked_at]])
        passed = self._passed(self._main, int(np.count_nonzero(is_main)))
        again = passed[self._num_uses[passed] > 0]
        self._num_uses[again] -= 1
        self._main.remove(again)
        self._main.push(again)
        self._is_victim[slots] = False
        self.park(slots)
        self._detach(slots)
        failed = names[~is_main]
        self._num_evicted += len(failed)
        self._ghosts.add(failed, np.ones(len(failed), dtype=np.int32), np.full(len(failed), self._num_evicted))

    def order(self) -> Slots:
        """Return the blocks on trial, those last that have passed it already, then the main queue."""
        small = self._front(self._small, self.num_slots)
        has_passed = self._num_uses[small] > 1
        return np.concatenate((small[~has_passed], small[has_passed], self._front(self._main, self.num_slots)))

    def clear(self) -> None:
        """Empty both queues and forget what was evicted."""
        self._small.clear()
        self._main.clear()
        self._is_parked.fill(True)  # noqa: FBT003 - numpy's own
        self._num_small = self._num_main = 0
        self._ghosts.clear()

    @property
    def _surplus(self) -> int:
        """How many more blocks there are on trial than are meant to be."""
        return max(0, self._num_small - int(self.num_slots * _ON_TRIAL))

    def _count(self, slots: Slots, sign: int) -> None:
        num_main = int(np.count_nonzero(self._is_main[slots]))
        self._num_main += sign * num_main
        self._num_small += sign * (len(slots) - num_main)

    def _detach(self, slots: Slots) -> None:
        placed = slots[self._small.holds(slots)]
        is_main = self._is_main[placed]
        self._small.remove(placed[~is_main])
        self._main.remove(placed[is_main])

    def _move_up(self, slots: Slots) -> None:
        """Move blocks that passed the trial."""
        self._count(slots, -1)
        self._small.remove(slots)
        self._is_main[slots] = True
        self._num_uses[slots] = 0
        self._main.push(slots)
        self._count(slots, 1)

    def _front(self, queue: SlotQueue, n: int) -> Slots:
        """Return the first ``n`` evictable blocks of a queue, or all if there are fewer."""
        most = n
        while True:
            head = queue.head(most)
            front: Slots = head[~self._is_parked[head]]
            if len(front) >= n or len(head) < most:
                return front[:n]
            most *= 2

    def _passed(self, queue: SlotQueue, num_victims: int) -> Slots:
        """Return the evictable blocks before the last victim of a queue, and take the parked ones there out of it.

        So no parked block is passed twice.
        """
        most = 2 * num_victims
        while True:
            head = queue.head(most)
            victims = np.flatnonzero(self._is_victim[head])
            if len(victims) == num_victims:
                break
            most *= 2
        if not num_victims:
            return head
        head = head[: victims[-1]]
        is_parked = self._is_parked[head]
        queue.remove(head[is_parked])
        passed: Slots = head[~is_parked & ~self._is_victim[head]]
        return passed
