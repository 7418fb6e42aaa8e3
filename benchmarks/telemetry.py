"""What metrics cost a load: the same loads from the CPU tier of two caches, one with metrics and one without.

In turns, in one process; beside them a thread scrapes once a second. Prints a table, then a line of JSON with the worst
row of loads of 64 blocks. Loads of 4 blocks are shown too: what metrics cost a load hardly depends on its size.
"""

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from statistics import median

import structlog
import torch
from prometheus_client import CollectorRegistry, generate_latest

from tiered_kv import GPULoadStoreSpec, KVLayout, ModelIdentity, TieredKV, hash_blocks
from tiered_kv.telemetry import Metrics

NUM_BLOCKS = 64
BLOCK_SIZE = 16
HEAD_DIMS = {"64 KiB": 4, "2 MiB": 128}
"""Of blocks of 32 layers with 8 heads of bf16."""
LOADS = (4, NUM_BLOCKS)


def main() -> None:
    """Measure, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="loads of each kind and cache (default: 60)")
    rounds = parser.parse_args().rounds
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    worst = dict.fromkeys(LOADS, 0.0)
    print(f"{'blocks of':>10}{'a load':>8}{'off us':>10}{'on us':>10}{'ratio':>8}")
    for size, head_dim in HEAD_DIMS.items():
        for n, (off_s, on_s, ratio) in asyncio.run(measure(head_dim, rounds)).items():
            print(f"{size:>10}{n:>8}{off_s * 1e6:10.0f}{on_s * 1e6:10.0f}{ratio:8.3f}")
            worst[n] = max(worst[n], ratio)
    print(json.dumps({"metrics_over_off": round(worst[NUM_BLOCKS], 3), "of_4_blocks": round(worst[4], 3)}))


async def measure(head_dim: int, rounds: int) -> dict[int, tuple[float, float, float]]:
    """Return, by blocks of a load, the median seconds without and with metrics, and the median ratio of neighbours."""
    kv_caches = [torch.zeros(NUM_BLOCKS, 2, BLOCK_SIZE, 8, head_dim, dtype=torch.bfloat16) for _ in range(32)]
    layout, model = KVLayout.from_tensors(kv_caches, block_size=BLOCK_SIZE), ModelIdentity("bench", weights="none")
    keys, spec = hash_blocks(range(NUM_BLOCKS * BLOCK_SIZE), block_size=BLOCK_SIZE), GPULoadStoreSpec(range(NUM_BLOCKS))
    tier = {"medium": "cpu", "capacity": 2 * NUM_BLOCKS * layout.groups[0].stride_bytes}
    registry = CollectorRegistry()
    seconds: dict[int, list[tuple[float, float]]] = {n: [] for n in LOADS}
    async with AsyncExitStack() as stack:
        caches = []
        for metrics in (False, Metrics(registry)):
            kv = await stack.enter_async_context(
                TieredKV([tier], model=model, layout=layout, metrics=metrics, device="cpu")
            )
            kv.register_kv_caches(kv_caches)
            await kv.store(keys, spec)
            caches.append(kv)
        stack.enter_context(scraping(registry))
        for number in range(rounds):
            for n in LOADS:
                took = [0.0, 0.0]
                for which in (0, 1) if number % 2 else (1, 0):
                    start = time.perf_counter()
                    await caches[which].load(keys[:n], spec[:n])
                    took[which] = time.perf_counter() - start
                seconds[n].append((took[0], took[1]))
    return {
        n: (median(off for off, _ in pairs), median(on for _, on in pairs), median(on / off for off, on in pairs))
        for n, pairs in seconds.items()
    }


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
