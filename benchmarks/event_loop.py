"""How long the event loop stands still while the cache works at full speed, beside threads that do the same work bare.

A ticker on the loop sleeps 1 ms and notes how late it wakes. Beside it run, in turn: the cache (stores and loads of
2 MiB blocks over a CPU tier and NVMe, as fast as they go), and bare threads, as many as the cache has, that move the
bytes that the cache has just moved, in as much time: they copy the same fragments with memmove, hash 2 MiB, and read
and write 2 MiB with O_DIRECT. The ratios say what the cache adds to the loop.

    python benchmarks/event_loop.py [--seconds 4] [--rounds 3] [--path DIR]
"""

import argparse
import asyncio
import ctypes
import gc
import itertools
import json
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path

import structlog
import torch
import xxhash
from rich.console import Console
from rich.table import Table

from tiered_kv import BlockKeys, GPULoadStoreSpec, KVLayout, ModelIdentity, TieredKV, hash_blocks

NUM_LAYERS, NUM_BLOCKS, BLOCK_BYTES = 32, 128, 2 << 20
NUM_THREADS = {"out": 1, "in": 1, "written": 8, "read": 8, "hashed": 2}
"""Of the bare side, by what they do; the cache has as many."""
TICK_S = 1e-3


def make_caches() -> dict[str, torch.Tensor]:
    """Llama-3-8B's KV of 16-token blocks: 2 MiB each, as 32 fragments of 64 KiB."""
    return {f"layer.{i}": torch.ones(2 * NUM_BLOCKS, 2, 16, 8, 128, dtype=torch.bfloat16) for i in range(NUM_LAYERS)}


async def lateness_beside(
    work: Callable[[asyncio.Event], Coroutine[None, None, Counter[str]]], seconds: float
) -> tuple[list[float], dict[str, float]]:
    """Run ``work`` until told to stop; return the ticker's latenesses in ms, and the bytes moved a second by kind."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    started = loop.time()
    task = asyncio.create_task(work(stop))
    await asyncio.sleep(0.2)  # warm: threads started, first windows under way
    late, until = [], loop.time() + seconds
    while (now := loop.time()) < until:
        await asyncio.sleep(TICK_S)
        late.append((loop.time() - now - TICK_S) * 1e3)
    stop.set()
    moved, took = await task, loop.time() - started
    return late, {kind: num_bytes / took for kind, num_bytes in moved.items()}


async def cache_at_work(kv: TieredKV, prompts: list[BlockKeys], stop: asyncio.Event) -> Counter[str]:
    """Two engines at once: one stores prompts, more than the cache holds; one loads what is there, some from NVMe."""
    fresh = itertools.count()
    ids = list(range(NUM_BLOCKS))
    before, moved = kv.stats()["nvme"], Counter[str]()

    async def store() -> None:
        while not stop.is_set():
            stored = await kv.store(prompts[next(fresh) % len(prompts)], GPULoadStoreSpec(ids))
            moved["out"] += stored.num_stored * BLOCK_BYTES

    async def load() -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            loaded = await kv.load(prompts[number % 8], GPULoadStoreSpec([NUM_BLOCKS + i for i in ids]))
            moved["in"] += loaded.num_blocks * BLOCK_BYTES
            await asyncio.sleep(0)  # a miss awaits nothing

    await asyncio.gather(store(), load())
    after = kv.stats()["nvme"]
    moved["written"] = (after.written - before.written) * BLOCK_BYTES
    moved["read"] = (after.hits - before.hits) * BLOCK_BYTES
    return moved


class BareThreads:
    """Threads without a cache, each of one kind of work, that go no faster than they are told.

    Attributes:
        rates: Bytes a second of each kind, of all its threads together.
    """

    def __init__(self, caches: dict[str, torch.Tensor], path: Path) -> None:
        self.rates: dict[str, float] = {}
        self._fragments = [tensor.data_ptr() for tensor in caches.values()]
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o600)
        self._host = {kind: torch.ones(NUM_BLOCKS, BLOCK_BYTES // 8, dtype=torch.int64) for kind in ("out", "in")}
        for slot in range(NUM_BLOCKS):
            os.pwritev(self._fd, [mmap.mmap(-1, BLOCK_BYTES)], slot * BLOCK_BYTES)

    def _copy(self, kind: str, number: int) -> None:
        host, size = self._host[kind].data_ptr(), BLOCK_BYTES // len(self._fragments)
        block = number % NUM_BLOCKS + (NUM_BLOCKS if kind == "in" else 0)
        for layer, base in enumerate(self._fragments):
            engine, slot = base + block * size, host + number % NUM_BLOCKS * BLOCK_BYTES + layer * size
            ctypes.memmove(*((slot, engine) if kind == "out" else (engine, slot)), size)

    def _work(self, kind: str) -> Callable[[int], object]:
        """Return what a thread does again and again, with the number of the block."""
        if kind in self._host:
            return lambda number: self._copy(kind, number)
        buffer = mmap.mmap(-1, BLOCK_BYTES)
        if kind == "hashed":
            return lambda _: xxhash.xxh3_64_digest(buffer)
        call = os.pwritev if kind == "written" else os.preadv
        return lambda number: call(self._fd, [buffer], number % NUM_BLOCKS * BLOCK_BYTES)

    async def run(self, stop: asyncio.Event) -> Counter[str]:
        """Move until told to stop; return the bytes."""
        rates = self.rates | {"hashed": self.rates["written"] + self.rates["read"]}
        ended, started = threading.Event(), time.monotonic()
        numbers = {kind: itertools.count() for kind in NUM_THREADS}
        moved = Counter[str]()

        def serve(kind: str) -> None:
            work = self._work(kind)
            while not ended.is_set():
                number = next(numbers[kind])
                if (early_s := number * BLOCK_BYTES / (rates[kind] + 1) - (time.monotonic() - started)) > 0:
                    ended.wait(early_s)
                work(number)
                moved[kind] += BLOCK_BYTES

        threads = [threading.Thread(target=serve, args=(kind,)) for kind, n in NUM_THREADS.items() for _ in range(n)]
        for thread in threads:
            thread.start()
        await stop.wait()
        ended.set()
        for thread in threads:
            thread.join()
        del moved["hashed"]
        return moved


async def measure(seconds: float, rounds: int, folder: Path) -> dict[str, list[tuple[float, float, float]]]:
    """Interleave the two; return p99.9 and maximum in ms and GB/s of each round."""
    caches = make_caches()
    layout = KVLayout.from_tensors(caches, block_size=16)
    tiers = [
        {"medium": "cpu", "capacity": 4 * NUM_BLOCKS * BLOCK_BYTES},
        {"medium": "nvme", "path": str(folder / "kv"), "capacity": 16 * NUM_BLOCKS * BLOCK_BYTES},
    ]
    tokens = NUM_BLOCKS * 16
    prompts = [hash_blocks(range(n * tokens, (n + 1) * tokens), block_size=16) for n in range(32)]
    bare = BareThreads(caches, folder / "bare")
    figures: dict[str, list[tuple[float, float, float]]] = {"tiered_kv": [], "bare threads": []}
    async with TieredKV(tiers, model=ModelIdentity("bench", weights="none"), layout=layout) as kv:
        kv.register_kv_caches(caches)
        gc.freeze()  # as a server does once it has started: what lives for good is not walked again
        works = {"tiered_kv": lambda stop: cache_at_work(kv, prompts, stop), "bare threads": bare.run}
        for _ in range(rounds):
            for name, work in works.items():
                late, rates = await lateness_beside(work, seconds)
                if name == "tiered_kv":
                    bare.rates = rates
                late.sort()
                figures[name].append((late[int(len(late) * 0.999)], late[-1], sum(rates.values()) / 1e9))
                await kv.flush()
    return figures


def main() -> None:
    """Measure, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--path", type=Path, default=Path())
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        figures = asyncio.run(measure(options.seconds, options.rounds, Path(folder)))
    table = Table("beside", "p99.9 ms", "longest ms", "moved GB/s", title="lateness of a 1 ms timer on the event loop")
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in figures.items()
    }
    for name, row in medians.items():
        table.add_row(name, *(f"{value:.2f}" for value in row))
    Console().print(table)
    ours, bare = medians["tiered_kv"], medians["bare threads"]
    ratios = {"stall_p999_over_bare": round(ours[0] / bare[0], 2), "stall_max_over_bare": round(ours[1] / bare[1], 2)}
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
