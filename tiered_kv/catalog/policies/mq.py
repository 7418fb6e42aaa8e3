"""Multi-queue: how often a block was used says how long it outlives those that were used as long ago.

Source: Y. Zhou, J. F. Philbin and K. Li, "The Multi-Queue Replacement Algorithm for Second Level Buffer Caches", USENIX
ATC 2001. It was made for a cache below another one, whose hits it never sees: as ours is, below the engine's.
Departures: batches instead of single blocks; time counts blocks used, not calls; the life of a block is a quantile of
the times between two uses, not the commonest of them; parked blocks take no part until they are back; one removed by
hand is not remembered.
"""

from typing import Final

import numpy as np

from tiered_kv.catalog.policies.base import Policy
from tiered_kv.catalog.slots import SlotQueue, by_number
from tiered_kv.catalog.table import Slots
from tiered_kv.catalog.uses import Ghosts, Times, at_least_as_often
from tiered_kv.values.keys import Names

_NUM_QUEUES: Final = 8
"""For blocks used once, 2 or 3 times, 4 to 7 times, and so on."""
_GHOSTS: Final = 4
"""Blocks that are remembered when they are gone, for each slot; the paper's number."""
_LEAST_GHOSTS: Final = 1 << 15
"""A small tier learns how long blocks stay away only if it remembers more of them; 14 bytes each."""
_QUANTILE: Final = 2 / 3
_STEP: Final = 0.01


class MQPolicy(Policy):
    """Evicts from the lowest queue that has blocks, the least recently used first.

    A block is in the queue of the logarithm of its uses. One that is not used for a life goes down by one queue, so
    that what was popular long ago goes in the end. A life is so long that two thirds of the blocks that come back do so
    within one, learned as they come. What was evicted goes on counting if it comes back soon. Takes about 100 bytes a
    slot.

    Attributes:
        life: In blocks used.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.life = float(max(1, num_slots))
        self._queues = SlotQueue.several(num_slots, _NUM_QUEUES)
        self._queue_of = np.full(num_slots, 0, dtype=np.uint8)
        self._num_uses = np.full(num_slots, 0, dtype=np.int32)
        self._used_at = np.full(num_slots, 0, dtype=np.int64)
        self._queued_at = np.full(num_slots, 0, dtype=np.int64)
        self._now = 0
        self._ghosts = Ghosts(max(_LEAST_GHOSTS, _GHOSTS * num_slots))

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def add(self, slots: Slots, names: Names) -> None:
        """Let those that were here before go on counting."""
        num_uses, used_at, _ = self._ghosts.recall(names)
        self._num_uses[slots] = at_least_as_often(num_uses) + 1
        self._learn(used_at[num_uses > 0])
        self._used_at[slots] = self._now

    def use(self, slots: Slots) -> None:
        """Count."""
        self._num_uses[slots] += 1
        self._learn(self._used_at[slots])
        self._used_at[slots] = self._now

    def park(self, slots: Slots) -> None:
        """Take blocks out of their queues."""
        for number, batch in by_number(self._queue_of[slots], slots):
            self._queues[number].remove(batch)

    def unpark(self, slots: Slots, *, cold: bool = False) -> None:
        """Put blocks at the hot ends of the queues of their uses; if ``cold``, at the cold end of the lowest."""
        self._now += len(slots)
        self._queued_at[slots] = self._now
        if cold:
            self._queue_of[slots] = 0
            self._queues[0].push_cold(slots)
        else:
            self._queue_of[slots] = np.minimum(np.log2(self._num_uses[slots]), _NUM_QUEUES - 1)
            for number, batch in by_number(self._queue_of[slots], slots):
                self._queues[number].push(batch)
        self._send_down(most=len(slots) + 1)

    def victims(self, n: int, keep: Slots) -> Slots:
        """Choose from the cold end of the lowest queue, then of the next."""
        chosen: list[Slots] = []
        for queue in self._queues:
            chosen.append(queue.head(n, skip=keep))
            n -= len(chosen[-1])
            if not n:
                break
        return np.concatenate(chosen)

    def evict(self, slots: Slots, names: Names) -> None:
        """Take blocks out of their queues and remember how often they were used, and when."""
        self.park(slots)
        self._ghosts.add(names, self._num_uses[slots], self._used_at[slots])

    def order(self) -> Slots:
        """Return the queues, the lowest first."""
        return np.concatenate([queue.head(len(queue)) for queue in self._queues])

    def clear(self) -> None:
        """Empty the queues and forget what was evicted."""
        self.life = float(max(1, self.num_slots))
        for queue in self._queues:
            queue.clear()
        self._ghosts.clear()

    def _learn(self, used_at: Times) -> None:
        """Take the times between two uses into account: the life goes up for longer ones, down for shorter ones."""
        num_longer = int(np.count_nonzero(self._now - used_at > self.life))
        drift = num_longer * _QUANTILE - (len(used_at) - num_longer) * (1 - _QUANTILE)
        self.life = max(1.0, self.life * float(np.exp(np.clip(_STEP * drift, -0.5, 0.5))))

    def _send_down(self, most: int) -> None:
        """Move what was not used for a life down by one queue, ``most`` blocks of each: as many as came, so all go."""
        before = self._now - self.life
        for number in range(1, _NUM_QUEUES):
            queue = self._queues[number]
            if not len(queue) or self._queued_at[queue.head(1)[0]] > before:
                continue
            head = queue.head(most)
            late = head[: int(np.count_nonzero(np.logical_and.accumulate(self._queued_at[head] <= before)))]
            queue.remove(late)
            self._queued_at[late] = self._now
            self._queue_of[late] = number - 1
            self._queues[number - 1].push(late)
