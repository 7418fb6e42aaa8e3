"""Least recently used."""

from tiered_kv.catalog.policies.base import Policy
from tiered_kv.catalog.slots import SlotQueue
from tiered_kv.catalog.table import Slots
from tiered_kv.values.keys import Names


class LRUPolicy(Policy):
    """Evicts what was used least recently. Takes 8 bytes a slot."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._queue = SlotQueue(num_slots)

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, slots: Slots, names: Names) -> None:
        """Nothing to note: a block's place is given to it when it is unparked."""

    def use(self, slots: Slots) -> None:
        """Nothing to note: one use and many are the same to LRU."""

    def park(self, slots: Slots) -> None:
        """Take blocks out of the queue."""
        self._queue.remove(slots)

    def unpark(self, slots: Slots, *, cold: bool = False) -> None:
        """Put blocks at the hot or the cold end of the queue."""
        self._queue.push_cold(slots) if cold else self._queue.push(slots)

    def victims(self, n: int, keep: Slots) -> Slots:
        """Choose from the cold end."""
        return self._queue.head(n, skip=keep)

    def evict(self, slots: Slots, names: Names) -> None:
        """Take blocks out of the queue."""
        self._queue.remove(slots)

    def order(self) -> Slots:
        """Return the queue."""
        return self._queue.head(len(self._queue))

    def clear(self) -> None:
        """Empty the queue."""
        self._queue.clear()
