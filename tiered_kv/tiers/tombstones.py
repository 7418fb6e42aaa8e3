"""The blocks that were evicted from a tier, for as long as its medium may not know it."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice, repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.tiers.tier import Batch
from tiered_kv.values.keys import Names, Namespace, rows_of

MOST_NAMES: Final = 1 << 16
"""What a tier remembers at most of a kind: of names evicted, missed, asked for, or that may be written yet."""


class Tombstones:
    """The blocks of one tier that were evicted: those evicted last, and ``most_names`` in all if that is more.

    Attributes:
        serial: Counts evictions, so that what lifts a tombstone lifts none that came after it.
        num_lost: How many went for want of room: they may be found again if their medium never heard of them.
        is_cleared: All that was there before is evicted.
    """

    def __init__(self, *, most_names: int = MOST_NAMES) -> None:
        self.serial = 0
        self.num_lost = 0
        self.is_cleared = False
        self._most_names = most_names
        # Three of the same names, not one of tuples: these make the garbage collector walk the whole process.
        self._serials = OrderedDict[bytes, int]()  # the first to go first
        self._spaces = OrderedDict[bytes, Namespace]()  # the next to be told first
        self._positions = dict[bytes, int]()

    def __bool__(self) -> bool:
        return self.is_cleared or bool(self._serials)

    def __len__(self) -> int:
        return len(self._serials)

    def add(self, batch: Batch) -> None:
        """Take blocks for absent from now on."""
        self.serial += 1
        names = rows_of(batch.names)
        self._drop(names)  # so that what is evicted again is the last to go
        spaces = repeat(batch.namespace, len(names)) if batch.spaces is None else batch.spaces
        for name, space in zip(names, spaces, strict=True):  # an update() makes a tuple of each
            self._serials[name] = self.serial
            self._spaces[name] = space
        self._positions.update(zip(names, batch.positions.tolist(), strict=True))
        num_lost = max(0, len(self._serials) - max(self._most_names, len(batch)))
        self._drop(list(islice(self._serials, num_lost)))
        self.num_lost += num_lost

    def add_all(self) -> None:
        """Take everything that was there before for absent."""
        self.serial += 1
        self.is_cleared = True
        for each in (self._serials, self._spaces, self._positions):
            each.clear()

    def lift(self, batch: Batch, serial: int) -> None:
        """Believe the medium again: it has forgotten these blocks, or has them anew, since eviction ``serial``."""
        if self._serials:
            self._drop([name for name in rows_of(batch.names) if self._serials.get(name, serial + 1) <= serial])

    def holds(self, batch: Batch) -> NDArray[np.bool_]:
        """Say which blocks are to be taken for absent."""
        if not self._serials:
            return np.zeros(len(batch), np.bool_)
        return np.array([name in self._serials for name in rows_of(batch.names)], np.bool_)

    def names(self) -> Names | None:
        """Return the names of all these blocks; None if there are none."""
        return _names(self._serials) if self._serials else None

    def next(self, most: int) -> Batch | None:
        """Return up to ``most`` of the blocks that are to be told next, of one namespace; None if there are none.

        All others are to be told before these again: one that cannot be deleted holds up no others.
        """
        if not self._spaces:
            return None
        space = next(iter(self._spaces.values()))
        taken = [name for name, its in islice(self._spaces.items(), most) if its == space]
        for name in taken:
            self._spaces.move_to_end(name)
        return Batch(space, _names(taken), np.array([self._positions[name] for name in taken], np.int64))

    def _drop(self, names: list[bytes]) -> None:
        for each in (self._serials, self._spaces, self._positions):
            for name in names if each else ():
                each.pop(name, None)


def _names(rows: Iterable[bytes]) -> Names:
    return np.frombuffer(b"".join(rows), np.uint64).reshape(-1, 4)
