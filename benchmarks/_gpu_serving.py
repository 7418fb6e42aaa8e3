"""A whole cache on a GPU: speed of its tiers, what the loop feels of it, captures of CUDA graphs beside it, a soak."""

import asyncio
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from _gpu_bus import coroutine_latency, engine_tensors, recorded
from _gpu_copies import MODELS, SMALL
from _gpu_report import Report, Run
from tiered_kv import CacheLimits, GPULoadStoreSpec, KVGroup, KVLayout, ModelIdentity, TieredKV, hash_blocks
from tiered_kv.memory import CUDADevice, Device, HostSlab, PageLockState
from tiered_kv.values.events import Event, HostMemoryReady

CHAINS: Final = ("cpu", "gpu cpu", "nvme", "cpu nvme")
_LIMITS: Final = CacheLimits(load_timeout_s=120, store_timeout_s=120)
"""A slow disk is to make small figures, not to drop blocks."""
_SEQUENCES: Final = 96
"""Of the soak: four times what one of its tiers holds."""
_LEAST: Final = 20
"""Sequences that each engine of it serves, however slow the machine is."""


@asynccontextmanager
async def opened(
    run: Run, group: KVGroup, tensors: list[Tensor], axes: str, chain: str, tier_bytes: int
) -> AsyncIterator[TieredKV]:
    """Open a cache of so large tiers for an engine, ready: its host memory is page-locked."""
    ready = threading.Event()

    def emit(event: Event) -> None:
        if isinstance(event, HostMemoryReady):
            ready.set()

    with tempfile.TemporaryDirectory(dir=run.path) as folder:
        tiers: list[dict[str, Any]] = [{"medium": name, "capacity": tier_bytes} for name in chain.split()]
        for tier in tiers:
            if tier["medium"] == "nvme":
                tier |= {"path": folder, "capacity": max(tier_bytes, 1 << 24)}
        where = run.device.torch_device
        model, layout = ModelIdentity("bench", weights="none"), KVLayout((group,))
        async with TieredKV(tiers, model=model, layout=layout, limits=_LIMITS, device=where, emit=emit) as kv:
            kv.register_kv_caches(tensors, axes=axes)
            await asyncio.to_thread(ready.wait, 120)
            yield kv


def cache(run: Run) -> None:
    """Measure stores and loads by the facade, what a large load costs the loop, page-locking, and a wake-up."""
    report, (about, group) = run.report, next(iter((SMALL if run.is_small else MODELS).items()))
    num_blocks = 8 if run.is_small else 512
    for chain in CHAINS:
        with report.catching(chain):
            asyncio.run(_there_and_back(run, chain, group, num_blocks))
    with report.catching("large load"):
        asyncio.run(_held_by_a_load(run, f"large load, {about}", group, 16 if run.is_small else 1024))
    with report.catching("page-locking"):
        _page_locking(run, 1 << 24 if run.is_small else 8 << 30)
    with report.catching("event to coroutine"):
        stream = run.device.stream("d2h")
        latency_us, cpu_us = asyncio.run(coroutine_latency(stream, 20 if run.is_small else 2000))
        report.note("event to coroutine", "latency_us", latency_us)
        report.note("event to coroutine", "cpu_us", cpu_us)


async def _there_and_back(run: Run, chain: str, group: KVGroup, num_blocks: int) -> None:
    """Note GB/s of awaited stores, until all tiers have them, and of loads; all bytes must come back."""
    with _apart(run.device):
        tensors, axes = engine_tensors(group, num_blocks, run.device.torch_device)
        expected = [tensor.clone() for tensor in tensors]
    num_bytes = num_blocks * group.payload_bytes
    async with opened(run, group, tensors, axes, chain, 2 * num_blocks * group.stride_bytes) as kv:
        keys = hash_blocks(range(num_blocks * group.block_size), block_size=group.block_size)
        spec = GPULoadStoreSpec(torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist())
        start = time.perf_counter()
        stored = await kv.store(keys, spec, after=recorded(tensors[0].device))
        run.report.note(chain, "store_gb_s", num_bytes / (time.perf_counter() - start) / 1e9)
        await stored.settled()
        run.report.note(chain, "store_settled_gb_s", num_bytes / (time.perf_counter() - start) / 1e9)
        for _ in range(3):
            for tensor in tensors:
                tensor.zero_()
            start = time.perf_counter()
            loaded = await kv.load(keys, spec, after=recorded(tensors[0].device))
            run.report.note(chain, "load_gb_s", num_bytes / (time.perf_counter() - start) / 1e9)
            with _apart(run.device):
                same = all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))
            if loaded.num_blocks != num_blocks or not same:
                raise ValueError(f"{loaded.num_blocks} of {num_blocks} blocks came back, the same bytes: {same}")


def _apart(device: Device) -> AbstractContextManager[object]:
    """Have torch, which takes memory and asks for events inside the ``with`` block, spoil no other thread's capture."""
    return device.here() if isinstance(device, CUDADevice) else nullcontext()


async def _held_by_a_load(run: Run, about: str, group: KVGroup, num_blocks: int) -> None:
    """Note the longest turn of the loop while many blocks are loaded out of host memory, at once and by layer."""
    with _apart(run.device):
        tensors, axes = engine_tensors(group, num_blocks, run.device.torch_device)
    async with opened(run, group, tensors, axes, "cpu", num_blocks * group.stride_bytes) as kv:
        keys = hash_blocks(range(num_blocks * group.block_size), block_size=group.block_size)
        spec = GPULoadStoreSpec(range(num_blocks))
        await kv.store(keys, spec, after=recorded(tensors[0].device))
        for name, layerwise in (("at_once", False), ("by_layer", True)):
            turns, ends = list[float](), asyncio.Event()
            ticking = asyncio.create_task(_tick(turns, ends))
            await asyncio.sleep(0)
            start = time.perf_counter()
            handle = kv.start_load(keys, spec, after=recorded(tensors[0].device), layerwise=layerwise)
            started_ms = 1e3 * (time.perf_counter() - start)
            await handle.admitted()
            admitted_ms = 1e3 * (time.perf_counter() - start)
            loaded = await handle
            took_s = time.perf_counter() - start
            ends.set()
            await ticking
            run.report.note(about, f"{name}_loop_held_ms", 1e3 * max(turns))
            run.report.note(about, f"{name}_start_load_ms", started_ms)
            run.report.note(about, f"{name}_admitted_ms", admitted_ms)
            run.report.note(about, f"{name}_gb_s", loaded.num_blocks * group.payload_bytes / took_s / 1e9)


async def _tick(turns: list[float], ends: asyncio.Event) -> None:
    """Take down how long each turn of the loop takes."""
    before = time.perf_counter()
    while not ends.is_set():
        await asyncio.sleep(0)
        now = time.perf_counter()
        turns.append(now - before)
        before = now


def _page_locking(run: Run, num_bytes: int) -> None:
    """Note how fast memory is locked, and for how long that keeps another thread from launching a kernel."""
    where = run.device.torch_device
    slab = HostSlab(num_bytes // 4096, 4096, 4096, name="benchmark")
    word, alone, beside = torch.zeros(1, device=where), list[float](), list[float]()

    def launch(took: list[float]) -> None:
        start = time.perf_counter()
        word.add_(1)
        took.append(time.perf_counter() - start)

    for _ in range(2000):
        launch(alone)
    start = time.perf_counter()
    locking = run.device.page_lock(slab)
    while locking.state is PageLockState.PREPARING:
        launch(beside)
    took_s = time.perf_counter() - start
    run.report.note("page-locking", "gb_s", num_bytes / took_s / 1e9)
    run.report.note("page-locking", "state", locking.state.value)
    run.report.note("page-locking", "longest_launch_alone_ms", 1e3 * max(alone[100:]))
    run.report.note("page-locking", "longest_launch_beside_ms", 1e3 * max(beside, default=0.0))
    run.report.note("page-locking", "time_in_slow_launches", sum(each for each in beside if each > 1e-3) / took_s)
    run.device.page_unlock(locking)
    slab.close()


def graphs(run: Run) -> None:
    """Capture CUDA graphs in the default mode while caches open, bind, store, load and close."""
    if not run.has_gpu:
        run.report.note("graphs", "captured", "no GPU")
        return
    about, group = next(iter((SMALL if run.is_small else MODELS).items()))
    with _capturing(run.report, run.device) as counts:
        for chain in CHAINS[:3]:
            with run.report.catching(f"{chain} beside captures"):
                asyncio.run(_there_and_back(run, chain, group, 64))
        with run.report.catching(f"{about} by layer beside captures"):
            asyncio.run(_held_by_a_load(run, f"beside captures, {about}", group, 64))
    for name, number in counts.items():
        run.report.note("graphs", name, number)


@contextmanager
def _capturing(report: Report, device: Device) -> Iterator[Counter[str]]:
    """Have a thread capture graphs and replay them, and count how many gave what they should."""
    ended, counts = threading.Event(), Counter[str](captured=0, failed=0, wrong=0)

    def capture() -> None:
        with torch.cuda.device(device.torch_device):
            given = torch.eye(512, device=device.torch_device)
            while not ended.is_set():
                graph = torch.cuda.CUDAGraph()
                try:
                    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # of torch
                        out = given
                        for _ in range(50):
                            out = out @ given + given
                    graph.replay()
                    torch.cuda.current_stream().synchronize()
                    counts["captured" if out[0, 0].item() == 51 else "wrong"] += 1
                except RuntimeError as error:
                    counts["failed"] += 1
                    report.errors.setdefault("first failed capture", str(error).splitlines()[0])

    thread = threading.Thread(target=capture)
    thread.start()
    try:
        yield counts
    finally:
        ended.set()
        thread.join(60)


def soak(run: Run) -> None:
    """Have engines store, load and cancel for minutes, through all tiers, beside products; every byte is compared."""
    with run.report.catching("soak"):
        asyncio.run(_soak(run))


async def _soak(run: Run) -> None:
    each, num_engines, num_sequences = (4, 2, 8) if run.is_small else (32, 4, _SEQUENCES)
    group = next(iter((SMALL if run.is_small else MODELS).values()))
    tensors, axes = engine_tensors(group, each * num_engines, run.device.torch_device)
    counts = Counter[str]()
    async with opened(run, group, tensors, axes, "gpu cpu nvme", num_sequences // 4 * each * group.stride_bytes) as kv:
        until = time.perf_counter() + run.soak_s
        engines = [_Engine(kv, group, tensors, range(n * each, (n + 1) * each), counts) for n in range(num_engines)]
        product = asyncio.create_task(_multiply(run, until))
        served = (engine.serve(until, num_sequences, random.Random(n)) for n, engine in enumerate(engines))
        await asyncio.gather(*served)
        await product
        stats = kv.stats()
    for name in ("loaded", "stored", "cancelled", "wrong"):
        run.report.note("soak", name, counts[name])
    run.report.note("soak", "is_device_usable", stats.is_device_usable)
    run.report.note("soak", "missed_because", dict(stats.missed_because))
    run.report.note("soak", "dropped_because", dict(stats.dropped_because))


async def _multiply(run: Run, until: float) -> None:
    size = 64 if run.is_small else 4096
    a = torch.randn(size, size, device=run.device.torch_device)
    while time.perf_counter() < until:
        a = (a @ a).clamp_(-1, 1)
        if (event := recorded(a.device)) is not None:
            await asyncio.to_thread(event.synchronize)
        await asyncio.sleep(0)


class _Engine:
    """One sequence at a time in pages of its own, whose bytes tell which sequence, layer and block they are of."""

    def __init__(self, kv: TieredKV, group: KVGroup, tensors: list[Tensor], pages: range, counts: Counter[str]) -> None:
        self._kv, self._group, self._counts = kv, group, counts
        self._pages = pages
        is_mla = group.order == "MLA"
        axis = 0 if is_mla else 1
        self._views = [
            tensor.view(torch.int16).narrow(axis, pages.start, len(pages)).movedim(axis, 0) for tensor in tensors
        ]

    async def serve(self, until: float, num_sequences: int, chance: random.Random) -> None:
        """Take sequences at random until then: load what there is, compare it, compute and store the rest."""
        done = 0
        while time.perf_counter() < until or done < _LEAST:
            done += 1
            number = chance.randrange(num_sequences)
            n = chance.randint(1, len(self._pages))
            size = self._group.block_size
            keys = hash_blocks(range(number * 10**6, number * 10**6 + n * size), block_size=size)
            self._fill(-1)
            found = self._kv.start_load(
                keys, GPULoadStoreSpec(self._pages[:n]), after=self._recorded(), layerwise=chance.random() < 0.3
            )
            if chance.random() < 0.1:
                await asyncio.sleep(chance.random() * 1e-3)
                found.cancel()
                self._counts["cancelled"] += 1
            loaded = (await found).num_blocks
            self._counts["loaded"] += loaded
            self._counts["wrong"] += self._num_wrong(number, loaded)
            self._fill(number)
            rest = GPULoadStoreSpec(self._pages[loaded:n])
            self._counts["stored"] += (await self._kv.store(keys[loaded:], rest, after=self._recorded())).num_stored
            await asyncio.sleep(0)

    def _recorded(self) -> Any:  # noqa: ANN401 - an event, of whatever kind
        return recorded(self._views[0].device)

    def _fill(self, number: int) -> None:
        for layer, view in enumerate(self._views):
            view.copy_(self._expected(number, layer, view))

    def _num_wrong(self, number: int, num_blocks: int) -> int:
        """Count the blocks whose bytes are not this sequence's."""
        differ = [
            (view[:num_blocks] != self._expected(number, layer, view)[:num_blocks]).flatten(1).any(1)
            for layer, view in enumerate(self._views)
        ]
        return int(torch.stack(differ).any(0).sum())

    def _expected(self, number: int, layer: int, view: Tensor) -> Tensor:
        blocks = torch.arange(view.shape[0], device=view.device, dtype=torch.int32)
        words = torch.arange(view[0].numel(), device=view.device, dtype=torch.int32)
        found = blocks[:, None] * 1031 + words + (number * 7919 + layer * 127)
        return found.to(torch.int16).view(view.shape)
