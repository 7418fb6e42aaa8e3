"""What messages between a server and its clients have in common: batches of keys, and where their blocks are."""

from tiered_kv.errors import ConfigurationError
from tiered_kv.host.wire import Field, as_bytes, as_ids
from tiered_kv.keys import DIGEST_BYTES, BlockKeys


class Keys(Field, frozen=True):
    """A batch of block keys, with the digest of the weights that they are of."""

    digests: bytes
    start: int
    block_size: int
    group: int
    salt_id: bytes
    epoch: bytes

    @classmethod
    def of(cls, keys: BlockKeys, epoch: bytes) -> "Keys":
        """Say keys of an engine's."""
        return cls(keys.digests, keys.start, keys.block_size, keys.group, keys.salt_id, epoch)

    def block_keys(self) -> BlockKeys:
        """Return them.

        Raises:
            ConfigurationError: They are none.
        """
        if len(self.salt_id) != DIGEST_BYTES or len(self.epoch) != DIGEST_BYTES:
            raise ConfigurationError("a salt's and an epoch's digest have 32 bytes each")
        return BlockKeys(
            self.digests, block_size=self.block_size, start=self.start, group=self.group, salt_id=self.salt_id
        )


class Part(Field, frozen=True):
    """What is copied together: ``slots`` of a slab, for the keys at ``positions``; both are int64, little-endian."""

    pool: str
    slots: bytes
    positions: bytes
    layers: tuple[int, int] | None = None

    def from_position(self, first: int) -> "Part | None":
        """Return what it has of ``first`` and all behind it; None if that is nothing."""
        wanted = as_ids(self.positions) >= first
        if wanted.all():
            return self
        slots, positions = as_ids(self.slots)[wanted], as_ids(self.positions)[wanted]
        return Part(self.pool, as_bytes(slots), as_bytes(positions), self.layers) if len(slots) else None
