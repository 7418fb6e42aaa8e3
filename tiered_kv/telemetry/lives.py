"""The lives of a sample of blocks: what other sizes would hit, how soon blocks are used again, how old they get."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

from tiered_kv.catalog.books import Change
from tiered_kv.histogram import Histogram
from tiered_kv.keys import Names
from tiered_kv.telemetry.ghost import GAPS_S, MOST_SAMPLES, GhostCaches, GhostCounts
from tiered_kv.telemetry.samples import Sampler, What
from tiered_kv.tiers.ledger import Direction, Place

_WHAT: Final[Mapping[Change, What]] = {Change.ADDED: "added", Change.EVICTED: "evicted"}
_REPLAYED_AT_ONCE: Final = 64
_PAUSE_S: Final = 5e-5
_REPLAYED_ON_LOOP: Final = 1 << 10


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


class Lives:
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

    def changed(self, place: Place, change: Change, names: Names) -> None:
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
