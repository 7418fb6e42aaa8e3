"""The ghost curve: the hit rate that a cache would have if it were smaller or larger, from a sample of its blocks.

Blocks are sampled by name, so all uses of a sampled block are seen; LRU caches that are smaller by the same factor then
hit as often as whole ones would. Source of the idea: Waldspurger et al., "Efficient MRC Construction with SHARDS",
FAST 2015, and "Cache Modeling and Optimization using Miniature Simulations", USENIX ATC 2017.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.keys import Names
from tiered_kv.telemetry.tallies import Histogram
from tiered_kv.tiers.ledger import Direction

SIZES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the caches that are imagined, as parts of the real one."""
MOST_SAMPLES: Final = 1 << 14
"""Blocks that the largest of them holds; about 3 MB for all."""
GAPS: Final = tuple(digit * 10.0**power for power in range(-1, 5) for digit in (1, 3))
_MOST_PENDING: Final = 1 << 14
_NOTED_AT_ONCE: Final = 1 << 10
_EVERYTHING: Final = 2**64 - 1
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class GhostCounts:
    """What became of the sampled blocks.

    Attributes:
        requested: Requests for sampled blocks.
        hits: Of these, by size, those that a cache of that size would have had.
        gaps_s: Seconds between uses of one block, of those that the largest of the caches would have had.
    """

    requested: int
    hits: Mapping[float, int]
    gaps_s: Histogram


class GhostCache:
    """Replays the requests for some blocks in LRU caches of several sizes.

    `use` belongs to the event loop, and only notes what was asked for; once in 1,024 blocks it samples
    them together, so that a call of 4 blocks takes 0.6 us, where sampling each took 2.1. `counts` may be called from
    any thread, and does the rest. Of the samples between two counts the latest 16,384 are remembered.
    """

    def __init__(
        self, num_blocks: int, *, most_samples: int = MOST_SAMPLES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Make one for a real cache of ``num_blocks``; of few blocks every one is sampled."""
        self.rate = min(1.0, most_samples / (num_blocks * max(SIZES)))
        self._most_samples = most_samples
        self._clock = clock
        self._threshold = np.uint64(min(int(self.rate * 2.0**64), _EVERYTHING))
        self._noted: deque[tuple[float, Direction, Names]] = deque()
        self._num_noted = 0
        self._pending: deque[tuple[float, Direction, NDArray[np.uint64]]] = deque(maxlen=_MOST_PENDING)
        self._caches = [(size, max(1, round(num_blocks * size * self.rate))) for size in SIZES]
        self._held: list[OrderedDict[int, float]] = [OrderedDict() for _ in SIZES]
        self._asked: OrderedDict[int, None] = OrderedDict()
        self._requested = 0
        self._hits = dict.fromkeys(SIZES, 0)
        self._gaps_s = Histogram(GAPS)
        self._lock = Lock()

    def use(self, direction: Direction, names: Names) -> None:
        """Note that blocks were asked for by a load, or given to a store.

        A store of what a load has asked for is no request of its own: the engine computed what it did not get.
        """
        self._noted.append((self._clock(), direction, names))
        self._num_noted += len(names)
        if self._num_noted >= _NOTED_AT_ONCE:
            self._num_noted = 0
            self._sample()

    def counts(self) -> GhostCounts:
        """Replay what was noted, and return what was counted so far."""
        with self._lock:
            self._sample()
            for _ in range(len(self._pending)):
                self._replay(*self._pending.popleft())
            gaps_s = self._gaps_s.copy()
            return GhostCounts(self._requested, dict(self._hits), gaps_s)

    def _sample(self) -> None:
        """Sample what was noted. On two threads at once each takes some: popping is one step of the interpreter."""
        noted = []
        while self._noted:
            try:
                noted.append(self._noted.popleft())
            except IndexError:  # the other thread has taken it
                break
        if not noted:
            return
        names = np.concatenate([names for _, _, names in noted])
        mixed = np.bitwise_xor.reduce(names, axis=1) * _ODD  # an engine's own hashes may fill one word alone
        is_sampled = mixed <= self._threshold
        start = 0
        for at, direction, some in noted:
            stop = start + len(some)
            sampled = mixed[start:stop][is_sampled[start:stop]]
            if len(sampled):
                self._pending.append((at, direction, sampled))
            start = stop

    def _replay(self, at: float, direction: Direction, sampled: NDArray[np.uint64]) -> None:
        for name in sampled.tolist():
            is_counted = True
            if direction == "load":
                self._asked[name] = None
                self._asked.move_to_end(name)
                if len(self._asked) > self._most_samples:
                    self._asked.popitem(last=False)
            elif name in self._asked:
                del self._asked[name]
                is_counted = False
            self._use(name, at, is_counted=is_counted)

    def _use(self, name: int, at: float, *, is_counted: bool) -> None:
        self._requested += is_counted
        last: float | None = None
        for (size, room), held in zip(self._caches, self._held, strict=True):
            last = held.pop(name, None)
            if last is not None:
                self._hits[size] += is_counted
            elif len(held) >= room:
                held.popitem(last=False)
            held[name] = at
        if last is not None and is_counted:
            self._gaps_s.saw(at - last)
