"""Admission: a tier that wants blocks used n times first gets them at their n-th use, wherever they are then."""

import asyncio

import pytest

from tests.support.backends import ScriptedSlotBackend
from tests.support.caches import keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, prompt
from tiered_kv import GPULoadStoreSpec, TierSettings, TierStore
from tiered_kv.tiers.chain import Chain

KEYS = prompt(8)
CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}


def picky(admit_after: int, **settings: object) -> ScriptedSlotBackend:
    """Return an owned tier that takes blocks at their n-th use."""
    backend = ScriptedSlotBackend()
    given = {"medium": "slots", "name": "slots", "admit_after": admit_after} | settings
    backend.settings = TierSettings.model_validate(given)
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
