"""Blocks of the GPU pool on their way down, of which others are just filling the host's slots: none is lost by that."""

import asyncio

import pytest

from tests.support.backends import ScriptedSlotBackend
from tests.support.caches import inside, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, SMALL_LIMITS, Engine, prompt
from tiered_kv import Outcomes
from tiered_kv.testing import ScriptedDevice

GPU = {"medium": "gpu", "capacity": 32 * PAYLOAD_BYTES}
CPU = {"medium": "cpu", "capacity": 32 * PAYLOAD_BYTES}
KEYS = prompt(4)
ROOMY = SMALL_LIMITS.model_copy(update={"window": 4 * PAYLOAD_BYTES, "bounce": 32 * PAYLOAD_BYTES, "low_water": 1.0})


@pytest.mark.parametrize("is_broken", [False, True], ids=["right", "broken"])
async def test_a_store_while_a_prefetch_brings_the_same_blocks(*, is_broken: bool) -> None:
    """What comes is present; what comes broken is replaced by what was stored."""
    slots, engine = ScriptedSlotBackend(name="below"), Engine()
    async with open_cache(GPU, CPU, slots, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS, tier="gpu")
        await kv.evict(KEYS, tier="cpu")
        for number in range(4 if is_broken else 0):
            slots.flip_byte(number)
        slots.on_read.hold()
        bringing = kv.prefetch(KEYS, to="cpu")
        await until(lambda: slots.on_read.num_held > 0)
        stored = await kv.store(KEYS, engine.compute(KEYS))
        settling = asyncio.create_task(stored.settled())
        slots.on_read.release()
        await bringing
        settled = await settling
        assert [(each.written + each.present, each.failed) for each in settled] == [(4, 0)] * 3
        assert await kv.drain()
        await kv.evict(KEYS, tier="gpu")
        await kv.evict(KEYS, tier="cpu")
        assert (await kv.lookup(KEYS)).by_tier == {"below": 4}
        await until_idle(kv)


async def test_a_use_that_admits_what_the_cleaner_copies() -> None:
    """Without a CPU tier, over one tier that wants blocks used twice and one that is written back: both get them."""
    second, back = ScriptedSlotBackend(name="second", admit_after=2), ScriptedSlotBackend(name="back", write="back")
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(GPU, second, back, engine=engine, limits=ROOMY, device=device) as kv:
        storing = kv.start_store(KEYS, engine.compute(KEYS))
        await until(lambda: storing.done, on_wait=device.run_all)
        await until(lambda: device.pending > 0)  # the cleaner's copy to the host
        kv.touch(KEYS)
        draining = asyncio.create_task(kv.drain())
        await until(draining.done, on_wait=device.run_all)
        assert draining.result()
        assert (second.num_records, back.num_records) == (4, 4)
        assert not any(tier.failed for tier in kv.stats().tiers)
        await until_idle(kv)


async def test_what_is_evicted_while_it_is_copied_is_counted_once() -> None:
    """In each tier, as removed or as what was to come later: nothing has failed."""
    through, back = ScriptedSlotBackend(name="through"), ScriptedSlotBackend(name="back", write="back")
    engine, device = Engine(), ScriptedDevice()
    limits = ROOMY.model_copy(update={"low_water": 0.0})
    async with open_cache(GPU, through, back, engine=engine, limits=limits, device=device) as kv:
        storing = kv.start_store(KEYS, engine.compute(KEYS))
        await until(lambda: storing.done, on_wait=device.run_all)
        await until(lambda: device.pending > 0)
        evicting = asyncio.create_task(kv.evict(KEYS))
        await until(evicting.done)
        settling = asyncio.create_task((await storing).settled())
        await until(settling.done, on_wait=device.run_all)
        assert [(each.written, each.deferred, each.dropped, each.failed) for each in settling.result()] == [
            (4, 0, 0, 0), (0, 0, 4, 0), (0, 4, 0, 0)
        ]  # fmt: skip
        await until_idle(kv)


async def test_what_the_host_has_stays_until_the_others_are_copied() -> None:
    """Who needs room there meanwhile finds none: those blocks are written below from there with the others."""
    below, engine, device, others = ScriptedSlotBackend(name="below"), Engine(), ScriptedDevice(), prompt(2, seed=1)
    small = {"medium": "cpu", "capacity": 4 * PAYLOAD_BYTES}
    async with open_cache(GPU, small, below, engine=engine, device=device) as kv:
        for keys, leaves in ((others, ("gpu", "cpu")), (KEYS[:2], ("gpu", "below"))):
            keeping = asyncio.create_task(keep(kv, engine, keys))
            await until(keeping.done, on_wait=device.run_all)
            for tier in leaves:
                await kv.evict(keys, tier=tier)
        storing = kv.start_store(KEYS, engine.compute(KEYS))
        await until(lambda: storing.done, on_wait=device.step)
        await until(lambda: device.pending > 0)  # the copy to the host of those that it lacks
        await kv.prefetch(others, to="cpu")
        settling = asyncio.create_task((await storing).settled())
        await until(settling.done, on_wait=device.run_all)
        counts = [(each.written, each.present, each.dropped, each.failed) for each in settling.result()]
        assert counts == [(4, 0, 0, 0), (2, 2, 0, 0), (4, 0, 0, 0)]
        assert kv.membership(KEYS, tier="below").all()
        assert await kv.drain()
        await until_idle(kv)


async def test_what_leaves_the_host_with_its_slot_meanwhile_is_copied_there() -> None:
    """It was there, and held, when the others began to be copied; then the host had that slot no more."""
    below, engine, device = ScriptedSlotBackend(name="below"), Engine(), ScriptedDevice()
    small = {"medium": "cpu", "capacity": 8 * PAYLOAD_BYTES}
    async with open_cache(GPU, small, below, engine=engine, device=device, limits=ROOMY) as kv:
        for keys in (prompt(4, seed=1), KEYS[:2]):
            keeping = asyncio.create_task(keep(kv, engine, keys))
            await until(keeping.done, on_wait=device.run_all)
        for tier in ("gpu", "below"):
            await kv.evict(KEYS, tier=tier)
        kv.pin(KEYS, ttl_s=1000.0)
        below.on_write.hold()
        before = kv.start_store(prompt(2, seed=2), engine.compute(prompt(2, seed=2)))
        await until(lambda: below.on_write.num_held > 0, on_wait=device.run_all)
        unwritten = inside(kv).chains[0].unwritten
        mark = unwritten.now
        resizing = asyncio.create_task(kv.resize("cpu", 4 * PAYLOAD_BYTES))
        await until(lambda: unwritten.now > mark)  # what comes from now on is not waited for
        storing = kv.start_store(KEYS, engine.compute(KEYS))
        await until(lambda: storing.done, on_wait=device.step)
        await until(lambda: device.pending > 0)
        assert kv.membership(KEYS[:2], tier="cpu").astype(bool).all()
        below.on_write.release()
        await until(lambda: not kv.membership(KEYS[:2], tier="cpu").astype(bool).any())
        settling = asyncio.create_task((await storing).settled())
        await until(settling.done, on_wait=device.run_all)
        assert [(each.written, each.failed) for each in settling.result()] == [(4, 0)] * 3
        await (await before).settled()
        kv.unpin(KEYS)
        await resizing
        assert kv.membership(KEYS, tier="below").astype(bool).all()
        assert await kv.drain(), "none was lost"
        await until_idle(kv)


async def test_what_a_worker_is_to_copy_to_the_host_comes_from_the_pool() -> None:
    """The worker may hang for days, or never come to it: what is in the pool is written below all the same."""
    below, engine = ScriptedSlotBackend(name="below"), Engine()
    async with open_cache(GPU, CPU, below, engine=engine) as kv:
        planner = kv.planner()
        planner.register_worker()
        job = planner.plan_store(KEYS[:2], engine.compute(KEYS[:2]))
        plan = await job.planned()
        settled = await (await kv.store(KEYS, engine.compute(KEYS))).settled()
        assert [(each.written, each.failed) for each in settled] == [(4, 0)] * 3
        assert kv.membership(KEYS, tier="below").astype(bool).all()
        planner.complete(Outcomes(plan.job, 0, 0))
        await job.ended()
        assert await kv.drain(), "none was lost"
        await until_idle(kv)
