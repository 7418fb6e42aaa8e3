"""What is on its way to a tier when it is evicted from that tier alone does not arrive there; others have it yet."""

import asyncio

import pytest

from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import inside, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, SMALL_LIMITS, Engine, prompt
from tiered_kv import BackendUnavailableError, CacheLimits, Outcomes, TieredKV
from tiered_kv.testing import ScriptedDevice
from tiered_kv.tiers.gate import Kind, Waiter
from tiered_kv.values.errors import Reason

CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}
GPU = {"medium": "gpu", "capacity": 16 * PAYLOAD_BYTES}
KEYS = prompt(4)
LAZY = SMALL_LIMITS.model_copy(update={"low_water": 0.0, "clean_after_s": 1e6})
"""The cleaner does nothing by itself."""
Scripted = ScriptedBackend | ScriptedSlotBackend


async def found_below(kv: TieredKV) -> int:
    """Evict from memory, and say how many blocks are found then."""
    for tier in kv.stats().tiers[:-1]:
        await kv.evict(KEYS, tier=tier.tier)
    return (await kv.lookup(KEYS)).num_blocks


@pytest.mark.parametrize("kind", [ScriptedSlotBackend, ScriptedBackend])
async def test_what_waits_for_its_turn_to_be_written(kind: type[Scripted]) -> None:
    """As soon as the tier has time for it nobody wants it there; memory has it, and a store that drops it says so."""
    engine, medium = Engine(), kind(name="below")
    async with open_cache(CPU, medium, engine=engine) as kv:
        budget = inside(kv).chains[0].storage[0].calls.budget
        give_back = await budget.take(budget.limit, Waiter(Kind.STORE))
        stored = await kv.store(KEYS, engine.compute(KEYS))
        await until(lambda: budget.room.num_waiting == 1)
        evicting = asyncio.create_task(kv.evict(KEYS[1:], tier="below"))
        await until(evicting.done)
        give_back()
        below = (await stored.settled())[-1]
        assert (below.written, below.dropped) == (1, 3)
        assert (await kv.lookup(KEYS)).num_blocks == 4
        assert await found_below(kv) == medium.num_records == 1
        await until_idle(kv)


@pytest.mark.parametrize("kind", [ScriptedSlotBackend, ScriptedBackend])
async def test_what_waits_for_the_cleaner(kind: type[Scripted]) -> None:
    """It does not come by a flush, which has nothing left to write then; what comes later does."""
    engine, medium = Engine(), kind(name="below", write="back")
    async with open_cache(CPU, medium, engine=engine, limits=LAZY) as kv:
        await kv.store(KEYS, engine.compute(KEYS))
        await kv.evict(KEYS[1:], tier="below")
        assert await kv.flush()
        assert (await kv.lookup(KEYS)).num_blocks == 4
        assert await found_below(kv) == medium.num_records == 1
        await kv.store(KEYS, engine.compute(KEYS))
        assert await kv.flush()
        assert await found_below(kv) == 4
        assert await kv.drain(), "none was lost"


@pytest.mark.parametrize("kind", [ScriptedSlotBackend, ScriptedBackend])
async def test_what_waits_and_is_stored_again_is_written(kind: type[Scripted]) -> None:
    """It was evicted below as it waited for the cleaner: the line it waits in since before is the one it goes by."""
    engine, medium = Engine(), kind(name="below", write="back")
    async with open_cache(CPU, medium, engine=engine, limits=LAZY) as kv:
        await kv.store(KEYS, engine.compute(KEYS))
        await kv.evict(KEYS, tier="below")
        await kv.store(KEYS[:2], engine.compute(KEYS[:2]))
        assert await kv.flush()
        assert await found_below(kv) == medium.num_records == 2


async def test_what_waits_and_is_planned_to_be_stored_again_is_written() -> None:
    """A planned store wants it there as any store does."""
    engine, medium = Engine(), ScriptedSlotBackend(name="below", write="back")
    async with open_cache(CPU, medium, engine=engine, limits=LAZY) as kv:
        planner = kv.planner()
        planner.register_worker()
        await kv.store(KEYS, engine.compute(KEYS))
        await kv.evict(KEYS, tier="below")
        job = planner.plan_store(KEYS[:2], engine.compute(KEYS[:2]))
        planner.complete(Outcomes((await job.planned()).job, 0, 0))
        await job.ended()
        assert await kv.flush()
        assert await found_below(kv) == medium.num_records == 2


async def test_what_comes_anew_while_others_wait_is_written() -> None:
    """Blocks are evicted everywhere and stored anew, as what came before the eviction still waits for the cleaner."""
    engine, medium = Engine(), ScriptedSlotBackend(name="below", write="back")
    async with open_cache(CPU, medium, engine=engine, limits=LAZY) as kv:
        await kv.store(prompt(4, seed=1), engine.compute(prompt(4, seed=1)))
        await kv.store(KEYS, engine.compute(KEYS))
        await kv.evict(KEYS, tier="below")
        await kv.evict(KEYS)
        await kv.store(KEYS, engine.compute(KEYS))
        assert await kv.flush()
        assert await found_below(kv) == 4


async def test_what_could_not_be_written_is_not_tried_again() -> None:
    """The write was under way when its blocks were evicted, and fails: nothing waits for another try."""
    engine, medium = Engine(), ScriptedSlotBackend(name="below", write="back")
    async with open_cache(CPU, medium, engine=engine, limits=LAZY) as kv:
        await kv.store(KEYS, engine.compute(KEYS))
        medium.on_write.fail_next(BackendUnavailableError("busy"))
        medium.on_write.hold()
        flushing = asyncio.create_task(kv.flush())
        await until(lambda: medium.on_write.num_held == 1)
        evicting = asyncio.create_task(kv.evict(KEYS, tier="below"))
        await asyncio.sleep(0)
        medium.on_write.release()
        await evicting
        await flushing
        await kv.flush()
        assert await found_below(kv) == medium.num_records == 0
        await until_idle(kv)


@pytest.mark.parametrize("write", ["through", "back"])
async def test_what_waits_in_the_gpu_pool(write: str) -> None:
    """It goes to the host, and no further."""
    engine, medium = Engine(), ScriptedSlotBackend(name="below", write=write)
    async with open_cache(GPU, CPU | {"write": write}, medium, engine=engine, limits=LAZY) as kv:
        storing = kv.start_store(KEYS, engine.compute(KEYS))
        evicting = asyncio.create_task(kv.evict(KEYS, tier="below"))
        await storing
        await evicting
        await kv.flush()
        await kv.evict(KEYS, tier="gpu")
        assert (await kv.lookup(KEYS)).num_blocks == 4
        assert await found_below(kv) == medium.num_records == 0
        await until_idle(kv)


@pytest.mark.parametrize("below", ["through", "back"])
async def test_what_waits_in_the_gpu_pool_for_memory(below: str) -> None:
    """Evicted from the CPU tier, it stays in the pool and goes no further; stored again it does."""
    engine, medium = Engine(), ScriptedSlotBackend(name="below", write=below)
    async with open_cache(GPU, CPU | {"write": "back"}, medium, engine=engine, limits=LAZY) as kv:
        await kv.store(KEYS, engine.compute(KEYS))
        await kv.evict(KEYS[1:], tier="cpu")
        assert await kv.flush()
        assert [int(kv.membership(KEYS, tier=tier).astype(bool).sum()) for tier in ("gpu", "cpu", "below")] == [4, 1, 1]
        assert [tier.failed for tier in kv.stats().tiers] == [0, 0, 0]
        await kv.store(prompt(8)[4:], engine.compute(prompt(8)[4:]))
        await kv.evict(prompt(8), tier="cpu")
        await kv.store(prompt(8)[4:6], engine.compute(prompt(8)[4:6]))
        assert await kv.flush()
        assert [kv.membership(prompt(8)[4:], tier=tier).astype(bool).tolist() for tier in ("cpu", "below")] == [
            [True, True, False, False]
        ] * 2
        assert await kv.drain(), "none was lost"
        await until_idle(kv)


@pytest.mark.parametrize("is_written", [False, True])
async def test_what_leaves_the_gpu_pool_while_it_is_copied_to_the_host(*, is_written: bool) -> None:
    """It goes no further; but what storage is being given by then arrives there."""
    engine, device, medium = Engine(), ScriptedDevice(), ScriptedSlotBackend(name="below")
    async with open_cache(GPU, CPU, medium, engine=engine, device=device) as kv:
        medium.on_write.hold()
        storing = kv.start_store(KEYS, engine.compute(KEYS))
        await until(lambda: storing.done, on_wait=device.step)
        await until(lambda: device.pending > 0)
        await until(lambda: not is_written or medium.on_write.num_held > 0, on_wait=device.run_all)
        await kv.evict(KEYS, tier="gpu")
        await kv.evict(KEYS, tier="cpu")
        medium.on_write.release()
        settling = asyncio.create_task((await storing).settled())
        await until(settling.done, on_wait=device.run_all)
        assert (await kv.lookup(KEYS)).num_blocks == (4 if is_written else 0)
        assert await kv.drain(), "none was lost"
        await until_idle(kv)


@pytest.mark.parametrize(("num_slots", "write"), [(16, "through"), (16, "back"), (1, "through")])
async def test_what_is_copied_out_of_the_gpu_pool(num_slots: int, write: str) -> None:
    """Evicted from the CPU tier, to stay there or to pass, before it is there: it does not come, nor has it failed."""
    engine, device, medium = Engine(), ScriptedDevice(), ScriptedSlotBackend(name="below", write=write)
    small = {"medium": "cpu", "capacity": num_slots * PAYLOAD_BYTES}
    async with open_cache(GPU, small, medium, engine=engine, device=device, limits=LAZY) as kv:
        storing = kv.start_store(KEYS, engine.compute(KEYS))
        await until(lambda: storing.done, on_wait=device.step)
        await until(lambda: device.pending > 0)
        await kv.evict(KEYS, tier="cpu")
        settling = asyncio.create_task((await storing).settled())
        await until(settling.done, on_wait=device.run_all)
        assert [(each.written, each.failed) for each in settling.result()] == [(4, 0), (0, 0), (0, 0)]
        assert kv.stats()["cpu"].dropped_because == {Reason.REMOVED: 4}
        assert kv.membership(KEYS, tier="gpu").all()
        assert await kv.drain(), "none was lost"
        await until_idle(kv)


async def test_what_has_no_place_yet() -> None:
    """A store that waits for slots when its blocks are evicted from a tier leaves them out there."""
    engine, disk = Engine(num_pages=128), ScriptedSlotBackend(64)
    async with open_cache(disk, engine=engine, limits=SMALL_LIMITS) as kv:
        disk.on_write.hold()
        others = [kv.start_store(keys, engine.compute(keys)) for keys in (prompt(8, seed=seed) for seed in range(1, 5))]
        await until(lambda: inside(kv).chains[0].room.num_waiting > 0)
        storing = kv.start_store(KEYS, engine.compute(KEYS))
        evicting = asyncio.create_task(kv.evict(KEYS, tier="slots"))
        await until(evicting.done)
        disk.on_write.release()
        for each in (*others, storing):
            await (await each).settled()
        assert kv.lookup_nowait(KEYS).num_blocks == 0
        assert kv.lookup_nowait(prompt(8, seed=1)).num_blocks == 8
        await keep(kv, engine, KEYS)
        assert kv.lookup_nowait(KEYS).num_blocks == 4
        await until_idle(kv)


async def test_what_is_being_copied_counts_as_written_nowhere() -> None:
    """It was removed before any tier had it: each says so, and memory has not written it either."""
    engine, medium, keys = Engine(), ScriptedSlotBackend(name="below"), prompt(40)
    async with open_cache({"medium": "cpu", "capacity": 64 * PAYLOAD_BYTES}, medium, engine=engine) as kv:
        storing = kv.start_store(keys, engine.compute(keys))
        await kv.evict(keys)
        tiers = await (await storing).settled()
        assert [(tier.written, tier.dropped) for tier in tiers] == [(0, 40), (0, 40)]
        assert [tier.dropped_because for tier in kv.stats().tiers] == [{Reason.REMOVED: 40}] * 2
        assert [tier.written for tier in kv.stats().tiers] == [0, 0]
        await until_idle(kv)


async def test_what_a_disk_is_writing_counts_as_dropped_there() -> None:
    """The medium has written it, and forgets it: the tier never had it."""
    engine, medium = Engine(), ScriptedSlotBackend(name="below")
    async with open_cache(CPU, medium, engine=engine) as kv:
        medium.on_write.hold()
        stored = await kv.store(KEYS, engine.compute(KEYS))
        await until(lambda: medium.on_write.num_held > 0)
        evicting = asyncio.ensure_future(kv.evict(KEYS[1:], tier="below"))
        await until(lambda: not kv.membership(KEYS[1:], tier="below").any())
        medium.on_write.release()
        await evicting
        memory, below = await stored.settled()
        assert (memory.written, below.written, below.dropped) == (4, 1, 3)
        assert kv.stats()["below"].dropped_because == {Reason.REMOVED: 3}
        assert medium.num_records == 1
        await until_idle(kv)


async def test_what_another_write_is_bringing_counts_as_dropped_there() -> None:
    """A store that leaves it to that write says of the tier what the one that writes it says."""
    engine, medium, keys = Engine(), ScriptedSlotBackend(name="below"), KEYS[:2]
    async with open_cache(CPU, medium, engine=engine, limits=CacheLimits()) as kv:
        budget = inside(kv).chains[0].storage[0].calls.budget
        medium.on_write.hold()
        first = await kv.store(keys, engine.compute(keys))
        await until(lambda: medium.on_write.num_held > 0)
        await kv.evict(keys, tier="cpu")
        second = await kv.store(keys, engine.compute(keys))
        assert budget.room.num_waiting == 0, "its turn has come"
        evicting = asyncio.ensure_future(kv.evict(keys[1:], tier="below"))
        await until(lambda: not kv.membership(keys[1:], tier="below").any())
        medium.on_write.release()
        await evicting
        below = [(await stored.settled())[-1] for stored in (first, second)]
        assert [(each.written, each.present, each.dropped, each.failed) for each in below] == [
            (1, 0, 1, 0),
            (0, 1, 1, 0),
        ]
        assert kv.stats()["below"].dropped_because == {Reason.REMOVED: 2}
        assert await kv.drain(), "none was lost"
        await until_idle(kv)


@pytest.mark.parametrize("tier", [None, "cpu"])
@pytest.mark.parametrize("layerwise", [False, True])
async def test_what_another_store_is_copying_counts_as_removed(tier: str | None, *, layerwise: bool) -> None:
    """Whoever left it to that store names the call, not the store, which has moved it."""
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        first = kv.start_store(KEYS[:2], engine.compute(KEYS[:2]))
        second = kv.start_store(KEYS, engine.compute(KEYS), layerwise=layerwise)
        await asyncio.sleep(0)
        await kv.evict(KEYS[:1], tier=tier)
        await until(lambda: first.done, on_wait=device.step)
        for layer in range(len(engine.caches)) if layerwise else ():
            second.store_layer(layer)
        await until(lambda: second.done, on_wait=device.step)
        stored = await second
        assert (stored.num_stored, stored.num_present, stored.drop_reasons) == (2, 1, {Reason.REMOVED: 1})
        assert [(each.written, each.present, each.dropped) for each in await stored.settled()] == [(2, 1, 1)]
        assert kv.stats()["cpu"].dropped_because == {Reason.REMOVED: 2}
        await until_idle(kv)
