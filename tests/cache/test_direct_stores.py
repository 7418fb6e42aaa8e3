"""Stores straight out of memory of the engine's own: the medium writes what is there, and nothing is copied."""

import asyncio
import threading
from pathlib import Path

import pytest
from anyio import fail_after

from tests.cache.test_host_pools import KEYS, SLOTS, Pool
from tests.support.backends import ScriptedSlotBackend, only
from tests.support.caches import AnyTier, Recorder, inside, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, contents, prompt
from tiered_kv import CacheLimits, CPULoadStoreSpec, Outcome, Reason
from tiered_kv.cache.tiered_kv import TieredKV
from tiered_kv.testing import ScriptedDevice, ScriptedEvent
from tiered_kv.values.events import BlocksNotEncoded

LIMITS = CacheLimits(window=64 * PAYLOAD_BYTES, bounce=256 * PAYLOAD_BYTES)
INTO = CPULoadStoreSpec(range(9), pool="swap")
FROM = CPULoadStoreSpec(SLOTS, pool="swap")


def filled(kv: TieredKV) -> Pool:
    """Register a pool that has the blocks in `SLOTS`."""
    pool = Pool()
    pool.fill(SLOTS, contents(KEYS))
    kv.register_host_pool("swap", pool.memory, direct=True)
    return pool


@pytest.mark.parametrize("medium", ["slots", "nvme"])
async def test_storage_writes_straight_out_of_a_direct_pool(medium: str, tmp_path: Path) -> None:
    """All is in storage when the store ends, with records that are verified; storing it again writes nothing."""
    nvme = {"medium": "nvme", "path": str(tmp_path), "capacity": "64MiB"}
    tiers: dict[str, AnyTier] = {"slots": ScriptedSlotBackend(), "nvme": nvme}
    async with open_cache(tiers[medium], engine=Engine()) as kv:
        pool = filled(kv)
        stored = await kv.store(KEYS, FROM)
        assert (stored.num_stored, stored.num_present) == (9, 0)
        assert [(each.tier, each.written) for each in await stored.settled()] == [(medium, 9)]
        again = await kv.store(KEYS, FROM)
        assert (again.num_stored, again.num_present) == (0, 9)
        assert (await kv.load(KEYS, INTO)).num_blocks == 9
        assert pool.read(range(9)) == contents(KEYS)
        assert kv.stats()[medium].written == 9
        await until_idle(kv)


async def test_a_direct_store_ends_when_the_medium_has_let_go() -> None:
    """The slots are the engine's only then, however long the medium takes, and a cancellation gives nothing back."""
    slots = ScriptedSlotBackend()
    async with open_cache(slots, engine=Engine()) as kv:
        filled(kv)
        slots.on_write.hold()
        handle = kv.start_store(KEYS[:4], CPULoadStoreSpec(SLOTS[:4], pool="swap"))
        await until(lambda: slots.on_write.num_held > 0)
        handle.cancel()
        waiting = asyncio.ensure_future(kv.flush())
        await asyncio.sleep(0)
        assert not handle.done
        assert not waiting.done()
        slots.on_write.release()
        with fail_after(30):
            assert (await handle).num_stored == 4
            await waiting
        await until_idle(kv)


@pytest.mark.parametrize("num_blocks", [4, 9], ids=["at once", "in pieces"])
async def test_a_flush_waits_for_a_direct_store_as_long_as_for_any(num_blocks: int) -> None:
    """For the store's time limit: a medium that hangs keeps the engine's memory for longer, and nobody who flushes.

    After that time nothing more of it is begun.
    """
    slots = ScriptedSlotBackend(timeout_s=1000.0)
    limits = CacheLimits(window=2 * PAYLOAD_BYTES, bounce=256 * PAYLOAD_BYTES, store_timeout_s=0.2)
    async with open_cache(slots, engine=Engine(), limits=limits) as kv:
        filled(kv)
        slots.on_write.hold()
        handle = kv.start_store(KEYS[:num_blocks], CPULoadStoreSpec(SLOTS[:num_blocks], pool="swap"))
        await until(lambda: slots.on_write.num_held > 0)
        with fail_after(30):
            await kv.flush()
        assert not handle.done
        slots.on_write.release()
        stored = await handle
        assert stored.num_stored == 4
        assert stored.drop_reasons == ({} if num_blocks == 4 else {Reason.DEADLINE: num_blocks - 4})
        await kv.flush()
        await until_idle(kv)


@pytest.mark.parametrize("num_blocks", [4, 9], ids=["at once", "in pieces"])
async def test_a_drain_waits_for_a_direct_store_that_is_late(num_blocks: int) -> None:
    """For as long as it may take: it says that all is written only when nothing is being written any more."""
    slots = ScriptedSlotBackend(timeout_s=1000.0)
    limits = CacheLimits(window=2 * PAYLOAD_BYTES, bounce=256 * PAYLOAD_BYTES, store_timeout_s=0.2)
    async with open_cache(slots, engine=Engine(), limits=limits) as kv:
        filled(kv)
        slots.on_write.hold()
        handle = kv.start_store(KEYS[:num_blocks], CPULoadStoreSpec(SLOTS[:num_blocks], pool="swap"))
        await until(lambda: slots.on_write.num_held > 0)
        with fail_after(30):
            await kv.flush()  # it is late
        assert not await kv.drain(timeout_s=0.01)
        assert not handle.done
        draining = asyncio.ensure_future(kv.drain(timeout_s=30.0))
        await asyncio.sleep(0)
        slots.on_write.release()
        assert await draining
        assert handle.done
        assert slots.num_records == (await handle).num_stored == 4
        await until_idle(kv)


async def test_what_is_evicted_before_its_turn_is_not_written() -> None:
    """Whoever evicts a block that a store is about to write finds it nowhere afterwards, a restart included."""
    slots, others = ScriptedSlotBackend(), prompt(8, seed=1)
    eight = CPULoadStoreSpec(SLOTS[:8], pool="swap")
    async with open_cache(slots, engine=Engine()) as kv:
        filled(kv)
        slots.on_write.hold()
        first = kv.start_store(others, eight)  # as much as stores may have in flight
        await until(lambda: slots.on_write.num_held > 0)
        second = kv.start_store(KEYS[:8], eight)
        for _ in range(10):
            await asyncio.sleep(0)
        assert slots.on_write.num_calls == 1
        await kv.evict(KEYS[4:8])
        slots.on_write.release()
        assert (await first).num_stored == 8
        stored = await second
        assert (stored.num_stored, stored.drop_reasons) == (4, {Reason.REMOVED: 4})
        assert (await kv.lookup(KEYS)).num_blocks == 4
        await until_idle(kv)
    assert slots.num_records == 12


@pytest.mark.parametrize("what", ["all", "one"])
async def test_what_is_not_written_is_told(what: str) -> None:
    """It counts as dropped, with its reason, and a drain says that not all is kept."""
    slots = ScriptedSlotBackend()
    async with open_cache(slots, engine=Engine()) as kv:
        filled(kv)
        if what == "all":
            slots.on_write.fail_next(OSError("gone"))
        else:
            slots.on_write.change_next(only(2, Outcome.FAILED))
        stored = await kv.store(KEYS[:4], CPULoadStoreSpec(SLOTS[:4], pool="swap"))
        lost = 4 if what == "all" else 1
        assert (stored.num_stored, stored.drop_reasons) == (4 - lost, {Reason.UNWRITTEN: lost})
        assert [each.failed for each in await stored.settled()] == [lost]
        assert not await kv.drain()


async def test_a_direct_store_waits_for_the_event_that_was_given() -> None:
    """No medium reads slots that somebody still writes."""
    device, after, slots = ScriptedDevice(), ScriptedEvent(), ScriptedSlotBackend()
    async with open_cache(slots, engine=Engine(), device=device) as kv:
        filled(kv)
        storing = kv.start_store(KEYS, FROM, after=after)
        await until(lambda: device.pending > 0)
        device.run_all()
        assert slots.on_write.num_calls == 0
        after.fire()
        await until(lambda: storing.done, on_wait=device.run_all)
        assert slots.num_records == 9


async def test_what_memory_is_to_keep_is_copied() -> None:
    """With a CPU tier above, or two tiers below, a store ends when its blocks are copied, as from any pool."""
    cpu, slots = {"medium": "cpu", "capacity": 64 * PAYLOAD_BYTES}, ScriptedSlotBackend()
    for tiers in ([cpu, slots], [slots, ScriptedSlotBackend(name="more")]):
        async with open_cache(*tiers, engine=Engine()) as kv:
            filled(kv)
            slots.on_write.hold()
            with fail_after(30):
                assert (await kv.store(KEYS, FROM)).num_stored == 9
            slots.on_write.release()
            await until_idle(kv)
        slots = ScriptedSlotBackend()


@pytest.mark.parametrize("num_turns", [0, 1, 2, 4, 9])
async def test_a_direct_store_that_waits_for_its_turn_can_be_given_up(num_turns: int) -> None:
    """The medium takes 16 writes at once: a store behind them that is cancelled ends, and reads nothing any more."""
    slots = ScriptedSlotBackend(timeout_s=1000.0)
    one = CPULoadStoreSpec(SLOTS[:1], pool="swap")
    limits = CacheLimits(window=64 * PAYLOAD_BYTES, bounce=256 * PAYLOAD_BYTES, store_timeout_s=1000.0)
    async with open_cache(slots, engine=Engine(), limits=limits) as kv:
        filled(kv)
        slots.on_write.hold()
        first = [kv.start_store(prompt(1, seed=seed), one) for seed in range(1, 17)]
        await until(lambda: slots.on_write.num_held == 16)
        late = kv.start_store(KEYS[:1], one)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        late.cancel()
        with fail_after(10):
            assert (await late).num_stored == 0
        slots.on_write.release()
        assert [(await each).num_stored for each in first] == [1] * 16
        await until_idle(kv)
        assert not (await kv.lookup(KEYS)).num_blocks


async def test_a_thread_that_outlives_the_closing_has_nothing_written() -> None:
    """A record that it makes when the medium is closed goes nowhere, and the slots are the engine's after that."""
    slots, free, told = ScriptedSlotBackend(), threading.Event(), Recorder()
    limits = CacheLimits(window=64 * PAYLOAD_BYTES, bounce=256 * PAYLOAD_BYTES, close_timeout_s=0.05)
    try:
        async with open_cache(slots, engine=Engine(), limits=limits, emit=told) as kv:
            filled(kv)
            threads = inside(kv).chains[0].storage[0].records.threads
            busy = [threads.run(free.wait) for _ in range(8)]
            handle = kv.start_store(KEYS[:4], CPULoadStoreSpec(SLOTS[:4], pool="swap"))
            await kv.aclose()
            assert not handle.done
    finally:
        free.set()
    assert (await handle).num_stored == 0
    await asyncio.wait(busy)
    assert (slots.on_write.num_calls, slots.on_close.num_calls) == (0, 1)
    assert not told.of(BlocksNotEncoded)


async def test_a_direct_store_that_outlives_the_closing_asks_nothing_of_the_medium() -> None:
    """What failed can be forgotten no more: the medium is closed, and the slots are the engine's without it."""
    slots = ScriptedSlotBackend()
    async with open_cache(slots, engine=Engine(), limits=CacheLimits(close_timeout_s=0.05)) as kv:
        filled(kv)
        slots.on_write.hold()
        slots.on_write.change_next(only(1, Outcome.FAILED))
        handle = kv.start_store(KEYS[:4], CPULoadStoreSpec(SLOTS[:4], pool="swap"))
        await until(lambda: slots.on_write.num_held > 0)
        await kv.aclose()
        assert not handle.done
    slots.on_forget.hold()
    slots.on_write.release()
    with fail_after(30):
        stored = await handle
    assert (stored.num_stored, stored.drop_reasons) == (3, {Reason.UNWRITTEN: 1})
    assert (slots.on_forget.num_calls, slots.on_close.num_calls) == (0, 1)
