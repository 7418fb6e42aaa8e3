"""How long the event loop stands still while the cache works at full speed, beside threads that do the same work bare.

A ticker on the loop sleeps 1 ms and notes how late it wakes. Beside it run, in turn: the cache (stores and loads of
2 MiB blocks over a CPU tier and NVMe, as fast as they go), and a bare load of as many threads that copy the same
fragments with memmove and read and write 2 MiB with O_DIRECT. The ratios say what the cache adds to the loop.

    python benchmarks/event_loop.py [--seconds 4] [--rounds 3] [--path DIR]
"""

import argparse
import asyncio
import ctypes
import itertools
import json
import mmap
import os
import statistics
import tempfile
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path

import structlog
import torch
from rich.console import Console
from rich.table import Table

from tiered_kv import BlockKeys, GPULoadStoreSpec, KVLayout, ModelIdentity, TieredKV, hash_blocks

NUM_LAYERS, NUM_BLOCKS = 32, 128
TICK_S = 1e-3


def make_caches() -> dict[str, torch.Tensor]:
    """Llama-3-8B's KV of 16-token blocks: 2 MiB each, as 32 fragments of 64 KiB."""
    return {f"layer.{i}": torch.ones(2 * NUM_BLOCKS, 2, 16, 8, 128, dtype=torch.bfloat16) for i in range(NUM_LAYERS)}


async def lateness_beside(
    work: Callable[[asyncio.Event], Coroutine[None, None, int]], seconds: float
) -> tuple[list[float], float]:
    """Run ``work`` until told to stop; return the ticker's latenesses in ms and the GB/s that ``work`` moved."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    task = asyncio.create_task(work(stop))
    await asyncio.sleep(0.2)  # warm: threads started, first windows under way
    late, started = [], loop.time()
    while (now := loop.time()) < started + seconds:
        await asyncio.sleep(TICK_S)
        late.append((loop.time() - now - TICK_S) * 1e3)
    stop.set()
    moved = await task
    return late, moved / (loop.time() - started + 0.2) / 1e9


async def cache_at_work(kv: TieredKV, payload_bytes: int, prompts: list[BlockKeys], stop: asyncio.Event) -> int:
    """Two engines at once: one stores prompts, more than the cache holds; one loads what is there, some from NVMe."""
    done: list[int] = [0]
    fresh = itertools.count()
    ids = list(range(NUM_BLOCKS))

    async def store() -> None:
        while not stop.is_set():
            stored = await kv.store(prompts[next(fresh) % len(prompts)], GPULoadStoreSpec(ids))
            done[0] += stored.num_stored * payload_bytes

    async def load() -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            loaded = await kv.load(prompts[number % 8], GPULoadStoreSpec([NUM_BLOCKS + i for i in ids]))
            done[0] += loaded.num_blocks * payload_bytes
            await asyncio.sleep(0)  # a miss awaits nothing

    await asyncio.gather(store(), load())
    return done[0]


class BareThreads:
    """Four threads without a cache: two copy fragments, one writes and one reads 2 MiB with direct I/O."""

    def __init__(self, caches: dict[str, torch.Tensor], path: Path) -> None:
        self._fragments = [tensor.data_ptr() for tensor in caches.values()]
        self._fragment_bytes = 64 * 1024
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o600)
        self._host = [torch.ones(NUM_BLOCKS, 2 << 18, dtype=torch.int64) for _ in range(2)]
        self._buffers = [mmap.mmap(-1, 2 << 20) for _ in range(2)]
        for slot in range(NUM_BLOCKS):
            os.pwritev(self._fd, [self._buffers[0]], slot * (2 << 20))

    async def run(self, stop: asyncio.Event) -> int:
        """Move until told to stop; return the bytes."""
        ended = threading.Event()
        moved = [0, 0, 0, 0]

        def copy(which: int) -> None:
            host, size = self._host[which].data_ptr(), self._fragment_bytes
            while not ended.is_set():
                for block in range(NUM_BLOCKS):
                    for layer, base in enumerate(self._fragments):
                        engine = base + (which * NUM_BLOCKS + block) * size
                        slot = host + block * (2 << 20) + layer * size
                        ctypes.memmove(*((slot, engine) if which == 0 else (engine, slot)), size)
                    moved[which] += 2 << 20

        def disk(which: int) -> None:
            call = (os.pwritev, os.preadv)[which]
            for slot in itertools.cycle(range(NUM_BLOCKS)):
                if ended.is_set():
                    return
                moved[2 + which] += call(self._fd, [self._buffers[which]], slot * (2 << 20))

        threads = [threading.Thread(target=each, args=(which,)) for each in (copy, disk) for which in range(2)]
        for thread in threads:
            thread.start()
        await stop.wait()
        ended.set()
        for thread in threads:
            thread.join()
        return sum(moved)


async def measure(seconds: float, rounds: int, folder: Path) -> dict[str, list[tuple[float, float, float]]]:
    """Interleave the two; return p99.9 and maximum in ms and GB/s of each round."""
    caches = make_caches()
    layout = KVLayout.from_tensors(caches, block_size=16)
    tiers = [
        {"medium": "cpu", "capacity": 4 * NUM_BLOCKS * layout.payload_bytes},
        {"medium": "nvme", "path": str(folder / "kv"), "capacity": 16 * NUM_BLOCKS * layout.payload_bytes},
    ]
    tokens = NUM_BLOCKS * 16
    prompts = [hash_blocks(range(n * tokens, (n + 1) * tokens), block_size=16) for n in range(32)]
    bare = BareThreads(caches, folder / "bare")
    figures: dict[str, list[tuple[float, float, float]]] = {"tiered_kv": [], "bare threads": []}
    async with TieredKV(tiers, model=ModelIdentity("bench", weights="none"), layout=layout) as kv:
        kv.register_kv_caches(caches)
        works = {
            "tiered_kv": lambda stop: cache_at_work(kv, layout.payload_bytes, prompts, stop),
            "bare threads": bare.run,
        }
        for _ in range(rounds):
            for name, work in works.items():
                late, rate = await lateness_beside(work, seconds)
                late.sort()
                figures[name].append((late[int(len(late) * 0.999)], late[-1], rate))
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
