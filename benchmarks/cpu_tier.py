"""Store and load of 2 MiB blocks in the CPU tier, over a bare loop of memmove.

The bare loop moves the same number of bytes in fragments of the same size, in the same order, on one thread like ours,
and has all its addresses worked out beforehand. Both go through pools far larger than the caches, to random pages, in
turns. The last rows go through the whole cache: `store` and `load` of 256 blocks, awaited. Prints a table, then a line
of JSON with the worst row of each direction, for the copies alone and through the cache.
"""

import argparse
import asyncio
import ctypes
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiered_kv import GPULoadStoreSpec, KVLayout, ModelIdentity, TieredKV, hash_blocks
from tiered_kv.memory import CPUDevice, HostSlab, PagedCaches, gather_blocks, scatter_blocks
from tiered_kv.values.layout import KVGroup

Ids = NDArray[np.int64]
Addresses = list[tuple[int, int]]

GROUP = KVGroup(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16)
NUM_BLOCKS = 512
"""In the engine's cache and in the slab: 1 GiB each."""
WINDOW = 16
"""Blocks moved at a time."""
LAYOUTS = {
    "32 x 64 KiB (K and V of a layer together)": (NUM_BLOCKS, 2, 16, 8, 128),
    "64 x 32 KiB (K and V of a layer apart)": (2, NUM_BLOCKS, 16, 8, 128),
}


@dataclass(frozen=True)
class Pools:
    """The engine's paged cache and a slab of slots, both touched."""

    caches: PagedCaches
    slab: HostSlab

    @classmethod
    def make(cls, shape: tuple[int, ...], device: CPUDevice) -> "Pools":
        """Allocate both for tensors of ``shape``, one a layer."""
        kv_caches = [torch.randn(shape).to(torch.bfloat16) for _ in range(GROUP.num_layers)]
        slab = HostSlab(NUM_BLOCKS, GROUP.stride_bytes, GROUP.payload_bytes, name="benchmark")
        device.page_lock(slab).wait()
        slab.rows.fill_(1)
        return cls(PagedCaches.bind(kv_caches, GROUP, device=device), slab)

    def addresses(self, pages: Ids, slots: Ids) -> Addresses:
        """Return (page, slot) addresses of every fragment, in the order in which ours are moved."""
        places = list(zip(pages.tolist(), slots.tolist(), strict=True))
        return [
            (_address(fragment.pages, page, 0), _address(self.slab.rows, slot, fragment.offset_bytes))
            for fragment in self.caches.fragments
            for page, slot in places
        ]


def main() -> None:
    """Measure, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="windows moved each way by each side (default: 100)")
    rounds = parser.parse_args().rounds
    chance = random.Random(0)
    worst = {"store_over_memcpy": float("inf"), "load_over_memcpy": float("inf")}
    print(f"{'CPU tier, 2 MiB blocks':44}{'slots':>11}{'':>7}{'ours GB/s':>11}{'bare GB/s':>11}{'ratio':>7}")
    for layout, shape in LAYOUTS.items():
        pools = Pools.make(shape, CPUDevice())
        for neighbours in (True, False):
            for way, ours, bare in ways(pools):
                windows = draw_windows(chance, neighbours=neighbours)
                ours_gbps, bare_gbps, ratio = in_turns(pools, windows, rounds, ours, bare)
                slots = "neighbours" if neighbours else "scattered"
                print(f"{layout:44}{slots:>11}{way:>7}{ours_gbps:11.2f}{bare_gbps:11.2f}{ratio:7.2f}")
                worst[f"{way}_over_memcpy"] = min(worst[f"{way}_over_memcpy"], ratio)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    for layout, shape in LAYOUTS.items():
        for way, (ours_gbps, bare_gbps, ratio) in asyncio.run(through_the_cache(shape, max(5, rounds // 8))).items():
            print(f"{layout:44}{'whole cache':>11}{way:>7}{ours_gbps:11.2f}{bare_gbps:11.2f}{ratio:7.2f}")
            name = f"{way}_through_the_cache"
            worst[name] = min(worst.get(name, float("inf")), ratio)
    print(json.dumps({name: round(ratio, 3) for name, ratio in worst.items()}))


async def through_the_cache(shape: tuple[int, ...], rounds: int) -> dict[str, tuple[float, float, float]]:
    """Return median GB/s of ours and of the bare loop, and the median ratio, for awaited stores and loads."""
    pools = Pools.make(shape, CPUDevice())
    kv_caches = [torch.randn(shape).to(torch.bfloat16) for _ in range(GROUP.num_layers)]
    n, rng = NUM_BLOCKS // 2, np.random.default_rng(0)
    tier = {"medium": "cpu", "capacity": NUM_BLOCKS * GROUP.stride_bytes}
    seconds: dict[str, list[tuple[float, float]]] = {"store": [], "load": []}
    num_bytes = n * GROUP.payload_bytes
    async with TieredKV([tier], model=ModelIdentity("bench", weights="none"), layout=KVLayout((GROUP,))) as kv:
        kv.register_kv_caches(kv_caches)
        keys = hash_blocks(range(n * 16), block_size=16)
        await asyncio.sleep(2.0)  # until the memory of the slab is there
        for _ in range(rounds):
            for way, bare in (("store", _bare_gather), ("load", _bare_scatter)):
                spec = GPULoadStoreSpec(rng.permutation(NUM_BLOCKS)[:n])
                addresses = pools.addresses(rng.permutation(NUM_BLOCKS)[:n], np.arange(n))
                start = time.perf_counter()
                await getattr(kv, way)(keys, spec)
                middle = time.perf_counter()
                bare(addresses, pools.caches.fragments[0].num_bytes)
                seconds[way].append((middle - start, time.perf_counter() - middle))
            await kv.evict(keys)
    return {
        way: (
            num_bytes / median(ours for ours, _ in pairs) / 1e9,
            num_bytes / median(bare for _, bare in pairs) / 1e9,
            median(bare / ours for ours, bare in pairs),
        )
        for way, pairs in seconds.items()
    }


def ways(pools: Pools) -> list[tuple[str, Callable[[Ids, Ids], None], Callable[[Addresses, int], None]]]:
    """Return how each direction is moved by us and by the bare loop."""
    caches, rows = pools.caches, pools.slab.rows
    return [
        ("store", lambda pages, slots: gather_blocks(caches, pages, rows, slots), _bare_gather),
        ("load", lambda pages, slots: scatter_blocks(rows, slots, caches, pages), _bare_scatter),
    ]


def draw_windows(chance: random.Random, *, neighbours: bool) -> Iterator[tuple[Ids, Ids]]:
    """Draw windows without end: random pages, and slots as a catalog gives them while it is young, or old."""
    while True:
        pages = chance.sample(range(NUM_BLOCKS), WINDOW)
        first = chance.randrange(NUM_BLOCKS - WINDOW)
        slots = range(first, first + WINDOW) if neighbours else sorted(chance.sample(range(NUM_BLOCKS), WINDOW))
        yield np.array(pages), np.array(slots)


def in_turns(
    pools: Pools,
    windows: Iterator[tuple[Ids, Ids]],
    rounds: int,
    ours: Callable[[Ids, Ids], None],
    bare: Callable[[Addresses, int], None],
) -> tuple[float, float, float]:
    """Return the median GB/s of both and the median ratio of neighbouring turns, as the machine's speed drifts.

    Each moves windows of its own, so that neither finds the other's in a cache.
    """
    ours_s: list[float] = []
    bare_s: list[float] = []
    fragment_bytes = pools.caches.fragments[0].num_bytes
    for number in range(rounds):
        pages, slots = next(windows)
        addresses = pools.addresses(*next(windows))
        turns = [(ours_s, partial(ours, pages, slots)), (bare_s, partial(bare, addresses, fragment_bytes))]
        for seconds, move in turns if number % 2 else reversed(turns):
            start = time.perf_counter()
            move()
            seconds.append(time.perf_counter() - start)
    num_bytes = WINDOW * GROUP.payload_bytes
    ratio = median(bare / ours for ours, bare in zip(ours_s, bare_s, strict=True))
    return num_bytes / median(ours_s) / 1e9, num_bytes / median(bare_s) / 1e9, ratio


def _bare_gather(addresses: Addresses, fragment_bytes: int) -> None:
    memmove = ctypes.memmove
    for page, slot in addresses:
        memmove(slot, page, fragment_bytes)


def _bare_scatter(addresses: Addresses, fragment_bytes: int) -> None:
    memmove = ctypes.memmove
    for page, slot in addresses:
        memmove(page, slot, fragment_bytes)


def _address(rows: Tensor, row: int, offset_bytes: int) -> int:
    return rows.data_ptr() + row * rows.stride(0) * rows.itemsize + offset_bytes


if __name__ == "__main__":
    main()
