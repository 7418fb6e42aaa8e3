"""A slow tier costs what would go there, counted, and nothing else: no load waits for a store."""

import asyncio

import pytest

from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import AnyTier, Recorder, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, contents, prompt
from tiered_kv import CacheLimits, GPULoadStoreSpec, Outcome, TieredKV
from tiered_kv.values.events import BlocksSettled
from tiered_kv.values.results import StoreResult, TierStore

CPU = {"medium": "cpu", "capacity": 32 * PAYLOAD_BYTES}
GPU = {"medium": "gpu", "capacity": 8 * PAYLOAD_BYTES}
Scripted = ScriptedBackend | ScriptedSlotBackend

both_kinds = pytest.mark.parametrize("kind", [ScriptedBackend, ScriptedSlotBackend])


def _limits(*, store_queue: int, store_timeout_s: float = 5.0) -> CacheLimits:
    """Let the queue hold so many blocks."""
    return CacheLimits(
        window=4 * PAYLOAD_BYTES,
        bounce=16 * PAYLOAD_BYTES,
        store_queue=store_queue * PAYLOAD_BYTES,
        store_timeout_s=store_timeout_s,
    )


def _assert_conserved(tiers: tuple[TierStore, ...], num_blocks: int) -> None:
    """Assert that each block of a store is counted once in every tier."""
    for each in tiers:
        assert each.written + each.present + each.deferred + each.dropped + each.failed == num_blocks, each


async def _load(kv: TieredKV, engine: Engine, seed: int, num_blocks: int = 8) -> int:
    """Load a prompt, check its bytes, and return the prefix."""
    keys, into = prompt(num_blocks, seed=seed), GPULoadStoreSpec(range(num_blocks))
    engine.poison()
    n = (await kv.load(keys, into)).num_blocks
    assert engine.read(into[:n]) == contents(keys[:n])
    return n


async def _store(kv: TieredKV, engine: Engine, seed: int, num_blocks: int = 8) -> StoreResult:
    keys = prompt(num_blocks, seed=seed)
    return await kv.store(keys, engine.compute(keys))


@both_kinds
async def test_a_full_queue_drops_below_and_says_how_much(kind: type[Scripted]) -> None:
    """While writes are held, stores return at once: kept above, dropped below once the queue is full, all counted."""
    engine, emit, slow = Engine(), Recorder(), kind(name="slow")
    async with open_cache(CPU, slow, engine=engine, emit=emit, limits=_limits(store_queue=12)) as kv:
        slow.on_write.hold()
        stored = [await _store(kv, engine, seed) for seed in range(4)]
        assert [each.num_stored for each in stored] == [8] * 4
        assert kv.stats().store_queue_bytes == 12 * PAYLOAD_BYTES
        assert [(await each.settled())[1] for each in stored[2:]] == [TierStore("slow", dropped=8)] * 2
        slow.on_write.release()
        tiers = [await each.settled() for each in stored]
        for each in tiers:
            _assert_conserved(each, 8)
        assert [each[1].written for each in tiers] == [8, 4, 0, 0]
        assert [each[0].written for each in tiers] == [8] * 4
        counts = kv.stats()["slow"]
        assert (counts.written, counts.dropped, counts.dropped_because) == (12, 20, {"queue full": 20})
        assert sum(event.lost.get("slow", 0) for event in emit.of(BlocksSettled)) == 20
        await until_idle(kv)
        assert [await _load(kv, engine, seed) for seed in range(4)] == [8] * 4  # the CPU tier has them all
        for seed in range(4):
            await kv.evict(prompt(8, seed=seed), tier="cpu")
        assert [await _load(kv, engine, seed) for seed in range(4)] == [8, 4, 0, 0]


@both_kinds
@pytest.mark.parametrize("tiers", [[CPU], [], [GPU], [GPU, CPU]], ids=["cpu", "none", "gpu", "gpu, cpu"])
async def test_loads_are_not_delayed_by_held_writes(kind: type[Scripted], tiers: list[AnyTier]) -> None:
    """With as many stores on hold as there may be, a load from the very same tier goes through."""
    engine, slow = Engine(), kind(name="slow", timeout_s=1e6)
    async with open_cache(*tiers, slow, engine=engine, limits=_limits(store_queue=1000)) as kv:
        await keep(kv, engine, prompt(8))
        for tier in kv.stats().tiers[:-1]:
            if tier.num_slots:
                await kv.evict(prompt(8), tier=tier.tier)
        slow.on_write.hold()
        storing = [asyncio.create_task(_store(kv, engine, seed)) for seed in range(1, 7)]
        await until(lambda: slow.on_write.num_held > 0)
        keys, into = prompt(8), GPULoadStoreSpec(range(40, 48))
        loaded = await kv.load(keys, into)
        assert loaded.num_blocks == 8
        assert engine.read(into) == contents(keys)
        assert slow.on_write.num_held > 0
        slow.on_write.release()
        for each in storing:
            _assert_conserved(await (await each).settled(), 8)
        await until_idle(kv)


@both_kinds
async def test_a_store_waits_for_a_slow_tier_no_longer_than_its_limit(kind: type[Scripted]) -> None:
    """Where no tier above keeps blocks, the caller waits for room, and is then told what was dropped."""
    engine, slow = Engine(), kind(name="slow", timeout_s=1e6)
    async with open_cache(slow, engine=engine, limits=_limits(store_queue=1000, store_timeout_s=0.02)) as kv:
        slow.on_write.hold()
        stored = await _store(kv, engine, 1, num_blocks=40)
        assert stored.num_stored > 0
        assert stored.drop_reasons == {"deadline": 40 - stored.num_stored}
        slow.on_write.release()
        tiers = await stored.settled()
        assert tiers == (TierStore("slow", written=stored.num_stored, dropped=stored.num_dropped),)
        await until_idle(kv)
        assert await _load(kv, engine, 1, num_blocks=40) == stored.num_stored


@both_kinds
async def test_every_block_is_counted_once_in_every_tier(kind: type[Scripted]) -> None:
    """Whatever becomes of a store, in one tier or the other, its blocks add up; so do its own counts."""
    engine, last = Engine(), ScriptedBackend(name="last")
    medium = ScriptedSlotBackend(20, name="medium") if kind is ScriptedSlotBackend else kind(name="medium")
    async with open_cache(GPU, CPU, medium, last, engine=engine, limits=_limits(store_queue=10)) as kv:
        medium.on_write.fail_next(OSError(28, "no space"))
        for step, (seed, num_blocks) in enumerate([(0, 8), (0, 12), (1, 30), (2, 3), (0, 12), (1, 40)]):
            stored = await _store(kv, engine, seed, num_blocks=num_blocks)
            assert stored.num_stored + stored.num_present + stored.num_dropped == num_blocks
            assert sum(stored.drop_reasons.values()) == stored.num_dropped
            tiers = await stored.settled()
            assert [each.tier for each in tiers] == ["gpu", "cpu", "medium", "last"], step
            _assert_conserved(tiers, num_blocks)
        await until_idle(kv)
        for tier in kv.stats().tiers:
            assert sum(tier.dropped_because.values()) == tier.dropped, tier
        # What memory has, and a medium has lost or never got, needs no copy and is in the queue first: that may be full
        # then for new blocks of the GPU pool, which go to the CPU tier through it.
        assert kv.stats()["cpu"].dropped_because.keys() <= {"no room", "queue full"}


@both_kinds
async def test_a_tier_says_why_it_was_not_written(kind: type[Scripted]) -> None:
    """It was bypassed, refused, or had the block evicted by name meanwhile: a word of its own for each."""
    engine, medium = Engine(), kind(name="medium")
    async with open_cache(CPU, medium, engine=engine) as kv:
        medium.on_write.change_next(lambda outcomes: [Outcome.REFUSED] * len(outcomes))
        await keep(kv, engine, prompt(2, seed=1))
        assert kv.stats()["medium"].dropped_because == {"refused": 2}
        for _ in range(3):
            medium.on_write.fail_next(OSError(28, "no space"))
            await keep(kv, engine, prompt(1, seed=2))
            await kv.evict(prompt(1, seed=2))
        await keep(kv, engine, prompt(4, seed=3))
        assert kv.stats()["medium"].open_breakers == ("writes",)
        assert kv.stats()["medium"].dropped_because == {"refused": 2, "tier away": 4}


async def test_settled_may_be_awaited_by_many_and_cancelled() -> None:
    """Who gives up waiting ends only their own wait; the others are told the same."""
    engine, slow = Engine(), ScriptedBackend(name="slow")
    async with open_cache(CPU, slow, engine=engine) as kv:
        slow.on_write.hold()
        stored = await _store(kv, engine, 0)
        waiters = [asyncio.create_task(stored.settled()) for _ in range(3)]
        await until(lambda: slow.on_write.num_held > 0)
        waiters[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiters[0]
        slow.on_write.release()
        expected = TierStore("cpu", written=8), TierStore("slow", written=8)
        assert [await each for each in waiters[1:]] == [expected] * 2
        assert await stored.settled() == expected


async def test_a_block_is_not_stored_twice() -> None:
    """Two stores of the same blocks at once copy and write each of them once; the second finds them on their way."""
    engine, medium = Engine(), ScriptedSlotBackend(name="medium")
    async with open_cache(CPU, medium, engine=engine) as kv:
        first, second = await asyncio.gather(_store(kv, engine, 0), _store(kv, engine, 0))
        assert (first.num_stored, second.num_stored, second.num_present) == (8, 0, 8)
        assert (await first.settled())[1].written == 8
        assert (await second.settled()) == (TierStore("cpu", present=8), TierStore("medium", deferred=8))
        assert medium.on_write.num_blocks == 8
        await until_idle(kv)


async def test_slots_that_come_free_while_another_tier_hangs_are_used() -> None:
    """A window is read from two tiers for loads that are gone: what arrives from the one frees its slots at once.

    These windows take no more than three quarters of the slots: the others are for what the upper tier has alone.
    """
    engine, first, second = Engine(), *(ScriptedBackend(name=name, timeout_s=60) for name in ("first", "second"))
    async with open_cache(first, second, engine=engine) as kv:
        prompts = [prompt(4, seed=seed) for seed in range(5)]
        for keys in prompts:
            await keep(kv, engine, keys)
        for keys in prompts[:4]:
            await kv.evict(keys[2:], tier="first")
        first.on_read.hold()
        second.on_read.hold()
        into = [GPULoadStoreSpec(range(4 * number, 4 * number + 4)) for number in range(5)]
        loads = [kv.start_load(keys, each) for keys, each in zip(prompts[:4], into[:4], strict=True)]
        await until(lambda: kv.stats().bounce_free == 4 and first.on_read.num_held > 0)
        last = kv.start_load(prompts[4], into[4])
        for load in loads:
            load.cancel()
        await until(lambda: all(load.done for load in loads))
        first.on_read.release()
        await until(lambda: last.done)
        assert (await last).num_blocks == 4
        await until(lambda: kv.stats().bounce_free == 16 - 3 * 2)
        second.on_read.release()
        await until_idle(kv)


@pytest.mark.parametrize("is_load", [True, False], ids=["loads", "stores"])
async def test_a_tier_moves_as_many_windows_at_once_as_it_says(*, is_load: bool) -> None:
    """Four of loads, or two of stores: a record's header, which takes no host memory, is no part of these."""
    engine, slots = Engine(), ScriptedSlotBackend(timeout_s=1000.0)
    limits = CacheLimits(window=4 * PAYLOAD_BYTES, bounce=64 * PAYLOAD_BYTES, promote=False)
    async with open_cache(slots, engine=engine, limits=limits) as kv:
        prompts = [prompt(4, seed=seed) for seed in range(6)]
        act = slots.on_read if is_load else slots.on_write
        for keys in prompts if is_load else ():
            await keep(kv, engine, keys)
        act.hold()
        handles = [
            kv.start_load(keys, GPULoadStoreSpec(range(4 * n, 4 * n + 4)))
            if is_load
            else kv.start_store(keys, engine.compute(keys))
            for n, keys in enumerate(prompts)
        ]
        most = 4 if is_load else 2
        await until(lambda: act.num_held == most and kv.stats()["slots"].num_waiting == 6 - most)
        act.release()
        for handle in handles:
            await handle
        await until_idle(kv)


@both_kinds
@pytest.mark.parametrize("how", ["store", "layers", "plan", "touch"])
async def test_whatever_brings_blocks_a_tier_has_no_more_of_them_than_it_may(kind: type[Scripted], how: str) -> None:
    """In flight, in one call, and in the queue: forty blocks, windows of four, of which two may be written at once."""
    engine, slow = Engine(), kind(name="slow", admit_after=2 if how == "touch" else 1)
    keys, memory = prompt(40), CPU | {"capacity": 64 * PAYLOAD_BYTES}
    async with open_cache(memory, slow, engine=engine, limits=_limits(store_queue=20)) as kv:
        if how == "touch":
            await keep(kv, engine, keys)
        slow.on_write.hold()
        if how == "touch":
            kv.touch(keys)
        elif how == "plan":
            planner = kv.planner()
            planner.register_worker()
            job = planner.plan_store(keys, engine.compute(keys))
            await job.planned()
            job.complete(keys)
            await job.ended()
        else:
            storing = kv.start_store(keys, engine.compute(keys), layerwise=how == "layers")
            for layer in range(len(engine.caches)) if how == "layers" else ():
                storing.store_layer(layer)
            assert (await storing).num_stored == 40
        await until(lambda: slow.on_write.num_held > 0)
        assert slow.on_write.num_blocks == 4 * slow.on_write.num_held <= 8
        assert kv.stats()["slow"].in_flight_bytes <= 2 * 4 * 2 * PAYLOAD_BYTES  # with their headers
        assert kv.stats().store_queue_bytes == 20 * PAYLOAD_BYTES
        assert kv.stats()["slow"].dropped_because == {"queue full": 20}
        slow.on_write.release()
        await kv.flush()
        assert slow.num_records == 20
        await until_idle(kv)
