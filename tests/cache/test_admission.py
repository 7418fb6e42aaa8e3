"""Admission: a tier that wants blocks used n times first gets them at their n-th use, wherever they are then."""

import asyncio

import pytest

from tests.support.backends import ScriptedSlotBackend
from tests.support.caches import keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, SMALL_LIMITS, Engine, prompt
from tiered_kv import GPULoadStoreSpec, Outcome, Outcomes, StorageTierSettings, TierStore
from tiered_kv.tiers.chain import Chain

KEYS = prompt(8)
CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}


def picky(admit_after: int, **settings: object) -> ScriptedSlotBackend:
    """Return an owned tier that takes blocks at their n-th use."""
    backend = ScriptedSlotBackend()
    given = {"medium": "slots", "name": "slots", "admit_after": admit_after} | settings
    backend.settings = StorageTierSettings.model_validate(given)
    return backend


async def test_the_second_use_writes() -> None:
    """A store is the first use, a load the second; only what was loaded is written."""
    engine, slots = Engine(), picky(2)
    async with open_cache(CPU, slots, engine=engine) as kv:
        stored = await kv.store(KEYS, engine.compute(KEYS))
        assert await stored.settled() == (TierStore("cpu", written=8), TierStore("slots", deferred=8))
        await kv.load(KEYS[:4], GPULoadStoreSpec(range(4)))
        await until(lambda: kv.stats().transfers == 0)
        assert (slots.num_records, kv.stats()["slots"].written) == (4, 4)
        await kv.load(KEYS[:4], GPULoadStoreSpec(range(4)))
        await until_idle(kv)
        assert slots.on_write.num_blocks == 4


async def test_every_kind_of_use_counts() -> None:
    """Storing again what is there, and touching, are uses as much as loading."""
    engine, slots = Engine(), picky(3)
    async with open_cache(CPU, slots, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await keep(kv, engine, KEYS)
        assert slots.num_records == 0
        kv.touch(KEYS)
        await until(lambda: slots.num_records == 8)
        await until_idle(kv)


async def test_what_a_full_queue_dropped_is_written_at_the_next_use() -> None:
    """It was used often enough already; once it is there no use writes it again."""
    engine, slots = Engine(), picky(2)
    limits = SMALL_LIMITS.model_copy(update={"store_queue": 4 * PAYLOAD_BYTES})
    async with open_cache(CPU, slots, engine=engine, limits=limits) as kv:
        await keep(kv, engine, KEYS)
        slots.on_write.hold()
        kv.touch(KEYS[:4])
        await until(lambda: slots.on_write.num_held == 1)
        kv.touch(KEYS[4:])
        assert kv.stats()["slots"].dropped_because == {"queue full": 4}
        slots.on_write.release()
        await until(lambda: kv.stats().transfers == 0)
        kv.touch(KEYS[4:])
        await until(lambda: slots.num_records == 8)
        kv.touch(KEYS)
        await until_idle(kv)
        assert slots.on_write.num_blocks == 8


async def test_what_a_tier_failed_to_write_is_written_at_the_next_use() -> None:
    """Once it takes blocks again."""
    engine, slots = Engine(), picky(2)
    async with open_cache(CPU, slots, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        for _ in range(2):  # windows
            slots.on_write.change_next(lambda outcomes: [Outcome.FAILED] * len(outcomes))
        kv.touch(KEYS)
        await kv.flush()
        assert (slots.num_records, kv.stats()["slots"].failed) == (0, 8)
        kv.touch(KEYS)
        await kv.flush()
        assert slots.num_records == 8
        await until_idle(kv)


async def test_what_left_memory_is_written_when_it_is_stored_again() -> None:
    """Its uses are remembered."""
    engine, slots = Engine(), picky(2)
    async with open_cache(CPU, slots, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS, tier="cpu")
        await keep(kv, engine, KEYS)
        assert slots.num_records == 8
        await until_idle(kv)


async def test_a_tier_that_is_written_back_waits_for_the_use_as_well() -> None:
    """What was used once does not wait, and so does not fill memory with what cannot be evicted."""
    engine, slots = Engine(), picky(2, write="back")
    async with open_cache(CPU, slots, engine=engine) as kv:
        await kv.store(KEYS, engine.compute(KEYS))
        assert kv.stats()["cpu"].dirty == 0
        kv.touch(KEYS[:4])
        assert kv.stats()["cpu"].dirty == 4
        await kv.flush()
        assert slots.num_records == 4
        await until_idle(kv)


async def test_blocks_of_the_gpu_pool_are_written_from_there() -> None:
    """Without a CPU tier they pass through."""
    engine, slots = Engine(), picky(2)
    async with open_cache({"medium": "gpu", "capacity": 16 * PAYLOAD_BYTES}, slots, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        assert slots.num_records == 0
        kv.touch(KEYS)
        await until(lambda: slots.num_records == 8)
        await until_idle(kv)


async def test_a_store_that_raises_as_it_begins_holds_up_no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, of ours perhaps, while uses were counted: nobody waits for the end of such a store."""
    engine, slots = Engine(), picky(2)
    async with open_cache({"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, slots, engine=engine) as kv:
        await kv.store(KEYS, engine.compute(KEYS))
        with monkeypatch.context() as patched:
            patched.setattr(Chain, "count_use", lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                await kv.store(KEYS, engine.compute(KEYS))
        async with asyncio.timeout(30):
            await kv.flush()
        await until_idle(kv)


@pytest.mark.parametrize("num_blocks", [8, 600])
@pytest.mark.parametrize("direction", ["load", "store"])
async def test_a_planned_transfer_is_a_use(direction: str, num_blocks: int) -> None:
    """A load of what workers have moved, and a store of what is there, count as those without a plan do."""
    engine, slots, keys = Engine(num_blocks), picky(2), prompt(num_blocks)
    slots.num_slots = num_blocks
    async with open_cache({"medium": "cpu", "capacity": num_blocks * PAYLOAD_BYTES}, slots, engine=engine) as kv:
        await keep(kv, engine, keys)
        planner, blocks = kv.planner(), GPULoadStoreSpec(range(num_blocks))
        planner.register_worker()
        if direction == "load":
            unmoved = planner.plan_load(keys, blocks)
            planner.complete(Outcomes((await unmoved.planned()).job, 0, 0))
            await unmoved.ended()
            await until_idle(kv)
            assert slots.num_records == 0
            job = planner.plan_load(keys, blocks)
            planner.complete(Outcomes((await job.planned()).job, 0, num_blocks))
        else:
            job = planner.plan_store(keys, blocks)
        await job.ended()
        await until_idle(kv)
        assert slots.num_records == num_blocks


async def test_what_a_store_passes_through_full_memory_is_written_at_the_use_that_admits_it() -> None:
    """It is on its way to another tier, in a slot that memory does not keep: the second use finds it there only."""
    engine, first, second = Engine(), ScriptedSlotBackend(name="first"), picky(2)
    async with open_cache(CPU, first, second, engine=engine) as kv:
        held = prompt(16, seed=1)
        await keep(kv, engine, held)
        async with kv.lease(held):
            first.on_write.hold()
            passing = kv.start_store(KEYS[:2], engine.compute(KEYS[:2]))
            await until(lambda: first.on_write.num_held > 0)
            await kv.store(KEYS[:2], engine.compute(KEYS[:2]))
            first.on_write.release()
            await passing
            await kv.flush()
            assert kv.stats()["cpu"].dropped >= 2, "memory was full"
            assert second.num_records == 2
        await until_idle(kv)


async def test_a_planned_load_keeps_its_blocks_below() -> None:
    """It is served from memory, and hot heads do not rot below."""
    engine, disk = Engine(), ScriptedSlotBackend(16, policy="lru")
    async with open_cache({"medium": "cpu", "capacity": 32 * PAYLOAD_BYTES}, disk, engine=engine) as kv:
        hot, cold, new = (prompt(8, seed=seed) for seed in range(3))
        await keep(kv, engine, hot)
        await keep(kv, engine, cold)
        planner = kv.planner()
        planner.register_worker()
        job = planner.plan_load(hot, GPULoadStoreSpec(range(8)))
        planner.complete(Outcomes((await job.planned()).job, 0, 8))
        await job.ended()
        await keep(kv, engine, new)
        for keys in (hot, cold, new):
            await kv.evict(keys, tier="cpu")
        assert [(await kv.lookup(keys)).num_blocks for keys in (hot, cold, new)] == [8, 0, 8]
        await until_idle(kv)


@pytest.mark.parametrize("num_blocks", [8, 600])
@pytest.mark.parametrize("use", ["touch", "load", "store", "planned load", "planned store"])
async def test_a_flush_waits_for_what_a_use_admits(use: str, num_blocks: int) -> None:
    """Also where the use is part of a store that has just begun, or of a job: all of it is in every tier then."""
    engine, slots, keys = Engine(num_blocks), picky(2), prompt(num_blocks)
    slots.num_slots = num_blocks
    async with open_cache({"medium": "cpu", "capacity": num_blocks * PAYLOAD_BYTES}, slots, engine=engine) as kv:
        await keep(kv, engine, keys)
        slots.on_write.hold()
        if use == "touch":
            kv.touch(keys)
        elif use == "load":
            await kv.load(keys, GPULoadStoreSpec(range(num_blocks)))
        elif use == "store":
            kv.start_store(keys, GPULoadStoreSpec(range(num_blocks)))
        else:
            planner = kv.planner()
            planner.register_worker()
            plan = planner.plan_load if use == "planned load" else planner.plan_store
            job = plan(keys, GPULoadStoreSpec(range(num_blocks)))
            planner.complete(Outcomes((await job.planned()).job, 0, num_blocks))
            await job.ended()
        flushing = asyncio.create_task(kv.flush())
        await until(lambda: slots.on_write.num_held > 0)
        assert not flushing.done()
        slots.on_write.release()
        await asyncio.wait_for(flushing, 60)
        assert slots.num_records == num_blocks
        await until_idle(kv)


@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("has_cpu", [False, True])
async def test_a_prompt_longer_than_what_passes_through_memory_is_written_from_the_gpu_pool(
    write: str, *, has_cpu: bool
) -> None:
    """There is never room for all of it in host memory at once."""
    engine, slots, keys = Engine(), picky(2, write=write), prompt(40)
    gpu, cpu = ({"medium": medium, "capacity": 64 * PAYLOAD_BYTES} for medium in ("gpu", "cpu"))
    async with open_cache(gpu, *[cpu][: int(has_cpu)], slots, engine=engine) as kv:
        await keep(kv, engine, keys)
        if has_cpu:
            await kv.evict(keys, tier="cpu")
        kv.touch(keys)
        assert await kv.drain()
        assert (slots.num_records, kv.stats()["slots"].dropped_because) == (40, {})
        await until_idle(kv)
