"""Every metric: its name, labels and help, and where in a cache's reading it is. Needs the extra ``metrics``.

Labels are bounded: ``model`` and ``cache``, the names of tiers, reasons and calls of a few fixed words, and
the salts that the operator has listed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Final, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tiered_kv.telemetry.watch import Reading, SaltCounts
from tiered_kv.tiers.fates import Histogram
from tiered_kv.values.results import CacheStatistics, TierStatistics

W = TypeVar("W", bound=str)
M = TypeVar("M", bound=CounterMetricFamily | GaugeMetricFamily)
Labels = tuple[str, ...]
Samples = Callable[[Reading], Iterable[tuple[Labels, float]]]
Histograms = Callable[[Reading], Iterable[tuple[Labels, Histogram]]]
_OF_CACHE: Final = ("model", "cache")
_CACHE_COUNTERS: Final[Mapping[str, tuple[Callable[[CacheStatistics], float], str]]] = {
    "requested_blocks": (
        lambda of: of.requested,
        "Blocks that loads asked for: the hits of all tiers and the missed ones add up to it.",
    ),
    "store_requested_blocks": (
        lambda of: of.store_requested,
        "Blocks given to stores: the stored, the present and the dropped ones add up to it.",
    ),
    "stored_blocks": (lambda of: of.stored, "Blocks that stores copied from the engine."),
    "present_blocks": (lambda of: of.present, "Blocks given to stores that were there already."),
    "num_cumulative_preemption": (lambda of: of.num_preemptions, "Sequences swapped out by name."),
}
_CACHE_GAUGES: Final[Mapping[str, tuple[Callable[[CacheStatistics], float], str]]] = {
    "transfers": (lambda of: of.transfers, "Loads, stores, prefetches, fills and writes under way."),
    "store_queue_bytes": (lambda of: of.store_queue_bytes, "Bytes of stores accepted and not yet in every tier."),
    "bounce_free_slots": (lambda of: of.bounce_free, "Free host slots for blocks that only pass through."),
    "bounce_slots": (lambda of: of.bounce_slots, "Host slots for blocks that only pass through."),
    "pinned_bytes": (lambda of: of.pinned_bytes, "Bytes of slots that pins hold."),
    "page_locked_bytes": (lambda of: of.page_locked_bytes, "Bytes of host memory that are page-locked for a GPU."),
    "device_usable": (lambda of: of.is_device_usable, "1 until the engine's device has failed, then 0."),
    "external_cache_usage": (
        lambda of: _part(sum(tier.ready for tier in of.tiers), sum(tier.num_slots for tier in of.tiers)),
        "Part of the slots of all tiers that holds a readable block, 0 to 1.",
    ),
}
_TIER_COUNTERS: Final[Mapping[str, str]] = {
    "written": "Blocks stored or written down to the tier.",
    "promoted": "Blocks copied up to the tier by a load or prefetch.",
    "evicted": "Blocks that left the tier for want of room.",
    "dropped": "Blocks not written to the tier: no room, or the queue of stores was full.",
    "corrupt": "Blocks read from the tier and found broken.",
    "failed": "Blocks not read or written because the medium failed.",
    "expired": "Blocks removed because they were in the tier for too long.",
    "held_back": "Of the dropped blocks, those that max_write_bytes_per_day has kept from being written.",
}
_TIER_GAUGES: Final[Mapping[str, tuple[Callable[[TierStatistics], float], str]]] = {
    "slots": (lambda of: of.num_slots, "Blocks the tier can hold; 0 for a medium that evicts for itself."),
    "free_slots": (lambda of: of.free, "Slots of the tier that hold nothing."),
    "ready_blocks": (lambda of: of.ready, "Readable blocks in the tier."),
    "evictable_blocks": (lambda of: of.evictable, "Readable blocks in the tier that nobody uses."),
    "leased_slots": (lambda of: of.leased, "Slots of the tier that somebody uses."),
    "pending_slots": (lambda of: of.pending, "Slots of the tier with a block on its way."),
    "dirty_blocks": (lambda of: of.dirty, "Blocks that wait in the tier to be written below."),
    "capacity_bytes": (lambda of: of.capacity_bytes, "Bytes of the tier's slots; 0 for a tier that others use too."),
    "in_flight_bytes": (lambda of: of.in_flight_bytes, "Bytes that transfers read from the medium or write to it."),
    "calls": (lambda of: of.num_calls, "Calls of transfers that the medium has not answered."),
    "waiting_calls": (lambda of: of.num_waiting, "Calls of transfers that wait for their turn."),
    "usage_ratio": (lambda of: _part(of.ready, of.num_slots), "Part of the tier's slots with a readable block."),
    "write_amplification": (
        lambda of: of.write_amplification,
        "Bytes written to the medium for each byte of the blocks stored: headers, padding and ledger included.",
    ),
    "bypassed": (lambda of: of.is_bypassed, "1 while loads or stores go on without the tier."),
}
_BREAKERS: Final = ("reads", "writes", "deletes", "upkeep", "locates")


class Families:
    """The metric families, each with the samples of all caches.

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
        """Add one that counts values by ranges."""
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


def by_word(counts: Mapping[W, int]) -> Iterable[tuple[Labels, float]]:
    """Return counts as samples of one label."""
    return [((word,), n) for word, n in counts.items()]


def families(readings: Sequence[Reading]) -> list[Metric]:
    """Return all metrics of some caches, each once, with a sample for each cache and whatever else labels it."""
    to = Families(readings)
    _tell_of_caches(to)
    _tell_of_tiers(to)
    _tell_of_events(to)
    _tell_of_salts(to)
    _tell_of_lives(to)
    return to.found


def _tell_of_caches(to: Families) -> None:
    for name, (value_of, text) in _CACHE_COUNTERS.items():
        to.counter(name, text, (), _each_cache(value_of))
    for name, (value_of, text) in _CACHE_GAUGES.items():
        to.gauge(name, text, (), _each_cache(value_of))
    to.counter(
        "missed_blocks",
        "Blocks that loads asked for and did not get, by what befell the first of them.",
        ("reason",),
        lambda of: by_word(of.statistics.missed_because),
    )
    to.counter("lookup_blocks", "Blocks that lookups asked for.", (), lambda of: [((), of.asked.looked_up)])
    to.counter(
        "lookup_missed_blocks",
        "Blocks that lookups asked for and did not find, by what befell the first of them.",
        ("reason",),
        lambda of: by_word(of.asked.not_found_because),
    )
    to.counter(
        "dropped_blocks",
        "Blocks given to stores and not kept at all.",
        ("reason",),
        lambda of: by_word(of.statistics.dropped_because),
    )
    to.counter(
        "requested_tokens",
        "Tokens of the blocks that loads asked for; not of models with several KV groups.",
        (),
        lambda of: [((), of.statistics.requested * of.tokens_per_block)] if of.tokens_per_block else [],
    )
    to.counter(
        "prefill_saved_seconds",
        "How long the engine would have computed the tokens that loads brought, at prefill_tokens_per_s.",
        (),
        lambda of: [((), of.prefill_saved_s)] if of.prefill_saved_s is not None else [],
    )
    to.gauge(
        "event_loop_lag_seconds",
        "How long the cache's event loop took to answer this scrape; a scrape waits for 1 s at most.",
        (),
        lambda of: [((), of.lag_s)],
    )


def _tell_of_tiers(to: Families) -> None:
    to.counter(
        "hit_blocks",
        "Blocks loaded that the tier had before any promotion: each counts in one tier.",
        ("tier",),
        _each_tier(attrgetter("hits")),
    )
    to.counter(
        "hit_tokens",
        "Tokens of the blocks loaded that the tier had; not of models with several KV groups.",
        ("tier",),
        lambda of: [
            ((tier.tier,), tier.hits * of.tokens_per_block) for tier in of.statistics.tiers if of.tokens_per_block
        ],
    )
    ways = ("tier", "direction")
    to.counter(
        "tier_bytes",
        "Bytes of records that the tier's medium brought (read) and took (write).",
        ways,
        _two_ways(attrgetter("bytes_read"), attrgetter("bytes_written")),
    )
    to.counter(
        "tier_call_seconds",
        "How long the medium took for calls, together; those side by side count each for itself.",
        ways,
        _two_ways(attrgetter("read_s"), attrgetter("write_s")),
    )
    to.counter(
        "tier_queue_seconds",
        "How long these calls waited for their turn before that, together.",
        ways,
        _two_ways(attrgetter("read_queue_s"), attrgetter("write_queue_s")),
    )
    to.gauge(
        "tier_breaker_open",
        "1 while the tier's calls of a kind are not made, but for a probe: they failed or were late.",
        ("tier", "calls"),
        lambda of: [
            ((tier.tier, calls), calls in tier.open_breakers) for tier in of.statistics.tiers for calls in _BREAKERS
        ],
    )
    for name, text in _TIER_COUNTERS.items():
        to.counter(f"tier_{name}_blocks", text, ("tier",), _each_tier(attrgetter(name)))
    for name, (value_of, text) in _TIER_GAUGES.items():
        to.gauge(f"tier_{name}", text, ("tier",), _each_tier(value_of))


def _tell_of_events(to: Families) -> None:
    calls = ("tier", "call")
    to.histogram("load_seconds", "From each load's call to its end.", (), lambda of: [((), of.load_seconds)])
    to.histogram(
        "store_seconds",
        "From each store's call until the engine's blocks were free again.",
        (),
        lambda of: [((), of.store_seconds)],
    )
    to.counter(
        "load_faults",
        "Faults that shortened loads; without a tier, those of the whole load.",
        ("tier", "reason"),
        lambda of: [
            ((tier, reason), n) for said, n in of.load_faults.items() for tier, _, reason in [said.rpartition(": ")]
        ],
    )
    to.counter("tier_call_failures", "Calls of a tier that went wrong.", calls, lambda of: of.tallies.failures.items())
    to.counter(
        "tier_call_stalls",
        "Calls of a tier that did not return in time.",
        calls,
        lambda of: of.tallies.stalls.items(),
    )
    to.counter(
        "tier_trips",
        "How often a tier was bypassed since calls failed one after another.",
        calls,
        lambda of: of.tallies.trips.items(),
    )
    to.counter(
        "tier_refused_blocks",
        "Records not served for their seal.",
        ("tier",),
        lambda of: by_word(of.tallies.refused),
    )


def _tell_of_salts(to: Families) -> None:
    """Tell of the tenants that the operator has listed, apart from the sums over all of them."""
    told: Mapping[str, tuple[Callable[[SaltCounts], float], str]] = {
        "requested": (lambda of: of.requested, "Blocks that loads asked for with one of the listed salts."),
        "hit": (lambda of: of.hits, "Blocks that these loads brought."),
        "lookup": (lambda of: of.looked_up, "Blocks that lookups asked for with one of the listed salts."),
        "lookup_missed": (lambda of: of.not_found, "Blocks that these lookups did not find."),
    }
    for name, (value_of, text) in told.items():
        to.counter(f"salt_{name}_blocks", text, ("salt",), _each_salt(value_of))


def _tell_of_lives(to: Families) -> None:
    to.histogram(
        "reuse_gap_seconds",
        "Seconds between two uses of a block, of a sample.",
        (),
        lambda of: [((), of.lives.ghost.gaps_s)] if of.lives else [],
    )
    to.histogram(
        "tier_eviction_age_seconds",
        "How long evicted blocks had been in the tier, of a sample.",
        ("tier",),
        lambda of: [((tier,), ages_s) for tier, ages_s in of.lives.ages_s.items()] if of.lives else [],
    )
    to.histogram(
        "tier_eviction_idle_seconds",
        "How long evicted blocks had not been used, of a sample.",
        ("tier",),
        lambda of: [((tier,), idle_s) for tier, idle_s in of.lives.idle_s.items()] if of.lives else [],
    )
    to.counter(
        "ghost_requested_blocks",
        "Blocks of a sample that loads and stores were about.",
        (),
        lambda of: [((), of.lives.ghost.requested)] if of.lives else [],
    )
    to.counter(
        "ghost_hit_blocks",
        "Of these, those that an LRU cache of so many times the size of the largest tier would have had.",
        ("size",),
        lambda of: [((f"{size:g}",), hits) for size, hits in of.lives.ghost.hits.items()] if of.lives else [],
    )


def _each_cache(value_of: Callable[[CacheStatistics], float]) -> Samples:
    return lambda of: [((), value_of(of.statistics))]


def _each_tier(value_of: Callable[[TierStatistics], float]) -> Samples:
    return lambda of: [((tier.tier,), value_of(tier)) for tier in of.statistics.tiers]


def _each_salt(value_of: Callable[[SaltCounts], float]) -> Samples:
    return lambda of: [((salt,), value_of(counts)) for salt, counts in of.tallies.salts.items()]


def _two_ways(read: Callable[[TierStatistics], float], write: Callable[[TierStatistics], float]) -> Samples:
    def samples(of: Reading) -> Iterable[tuple[Labels, float]]:
        for tier in of.statistics.tiers:
            yield (tier.tier, "read"), read(tier)
            yield (tier.tier, "write"), write(tier)

    return samples


def _part(some: int, of_all: int) -> float:
    return some / of_all if of_all else 0.0
