"""Write-back: what waits in memory is bounded, is never lost in silence, and reaches its tier by the cleaner."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from numpy.typing import NDArray
from structlog.testing import capture_logs

from tests.support import virtual
from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import AnyTier, Recorder, inside, open_cache, until, until_idle
from tests.support.engine import BLOCK_SIZE, MODEL, PAYLOAD_BYTES, SMALL_LIMITS, Engine, contents, prompt, small_layout
from tiered_kv import (
    BackendUnavailableError,
    Block,
    BlockKey,
    BlockKeys,
    CacheLimits,
    ConfigurationError,
    GPULoadStoreSpec,
    Outcome,
    Outcomes,
    StorageTierSettings,
    TieredKV,
    TierStore,
    hash_blocks,
)
from tiered_kv.media.backend import Make
from tiered_kv.testing import ScriptedDevice
from tiered_kv.tiers.gate import Bandwidth
from tiered_kv.values.events import CacheClosed
from tiered_kv.values.keys import Names
from tiered_kv_backends.memory import MemoryBackend
from tiered_kv_backends.nvme import NVMeBackend

KEYS = prompt(8)
INTO = GPULoadStoreSpec(range(8))
LAZY = SMALL_LIMITS.model_copy(update={"low_water": 0.0, "clean_after_s": 1e6})
"""The cleaner does nothing by itself."""


def cpu(num_blocks: int, **settings: object) -> dict[str, object]:
    """Return a CPU tier of so many blocks."""
    return {"medium": "cpu", "capacity": num_blocks * PAYLOAD_BYTES, **settings}


def slots_back(num_slots: int = 64, **settings: object) -> ScriptedSlotBackend:
    """Return an owned tier that is written back."""
    backend = ScriptedSlotBackend(num_slots)
    given = {"medium": "slots", "name": "slots", "write": "back"} | settings
    backend.settings = StorageTierSettings.model_validate(given)
    return backend


def keyed_back(name: str = "keyed", **settings: object) -> ScriptedBackend:
    """Return a keyed tier that is written back."""
    backend = ScriptedBackend(name=name)
    given = {"name": name, "capacity": 1 << 30, "write": "back"} | settings
    backend.settings = MemoryBackend.Settings.model_validate(given)
    return backend


def dirty(kv: TieredKV, tier: str = "cpu") -> int:
    """Count the blocks that wait in a tier."""
    return kv.stats()[tier].dirty


async def test_a_store_leaves_its_blocks_waiting_and_flush_writes_them() -> None:
    """settled() says deferred and does not wait; the blocks load from memory; flush() brings them below."""
    engine, slots = Engine(), slots_back()
    async with open_cache(cpu(16), slots, engine=engine, limits=LAZY) as kv:
        stored = await kv.store(KEYS, engine.compute(KEYS))
        assert stored.num_stored == 8
        assert await stored.settled() == (TierStore("cpu", written=8), TierStore("slots", deferred=8))
        assert (dirty(kv), slots.num_records) == (8, 0)
        await kv.flush()
        assert (dirty(kv), slots.num_records) == (0, 8)
        assert kv.stats()["slots"].written == 8
        await kv.evict(KEYS, tier="cpu")
        engine.poison()
        assert (await kv.load(KEYS, INTO)).by_tier == {"slots": 8}
        assert engine.read(INTO) == contents(KEYS)
        await until_idle(kv)


async def test_what_waits_of_several_tenants_is_written_for_each() -> None:
    """One after another, in the order they came, under their own names."""
    engine, slots = Engine(), slots_back()
    tokens = np.arange(3 * BLOCK_SIZE)
    salts = ("ann", "bob", "ann", "", "bob")
    batches = [hash_blocks(tokens + 1000 * n, block_size=BLOCK_SIZE, salt=salt) for n, salt in enumerate(salts)]
    async with open_cache(cpu(16), slots, engine=engine, limits=LAZY) as kv:
        for keys in batches:
            await kv.store(keys, engine.compute(keys))
        assert (dirty(kv), slots.num_records) == (15, 0)
        await kv.flush()
        assert (dirty(kv), slots.num_records) == (0, 15)
        for keys in batches:
            await kv.evict(keys, tier="cpu")
            engine.poison()
            assert (await kv.load(keys, INTO[:3])).by_tier == {"slots": 3}
            assert engine.read(INTO[:3]) == contents(keys)
        await until_idle(kv)


async def test_the_cleaner_begins_at_low_water_and_ends_there() -> None:
    """It writes the oldest first, and no more than brings the tier back above the mark."""
    engine, slots = Engine(), slots_back()
    limits = LAZY.model_copy(update={"low_water": 0.5})
    async with open_cache(cpu(16), slots, engine=engine, limits=limits) as kv:
        await kv.store(KEYS, engine.compute(KEYS))
        await until(lambda: kv.stats().transfers == 0)
        assert dirty(kv) == 8
        more = prompt(4, seed=1)
        await kv.store(more, engine.compute(more))
        await until(lambda: slots.num_records == 4)
        await until(lambda: kv.stats().transfers == 0)
        assert dirty(kv) == 8
        await kv.evict(KEYS[:8], tier="cpu")
        assert (await kv.lookup(KEYS)).num_blocks == 4
        await kv.flush()
        await until_idle(kv)


async def test_memory_full_of_waiting_blocks_drops_stores_and_serves_loads() -> None:
    """Without a clean block a store drops, at once and counted; loads pass through."""
    engine, slots = Engine(), slots_back()
    async with open_cache(cpu(8), slots, engine=engine, limits=LAZY) as kv:
        old = prompt(4, seed=2)
        await kv.store(old, engine.compute(old))
        await kv.flush()
        await kv.evict(old, tier="cpu")
        slots.on_write.hold()
        assert (await kv.store(KEYS, engine.compute(KEYS))).num_stored == 8
        more = prompt(4, seed=1)
        stored = await kv.store(more, engine.compute(more))
        assert (stored.num_stored, dict(stored.drop_reasons)) == (0, {"no room": 4})
        assert (await kv.load(old, GPULoadStoreSpec(range(4)))).num_blocks == 4
        assert (dirty(kv), kv.stats()["cpu"].dropped) == (8, 4)
        slots.on_write.release()
        await kv.flush()
        assert (await kv.store(more, engine.compute(more))).num_stored == 4
        await kv.flush()
        await until_idle(kv)


async def test_through_and_back_below_one_another() -> None:
    """The one gets a block with the store; for the other it waits."""
    engine, slots, keyed = Engine(), ScriptedSlotBackend(), keyed_back()
    async with open_cache(cpu(16), slots, keyed, engine=engine, limits=LAZY) as kv:
        stored = await kv.store(KEYS, engine.compute(KEYS))
        assert [(each.written, each.deferred) for each in await stored.settled()] == [(8, 0), (8, 0), (0, 8)]
        assert (slots.num_records, keyed.num_records, dirty(kv)) == (8, 0, 8)
        await kv.flush()
        assert (slots.num_records, keyed.num_records, slots.on_write.num_blocks) == (8, 8, 8)
        await until_idle(kv)


@pytest.mark.parametrize("has_cpu", [True, False])
async def test_demotion_from_the_gpu_pool(*, has_cpu: bool) -> None:
    """Blocks wait in the GPU pool, go to the CPU tier at the low-water mark, and from there to storage."""
    engine, slots = Engine(), slots_back()
    gpu = {"medium": "gpu", "capacity": 8 * PAYLOAD_BYTES}
    tiers: list[AnyTier] = [gpu, cpu(16, write="back"), slots] if has_cpu else [gpu, slots]
    async with open_cache(*tiers, engine=engine, limits=LAZY) as kv:
        stored = await kv.store(KEYS, engine.compute(KEYS))
        assert [each.deferred for each in await stored.settled()] == ([0, 8, 8] if has_cpu else [0, 8])
        assert dirty(kv, "gpu") == 8
        await kv.flush()
        assert (dirty(kv, "gpu"), slots.num_records) == (0, 8)
        if has_cpu:
            assert (dirty(kv), kv.stats()["cpu"].written) == (0, 8)
        more = prompt(8, seed=1)
        assert (await kv.store(more, engine.compute(more))).num_stored == 8
        engine.poison()
        assert (await kv.load(KEYS, INTO)).num_blocks == 8
        assert engine.read(INTO) == contents(KEYS)
        await kv.flush()
        await until_idle(kv)


@pytest.mark.parametrize(("num_failures", "num_lost"), [(1, 0), (4, 0), (6, 8)])
async def test_blocks_whose_copy_to_the_cpu_tier_fails_wait_for_another_try(num_failures: int, num_lost: int) -> None:
    """They are in the GPU pool and nowhere else: as what a medium fails to write they are tried three times."""
    engine, slots, device = Engine(), slots_back(), ScriptedDevice()
    gpu = {"medium": "gpu", "capacity": 8 * PAYLOAD_BYTES}

    async def stepped(work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        await until(task.done, on_wait=device.step)
        await task

    async def store() -> None:
        await kv.store(KEYS, engine.compute(KEYS))

    async with open_cache(gpu, cpu(16, write="back"), slots, engine=engine, device=device, limits=LAZY) as kv:
        await stepped(store())
        for _ in range(num_failures):
            device.fail_next(RuntimeError("the bus"))
        for _ in range(3):
            await stepped(kv.flush())
        assert (dirty(kv, "gpu"), dirty(kv)) == (0, 0)
        assert (slots.num_records, kv.stats()["cpu"].failed) == (8 - num_lost, num_lost)
        await until_idle(kv)


def test_closing_counts_what_waited_for_room_on_the_host() -> None:
    """A window on its way from the GPU pool that never found host slots is among the blocks that were not written."""

    async def main() -> None:
        engine, slots, device, said = Engine(), ScriptedSlotBackend(), virtual.CountingDevice(), Recorder()
        gpu, host = {"medium": "gpu", "capacity": 8 * PAYLOAD_BYTES}, cpu(4, write="back")
        limits = LAZY.model_copy(update={"clean_after_s": 0.5, "close_timeout_s": 0.5, "store_timeout_s": 60.0})
        async with open_cache(gpu, host, slots, engine=engine, device=device, limits=limits, emit=said) as kv:
            virtual.watch(device, virtual.pools_of(kv))
            prompts = [prompt(4, seed=seed) for seed in range(5)]
            for keys in prompts[:4]:
                await kv.store(keys, engine.compute(keys))
                await kv.flush()
                await kv.evict(keys, tier="gpu")
            slots.on_read.hold()
            async with kv.lease(prompts[3]):  # the CPU tier is full, and most bounce slots are of loads that hang
                loads = [kv.start_load(keys, GPULoadStoreSpec(range(4))) for keys in prompts[:3]]
                await kv.store(prompts[4], engine.compute(prompts[4]))
                await asyncio.sleep(3.0)
                assert (dirty(kv, "gpu"), dirty(kv), [load.done for load in loads]) == (2, 0, [False] * 3)
                await kv.aclose()
        (closed,) = said.of(CacheClosed)
        assert closed.unwritten == 4

    virtual.run(main)


async def test_demotion_through_a_cpu_tier_smaller_than_a_window() -> None:
    """Blocks go through it a few at a time, also where most of it is pinned."""
    engine, slots = Engine(), slots_back()
    gpu = {"medium": "gpu", "capacity": 8 * PAYLOAD_BYTES}
    async with open_cache(gpu, cpu(4, write="back"), slots, engine=engine, limits=LAZY) as kv:
        held = prompt(2, seed=1)
        await kv.store(held, engine.compute(held))
        await kv.flush()
        await kv.evict(held, tier="gpu")
        assert kv.pin(held, ttl_s=60).num_blocks == 2
        await kv.store(KEYS, engine.compute(KEYS))
        await kv.flush()
        assert (dirty(kv, "gpu"), dirty(kv), slots.num_records) == (0, 0, 10)
        kv.unpin(held)
        await until_idle(kv)


async def test_demotion_past_a_full_cpu_tier_to_a_tier_that_fails() -> None:
    """What only passes through host memory waits there for no other try: it counts as failed, and holds nothing."""
    engine, through = Engine(), ScriptedBackend()
    gpu = {"medium": "gpu", "capacity": 8 * PAYLOAD_BYTES}
    async with open_cache(gpu, cpu(4, write="back"), through, slots_back(), engine=engine, limits=LAZY) as kv:
        held = prompt(4, seed=1)
        await kv.store(held, engine.compute(held))
        await kv.flush()
        await kv.evict(held, tier="gpu")
        async with kv.lease(held):
            await kv.store(KEYS, engine.compute(KEYS))
            for _ in KEYS:
                through.on_write.fail_next(BackendUnavailableError("not now"))
            async with asyncio.timeout(60):
                await kv.flush()
        assert (dirty(kv, "gpu"), dirty(kv), through.num_records) == (0, 0, 4)
        await until_idle(kv)


async def test_the_gpu_pool_is_cleaned_before_it_is_full() -> None:
    """Long streams of stores go down the chain by themselves, block for block."""
    engine, slots = Engine(), slots_back(256)
    gpu = {"medium": "gpu", "capacity": 16 * PAYLOAD_BYTES}
    limits = SMALL_LIMITS.model_copy(update={"low_water": 0.5})
    async with open_cache(gpu, cpu(32, write="back"), slots, engine=engine, limits=limits) as kv:
        for seed in range(12):
            keys = prompt(8, seed=seed)
            assert (await kv.store(keys, engine.compute(keys))).num_stored == 8
            await until(lambda: kv.stats().transfers == 0)
        await kv.flush()
        assert slots.num_records == 96
        for seed in range(12):
            keys = prompt(8, seed=seed)
            assert (await kv.load(keys, INTO)).num_blocks == 8
            assert engine.read(INTO) == contents(keys)
        await until_idle(kv)


async def test_what_is_evicted_while_it_waits_or_is_written_is_gone_for_good() -> None:
    """It is not found, and no tier brings it back, after a restart either."""
    engine, slots = Engine(), slots_back()
    async with open_cache(cpu(16), slots, engine=engine, limits=LAZY) as kv:
        await kv.store(KEYS, engine.compute(KEYS))
        await kv.evict(KEYS[4:])
        assert dirty(kv) == 4
        slots.on_write.hold()
        flushing = asyncio.create_task(kv.flush())
        await until(lambda: slots.on_write.num_held == 1)
        evicting = asyncio.create_task(kv.evict(KEYS))
        await until(lambda: not kv.lookup_nowait(KEYS).num_blocks)
        slots.on_write.release()
        await evicting
        await flushing
        await until_idle(kv)
        assert (dirty(kv), (await kv.lookup(KEYS)).num_blocks) == (0, 0)
    async with open_cache(cpu(16), slots, engine=engine, limits=LAZY) as kv:
        assert (await kv.lookup(KEYS)).num_blocks == 0


async def test_an_epoch_that_advances_meanwhile_changes_no_name() -> None:
    """What waits is written under the weights that computed it, and served for those alone."""
    engine, slots = Engine(), slots_back()
    async with open_cache(cpu(16), slots, engine=engine, limits=LAZY) as kv:
        await kv.store(KEYS, engine.compute(KEYS))
        kv.advance_epoch("w1")
        await kv.store(KEYS[:4], engine.compute(KEYS[:4]))
        await kv.flush()
        await kv.evict(KEYS, tier="cpu")
        assert (await kv.lookup(KEYS)).num_blocks == 4
        kv.advance_epoch("w0")
        await kv.evict(KEYS, tier="cpu")
        assert (await kv.load(KEYS, INTO)).num_blocks == 8
        await until_idle(kv)


async def test_a_cancelled_flush_leaves_nothing_behind() -> None:
    """Blocks on their way go on; the others wait, and the next flush writes them."""
    engine, slots = Engine(), slots_back()
    async with open_cache(cpu(16), slots, engine=engine, limits=LAZY) as kv:
        await kv.store(KEYS, engine.compute(KEYS))
        slots.on_write.hold()
        flushing = asyncio.create_task(kv.flush())
        await until(lambda: slots.on_write.num_held == 1)
        flushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flushing
        slots.on_write.release()
        await kv.flush()
        assert slots.num_records == 8
        await until_idle(kv)


class OneByOne(ScriptedBackend):
    """A tier whose writes are let go one by one.

    Attributes:
        writes: What each of them so far waits for.
    """

    def __init__(self, **settings: object) -> None:
        super().__init__(write="back", **settings)  # type: ignore[arg-type]  # settings of any name
        self.writes: list[asyncio.Event] = []

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Wait, then write."""
        self.writes.append(may_go := asyncio.Event())
        await may_go.wait()
        return await super().write(keys, blocks)


async def call(kv: TieredKV, what: str) -> bool:
    """Make one of the calls that write what waits; say what a drain says."""
    if what == "drain":
        return await kv.drain(timeout_s=100)
    await (kv.flush() if what == "flush" else kv.resize("cpu", 12 * PAYLOAD_BYTES))
    return False


@pytest.mark.parametrize("what", ["flush", "resize"])
async def test_what_is_stored_later_is_not_waited_for(what: str) -> None:
    """A call ends when what was there is written, whatever has come since."""
    engine, keyed = Engine(), OneByOne()
    limits = LAZY.model_copy(update={"low_water": 1.0})
    async with open_cache(cpu(16, max_capacity=16 * PAYLOAD_BYTES), keyed, engine=engine, limits=limits) as kv:
        first, second = prompt(4, seed=1), prompt(4, seed=2)
        await kv.store(first, engine.compute(first))
        calling, num_slots = asyncio.create_task(call(kv, what)), 12 if what == "resize" else 16
        await until(lambda: len(keyed.writes) == 1 and kv.stats()["cpu"].num_slots == num_slots)
        for _ in range(2):  # a resize waits for what is there when no slot can be given up any more
            await checkpoint()
        await kv.store(second, engine.compute(second))
        await until(lambda: dirty(kv) == 0)  # taken by the cleaner
        keyed.writes[0].set()
        await asyncio.wait_for(calling, 60)
        assert keyed.num_records == 4
        await until(lambda: len(keyed.writes) == 2)
        keyed.writes[1].set()
        await kv.flush()
        assert keyed.num_records == 8
        await until_idle(kv)


@pytest.mark.parametrize("what", ["flush", "resize", "drain"])
async def test_what_waits_by_a_later_use_is_not_waited_for(what: str) -> None:
    """Loads may go on to bring more to be written: then a drain says that not all is."""
    engine, keyed = Engine(), OneByOne(admit_after=2)
    limits = LAZY.model_copy(update={"low_water": 1.0})
    async with open_cache(cpu(16, max_capacity=16 * PAYLOAD_BYTES), keyed, engine=engine, limits=limits) as kv:
        first, second = prompt(4, seed=1), prompt(4, seed=2)
        for keys in (first, second):
            await kv.store(keys, engine.compute(keys))
        kv.touch(first)
        calling = asyncio.create_task(call(kv, what))
        await until(lambda: len(keyed.writes) == 1)
        await kv.load(second, GPULoadStoreSpec(range(4)))
        await until(lambda: dirty(kv) == 0)  # taken by the cleaner
        keyed.writes[0].set()
        assert not await asyncio.wait_for(calling, 60)
        assert keyed.num_records == 4
        await until(lambda: len(keyed.writes) == 2)
        keyed.writes[1].set()
        await kv.flush()
        assert keyed.num_records == 8
        await until_idle(kv)


async def test_what_a_worker_had_when_a_flush_began_is_written_when_it_ends() -> None:
    """Though it waits for a tier only from the worker's answer on; another capacity waits for no worker."""
    engine, keyed = Engine(), OneByOne()
    limits = LAZY.model_copy(update={"low_water": 1.0})
    async with open_cache(cpu(16, max_capacity=16 * PAYLOAD_BYTES), keyed, engine=engine, limits=limits) as kv:
        planner, first, second = kv.planner(), prompt(4, seed=1), prompt(4, seed=2)
        planner.register_worker()
        job = planner.plan_store(first, engine.compute(first))
        await job.planned()
        flushing = asyncio.create_task(kv.flush())
        await asyncio.wait_for(kv.resize("cpu", 12 * PAYLOAD_BYTES), 60)
        assert not flushing.done()
        planner.complete(Outcomes(job.number, 0, 4))
        await until(lambda: len(keyed.writes) == 1)
        await kv.store(second, engine.compute(second))
        assert not flushing.done()
        keyed.writes[0].set()
        await asyncio.wait_for(flushing, 60)
        assert keyed.num_records == 4
        await until(lambda: len(keyed.writes) == 2)
        keyed.writes[1].set()
        await kv.flush()
        await until_idle(kv)


@pytest.mark.parametrize("what", ["flush", "resize"])
@pytest.mark.parametrize("has_gpu", [True, False])
def test_calls_end_beside_stores_that_go_on(what: str, *, has_gpu: bool) -> None:
    """They have what was there when they were made written, and take about as long as that does."""

    class Slow(ScriptedBackend):
        async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
            await asyncio.sleep(0.02)
            return await super().write(keys, blocks)

    async def main() -> None:
        engine, slow, device = Engine(), Slow(write="back"), virtual.CountingDevice()
        tiers: list[AnyTier] = [cpu(64, max_capacity=64 * PAYLOAD_BYTES), slow]
        if has_gpu:
            gpu = {"medium": "gpu", "capacity": 32 * PAYLOAD_BYTES}
            tiers = [gpu, cpu(64, max_capacity=64 * PAYLOAD_BYTES, write="back"), slow]
        limits = LAZY.model_copy(update={"low_water": 1.0, "clean_after_s": 0.05})
        async with open_cache(*tiers, engine=engine, device=device, limits=limits) as kv:
            virtual.watch(device, virtual.pools_of(kv))
            stored: list[BlockKeys] = []

            async def traffic() -> None:
                while True:
                    keys = prompt(2, seed=len(stored))
                    result = await kv.store(keys, engine.compute(keys))
                    if result.num_stored == 2:
                        stored.append(keys)
                    await asyncio.sleep(0.005)

            storing = asyncio.create_task(traffic())
            await asyncio.sleep(1.0)
            before = [key for keys in stored for key in keys]
            async with asyncio.timeout(10.0):
                await call(kv, what)
            written = slow.keys()
            assert {key.hash for key in written} >= set(before)
            storing.cancel()
            await asyncio.wait({storing})
            await kv.flush()
            await until_idle(kv)

    virtual.run(main)


async def test_closing_writes_what_waits(tmp_path: Path) -> None:
    """A restart finds all of it, and the event says that nothing was left."""
    engine, said = Engine(), Recorder()
    disk = {"medium": "nvme", "path": tmp_path, "capacity": "2MiB", "write": "back"}
    async with open_cache(cpu(16), disk, engine=engine, limits=LAZY, emit=said) as kv:
        await kv.store(KEYS, engine.compute(KEYS))
        assert (dirty(kv), kv.stats()["nvme"].ready) == (8, 0)
    (closed,) = said.of(CacheClosed)
    assert (closed.abandoned, closed.unwritten) == (0, 0)
    async with open_cache(cpu(16), disk, engine=engine, limits=LAZY) as kv:
        engine.poison()
        assert (await kv.load(KEYS, INTO)).by_tier == {"nvme": 8}
        assert engine.read(INTO) == contents(KEYS)


async def test_what_fails_waits_for_another_try_and_fails_for_good_at_the_third() -> None:
    """A tier that fails a few writes loses nothing; a block that cannot be written is counted once."""
    engine, keyed = Engine(), keyed_back()
    async with open_cache(cpu(16), keyed, engine=engine, limits=LAZY) as kv:
        first = KEYS[:4]
        await kv.store(first, engine.compute(first))
        keyed.on_write.change_next(lambda outcomes: [Outcome.FAILED, *outcomes[1:]])
        await kv.flush()
        assert (dirty(kv), kv.stats()["keyed"].written, kv.stats()["keyed"].failed) == (1, 3, 0)
        await kv.flush()
        assert (dirty(kv), keyed.num_records) == (0, 4)
        rest = KEYS[4:]
        await kv.store(rest, engine.compute(rest))
        for _ in range(3):
            keyed.on_write.change_next(lambda outcomes: [Outcome.FAILED, *outcomes[1:]])
            await kv.flush()
        assert (dirty(kv), kv.stats()["keyed"].failed) == (0, 1)
        await until_idle(kv)


def test_a_tier_that_is_bypassed_keeps_its_blocks_waiting() -> None:
    """While it fails memory holds them, and stores drop when it is full; when it is well they are written."""

    async def main() -> None:
        engine, keyed, device = Engine(), keyed_back(), virtual.CountingDevice()
        async with open_cache(cpu(8), keyed, engine=engine, device=device) as kv:
            virtual.watch(device, virtual.pools_of(kv))
            for _ in range(3):
                keyed.on_write.fail_next(BackendUnavailableError("away"))
            await kv.store(KEYS, engine.compute(KEYS))
            for _ in range(3):
                await kv.flush()
                await asyncio.sleep(0)
            assert kv.stats()["keyed"].is_bypassed
            assert dirty(kv) + kv.stats()["keyed"].written == 8
            waiting = dirty(kv)
            assert waiting > 0
            await kv.flush()  # does not wait for it
            assert dirty(kv) == waiting
            await asyncio.sleep(60.0)
            assert (dirty(kv), keyed.num_records) == (0, 8)
            await until_idle(kv)

    virtual.run(main)


def test_closing_counts_what_waited_for_its_turn_to_be_written() -> None:
    """A window that stood in the line of a tier, behind one that is being written, is lost as that one is."""

    async def main() -> None:
        engine, keyed, device, said = Engine(), keyed_back(timeout_s=60.0), virtual.CountingDevice(), Recorder()
        limits = LAZY.model_copy(update={"clean_after_s": 0.5})
        async with open_cache(cpu(32), keyed, engine=engine, device=device, limits=limits, emit=said) as kv:
            virtual.watch(device, virtual.pools_of(kv))
            keyed.on_write.hold()
            for seed in range(6):
                await kv.store(prompt(4, seed=seed), engine.compute(prompt(4, seed=seed)))
            await asyncio.sleep(30.0)
            assert (keyed.on_write.num_calls, kv.stats()["keyed"].num_waiting) == (1, 1)
        (closed,) = said.of(CacheClosed)
        assert closed.unwritten == 24

    virtual.run(main)


def test_a_tier_that_hangs_holds_up_nobody_and_close_says_what_is_left() -> None:
    """Loads go on, stores drop once memory is full, and closing returns within its limit."""

    async def main() -> None:
        engine, keyed, device, said = Engine(), keyed_back(timeout_s=5.0), virtual.CountingDevice(), Recorder()
        loop = asyncio.get_running_loop()
        async with open_cache(cpu(8), keyed, engine=engine, device=device, emit=said) as kv:
            virtual.watch(device, virtual.pools_of(kv))
            keyed.on_write.hold()
            assert (await kv.store(KEYS, engine.compute(KEYS))).num_stored == 8
            await asyncio.sleep(60.0)
            started = loop.time()
            assert (await kv.load(KEYS, INTO)).num_blocks == 8
            assert loop.time() == started
            more = prompt(4, seed=1)
            stored = await kv.store(more, engine.compute(more))
            assert (stored.num_stored, dict(stored.drop_reasons)) == (0, {"no room": 4})
            started = loop.time()
        assert loop.time() - started <= 2 * inside(kv).cache.limits.close_timeout_s  # no public call tells it
        (closed,) = said.of(CacheClosed)
        assert closed.unwritten > 0

    virtual.run(main)


def test_the_cleaner_rests_while_nothing_can_be_written() -> None:
    """Blocks of the GPU pool wait for a CPU tier that is full, of blocks that wait for a medium that hangs."""

    async def main() -> None:
        engine, slots, device = Engine(), slots_back(256, timeout_s=5.0), virtual.CountingDevice()
        gpu, limits = {"medium": "gpu", "capacity": 64 * PAYLOAD_BYTES}, LAZY.model_copy(update={"clean_after_s": 0.5})
        async with open_cache(gpu, cpu(8, write="back"), slots, engine=engine, device=device, limits=limits) as kv:
            virtual.watch(device, virtual.pools_of(kv))
            slots.on_write.hold()
            for seed in range(8):
                await kv.store(prompt(8, seed=seed), engine.compute(prompt(8, seed=seed)))
                await asyncio.sleep(1.0)
            await asyncio.sleep(30.0)
            assert (dirty(kv, "gpu"), kv.stats()["slots"].is_bypassed) == (56, True)
            num_tasks = 0

            def count(
                loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], context: Context | None = None
            ) -> "asyncio.Task[Any]":
                nonlocal num_tasks
                num_tasks += 1
                return asyncio.Task(work, loop=loop, context=context)

            asyncio.get_running_loop().set_task_factory(count)  # type: ignore[arg-type]  # for coroutines alone
            await asyncio.sleep(60.0)
            assert num_tasks <= 60
            asyncio.get_running_loop().set_task_factory(None)
            slots.on_write.release()
            await asyncio.sleep(60.0)
            assert (dirty(kv, "gpu"), dirty(kv), slots.num_records) == (0, 0, 64)
            await until_idle(kv)

    virtual.run(main)


def test_an_error_does_not_end_the_cleaner_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ours, perhaps: it is logged, and after a pause the cleaner goes on."""
    wait_s, left = Bandwidth.wait_s, [2]

    def stumble(self: Bandwidth) -> float:
        if left[0]:
            left[0] -= 1
            raise ZeroDivisionError
        return wait_s(self)

    async def main() -> None:
        engine, slots, device = Engine(), slots_back(), virtual.CountingDevice()
        limits = SMALL_LIMITS.model_copy(update={"clean_after_s": 5.0})
        async with open_cache(cpu(64), slots, engine=engine, device=device, limits=limits) as kv:
            virtual.watch(device, virtual.pools_of(kv))
            await kv.store(KEYS, engine.compute(KEYS))
            monkeypatch.setattr(Bandwidth, "wait_s", stumble)
            with capture_logs() as logs:
                await asyncio.sleep(30.0)
            assert [(entry["event"], entry["task"]) for entry in logs] == [("background.failed", "cleaner")] * 2
            assert slots.num_records == 8
            await until_idle(kv)

    virtual.run(main)


def test_blocks_are_written_when_they_are_old_enough() -> None:
    """Though there is room, no block waits much longer than it may."""

    async def main() -> None:
        engine, slots, device = Engine(), slots_back(), virtual.CountingDevice()
        limits = SMALL_LIMITS.model_copy(update={"clean_after_s": 5.0})
        async with open_cache(cpu(64), slots, engine=engine, device=device, limits=limits) as kv:
            virtual.watch(device, virtual.pools_of(kv))
            await kv.store(KEYS, engine.compute(KEYS))
            await asyncio.sleep(4.0)
            assert slots.num_records == 0
            await asyncio.sleep(3.0)
            assert slots.num_records == 8
            await until_idle(kv)

    virtual.run(main)


def test_a_block_that_is_stored_again_and_again_holds_up_no_other() -> None:
    """As a prompt that all requests share, which is the first in the line: all are written by their age."""

    async def main() -> None:
        engine, slots, device = Engine(), slots_back(), virtual.CountingDevice()
        limits = SMALL_LIMITS.model_copy(update={"clean_after_s": 5.0, "low_water": 0.0})
        async with open_cache(cpu(64), slots, engine=engine, device=device, limits=limits) as kv:
            virtual.watch(device, virtual.pools_of(kv))
            await kv.store(KEYS, engine.compute(KEYS))
            for _ in range(7):
                await asyncio.sleep(1.0)
                await kv.store(KEYS[:1], engine.compute(KEYS[:1]))
            assert slots.num_records == 8
            await until_idle(kv)

    virtual.run(main)


def test_each_block_is_written_in_its_time() -> None:
    """A few at a time, as they come to be old enough: all of a second at once would be felt in an engine's steps."""

    async def main() -> None:
        engine, slots, device = Engine(), slots_back(), virtual.CountingDevice()
        limits = SMALL_LIMITS.model_copy(update={"clean_after_s": 5.0, "window": 32 * PAYLOAD_BYTES})
        async with open_cache(cpu(64), slots, engine=engine, device=device, limits=limits) as kv:
            virtual.watch(device, virtual.pools_of(kv))
            for number in range(4):
                await kv.store(keys := prompt(4, seed=number), engine.compute(keys))
                await asyncio.sleep(0.25)
            await asyncio.sleep(4.0 + 0.1)
            for number in range(4):
                assert slots.num_records == 4 * (number + 1)
                await asyncio.sleep(0.25)
            await until_idle(kv)

    virtual.run(main)


def test_what_comes_to_be_old_enough_at_once_is_written_one_piece_after_the_other() -> None:
    """No step of an engine bears two pieces; but what lags behind is written as fast as can be."""

    async def main() -> None:
        engine, slots, device = Engine(), slots_back(), virtual.CountingDevice()
        limits = SMALL_LIMITS.model_copy(update={"clean_after_s": 5.0, "window": 32 * PAYLOAD_BYTES})
        async with open_cache(cpu(64), slots, engine=engine, device=device, limits=limits) as kv:
            virtual.watch(device, virtual.pools_of(kv))
            for number in range(4):
                await kv.store(keys := prompt(4, seed=number), engine.compute(keys))
                await asyncio.sleep(0.001)
            await asyncio.sleep(5.0)
            for number in range(4):
                assert slots.num_records == 4 * (number + 1)
                await asyncio.sleep(0.02)
            await until_idle(kv)

    virtual.run(main)


def test_the_cleaner_heeds_its_bandwidth() -> None:
    """Over a while it writes no more than it may, and flush() passes that over."""

    async def main() -> None:
        engine, slots, device = Engine(), slots_back(), virtual.CountingDevice()
        update = {"clean_after_s": 0.5, "clean_bandwidth": PAYLOAD_BYTES}
        async with open_cache(
            cpu(64), slots, engine=engine, device=device, limits=SMALL_LIMITS.model_copy(update=update)
        ) as kv:
            virtual.watch(device, virtual.pools_of(kv))
            keys = prompt(40)
            await kv.store(keys, engine.compute(keys))
            await asyncio.sleep(16.0)
            assert 8 <= slots.num_records <= 20
            started = asyncio.get_running_loop().time()
            await kv.flush()
            assert slots.num_records == 40
            assert asyncio.get_running_loop().time() - started < 1.0
            await until_idle(kv)

    virtual.run(main)


class SlowDisk(NVMeBackend):
    """A real disk whose writes take as much virtual time as a bandwidth says."""

    bytes_per_s = 64 * PAYLOAD_BYTES

    def begin_write(self, *_: object) -> bool:
        """Have `write` do it."""
        return False

    async def write(
        self,
        group: int,
        slots: NDArray[np.int64],
        names: Names,
        blocks: Sequence[Block],
        make: Make | None = None,
    ) -> list[Outcome]:
        """Take the time, then write."""
        await asyncio.sleep(sum(len(block.padded) for block in blocks) / self.bytes_per_s)
        return await super().write(group, slots, names, blocks, make)


@asynccontextmanager
async def slow_cache(path: Path, engine: Engine, write: str, emit: Recorder) -> AsyncIterator[TieredKV]:
    """Yield a cache of 64 blocks of memory over a slow disk of 8,192."""
    device = virtual.CountingDevice()
    disk = SlowDisk(
        NVMeBackend.Settings.model_validate({"path": path, "capacity": 8192 * 2 * PAYLOAD_BYTES, "write": write})
    )
    limits = CacheLimits(window=4 * PAYLOAD_BYTES, bounce=16 * PAYLOAD_BYTES, store_queue=64 * PAYLOAD_BYTES)
    tiers: list[AnyTier] = [cpu(64), disk]
    cache = TieredKV(tiers, model=MODEL, layout=small_layout(), limits=limits, device=device, emit=emit)
    async with cache as kv:
        virtual.watch(device, virtual.pools_of(kv))
        kv.register_kv_caches(engine.caches)
        yield kv


@pytest.mark.slow
@pytest.mark.parametrize("write", ["back", "through"])
def test_stores_at_twice_the_bandwidth_of_the_disk(write: str, tmp_path: Path) -> None:
    """For a minute: no deadlock, memory bounded, each drop counted, and what was written is there after a restart."""
    prompts = [prompt(8, seed=seed) for seed in range(60 * 128 // 8)]

    async def fill() -> tuple[int, int]:
        engine, said = Engine(), Recorder()
        loop = asyncio.get_running_loop()
        num_stored = num_dropped = most_queued = 0
        async with slow_cache(tmp_path, engine, write, said) as kv:
            started = loop.time()
            for number, keys in enumerate(prompts):
                stored = await kv.store(keys, engine.compute(keys))
                num_stored += stored.num_stored
                num_dropped += stored.num_dropped
                stats = kv.stats()
                most_queued = max(most_queued, stats.store_queue_bytes)
                assert stats["cpu"].dirty <= 64
                assert stats.transfers < 64
                await asyncio.sleep(max(0.0, started + (number + 1) * 8 / 128 - loop.time()))
            assert loop.time() - started < 90.0
            await kv.flush()
            stats = kv.stats()
            assert num_stored + num_dropped == 8 * len(prompts)
            assert most_queued <= 64 * PAYLOAD_BYTES
            disk = stats["nvme"]
            assert disk.written + disk.dropped == 8 * len(prompts)
            assert disk.failed == 0
            assert disk.dropped > 0
            await until_idle(kv)
        (closed,) = said.of(CacheClosed)
        assert (closed.abandoned, closed.unwritten) == (0, 0)
        return disk.written, stats["cpu"].dropped

    async def count() -> int:
        engine = Engine()
        num_there = 0
        async with slow_cache(tmp_path, engine, write, Recorder()) as kv:
            for keys in prompts:
                for i in range(8):
                    num_there += (await kv.lookup(keys[i : i + 1])).num_blocks
            for keys in prompts[::16]:
                found = (await kv.lookup(keys)).num_blocks
                engine.poison()
                assert (await kv.load(keys, INTO)).num_blocks == found
                assert engine.read(range(found)) == contents(keys)[:found]
        return num_there

    num_written, _ = virtual.run(fill)
    assert num_written > 60 * 64 * 0.8
    assert virtual.run(count) == num_written


def test_policies_that_can_not_work_are_refused() -> None:
    """What would wait, or move, has to have somewhere to do so."""
    cases: tuple[tuple[list[AnyTier], str], ...] = (
        ([cpu(8, write="back")], "is the first"),
        ([{"medium": "gpu", "capacity": 1 << 20, "write": "back"}], "is the first"),
        ([keyed_back()], "to wait in"),
        ([cpu(8, admit_after=2)], "for storage tiers"),
    )
    for tiers, why in cases:
        with pytest.raises(ConfigurationError, match=why):
            TieredKV(tiers, model=MODEL, layout=small_layout())
