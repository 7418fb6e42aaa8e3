"""Resizing: another capacity while the cache is used, with memory and disk space really taken and given back."""

import asyncio
import os
from pathlib import Path

import pytest
from anyio.lowlevel import checkpoint

from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import Recorder, inside, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, SMALL_LIMITS, Engine, contents, prompt
from tests.support.planned import mapped
from tiered_kv import ConfigurationError, GPULoadStoreSpec, TieredKV
from tiered_kv.values.events import TierResized

KEYS = prompt(16)
INTO = GPULoadStoreSpec(range(16))


def cpu(num_blocks: int, most: int, **settings: object) -> dict[str, object]:
    """Return a CPU tier that can be resized."""
    return {
        "medium": "cpu",
        "capacity": num_blocks * PAYLOAD_BYTES,
        "max_capacity": most * PAYLOAD_BYTES,
        **settings,
    }


def slab_bytes(kv: TieredKV) -> int:
    """Return how much memory the system has given to the host slab."""
    slab = inside(kv).chains[0].host.slab  # no public call tells it
    return os.fstat(slab.fd).st_blocks * 512


def file_bytes(path: Path) -> int:
    """Return the length of the only slab under a path."""
    (file,) = path.glob("*/slab")
    return file.stat().st_size


async def test_memory_that_workers_may_have_page_locked_is_not_given_back() -> None:
    """Their GPUs would copy to and from pages that are none of the slab's any more."""
    async with open_cache(cpu(8, 64)) as kv:
        (handle,) = kv.planner().slabs()
        with mapped(handle) as memory:
            memory[:] = b"Z" * len(memory)
            await kv.resize("cpu", PAYLOAD_BYTES)
            await kv.resize("cpu", 64 * PAYLOAD_BYTES)
            assert memory[:] == b"Z" * len(memory)


async def test_memory_that_a_medium_goes_on_using_is_not_given_back() -> None:
    """As what it has registered for RDMA: it would read and write pages that are none of the slab's any more."""
    backend = ScriptedBackend()
    backend.keeps_memory = True
    async with open_cache(cpu(8, 64), backend) as kv:
        rows = inside(kv).chains[0].host.slab.rows
        rows[:] = 90
        await kv.resize("cpu", PAYLOAD_BYTES)
        assert (rows == 90).all()


async def test_memory_grows_and_shrinks() -> None:
    """More blocks find room after growing; after shrinking the system has the memory back, and what stayed loads."""
    engine, said = Engine(), Recorder()
    async with open_cache(cpu(8, 64), engine=engine, emit=said) as kv:
        await keep(kv, engine, KEYS)
        assert kv.stats()["cpu"].ready == 8
        assert await kv.resize("cpu", 32 * PAYLOAD_BYTES) == 32
        await keep(kv, engine, KEYS)
        assert kv.stats()["cpu"].ready == 16
        before = slab_bytes(kv)
        assert await kv.resize("cpu", 4 * PAYLOAD_BYTES) == 4
        assert slab_bytes(kv) == before - 12 * PAYLOAD_BYTES
        stats = kv.stats()["cpu"]
        assert (stats.num_slots, stats.free + stats.ready, stats.evicted) == (4, 4, 12)
        found = (await kv.lookup(KEYS)).num_blocks
        engine.poison()
        assert (await kv.load(KEYS, INTO)).num_blocks == found
        assert engine.read(range(found)) == contents(KEYS)[:found]
        assert [(each.before, each.blocks, each.evicted) for each in said.of(TierResized)] == [(8, 32, 0), (32, 4, 12)]
        assert await kv.resize("cpu", f"{64 * PAYLOAD_BYTES // 1024}KiB") == 64
        await keep(kv, engine, KEYS)
        engine.poison()
        assert (await kv.load(KEYS, INTO)).num_blocks == 16
        assert engine.read(INTO) == contents(KEYS)
        await until_idle(kv)


async def test_what_is_leased_stays_until_it_is_released() -> None:
    """Its bytes are not touched; its memory goes back after the release."""
    engine = Engine()
    async with open_cache(cpu(16, 16), engine=engine) as kv:
        await keep(kv, engine, KEYS)
        before = inside(kv).chains[0].host.slab.num_bytes
        await until(lambda: slab_bytes(kv) == before)  # a thread touches it all, some time
        async with kv.lease(KEYS) as lease:
            held = [bytes(view) for view in lease.views]
            resizing = asyncio.create_task(kv.resize("cpu", 2 * PAYLOAD_BYTES))
            await until(lambda: kv.lookup_nowait(KEYS).num_blocks <= 2)
            assert [bytes(view) for view in lease.views] == held
        assert await resizing == 2
        assert slab_bytes(kv) < before
        await until_idle(kv)


async def test_memory_goes_back_once_what_was_pinned_for_long_is_not() -> None:
    """Longer than the call waits; of whatever capacity the tier has by then."""
    engine, limits = Engine(), SMALL_LIMITS.model_copy(update={"store_timeout_s": 0.05})
    async with open_cache(cpu(16, 16), engine=engine, limits=limits) as kv:
        await keep(kv, engine, KEYS)
        before = inside(kv).chains[0].host.slab.num_bytes
        await until(lambda: slab_bytes(kv) == before)  # a thread touches it all, some time
        async with kv.lease(KEYS):
            assert await kv.resize("cpu", 8 * PAYLOAD_BYTES) == 8
            assert await kv.resize("cpu", 2 * PAYLOAD_BYTES) == 2
            assert slab_bytes(kv) == before
        await until(lambda: slab_bytes(kv) == before - 14 * PAYLOAD_BYTES)
        await until_idle(kv)


async def test_a_load_brings_again_what_was_in_slots_that_are_given_up() -> None:
    """Whether it was being read there or just had been: the medium has it, so the load comes to its end."""
    engine, slots = Engine(), ScriptedSlotBackend()
    async with open_cache(cpu(16, 16), slots, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        for num_turns in range(40):
            await kv.resize("cpu", 16 * PAYLOAD_BYTES)
            await kv.evict(KEYS[2:], tier="cpu")
            engine.poison()
            slots.on_read.hold()
            loading = kv.start_load(KEYS, INTO)
            await until(lambda: slots.on_read.num_held > 0)
            slots.on_read.release()
            for _ in range(num_turns):
                await checkpoint()
            await kv.resize("cpu", 4 * PAYLOAD_BYTES)
            loaded = await loading
            assert (loaded.num_blocks, loaded.faults) == (16, ())
            assert engine.read(INTO) == contents(KEYS)
            await until_idle(kv)


async def test_what_is_stored_beside_a_resize_is_written_too() -> None:
    """It is not put where the tier is going to end, and lost: seed 8000633 had stored while others were written."""
    engine, slots = Engine(), ScriptedSlotBackend()
    slots.settings = slots.settings.model_copy(update={"write": "back"})
    limits = SMALL_LIMITS.model_copy(update={"clean_after_s": 60.0})
    async with open_cache(cpu(16, 16), slots, engine=engine, limits=limits) as kv:
        await keep(kv, engine, KEYS[:8])
        await kv.flush()
        slots.on_write.hold()
        await kv.store(KEYS[8:10], engine.compute(KEYS[8:10]))
        resizing = asyncio.create_task(kv.resize("cpu", 8 * PAYLOAD_BYTES))
        await until(lambda: slots.on_write.num_held > 0)
        await kv.store(KEYS[10:12], engine.compute(KEYS[10:12]))
        slots.on_write.release()
        assert await resizing == 8
        await kv.flush()
        assert slots.num_records == 12
        stats = kv.stats()["cpu"]
        assert (stats.num_slots, stats.free + stats.ready, stats.evicted) == (8, 8, 4)
        assert await kv.drain()
        await until_idle(kv)


async def test_waiting_blocks_are_written_before_their_memory_goes() -> None:
    """Shrinking a tier loses nothing that a tier below takes."""
    engine, slots = Engine(), ScriptedSlotBackend()
    slots.settings = slots.settings.model_copy(update={"write": "back"})
    async with open_cache(cpu(16, 16), slots, engine=engine) as kv:
        await kv.store(KEYS, engine.compute(KEYS))
        assert await kv.resize("cpu", PAYLOAD_BYTES) == 1
        assert slots.num_records == 16
        engine.poison()
        assert (await kv.load(KEYS, INTO)).num_blocks == 16
        assert engine.read(INTO) == contents(KEYS)
        await kv.flush()
        await until_idle(kv)


async def test_a_disk_grows_and_shrinks(tmp_path: Path) -> None:
    """Its file takes more blocks, and gives their place back; a restart with the smaller capacity finds the rest."""
    engine = Engine()
    disk = {"medium": "nvme", "path": tmp_path, "capacity": "240KiB", "max_capacity": "2MiB"}
    async with open_cache(disk, engine=engine) as kv:
        small = kv.stats()["nvme"].num_slots
        assert 2 <= small < 16
        large = await kv.resize("nvme", "1MiB")
        assert large == kv.stats()["nvme"].num_slots >= 16
        await keep(kv, engine, KEYS)
        assert (await kv.lookup(KEYS)).num_blocks == 16
        assert file_bytes(tmp_path) >= 16 * 2 * PAYLOAD_BYTES
        assert await kv.resize("nvme", "240KiB") == small
        assert file_bytes(tmp_path) <= small * 2 * PAYLOAD_BYTES
        found = (await kv.lookup(KEYS)).num_blocks
        assert kv.stats()["nvme"].ready == small
        engine.poison()
        assert (await kv.load(KEYS, INTO)).num_blocks == found
        await until_idle(kv)
    disk |= {"max_capacity": "240KiB"}
    async with open_cache(disk, engine=engine) as kv:
        assert kv.stats()["nvme"].ready == small
        assert (await kv.lookup(KEYS)).num_blocks == found
        engine.poison()
        assert (await kv.load(KEYS, INTO)).num_blocks == found
        assert engine.read(range(found)) == contents(KEYS)[:found]


async def test_traffic_goes_on_meanwhile(tmp_path: Path) -> None:
    """Loads and stores beside a tier that grows and shrinks see no wrong byte, and leave nothing behind."""
    engine = Engine()
    disk = {"medium": "nvme", "path": tmp_path, "capacity": "500KiB", "max_capacity": "2MiB"}
    async with open_cache(cpu(12, 24), disk, engine=engine, limits=SMALL_LIMITS) as kv:

        async def resize() -> None:
            for n in range(20):
                await kv.resize("cpu", (3, 24, 12)[n % 3] * PAYLOAD_BYTES)
                await kv.resize("nvme", ("240KiB", "2MiB")[n % 2])

        async def use() -> None:
            for n in range(60):
                keys = prompt(12, seed=n % 5)
                await kv.store(keys, engine.compute(keys))
                engine.poison()
                loaded = await kv.load(keys, GPULoadStoreSpec(range(12)))
                assert engine.read(range(loaded.num_blocks)) == contents(keys)[: loaded.num_blocks]

        await asyncio.gather(resize(), use())
        await until_idle(kv)


async def test_a_cancelled_resize_ends_all_the_same() -> None:
    """Cancellation ends the wait only."""
    engine = Engine()
    async with open_cache(cpu(16, 16), engine=engine) as kv:
        resizing = asyncio.create_task(kv.resize("cpu", 4 * PAYLOAD_BYTES))
        await asyncio.sleep(0)
        resizing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resizing
        await until_idle(kv)
        assert kv.stats()["cpu"].num_slots == 4


async def test_what_can_not_be_resized_says_so(tmp_path: Path) -> None:
    """Beyond max_capacity, below one block, tiers of other kinds, no such tier, no size: and nothing has changed."""
    disk = {"medium": "nvme", "path": tmp_path, "capacity": "240KiB"}
    async with open_cache(
        {"medium": "gpu", "capacity": 4 * PAYLOAD_BYTES},
        cpu(4, 8),
        disk,
        ScriptedSlotBackend(),
        {"medium": "memory", "capacity": "1MiB"},
    ) as kv:
        before = [tier.num_slots for tier in kv.stats().tiers]
        for tier, capacity, why in (
            ("cpu", 9 * PAYLOAD_BYTES, "max_capacity"),
            ("cpu", 0, "1 to 8 blocks, not 0$"),
            ("nvme", "1MiB", "max_capacity"),
            ("nvme", 1, "holds no block"),
            ("gpu", PAYLOAD_BYTES, "cannot be changed"),
            ("slots", PAYLOAD_BYTES, "cannot be resized"),
            ("memory", PAYLOAD_BYTES, "cannot be changed"),
            ("tape", PAYLOAD_BYTES, "no tier 'tape'"),
            ("cpu", "lots", "no size"),
        ):
            with pytest.raises(ConfigurationError, match=why):
                await kv.resize(tier, capacity)
        assert [tier.num_slots for tier in kv.stats().tiers] == before
