"""Where a prefix is: the longest prefix that the owned tiers can read, each block from the fastest that has it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.index import TierIndex
from tiered_kv.keys import Names

_CHUNK: Final = 1024  # names looked up at once, after the first: large enough that the fixed cost of a batch vanishes


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks ``start <= i < stop`` of the batch are read from tier ``tier``."""

    tier: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Located:
    """A readable prefix of ``num_blocks`` blocks, as runs that follow one another."""

    num_blocks: int
    runs: tuple[Run, ...]


def locate(indexes: Sequence[TierIndex], names: Names) -> Located:
    """Find the longest prefix in which every block is ready in some tier; ``indexes`` come fastest first.

    A tier is asked only for blocks that no faster one has, and nothing is asked past the chunk that ends the prefix;
    the first chunk is a single name, so that a plain miss is cheap. Changes nothing, recency included.
    """
    runs: list[Run] = []
    start, stop = 0, 1
    while start < len(names):
        chunk = names[start:stop]
        tiers = _tiers(indexes, chunk)
        absent = np.flatnonzero(tiers < 0)
        num_blocks = int(absent[0]) if len(absent) else len(chunk)
        _append_runs(runs, tiers[:num_blocks], start)
        start += num_blocks
        if len(absent):
            break
        stop = start + _CHUNK
    return Located(start, tuple(runs))


def _tiers(indexes: Sequence[TierIndex], names: Names) -> NDArray[np.int64]:
    """Return for each name the first tier that has it ready, or -1."""
    tiers = np.full(len(names), -1, dtype=np.int64)
    open_positions, open_names = np.arange(len(names)), names
    for tier, index in enumerate(indexes):
        ready = index.ready(open_names)
        tiers[open_positions[ready]] = tier
        if ready.all():
            break
        open_positions = open_positions[~ready]
        open_names = names.take(open_positions, axis=0)
    return tiers


def _append_runs(runs: list[Run], tiers: NDArray[np.int64], start: int) -> None:
    """Add the blocks from ``start`` on, one tier each, to ``runs``, merging neighbours of one tier."""
    if not len(tiers):
        return
    edges = [0, *(np.flatnonzero(tiers[1:] != tiers[:-1]) + 1).tolist(), len(tiers)]
    for left, right in pairwise(edges):
        tier, first = int(tiers[left]), start + left
        if runs and runs[-1].tier == tier:
            first = runs.pop().start
        runs.append(Run(tier, first, start + right))
