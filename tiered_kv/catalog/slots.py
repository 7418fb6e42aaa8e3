"""What is kept of slots by their number: which are free, in which order others were used, when each was filled.

All of it is numpy arrays, allocated once. Pure data: no locks; one thread at a time.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.table import Slots
from tiered_kv.values.errors import ConfigurationError

_Links = tuple[NDArray[np.int32], NDArray[np.int32]]
_ABSENT: Final = -1
_FEW: Final = 32
"""So many slots are linked one by one sooner than numpy begins: 1 us instead of 7 for four."""
_MAX_FOUND: Final = 4096  # to remove so many blocks takes about 1 ms, to look at as many slots takes 3 us


class FreeSlots:
    """A stack of free slot ids. Takes 4 bytes a slot.

    What was freed together was mostly filled together, so the top of the stack, sorted, comes in long runs of
    neighbours, and I/O and DMA merge neighbours.

    Attributes:
        num: How many are free.
    """

    def __init__(self, capacity: int, slots: range) -> None:
        """Start with all of ``slots`` free; there are never more than ``capacity``."""
        self._stack = np.full(capacity, 0, dtype=np.int32)
        self.num = len(slots)
        self._stack[: self.num] = slots[::-1]  # the lowest ids on top

    def take(self, n: int) -> Slots:
        """Take ``n <= num`` slots, in ascending order."""
        self.num -= n
        return ascending(self._stack[self.num : self.num + n].astype(np.int64))

    def give(self, slots: Slots) -> None:
        """Give slots back, none of them free already."""
        self._stack[self.num : self.num + len(slots)] = slots
        self.num += len(slots)

    def reset(self, slots: Slots) -> None:
        """Have just ``slots``, ascending, free."""
        self.num = 0
        self.give(slots[::-1])


def ascending(slots: Slots) -> Slots:
    """Return slots in ascending order."""
    if len(slots) < 2:
        return slots
    return np.array(sorted(slots.tolist()), np.int64) if len(slots) <= _FEW else np.sort(slots)


class SlotQueue:
    """Slots ``0 <= slot < capacity`` from least to most recently used, each at most once. Takes 8 bytes a slot.

    A doubly linked list threaded through two arrays. Blocks are used in chains, so the slots of a batch are mostly
    neighbours in it already: they are linked and unlinked by the run, and a batch costs a few array operations,
    whatever the number of slots in the list. Few slots are dealt with one by one.

    Every batch is given and returned in the queue's own direction: the least recently used first.
    """

    def __init__(self, capacity: int, *, links: "_Links | None" = None, number: int = 0) -> None:
        """Allocate for ``capacity`` slots; nothing is allocated later. For several queues see `several`."""
        self._capacity = capacity
        self._end = capacity + number  # the sentinel that closes the ring: behind it the coldest, before it the hottest
        self._next, self._previous = links or _links(capacity, 1)
        # Indexing a memoryview gives a plain int in a third of the time that an array takes.
        self._next_at = self._next.data
        self._previous_at = self._previous.data
        self.clear()

    @classmethod
    def several(cls, capacity: int, num_queues: int) -> "list[SlotQueue]":
        """Make queues for slots of which each is in one of them at most. They take no more memory than one queue.

        In any of them, ``in`` and `holds` tell of all; clear all or none.
        """
        links = _links(capacity, num_queues)
        return [cls(capacity, links=links, number=number) for number in range(num_queues)]

    def __len__(self) -> int:
        """Count the slots in the queue."""
        return self._len

    def __contains__(self, slot: int) -> bool:
        """Whether ``slot`` is in the queue."""
        return self._next_at[slot] != _ABSENT

    @property
    def first(self) -> int:
        """The coldest slot, of a queue that has some."""
        return self._next_at[self._end]

    def holds(self, slots: Slots) -> NDArray[np.bool_]:
        """Say of each slot whether it is in the queue."""
        is_held: NDArray[np.bool_] = self._next[slots] != _ABSENT
        return is_held

    def push(self, slots: Slots) -> None:
        """Put slots, none of them in the queue, at the hot end, the last one hottest."""
        self._link(self._previous_at[self._end], slots)

    def push_cold(self, slots: Slots) -> None:
        """Put slots, none of them in the queue, at the cold end, the first one coldest."""
        self._link(self._end, slots)

    def remove(self, slots: Slots) -> None:
        """Take slots out, each of them in the queue and none twice. Runs of neighbours cost as much as one slot."""
        following, preceding = self._next_at, self._previous_at
        self._len -= len(slots)
        if len(slots) <= _FEW:
            for slot in slots.tolist():
                before, behind = preceding[slot], following[slot]
                following[before], preceding[behind], following[slot] = behind, before, _ABSENT
            return
        breaks = (self._next[slots[:-1]] != slots[1:]).nonzero()[0]
        firsts = slots[np.concatenate(([0], breaks + 1))].tolist()
        lasts = slots[np.concatenate((breaks, [len(slots) - 1]))].tolist()
        for first, last in zip(firsts, lasts, strict=True):
            before, behind = preceding[first], following[last]
            following[before] = behind
            preceding[behind] = before
        self._next[slots] = _ABSENT

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
        self._next[: self._capacity] = _ABSENT
        self._next_at[self._end] = self._previous_at[self._end] = self._end
        self._len = 0

    def _link(self, before: int, slots: Slots) -> None:
        following, preceding, behind = self._next_at, self._previous_at, self._next_at[before]
        self._len += len(slots)
        if len(slots) <= _FEW:
            for slot in slots.tolist():
                following[before], preceding[slot], before = slot, before, slot
        else:
            first, last = int(slots[0]), int(slots[-1])
            self._next[slots[:-1]] = slots[1:]
            self._previous[slots[1:]] = slots[:-1]
            following[before], preceding[first], before = first, before, last
        following[before], preceding[behind] = behind, before


def by_number(numbers: NDArray[np.uint8], slots: Slots) -> list[tuple[int, Slots]]:
    """Return the slots of each number that has some of them, in the order given."""
    if not len(slots):
        return []
    first = int(numbers[0])
    if numbers.tobytes().count(first) == len(slots):
        return [(first, slots)]
    if len(slots) <= _FEW:
        batches: dict[int, list[int]] = {}
        for number, slot in zip(numbers.tolist(), slots.tolist(), strict=True):
            batches.setdefault(number, []).append(slot)
        return [(number, np.array(batch)) for number, batch in batches.items()]
    return [(number, slots[numbers == number]) for number in np.bincount(numbers).nonzero()[0].tolist()]


class Expiry:
    """When each slot was last filled. Takes 4 bytes a slot.

    Times are 32-bit floats of seconds since the clock was first looked at: exact to 0.06 s after 10 days, to 4 s after
    two years.
    """

    def __init__(self, num_slots: int, ttl_s: float, clock: Callable[[], float]) -> None:
        """Make times for ``num_slots`` slots, none of them filled.

        Raises:
            ConfigurationError: ``ttl_s`` is no positive number.
        """
        if not ttl_s > 0:
            raise ConfigurationError(f"ttl_s must be positive, got {ttl_s}")
        self._ttl_s = ttl_s
        self._clock = clock
        self._zero_s = clock()
        self._filled_s = np.full(num_slots, 0, dtype=np.float32)
        self._next = 0

    def start(self, slots: Slots) -> None:
        """Let the age of these slots count from now on."""
        self._filled_s[slots] = self._clock() - self._zero_s

    def overdue(self, num_slots: int, limit: int) -> Slots:
        """Look at the next ``limit`` of the first ``num_slots`` slots; return those filled too long ago, ascending.

        Finds at most 4,096, and then goes on after the last of them at the next call.
        """
        start = self._next if self._next < num_slots else 0
        stop = min(start + limit, num_slots)
        deadline_s = self._clock() - self._zero_s - self._ttl_s
        found = (self._filled_s[start:stop] <= deadline_s).nonzero()[0][:_MAX_FOUND] + start
        self._next = int(found[-1]) + 1 if len(found) == _MAX_FOUND else stop
        return found


def _links(capacity: int, num_queues: int) -> _Links:
    """Allocate the links forward and back of slots, and of one sentinel for each queue."""
    size = capacity + num_queues
    return np.full(size, _ABSENT, dtype=np.int32), np.full(size, _ABSENT, dtype=np.int32)
