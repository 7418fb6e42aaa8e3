"""One block record on every medium: a 4 KiB header, then the payload. ``docs/format.md`` has it for other readers.

The header names the block in full and carries a checksum of the payload, so that whoever reads a record can tell a
right block from another one, an old one and a broken one without trusting where it was found.
"""

import struct
from dataclasses import dataclass
from functools import lru_cache

import xxhash

from tiered_kv.backend import Block, Outcome
from tiered_kv.errors import BlockCorruptError, LayoutMismatchError
from tiered_kv.keys import BlockKey, Namespace, Shard
from tiered_kv.layout import FORMAT_VERSION

HEADER_BYTES = 4096
MAGIC = b"TIEREDKV"

SIGNED_BYTES = 512
"""The part of the header in use; its last 8 bytes are its own xxh3-64. The rest of the 4 KiB is zero."""
_FIELDS = struct.Struct("<8sIIQQ32s32s32s32sII16s16s16s16s16s16s")
# magic, format version, header bytes, stored bytes, logical bytes, fingerprint, epoch, salt, hash, shard rank and size,
# codec, payload checksum (xxh3-128), then room for encryption: key id, nonce (12 used), tag, reserved
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = SIGNED_BYTES - _CHECKSUM.size
_NO_ENCRYPTION = (b"", b"", b"", b"")
_PADDING = bytes(HEADER_BYTES)


def encode(key: BlockKey, block: Block, *, codec: str = "none", decoded_bytes: int = 0) -> None:
    """Write the header of ``block`` for its payload as it is now. About 2 us, and the payload is read once.

    Args:
        key: Names the block.
        block: Whose payload is there already.
        codec: What made the payload of the engine's bytes.
        decoded_bytes: How many those were; 0 is for as many as the payload has.
    """
    header, payload, space = block.header, block.payload, key.namespace
    header[:] = _PADDING
    _FIELDS.pack_into(
        header, 0, MAGIC, FORMAT_VERSION, HEADER_BYTES, len(payload), decoded_bytes or len(payload),
        space.fingerprint, space.epoch, space.salt, key.hash, space.shard.rank, space.shard.size,
        codec.encode(), xxhash.xxh3_128_digest(payload), *_NO_ENCRYPTION,
    )  # fmt: skip
    _CHECKSUM.pack_into(header, _CHECKSUM_AT, xxhash.xxh3_64_intdigest(header[:_CHECKSUM_AT]))


def verify(key: BlockKey, block: Block, *, codec: str = "none") -> Outcome:
    """Say what was read into ``block``: a HIT only if every field and every byte is right.

    Returns:
        ``HIT``; ``MISS`` for a whole record of another key, namespace, codec or format version, or for none at all
        (zeros); ``CORRUPT`` for one that is broken.
    """
    header, payload, space = block.header, block.payload, key.namespace
    (
        magic, version, header_bytes, stored_bytes, _, fingerprint, epoch, salt, digest, rank, size, kept, checksum, *_
    ) = _FIELDS.unpack_from(header)  # fmt: skip
    if magic != MAGIC:
        return Outcome.CORRUPT if any(header[:SIGNED_BYTES]) else Outcome.MISS
    if xxhash.xxh3_64_intdigest(header[:_CHECKSUM_AT]) != _CHECKSUM.unpack_from(header, _CHECKSUM_AT)[0]:
        return Outcome.CORRUPT
    named = fingerprint, epoch, salt, digest, rank, size
    wanted = space.fingerprint, space.epoch, space.salt, key.hash, space.shard.rank, space.shard.size
    if version != FORMAT_VERSION or kept != codec.encode().ljust(16, b"\0") or named != wanted:
        return Outcome.MISS
    if header_bytes != HEADER_BYTES or stored_bytes != len(payload):
        return Outcome.CORRUPT
    return Outcome.HIT if xxhash.xxh3_128_digest(payload) == checksum else Outcome.CORRUPT


def key_in(header: memoryview) -> BlockKey | None:
    """Return the key that a record's header names; None if it is no whole header of this format.

    Nothing is said about the payload: `verify` is for that.
    """
    if xxhash.xxh3_64_intdigest(header[:_CHECKSUM_AT]) != _CHECKSUM.unpack_from(header, _CHECKSUM_AT)[0]:
        return None
    magic, version, _, _, _, fingerprint, epoch, salt, digest, rank, size, *_ = _FIELDS.unpack_from(header)
    if magic != MAGIC or version != FORMAT_VERSION or not rank < size:
        return None
    return BlockKey(_namespace(fingerprint, epoch, salt, rank, size), digest)


@dataclass(frozen=True)
class Record:
    """What a whole record says.

    Attributes:
        key: Names the block; equal to a `Namespace`'s key of it. A record does not know its position.
        payload: The block's bytes, a view of what was parsed: in the order of its `KVLayout`, or what ``codec`` made of
            those.
        codec: ``"none"`` where they are as the engine has them.
        decoded_bytes: How many those are.
    """

    key: BlockKey
    payload: memoryview
    codec: str
    decoded_bytes: int


def parse_record(data: bytes | bytearray | memoryview) -> Record:
    """Read a record, wherever it was found, and check every byte of it. Needs no cache.

    Args:
        data: Its bytes, from the first of the header to the last of the payload.

    Raises:
        BlockCorruptError: It is none, or broken, or cut.
        LayoutMismatchError: It is whole, and of another version of the format.
    """
    view = memoryview(data).cast("B")
    header, payload = view[:SIGNED_BYTES], view[HEADER_BYTES:]
    if len(view) < HEADER_BYTES or header[: len(MAGIC)] != MAGIC:
        raise BlockCorruptError(f"{len(view)} bytes are no record: they do not begin with its header")
    if xxhash.xxh3_64_intdigest(header[:_CHECKSUM_AT]) != _CHECKSUM.unpack_from(header, _CHECKSUM_AT)[0]:
        raise BlockCorruptError("the record's header is broken: its checksum is of other bytes")
    (
        _, version, header_bytes, stored_bytes, decoded_bytes, fingerprint, epoch, salt, digest, rank, size, codec,
        checksum, *_,
    ) = _FIELDS.unpack_from(header)  # fmt: skip
    if version != FORMAT_VERSION or header_bytes != HEADER_BYTES:
        raise LayoutMismatchError(f"a record of format version {version}; this reads version {FORMAT_VERSION}")
    if stored_bytes != len(payload):
        raise BlockCorruptError(f"the record's payload has {stored_bytes} bytes, {len(payload)} were given")
    if xxhash.xxh3_128_digest(payload) != checksum:
        raise BlockCorruptError("the record's payload is broken: its checksum is of other bytes")
    if rank >= size:
        raise BlockCorruptError(f"the record says that it is of rank {rank} of {size}")
    key = BlockKey(_namespace(fingerprint, epoch, salt, rank, size), digest)
    return Record(key, payload, codec.rstrip(b"\0").decode("ascii", "replace"), decoded_bytes)


@lru_cache(maxsize=1024)
def _namespace(fingerprint: bytes, epoch: bytes, salt: bytes, rank: int, size: int) -> Namespace:
    return Namespace(fingerprint, epoch, salt, Shard(rank, size))
