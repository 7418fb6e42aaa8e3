"""A snapshot of a cache in numbers, added up over its KV groups and ranks."""

from collections.abc import Sequence
from typing import Any

from tiered_kv.results import CacheStatistics, TierStatistics
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.ledger import Ledger
from tiered_kv.tiers.pins import Pins
from tiered_kv.tiers.storage import StorageTier

_SLOTS = ("num_slots", "free", "ready", "evictable", "leased", "pending", "doomed", "dirty", "withheld")


def cache_statistics(chains: Sequence[Chain], ledger: Ledger, pins: Pins, num_transfers: int) -> CacheStatistics:
    """Count what is where in all chains, which share their tiers."""
    host, device = [chain.host.index.statistics() for chain in chains], chains[0].h2d.device
    return CacheStatistics(
        tiers=tuple(_tier_statistics(chains, number) for number in range(len(chains[0].names))),
        transfers=num_transfers,
        store_queue_bytes=chains[0].limits.store_queue.num_bytes,
        bounce_free=sum(each.transient_free for each in host),
        bounce_slots=sum(chain.host.index.num_transient for chain in chains),
        requested=ledger.requested,
        missed=ledger.missed,
        store_requested=ledger.store_requested,
        stored=ledger.stored,
        present=ledger.present,
        dropped=ledger.dropped,
        missed_because=dict(ledger.missed_because),
        dropped_because=dict(ledger.dropped_because),
        num_preemptions=ledger.preemptions,
        pinned_bytes=pins.num_bytes,
        page_locked_bytes=device.page_locked_bytes,
        is_pageable=device.is_pageable,
        is_device_usable=device.error is None,
    )


def _tier_statistics(chains: Sequence[Chain], number: int) -> TierStatistics:
    values: dict[str, Any] = {}
    for chain in chains:
        tier = chain.tiers[number]
        counts = dict(vars(tier.counters))
        if (index := getattr(tier, "index", None)) is not None:
            books = index.statistics()
            counts |= {each: getattr(books, each) for each in _SLOTS}
            counts |= {
                "capacity_bytes": books.num_slots * chain.stride_bytes,
                "used_bytes": books.ready * chain.stride_bytes,
            }
        values = {each: values.get(each, 0) + count for each, count in counts.items()}
    tier = chains[0].tiers[number]
    health = getattr(tier, "health", None)
    if isinstance(tier, StorageTier):
        calls, budget = tier.calls, tier.budget
        values |= {
            "in_flight_bytes": budget.in_flight,
            "num_calls": calls.num_underway,
            "num_waiting": calls.num_waiting + budget.room.num_waiting,
        }
    return TierStatistics(
        tier=tier.name,
        is_bypassed=health is not None and (health.is_bypassed or health.is_shedding),
        open_breakers=health.open_breakers() if health is not None else (),
        facts=tier.describe() if isinstance(tier, StorageTier) else {},
        **values,
    )
