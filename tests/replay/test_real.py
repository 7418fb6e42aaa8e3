import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tiered_kv import CacheLimits, ConfigurationError, CPUTier, TieredKVSettings, TierSettings
from tiered_kv.replay import BlockCost, ReplayReport, TierPlan, plans_from, replay, tier_plans
from tiered_kv.replay.real import media_of, really, with_room_as
from tiered_kv.settings.chain_settings import tier_from
from tiered_kv.traces import Request, Trace, agents, chat

BLOCK = 4096
COST = BlockCost(token_bytes=8, prefill_tokens_a_s=1e4)
LIMITS = CacheLimits(window=16 * BLOCK, bounce=64 * BLOCK)


async def done(trace: Trace, *tiers: TierSettings, real_cost: BlockCost = COST, cost: BlockCost = COST) -> ReplayReport:
    """Serve a trace from a real cache."""
    plans = plans_from(TieredKVSettings(tiers=tiers))
    return await really(trace, tiers, plans, cost, real_cost, LIMITS)


def imagined(trace: Trace, real: ReplayReport, *tiers: TierSettings) -> ReplayReport:
    """Say what a replay would find for tiers as large as these were."""
    plans = with_room_as(real, plans_from(TieredKVSettings(tiers=tiers)), BLOCK)
    report = replay(trace, plans, COST)
    alike = []
    for one, other in zip(report.tiers, real.tiers, strict=True):
        assert one.write_amplification == pytest.approx(other.write_amplification, abs=0.05)  # that of a ledger too
        alike.append(dataclasses.replace(one, write_amplification=other.write_amplification))
    return dataclasses.replace(report, tiers=tuple(alike), is_real=True, load_s=real.load_s)


def two_tiers(path: Path, policy: str) -> tuple[TierSettings, TierSettings]:
    """Return a tier of 40 blocks over one of about a hundred."""
    nvme = tier_from({"medium": "nvme", "path": path / "kv", "capacity": "1MiB"})
    return CPUTier(capacity=40 * BLOCK, policy=policy), nvme


async def test_what_is_imagined_is_what_a_cache_does(tmp_path: Path) -> None:
    """Hits, bytes, evictions and promotions of every tier are equal, and every byte is right."""
    trace, tiers = chat(num_requests=40), two_tiers(tmp_path, "lru")
    report = await done(trace, *tiers)
    assert report == imagined(trace, report, *tiers)
    assert report.tiers[1].hits > 0
    assert report.tiers[1].evicted_blocks > 0
    assert report.wrong_blocks == 0


async def test_tiers_are_told_by_their_names(tmp_path: Path) -> None:
    """Host memory is in the cache's books where no tier keeps anything there, and memory may have another name."""
    trace, (_, disk) = chat(num_requests=40), two_tiers(tmp_path, "lru")
    for tiers in (
        (disk.model_copy(update={"policy": "lru"}),),
        (CPUTier(capacity=40 * BLOCK, name="hot", policy="lru"),),
    ):
        report = await done(trace, *tiers)
        assert report.tiers_hit_rate == report.hit_rate > 0
        assert report == imagined(trace, report, *tiers)


async def test_a_trace_without_blocks_is_no_fault_of_a_tier() -> None:
    """Imagined or not."""
    trace = Trace("empty", [Request(0.0, np.array([], np.int64), 5)], 16)
    with pytest.raises(ConfigurationError, match="no request of the trace has a block"):
        await done(trace, CPUTier(capacity=40 * BLOCK))
    with pytest.raises(ConfigurationError, match="no request of the trace has a block"):
        replay(trace, tier_plans(["cpu=1GiB"], "lru"), COST)


@pytest.mark.parametrize("policy", ["lhd", "mq", "arc"])
async def test_under_every_policy(policy: str, tmp_path: Path) -> None:
    """Within 0.01 together; a load uses blocks while it lasts, so that what memory has depends a little on time."""
    trace, tiers = chat(num_requests=40), two_tiers(tmp_path, policy)
    report = await done(trace, *tiers)
    other = imagined(trace, report, *tiers)
    assert report.hit_rate == pytest.approx(other.hit_rate, abs=0.01)
    assert [each.hit_rate for each in report.tiers] == pytest.approx([each.hit_rate for each in other.tiers], abs=0.05)
    assert report.wrong_blocks == 0


async def test_tiers_of_others_are_left_as_they_were() -> None:
    """A store without a path is used where it is, under a name that nobody has."""
    trace = agents(num_requests=12, num_agents=3)
    tiers = (CPUTier(capacity=30 * BLOCK), tier_from({"medium": "memory", "capacity": "8MiB"}))
    report = await done(trace, *tiers)
    assert report.tiers[1].written_blocks == trace.num_blocks
    assert report.hit_rate == imagined(trace, report, *tiers).hit_rate


async def test_a_smaller_cache_stands_for_a_large_one(tmp_path: Path) -> None:
    """Blocks are as large as they are to be, or smaller, and tiers with them."""
    trace = chat(num_requests=10)
    tiers = (CPUTier(capacity=30 * 512 * 2**17), tier_from({"medium": "nvme", "path": tmp_path, "capacity": "4GiB"}))
    report = await done(trace, *tiers, cost=BlockCost(2**17, 1e4))
    assert report.tiers[0].capacity_blocks == 30
    assert report.block_bytes == BLOCK
    assert 0 < report.tiers[1].capacity_blocks <= 64
    with pytest.raises(ConfigurationError, match="multiple of 8 bytes, got 9"):
        await done(trace, *tiers, real_cost=BlockCost(9, 1e4))


def test_folders_are_gone_afterwards(tmp_path: Path) -> None:
    """Those that are set are not touched, and those beside them not left."""
    asyncio.run(done(chat(num_requests=3), *two_tiers(tmp_path, "lru")))
    assert list(tmp_path.iterdir()) == []


def test_tiers_of_the_command_line_are_media() -> None:
    """Of those that take more than a capacity, a path and a policy, settings tell."""
    cpu, nvme, memory = media_of(tier_plans(["cpu=1MiB:mq", "nvme=2MiB", "memory=3MiB"], "lhd"))
    assert isinstance(cpu, CPUTier)
    assert (cpu.capacity, cpu.policy) == (2**20, "mq")
    assert (nvme.medium, memory.medium) == ("nvme", "memory")
    for wrong in (TierPlan("s3", None), TierPlan("shelf", 9), TierPlan("memory", 2**20, "mq")):
        with pytest.raises(ConfigurationError):
            media_of([wrong])
