"""Loads of one prompt at the same time, where no tier above storage keeps anything."""

import asyncio
from pathlib import Path

import pytest
from anyio.lowlevel import checkpoint

from tests.support.backends import ScriptedSlotBackend
from tests.support.caches import keep, open_cache, until, until_idle
from tests.support.engine import BLOCK_SIZE, PAYLOAD_BYTES, Engine, contents, prompt
from tiered_kv import GPULoadStoreSpec, Outcome, hash_blocks


@pytest.mark.parametrize("num_loads", [2, 5])
async def test_loads_that_join_each_other_all_arrive(tmp_path: Path, num_loads: int) -> None:
    """A block that another load brought, and that only passed through, is there for all who waited for it."""
    keys = prompt(24)
    engine = Engine(num_pages=24 * (num_loads + 1))
    tier = {"medium": "nvme", "path": str(tmp_path), "capacity": 64 * 2 * PAYLOAD_BYTES + (1 << 20)}
    async with open_cache(tier, engine=engine) as kv:
        await (await kv.store(keys, engine.compute(keys))).settled()
        for _ in range(10):
            engine.poison()
            pages = [range(24 * (n + 1), 24 * (n + 2)) for n in range(num_loads)]
            loads = await asyncio.gather(*(kv.load(keys, GPULoadStoreSpec(part)) for part in pages))
            assert [load.num_blocks for load in loads] == [24] * num_loads
            assert all(engine.read(part) == contents(keys) for part in pages)
        assert kv.stats().bounce_free == kv.stats().bounce_slots


@pytest.mark.parametrize(("lost", "why"), [({3}, "never stored"), ({2, 3}, "gone when read")])
async def test_a_load_is_told_only_what_befell_its_own_blocks(lost: set[int], why: str) -> None:
    """Not what befell those behind them that another load asked for in the same read."""
    shared = list(range(3 * BLOCK_SIZE))
    first = hash_blocks([*shared, *[1] * BLOCK_SIZE], block_size=BLOCK_SIZE)
    second = hash_blocks([*shared, *[2] * BLOCK_SIZE], block_size=BLOCK_SIZE)
    engine, below = Engine(), ScriptedSlotBackend()
    async with open_cache({"medium": "cpu", "capacity": 32 * PAYLOAD_BYTES}, below, engine=engine) as kv:
        await keep(kv, engine, first)
        await kv.evict(first, tier="cpu")
        below.on_read.hold()
        below.on_read.change_next(lambda said: [Outcome.MISS if i in lost else each for i, each in enumerate(said)])
        others = kv.start_load(first, GPULoadStoreSpec(range(4)))
        await until(lambda: below.on_read.num_held > 0)
        joined = kv.start_load(second, GPULoadStoreSpec(range(10, 14)))
        for _ in range(20):
            await checkpoint()  # by then it waits for the same read
        below.on_read.release()
        assert [(fault.reason, fault.num_blocks) for fault in (await others).faults] == [("gone when read", len(lost))]
        loaded = await joined
        assert (loaded.num_blocks, loaded.missed_because) == (min(lost), why)
        assert [(fault.reason, fault.num_blocks) for fault in loaded.faults] == [(why, 1)] * (2 in lost)
        await until_idle(kv)
