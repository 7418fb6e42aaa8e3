"""Hit rates by size of policies other than LRU: from replays at some sizes, and between them from what LRU does there.

At a size that was served a policy does better than LRU by so much, or worse; between two of them this is taken to
change evenly. Of a long trace small tiers serve a part, as in C. Waldspurger et al., "Cache Modeling and Optimization
using Miniature Simulations", USENIX ATC 2017; but a part of its conversations and not of its blocks: a prefix ends at
its first hole, and a prompt of which few blocks were left would show few of these.
"""

import math
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog import Policy
from tiered_kv.replay.curves import Curve, lru_curve
from tiered_kv.replay.simulated_chain import SimulatedChain, SimulatedEngine, TierPlan
from tiered_kv.settings.registry import resolve_policy
from tiered_kv.traces import Request, Trace, names_of
from tiered_kv.values.layout import PAGE_BYTES

MOST_BLOCKS: Final = 1 << 18
"""Different blocks that are looked at: of a trace with no more, all; of a longer one, about so many."""
_MOST_SERVED: Final = 1 << 23
"""Blocks that are asked for in all replays of one survey together: they bound how many sizes it looks at."""
_MOST_SIZES: Final = 48
_LEAST_SIZES: Final = 8
"""However long the trace is."""
_STEP: Final = 0.01
"""Between two sizes whose rates are no further apart no third one is tried."""
_POPULAR: Final = 1 / 20
"""A block that would be a larger part of a sample is in none: it would be most of it, and any policy keeps it."""
_LEAST_SLOTS: Final = 32
"""Of a small tier that stands for a larger one: with fewer it would say little."""
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)


class Survey:
    """A policy's curve in the making.

    Attributes:
        curve: As well as it is known: exactly at sizes that were served, if the trace has at most ``most_blocks``.
        most_sizes: At how many sizes `explore` serves it at most.
    """

    def __init__(
        self,
        trace: Trace,
        policy: str | type[Policy],
        lru: Curve,
        *,
        engine_blocks: int = 0,
        most_blocks: int = MOST_BLOCKS,
    ) -> None:
        """Know nothing yet but LRU's curve.

        Args:
            trace: The requests.
            policy: By name, or its class or the path of that.
            lru: The trace's own `lru_curve`, `Curve.below` the engine.
            engine_blocks: What the engine's own cache holds; blocks are stored when it is about to drop them.
            most_blocks: About so many different blocks are looked at, or all if there are no more.

        Raises:
            ConfigurationError: There is no such policy.
        """
        self._policy, self._lru = resolve_policy(policy), lru
        self._sample = _Sample(trace, most_blocks, engine_blocks)
        self._gains = {0: 0.0, len(lru.rates) - 1: 0.0}  # where there is room for everything, policies do not differ
        self.curve = Curve(policy if isinstance(policy, str) else policy.__name__, lru.rates)
        within = _MOST_SERVED // max(1, self._sample.trace.num_references)
        self.most_sizes = min(max(within, _LEAST_SIZES), _MOST_SIZES)

    def explore(self, on_size: Callable[[int], None] = lambda _: None) -> Curve:
        """Serve the sizes that tell most of the others, one after the other, until little is left to know.

        Args:
            on_size: Told at how many sizes it was served.
        """
        size = self._sample.least_size
        for done in range(1, self.most_sizes + 1):
            self.serve(size)
            on_size(done)
            if (size := _most_telling(self.curve.rates, np.array(sorted(self._gains)))) in self._gains:
                break
        return self.curve

    def serve(self, size: int) -> bool:
        """Replay the sample on a tier of so many blocks of the whole trace; return False if that was done before."""
        if size in self._gains:
            return False
        self._gains[size] = self._sample.gain(size, self._policy)
        sizes = sorted(self._gains)
        every = np.log1p(np.arange(len(self._lru.rates)))
        gain = np.interp(every, np.log1p(sizes), [self._gains[each] for each in sizes])
        rates = np.clip(self._lru.rates + gain, 0.0, self._lru.rates[-1])
        self.curve = Curve(self.curve.policy, rates)
        return True


def sessions_of(trace: Trace) -> Iterator[int]:
    """Yield the conversation of each request: what the trace says, else that of the longest prompt it continues."""
    known: dict[int, int] = {}
    seen: set[int] = set()
    for number, request in enumerate(trace.requests):
        if request.session is not None:
            yield request.session
            continue
        ids = request.ids.tolist()
        session = next((known[each] for each in reversed(ids) if each in known), number)
        # The last block may be partly filled: another one in the next turn. What others have too tells nothing.
        known.update((each, session) for each in ids[-2:] if each not in seen or known.get(each) == session)
        seen.update(ids)
        yield session


class _Sample:
    """Conversations of a trace that a hash chooses, without blocks that are a large part of all requests."""

    def __init__(self, trace: Trace, most_blocks: int, engine_blocks: int) -> None:
        ids = np.concatenate([each.ids for each in trace.requests])
        known, first, numbers, counts = np.unique(ids, return_index=True, return_inverse=True, return_counts=True)
        part = min(1.0, most_blocks / max(1, len(known)))
        is_popular = (counts > len(ids) * part * _POPULAR) & (part < 1.0)
        is_chosen = np.full(len(known), fill_value=True)
        if part < 1.0:
            lengths = [len(each.ids) for each in trace.requests]
            mixed = _mixed(np.repeat(np.fromiter(sessions_of(trace), np.int64), lengths)[first])
            least = mixed.min(where=~is_popular, initial=1.0)
            is_chosen = mixed < max(part, np.nextafter(least, 2.0))  # of few long ones at least one
        is_chosen &= ~is_popular
        self._num_popular = int(np.count_nonzero(is_popular))
        self._part = np.count_nonzero(is_chosen) / max(1, len(known) - self._num_popular)  # by chance not quite `part`
        masks = np.split(is_chosen[numbers.reshape(-1)], np.cumsum([len(each.ids) for each in trace.requests])[:-1])
        requests = [
            Request(each.at_s, each.ids[mask], 0)
            for each, mask in zip(trace.requests, masks, strict=True)
            if mask.any()
        ]
        self.trace = Trace(trace.name, requests, trace.block_size)
        self._engine_blocks = self._slots(engine_blocks) if engine_blocks else 0
        self._lru = lru_curve(self.trace).below(self._engine_blocks) if requests else Curve("lru", np.zeros(1))
        self._num_references = len(ids) * self._part
        least = self._num_popular + _LEAST_SLOTS / self._part if self._part else math.inf
        self.least_size = min(max(1, len(known) // 2), max(1, round(min(least, len(known)))))

    def gain(self, size: int, policy: str | type[Policy]) -> float:
        """Return by how much a policy's hit rate is above LRU's in a tier of so many blocks of the whole trace."""
        if not self.trace.num_blocks:
            return 0.0  # nothing but what is popular
        num_slots = self._slots(size)
        plan = TierPlan("cpu", num_slots * PAGE_BYTES, policy, is_memory=True)
        chain = SimulatedChain([plan], payload_bytes=PAGE_BYTES, num_blocks=self.trace.num_blocks)
        engine = SimulatedEngine(chain, self._engine_blocks, "evicted")
        for request in self.trace.requests:
            engine.serve(request.at_s, names_of(request.ids))
        better = chain.tiers[0].hits - self._lru.at(num_slots) * self.trace.num_references
        return better / max(1.0, self._num_references)

    def _slots(self, size: int) -> int:
        return max(1, round((size - self._num_popular) * self._part))


def _most_telling(rates: NDArray[np.float64], sizes: NDArray[np.int64]) -> int:
    """Return the size, between those looked at, of which least is known; or one of them, where enough is known.

    That is where two rates lie far apart, and their sizes too, as on a picture with sizes by their logarithm; in the
    middle of the step that is expected there.
    """
    steps = np.diff(rates[sizes])
    doubts = np.where((np.diff(sizes) > 1) & (abs(steps) > _STEP), abs(steps) * np.diff(np.log1p(sizes)), 0.0)
    widest = int(np.argmax(doubts))
    lower, upper = int(sizes[widest]), int(sizes[widest + 1])
    if not doubts[widest]:
        return lower
    sign = np.sign(steps[widest])
    between = np.maximum.accumulate(sign * rates[lower:upper])
    halfway = int(np.searchsorted(between, sign * (rates[lower] + rates[upper]) / 2))
    return min(lower + max(1, halfway), upper - 1)


def _mixed(numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a number from 0 to 1 for each number, the same for equal ones."""
    mixed = numbers.astype(np.uint64) * _ODD
    mixed = (mixed ^ (mixed >> np.uint64(29))) * _ODD
    return (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53
