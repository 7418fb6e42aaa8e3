"""Another capacity for a tier, while it is used: step by step, so that no pause grows with the tier."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.errors import BackendUnavailableError, ConfigurationError
from tiered_kv.preflight import check_host_memory
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.memory import HostTier, MemoryTier, Tier
from tiered_kv.tiers.owned import OwnedTier
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
    """
    tier = chains[0].tiers[number]
    if isinstance(tier, OwnedTier):
        return tier.backend.fit(capacity_bytes)
    if not isinstance(tier, HostTier):
        raise ConfigurationError(f"the capacity of tier {tier.name!r} cannot be changed while it is used")
    num_slots = capacity_bytes // sum(chain.stride_bytes for chain in chains)
    most = tier.index.max_slots
    if not 0 < num_slots <= most:
        raise ConfigurationError(f"tier {tier.name!r} can hold 1 to {most} blocks, not {num_slots}: set max_capacity")
    return num_slots


async def resize(chains: Sequence[Chain], cleaners: Sequence[Cleaner], number: int, num_slots: int) -> tuple[int, int]:
    """Have a tier hold ``num_slots`` blocks in each chain.

    Returns:
        How many it held before, and how many blocks had to go, in all chains.

    Raises:
        ConfigurationError: The machine lacks the memory.
        BackendUnavailableError: The medium did not grow; nothing has changed.
    """
    tiers = [_owned(chain.tiers[number]) for chain in chains]
    before = tiers[0].index.num_slots
    if num_slots > before:
        await _grow(chains, tiers[0], num_slots - before, num_slots)
    for cleaner in cleaners if num_slots < before else ():
        await cleaner.drain()  # what waits in slots that are given up would be lost
    num_evicted = 0
    for chain, tier in zip(chains, tiers, strict=True):
        num_evicted += await _resize_index(chain, tier, num_slots)
    first = tiers[0]
    if isinstance(first, OwnedTier) and num_slots < before and await _are_idle(tiers, first.health.timeout_s):
        await _resize_backend(first, num_slots)
    return before, num_evicted


async def _grow(chains: Sequence[Chain], tier: MemoryTier | OwnedTier, num_more: int, num_slots: int) -> None:
    if isinstance(tier, OwnedTier):
        await _resize_backend(tier, num_slots)
    elif _gives_back(chains[0]):
        check_host_memory(num_more * sum(chain.stride_bytes for chain in chains))


async def _resize_index(chain: Chain, tier: MemoryTier | OwnedTier, num_slots: int) -> int:
    """Change the books step by step, and give back host memory as it becomes free."""
    index, num_evicted = tier.index, 0
    step = max(1, min(_STEP_SLOTS, _STEP_BYTES // chain.stride_bytes))
    sizes = [index.num_slots, *range(index.num_slots - step, num_slots, -step), num_slots]
    is_given_back = isinstance(tier, HostTier) and _gives_back(chain)
    held: list[tuple[int, int]] = []
    for larger, smaller in pairwise(sizes):
        evicted = len(index.resize(smaller))
        num_evicted += evicted
        tier.counters.evicted += evicted
        chain.room.changed()
        if is_given_back and isinstance(tier, HostTier) and not _give_back(tier, smaller, larger):
            held.append((smaller, larger))
        await asyncio.sleep(0)
    if held and isinstance(tier, HostTier) and await _are_idle([tier], chain.limits.store_timeout_s):
        for smaller, larger in held:
            _give_back(tier, smaller, larger)
            await asyncio.sleep(0)
    return num_evicted


def _give_back(host: HostTier, start: int, stop: int) -> bool:
    """Return the memory of slots beyond the capacity to the system, but for those in use; say if that was all."""
    idle: NDArray[np.int64] = host.index.idle_retired(start, stop)
    for run in np.split(idle, np.flatnonzero(np.diff(idle) > 1) + 1):
        if len(run):
            host.slab.give_back(int(run[0]), int(run[-1]) + 1)
    return len(idle) == max(0, stop - start)


def _gives_back(chain: Chain) -> bool:
    """Whether host memory is taken from the system, and given back, by the slot: what is page-locked stays."""
    return chain.h2d.device.kind == "cpu"


async def _are_idle(tiers: Sequence[MemoryTier | OwnedTier], timeout_s: float) -> bool:
    """Wait until nobody uses the slots given up, for a limited time; say whether that is so."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while any(tier.index.statistics().retired < tier.index.max_slots - tier.index.num_slots for tier in tiers):
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(_LOOK_AGAIN_S)
    return True


async def _resize_backend(tier: OwnedTier, num_slots: int) -> None:
    try:
        async with asyncio.timeout(tier.health.timeout_s):
            await tier.backend.resize(num_slots)
    except TimeoutError as error:
        raise BackendUnavailableError(f"{tier.name} was not resized within {tier.health.timeout_s:g} s") from error


def _owned(tier: Tier) -> MemoryTier | OwnedTier:
    assert isinstance(tier, MemoryTier | OwnedTier)  # noqa: S101 - `slots_within` has raised before
    return tier
