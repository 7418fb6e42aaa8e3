"""Stores of few blocks need no task where a tier has room; all that is promised of a store holds all the same."""

import asyncio
import threading

import pytest

from tests.support.backends import ScriptedBackend
from tests.support.caches import open_cache, until_idle
from tests.support.engine import PAYLOAD_BYTES, SMALL_LIMITS, Engine, contents, prompt
from tiered_kv import GPULoadStoreSpec
from tiered_kv.testing import ScriptedDevice, ScriptedEvent
from tiered_kv.values.results import TierStore

CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}
KEYS = prompt(4)


async def test_few_blocks_are_kept_at_once() -> None:
    """On a CPU the source may be reused when `start_store` returns; a second store finds them present."""
    engine = Engine()
    async with open_cache(CPU, engine=engine) as kv:
        source = engine.compute(KEYS)
        handle = kv.start_store(KEYS, source)
        assert (handle.done, kv.stats().transfers) == (True, 0)
        engine.poison()
        stored = await handle
        assert (stored.num_stored, stored.num_present, stored.num_dropped) == (4, 0, 0)
        assert await stored.settled() == (TierStore("cpu", written=4),)
        again = await kv.start_store(KEYS, source)
        assert (again.num_stored, again.num_present) == (0, 4)
        assert await again.settled() == (TierStore("cpu", present=4),)
        loaded = await kv.load(KEYS, GPULoadStoreSpec(range(10, 14)))
        assert engine.read(range(10, 14)) == contents(KEYS)
        stats = kv.stats()
        assert (loaded.num_blocks, stats.store_requested, stats.stored, stats.present) == (4, 8, 4, 4)
        await until_idle(kv)


async def test_what_goes_down_is_written_afterwards() -> None:
    """The store has ended before the tiers below have the blocks; its result says when they do."""
    engine, medium = Engine(), ScriptedBackend()
    async with open_cache(CPU, medium, engine=engine) as kv:
        medium.on_write.hold()
        handle = kv.start_store(KEYS, engine.compute(KEYS))
        assert handle.done
        stored = await handle
        assert medium.num_records == 0
        medium.on_write.release()
        assert await stored.settled() == (TierStore("cpu", written=4), TierStore("keyed", written=4))
        await until_idle(kv)


async def test_nothing_is_read_before_its_event() -> None:
    """A store behind an event is copied by the stream."""
    engine, computed = Engine(), threading.Event()
    async with open_cache(CPU, engine=engine) as kv:
        handle = kv.start_store(KEYS, GPULoadStoreSpec(range(4)), after=computed)
        assert (handle.done, kv.stats().transfers) == (False, 1)
        engine.compute(KEYS)
        computed.set()
        assert (await handle).num_stored == 4
        await kv.load(KEYS, GPULoadStoreSpec(range(10, 14)))
        assert engine.read(range(10, 14)) == contents(KEYS)
        await until_idle(kv)


@pytest.mark.parametrize(("how", "reason"), [("cancel", "revoked"), ("task", "revoked"), ("deadline", "deadline")])
async def test_what_has_not_begun_can_be_stopped(how: str, reason: str) -> None:
    """Nothing is kept, and nothing is held, whoever ends it."""
    engine, device = Engine(), ScriptedDevice()
    limits = SMALL_LIMITS.model_copy(update={"store_timeout_s": 0.01 if how == "deadline" else 60.0})
    async with open_cache(CPU, engine=engine, device=device, limits=limits) as kv:
        handle = kv.start_store(KEYS, engine.compute(KEYS), after=ScriptedEvent())
        waiting = asyncio.ensure_future(handle)
        await asyncio.sleep(0)
        if how == "cancel":
            handle.cancel()
        elif how == "task":
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        stored = await handle
        assert (stored.num_stored, stored.drop_reasons) == (0, {reason: 4})
        assert (await kv.lookup(KEYS)).num_blocks == 0
        await until_idle(kv, on_wait=device.run_all)
