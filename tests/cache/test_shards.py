"""Tensor-parallel ranks: each holds its part of the heads, and a scheduler asks for all of them at once."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.any_layout import AnyEngine, cpu, nvme, open_any, prompt
from tests.support.caches import until_idle
from tiered_kv import ConfigurationError, KVGroup, KVLayout, Shard

N = 12
KEYS = prompt(N)


def shared(path: Path) -> dict[str, Any]:
    """A directory that all ranks share."""
    return {"medium": "shared_fs", "path": path, "capacity": "64MiB"}


def names_in(path: Path) -> set[str]:
    """Return what a directory holds."""
    return {each.name for each in path.iterdir()}


async def test_a_block_is_there_when_every_rank_has_its_part(tmp_path: Path) -> None:
    """A scheduler, which has no rank, finds the prefix that all ranks have stored; each rank loads its own bytes."""
    engines = [AnyEngine(), AnyEngine()]
    for rank, num_blocks in enumerate((N, N - 5)):
        async with open_any(engines[rank], shared(tmp_path), shard=Shard(rank, 2)) as kv:
            keys = KEYS[:num_blocks]
            stored = await kv.store(keys, engines[rank].fill(keys, range(num_blocks), f"rank {rank}"))
            assert (await stored.settled())[-1].written == num_blocks
    async with open_any(AnyEngine(), shared(tmp_path), shard=Shard.every(2)) as scheduler:
        found = await scheduler.lookup(KEYS)
        assert found.num_blocks == N - 5
        assert found.by_tier == {"shared_fs": N - 5}
        assert found.num_bytes == 2 * (N - 5) * engines[0].layout.payload_bytes
    for rank, num_blocks in enumerate((N, N - 5)):
        engines[rank].wipe()
        async with open_any(engines[rank], shared(tmp_path), shard=Shard(rank, 2)) as kv:
            assert (await kv.load(KEYS, engines[rank].spec(range(N)))).num_blocks == num_blocks
            assert engines[rank].count_right(KEYS, range(N), f"rank {rank}") == num_blocks


async def test_of_replicas_each_writes_its_share(tmp_path: Path) -> None:
    """Ranks that hold the same latents write each block once between them, and each loads what the other wrote."""
    layout = KVLayout((KVGroup(2, 1, 48, "bfloat16", 4, "MLA"),))
    engines = [AnyEngine(layout), AnyEngine(layout)]
    written = []
    for rank, engine in enumerate(engines):
        async with open_any(engine, shared(tmp_path), shard=Shard(rank, 2, replicated=True)) as kv:
            stored = await kv.store(KEYS, engine.fill(KEYS, range(N)))
            (tier,) = await stored.settled()
            written.append(tier.written)
            assert tier.written + tier.deferred + tier.present == N
            assert tier.deferred >= (N // 2 if rank == 0 else 1)
            await until_idle(kv)
    assert written == [N // 2, N // 2]
    for shard in (Shard(0, 2, replicated=True), Shard(1, 2, replicated=True), Shard()):
        engines[0].wipe()
        async with open_any(engines[0], shared(tmp_path), shard=shard) as kv:
            assert (await kv.load(KEYS, engines[0].spec(range(N)))).num_blocks == N
            assert engines[0].count_right(KEYS, range(N)) == N


async def test_a_scheduler_moves_no_bytes(tmp_path: Path) -> None:
    """What only a rank can do is refused where a cache stands for all of them, in words that say so."""
    engine = AnyEngine()
    async with open_any(engine, cpu(8), shared(tmp_path), shard=Shard.every(2)) as kv:
        with pytest.raises(ConfigurationError, match="stands for 2 ranks"):
            kv.register_kv_caches(engine.caches[0])
        with pytest.raises(ConfigurationError, match="stands for 2 ranks"):
            await kv.load(KEYS, engine.spec(range(N)))
        with pytest.raises(ConfigurationError, match="stands for 2 ranks"):
            await kv.store(KEYS, engine.spec(range(N)))
        kv.touch(KEYS)
        assert (await kv.evict(KEYS)).num_blocks == 0


@pytest.mark.parametrize(
    "shard",
    [
        (Shard(0, 2),),
        (Shard(1, 2), Shard(0, 2)),
        (*Shard.every(2), Shard(1, 2)),
        2 * Shard.every(2),
        (),
        ([0, 2],),
        [Shard()],
        "0/2",
    ],
    ids=repr,
)
async def test_shards_that_cannot_be(shard: Any, tmp_path: Path) -> None:  # noqa: ANN401 - what is no shard
    """Some of the ranks, or ranks in another order, are no set of shards."""
    with pytest.raises(ConfigurationError, match=r"Shard\.every"):
        async with open_any(AnyEngine(), shared(tmp_path), shard=shard):
            pass


async def test_two_ranks_in_one_directory_tree(tmp_path: Path) -> None:
    """Ranks with NVMe tiers below one root keep apart, and what a rank finds after a restart is its own."""
    for rank in range(2):
        engine = AnyEngine()
        async with open_any(engine, nvme(tmp_path), shard=Shard(rank, 2)) as kv:
            await (await kv.store(KEYS, engine.fill(KEYS, range(N), f"rank {rank}"))).settled()
    for rank in range(2):
        engine = AnyEngine()
        async with open_any(engine, nvme(tmp_path), shard=Shard(rank, 2)) as kv:
            assert (await kv.load(KEYS, engine.spec(range(N)))).num_blocks == N
            assert engine.count_right(KEYS, range(N), f"rank {rank}") == N


async def test_ranks_of_one_host_have_directories_by_one_configuration(tmp_path: Path) -> None:
    """``{rank}`` in a path is each one's own; a cache that stands for all of them needs no such thing, and says so."""
    tier = nvme(tmp_path / "{rank}")
    engines = [AnyEngine(), AnyEngine()]
    async with (
        open_any(engines[0], tier, shard=Shard(0, 2)) as first,
        open_any(engines[1], tier, shard=Shard(1, 2)) as second,
    ):
        for rank, kv in enumerate((first, second)):
            await kv.store(KEYS, engines[rank].fill(KEYS, range(N), f"rank {rank}"))
            await kv.flush()
    assert names_in(tmp_path) == {"0", "1"}
    with pytest.raises(ConfigurationError, match="stands for 2 ranks"):
        async with open_any(AnyEngine(), tier, shard=Shard.every(2)):
            pass
