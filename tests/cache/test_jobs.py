"""Jobs of a planner: who hears of them, in which thread, and how they end."""

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Self

import pytest
from anyio.lowlevel import checkpoint

from tests.support.any_layout import AnyEngine, cpu, open_any, prompt
from tests.support.backends import ScriptedBackend
from tests.support.caches import inside, until, until_idle
from tests.support.planned import CPU, KEYS, PAYLOAD, WAIT_S, N, Ranks, spread
from tiered_kv import (
    ClosedError,
    ConfigurationError,
    GPULoadStoreSpec,
    Job,
    JobResult,
    Outcomes,
    Plan,
    Planner,
    Reason,
    Shard,
)
from tiered_kv.values.loop_calls import LoopCalls


async def test_closing_ends_every_job() -> None:
    """A cache closes with jobs open: whoever waits is told, and nobody gets a slot that a worker may be writing to."""
    async with open_any(AnyEngine(), CPU, shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        ranks.compute()
        job = planner.plan_store(KEYS, ranks.engines[0].spec(range(N)))
        plan = await job.planned()
        planner.complete(ranks.workers[0].execute(plan))
    assert (await job.ended()).num_blocks == 0
    pending = [chain.host.index.statistics().pending for chain in inside(kv).chains]  # kv.stats() is closed
    assert pending == [0, N]
    ranks.close()


async def test_what_is_answered_just_before_the_end_counts() -> None:
    """Though the loop has not had a turn since."""
    engine = AnyEngine()
    async with open_any(engine, CPU) as kv:
        planner = kv.planner()
        planner.register_worker()
        job = planner.plan_store(KEYS, engine.spec(range(N)))
        plan = await job.planned()
        planner.complete(Outcomes(plan.job, 0, plan.num_blocks))
        inside(kv).cache.close_jobs()
        assert (await job.ended()).num_blocks == N


async def test_a_call_that_an_interrupt_ends_makes_no_other_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes just before the loop is told, say: each later job is planned, and ends, in its own time."""
    engine = AnyEngine()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    async with open_any(engine, CPU) as kv:
        planner = kv.planner()
        planner.register_worker()
        with monkeypatch.context() as patch:
            patch.setattr(LoopCalls, "call", interrupted)
            with pytest.raises(KeyboardInterrupt):
                planner.plan_store(prompt(N, 1), engine.spec(range(N)))
        job = planner.plan_store(KEYS, engine.spec(range(N, 2 * N)))
        plan = await asyncio.wait_for(job.planned(), WAIT_S)
        planner.complete(Outcomes(plan.job, 0, plan.num_blocks))
        assert (await asyncio.wait_for(job.ended(), WAIT_S)).num_blocks == N


@pytest.mark.parametrize("direction", ["store", "load"])
async def test_a_closed_planner_ends_what_no_worker_has_the_plan_of(direction: str) -> None:
    """Though it is planned, and the engine's blocks are known: nobody has looked at it."""
    engine = AnyEngine()
    async with open_any(engine, CPU) as kv:
        await kv.store(KEYS, engine.fill(KEYS, range(N)))
        planner, spec = kv.planner(), engine.spec(range(N))
        planner.register_worker()
        job = planner.plan_store(prompt(N, 1), spec) if direction == "store" else planner.plan_load(KEYS, spec)
        await until(lambda: job in planner.poll())
        planner.close()
        assert (await job.ended()).num_blocks == 0
        await until_idle(kv)


async def test_a_closed_planner_says_so() -> None:
    """At once and from then on; closed twice it is closed."""
    engine = AnyEngine()
    async with open_any(engine, CPU) as kv:
        planner = kv.planner()
        planner.register_worker()
        for _ in range(2):
            planner.close()
            for _turn in range(2):
                with pytest.raises(ClosedError, match="planner"):
                    planner.plan_store(KEYS, engine.spec(range(N)))
                with pytest.raises(ClosedError, match="planner"):
                    planner.register_worker()
                await asyncio.sleep(0)
        assert planner.poll() == []


async def test_a_flush_waits_for_no_worker_of_a_closed_planner() -> None:
    """Whoever planned brings its answers no more."""
    engine = AnyEngine()
    async with open_any(engine, CPU) as kv:
        planner = kv.planner()
        planner.register_worker()
        await planner.plan_store(KEYS, engine.spec(range(N))).planned()
        planner.close()
        assert await asyncio.wait_for(kv.flush(), WAIT_S)


async def test_a_planned_store_of_who_drains_is_dropped_for_that() -> None:
    """And counted as any other store is."""
    engine = AnyEngine()
    async with open_any(engine, CPU) as kv:
        planner = kv.planner()
        planner.register_worker()
        assert await kv.drain()
        assert (await planner.plan_store(KEYS, engine.spec(range(N))).ended()).num_blocks == 0
        assert kv.stats().dropped_because == {"draining": N}


async def test_without_room_for_all_what_is_there_counts_as_present() -> None:
    """A store of which nothing is copied says which blocks the host has, and uses them."""
    engine = AnyEngine()
    async with open_any(engine, cpu(N)) as kv:
        planner = kv.planner()
        planner.register_worker()
        await kv.store(KEYS[:4], engine.fill(KEYS[:4], range(4)))
        result = await planner.plan_store(prompt(N + 2), engine.spec(range(N + 2))).ended()
        there = (await kv.presence(prompt(N + 2))).tolist()
        assert result.mask.tolist() == there == [True] * 4 + [False] * (N - 2)
        stats = kv.stats()
        assert (stats.present, stats.dropped, stats.dropped_because) == (4, N - 2, {"no room": N - 2})
        await until_idle(kv)


async def test_what_was_evicted_while_it_was_copied_is_not_on_the_host() -> None:
    """A job's mask does not say that it is, and the tier says what befell it."""
    engine = AnyEngine()
    async with open_any(engine, CPU) as kv:
        planner = kv.planner()
        planner.register_worker()
        job = planner.plan_store(KEYS, engine.spec(range(N)))
        await job.planned()
        await kv.evict(KEYS[:2])
        planner.complete(Outcomes(job.number, 0, N))
        result = await job.ended()
        assert result.mask.tolist() == (await kv.presence(KEYS)).tolist() == [False] * 2 + [True] * (N - 2)
        assert kv.stats()["cpu"].dropped_because == {Reason.REMOVED: 2}
        await until_idle(kv)


@pytest.mark.parametrize("removal", ["evict", "clear"])
async def test_what_was_planned_before_it_is_removed_never_becomes_readable(removal: str) -> None:
    """Planned by the thread of the loop, which has had no turn since: its slots are filled, and nobody finds them."""
    engine = AnyEngine()
    async with open_any(engine, CPU) as kv:
        planner = kv.planner()
        planner.register_worker()
        known = await planner.plan_store(prompt(N, 1), engine.spec(range(N, 2 * N))).planned()  # so is the worker
        planner.complete(Outcomes(known.job, 0, N))
        job = planner.plan_store(KEYS, engine.spec(range(N)))
        await (kv.evict(KEYS) if removal == "evict" else kv.clear())
        plan = await job.planned()
        planner.complete(Outcomes(plan.job, 0, plan.num_blocks))
        await job.ended()
        assert not (await kv.presence(KEYS)).any()
        await until_idle(kv)


async def test_what_another_worker_is_to_copy_is_not_on_the_host() -> None:
    """Nor what was there and was evicted since: a job's mask says so of neither."""
    engine = AnyEngine()
    async with open_any(engine, CPU) as kv:
        planner = kv.planner()
        planner.register_worker()
        await kv.store(KEYS[:1], engine.fill(KEYS[:1], range(1)))
        first = planner.plan_store(KEYS[1:3], engine.spec(range(1, 3)))
        await first.planned()
        second = planner.plan_store(KEYS, engine.spec(range(N)))
        await second.planned()
        await kv.evict(KEYS[:1])
        planner.complete(Outcomes(second.number, 0, N - 3))
        result = await second.ended()
        assert result.mask.tolist() == (await kv.presence(KEYS)).tolist() == [False] * 3 + [True] * (N - 3)
        planner.complete(Outcomes(first.number, 0, 0))
        assert not (await first.ended()).mask.any()
        await until_idle(kv)


@pytest.mark.parametrize("direction", ["store", "load"])
async def test_what_was_answered_before_the_rest_was_bound_is_counted_once(direction: str) -> None:
    """Key by key, and then the rest by a worker: no count falls."""
    engine = AnyEngine()
    async with open_any(engine, CPU) as kv:
        planner = kv.planner()
        planner.register_worker()
        if direction == "load":
            await kv.store(KEYS, engine.fill(KEYS, range(N)))
        job = planner.plan_load(KEYS) if direction == "load" else planner.plan_store(KEYS)
        await job.planned()
        job.complete(list(KEYS)[: N - 2])
        plan = job.bind(engine.spec(range(2)), start=N - 2)
        planner.complete(Outcomes(plan.job, 0, N))
        await job.ended()
        stats = kv.stats()
        assert (stats.missed, stats.dropped) == (0, 0)
        assert (stats.requested if direction == "load" else stats.store_requested) == N
        await until_idle(kv)


async def test_what_was_answered_as_not_moved_stays_so() -> None:
    """Key by key, whatever its worker says of all."""
    engine = AnyEngine()
    async with open_any(engine, CPU) as kv:
        planner = kv.planner()
        planner.register_worker()
        job = planner.plan_store(KEYS, engine.spec(range(N)))
        await job.planned()
        job.complete(KEYS[:1], moved=False)
        planner.complete(Outcomes(job.number, 0, N))
        assert (await job.ended()).mask.tolist() == (await kv.presence(KEYS)).tolist() == [False] + [True] * (N - 1)
        await until_idle(kv)


async def test_what_is_over_can_be_ended_again() -> None:
    """By its last answer once more, by a cancellation, and in a cache that is closed: none of it is an error."""
    async with open_any(AnyEngine(), CPU, shard=Shard.every(2)) as kv:
        planner = kv.planner()
        ranks = Ranks(planner)
        job = planner.plan_store(KEYS, ranks.engines[0].spec(range(N)))
        await job.planned()
        for rank in range(2):
            planner.complete(Outcomes(job.number, rank, N))
        result = await job.ended()
        planner.complete(Outcomes(job.number, 1, 0))
        job.cancel()
        await checkpoint()
        assert await job.ended() is job.result is result
        assert (await kv.lookup(KEYS)).num_blocks == N
        ranks.close()
        await until_idle(kv)
    planner.complete(Outcomes(job.number, 1, 0))
    job.cancel()
    with pytest.raises(ClosedError):
        planner.plan_store(KEYS, ranks.engines[0].spec(range(N)))


async def test_a_job_that_nobody_was_sent_is_cancelled() -> None:
    """At any time: before it is planned, while bytes are brought for it, and after. It holds nothing any more."""
    engine, below = AnyEngine(), ScriptedBackend()
    async with open_any(engine, cpu(32), below) as kv:
        await (await kv.store(KEYS, engine.fill(KEYS, range(N)))).settled()
        planner, spec = kv.planner(), engine.spec(range(N))
        planner.register_worker()
        jobs = [planner.plan_load(KEYS, spec), planner.plan_store(prompt(N, seed=1), spec)]
        for job in jobs:
            await job.planned()
            job.cancel(undelivered=True)
            assert await job.ended() == JobResult(job.number, 0, ("cancelled",))
        await until_idle(kv)
        await kv.evict(KEYS, tier="cpu")
        below.on_read.hold()
        jobs = [planner.plan_load(KEYS, spec), planner.plan_load(KEYS, spec)]
        jobs[0].cancel()
        await until(lambda: below.on_read.num_held > 0)
        jobs[1].cancel()
        assert [(await job.ended()).errors for job in jobs] == [("cancelled",)] * 2
        below.on_read.release()
        await until_idle(kv)
        assert (await kv.lookup(prompt(N, seed=1))).num_blocks == 0


async def test_what_a_worker_may_have_is_not_cancelled() -> None:
    """It may be writing: its slots are another's only once it has answered. Bound later, it is no different."""
    async with open_any(AnyEngine(), cpu(32)) as kv:
        planner, spec = kv.planner(), AnyEngine().spec(range(N))
        planner.register_worker()
        jobs = [planner.plan_store(KEYS, spec), planner.plan_store(prompt(N, seed=1))]
        for job in jobs:
            await job.planned()
        jobs[1].bind(spec)
        for job in jobs:
            with pytest.raises(ConfigurationError, match="a worker may have its plan"):
                job.cancel()
        await asyncio.sleep(0)  # the turn in which a job that is cancelled gives its slots back
        assert kv.stats()["cpu"].pending == 2 * N
        for job in jobs:
            planner.complete(Outcomes(job.number, 0, N))
            assert (await job.ended()).num_blocks == N
        await until_idle(kv)


async def planned_unseen(planner: Planner, blocks: GPULoadStoreSpec | None, seed: int) -> Job:
    """Return a store that is planned, and whose plan nobody has looked at."""
    job, polled = planner.plan_store(prompt(N, seed), blocks), list[Job]()
    await until(lambda: bool(polled), on_wait=lambda: polled.extend(planner.poll()))
    assert polled == [job]
    return job


async def test_after_a_cancellation_nobody_is_handed_what_was_to_be_moved() -> None:
    """Its slots are about to be another's: who looks, awaits or binds gets a plan without moves."""
    async with open_any(AnyEngine(), cpu(32)) as kv:
        planner, spec = kv.planner(), AnyEngine().spec(range(N))
        planner.register_worker()
        for seed, blocks in enumerate((spec, None)):
            job = await planned_unseen(planner, blocks, seed)
            job.cancel()
            bound = job.bind(spec) if blocks is None else job.plan
            for plan in (job.plan, bound, await job.planned()):
                assert plan == Plan(job.number, "store", 0, ())
            assert job.result == JobResult(job.number, 0, ("cancelled",))  # `planned` has waited for it
            assert await job.ended() is job.result
            assert job.plan == Plan(job.number, "store", 0, ())
        await until_idle(kv)


def is_cancelled(job: Job) -> bool:
    """Cancel a job if that is not refused; say whether it was."""
    try:
        job.cancel()
    except ConfigurationError:
        return False
    return True


def has_moves(job: Job) -> bool:
    """Say whether a plan is handed out that workers would execute."""
    return job.plan is not None and job.plan.moves != ()


async def test_a_plan_is_handed_out_or_its_job_is_cancelled() -> None:
    """Never both, and one of them: in either order, and by threads that come to it at once."""
    async with open_any(AnyEngine(), cpu(32)) as kv:
        planner, spec = kv.planner(), AnyEngine().spec(range(N))
        planner.register_worker()
        seen = await planned_unseen(planner, spec, 0)
        assert (has_moves(seen), is_cancelled(seen), has_moves(seen)) == (True, False, True)
        seen.cancel(undelivered=True)
        assert not has_moves(seen)
        await seen.ended()
        cancelled = await planned_unseen(planner, spec, 1)
        assert (is_cancelled(cancelled), has_moves(cancelled)) == (True, False)
        await cancelled.ended()
        for seed in range(20):
            job, said = await planned_unseen(planner, spec, seed), dict[Callable[[Job], bool], bool]()
            threads = [
                threading.Thread(target=lambda ask=ask, job=job, said=said: said.update({ask: ask(job)}))
                for ask in (is_cancelled, has_moves)
            ]
            with planner._jobs._polled.lock:  # noqa: SLF001 - both wait for it, and go on at once
                for thread in threads:
                    thread.start()
                await until(lambda threads=threads: all(is_in(thread, "__enter__") for thread in threads))  # type: ignore[misc]
            for thread in threads:
                thread.join()
            assert said[is_cancelled] is not said[has_moves]
            job.cancel(undelivered=True)
            await job.ended()
        await until_idle(kv)


async def test_a_plan_that_is_awaited_is_handed_over_or_its_job_is_cancelled() -> None:
    """Whenever the cancellation comes: between the plan and the wake-up of who awaits it, too."""
    async with open_any(AnyEngine(), cpu(32)) as kv:
        planner, spec = kv.planner(), AnyEngine().spec(range(N))
        planner.register_worker()
        outcomes = list[bool]()
        for num_turns in range(20):
            job = planner.plan_store(KEYS, spec)
            awaiting = asyncio.create_task(job.planned())
            for _ in range(num_turns):
                await checkpoint()
            outcomes.append(is_cancelled(job))
            plan = await awaiting
            assert bool(plan.moves) is not outcomes[-1]
            assert (job.result is not None) is outcomes[-1]
            job.cancel(undelivered=True)
            await job.ended()
        assert outcomes == sorted(outcomes, reverse=True)
        assert set(outcomes) == {True, False}
        await until_idle(kv)


def ended(planner: Planner) -> list[tuple[Job, JobResult | None]]:
    """Poll, and look at each result at once."""
    return [(job, job.result) for job in planner.poll()]


class CancelsItself(GPULoadStoreSpec):
    """Ids of a job that is cancelled at the moment when they are planned with, as another thread may do."""

    job: Job

    def __getitem__(self, positions: slice) -> Self:
        """Cancel the job; then be ids like any other."""
        self.job.cancel()
        return super().__getitem__(positions)


async def test_the_plan_of_a_cancelled_job_is_not_polled() -> None:
    """Its slots are going: nobody is to send it to a worker. Polled is the end, once, and it says that it is one."""
    engine = AnyEngine()
    async with open_any(engine, cpu(32)) as kv:
        planner = kv.planner()
        planner.register_worker()
        planned = planner.plan_store(KEYS, engine.spec(range(N)))
        await until(lambda: planned.plan is not None)
        planned.cancel(undelivered=True)
        assert planner.poll() == []
        ids = CancelsItself(range(N))
        during = planner.plan_store(KEYS, ids)
        object.__setattr__(ids, "job", during)
        polled = list[tuple[Job, JobResult | None]]()
        await until(lambda: during.result is not None, on_wait=lambda: polled.extend(ended(planner)))
        polled += ended(planner)
        assert polled == [(job, JobResult(job.number, 0, ("cancelled",))) for job in (planned, during)]
        await until_idle(kv)


async def test_a_scheduler_without_an_event_loop() -> None:
    """A thread registers, plans, executes, completes and polls; each job is polled as planned, and as over."""
    async with open_any(AnyEngine(), CPU, shard=Shard.every(2)) as kv:

        def schedule() -> None:
            planner = kv.planner()
            ranks = Ranks(planner)
            ranks.compute()
            spec = ranks.engines[0].spec(range(N))
            for direction in ("store", "load"):
                job = planner.plan_store(KEYS, spec) if direction == "store" else planner.plan_load(KEYS, spec)
                assert planner.poll(WAIT_S) == [job]
                assert job.result is None
                assert job.plan is not None
                assert (job.plan.job, job.plan.direction, job.plan.num_blocks) == (job.number, direction, N)
                for worker in ranks.workers:
                    planner.complete(worker.execute(spread(job.plan)))
                assert planner.poll(WAIT_S) == [job]
                assert job.result == JobResult(job.number, N, num_bytes=N * 2 * PAYLOAD)
                ranks.wipe() if direction == "store" else None
            assert ranks.num_right() == [N, N]
            empty = planner.plan_load(prompt(3, seed=9), spec[:3])
            assert planner.poll(WAIT_S) == [empty]  # once: it is over when it is planned
            assert empty.result == JobResult(empty.number, 0)
            assert planner.poll(WAIT_S) == []  # at once: nothing is under way
            ranks.close()

        await asyncio.to_thread(schedule)
        await until_idle(kv)


async def test_nothing_waits_for_storage() -> None:
    """A thread plans a load from a medium that hangs, and goes on with others; the plan is there when the bytes are."""
    engine, below = AnyEngine(), ScriptedBackend()
    async with open_any(engine, cpu(32), below) as kv:
        await (await kv.store(KEYS, engine.fill(KEYS, range(N)))).settled()
        await kv.evict(KEYS, tier="cpu")
        below.on_read.hold()
        planner, other = kv.planner(), prompt(N, seed=1)

        def schedule() -> Job:
            planner.register_worker()
            slow = planner.plan_load(KEYS, engine.spec(range(N)))
            fast = planner.plan_store(other, engine.spec(range(N)))
            assert planner.poll(WAIT_S) == [fast]
            planner.complete(Outcomes(fast.number, 0, N))
            assert planner.poll(WAIT_S) == [fast]
            assert planner.poll() == []
            assert slow.plan is None
            return slow

        slow = await asyncio.to_thread(schedule)
        below.on_read.release()
        assert await asyncio.to_thread(planner.poll, WAIT_S) == [slow]
        assert slow.plan is not None
        assert slow.plan.num_blocks == N
        slow.cancel(undelivered=True)
        await slow.ended()
        assert planner.poll() == []  # whoever awaits knows
        await until_idle(kv)


async def test_a_job_is_awaited_on_the_loop_of_its_cache() -> None:
    """Elsewhere the wait would have no end: it is refused, and so is blocking the loop in `poll`."""
    async with open_any(AnyEngine(), CPU) as kv:
        planner = kv.planner()
        planner.register_worker()
        job = planner.plan_store(KEYS, AnyEngine().spec(range(N)))
        with pytest.raises(ConfigurationError, match="on the event loop that opened its cache"):
            await asyncio.to_thread(lambda: asyncio.run(job.ended()))
        with pytest.raises(ConfigurationError, match="must not block"):
            planner.poll(1.0)
        with pytest.raises(ConfigurationError, match="timeout_s"):
            planner.poll(-1.0)
        await until(lambda: job.plan is not None)
        assert planner.poll() == [job]
        job.cancel(undelivered=True)


async def test_what_a_coroutine_awaits_is_for_it_alone() -> None:
    """A thread that waits in `poll` at that moment is not told of it, and waits on for what comes after."""
    engine, below = AnyEngine(), ScriptedBackend()
    async with open_any(engine, cpu(32), below) as kv:
        await (await kv.store(KEYS, engine.fill(KEYS, range(N)))).settled()
        await kv.evict(KEYS, tier="cpu")
        below.on_read.hold()
        planner, polled = kv.planner(), list[Job]()
        planner.register_worker()
        job = planner.plan_load(KEYS, engine.spec(range(N)))
        awaiting = asyncio.create_task(job.planned())
        thread = threading.Thread(target=lambda: polled.extend(planner.poll(WAIT_S)))
        thread.start()
        await until(lambda: is_in(thread, "wait_until"))
        below.on_read.release()
        assert (await awaiting).num_blocks == N
        other = planner.plan_store(prompt(N, seed=1), engine.spec(range(N)))
        await until(lambda: not thread.is_alive())
        assert polled == [other]
        for each in (job, other):
            each.cancel(undelivered=True)
            await each.ended()
        await until_idle(kv)


async def cancel_at_the_answer(planner: Planner, job: Job, awaiting: "asyncio.Task[Plan]") -> None:
    """Cancel who awaits a plan as soon as there is one; others are told of it."""
    while job.plan is None:
        await checkpoint()  # it is there for a turn before who awaits it hears
    awaiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await awaiting
    assert planner.poll() == [job]
    job.cancel(undelivered=True)
    await job.ended()


async def test_whoever_awaits_a_job_and_is_cancelled_leaves_it_to_others() -> None:
    """Even at the moment when it has an answer: somebody is told of it."""
    engine, backend = AnyEngine(), ScriptedBackend()
    async with open_any(engine, CPU, backend) as kv:
        await kv.store(KEYS, engine.fill(KEYS, range(N)))
        await kv.flush()
        await kv.evict(KEYS, tier="cpu")
        planner = kv.planner()
        planner.register_worker()
        backend.on_read.hold()
        job = planner.plan_load(KEYS, engine.spec(range(N)))
        awaiting = asyncio.create_task(job.planned())
        await until(lambda: backend.on_read.num_held > 0)
        backend.on_read.release()
        await cancel_at_the_answer(planner, job, awaiting)
        await until_idle(kv)


def is_in(thread: threading.Thread, function: str) -> bool:
    """Whether a thread is in a function of this name now."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 - there is no other way to see it
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None
