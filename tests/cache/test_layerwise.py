"""Loads and stores layer by layer: attention of one layer starts while the next one is on its way."""

import asyncio
import threading

import pytest
from anyio.lowlevel import checkpoint

from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import AnyTier, inside, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, POISON, SMALL_LIMITS, Engine, contents, prompt, small_layout
from tiered_kv import CacheLimits, ConfigurationError, GPULoadStoreSpec, Worker
from tiered_kv.memory.lanes import LaneCopy
from tiered_kv.testing import ScriptedDevice, ScriptedEvent
from tiered_kv.tiers.gate import Kind, Waiter

KEYS = prompt(9)
INTO, SOURCE = GPULoadStoreSpec(range(9)), GPULoadStoreSpec(range(10, 19))
HALF = PAYLOAD_BYTES // 2
"""Bytes of one of the two layers of a block."""
SOON_S = 0.02
CPU: AnyTier = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}
GPU: AnyTier = {"medium": "gpu", "capacity": 4 * PAYLOAD_BYTES}


async def _some_turns() -> None:
    for _ in range(50):
        await checkpoint()


def _layers(blocks: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    return [block[:HALF] for block in blocks], [block[HALF:] for block in blocks]


POISONED = [bytes([POISON]) * HALF] * 9

# Loads.


async def test_layers_come_one_after_another() -> None:
    """All blocks of layer 0 are in place before any of layer 1 is touched, and each can be waited for."""
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        storing = asyncio.create_task(keep(kv, engine, KEYS))
        await until(storing.done, on_wait=device.run_all)
        engine.poison()
        handle = kv.start_load(KEYS, INTO, layerwise=True)
        assert await handle.admitted() == 9
        assert engine.is_poisoned()
        waiting = [asyncio.create_task(handle.layer(layer)) for layer in range(2)]
        device.step()
        await until(waiting[0].done)
        assert _layers(engine.read(INTO)) == (_layers(contents(KEYS))[0], POISONED)
        assert not waiting[1].done()
        device.step()
        await until(waiting[1].done)
        assert (await handle).num_blocks == 9
        assert engine.read(INTO) == contents(KEYS)
        await until_idle(kv)


@pytest.mark.parametrize("layerwise", [True, False])
async def test_a_layer_that_has_not_even_been_read_is_waited_for(*, layerwise: bool) -> None:
    """Asked for before it is known how many blocks there will be, it is there once the wait ends."""
    engine, medium = Engine(), ScriptedBackend()
    async with open_cache(medium, engine=engine) as kv:
        await keep(kv, engine, KEYS[:4])
        engine.poison()
        medium.on_read.hold()
        handle = kv.start_load(KEYS[:4], INTO[:4], layerwise=layerwise)
        waiting = asyncio.create_task(handle.layer(1))
        await until(lambda: medium.on_read.num_held > 0)
        assert not waiting.done()
        medium.on_read.release()
        await waiting
        assert _layers(engine.read(range(4)))[1] == _layers(contents(KEYS[:4]))[1]
        assert (await handle).num_blocks == 4


@pytest.mark.parametrize("kind", [ScriptedBackend, ScriptedSlotBackend])
async def test_blocks_come_from_wherever_they_are(kind: type[ScriptedBackend | ScriptedSlotBackend]) -> None:
    """From the GPU pool, the CPU tier and below it in one load, through threads."""
    engine, medium = Engine(), kind(name="medium")
    async with open_cache(GPU, CPU, medium, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS[4:7], tier="gpu")
        await kv.evict(KEYS[6:], tier="cpu")
        engine.poison()
        handle = kv.start_load(KEYS, INTO, layerwise=True)
        assert await handle.admitted() == 9
        for layer in range(2):
            await handle.layer(layer)
            assert _layers(engine.read(INTO))[layer] == _layers(contents(KEYS))[layer]
        loaded = await handle
        assert (loaded.num_blocks, sum(loaded.by_tier.values()), loaded.faults) == (9, 9, ())
        await until_idle(kv)


async def test_what_finds_no_slots_at_once_is_not_loaded() -> None:
    """Windows hold their slots until the layers are copied: the prefix ends where there are no more."""
    engine, medium = Engine(), ScriptedSlotBackend()
    keys, into = prompt(30), GPULoadStoreSpec(range(30))
    async with open_cache(medium, engine=engine, limits=SMALL_LIMITS) as kv:
        await keep(kv, engine, keys)
        engine.poison()
        handle = kv.start_load(keys, into, layerwise=True)
        n = await handle.admitted()
        assert 0 < n <= kv.stats().bounce_slots
        assert (await handle).num_blocks == n
        assert engine.read(into[:n]) == contents(keys[:n])
        assert (await kv.load(keys[n:], into[n:])).num_blocks == 30 - n
        await until_idle(kv)


@pytest.mark.parametrize("layerwise", [True, False])
async def test_what_is_copied_late_is_admitted_once_it_is_there(
    monkeypatch: pytest.MonkeyPatch, *, layerwise: bool
) -> None:
    """While memory is not page-locked: a stream that is to wait for it would block whoever has it do so."""
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        storing = asyncio.create_task(keep(kv, engine, KEYS))
        await until(storing.done, on_wait=device.run_all)
        monkeypatch.setattr(LaneCopy, "is_late", property(lambda copy: not copy.ended.done()))
        handle = kv.start_load(KEYS, INTO, layerwise=layerwise)
        admitted = asyncio.ensure_future(handle.admitted())
        await _some_turns()
        assert not admitted.done()
        await until(admitted.done, on_wait=device.run_all)
        assert await admitted == (await handle).num_blocks == 9
        await until_idle(kv)


async def test_a_miss_is_admitted_as_nothing() -> None:
    """And no layer has to be waited for."""
    engine = Engine()
    async with open_cache(CPU, engine=engine) as kv:
        handle = kv.start_load(KEYS, INTO, layerwise=True)
        assert await handle.admitted() == 0
        await handle.layer(1)
        assert (await handle).num_blocks == 0
        await until_idle(kv)


async def test_a_deadline_does_not_take_back_what_has_begun() -> None:
    """Once the first layer is being copied, the others follow, however late; and it says that it was late."""
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        storing = asyncio.create_task(keep(kv, engine, KEYS))
        await until(storing.done, on_wait=device.run_all)
        handle = kv.start_load(KEYS, INTO, layerwise=True, deadline_s=SOON_S)
        await handle.admitted()
        device.step()
        done, _ = await asyncio.wait(
            {asyncio.ensure_future(handle.layer(1))}, timeout=0.2
        )  # past the last copies' time
        assert not done
        device.run_all()
        loaded = await handle
        assert (loaded.num_blocks, [fault.reason for fault in loaded.faults]) == (9, ["deadline"])
        assert engine.read(INTO) == contents(KEYS)
        await until_idle(kv)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_load_behind_an_event_that_never_fires_ends(how: str) -> None:
    """With 0 blocks, though they were admitted; nothing is touched, then or later, and nothing is held."""
    engine, device, never = Engine(), ScriptedDevice(), ScriptedEvent()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        storing = asyncio.create_task(keep(kv, engine, KEYS))
        await until(storing.done, on_wait=device.run_all)
        engine.poison()
        deadline_s = SOON_S if how == "deadline" else None
        handle = kv.start_load(KEYS, INTO, after=never, layerwise=True, deadline_s=deadline_s)
        assert await handle.admitted() == 9
        if how == "cancel":
            handle.cancel()
        assert (await handle).num_blocks == 0
        await until_idle(kv)
        never.fire()
        device.run_all()
        assert engine.is_poisoned()


async def test_a_layer_that_fails_fails_the_load() -> None:
    """A block without one of its layers is none; the fault is named."""
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        storing = asyncio.create_task(keep(kv, engine, KEYS))
        await until(storing.done, on_wait=device.run_all)
        handle = kv.start_load(KEYS, INTO, layerwise=True)
        await handle.admitted()
        device.step()
        device.fail_next(OSError("lost"))
        device.run_all()
        loaded = await handle
        assert (loaded.num_blocks, [fault.reason for fault in loaded.faults]) == (0, ["copy failed"])
        await until_idle(kv)


async def test_a_thread_of_the_engine_may_block() -> None:
    """On a CPU there are no streams; the event loop's own thread is refused."""
    engine = Engine()
    async with open_cache(CPU, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        engine.poison()
        handle = kv.start_load(KEYS, INTO, layerwise=True)
        seen: list[bool] = []

        def compute() -> None:
            for layer in range(2):
                handle.wait_layer(layer)
                seen.append(_layers(engine.read(INTO))[layer] == _layers(contents(KEYS))[layer])

        thread = threading.Thread(target=compute)
        thread.start()
        await until(lambda: not thread.is_alive())
        assert seen == [True, True]
        with pytest.raises(ConfigurationError, match="event loop"):
            handle.wait_layer(0)
        await handle


async def test_streams_wait_for_plain_loads_too() -> None:
    """There every layer is there when the last block is."""
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        storing = asyncio.create_task(keep(kv, engine, KEYS))
        await until(storing.done, on_wait=device.run_all)
        handle, compute, ran = kv.start_load(KEYS, INTO), device.stream("compute"), list[bool]()
        assert await handle.admitted() == 9
        handle.wait_layer(0, compute)
        compute.submit(lambda: ran.append(engine.read(INTO) == contents(KEYS)), lambda _: None)
        device.run_all()
        assert ran == [True]
        for layer in (-1, 2):
            with pytest.raises(ConfigurationError, match="not one of the KV group's 2"):
                handle.wait_layer(layer, compute)
        with pytest.raises(ConfigurationError, match="no stream"):
            handle.wait_layer(0, object())
        await handle
        early = kv.start_load(KEYS, INTO, layerwise=True)
        with pytest.raises(ConfigurationError, match="admitted"):
            early.wait_layer(0, compute)
        await early.admitted()
        device.run_all()
        await early


# Stores.


async def test_a_stream_of_the_engine_waits_for_a_plan() -> None:
    """What it is given next finds the blocks there, though nobody has waited for the copies."""
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        storing = asyncio.create_task(keep(kv, engine, KEYS))
        await until(storing.done, on_wait=device.run_all)
        planner = kv.planner()
        planner.register_worker()
        with Worker(planner.slabs(), layout=small_layout(), device=device) as worker:
            worker.register_kv_caches(engine.caches)
            job, compute, ran = planner.plan_load(KEYS, INTO), device.stream("compute"), list[bool]()
            plan = await job.planned()
            with pytest.raises(ConfigurationError, match="is no stream that can wait"):
                worker.start(plan, ahead_of=object())
            loading = worker.start(plan, ahead_of=compute)
            compute.submit(lambda: ran.append(engine.read(INTO) == contents(KEYS)), lambda _: None)
            device.run_all()
            assert ran == [True]
            planner.complete(loading.result(0))
            assert (await job.ended()).num_blocks == len(KEYS)


async def test_layers_are_stored_as_they_are_computed() -> None:
    """Each is read after its own event, in whichever order; the blocks are there once all layers are."""
    engine, device = Engine(), ScriptedDevice()
    events = [ScriptedEvent(), ScriptedEvent()]
    async with open_cache(CPU, ScriptedSlotBackend(), engine=engine, device=device) as kv:
        engine.poison()
        handle = kv.start_store(KEYS, SOURCE, layerwise=True)
        handle.store_layer(1, after=events[1])
        await _some_turns()
        engine.compute(KEYS, SOURCE.ids.tolist())
        events[1].fire()
        device.run_all()
        await _some_turns()
        assert (await kv.lookup(KEYS)).num_blocks == 0
        assert not handle.done
        handle.store_layer(0, after=events[0])
        assert device.run_all() == 0
        events[0].fire()
        device.run_all()
        stored = await handle
        assert (stored.num_stored, stored.num_dropped) == (9, 0)
        assert [each.written for each in await stored.settled()] == [9, 9]
        engine.poison()
        loading = kv.start_load(KEYS, INTO)
        await until(lambda: loading.done, on_wait=device.run_all)
        assert engine.read(INTO) == contents(KEYS)
        await until_idle(kv)


async def test_a_store_that_lacks_a_layer_is_dropped() -> None:
    """At its deadline, whole, and nothing is held; what comes later does nothing."""
    engine = Engine()
    limits = CacheLimits(window=4 * PAYLOAD_BYTES, bounce=16 * PAYLOAD_BYTES, store_timeout_s=SOON_S)
    async with open_cache(CPU, engine=engine, limits=limits) as kv:
        handle = kv.start_store(KEYS, SOURCE, layerwise=True)
        handle.store_layer(0)
        stored = await handle
        assert (stored.num_stored, stored.drop_reasons) == (0, {"deadline": 9})
        handle.store_layer(1)
        await stored.settled()
        await until_idle(kv)
        assert (await kv.lookup(KEYS)).num_blocks == 0


async def test_a_store_may_be_cancelled_between_layers() -> None:
    """Its source is free at once, and nothing is kept."""
    engine, never = Engine(), threading.Event()
    async with open_cache(CPU, engine=engine) as kv:
        handle = kv.start_store(KEYS, SOURCE, layerwise=True)
        handle.store_layer(0, after=never)
        handle.cancel()
        stored = await handle
        assert (stored.num_stored, stored.drop_reasons) == (0, {"revoked": 9})
        await until_idle(kv)
        never.set()


async def test_a_layer_that_is_not_copied_drops_the_store() -> None:
    """Blocks that lack a layer are never found."""
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        handle = kv.start_store(KEYS, SOURCE, layerwise=True)
        device.fail_next(OSError("lost"))
        for layer in range(2):
            handle.store_layer(layer)
        device.run_all()
        assert (await handle).drop_reasons == {"copy failed": 9}
        await until_idle(kv)
        assert (await kv.lookup(KEYS)).num_blocks == 0


async def test_a_store_takes_the_slots_there_are() -> None:
    """It waits for none: the head is stored, the tail dropped; what was there is counted as present."""
    engine, medium = Engine(), ScriptedSlotBackend()
    keys, source = prompt(30), GPULoadStoreSpec(range(30))
    async with open_cache(medium, engine=engine) as kv:
        await keep(kv, engine, keys[:2])
        engine.compute(keys)
        handle = kv.start_store(keys, source, layerwise=True)
        for layer in range(2):
            handle.store_layer(layer)
        stored = await handle
        assert stored.num_stored + stored.num_dropped + stored.num_present == 30
        assert stored.drop_reasons == {"no room": stored.num_dropped}
        assert stored.num_stored >= 4
        await stored.settled()
        assert (await kv.lookup(keys)).num_blocks >= 4
        await until_idle(kv)


async def test_a_store_leaves_slots_to_whoever_waits_for_them() -> None:
    """In whatever line: it would hold them for as long as all layers take to be computed."""
    engine, limits = Engine(), CacheLimits(window=4 * PAYLOAD_BYTES, bounce=16 * PAYLOAD_BYTES)
    keys = prompt(4)
    async with open_cache({"medium": "cpu", "capacity": 0}, ScriptedSlotBackend(), engine=engine, limits=limits) as kv:
        chain = inside(kv).chains[0]
        waiting: asyncio.Future[None] = asyncio.ensure_future(
            chain.room.acquire(lambda: None, Waiter(Kind.PREFETCH), lambda _: None, 4, lane=len(chain.memory))
        )
        await until(lambda: chain.room.num_waiting == 1)
        for is_waited_for, num_stored in ((True, 0), (False, 4)):
            if not is_waited_for:
                waiting.cancel()
                await asyncio.wait({waiting})
            handle = kv.start_store(keys, engine.compute(keys), layerwise=True)
            for layer in range(2):
                handle.store_layer(layer)
            assert (await handle).num_stored == num_stored


async def test_layers_that_cannot_be_are_refused() -> None:
    """One there is not, one that was given, one of a store that is not layer-wise, an event that is none, no number."""
    engine, wrong = Engine(), (1.0, "1", None, True)
    async with open_cache(CPU, engine=engine) as kv:
        handle = kv.start_store(KEYS, SOURCE, layerwise=True)
        handle.store_layer(0)
        for layer, message in ((0, "already"), (2, "not one of"), (-1, "not one of")):
            with pytest.raises(ConfigurationError, match=message):
                handle.store_layer(layer)
        with pytest.raises(ConfigurationError, match="after must"):
            handle.store_layer(1, after=object())
        for number in wrong:
            with pytest.raises(ConfigurationError, match="layer must be an int, got"):
                handle.store_layer(number)  # type: ignore[arg-type]  # wrong on purpose
        handle.store_layer(1)
        assert (await handle).num_stored == len(KEYS)
        load = kv.start_load(KEYS, SOURCE, layerwise=True)
        back = kv.start_load(KEYS, SOURCE, order="back")
        for number in wrong:
            with pytest.raises(ConfigurationError, match="layer must be an int, got"):
                await load.layer(number)  # type: ignore[arg-type]  # likewise
            with pytest.raises(ConfigurationError, match="block must be an int, got"):
                back.stop_before(number)  # type: ignore[arg-type]  # likewise
        await load
        await back
        plain = kv.start_store(KEYS, SOURCE)
        with pytest.raises(ConfigurationError, match="layerwise=True"):
            plain.store_layer(0)
        await plain
        await until_idle(kv)


class RefusedEvent:
    """An event that a driver refuses when its wait is enqueued: looked at once more, it fails."""

    num_looks = 0

    @property
    def synchronize(self) -> object:
        """Fail from the second look on."""
        self.num_looks += 1
        if self.num_looks > 1:
            raise RuntimeError("invalid resource handle")
        return lambda: None


async def test_a_layer_whose_wait_is_refused_is_missing() -> None:
    """Nothing of it was copied, so the blocks are not kept, unless the layer is given again."""
    engine = Engine()
    async with open_cache(CPU, engine=engine) as kv:
        for again in (False, True):
            keys = prompt(4, seed=again)
            handle = kv.start_store(keys, engine.compute(keys), layerwise=True)
            with pytest.raises(RuntimeError, match="invalid resource handle"):
                handle.store_layer(1, after=RefusedEvent())
            handle.store_layer(0)
            if again:
                handle.store_layer(1)
            else:
                handle.cancel()
            assert (await handle).num_stored == 4 * again
            assert (await kv.lookup(keys)).num_blocks == 4 * again
        engine.poison()
        loaded = await kv.load(keys, GPULoadStoreSpec(range(4)))
        assert engine.read(range(loaded.num_blocks)) == contents(keys)
        await until_idle(kv)
