"""What is watched of one open cache, whoever shows it: Prometheus, or the page.

What a cache does is counted anyway. A `Reading` costs it one snapshot, taken on its event loop, so that what is shown
adds up; it may be asked for from any thread, and a loop that has no time holds up nobody.

`Tallies` count what neither `stats` nor `Fates` does: how often a tier's calls went wrong, and tenants one by one. They
are plain numbers, for the event loop's thread.

`MomentHistory` is the last hour of a cache in a bounded memory, so that a page can show it whoever else was watching,
or nobody.
"""

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, starmap
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar

from tiered_kv.telemetry.block_sample import LifeCounts, SampledLives
from tiered_kv.telemetry.prompts import Asked, Prompts
from tiered_kv.tiers.fates import Fates, Histogram
from tiered_kv.values.errors import ClosedError, Reason
from tiered_kv.values.events import Emit, Event, RecordsRefused, TierFailed, TierStalled, TierTripped
from tiered_kv.values.hints import HintAction
from tiered_kv.values.keys import BlockKeys, Namespace, salt_digest
from tiered_kv.values.results import CacheStatistics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from tiered_kv.tiers.tier import Batch

T = TypeVar("T")
W = TypeVar("W", bound=str)
EVERY_S: Final = 10.0
KEPT_S: Final = 3600.0
_MOST: Final = 1 + int(KEPT_S / EVERY_S)
_POINTS: Final = 60
Count = Callable[[], tuple[CacheStatistics, Asked]]
_PATIENCE_S: Final = 1.0
"""How long a reader waits for the event loop; then it gets what it got before, and learns that the loop is busy."""
Explain = Callable[[BlockKeys], Coroutine[Any, Any, Sequence[object]]]


@dataclass
class SaltCounts:
    """Blocks of one tenant's loads and lookups."""

    requested: int = 0
    hits: int = 0
    looked_up: int = 0
    not_found: int = 0


class Tallies:
    """Takes events, and the calls of some tenants, and adds them up.

    Attributes:
        failures: Calls that went wrong, by tier and what they were doing.
        stalls: Calls that were late, by the same.
        trips: How often a breaker opened, by the same.
        refused: Records not served for their seal, by tier.
        errors: What a call that went wrong or was late told last, and when, by tier and what it was doing.
        salts: Of the tenants that are counted each for itself.
    """

    def __init__(self) -> None:
        self.failures, self.stalls, self.trips = (Counter[tuple[str, str]]() for _ in range(3))
        self.refused = Counter[str]()
        self.errors: dict[tuple[str, str], tuple[str, float]] = {}
        self.salts: dict[str, SaltCounts] = {}
        self._of_salt: dict[bytes, SaltCounts] = {}

    def __call__(self, event: Event) -> None:
        """Take one event."""
        match event:
            case TierFailed():
                self.failures[event.tier, event.doing] += 1
                self._tell(event.tier, event.doing, event.error)
            case TierStalled():
                self.stalls[event.tier, event.doing] += 1
                self._tell(event.tier, event.doing, f"no answer within {event.timeout_s:g} s")
            case TierTripped():
                self.trips[event.tier, event.doing] += 1
            case RecordsRefused():
                self.refused[event.tier] += event.blocks
            case _:
                pass

    def _tell(self, tier: str, doing: str, error: str) -> None:
        self.errors[tier, doing] = error, time.time()

    def count_salts(self, salts: Iterable[str]) -> None:
        """Count these tenants each for itself from now on."""
        self.salts = {salt: SaltCounts() for salt in salts}
        self._of_salt = {salt_digest(salt): counts for salt, counts in self.salts.items()}

    def loaded(self, salt_id: bytes, requested: int, num_blocks: int) -> None:
        """Count a load for its tenant."""
        if (counts := self._of_salt.get(salt_id)) is not None:
            counts.requested += requested
            counts.hits += num_blocks

    def looked_up(self, salt_id: bytes, requested: int, found: int) -> None:
        """Count a lookup for its tenant."""
        if (counts := self._of_salt.get(salt_id)) is not None:
            counts.looked_up += requested
            counts.not_found += requested - found

    def copy(self) -> Self:
        """Return what was added up so far, for another thread."""
        copied = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Counter):
                setattr(copied, name, value.copy())
        copied.errors = dict(self.errors)
        copied.salts = {salt: replace(counts) for salt, counts in self.salts.items()}
        return copied


@dataclass(frozen=True)
class Moment:
    """What was counted at one time, in seconds since 1970."""

    at: float
    statistics: CacheStatistics
    asked: Asked


@dataclass(frozen=True)
class Span:
    """What happened between two moments. Blocks; by tier or by reason where it says so.

    Attributes:
        start, stop: When, in seconds since 1970.
        requested, missing: Of prompts, each once, whether looked up, loaded or both.
        missing_because: By reason.
        hits: Of loads, by tier.
        stored, dropped: Of stores.
        dropped_because: By reason.
        evicted: By tier.
        not_written: By tier and reason: what stores gave, and the tier does not have.
        bytes_read, bytes_written: By tier.
    """

    start: float
    stop: float
    requested: int
    missing: int
    missing_because: Mapping[str, int]
    hits: Mapping[str, int]
    stored: int
    dropped: int
    dropped_because: Mapping[Reason, int]
    evicted: Mapping[str, int]
    not_written: Mapping[str, Mapping[Reason, int]]
    bytes_read: Mapping[str, int]
    bytes_written: Mapping[str, int]

    @property
    def hit_rate(self) -> float | None:
        """Part of the blocks asked for that were found and brought; None if nobody asked."""
        return 1 - self.missing / self.requested if self.requested else None


class MomentHistory:
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
        requested=b.asked.requested - a.asked.requested,
        missing=max(0, b.asked.missing - a.asked.missing),
        missing_because=_more(a.asked.missing_because, b.asked.missing_because),
        hits=by_tier("hits"),
        stored=two.stored - one.stored,
        dropped=two.dropped - one.dropped,
        dropped_because=_more(one.dropped_because, two.dropped_because),
        evicted=by_tier("evicted"),
        not_written={tier.tier: _more(before[tier.tier].dropped_because, tier.dropped_because) for tier in two.tiers},
        bytes_read=by_tier("bytes_read"),
        bytes_written=by_tier("bytes_written"),
    )


def _more(before: Mapping[W, int], after: Mapping[W, int]) -> dict[W, int]:
    return dict(Counter(after) - Counter(before))


class Watched(Protocol):
    """What is asked of an open cache.

    Attributes:
        model_name: Whose blocks it keeps.
        block_sizes: Tokens in a block, by KV group.
        tokens_per_block: Tokens that each counted block stands for; 0 where KV groups differ.
        fates: What became of blocks; on the event loop.
    """

    model_name: str
    block_sizes: tuple[int, ...]
    tokens_per_block: float
    fates: Fates

    @property
    def emit(self) -> Emit:
        """Takes events."""

    def namespaces(self) -> list[Namespace]:
        """Return what names blocks without a salt, by KV group; from any thread."""

    def statistics(self) -> CacheStatistics:
        """Count what is where; on the event loop."""

    def call_soon(self, function: Callable[[], object]) -> None:
        """Have the event loop call a function, from any thread."""


class Hinted(Protocol):
    """Who does what KV hints ask for; on the event loop."""

    def begin(self, meant: Sequence[tuple[HintAction, BlockKeys]], salt: str) -> bool:
        """Begin to do what is meant of a tenant's blocks; say no if too many wait."""

    async def aclose(self) -> None:
        """End what waits."""


MakeHinted = Callable[[Callable[[int, int], object]], Hinted | None]
"""Makes one for an open cache; None for a cache without a CPU tier, a part of which bounds hints. What it is given is
told of how many blocks hints keep or bring, and of how many they may not."""


class Watcher(Protocol):
    """Who shows what is seen of one cache."""

    def claim(self) -> None:
        """Become the watcher of one cache, before it opens."""

    def begin(self, watch: "Watch") -> None:
        """Show an open cache. Called on its event loop."""

    async def end(self) -> None:
        """Show the cache no more: it closes."""


@dataclass(frozen=True)
class Reading:
    """One cache at one moment, for any thread.

    Attributes:
        at: When, in seconds since 1970.
        labels: Values of the labels ``model`` and ``cache``.
        tokens_per_block: See `Watched`.
        statistics: What it counts.
        asked: What it was asked for.
        tallies: What its events told.
        load_seconds, store_seconds, load_faults: See `Fates`.
        lag_s: How long the event loop took to answer.
        prefill_saved_s: How long the engine would have computed what loads brought; None if nobody says how fast it is.
        lives: What became of a sample of blocks; None if no tier is the cache's own.
    """

    at: float
    labels: tuple[str, str]
    tokens_per_block: float
    statistics: CacheStatistics
    asked: Asked
    tallies: Tallies
    load_seconds: Histogram
    store_seconds: Histogram
    load_faults: Mapping[str, int]
    lag_s: float = 0.0
    prefill_saved_s: float | None = None
    lives: LifeCounts | None = None


class Watch:
    """Sees what one cache does, and remembers the last hour of it.

    Attributes:
        number: Tells caches of one process apart where they are shown together.
        registry: Where Prometheus finds it, if anywhere.
        prefill_tokens_per_s: How fast the engine computes a prompt; 0 if nobody said.
        history: Of the last hour.
        prompts: That were asked for.
        started_at: When the cache was opened, in seconds since 1970.
        make_hinted: For who takes hints.
    """

    def __init__(self, watchers: Sequence[Watcher], explain: Explain, make_hinted: MakeHinted) -> None:
        """Make one of a cache that is not open yet; ``explain`` and ``make_hinted`` are its own."""
        self.number = 0
        self.registry: CollectorRegistry | None = None
        self.prefill_tokens_per_s = 0.0
        self.history = MomentHistory()
        self.prompts = Prompts()
        self.started_at = 0.0
        self._watchers = watchers
        self._explain = explain
        self.make_hinted = make_hinted
        self._tallies = Tallies()
        self._lives: SampledLives | None = None
        self._watched: Watched | None = None
        self._last: Reading | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0

    @property
    def watched(self) -> Watched:
        """The cache, once it is open."""
        assert self._watched is not None  # noqa: S101 - begun by the cache
        return self._watched

    def __call__(self, event: Event) -> None:
        """Take an event; called by the cache. Those of each load and store are passed by: `Fates` counts them."""
        if event.level != "debug":
            self._tallies(event)

    def looked_up(self, batch: "Batch", found: int, because: str) -> None:
        """Count a lookup; called by the cache. ``because`` says what befell the first block that was not found."""
        self._tallies.looked_up(batch.namespace.salt, len(batch), found)
        self.prompts.looked_up(batch, found, because)

    def claim(self) -> None:
        """Have all who will show it be this cache's.

        Raises:
            ConfigurationError: One is another cache's, or cannot show it.
        """
        for watcher in self._watchers:
            watcher.claim()

    def begin(self, watched: Watched) -> None:
        """Watch an open cache from now on; called by the cache, on its event loop."""
        self._watched, self._loop, self._thread = watched, asyncio.get_running_loop(), threading.get_ident()
        self.started_at = time.time()
        self._last = self._take()
        if num_slots := max(tier.num_slots for tier in self._last.statistics.tiers):
            self._lives = SampledLives(num_slots)
            watched.fates.on_use = self._lives.use
            watched.fates.listeners.append(self._lives.changed)
        watched.fates.on_load = self.prompts.loaded
        self.history.begin(lambda: (watched.statistics(), self.prompts.counted()))
        for watcher in self._watchers:
            watcher.begin(self)

    async def end(self) -> None:
        """Watch the cache no more; called by the cache when it closes."""
        self.history.end()
        for watcher in self._watchers:
            await watcher.end()

    def count_salts(self, salts: Sequence[str]) -> None:
        """Count the loads and lookups of these tenants each for itself from now on; on the cache's event loop."""
        self._tallies.count_salts(salts)
        self.watched.fates.on_load = self._loaded

    def tell(self, event: Event) -> None:
        """Tell all receivers of an event; on the cache's event loop."""
        self.watched.emit(event)

    def read(self) -> Reading:
        """Return what there is now, from any thread; what there was, if the event loop has no time for a second."""
        reading = self._read()
        if self._lives is None:
            return reading
        return replace(reading, lives=self._lives.counts(on_loop=threading.get_ident() == self._thread))

    async def explain(self, keys: BlockKeys) -> Sequence[object]:
        """Ask the cache why blocks are there or are not, from any event loop.

        Raises:
            ClosedError: The cache is closed.
        """
        return await self.ask(partial(self._explain, keys))

    async def ask(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Have something awaited on the cache's event loop, from any other.

        Raises:
            ClosedError: The cache is closed.
        """
        assert self._loop is not None  # noqa: S101 - begun by the cache
        if asyncio.get_running_loop() is self._loop:
            return await ask()
        asking = ask()
        try:
            asked = asyncio.run_coroutine_threadsafe(asking, self._loop)
        except RuntimeError as error:
            asking.close()
            raise ClosedError("the event loop that opened this TieredKV is closed") from error
        return await asyncio.wrap_future(asked)

    def _loaded(self, batch: "Batch", num_blocks: int, because: str) -> None:
        self._tallies.loaded(batch.namespace.salt, len(batch), num_blocks)
        self.prompts.loaded(batch, num_blocks, because)

    def _read(self) -> Reading:
        assert self._last is not None  # noqa: S101 - begun by the cache
        if threading.get_ident() == self._thread:
            return self._take()
        taken = Future[Reading]()
        asked = time.monotonic()
        self.watched.call_soon(lambda: taken.set_result(self._take()))
        try:
            return replace(taken.result(_PATIENCE_S), lag_s=time.monotonic() - asked)
        except TimeoutError:
            return replace(self._last, lag_s=time.monotonic() - asked)

    def _take(self) -> Reading:
        watched, fates = self.watched, self.watched.fates
        statistics, saved_s = watched.statistics(), None
        if self.prefill_tokens_per_s and watched.tokens_per_block:
            num_hits = statistics.requested - statistics.missed
            saved_s = num_hits * watched.tokens_per_block / self.prefill_tokens_per_s
        self._last = Reading(
            at=time.time(),
            labels=(watched.model_name, str(self.number)),
            tokens_per_block=watched.tokens_per_block,
            statistics=statistics,
            asked=self.prompts.counted(),
            tallies=self._tallies.copy(),
            load_seconds=fates.load_seconds.copy(),
            store_seconds=fates.store_seconds.copy(),
            load_faults=dict(fates.load_faults),
            prefill_saved_s=saved_s,
        )
        return self._last
