"""Host memory of the engine's own: what is loaded into it and stored from it, in whatever shape it is."""

import asyncio
import ctypes
import mmap
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from anyio import fail_after

from tests.support.backends import ScriptedBackend, ScriptedSlotBackend, only
from tests.support.caches import AnyTier, Recorder, keep, open_cache, until, until_idle
from tests.support.engine import MODEL, PAYLOAD_BYTES, Engine, contents, prompt
from tiered_kv import (
    Block,
    BlockKey,
    CacheLimits,
    ConfigurationError,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KVLayout,
    LayoutMismatchError,
    Outcome,
    TieredKV,
)
from tiered_kv.testing import ScriptedDevice, ScriptedEvent
from tiered_kv.values.events import BlocksLoaded

CPU = {"medium": "cpu", "capacity": 64 * PAYLOAD_BYTES}
KEYS = prompt(9)
SLOTS = [12, 3, 7, 0, 9, 1, 15, 4, 11]


class Pool:
    """A host pool of whole blocks, ``offset`` bytes into a page of memory.

    Attributes:
        memory: What is registered.
    """

    def __init__(self, num_slots: int = 16, *, slot_bytes: int = PAYLOAD_BYTES, offset: int = 0) -> None:
        self.slot_bytes = slot_bytes
        self.memory = memoryview(mmap.mmap(-1, offset + num_slots * slot_bytes))[offset:]

    def fill(self, slots: Sequence[int], blocks: Sequence[bytes]) -> None:
        """Put blocks into slots."""
        for slot, block in zip(slots, blocks, strict=True):
            self.memory[slot * self.slot_bytes : slot * self.slot_bytes + PAYLOAD_BYTES] = block

    def read(self, slots: Sequence[int]) -> list[bytes]:
        """Return what is in slots."""
        starts = [slot * self.slot_bytes for slot in slots]
        return [bytes(self.memory[start : start + PAYLOAD_BYTES]) for start in starts]


@pytest.mark.parametrize(
    ("slot_bytes", "offset"), [(PAYLOAD_BYTES, 0), (PAYLOAD_BYTES + 512, 0), (PAYLOAD_BYTES + 2, 1)]
)
async def test_blocks_go_in_and_out_byte_for_byte(slot_bytes: int, offset: int) -> None:
    """Aligned or not, with room between slots or none; and they are the same blocks that the engine's pages hold."""
    engine, pool = Engine(), Pool(slot_bytes=slot_bytes, offset=offset)
    at = CPULoadStoreSpec(SLOTS, pool="swap")
    async with open_cache(CPU, engine=engine) as kv:
        kv.register_host_pool("swap", pool.memory, slot_bytes=slot_bytes)
        await keep(kv, engine, KEYS)
        loaded = await kv.load(KEYS, at)
        assert loaded.num_blocks == 9
        assert loaded.by_tier == {"cpu": 9}
        assert pool.read(SLOTS) == contents(KEYS)
        others = prompt(9, seed=1)
        pool.fill(SLOTS, contents(others))
        assert (await kv.store(others, at)).num_stored == 9
        into = GPULoadStoreSpec(range(30, 39))
        assert (await kv.load(others, into)).num_blocks == 9
        assert engine.read(into) == contents(others)
        await until_idle(kv)


async def test_fragments_are_a_pool_too() -> None:
    """Per-layer tensors in host memory, like the engine's own, are loaded into page by page."""
    engine, swapped = Engine(), Engine(num_pages=16)
    async with open_cache(CPU, engine=engine) as kv:
        kv.register_host_pool("swap", swapped.caches)
        await keep(kv, engine, KEYS)
        assert (await kv.load(KEYS, CPULoadStoreSpec(SLOTS, pool="swap"))).num_blocks == 9
        assert swapped.read(SLOTS) == contents(KEYS)


async def test_buffers_of_any_kind_make_a_pool() -> None:
    """A tensor, an array, bytes: rows are slots; of a flat one every payload is one."""
    engine = Engine()
    buffers = {
        "tensor": torch.zeros(16, PAYLOAD_BYTES // 2, dtype=torch.bfloat16),
        "array": np.zeros((16, PAYLOAD_BYTES + 64), np.uint8),
        "bytes": bytearray(16 * PAYLOAD_BYTES),
    }
    async with open_cache(CPU, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        for name, buffer in buffers.items():
            kv.register_host_pool(name, buffer)
            assert (await kv.load(KEYS, CPULoadStoreSpec(SLOTS, pool=name))).num_blocks == 9
        rows = buffers["array"]
        assert isinstance(rows, np.ndarray)
        assert [rows[slot, :PAYLOAD_BYTES].tobytes() for slot in SLOTS] == contents(KEYS)
        assert not rows[:, PAYLOAD_BYTES:].any()


async def test_a_thread_moves_blocks_of_a_pool() -> None:
    """`submit_store` and `submit_load` take both kinds of spec."""
    engine, pool = Engine(), Pool()
    async with open_cache(CPU, engine=engine) as kv:
        kv.register_host_pool("swap", pool.memory)
        pool.fill(SLOTS, contents(KEYS))
        storing = kv.submit_store(KEYS, CPULoadStoreSpec(SLOTS, pool="swap"))
        await until(lambda: storing.result is not None)
        loading = kv.submit_load(KEYS, CPULoadStoreSpec(range(9), pool="swap"))
        await until(lambda: loading.result is not None)
        assert pool.read(range(9)) == contents(KEYS)


async def test_nothing_is_written_before_the_event_that_was_given() -> None:
    """`after` holds for pools as for pages."""
    device, engine, pool, after = ScriptedDevice(), Engine(), Pool(), ScriptedEvent()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        kv.register_host_pool("swap", pool.memory)
        storing = kv.start_store(KEYS, engine.compute(KEYS))
        await until(lambda: storing.done, on_wait=device.run_all)
        loading = kv.start_load(KEYS, CPULoadStoreSpec(SLOTS, pool="swap"), after=after)
        await until(lambda: device.pending > 0)
        device.run_all()
        assert not any(pool.memory)
        after.fire()
        await until(lambda: loading.done, on_wait=device.run_all)
        assert pool.read(SLOTS) == contents(KEYS)


async def test_what_is_only_in_the_gpu_pool_ends_the_prefix() -> None:
    """Its copies do not reach host memory of the engine's; what is below it is served."""
    gpu = {"medium": "gpu", "capacity": 64 * PAYLOAD_BYTES}
    engine, pool = Engine(), Pool()
    async with open_cache(gpu, engine=engine) as kv:
        kv.register_host_pool("swap", pool.memory)
        await keep(kv, engine, KEYS)
        assert (await kv.load(KEYS, CPULoadStoreSpec(SLOTS, pool="swap"))).num_blocks == 0
        await until_idle(kv)
    async with open_cache(gpu, CPU, engine=engine) as kv:
        kv.register_host_pool("swap", pool.memory)
        pool.fill(SLOTS, contents(KEYS))
        stored = await kv.store(KEYS, CPULoadStoreSpec(SLOTS, pool="swap"))
        assert stored.num_stored == 9
        assert (await kv.lookup(KEYS)).by_tier == {"cpu": 9}
        loaded = await kv.load(KEYS, CPULoadStoreSpec(range(9), pool="swap"))
        assert loaded.by_tier == {"cpu": 9}
        assert pool.read(range(9)) == contents(KEYS)
        await until_idle(kv)


async def test_what_can_not_be_a_pool_says_why() -> None:
    """With the numbers, before anything moves."""
    half = torch.zeros(16, PAYLOAD_BYTES)[:, ::2]
    async with open_cache(CPU) as kv:
        with pytest.raises(LayoutMismatchError, match=r"slots of 4095 bytes: a block of this KV group has 4096"):
            kv.register_host_pool("a", bytearray(16 * 4095), slot_bytes=4095)
        with pytest.raises(LayoutMismatchError, match=r"5000 bytes is no number of slots of 4096 bytes"):
            kv.register_host_pool("a", bytearray(5000))
        for empty in (bytearray(), np.zeros((0, PAYLOAD_BYTES), np.uint8), torch.zeros(0, PAYLOAD_BYTES)):
            with pytest.raises(LayoutMismatchError, match=r"0 bytes is no number of slots of 4096 bytes"):
                kv.register_host_pool("a", empty)
        with pytest.raises(LayoutMismatchError, match=r"slots of 4097 bytes"):
            kv.register_host_pool("a", bytearray(4097), slot_bytes=4097)
        for wrong in ("4KiB", 4096.0):
            with pytest.raises(ConfigurationError, match="slot_bytes must be an int"):
                kv.register_host_pool("a", bytearray(4096), slot_bytes=wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"4096 bytes, read-only"):
            kv.register_host_pool("a", bytes(4096))
        with pytest.raises(LayoutMismatchError, match=r"with strides \(4096, 2\)"):
            kv.register_host_pool("a", half)
        with pytest.raises(ConfigurationError, match="buffer protocol, got int"):
            kv.register_host_pool("a", 4096)
        with pytest.raises(LayoutMismatchError, match="2 layers, got the tensors of 1"):
            kv.register_host_pool("a", list(Engine().caches.values())[:1])
        with pytest.raises(ConfigurationError, match="slot_bytes and direct=True"):
            kv.register_host_pool("a", Engine().caches, direct=True)
        kv.register_host_pool("a", bytearray(4 * 4096))
        with pytest.raises(ConfigurationError, match="taken: a"):
            kv.register_host_pool("a", bytearray(4096))
        with pytest.raises(ConfigurationError, match="name of its own, got ''"):
            kv.register_host_pool("", bytearray(4096))
        with pytest.raises(ConfigurationError, match=r"no host pool 'b'.*there are 'a'"):
            await kv.load(KEYS, CPULoadStoreSpec(SLOTS, pool="b"))
        with pytest.raises(ConfigurationError, match=r"block id 4 at position 1 is not in \[0, 4\)"):
            await kv.load(KEYS[:2], CPULoadStoreSpec([0, 4], pool="a"))
        with pytest.raises(LayoutMismatchError, match="9 block ids, got 2"):
            await kv.load(KEYS, CPULoadStoreSpec([0, 1], pool="a"))


async def test_a_pool_is_of_one_kv_group() -> None:
    """Keys of another group are refused."""
    first, second = (torch.zeros(2, 4, 16, 2, dims, dtype=torch.bfloat16) for dims in (16, 32))
    layout = KVLayout.from_groups([[first], [second]], block_size=16)
    async with TieredKV([CPU], model=MODEL, layout=layout, device="cpu") as kv:
        kv.register_host_pool("second", bytearray(4 * layout.groups[1].payload_bytes), group=1)
        with pytest.raises(LayoutMismatchError, match="keys of KV group 0, but the host pool 'second' is of 1"):
            await kv.load(KEYS[:1], CPULoadStoreSpec([0], pool="second"))


@pytest.mark.parametrize("medium", ["slots", "keyed", "nvme"])
async def test_storage_reads_straight_into_a_direct_pool(medium: str, tmp_path: Path) -> None:
    """What is resident is copied, the rest is read in place and verified, and no host slot is taken for it."""
    nvme = {"medium": "nvme", "path": str(tmp_path), "capacity": "64MiB"}
    tiers: dict[str, AnyTier] = {"slots": ScriptedSlotBackend(), "keyed": ScriptedBackend(), "nvme": nvme}
    engine, pool, recorder = Engine(), Pool(slot_bytes=2 * PAYLOAD_BYTES), Recorder()
    async with open_cache(CPU, tiers[medium], engine=engine, emit=recorder) as kv:
        kv.register_host_pool("swap", pool.memory, slot_bytes=2 * PAYLOAD_BYTES, direct=True)
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS[2:4], tier="cpu")
        await kv.evict(KEYS[6:], tier="cpu")
        loaded = await kv.load(KEYS, CPULoadStoreSpec(SLOTS, pool="swap"))
        assert loaded.num_blocks == 9
        assert loaded.by_tier == {"cpu": 4, medium: 5}
        assert pool.read(SLOTS) == contents(KEYS)
        assert kv.stats()["cpu"].promoted == 0
        assert kv.stats()[medium].hits == 5
        assert [event.blocks for event in recorder.of(BlocksLoaded)] == [9]
        await until_idle(kv)


async def test_a_broken_block_is_not_served_by_a_direct_load() -> None:
    """It ends the prefix and is deleted; what is before it is right."""
    slots, engine, pool = ScriptedSlotBackend(), Engine(), Pool()
    async with open_cache(slots, engine=engine) as kv:
        kv.register_host_pool("swap", pool.memory, direct=True)
        await keep(kv, engine, KEYS)
        slots.flip_byte(5)
        loaded = await kv.load(KEYS, CPULoadStoreSpec(SLOTS, pool="swap"))
        assert loaded.num_blocks == 5
        assert pool.read(SLOTS[:5]) == contents(KEYS[:5])
        assert kv.stats()["slots"].corrupt == 1
        await until_idle(kv)


async def test_what_fails_in_place_is_had_by_way_of_slots() -> None:
    """A read that fails once is tried once more, as other loads do it."""
    slots, engine, pool = ScriptedSlotBackend(), Engine(), Pool()
    async with open_cache(slots, engine=engine) as kv:
        kv.register_host_pool("swap", pool.memory, direct=True)
        await keep(kv, engine, KEYS)
        slots.on_read.change_next(only(0, Outcome.FAILED))
        loaded = await kv.load(KEYS, CPULoadStoreSpec(SLOTS, pool="swap"))
        assert loaded.num_blocks == 9
        assert pool.read(SLOTS) == contents(KEYS)
        await until_idle(kv)


async def test_a_direct_read_waits_for_the_event_that_was_given() -> None:
    """No medium touches slots that somebody still uses."""
    device, engine, pool, after = ScriptedDevice(), Engine(), Pool(), ScriptedEvent()
    slots = ScriptedSlotBackend()
    async with open_cache(slots, engine=engine, device=device) as kv:
        kv.register_host_pool("swap", pool.memory, direct=True)
        storing = kv.start_store(KEYS, engine.compute(KEYS))
        await until(lambda: slots.num_records == 9 and kv.stats().transfers == 0, on_wait=device.run_all)
        assert storing.done
        loading = kv.start_load(KEYS, CPULoadStoreSpec(SLOTS, pool="swap"), after=after)
        await until(lambda: device.pending > 0)
        device.run_all()
        assert slots.on_read.num_calls == 0
        after.fire()
        await until(lambda: loading.done, on_wait=device.run_all)
        assert pool.read(SLOTS) == contents(KEYS)


async def test_a_direct_read_without_an_event_waits_for_no_copy() -> None:
    """Nobody uses the slots: storage reads at once, whatever else is to be copied first."""
    device, engine, pool, slots = ScriptedDevice(), Engine(), Pool(), ScriptedSlotBackend()
    async with open_cache(slots, engine=engine, device=device) as kv:
        kv.register_host_pool("swap", pool.memory, direct=True)
        kv.start_store(KEYS, engine.compute(KEYS))
        await until(lambda: slots.num_records == 9 and kv.stats().transfers == 0, on_wait=device.run_all)
        loading = kv.start_load(KEYS, CPULoadStoreSpec(SLOTS, pool="swap"))
        await until(lambda: loading.done)
        assert pool.read(SLOTS) == contents(KEYS)


@pytest.mark.parametrize("end", ["deadline", "cancel"])
async def test_a_direct_load_ends_when_the_medium_has_let_go(end: str) -> None:
    """Neither a deadline nor a cancellation gives the slots back while a medium may write to them."""
    slots, engine, pool, loop = ScriptedSlotBackend(), Engine(), Pool(), asyncio.get_running_loop()
    async with open_cache(slots, engine=engine) as kv:
        kv.register_host_pool("swap", pool.memory, direct=True)
        await keep(kv, engine, KEYS)
        slots.on_read.hold()
        deadline = loop.time() + 0.5
        handle = kv.start_load(KEYS, CPULoadStoreSpec(SLOTS, pool="swap"), deadline_s=0.5)
        await until(lambda: slots.on_read.num_held > 0)
        if end == "cancel":
            handle.cancel()
        else:
            await until(lambda: loop.time() > deadline)
        assert not handle.done
        slots.on_read.release()
        with fail_after(30):
            loaded = await handle
        assert loaded.num_blocks < len(KEYS)
        assert pool.read(SLOTS[: loaded.num_blocks]) == contents(KEYS[: loaded.num_blocks])
        await until_idle(kv)


@pytest.mark.parametrize("end", ["cancelled", "deadline"])
async def test_a_direct_load_that_waits_behind_others_can_be_given_up(end: str) -> None:
    """Its memory is with no medium yet: it ends when it is cancelled or late, not when those before it have ended."""
    slots, pool = ScriptedSlotBackend(), Pool()
    at = [CPULoadStoreSpec(range(start, start + 4), pool="swap") for start in (0, 4, 8)]
    prompts = [prompt(4, seed=seed) for seed in range(3)]
    async with open_cache(slots, engine=Engine()) as kv:
        kv.register_host_pool("swap", pool.memory, direct=True)
        for keys, blocks in zip(prompts, at, strict=True):
            pool.fill(list(blocks.ids), contents(keys))
            await kv.store(keys, blocks)
        slots.on_read.hold()
        first, second = [kv.start_load(*each) for each in zip(prompts[:2], at[:2], strict=True)]
        last = kv.start_load(prompts[2], at[2], deadline_s=0.05 if end == "deadline" else None)
        await until(lambda: slots.on_read.num_held > 0)
        if end == "cancelled":
            last.cancel()
        with fail_after(30):
            await asyncio.wait({asyncio.ensure_future(last)})
        assert (first.done, second.done, slots.on_read.num_calls) == (False, False, 1)
        slots.on_read.release()
        assert [(await each).num_blocks for each in (first, second)] == [4, 4]
        await until_idle(kv)


async def test_a_thread_that_outlives_the_closing_keeps_its_direct_load_from_ending() -> None:
    """Closing is bounded, and cannot stop it: until it has let go the load has not ended, and then it has nothing."""

    class Threaded(ScriptedBackend):
        def __init__(self) -> None:
            super().__init__()
            self.begun, self.free = threading.Event(), threading.Event()

        async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
            outcomes = await super().read(keys, [Block.empty(PAYLOAD_BYTES) for _ in into])
            await asyncio.to_thread(self._write, into)
            return outcomes

        def _write(self, into: Sequence[Block]) -> None:
            self.begun.set()
            self.free.wait()
            for block in into:
                block.payload[:] = bytes(PAYLOAD_BYTES)

    medium, engine, pool = Threaded(), Engine(), Pool()
    try:
        async with open_cache(medium, engine=engine, limits=CacheLimits(close_timeout_s=0.05)) as kv:
            kv.register_host_pool("swap", pool.memory, direct=True)
            await keep(kv, engine, KEYS)
            pool.fill(SLOTS, contents(KEYS))
            handle = kv.start_load(KEYS, CPULoadStoreSpec(SLOTS, pool="swap"))
            await until(medium.begun.is_set)
            await kv.aclose()
            assert not handle.done
            assert pool.read(SLOTS) == contents(KEYS)
    finally:
        medium.free.set()
    assert (await handle).num_blocks == 0
    assert pool.read(SLOTS) == [bytes(PAYLOAD_BYTES)] * len(KEYS)


async def test_an_unaligned_pool_is_not_read_into() -> None:
    """It is refused with its address and stride; without ``direct`` it serves."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(Pool(offset=512).memory))
    assert address % 4096 == 512
    async with open_cache(CPU) as kv:
        with pytest.raises(ConfigurationError, match=r"at address 0x[0-9a-f]+200 \(\+512\), with 4096 bytes a slot"):
            kv.register_host_pool("swap", Pool(offset=512).memory, direct=True)
        with pytest.raises(ConfigurationError, match=r"\(\+0\), with 4608 bytes a slot"):
            kv.register_host_pool("swap", Pool(slot_bytes=4608).memory, slot_bytes=4608, direct=True)
        kv.register_host_pool("swap", Pool(offset=512).memory)


async def test_a_pool_can_be_unmapped_once_the_cache_is_closed() -> None:
    """Nothing of a cache that is closed holds the engine's memory, as long as the cache itself is kept."""
    pool = mmap.mmap(-1, 16 * PAYLOAD_BYTES)
    async with open_cache(CPU) as kv:
        kv.register_host_pool("swap", memoryview(pool))
        assert (await kv.store(KEYS, CPULoadStoreSpec(SLOTS, pool="swap"))).num_stored == 9
    pool.close()  # raises BufferError while anything has it
    assert kv is not None
