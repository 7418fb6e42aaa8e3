"""What the blocks of one KV group are called on one rank: an engine's keys become batches of names."""

from typing import Final

import numpy as np

from tiered_kv.keys import BlockKeys, Namespace, Shard
from tiered_kv.motion.tiers import Batch

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
