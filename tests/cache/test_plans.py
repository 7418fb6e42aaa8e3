"""Plan, execute, complete: what one process decides and others move, and what becomes of it when they do not."""

import asyncio
import mmap
import multiprocessing as mp
import os
import pickle
import resource
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import anyio
import numpy as np
import pytest
import torch
from anyio.lowlevel import checkpoint

from tests.support.any_layout import SMALL, STRIDE, AnyEngine, cpu, nvme, open_any, prompt
from tests.support.backends import ScriptedBackend
from tests.support.caches import Recorder, inside, until, until_idle
from tiered_kv import (
    ClosedError,
    ConfigurationError,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    Job,
    JobResult,
    KVLayout,
    LayoutMismatchError,
    Outcomes,
    Plan,
    Planner,
    Shard,
    TieredKV,
    Worker,
)
from tiered_kv.events import WorkerEnded
from tiered_kv.plan import SlabHandle, TierShare

N = 6
KEYS = prompt(N)
CPU = cpu(32, 2 * STRIDE)  # 32 slots for each of two ranks
HEADER = 4096
PAYLOAD = SMALL.groups[0].payload_bytes
WAIT_S = 30.0
"""For what comes at once unless something is broken."""


def spread(plan: Plan) -> Plan:
    """Send a plan to another process, and have it back."""
    sent: Plan = pickle.loads(pickle.dumps(plan))
    return sent


class Ranks:
    """Two ranks' workers in this process, each with an engine of its own."""

    def __init__(self, planner: Planner) -> None:
        self.engines = [AnyEngine(), AnyEngine()]
        slabs = pickle.loads(pickle.dumps(planner.slabs()))
        self.workers = [Worker(slabs, layout=SMALL, rank=rank, device="cpu") for rank in range(2)]
        for rank, (worker, engine) in enumerate(zip(self.workers, self.engines, strict=True)):
            worker.register_kv_caches(engine.caches[0])
            planner.register_worker(rank=rank)

    def compute(self) -> None:
        """Have both ranks compute their parts of the prompt."""
        for rank, engine in enumerate(self.engines):
            engine.fill(KEYS, range(N), f"rank {rank}")

    def num_right(self) -> list[int]:
        """Count, per rank, the leading blocks that are that rank's own."""
        return [engine.count_right(KEYS, range(N), f"rank {rank}") for rank, engine in enumerate(self.engines)]

    def wipe(self) -> None:
        """Overwrite both engines' blocks."""
        for engine in self.engines:
            engine.wipe()

    def close(self) -> None:
        """End both."""
        for worker in self.workers:
            worker.close()


async def store(kv: TieredKV, planner: Planner, ranks: Ranks) -> None:
    """Keep the whole prompt of both ranks."""
    ranks.compute()
    job = planner.plan_store(KEYS, ranks.engines[0].spec(range(N)))
    plan = await job.planned()
    for worker in ranks.workers:
        assert job.result is None
        planner.complete(worker.execute(spread(plan)))
    assert (await job.ended()).num_blocks == N
    await kv.flush()


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


async def test_a_worker_that_ends_while_its_plan_is_made() -> None:
    """Nobody would end such a job: it is not begun, and holds nothing. The same where the cache is closed meanwhile."""
    engine, below, recorder = AnyEngine(), ScriptedBackend(), Recorder()
    async with open_any(engine, cpu(32), below, emit=recorder) as kv:
        await (await kv.store(KEYS, engine.fill(KEYS, range(N)))).settled()
        await kv.evict(KEYS, tier="cpu")
        planner = kv.planner()
        with idle_process() as process:
            planner.register_worker(pid=process.pid)
            below.on_read.hold()
            job = planner.plan_load(KEYS, engine.spec(range(N)))
            await until(lambda: below.on_read.num_held > 0)
        await until(lambda: bool(recorder.of(WorkerEnded)))
        below.on_read.release()
        assert "worker of every rank" in (await job.ended()).errors[0]
        assert job.plan is not None
        assert not job.plan.moves
        await until_idle(kv)
        await kv.evict(KEYS, tier="cpu")
        planner.register_worker()
        below.on_read.hold()
        job = planner.plan_load(KEYS, engine.spec(range(N)))
        await until(lambda: below.on_read.num_held > 0)
        closing = asyncio.create_task(kv.aclose())
        await checkpoint()
        below.on_read.release()
        assert await job.ended() == JobResult(job.number, 0, ("closed",))
        await closing


async def test_a_plan_is_for_one_process_only() -> None:
    """A worker started in place of another refuses what was meant for that: the slots may be another's by now."""
    engine = AnyEngine()
    async with open_any(engine, CPU) as kv:
        planner = kv.planner()
        with Worker(planner.slabs(), layout=SMALL, device="cpu") as worker, idle_process() as process:
            worker.register_kv_caches(engine.caches[0])
            planner.register_worker(pid=process.pid)
            job = planner.plan_store(KEYS, engine.spec(range(N)))
            plan = await job.planned()
            with pytest.raises(ConfigurationError, match=f"for process {process.pid}, this is {os.getpid()}"):
                worker.execute(plan)


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


async def test_memory_that_is_not_what_was_meant_is_not_attached() -> None:
    """Neither that of another cache that has the file descriptor by now, nor blocks of another layout."""
    engine = AnyEngine()
    async with open_any(engine, CPU) as kv:
        before = kv.planner().slabs()
    async with open_any(engine, CPU) as kv:
        slabs = kv.planner().slabs()
        assert [handle.fd for handle in slabs] == [handle.fd for handle in before]
        with pytest.raises(ConfigurationError, match="not there any more"):
            Worker(before, layout=SMALL, device="cpu")
        fewer = KVLayout((replace(SMALL.groups[0], num_layers=1),))
        with pytest.raises(LayoutMismatchError, match="768 bytes here, 1536 where"):
            Worker(slabs, layout=fewer, device="cpu")


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
        assert kv.stats()["cpu"].pending == 0
    async with open_any(engine, {"medium": "memory", "capacity": "1MiB"}) as kv:
        kv.planner().register_worker()
        with pytest.raises(ConfigurationError, match="hold blocks in the CPU tier"):
            kv.planner().plan_store(KEYS, engine.spec(range(N)))


# Real processes.


@contextmanager
def idle_process() -> Generator["subprocess.Popen[bytes]"]:
    """Start a process that does nothing; it is killed when the block ends."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def serve(rank: int, slabs: Sequence[SlabHandle], pipe: Connection) -> None:
    """A worker process: computes, executes what it is told, and answers."""
    torch.set_num_threads(1)
    engine = AnyEngine()
    with Worker(slabs, layout=SMALL, rank=rank, device="cpu") as worker:
        worker.register_kv_caches(engine.caches[0])
        while (told := pipe.recv()) is not None:
            if told == "compute":
                engine.fill(KEYS, range(N), f"rank {rank}")
            elif told == "wipe":
                engine.wipe()
            elif told == "count":
                pipe.send(engine.count_right(KEYS, range(N), f"rank {rank}"))
            else:
                pipe.send(worker.execute(told))


class Process:
    """A worker process started by spawn."""

    def __init__(self, rank: int, planner: Planner) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(rank, planner.slabs(), theirs), daemon=True)
        self.process.start()
        theirs.close()
        assert self.process.pid is not None
        planner.register_worker(rank=rank, pid=self.process.pid)

    def tell(self, what: object) -> None:
        """Send it something to do."""
        self.pipe.send(what)

    async def answer(self) -> object:
        """Wait for what it says."""
        said: object = await asyncio.to_thread(self.pipe.recv)
        return said

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.kill()
        self.process.join()


@pytest.fixture
def processes() -> Generator[list[Process]]:
    """Those started here; ended with the test."""
    started: list[Process] = []
    yield started
    for each in started:
        each.kill()


async def both(planner: Planner, processes: Sequence[Process], job: Job) -> int:
    """Have both processes execute a job's plan; return what came of it."""
    plan = await job.planned()
    for process in processes:
        process.tell(plan)
    for process in processes:
        assert job.result is None
        planner.complete(await process.answer())  # type: ignore[arg-type]  # answers
    return (await job.ended()).num_blocks


@pytest.mark.slow
async def test_two_worker_processes(processes: list[Process]) -> None:
    """A planner and two spawned workers: bytes go out of two processes' tensors and back, through one slab each."""
    async with open_any(AnyEngine(), CPU, shard=Shard.every(2)) as kv:
        planner = kv.planner()
        processes += [Process(rank, planner) for rank in range(2)]
        for process in processes:
            process.tell("compute")
        spec = AnyEngine().spec(range(N))
        assert await both(planner, processes, planner.plan_store(KEYS, spec)) == N
        for process in processes:
            process.tell("wipe")
        assert await both(planner, processes, planner.plan_load(KEYS, spec)) == N
        for process in processes:
            process.tell("count")
        assert [await process.answer() for process in processes] == [N, N]
        await until_idle(kv)


@pytest.mark.slow
async def test_a_worker_killed_in_the_middle(processes: list[Process]) -> None:
    """Its leases end, the slots it was to fill never become readable, the job ends, and a new worker takes its rank."""
    recorder = Recorder()
    async with open_any(AnyEngine(), CPU, shard=Shard.every(2), emit=recorder) as kv:
        planner = kv.planner()
        processes += [Process(rank, planner) for rank in range(2)]
        for process in processes:
            process.tell("compute")
        spec = AnyEngine().spec(range(N))
        half = KEYS[: N // 2], spec[: N // 2]
        assert await both(planner, processes, planner.plan_store(*half)) == N // 2
        storing, loading = planner.plan_store(KEYS, spec), planner.plan_load(*half)
        for job in (storing, loading):
            processes[0].tell(await job.planned())
            planner.complete(await processes[0].answer())  # type: ignore[arg-type]  # answers
        assert kv.stats()["cpu"].pending == 2 * (N - N // 2)
        processes[1].kill()
        stored, loaded = await asyncio.gather(storing.ended(), loading.ended())
        assert (stored.num_blocks, loaded.num_blocks) == (0, 0)
        assert "has ended" in loaded.errors[0]
        assert [event.jobs for event in recorder.of(WorkerEnded)] == [2]
        assert (await kv.lookup(KEYS)).num_blocks == N // 2
        await until_idle(kv)
        processes.append(Process(1, planner))
        processes[2].tell("compute")
        assert await both(planner, [processes[0], processes[2]], planner.plan_store(KEYS, spec)) == N - N // 2
        await until_idle(kv)


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
            job.cancel()
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
        planned.cancel()
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
        slow.cancel()
        await slow.ended()
        assert planner.poll() == []  # whoever awaits knows
        await until_idle(kv)


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
            each.cancel()
            await each.ended()
        await until_idle(kv)


async def test_whoever_awaits_a_job_and_is_cancelled_leaves_it_to_others() -> None:
    """Even at the moment when it has an answer: somebody is told of it."""
    async with open_any(AnyEngine(), CPU) as kv:
        planner = kv.planner()
        planner.register_worker()
        job = planner.plan_store(KEYS, AnyEngine().spec(range(N)))
        awaiting = asyncio.create_task(job.planned())
        await until(lambda: job.plan is not None)
        awaiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await awaiting
        assert planner.poll() == [job]
        job.cancel()
        await job.ended()
        await until_idle(kv)


def is_in(thread: threading.Thread, function: str) -> bool:
    """Whether a thread is in a function of this name now."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 - there is no other way to see it
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def read_slot(planner: Planner, spec: CPULoadStoreSpec, slot: int) -> bytes:
    """Return what is in a slot, read past the cache."""
    slab = next(each for each in planner.slabs() if each.pool == spec.pool)
    with mmap.mmap(slab.fd, slab.num_slots * slab.stride_bytes, prot=mmap.PROT_READ) as memory:
        return memory[slot * slab.stride_bytes :][: slab.payload_bytes]


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
            with mmap.mmap(slab.fd, slab.num_slots * slab.stride_bytes) as memory:
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


async def test_what_no_worker_has_ends_with_a_worker() -> None:
    """A job that is not bound yet: the others would never answer. One that is bound waits for the others."""
    engine = AnyEngine()
    async with open_any(engine, CPU, shard=Shard.every(2)) as kv:
        planner = kv.planner()
        planner.register_worker(rank=0)
        with idle_process() as process:
            planner.register_worker(rank=1, pid=process.pid)
            held, bound = planner.plan_store(KEYS), planner.plan_store(prompt(N, seed=1))
            await held.planned()
            await bound.planned()
            plan = bound.bind(engine.spec(range(N)))
        assert "has ended" in (await held.ended()).errors[0]
        assert held.bind(engine.spec(range(N))).moves == ()
        assert bound.result is None
        assert kv.stats()["cpu"].pending == 2 * N
        planner.complete(Outcomes(plan.job, 0, N))
        assert (await bound.ended()).num_blocks == 0
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
        assert planner.poll() == [job]
        job.cancel()


async def test_a_worker_is_watched_whatever_the_number_of_its_descriptor() -> None:
    """Also above 1,023: a rank whose worker lives is refused another, one whose worker has ended is not."""
    most, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limit), limit))
    open_files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        async with open_any(AnyEngine(), CPU, shard=Shard.every(2)) as kv:
            planner = kv.planner()
            worker = await anyio.open_process([sys.executable, "-c", "input()"])
            async with worker:
                planner.register_worker(rank=0, pid=worker.pid)
                with pytest.raises(ConfigurationError, match="which is alive"):
                    planner.register_worker(rank=0)
                worker.kill()
                await worker.wait()
            planner.register_worker(rank=0)
    finally:
        for fd in open_files:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limit))
