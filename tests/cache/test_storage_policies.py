"""The policy of an owned storage tier: which is asked, and what of its order outlives a restart."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.any_layout import AnyEngine, cpu, nvme, open_any, prompt
from tiered_kv.catalog.policies import LRUPolicy
from tiered_kv.catalog.table import Slots


class NewestFirst(LRUPolicy):
    """Evicts what was used last: nobody else does."""

    def victims(self, n: int, keep: Slots) -> Slots:
        """See `Policy.victims`."""
        newest_first = self.order()[::-1]
        return newest_first[np.isin(newest_first, keep, invert=True)][:n]


async def test_the_disk_asks_its_own_policy(tmp_path: Path) -> None:
    """With one that keeps the oldest, the first prompt outlives all that come after it."""
    engine, first = AnyEngine(), prompt(4)
    disk = {**nvme(tmp_path, 700_000), "policy": f"{__name__}:NewestFirst"}
    async with open_any(engine, cpu(16), disk) as kv:
        for seed in range(kv.stats()["nvme"].num_slots // 4 + 3):
            keys = prompt(4, seed=seed)
            await kv.store(keys, engine.fill(keys, range(4)))
            await kv.flush()
        await kv.evict(first, tier="cpu")
        assert (await kv.lookup(first)).by_tier == {"nvme": 4}


async def test_write_amplification_counts_all_that_is_written_for_a_block(tmp_path: Path) -> None:
    """Each block comes with a header, padding and an entry of the ledger; memory writes nothing of the kind."""
    engine, keys = AnyEngine(), prompt(6)
    async with open_any(engine, cpu(16), nvme(tmp_path)) as kv:
        assert kv.stats()["nvme"].write_amplification == 0.0
        await kv.store(keys, engine.fill(keys, range(6)))
        await kv.flush()
        disk = kv.stats()["nvme"]
        assert disk.block_bytes_written == 6 * engine.layout.groups[0].payload_bytes
        ledger_bytes = disk.facts["own_bytes_written"]
        assert isinstance(ledger_bytes, int)
        assert ledger_bytes >= 6 * 64
        assert disk.write_amplification == (disk.bytes_written + ledger_bytes) / disk.block_bytes_written > 1.0
        assert kv.stats()["cpu"].write_amplification == 0.0


@pytest.mark.parametrize("policy", ["lhd", "lru", "mq", "arc"])
async def test_what_would_go_last_goes_last_after_a_restart(tmp_path: Path, policy: str) -> None:
    """A prompt that was used again and again is there after a restart and as many new blocks as fill half a disk."""
    engine, often = AnyEngine(), prompt(4)
    disk = {**nvme(tmp_path, 700_000), "policy": policy}
    async with open_any(engine, cpu(16), disk) as kv:
        num_slots = kv.stats()["nvme"].num_slots
        for seed in range(1, num_slots // 4):
            await kv.store(often, engine.fill(often, range(4)))
            keys = prompt(4, seed=seed)
            await kv.store(keys, engine.fill(keys, range(4)))
            await kv.flush()
        await kv.store(often, engine.fill(often, range(4)))
    async with open_any(engine, cpu(16), disk) as kv:
        for seed in range(num_slots // 8):
            keys = prompt(4, seed=1000 + seed)
            await kv.store(keys, engine.fill(keys, range(4)))
            await kv.flush()
        assert (await kv.lookup(often)).by_tier == {"nvme": 4}
