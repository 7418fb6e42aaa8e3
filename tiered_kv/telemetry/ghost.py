"""The ghost curve: the hit rate that a cache would have if it were smaller or larger, from a sample of its blocks.

Of a sample of blocks, LRU caches that are smaller by the same factor hit as often as whole ones would of all. Source of
the idea: Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015, and "Cache Modeling and Optimization
using Miniature Simulations", USENIX ATC 2017.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, Literal

from tiered_kv.histogram import Histogram

SIZES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the caches that are imagined, as parts of the real one."""
MOST_SAMPLES: Final = 1 << 14
"""Blocks that the largest of them holds; 10 MB at most with all that is known of them."""
GAPS_S: Final = tuple(digit * 10.0**power for power in range(-1, 6) for digit in (1, 3))


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


class GhostCaches:
    """Replays the requests for sampled blocks in LRU caches of several sizes at once.

    What a smaller cache holds, a larger one holds as well; so there is one list of blocks, the last used first, cut
    where each size ends. Within a part a block has no number, so that a use moves one block for each cut it passes.
    """

    def __init__(self, num_blocks: int, most_samples: int = MOST_SAMPLES) -> None:
        """Imagine caches for a real one of ``num_blocks``."""
        self.rate = min(1.0, most_samples / (num_blocks * max(SIZES)))
        rooms = [max(1, round(num_blocks * size * self.rate)) for size in SIZES]
        self._rooms = [stop - start for start, stop in pairwise([0, *rooms])]
        self._parts: list[OrderedDict[int, float]] = [OrderedDict() for _ in SIZES]
        self._most_asked = most_samples
        self._asked: OrderedDict[int, None] = OrderedDict()
        self._requested = 0
        self._hits = [0] * len(SIZES)
        self._gaps_s = Histogram(GAPS_S)

    def counts(self) -> GhostCounts:
        """Return what was counted so far."""
        hits = dict(zip(SIZES, accumulate(self._hits), strict=True))
        return GhostCounts(self._requested, hits, self._gaps_s.copy())

    def last_use(self, block: int) -> float | None:
        """Return when a block was used last, as far as that is remembered."""
        return next((part[block] for part in self._parts if block in part), None)

    def use(self, at: float, direction: Literal["load", "store"], blocks: Sequence[int]) -> None:
        """Replay a use of sampled blocks.

        A store of what a load has asked for is no request of its own: the engine computed what it did not get.
        """
        for block in blocks:
            is_counted = True
            if direction == "load":
                self._asked[block] = None
                self._asked.move_to_end(block)
                if len(self._asked) > self._most_asked:
                    self._asked.popitem(last=False)
            elif block in self._asked:
                del self._asked[block]
                is_counted = False
            self._use(block, at, is_counted=is_counted)

    def _use(self, block: int, at: float, *, is_counted: bool) -> None:
        self._requested += is_counted
        found = len(self._parts)
        for number, part in enumerate(self._parts):
            last = part.pop(block, None)
            if last is not None:
                self._hits[number] += is_counted
                if is_counted:
                    self._gaps_s.saw(at - last)
                found = number
                break
        moved, used = block, at
        for number, part in enumerate(self._parts):  # each part gives the next its oldest block
            part[moved] = used
            if number == found or len(part) <= self._rooms[number]:
                break
            moved, used = part.popitem(last=False)
