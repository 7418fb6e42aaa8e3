"""Plans: what one process decides and others move, what they hold meanwhile, and what becomes readable."""

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from tests.support.any_layout import LIMITS, SMALL, STRIDE, AnyEngine, cpu, nvme, open_any, prompt
from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import inside, until, until_idle
from tests.support.planned import CPU, HEADER, KEYS, PAYLOAD, WAIT_S, N, Ranks, spread, store
from tests.support.work import num_calls
from tiered_kv import (
    BlockKeys,
    ClosedError,
    ConfigurationError,
    GPULoadStoreSpec,
    LayoutMismatchError,
    Outcomes,
    ReuseHint,
    Shard,
    TieredKV,
    Worker,
)
from tiered_kv.cache import worker as worker_module
from tiered_kv.memory.lanes import Lane
from tiered_kv.transfers.job_state import Underway
from tiered_kv.transfers.transfer_requests import JobRequest
from tiered_kv.values.errors import Reason, TierFault
from tiered_kv.values.plan import TierShare


def in_memory(kv: TieredKV, keys: BlockKeys) -> list[int]:
    """Say which blocks are on the host."""
    (chain,) = inside(kv).chains
    return chain.host.index.ready(kv.namespace().names(keys)).nonzero()[0].tolist()


def overwrite(path: Path) -> None:
    """Have a disk hold nothing where it had records."""
    for slab in path.rglob("slab"):
        with slab.open("r+b") as file:
            file.write(bytes(slab.stat().st_size))


async def test_a_round_trip_through_two_ranks(tmp_path: Path) -> None:
    """What two workers copy out is written to disk, and copied back in after a restart: each rank its own bytes."""
    async with open_any(AnyEngine(), CPU, nvme(tmp_path), shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        await store(kv, planner, ranks)
        assert (await kv.lookup(KEYS)).num_blocks == N
        ranks.close()
        await until_idle(kv)
    async with open_any(AnyEngine(), CPU, nvme(tmp_path), shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        job = planner.plan_load(KEYS, ranks.engines[0].spec(range(N)))
        plan = await job.planned()
        assert plan.num_blocks == N
        for worker in reversed(ranks.workers):  # answers come in any order
            planner.complete(worker.execute(spread(plan)))
        assert (await job.ended()).num_blocks == N
        assert ranks.num_right() == [N, N]
        result = await job.ended()
        assert result.num_bytes == N * 2 * PAYLOAD
        assert result.seconds >= result.planned_s > 0.0  # the bytes were brought from the disk
        assert result.moved_s > 0.0
        assert result.by_tier.keys() == {"nvme"}
        assert result.by_tier["nvme"].num_bytes == result.num_bytes
        assert result.planned_s >= result.by_tier["nvme"].seconds > 0.0
        again = planner.plan_load(KEYS, ranks.engines[0].spec(range(N)))
        for worker in ranks.workers:
            planner.complete(worker.execute(spread(await again.planned())))
        assert (await again.ended()).by_tier == {"cpu": TierShare(result.num_bytes, 0.0)}  # it was there
        disk = kv.stats()["nvme"]
        assert disk.bytes_read == 2 * N * (STRIDE + HEADER)
        assert disk.read_s > 0.0
        ranks.close()
        await until_idle(kv)


async def test_one_store_holds_blocks_of_several_prompts() -> None:
    """Each block of one job is found by its own prompt's keys, and under its own salt: what it was given comes back."""
    of_tenant, of_other = prompt(4, salt="tenant"), prompt(4, salt="another")
    runs = [KEYS[2:5], of_tenant, of_other[3:]]
    async with open_any(AnyEngine(), CPU, shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        for rank, engine in enumerate(ranks.engines):
            for first, run in zip((0, 3, 7), runs, strict=True):
                engine.fill(run, range(first, first + len(run)), f"rank {rank}")
        for num_new in (8, 0):
            job = planner.plan_store(runs, ranks.engines[0].spec(range(8)))
            plan = await job.planned()
            for worker in ranks.workers:
                planner.complete(worker.execute(spread(plan)))
            assert (await job.ended()).num_blocks == num_new
        assert [(await kv.lookup(run)).num_blocks for run in runs] == [3, 4, 1]
        assert not (await kv.lookup(prompt(4, salt="nobody"))).num_blocks
        ranks.wipe()
        loading = planner.plan_load(of_tenant, ranks.engines[0].spec(range(4)))
        for rank, worker in enumerate(ranks.workers):
            planner.complete(worker.execute(spread(await loading.planned())))
            assert ranks.engines[rank].count_right(of_tenant, range(4), f"rank {rank}") == 4
        assert (await loading.ended()).num_blocks == 4
        ranks.close()
        await until_idle(kv)


async def test_what_is_answered_for_one_salt_is_not_of_another() -> None:
    """Where hashes are the engine's own, two tenants may have the same: each block is answered for by itself."""
    ours, theirs = (BlockKeys.from_hashes(list(KEYS), block_size=KEYS.block_size, salt=salt) for salt in ("a", "b"))
    async with open_any(engine := AnyEngine(), cpu(32)) as kv:
        planner = kv.planner()
        planner.register_worker()
        job = planner.plan_store([ours, theirs], engine.spec(range(2 * N)))
        await job.planned()
        job.complete(ours)
        with pytest.raises(ConfigurationError, match="of several salts"):
            job.complete(list(theirs))
        assert (await kv.lookup(theirs)).num_blocks == 0
        assert job.result is None
        job.complete(theirs, moved=False)
        assert (await job.ended()).mask.tolist() == [True] * N + [False] * N
        assert [(await kv.lookup(each)).num_blocks for each in (ours, theirs)] == [N, 0]
        await until_idle(kv)


@pytest.mark.parametrize("write", ["through", "back"])
async def test_blocks_of_several_prompts_are_written_by_their_own_names(write: str) -> None:
    """To tiers below too, each goes under its own salt and with its place in its own prompt."""
    runs = [KEYS[2:5], prompt(4, salt="tenant"), prompt(4, salt="another")[3:]]
    below = ScriptedBackend(write=write)
    async with open_any(AnyEngine(), CPU, below) as kv:
        planner, engine = kv.planner(), AnyEngine()
        worker = Worker(planner.slabs(), layout=SMALL, device="cpu")
        worker.register_kv_caches(engine.caches[0])
        planner.register_worker()
        job = planner.plan_store(runs, engine.spec(range(8)))
        planner.complete(worker.execute(await job.planned()))
        await job.ended()
        await kv.flush()
        written = [(key.position, key.namespace.salt, key.hash) for key in below.keys()]  # noqa: SIM118 - no mapping
        named = [(at, run.salt_id, digest) for run in runs for at, digest in enumerate(run, run.start)]
        assert sorted(written) == sorted(named)
        assert write == "through" or below.on_write.num_calls == 2  # whole windows, of four blocks
        worker.close()


@pytest.mark.parametrize("write", ["nothing", "back", "through"])
async def test_a_long_store_ends_in_as_few_steps_as_a_short_one(write: str) -> None:
    """It ends on the event loop at once: what nothing below gets now must not cost a step for each window of it."""
    limits, below = (
        LIMITS.model_copy(update={"store_queue": 8 * STRIDE}),
        [] if write == "nothing" else [ScriptedSlotBackend(2048, write=write)],
    )
    async with open_any(AnyEngine(), cpu(2048), *below, limits=limits) as kv:
        seat, num_steps = inside(kv), []
        for n in (64, 1024):
            keys, clock = prompt(n, seed=n), asyncio.get_running_loop().time
            request = JobRequest(
                "store", keys, seat.batches(keys), GPULoadStoreSpec(range(n)), lambda: True, clock() + 9
            )
            job = Underway(0, request, clock)
            job.hold([os.getpid()], [])
            job.take(0, n, "")
            num_steps.append(num_calls(job.end))
            assert (await kv.lookup(keys)).num_blocks == n
        await kv.flush()
        dropped = kv.stats()["slots"].dropped_because if below else {}
        assert dropped == ({"queue full": 64 + 1024 - 8} if write == "through" else {})
        assert num_steps[1] < 2 * num_steps[0]
        await until_idle(kv)


@pytest.mark.parametrize("then", ["watched", "flushed", "closed"])
async def test_a_long_store_is_written_down_a_few_windows_in_each_turn(then: str) -> None:
    """However many of them the store queue takes: the loop is the engine's. Who waits for it has all of it."""
    slots = ScriptedSlotBackend(2048)
    async with open_any(AnyEngine(), cpu(2048), slots) as kv:
        chain, keys = inside(kv).chains[0], prompt(1024)
        planner = kv.planner()
        planner.register_worker()
        job = planner.plan_store(keys, GPULoadStoreSpec(range(1024)))
        plan = await job.planned()
        slots.on_write.hold()
        planner.complete(Outcomes(plan.job, 0, 1024, "", 0.0))
        await job.ended()
        num_begun = [kv.stats()["slots"].num_waiting]
        while then == "watched" and num_begun[-1] < 1024 // chain.most_window - 1:
            await checkpoint()
            num_begun.append(kv.stats()["slots"].num_waiting)
        assert max(np.diff(num_begun), default=0) <= 16
        assert num_begun[0] <= 16
        slots.on_write.release()
        if then == "flushed":
            await kv.flush()
            assert slots.num_records == 1024
    assert slots.num_records == 1024


async def test_several_prompts_that_cannot_be_stored_together() -> None:
    """They are refused before anything is held: none at all, and blocks of two sizes."""
    async with open_any(AnyEngine(), CPU, shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        refused: Any
        for refused, words in (([], "no keys"), ([KEYS, prompt(1, block_size=8)], "8 tokens"), ([KEYS, 1], "int")):
            with pytest.raises(ConfigurationError, match=words):
                planner.plan_store(refused, ranks.engines[0].spec(range(N)))
        ranks.close()


async def test_a_flush_waits_for_planned_stores() -> None:
    """When it returns, what workers have copied out is in every tier, of every rank."""
    below = ScriptedBackend()
    async with open_any(AnyEngine(), CPU, below, shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        below.on_write.hold()
        storing = asyncio.create_task(store(kv, planner, ranks))
        await until(lambda: below.on_write.num_held > 0)
        for _ in range(10):
            await checkpoint()
        assert not storing.done()
        below.on_write.release()
        await storing
        assert below.num_records == 2 * N
        ranks.close()
        await until_idle(kv)


async def test_what_one_rank_has_not_copied_is_readable_on_none() -> None:
    """A block counts when every rank has copied it out; the others' slots go back."""
    async with open_any(AnyEngine(), CPU, shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        ranks.compute()
        job = planner.plan_store(KEYS, ranks.engines[0].spec(range(N)))
        plan = await job.planned()
        assert kv.stats()["cpu"].pending == 2 * N
        planner.complete(ranks.workers[0].execute(plan))
        planner.complete(Outcomes(plan.job, 1, 2, "it stumbled"))
        result = await job.ended()
        assert result.num_blocks == 2
        assert result.errors == ("rank 1: it stumbled",)
        assert (await kv.lookup(KEYS)).num_blocks == 2
        assert kv.stats()["cpu"].ready == 4
        storing = planner.plan_store(KEYS, ranks.engines[0].spec(range(N)))
        again = await storing.planned()
        assert [len(move.host) for move in again.moves] == [N - 2, N - 2]  # what is there is left out
        for worker in ranks.workers:
            planner.complete(worker.execute(again))
        await storing.ended()
        assert (await kv.lookup(KEYS)).num_blocks == N
        ranks.close()
        await until_idle(kv)


async def test_fewer_than_none_moved_is_none() -> None:
    """A worker that says -1 for an error has copied nothing that anyone may read."""
    async with open_any(AnyEngine(), CPU, shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        job = planner.plan_store(KEYS, ranks.engines[0].spec(range(N)))
        plan = await job.planned()
        for rank in range(2):
            planner.complete(Outcomes(plan.job, rank, -1, "it stumbled"))
        await job.ended()
        assert (await kv.lookup(KEYS)).num_blocks == 0
        await until_idle(kv)
        ranks.close()


async def test_a_plan_holds_what_it_names() -> None:
    """Between plan and completion no block of it is evicted, whatever else is stored."""
    async with open_any(AnyEngine(), cpu(8, 2 * STRIDE), shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        await store(kv, planner, ranks)
        job = planner.plan_load(KEYS, ranks.engines[0].spec(range(N)))
        plan = await job.planned()
        crowd = planner.plan_store(prompt(8, seed=1), ranks.engines[0].spec(range(8)))
        assert (await crowd.ended()).num_blocks == 0  # at once: nobody has anything to do
        assert crowd.plan is not None
        assert [len(move.host) for move in crowd.plan.moves] == [0, 0]  # no room: none of it, rather than a part
        ranks.wipe()
        for worker in ranks.workers:
            planner.complete(worker.execute(plan))
        await job.ended()
        assert ranks.num_right() == [N, N]
        ranks.close()
        await until_idle(kv)


async def test_a_hint_outlives_the_writing_of_what_it_is_about(tmp_path: Path) -> None:
    """Of a store that is written down in several windows, too: what nobody wants again makes room first."""
    engine, useful, closed, new = AnyEngine(), prompt(8, 1), prompt(8, 2), prompt(8, 3)
    async with open_any(engine, cpu(16), nvme(tmp_path)) as kv:
        assert inside(kv).chains[0].most_window < 8
        await kv.store(useful, engine.fill(useful, range(8)))
        planner = kv.planner()
        worker = Worker(planner.slabs(), layout=SMALL, device="cpu")
        worker.register_kv_caches(engine.caches[0])
        planner.register_worker()
        job = planner.plan_store(closed, engine.fill(closed, range(20, 28)), hint=ReuseHint(0.0))
        planner.complete(worker.execute(await job.planned()))
        assert (await job.ended()).num_blocks == 8
        worker.close()
        await kv.flush()
        await kv.store(new, engine.fill(new, range(40, 48)))
        assert [kv.stats()["cpu"].ready, *(len(in_memory(kv, keys)) for keys in (useful, closed, new))] == [16, 8, 0, 8]
        await until_idle(kv)


@pytest.mark.parametrize("how", ["moved", "not moved", "evicted", "cancelled", "late"])
async def test_what_is_left_to_another_plan_counts_as_there_once_it_is(how: str) -> None:
    """A worker that has slots for a block may fail, or hang for days: else it would be in no tier, and nobody told."""
    async with open_any(engine := AnyEngine(), cpu(32)) as kv:
        planner = kv.planner()
        planner.register_worker()
        first = planner.plan_store(KEYS[:4], engine.spec(range(4)))
        second = planner.plan_store(KEYS, engine.spec(range(N)))
        if how == "cancelled":
            await second.planned()
            first.cancel()
        else:
            assert (await first.planned()).moves[0].positions == (0, 1, 2, 3)
        assert (await second.planned()).moves[0].positions == (4, 5)
        if how == "evicted":
            await kv.evict(KEYS[:4])
        if how in ("moved", "not moved", "evicted"):
            planner.complete(Outcomes(first.number, 0, 0 if how == "not moved" else 4))
        planner.complete(Outcomes(second.number, 0, 2))
        result, num_there = await second.ended(), 4 if how == "moved" else 0
        assert (result.num_blocks, int(result.mask.sum())) == (2, num_there + 2)
        if how == "late":
            planner.complete(Outcomes(first.number, 0, 0))
        await first.ended()
        stats = kv.stats()
        lost = {Reason.REMOVED: 4} if how == "evicted" else {Reason.NOT_MOVED: 8} if how != "moved" else {}
        assert (stats.present, stats.dropped_because) == (num_there, lost)
        assert stats.stored + stats.present + stats.dropped == stats.store_requested == N + 4
        await until_idle(kv)


async def test_a_block_that_two_prompts_of_one_store_have_is_there_for_both() -> None:
    """It is copied once, and counted for the other as there if that went well."""
    async with open_any(engine := AnyEngine(), cpu(32)) as kv:
        planner = kv.planner()
        planner.register_worker()
        for num_moved, counts in ((0, (0, 0, 4)), (2, (2, 2, 4))):
            job = planner.plan_store([KEYS[:2], KEYS[:2]], engine.spec(range(4)))
            assert (await job.planned()).moves[0].positions == (0, 1)
            planner.complete(Outcomes(job.number, 0, num_moved))
            assert (await job.ended()).mask.tolist() == [num_moved > 0] * 4
            assert ((stats := kv.stats()).stored, stats.present, stats.dropped) == counts
        await until_idle(kv)


async def test_what_is_being_copied_out_is_loaded_from_where_it_is(tmp_path: Path) -> None:
    """A worker may take as long as it likes: of what only it has no load waits, and no lookup says so."""
    engine = AnyEngine()
    async with open_any(engine, cpu(32), nvme(tmp_path)) as kv:
        await kv.store(KEYS[:4], engine.fill(KEYS[:4], range(4)))
        await kv.flush()
        await kv.evict(KEYS, tier="cpu")
        planner = kv.planner()
        planner.register_worker()
        with Worker(planner.slabs(), layout=SMALL, device="cpu") as worker:
            worker.register_kv_caches(engine.caches[0])
            job = planner.plan_store(KEYS, engine.fill(KEYS, range(N)))
            plan = await job.planned()
            found = await kv.lookup(KEYS)
            assert (found.num_blocks, found.num_pending) == (4, 0)
            loaded = await kv.load(KEYS, engine.spec(range(10, 10 + N)), deadline_s=WAIT_S)
            assert loaded.num_blocks == engine.count_right(KEYS[:4], range(10, 14)) == 4
            planner.complete(worker.execute(spread(plan)))
            assert (await job.ended()).mask.all()
        assert (await kv.load(KEYS, engine.spec(range(10, 10 + N)))).num_blocks == N
        assert await kv.drain(timeout_s=WAIT_S)
        await until_idle(kv)


async def test_a_rank_without_room_costs_the_others_nothing() -> None:
    """Where one rank has no room for a store, no other evicts anything for it."""
    async with open_any(AnyEngine(), cpu(N, 2 * STRIDE), shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        await store(kv, planner, ranks)
        _, (chain, batch) = inside(kv).batches(KEYS)  # the facade leases for all ranks at once
        with chain.host.index.lease(batch.names):
            job = planner.plan_store(prompt(N, seed=1), ranks.engines[0].spec(range(N)))
            plan = await job.planned()
            assert [len(move.host) for move in plan.moves] == [0, 0]
        assert kv.stats()["cpu"].evicted == 0
        assert (await kv.lookup(KEYS)).num_blocks == N
        ranks.close()
        await until_idle(kv)


async def test_a_plan_is_executed_once() -> None:
    """A plan that is delivered twice is refused: after its job the slots may be another's. A cache has one planner."""
    async with open_any(AnyEngine(), CPU, shard=Shard.every(2)) as kv:
        planner = kv.planner()
        assert kv.planner() is planner
        ranks = Ranks(planner)
        ranks.compute()
        job = planner.plan_store(KEYS, ranks.engines[0].spec(range(N)))
        plan = await job.planned()
        for worker in ranks.workers:
            planner.complete(worker.execute(plan))
        await job.ended()
        with pytest.raises(ConfigurationError, match=f"job {plan.job} has been executed"):
            ranks.workers[0].execute(plan)
        ranks.close()
        await until_idle(kv)


async def test_memory_that_another_thread_gives_up_is_not_copied_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan whose memory goes just as it is started is refused, and can be executed once that is attached again."""
    async with open_any(AnyEngine(), CPU) as kv:
        planner, engine = kv.planner(), AnyEngine()
        planner.register_worker()
        with Worker(planner.slabs(), layout=SMALL, device="cpu") as worker:
            worker.register_kv_caches(engine.caches[0])
            job = planner.plan_store(KEYS, engine.fill(KEYS, range(N)))
            plan = await job.planned()
            with monkeypatch.context() as meanwhile:
                meanwhile.setattr(worker, "_check_new", lambda _: worker.attach(()))
                with pytest.raises(ConfigurationError, match="none of the slabs"):
                    worker.start(plan)
            worker.attach(planner.slabs())
            outcomes = worker.execute(plan)
            assert (outcomes.num_moved, outcomes.error) == (N, "")
            planner.complete(outcomes)
            assert (await job.ended()).num_blocks == N


async def test_a_load_overtaken_by_new_weights_brings_nothing() -> None:
    """The job's result says 0 blocks, and why, although the workers have copied."""
    async with open_any(AnyEngine(), CPU, shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        await store(kv, planner, ranks)
        job = planner.plan_load(KEYS, ranks.engines[0].spec(range(N)))
        plan = await job.planned()
        kv.advance_epoch("w1")
        planner.complete(ranks.workers[0].execute(plan))
        planner.complete(ranks.workers[1].execute(plan))
        result = await job.ended()
        assert (result.num_blocks, result.errors) == (0, ("epoch advanced",))
        ranks.close()
        await until_idle(kv)


async def test_a_load_overtaken_by_new_weights_counts_as_missed_for_that() -> None:
    """As one without a plan does, in a cache of this process, which knows of the weights."""
    engine = AnyEngine()
    async with open_any(engine, CPU) as kv:
        planner = kv.planner()
        planner.register_worker()
        await kv.store(KEYS, engine.fill(KEYS, range(N)))
        job = planner.plan_load(KEYS, engine.spec(range(N)))
        plan = await job.planned()
        kv.advance_epoch("w1")
        planner.complete(Outcomes(plan.job, 0, N))
        assert (await job.ended()).num_blocks == 0
        assert kv.stats().missed_because == {Reason.EPOCH_ADVANCED: N}
        await until_idle(kv)


async def test_answers_to_another_planner_end_no_job() -> None:
    """Of another cache, or of one before a restart: what a worker answers to one planner is nothing to the other."""
    engine, other = AnyEngine(), prompt(N, seed=1)
    async with open_any(AnyEngine(), CPU) as elsewhere, open_any(engine, CPU) as kv:
        first, second = kv.planner(), elsewhere.planner()
        first.register_worker()
        second.register_worker()
        with Worker(first.slabs(), layout=SMALL, device="cpu") as worker:
            worker.register_kv_caches(engine.caches[0])
            job = first.plan_store(KEYS, engine.fill(KEYS, range(N)))
            theirs = second.plan_store(other, engine.spec(range(N)))
            outcomes = worker.execute(await job.planned())
            await theirs.planned()
            second.complete(outcomes)
            first.complete(outcomes)
            assert (await job.ended()).num_blocks == N
            assert theirs.result is None
        assert (await kv.lookup(KEYS)).num_blocks == N
        assert (await kv.lookup(other)).num_blocks == 0


async def test_a_planner_that_is_gone_at_once_holds_nothing_of_what_is_brought_for_it(tmp_path: Path) -> None:
    """Even where its loads were begun and had not waited for a turn of the loop yet: a server has such clients."""
    engine = AnyEngine()
    async with open_any(engine, CPU, nvme(tmp_path)) as kv:
        await kv.store(KEYS, engine.fill(KEYS, range(N)))
        await kv.flush()
        await kv.evict(KEYS, tier="cpu")
        seat = inside(kv)
        jobs = seat.cache.new_jobs(1)
        jobs.workers.register(0, os.getpid())
        job = jobs.begin(
            JobRequest("load", KEYS, seat.batches(KEYS), engine.spec(range(N)), lambda: True, seat.deadline(None))
        )
        jobs.leave()
        assert job.result is not None
        assert job.result.errors == ("the planner has ended",)
        await until_idle(kv)
        assert kv.stats()["cpu"].leased == 0


async def test_what_workers_answered_before_the_planner_was_gone_counts() -> None:
    """Even in the same turn of the loop: a server may hear of both at once."""
    engine = AnyEngine()
    async with open_any(engine, CPU) as kv:
        seat = inside(kv)
        jobs = seat.cache.new_jobs(1)
        jobs.workers.register(0, os.getpid())
        spec, deadline = engine.spec(range(N)), seat.deadline(None)
        job = jobs.begin(JobRequest("store", KEYS, seat.batches(KEYS), spec, lambda: True, deadline))
        plan = await job.planned()
        jobs.complete(Outcomes(plan.job, 0, N))
        jobs.leave()
        assert (await job.ended()).num_blocks == N
        assert (await kv.lookup(KEYS)).num_blocks == N
        await until_idle(kv)


async def test_plans_that_cannot_be() -> None:
    """What is missing is said before anything is held: workers, a CPU tier, ids, ranks, answers."""
    engine = AnyEngine()
    async with open_any(engine, CPU, shard=Shard.every(2)) as kv:
        planner = kv.planner()
        with pytest.raises(ConfigurationError, match=r"register_worker\(\) for ranks \[0, 1\]"):
            planner.plan_store(KEYS, engine.spec(range(N)))
        planner.register_worker(rank=0)
        with pytest.raises(ConfigurationError, match="already, process"):
            planner.register_worker(rank=0)
        with pytest.raises(TypeError, match="positional"):
            planner.register_worker(os.getpid(), 1)  # type: ignore[call-arg]  # which is which must be said
        with pytest.raises(ConfigurationError, match="pid must be a positive int, got '7'"):
            planner.register_worker(rank=1, pid="7")  # type: ignore[arg-type]  # wrong on purpose
        with pytest.raises(ConfigurationError, match="rank 2 of 2"):
            planner.register_worker(rank=2)
        with pytest.raises(ConfigurationError, match="cannot be the worker"):
            planner.register_worker(rank=1, pid=2**22 + 1)
        with pytest.raises(LayoutMismatchError, match="need 6 block ids, got 5"):
            planner.plan_load(KEYS, engine.spec(range(N - 1)))
        with pytest.raises(ConfigurationError, match="rank 2 of 2: this cache has no such rank"):
            planner.complete(Outcomes(1, 2, 0))
        with pytest.raises(ConfigurationError, match="rank 5 needs host memory"):
            Worker(planner.slabs(), layout=SMALL, rank=5, device="cpu")
        wrong: Any
        for wrong in (planner.slabs, "slabs", [planner]):
            with pytest.raises(ConfigurationError, match=r"a worker attaches what planner\.slabs\(\) returns, got"):
                Worker(wrong, layout=SMALL, device="cpu")
        for wrong in (None, SMALL.groups[0]):
            with pytest.raises(ConfigurationError, match="needs the planner's layout, a KVLayout, got"):
                Worker(planner.slabs(), layout=wrong, device="cpu")
        with Worker(planner.slabs(), layout=SMALL, device="cpu") as worker:
            for wrong in (None, planner):
                with pytest.raises(ConfigurationError, match="a worker executes a Plan, as job"):
                    worker.execute(wrong)
            for wrong in (None, 1, [1], ["job"]):
                with pytest.raises(ConfigurationError, match="jobs must be those that a planner has returned, got"):
                    planner.wait_planned(wrong, 1.0)
            assert repr(worker) == f"Worker(rank 0 on cpu, {planner.slabs()[0].pool})"
            with pytest.raises(
                ConfigurationError, match=r"a worker attaches what planner\.slabs\(\) returns, got None"
            ):
                worker.attach(None)  # type: ignore[arg-type]  # wrong on purpose
        assert repr(worker) == "Worker(rank 0 on cpu, nothing attached)"
        assert kv.stats()["cpu"].pending == 0
    async with open_any(engine, {"medium": "memory", "capacity": "1MiB"}) as kv:
        kv.planner().register_worker()
        with pytest.raises(ConfigurationError, match="hold blocks in the CPU tier"):
            kv.planner().plan_store(KEYS, engine.spec(range(N)))


async def test_what_cannot_be_waited_for_uses_up_no_job() -> None:
    """A plan whose `after` is refused has not been executed: with a right one it is."""
    async with open_any(AnyEngine(), CPU, shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        ranks.compute()
        job = planner.plan_store(KEYS, ranks.engines[0].spec(range(N)))
        plan = await job.planned()
        for worker in ranks.workers:
            with pytest.raises(ConfigurationError, match="after must"):
                worker.start(plan, after=object())
            planner.complete(worker.execute(plan))
        assert (await job.ended()).num_blocks == N
        ranks.close()
        await until_idle(kv)


async def test_a_thread_may_wait_for_plans_for_a_while() -> None:
    """For those that it names; they are polled as if it had not. The event loop's own thread may not."""
    async with open_any(AnyEngine(), CPU, shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        job = planner.plan_store(KEYS, ranks.engines[0].spec(range(N)))
        with pytest.raises(ConfigurationError, match="must not block"):
            planner.wait_planned([job], 1)
        assert await asyncio.to_thread(planner.wait_planned, [job], 30)
        assert planner.wait_planned([job], 0)
        assert planner.poll() == [job]
        job.cancel(undelivered=True)
        await job.ended()
        ranks.close()


async def test_an_execution_cannot_be_cancelled() -> None:
    """Its future is done when its copy is: who stops waiting for it must not think that the blocks are free."""
    async with open_any(AnyEngine(), CPU, shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        job, after = planner.plan_store(KEYS, ranks.engines[0].spec(range(N))), threading.Event()
        plan = await job.planned()
        moving = [worker.start(plan, after=after) for worker in ranks.workers]
        assert [future.cancel() for future in moving] == [False, False]
        after.set()
        assert [future.result(30).num_moved for future in moving] == [N, N]
        for future in moving:
            planner.complete(future.result())
        await job.ended()
        ranks.close()
        await until_idle(kv)


@pytest.mark.parametrize(
    "wrong", [{"num_moved": None}, {"num_moved": 2.5}, {"rank": None}, {"rank": -1}, {"rank": 2}, {"job": []}]
)
async def test_outcomes_that_say_nothing_leave_the_job_as_it_was(wrong: dict[str, Any]) -> None:
    """They are refused, and the right ones end the job; no slot is lost."""
    async with open_any(AnyEngine(), CPU, shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        job = planner.plan_store(KEYS, ranks.engines[0].spec(range(N)))
        plan = await job.planned()
        planner.complete(Outcomes(plan.job, 0, N))
        with pytest.raises(ConfigurationError):
            planner.complete(replace(Outcomes(plan.job, 1, N), **wrong))
        assert kv.stats()["cpu"].pending == 2 * N
        planner.complete(Outcomes(plan.job, 1, np.int64(N)))  # type: ignore[arg-type]  # an int of numpy
        assert (await job.ended()).num_blocks == N
        ranks.close()
        await until_idle(kv)


@pytest.mark.parametrize("binds", [False, True])
async def test_a_load_with_gaps_brings_what_every_rank_has(tmp_path: Path, *, binds: bool) -> None:
    """Also behind a hole, from memory and from disk; what one rank lacks is a gap on all."""
    async with open_any(AnyEngine(), CPU, nvme(tmp_path), shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        await store(kv, planner, ranks)
        await kv.evict(KEYS[:1])
        await kv.evict(KEYS[4:5], tier="cpu")
        chain, batch = inside(kv).batches(KEYS)[1]  # the facade evicts for all ranks at once
        for tier in chain.booked:
            tier.index.remove(batch.names[2:3])
        ranks.wipe()
        spec, before = ranks.engines[0].spec(range(N)), kv.stats()
        job = planner.plan_load(KEYS, None if binds else spec, gaps=True)
        plan = await job.planned()
        assert plan.num_blocks == N
        assert [move.positions for move in plan.moves] == [(1, 3, 4, 5)] * 2
        for worker in ranks.workers:
            planner.complete(worker.execute(spread(job.bind(spec) if binds and worker.rank == 0 else job.plan or plan)))
        result = await job.ended()
        assert result.mask.tolist() == [False, True, False, True, True, True]
        assert (result.num_blocks, result.num_bytes) == (0, 4 * 2 * PAYLOAD)
        for rank, engine in enumerate(ranks.engines):
            assert engine.right(KEYS, range(N), f"rank {rank}") == result.mask.tolist()
        after = kv.stats()
        hits = after["cpu"].hits - before["cpu"].hits, after["nvme"].hits - before["nvme"].hits
        assert (hits, after.missed - before.missed) == ((6, 2), 4)
        ranks.close()
        await until_idle(kv)


@pytest.mark.parametrize("is_planned", [False, True])
async def test_a_load_with_gaps_passes_over_what_workers_merely_have_slots_for(*, is_planned: bool) -> None:
    """However many there are: what a tier has between and behind them is brought."""
    engine, keys, n = AnyEngine(), prompt(60), 60
    async with open_any(engine, cpu(128), ScriptedSlotBackend(n)) as kv:
        await (await kv.store(keys, engine.fill(keys, range(n)))).settled()
        await kv.evict(keys, tier="cpu")
        planner = kv.planner()
        planner.register_worker()
        with_workers = [keys[at : at + 1] for at in range(0, n, 2)]
        for each in with_workers:
            await kv.evict(each)
        copying = planner.plan_store(with_workers, engine.spec(range(n // 2)))
        await copying.planned()
        if is_planned:
            job = planner.plan_load(keys, engine.spec(range(n)), gaps=True)
            planner.complete(Outcomes(job.number, 0, len((await job.planned()).moves[0].positions)))
            mask = (await job.ended()).mask
        else:
            mask = (await kv.load(keys, engine.spec(range(n)), gaps=True)).mask
        assert mask.tolist() == [False, True] * (n // 2)
        planner.complete(Outcomes(copying.number, 0, 0))
        await copying.ended()
        await until_idle(kv)


async def test_a_load_with_gaps_goes_on_behind_what_is_lost() -> None:
    """Of a block whose record is broken, or has gone since it was asked for; cancelled meanwhile, it holds nothing."""
    engine, below = AnyEngine(), ScriptedBackend()
    async with open_any(engine, cpu(32), below) as kv:
        await (await kv.store(KEYS, engine.fill(KEYS, range(N)))).settled()
        await kv.evict(KEYS, tier="cpu")
        below.flip_byte(2)
        planner = kv.planner()
        planner.register_worker()
        job = planner.plan_load(KEYS, gaps=True)
        (move,) = (await job.planned()).moves
        assert move.positions == (0, 1, 3, 4, 5)
        job.cancel()
        await kv.evict(KEYS, tier="cpu")
        below.on_read.hold()
        job = planner.plan_load(KEYS, gaps=True)
        await until(lambda: below.on_read.num_held > 0)
        job.cancel()
        assert (await job.ended()).mask.tolist() == [False] * N
        below.on_read.release()
        await until_idle(kv)


@pytest.mark.parametrize("gaps", [False, True])
async def test_a_planned_load_names_what_a_tier_has_lost(tmp_path: Path, *, gaps: bool) -> None:
    """By its result: the tier and the reason once, for all ranks together, beside what a worker says."""
    async with open_any(AnyEngine(), CPU, nvme(tmp_path), shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        await store(kv, planner, ranks)
        await kv.evict(KEYS[1:], tier="cpu")
        overwrite(tmp_path)
        job = planner.plan_load(KEYS, ranks.engines[0].spec(range(N)), gaps=gaps)
        plan = await job.planned()
        assert plan.num_blocks == (N if gaps else 1)
        for worker in ranks.workers:
            planner.complete(replace(worker.execute(spread(plan)), error="late"))
        result = await job.ended()
        assert result.errors == ("rank 0: late", "rank 1: late")
        assert result.mask.tolist() == [True] + [False] * (N - 1)
        assert [(fault.tier, fault.reason) for fault in result.faults] == [("nvme", Reason.GONE)]
        ranks.close()
        await until_idle(kv)


@pytest.mark.parametrize("gaps", [False, True])
async def test_a_planned_load_names_a_tier_that_is_away(*, gaps: bool) -> None:
    """Once, as a load does; and nothing where no tier is to blame."""
    engine, away = AnyEngine(), ScriptedBackend(name="away", timeout_s=0.02, required=False)
    away.on_open.hold()
    async with open_any(engine, cpu(32), away) as kv:
        planner = kv.planner()
        planner.register_worker()
        await kv.store(KEYS[:2], engine.fill(KEYS[:2], range(2)))
        job = planner.plan_load(KEYS, gaps=gaps)
        assert (await job.planned()).moves[0].positions == (0, 1)
        job.cancel()
        assert (await job.ended()).faults == (TierFault("away", Reason.TIER_AWAY, N - 2),)
        job = planner.plan_load(KEYS[:2], gaps=gaps)
        await job.planned()
        job.cancel()
        assert (await job.ended()).faults == ()
        away.on_open.release()


async def test_what_a_planned_load_missed_is_counted_by_what_befell_it() -> None:
    """As never stored, as lost in its tier, or as not moved: the last only of what a worker had to move."""
    engine, below = AnyEngine(), ScriptedBackend()
    async with open_any(engine, cpu(32), below) as kv:
        planner = kv.planner()
        planner.register_worker()
        await (await kv.store(KEYS[:4], engine.fill(KEYS[:4], range(4)))).settled()
        job = planner.plan_load(KEYS, engine.spec(range(N)))
        planner.complete(Outcomes((await job.planned()).job, 0, 4))
        await job.ended()
        assert kv.stats().missed_because == {"never stored": N - 4}
        job = planner.plan_load(KEYS[:4], engine.spec(range(4)))
        planner.complete(Outcomes((await job.planned()).job, 0, 1))
        await job.ended()
        assert kv.stats().missed_because == {"never stored": N - 4, Reason.NOT_MOVED: 3}
        assert not inside(kv).fates.load_faults
        await kv.evict(KEYS, tier="cpu")
        below.flip_byte(0)
        await planner.plan_load(KEYS[:4], engine.spec(range(4))).ended()
        assert kv.stats().missed_because == {"never stored": N - 4, Reason.NOT_MOVED: 3, Reason.UNREADABLE: 4}
        assert inside(kv).fates.load_faults == {"keyed: unreadable": 1}


@pytest.mark.parametrize(("stored", "why"), [(slice(1, N), "never stored"), (slice(N - 1), Reason.UNREADABLE)])
async def test_a_planned_load_with_gaps_is_counted_by_what_befell_the_first_it_missed(stored: slice, why: str) -> None:
    """Of two that are missing, one never stored and one that cannot be read: whichever comes first."""
    engine, below = AnyEngine(), ScriptedBackend()
    async with open_any(engine, cpu(32), below) as kv:
        planner = kv.planner()
        planner.register_worker()
        keys = KEYS[stored]
        await (await kv.store(keys, engine.fill(keys, range(N)[stored]))).settled()
        await kv.evict(keys, tier="cpu")
        below.flip_byte(2)
        job = planner.plan_load(KEYS, engine.spec(range(N)), gaps=True)
        (move,) = (await job.planned()).moves
        there = range(N)[stored]
        assert list(move.positions) == [*there[:2], *there[3:]]
        planner.complete(Outcomes(job.number, 0, len(move.positions)))
        await job.ended()
        assert kv.stats().missed_because == {why: 2}
        await until_idle(kv)


async def test_a_planned_load_says_that_its_time_was_up() -> None:
    """And of which tier it has waited for the blocks."""
    limits = LIMITS.model_copy(update={"load_timeout_s": 0.02})
    engine, below = AnyEngine(), ScriptedBackend()
    async with open_any(engine, cpu(32), below, limits=limits) as kv:
        await (await kv.store(KEYS, engine.fill(KEYS, range(N)))).settled()
        await kv.evict(KEYS, tier="cpu")
        below.on_read.hold()
        planner = kv.planner()
        planner.register_worker()
        result = await planner.plan_load(KEYS).ended()
        assert {(fault.tier, fault.reason) for fault in result.faults} == {("keyed", Reason.DEADLINE)}
        below.on_read.release()
        await until_idle(kv)


async def test_who_cancels_a_job_that_is_over_has_its_slots_given_to_nobody() -> None:
    """A worker may have ended before anybody looked at its plan: the slots may be another's by now."""
    async with open_any(engine := AnyEngine(), cpu(32)) as kv:
        planner = kv.planner()
        planner.register_worker()
        job = planner.plan_store(KEYS, engine.spec(range(N)))
        await until(lambda: kv.stats()["cpu"].pending == N)
        planner.complete(Outcomes(job.number, 0, 0, "the worker has ended"))
        await job.ended()
        job.cancel()
        assert (await job.planned()).moves == ()


async def test_a_plan_may_be_submitted_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a stream closes under it, the worker says how far it came once the last copy has ended, and not before."""
    monkeypatch.setattr(worker_module, "_WINDOW_BYTES", 2 * STRIDE)
    submit, submitted = Lane.submit, list[object]()

    def submit_two(lane: Lane, *args: Any) -> object:  # noqa: ANN401 - as it is
        if len(submitted) == 2:
            raise ClosedError("closed just now")
        submitted.append(args)
        return submit(lane, *args)

    async with open_any(AnyEngine(), CPU, shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        ranks.compute()
        job = planner.plan_store(KEYS, ranks.engines[0].spec(range(N)))
        plan = await job.planned()
        with monkeypatch.context() as patch:
            patch.setattr(Lane, "submit", submit_two)
            outcomes = await asyncio.to_thread(ranks.workers[0].execute, spread(plan))
        assert (outcomes.num_moved, outcomes.error) == (4, "ClosedError: closed just now")
        planner.complete(outcomes)
        planner.complete(ranks.workers[1].execute(spread(plan)))
        assert (await job.ended()).num_blocks == 4
        ranks.close()
