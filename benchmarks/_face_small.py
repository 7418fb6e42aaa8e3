"""Awaited calls of few small blocks, which are all fixed cost: us a call, and loads a second of many tasks at once.

Each stands over an awaited empty task of the same moments, as a machine is now fast and now slow.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from statistics import median

import numpy as np
import torch

from tiered_kv import GPULoadStoreSpec, KVLayout, ModelIdentity, TieredKV, hash_blocks

NUM_PAGES, NUM_LAYERS = 2048, 4
BLOCK_BYTES = 32 << 10
"""16 tokens, 2 heads of 64 in bf16, K and V, 4 layers."""
NUM_TASKS = 64
_PART = 100
"""Calls between two looks at how fast the machine is now."""


async def measure(rounds: int) -> dict[str, float]:
    """Return the figures of resident loads of 1 and 4 blocks, a store and a lookup of one, and of many tasks.

    ``task_us`` is what an awaited empty task takes; ``*_over_task`` are medians over parts of the run.
    """
    caches = [torch.ones(NUM_PAGES, 2, 16, 2, 64, dtype=torch.bfloat16) for _ in range(NUM_LAYERS)]
    layout = KVLayout.from_tensors(caches, block_size=16)
    half, rng, figures = NUM_PAGES // 2, np.random.default_rng(0), dict[str, float]()
    tiers = [{"medium": "cpu", "capacity": 2 * NUM_PAGES * BLOCK_BYTES}]
    async with TieredKV(tiers, model=ModelIdentity("bench", weights="none"), layout=layout, device="cpu") as kv:
        kv.register_kv_caches(caches)
        keys = hash_blocks(range(half * 16), block_size=16)
        others = hash_blocks(range(1 << 24, (1 << 24) + rounds * 16), block_size=16)
        await kv.store(keys, GPULoadStoreSpec(range(half)))

        async def load(n: int) -> None:
            at, into = int(rng.integers(0, half - n)), GPULoadStoreSpec(half + rng.permutation(half)[:n])
            part = keys[at : at + n]
            started = time.perf_counter()
            loaded = await kv.load(part, into)
            seconds.append(time.perf_counter() - started)
            assert loaded.num_blocks == n, loaded  # noqa: S101 - a miss would be fast

        async def store(number: int) -> None:
            part, source = others[number : number + 1], GPULoadStoreSpec([number % half])
            started = time.perf_counter()
            stored = await kv.store(part, source)
            seconds.append(time.perf_counter() - started)
            assert stored.num_stored == 1, stored  # noqa: S101 - a block that is there would be fast

        async def lookup() -> None:
            at = int(rng.integers(0, half))
            started = time.perf_counter()
            await kv.lookup(keys[at : at + 1])
            seconds.append(time.perf_counter() - started)

        calls: dict[str, Callable[[int], Awaitable[None]]] = {
            "load_1_us": lambda _: load(1),
            "load_4_us": lambda _: load(4),
            "store_1_us": store,
            "lookup_1_us": lambda _: lookup(),
        }
        tasks: list[float] = []
        for name, call in calls.items():
            ratios, all_seconds = [], []
            for start in range(0, rounds, _PART):
                seconds: list[float] = []
                for number in range(start, min(start + _PART, rounds)):
                    await call(number)
                tasks.append(await _task_s())
                ratios.append(median(seconds) / tasks[-1])
                all_seconds += seconds
            figures[name] = round(median(all_seconds) * 1e6, 1)
            figures[name.replace("_us", "_over_task")] = round(median(ratios), 2)
        figures["task_us"] = round(median(tasks) * 1e6, 2)

        async def load_often(into: GPULoadStoreSpec) -> None:
            for number in range(rounds // 16):
                at = number * 16 % (half - 4)
                assert (await kv.load(keys[at : at + 4], into)).num_blocks == 4  # noqa: S101

        specs = [GPULoadStoreSpec(half + rng.permutation(half)[:4]) for _ in range(NUM_TASKS)]
        before = await _task_s()
        started = time.perf_counter()
        await asyncio.gather(*(load_often(spec) for spec in specs))
        load_s = (time.perf_counter() - started) / (NUM_TASKS * (rounds // 16))
        figures["loads_per_s"] = round(1 / load_s)
        figures["loads_64_over_task"] = round(2 * load_s / (before + await _task_s()), 2)
    return figures


async def _task_s() -> float:
    """Return the seconds that an awaited empty task takes now."""
    seconds = []
    for _ in range(_PART):
        started = time.perf_counter()
        await asyncio.create_task(_nothing())
        seconds.append(time.perf_counter() - started)
    return median(seconds)


async def _nothing() -> None:
    pass
