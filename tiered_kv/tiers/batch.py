"""Blocks as transfers name them: an engine's keys become batches of names, of one KV group on one rank."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.keys import BlockKey, BlockKeys, Names, Namespace, Shard

_MOST_NAMESPACES: Final = 4096
"""Tenants come and go; the digest of one costs a microsecond."""


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
