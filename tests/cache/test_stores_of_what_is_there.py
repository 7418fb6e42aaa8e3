"""A store of blocks that are there already copies nothing, and is a use of them like any other."""

import asyncio
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import inside, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, SMALL_LIMITS, Engine, contents, prompt, small_layout
from tests.support.virtual import CountingDevice, pools_of, run, watch
from tests.support.work import num_calls
from tiered_kv import GPULoadStoreSpec, Outcomes, Reason, TierStore, Worker
from tiered_kv.testing import ScriptedDevice
from tiered_kv.tiers.tier import Batch

KEYS = prompt(3)


async def test_what_a_store_finds_there_is_used_in_memory() -> None:
    """An engine whose own cache has a prefix stores it anew, and never loads it: it must not be the first to go."""
    engine = Engine()
    async with open_cache({"medium": "cpu", "capacity": 4 * PAYLOAD_BYTES, "policy": "lru"}, engine=engine) as kv:
        for seed in range(1, 6):
            await keep(kv, engine, KEYS)
            await keep(kv, engine, prompt(1, seed=seed))
        assert (await kv.lookup(KEYS)).num_blocks == 3
        assert kv.stats().present == 4 * 3


async def test_it_is_used_below_too() -> None:
    """A tier below sees none of these stores, and keeps what they are of."""
    engine, slots = Engine(), ScriptedSlotBackend(4)
    async with open_cache({"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, slots, engine=engine) as kv:
        for seed in range(1, 6):
            await keep(kv, engine, KEYS)
            await keep(kv, engine, prompt(1, seed=seed))
        await until_idle(kv)
        assert ((await kv.evict(KEYS, tier="cpu")).num_blocks, (await kv.lookup(KEYS)).by_tier) == (3, {"slots": 3})


@pytest.mark.parametrize("medium", [ScriptedSlotBackend, ScriptedBackend])
@pytest.mark.parametrize(("how", "write"), [("failed", "through"), ("evicted", "through"), ("evicted", "back")])
async def test_a_tier_below_gets_what_it_lacks(
    medium: type[ScriptedSlotBackend | ScriptedBackend], how: str, write: str
) -> None:
    """As it failed to be written, or was evicted there: a store says which it has, and sends the others."""
    engine, below = Engine(), medium(name="below", write=write)
    async with open_cache({"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, below, engine=engine) as kv:
        if how == "failed":
            below.on_write.fail_next(OSError("once"))
        await keep(kv, engine, KEYS)
        await kv.flush()
        if how == "evicted":
            await kv.evict(KEYS, tier="below")
        assert below.num_records == 0
        stored = await kv.store(KEYS, engine.compute(KEYS))
        assert (stored.num_stored, stored.num_present) == (0, 3)
        assert await stored.settled() == (TierStore("cpu", present=3), TierStore("below", deferred=3))
        assert await kv.flush()
        assert below.num_records == 3
        stored = await kv.store(KEYS, engine.compute(KEYS))
        assert await stored.settled() == (TierStore("cpu", present=3), TierStore("below", present=3))
        await until_idle(kv)
        assert below.num_records == 3


async def test_what_a_shared_tier_lacks_is_sent_once_however_often_it_is_stored() -> None:
    """As long as it is on its way; if that fails, the next store sends it again."""
    engine, below = Engine(), ScriptedBackend(name="below")
    async with open_cache({"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, below, engine=engine) as kv:
        below.on_write.fail_next(OSError("once"))
        await keep(kv, engine, KEYS)
        await kv.flush()
        below.on_write.hold()
        below.on_write.fail_next(OSError("again"))
        again = await kv.store(KEYS, engine.compute(KEYS))
        await until(lambda: below.on_write.num_held == 1)
        for _ in range(3):
            stored = await kv.store(KEYS, engine.compute(KEYS))
            assert (await stored.settled())[-1] == TierStore("below", present=3)
        below.on_write.release()
        assert (await again.settled())[-1] == TierStore("below", deferred=3)
        await until_idle(kv)
        assert (below.on_write.num_calls, below.num_records) == (2, 0)
        await kv.store(KEYS, engine.compute(KEYS))
        assert await kv.flush()
        assert below.num_records == 3


async def test_what_a_shared_tier_lacks_is_not_sent_beside_a_write_that_brings_it() -> None:
    """As its use has just brought it on its way, where a tier wants some, or a store of what was evicted everywhere."""
    engine, below = Engine(), ScriptedBackend(name="below", admit_after=2)
    async with open_cache({"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, below, engine=engine) as kv:
        below.on_write.fail_next(OSError("once"))
        for _ in range(3):
            await (await kv.store(KEYS, engine.compute(KEYS))).settled()
            await until_idle(kv)
        assert (below.on_write.num_calls, below.num_records) == (2, 3)
        await kv.evict(KEYS)
        below.on_write.hold()
        await kv.store(KEYS, engine.compute(KEYS))
        await until(lambda: below.on_write.num_held == 1)
        stored = await kv.store(KEYS, engine.compute(KEYS))
        assert (await stored.settled())[-1] == TierStore("below", present=3)
        below.on_write.release()
        await until_idle(kv)
        assert (below.on_write.num_calls, below.num_records) == (3, 3)


@pytest.mark.parametrize("write", ["through", "back"])
async def test_what_is_evicted_while_it_is_written_is_sent_again(write: str) -> None:
    """The write ends well, and what evicted the blocks deletes them behind it."""
    engine, below = Engine(), ScriptedBackend(name="below", write=write)
    async with open_cache({"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, below, engine=engine) as kv:
        below.on_write.hold()
        await kv.store(KEYS, engine.compute(KEYS))
        flushing = asyncio.ensure_future(kv.flush())
        await until(lambda: below.on_write.num_held == 1)
        evicting = asyncio.ensure_future(kv.evict(KEYS, tier="below"))
        await checkpoint()
        below.on_write.release()
        await asyncio.gather(evicting, flushing)
        await until_idle(kv)
        assert below.num_records == 0
        stored = await kv.store(KEYS, engine.compute(KEYS))
        assert (await stored.settled())[-1] == TierStore("below", deferred=3)
        assert await kv.flush()
        assert below.num_records == 3


@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize(
    ("tier", "above"), [("below", ["cpu"]), ("below", ["gpu", "cpu"]), ("cpu", ["cpu"]), ("cpu", ["gpu", "cpu"])]
)
async def test_what_is_evicted_on_its_way_down_is_sent_by_the_next_store(
    write: str, tier: str, above: list[str]
) -> None:
    """Wherever it is then: on its way out of the engine or to the CPU tier, waiting there, or being written."""
    for num_steps in range(16):
        engine, below = Engine(), ScriptedBackend(name="below", write=write)
        memory = [{"medium": medium, "capacity": 16 * PAYLOAD_BYTES} for medium in above]
        async with open_cache(*memory, below, engine=engine) as kv:
            storing = kv.start_store(KEYS, engine.compute(KEYS))
            for _ in range(num_steps):
                await checkpoint()
            await kv.evict(KEYS, tier=tier)
            await (await storing).settled()
            assert await kv.flush()
            await kv.store(KEYS, engine.compute(KEYS))
            assert await kv.flush()
            assert below.num_records == 3, num_steps


async def test_what_waits_in_the_gpu_pool_is_not_sent_to_a_shared_tier_beside_that() -> None:
    """Which is known to lack it, as it was evicted there: it comes by the CPU tier, once that takes it."""
    engine, below = Engine(), ScriptedBackend(name="below")
    gpu, cpu = ({"medium": medium, "capacity": 16 * PAYLOAD_BYTES} for medium in ("gpu", "cpu"))
    async with open_cache(gpu, cpu | {"write": "back"}, below, engine=engine) as kv:
        for num_times in (1, 2):
            for _ in range(3):
                await kv.store(KEYS, engine.compute(KEYS))
            assert await kv.flush()
            assert (below.num_records, below.on_write.num_blocks) == (3, num_times * 3)
            await kv.evict(KEYS)


async def test_what_waits_in_the_gpu_pool_again_is_not_sent_to_a_shared_tier_beside_that() -> None:
    """As its copy to the CPU tier failed."""
    device, engine, below = ScriptedDevice(), Engine(), ScriptedBackend(name="below")
    gpu, cpu = ({"medium": medium, "capacity": 16 * PAYLOAD_BYTES} for medium in ("gpu", "cpu"))
    async with open_cache(gpu, cpu | {"write": "back"}, below, engine=engine, device=device) as kv:
        storing = kv.start_store(KEYS, engine.compute(KEYS))
        await until(lambda: storing.done, on_wait=device.step)
        device.fail_next(OSError("once"))
        flushing = asyncio.ensure_future(kv.flush())
        await until(lambda: not kv.stats()["gpu"].dirty)
        await until(lambda: kv.stats()["gpu"].dirty == 3, on_wait=device.step)
        again = kv.start_store(KEYS, engine.compute(KEYS))
        await until(lambda: flushing.done() and again.done, on_wait=device.step)
        draining = asyncio.ensure_future(kv.drain())
        await until(draining.done, on_wait=device.step)
        assert (below.num_records, below.on_write.num_blocks) == (3, 3)


@pytest.mark.parametrize("how", ["resized", "expired"])
@pytest.mark.parametrize("medium", [ScriptedSlotBackend, ScriptedBackend])
def test_what_went_while_it_waited_in_the_cpu_tier_is_sent_by_the_next_store(
    medium: type[ScriptedSlotBackend | ScriptedBackend], how: str
) -> None:
    """As that became smaller while the tier below failed, or it grew too old there: the GPU pool has it yet."""

    async def work() -> None:
        device, engine, below = CountingDevice(), Engine(), medium(name="below", write="back")
        gpu, cpu = ({"medium": each, "capacity": 16 * PAYLOAD_BYTES} for each in ("gpu", "cpu"))
        async with open_cache(gpu, cpu | {"ttl_s": 5}, below, engine=engine, device=device) as kv:
            watch(device, pools_of(kv))
            await kv.store(KEYS, engine.compute(KEYS))
            if how == "resized":
                below.on_write.fail_next(OSError("once"))
                await kv.resize("cpu", PAYLOAD_BYTES)
                await kv.resize("cpu", 16 * PAYLOAD_BYTES)
            else:
                await asyncio.sleep(10)
            assert (await kv.lookup(KEYS)).by_tier == {"gpu": 3}
            await kv.store(KEYS, engine.compute(KEYS))
            assert await kv.flush()
            assert below.num_records == 3

    run(work)


async def test_what_a_shared_tier_lacks_is_sent_once_memory_has_it() -> None:
    """A store that finds it on its way from another tier sends nothing, and leaves it to the next."""
    engine, other, below = Engine(), ScriptedBackend(name="other"), ScriptedBackend(name="below")
    async with open_cache({"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, other, below, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        for tier in ("below", "cpu"):
            await kv.evict(KEYS, tier=tier)
        other.on_read.hold()
        loading = kv.start_load(KEYS, GPULoadStoreSpec(range(3)))
        await until(lambda: other.on_read.num_held == 1)
        stored = await kv.store(KEYS, engine.compute(KEYS, range(3, 6)))
        assert (stored.num_present, (await stored.settled())[-1]) == (3, TierStore("below", deferred=3))
        other.on_read.release()
        assert (await loading).num_blocks == 3
        await kv.store(KEYS, engine.compute(KEYS, range(3, 6)))
        assert await kv.flush()
        assert below.num_records == 3


@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("is_use_enough", [False, True])
async def test_a_tier_below_gets_what_the_gpu_pool_alone_has(write: str, *, is_use_enough: bool) -> None:
    """As the CPU tier, above which nothing waits for storage, had no room for it any more: by a store, or by a use."""
    engine, slots = Engine(), ScriptedSlotBackend(write=write, admit_after=2 if is_use_enough else 1)
    gpu, cpu = ({"medium": medium, "capacity": 16 * PAYLOAD_BYTES} for medium in ("gpu", "cpu"))
    async with open_cache(gpu, cpu, slots, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.flush()
        await kv.evict(KEYS, tier="cpu")
        await kv.evict(KEYS, tier="slots")
        if is_use_enough:
            kv.touch(KEYS)
        else:
            stored = await kv.store(KEYS, engine.compute(KEYS))
            assert (await stored.settled())[-1] == TierStore("slots", deferred=3)
        assert await kv.drain()
        assert slots.num_records == 3
        await until_idle(kv)


@pytest.mark.parametrize("has_pool", [False, True])
async def test_what_is_on_its_way_to_a_tier_is_not_sent_there_again(*, has_pool: bool) -> None:
    """However often it is stored meanwhile: else the queue of stores is full of it, and others are dropped."""
    engine, slots, others = Engine(), ScriptedSlotBackend(), prompt(3, seed=1)
    gpu, cpu = ({"medium": medium, "capacity": 16 * PAYLOAD_BYTES} for medium in ("gpu", "cpu"))
    limits = SMALL_LIMITS.model_copy(update={"store_queue": 6 * PAYLOAD_BYTES})
    async with open_cache(*[gpu][: int(has_pool)], cpu, slots, engine=engine, limits=limits) as kv:
        slots.on_write.hold()
        for _ in range(4):
            assert (await kv.store(KEYS, engine.compute(KEYS))).num_dropped == 0
            assert kv.stats().store_queue_bytes == 3 * PAYLOAD_BYTES
        await until(lambda: slots.on_write.num_held == 1)
        await kv.store(KEYS, engine.compute(KEYS))
        await kv.store(others, engine.compute(others))
        slots.on_write.release()
        assert await kv.drain()
        assert (slots.num_records, slots.on_write.num_blocks, kv.stats()["slots"].dropped) == (6, 6, 0)
        await until_idle(kv)


@pytest.mark.parametrize("tier", ["slots", "cpu", None])
@pytest.mark.parametrize("is_begun", [False, True])
async def test_what_was_evicted_on_its_way_is_sent_again(tier: str | None, *, is_begun: bool) -> None:
    """What is on its way then comes to nothing, or is wanted after all."""
    engine, slots, others = Engine(), ScriptedSlotBackend(), prompt(8, seed=1)
    gpu, cpu = ({"medium": medium, "capacity": 16 * PAYLOAD_BYTES} for medium in ("gpu", "cpu"))
    async with open_cache(gpu, cpu, slots, engine=engine) as kv:
        slots.on_write.hold()
        await kv.store(others, engine.compute(others))
        await kv.store(KEYS, engine.compute(KEYS))
        await until(lambda: kv.stats()["slots"].num_waiting == 2)  # a window of the first, and the second
        keys = others if is_begun else KEYS
        evicting = asyncio.create_task(kv.evict(keys, tier=tier))
        await checkpoint()
        await kv.store(keys, engine.compute(keys))
        slots.on_write.release()
        await evicting
        assert await kv.drain()
        assert slots.num_records == 11
        await until_idle(kv)


async def test_many_blocks_are_announced_in_as_few_calls_as_few() -> None:
    """To a tier to which they come later, on the event loop; of a block that is to come twice, each by itself."""
    async with open_cache({"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, ScriptedSlotBackend()) as kv:
        (tier,) = inside(kv).chains[0].owned
        few, many, late = (inside(kv).batch(prompt(n))[1] for n in (8, 1024, 2048))
        overs: list[Callable[[], None]] = []

        def announce(batch: Batch) -> None:
            overs.append(tier.announce(batch.names, lambda: np.ones(len(batch), np.bool_)))

        num_steps = [num_calls(partial(announce, batch)) for batch in (few, many, late[1000:])]
        assert num_steps[1] < 2 * num_steps[0]
        assert tier.is_coming(late).all()
        overs[1]()
        assert tier.is_coming(late).nonzero()[0].tolist() == [*range(8), *range(1000, 2048)]
        overs[2]()
        assert tier.is_coming(late).nonzero()[0].tolist() == [*range(8)]
        overs[0]()
        assert not tier.is_coming(late).any()


@pytest.mark.parametrize("nothing_first", [False, True])
async def test_nothing_may_be_announced_too(*, nothing_first: bool) -> None:
    """Beside blocks, and over before them or after them."""
    async with open_cache({"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, ScriptedSlotBackend()) as kv:
        (tier,) = inside(kv).chains[0].owned
        _, batch = inside(kv).batch(KEYS)
        none, some = (tier.announce(each.names, lambda: np.ones(3, np.bool_)) for each in (batch[:0], batch))
        assert tier.is_coming(batch).all()
        for over in (none, some) if nothing_first else (some, none):
            over()
            assert tier.is_coming(batch).all() == (over is none and nothing_first)


@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("num_planned", [3, 17], ids=["all there", "no room for the rest"])
async def test_a_tier_below_gets_what_it_lacks_by_a_plan_too(write: str, num_planned: int) -> None:
    """A planned store of what is there moves nothing, and sends below what was evicted there."""
    engine, slots, keys = Engine(), ScriptedSlotBackend(write=write), prompt(num_planned)
    async with open_cache({"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, slots, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.flush()
        await kv.evict(KEYS, tier="slots")
        planner = kv.planner()
        planner.register_worker()
        assert (await planner.plan_store(keys, engine.compute(keys)).ended()).num_blocks == slots.num_records == 0
        assert await kv.drain()
        assert slots.num_records == 3
        await until_idle(kv)


@pytest.mark.parametrize("layerwise", [False, True])
async def test_what_a_worker_merely_has_slots_for_is_stored(*, layerwise: bool) -> None:
    """It may fail, or hang for days; what it brings after all is dropped."""
    engine, slots = Engine(), ScriptedSlotBackend()
    async with open_cache({"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, slots, engine=engine) as kv:
        planner = kv.planner()
        planner.register_worker()
        job = planner.plan_store(KEYS[:2], engine.compute(KEYS[:2]))
        plan = await job.planned()
        storing = kv.start_store(KEYS, engine.compute(KEYS), layerwise=layerwise)
        for layer in range(len(engine.caches)) if layerwise else ():
            storing.store_layer(layer)
        stored = await storing
        assert (stored.num_stored, stored.num_present) == (3, 0)
        assert await stored.settled() == (TierStore("cpu", written=3), TierStore("slots", written=3))
        planner.complete(Outcomes(plan.job, 0, 0))
        await job.ended()
        assert (await kv.lookup(KEYS)).num_blocks == 3
        assert await kv.drain()
        await until_idle(kv)


@pytest.mark.parametrize("how", ["right", "gone", "broken"])
@pytest.mark.parametrize("way", ["at once", "layerwise", "a task", "planned", "passing", "passing, a task", "no room"])
async def test_what_is_read_for_nobody_is_stored(how: str, way: str) -> None:
    """A load gives up a slow tier and the engine computes the blocks: whatever the read brings then, they are there."""
    engine, shared, slots = Engine(), ScriptedBackend(timeout_s=60), ScriptedSlotBackend()
    passes, num_others = "passing" in way, 20 if "task" in way else 0
    cpu = {"medium": "cpu", "capacity": (4 if way == "no room" else 32) * PAYLOAD_BYTES}
    async with open_cache(*[] if passes else [cpu], shared, slots, engine=engine) as kv:
        await (await kv.store(KEYS, engine.compute(KEYS))).settled()
        for tier in ("slots",) if passes else ("cpu", "slots"):
            await kv.evict(KEYS, tier=tier)
        shared.on_read.hold()
        assert (await kv.load(KEYS, GPULoadStoreSpec(range(3)), deadline_s=0.01)).num_blocks == 0
        if way == "planned":
            planner = kv.planner()
            worker = Worker(planner.slabs(), layout=small_layout(), device="cpu")
            worker.register_kv_caches(engine.caches)
            planner.register_worker()
            job = planner.plan_store(KEYS, engine.compute(KEYS))
            planner.complete(worker.execute(await job.planned()))
            assert (await job.ended()).num_blocks == 3
        else:
            keys = prompt(3 + num_others)
            storing = kv.start_store(keys, engine.compute(keys), layerwise=way == "layerwise")
            for layer in range(len(engine.caches)) if way == "layerwise" else ():
                storing.store_layer(layer)
            stored = await storing
            assert (stored.num_stored, stored.num_present) == (len(keys), 0)
            assert TierStore("slots", written=len(keys)) in await stored.settled()
        if how == "gone":
            await shared.delete(shared.keys())
        for position in range(3) if how == "broken" else ():
            shared.flip_byte(position)
        shared.on_read.release()
        await until_idle(kv)
        engine.poison()
        loaded = await kv.load(KEYS, GPULoadStoreSpec(range(3)))
        assert loaded.num_blocks == 3
        assert loaded.by_tier == {"cpu": 3} or passes or way == "no room"
        assert engine.read(range(3)) == contents(KEYS)
        assert await kv.drain()
        assert slots.num_records == 3 + num_others


@pytest.mark.parametrize("layerwise", [False, True])
async def test_what_is_read_for_nobody_is_left_to_its_read_where_no_slots_are_free(*, layerwise: bool) -> None:
    """Neither own ones nor those that others pass by: a store that gave up the read would end with nothing at all."""
    engine, shared, slots = Engine(), ScriptedBackend(timeout_s=60), ScriptedSlotBackend()
    others = prompt(40, seed=1)
    async with open_cache({"medium": "cpu", "capacity": 4 * PAYLOAD_BYTES}, shared, slots, engine=engine) as kv:
        await (await kv.store(KEYS, engine.compute(KEYS))).settled()
        for tier in ("cpu", "slots"):
            await kv.evict(KEYS, tier=tier)
        shared.on_read.hold()
        assert (await kv.load(KEYS, GPULoadStoreSpec(range(3)), deadline_s=0.01)).num_blocks == 0
        shared.on_write.hold()
        slots.on_write.hold()
        storing = kv.start_store(others, engine.compute(others, range(20, 60)))
        await until(lambda: slots.on_write.num_held > 0 and not storing.done)
        handle = kv.start_store(KEYS, engine.compute(KEYS), layerwise=layerwise)
        for layer in range(len(engine.caches)) if layerwise else ():
            handle.store_layer(layer)
        stored = await handle
        assert (stored.num_stored, stored.num_present) == (0, 3)
        for held in (shared.on_read, shared.on_write, slots.on_write):
            held.release()
        await storing
        await until_idle(kv)
        assert (await kv.lookup(KEYS)).by_tier == {"cpu": 3}


@pytest.mark.parametrize("num_slots", [32, 5])
async def test_what_has_come_of_a_read_for_nobody_stays(num_slots: int) -> None:
    """From one tier, while another one hangs: a store finds it there, and takes the rest on itself."""
    keys = prompt(4)
    engine, shared, slots = Engine(), ScriptedBackend(timeout_s=60), ScriptedSlotBackend()
    cpu = {"medium": "cpu", "capacity": num_slots * PAYLOAD_BYTES}
    async with open_cache(cpu, shared, slots, engine=engine) as kv:
        await (await kv.store(keys, engine.compute(keys))).settled()
        await kv.evict(keys, tier="cpu")
        await kv.evict(keys[:2], tier="slots")
        await shared.delete(shared.keys()[2:])
        shared.on_read.hold()
        assert (await kv.load(keys, GPULoadStoreSpec(range(4)), deadline_s=0.01)).num_blocks == 0
        await until(lambda: kv.stats().tiers[0].ready == 2)
        stored = await kv.store(keys, engine.compute(keys))
        assert (stored.num_stored, stored.num_present) == (2, 2)
        assert kv.stats().tiers[0].ready == (4 if num_slots > 5 else 2)
        shared.on_read.release()
        await until_idle(kv)


async def test_slots_that_others_have_by_now_are_theirs_alone() -> None:
    """Once a read that hangs in one tier, and had come from another into these, ends too."""
    keys, others = prompt(4), prompt(2, seed=1)
    engine, shared, slots = Engine(), ScriptedBackend(timeout_s=60), ScriptedSlotBackend()
    cpu = {"medium": "cpu", "capacity": 4 * PAYLOAD_BYTES}
    async with open_cache(cpu, shared, slots, engine=engine) as kv:
        for each in (others, keys):
            await (await kv.store(each, engine.compute(each))).settled()
            await kv.evict(each, tier="cpu")
        await kv.evict(keys[:2], tier="slots")
        held = shared.keys()
        await shared.delete([*held[:2], *held[4:]])
        shared.on_read.hold()
        assert (await kv.load(keys, GPULoadStoreSpec(range(4)), deadline_s=0.01)).num_blocks == 0
        await until(lambda: kv.stats().tiers[0].ready == 2)
        slots.on_read.hold()
        loading = kv.start_load(others, GPULoadStoreSpec(range(10, 12)))
        await until(lambda: slots.on_read.num_held == 1)
        shared.on_read.release()
        await until(lambda: kv.stats().tiers[0].ready == 2)
        too, num_read = kv.start_load(others, GPULoadStoreSpec(range(12, 14))), slots.on_read.num_blocks
        for _ in range(20):
            await checkpoint()
        slots.on_read.release()
        assert [(await each).num_blocks for each in (loading, too)] == [2, 2]
        assert slots.on_read.num_blocks == num_read
        await until_idle(kv)


async def test_what_a_load_waits_for_is_left_to_its_read() -> None:
    """It comes for both; who waits for it is not sent away."""
    engine, shared = Engine(), ScriptedBackend()
    async with open_cache({"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, shared, engine=engine) as kv:
        await (await kv.store(KEYS, engine.compute(KEYS))).settled()
        await kv.evict(KEYS, tier="cpu")
        shared.on_read.hold()
        loading = kv.start_load(KEYS, GPULoadStoreSpec(range(10, 13)))
        await until(lambda: shared.on_read.num_held == 1)
        stored = await kv.store(KEYS, engine.compute(KEYS))
        assert (stored.num_stored, stored.num_present) == (0, 3)
        shared.on_read.release()
        assert (await loading).num_blocks == 3
        await until_idle(kv)


async def test_a_worker_keeps_its_slots_where_there_are_no_others() -> None:
    """Without it there would be none of what it is to copy; a store that leaves that to it counts it as not moved."""
    engine = Engine()
    async with open_cache({"medium": "cpu", "capacity": 3 * PAYLOAD_BYTES}, engine=engine) as kv:
        planner = kv.planner()
        planner.register_worker()
        job = planner.plan_store(KEYS, engine.compute(KEYS))
        plan = await job.planned()
        stored = await kv.store(KEYS, engine.compute(KEYS))
        assert (stored.num_stored, stored.num_present, stored.drop_reasons) == (0, 0, {Reason.NOT_MOVED: 3})
        planner.complete(Outcomes(plan.job, 0, 3))
        assert (await job.ended()).num_blocks == 3
        assert (await kv.lookup(KEYS)).num_blocks == 3
        await until_idle(kv)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_what_is_left_to_another_store_is_there_or_counts_as_dropped(
    *, is_cancelled: bool, layerwise: bool
) -> None:
    """By a store that ends after the other, which may have been cancelled: in the result, and of each tier."""
    engine, device = Engine(), ScriptedDevice()
    cpu = {"medium": "cpu", "capacity": 8 * PAYLOAD_BYTES}
    async with open_cache(cpu, engine=engine, device=device) as kv:
        first = kv.start_store(KEYS[:2], engine.compute(KEYS[:2]))
        second = kv.start_store(KEYS, engine.compute(KEYS), layerwise=layerwise)
        if is_cancelled:
            first.cancel()
        await until(lambda: first.done, on_wait=device.step)
        for layer in range(len(engine.caches)) if layerwise else ():
            second.store_layer(layer)
        await until(lambda: second.done, on_wait=device.step)
        stored, num_left = await second, 0 if is_cancelled else 2
        assert (stored.num_stored, stored.num_present, stored.num_dropped) == (1, num_left, 2 - num_left)
        assert stored.drop_reasons == ({Reason.NOT_MOVED: 2} if is_cancelled else {})
        assert await stored.settled() == (TierStore("cpu", written=1, present=num_left, dropped=2 - num_left),)
        assert (await kv.presence(KEYS)).tolist() == [not is_cancelled] * 2 + [True]
        await until_idle(kv)


async def test_what_no_queue_takes_is_dropped_once() -> None:
    """A tier below wants a second use of a block, and the queue of stores has no room for it then: its next use has."""
    engine, slots = Engine(), ScriptedSlotBackend(admit_after=2)
    limits = SMALL_LIMITS.model_copy(update={"store_queue": PAYLOAD_BYTES})
    async with open_cache({"medium": "cpu", "capacity": 8 * PAYLOAD_BYTES}, slots, engine=engine, limits=limits) as kv:
        first, second = prompt(1, seed=1), prompt(1, seed=2)
        for keys in (first, second):
            await keep(kv, engine, keys)
        slots.on_write.hold()
        await kv.store(first, engine.compute(first))
        await until(lambda: slots.on_write.num_held > 0)
        assert (await kv.store(second, engine.compute(second))).num_present == 1
        assert kv.stats()["slots"].dropped == 1
        slots.on_write.release()
        await until_idle(kv)
        await kv.store(second, engine.compute(second))
        await until_idle(kv)
        assert (await kv.evict(second, tier="slots")).num_blocks == 1
