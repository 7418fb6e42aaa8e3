"""What is remembered of names, whether their blocks are there or not, in a fixed amount of memory.

`History` has the last thing that befell each of the names noted last: why a block is not there. `UseCounts` estimates
how often names were asked for lately, for tiers that want some uses first. `Ghosts` has how often and when blocks were
used that are gone, for the policies that learn from it.

Pure data: no locks; one thread at a time.

Source: G. Cormode and S. Muthukrishnan, "An Improved Data Stream Summary: The Count-Min Sketch and its Applications",
J. Algorithms 2005; ageing by halving as in G. Einziger, R. Friedman and B. Manes, "TinyLFU", ACM ToS 2017.
"""

from collections.abc import Sequence
from enum import IntEnum
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.slots import FreeSlots, SlotQueue
from tiered_kv.catalog.table import NameTable, first_occurrences, hash_names
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.keys import Names

Times = NDArray[np.int64]
"""Moments, counted in blocks used."""
Uses = NDArray[np.int32]


class Fate(IntEnum):
    """What happened to a block last. `UNKNOWN`: nothing that is remembered."""

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
    """Return a fate in the words that users see."""
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
        self._forget(self._order.head(len(names) - self._free.num))
        places = self._free.take(len(names))
        self._table.insert(names, places)
        self._fates[places] = fates[last] if isinstance(fates, np.ndarray) else fates
        self._order.push(places)

    def fates(self, names: Names) -> NDArray[np.uint8]:
        """Return the `Fate` of each name, ``(n,)``."""
        return self._fates[self._table.find(names)]

    def clear(self) -> None:
        """Forget everything."""
        self._table.clear()
        self._order.clear()
        self._free.reset(np.arange(self.capacity))

    def _forget(self, places: NDArray[np.int64]) -> None:
        self._order.remove(places)
        self._table.remove(places)
        self._free.give(places)


_ROWS: Final = 4
_CELLS_PER_USE: Final = 4
_MOST: Final = 255
_NO_CELL: Final = np.uint64(2**64 - 1)


class UseCounts:
    """Estimates of how often each name was used among the last uses of all names, up to 255.

    Between two halvings, one every ``window`` uses, no estimate is below the truth; one in about forty of names never
    used is above it. Takes 16 to 32 bytes for each use of the window.
    """

    def __init__(self, window: int) -> None:
        """Make estimates in which nothing was used.

        Args:
            window: After so many uses all counts are halved: a use counts for one window, and ever less afterwards.

        Raises:
            ConfigurationError: ``window`` is not positive.
        """
        if window < 1:
            raise ConfigurationError(f"window must be positive, got {window}")
        self.window = window
        width = 1 << (_CELLS_PER_USE * window - 1).bit_length()
        self._mask = np.uint64(width - 1)
        self._rows = np.arange(_ROWS, dtype=np.uint64)[:, None]
        self._row_starts = self._rows * np.uint64(width)
        self._cells = np.full(_ROWS * width, 0, dtype=np.uint8)  # one row after the other
        self._left = window

    def add(self, names: Names) -> None:
        """Count one use of each name; a name that is repeated counts each time."""
        ordered = np.sort(self._cells_of(names), axis=None)  # equal ones side by side, for np.unique is slow to begin
        starts = np.diff(ordered, prepend=_NO_CELL).nonzero()[0]
        cells = ordered[starts]
        self._cells[cells] = np.minimum(self._cells[cells] + np.diff(starts, append=len(ordered)), _MOST)
        self._left -= len(names)
        if self._left <= 0:
            self._cells >>= 1  # 1.5 ms for a window of a million
            self._left = self.window

    def estimate(self, names: Names) -> NDArray[np.uint8]:
        """Estimate how often each name was used, ``(n,)``."""
        estimates: NDArray[np.uint8] = self._cells[self._cells_of(names)].min(axis=0)
        return estimates

    def _cells_of(self, names: Names) -> NDArray[np.uint64]:
        """Return the cells of each name, one in each row: ``(4, n)``."""
        hashes = hash_names(names)
        strides = hashes >> np.uint64(32) | np.uint64(1)
        return (hashes + self._rows * strides & self._mask) + self._row_starts


_MOST_AGAIN: Final = 1 << 16


class AdmissionFilter:
    """Which blocks are used often enough for tiers that want some uses before they take one.

    Attributes:
        is_wanted: Whether there is such a tier.
    """

    def __init__(self, least_uses: Sequence[int], window: int) -> None:
        """Make a filter that has seen no uses.

        Args:
            least_uses: By tier, how many uses it wants; up to 1 is none.
            window: As for `UseCounts`.
        """
        self._least = {tier: least for tier, least in enumerate(least_uses) if least > 1}
        self.is_wanted = bool(self._least)
        self._counts = UseCounts(window if self._least else 1)
        self._again: dict[int, dict[int, None]] = {tier: {} for tier in self._least}

    def admits(self, tier: int, names: Names) -> NDArray[np.bool_]:
        """Say of which blocks a tier is to have a copy."""
        if tier not in self._least:
            return np.ones(len(names), np.bool_)
        admitted: NDArray[np.bool_] = self._counts.estimate(names) >= self._least[tier]
        return admitted

    def use(self, names: Names) -> list[tuple[int, NDArray[np.bool_]]]:
        """Count one use of each block; return, by tier, which are enough by this one."""
        if not self._least or not len(names):
            return []
        before = self._counts.estimate(names)
        self._counts.add(names)
        after = self._counts.estimate(names)
        enough = {tier: (before < least) & (after >= least) for tier, least in self._least.items()}
        for tier, again in self._again.items():
            if again:
                hashes = hash_names(names).tolist()
                enough[tier] |= [each in again for each in hashes]
                for each in hashes:
                    again.pop(each, None)
        return list(enough.items())

    def again(self, tier: int, names: Names) -> None:
        """Have one more use be enough of blocks that a tier was to have, and did not get, as far as is remembered."""
        if (again := self._again.get(tier)) is not None:
            again.update(dict.fromkeys(hash_names(names).tolist()))
            for each in list(islice(again, max(0, len(again) - _MOST_AGAIN))):
                del again[each]

    def waits(self, tier: int, names: Names) -> NDArray[np.bool_]:
        """Say of which blocks one more use is enough, by `again`."""
        if not (again := self._again.get(tier)):
            return np.zeros(len(names), np.bool_)
        return np.array([each in again for each in hash_names(names).tolist()], np.bool_)


NUM_LEVELS: Final = 8
LEVELS: Final = np.searchsorted([2, 3, 4, 5, 7, 10, 16], np.arange(256), side="right").astype(np.uint8)
"""By number of uses: 1, 2, 3, 4, up to 6, up to 9, up to 15, more."""


class Ghosts:
    """The blocks lately evicted, by a hash of their names: a wrong guess costs little. Takes 14 bytes a place.

    Each has one place, which the next one of the same place takes over.
    """

    def __init__(self, num_places: int) -> None:
        """Allocate for more than ``num_places``, up to twice as many; nothing is allocated later."""
        bits = num_places.bit_length()
        self._shift = np.uint64(64 - bits)
        self._tags = np.full(1 << bits, 0, dtype=np.uint32)
        self._num_uses = np.full(1 << bits, 0, dtype=np.uint8)
        self._used_at = np.full(1 << bits, 0, dtype=np.int64)
        self._kinds = np.full(1 << bits, 0, dtype=np.uint8)

    def add(self, names: Names, num_uses: Uses, used_at: Times, kinds: NDArray[np.uint8] | int = 0) -> None:
        """Remember how often each was used, at least once; when; and of which kind it is, whatever that is."""
        places, tags = self._places(names)
        self._tags[places], self._used_at[places], self._kinds[places] = tags, used_at, kinds
        self._num_uses[places] = np.minimum(num_uses, 255).astype(np.uint8)

    def recall(self, names: Names) -> tuple[Uses, Times, NDArray[np.uint8]]:
        """Return what `add` was told of each: 0 uses of what is not remembered."""
        places, tags = self._places(names)
        num_uses = self._num_uses[places] * (self._tags[places] == tags)
        return num_uses.astype(np.int32), self._used_at[places], self._kinds[places]

    def clear(self) -> None:
        """Forget all."""
        self._num_uses.fill(0)

    def _places(self, names: Names) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        hashes = hash_names(names)
        return (hashes >> self._shift).view(np.int64), hashes.astype(np.uint32)


def at_least_as_often(num_uses: Uses) -> Uses:
    """Return how often the blocks of a prompt, in order, were used, when some of their ghosts are lost.

    Whoever used a block used those before it. Were they thought to be strangers they would go first, and take all that
    comes after them along.
    """
    uses: Uses = np.maximum.accumulate(num_uses[::-1])[::-1]
    return uses
