"""Jobs that are planned before the engine has chosen its blocks, and those that are completed key by key."""

from dataclasses import replace

import pytest
from anyio.lowlevel import checkpoint

from tests.support.any_layout import SMALL, STRIDE, AnyEngine, cpu, open_any, prompt
from tests.support.caches import until_idle
from tests.support.planned import CPU, KEYS, PAYLOAD, N, Ranks, mapped, spread, store
from tiered_kv import (
    ConfigurationError,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    JobResult,
    KVLayout,
    LayoutMismatchError,
    Planner,
    Shard,
    Worker,
)


async def test_a_load_is_bound_when_the_engine_has_chosen_its_blocks() -> None:
    """Held by key: nothing of it is evicted meanwhile. Then a part of it goes into blocks, and the rest is let go."""
    async with open_any(AnyEngine(), cpu(8, 2 * STRIDE), shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        await store(kv, planner, ranks)
        before = kv.stats()
        job = planner.plan_load(KEYS)
        plan = await job.planned()
        assert plan.num_blocks == N
        assert [move.engine for move in plan.moves] == [None, None]
        assert plan.moves[0].positions == tuple(range(N))
        crowd = planner.plan_store(prompt(8, seed=1), ranks.engines[0].spec(range(8)))
        assert (await crowd.ended()).num_blocks == 0
        with pytest.raises(ConfigurationError, match=r"no blocks of the engine yet: job\.bind\(\)"):
            ranks.workers[0].execute(plan)
        ranks.wipe()
        bound = job.bind(ranks.engines[0].spec(range(2, 5)), start=2)
        assert job.plan is bound
        assert bound.num_blocks == 3
        assert bound.moves[1].positions == (2, 3, 4)
        for worker in ranks.workers:
            planner.complete(worker.execute(spread(bound)))
        assert await job.ended() == JobResult(job.number, 3, num_bytes=3 * 2 * PAYLOAD)
        for rank, engine in enumerate(ranks.engines):
            assert engine.right(KEYS, range(N), f"rank {rank}") == [False, False, True, True, True, False]
        after = kv.stats()
        assert (after.requested - before.requested, after["cpu"].hits - before["cpu"].hits) == (6, 6)  # of two ranks
        ranks.close()
        await until_idle(kv)


async def test_what_cannot_be_bound() -> None:
    """Nothing has changed: the right call works after it. What is over is bound to nothing, which is no error."""
    layout = KVLayout((replace(SMALL.groups[0], page_size=2),))
    engine = AnyEngine(layout)
    async with open_any(engine, CPU) as kv:
        planner = kv.planner()
        planner.register_worker()
        job = planner.plan_store(KEYS)
        with pytest.raises(ConfigurationError, match="comes when the job is planned"):
            job.bind(engine.spec(range(N)))
        await job.planned()
        for wrong, expected in (
            (GPULoadStoreSpec(range(2 * N + 2)), "14 block ids, 2 a key, from key 0 on: the plan has 6 keys"),
            (GPULoadStoreSpec(range(3)), "3 block ids, 2 a key"),
            (GPULoadStoreSpec(range(2 * N), group=1), "keys of KV group 0, but block ids of 1"),
        ):
            with pytest.raises(LayoutMismatchError, match=expected):
                job.bind(wrong)
        with pytest.raises(ConfigurationError, match="given as GPULoadStoreSpec, got list"):
            job.bind(list(range(12)))  # type: ignore[arg-type]  # wrong on purpose
        bound = job.bind(engine.fill(KEYS, range(N)))
        with pytest.raises(ConfigurationError, match="bound once"):
            job.bind(engine.spec(range(N)))
        with Worker(planner.slabs(), layout=layout, device="cpu") as worker:
            worker.register_kv_caches(engine.caches[0])
            planner.complete(worker.execute(bound))
            assert (await job.ended()).num_blocks == N
            late = planner.plan_load(KEYS)
            await late.planned()
            late.cancel()
            nothing = late.bind(engine.spec(range(N)))  # the cancellation has not been taken in yet
            assert (nothing.num_blocks, nothing.moves) == (0, ())
            assert worker.execute(nothing).num_moved == 0
        assert (await late.ended()).errors == ("cancelled",)
        with pytest.raises(LayoutMismatchError, match="keys of KV group 0, but block ids of 1"):
            planner.plan_load(KEYS, GPULoadStoreSpec(range(2 * N), group=1))
        await until_idle(kv)


async def test_no_block_of_the_engine_is_planned_for_two_keys() -> None:
    """It is refused, by its id, before a worker hears of it. Prompts that are stored together share what they share."""
    runs, shared = [KEYS[:3], KEYS], [0, 1, 2, 0, 1, 2, 3, 4, 5]
    async with open_any(engine := AnyEngine(), CPU) as kv:
        planner = kv.planner()
        with Worker(planner.slabs(), layout=SMALL, device="cpu") as worker:
            worker.register_kv_caches(engine.caches[0])
            planner.register_worker()
            twice, swapped = engine.spec([0, 1, 2, 3, 4, 1]), engine.spec([1, *shared[1:]])
            storing = planner.plan_store(runs)
            await storing.planned()
            for refuse in (lambda: planner.plan_store(runs, swapped), lambda: storing.bind(swapped)):
                with pytest.raises(ConfigurationError, match="block id 1 at position 1 is there twice"):
                    refuse()
            engine.fill(KEYS, range(N))
            planner.complete(worker.execute(storing.bind(engine.spec(shared))))
            assert (await storing.ended()).num_blocks == N
            loading = planner.plan_load(KEYS)
            await loading.planned()
            for refuse in (
                lambda: planner.plan_store(KEYS, twice),
                lambda: planner.plan_load(KEYS, twice),
                lambda: loading.bind(twice),
            ):
                with pytest.raises(ConfigurationError, match="block id 1 at position 5 is there twice"):
                    refuse()
            engine.wipe()
            planner.complete(worker.execute(loading.bind(engine.spec(range(N)))))
            assert (await loading.ended()).num_blocks == engine.count_right(KEYS, range(N)) == N
        await until_idle(kv)


async def test_a_store_is_completed_key_by_key() -> None:
    """Slots are reserved by key, written by whoever has the bytes, and answered for in any order."""
    async with open_any(AnyEngine(), CPU, shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        await store(kv, planner, ranks)
        keys = KEYS + prompt(N + 4)[N:]
        job = planner.plan_store(keys)
        plan = await job.planned()
        assert [move.positions for move in plan.moves] == [(6, 7, 8, 9)] * 2
        for rank, move in enumerate(plan.moves):
            slab = next(each for each in planner.slabs() if each.pool == move.host.pool)
            with mapped(slab) as memory:
                for slot, at in zip(move.host.ids.tolist(), move.positions, strict=True):
                    content = ranks.engines[rank].content(keys[at], 0, f"rank {rank}")
                    memory[slot * slab.stride_bytes : slot * slab.stride_bytes + len(content)] = content
        job.complete(keys[7:9], rank=0)
        job.complete(keys[:7], rank=0)
        job.complete(keys[9:], rank=0, moved=False)
        with pytest.raises(ConfigurationError, match="rank 2 of 2"):
            job.complete(keys, rank=2)
        await checkpoint()
        assert job.result is None
        assert (await kv.lookup(keys)).num_blocks == N  # a block counts when every rank has it
        job.complete([keys[8], keys[6], keys[9]], rank=1)
        job.complete(keys, rank=1)
        assert await job.ended() == JobResult(job.number, 3, num_bytes=3 * 2 * PAYLOAD)
        job.complete(keys, rank=1, moved=False)
        assert (await kv.lookup(keys)).num_blocks == N + 3
        loading = planner.plan_load(keys)
        held = await loading.planned()
        assert held.num_blocks == N + 3
        for rank, move in enumerate(held.moves):  # read where it is, by slot
            for slot, at in zip(move.host.ids.tolist(), move.positions, strict=True):
                content = ranks.engines[rank].content(keys[at], 0, f"rank {rank}")
                assert read_slot(planner, move.host, slot) == content
            loading.complete(keys[: N + 3], rank=rank)
        assert (await loading.ended()).num_blocks == N + 3
        ranks.close()
        await until_idle(kv)


def read_slot(planner: Planner, spec: CPULoadStoreSpec, slot: int) -> bytes:
    """Return what is in a slot, read past the cache."""
    slab = next(each for each in planner.slabs() if each.pool == spec.pool)
    with mapped(slab) as memory:
        return memory[slot * slab.stride_bytes :][: slab.payload_bytes]
