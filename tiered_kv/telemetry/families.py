"""Families of metrics as prometheus_client has them, made of readings of caches. Needs the extra ``metrics``."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tiered_kv.histogram import Histogram
from tiered_kv.telemetry.watch import Reading

M = TypeVar("M", bound=CounterMetricFamily | GaugeMetricFamily)
Labels = tuple[str, ...]
Samples = Callable[[Reading], Iterable[tuple[Labels, float]]]
Histograms = Callable[[Reading], Iterable[tuple[Labels, Histogram]]]
_OF_CACHE: Final = ("model", "cache")


class Families:
    """Families, each with the samples of all caches.

    Attributes:
        found: Those that were added.
    """

    def __init__(self, readings: Sequence[Reading]) -> None:
        self.found: list[Metric] = []
        self._readings = readings

    def counter(self, name: str, text: str, labels: Labels, samples: Samples) -> None:
        """Add one that only grows; ``samples`` says what a cache has, by its own labels."""
        self._add(CounterMetricFamily(f"tiered_kv_{name}", text, labels=[*_OF_CACHE, *labels]), samples)

    def gauge(self, name: str, text: str, labels: Labels, samples: Samples) -> None:
        """Add one that goes up and down."""
        self._add(GaugeMetricFamily(f"tiered_kv_{name}", text, labels=[*_OF_CACHE, *labels]), samples)

    def histogram(self, name: str, text: str, labels: Labels, samples: Histograms) -> None:
        """Add one of ranges."""
        family = HistogramMetricFamily(f"tiered_kv_{name}", text, labels=[*_OF_CACHE, *labels])
        for each in self._readings:
            for own, histogram in samples(each):
                family.add_metric([*each.labels, *own], histogram.cumulated(), histogram.total)
        self.found.append(family)

    def _add(self, family: M, samples: Samples) -> None:
        for each in self._readings:
            for own, value in samples(each):
                family.add_metric([*each.labels, *own], float(value))
        self.found.append(family)


def by_word(counts: Mapping[str, int]) -> Iterable[tuple[Labels, float]]:
    """Return counts as samples of one label."""
    return [((word,), n) for word, n in counts.items()]
