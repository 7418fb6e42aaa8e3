"""Jobs of a planner whose cache is a server's, and whoever dies: the planner, a worker, the server."""

import asyncio
import signal
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.host.processes import planner, started, worker
from tests.host.test_deaths import FOREVER_S, attached_at, facts, served, until_clean, until_found
from tests.support.any_layout import MODEL, SMALL, STRIDE, AnyEngine, cpu, prompt
from tests.support.caches import until
from tests.support.planned import mapped
from tests.support.serving import attached, serving
from tiered_kv import BackendUnavailableError, BlockKeys, ConnectedKV, GPULoadStoreSpec, Outcomes, Shard, Worker
from tiered_kv.host.client_planner import introduce
from tiered_kv.host.connection import FarSide
from tiered_kv.values.events import WorkerEnded

KEYS = prompt(8)


async def crowd(kv: ConnectedKV, engine: AnyEngine) -> None:
    """Store so much that every slot is used again that is anyone's to use; all of it is right."""
    for seed in range(1, 20):
        keys = prompt(8, seed=seed)
        await kv.store(keys, engine.fill(keys, range(8)))
        assert (await kv.load(keys, engine.spec(range(8)))).num_blocks == engine.count_right(keys, range(8)) == 8


async def test_a_worker_killed_in_the_midst_of_a_copy(tmp_path: Path) -> None:
    """Its job ends when it has; before that its slots are nobody's, and after it they are anybody's."""
    async with served(tmp_path), attached_at(tmp_path, engine := AnyEngine()) as kv:
        with started(worker, KEYS, gets_stuck=True) as process:
            kv.planner().register_worker(pid=process.pid)
            job = kv.planner().plan_store(KEYS, engine.spec(range(8)))
            process.say((kv.planner().slabs(), await job.planned()))
            assert await asyncio.to_thread(process.hear) == "stuck"
            await crowd(kv, engine)
            assert kv.stats()["cpu"].pending == 8
            process.kill()
            with anyio.fail_after(FOREVER_S):
                result = await job.ended()
            assert (result.num_blocks, "has ended" in result.errors[0]) == (0, True)
            assert (await kv.lookup(KEYS)).num_blocks == 0
            await until(lambda: kv.stats()["cpu"].pending == 0)


async def test_one_of_several_that_hold_the_same_killed_in_the_midst_of_a_copy(tmp_path: Path) -> None:
    """Until then none of the store's slots are anybody's; what the other has copied of it is there for both."""
    async with (
        served(tmp_path),
        attached_at(tmp_path, engine := AnyEngine()) as other,
        attached(tmp_path / "kv.sock", shard=Shard.every(1, copies=2)) as kv,
    ):
        planning = kv.planner()
        with started(worker, KEYS, gets_stuck=True) as process:
            planning.register_worker(rank=0, pid=process.pid)
            planning.register_worker(rank=1)
            with Worker(planning.slabs(), layout=SMALL, rank=1, device="cpu") as ours:
                ours.register_kv_caches(engine.caches[0])
                job = planning.plan_store(KEYS, engine.fill(KEYS, range(8)))
                plan = await job.planned()
                process.say((planning.slabs(), plan))
                planning.complete(ours.execute(plan))
            assert await asyncio.to_thread(process.hear) == "stuck"
            await crowd(other, engine)
            assert (await kv.lookup(KEYS)).num_blocks == 0
            assert kv.stats()["cpu"].pending == 8
            process.kill()
        with anyio.fail_after(FOREVER_S):
            result = await job.ended()
        assert (result.num_blocks, result.mask.tolist()) == (4, [False, True] * 4)
        assert kv.stats()["cpu"].pending == 0
        engine.wipe()
        loaded = await other.load(KEYS, engine.spec(range(8, 16)), gaps=True)
        assert loaded.mask.tolist() == [False, True] * 4
        assert engine.right(KEYS, range(8, 16)) == [False, True] * 4


@pytest.mark.parametrize("binds", [False, True])
async def test_a_planner_killed_while_its_worker_copies(tmp_path: Path, *, binds: bool) -> None:
    """What the worker may be writing is nobody's as long as that lives, whatever the server was told before the end."""
    async with served(tmp_path):
        with started(worker, KEYS, gets_stuck=True) as process:
            with started(planner, tmp_path / "kv.sock", process.pid, KEYS, binds=binds) as planning:
                process.say(await asyncio.to_thread(planning.hear))
                assert await asyncio.to_thread(process.hear) == "stuck"
            async with attached_at(tmp_path, engine := AnyEngine()) as kv:
                await crowd(kv, engine)
                assert kv.stats()["cpu"].doomed == 8
                process.kill()
                await until(lambda: kv.stats()["cpu"].doomed == 0)
                assert (await kv.lookup(KEYS)).num_blocks == 0
        await until_clean(tmp_path)


async def test_a_flush_does_not_wait_for_what_a_planner_that_is_gone_had_workers_do(tmp_path: Path) -> None:
    """They live, and nobody says any more what they have copied: others store the same, in other slots."""
    async with served(tmp_path), attached_at(tmp_path, engine := AnyEngine()) as kv:
        with (
            started(worker, KEYS, gets_stuck=False) as process,
            started(planner, tmp_path / "kv.sock", process.pid, KEYS, binds=False) as planning,
        ):
            process.say(await asyncio.to_thread(planning.hear))
            assert (await asyncio.to_thread(process.hear)).num_moved == 8
            before = asyncio.create_task(kv.flush())
            await until(lambda: any(client["questions"] for client in facts(tmp_path)["clients"]))
            planning.kill()
            with anyio.fail_after(FOREVER_S / 2):  # half of what a flush may take
                assert await before
                assert await kv.flush()
            assert (await kv.lookup(KEYS)).num_blocks == 0
            assert (await kv.store(KEYS, engine.fill(KEYS, range(8)))).num_stored == 8
            assert kv.stats()["cpu"].doomed == 8
            process.kill()
            await until(lambda: kv.stats()["cpu"].doomed == 0)
            loaded = await kv.load(KEYS, engine.spec(range(8, 16)))
            assert loaded.num_blocks == engine.count_right(KEYS, range(8, 16)) == 8


async def test_a_plan_that_no_worker_has_ends_with_its_planner(tmp_path: Path) -> None:
    """The worker lives, but was told of nothing: its slots go back at once."""
    with serving(tmp_path, cpu(16)) as server, started(worker, KEYS, gets_stuck=False) as process:
        async with attached(server, AnyEngine()) as other:
            async with attached(server, AnyEngine()) as kv:
                kv.planner().register_worker(pid=process.pid)
                await kv.planner().plan_store(KEYS).planned()
                assert other.stats()["cpu"].pending == 8
            await until(lambda: other.stats()["cpu"].pending == 0)


async def test_a_plan_bound_when_a_worker_has_just_ended(tmp_path: Path) -> None:
    """The worker of another rank has the plan, and may be writing: until it has answered, its slots are nobody's."""
    is_lost = threading.Event()

    def hear(event: object) -> None:
        if isinstance(event, WorkerEnded):
            is_lost.set()

    with serving(tmp_path, cpu(32), emit=hear) as server, started(worker, KEYS, gets_stuck=False) as process:
        async with attached(server, shard=(Shard(0, 2), Shard(1, 2))) as kv:
            planning = kv.planner()
            planning.register_worker(rank=0)
            planning.register_worker(rank=1, pid=process.pid)
            job = planning.plan_store(KEYS)
            await job.planned()
            process.kill()
            is_lost.wait()  # and this event loop hears of nothing
            bound = job.bind(GPULoadStoreSpec(range(8)))
            assert kv.stats()["cpu"].pending == 16
            planning.complete(Outcomes(bound.job, 0, 8))
            with anyio.fail_after(FOREVER_S):
                result = await job.ended()
            assert (result.num_blocks, "has ended" in result.errors[0]) == (0, True)
            await until(lambda: kv.stats()["cpu"].pending == 0)


async def test_a_plan_of_more_blocks_than_may_be_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its job ends and says why, and no slot is held for it."""
    with serving(tmp_path, cpu(64)) as server:
        async with attached(server, shard=tuple(Shard(rank, 2) for rank in range(2))) as kv:
            planning = kv.planner()
            for rank in range(2):
                planning.register_worker(rank=rank)
            before = await planning.plan_store(KEYS).planned()  # the server knows the workers
            assert before.num_blocks == 8
            with monkeypatch.context() as patched, anyio.fail_after(FOREVER_S):
                patched.setattr("tiered_kv.host.session_jobs.MOST_BLOCKS", 15)
                result = await planning.plan_store(prompt(8, seed=7)).ended()
            assert "8 keys for 2 ranks, 15 blocks at most: give fewer keys" in result.errors[0]
            assert kv.stats()["cpu"].pending == 16  # those of the job before


async def test_a_plan_that_nobody_has_ends_with_any_worker(tmp_path: Path) -> None:
    """Its client ends it, and the server lets go of what it holds for every rank."""
    with serving(tmp_path, cpu(32)) as server, started(worker, KEYS, gets_stuck=False) as process:
        async with attached(server, shard=(Shard(0, 2), Shard(1, 2))) as kv:
            planning = kv.planner()
            planning.register_worker(rank=0)
            planning.register_worker(rank=1, pid=process.pid)
            job = planning.plan_store(KEYS)
            await job.planned()
            process.kill()
            with anyio.fail_after(FOREVER_S):
                assert "has ended" in (await job.ended()).errors[0]
            await until(lambda: kv.stats()["cpu"].pending == 0)


async def test_who_drains_plans_no_store(tmp_path: Path) -> None:
    """It ends with nothing; loads are planned until the client is closed."""
    with serving(tmp_path, cpu(16)) as server:
        async with attached(server, engine := AnyEngine()) as kv:
            await kv.store(KEYS, engine.fill(KEYS, range(8)))
            planning = kv.planner()
            planning.register_worker()
            assert await kv.drain()
            assert (await planning.plan_store(prompt(4, seed=1)).ended()).errors == ("draining",)
            job = planning.plan_load(KEYS)
            assert (await job.planned()).num_blocks == 8
            job.cancel()


async def test_prompts_stored_together_are_of_the_weights_that_were_served_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others that are served from the midst of it on, as the call is a thread's, make no job of several weights."""
    with serving(tmp_path, cpu(16)) as server:
        async with attached(server, engine := AnyEngine()) as kv:
            planning, check = kv.planner(), FarSide.check
            planning.register_worker()

            def check_and_advance(side: FarSide, keys: BlockKeys) -> None:
                check(side, keys)
                if keys is not KEYS:
                    kv.advance_epoch("others")

            with monkeypatch.context() as patch:
                patch.setattr(FarSide, "check", check_and_advance)
                job = planning.plan_store([KEYS, prompt(4, seed=1)], engine.spec(range(12)))
            planning.complete(Outcomes((await job.planned()).job, 0, 12))
            assert ((await job.ended()).num_blocks, job.result and job.result.errors) == (12, ())
            kv.advance_epoch(MODEL.weights)
            assert [(await kv.lookup(each)).num_blocks for each in (KEYS, prompt(4, seed=1))] == [8, 4]


async def test_whatever_a_worker_says_of_its_error_ends_the_job(tmp_path: Path) -> None:
    """Of a file whose name is of any bytes, say: a server that did not hear it would hold the slots for good."""
    with serving(tmp_path, cpu(16)) as server:
        async with attached(server, engine := AnyEngine()) as kv:
            planning = kv.planner()
            planning.register_worker()
            job = planning.plan_store(KEYS, engine.spec(range(8)))
            planning.complete(Outcomes((await job.planned()).job, 0, 0, "no caf\udce9"))
            with anyio.fail_after(FOREVER_S / 2):
                assert (await job.ended()).errors == ("rank 0: no caf\\udce9",)
            assert not any(tier.leased or tier.pending for tier in kv.stats().tiers)


async def test_a_flush_waits_for_what_a_clients_worker_copies_out(tmp_path: Path) -> None:
    """As for any store, whichever client asks; a plan that is not bound is at no worker."""
    with serving(tmp_path, cpu(32)) as server:
        async with attached(server, engine := AnyEngine()) as kv, attached(server) as other:
            planning = kv.planner()
            planning.register_worker()
            unbound = planning.plan_store(prompt(8, seed=1))
            await unbound.planned()
            await other.flush()
            job = planning.plan_store(KEYS, engine.spec(range(8)))
            await job.planned()
            flushing = [asyncio.create_task(each.flush()) for each in (kv, other)]
            for _ in range(20):
                assert (await kv.lookup(KEYS)).num_blocks == (await other.lookup(KEYS)).num_blocks == 0
            assert not any(each.done() for each in flushing)
            planning.complete(Outcomes(job.number, 0, 8))
            with anyio.fail_after(FOREVER_S):
                await asyncio.gather(*flushing)
            assert (await kv.lookup(KEYS)).num_blocks == 8
            unbound.cancel()
            await unbound.ended()


async def test_a_server_killed_under_a_plan(tmp_path: Path) -> None:
    """Jobs end, others end at once while none is there; then workers take the memory of the next one, and go on."""
    async with AsyncExitStack() as stack:
        first, engine = await stack.enter_async_context(served(tmp_path)), AnyEngine()
        kv = await stack.enter_async_context(attached_at(tmp_path, engine))
        process = stack.enter_context(started(worker, KEYS, gets_stuck=False))
        planning = kv.planner()
        planning.register_worker(pid=process.pid)
        slabs, job = planning.slabs(), planning.plan_store(KEYS, engine.spec(range(8)))
        process.say((slabs, await job.planned()))
        outcomes = await asyncio.to_thread(process.hear)
        first.kill()
        with anyio.fail_after(FOREVER_S):
            assert (await job.ended()).errors == ("server away",)
            assert (await planning.plan_store(KEYS).ended()).errors == ("server away",)
            assert (await planning.plan_load(KEYS[:4]).ended()).errors == ("server away",)
        stats = kv.stats()
        assert (stats.dropped_because, stats.missed_because) == ({"server away": 8}, {"server away": 4})
        planning.complete(outcomes)
        assert planning.slabs() == ()
        await stack.enter_async_context(served(tmp_path))
        await until(lambda: kv.is_attached)
        assert planning.slabs()[0].pool != slabs[0].pool
        again = planning.plan_store(KEYS, engine.spec(range(8)))
        process.say((planning.slabs(), await again.planned()))
        planning.complete(await asyncio.to_thread(process.hear))
        assert (await again.ended()).num_blocks == 8
        loaded = await kv.load(KEYS, engine.spec(range(8, 16)))
        assert loaded.num_blocks == engine.count_right(KEYS, range(8, 16)) == 8


async def test_jobs_end_while_a_server_hangs(tmp_path: Path) -> None:
    """A server that stops costs a job a time; what it holds for the job goes back when it goes on.

    What a worker has ends by its answer. Plans that went to none are given back: by an answer or a cancellation, and
    without a word where nobody has looked at them.
    """
    engine = AnyEngine()
    async with served(tmp_path) as one, attached_at(tmp_path, engine, timeout_s=1.0) as kv:
        planning = kv.planner()
        planning.register_worker()
        unseen = planning.plan_store(prompt(4, seed=3), engine.spec(range(4)))
        await until(lambda: unseen in planning.poll())
        planned = planning.plan_store(KEYS, engine.fill(KEYS, range(8)))
        plan, others = await planned.planned(), prompt(4, seed=2)
        await (unmoved := planning.plan_store(others, engine.spec(range(8, 12)))).planned()
        await (unwanted := planning.plan_store(prompt(4, seed=4), engine.spec(range(8, 12)))).planned()
        with Worker(planning.slabs(), layout=SMALL, device="cpu") as moving:
            moving.register_kv_caches(engine.caches[0])
            one.send(signal.SIGSTOP)
            waiting = planning.plan_store(prompt(4, seed=1), engine.spec(range(4)))
            with anyio.fail_after(FOREVER_S):
                for job in (waiting, unseen, planned, unmoved, unwanted):
                    assert (await job.ended()).errors == ("server away",)
            assert unseen.plan is not None
            assert unseen.plan.moves == ()
            planning.complete(moving.execute(plan))
            unmoved.complete(list(others), moved=False)
            unwanted.cancel(undelivered=True)
            one.send(signal.SIGCONT)
            await until_found(kv, KEYS)
            await until(lambda: kv.stats()["cpu"].pending == 0)


async def test_slots_are_his_who_copies_himself_while_a_server_hangs(tmp_path: Path) -> None:
    """The plan names keys alone, and no worker has it: its slots are nobody else's until he has answered."""
    engine = AnyEngine()
    async with served(tmp_path) as one, attached_at(tmp_path, engine, timeout_s=1.0) as kv:
        planning = kv.planner()
        planning.register_worker()
        job = planning.plan_store(KEYS)
        slots = (await job.planned()).moves[0].host.ids.tolist()
        with mapped(planning.slabs()[0]) as memory:
            one.send(signal.SIGSTOP)
            with anyio.fail_after(FOREVER_S):
                assert (await job.ended()).errors == ("server away",)
            one.send(signal.SIGCONT)
            await until(lambda: kv.is_attached)
            await crowd(kv, engine)
            for slot, key in zip(slots, KEYS, strict=True):
                content = engine.content(key, 0, "")
                memory[slot * STRIDE : slot * STRIDE + len(content)] = content
        job.complete(KEYS)
        await until_found(kv, KEYS)
        for keys in (KEYS, *(prompt(8, seed=seed) for seed in range(13, 20))):
            assert (await kv.load(keys, engine.spec(range(8)))).num_blocks == engine.count_right(keys, range(8)) == 8
        await until(lambda: kv.stats()["cpu"].pending == 0)


@pytest.mark.parametrize("error", [BackendUnavailableError("late"), OSError(24, "Too many open files")])
async def test_workers_are_introduced_again_if_that_was_not_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A job that waits for it ends with what went wrong; the next is planned, though the server knows the worker."""
    errors = [error]

    def disturbed(*said: Any) -> None:  # noqa: ANN401 - as it was called
        introduce(*said)
        if errors:
            raise errors.pop()

    monkeypatch.setattr("tiered_kv.host.client_planner.introduce", disturbed)
    with serving(tmp_path, cpu(16)) as server:
        async with attached(server) as kv:
            kv.planner().register_worker()
            with anyio.fail_after(FOREVER_S):
                assert (await kv.planner().plan_store(KEYS).ended()).errors == (str(error),)
                job = kv.planner().plan_store(KEYS)
                assert (await job.planned()).num_blocks == 8
            job.cancel()
