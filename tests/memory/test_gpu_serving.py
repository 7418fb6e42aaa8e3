"""A whole cache on a driver of our own: every byte comes back, and mistakes that only a GPU would show are found."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from tests.support.caches import Recorder, inside, open_cache, until, until_idle
from tests.support.engine import MODEL, PAYLOAD_BYTES, SMALL_LIMITS, Engine, contents, prompt, small_layout
from tests.support.fake_cuda import fake_cuda
from tests.support.fake_driver import FakeDriver, Marker
from tests.support.gpu_engine import (
    CPU_TIER,
    GPU,
    GPU_TIER,
    INTO,
    KEYS,
    engine_on,
    goes_round,
    locked,
    only,
    opened,
)
from tiered_kv import GPULoadStoreSpec, KVGroup, KVLayout, TieredKV, Worker, hash_blocks
from tiered_kv.cache import worker as worker_module
from tiered_kv.memory import CUDADevice, HostSlab, PagedCaches, PageLockState, gpu, kernels, staging
from tiered_kv.memory.codec import CodecName
from tiered_kv.memory.device import attempt
from tiered_kv.memory.staging import Staging
from tiered_kv.transfers.layerwise import LAYERS_A_TURN, layers_a_turn
from tiered_kv.values.errors import ConfigurationError

pytest.importorskip("triton", reason="Triton: pip install 'tiered-kv[cuda]'")


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    """Four GPUs."""
    with fake_cuda() as fake:
        yield fake


@pytest.mark.parametrize("way", ["staging", "directly", "by kernel"])
async def test_streams_may_be_one_and_the_same(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Torch has 32 of a kind and gives them out in turns: ours may be each other's, or the engine's."""
    monkeypatch.setattr("tests.support.fake_cuda.POOL", 1)
    only(way, monkeypatch)
    with fake_cuda() as fake:
        engine = engine_on(fake)
        async with opened(engine, GPU_TIER, CPU_TIER) as kv:
            await asyncio.to_thread(locked, kv)
            await goes_round(kv, engine)
            await goes_round(kv, engine, layerwise=True)
        assert not fake.blocked


@pytest.mark.parametrize("shift_bytes", [0, 2, 8])
@pytest.mark.parametrize(("codec", "way"), [("none", "staging"), ("none", "by kernel"), ("fp8", "staging")])
async def test_nothing_is_compiled_while_serving(
    monkeypatch: pytest.MonkeyPatch, fake: FakeDriver, codec: CodecName, way: str, shift_bytes: int
) -> None:
    """All that a binding can need is compiled by it: whatever is aligned how, at once, layer by layer, or swapped."""
    only(way, monkeypatch)
    engine = engine_on(fake, shift_bytes=shift_bytes)
    limits = SMALL_LIMITS.model_copy(update={"swap_space": 16 * PAYLOAD_BYTES})
    cache = TieredKV(
        [GPU_TIER, CPU_TIER],
        model=MODEL,
        layout=small_layout(),
        limits=limits,
        device=GPU,
        codec=codec,
        emit=Recorder(),
    )
    async with cache as kv:
        kv.register_kv_caches(engine.caches)
        await asyncio.to_thread(locked, kv)
        compiled = set(kernels._copy.compiled)  # noqa: SLF001 - the fake's
        for layerwise in (False, True):
            stored = await kv.store(KEYS, engine.compute(KEYS))
            assert stored.num_stored + stored.num_present == len(KEYS)
            assert (await kv.start_load(KEYS, INTO, layerwise=layerwise)).num_blocks == len(KEYS)
        assert (await kv.swap({1: 5}, {1: 1, 2: 2}, {7: 8})).fault is None
        assert compiled
        assert kernels._copy.compiled == compiled  # noqa: SLF001 - the fake's


async def test_the_first_gpu_is_like_any_other(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver) -> None:
    """It is the current one of every thread, and so never chosen: the driver's own calls find its context even so."""
    only("directly", monkeypatch)
    engine = engine_on(fake, 0)
    async with opened(engine, device="cuda:0") as kv:
        await asyncio.to_thread(locked, kv)
        await goes_round(kv, engine)
    assert fake.contexts == {0}


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("way", ["staging", "directly", "by kernel"])
@pytest.mark.parametrize("seed", range(2))
async def test_every_byte_goes_there_and_back(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    way: str,
    layerwise: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    """In whatever order the GPU does what it may; the loop's thread waits for it nowhere; all memory is unlocked."""
    only(way, monkeypatch)
    with fake_cuda(seed=seed) as fake:
        engine = engine_on(fake)
        async with opened(engine, GPU_TIER, CPU_TIER) as kv:
            address = inside(kv).chains[0].host.slab.rows.data_ptr()
            await asyncio.to_thread(locked, kv)
            await goes_round(kv, engine, layerwise=layerwise)
            assert address in fake.registered
        assert not fake.blocked
        assert address not in fake.registered


@pytest.mark.parametrize(("direction", "layerwise"), [("store", False), ("load", False), ("load", True)])
async def test_the_memory_that_blocks_go_through_is_taken_by_the_binding(
    monkeypatch: pytest.MonkeyPatch,
    fake: FakeDriver,
    direction: str,
    layerwise: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    """As much as the documentation says, and none while serving: not by transfers that wait either."""
    only("staging", monkeypatch)
    engine = engine_on(fake)

    def taken() -> dict[int, int]:
        return {at: num_bytes for at, (num_bytes, _) in fake.allocated.items() if num_bytes >= 1 << 20}

    async with opened(engine) as kv:
        at_first = taken()
        assert sum(at_first.values()) == 128 << 20
        await asyncio.to_thread(locked, kv)
        await goes_round(kv, engine)
        for _ in range(2):  # by streams that wait, more of them than there are
            fake.run()
            fake.held, begun = True, Marker()
            stream = torch.cuda.Stream(GPU)  # type: ignore[no-untyped-call]  # of torch
            fake.enqueue(stream.queue, after=begun)  # type: ignore[attr-defined]  # the fake's
            after = stream.record_event()
            spec = GPULoadStoreSpec(range(len(KEYS)))
            handles = [
                kv.start_store(prompt(2, seed=n), GPULoadStoreSpec(range(2)), after=after)
                if direction == "store"
                else kv.start_load(KEYS, spec, after=after, layerwise=layerwise)
                for n in range(6)
            ]
            begun.fired = True
            fake.release()
            for handle in handles:
                await handle
        await goes_round(kv, engine)
        assert taken() == at_first
    assert not fake.failure


async def test_a_gpu_without_room_for_it_is_refused_at_once(fake: FakeDriver) -> None:
    """By the binding, with numbers; not by the first load that needs it."""
    engine = engine_on(fake)
    async with TieredKV([CPU_TIER], model=MODEL, layout=small_layout(), device=GPU, emit=Recorder()) as kv:
        fake.room = 20 << 20
        with pytest.raises(ConfigurationError, match=r"32 MiB of cuda:3 are wanted .* has 20 MiB"):
            kv.register_kv_caches(engine.caches)
        fake.room = 40 << 20
        kv.register_kv_caches(engine.caches)


async def test_a_gpu_without_room_for_its_tier_is_refused(fake: FakeDriver) -> None:
    """When the cache is opened, with numbers, and nothing stays behind."""
    tier = {"medium": "gpu", "capacity": "64MiB"}
    fake.room = 20 << 20
    with pytest.raises(ConfigurationError, match=r"64 MiB of cuda:3 are wanted for a gpu tier, and it has 20 MiB"):
        async with TieredKV([tier, CPU_TIER], model=MODEL, layout=small_layout(), device=GPU, emit=Recorder()):
            pass
    assert not fake.registered


async def test_swaps_that_are_refused_for_want_of_room_take_nothing_more_each(fake: FakeDriver) -> None:
    """The engine asks again and again: the first time a thread is there for them, and once there is room they go."""
    engine, limits = engine_on(fake), SMALL_LIMITS.model_copy(update={"swap_space": 16 * PAYLOAD_BYTES})
    async with open_cache(CPU_TIER, engine=engine, limits=limits, device=GPU) as kv:
        await asyncio.to_thread(locked, kv)
        room, fake.room, taken = fake.room, 1 << 20, []
        for _ in range(3):
            with pytest.raises(ConfigurationError, match="8 MiB of cuda:3 are wanted for copies of 'swap0'"):
                await kv.swap({}, {1: 1})
            taken.append(threading.active_count())
        assert taken == [taken[0]] * 3
        fake.room = room
        assert (await kv.swap({}, {1: 1})).num_out == 1


NUM_LAYERS, NUM_BLOCKS = 40, 3
DEEP = KVLayout((KVGroup(NUM_LAYERS, 1, 8, "bfloat16", 4, "MLA"),))


@asynccontextmanager
async def deep_cache(fake: FakeDriver) -> AsyncIterator[tuple[TieredKV, list[torch.Tensor]]]:
    """Open a cache for an engine of many layers, and store its first blocks."""
    tensors = [torch.full((2 * NUM_BLOCKS, 4, 8), layer, dtype=torch.bfloat16) for layer in range(1, 1 + NUM_LAYERS)]
    for tensor in tensors:
        fake.keep(tensor.data_ptr(), tensor.nbytes, 3, tensor)
    async with TieredKV([CPU_TIER], model=MODEL, layout=DEEP, device=GPU, emit=Recorder()) as kv:
        kv.register_kv_caches(tensors)
        await asyncio.to_thread(locked, kv)
        await kv.store(DEEP_KEYS, GPULoadStoreSpec(range(NUM_BLOCKS)))
        for tensor in tensors:
            tensor[NUM_BLOCKS:] = 0
        try:
            yield kv, tensors
        finally:
            fake.release()
        await until_idle(kv)


DEEP_KEYS = hash_blocks(range(4 * NUM_BLOCKS), block_size=4)
DEEP_INTO = GPULoadStoreSpec(range(NUM_BLOCKS, 2 * NUM_BLOCKS))


async def test_the_layers_of_a_load_are_enqueued_in_several_turns(fake: FakeDriver) -> None:
    """No turn of the loop enqueues more than so many, and once a load is admitted a stream can wait for all of them."""
    async with deep_cache(fake) as (kv, tensors):
        fake.held = True
        handle = kv.start_load(DEEP_KEYS, DEEP_INTO, layerwise=True)
        in_turns, before = list[int](), fake.num_enqueued
        while not handle._load.is_admitted:  # noqa: SLF001 - asked between turns; admitted() would be one more task
            await asyncio.sleep(0)
            in_turns.append(fake.num_enqueued - before)
            before = fake.num_enqueued
        assert max(in_turns) <= sum(in_turns) * LAYERS_A_TURN / NUM_LAYERS + 4  # and what comes before the first layer
        stream, seen = torch.cuda.Stream(GPU), list[float]()  # type: ignore[no-untyped-call]  # of torch
        handle.wait_layer(NUM_LAYERS - 1, stream)
        fake.enqueue(stream.queue, lambda: seen.append(tensors[-1][NUM_BLOCKS:].min().item()))  # type: ignore[attr-defined]  # the fake's
        fake.release()
        stream.synchronize()
        assert seen == [NUM_LAYERS]
        assert (await handle).num_blocks == NUM_BLOCKS
        assert not fake.blocked


async def test_the_layers_of_a_load_send_their_ids_once(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver) -> None:
    """All are of the same pages and slots; and where the fragments are, the GPU knows since the binding."""
    only("by kernel", monkeypatch)
    async with deep_cache(fake) as (kv, tensors):
        before = len(fake.registered)  # each upload is out of page-locked memory of its own
        assert (await kv.start_load(DEEP_KEYS, DEEP_INTO, layerwise=True)).num_blocks == NUM_BLOCKS
        assert len(fake.registered) == before + 1
        assert [tensor[NUM_BLOCKS:].min().item() for tensor in tensors] == list(range(1, 1 + NUM_LAYERS))
        elsewhere = GPULoadStoreSpec(range(2 * NUM_BLOCKS - 1, NUM_BLOCKS - 1, -1))
        assert (await kv.start_load(DEEP_KEYS, elsewhere, layerwise=True)).num_blocks == NUM_BLOCKS
        assert len(fake.registered) == before + 2


@pytest.mark.parametrize("below", [[], ["nvme"]])
async def test_a_layer_of_a_store_is_one_launch(
    monkeypatch: pytest.MonkeyPatch, fake: FakeDriver, tmp_path: Path, below: list[str]
) -> None:
    """However many windows its blocks are for the tiers below: they cross the bus together."""
    only("by kernel", monkeypatch)
    engine = engine_on(fake)
    tiers = [CPU_TIER, *({"medium": name, "path": tmp_path, "capacity": "1MiB"} for name in below)]
    async with opened(engine, *tiers) as kv:
        await asyncio.to_thread(locked, kv)
        handle = kv.start_store(KEYS, engine.compute(KEYS), layerwise=True)
        launched = list[int]()
        for layer in range(2):
            before = kernels._copy.num_launched  # noqa: SLF001 - the fake's
            handle.store_layer(layer)
            launched.append(kernels._copy.num_launched - before)  # noqa: SLF001 - the fake's
        assert launched == [1, 1]
        assert (await handle).num_stored == len(KEYS)
        engine.poison()
        assert (await kv.load(KEYS, INTO)).num_blocks == len(KEYS)
        assert engine.read(INTO) == contents(KEYS)


async def test_a_load_may_be_cancelled_between_its_layers(fake: FakeDriver) -> None:
    """Then 0 blocks are in place, the rest is never enqueued, and nothing is held."""
    async with deep_cache(fake) as (kv, tensors):
        fake.held = True
        handle = kv.start_load(DEEP_KEYS, DEEP_INTO, layerwise=True)
        before = fake.num_enqueued
        await until(lambda: fake.num_enqueued > before)
        handle.cancel()
        fake.release()
        assert (await handle).num_blocks == 0
        await until_idle(kv)
        fake.run()
        assert not tensors[-1][NUM_BLOCKS:].any()


def test_many_blocks_are_fewer_layers_a_turn() -> None:
    """What a turn costs depends on both."""
    assert [layers_a_turn(n) for n in (1, 1024, 1 << 20)] == [LAYERS_A_TURN, 8, 1]


@pytest.mark.parametrize("device", ["cpu", GPU])
async def test_a_cache_opened_under_inference_mode_works_outside_of_it(fake: FakeDriver, device: str) -> None:
    """Engines run under it, some of their threads do not: none of our tensors may be for one side alone."""
    engine = Engine() if device == "cpu" else engine_on(fake)
    with torch.inference_mode():
        cache = TieredKV(
            [CPU_TIER] if device == "cpu" else [GPU_TIER, CPU_TIER], model=MODEL, layout=small_layout(), device=device
        )
        kv = await cache.__aenter__()
        kv.register_kv_caches(engine.caches)
    await goes_round(kv, engine)
    with torch.inference_mode():
        await goes_round(kv, engine)
    await kv.aclose()


def test_no_tensor_of_ours_is_for_inference_mode_alone(fake: FakeDriver) -> None:
    """Nowhere else could it be written to: neither rows nor a pool, nor the engine's pages as we see them."""
    device = CUDADevice(GPU)
    with torch.inference_mode():
        group = small_layout().groups[0]
        caches = PagedCaches.bind(engine_on(fake).caches, group, device=device)
        ours = [HostSlab(2, 4096, 4096).rows, device.empty_pool(2, 4096)]
        ours += [fragment.pages for part in (caches, caches.of_layers(slice(1))) for fragment in part.fragments]
    assert not any(tensor.is_inference() for tensor in ours)
    assert device.close(60)


def _recorded_before_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def enqueue(self: Any, item: Any) -> None:  # noqa: ANN401 - private
        item.event = self._device.new_event()
        item.event.record(self._stream)
        with self._device.on(self._stream), self._staging.used():
            item.error = attempt(item.copy)

    monkeypatch.setattr(gpu.AcceleratorStream, "_enqueue", enqueue)


def _claimed_to_be_16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "alignment_of", lambda *_: 16)


def _never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Staging, "wait", lambda *_: None)


@pytest.mark.parametrize("plant", [None, _recorded_before_its_copy, _claimed_to_be_16, _never_waits])
async def test_mistakes_that_only_a_gpu_would_show_are_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None] | None
) -> None:
    """An event before its copy, 8 bytes called 16, a wait left out: planted, each fails what passes without."""
    only("staging", monkeypatch)
    if plant is not None:
        plant(monkeypatch)
    errors = []
    with fake_cuda() as fake:
        try:
            await _store_what_is_computed(fake)
        except (AssertionError, RuntimeError) as error:
            errors.append(error)
    assert bool(errors) == (plant is not None)


async def _store_what_is_computed(fake: FakeDriver) -> None:
    engine = engine_on(fake, shift_bytes=8)
    async with opened(engine) as kv:
        await asyncio.to_thread(locked, kv)
        fake.held = True
        computing, begun = torch.cuda.Stream(GPU), Marker()  # type: ignore[no-untyped-call]  # of torch
        fake.enqueue(computing.queue, lambda: engine.compute(KEYS), after=begun)  # type: ignore[attr-defined]  # the fake's
        handle = kv.start_store(KEYS, GPULoadStoreSpec(range(len(KEYS))), after=computing.record_event())
        await asyncio.sleep(0)
        fake.run()  # all that does not wait for it
        begun.fired = True
        fake.release()
        await handle
        engine.poison()
        assert (await kv.load(KEYS, INTO)).num_blocks == len(KEYS)
        assert engine.read(INTO) == contents(KEYS)


@pytest.mark.parametrize("way", ["staging", "by kernel"])
@pytest.mark.parametrize("direction", ["load", "store"])
async def test_a_large_plan_blocks_no_worker(
    monkeypatch: pytest.MonkeyPatch, fake: FakeDriver, way: str, direction: str
) -> None:
    """An engine's model runner starts it and goes on, though its copies are more than a stream's queue holds."""
    only(way, monkeypatch)
    monkeypatch.setattr(staging, "PIECE_BYTES", 4 * PLANNED.stride_bytes)  # as with blocks of 2 MiB
    monkeypatch.setattr(worker_module, "_WINDOW_BYTES", 8 * PLANNED.stride_bytes)
    n = 1024
    tensors = [torch.zeros(n, 4, 512, dtype=torch.uint8) for _ in range(2)]
    for tensor in tensors:
        fake.keep(tensor.data_ptr(), tensor.nbytes, 3, tensor)
        tensor[:] = torch.arange(n)[:, None, None]
    expected = [tensor.clone() for tensor in tensors]
    keys, pages = hash_blocks(range(4 * n), block_size=4), GPULoadStoreSpec(torch.randperm(n).tolist())
    tiers = [{"medium": "cpu", "capacity": n * PLANNED.stride_bytes}]
    async with TieredKV(tiers, model=MODEL, layout=KVLayout((PLANNED,)), device=GPU, emit=Recorder()) as kv:
        planner = kv.planner()
        planner.register_worker()
        device = CUDADevice(GPU)
        with Worker(planner.slabs(), layout=KVLayout((PLANNED,)), device=device) as worker:
            worker.register_kv_caches(tensors, axes="BND")
            for locking in device._page_lockings:  # noqa: SLF001 - what the wait is for
                assert await asyncio.to_thread(locking.wait, 60) is PageLockState.LOCKED
            for each in ("store", "load"):
                job = planner.plan_store(keys, pages) if each == "store" else planner.plan_load(keys, pages)
                plan = await job.planned()
                fake.run()
                fake.blocked.clear()
                fake.held = each == direction
                future = worker.start(plan)
                fake.release()
                outcomes = await asyncio.to_thread(future.result, 60)
                assert (outcomes.num_moved, outcomes.error) == (n, "")
                planner.complete(outcomes)
                await job.ended()
                assert not fake.blocked
                if each == "store":
                    for tensor in tensors:
                        tensor.zero_()
            assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))
        assert device.close(60)


async def test_a_worker_whose_gpu_is_lost_answers_its_plan(fake: FakeDriver) -> None:
    """With the error, and 0 blocks: the planner has its slots back, also if a stream was to wait for the copy."""
    engine, device = engine_on(fake), CUDADevice(GPU)
    async with TieredKV([CPU_TIER], model=MODEL, layout=small_layout(), device="cpu", emit=Recorder()) as kv:
        planner = kv.planner()
        planner.register_worker()
        with capture_logs(), Worker(planner.slabs(), layout=small_layout(), device=device) as worker:
            worker.register_kv_caches(engine.caches)
            job = planner.plan_store(KEYS, engine.compute(KEYS))
            plan, stream = await job.planned(), torch.cuda.Stream(GPU)  # type: ignore[no-untyped-call]  # of torch
            fake.run()
            fake.failure = 700
            outcomes = await asyncio.to_thread(worker.start(plan, ahead_of=stream).result, 60)
            assert (outcomes.num_moved, outcomes.error) == (0, "RuntimeError: CUDA error: 700")
            planner.complete(outcomes)
            await job.ended()
            assert device.close(60)
        await until_idle(kv)


PLANNED = KVGroup(2, 1, 512, "uint8", 4, "MLA")
