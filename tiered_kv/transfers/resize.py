"""Another capacity for a tier, while it is used: step by step, so that no pause grows with the tier."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from tiered_kv.errors import ConfigurationError
from tiered_kv.tiers.base import BookedTier
from tiered_kv.tiers.chain import Chain
from tiered_kv.transfers.cleaner import Cleaner

_STEP_SLOTS: Final = 4096
_STEP_BYTES: Final = 4 << 20
"""Of host memory given back at once: 1.6 ms."""
_LOOK_AGAIN_S: Final = 0.05


def slots_within(chains: Sequence[Chain], number: int, capacity_bytes: int) -> int:
    """Say how many blocks of each KV group a tier would hold within a capacity.

    Args:
        chains: All of the cache.
        number: Of the tier, in each of them.
        capacity_bytes: The capacity.

    Raises:
        ConfigurationError: It cannot have that capacity.
        BackendUnavailableError: Its medium is not open yet.
    """
    name = chains[0].names[number]
    tier = next((each for each in chains[0].booked if each.name == name), None)
    if tier is None:
        raise ConfigurationError(f"the capacity of tier {name!r} cannot be changed: its medium evicts for itself")
    return tier.slots_within(capacity_bytes, sum(chain.stride_bytes for chain in chains))


async def resize(chains: Sequence[Chain], cleaners: Sequence[Cleaner], number: int, num_slots: int) -> tuple[int, int]:
    """Have a tier hold ``num_slots`` blocks in each chain.

    Returns:
        How many it held before, and how many blocks had to go, in all chains.

    Raises:
        ConfigurationError: The machine lacks the memory.
        BackendUnavailableError: The medium did not grow; nothing has changed.
    """
    name = chains[0].names[number]
    tiers = [next(each for each in chain.booked if each.name == name) for chain in chains]
    before = tiers[0].index.num_slots
    if num_slots > before:
        stride_bytes = sum(chain.stride_bytes for chain in chains)
        await tiers[0].grow(num_slots, (num_slots - before) * stride_bytes if _gives_back(chains[0]) else 0)
    for cleaner in cleaners if num_slots < before else ():
        await cleaner.drain()  # what waits in slots that are given up would be lost
    num_evicted = 0
    for chain, tier in zip(chains, tiers, strict=True):
        num_evicted += await _resize_index(chain, tier, num_slots)
    if num_slots < before and await _are_idle(tiers, chains[0].limits.store_timeout_s):
        await tiers[0].shrink(num_slots)
    return before, num_evicted


async def _resize_index(chain: Chain, tier: BookedTier, num_slots: int) -> int:
    """Change the books step by step, and give back host memory as it becomes free."""
    index, num_evicted = tier.index, 0
    step = max(1, min(_STEP_SLOTS, _STEP_BYTES // chain.stride_bytes))
    sizes = [index.num_slots, *range(index.num_slots - step, num_slots, -step), num_slots]
    is_given_back = _gives_back(chain)
    held: list[tuple[int, int]] = []
    for larger, smaller in pairwise(sizes):
        evicted = len(index.resize(smaller))
        num_evicted += evicted
        tier.counters.evicted += evicted
        chain.room.changed()
        if is_given_back and not tier.give_back(smaller, larger):
            held.append((smaller, larger))
        await asyncio.sleep(0)
    if held and await _are_idle([tier], chain.limits.store_timeout_s):
        for smaller, larger in held:
            tier.give_back(smaller, larger)
            await asyncio.sleep(0)
    return num_evicted


def _gives_back(chain: Chain) -> bool:
    """Whether host memory is taken from the system, and given back, by the slot: what is page-locked stays."""
    return chain.h2d.device.kind == "cpu"


async def _are_idle(tiers: Sequence[BookedTier], timeout_s: float) -> bool:
    """Wait until nobody uses the slots given up, for a limited time; say whether that is so."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while any(tier.index.statistics().retired < tier.index.max_slots - tier.index.num_slots for tier in tiers):
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(_LOOK_AGAIN_S)
    return True
