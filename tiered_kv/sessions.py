"""Conversations that come back: their blocks are brought to memory before the next turn is due.

Whoever knows when that is says so. Else it is learned from all conversations, by a `SessionForecast`.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from tiered_kv.block_cache import BlockCache
from tiered_kv.errors import ClosedError, ConfigurationError
from tiered_kv.forecast import MOST_SESSIONS, SessionForecast
from tiered_kv.keys import BlockKeys
from tiered_kv.results import TierStatistics
from tiered_kv.transfers.prefetch import PrefetchHandle

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
