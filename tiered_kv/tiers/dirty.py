"""Blocks that wait in a memory tier to be written below: the dirty ones, with what is needed to write them."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.leases import Lease
from tiered_kv.tiers.batch import Batch
from tiered_kv.tiers.memory import MemoryTier


class Waiting:
    """The dirty blocks of one memory tier, the one that waits longest first. Takes 25 bytes a slot of the tier.

    The books of the tier say which blocks are dirty; a block's name alone is not enough to write its record, so its
    namespace and position are kept here, by slot.
    """

    def __init__(self, tier: MemoryTier, clock: Callable[[], float]) -> None:
        """Make an empty line; the tier's index must be made for dirty blocks."""
        self._index = tier.index
        self._clock = clock
        self._namespaces = np.full(tier.index.max_slots, None, dtype=object)  # no array is walked by the collector
        self._positions = np.full(tier.index.max_slots, 0, dtype=np.int64)
        self._since_s = np.full(tier.index.max_slots, 0.0)
        self._num_tries = np.full(tier.index.max_slots, 0, dtype=np.uint8)
        self.on_add: Callable[[], object] = lambda: None
        """Called when blocks have come, once there is someone who writes them."""

    def __len__(self) -> int:
        return self._index.statistics().dirty

    def add(self, batch: Batch, slots: NDArray[np.int64], lease: Lease) -> None:
        """Let blocks wait: ``batch`` lies in ``slots``, own ones of the tier, which ``lease`` holds."""
        self._line_up(batch, slots, lease)
        self._num_tries[slots] = 0
        self.on_add()

    def again(self, batch: Batch, slots: NDArray[np.int64], lease: Lease, *, most_tries: int) -> NDArray[np.bool_]:
        """Let blocks that could not be written wait for another try, behind all others; say which are to have one."""
        self._num_tries[slots] += 1
        again: NDArray[np.bool_] = self._num_tries[slots] < most_tries
        self._line_up(batch[again], slots[again], lease)
        return again

    def put_back(self, batch: Batch, slots: NDArray[np.int64], lease: Lease) -> None:
        """Let blocks that nobody tried to write wait again."""
        self._line_up(batch, slots, lease)

    def take(self, most: int) -> tuple[Batch, Lease]:
        """Take up to ``most`` of the blocks that wait longest, of one namespace, and hold them."""
        slots = self._index.oldest_dirty(most)
        namespace = self._namespaces[slots[0]]
        others = np.flatnonzero(self._namespaces[slots] != namespace)
        n = int(others[0]) if len(others) else len(slots)
        names, lease = self._index.take_dirty(n)
        return Batch(namespace, names, self._positions[lease.slots]), lease

    def oldest_s(self) -> float:
        """Return for how long the first in the line waits; 0 if there is none."""
        slots = self._index.oldest_dirty(1)
        return self._clock() - float(self._since_s[slots[0]]) if len(slots) else 0.0

    def _line_up(self, batch: Batch, slots: NDArray[np.int64], lease: Lease) -> None:
        self._namespaces[slots] = batch.namespace
        self._positions[slots] = batch.positions
        self._since_s[slots] = self._clock()
        self._index.mark_dirty(lease, slots)
