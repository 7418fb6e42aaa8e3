"""How readings of caches are told to Prometheus: every metric's name, labels and help. Needs the extra ``metrics``.

Labels are bounded: ``model`` and ``cache``, the names of tiers, and reasons and calls of a few fixed words.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Final, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tiered_kv.results import CacheStatistics, TierStatistics
from tiered_kv.telemetry.tallies import Histogram, Tallies
from tiered_kv.telemetry.watch import Reading

M = TypeVar("M", bound=CounterMetricFamily | GaugeMetricFamily)
Labelled = Iterable[tuple[tuple[str, ...], float]]
Samples = Callable[[Reading], Labelled]
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
    "bypassed": (lambda of: of.is_bypassed, "1 while loads or stores go on without the tier."),
}
_BREAKERS: Final = ("reads", "writes", "deletes", "upkeep")


def families(readings: Sequence[Reading]) -> list[Metric]:
    """Return all metrics of some caches, each once, with a sample for each cache and whatever else labels it."""
    return [*_of_caches(readings), *_of_tiers(readings), *_of_events(readings), *_of_ghosts(readings)]


def _of_caches(readings: Sequence[Reading]) -> list[Metric]:
    found: list[Metric] = []
    for name, (value_of, text) in _CACHE_COUNTERS.items():
        found.append(_counter(name, text, (), readings, _each_cache(value_of)))
    for name, (value_of, text) in _CACHE_GAUGES.items():
        found.append(_gauge(name, text, (), readings, _each_cache(value_of)))
    return [
        *found,
        _counter(
            "missed_blocks",
            "Blocks that loads asked for and did not get, by what befell the first of them.",
            ("reason",),
            readings,
            lambda of: _by_word(of.statistics.missed_because),
        ),
        _counter(
            "lookup_blocks",
            "Blocks that lookups asked for.",
            (),
            readings,
            lambda of: [((), of.tallies.lookups().requested)],
        ),
        _counter(
            "lookup_missed_blocks",
            "Blocks that lookups asked for and did not find, by what befell the first of them.",
            ("reason",),
            readings,
            lambda of: _by_word(of.tallies.lookups().missed_because),
        ),
        _counter(
            "dropped_blocks",
            "Blocks given to stores and not kept at all.",
            ("reason",),
            readings,
            lambda of: _by_word(of.statistics.dropped_because),
        ),
        _counter(
            "requested_tokens",
            "Tokens of the blocks that loads asked for; not of models with several KV groups.",
            (),
            readings,
            lambda of: [((), of.statistics.requested * of.tokens_per_block)] if of.tokens_per_block else [],
        ),
        _gauge(
            "event_loop_lag_seconds",
            "How long the cache's event loop took to answer this scrape; a scrape waits for 1 s at most.",
            (),
            readings,
            lambda of: [((), of.lag_s)],
        ),
    ]


def _of_tiers(readings: Sequence[Reading]) -> list[Metric]:
    found: list[Metric] = [
        _counter(
            "hit_blocks",
            "Blocks loaded that the tier had before any promotion: each counts in one tier.",
            ("tier",),
            readings,
            _each_tier(attrgetter("hits")),
        ),
        _counter(
            "hit_tokens",
            "Tokens of the blocks loaded that the tier had; not of models with several KV groups.",
            ("tier",),
            readings,
            lambda of: [
                ((tier.tier,), tier.hits * of.tokens_per_block) for tier in of.statistics.tiers if of.tokens_per_block
            ],
        ),
        _counter(
            "tier_bytes",
            "Bytes of records that the tier's medium brought (read) and took (write).",
            ("tier", "direction"),
            readings,
            lambda of: _two_ways(of, attrgetter("bytes_read"), attrgetter("bytes_written")),
        ),
        _counter(
            "tier_call_seconds",
            "How long the medium took for calls, together; those side by side count each for itself.",
            ("tier", "direction"),
            readings,
            lambda of: _two_ways(of, attrgetter("read_s"), attrgetter("write_s")),
        ),
        _counter(
            "tier_queue_seconds",
            "How long these calls waited for their turn before that, together.",
            ("tier", "direction"),
            readings,
            lambda of: _two_ways(of, attrgetter("read_queue_s"), attrgetter("write_queue_s")),
        ),
        _gauge(
            "tier_breaker_open",
            "1 while the tier's calls of a kind are not made, but for a probe: they failed or were late.",
            ("tier", "calls"),
            readings,
            lambda of: [
                ((tier.tier, calls), calls in tier.open_breakers) for tier in of.statistics.tiers for calls in _BREAKERS
            ],
        ),
    ]
    for name, text in _TIER_COUNTERS.items():
        found.append(
            _counter(
                f"tier_{name}_blocks",
                text,
                ("tier",),
                readings,
                _each_tier(attrgetter(name)),
            )
        )
    for name, (value_of, text) in _TIER_GAUGES.items():
        found.append(
            _gauge(
                f"tier_{name}",
                text,
                ("tier",),
                readings,
                _each_tier(value_of),
            )
        )
    return found


def _of_events(readings: Sequence[Reading]) -> list[Metric]:
    calls = ("tier", "call")
    return [
        _histogram("load_seconds", "From each load's call to its end.", readings, lambda of: of.load_seconds),
        _histogram(
            "store_seconds",
            "From each store's call until the engine's blocks were free again.",
            readings,
            lambda of: of.store_seconds,
        ),
        _counter(
            "load_faults",
            "Faults that shortened loads; without a tier, those of the whole load.",
            ("tier", "reason"),
            readings,
            lambda of: [
                ((tier, reason), n)
                for said, n in of.tallies.load_faults.items()
                for tier, _, reason in [said.rpartition(": ")]
            ],
        ),
        _counter(
            "tier_call_failures",
            "Calls of a tier that went wrong.",
            calls,
            readings,
            lambda of: of.tallies.failures.items(),
        ),
        _counter(
            "tier_call_stalls",
            "Calls of a tier that did not return in time.",
            calls,
            readings,
            lambda of: of.tallies.stalls.items(),
        ),
        _counter(
            "tier_trips",
            "How often a tier was bypassed since calls failed one after another.",
            calls,
            readings,
            lambda of: of.tallies.trips.items(),
        ),
        _counter(
            "tier_refused_blocks",
            "Records not served for their seal.",
            ("tier",),
            readings,
            lambda of: _by_word(of.tallies.refused),
        ),
    ]


def _of_ghosts(readings: Sequence[Reading]) -> list[Metric]:
    gaps = HistogramMetricFamily(
        "tiered_kv_reuse_gap_seconds", "Seconds between two uses of a block, of a sample.", labels=_OF_CACHE
    )
    for each in readings:
        if each.ghost is not None:
            gaps.add_metric(each.labels, each.ghost.gaps_s.cumulated(), each.ghost.gaps_s.total)
    return [
        gaps,
        _counter(
            "ghost_requested_blocks",
            "Blocks of a sample that loads and stores were about.",
            (),
            readings,
            lambda of: [((), of.ghost.requested)] if of.ghost is not None else [],
        ),
        _counter(
            "ghost_hit_blocks",
            "Of these, those that an LRU cache of so many times the size of the largest tier would have had.",
            ("size",),
            readings,
            lambda of: [((f"{size:g}",), hits) for size, hits in of.ghost.hits.items()] if of.ghost is not None else [],
        ),
    ]


def _counter(
    name: str,
    text: str,
    labels: tuple[str, ...],
    readings: Sequence[Reading],
    samples: Samples,
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"tiered_kv_{name}", text, labels=[*_OF_CACHE, *labels])
    return _filled(family, readings, samples)


def _gauge(
    name: str,
    text: str,
    labels: tuple[str, ...],
    readings: Sequence[Reading],
    samples: Samples,
) -> GaugeMetricFamily:
    return _filled(GaugeMetricFamily(f"tiered_kv_{name}", text, labels=[*_OF_CACHE, *labels]), readings, samples)


def _histogram(
    name: str, text: str, readings: Sequence[Reading], of: Callable[[Tallies], Histogram]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"tiered_kv_{name}", text, labels=_OF_CACHE)
    for each in readings:
        histogram = of(each.tallies)
        family.add_metric(each.labels, histogram.cumulated(), histogram.total)
    return family


def _each_cache(value_of: Callable[[CacheStatistics], float]) -> Samples:
    return lambda of: [((), value_of(of.statistics))]


def _each_tier(value_of: Callable[[TierStatistics], float]) -> Samples:
    return lambda of: [((tier.tier,), value_of(tier)) for tier in of.statistics.tiers]


def _two_ways(
    of: Reading, read: Callable[[TierStatistics], float], write: Callable[[TierStatistics], float]
) -> Labelled:
    values = (("read", read), ("write", write))
    return [((tier.tier, way), value_of(tier)) for tier in of.statistics.tiers for way, value_of in values]


def _filled(family: M, readings: Sequence[Reading], samples: Samples) -> M:
    for each in readings:
        for labels, value in samples(each):
            family.add_metric([*each.labels, *labels], float(value))
    return family


def _by_word(counts: Mapping[str, int]) -> Labelled:
    return [((word,), n) for word, n in counts.items()]


def _part(some: int, of_all: int) -> float:
    return some / of_all if of_all else 0.0
