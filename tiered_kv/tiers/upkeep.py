"""What is done to whole tiers: blocks that are too old removed, blocks evicted on request, books noted down."""

import asyncio
from collections.abc import Sequence
from typing import Final

import numpy as np

from tiered_kv.tiers.base import BookedTier, Mask
from tiered_kv.tiers.batch import Batch
from tiered_kv.tiers.chain import Chain

_TICK_S: Final = 1.0
_SLOTS_AT_ONCE: Final = 1 << 16
"""Looked at in some 50 us; at most 4,096 of them are removed at once, in 1 ms."""


async def keep_up(chain: Chain) -> None:
    """Once a second make up for what a medium did not do, and remove what is too old; until cancelled."""
    while True:
        await asyncio.sleep(_TICK_S)
        for storage in chain.storage:
            storage.tick()
        for booked in chain.booked:
            if booked.index.ttl_s is not None:
                await _expire(chain, booked)


async def _expire(chain: Chain, tier: BookedTier) -> None:
    """Look through a tier once."""
    for _ in range(0, tier.index.num_slots, _SLOTS_AT_ONCE):
        num_expired = len(tier.index.expire(limit=_SLOTS_AT_ONCE))
        tier.counters.expired += num_expired
        if num_expired:
            chain.room.changed()
        await asyncio.sleep(0)


async def evict(chain: Chain, batch: Batch, tier: str | None) -> Mask:
    """Remove blocks from one tier, or from all; say which were in an owned one.

    All of it is decided before the first await: a cancellation ends the wait for the media, and nothing else. They are
    not waited for beyond their time.
    """
    found = np.zeros(len(batch), np.bool_)
    for booked in (each for each in chain.booked if tier in (None, each.name)):
        found |= booked.index.ready(batch.names)
    for memory in (each for each in chain.memory if tier in (None, each.name)):
        memory.index.remove(batch.names)
    storage = [each for each in chain.storage if tier in (None, each.name)]
    forgetting = [chain.tasks.spawn(each.forget(batch), f"evict from {each.name}") for each in storage]
    chain.room.changed()
    if forgetting:
        await asyncio.wait(forgetting, timeout=max(each.health.timeout_s for each in storage))
    return found


async def clear(chains: Sequence[Chain]) -> None:
    """Empty the owned tiers, after a restart too; tiers that do not answer are not waited for beyond their time."""
    clearing, timeout_s = [], 0.0
    for chain in chains:
        for memory in chain.memory:
            memory.index.clear()
        chain.room.changed()
        clearing += [chain.tasks.spawn(tier.clear(), f"clear {tier.name}") for tier in chain.owned]
        timeout_s = max([timeout_s, *(tier.health.timeout_s for tier in chain.owned)])
    if clearing:
        await asyncio.wait(clearing, timeout=timeout_s)


async def checkpoint(chains: Sequence[Chain], *, sync: bool) -> bool:
    """Let the owned tiers remember what they hold, in order of use; with ``sync`` through a loss of power.

    Returns:
        Whether all do that hold something: those that are open.
    """
    is_well = True
    for chain in chains:
        for tier in chain.owned:
            if tier.is_in_use:
                is_well &= await tier.checkpoint(sync=sync)
            else:
                is_well &= not tier.health.is_open
    return is_well
