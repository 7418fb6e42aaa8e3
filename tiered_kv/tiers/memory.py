"""One tier as motion sees it: its books, its memory or its backend, and what has been counted of it."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from tiered_kv.catalog.index import TierIndex
from tiered_kv.keys import BlockKey, BlockKeys, Names, Namespace, Shard
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


_MOST_NAMESPACES: Final = 4096
"""Tenants come and go; the digest of one costs a microsecond."""


class Naming:
    """Adds to an engine's keys what they leave out: the fingerprint, the epoch and the shard.

    Attributes:
        fingerprint: Of the KV group.
        shard: Whose part of the heads the blocks are.
    """

    def __init__(self, fingerprint: bytes, shard: Shard) -> None:
        self.fingerprint = fingerprint
        self.shard = shard
        self._namespaces: dict[tuple[bytes, bytes], Namespace] = {}

    def batch(self, keys: BlockKeys, epoch: bytes) -> Batch:
        """Name blocks that weights of ``epoch`` computed."""
        space = self.namespace(keys.salt_id, epoch)
        return Batch(space, space.names(keys), np.arange(keys.start, keys.start + len(keys)))

    def namespace(self, salt_id: bytes, epoch: bytes) -> Namespace:
        """Return what a tenant's blocks, computed by weights of ``epoch``, share."""
        space = self._namespaces.get((epoch, salt_id))
        if space is None:
            if len(self._namespaces) >= _MOST_NAMESPACES:
                self._namespaces.clear()
            space = self._namespaces[epoch, salt_id] = Namespace(self.fingerprint, epoch, salt_id, self.shard.part)
        return space
