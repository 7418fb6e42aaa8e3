"""One tier as motion sees it: its books, its memory or its backend, and what has been counted of it."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tiered_kv.catalog.index import TierIndex
from tiered_kv.keys import BlockKey, Names, Namespace
from tiered_kv.memory.host import HostSlab


@dataclass(frozen=True)
class Batch:
    """Blocks of one namespace, by name; ``positions`` says which block of its prompt each is."""

    namespace: Namespace
    names: Names
    positions: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, at: "slice | NDArray[np.int64] | NDArray[np.bool_]") -> "Batch":
        return Batch(self.namespace, self.names[at], self.positions[at])

    def keys(self) -> list[BlockKey]:
        """One key object per block, for a backend or a header."""
        return self.namespace.keys_of(self.names, self.positions)


@dataclass
class Counters:
    """Blocks, since the cache was opened."""

    hits: int = 0
    """Loaded from here: each block asked for is counted once, in the tier that had it before promotion."""
    written: int = 0
    """Stored or written down to here."""
    promoted: int = 0
    """Copied up to here by a load or prefetch."""
    evicted: int = 0
    """Made to leave for want of room."""
    dropped: int = 0
    """Not written for want of room or because the queue was full."""
    corrupt: int = 0
    """Read and found broken."""
    failed: int = 0
    """Not read or written because the medium failed."""
    expired: int = 0
    """Removed because they were here for too long."""


class Tier:
    """What all tiers have: a name and counts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counters = Counters()


class MemoryTier(Tier):
    """A tier whose slots copies reach: rows of a tensor on the host or on a device.

    Attributes:
        index: Which block is in which row.
        rows: ``(num_slots, stride / 8)`` int64.
        write_back: Whether blocks wait in the tier above for the cleaner, if there is one above.
    """

    def __init__(self, name: str, index: TierIndex, rows: torch.Tensor, *, write_back: bool = False) -> None:
        super().__init__(name)
        self.index = index
        self.rows = rows
        self.write_back = write_back

    def room_for(self, batch: Batch) -> int:
        """How many blocks of a long batch may be added, head first, without evicting what the tier has of its head."""
        books = self.index.statistics()
        room = books.free + books.evictable
        return room - int(np.count_nonzero(self.index.ready(batch.names[:room])))


class HostTier(MemoryTier):
    """The CPU tier and the bounce slots that everything else passes through: always there, if with no own slots."""

    def __init__(self, name: str, index: TierIndex, slab: HostSlab, *, write_back: bool = False) -> None:
        super().__init__(name, index, slab.rows, write_back=write_back)
        self.slab = slab
