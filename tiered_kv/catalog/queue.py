"""Order of use: a doubly linked list threaded through two arrays, indexed by slot.

Blocks are used in chains, so the slots of a batch are mostly neighbours in the list already: they are linked and
unlinked by the run, and a batch costs a few array operations, whatever the number of slots in the list.

Pure data: no locks; one thread at a time.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.table import Slots

_ABSENT: Final = -1


class SlotQueue:
    """Slots ``0 <= slot < capacity`` from least to most recently used, each at most once. Takes 8 bytes a slot.

    Every batch is given and returned in the queue's own direction: the least recently used first.
    """

    def __init__(self, capacity: int) -> None:
        """Allocate for ``capacity`` slots; nothing is allocated later."""
        self._end = capacity  # the sentinel that closes the ring: behind it the coldest slot, before it the hottest
        self._next = np.full(capacity + 1, _ABSENT, dtype=np.int32)
        self._previous = np.full(capacity + 1, _ABSENT, dtype=np.int32)
        # Indexing a memoryview gives a plain int in a third of the time that an array takes.
        self._next_at = self._next.data
        self._previous_at = self._previous.data
        self.clear()

    def __len__(self) -> int:
        """Count the slots in the queue."""
        return self._len

    def __contains__(self, slot: int) -> bool:
        """Whether ``slot`` is in the queue."""
        return self._next_at[slot] != _ABSENT

    def holds(self, slots: Slots) -> NDArray[np.bool_]:
        """Say of each slot whether it is in the queue."""
        is_held: NDArray[np.bool_] = self._next.take(slots) != _ABSENT
        return is_held

    def push(self, slots: Slots) -> None:
        """Put slots, none of them in the queue, at the hot end, the last one hottest."""
        self._link(self._previous_at[self._end], slots)

    def push_cold(self, slots: Slots) -> None:
        """Put slots, none of them in the queue, at the cold end, the first one coldest."""
        self._link(self._end, slots)

    def remove(self, slots: Slots) -> None:
        """Take slots out, each of them in the queue and none twice. Runs of neighbours cost as much as one slot."""
        if not len(slots):
            return
        breaks = np.flatnonzero(self._next.take(slots[:-1]) != slots[1:])
        firsts = slots[np.concatenate(([0], breaks + 1))].tolist()
        lasts = slots[np.concatenate((breaks, [len(slots) - 1]))].tolist()
        following, preceding = self._next_at, self._previous_at
        for first, last in zip(firsts, lasts, strict=True):
            before, behind = preceding[first], following[last]
            following[before] = behind
            preceding[behind] = before
        self._next[slots] = _ABSENT
        self._len -= len(slots)

    def head(self, n: int, *, skip: Slots | None = None) -> Slots:
        """Return the ``n`` coldest slots that are not in ``skip``, or all if there are fewer. Takes nothing out."""
        skipped = frozenset() if skip is None else frozenset(skip.tolist())
        following = self._next_at
        slots: list[int] = []
        slot = self._end
        for _ in range(min(n + len(skipped), self._len)):
            slot = following[slot]
            slots.append(slot)
        if skipped:
            slots = [slot for slot in slots if slot not in skipped][:n]
        return np.array(slots, dtype=np.int64)

    def clear(self) -> None:
        """Take all slots out."""
        self._next.fill(_ABSENT)
        self._next_at[self._end] = self._previous_at[self._end] = self._end
        self._len = 0

    def _link(self, before: int, slots: Slots) -> None:
        if not len(slots):
            return
        behind = self._next_at[before]
        first, last = int(slots[0]), int(slots[-1])
        self._next[slots[:-1]] = slots[1:]
        self._previous[slots[1:]] = slots[:-1]
        self._next_at[before], self._previous_at[first] = first, before
        self._next_at[last], self._previous_at[behind] = behind, last
        self._len += len(slots)
