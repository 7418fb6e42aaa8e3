"""What the policies of tiers are told, which one is asked, and what of a disk's order outlives a restart."""

from collections import Counter
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from tests.support.any_layout import AnyEngine, cpu, nvme, open_any, prompt
from tests.support.caches import until_idle
from tiered_kv import GPULoadStoreSpec, Outcomes
from tiered_kv.catalog.policies import LRUPolicy
from tiered_kv.catalog.table import Slots


class NewestFirst(LRUPolicy):
    """Evicts what was used last: nobody else does."""

    def victims(self, n: int, keep: Slots) -> Slots:
        """See `Policy.victims`."""
        newest_first = self.order()[::-1]
        return newest_first[np.isin(newest_first, keep, invert=True)][:n]


class CountsUses(LRUPolicy):
    """Counts the blocks that it is told were used."""

    num_uses: ClassVar[Counter[int]] = Counter()

    def use(self, slots: Slots) -> None:
        """See `Policy.use`."""
        self.num_uses[self.num_slots] += len(slots)

    @classmethod
    def since(cls) -> list[int]:
        """Return how many uses each tier was told of since this was last called, the smaller tier's first."""
        told = [n for _, n in sorted(cls.num_uses.items()) if n]
        cls.num_uses.clear()
        return told


async def test_each_tier_is_told_of_each_use_once(tmp_path: Path) -> None:
    """A load is one use of a block in each tier that has it, wherever it came from; to be moved or looked at is none.

    A policy that counts uses would take a prompt that was written down and read ahead for one that is asked for often.
    """
    engine, keys, spec = AnyEngine(), prompt(4), GPULoadStoreSpec(range(4, 8))
    policy = {"policy": f"{__name__}:CountsUses"}
    host, disk = {**cpu(8), **policy}, {**nvme(tmp_path, "2MiB"), **policy, "write": "back"}
    async with open_any(engine, host, disk) as kv:
        CountsUses.since()
        await kv.store(keys, engine.fill(keys, range(4)))
        await kv.flush()
        kv.pin(keys, ttl_s=60)
        kv.unpin(keys)
        assert CountsUses.since() == []
        assert (await kv.load(keys, spec)).by_tier == {"cpu": 4}
        assert CountsUses.since() == [4, 4]
        await kv.evict(keys[2:], tier="cpu")
        assert (await kv.load(keys, spec)).by_tier == {"cpu": 2, "nvme": 2}
        assert CountsUses.since() == [4, 4]
        await kv.evict(keys, tier="cpu")
        await kv.prefetch(keys)
        assert CountsUses.since() == []
        planner = kv.planner()
        planner.register_worker(rank=0)
        for source in ("cpu", "nvme"):
            job = planner.plan_load(keys, spec)
            planner.complete(Outcomes((await job.planned()).job, 0, 4))
            assert (await job.ended()).by_tier.keys() == {source}
            await until_idle(kv)
            assert CountsUses.since() == [4, 4]
            await kv.evict(keys, tier="cpu")


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
