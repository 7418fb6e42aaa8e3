"""Which slots are free."""

import numpy as np

from tiered_kv.catalog.table import Slots


class FreeSlots:
    """A stack of free slot ids. Takes 4 bytes a slot.

    What was freed together was mostly filled together, so the top of the stack, sorted, comes in long runs of
    neighbours, and I/O and DMA merge neighbours.
    """

    def __init__(self, capacity: int, slots: range) -> None:
        """Start with all of ``slots`` free; there are never more than ``capacity``."""
        self._stack = np.full(capacity, 0, dtype=np.int32)
        self._len = len(slots)
        self._stack[: self._len] = slots[::-1]  # the lowest ids on top

    def __len__(self) -> int:
        """Count the free slots."""
        return self._len

    def take(self, n: int) -> Slots:
        """Take ``n <= len(self)`` slots, in ascending order."""
        self._len -= n
        return np.sort(self._stack[self._len : self._len + n].astype(np.int64))

    def give(self, slots: Slots) -> None:
        """Give slots back, none of them free already."""
        self._stack[self._len : self._len + len(slots)] = slots
        self._len += len(slots)

    def reset(self, slots: Slots) -> None:
        """Have just ``slots``, ascending, free."""
        self._len = 0
        self.give(slots[::-1])
