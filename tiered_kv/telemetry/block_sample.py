"""The lives of a sample of blocks: what caches of other sizes would hit, how soon blocks come again, how old they get.

Of every block this would cost too much. Blocks are sampled by their names, so all that befalls a sampled block is seen;
of a cache of few blocks all are sampled. `Sampler` notes what happens and picks the sampled blocks, `GhostCaches`
replays their uses in caches of other sizes, and `SampledLives`, which a cache has, keeps both.

On a sample, LRU caches that are smaller by the same factor hit as often as whole ones do on all blocks: Waldspurger et
al., "Efficient MRC Construction with SHARDS", FAST 2015, and "Cache Modeling and Optimization using Miniature
Simulations", USENIX ATC 2017.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from threading import Lock
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.books import Change
from tiered_kv.tiers.fates import Direction, Histogram, IndexPlace
from tiered_kv.values.keys import Names

SIZES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the caches that are imagined, as parts of the real one."""
MOST_SAMPLES: Final = 1 << 14
"""Blocks that the largest of them holds; 10 MB at most with all that is known of them."""
GAPS_S: Final = tuple(digit * 10.0**power for power in range(-1, 6) for digit in (1, 3))
_NOTED_AT_ONCE: Final = 1 << 10
_MOST_PENDING: Final = 1 << 16
_EVERYTHING: Final = 2**64 - 1
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
What = Literal["load", "store", "added", "evicted", "gone"]
"""Asked for by a load, given to a store; readable in a tier, evicted from it, gone from it for another reason."""
Noted = tuple[float, What, str]
"""When, what, and in which tier."""
_WHAT: Final[Mapping[Change, What]] = {Change.ADDED: "added", Change.EVICTED: "evicted"}
_REPLAYED_AT_ONCE: Final = 64
_PAUSE_S: Final = 5e-5
_REPLAYED_ON_LOOP: Final = 1 << 10


@dataclass(frozen=True)
class GhostCounts:
    """What became of the sampled blocks.

    Attributes:
        requested: Requests for sampled blocks.
        rate: Which part of all blocks is sampled.
        hits: Of these, by size, those that a cache of that size would have had.
        gaps_s: Seconds between uses of one block, of those that the largest of the caches would have had.
    """

    requested: int
    rate: float
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
        return GhostCounts(self._requested, self.rate, hits, self._gaps_s.copy())

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


@dataclass(frozen=True)
class _Batch:
    """The sampled blocks of some calls, and where those of each call end. Of other calls nothing is kept."""

    noted: Sequence[Noted]
    stops: NDArray[np.int64]
    blocks: NDArray[np.uint64]


class Sampler:
    """Notes what befell blocks, and picks the sampled ones.

    `note` belongs to the event loop, and looks at no block: once in 1,024 they are picked together, in some 20 us, so
    that a call takes 0.3 us whatever its blocks. `take` may be called from any thread. Between two calls of `take` the
    latest 65,536 sampled blocks are remembered.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Make one that samples a part of the blocks, 0 to 1."""
        self._clock = clock
        self._is_all = rate >= 1.0
        self._threshold = np.uint64(min(int(rate * 2.0**64), _EVERYTHING))
        self._noted: deque[tuple[Noted, Names]] = deque()
        self._num_noted = 0
        self._lock = Lock()  # held for some 20 us
        self._pending: deque[_Batch] = deque()
        self._num_pending = 0

    def note(self, what: What, names: Names, tier: str = "") -> None:
        """Note what befalls blocks now. Done for each load and store: what it calls is what it costs."""
        self._noted.append(((self._clock(), what, tier), names))
        self._num_noted += 1 + len(names)
        if self._num_noted >= _NOTED_AT_ONCE:
            self._num_noted = 0
            with self._lock:
                self._pick()

    def take(self, most: int = _MOST_PENDING) -> list[tuple[Noted, list[int]]]:
        """Return what was noted of sampled blocks since the last call, in order; a block is a number here.

        Once there are ``most`` blocks, the rest is left for the next call.
        """
        batches, num_blocks = [], 0
        with self._lock:
            self._pick()
            while self._pending and num_blocks < most:
                batches.append(self._pending.popleft())
                num_blocks += len(batches[-1].blocks)
            self._num_pending -= num_blocks
        return [
            (noted, part.tolist())
            for batch in batches
            for noted, part in zip(batch.noted, np.split(batch.blocks, batch.stops[:-1]), strict=True)
        ]

    def _pick(self) -> None:
        noted = [self._noted.popleft() for _ in range(len(self._noted))]  # the loop may append more meanwhile
        if not noted:
            return
        names = np.concatenate([names for _, names in noted])
        mixed = names[:, 0] ^ names[:, 1]  # an engine's own hashes may fill one word alone
        mixed ^= names[:, 2]
        mixed ^= names[:, 3]
        mixed *= _ODD
        places = np.arange(len(mixed)) if self._is_all else np.flatnonzero(mixed <= self._threshold)
        if not len(places):
            return
        stops = np.searchsorted(places, np.cumsum([len(names) for _, names in noted]))
        sampled = np.flatnonzero(np.diff(stops, prepend=0))
        self._pending.append(_Batch([noted[n][0] for n in sampled], stops[sampled], mixed[places]))
        self._num_pending += len(places)
        while self._num_pending > _MOST_PENDING and len(self._pending) > 1:
            self._num_pending -= len(self._pending.popleft().blocks)


@dataclass(frozen=True)
class LifeCounts:
    """What became of the sampled blocks.

    Attributes:
        ghost: In caches of other sizes.
        ages_s: By tier, how long evicted blocks had been in it.
        idle_s: By tier, how long they had not been used.
    """

    ghost: GhostCounts
    ages_s: Mapping[str, Histogram]
    idle_s: Mapping[str, Histogram]


class SampledLives:
    """Follows a sample of blocks. `use` and `changed` belong to the event loop; `counts` is for any thread.

    Attributes:
        use: Notes that blocks were asked for by a load, or given to a store.
    """

    def __init__(
        self, num_blocks: int, *, most_samples: int = MOST_SAMPLES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Follow the blocks of a cache whose largest tier holds ``num_blocks``."""
        self._ghost = GhostCaches(num_blocks, most_samples)
        self._sampler = Sampler(self._ghost.rate, clock)
        self.use: Callable[[Direction, Names], None] = self._sampler.note
        self._most_samples = most_samples
        self._since: OrderedDict[tuple[str, int], float] = OrderedDict()
        self._ages_s: dict[str, Histogram] = {}
        self._idle_s: dict[str, Histogram] = {}
        self._lock = Lock()
        self._counted = LifeCounts(self._ghost.counts(), {}, {})

    @property
    def rate(self) -> float:
        """Which part of the blocks is in the sample."""
        return self._ghost.rate

    def changed(self, place: IndexPlace, change: Change, names: Names) -> None:
        """Note that blocks came to a tier, or left it."""
        self._sampler.note(_WHAT.get(change, "gone"), names, place.tier)

    def counts(self, *, on_loop: bool = False) -> LifeCounts:
        """Replay what was noted, and return what was counted so far.

        Args:
            on_loop: This is the event loop's thread: replay a little, and wait for no other thread that replays.
                Other threads replay all, and let the loop run all the while: a thread at work would keep it waiting
                for 5 ms whenever it wants to go on.
        """
        if not self._lock.acquire(blocking=not on_loop):
            return self._counted
        try:
            num_replayed = 0
            for noted, blocks in self._sampler.take(_REPLAYED_ON_LOOP) if on_loop else self._sampler.take():
                self._replay(*noted, blocks)
                num_replayed += len(blocks)
                if not on_loop and num_replayed >= _REPLAYED_AT_ONCE:
                    num_replayed = 0
                    time.sleep(_PAUSE_S)
            self._counted = LifeCounts(self._ghost.counts(), _copied(self._ages_s), _copied(self._idle_s))
            return self._counted
        finally:
            self._lock.release()

    def _replay(self, at: float, what: What, tier: str, blocks: Sequence[int]) -> None:
        if what == "added":
            for block in blocks:
                self._since[tier, block] = at
                if len(self._since) > self._most_samples:
                    self._since.popitem(last=False)
        elif what == "evicted" or what == "gone":  # noqa: PLR1714 - mypy narrows by these, not by a set
            for block in blocks:
                since = self._since.pop((tier, block), None)
                if since is not None and what == "evicted":
                    self._evicted(at, tier, since, self._ghost.last_use(block))
        else:
            self._ghost.use(at, what, blocks)

    def _evicted(self, at: float, tier: str, since: float, last_use: float | None) -> None:
        if tier not in self._ages_s:
            self._ages_s[tier], self._idle_s[tier] = Histogram(GAPS_S), Histogram(GAPS_S)
        self._ages_s[tier].saw(at - since)
        self._idle_s[tier].saw(at - max(since, last_use or since))


def _copied(histograms: Mapping[str, Histogram]) -> dict[str, Histogram]:
    return {tier: histogram.copy() for tier, histogram in histograms.items()}
