"""Conversations that come back: their blocks are brought to memory before the next turn is due.

Whoever knows when that is says so. Else it is learned from all conversations, by a `SessionForecast`.

When conversations come back, learned from all of them as they come.

For each span of time since the last turn it is counted how many that had waited so long came back within it. That is
E. L. Kaplan and P. Meier's estimate, "Nonparametric Estimation from Incomplete Observations", JASA 1958, and needs no
end of a conversation to be told.
"""

import asyncio
import heapq
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from tiered_kv.cache.block_cache import BlockCache
from tiered_kv.transfers.prefetch import PrefetchHandle
from tiered_kv.values.errors import ClosedError, ConfigurationError
from tiered_kv.values.keys import BlockKeys
from tiered_kv.values.results import TierStatistics

MOST_SESSIONS: Final = 1 << 16
_FIRST_S: Final = 0.25
_STEPS_PER_OCTAVE: Final = 4
_NUM_SPANS: Final = 80
"""Spans of time since the last turn, each 1.2 times as long as the one before: to about two days."""
_MEMORY: Final = 2_000.0
"""Turns after which what was learned counts half."""
_EARLY: Final = 0.9
"""A turn that is known to come is prepared after this part of the time."""
_AGAIN: Final = 0.05
"""What could not be brought is looked at again after this part of the time since the last turn."""


class SessionForecast:
    """How likely conversations come back, and when to look at each again. Bounded; looks at no clock."""

    def __init__(self, *, most_sessions: int = MOST_SESSIONS) -> None:
        """Make one that has seen nothing; of more conversations than ``most_sessions`` the oldest are forgotten."""
        self._most = most_sessions
        self._at_risk = [0.0] * _NUM_SPANS
        self._came = [0.0] * _NUM_SPANS
        self._waiting: OrderedDict[Hashable, _Waiting] = OrderedDict()
        self._looks: list[tuple[float, int, Hashable]] = []
        self._num_turns = 0

    def __len__(self) -> int:
        """Count the conversations that are waited for."""
        return len(self._waiting)

    def turn(self, session: Hashable, at_s: float, back_in_s: float | None = None) -> None:
        """A turn came: learn from how long it took, and wait for the next, which may be known to come after so long."""
        self._num_turns += 1
        if (waiting := self._waiting.pop(session, None)) is not None:
            self._pass(waiting, at_s)
            self._came[waiting.span] += 1.0
        if self._num_turns % int(_MEMORY) == 0:
            self._at_risk = [each / 2 for each in self._at_risk]
            self._came = [each / 2 for each in self._came]
        self._waiting[session] = waiting = _Waiting(self._num_turns, at_s, back_in_s)
        self._at_risk[0] += 1.0
        self._look_later(session, waiting)
        if back_in_s is not None:
            heapq.heappush(self._looks, (at_s + _EARLY * back_in_s, waiting.number, session))
        while len(self._waiting) > self._most:
            self._waiting.popitem(last=False)
        if len(self._looks) > 4 * self._most:  # of turns that are over
            self._looks = [each for each in self._looks if self._is_current(each)]
            heapq.heapify(self._looks)

    def close(self, session: Hashable) -> None:
        """It will not come back."""
        self._waiting.pop(session, None)

    def due(self, now_s: float) -> list[Hashable]:
        """Return the conversations that are to be looked at now: those that have entered another span of time."""
        found: dict[Hashable, None] = {}
        while self._looks and self._looks[0][0] <= now_s:
            look = heapq.heappop(self._looks)
            if not self._is_current(look):
                continue
            waiting = self._waiting[look[2]]
            span = waiting.span
            self._pass(waiting, now_s)
            if waiting.span > span:
                self._look_later(look[2], waiting)
            found[look[2]] = None
        return list(found)

    def look_again(self, session: Hashable, now_s: float) -> None:
        """Have `due` return it once more before long: there was no room for it now."""
        if (waiting := self._waiting.get(session)) is not None:
            heapq.heappush(self._looks, (now_s + _AGAIN * (now_s - waiting.since_s), waiting.number, session))

    def chance(self, session: Hashable, now_s: float, within_s: float) -> float:
        """Return how likely it comes back within so many seconds, as it has not yet."""
        waiting = self._waiting.get(session)
        if waiting is None:
            return 0.0
        if waiting.back_in_s is not None:
            age_s = now_s - waiting.since_s
            return float(_EARLY * waiting.back_in_s <= age_s <= waiting.back_in_s / _EARLY <= age_s + within_s)
        stays = 1.0
        for span in range(_span_of(now_s - waiting.since_s), _span_of(now_s - waiting.since_s + within_s) + 1):
            part = _part_of(span, now_s - waiting.since_s, within_s)
            if self._at_risk[span] > 0:
                stays *= max(0.0, 1.0 - part * min(1.0, self._came[span] / self._at_risk[span]))
        return 1.0 - stays

    def _pass(self, waiting: "_Waiting", now_s: float) -> None:
        """Count that it waits, in each span of time that it has entered."""
        span = _span_of(now_s - waiting.since_s)
        while waiting.span < span:
            waiting.span += 1
            self._at_risk[waiting.span] += 1.0

    def _look_later(self, session: Hashable, waiting: "_Waiting") -> None:
        if waiting.span + 1 < _NUM_SPANS:
            heapq.heappush(self._looks, (waiting.since_s + _start_of(waiting.span + 1), waiting.number, session))

    def _is_current(self, look: tuple[float, int, Hashable]) -> bool:
        waiting = self._waiting.get(look[2])
        return waiting is not None and waiting.number == look[1]


@dataclass(slots=True)
class _Waiting:
    """A conversation that may come back; ``number`` tells its turn from all others."""

    number: int
    since_s: float
    back_in_s: float | None = None
    span: int = 0


def _span_of(seconds: float) -> int:
    if seconds < _FIRST_S:
        return 0
    seconds = min(seconds, _start_of(_NUM_SPANS))
    return min(_NUM_SPANS - 1, 1 + int(_STEPS_PER_OCTAVE * math.log2(seconds / _FIRST_S)))


def _start_of(span: int) -> float:
    return 0.0 if span == 0 else _FIRST_S * 2.0 ** ((span - 1) / _STEPS_PER_OCTAVE)


def _part_of(span: int, since_s: float, within_s: float) -> float:
    """Return the part of a span that lies between ``since_s`` and ``since_s + within_s``."""
    start, stop = _start_of(span), _start_of(span + 1)
    if span == _NUM_SPANS - 1:
        return 1.0
    return (min(stop, since_s + within_s) - max(start, since_s)) / (stop - start)


_TICK_S: Final = 0.5
_MOST_AT_ONCE: Final = 64
"""Prefetches that one tick starts."""


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """What prefetches were good for, so far, in blocks.

    Attributes:
        sessions: Conversations that are waited for.
        prefetches: Started.
        moved: Copied up.
        used: Of these, those of conversations that came back in time.
        wasted: Those of conversations that did not.
    """

    sessions: int
    prefetches: int
    moved: int
    used: int
    wasted: int


class SessionPlanner:
    """Brings the blocks of conversations to the CPU tier before they come back: ``async with SessionPlanner(kv)``.

    What it brings and nobody has used yet is never more than a part of the tier; how much is under way at once is
    bounded by `CacheLimits.prefetch_quota`. For the event loop of the cache.
    """

    def __init__(
        self,
        kv: BlockCache,
        *,
        to: str = "cpu",
        least_chance: float = 0.6,
        share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make one of an open cache.

        Args:
            kv: The cache.
            to: A memory tier of it.
            least_chance: What is less likely to be used before the tier needs its room is not brought.
            share: The part of the tier that may be taken by blocks that were brought and not used yet.
            clock: Seconds.

        Raises:
            ConfigurationError: The cache has no such tier, or a number is out of range.
        """
        if not (0 < least_chance <= 1 and 0 < share <= 1):
            raise ConfigurationError(f"least_chance and share lie in (0, 1], got {least_chance} and {share}")
        if all(tier.tier != to for tier in kv.stats().tiers):
            raise ConfigurationError(f"this cache has no tier {to!r}")
        self._kv, self._to, self._least_chance, self._share, self._clock = kv, to, least_chance, share, clock
        self._forecast = SessionForecast()
        self._keys: OrderedDict[Hashable, BlockKeys] = OrderedDict()
        self._brought: dict[Hashable, tuple[PrefetchHandle, float, int]] = {}
        self._counts = {"prefetches": 0, "moved": 0, "used": 0, "wasted": 0}
        self._before: tuple[float, int] = (clock(), self._num_filled())
        self._stay_s = math.inf
        self._task: asyncio.Task[None] | None = None

    def turn(self, session: Hashable, keys: BlockKeys, *, back_in_s: float | None = None) -> None:
        """A turn of a conversation was served.

        Args:
            session: Which: anything that can be a key of a dict.
            keys: Of all its blocks, which its next turn begins with. Shared: they are only read.
            back_in_s: When it comes back, if that is known: of a tool that takes as long every time, or a timer.

        Raises:
            ConfigurationError: ``back_in_s`` is no positive number.
        """
        if back_in_s is not None and not 0 < back_in_s < math.inf:
            raise ConfigurationError(f"back_in_s must be positive, got {back_in_s!r:.40}")
        self._let_go(session, "used")
        self._forecast.turn(session, self._clock(), back_in_s)
        self._keys[session] = keys
        self._keys.move_to_end(session)
        while len(self._keys) > MOST_SESSIONS:
            self._keys.popitem(last=False)

    def close(self, session: Hashable) -> None:
        """A conversation will not come back."""
        self._let_go(session, "wasted")
        self._forecast.close(session)
        self._keys.pop(session, None)

    def tick(self) -> None:
        """Start the prefetches that are due; called by itself, twice a second."""
        now, books = self._clock(), self._books()
        self._measure(now, books.num_slots)
        for session in [each for each, (_, until, _) in self._brought.items() if until <= now]:
            self._let_go(session, "wasted")
        num_started = 0
        for session in self._forecast.due(now):
            keys = self._keys.get(session)
            if keys is None or session in self._brought:
                continue
            if self._forecast.chance(session, now, self._stay_s) < self._least_chance:
                continue
            taken = sum(num_blocks for _, _, num_blocks in self._brought.values())
            if taken + len(keys) > self._share * books.num_slots or num_started == _MOST_AT_ONCE:
                self._forecast.look_again(session, now)
                continue
            handle = self._kv.prefetch(keys, to=self._to)
            self._brought[session] = handle, now + self._stay_s, len(keys)
            self._counts["prefetches"] += 1
            num_started += 1

    def statistics(self) -> SessionStatistics:
        """Count."""
        return SessionStatistics(sessions=len(self._forecast), **self._counts)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="sessions")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Start no more; what is under way is the cache's to end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self.tick()
            except ClosedError:
                return

    def _measure(self, now: float, num_slots: int) -> None:
        """Learn how long a block stays in the tier: its slots over the blocks that come to it in a second."""
        since, before = self._before
        if now <= since:
            return
        filled = self._num_filled()
        stay_s = num_slots * (now - since) / (filled - before) if filled > before else math.inf
        self._stay_s = min(stay_s, 2.0 * self._stay_s) if math.isfinite(self._stay_s) else stay_s
        if filled - before >= num_slots // 8 or now - since > 60.0:
            self._before = now, filled

    def _num_filled(self) -> int:
        books = self._books()
        return books.written + books.promoted

    def _books(self) -> TierStatistics:
        nothing = TierStatistics(self._to)  # while a host's server is away
        return next((tier for tier in self._kv.stats().tiers if tier.tier == self._to), nothing)

    def _let_go(self, session: Hashable, what: str) -> None:
        """Count what a prefetch has brought."""
        brought = self._brought.pop(session, None)
        if brought is None:
            return
        handle = brought[0]
        if not handle.done:
            handle.cancel()
            return
        moved = 0
        with suppress(asyncio.CancelledError):  # of a prefetch that the end of the cache has ended; nobody waits here
            moved = handle.result().num_moved
        self._counts["moved"] += moved
        self._counts[what] += moved
