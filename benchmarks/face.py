"""What calls of the cache cost: microseconds a call, an awaited load over a bare copy, loads beside a dead tier.

Blocks are 2 MiB, as 32 fragments of 64 KiB. The calls are timed until they return, on the event loop (``start_*``) and
in a thread (``submit_*``, ``lookup_nowait``); what they start is awaited outside. The awaited loads are of blocks in
the CPU tier, in turns with a bare loop of memmove over as many fragments whose addresses are known. At last a third
tier, behind CPU and NVMe, stops answering for good: loads of what the others have are timed before, and while requests
that want the dead tier go on. Small blocks are last, for what a call costs whatever it moves. Prints tables, then a
line of JSON.

    python benchmarks/face.py [--rounds 50] [--path DIR]
"""

import argparse
import asyncio
import ctypes
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import structlog
import torch
from rich.console import Console
from rich.table import Table

import _face_small
from tiered_kv import (
    Backend,
    Block,
    BlockKey,
    BlockKeys,
    CacheLimits,
    GPULoadStoreSpec,
    KVLayout,
    ModelIdentity,
    Outcome,
    StorageTierSettings,
    TieredKV,
    hash_blocks,
)

NUM_LAYERS, NUM_PAGES = 32, 512
BLOCK_BYTES = 2 << 20
SIZES = (1, 16, 256)
Times = dict[str, list[float]]
T = TypeVar("T")


class DyingBackend(Backend):
    """A shared tier that knows no block, and from some moment on answers nothing any more."""

    Settings = StorageTierSettings

    def __init__(self) -> None:
        self.settings = StorageTierSettings(medium="dying", name="dying", timeout_s=0.25)
        self.is_dead = False
        self._never = asyncio.Event()

    async def _answer(self, outcomes: list[Outcome]) -> list[Outcome]:
        if self.is_dead:
            await self._never.wait()
        return outcomes

    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Find none."""
        return await self._answer([Outcome.MISS] * len(keys))

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Read none."""
        return await self._answer([Outcome.MISS] * len(into))

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Keep none."""
        return await self._answer([Outcome.REFUSED] * len(blocks))

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Nothing is there."""
        await self._answer([])


class Engine:
    """A paged cache of which one half is stored from and the other loaded into, and as much memory to copy it from."""

    def __init__(self) -> None:
        shape = (NUM_PAGES, 2, 16, 8, 128)
        self.caches = [torch.ones(shape, dtype=torch.bfloat16) for _ in range(NUM_LAYERS)]
        self.slots = torch.ones(NUM_PAGES // 2, BLOCK_BYTES, dtype=torch.uint8)
        self.rng = np.random.default_rng(0)

    def pages(self, n: int) -> GPULoadStoreSpec:
        """Draw pages to load into."""
        return GPULoadStoreSpec(NUM_PAGES // 2 + self.rng.permutation(NUM_PAGES // 2)[:n])

    def copy_bare(self, n: int) -> Callable[[], None]:
        """Return a loop of memmove that fills ``n`` pages, fragment by fragment, as a load does."""
        size, memmove = BLOCK_BYTES // NUM_LAYERS, ctypes.memmove
        blocks = self.rng.permutation(NUM_PAGES // 2)[:n].tolist()
        pairs = list(zip(self.pages(n).ids.tolist(), blocks, strict=True))
        places = [
            (layer.data_ptr() + page * size, self.slots.data_ptr() + block * BLOCK_BYTES + number * size)
            for number, layer in enumerate(self.caches)
            for page, block in pairs
        ]

        def copy() -> None:
            for target, source in places:
                memmove(target, source, size)

        return copy


def main() -> None:
    """Measure, print the tables and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="of each measurement (default: 50)")
    parser.add_argument("--path", type=Path, help="a folder on the disk to measure (default: a temporary one)")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        figures = asyncio.run(measure(Engine(), Path(folder), options.rounds))
    print(json.dumps(figures))


async def measure(engine: Engine, folder: Path, rounds: int) -> dict[str, float]:
    """Print each table, and return what the line of JSON says."""
    console, figures = Console(), dict[str, float]()
    async with open_cache(engine, {"medium": "cpu", "capacity": NUM_PAGES * BLOCK_BYTES}) as kv:
        keys = await store(kv, max(SIZES))
        table = Table("call, us (median)", *(f"{n} blocks" for n in SIZES))
        calls = {n: await time_calls(kv, engine, keys[:n], rounds) for n in SIZES}
        for call in calls[1]:
            table.add_row(call, *(f"{median(calls[n][call]) * 1e6:.0f}" for n in SIZES))
            figures |= {f"{call}_{n}_us": round(median(calls[n][call]) * 1e6, 1) for n in SIZES}
        console.print(table)
        table = Table("await load, CPU tier", "ours us", "bare us", "ratio bare / ours")
        for n in SIZES:
            ours, bare = await time_loads(kv, engine, keys[:n], rounds)
            ratio = median(b / o for o, b in zip(ours, bare, strict=True))
            table.add_row(f"{n} blocks", f"{median(ours) * 1e6:.0f}", f"{median(bare) * 1e6:.0f}", f"{ratio:.2f}")
            figures[f"load_{n}_over_memcpy"] = round(ratio, 3)
        console.print(table)
    table = Table("load of 16 blocks, ms", "median before", "beside a dead tier", "worst before", "beside a dead tier")
    before, beside = await time_beside_a_dead_tier(engine, folder, rounds)
    for tier in before:
        medians, worst = (f(before[tier]) for f in (median, max)), (f(beside[tier]) for f in (median, max))
        shown = [f"{seconds * 1e3:.1f}" for pair in zip(medians, worst, strict=True) for seconds in pair]
        table.add_row(tier, *shown)
        figures[f"{tier}_beside_dead_tier"] = round(median(beside[tier]) / median(before[tier]), 3)
    console.print(table)
    small = await _face_small.measure(rounds=30 * rounds)
    table = Table("blocks of 32 KiB, awaited", "us, or times an empty task")
    for name, figure in small.items():
        table.add_row(name, f"{figure:g}")
    console.print(table)
    return figures | small


@asynccontextmanager
async def open_cache(engine: Engine, *tiers: dict[str, Any] | Backend) -> AsyncIterator[TieredKV]:
    """Yield a cache for the engine whose memory is there."""
    layout = KVLayout.from_tensors(engine.caches, block_size=16)
    limits = CacheLimits(promote=False, close_timeout_s=1.0)
    cache = TieredKV(tiers, model=ModelIdentity("bench", weights="none"), layout=layout, limits=limits, device="cpu")
    async with cache as kv:
        kv.register_kv_caches(engine.caches)
        await asyncio.sleep(2.0)  # until the slab has its pages
        yield kv


async def store(kv: TieredKV, n: int, *, salt: str = "") -> BlockKeys:
    """Store a prompt from the first pages; return its keys when all tiers have it."""
    keys = hash_blocks(range(n * 16), block_size=16, salt=salt)
    await kv.store(keys, GPULoadStoreSpec(range(n)))
    await kv.flush()
    return keys


async def time_calls(kv: TieredKV, engine: Engine, keys: BlockKeys, rounds: int) -> Times:
    """Return seconds until each call has returned, by call."""
    times: Times = {}
    source, into = GPULoadStoreSpec(range(len(keys))), engine.pages(len(keys))

    def timed(call: Callable[..., T], *arguments: object) -> T:
        started = time.perf_counter()
        returned = call(*arguments)
        times.setdefault(call.__name__, []).append(time.perf_counter() - started)
        return returned

    def in_thread() -> None:
        for _ in range(rounds):
            timed(kv.submit_store, keys, source).wait()
            timed(kv.submit_load, keys, into).wait()
            timed(kv.lookup_nowait, keys)

    for _ in range(rounds):
        await timed(kv.start_store, keys, source)
        await timed(kv.start_load, keys, into)
    await asyncio.to_thread(in_thread)
    return times


async def time_loads(kv: TieredKV, engine: Engine, keys: BlockKeys, rounds: int) -> tuple[list[float], list[float]]:
    """Return seconds of awaited loads and of bare copies, by turns, as the machine's speed drifts."""
    ours: list[float] = []
    bare: list[float] = []
    for _ in range(rounds):
        into, copy = engine.pages(len(keys)), engine.copy_bare(len(keys))
        started = time.perf_counter()
        loaded = await kv.load(keys, into)
        middle = time.perf_counter()
        copy()
        bare.append(time.perf_counter() - middle)
        ours.append(middle - started)
        assert loaded.num_blocks == len(keys), loaded  # noqa: S101 - a miss would be fast
    return ours, bare


async def time_beside_a_dead_tier(engine: Engine, folder: Path, rounds: int) -> tuple[Times, Times]:
    """Return seconds of loads by the tier they come from, before another tier dies and afterwards."""
    dying = DyingBackend()
    nvme = {"medium": "nvme", "path": str(folder), "capacity": "512MiB"}
    async with open_cache(engine, {"medium": "cpu", "capacity": 64 * BLOCK_BYTES}, nvme, dying) as kv:
        prompts = {"cpu": await store(kv, 16, salt="a"), "nvme": await store(kv, 16, salt="b")}
        await kv.evict(prompts["nvme"], tier="cpu")

        async def load_all() -> Times:
            times: Times = {tier: [] for tier in prompts}
            for _ in range(rounds):
                for tier, keys in prompts.items():
                    started = time.perf_counter()
                    loaded = await kv.load(keys, engine.pages(16))
                    times[tier].append(time.perf_counter() - started)
                    assert loaded.by_tier == {tier: 16}, loaded  # noqa: S101 - else another tier was measured
            return times

        async def want_the_dead_tier() -> None:
            for number in range(1 << 30):
                keys = hash_blocks(range(16), block_size=16, salt=f"absent {number}")
                await kv.load(keys, engine.pages(1), deadline_s=1.0)
                await kv.store(keys, GPULoadStoreSpec([0]))
                await kv.evict(keys, tier="cpu")
                await asyncio.sleep(0.02)  # else the copies of these stores are what is measured

        beside = asyncio.create_task(want_the_dead_tier())  # before as well: only the death is to make a difference
        before = await load_all()
        dying.is_dead = True
        afterwards = await load_all()
        beside.cancel()
        await asyncio.wait({beside})
        return before, afterwards


if __name__ == "__main__":
    main()
