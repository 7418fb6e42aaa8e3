"""Workers that hold the same, of latents all ranks: a scheduler keeps it once, each loads all, one stores a block."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.any_layout import SMALL, STRIDE, AnyEngine, cpu, nvme, open_any
from tests.support.caches import inside, until, until_idle
from tests.support.planned import KEYS, N, Ranks, spread
from tests.support.serving import attached, serving
from tiered_kv import ConfigurationError, ConnectedKV, Job, KVLayout, Outcomes, Plan, Planner, Shard, TieredKV

CPU = cpu(32, STRIDE)
COPIES = Shard.every(1, copies=3)


@asynccontextmanager
async def planning() -> AsyncIterator[tuple[TieredKV, Planner, Ranks]]:
    """Open a cache in memory, with three workers that have computed the same; in the end nothing is held."""
    async with open_any(AnyEngine(), CPU, shard=COPIES) as kv:
        ranks = Ranks(kv.planner(), 3, copies=3)
        ranks.compute()
        yield kv, kv.planner(), ranks
        ranks.close()
        await until_idle(kv)


async def carried_out(planner: Planner, ranks: Ranks, job: Job) -> Plan:
    """Have each worker do its part, and the job end."""
    plan = await job.planned()
    for worker in reversed(ranks.workers):  # answers come in any order
        assert job.result is None
        planner.complete(worker.execute(spread(plan)))
    await job.ended()
    return plan


async def test_a_block_is_kept_once_and_every_worker_has_it(tmp_path: Path) -> None:
    """Each worker stores its turn of the blocks; after a restart each loads all, from one slot, and one record."""
    async with open_any(AnyEngine(), CPU, nvme(tmp_path), shard=COPIES) as kv:
        ranks = Ranks(kv.planner(), 3, copies=3)
        ranks.compute()
        job = kv.planner().plan_store(KEYS, ranks.engines[0].spec(range(N)))
        plan = await carried_out(kv.planner(), ranks, job)
        assert [move.positions for move in plan.moves] == [(0, 3), (1, 4), (2, 5)]
        assert (await job.ended()).num_blocks == N
        await kv.flush()
        assert kv.stats()["cpu"].ready == kv.stats()["nvme"].ready == N
        again = kv.planner().plan_store(KEYS, ranks.engines[0].spec(range(N)))
        assert (await again.ended()).num_blocks == 0, "all is there"
        ranks.close()
        await until_idle(kv)
    async with open_any(AnyEngine(), CPU, nvme(tmp_path), shard=COPIES) as kv:
        ranks = Ranks(kv.planner(), 3, copies=3)
        job = kv.planner().plan_load(KEYS, ranks.engines[0].spec(range(N)))
        await carried_out(kv.planner(), ranks, job)
        assert (await job.ended()).num_blocks == N
        assert ranks.num_right() == [N, N, N]
        ranks.close()
        await until_idle(kv)
    engine = AnyEngine()
    async with open_any(engine, CPU, nvme(tmp_path)) as kv:  # names are as one process's that holds all of it
        assert (await kv.load(KEYS, engine.spec(range(N)))).num_blocks == N
        assert engine.count_right(KEYS, range(N), "rank 0") == N


async def test_parts_may_have_several_workers_each(tmp_path: Path) -> None:
    """Of pipeline stages, say: a worker loads its stage's part, and stores its turn of that."""
    async with open_any(AnyEngine(), cpu(32, 2 * STRIDE), shard=Shard.every(2, copies=2)) as kv:
        ranks = Ranks(kv.planner(), 4, copies=2)
        ranks.compute()
        job = kv.planner().plan_store(KEYS, ranks.engines[0].spec(range(N)))
        plan = await carried_out(kv.planner(), ranks, job)
        assert [move.positions for move in plan.moves] == [(0, 2, 4), (1, 3, 5)] * 2
        ranks.wipe()
        job = kv.planner().plan_load(KEYS, ranks.engines[0].spec(range(N)))
        await carried_out(kv.planner(), ranks, job)
        assert ranks.num_right() == [N] * 4
        ranks.close()
        await until_idle(kv)


async def test_what_one_worker_did_not_store_is_not_there() -> None:
    """The others' blocks are; the next store has the ones that are left."""
    async with planning() as (kv, planner, ranks):
        job = planner.plan_store(KEYS, ranks.engines[0].spec(range(N)))
        plan = await job.planned()
        planner.complete(Outcomes(plan.job, 1, 1, "a copy failed"))
        for rank in (0, 2):
            planner.complete(ranks.workers[rank].execute(spread(plan)))
        result = await job.ended()
        assert (result.num_blocks, result.errors) == (N - 1, ("rank 1: a copy failed",))
        assert result.mask.tolist() == [True] * 4 + [False, True]
        assert (await kv.lookup(KEYS)).num_blocks == 4
        job = planner.plan_store(KEYS, ranks.engines[0].spec(range(N)))
        plan = await job.planned()
        assert [move.positions for move in plan.moves] == [(4,), (), ()]
        planner.complete(ranks.workers[0].execute(spread(plan)))
        assert (await job.ended()).num_blocks == 1


async def test_what_one_worker_did_not_load_is_in_place_for_none() -> None:
    """A load brings the prefix that each has."""
    async with planning() as (_, planner, ranks):
        await carried_out(planner, ranks, planner.plan_store(KEYS, ranks.engines[0].spec(range(N))))
        job = planner.plan_load(KEYS, ranks.engines[0].spec(range(N)))
        plan = await job.planned()
        for rank in (0, 1):
            planner.complete(ranks.workers[rank].execute(spread(plan)))
        planner.complete(Outcomes(plan.job, 2, 3, "a copy failed"))
        assert (await job.ended()).num_blocks == 3


async def test_a_store_may_be_bound_to_a_part() -> None:
    """Each worker stores those of its turn that are in the part; what is left out is not there, and counts nowhere."""
    async with planning() as (kv, planner, ranks):
        job = planner.plan_store(KEYS)
        await job.planned()
        plan = job.bind(ranks.engines[0].spec(range(2, N)), start=2)
        assert [move.positions for move in plan.moves] == [(3,), (4,), (2, 5)]
        await carried_out(planner, ranks, job)
        result = await job.ended()
        assert result.num_blocks == N - 2
        assert result.mask.tolist() == [False] * 2 + [True] * 4
        stats = kv.stats()
        assert (stats.store_requested, stats.stored, stats.dropped) == (N - 2, N - 2, 0)


@pytest.mark.parametrize(("num_answers", "pending"), [(0, [N, N]), (1, [N, N]), (2, [0, N]), (3, [0, N])])
async def test_slots_that_a_worker_may_be_writing_to_are_nobodys_at_the_end(
    num_answers: int, pending: list[int]
) -> None:
    """The cache closes over a job: what it has reserved of a part that not all have answered for nobody gets."""
    async with open_any(AnyEngine(), cpu(32, 2 * STRIDE), shard=Shard.every(2, copies=2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner, 4, copies=2)
        ranks.compute()
        job = planner.plan_store(KEYS, ranks.engines[0].spec(range(N)))
        plan = await job.planned()
        for worker in ranks.workers[:num_answers]:
            planner.complete(worker.execute(spread(plan)))
    assert (await job.ended()).num_blocks == 0
    assert [chain.host.index.statistics().pending for chain in inside(kv).chains] == pending
    ranks.close()


async def test_a_cancelled_store_holds_nothing() -> None:
    """Nobody has its plan."""
    async with open_any(AnyEngine(), CPU, shard=COPIES) as kv:
        planner = kv.planner()
        ranks = Ranks(planner, 3, copies=3)
        job = planner.plan_store(KEYS, ranks.engines[0].spec(range(N)))
        await until(lambda: job in planner.poll())
        job.cancel()
        assert (await job.ended()).num_blocks == 0
        ranks.close()
        await until_idle(kv)


@asynccontextmanager
async def three_that_hold_the_same(tmp_path: Path) -> AsyncIterator[tuple[ConnectedKV, Planner, Ranks]]:
    """Yield a server's client, its planner, and three workers that have computed the same blocks."""
    with serving(tmp_path, CPU) as server:
        async with attached(server, shard=COPIES) as kv:
            planner = kv.planner()
            ranks = Ranks(planner, 3, copies=3)
            ranks.compute()
            yield kv, planner, ranks
            ranks.close()


async def test_a_server_keeps_a_block_once_for_all_of_a_clients_workers(tmp_path: Path) -> None:
    """Its memory too: each worker maps the one slab."""
    async with three_that_hold_the_same(tmp_path) as (kv, planner, ranks):
        job: Any = planner.plan_store(KEYS, ranks.engines[0].spec(range(N)))
        plan = await carried_out(planner, ranks, job)
        assert [move.positions for move in plan.moves] == [(0, 3), (1, 4), (2, 5)]
        assert (await job.ended()).num_blocks == N
        assert kv.stats()["cpu"].ready == N
        ranks.wipe()
        job = planner.plan_load(KEYS, ranks.engines[0].spec(range(N)))
        await carried_out(planner, ranks, job)
        assert (await job.ended()).num_blocks == N
        assert ranks.num_right() == [N, N, N]


async def test_a_server_plans_no_more_than_it_can_say_to_every_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load names its blocks to each. One of more ends and says why: its client would never hear of it."""
    async with three_that_hold_the_same(tmp_path) as (kv, planner, ranks):
        await carried_out(planner, ranks, planner.plan_store(KEYS, ranks.engines[0].spec(range(N))))
        with monkeypatch.context() as patched:
            patched.setattr("tiered_kv.host.session_jobs.MOST_BLOCKS", 3 * N - 1)
            job = planner.plan_load(KEYS, ranks.engines[0].spec(range(N)))
            await job.planned()
        assert job.result is not None
        assert f"{N} keys for 3 ranks, {3 * N - 1} blocks at most: give fewer keys" in job.result.errors[0]
        assert kv.stats()["cpu"].leased == 0


async def test_a_server_counts_a_block_once_that_one_worker_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that hold the same take turns: a store names each block to one of them, so as many may be planned."""
    async with three_that_hold_the_same(tmp_path) as (_, planner, ranks):
        monkeypatch.setattr("tiered_kv.host.session_jobs.MOST_BLOCKS", N)
        job = planner.plan_store(KEYS, ranks.engines[0].spec(range(N)))
        await carried_out(planner, ranks, job)
        assert (await job.ended()).num_blocks == N
        monkeypatch.setattr("tiered_kv.host.session_jobs.MOST_BLOCKS", N - 1)
        result = await planner.plan_store(KEYS, ranks.engines[0].spec(range(N))).ended()
        assert f"{N} keys for 1 ranks, {N - 1} blocks at most: give fewer keys" in result.errors[0]


async def test_a_server_passes_memory_once_to_all_that_hold_the_same(tmp_path: Path) -> None:
    """However many they are, and of however many KV groups: a message has room for 253 descriptors."""
    groups = SMALL.groups * 12
    with serving(tmp_path, cpu(24, 12 * STRIDE)) as server:
        async with attached(server, layout=KVLayout(groups), shard=Shard.every(1, copies=22)) as kv:
            slabs = kv.planner().slabs()
            assert len({slab.pool for slab in slabs}) == 12
            assert [(slab.group, slab.rank) for slab in slabs] == [(group, n) for group in range(12) for n in range(22)]
        async with attached(server, layout=KVLayout(groups), shard=Shard(21, 22, replicated=True)) as kv:
            assert len(kv.planner().slabs()) == 12, "one of 22 that hold the same has caches of its own"
        with pytest.raises(ConfigurationError, match="264 KV groups of ranks, 253 at most"):
            async with attached(server, layout=KVLayout(groups), shard=Shard.every(22)):
                pass
        with pytest.raises(ConfigurationError, match="254 workers, 253 at most"):
            async with attached(server, shard=Shard.every(1, copies=254)):
                pass
