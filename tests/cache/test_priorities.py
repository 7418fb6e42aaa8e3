"""A priority says who goes first. What a call is, and so what bounds it, it does not change."""

import asyncio
from collections.abc import Sequence

import pytest
from anyio.lowlevel import checkpoint

from tests.support import virtual
from tests.support.backends import ScriptedBackend
from tests.support.caches import inside, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, contents, prompt
from tests.support.virtual import InlineWorkers, advance
from tiered_kv import Block, BlockKey, CacheLimits, GPULoadStoreSpec, Outcome, Priority
from tiered_kv.testing import ScriptedDevice

CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}
ROOMY = {"medium": "cpu", "capacity": 64 * PAYLOAD_BYTES}
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
        most = tier.calls.budget.limit // tier.shape.stride_bytes + 4
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


@pytest.mark.parametrize("gaps", [False, True])
async def test_a_planned_load_does_not_wait_behind_guesses(*, gaps: bool) -> None:
    """Neither for their quota nor in the line of a tier: somebody waits for it, as for any load."""
    medium, engine = ScriptedBackend(), Engine()
    wanted, *guesses = (prompt(4, seed=seed) for seed in range(6))
    for quota, limit in ((4, 64), (64, 4)):
        limits = LIMITS.model_copy(update={"prefetch_quota": quota * PAYLOAD_BYTES})
        async with open_cache(ROOMY, medium, engine=engine, limits=limits) as kv:
            for keys in (wanted, *guesses):
                await keep(kv, engine, keys)
                await kv.evict(keys, tier="cpu")
            tier = inside(kv).chains[0].storage[0]
            tier.calls.budget.limit = limit * tier.shape.stride_bytes
            planner = kv.planner()
            planner.register_worker()
            medium.on_read.hold()
            prefetches = [kv.prefetch(keys) for keys in guesses]
            await until(lambda: medium.on_read.num_held == 1)
            job = planner.plan_load(wanted, GPULoadStoreSpec(range(4)), gaps=gaps)
            await until(lambda: medium.on_read.num_held == 2)
            medium.on_read.release()
            assert [len(move.host) for move in (await job.planned()).moves] == [4]
            job.cancel(undelivered=True)
            assert [(await each).num_blocks for each in prefetches] == [4] * 5
            await until_idle(kv)


@pytest.mark.parametrize("gaps", [False, True])
def test_a_planned_load_has_the_time_of_a_load(*, gaps: bool) -> None:
    """Then it is planned with what is there, whatever its medium does; the job can be cancelled, and holds nothing."""

    async def program() -> None:
        medium, engine, keys = ScriptedBackend(timeout_s=100.0), Engine(), prompt(12)
        limits = LIMITS.model_copy(update={"load_timeout_s": 5.0})
        async with open_cache(ROOMY, medium, engine=engine, limits=limits) as kv:
            await keep(kv, engine, keys)
            await kv.evict(keys[4:], tier="cpu")
            planner = kv.planner()
            planner.register_worker()
            medium.on_read.hold()
            job = planner.plan_load(keys, GPULoadStoreSpec(range(12)), gaps=gaps)
            await until(lambda: medium.on_read.num_held == 1)
            await advance(4.9)
            assert job.plan is None
            await advance(0.2)
            await until(lambda: job.plan is not None)
            assert job.plan is not None
            assert [move.positions for move in job.plan.moves] == [(0, 1, 2, 3)]
            job.cancel(undelivered=True)
            await job.ended()
            medium.on_read.release()
            await until_idle(kv)

    virtual.run(program)


async def test_a_planned_load_takes_no_slots_that_blocks_only_pass_through() -> None:
    """What has no room to stay is left out of the plan at once: nothing would be held of it."""
    medium, engine = ScriptedBackend(), Engine()
    held, wanted = prompt(14), prompt(4, seed=1)
    async with open_cache(CPU, medium, engine=engine, limits=LIMITS) as kv:
        await keep(kv, engine, wanted)
        await kv.evict(wanted, tier="cpu")
        await keep(kv, engine, held)
        planner = kv.planner()
        planner.register_worker()
        async with kv.lease(held) as lease:
            assert lease.num_blocks == 14
            medium.on_read.hold()
            job = planner.plan_load(wanted, GPULoadStoreSpec(range(4)))
            await until(lambda: medium.on_read.num_held > 0)
            assert kv.stats().bounce_free == kv.stats().bounce_slots
            medium.on_read.release()
            assert (await job.planned()).num_blocks == 2
            job.cancel(undelivered=True)
            await job.ended()
        await until_idle(kv)


async def test_a_load_does_not_wait_behind_stores_for_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand stores begun before it that only find their blocks there already, most end after it."""
    monkeypatch.setattr("tiered_kv.cache.opening.WorkerPool", InlineWorkers)  # turns alone count, no thread's time
    medium, engine, device = ScriptedBackend(), Engine(), ScriptedDevice()
    keys = prompt(4)
    async with open_cache(medium, engine=engine, limits=LIMITS, device=device) as kv:
        storing = kv.start_store(keys, engine.compute(keys))
        await until(lambda: storing.done, on_wait=device.step)
        await (await storing).settled()
        stores = [kv.start_store(keys, GPULoadStoreSpec(range(4))) for _ in range(1000)]
        loading = kv.start_load(keys, GPULoadStoreSpec(range(4, 8)))
        await until(lambda: loading.done, on_wait=device.step)
        assert sum(each.done for each in stores) < 500
        assert ((await loading).num_blocks, engine.read(range(4, 8))) == (4, contents(keys))
        assert [(await each).num_present for each in stores] == [4] * 1000
        await until_idle(kv)
