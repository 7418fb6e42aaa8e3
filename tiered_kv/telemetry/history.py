"""The last hour of a cache, in a bounded memory: so that a page can show it whoever else was watching, or nobody."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import Final

from tiered_kv.results import CacheStatistics
from tiered_kv.telemetry.tallies import Lookups

EVERY_S: Final = 10.0
KEPT_S: Final = 3600.0
_MOST: Final = 1 + int(KEPT_S / EVERY_S)
_POINTS: Final = 60
Count = Callable[[], tuple[CacheStatistics, Lookups]]


@dataclass(frozen=True)
class Moment:
    """What was counted at one time, in seconds since 1970."""

    at: float
    statistics: CacheStatistics
    lookups: Lookups


@dataclass(frozen=True)
class Span:
    """What happened between two moments. Blocks; by tier or by reason where it says so.

    Attributes:
        start, stop: When, in seconds since 1970.
        requested, missed: Of loads.
        hits: By tier.
        missed_because: By reason.
        looked_up, not_found: Of lookups.
        not_found_because: By reason.
        stored, dropped: Of stores.
        dropped_because: By reason.
        evicted, tier_dropped: By tier.
        bytes_read, bytes_written: By tier.
    """

    start: float
    stop: float
    requested: int
    missed: int
    hits: Mapping[str, int]
    missed_because: Mapping[str, int]
    looked_up: int
    not_found: int
    not_found_because: Mapping[str, int]
    stored: int
    dropped: int
    dropped_because: Mapping[str, int]
    evicted: Mapping[str, int]
    tier_dropped: Mapping[str, int]
    bytes_read: Mapping[str, int]
    bytes_written: Mapping[str, int]

    @property
    def hit_rate(self) -> float | None:
        """Part of the blocks that lookups found and loads brought, of all that were asked for; None if nobody asked.

        An engine that looks first loads what is there alone: its lookups say what it had hoped for, and what its loads
        missed is missing as well. Of a load that asked for more than lookups had found, that much was known to miss.
        """
        if not self.looked_up:
            return 1 - self.missed / self.requested if self.requested else None
        found = self.looked_up - self.not_found
        not_brought = max(0, self.missed - max(0, self.requested - found))
        return (found - not_brought) / self.looked_up


class History:
    """Takes a moment every ten seconds, and keeps those of an hour. `begin` and `end` belong to the event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._moments: deque[Moment] = deque(maxlen=_MOST)
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, count: Count) -> None:
        """Take one now, and go on until `end`."""
        self._take(asyncio.get_running_loop(), count)

    def end(self) -> None:
        """Take no more."""
        if self._timer is not None:
            self._timer.cancel()

    def until(self, now: Moment) -> tuple[Span, list[Span]]:
        """Return the last hour as a whole, and in up to 60 parts, each ended by a moment that was taken, or ``now``.

        From any thread.
        """
        moments = [each for each in tuple(self._moments) if now.at - KEPT_S - EVERY_S <= each.at < now.at] + [now]
        step = KEPT_S / _POINTS
        ends = [moments[0]]
        for moment in moments[1:]:
            if moment.at - ends[-1].at >= min(step, max(EVERY_S / 2, (now.at - moments[0].at) / _POINTS)):
                ends.append(moment)
        if ends[-1] is not now:
            ends.append(now)
        return _between(moments[0], now), list(starmap(_between, pairwise(ends)))

    def _take(self, loop: asyncio.AbstractEventLoop, count: Count) -> None:
        self._timer = loop.call_later(EVERY_S, self._take, loop, count)
        self._moments.append(Moment(self._clock(), *count()))


def _between(a: Moment, b: Moment) -> Span:
    one, two = a.statistics, b.statistics
    before = {tier.tier: tier for tier in one.tiers}

    def by_tier(name: str) -> dict[str, int]:
        return {tier.tier: getattr(tier, name) - getattr(before[tier.tier], name) for tier in two.tiers}

    return Span(
        start=a.at,
        stop=b.at,
        requested=two.requested - one.requested,
        missed=two.missed - one.missed,
        hits=by_tier("hits"),
        missed_because=_more(one.missed_because, two.missed_because),
        looked_up=b.lookups.requested - a.lookups.requested,
        not_found=b.lookups.missed - a.lookups.missed,
        not_found_because=_more(a.lookups.missed_because, b.lookups.missed_because),
        stored=two.stored - one.stored,
        dropped=two.dropped - one.dropped,
        dropped_because=_more(one.dropped_because, two.dropped_because),
        evicted=by_tier("evicted"),
        tier_dropped=by_tier("dropped"),
        bytes_read=by_tier("bytes_read"),
        bytes_written=by_tier("bytes_written"),
    )


def _more(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return dict(Counter(after) - Counter(before))
