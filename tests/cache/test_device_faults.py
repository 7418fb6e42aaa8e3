"""Faults of the engine's device: late events, failed events, a device that is lost. Nothing leaks, storage goes on."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from anyio.lowlevel import checkpoint

from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import AnyTier, Recorder, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, contents, prompt
from tiered_kv import CacheLimits, GPULoadStoreSpec, TieredKV
from tiered_kv.testing import ScriptedDevice, ScriptedEvent
from tiered_kv.transfers.engine_memory import EngineMemory
from tiered_kv.transfers.handles import Handle
from tiered_kv.transfers.store import Placed
from tiered_kv.values.events import DeviceFailed, HostMemoryReady

KEYS, OTHERS = prompt(9), prompt(9, seed=1)
INTO, SOURCE = GPULoadStoreSpec(range(9)), GPULoadStoreSpec(range(10, 19))
SOON_S = 0.02
CPU: AnyTier = {"medium": "cpu", "capacity": 32 * PAYLOAD_BYTES}
GPU: AnyTier = {"medium": "gpu", "capacity": 4 * PAYLOAD_BYTES}
LOST = OSError("the device is lost")


async def _some_turns() -> None:
    for _ in range(50):
        await checkpoint()


async def _have(kv: TieredKV, engine: Engine, device: ScriptedDevice) -> None:
    storing = asyncio.create_task(keep(kv, engine, KEYS))
    await until(storing.done, on_wait=device.run_all)
    engine.compute(OTHERS, SOURCE.ids.tolist())


async def test_an_event_that_comes_late_delays_its_own_transfer_only() -> None:
    """Loads and stores with no event, or with one that has fired, pass by; the late one is right in the end."""
    engine, device, late = Engine(), ScriptedDevice(), ScriptedEvent()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        await _have(kv, engine, device)
        slow: list[Handle[Any]] = [
            kv.start_load(KEYS, INTO, after=late),
            kv.start_store(OTHERS, SOURCE, after=late),
        ]
        await _some_turns()
        soon = ScriptedEvent()
        passing = kv.start_load(KEYS, GPULoadStoreSpec(range(20, 29)), after=soon)
        plain = kv.start_load(KEYS, GPULoadStoreSpec(range(30, 39)))
        soon.fire()
        await until(lambda: passing.done and plain.done, on_wait=device.run_all)
        assert (await passing).num_blocks == (await plain).num_blocks == 9
        assert not any(handle.done for handle in slow)
        late.fire()
        await until(lambda: all(handle.done for handle in slow), on_wait=device.run_all)
        assert engine.read(INTO) == contents(KEYS)
        assert (await kv.lookup(OTHERS)).num_blocks == 9
        await until_idle(kv)


@pytest.mark.parametrize("layerwise", [False, True])
async def test_an_event_that_fails_fails_its_own_transfer_only(layerwise: bool) -> None:  # noqa: FBT001 - a parameter
    """Nobody knows what it stood for: nothing is copied after it, its result says so, and the next ones go on."""
    engine, device, emit = Engine(), ScriptedDevice(), Recorder()
    failed = ScriptedEvent()
    failed.fail(LOST)
    async with open_cache(CPU, engine=engine, device=device, emit=emit) as kv:
        await _have(kv, engine, device)
        loading = kv.start_load(KEYS, INTO, after=failed, layerwise=layerwise)
        storing = kv.start_store(OTHERS, SOURCE, after=failed, layerwise=layerwise)
        if layerwise:
            for layer in range(2):
                storing.store_layer(layer)
        engine.poison()
        await until(lambda: loading.done and storing.done, on_wait=device.run_all)
        loaded, stored = await loading, await storing
        assert loaded.num_blocks == 0
        assert {fault.reason for fault in loaded.faults} == {"copy failed"}
        assert (stored.num_stored, stored.drop_reasons) == (0, {"copy failed": 9})
        assert engine.is_poisoned()
        await until_idle(kv)
        assert not emit.of(DeviceFailed)
        again = kv.start_load(KEYS, INTO)
        await until(lambda: again.done, on_wait=device.run_all)
        assert (await again).num_blocks == 9


async def test_an_event_that_fails_before_the_first_layer_fails_the_store() -> None:
    """Each layer has an event of its own, which comes; the next layer-wise store is none the worse."""
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        lost, fired = ScriptedEvent(), ScriptedEvent()
        fired.fire()
        lost.fail(LOST)
        for after, num_stored in ((lost, 0), (None, 9)):
            storing = kv.start_store(KEYS, engine.compute(KEYS), after=after, layerwise=True)
            for layer in range(2):
                storing.store_layer(layer, after=fired)
            await until(lambda storing=storing: storing.done, on_wait=device.run_all)  # type: ignore[misc]
            assert (await storing).num_stored == num_stored
        await until_idle(kv, on_wait=device.run_all)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("tiers", [[CPU], [GPU, CPU]], ids=["cpu", "gpu, cpu"])
async def test_a_device_that_is_lost_takes_nothing_with_it(tiers: list[AnyTier], layerwise: bool) -> None:  # noqa: FBT001
    """What is under way ends with faults; what comes ends at once. One event; lookups, evictions and storage go on."""
    engine, device, emit, medium = Engine(), ScriptedDevice(), Recorder(), ScriptedSlotBackend()
    async with open_cache(*tiers, medium, engine=engine, device=device, emit=emit) as kv:
        await _have(kv, engine, device)
        never = ScriptedEvent()
        loads = [kv.start_load(KEYS, INTO, after=after, layerwise=layerwise) for after in (None, never)]
        store = kv.start_store(OTHERS, SOURCE, after=never, layerwise=layerwise)
        if layerwise:
            store.store_layer(0)
        engine.poison()
        await _some_turns()
        device.fail(LOST)
        device.fail(OSError("again"))
        if layerwise:
            store.store_layer(1)
        await until(lambda: store.done and all(load.done for load in loads), on_wait=device.run_all)
        for load in loads:
            assert (await load).num_blocks == 0
            assert {fault.reason for fault in (await load).faults} == {"copy failed"}
        assert (await store).drop_reasons == {"copy failed": 9}
        await until_idle(kv, on_wait=device.run_all)
        for loaded in [await kv.load(KEYS, INTO), await kv.start_load(KEYS, INTO, layerwise=True)]:
            assert (loaded.num_blocks, [fault.reason for fault in loaded.faults]) == (0, ["device unusable"])
        for stored in [await kv.store(OTHERS, SOURCE), await kv.start_store(OTHERS, SOURCE, layerwise=True)]:
            assert (stored.num_stored, stored.drop_reasons) == (0, {"device unusable": 9})
            await stored.settled()
        assert len(emit.of(DeviceFailed)) == 1
        assert not kv.stats().is_device_usable
        assert engine.is_poisoned()
        assert (await kv.lookup(KEYS)).num_blocks == 9
        await kv.evict(KEYS, tier="cpu")
        async with kv.lease(KEYS) as lease:
            assert [bytes(view) for view in lease.views] == contents(KEYS)
        await until_idle(kv)


async def test_a_device_lost_before_the_cache_is_opened_serves_lookups() -> None:
    """Nothing hangs for it."""
    engine, device = Engine(), ScriptedDevice()
    device.fail(LOST)
    async with open_cache(CPU, engine=engine, device=device) as kv:
        assert (await kv.load(KEYS, INTO)).num_blocks == 0
        assert (await kv.lookup(KEYS)).num_blocks == 0
        await until_idle(kv)


async def test_a_copy_that_fails_is_one_fault_and_no_more() -> None:
    """The device stays in use: a copy may fail for want of memory, say."""
    engine, device = Engine(), ScriptedDevice()
    limits = CacheLimits(window=4 * PAYLOAD_BYTES, bounce=16 * PAYLOAD_BYTES, store_timeout_s=SOON_S)
    async with open_cache(CPU, engine=engine, device=device, limits=limits) as kv:
        await _have(kv, engine, device)
        device.fail_next(MemoryError("no staging"))
        load = kv.start_load(KEYS, INTO)
        await until(lambda: load.done, on_wait=device.run_all)
        assert [fault.reason for fault in (await load).faults] == ["copy failed"]
        load = kv.start_load(KEYS, INTO)
        await until(lambda: load.done, on_wait=device.run_all)
        assert (await load).num_blocks == 9
        assert kv.stats().is_device_usable
        await until_idle(kv)


async def test_a_prefetch_whose_copy_fails_says_so() -> None:
    """Why nothing came to the GPU pool: one copy failed, or the device is lost."""
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(GPU, CPU, engine=engine, device=device) as kv:
        await _have(kv, engine, device)
        await kv.evict(KEYS, tier="gpu")
        device.fail_next(MemoryError("no staging"))
        for reason in ("copy failed", "device unusable"):
            prefetch = kv.prefetch(KEYS[:4], to="gpu")
            await until(lambda prefetch=prefetch: prefetch.done, on_wait=device.run_all)  # type: ignore[misc]
            brought = await prefetch
            assert brought.num_blocks == 0
            assert [(each.tier, each.reason, each.num_blocks) for each in brought.faults] == [("gpu", reason, 4)]
            device.fail(LOST)
        await until_idle(kv, on_wait=device.run_all)


@pytest.mark.parametrize("num_blocks", [4, 9], ids=["begun at once", "in a task"])
@pytest.mark.parametrize(
    "waits", [lambda kv: kv.flush(), lambda kv: kv.resize("cpu", 12 * PAYLOAD_BYTES)], ids=["flush", "resize"]
)
async def test_a_copy_that_hangs_keeps_no_flush_and_no_resize_waiting(
    num_blocks: int, waits: Callable[[TieredKV], Awaitable[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for a store as long as it may take; what it keeps in the end, the next flush waits for.

    Seed 8001311 had a client of a host's server that hung in a copy, and a resize that waited for it.
    """
    engine, medium, keys = Engine(), ScriptedBackend(), prompt(num_blocks)
    computed, begun, goes_on, gather = threading.Event(), threading.Event(), threading.Event(), Placed.gather

    def hang(placed: Placed, memory: EngineMemory) -> None:
        begun.set()
        goes_on.wait()
        gather(placed, memory)

    monkeypatch.setattr(Placed, "gather", hang)
    limits = CacheLimits(window=4 * PAYLOAD_BYTES, bounce=16 * PAYLOAD_BYTES, store_timeout_s=SOON_S)
    async with open_cache(CPU, medium, engine=engine, limits=limits) as kv:
        try:
            handle = kv.start_store(keys, engine.compute(keys), after=computed)
            computed.set()
            await asyncio.to_thread(begun.wait)
            await waits(kv)
            assert not handle.done
            medium.on_write.hold()
        finally:
            goes_on.set()
        stored = await handle
        flushing = asyncio.ensure_future(kv.flush())
        await _some_turns()
        assert not flushing.done()
        medium.on_write.release()
        await flushing
        assert medium.num_records == stored.num_stored == 4
        await until_idle(kv)


async def test_a_drain_says_what_a_copy_that_hung_lost_by_a_resize(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots were given up, as nobody waited for it: what it brings in the end goes nowhere, and is lost."""
    engine, medium, keys = Engine(), ScriptedBackend(), prompt(4)
    begun, goes_on, gather = threading.Event(), threading.Event(), Placed.gather

    def hang(placed: Placed, memory: EngineMemory) -> None:
        begun.set()
        goes_on.wait()
        gather(placed, memory)

    monkeypatch.setattr(Placed, "gather", hang)
    limits = CacheLimits(window=4 * PAYLOAD_BYTES, bounce=16 * PAYLOAD_BYTES, store_timeout_s=SOON_S)
    computed = threading.Event()
    async with open_cache(CPU, medium, engine=engine, limits=limits) as kv:
        try:
            handle = kv.start_store(keys, engine.compute(keys), after=computed)
            computed.set()
            await asyncio.to_thread(begun.wait)
            await kv.resize("cpu", 2 * PAYLOAD_BYTES)
            assert not handle.done
        finally:
            goes_on.set()
        await handle
        await kv.flush()
        assert medium.num_records == 2
        assert not await kv.drain()
        await until_idle(kv)


async def test_memory_says_when_it_is_ready() -> None:
    """By an event on the loop, with the bytes; the cache serves before."""
    engine, emit = Engine(), Recorder()
    async with open_cache(CPU, engine=engine, emit=emit) as kv:
        await until(lambda: bool(emit.of(HostMemoryReady)))
        (ready,) = emit.of(HostMemoryReady)
        assert ready.num_bytes >= 32 * PAYLOAD_BYTES
        assert (kv.stats().page_locked_bytes, kv.stats().is_pageable) == (0, False)
