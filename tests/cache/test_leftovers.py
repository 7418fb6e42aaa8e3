"""What one call leaves behind does not change what the next ones do."""

import asyncio
import threading

import pytest
from anyio.lowlevel import checkpoint

from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import Recorder, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, prompt
from tiered_kv import GPULoadStoreSpec
from tiered_kv.values.events import BlocksCorrupted

KEYS = prompt(9)
INTO = GPULoadStoreSpec(range(9))
CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}


async def test_a_store_that_is_cancelled_reaches_no_backend() -> None:
    """A store that asks what is below, where nothing keeps blocks above, leaves the question to the cache."""
    engine, keyed = Engine(), ScriptedBackend(name="keyed")
    async with open_cache(keyed, engine=engine) as kv:
        keyed.on_lookup.hold()
        storing = asyncio.create_task(kv.store(KEYS, engine.compute(KEYS)))
        await until(lambda: keyed.on_lookup.num_held == 1)
        storing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await storing
        assert keyed.on_lookup.num_held == 1
        keyed.on_lookup.release()
        await until_idle(kv)


async def test_what_is_evicted_is_not_brought_back_from_a_shared_tier() -> None:
    """Before a shared tier has deleted it, a block is unfindable here all the same."""
    engine, keyed = Engine(), ScriptedBackend(name="keyed")
    async with open_cache(CPU, keyed, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        keyed.on_delete.hold()
        evicting = asyncio.create_task(kv.evict(KEYS))
        await until(lambda: keyed.on_delete.num_held == 1)
        assert (await kv.load(KEYS, INTO)).num_blocks == 0
        keyed.on_delete.release()
        await evicting
        assert (await kv.lookup(KEYS)).num_blocks == 0
        await until_idle(kv)


async def test_a_close_that_is_cancelled_ends_all_the_same() -> None:
    """The cancellation is raised once everything has ended: transfers, backends and threads."""
    engine, keyed, before = Engine(), ScriptedBackend(name="keyed"), set(threading.enumerate())
    async with open_cache(CPU, keyed, engine=engine) as kv:
        keyed.on_write.hold()
        await kv.store(KEYS, engine.compute(KEYS))
        await until(lambda: keyed.on_write.num_held > 0)
        closing = asyncio.create_task(kv.aclose())
        for _ in range(3):
            await checkpoint()
            closing.cancel()
        await checkpoint()
        assert not closing.done()
        keyed.on_write.release()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert keyed.on_close.num_calls == 1
        await until(lambda: set(threading.enumerate()) <= before)


async def test_what_is_evicted_while_it_is_read_is_no_corruption() -> None:
    """A medium may overwrite it at once: the load ends before it, and no disk is suspected."""
    engine, disk, recorder = Engine(), ScriptedSlotBackend(name="disk"), Recorder()
    async with open_cache(disk, engine=engine, emit=recorder) as kv:
        await keep(kv, engine, KEYS)
        disk.on_read.hold()
        loading = asyncio.create_task(kv.load(KEYS, INTO))
        await until(lambda: disk.on_read.num_held > 0)
        await kv.evict(KEYS[4:])
        assert disk.num_records == 4
        disk.on_read.release()
        assert (await loading).num_blocks == 4
        await until_idle(kv)
    assert recorder.of(BlocksCorrupted) == []
