"""What all tiers have, and what those have whose blocks this cache keeps the books of."""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.index import TierIndex
from tiered_kv.specs import LoadStoreSpec
from tiered_kv.tiers.batch import Batch

Mask = NDArray[np.bool_]


@dataclass
class Counters:
    """Since the cache was opened; blocks unless they say otherwise."""

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
    held_back: int = 0
    """Not written as so many bytes a day have been already; counted as dropped, too."""
    expired: int = 0
    """Removed because they were here for too long."""
    bytes_read: int = 0
    """Of records that reads brought, padding included: nothing is counted for a memory tier."""
    read_s: float = 0.0
    """Of these reads, each as long as the medium took: several may be under way at once."""
    read_queue_s: float = 0.0
    """How long reads waited for their turn before that."""
    bytes_written: int = 0
    """Of records that the medium took."""
    block_bytes_written: int = 0
    """Of the blocks in these records alone, as they are in slots of memory."""
    write_s: float = 0.0
    """Of these writes."""
    write_queue_s: float = 0.0
    """How long they waited for their turn before that."""


class Tier:
    """What all tiers have: a name and counts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counters = Counters()

    @property
    @abstractmethod
    def can_keep(self) -> bool:
        """Whether blocks may stay here at all."""

    async def locate(self, batch: Batch) -> LoadStoreSpec | None:
        """Say where all these blocks are in this tier now; None where that is not to be told."""
        return None


class BookedTier(Tier):
    """A tier of which this cache knows, without asking, what is in it.

    Attributes:
        index: Which block is in which slot.
    """

    index: TierIndex

    @property
    @abstractmethod
    def is_in_use(self) -> bool:
        """Whether what the books say can be had now."""

    def slots_of(self, batch: Batch) -> NDArray[np.int64] | None:
        """Return the slots of these blocks, or None unless every one of them can be read now."""
        slots, _ = self.index.find(batch.names)
        return slots if self.is_in_use and self.index.ready(batch.names).all() else None

    @abstractmethod
    def slots_within(self, capacity_bytes: int, block_bytes: int) -> int:
        """Say how many blocks of each kind it would hold within a capacity, where a block of every kind takes so much.

        Raises:
            ConfigurationError: It cannot have that capacity.
        """

    @abstractmethod
    async def grow(self, num_slots: int, more_bytes: int) -> None:
        """Have what more slots need, of every kind of block: ``num_slots`` each, ``more_bytes`` of memory in all.

        Raises:
            ConfigurationError: The machine lacks the memory.
            BackendUnavailableError: The medium did not grow. Nothing has changed.
        """

    @abstractmethod
    async def shrink(self, num_slots: int) -> None:
        """Give back what slots beyond ``num_slots`` took; nobody uses them, of any kind of block."""

    def give_back(self, start: int, stop: int) -> bool:
        """Return what idle slots beyond the capacity took, of this kind of block; say if none of them is in use."""
        return True


def prefix_of(mask: Mask) -> int:
    """Count the leading positions of which it is true."""
    holes = np.flatnonzero(~mask)
    return int(holes[0]) if len(holes) else len(mask)
