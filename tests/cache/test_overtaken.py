"""Calls that others overtake: an ``after`` that comes late or never, blocks evicted and weights changed on the way."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest
from anyio.lowlevel import checkpoint

from tests.support.backends import ScriptedBackend, ScriptedSlotBackend, only
from tests.support.caches import AnyTier, keep, open_cache, until, until_idle
from tests.support.engine import MODEL, PAYLOAD_BYTES, Engine, contents, prompt
from tiered_kv import CacheLimits, GPULoadStoreSpec, Outcome, TieredKV
from tiered_kv.testing import ScriptedDevice, ScriptedEvent

KEYS = prompt(9)
INTO = GPULoadStoreSpec(range(9))
SOON_S = 0.02
"""A timeout that is expected to pass."""
CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}
GPU = {"medium": "gpu", "capacity": 16 * PAYLOAD_BYTES}
Scripted = ScriptedBackend | ScriptedSlotBackend
Removal = Callable[[TieredKV], Awaitable[object]]

both_kinds = pytest.mark.parametrize("kind", [ScriptedBackend, ScriptedSlotBackend])


async def _some_turns() -> None:
    """Give whoever does what it must not enough turns of the loop to do it."""
    for _ in range(50):
        await checkpoint()


# Events to wait for.


async def test_nothing_is_written_before_its_event() -> None:
    """A load touches the engine's blocks only once ``after`` has fired, and then fills them."""
    engine, device, after = Engine(), ScriptedDevice(), ScriptedEvent()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        stored = kv.start_store(KEYS, engine.compute(KEYS))
        await until(lambda: stored.done, on_wait=device.run_all)
        engine.poison()
        handle = kv.start_load(KEYS, INTO, after=after)
        await until(lambda: device.pending > 0)
        await _some_turns()
        assert device.run_all() == 0
        assert engine.is_poisoned()
        assert not handle.done
        after.fire()
        await until(lambda: handle.done, on_wait=device.run_all)
        assert (await handle).num_blocks == 9
        assert engine.read(INTO) == contents(KEYS)
        await until_idle(kv)


async def test_nothing_is_read_before_its_event() -> None:
    """A store copies what the blocks hold when ``after`` fires: they may be computed after the call."""
    engine, after = Engine(), threading.Event()
    async with open_cache(CPU, engine=engine) as kv:
        engine.poison()
        handle = kv.start_store(KEYS, INTO, after=after)
        await _some_turns()
        assert not handle.done
        engine.compute(KEYS)
        after.set()
        assert (await handle).num_stored == 9
        engine.poison()
        assert (await kv.load(KEYS, INTO)).num_blocks == 9
        assert engine.read(INTO) == contents(KEYS)
        await until_idle(kv)


@pytest.mark.parametrize("what", ["load", "store"])
async def test_who_waits_for_an_event_that_never_fires_may_leave_at_once(what: str) -> None:
    """Cancelled, the transfer ends though its event has not fired; should it fire later, nothing is touched."""
    engine, device, never = Engine(), ScriptedDevice(), ScriptedEvent()
    others = prompt(9, seed=1)
    async with open_cache(CPU, engine=engine, device=device) as kv:
        stored = kv.start_store(KEYS, engine.compute(KEYS))
        await until(lambda: stored.done, on_wait=device.run_all)
        engine.compute(others)
        call = kv.load(KEYS, INTO, after=never) if what == "load" else kv.store(others, INTO, after=never)
        task = asyncio.create_task(call)
        await until(lambda: device.pending > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.poison()
        await until_idle(kv)
        never.fire()
        device.run_all()
        await _some_turns()
        assert engine.is_poisoned()
        assert (await kv.lookup(others)).num_blocks == 0


async def test_a_deadline_holds_for_an_event_that_never_fires() -> None:
    """A load ends in time with the prefix that is in place, here nothing; what comes too late touches nothing."""
    engine, device, never = Engine(), ScriptedDevice(), ScriptedEvent()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        stored = kv.start_store(KEYS, engine.compute(KEYS))
        await until(lambda: stored.done, on_wait=device.run_all)
        engine.poison()
        loaded = await kv.load(KEYS, INTO, after=never, deadline_s=SOON_S)
        assert loaded.num_blocks == 0
        assert [fault.reason for fault in loaded.faults] == ["deadline"]
        await until_idle(kv)
        never.fire()
        device.run_all()
        assert engine.is_poisoned()


async def test_a_store_gives_up_an_event_that_never_fires() -> None:
    """After its time limit the source is the caller's again, and the blocks are dropped."""
    engine, device, never = Engine(), ScriptedDevice(), ScriptedEvent()
    limits = CacheLimits(window=4 * PAYLOAD_BYTES, bounce=16 * PAYLOAD_BYTES, store_timeout_s=SOON_S)
    async with open_cache(CPU, engine=engine, device=device, limits=limits) as kv:
        stored = await kv.store(KEYS, engine.compute(KEYS), after=never)
        assert (stored.num_stored, stored.drop_reasons) == (0, {"deadline": 9})
        await until_idle(kv)
        assert (await kv.lookup(KEYS)).num_blocks == 0


# Blocks that are evicted on the way.


async def _evict(kv: TieredKV) -> None:
    await kv.evict(KEYS)


async def _clear(kv: TieredKV) -> None:
    await kv.clear()


async def _advance(kv: TieredKV) -> None:
    kv.advance_epoch("w1")


removals = pytest.mark.parametrize("remove", [_evict, _clear, _advance])


def _can(kind: type[Scripted], remove: Removal) -> bool:
    """A cache clears only what it owns."""
    return not (kind is ScriptedBackend and remove is _clear)


@both_kinds
@removals
async def test_a_fill_that_is_overtaken_never_commits(kind: type[Scripted], remove: Removal) -> None:
    """What goes while it is read from below is unfindable at once, and the load that waits for it returns nothing."""
    if not _can(kind, remove):
        return
    engine, medium = Engine(), kind(name="medium")
    async with open_cache(CPU, medium, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS, tier="cpu")
        medium.on_read.hold()
        loading = asyncio.create_task(kv.load(KEYS, INTO))
        await until(lambda: medium.on_read.num_held > 0)
        await remove(kv)
        assert (await kv.lookup(KEYS)).num_blocks == 0
        medium.on_read.release()
        assert (await loading).num_blocks == 0
        await until_idle(kv)
        assert (await kv.lookup(KEYS)).num_blocks == 0
        assert remove is _advance or kv.stats()["cpu"].ready == 0


@both_kinds
@removals
async def test_a_store_that_is_overtaken_does_not_come_back(kind: type[Scripted], remove: Removal) -> None:
    """What goes while it is written down is unfindable at once and for good, after a restart too."""
    if not _can(kind, remove):
        return
    # An eviction waits for the write, until its tier is late.
    engine, medium = Engine(), kind(name="medium", timeout_s=60.0 if remove is _advance else 10 * SOON_S)
    async with open_cache(CPU, medium, engine=engine) as kv:
        medium.on_write.hold()
        stored = await kv.store(KEYS, engine.compute(KEYS))
        await until(lambda: medium.on_write.num_held > 0)
        await remove(kv)
        assert (await kv.lookup(KEYS)).num_blocks == 0
        medium.on_write.release()
        await stored.settled()
        await until_idle(kv)
        assert (await kv.lookup(KEYS)).num_blocks == 0
        if remove is _advance:
            assert [each.written for each in await stored.settled()] == [9, 9]
            kv.advance_epoch(MODEL.weights)
            assert (await kv.load(KEYS, INTO)).num_blocks == 9
            assert engine.read(INTO) == contents(KEYS)
            return
        assert medium.num_records == 0  # so that not even a crash brings it back
    async with open_cache(CPU, medium, engine=engine) as kv:
        assert (await kv.lookup(KEYS)).num_blocks == 0


@both_kinds
@pytest.mark.parametrize("tiers", [[CPU], [GPU, CPU]], ids=["cpu", "gpu, cpu"])
@removals
async def test_a_copy_out_that_is_overtaken(kind: type[Scripted], tiers: list[AnyTier], remove: Removal) -> None:
    """What goes while it is copied out of the engine is not kept, and goes no further down."""
    engine, medium, device = Engine(), kind(name="medium"), ScriptedDevice()
    async with open_cache(*tiers, medium, engine=engine, device=device) as kv:
        storing = asyncio.create_task(kv.store(KEYS, engine.compute(KEYS)))
        await until(lambda: device.pending > 0)
        await _some_turns()
        await remove(kv)
        await until(storing.done, on_wait=device.run_all)
        settled = asyncio.create_task((await storing).settled())
        await until(settled.done, on_wait=device.run_all)
        await until_idle(kv, on_wait=device.run_all)
        assert (await kv.lookup(KEYS)).num_blocks == 0
        if remove is _advance:
            kv.advance_epoch(MODEL.weights)
            assert (await kv.lookup(KEYS)).num_blocks == 9
        else:
            assert medium.on_write.num_blocks == 0


@both_kinds
async def test_a_late_read_takes_nothing_from_who_stored_the_blocks_since(kind: type[Scripted]) -> None:
    """What was evicted while a hanging read had slots for it, and is stored again, stays when the read is late."""
    keys, into = KEYS[:4], INTO[:4]
    engine, medium = Engine(), kind(name="medium", timeout_s=10 * SOON_S)
    async with open_cache(CPU, medium, engine=engine) as kv:
        await keep(kv, engine, keys)
        await kv.evict(keys, tier="cpu")
        medium.on_read.hold()
        loading = asyncio.create_task(kv.load(keys, into))
        await until(lambda: medium.on_read.num_held > 0)
        await kv.evict(keys, tier="cpu")
        await kv.store(keys, engine.compute(keys))
        await until(lambda: kv.stats()["medium"].is_bypassed)
        assert (await kv.load(keys, into)).by_tier == {"cpu": 4}
        medium.on_read.release()
        await loading
        await until_idle(kv)


async def test_a_broken_read_takes_nothing_from_who_stored_the_blocks_since() -> None:
    """What is broken in a slot that was evicted meanwhile says nothing of the slot that the block is in now."""
    keys, engine, medium = KEYS[:2], Engine(), ScriptedSlotBackend(name="medium")
    async with open_cache(medium, engine=engine) as kv:
        await keep(kv, engine, keys)
        medium.on_read.hold()
        medium.on_read.change_next(only(0, Outcome.CORRUPT))
        loading = asyncio.create_task(kv.load(keys, INTO[:2]))
        await until(lambda: medium.on_read.num_held > 0)
        await kv.evict(keys)
        stored = await kv.store(keys, engine.compute(keys, range(20, 22)))
        assert [each.written for each in await stored.settled()] == [2]
        medium.on_read.release()
        await loading
        await until_idle(kv)
        assert (await kv.lookup(keys)).num_blocks == 2


@pytest.mark.parametrize("is_stored_again", [False, True])
async def test_a_copy_down_that_is_overtaken(*, is_stored_again: bool) -> None:
    """What leaves the GPU pool while it is copied to the host is not kept there, whatever has its name since."""
    keys, into = KEYS[:4], INTO[:4]
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(GPU, CPU, engine=engine, device=device) as kv:
        engine.poison()
        stored = kv.start_store(keys, into)
        await until(lambda: device.pending > 0)
        device.run_all()
        await until(lambda: stored.done)
        await until(lambda: device.pending > 0)  # on its way to the host
        await kv.evict(keys, tier="gpu")
        if is_stored_again:
            again = kv.start_store(keys, engine.compute(keys))
            await until(lambda: again.done, on_wait=device.run_all)
        await until(lambda: kv.stats().transfers == 0, on_wait=device.run_all)
        await kv.evict(keys, tier="gpu")
        engine.poison()
        loading = kv.start_load(keys, into)
        await until(lambda: loading.done, on_wait=device.run_all)
        n = (await loading).num_blocks
        assert is_stored_again or n == 0
        assert engine.read(into[:n]) == contents(keys[:n])
        await until_idle(kv, on_wait=device.run_all)


@both_kinds
async def test_a_write_that_is_overtaken_by_another_of_the_same_blocks(kind: type[Scripted]) -> None:
    """What was evicted before its turn to be written came is not written, though its name is in the CPU tier again."""
    keys, into, others = KEYS[:4], INTO[:4], prompt(4, seed=1)
    engine, medium = Engine(), kind(name="medium")
    async with open_cache(CPU, medium, engine=engine) as kv:
        medium.on_write.hold()
        await kv.store(others, engine.compute(others))
        await until(lambda: medium.on_write.num_held == 1)
        engine.poison()
        await kv.store(keys, into)  # waits for its turn
        await kv.evict(keys)
        await kv.store(keys, engine.compute(keys))
        medium.on_write.release()
        await until_idle(kv)
        await kv.evict(keys, tier="cpu")
        engine.poison()
        assert (await kv.load(keys, into)).by_tier == {"medium": 4}
        assert engine.read(into) == contents(keys)
        await until_idle(kv)


@removals
async def test_a_copy_in_that_is_overtaken_is_right_or_nothing(remove: Removal) -> None:
    """Blocks that go while they are copied to the engine stay where they are until they have arrived."""
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        stored = kv.start_store(KEYS, engine.compute(KEYS))
        await until(lambda: stored.done, on_wait=device.run_all)
        engine.poison()
        loading = asyncio.create_task(kv.load(KEYS, INTO))
        await until(lambda: device.pending > 0)
        await _some_turns()
        await remove(kv)
        assert (await kv.lookup(KEYS)).num_blocks == 0
        others = prompt(16, seed=1)  # as many as there are slots: they may not take the ones in use
        storing = asyncio.create_task(kv.store(others, engine.compute(others, range(20, 36))))
        await until(lambda: loading.done() and storing.done(), on_wait=device.run_all)
        loaded = loading.result()
        assert loaded.num_blocks == (0 if remove is _advance else 9)
        assert engine.read(INTO) == contents(KEYS)
        await until_idle(kv, on_wait=device.run_all)


async def test_a_load_that_weights_overtake_says_so() -> None:
    """It returns 0 blocks with the reason; one that starts after the change finds nothing without a fault."""
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        stored = kv.start_store(KEYS, engine.compute(KEYS))
        await until(lambda: stored.done, on_wait=device.run_all)
        handle = kv.start_load(KEYS, INTO)
        kv.advance_epoch("w1")
        await until(lambda: handle.done, on_wait=device.run_all)
        loaded = await handle
        assert (loaded.num_blocks, [fault.reason for fault in loaded.faults]) == (0, ["epoch advanced"])
        loaded = await kv.load(KEYS, INTO)
        assert (loaded.num_blocks, loaded.faults) == (0, ())


async def test_a_store_names_the_weights_that_computed_it() -> None:
    """Blocks of weights that are not current any more go where those weights' blocks are."""
    engine = Engine()
    async with open_cache(CPU, engine=engine) as kv:
        kv.advance_epoch("w1")
        await kv.store(KEYS, engine.compute(KEYS), epoch="w0")
        assert (await kv.lookup(KEYS)).num_blocks == 0
        kv.advance_epoch("w0")
        assert (await kv.lookup(KEYS)).num_blocks == 9
        await until_idle(kv)


async def test_what_is_being_deleted_is_not_written_at_the_same_time() -> None:
    """Which of the two came last, nobody could tell: the tier drops the block, and a store after it keeps it."""
    shared, engine, keys = ScriptedBackend(), Engine(), prompt(4)
    async with open_cache(CPU, shared, engine=engine) as kv:
        await keep(kv, engine, keys)
        shared.on_delete.hold()
        evicting = asyncio.create_task(kv.evict(keys[:2]))
        await until(lambda: shared.on_delete.num_held > 0)
        num_written = shared.on_write.num_blocks
        dropped = {tier.tier: tier.dropped for tier in await (await kv.store(keys, engine.compute(keys))).settled()}
        assert (dropped["keyed"], shared.on_write.num_blocks) == (2, num_written)
        shared.on_delete.release()
        await evicting
        await kv.evict(keys[:2], tier="cpu")
        assert (await kv.lookup(keys)).num_blocks == 0
        await keep(kv, engine, keys[:2])
        await kv.evict(keys[:2], tier="cpu")
        assert (await kv.load(keys[:2], GPULoadStoreSpec(range(2)))).by_tier == {"keyed": 2}
        await until_idle(kv)
