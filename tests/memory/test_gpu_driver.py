"""What only a GPU could show, on a driver of our own: captures, contexts, blocking calls, events, and the end."""

import asyncio
import gc
import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from tests.support.caches import Recorder, inside, until
from tests.support.engine import MODEL, PAYLOAD_BYTES, SMALL_LIMITS, small_layout
from tests.support.fake_cuda import fake_cuda
from tests.support.fake_driver import GLOBAL, RELAXED, FakeDriver, Marker
from tests.support.gpu_engine import (
    CPU_TIER,
    GPU,
    GPU_TIER,
    INTO,
    KEYS,
    capturing,
    engine_on,
    goes_round,
    locked,
    only,
    opened,
)
from tiered_kv import GPULoadStoreSpec, TieredKV
from tiered_kv.memory import CUDADevice, HostSlab, PagedCaches, PageLockState, host, kernels, make_device
from tiered_kv.memory.gpu import MOST_AHEAD
from tiered_kv.memory.lanes import wait_in
from tiered_kv.memory.staging import Staging
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.events import HostMemoryPageable
from tiered_kv.values.layout import KVGroup

pytest.importorskip("triton", reason="Triton: pip install 'tiered-kv[cuda]'")


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    """Four GPUs."""
    with fake_cuda() as fake:
        yield fake


class TestCaptures:
    """Of CUDA graphs, which calls of other threads would spoil."""

    @pytest.mark.parametrize("layerwise", [False, True])
    async def test_nothing_of_ours_spoils_one(self, fake: FakeDriver, layerwise: bool) -> None:  # noqa: FBT001 - pytest passes it by name
        """Not the locking of memory, no event, no allocation, from the opening of a cache to its end."""
        with capturing(fake):
            engine = engine_on(fake)
            async with opened(engine, GPU_TIER, CPU_TIER) as kv:
                await asyncio.to_thread(locked, kv)
                after = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of torch
                after.record(torch.cuda.current_stream())
                await kv.store(KEYS[:3], engine.compute(KEYS[:3]), after=after)
                await goes_round(kv, engine, layerwise=layerwise)
        assert not fake.spoilt

    async def test_nor_one_of_the_callers_own(self, fake: FakeDriver) -> None:
        """The thread that starts transfers may be the one that captures."""
        engine = engine_on(fake)
        async with opened(engine) as kv:
            await asyncio.to_thread(locked, kv)
            after = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of torch
            after.record(torch.cuda.current_stream())
            with fake.capture(GLOBAL):
                handle = kv.start_store(KEYS, engine.compute(KEYS), after=after)
                fake.run()
            assert (await handle).num_stored == len(KEYS)
        assert not fake.spoilt

    def test_a_thread_is_set_apart_once_it_has_a_context(
        self, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A driver may refuse before: then it is asked again, and what the thread had is set back in the end."""
        exchange, refused = fake.cuThreadExchangeStreamCaptureMode, list[int]()

        def strict(mode: Any) -> int:  # noqa: ANN401 - a reference of C
            if not fake.here.is_bound:
                refused.append(201)
                return 201
            return exchange(mode)

        monkeypatch.setattr(fake, "cuThreadExchangeStreamCaptureMode", strict)
        device, modes = CUDADevice("cuda:0"), list[int]()

        def work() -> None:
            modes.append(fake.here.capture_mode)
            for _ in range(2):
                with device.here():
                    modes.append(fake.here.capture_mode)
                modes.append(fake.here.capture_mode)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
        assert device.close(60)
        assert refused
        assert modes == [GLOBAL, RELAXED, GLOBAL, RELAXED, GLOBAL]

    def test_a_refusal_is_no_answer(self, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the driver says that a graph is being captured, the memory is locked later."""
        monkeypatch.setattr(host, "_PAUSE_S", 0.0)
        fake.refusals = [900, 900]
        device, slab = CUDADevice(GPU), HostSlab(4, 4096, 4096)
        assert device.page_lock(slab).wait(60) is PageLockState.LOCKED
        assert device.close(60)

    def test_closing_does_not_wait_for_a_capture(self, fake: FakeDriver) -> None:
        """A slab that was refused until the end was never locked, and is not unlocked."""
        fake.refusals = [900] * 10_000
        device, slab = CUDADevice(GPU), HostSlab(4, 4096, 4096)
        locking = device.page_lock(slab)
        assert device.close(60)
        assert (locking.state, locking.page_locked_bytes, fake.registered) == (PageLockState.PAGEABLE, 0, {})


class TestPageableMemory:
    """Copies of it block whoever enqueues them."""

    @pytest.mark.parametrize(("code", "way"), [(1, "staging"), (712, "directly"), (1, "by kernel")])
    async def test_the_loop_is_not_blocked_by_it(
        self, monkeypatch: pytest.MonkeyPatch, fake: FakeDriver, code: int, way: str
    ) -> None:
        """Where memory is not locked, or not yet, the streams' own threads enqueue what waits for the GPU."""
        only(way, monkeypatch)
        fake.refusals = [code]
        engine = engine_on(fake)
        async with opened(engine) as kv:
            fake.held = True
            handle = kv.start_store(KEYS, engine.compute(KEYS))
            assert not handle.done
            fake.release()
            assert (await handle).num_stored == len(KEYS)
            await goes_round(kv, engine)
        names = {name for name, _ in fake.blocked}
        assert names
        assert all(name.startswith(("tiered_kv-d2h", "tiered_kv-h2d")) for name in names)

    @pytest.mark.parametrize("way", ["staging", "directly", "by kernel"])
    async def test_a_slab_that_is_locked_in_part_serves(
        self, monkeypatch: pytest.MonkeyPatch, fake: FakeDriver, way: str
    ) -> None:
        """The driver may refuse any piece: no kernel and no batch touches what is behind it, and every byte arrives."""
        only(way, monkeypatch)
        monkeypatch.setattr(host, "PIECE_BYTES", 4 * PAYLOAD_BYTES)
        fake.refusals = [0, 2]
        engine = engine_on(fake)
        async with opened(engine) as kv:
            (locking,) = inside(kv).cache.device._page_lockings  # noqa: SLF001 - what the wait is for
            assert await asyncio.to_thread(locking.wait, 60) is PageLockState.PAGEABLE
            assert 0 < locking.page_locked_bytes < locking.num_bytes
            await goes_round(kv, engine)
            await goes_round(kv, engine, layerwise=True)
        assert not fake.failure

    @pytest.mark.parametrize("way", ["staging", "directly"])
    async def test_batches_need_memory_that_has_one_address(
        self, monkeypatch: pytest.MonkeyPatch, fake: FakeDriver, way: str
    ) -> None:
        """As under WSL, memory that was registered may have another address on the GPU: a batch by the host's fails."""
        only(way, monkeypatch)
        fake.attributes[91] = 0
        engine = engine_on(fake)
        async with opened(engine) as kv:
            await asyncio.to_thread(locked, kv)
            await goes_round(kv, engine)
            await goes_round(kv, engine, layerwise=True)
        assert not fake.failure

    def test_a_reason_has_the_number_of_the_error(self, fake: FakeDriver) -> None:
        """Torch has names for none of them."""
        fake.refusals = [2]
        device, slab, said = CUDADevice(GPU), HostSlab(4, 4096, 4096), Recorder()
        locking = device.page_lock(slab, emit=said)
        assert locking.wait(60) is PageLockState.PAGEABLE
        (pageable,) = said.of(HostMemoryPageable)
        assert pageable.reason == "could not page-lock 16384 bytes: CUDA error 2"
        assert device.close(60)

    async def test_what_is_admitted_can_be_waited_for(self, fake: FakeDriver) -> None:
        """A layer-wise load is admitted once its copies are enqueued: the engine's stream has events to wait for."""
        fake.refusals = [1]
        engine = engine_on(fake)
        async with opened(engine) as kv:
            await kv.store(KEYS, engine.compute(KEYS))
            engine.poison()
            fake.held = True
            handle = kv.start_load(KEYS, INTO, layerwise=True)
            admitted = asyncio.create_task(handle.admitted())
            for _ in range(200):
                await asyncio.sleep(0)
            assert not admitted.done()
            fake.release()
            assert await admitted == len(KEYS)
            stream = torch.cuda.Stream(GPU)  # type: ignore[no-untyped-call]  # of torch
            handle.wait_layer(0, stream)
            stream.synchronize()
            assert (await handle).num_blocks == len(KEYS)
        assert not [name for name, _ in fake.blocked if not name.startswith("tiered_kv-")]

    def test_another_stream_can_wait_for_a_late_copy(self, fake: FakeDriver) -> None:
        """Before it is enqueued too: then in the waiting stream's own thread."""
        device, slab = CUDADevice(GPU), HostSlab(4, 4096, 4096)
        fake.refusals = [1]
        assert device.page_lock(slab).wait(60) is PageLockState.PAGEABLE
        first, second = device.stream("first"), device.stream("second")
        begin, order = threading.Event(), list[str]()

        def slow() -> None:
            assert begin.wait(60)
            order.append("first")

        event = first.submit(slow, lambda _: None)
        assert not device.has_happened(event)
        second.wait(event)
        second.submit(lambda: order.append("second"), lambda _: None)
        begin.set()
        assert device.close(60)
        assert order == ["first", "second"]
        assert device.has_happened(event)

    def test_a_late_copy_that_cannot_be_enqueued_holds_up_nobody(
        self, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A device that has just been lost may refuse the stream itself, in the stream's thread: all are told."""
        device, slab = CUDADevice(GPU), HostSlab(4, 4096, 4096)
        fake.refusals = [1]
        assert device.page_lock(slab).wait(60) is PageLockState.PAGEABLE
        first, second = device.stream("first"), device.stream("second")
        lost, ended = RuntimeError("CUDA error: device lost"), list[BaseException | None]()

        def refused(_: Any) -> Any:  # noqa: ANN401 - a stream, and nothing
            raise lost

        monkeypatch.setattr(device, "on", refused)
        second.wait(first.submit(lambda: None, ended.append))
        first.submit(lambda: None, ended.append)
        second.submit(lambda: None, ended.append)
        assert device.close(60)
        assert ended == [lost] * 3
        assert device.error is lost


def test_a_full_queue_blocks_nobody(fake: FakeDriver) -> None:
    """What more operations are ahead of than a queue holds is enqueued by the stream's thread, in its turn."""
    device, ended = CUDADevice(GPU), list[BaseException | None]()
    stream = device.stream("h2d")
    source, target = (torch.zeros(4, dtype=torch.int64, device=GPU) for _ in range(2))
    fake.run()
    fake.held = True

    def copy() -> None:
        for _ in range(50):
            target.copy_(source)
        _staging(stream).num_operations += 50

    for _ in range(100):
        stream.submit(copy, ended.append)
    assert not fake.blocked
    fake.release()
    assert device.close(60)
    assert ended == [None] * 100
    assert not fake.blocked


def test_the_gpu_never_waits_for_what_is_late(fake: FakeDriver) -> None:
    """Of copies that the stream's thread enqueues the next one is there before the one at hand has ended."""
    device, ended = CUDADevice(GPU), queue.SimpleQueue[BaseException | None]()
    stream = device.stream("d2h")
    source, target = (torch.zeros(4, dtype=torch.int64, device=GPU) for _ in range(2))
    fake.run()
    fake.held = True
    ahead = list[int]()

    def copy() -> None:
        if threading.current_thread().name.startswith("tiered_kv"):
            ahead.append(len(_staging(stream).stream.queue.items))
        for _ in range(14):
            target.copy_(source)
        _staging(stream).num_operations += 14

    for _ in range(80):
        stream.submit(copy, ended.put)
    assert not ahead
    fake.release()
    assert [ended.get(timeout=60) for _ in range(80)] == [None] * 80
    assert device.close(60)
    assert len(ahead) > 40
    assert all(0 < each < MOST_AHEAD + 30 for each in ahead)
    assert not fake.blocked


def _staging(stream: Any) -> Staging:  # noqa: ANN401 - of an accelerator
    staging: Staging = stream._staging  # noqa: SLF001 - where copies count what they enqueue
    return staging


class TestDevices:
    """Which GPU is meant, and that no other is touched."""

    async def test_the_current_one_is_that_of_whoever_makes_the_cache(self, fake: FakeDriver) -> None:
        """Not of the thread that opens it."""
        torch.cuda.set_device(2)
        cache = TieredKV([CPU_TIER], model=MODEL, layout=small_layout(), device="cuda")
        torch.cuda.set_device(1)
        async with cache as kv:
            assert inside(kv).cache.device.torch_device == torch.device("cuda", 2)

    @pytest.mark.parametrize("layerwise", [False, True])
    async def test_no_context_is_made_on_another(self, fake: FakeDriver, layerwise: bool) -> None:  # noqa: FBT001 - pytest passes it by name
        """The thread of the loop has never chosen one: it is on GPU 0, which stays untouched, by ours too."""
        engine = engine_on(fake)
        async with opened(engine, GPU_TIER, CPU_TIER) as kv:
            await asyncio.to_thread(locked, kv)
            await goes_round(kv, engine, layerwise=layerwise)
        assert fake.contexts == {3}
        assert torch.cuda.current_device() == 0

    @pytest.mark.parametrize("device", [GPU, torch.device(GPU)])
    async def test_a_torch_device_is_as_good_as_its_name(self, fake: FakeDriver, device: Any) -> None:  # noqa: ANN401 - a name, or torch\'s
        """To the facade, and to `make_device`."""
        engine = engine_on(fake)
        async with opened(engine, device=device) as kv:
            assert inside(kv).cache.device.torch_device == torch.device(GPU)
        made = make_device(device)
        assert made.torch_device == torch.device(GPU)
        assert made.close(60)

    @pytest.mark.parametrize(("is_one_memory", "num_programs"), [(0, 16), (1, 64)])
    def test_a_faster_bus_has_more_in_flight(self, fake: FakeDriver, is_one_memory: int, num_programs: int) -> None:
        """As much as it carries in a round trip: 128 KiB by PCIe, four times that where processor and GPU are one."""
        fake.attributes[100] = is_one_memory
        device, group = CUDADevice(GPU), KVGroup(1, 1, 8192, "uint8", 1, "MLA")
        tensor = torch.zeros(128, 1, 8192, dtype=torch.uint8, device=GPU)
        caches = PagedCaches.bind([tensor], group, device=device)
        rows, ids = torch.zeros(128, 1024, dtype=torch.int64, pin_memory=True), np.arange(128)
        with device.here():
            kernels.gather_blocks(caches, ids[:, None], rows, ids)
        assert kernels._copy.num_programs == num_programs  # noqa: SLF001 - the fake's
        assert device.close(60)


class TestEvents:
    """What is waited for."""

    @pytest.mark.parametrize("kind", ["cuda", "generic"])
    def test_one_that_was_never_recorded_is_refused(self, fake: FakeDriver, kind: str) -> None:
        """It would order nothing, and says that it has happened."""
        device = CUDADevice(GPU)
        event: Any = torch.cuda.Event() if kind == "cuda" else torch.Event(GPU)  # type: ignore[no-untyped-call]  # of torch
        assert event.query()
        with pytest.raises(ConfigurationError, match="never recorded"):
            device.check(event)
        event.record(torch.cuda.Stream(GPU))  # type: ignore[no-untyped-call]  # of torch
        device.check(event)
        assert device.close(60)

    @pytest.mark.parametrize("is_over", [False, True])
    async def test_one_of_a_capture_is_refused(self, fake: FakeDriver, is_over: bool) -> None:  # noqa: FBT001 - pytest passes it by name
        """It stands for no work, and a stream that waits for it is lost to the graph: the device, though, is not."""
        engine = engine_on(fake)
        async with opened(engine) as kv:
            source, stream = engine.compute(KEYS), torch.cuda.Stream(GPU)  # type: ignore[no-untyped-call]  # of torch
            after = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of torch
            with fake.capture(GLOBAL, stream.queue):  # type: ignore[attr-defined]  # the fake's
                after.record(stream)
                if not is_over:
                    with pytest.raises(ConfigurationError, match="recorded in the capture"):
                        kv.start_store(KEYS, source, after=after)
            if is_over:
                with pytest.raises(ConfigurationError, match="recorded in the capture"):
                    kv.start_store(KEYS, source, after=after)
            assert not fake.spoilt
            await goes_round(kv, engine)

    def test_one_that_cannot_be_waited_for_fails_what_comes_after_it(
        self, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Until the next wait, and not the device: that would do all else."""
        device, ended, ran = CUDADevice(GPU), queue.SimpleQueue[BaseException | None](), list[str]()
        stream, good = device.stream("d2h"), torch.cuda.Event()  # type: ignore[no-untyped-call]  # of torch
        bad = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of torch
        for event in (good, bad):
            event.record(torch.cuda.Stream(GPU))  # type: ignore[no-untyped-call]  # of torch
        monkeypatch.setattr(bad, "wait", lambda _: fake.fail(400))
        for event in (bad, good):
            stream.wait(event)
            stream.submit(lambda event=event: ran.append("good" if event is good else "bad"), ended.put)  # type: ignore[misc]  # mypy knows no default of a lambda
        assert [str(ended.get(timeout=60)) for _ in range(2)] == ["CUDA error: 400", "None"]
        assert (ran, device.error) == (["good"], None)
        fake.failure = 700
        stream.wait(good)
        assert device.error is not None
        device.close(60)

    @pytest.mark.parametrize("verb", ["store", "load", "layers", "swap"])
    async def test_none_is_what_the_callers_stream_has_to_do(self, fake: FakeDriver, verb: str) -> None:
        """Whoever gives no event is served as by torch: after what its current stream was given, and no sooner."""
        engine = engine_on(fake)
        limits = SMALL_LIMITS.model_copy(update={"swap_space": 16 * PAYLOAD_BYTES})
        cache = TieredKV([CPU_TIER], model=MODEL, layout=small_layout(), limits=limits, device=GPU, emit=Recorder())
        async with cache as kv:
            kv.register_kv_caches(engine.caches)
            await asyncio.to_thread(locked, kv)
            await kv.store(KEYS[:3], engine.compute(KEYS[:3]))
            fake.run()
            fake.held, begun = True, Marker()
            stream = torch.cuda.Stream(GPU)  # type: ignore[no-untyped-call]  # of torch
            with torch.cuda.device(GPU), torch.cuda.stream(stream):
                fake.enqueue(stream.queue, after=begun)  # type: ignore[attr-defined]  # the fake's
                if verb == "swap":
                    handle: Any = kv.start_swap({}, {1: 1}, {})
                elif verb == "load":
                    handle = kv.start_load(KEYS[:3], GPULoadStoreSpec(range(20, 23)))
                else:
                    handle = kv.start_store(KEYS, engine.compute(KEYS), layerwise=verb == "layers")
                for layer in range(2 if verb == "layers" else 0):
                    handle.store_layer(layer)
            ours = [each for each in fake.queues_of(3) if each is not stream.queue]  # type: ignore[attr-defined]  # the fake's
            await until(lambda: any(each.items for each in ours))
            fake.run()  # all that does not wait for the engine
            assert any(each.items for each in ours)
            begun.fired = True
            fake.release()
            await handle

    async def test_none_in_a_capture_is_refused(self, fake: FakeDriver) -> None:
        """An event of ours would be a part of the graph, and no more happen than one of the caller's."""
        engine = engine_on(fake)
        async with opened(engine) as kv:
            source, stream = engine.compute(KEYS), torch.cuda.Stream(GPU)  # type: ignore[no-untyped-call]  # of torch
            refused = pytest.raises(ConfigurationError, match="captures a CUDA graph")
            with torch.cuda.stream(stream), fake.capture(GLOBAL, stream.queue), refused:  # type: ignore[attr-defined]  # the fake's
                kv.start_store(KEYS, source)
            assert not fake.spoilt
            await goes_round(kv, engine)

    def test_a_generic_stream_is_taken_for_what_it_is(self, fake: FakeDriver) -> None:
        """Older versions of torch read any stream as CUDA's own; by its number it is made one."""
        device = CUDADevice(GPU)
        ended = threading.Event()
        event = device.stream("h2d").submit(lambda: None, lambda _: ended.set())
        generic = torch.Stream(torch.device(GPU))
        wait_in(generic, event)
        wait_in(torch.cuda.Stream(GPU), event)  # type: ignore[no-untyped-call]  # of torch
        assert device.close(60)
        assert ended.is_set()

    def test_a_pool_is_zeros_for_any_stream(self, fake: FakeDriver) -> None:
        """The zeros are there before anybody can use it."""
        device = CUDADevice(GPU)
        pool = device.empty_pool(3, 4096)
        assert pool.device == torch.device(GPU)
        assert not pool.view(-1).tolist().count(0) - pool.numel()
        assert device.close(60)

    def test_copies_have_high_priority_streams(self, fake: FakeDriver) -> None:
        """A short kernel of ours does not stand behind a long one of the engine's."""
        device = CUDADevice(GPU)
        assert _staging(device.stream("h2d")).stream.priority < 0
        assert device.close(60)


class TestTheEnd:
    """Closing."""

    def test_a_thread_that_waits_can_end_with_the_program(self, fake: FakeDriver) -> None:
        """It waits in the driver: torch takes the GIL back where a thread may not end, and aborts the program."""
        device, ended, threads = CUDADevice(GPU), queue.SimpleQueue[BaseException | None](), list[str]()
        stream = device.stream("d2h")
        stream.submit(lambda: threads.append(threading.current_thread().name), ended.put)
        assert ended.get(timeout=60) is None  # the fake's `synchronize` is for threads that the program waits for
        assert threads == ["MainThread"]
        assert [name for name, _ in fake.waits] == ["tiered_kv-d2h"]
        assert device.close(60)

    def test_what_the_driver_answers_is_said(self, fake: FakeDriver) -> None:
        """Of a copy that broke the GPU, whose event will never fire."""
        device, ended = CUDADevice(GPU), queue.SimpleQueue[BaseException | None]()
        stream = device.stream("d2h")
        fake.held = True
        stream.submit(lambda: None, ended.put)
        fake.failure = 700
        fake.release()
        assert "CUDA error 700" in str(ended.get(timeout=60))
        assert "CUDA error 700" in str(device.error)
        assert device.close(60)

    def test_torch_waits_where_the_driver_cannot_be_asked(
        self, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As under ROCm, where torch may have the library under a name of its own."""
        monkeypatch.delattr(FakeDriver, "cuEventSynchronize")
        device, event = CUDADevice(GPU), torch.cuda.Event()  # type: ignore[no-untyped-call]  # of torch
        event.record()
        device.wait_for(event)
        assert event.query()  # type: ignore[no-untyped-call]  # of torch
        assert device.close(60)

    def test_the_last_one_out_unlocks_what_close_gave_up(self, fake: FakeDriver) -> None:
        """Memory stays mapped as long as it is registered, and registered as long as a copy is under way."""
        device, slab = CUDADevice(GPU), HostSlab(4, 4096, 4096)
        assert device.page_lock(slab).wait(60) is PageLockState.LOCKED
        streams = [device.stream("d2h"), device.stream("h2d")]
        fake.held = True
        for stream in streams:
            stream.submit(lambda: None, lambda _: None)
        address = slab.rows.data_ptr()
        slab.close()
        assert not device.close(0.0)
        del slab
        gc.collect()
        assert address in fake.registered
        assert _is_mapped(address)
        fake.release()
        assert all(stream.join(60) for stream in streams)
        assert address not in fake.registered

    async def test_a_cache_whose_gpu_is_lost_closes(self, fake: FakeDriver) -> None:
        """The driver answers every call with the error then, those that unlock memory too: that is said, not raised."""
        engine = engine_on(fake)
        with capture_logs() as logs:
            async with opened(engine) as kv:
                await asyncio.to_thread(locked, kv)
                slab = inside(kv).chains[0].host.slab
                start, stop = slab.rows.data_ptr(), slab.rows.data_ptr() + slab.num_bytes
                await kv.store(KEYS, engine.compute(KEYS))
                fake.failure = 700
                assert (await kv.load(KEYS, INTO)).num_blocks == 0
        assert [each["log_level"] for each in logs if each["event"] == "host_memory.unlock_failed"] == ["warning"]
        assert not host.is_page_locked(start, stop)

    @pytest.mark.parametrize("index", [0, 3])
    async def test_tensors_bound_on_a_lost_gpu_keep_nobody_waiting(self, fake: FakeDriver, index: int) -> None:
        """The thread of a new stream finds that it has no context; what is measured there ends as all copies do."""
        engine = engine_on(fake, index)
        with capture_logs() as logs:
            async with opened(engine, device=f"cuda:{index}") as kv:
                await asyncio.to_thread(locked, kv)
                fake.failure = 700
                kv.register_kv_caches(engine.caches)
                assert [fault.reason for fault in (await kv.load(KEYS, INTO)).faults] == ["device unusable"]
        assert "copies.unmeasured" in [each["event"] for each in logs]

    def test_closing_again_does_no_harm(self, fake: FakeDriver) -> None:
        """Neither after all has ended, nor before."""
        device, slab = CUDADevice(GPU), HostSlab(4, 4096, 4096)
        locking = device.page_lock(slab)
        locking.wait(60)
        device.stream("d2h")
        assert device.close(60)
        assert device.close(60)
        assert not fake.registered


def _is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:  # noqa: PTH123 - a file of the system's
        places = (line.split(maxsplit=1)[0].split("-") for line in maps)
        return any(int(start, 16) <= address < int(stop, 16) for start, stop in places)
