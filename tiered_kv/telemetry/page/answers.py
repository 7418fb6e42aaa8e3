"""What the page shows, as plain values for JSON. Rates are parts of 1, times are seconds since 1970."""

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from tiered_kv.histogram import Histogram
from tiered_kv.keys import NO_SALT, Namespace
from tiered_kv.telemetry.history import Moment, Span
from tiered_kv.telemetry.watch import Reading, Watch


def state_of(watch: Watch) -> dict[str, Any]:
    """Return all that is known of a cache. From any thread but its own; takes a second where its loop is busy."""
    reading = watch.read()
    now = Moment(reading.at, reading.statistics, reading.tallies.lookups())
    hour, parts = watch.history.until(now)
    statistics = asdict(reading.statistics)
    tiers = statistics.pop("tiers")
    return {
        "version": version("tiered-kv"),
        "model": reading.labels[0],
        "at": now.at,
        "opened_at": watch.started_at,
        "lag_s": reading.lag_s,
        "block_sizes": watch.watched.block_sizes,
        "named_by": [digests_of(each) for each in watch.watched.namespaces()],
        "tokens_per_block": reading.tokens_per_block,
        "tiers": tiers,
        "cache": statistics,
        "lookups": asdict(now.lookups),
        "hour": _span(hour),
        "parts": [_span(part) for part in parts],
        "shortfalls": [asdict(each) for each in reversed(tuple(watch.shortfalls))],
        "troubles": _troubles(reading),
        "load_s": _quantiles(reading.load_seconds),
        "store_s": _quantiles(reading.store_seconds),
        "ghost": _ghost(reading, max((tier["capacity_bytes"] for tier in tiers), default=0)),
    }


def digests_of(space: Namespace) -> dict[str, str]:
    """Return what blocks are named by, as `tiered-kv inspect` shows it: digests, and ``"none"`` without a salt."""
    tenant = "none" if space.salt == NO_SALT else space.salt.hex()
    return {"model": space.fingerprint.hex(), "epoch": space.epoch.hex(), "shard": str(space.shard), "tenant": tenant}


def _span(span: Span) -> dict[str, Any]:
    return asdict(span) | {"hit_rate": span.hit_rate}


def _troubles(reading: Reading) -> list[dict[str, Any]]:
    tallies = reading.tallies
    kinds = {"failed": tallies.failures, "late": tallies.stalls, "breaker opened": tallies.trips}
    return [
        {"tier": tier, "call": call, "what": what, "times": times}
        for what, counts in kinds.items()
        for (tier, call), times in sorted(counts.items())
    ]


def _quantiles(histogram: Histogram) -> dict[str, float]:
    """Return upper bounds of the buckets in which the median and the 99th percentile are; of none, nothing."""
    cumulated = histogram.cumulated()
    count = cumulated[-1][1]
    if not count:
        return {}
    found = {
        name: next(float(bound) for bound, seen in cumulated if seen >= part * count)
        for name, part in (("p50", 0.5), ("p99", 0.99))
    }
    return {name: bound for name, bound in found.items() if bound != float("inf")} | {"count": count}


def _ghost(reading: Reading, capacity_bytes: int) -> list[Mapping[str, float]]:
    if reading.lives is None or not reading.lives.ghost.requested:
        return []
    ghost = reading.lives.ghost
    return [
        {"size": size, "capacity_bytes": int(size * capacity_bytes), "hit_rate": hits / ghost.requested}
        for size, hits in ghost.hits.items()
    ]
