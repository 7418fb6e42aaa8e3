"""A priority says who goes first. What a call is, and so what bounds it, it does not change."""

import asyncio
from collections.abc import Sequence

import pytest
from anyio.lowlevel import checkpoint

from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import inside, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, contents, prompt
from tiered_kv import Block, BlockKey, CacheLimits, GPULoadStoreSpec, Outcome, Priority

CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}
LIMITS = CacheLimits(window=4 * PAYLOAD_BYTES, bounce=512 * PAYLOAD_BYTES, close_timeout_s=0.5)


class CountingBackend(ScriptedBackend):
    """Counts the blocks that are being read."""

    now = most = 0

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Take a few turns."""
        self.now += len(keys)
        self.most = max(self.most, self.now)
        try:
            for _ in range(20):
                await checkpoint()
            return await super().read(keys, into)
        finally:
            self.now -= len(keys)


@pytest.mark.parametrize("priority", Priority)
async def test_no_priority_evades_the_budget(priority: Priority) -> None:
    """Loads have their bytes in flight bounded while stores are shed, whatever their priority."""
    medium, engine = CountingBackend(timeout_s=0.2), Engine(80)
    prompts = [prompt(4, seed=seed) for seed in range(20)]
    async with open_cache(medium, engine=engine, limits=LIMITS) as kv:
        for keys in prompts:
            await keep(kv, engine, keys)
        tier = inside(kv).chains[0].storage[0]
        most = tier.budget.limit // tier.shape.stride_bytes + 4
        medium.on_write.hold()
        storing = await kv.store(prompt(1, seed=99), GPULoadStoreSpec([0]))
        await until(lambda: tier.health.is_shedding)
        loaded = await asyncio.gather(
            *(
                kv.load(keys, GPULoadStoreSpec(range(4 * n, 4 * n + 4)), priority=priority)
                for n, keys in enumerate(prompts)
            )
        )
        medium.on_write.release()
        await storing.settled()
        assert [each.num_blocks for each in loaded] == [4] * 20
        assert 0 < medium.most <= most
        await until_idle(kv)


@pytest.mark.parametrize("priority", Priority)
async def test_no_load_waits_for_a_tier_that_is_bypassed(priority: Priority) -> None:
    """One that wants a hung tier's blocks is told at once that it is bypassed, and holds no slots of the host."""
    medium, engine = ScriptedBackend(timeout_s=0.05), Engine()
    first, second = prompt(4), prompt(4, seed=1)
    async with open_cache(medium, engine=engine, limits=LIMITS) as kv:
        await keep(kv, engine, first)
        await keep(kv, engine, second)
        medium.on_read.hold()
        hung = kv.start_load(first, GPULoadStoreSpec(range(4)), priority=priority)
        behind = kv.start_load(second, GPULoadStoreSpec(range(4, 8)), priority=priority)
        assert [(await hung).num_blocks, (await behind).num_blocks] == [0, 0]
        assert [fault.reason for fault in (await hung).faults] == ["timeout"]
        await until(lambda: kv.stats().bounce_slots - kv.stats().bounce_free <= 8)
        medium.on_read.release()
        await until_idle(kv)


async def test_a_load_of_low_priority_passes_through_a_full_tier() -> None:
    """Only a prefetch stops where blocks find no room to stay: somebody waits for a load."""
    medium, engine = ScriptedBackend(), Engine()
    held, wanted = prompt(16), prompt(4, seed=1)
    async with open_cache(CPU, medium, engine=engine, limits=LIMITS) as kv:
        await keep(kv, engine, wanted)
        await keep(kv, engine, held)
        async with kv.lease(held) as lease:
            assert lease.num_blocks == 16
            loaded = await kv.load(wanted, GPULoadStoreSpec(range(4)), priority=Priority.PREFETCH)
        assert loaded.num_blocks == 4
        await until_idle(kv)


async def test_a_load_does_not_wait_behind_stores_for_its_turns() -> None:
    """Of a thousand stores begun before it that only find their blocks there already, most end after it."""
    medium, engine = ScriptedSlotBackend(), Engine()
    keys = prompt(4)
    async with open_cache(medium, engine=engine, limits=LIMITS) as kv:
        await keep(kv, engine, keys)
        stores = [kv.start_store(keys, GPULoadStoreSpec(range(4))) for _ in range(1000)]
        loaded = await kv.load(keys, GPULoadStoreSpec(range(4, 8)))
        assert (loaded.num_blocks, engine.read(range(4, 8))) == (4, contents(keys))
        assert sum(each.done for each in stores) < 500
        assert [(await each).num_present for each in stores] == [4] * 1000
        await until_idle(kv)
