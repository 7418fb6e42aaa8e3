"""Awaited calls of few small blocks, which are all fixed cost: us a call, and loads a second of many tasks at once.

As a machine is now fast and now slow, each figure is also given as a multiple of an awaited empty task, taken at the
same moment. Loads with the policy `lhd` are compared with loads with `lru`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from statistics import median

import numpy as np
import torch

from tiered_kv import BlockKeys, GPULoadStoreSpec, KVLayout, ModelIdentity, TieredKV, hash_blocks

NUM_PAGES, NUM_LAYERS = 2048, 4
BLOCK_BYTES = 32 << 10
"""16 tokens, 2 heads of 64 in bf16, K and V, 4 layers."""
NUM_TASKS = 64
_TIMES_MANY = 5
_PART = 100
"""Calls between two looks at how fast the machine is now."""


async def measure(rounds: int) -> dict[str, float]:
    """Return the figures of resident loads of 1 and 4 blocks, a store and a lookup of one, and of many tasks.

    ``task_us`` is what an awaited empty task takes; ``*_over_task`` are medians over parts of the run.
    """
    half, rng, figures = NUM_PAGES // 2, np.random.default_rng(0), dict[str, float]()
    async with _open_cache("lhd") as (kv, keys):
        others = hash_blocks(range(1 << 24, (1 << 24) + rounds * 16), block_size=16)

        async def load(n: int) -> float:
            at, into = int(rng.integers(0, half - n)), GPULoadStoreSpec(half + rng.permutation(half)[:n])
            part = keys[at : at + n]
            started = time.perf_counter()
            loaded = await kv.load(part, into)
            seconds = time.perf_counter() - started
            assert loaded.num_blocks == n, loaded  # noqa: S101 - a miss would be fast
            return seconds

        async def store(number: int) -> float:
            part, source = others[number : number + 1], GPULoadStoreSpec([number % half])
            started = time.perf_counter()
            stored = await kv.store(part, source)
            seconds = time.perf_counter() - started
            assert stored.num_stored == 1, stored  # noqa: S101 - a block that is there would be fast
            return seconds

        async def lookup() -> float:
            at = int(rng.integers(0, half))
            started = time.perf_counter()
            await kv.lookup(keys[at : at + 1])
            return time.perf_counter() - started

        calls: dict[str, Callable[[int], Awaitable[float]]] = {
            "load_1_us": lambda _: load(1),
            "load_4_us": lambda _: load(4),
            "store_1_us": store,
            "lookup_1_us": lambda _: lookup(),
        }
        tasks: list[float] = []
        for name, call in calls.items():
            ratios, all_seconds = list[float](), list[float]()
            for start in range(0, rounds, _PART):
                seconds = [await call(number) for number in range(start, min(start + _PART, rounds))]
                tasks.append(await _task_s())
                ratios.append(median(seconds) / tasks[-1])
                all_seconds += seconds
            figures[name] = round(median(all_seconds) * 1e6, 1)
            figures[name.replace("_us", "_over_task")] = round(median(ratios), 2)
        figures["task_us"] = round(median(tasks) * 1e6, 2)

        specs = [GPULoadStoreSpec(half + rng.permutation(half)[:4]) for _ in range(NUM_TASKS)]
        load_s, ratio = await _of_many(partial(_load_all, kv, keys, specs, rounds // 16), NUM_TASKS * (rounds // 16))
        figures["loads_per_s"], figures["loads_64_over_task"] = round(1 / load_s), round(ratio, 2)
    async with _open_cache("lhd") as (kv, keys), _open_cache("lru") as (by_lru, _):
        figures |= await _over_lru(kv, by_lru, keys, specs, rounds)
    return figures


@asynccontextmanager
async def _open_cache(policy: str) -> AsyncIterator[tuple[TieredKV, BlockKeys]]:
    """Yield a cache that evicts by a policy, and the blocks that it has: half as many as there are pages."""
    caches = [torch.ones(NUM_PAGES, 2, 16, 2, 64, dtype=torch.bfloat16) for _ in range(NUM_LAYERS)]
    layout = KVLayout.from_tensors(caches, block_size=16)
    tiers = [{"medium": "cpu", "capacity": 2 * NUM_PAGES * BLOCK_BYTES, "policy": policy}]
    async with TieredKV(tiers, model=ModelIdentity("bench", weights="none"), layout=layout, device="cpu") as kv:
        kv.register_kv_caches(caches)
        keys = hash_blocks(range(NUM_PAGES // 2 * 16), block_size=16)
        await kv.store(keys, GPULoadStoreSpec(range(NUM_PAGES // 2)))
        yield kv, keys


async def _load_all(kv: TieredKV, keys: BlockKeys, specs: Sequence[GPULoadStoreSpec], num_loads: int) -> None:
    """Load with a task for each spec, all of them the same blocks one after another, as requests with one head do."""

    async def load_often(into: GPULoadStoreSpec) -> None:
        for number in range(num_loads):
            at = number * 16 % (len(keys) - 4)
            assert (await kv.load(keys[at : at + 4], into)).num_blocks == 4  # noqa: S101 - a miss would be fast

    await asyncio.gather(*map(load_often, specs))


async def _over_lru(
    kv: TieredKV, by_lru: TieredKV, keys: BlockKeys, specs: Sequence[GPULoadStoreSpec], rounds: int
) -> dict[str, float]:
    """Return what loads of four blocks take over LRU's, by turns: of others each time, and of one head."""
    at = np.random.default_rng(1).integers(0, len(keys) - 4, rounds)

    async def load_others(kv: TieredKV) -> None:
        for number, start in enumerate(at.tolist()):
            await kv.load(keys[start : start + 4], specs[number % len(specs)])

    async def seconds_of(loads: Awaitable[None]) -> float:
        started = time.perf_counter()
        await loads
        return time.perf_counter() - started

    others, of_head = [], []
    for _ in range(_TIMES_MANY):
        others.append([await seconds_of(load_others(each)) for each in (kv, by_lru)])
        of_head.append([await seconds_of(_load_all(each, keys, specs, rounds // 16)) for each in (kv, by_lru)])
    return {
        "load_4_over_lru": round(median(ours / lru for ours, lru in others), 3),
        "loads_64_over_lru": round(median(ours / lru for ours, lru in of_head), 3),
    }


async def _of_many(calls: Callable[[], Awaitable[None]], num_calls: int) -> tuple[float, float]:
    """Return the seconds of one of so many calls, and the same over an empty task's, as medians of a few times all."""
    seconds, ratios = [], []
    for _ in range(_TIMES_MANY):
        before = await _task_s()
        started = time.perf_counter()
        await calls()
        seconds.append((time.perf_counter() - started) / num_calls)
        ratios.append(2 * seconds[-1] / (before + await _task_s()))
    return median(seconds), median(ratios)


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
