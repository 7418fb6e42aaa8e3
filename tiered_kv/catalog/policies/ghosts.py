"""What a policy remembers of blocks that are gone: how often and when they were used."""

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.table import hash_names
from tiered_kv.values.keys import Names

Times = NDArray[np.int64]
"""Moments, counted in blocks used."""
Uses = NDArray[np.int32]


class Ghosts:
    """Blocks lately evicted, by a hash of their names: a wrong guess costs nothing much. Takes 14 bytes a place.

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
        self._num_uses[places] = np.minimum(num_uses, 255)

    def recall(self, names: Names) -> tuple[Uses, Times, NDArray[np.uint8]]:
        """Return what `add` was told of each: 0 uses of what is not remembered."""
        places, tags = self._places(names)
        num_uses = self._num_uses.take(places) * (self._tags.take(places) == tags)
        return num_uses.astype(np.int32), self._used_at.take(places), self._kinds.take(places)

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
