"""What the connector counts, in vLLM's own hooks: a line of its log now and then, and Prometheus counters."""

from collections.abc import Mapping
from threading import Lock
from typing import Any, Final, Self

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tiered_kv.values.plan import TierShare

COUNTERS: Final = {
    "load_requests": "Requests that waited for blocks",
    "load_blocks": "Blocks that were brought to host memory for requests",
    "load_blocks_lost": "Blocks that were found and did not come, and were computed",
    "load_blocks_declined": "Blocks that were found, and computed, as that took less time",
    "load_wait_seconds": "Time that requests waited for blocks to be in host memory",
    "loaded_tokens": "Tokens whose blocks were loaded; vLLM counts hits when they are found",
    "store_blocks": "Blocks copied out of the engine",
    "store_blocks_skipped": "Blocks that were there already, had no room, were too many at once, or may be wrong",
    "store_blocks_late": "Blocks that vLLM dropped before they could be copied out, where they are stored then",
    "hints": "Actions of KV hints that are acted on",
    "hints_ignored": "Actions of KV hints that are not understood, too many, or have failed",
    "hint_blocks": "Blocks that hints keep or bring",
    "hint_blocks_refused": "Blocks that hints would keep or bring beyond their tenant's share",
    "errors": "Copies that failed",
}
BY_TIER: Final = {
    "load_bytes": "Bytes that requests were given, by the tier that had them",
    "load_seconds": "Time until these were in host memory, by tier: near 0 of what was there",
}


class TieredKVStats(KVConnectorStats):
    """Counters by name. ``data`` is plain, as vLLM sends it between processes."""

    data: dict[str, float]

    def reset(self) -> None:
        """Begin at zero."""
        self.data = {}

    def aggregate(self, other: Self) -> Self:
        """Add another's."""
        self.add(other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's log says."""
        return {f"tiered_kv {name}": round(value, 3) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        """Say whether nothing happened."""
        return not any(self.data.values())

    def add(self, counts: Mapping[str, float]) -> None:
        """Count more."""
        for name, value in counts.items():
            self.data[name] = self.data.get(name, 0) + value


class Counts:
    """What the scheduler's side counts, until vLLM takes it. Any thread may call."""

    def __init__(self) -> None:
        self._stats = TieredKVStats()
        self._lock = Lock()  # hints count in the cache's event loop

    def add(self, **counts: float) -> None:
        """Count more, by the names of `COUNTERS`; see `TieredKVStats.add`."""
        with self._lock:
            self._stats.add(counts)

    def load(self, num_wanted: int, num_blocks: int, waited_s: float) -> None:
        """Count a load as it goes to the workers."""
        lost = num_wanted - num_blocks
        self.add(load_requests=1, load_blocks=num_blocks, load_blocks_lost=lost, load_wait_seconds=waited_s)

    def store(self, num_wanted: int, num_stored: int) -> None:
        """Count a store that has ended."""
        self.add(store_blocks=num_stored, store_blocks_skipped=num_wanted - num_stored)

    def hints(self, num_actions: int, num_ignored: int) -> None:
        """Count what requests say of their KV."""
        if num_actions or num_ignored:
            self.add(hints=num_actions, hints_ignored=num_ignored)

    def favoured(self, num_blocks: int, num_refused: int) -> None:
        """Count blocks that are kept or brought by hints."""
        if num_blocks or num_refused:
            self.add(hint_blocks=num_blocks, hint_blocks_refused=num_refused)

    def load_ended(self, num_tokens: int, by_tier: Mapping[str, TierShare]) -> None:
        """Count what is in place, and what has come from which tier."""
        self.add(loaded_tokens=num_tokens)
        for tier, share in by_tier.items():
            self.add(**{f"load_bytes {tier}": share.num_bytes, f"load_seconds {tier}": share.seconds})

    def take(self) -> TieredKVStats | None:
        """Return what was counted since the last time."""
        with self._lock:
            if self._stats.is_empty():
                return None
            stats, self._stats = self._stats, TieredKVStats()
        return stats


class TieredKVPromMetrics(KVConnectorPromMetrics):
    """A counter for each of `COUNTERS`, ``vllm:tiered_kv_...``, and one with a label ``tier`` for each of `BY_TIER`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters = {
            name: self._counter_cls(name=f"vllm:tiered_kv_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._counters = {  # of each engine
            engine: {name: counter.labels(*values) for name, counter in counters.items()}
            for engine, values in per_engine_labelvalues.items()
        }
        self._by_tier = {
            name: self._counter_cls(name=f"vllm:tiered_kv_{name}", documentation=text, labelnames=[*labelnames, "tier"])
            for name, text in BY_TIER.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what one engine's connector has counted."""
        for name, value in transfer_stats_data.items():
            counted, _, tier = name.partition(" ")
            if tier:
                self._by_tier[counted].labels(*self.per_engine_labelvalues[engine_idx], tier).inc(value)
            else:
                self._counters[engine_idx][name].inc(value)


def hit_sources(media: Mapping[str, str], by_tier: Mapping[str, int], num_tokens: int) -> dict[CacheHitSource, int]:
    """Split tokens that come from tiers by vLLM's words for where they were.

    Args:
        media: Of the tiers that are the cache's own, see `BlockCache.media`.
        by_tier: Tokens that tiers of this cache's own have; the others are a shared one's.
        num_tokens: Of all.
    """
    sources: dict[CacheHitSource, int] = {}
    left = num_tokens
    for tier, medium in media.items():
        if num_here := min(left, by_tier.get(tier, 0)):
            source = CacheHitSource.HOST if medium == "cpu" else CacheHitSource.DISK
            sources[source] = sources.get(source, 0) + num_here
            left -= num_here
    return sources | ({CacheHitSource.EXTERNAL_UNSPECIFIED: left} if left else {})
