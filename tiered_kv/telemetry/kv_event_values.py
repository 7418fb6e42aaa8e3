"""What a publisher of KV events takes and gives: settings, a cache, descriptions of blocks, counts. Needs no extra."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tiered_kv.tiers.changes import Changes
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.integers import as_int
from tiered_kv.values.keys import BlockKeys, Namespace, TokenIds, token_array

Form = Literal["map", "array"]
"""How an event is written: with the names of its fields, or, for older routers, without."""


@dataclass(frozen=True)
class SocketSettings:
    """What `KVEventPublisher` takes for its sockets; it says what each is."""

    endpoint: str
    replay_endpoint: str | None
    topic: str
    data_parallel_rank: int | None
    form: Form
    high_water_mark: int
    buffer_steps: int
    buffer_bytes: int
    snapshot_every_s: float


class HasChanges(Protocol):
    """What is asked of a cache; a `TieredKV` has it."""

    def events(self) -> Changes:
        """Return the stream of what changes in its tiers."""

    def namespace(self, salt: str | bytes = b"", *, group: int = 0, rank: int = 0) -> Namespace:
        """Return the namespace that makes names of keys."""


@dataclass(frozen=True)
class KVEventStatistics:
    """What a publisher has done.

    Attributes:
        num_batches: Messages sent; the next sequence number.
        num_snapshots: How often everything was told anew, because a router joined or had lost what is not kept.
        num_overflows: How often the publisher fell behind the cache, and compared snapshots.
        num_undescribed: Blocks in some tier that routers are not told of, as nobody has said what they are.
        num_refused: Blocks whose description was dropped, as too many waited.
    """

    num_batches: int
    num_snapshots: int
    num_overflows: int
    num_undescribed: int
    num_refused: int


def tokens_of(keys: BlockKeys, token_ids: TokenIds) -> NDArray[np.uint32]:
    """Return the tokens of all full blocks, ``(n, block_size)``."""
    if not isinstance(keys, BlockKeys):
        raise ConfigurationError(f"keys must be BlockKeys, from hash_blocks(), got {type(keys).__name__}")
    tokens, size = token_array(token_ids), keys.block_size
    num = min(len(keys), len(tokens) // size)
    if len(tokens) < len(keys) * size and (num < len(keys) - 1 or len(tokens) % size == 0):
        raise ConfigurationError(f"{len(keys)} blocks of {size} tokens have {len(keys) * size}, got {len(tokens)}")
    return tokens[: num * size].reshape(num, size)


def own_hashes(keys: BlockKeys) -> NDArray[np.uint64]:
    """Return the last 8 bytes of each key, which routers know it by."""
    hashes = keys.words.view(">u8")[:, -1].astype(np.uint64)
    if not hashes.all():
        raise ConfigurationError("these keys were made of hashes shorter than 32 bytes: give hashes=, a u64 per block")
    return hashes


def given_hashes(hashes: Sequence[int] | NDArray[np.uint64], num: int) -> NDArray[np.uint64]:
    """Return a u64 for each of ``num`` blocks."""
    if len(hashes) < num:
        raise ConfigurationError(f"hashes must name every block: {num} blocks, {len(hashes)} hashes")
    try:
        return np.array([int(each) for each in hashes], dtype=np.uint64)
    except (OverflowError, TypeError, ValueError) as error:
        raise ConfigurationError(f"hashes must be ints in [0, 2**64): {error}") from error


def parent_of(keys: BlockKeys, parent: BlockKeys | int | None) -> int | None:
    """Return the hash of the block before the first, or None where the prompt begins."""
    if not keys.start:
        return None
    if isinstance(parent, BlockKeys):
        if not len(parent) or parent.start + len(parent) != keys.start:
            raise ConfigurationError(
                f"parent must end right before block {keys.start}; it has {len(parent)} blocks from {parent.start}"
            )
        return int(own_hashes(parent[-1:])[0])
    if parent is None:
        raise ConfigurationError(f"these keys begin with block {keys.start}: give parent=, the keys before them")
    return as_int("parent", parent)
