"""Time to live: blocks that came to an owned tier too long ago are removed, a bounded piece at a time."""

import asyncio
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.memory import Batch, MemoryTier
from tiered_kv.tiers.owned import OwnedTier

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


async def evict(chain: Chain, batch: Batch, tier: str | None) -> NDArray[np.bool_]:
    """Remove blocks from one tier, or from all; say which were in an owned one.

    Shared tiers are asked to delete, and not waited for beyond their time.
    """
    found = np.zeros(len(batch), np.bool_)
    memory = [each for each in chain.memory if tier in (None, each.name)]
    storage = [each for each in chain.storage if tier in (None, each.name)]
    for each in memory:
        found |= each.index.ready(batch.names)
        each.index.remove(batch.names)
    chain.room.changed()
    for owned in storage:
        if isinstance(owned, OwnedTier):
            found |= owned.index.ready(batch.names)
    forgetting = [chain.tasks.spawn(each.forget(batch), f"evict from {each.name}") for each in storage]
    if forgetting:
        await asyncio.wait(forgetting, timeout=max(each.health.timeout_s for each in storage))
        for each in memory:  # a load may have read from a shared tier what that had not deleted yet
            each.index.remove(batch.names)
        chain.room.changed()
    return found


async def clear(chains: Sequence[Chain]) -> None:
    """Empty the owned tiers, after a restart too; tiers that do not answer are not waited for beyond their time."""
    clearing, timeout_s = [], 0.0
    for chain in chains:
        for memory in chain.memory:
            memory.index.clear()
        chain.room.changed()
        owned = [tier for tier in chain.storage if isinstance(tier, OwnedTier)]
        clearing += [chain.tasks.spawn(tier.clear(), f"clear {tier.name}") for tier in owned]
        timeout_s = max([timeout_s, *(tier.health.timeout_s for tier in owned)])
    if clearing:
        await asyncio.wait(clearing, timeout=timeout_s)


async def checkpoint(chains: Sequence[Chain], *, sync: bool) -> None:
    """Let the owned tiers remember what they hold, in order of use; with ``sync`` through a loss of power."""
    for chain in chains:
        for tier in chain.storage:
            if isinstance(tier, OwnedTier) and not tier.health.is_bypassed:
                await tier.checkpoint(sync=sync)
