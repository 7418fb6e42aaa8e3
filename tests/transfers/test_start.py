"""What is in memory is loaded without a task; all that is promised of a load holds all the same."""

import asyncio
import threading

import pytest

from tests.support.backends import ScriptedBackend
from tests.support.caches import Recorder, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, SMALL_LIMITS, Engine, contents, prompt
from tiered_kv import GPULoadStoreSpec, TieredKV
from tiered_kv.testing import ScriptedDevice, ScriptedEvent
from tiered_kv.transfers import engine_memory
from tiered_kv.values.events import BlocksLoaded

CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}
KEYS = prompt(4)
INTO = GPULoadStoreSpec(range(10, 14))


async def _have(kv: TieredKV, engine: Engine, device: ScriptedDevice) -> None:
    storing = asyncio.create_task(keep(kv, engine, KEYS))
    await until(storing.done, on_wait=device.run_all)
    engine.poison()


async def test_few_blocks_are_there_at_once() -> None:
    """On a CPU they are copied before `start_load` returns; the books are as for any load."""
    engine, emit = Engine(), Recorder()
    async with open_cache(CPU, engine=engine, emit=emit) as kv:
        await keep(kv, engine, KEYS)
        engine.poison()
        handle = kv.start_load(KEYS, INTO)
        assert (handle.done, kv.stats().transfers) == (True, 0)
        assert engine.read(INTO) == contents(KEYS)
        loaded = await handle
        assert (loaded.num_blocks, loaded.num_requested, loaded.by_tier) == (4, 4, {"cpu": 4})
        assert (loaded.num_bytes, loaded.faults, await handle.admitted()) == (4 * PAYLOAD_BYTES, (), 4)
        assert [(each.blocks, each.by_tier) for each in emit.of(BlocksLoaded)] == [(4, {"cpu": 4})]
        stats = kv.stats()
        assert (stats.requested, stats.missed, stats["cpu"].hits) == (4, 0, 4)
        handle.wait_layer(0, object())  # there is nothing to wait for
        handle.cancel()
        assert await handle == loaded
        await until_idle(kv)


async def test_awaiting_one_load_after_another_leaves_turns_to_others() -> None:
    """However many of them are done before they are awaited."""
    engine, turns = Engine(), list[int]()
    async with open_cache(CPU, engine=engine) as kv:
        await keep(kv, engine, KEYS)

        async def other() -> None:
            for number in range(10):
                turns.append(number)
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        for _ in range(10):
            await kv.load(KEYS, INTO)
        assert len(turns) >= 9
        await beside
        await until_idle(kv)


async def test_a_busy_stream_keeps_its_order() -> None:
    """A load behind others of its stream is copied after them, by the stream."""
    engine, gate = Engine(), threading.Event()
    async with open_cache(CPU, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        engine.poison()
        first = kv.start_load(KEYS[:1], INTO[:1], after=gate)
        behind = kv.start_load(KEYS[1:], INTO[1:], after=gate)
        assert (first.done, behind.done, kv.stats().transfers) == (False, False, 2)
        assert engine.is_poisoned()
        gate.set()
        assert [(await first).num_blocks, (await behind).num_blocks] == [1, 3]
        assert engine.read(INTO) == contents(KEYS)
        await until_idle(kv)


@pytest.mark.parametrize("how", ["cancel", "task", "deadline", "close"])
async def test_what_has_not_begun_can_be_stopped(how: str) -> None:
    """Nothing is written, and nothing is held, whoever ends it."""
    engine, device = Engine(), ScriptedDevice()
    limits = SMALL_LIMITS.model_copy(update={"close_timeout_s": 0.05})
    async with open_cache(CPU, engine=engine, device=device, limits=limits) as kv:
        await _have(kv, engine, device)
        handle = kv.start_load(KEYS, INTO, after=ScriptedEvent(), deadline_s=0.01 if how == "deadline" else 60.0)
        waiting = asyncio.ensure_future(handle)
        await asyncio.sleep(0)
        if how == "cancel":
            handle.cancel()
        elif how == "task":
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        elif how == "close":
            await kv.aclose()
        loaded = await handle
        assert loaded.num_blocks == 0
        assert [fault.reason for fault in loaded.faults] == ["deadline" if how == "deadline" else "revoked"]
        if how != "close":
            await until_idle(kv, on_wait=device.run_all)
        assert engine.is_poisoned()


async def test_what_has_begun_is_waited_for() -> None:
    """A cancellation comes through once the copy has ended, and not before."""
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        await _have(kv, engine, device)
        handle = kv.start_load(KEYS, INTO)
        waiting = asyncio.ensure_future(handle)
        await asyncio.sleep(0)
        device.run_all()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (handle.done, (await handle).num_blocks) == (True, 4)
        assert engine.read(INTO) == contents(KEYS)
        await until_idle(kv)


async def test_new_weights_overtake_it() -> None:
    """What was asked for with the old weights is no hit any more, though its bytes have come."""
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        await _have(kv, engine, device)
        handle = kv.start_load(KEYS, INTO)
        kv.advance_epoch("w1")
        device.run_all()
        loaded = await handle
        assert (loaded.num_blocks, [fault.reason for fault in loaded.faults]) == (0, ["epoch advanced"])
        await until_idle(kv)


async def test_a_leased_block_that_is_evicted_meanwhile_arrives() -> None:
    """Its slot is nobody else's until it is copied."""
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        await _have(kv, engine, device)
        handle = kv.start_load(KEYS, INTO)
        evicting = asyncio.create_task(kv.evict(KEYS))
        await until(evicting.done)
        device.run_all()
        assert (await handle).num_blocks == 4
        assert engine.read(INTO) == contents(KEYS)
        assert (await kv.lookup(KEYS)).num_blocks == 0
        await until_idle(kv)


async def test_a_hit_counts_in_the_tiers_below() -> None:
    """A use is noted wherever the blocks are, though one tier served them."""
    engine, medium = Engine(), ScriptedBackend()
    async with open_cache(CPU, medium, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        for seed in range(1, 4):  # with the four blocks these fill the tier
            await keep(kv, engine, prompt(4, seed=seed))
        assert (await kv.load(KEYS, INTO)).num_blocks == 4
        await keep(kv, engine, prompt(4, seed=9))
        assert (await kv.lookup(KEYS)).by_tier == {"cpu": 4}
        assert (await kv.lookup(prompt(4, seed=1))).by_tier == {"keyed": 4}
        await until_idle(kv)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_an_interrupt_in_the_copy_is_the_programs(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """A handler of signals raised it, by chance there: it is raised to the program, and nothing stays leased."""

    def interrupted(*_: object, **__: object) -> None:
        raise error

    engine, others = Engine(), prompt(4, seed=1)
    async with open_cache(CPU, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        computed = engine.compute(others)
        with monkeypatch.context() as patch:
            patch.setattr(engine_memory, "scatter_blocks", interrupted)
            patch.setattr(engine_memory, "gather_blocks", interrupted)
            with pytest.raises(error):
                kv.start_load(KEYS, INTO)
            with pytest.raises(error):
                kv.start_store(others, computed)
        await until_idle(kv)
        assert (await kv.lookup(others)).num_blocks == 0
        assert (await kv.load(KEYS, INTO)).num_blocks == 4
