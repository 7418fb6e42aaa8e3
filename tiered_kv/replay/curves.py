"""Hit rates at all sizes of a tier, from one pass over a trace: exact for LRU, from a sample for other policies.

A tier that evicts the least recently used block holds, at every size, the top of one and the same stack. So a block's
depth in that stack, when it is asked for, is the smallest size that has it: R. L. Mattson et al., "Evaluation
Techniques for Storage Hierarchies", IBM Systems Journal 1970. Depths are counted in a binary indexed tree: P. M.
Fenwick, "A New Data Structure for Cumulative Frequency Tables", 1994.

Other policies hold no such stack. Small tiers stand for them, which see the blocks that a hash chooses: C. Waldspurger
et al., "Cache Modeling and Optimization using Miniature Simulations", USENIX ATC 2017. What is taken from these is only
by how much a policy does better than LRU on the same sample: the errors of a sample are much the same for both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog import Policy
from tiered_kv.replay.chain import SimulatedChain, TierPlan
from tiered_kv.traces import Request, Trace, names_of

MOST_SAMPLES: Final = 1 << 14
"""Blocks of a trace that a sample has; of fewer, all are looked at."""
NUM_SIZES: Final = 10
"""Sizes at which a sample is served, from small to all blocks of the trace."""
_POPULAR: Final = 1 / 20
"""A block that would be a larger part of a sample is in none: it would be most of it, and any policy keeps it."""
_LEAST_SLOTS: Final = 32
"""Of a small tier that stands for a larger one: with fewer it would say little."""
_PAGE: Final = 4096
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)


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


def sampled_curve(
    trace: Trace,
    policy: str | type[Policy],
    lru: Curve,
    *,
    most_samples: int = MOST_SAMPLES,
    num_sizes: int = NUM_SIZES,
    on_request: Callable[[int], None] = lambda _: None,
) -> Curve:
    """Serve a sample of the blocks from small tiers of several sizes side by side.

    Args:
        trace: The requests.
        policy: By name, or its class.
        lru: The trace's own `lru_curve`.
        most_samples: About so many different blocks are looked at, or all if there are no more.
        num_sizes: At how many sizes.
        on_request: Told how many requests were served.

    Raises:
        ConfigurationError: There is no such policy.
    """
    num_blocks = trace.num_blocks
    rate = min(1.0, most_samples / max(1, num_blocks))
    sample = _sample_of(trace, rate)
    least = min(num_blocks, max(1, round(_LEAST_SLOTS / rate)))
    sizes = np.unique(np.geomspace(least, max(1, num_blocks), num_sizes).round().astype(np.int64))
    slots = np.maximum(1, (sizes * rate).round().astype(np.int64))
    chains = [_tier_of(each, policy) for each in slots.tolist()]
    for done, request in enumerate(sample.requests, start=1):
        if len(request.ids):
            names = names_of(request.ids)
            for chain in chains:
                chain.serve(request.at_s, names)
        on_request(done)
    num_references = max(1.0, trace.num_references * rate)  # what is not in the sample is found by any policy, or none
    of_lru = lru_curve(sample)
    better = [
        (chain.tiers[0].hits - of_lru.at(each) * sample.num_references) / num_references
        for chain, each in zip(chains, slots.tolist(), strict=True)
    ]
    all_sizes = np.log1p(np.arange(num_blocks + 1))
    gain = np.interp(all_sizes, np.log1p(np.append(0, sizes)), np.append(0.0, better))
    rates = np.clip(np.maximum.accumulate(lru.rates + gain), 0.0, lru.rates[-1])
    return Curve(_name_of(policy), rates)


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


def _sample_of(trace: Trace, rate: float) -> Trace:
    """Return the requests for those of the blocks that a hash chooses, at a rate below 1 without the popular ones."""
    if rate == 1.0:
        return trace
    ids, counts = np.unique(np.concatenate([each.ids for each in trace.requests]), return_counts=True)
    popular = ids[counts > trace.num_references * rate * _POPULAR]
    threshold = np.uint64(int(rate * 2.0**53))
    requests = []
    for each in trace.requests:
        mixed = each.ids.astype(np.uint64) * _ODD
        mixed = (mixed ^ (mixed >> np.uint64(29))) * _ODD
        chosen = mixed >> np.uint64(11) < threshold
        if len(popular):
            chosen &= ~np.isin(each.ids, popular)
        requests.append(Request(each.at_s, each.ids[chosen], 0))
    return Trace(trace.name, requests, trace.block_size)


def _tier_of(num_slots: int, policy: str | type[Policy]) -> SimulatedChain:
    plan = TierPlan("cpu", num_slots * _PAGE, policy, is_memory=True)
    return SimulatedChain([plan], payload_bytes=_PAGE, num_blocks=num_slots)


def _name_of(policy: str | type[Policy]) -> str:
    return policy if isinstance(policy, str) else policy.__name__
