"""Loads of one prompt at the same time, where no tier above storage keeps anything."""

import asyncio
from pathlib import Path

import pytest

from tests.support.caches import open_cache
from tests.support.engine import PAYLOAD_BYTES, Engine, contents, prompt
from tiered_kv import GPULoadStoreSpec


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
