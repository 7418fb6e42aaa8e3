"""LRU's hit rates at all sizes of a tier, from one pass over a trace: exactly, if a request uses all of its prefix.

A real one ends where a block was evicted: for a tier of a few prompts' blocks these rates are too good.

A tier that evicts the least recently used block holds, at every size, the top of one and the same stack. So a block's
depth in that stack, when it is asked for, is the smallest size that has it: R. L. Mattson et al., "Evaluation
Techniques for Storage Hierarchies", IBM Systems Journal 1970. Depths are counted in a binary indexed tree: P. M.
Fenwick, "A New Data Structure for Cumulative Frequency Tables", 1994.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiered_kv.traces import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Hit rates by size.

    Attributes:
        policy: Of eviction.
        rates: By the number of blocks that a tier holds, from 0 on: blocks of prefixes found, of all asked for.
    """

    policy: str
    rates: NDArray[np.float64]

    def at(self, num_blocks: int) -> float:
        """Return the hit rate of a tier of so many blocks."""
        return float(self.rates[min(num_blocks, len(self.rates) - 1)])

    def below(self, engine_blocks: int) -> "Curve":
        """Return what a tier adds below an engine's own cache of so many blocks, if both use LRU and share no block."""
        first = min(engine_blocks, len(self.rates) - 1)
        both = np.concatenate((self.rates[first:], np.full(first, self.rates[-1])))
        return Curve(self.policy, both - self.rates[first])


def lru_curve(trace: Trace, *, on_request: Callable[[int], None] = lambda _: None) -> Curve:
    """Count hits at every size at once. Takes 8 bytes a reference, and some microseconds.

    Args:
        trace: The requests.
        on_request: Told how many requests were looked at.
    """
    num_blocks, num_references = trace.num_blocks, trace.num_references
    numbers = _numbered(trace)
    last = np.zeros(num_blocks, np.int64)
    hits = np.zeros(num_blocks + 1, np.int64)  # by depth, from 1 on
    marks = _Marks(num_references)
    num_marked = end = 0
    for done, request in enumerate(trace.requests, start=1):
        blocks = numbers[end : end + len(request.ids)]
        before = last[blocks]
        new = np.flatnonzero(before == 0)
        num_known = int(new[0]) if len(new) else len(blocks)
        depths = num_marked - marks.up_to(before[:num_known]) + 1
        np.add.at(hits, np.maximum.accumulate(depths), 1)  # a block behind a hole is none that is found
        # A load uses what was there, its head last; the store after it brings what is new.
        places = end + np.concatenate((np.arange(num_known, 0, -1), np.arange(len(blocks), num_known, -1)))
        before = before[before > 0]
        marks.add(before, -1)
        marks.add(places, 1)
        last[blocks] = places
        num_marked += len(blocks) - len(before)
        end += len(blocks)
        on_request(done)
    return Curve("lru", np.cumsum(hits) / max(1, num_references))


class _Marks:
    """Places from 1 to ``size`` that are marked, and how many of them up to a place."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tree = np.zeros(size + 1, np.int64)

    def add(self, places: NDArray[np.int64], value: int) -> None:
        """Add to each of these places."""
        while len(places):
            np.add.at(self._tree, places, value)
            places = places + (places & -places)
            places = places[places <= self._size]

    def up_to(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Add up what is at each place and before it."""
        total = np.zeros(len(places), np.int64)
        while places.any():
            total += self._tree[places]
            places = places & (places - 1)
        return total


def _numbered(trace: Trace) -> NDArray[np.int64]:
    """Return the blocks of all requests in order, as numbers from 0 on."""
    ids: Sequence[NDArray[np.int64]] = [each.ids for each in trace.requests]
    return np.unique(np.concatenate(ids), return_inverse=True)[1].reshape(-1)
