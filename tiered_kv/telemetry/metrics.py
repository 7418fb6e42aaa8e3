"""Metrics of caches for Prometheus: read from `stats` when somebody scrapes, and added up from events.

What a cache does is counted anyway; a scrape costs it one snapshot, taken on its event loop, so that what is exported
adds up. Metrics need the extra ``metrics``.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakKeyDictionary

from tiered_kv.errors import ConfigurationError
from tiered_kv.events import Event
from tiered_kv.results import CacheStatistics
from tiered_kv.telemetry.ghost import GhostCache, GhostCounts
from tiered_kv.telemetry.tallies import Tallies
from tiered_kv.tiers.ledger import OnUse

if TYPE_CHECKING:  # the extra "metrics" may not be installed
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

_PATIENCE_S: Final = 1.0
"""How long a scrape waits for the event loop; then it gets what it got before, and learns that the loop is busy."""


class Watched(Protocol):
    """What metrics ask of an open cache.

    Attributes:
        model_name: Whose blocks it keeps.
        tokens_per_block: Tokens that each counted block stands for; 0 where KV groups differ.
    """

    model_name: str
    tokens_per_block: float

    def statistics(self) -> CacheStatistics:
        """Count what is where; on the event loop."""

    def watch_uses(self, on_use: OnUse) -> None:
        """Have each load and store say what it is about."""

    def call_soon(self, function: Callable[[], object]) -> None:
        """Have the event loop call a function, from any thread."""


@dataclass(frozen=True)
class Reading:
    """One cache at one moment, for any thread.

    Attributes:
        labels: Values of the labels ``model`` and ``cache``.
        tokens_per_block: See `Watched`.
        statistics: What it counts.
        tallies: What its events told.
        lag_s: How long the event loop took to answer.
        ghost: What caches of other sizes would have had; None if no tier is the cache's own.
    """

    labels: tuple[str, str]
    tokens_per_block: float
    statistics: CacheStatistics
    tallies: Tallies
    lag_s: float = 0.0
    ghost: GhostCounts | None = None


class Metrics:
    """The metrics of one cache, for `TieredKV`'s argument ``metrics``.

    ``TieredKV(..., metrics=True)``, or ``metrics = true`` in the settings, is the same as ``metrics=Metrics()``. Then
    serve them, e.g. by ``prometheus_client.start_http_server(9100)``. They are there as long as the cache is open.
    """

    def __init__(self, registry: "CollectorRegistry | None" = None) -> None:
        """Make metrics of a cache that is not open yet.

        Args:
            registry: Where to be collected; prometheus_client's own by default. Caches may share one: the label
                ``cache`` tells them apart, the lowest number that is free.

        Raises:
            ConfigurationError: The extra ``metrics`` is not installed.
        """
        try:
            from prometheus_client import REGISTRY  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ConfigurationError("metrics need prometheus_client: pip install 'tiered-kv[metrics]'") from error
        self._registry = REGISTRY if registry is None else registry
        self._tallies = Tallies()
        self._watched: Watched | None = None
        self._thread = 0
        self._last: Reading | None = None
        self._number = 0
        self._collector: _Collector | None = None
        self._ghost: GhostCache | None = None

    def __call__(self, event: Event) -> None:
        """Take an event; called by the cache."""
        self._tallies(event)

    def claim(self) -> None:
        """Become the metrics of one cache; called by it before it opens.

        Raises:
            ConfigurationError: They are another cache's, or the registry has metrics of these names.
        """
        if self._collector is not None:
            raise ConfigurationError("these Metrics are another cache's: make one for each")
        self._collector = _collector_of(self._registry)

    def begin(self, watched: Watched) -> None:
        """Be collected from now on; called on the event loop by the cache that has opened."""
        assert self._collector is not None  # noqa: S101 - claimed by the cache
        self._watched, self._thread = watched, threading.get_ident()
        self._number = self._collector.number_of_next()
        self._last = self._take()
        if num_slots := max(tier.num_slots for tier in self._last.statistics.tiers):
            self._ghost = GhostCache(num_slots)
            watched.watch_uses(self._ghost.use)
        self._collector.add(self._number, self)

    def end(self) -> None:
        """Be collected no more; called by the cache when it closes."""
        assert self._collector is not None  # noqa: S101 - likewise
        self._collector.remove(self._number)

    def read(self) -> Reading:
        """Return what there is now, from any thread; what there was, if the event loop has no time for a second."""
        reading = self._read()
        return replace(reading, ghost=self._ghost.counts()) if self._ghost is not None else reading

    def _read(self) -> Reading:
        assert self._watched is not None  # noqa: S101 - collected is what has begun
        assert self._last is not None  # noqa: S101 - likewise
        if threading.get_ident() == self._thread:
            return self._take()
        taken = Future[Reading]()
        asked = time.monotonic()
        self._watched.call_soon(lambda: taken.set_result(self._take()))
        try:
            return replace(taken.result(_PATIENCE_S), lag_s=time.monotonic() - asked)
        except TimeoutError:
            return replace(self._last, lag_s=time.monotonic() - asked)

    def _take(self) -> Reading:
        assert self._watched is not None  # noqa: S101 - likewise
        labels = self._watched.model_name, str(self._number)
        statistics = self._watched.statistics()
        self._last = Reading(labels, self._watched.tokens_per_block, statistics, self._tallies.copy())
        return self._last


class _Collector:
    """What a registry asks: all caches that are open and have their metrics there. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Metrics | None] = {}  # None: about to be

    def number_of_next(self) -> int:
        """Take the lowest number that is free."""
        with self._lock:
            number = next(each for each in range(len(self._open) + 1) if each not in self._open)
            self._open[number] = None
            return number

    def add(self, number: int, metrics: Metrics) -> None:
        """Collect from one more."""
        with self._lock:
            self._open[number] = metrics

    def remove(self, number: int) -> None:
        """Collect from it no more, and let others have its number."""
        with self._lock:
            del self._open[number]

    def collect(self) -> Iterator["Metric"]:
        """Yield all metrics, as prometheus_client asks; without caches their names alone."""
        from tiered_kv.telemetry.exposition import families  # noqa: PLC0415 - needs the extra "metrics"

        with self._lock:
            each = [metrics for metrics in self._open.values() if metrics is not None]
        return iter(families([metrics.read() for metrics in each]))


_collectors: "WeakKeyDictionary[CollectorRegistry, _Collector]" = WeakKeyDictionary()
_collectors_lock = threading.Lock()


def _collector_of(registry: "CollectorRegistry") -> _Collector:
    with _collectors_lock:
        if (collector := _collectors.get(registry)) is None:
            collector = _Collector()
            try:
                registry.register(collector)
            except ValueError as error:
                raise ConfigurationError(f"the registry has metrics of these names: {error}") from error
            _collectors[registry] = collector
        return collector
