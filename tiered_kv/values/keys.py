"""Names of KV blocks: the chained hash of a block's whole prefix, and the namespace that it lives in.

A block is named by (fingerprint, epoch, salt, chained hash, shard). The engine handles only `BlockKeys`, the hashes and
the salt; the cache adds the rest as a `Namespace`. One batch of blocks always shares one namespace, so what differs per
block is 32 bytes, and what is shared is hashed once per batch. `hash_blocks` makes hashes of token ids, the same in
every process and on every host.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Final, overload

import numpy as np
from numpy.typing import NDArray

from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.integers import as_int, as_ints

Names = NDArray[np.uint64]
"""A batch of 32-byte names, shape ``(n, 4)``, C-contiguous."""

DIGEST_BYTES = 32
NO_SALT = b"\0" * DIGEST_BYTES
_LAST_START: Final = 1 << 62
_LARGEST_BLOCK: Final = (1 << 32) - 1
"""Positions are int64, those of the keys that follow too."""
TokenIds = Sequence[int] | NDArray[np.integer[Any]]
_ROOT = b"tiered_kv block hash v1"
_TAIL = b"tiered_kv tail hash v1"
_MAX_TOKEN_ID = 2**32


@dataclass(frozen=True)
class ModelIdentity:
    """Which weights computed the KV. Two models of equal shapes must never meet, so ``weights`` is required.

    Attributes:
        name: The model's name, e.g. ``"llama-3-8b"``.
        weights: Anything that changes when the weights do: a digest of the checkpoint, a revision, an RL step.
            It is the cache's first epoch; `TieredKV.advance_epoch` names the next one.
        extra: What else changes KV bytes without changing their shapes (RoPE scaling, quantisation of the weights, a
            LoRA merged into them). Part of the fingerprint.
    """

    name: str
    weights: str
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for field_name in ("name", "weights"):
            value = getattr(self, field_name)
            if not isinstance(value, str) or not value:
                says = {"name": "the model's name", "weights": "a checkpoint's revision, or a digest of its files"}
                raise ConfigurationError(
                    f"ModelIdentity.{field_name} must be a non-empty str, got {value!r}: give {says[field_name]}"
                )
            as_utf8(f"ModelIdentity.{field_name}", value)
        pairs = self.extra if isinstance(self.extra, tuple) else (None,)
        if not all(isinstance(pair, tuple) and [type(part) for part in pair] == [str, str] for pair in pairs):
            raise ConfigurationError(
                f"ModelIdentity.extra must be a tuple of (str, str) pairs, got {self.extra!r:.200}"
            )
        for part in chain.from_iterable(self.extra):
            as_utf8("ModelIdentity.extra", part)


@dataclass(frozen=True)
class Shard:
    """Which part of a block's heads a process holds: ``Shard()`` is all of them, else ``rank`` of ``size``.

    MLA latents are the same on every rank: there each is ``Shard(rank, size, replicated=True)``. In the tiers that the
    ranks share they share one copy, and each block is written by one of them. A process that stands for all ranks, a
    scheduler, takes `every` of them: for it a block is there when it is there for each rank.
    """

    rank: int = 0
    size: int = 1
    replicated: bool = False

    def __post_init__(self) -> None:
        for name, least in (("rank", 0), ("size", 1)):
            object.__setattr__(self, name, as_int(f"a shard's {name}", getattr(self, name), least=least))
        if self.rank >= self.size:
            raise ConfigurationError(f"a shard's rank must lie in [0, size), got rank {self.rank} of size {self.size}")

    @classmethod
    def every(cls, size: int, *, copies: int = 1) -> "tuple[Shard, ...]":
        """Return the shards of all ``size`` ranks; or of ``copies`` workers each, which hold the same: MLA latents.

        Of n workers with the same latents it is ``Shard.every(1, copies=n)``: `Shard()` n times.
        """
        size, copies = as_int("the number of ranks", size, least=1), as_int("the number of copies", copies, least=1)
        return tuple(cls(worker // copies, size) for worker in range(size * copies))

    @property
    def part(self) -> "Shard":
        """The part of the heads as blocks are named by: replicas hold the whole, whatever their rank."""
        return Shard() if self.replicated else self

    def writes(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Say which blocks of a prompt this rank writes to tiers that all share: of replicas, each writes its turn."""
        if not self.replicated:
            return np.ones(len(positions), np.bool_)
        return np.equal(positions % self.size, self.rank)

    def __str__(self) -> str:
        return "replicated" if self.part.size == 1 else f"{self.rank}of{self.size}"


@dataclass(frozen=True)
class Namespace:
    """What all keys of one batch share. All digests are 32 bytes.

    Attributes:
        fingerprint: Model, dtype, layout, block size, KV group, codec and record format.
        epoch: Digest of the weights' identity (`epoch_digest`).
        salt: Digest of the tenant's salt (`salt_digest`).
        shard: Which part of the heads; a `Shard.part`.
    """

    fingerprint: bytes
    epoch: bytes
    salt: bytes = NO_SALT
    shard: Shard = field(default_factory=Shard)

    @cached_property
    def mask(self) -> NDArray[np.uint64]:
        """A digest of this namespace, ``(4,)``: XORed onto block hashes, it makes names that no other namespace has."""
        shard = f"{self.shard.rank}/{self.shard.size}".encode()
        digest = hashlib.sha256(b"tiered_kv namespace v1" + self.fingerprint + self.epoch + self.salt + shard).digest()
        return np.frombuffer(digest, np.uint64)

    @cached_property
    def path(self) -> str:
        """The external folder of these keys, derived from digests alone: ``fingerprint/epoch/shard/salt``."""
        return f"{self.fingerprint.hex()}/{self.epoch.hex()[:32]}/{self.shard}/{self.salt.hex()[:32]}"

    def names(self, keys: "BlockKeys") -> Names:
        """Return the names of ``keys`` here, ``(n, 4)``. Nothing is hashed: a new epoch is another mask, no more."""
        return keys.words ^ self.mask

    def first_name(self, keys: "BlockKeys") -> bytes:
        """Return the name of the first of some keys here, without those of the others."""
        first = int.from_bytes(keys.digests[:DIGEST_BYTES], "little") ^ self._mask_as_int
        return first.to_bytes(DIGEST_BYTES, "little")

    def names_of(self, hashes: Sequence[bytes]) -> Names:
        """Return the names of blocks of these hashes here, ``(n, 4)``."""
        return np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, 4) ^ self.mask

    def keys(self, keys: "BlockKeys") -> "list[BlockKey]":
        """Return one `BlockKey` per block, for a backend."""
        return [BlockKey(self, digest, position) for position, digest in enumerate(keys, keys.start)]

    def keys_of(self, names: Names, positions: NDArray[np.int64]) -> "list[BlockKey]":
        """Return the keys that ``names`` were made from in this namespace."""
        flat, each = (names ^ self.mask).tobytes(), DIGEST_BYTES
        return [
            BlockKey(self, flat[i * each : (i + 1) * each], position) for i, position in enumerate(positions.tolist())
        ]

    @cached_property
    def _mask_as_int(self) -> int:
        return int.from_bytes(self.mask.tobytes(), "little")

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:  # without what is cached: hash() of bytes differs between processes
        return Namespace, (self.fingerprint, self.epoch, self.salt, self.shard)

    def __repr__(self) -> str:
        return f"Namespace({self.path})"

    @cached_property
    def _hash(self) -> int:  # hashed once: a backend's dict hashes every key of a batch
        return hash((self.fingerprint, self.epoch, self.salt, self.shard))


class BlockKey:
    """The whole name of one block, as a backend sees it. Hashable, picklable, equal only where every field of it is.

    Attributes:
        namespace: What it shares with the other keys of its batch.
        hash: The chained hash, 32 bytes.
        position: Which block of its prompt it is, for media that pack neighbours. No part of the name.
    """

    __slots__ = ("hash", "namespace", "position")

    def __init__(self, namespace: Namespace, hash: bytes, position: int = 0) -> None:  # noqa: A002 - what it is
        self.namespace = namespace
        self.hash = hash
        self.position = position

    @property
    def path(self) -> str:
        """A relative path made of digests: ``fingerprint/epoch/shard/salt/hash``. Nothing from outside is in it."""
        return f"{self.namespace.path}/{self.hash.hex()}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockKey) and self.hash == other.hash and self.namespace == other.namespace

    def __hash__(self) -> int:
        return hash((self.hash, self.namespace))

    def __reduce__(self) -> tuple[object, ...]:
        return BlockKey, (self.namespace, self.hash, self.position)

    def __repr__(self) -> str:
        return f"BlockKey({self.path}, position={self.position})"


class BlockKeys(Sequence[bytes]):
    """An immutable sequence of 32-byte block hashes that knows where in a prompt it starts.

    Made by `hash_blocks` from token ids, or by `from_hashes` from an engine's own hashes. A slice keeps its position,
    so that ``keys[n:]`` is still the tail of the same prompt.

    Attributes:
        digests: All hashes, one after another.
        start: Position of the first block in the prompt, in blocks.
        block_size: Tokens per block.
        group: The KV group (`KVLayout.groups`) these blocks belong to.
        salt_id: Digest of the salt they were made with; keys of another salt never meet these.
    """

    __slots__ = ("_words", "block_size", "digests", "group", "salt_id", "start")

    def __init__(
        self, digests: bytes, *, block_size: int, start: int = 0, group: int = 0, salt_id: bytes = NO_SALT
    ) -> None:
        if not isinstance(digests, bytes) or len(digests) % DIGEST_BYTES:
            raise ConfigurationError(
                "BlockKeys are made by hash_blocks(token_ids, block_size=16), or of an engine's own hashes by "
                f"BlockKeys.from_hashes(); 32 bytes for each block may be given too, not {_described(digests)}"
            )
        self.digests = digests
        self._words: NDArray[np.uint64] | None = None
        self.start = as_int("start", start)
        if self.start > _LAST_START:
            raise ConfigurationError(f"start must be {_LAST_START} at most, got {start}")
        self.block_size = as_int("block_size", block_size, least=1)
        self.group = as_int("a KV group's number", group)
        if not isinstance(salt_id, bytes) or len(salt_id) != DIGEST_BYTES:
            raise ConfigurationError(f"salt_id must be the 32 bytes of salt_digest(salt), not {_described(salt_id)}")
        self.salt_id = salt_id

    @classmethod
    def from_hashes(
        cls, hashes: Iterable[bytes], *, block_size: int, start: int = 0, group: int = 0, salt: str | bytes = b""
    ) -> "BlockKeys":
        """Take an engine's own chained hashes, 8 to 32 bytes each; shorter ones are padded with zeros.

        They must be chained over the whole prefix, and name the LoRA and images that went into it. Python's ``hash()``
        is not stable across processes: keys made from it find nothing after a restart.

        Raises:
            ConfigurationError: A hash is no bytes object of 8 to 32 bytes.
        """
        if not isinstance(hashes, list):
            if not isinstance(hashes, Iterable) or isinstance(hashes, str | bytes):
                raise ConfigurationError(f"hashes must be a list, 8 to 32 bytes each, got {_described(hashes)}")
            hashes = list(hashes)
        if {*map(type, hashes)} == {bytes} and {*map(len, hashes)} == {DIGEST_BYTES}:  # as most engines' are
            return cls(b"".join(hashes), block_size=block_size, start=start, group=group, salt_id=salt_digest(salt))
        parts = []
        for position, digest in enumerate(hashes):
            if not isinstance(digest, bytes) or not 8 <= len(digest) <= DIGEST_BYTES:
                advice = ": bytes.fromhex() reads hexadecimal digits" if isinstance(digest, str) else ""
                raise ConfigurationError(
                    f"hash {position} must be 8 to 32 bytes, got {type(digest).__name__} {digest!r:.80}{advice}"
                )
            parts.append(digest.ljust(DIGEST_BYTES, b"\0"))
        return cls(b"".join(parts), block_size=block_size, start=start, group=group, salt_id=salt_digest(salt))

    @property
    def runs(self) -> "tuple[BlockKeys, ...]":
        """These keys, which are of one prompt; see `KeyRuns`."""
        return (self,)

    @property
    def words(self) -> NDArray[np.uint64]:
        """The hashes as ``(n, 4)`` uint64, read-only."""
        if self._words is None:
            self._words = np.frombuffer(self.digests, np.uint64).reshape(-1, 4)
        return self._words

    def __len__(self) -> int:
        return len(self.digests) // DIGEST_BYTES

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> "BlockKeys": ...
    def __getitem__(self, at: int | slice) -> "bytes | BlockKeys":
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if step != 1:
                raise ConfigurationError(f"BlockKeys are runs of a prompt: slice them with step 1, not {step}")
            stop = max(start, stop)
            digests = self.digests[start * DIGEST_BYTES : stop * DIGEST_BYTES]
            return _rebuild_keys(digests, self.block_size, self.start + start, self.group, self.salt_id)
        try:
            index = range(len(self))[at]
        except TypeError:
            raise TypeError(f"BlockKeys take an int or a slice in [], not {type(at).__name__}") from None
        except IndexError:
            raise IndexError(f"block {at} of {len(self)}: BlockKeys count blocks, not tokens") from None
        return self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def __add__(self, other: "BlockKeys") -> "BlockKeys":
        """Return these keys and those of the blocks that follow them in the same prompt.

        Raises:
            ConfigurationError: ``other`` starts elsewhere, or is of another salt, group or block size.
        """
        if not isinstance(other, BlockKeys):
            return NotImplemented
        if self.salt_id != other.salt_id:
            raise ConfigurationError("keys of different salts cannot be joined")
        if (self.block_size, self.group) != (other.block_size, other.group):
            raise ConfigurationError(
                f"only keys of one block size and KV group can be joined: here {self.block_size} tokens a block and "
                f"group {self.group}, there {other.block_size} and {other.group}"
            )
        if other.start != (stop := self.start + len(self)):
            raise ConfigurationError(
                f"keys are joined in the order of their prompt: here block {stop} comes next, the others begin with "
                f"block {other.start}; keys of another prompt go into a call of their own"
            )
        return _rebuild_keys(self.digests + other.digests, self.block_size, self.start, self.group, self.salt_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockKeys) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_keys, (self.digests, self.block_size, self.start, self.group, self.salt_id)

    def __repr__(self) -> str:
        first = self.digests[:4].hex()
        where = f"{len(self)} blocks from {self.start}, block_size={self.block_size}, group={self.group}"
        return f"BlockKeys({where}, first={first}..)"

    def _identity(self) -> tuple[bytes, int, int, int, bytes]:
        return self.digests, self.block_size, self.start, self.group, self.salt_id


class KeyRuns(Sequence[bytes]):
    """Blocks of several prompts, one run after another: what one planned store holds. Each run has its own salt.

    Attributes:
        runs: Of one prompt each.
        block_size: Tokens per block, of all.
        group: The KV group, of all.
    """

    __slots__ = ("_digests", "block_size", "group", "runs")

    def __init__(self, runs: Sequence[BlockKeys]) -> None:
        """Put runs together.

        Raises:
            ConfigurationError: There are none, or of several block sizes or KV groups.
        """
        for each in runs:
            if not isinstance(each, BlockKeys):
                raise ConfigurationError(f"keys of several prompts are BlockKeys each, got {type(each).__name__}")
        kinds = {(each.block_size, each.group) for each in runs}
        if not kinds:
            raise ConfigurationError("no keys: a store of several prompts has at least one")
        if len(kinds) > 1:
            said = " and ".join(f"{size} tokens a block in group {group}" for size, group in sorted(kinds))
            raise ConfigurationError(f"only keys of one block size and KV group are stored together, got {said}")
        self.runs = tuple(runs)
        ((self.block_size, self.group),) = kinds
        self._digests: list[bytes] | None = None

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if self._digests is None:
            self._digests = [digest for run in self.runs for digest in run]
        return self._digests[at]


StoredKeys = BlockKeys | KeyRuns
"""What a planned store is about: blocks of one prompt, or of several."""


def stored_keys(keys: BlockKeys | Sequence[BlockKeys]) -> StoredKeys:
    """Return what a caller wants to store; raise `ConfigurationError` unless it is keys of one prompt or of several."""
    if isinstance(keys, list | tuple):
        return keys[0] if len(keys) == 1 and isinstance(keys[0], BlockKeys) else KeyRuns(keys)
    if not isinstance(keys, BlockKeys):
        raise ConfigurationError(
            "keys must be BlockKeys, from hash_blocks() or BlockKeys.from_hashes(), or a list of them, got "
            f"{type(keys).__name__}"
        )
    return keys


def rows_of(names: Names) -> list[bytes]:
    """Return each name, or hash, of a batch as bytes: at a twentieth of what iterating over the array takes."""
    rows: list[bytes] = np.ascontiguousarray(names).view("V32").ravel().tolist()
    return rows


def salt_digest(salt: str | bytes) -> bytes:
    """Digest a tenant's salt; the empty salt is 32 zero bytes."""
    if not isinstance(salt, str | bytes):
        raise ConfigurationError(f"salt must be str or bytes, got {type(salt).__name__}")
    if not salt:
        return NO_SALT
    raw = as_utf8("salt", salt) if isinstance(salt, str) else salt
    return hashlib.sha256(b"tiered_kv salt v1" + raw).digest()


def epoch_digest(weights: str) -> bytes:
    """Digest the identity of weights. No counter: restarts and other hosts agree by naming the same weights."""
    if not isinstance(weights, str) or not weights:
        raise ConfigurationError(f"weights must be a non-empty str, got {weights!r:.80}")
    return hashlib.sha256(b"tiered_kv epoch v1" + as_utf8("weights", weights)).digest()


def as_utf8(name: str, text: str) -> bytes:
    """Encode text; `ConfigurationError` of what JSON and the environment can give and UTF-8 has not. It shows none."""
    with suppress(UnicodeEncodeError):
        return text.encode()
    raise ConfigurationError(f"{name} must be text that UTF-8 can hold, and has half a character in it")


def _rebuild_keys(digests: bytes, block_size: int, start: int, group: int, salt_id: bytes) -> BlockKeys:
    """Make keys of what has been checked: a part of others, or what was pickled."""
    keys = object.__new__(BlockKeys)
    keys.digests, keys._words = digests, None
    keys.start, keys.block_size, keys.group, keys.salt_id = start, block_size, group, salt_id
    return keys


def _described(value: object) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__


def token_array(token_ids: TokenIds) -> NDArray[np.uint32]:
    """Return token ids as little-endian uint32, in memory of its own.

    Raises:
        ConfigurationError: They are no flat sequence of ints, or one is out of range.
    """
    if isinstance(token_ids, str):
        raise ConfigurationError("token_ids must be ints, got str: a tokenizer makes tokens of text")
    if isinstance(token_ids, list) and token_ids and type(token_ids[0]) is int:
        with suppress(OverflowError, TypeError):  # `as_ints` finds the words for it
            return np.frombuffer(array("I", token_ids), "=u4").astype("<u4", copy=False)  # thrice as fast
    tokens = as_ints("token_ids", token_ids)
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= _MAX_TOKEN_ID):
        raise ConfigurationError(f"token ids must lie in [0, 2**32), got {int(tokens.min())} to {int(tokens.max())}")
    return tokens.astype("<u4")


def hash_blocks(
    token_ids: TokenIds,
    *,
    block_size: int,
    salt: str | bytes = b"",
    parent: BlockKeys | None = None,
    extra: Sequence[bytes | None] | None = None,
    group: int = 0,
) -> BlockKeys:
    """Hash every *full* block of a prompt, each chained over all before it: the same in every process, on every host.

    Args:
        token_ids: ``(num_tokens,)`` non-negative ints below ``2**32``; a trailing partial block is left out.
        block_size: Tokens per block.
        salt: Keeps tenants apart: equal prompts of different salts share nothing. Secret salts stay secret: only
            digests leave this function.
        parent: Keys of the prefix that ``token_ids`` continue (all of it full blocks); salt and group must agree.
        extra: Per full block, bytes that name what else went into it (a LoRA's id, an image's digest), or None.
        group: The KV group.

    Returns:
        One key per full block; ``start`` is one after ``parent``'s last.

    Raises:
        ConfigurationError: A token id out of range, too few ``extra`` or no bytes, a negative group, a parent of
            another salt, group or block size, or an empty slice as parent, which does not say what came before it.

    Source: chained prefix hashing as in vLLM's "Automatic Prefix Caching"; the encoding is our own and versioned.
    """
    block_size, group = as_int("block_size", block_size, least=1), as_int("a KV group's number", group)
    tokens = token_array(token_ids)
    num_blocks = len(tokens) // block_size
    salt_id = salt_digest(salt)
    if extra is not None and len(extra) < num_blocks:
        raise ConfigurationError(f"extra must name every full block: {num_blocks} blocks, {len(extra)} entries")
    start, previous = _chain_from(parent, salt_id, group, block_size)
    body, stride = tokens[: num_blocks * block_size].tobytes(), block_size * 4
    digests = []
    for block in range(num_blocks):
        hashed = previous + body[block * stride : (block + 1) * stride]
        if extra is not None and (named := extra[block]) is not None:
            hashed += _hashed_beside(f"extra[{block}]", named)
        previous = hashlib.sha256(hashed).digest()  # one call: a prompt of 32k tokens has thousands of blocks
        digests.append(previous)
    return BlockKeys(b"".join(digests), block_size=block_size, start=start, group=group, salt_id=salt_id)


def hash_tail(token_ids: TokenIds, *, parent: BlockKeys, extra: bytes | None = None) -> BlockKeys:
    """Name the partial block that `hash_blocks` leaves out, for a sequence that is swapped out whole.

    The name is chained over all before it and says how many tokens there are, and it never meets a full block's: the
    same block, once full, has another. ``keys + hash_tail(rest, parent=keys)`` are the keys of the whole sequence.

    Args:
        token_ids: The tokens after the last full block, fewer than a block has.
        parent: Keys of all full blocks before, with what went into them; of a sequence shorter than a block the empty
            keys that `hash_blocks` returns. Salt, group and block size are its own.
        extra: What else went into the partial block, as for `hash_blocks`.

    Returns:
        One key, or none if there are no tokens.

    Raises:
        ConfigurationError: A full block or more, a token id out of range, or an empty slice as parent.
    """
    tokens = token_array(token_ids)
    _check_parent(parent)
    if len(tokens) >= parent.block_size:
        raise ConfigurationError(
            f"a tail has fewer than {parent.block_size} tokens, got {len(tokens)}: name full blocks"
        )
    start, previous = _chain_from(parent, parent.salt_id, parent.group, parent.block_size)
    digest = hashlib.sha256(_TAIL + previous + len(tokens).to_bytes(4, "little") + tokens.tobytes())
    if extra is not None:
        digest.update(_hashed_beside("extra", extra))
    name = digest.digest() if len(tokens) else b""
    return BlockKeys(name, block_size=parent.block_size, start=start, group=parent.group, salt_id=parent.salt_id)


def _hashed_beside(name: str, extra: object) -> bytes:
    """Return what is hashed of what went into a block beside its tokens."""
    if not isinstance(extra, bytes):
        raise ConfigurationError(f"{name} must be bytes or None, got {extra!r:.80}")
    return b"extra" + len(extra).to_bytes(8, "little") + extra


def _chain_from(parent: BlockKeys | None, salt_id: bytes, group: int, block_size: int) -> tuple[int, bytes]:
    """Return the position after ``parent`` and the digest to chain the next block to."""
    if block_size > _LARGEST_BLOCK:
        raise ConfigurationError(f"block_size must be {_LARGEST_BLOCK} at most, got {block_size}")
    root = hashlib.sha256(_ROOT + salt_id + block_size.to_bytes(4, "little")).digest()
    if parent is None:
        return 0, root
    _check_parent(parent)
    if (parent.salt_id, parent.group, parent.block_size) != (salt_id, group, block_size):
        raise ConfigurationError("the parent's salt, KV group or block size differs from this call's")
    start = parent.start + len(parent)
    if start and not len(parent):  # hashed from the root, these tokens would pass for the beginning of a prompt
        raise ConfigurationError(
            f"the parent is empty but starts at block {start}: give one that has the block before it"
        )
    return start, parent[-1] if len(parent) else root


def _check_parent(parent: object) -> None:
    if not isinstance(parent, BlockKeys):
        raise ConfigurationError(f"parent must be the BlockKeys of what comes before, got {type(parent).__name__}")
