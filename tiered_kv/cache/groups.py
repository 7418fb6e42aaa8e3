"""Models with several KV groups: what each group needs of a prompt, and the longest length that satisfies all.

A full-attention group needs every block from the first one on; a sliding-window group only those that its window can
still see; one that attends within chunks those of the next token's chunk; of a recurrent state one block holds all
before its end. A length counts when each group has what it needs there: a hole outside every window costs nothing. So
all kinds are one: a run of blocks that ends at the length, and begins where it says.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.integers import Mask, as_int
from tiered_kv.values.keys import BlockKeys
from tiered_kv.values.results import LoadResult


@dataclass(frozen=True)
class GroupNeed:
    """One KV group's keys of a prompt, and what a model needs of them: made by `full`, `window`, `chunk` and `state`.

    Attributes:
        keys: Of the whole prompt, or of its rest: all groups' keys begin at the same token.
        num_blocks: How many of the last blocks are needed, or None for all of them.
        chunk_tokens: Of these no more than the last chunk of so many tokens, counted from the prompt's begin; or None.
    """

    keys: BlockKeys
    num_blocks: int | None = None
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.keys, BlockKeys):
            raise ConfigurationError(f"what a KV group needs is said by its BlockKeys, got {type(self.keys).__name__}")
        if self.num_blocks is not None:
            object.__setattr__(self, "num_blocks", as_int("a window, in blocks,", self.num_blocks, least=1))
        if self.chunk_tokens is not None:
            object.__setattr__(self, "chunk_tokens", as_int("a chunk, in tokens,", self.chunk_tokens, least=1))

    @property
    def is_whole(self) -> bool:
        """Whether every block is needed, from the first one on."""
        return self.num_blocks is None and self.chunk_tokens is None

    @property
    def needed(self) -> BlockKeys:
        """The keys that are needed for the prompt to go on behind all of them."""
        return self.at(len(self.keys) * self.keys.block_size)

    def until(self, num_tokens: int) -> "GroupNeed":
        """Return the need of the prompt's first ``num_tokens`` tokens, from the first key's start on.

        What `TieredKV.lookup_groups` found may be shorter than what was asked: load the needs until there.
        """
        num_blocks = as_int("num_tokens", num_tokens) // self.keys.block_size
        return replace(self, keys=self.keys[:num_blocks])

    def at(self, num_tokens: int) -> BlockKeys:
        """Return the keys that are needed for the prompt to go on at ``num_tokens`` from the first key's start on."""
        stop = num_tokens // self.keys.block_size
        return self.keys[int(self.firsts(np.array([stop]))[0]) : stop]

    def firsts(self, stops: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each of some numbers of keys the first that is needed where the prompt goes on behind them."""
        firsts = np.zeros_like(stops) if self.num_blocks is None else stops - self.num_blocks
        if self.chunk_tokens is not None:
            tokens = (self.keys.start + stops) * self.keys.block_size
            begun = tokens // self.chunk_tokens * self.chunk_tokens
            firsts = np.maximum(firsts, begun // self.keys.block_size - self.keys.start)
        return np.maximum(0, firsts)


def full(keys: BlockKeys) -> GroupNeed:
    """Say that a group attends to everything (MLA too)."""
    return GroupNeed(keys)


def window(keys: BlockKeys, num_tokens: int) -> GroupNeed:
    """Say that a group attends to the last ``num_tokens`` tokens: to the blocks in which they lie."""
    need = GroupNeed(keys)  # checks the keys
    num_blocks = -(-as_int("a window, in tokens,", num_tokens, least=1) // keys.block_size)
    return replace(need, num_blocks=num_blocks)


def chunk(keys: BlockKeys, num_tokens: int) -> GroupNeed:
    """Say that a group attends within chunks of ``num_tokens``, the first of which begins with the prompt (Llama 4)."""
    return GroupNeed(keys, chunk_tokens=as_int("a chunk, in tokens,", num_tokens, least=1))


def state(keys: BlockKeys) -> GroupNeed:
    """Say that a block holds all before its end: the state of a recurrent layer (Mamba, linear attention)."""
    return GroupNeed(keys, 1)


@dataclass(frozen=True)
class GroupsLookup:
    """The longest length at which every group has what it needs.

    Attributes:
        num_tokens: Behind the start of the keys; whole blocks of every group.
        needed: Per group, in the order asked, the keys to load there.
    """

    num_tokens: int
    needed: tuple[BlockKeys, ...]


@dataclass(frozen=True)
class GroupsLoad:
    """What a load of several groups brought.

    Attributes:
        num_tokens: The longest length at which every group has what it needs in place; 0 if there is none.
        results: Per group, in the order asked.
    """

    num_tokens: int
    results: tuple[LoadResult, ...]


def lengths_of(needs: Sequence[GroupNeed]) -> range:
    """Return the lengths in tokens, up to what all keys have in common, that are whole blocks of every group.

    Raises:
        ConfigurationError: No needs, a group twice, or keys that begin at different tokens or are of two salts.
    """
    if not isinstance(needs, list | tuple) or not needs or not all(isinstance(need, GroupNeed) for need in needs):
        raise ConfigurationError(
            "say what each KV group needs: [full(keys), window(other_keys, num_tokens), state(more_keys)], or chunk"
        )
    groups = [need.keys.group for need in needs]
    if len(set(groups)) < len(groups):
        raise ConfigurationError(f"each KV group is asked for once, got groups {groups}")
    starts = {need.keys.start * need.keys.block_size for need in needs}
    if len(starts) > 1 or len({need.keys.salt_id for need in needs}) > 1:
        raise ConfigurationError(
            f"all groups' keys are of one prompt: of one salt and from one token on; these start at {sorted(starts)}"
        )
    step = math.lcm(*(need.keys.block_size for need in needs))
    return range(0, min(len(need.keys) * need.keys.block_size for need in needs) + 1, step)


def find_longest(needs: Sequence[GroupNeed]) -> Generator[list[GroupNeed], list[Mask], int]:
    """Find the longest length in tokens at which every group has what it needs, asking three times at most.

    Yields needs, and is sent for each which of its keys are there, ``(len(keys),)``. Of a need of all blocks only
    those before the first hole count, so whoever answers may leave out what is behind it.

    Returns:
        The length, as the generator's value.
    """
    lengths = lengths_of(needs)
    length = lengths[-1]
    if wholes := [need.until(length) for need in needs if need.is_whole]:  # they cut the most
        length = longest_of(wholes, (yield wholes), lengths)
    ends = [need.until(length) for need in needs if not need.is_whole]
    if length and ends:
        there = yield [replace(need, keys=need.at(length)) for need in ends]
        if not all(mask.all() for mask in there):  # mostly they are: then nobody is asked for all others
            length = longest_of(ends, (yield ends), range(0, length + 1, lengths.step))
    return length


def longest_of(needs: Sequence[GroupNeed], there: Sequence[Mask], lengths: range) -> int:
    """Return the longest of some lengths in tokens at which every group has what it needs.

    Args:
        needs: Checked.
        there: For each, which of its keys are there.
        lengths: From 0 on, each whole blocks of every group.
    """
    tokens = np.asarray(lengths)
    is_served = np.ones(len(tokens), np.bool_)
    for need, mask in zip(needs, there, strict=True):
        behind_holes = np.where(mask, 0, np.arange(1, len(mask) + 1))
        first = np.maximum.accumulate(np.append([0], behind_holes))  # of the run of blocks that ends at each stop
        stops = tokens // need.keys.block_size
        is_served &= first[stops] <= need.firsts(stops)
    return int(tokens[is_served][-1])


def length_in_place(needs: Sequence[GroupNeed], wanted: Sequence[BlockKeys], results: Sequence[LoadResult]) -> int:
    """Find the longest length for which what was loaded is enough.

    Args:
        needs: As asked.
        wanted: Per group, the keys that were loaded.
        results: Per group, how many of them are in place.
    """
    there = list[Mask]()
    for need, keys, result in zip(needs, wanted, results, strict=True):
        first = keys.start - need.keys.start
        there.append(np.zeros(len(need.keys), np.bool_))
        there[-1][first : first + result.num_blocks] = True
    return longest_of(needs, there, lengths_of(needs))
