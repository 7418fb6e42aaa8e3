"""What is watched of one open cache, whoever shows it: Prometheus, or the page.

What a cache does is counted anyway. A reading costs it one snapshot, taken on its event loop, so that what is shown
adds up; it may be asked for from any thread, and a loop that has no time holds up nobody.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from tiered_kv.errors import ClosedError
from tiered_kv.events import Emit, Event
from tiered_kv.histogram import Histogram
from tiered_kv.keys import BlockKeys, Namespace
from tiered_kv.results import CacheStatistics
from tiered_kv.telemetry.history import History
from tiered_kv.telemetry.lives import LifeCounts, Lives
from tiered_kv.telemetry.tallies import Tallies
from tiered_kv.tiers.ledger import Ledger

if TYPE_CHECKING:  # the extra "metrics" may not be installed
    from prometheus_client import CollectorRegistry

_PATIENCE_S: Final = 1.0
"""How long a reader waits for the event loop; then it gets what it got before, and learns that the loop is busy."""
_SHORTFALLS: Final = 32

Explain = Callable[[BlockKeys], Awaitable[Sequence[object]]]


class Watched(Protocol):
    """What is asked of an open cache.

    Attributes:
        model_name: Whose blocks it keeps.
        block_sizes: Tokens in a block, by KV group.
        tokens_per_block: Tokens that each counted block stands for; 0 where KV groups differ.
        ledger: What became of blocks; on the event loop.
    """

    model_name: str
    block_sizes: tuple[int, ...]
    tokens_per_block: float
    ledger: Ledger

    @property
    def emit(self) -> Emit:
        """Takes events."""

    def namespaces(self) -> list[Namespace]:
        """Return what names blocks without a salt, by KV group; from any thread."""

    def statistics(self) -> CacheStatistics:
        """Count what is where; on the event loop."""

    def call_soon(self, function: Callable[[], object]) -> None:
        """Have the event loop call a function, from any thread."""


class Watcher(Protocol):
    """Who shows what is seen of one cache."""

    def claim(self) -> None:
        """Become that of one cache, before it opens."""

    def begin(self, watch: "Watch") -> None:
        """Show it: the cache has opened. Called on its event loop."""

    async def end(self) -> None:
        """Show it no more: the cache closes."""


@dataclass(frozen=True)
class Shortfall:
    """A lookup or load that did not find all it was asked for.

    Attributes:
        at: When, in seconds since 1970.
        call: ``"lookup"`` or ``"load"``.
        requested: Its blocks.
        found: Those that were there, or came.
        because: What befell the first of the others.
    """

    at: float
    call: str
    requested: int
    found: int
    because: str


@dataclass(frozen=True)
class Reading:
    """One cache at one moment, for any thread.

    Attributes:
        at: When, in seconds since 1970.
        labels: Values of the labels ``model`` and ``cache``.
        tokens_per_block: See `Watched`.
        statistics: What it counts.
        tallies: What its events told.
        load_seconds, store_seconds, load_faults: See `Ledger`.
        lag_s: How long the event loop took to answer.
        prefill_saved_s: How long the engine would have computed what loads brought; None if nobody says how fast it is.
        lives: What became of a sample of blocks; None if no tier is the cache's own.
    """

    at: float
    labels: tuple[str, str]
    tokens_per_block: float
    statistics: CacheStatistics
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
        shortfalls: The lookups and loads that fell short last.
        started_at: When the cache was opened, in seconds since 1970.
    """

    def __init__(self, watchers: Sequence[Watcher], explain: Explain) -> None:
        """Make one of a cache that is not open yet; ``explain`` is its own."""
        self.number = 0
        self.registry: CollectorRegistry | None = None
        self.prefill_tokens_per_s = 0.0
        self.history = History()
        self.shortfalls: deque[Shortfall] = deque(maxlen=_SHORTFALLS)
        self.started_at = 0.0
        self._watchers = watchers
        self._explain = explain
        self._tallies = Tallies()
        self._lives: Lives | None = None
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
        """Take an event; called by the cache. Those of each load and store are passed by: the ledger counts them."""
        if event.level != "debug":
            self._tallies(event)

    def looked_up(self, salt_id: bytes, requested: int, found: int, because: str) -> None:
        """Count a lookup; called by the cache."""
        self._tallies.looked_up(salt_id, requested, found, because)
        if because:
            self._fell_short("lookup", requested, found, because)

    def claim(self) -> None:
        """Have all who will show it be this cache's.

        Raises:
            ConfigurationError: One is another cache's, or cannot show it.
        """
        for watcher in self._watchers:
            watcher.claim()

    def begin(self, watched: Watched) -> None:
        """See it from now on; called on the event loop by the cache that has opened."""
        self._watched, self._loop, self._thread = watched, asyncio.get_running_loop(), threading.get_ident()
        self.started_at = time.time()
        self._last = self._take()
        if num_slots := max(tier.num_slots for tier in self._last.statistics.tiers):
            self._lives = Lives(num_slots)
            watched.ledger.on_use = self._lives.use
            watched.ledger.listeners.append(self._lives.changed)
        watched.ledger.on_miss = partial(self._fell_short, "load")
        self.history.begin(lambda: (watched.statistics(), self._tallies.lookups()))
        for watcher in self._watchers:
            watcher.begin(self)

    async def end(self) -> None:
        """See it no more; called by the cache when it closes."""
        self.history.end()
        for watcher in self._watchers:
            await watcher.end()

    def count_salts(self, salts: Sequence[str]) -> None:
        """Count the loads and lookups of these tenants each for itself from now on; on the cache's event loop."""
        self._tallies.count_salts(salts)
        self.watched.ledger.on_load = self._tallies.loaded

    def tell(self, event: Event) -> None:
        """Tell all receivers of events of one; on the cache's event loop."""
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
        assert self._loop is not None  # noqa: S101 - begun by the cache
        if asyncio.get_running_loop() is self._loop:
            return await self._explain(keys)
        asking = self._asking(keys)
        try:
            asked = asyncio.run_coroutine_threadsafe(asking, self._loop)
        except RuntimeError as error:
            asking.close()
            raise ClosedError("the event loop that opened this TieredKV is closed") from error
        return await asyncio.wrap_future(asked)

    async def _asking(self, keys: BlockKeys) -> Sequence[object]:
        return await self._explain(keys)

    def _fell_short(self, call: str, requested: int, found: int, because: str) -> None:
        self.shortfalls.append(Shortfall(time.time(), call, requested, found, because))

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
        watched, ledger = self.watched, self.watched.ledger
        statistics, saved_s = watched.statistics(), None
        if self.prefill_tokens_per_s and watched.tokens_per_block:
            num_hits = statistics.requested - statistics.missed
            saved_s = num_hits * watched.tokens_per_block / self.prefill_tokens_per_s
        self._last = Reading(
            at=time.time(),
            labels=(watched.model_name, str(self.number)),
            tokens_per_block=watched.tokens_per_block,
            statistics=statistics,
            tallies=self._tallies.copy(),
            load_seconds=ledger.load_seconds.copy(),
            store_seconds=ledger.store_seconds.copy(),
            load_faults=dict(ledger.load_faults),
            prefill_saved_s=saved_s,
        )
        return self._last
