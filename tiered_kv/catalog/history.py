"""Why blocks are not there: the last thing that befell each of the names noted last, in a fixed amount of memory.

Pure data: no locks; one thread at a time.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.slots import FreeSlots, SlotQueue
from tiered_kv.catalog.table import NameTable, first_occurrences
from tiered_kv.keys import Names


class Fate(IntEnum):
    """What befell a block. `UNKNOWN`: nothing that is remembered."""

    UNKNOWN = 0
    EVICTED = 1
    """Others needed its room, or its tier was made smaller."""
    REMOVED = 2
    """By a call."""
    EXPIRED = 3
    CORRUPT = 4
    FAILED = 5
    """The tier could not write it, or has lost the part in which it was."""
    DROPPED = 6
    """Not stored: no room, late, or the tier was bypassed or would not have it."""
    UNADMITTED = 7
    """Not stored: not used often enough yet."""


def said_of(fate: Fate) -> str:
    """Return it in the words that users see."""
    return {Fate.UNKNOWN: "never stored", Fate.UNADMITTED: "not admitted"}.get(fate, fate.name.lower())


class History:
    """The fates of up to ``capacity`` names; those noted longest ago are forgotten first. Takes 100 bytes a name."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        """Make an empty one. Everything is allocated now."""
        self.capacity = capacity
        self._table = NameTable(capacity)
        self._free = FreeSlots(capacity, range(capacity))
        self._order = SlotQueue(capacity)
        self._fates = np.full(capacity + 1, Fate.UNKNOWN, dtype=np.uint8)  # the last one answers for names unknown

    def __len__(self) -> int:
        """Count the names remembered."""
        return len(self._order)

    def note(self, names: Names, fates: int | NDArray[np.uint8]) -> None:
        """Note what befell blocks just now; for each name the latest is kept.

        One call costs 70 us and 0.3 us a name: note little ones together.

        Args:
            names: In the order of what befell them; the last of repeats counts. Of more than ``capacity`` the last ones
                are kept.
            fates: For all of them, or ``(n,)`` for each: a `Fate`, or any number of the caller's from 1 to 255.
        """
        last = (len(names) - 1 - first_occurrences(names[::-1])[: self.capacity])[::-1]
        names = names[last]
        known = self._table.find(names)
        self._forget(known[known >= 0])
        self._forget(self._order.head(len(names) - len(self._free)))
        places = self._free.take(len(names))
        self._table.insert(names, places)
        self._fates[places] = fates[last] if isinstance(fates, np.ndarray) else fates
        self._order.push(places)

    def fates(self, names: Names) -> NDArray[np.uint8]:
        """Return the `Fate` of each name, ``(n,)``."""
        return self._fates.take(self._table.find(names))

    def clear(self) -> None:
        """Forget everything."""
        self._table.clear()
        self._order.clear()
        self._free.reset(np.arange(self.capacity))

    def _forget(self, places: NDArray[np.int64]) -> None:
        self._order.remove(places)
        self._table.remove(places)
        self._free.give(places)
