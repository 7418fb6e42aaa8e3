"""One block record on every medium: a 4 KiB header, then the payload. ``docs/format.md`` has it for other readers.

The header names the block in full and carries a checksum of the payload, or a `Seal`'s tag over both, so that whoever
reads a record can tell a right block from another one, an old one, a broken one and a forged one without trusting where
it was found. A key here is the block's on the medium: of a tier that has keys, a hidden one (`NameCipher.hide_key`).
"""

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, cast, get_args

import xxhash

from tiered_kv.media.backend import Block, Outcome
from tiered_kv.values.errors import BlockCorruptError, ConfigurationError, LayoutMismatchError
from tiered_kv.values.keys import BlockKey, Namespace, Shard
from tiered_kv.values.layout import FORMAT_VERSION

if TYPE_CHECKING:  # importing it takes an extra
    from tiered_kv.media.seal import Seal

Cipher = Literal["aes-256-gcm", "aes-256-gmac"]
KEY_BYTES: Final = 32
HEADER_BYTES = 4096
MAGIC = b"TIEREDKV"
SEALED_VERSION: Final = 3
"""Of the format of a record that is sealed: who knows plain ones alone must not take one for KV. Version 2 was sealed
too, and named its block in the clear; nothing reads it any more."""

SIGNED_BYTES = 512
"""The part of the header in use; its last 8 bytes are its own xxh3-64. The rest of the 4 KiB is zero."""
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = SIGNED_BYTES - _CHECKSUM.size
_VERSIONS: Final = frozenset({FORMAT_VERSION, SEALED_VERSION})
_ZEROS = bytes(16)
_PADDING = bytes(HEADER_BYTES)
_PART_BYTES: Final = 64 << 10
_SHORT_BYTES: Final = 256 << 10
"""Of a payload that is hashed in such parts, see `_checksum`: 10 us."""
_CIPHERS: Final = {name.encode().ljust(16, b"\0"): cast("Cipher", name) for name in get_args(Cipher)}


class _Fields(NamedTuple):
    """What the used part of a header says, in its order."""

    magic: bytes
    version: int
    header_bytes: int
    stored_bytes: int
    decoded_bytes: int
    fingerprint: bytes
    epoch: bytes
    salt: bytes
    hash: bytes
    rank: int
    size: int
    codec: bytes
    checksum: bytes  # xxh3-128 of the payload; zeros where it is sealed, and the following four zeros where it is not
    key_id: bytes
    nonce: bytes
    tag: bytes
    cipher: bytes

    @property
    def key(self) -> BlockKey:
        return BlockKey(_namespace(self.fingerprint, self.epoch, self.salt, self.rank, self.size), self.hash)

    @property
    def is_sealed(self) -> bool:
        return self.version == SEALED_VERSION


_KINDS: Final = ("8s", "I", "I", "Q", "Q", *("32s",) * 4, "I", "I", *("16s",) * 6)
"""Of these fields, as `struct` writes them."""
_FIELDS = struct.Struct("<" + "".join(_KINDS))


def _place_of(name: str) -> slice:
    """Return which bytes of a header a field takes."""
    at = _Fields._fields.index(name)
    start, stop = (struct.calcsize("<" + "".join(_KINDS[:end])) for end in (at, at + 1))
    return slice(start, stop)


_HASH, _SUM, _TAG = map(_place_of, ("hash", "checksum", "tag"))


class _Plain:
    """The used part of headers of one namespace that are not sealed: all but the hash and the checksums is the same."""

    def __init__(self, space: Namespace, payload_bytes: int, decoded_bytes: int, codec: str) -> None:
        fields = _FIELDS.pack(
            MAGIC, FORMAT_VERSION, HEADER_BYTES, payload_bytes, decoded_bytes, space.fingerprint, space.epoch,
            space.salt, b"", space.shard.rank, space.shard.size, codec.encode(), *[_ZEROS] * 5,
        )  # fmt: skip
        fields = fields.ljust(_CHECKSUM_AT, b"\0")
        self._parts = fields[: _HASH.start], fields[_HASH.stop : _SUM.start], fields[_SUM.stop :]

    def header(self, digest: bytes, checksum: bytes) -> bytes:
        """Return that of the block of this hash, whose payload has this checksum."""
        front, middle, end = self._parts
        signed = b"".join((front, digest, middle, checksum, end))
        return signed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(signed))


_plain = lru_cache(maxsize=1024)(_Plain)


def _checksum(payload: memoryview) -> bytes:
    """Return the xxh3-128 of a payload. Of a short one the GIL is kept meanwhile: xxhash lets go of it for long parts.

    Where many threads hash, to get it back takes one longer than a short payload does: 10 ms for 27 of 128 KiB in each
    of 8 threads, on two cores that a scheduler and an event loop share, and 1 ms if it is kept.
    """
    if not _PART_BYTES < len(payload) <= _SHORT_BYTES:
        return xxhash.xxh3_128_digest(payload)
    hasher = xxhash.xxh3_128()
    for at in range(0, len(payload), _PART_BYTES):
        hasher.update(payload[at : at + _PART_BYTES])
    return hasher.digest()


def encode(
    key: BlockKey,
    block: Block,
    *,
    codec: str = "none",
    decoded_bytes: int = 0,
    seal: "Seal | None" = None,
    payload: memoryview | None = None,
) -> None:
    """Write the header of ``block`` for its payload. About 2 us, 10 us if it is sealed, and the payload is read once.

    Args:
        key: Names the block.
        block: Whose payload is there already.
        codec: What made the payload of the engine's bytes.
        decoded_bytes: How many those were; 0 is for as many as the payload has.
        seal: Seals the record.
        payload: Where the payload is, if it is not in the block yet: encrypted, it goes there. Only for a seal that
            encrypts.
    """
    header, space, num_bytes = block.header, key.namespace, len(block.payload)
    header[:] = _PADDING
    if seal is None:
        plain = _plain(space, num_bytes, decoded_bytes or num_bytes, codec)
        header[:SIGNED_BYTES] = plain.header(key.hash, _checksum(block.payload))
        return
    nonce, source = seal.nonce(), block.payload if payload is None else payload
    _FIELDS.pack_into(
        header, 0, MAGIC, SEALED_VERSION, HEADER_BYTES, num_bytes, decoded_bytes or num_bytes, space.fingerprint,
        space.epoch, space.salt, key.hash, space.shard.rank, space.shard.size, codec.encode(), _ZEROS, seal.key_id,
        nonce, _ZEROS, seal.cipher.encode(),
    )  # fmt: skip
    header[_TAG] = seal.close(space.salt, nonce, bytes(header[:_CHECKSUM_AT]), source, block.payload)
    _CHECKSUM.pack_into(header, _CHECKSUM_AT, xxhash.xxh3_64_intdigest(header[:_CHECKSUM_AT]))


def verify(key: BlockKey, block: Block, *, codec: str = "none", seal: "Seal | None" = None) -> Outcome:
    """Say what was read into ``block``: a HIT only if every field and every byte is right.

    What is encrypted is decrypted in place. Unless it is a HIT, the payload is garbage then.

    Returns:
        ``HIT``; ``MISS`` for a whole record of another key, namespace, codec or format version, or for none at all
        (zeros), and for one that is sealed by a key that ``seal`` lacks, or not sealed although there is a ``seal``;
        ``CORRUPT`` for one that is broken.
    """
    return examine(key, block, codec=codec, seal=seal)[0]


def examine(key: BlockKey, block: Block, *, codec: str, seal: "Seal | None") -> tuple[Outcome, str]:
    """Return what `verify` does, and why a record is refused for its seal; empty where that is not the reason."""
    header, space = block.header, key.namespace
    if seal is None and codec == "none":  # as a rule it is what `encode` makes, but for the payload's checksum
        num_bytes, used = len(block.payload), bytes(header[:SIGNED_BYTES])
        if used == _plain(space, num_bytes, num_bytes, codec).header(key.hash, used[_SUM]):
            return Outcome.HIT if _checksum(block.payload) == used[_SUM] else Outcome.CORRUPT, ""
    if (fields := _parse(header)) is None:
        is_none = not any(header[:SIGNED_BYTES])
        return Outcome.MISS if is_none else Outcome.CORRUPT, ""
    named = fields[5:11]  # fingerprint to size
    wanted = space.fingerprint, space.epoch, space.salt, key.hash, space.shard.rank, space.shard.size
    if named != wanted or fields.version not in _VERSIONS or fields.codec != codec.encode().ljust(16, b"\0"):
        return Outcome.MISS, ""
    if fields.header_bytes != HEADER_BYTES or fields.stored_bytes != len(block.payload):
        return Outcome.CORRUPT, ""
    if refused := _refusal(fields, seal):
        return Outcome.MISS, refused
    return Outcome.HIT if _is_right(fields, header, block.payload, seal) else Outcome.CORRUPT, ""


def examine_any(name: bytes, block: Block, *, codec: str, seal: "Seal | None") -> tuple[Outcome, str]:
    """Do as `examine` does, where only the block's name is known: its hash XORed with its namespace's mask.

    Another block's record is a MISS.
    """
    key = key_in(block.header)
    if key is None or key.namespace.names_of([key.hash]).tobytes() != name:
        return (Outcome.MISS if key is not None or not any(block.header[:SIGNED_BYTES]) else Outcome.CORRUPT), ""
    return examine(key, block, codec=codec, seal=seal)


def key_in(header: memoryview) -> BlockKey | None:
    """Return the key that a record's header names; None if it is no whole header of this format.

    Nothing is said about the payload: `verify` is for that.
    """
    fields = _parse(header)
    if fields is None or fields.version not in _VERSIONS or not fields.rank < fields.size:
        return None
    return fields.key


def payload_bytes_in(header: memoryview) -> int:
    """Return how long the payload is, as it lies there, of a record whose header names a key, see `key_in`."""
    return _Fields(*_FIELDS.unpack_from(header)).stored_bytes


def _parse(header: memoryview) -> _Fields | None:
    """Return the fields of a header that is whole."""
    if xxhash.xxh3_64_intdigest(header[:_CHECKSUM_AT]) != _CHECKSUM.unpack_from(header, _CHECKSUM_AT)[0]:
        return None
    fields = _Fields._make(_FIELDS.unpack_from(header))
    return fields if fields.magic == MAGIC else None


def _refusal(fields: _Fields, seal: "Seal | None") -> str:
    """Say why a record's seal, or that it has none, keeps it from being read; empty if nothing does."""
    if not fields.is_sealed:
        return "not sealed" if seal else ""
    if seal is None:
        return f"sealed by key {fields.key_id.hex()}, and there are no keys"
    if not seal.knows(fields.key_id):
        return f"sealed by key {fields.key_id.hex()}, which is not among the keys"
    return ""


def _is_right(fields: _Fields, header: memoryview, payload: memoryview, seal: "Seal | None") -> bool:
    """Compare every byte of the payload with the checksum, or header and payload with the tag."""
    if not fields.is_sealed or seal is None:
        return _checksum(payload) == fields.checksum
    if (cipher := _CIPHERS.get(fields.cipher)) is None:
        return False
    signed = bytearray(header[:_CHECKSUM_AT])
    signed[_TAG] = _ZEROS
    return seal.open(fields.key_id, cipher, fields.salt, fields.nonce, bytes(signed), fields.tag, payload)


@dataclass(frozen=True)
class Record:
    """What a whole record says.

    Attributes:
        key: Names the block; equal to a `Namespace`'s key of it. A record does not know its position. Where names are
            hidden it takes the seal to tell: without one this is what stands in the header.
        payload: The block's bytes, a view of what was parsed: in the order of its `KVLayout`, or what ``codec`` made of
            those.
        codec: ``"none"`` where they are as the engine has them.
        decoded_bytes: How many those are.
    """

    key: BlockKey
    payload: memoryview
    codec: str
    decoded_bytes: int


def parse_record(data: bytes | bytearray | memoryview, *, seal: "Seal | None" = None) -> Record:
    """Read a record, wherever it was found, and check every byte of it. Needs no cache.

    Args:
        data: Its bytes, from the first of the header to the last of the payload.
        seal: Tells the block's name, and opens what is sealed: ``Encryption(...).make_seal()``. The payload is a copy
            then. If it has keys to seal, what is not sealed is refused.

    Raises:
        BlockCorruptError: It is none, or broken, or cut.
        LayoutMismatchError: It is whole, and of another version of the format.
        ConfigurationError: It is sealed by a key that ``seal`` does not have, or not sealed although there is a seal.
    """
    view = memoryview(data).cast("B")
    header, payload = view[:SIGNED_BYTES], view[HEADER_BYTES:]
    if len(view) < HEADER_BYTES or header[: len(MAGIC)] != MAGIC:
        raise BlockCorruptError(f"{len(view)} bytes are no record: they do not begin with its header")
    if (fields := _parse(header)) is None:
        raise BlockCorruptError("the record's header is broken: its checksum is of other bytes")
    if fields.version not in _VERSIONS or fields.header_bytes != HEADER_BYTES:
        known = f"{FORMAT_VERSION} and {SEALED_VERSION}"
        raise LayoutMismatchError(f"a record of format version {fields.version}; this reads versions {known}")
    if fields.stored_bytes != len(payload):
        raise BlockCorruptError(f"the record's payload has {fields.stored_bytes} bytes, {len(payload)} were given")
    if fields.rank >= fields.size:
        raise BlockCorruptError(f"the record says that it is of rank {fields.rank} of {fields.size}")
    opener = seal if seal is not None and seal.seals else None
    if refused := _refusal(fields, opener):
        raise ConfigurationError(f"the record is {refused}")
    if fields.is_sealed:
        payload = memoryview(bytearray(payload))
    if not _is_right(fields, header, payload, opener):
        raise BlockCorruptError("the record's payload is broken: its checksum or tag is of other bytes")
    key = fields.key if seal is None else seal.names.show_key(fields.key)
    return Record(key, payload, fields.codec.rstrip(b"\0").decode("ascii", "replace"), fields.decoded_bytes)


@lru_cache(maxsize=1024)
def _namespace(fingerprint: bytes, epoch: bytes, salt: bytes, rank: int, size: int) -> Namespace:
    return Namespace(fingerprint, epoch, salt, Shard(rank, size))
