"""Another capacity for a tier, while it is used: step by step, so that no pause grows with the tier."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.tier import BookedTier
from tiered_kv.transfers.writedown import Cleaner, write_all
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.integers import as_int
from tiered_kv.values.keys import Names

_STEP_SLOTS: Final = 4096
_STEP_BYTES: Final = 4 << 20
"""Of host memory given back at once: 1.6 ms."""
_LOOK_AGAIN_S: Final = 0.05


class GivenUp:
    """The slots beyond a tier's capacity that still take memory, as somebody uses some of them."""

    def __init__(self, chains: Sequence[Chain], tiers: Sequence[BookedTier]) -> None:
        """Take the tier, in each of the cache's chains."""
        self._parts = tuple(zip(chains, tiers, strict=True))

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses these slots any more."""
        indices = [tier.index for _, tier in self._parts]
        return all(index.statistics().retired >= index.max_slots - index.num_slots for index in indices)

    async def until_idle(self, timeout_s: float) -> bool:
        """Wait until nobody uses them, for a limited time; say whether that is so."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not self.is_idle:
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(_LOOK_AGAIN_S)
        return True

    async def give_back(self, *, of_memory: bool = True) -> None:
        """Give back what they take; nobody uses them, and the tier is not resized meanwhile."""
        for chain, tier in self._parts if of_memory else ():
            if _gives_back(chain):
                step, most = _step_of(chain), tier.index.max_slots
                for start in range(tier.index.num_slots, most, step):
                    tier.give_back(start, min(start + step, most))
                    await asyncio.sleep(0)
        tiers = [tier for _, tier in self._parts]
        await tiers[0].shrink(_num_blocks(tiers))


def check_capacity_of(chains: Sequence[Chain], number: int, capacity_bytes: int) -> int:
    """Check another capacity of a tier; return how many blocks of prompts the tier would hold within it.

    Args:
        chains: All of the cache.
        number: Of the tier, in each of them.
        capacity_bytes: The capacity.

    Raises:
        ConfigurationError: It cannot have that capacity.
        BackendUnavailableError: Its medium is not open yet.
    """
    name = chains[0].names[number]
    tiers = {chain: each for chain in chains for each in chain.booked if each.name == name}
    if not tiers:
        raise ConfigurationError(f"the capacity of tier {name!r} cannot be changed: its medium evicts for itself")
    whole = next(tier for chain, tier in tiers.items() if chain.group.slots_per_block == 1)
    num_blocks = whole.blocks_within(capacity_bytes, partial(_needed, chains))
    num_blocks = as_int(f"the number of blocks that tier {name!r} says it can hold", num_blocks, least=1)
    for chain, each in tiers.items():  # before any of them is changed
        if chain.group.num_slots(num_blocks) > (most := each.index.max_slots):
            raise ConfigurationError(f"tier {name!r} says it can hold {num_blocks} blocks, and was opened for {most}")
    return num_blocks


async def resize(
    chains: Sequence[Chain], cleaners: Mapping[Chain, Cleaner], number: int, num_blocks: int
) -> tuple[int, int, GivenUp | None]:
    """Have a tier hold so many blocks of prompts, of each KV group its share.

    Returns:
        How many it held before, how many blocks had to go, in all chains, and what is to be given back later.

    Raises:
        ConfigurationError: The machine lacks the memory.
        BackendUnavailableError: The medium did not grow; nothing has changed.
    """
    name = chains[0].names[number]
    tiers = [next(each for each in chain.booked if each.name == name) for chain in chains]
    before = _num_blocks(tiers)
    if num_blocks > before:
        more_bytes = _needed(chains, num_blocks) - _needed(chains, before)
        await tiers[0].grow(num_blocks, more_bytes if _gives_back(chains[0]) else 0)
    num_evicted, is_given_back = 0, True
    for chain, tier in zip(chains, tiers, strict=True):
        num_slots = chain.group.num_slots(num_blocks)
        if num_blocks >= before:  # a medium may have more of a group than it was asked for, and blocks there
            num_slots = max(num_slots, tier.index.num_slots)
        evicted, is_all = await _resize_index(chain, tier, num_slots)
        num_evicted += evicted
        is_given_back &= is_all
    if num_blocks >= before:
        return before, num_evicted, None
    # What waits in slots that are given up would be lost. Nothing comes there any more.
    await write_all({chain: chain.unwritten.mark() for chain in chains}, cleaners)
    for chain, tier in zip(chains, tiers, strict=True):
        num_evicted += await _give_up(chain, tier)
    given_up = GivenUp(chains, tiers)
    if not await given_up.until_idle(chains[0].limits.store_timeout_s):
        return before, num_evicted, given_up
    await given_up.give_back(of_memory=not is_given_back)
    return before, num_evicted, None


async def _resize_index(chain: Chain, tier: BookedTier, num_slots: int) -> tuple[int, bool]:
    """Change the books step by step, and give back host memory that is free. What is held stays.

    Returns:
        How many blocks had to go, and whether all that memory was free.
    """
    index, num_evicted, is_all = tier.index, 0, True
    step = _step_of(chain)
    sizes = [index.num_slots, *range(index.num_slots - step, num_slots, -step), num_slots]
    is_given_back = _gives_back(chain)
    for larger, smaller in pairwise(sizes):
        num_evicted += _count(chain, tier, index.resize(smaller, keep_held=True))
        if is_given_back:
            is_all &= tier.give_back(smaller, larger)
        await asyncio.sleep(0)
    return num_evicted, is_all


async def _give_up(chain: Chain, tier: BookedTier) -> int:
    """Have whatever is held beyond the capacity go, step by step; return how many blocks did since it was resized."""
    index, step, num_evicted = tier.index, _step_of(chain), 0
    unwritten = chain.unwritten
    # What a store is late with, or a worker copies, was not waited for: what it brings to such a slot goes no further.
    may_lose = tier is chain.host and bool(chain.written) and unwritten.num_late > 0
    unwritten.has_lost |= may_lose and index.is_filled_from(index.num_slots)
    for given_up in unwritten.held.values() if tier is chain.host else ():
        given_up(index.num_slots)
    for start in (*range(index.max_slots - step, index.num_slots, -step), index.num_slots):
        num_evicted += _count(chain, tier, index.give_up(start))
        await asyncio.sleep(0)
    return num_evicted


def _num_blocks(tiers: Sequence[BookedTier]) -> int:
    """Return how many blocks of prompts a tier holds: as many as the KV group that has a slot for each of them."""
    return max(tier.index.num_slots for tier in tiers)


def _needed(chains: Sequence[Chain], num_blocks: int) -> int:
    """Return how many bytes of memory so many blocks of prompts take."""
    return sum(chain.group.num_slots(num_blocks) * chain.stride_bytes for chain in chains)


def _count(chain: Chain, tier: BookedTier, evicted: Names) -> int:
    tier.counters.evicted += len(evicted)
    chain.room.changed()
    return len(evicted)


def _step_of(chain: Chain) -> int:
    """How many slots are given up, or back, at once."""
    return max(1, min(_STEP_SLOTS, _STEP_BYTES // chain.stride_bytes))


def _gives_back(chain: Chain) -> bool:
    """Whether host memory is taken from the system, and given back, by the slot: what is page-locked stays."""
    return chain.h2d.device.kind == "cpu"
