"""Time to live: blocks that came to an owned tier too long ago are removed, a bounded piece at a time."""

import asyncio
from collections.abc import Sequence
from typing import Final

from tiered_kv.motion.chain import Chain
from tiered_kv.motion.owned import OwnedTier
from tiered_kv.motion.tiers import MemoryTier

_TICK_S: Final = 1.0
_SLOTS_AT_ONCE: Final = 1 << 16
"""Looked at in some 50 us; at most 4,096 of them are removed at once, in 1 ms."""


async def expire_forever(chains: Sequence[Chain]) -> None:
    """Look through every tier that has a TTL once a second, until cancelled."""
    tiers = [(chain, tier) for chain in chains for tier in chain.tiers if isinstance(tier, MemoryTier | OwnedTier)]
    while True:
        await asyncio.sleep(_TICK_S)
        for chain, tier in tiers:
            if tier.index.ttl_s is not None:
                await _expire(chain, tier)


async def _expire(chain: Chain, tier: MemoryTier | OwnedTier) -> None:
    """Look through a tier once."""
    for _ in range(0, tier.index.num_slots, _SLOTS_AT_ONCE):
        num_expired = len(tier.index.expire(limit=_SLOTS_AT_ONCE))
        tier.counters.expired += num_expired
        if num_expired and isinstance(tier, MemoryTier):
            chain.room.changed()
        await asyncio.sleep(0)
