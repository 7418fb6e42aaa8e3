"""Metrics of caches for Prometheus: read when somebody scrapes. They need the extra ``metrics``."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from tiered_kv.telemetry.watch import Watch
from tiered_kv.values.errors import ConfigurationError

if TYPE_CHECKING:  # the extra "metrics" may not be installed
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric


class Metrics:
    """The metrics of one cache, for `TieredKV`'s argument ``metrics``.

    ``TieredKV(..., metrics=True)`` is the same as ``metrics=Metrics()``; ``metrics = true`` in the settings takes
    ``metrics_salts`` and ``prefill_tokens_per_s`` from there as well. Then serve them, e.g. by
    ``prometheus_client.start_http_server(9100)``. They are there as long as the cache is open.
    """

    def __init__(
        self,
        registry: "CollectorRegistry | None" = None,
        *,
        salts: Sequence[str] = (),
        prefill_tokens_per_s: float = 0.0,
    ) -> None:
        """Make metrics of a cache that is not open yet.

        Args:
            registry: Where to be collected; prometheus_client's own by default. Caches may share one: the label
                ``cache`` tells them apart, the lowest number that is free.
            salts: Tenants that are counted each for itself, in the label ``salt``: it shows the salt, so list none
                that is secret.
            prefill_tokens_per_s: How fast the engine computes a prompt, for ``prefill_saved_seconds``; 0 if unknown.

        Raises:
            ConfigurationError: The extra ``metrics`` is not installed, or an argument cannot be right.
        """
        try:
            from prometheus_client import REGISTRY, CollectorRegistry  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ConfigurationError("metrics need prometheus_client: pip install 'tiered-kv[metrics]'") from error
        if isinstance(salts, str) or not isinstance(salts, Iterable) or not all(_is_salt(salt) for salt in salts):
            raise ConfigurationError(f"salts must be a list of the salts to count, each a str, got {salts!r:.80}")
        is_number = isinstance(prefill_tokens_per_s, int | float) and not isinstance(prefill_tokens_per_s, bool)
        if not is_number or not 0 <= prefill_tokens_per_s < float("inf"):
            raise ConfigurationError(
                f"prefill_tokens_per_s must be tokens a second, 0 if unknown, got {prefill_tokens_per_s!r:.80}"
            )
        if not isinstance(registry, CollectorRegistry | None):
            raise ConfigurationError(f"registry must be one of prometheus_client's, got {registry!r:.80}")
        self._registry = REGISTRY if registry is None else registry
        self._salts, self._prefill_tokens_per_s = tuple(salts), prefill_tokens_per_s
        self._collector: _Collector | None = None
        self._number: int | None = None  # as long as they are collected

    def claim(self) -> None:
        """Become the metrics of one cache; called by it before it opens.

        Raises:
            ConfigurationError: They are another cache's, or the registry has metrics of these names.
        """
        if self._collector is not None:
            raise ConfigurationError("these Metrics are another cache's: make one for each")
        self._collector = _collector_of(self._registry)

    def begin(self, watch: Watch) -> None:
        """Be collected from now on; called on the event loop by the cache that has opened."""
        assert self._collector is not None  # noqa: S101 - claimed by the cache
        watch.registry = self._registry
        watch.prefill_tokens_per_s = self._prefill_tokens_per_s
        if self._salts:
            watch.count_salts(self._salts)
        self._collector.add(watch)
        self._number = watch.number

    async def end(self) -> None:
        """Be collected no more; called by the cache when it closes."""
        assert self._collector is not None  # noqa: S101 - likewise
        number, self._number = self._number, None
        if number is not None:  # else it did not get as far as `begin`, and any number is another cache's
            self._collector.remove(number)


def _is_salt(salt: object) -> bool:
    return isinstance(salt, str) and bool(salt)


class _Collector:
    """What a registry asks: all caches that are open and have their metrics there. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Watch] = {}

    def add(self, watch: Watch) -> None:
        """Collect from one more; it gets the lowest number that is free."""
        with self._lock:
            watch.number = next(each for each in range(len(self._open) + 1) if each not in self._open)
            self._open[watch.number] = watch

    def remove(self, number: int) -> None:
        """Collect from it no more, and let others have its number."""
        with self._lock:
            del self._open[number]

    def collect(self) -> Iterator["Metric"]:
        """Yield all metrics, as prometheus_client asks; without caches their names alone."""
        from tiered_kv.telemetry.prometheus import families  # noqa: PLC0415 - needs the extra "metrics"

        with self._lock:
            each = list(self._open.values())
        return iter(families([watch.read() for watch in each]))


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
