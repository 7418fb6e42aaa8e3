"""What metrics cost a load: the same loads from the CPU tier of caches with metrics and without.

In turns, in one process; beside them a thread scrapes once a second. A third cache, without metrics too, says what the
machine's noise alone makes of such a ratio. Where in memory a cache lies makes a load 2 % faster or slower: so the
three are opened three times, the one with metrics first, second and third, and the middle one of the three ratios
counts. Prints a table, then a line of JSON with the worst row of loads of 64 blocks. Loads of 4 blocks are shown too.
"""

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, fields
from statistics import median

import structlog
import torch
from prometheus_client import CollectorRegistry, generate_latest

from tiered_kv import BlockKeys, GPULoadStoreSpec, KVLayout, ModelIdentity, TieredKV, hash_blocks
from tiered_kv.telemetry import Metrics

NUM_BLOCKS = 64
BLOCK_SIZE = 16
HEAD_DIMS = {"64 KiB": 4, "2 MiB": 128}
"""Of blocks of 32 layers with 8 heads of bf16."""
LOADS = (4, NUM_BLOCKS)


def main() -> None:
    """Measure, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each row (default: 5)")
    seconds = parser.parse_args().seconds
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    worst, noise = dict.fromkeys(LOADS, 0.0), 1.0
    print(f"{'blocks of':>10}{'a load':>8}{'off us':>10}{'on us':>10}{'on/off':>8}{'off/off':>9}")
    for size, head_dim in HEAD_DIMS.items():
        opened = [asyncio.run(measure(head_dim, seconds / 3, place)) for place in range(3)]
        for n in LOADS:
            found = Found(*(median(getattr(each[n], field.name) for each in opened) for field in fields(Found)))
            print(
                f"{size:>10}{n:>8}{found.off_s * 1e6:10.0f}{found.on_s * 1e6:10.0f}{found.ratio:8.3f}{found.noise:9.3f}"
            )
            worst[n] = max(worst[n], found.ratio)
            noise = max(noise, found.noise, 1 / found.noise)
    of_all = {"metrics_over_off": worst[NUM_BLOCKS], "of_4_blocks": worst[4], "noise": noise}
    print(json.dumps({name: round(value, 3) for name, value in of_all.items()}))


@dataclass(frozen=True)
class Found:
    """Of loads of one size: median seconds, the median ratio of neighbours, and that of two caches without metrics."""

    off_s: float
    on_s: float
    ratio: float
    noise: float


async def measure(head_dim: int, seconds: float, place: int) -> dict[int, Found]:
    """Return what was measured, by blocks of a load, of three caches; the one at ``place`` has metrics."""
    kv_caches = [torch.zeros(NUM_BLOCKS, 2, BLOCK_SIZE, 8, head_dim, dtype=torch.bfloat16) for _ in range(32)]
    layout, model = KVLayout.from_tensors(kv_caches, block_size=BLOCK_SIZE), ModelIdentity("bench", weights="none")
    keys, spec = hash_blocks(range(NUM_BLOCKS * BLOCK_SIZE), block_size=BLOCK_SIZE), GPULoadStoreSpec(range(NUM_BLOCKS))
    tier = {"medium": "cpu", "capacity": 2 * NUM_BLOCKS * layout.groups[0].stride_bytes}
    registry = CollectorRegistry()
    async with AsyncExitStack() as stack:
        caches = []
        for number in range(3):
            metrics = Metrics(registry) if number == place else False
            kv = await stack.enter_async_context(
                TieredKV([tier], model=model, layout=layout, metrics=metrics, device="cpu")
            )
            kv.register_kv_caches(kv_caches)
            await kv.store(keys, spec)
            caches.append(kv)
        stack.enter_context(scraping(registry))
        caches.insert(1, caches.pop(place))
        return {n: await compare(caches, keys[:n], spec[:n], seconds) for n in LOADS}


async def compare(caches: Sequence[TieredKV], keys: BlockKeys, spec: GPULoadStoreSpec, seconds: float) -> Found:
    """Load the same from each cache in turns, each turn begun by the next of them; the second has metrics."""
    took: list[list[float]] = [[], [], []]
    end, number = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or number < len(caches):
        for place in range(len(caches)):
            which = (number + place) % len(caches)
            start = time.perf_counter()
            await caches[which].load(keys, spec)
            took[which].append(time.perf_counter() - start)
        number += 1
    off, on, again = took
    ratio = median([b / a for a, b in zip(off, on, strict=True)] + [b / c for b, c in zip(on, again, strict=True)])
    return Found(median(off), median(on), ratio, median(c / a for a, c in zip(off, again, strict=True)))


@contextmanager
def scraping(registry: CollectorRegistry) -> Iterator[None]:
    """Scrape once a second in a thread."""
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(1.0):
            generate_latest(registry)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    main()
