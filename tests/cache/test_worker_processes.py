"""Planned transfers that other processes carry out: attached, killed, or not the ones that were meant."""

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import pytest
import torch
from anyio.lowlevel import checkpoint

from tests.host.processes import FORKING
from tests.support.any_layout import SMALL, AnyEngine, cpu, open_any, prompt
from tests.support.backends import ScriptedBackend
from tests.support.caches import Recorder, until, until_idle
from tests.support.descriptors import descriptors_left
from tests.support.planned import CPU, KEYS, N
from tiered_kv import (
    ConfigurationError,
    Job,
    JobResult,
    KVLayout,
    LayoutMismatchError,
    Outcomes,
    Planner,
    Shard,
    Worker,
)
from tiered_kv.transfers.workers import WorkerProcesses
from tiered_kv.values.events import WorkerEnded
from tiered_kv.values.loop_calls import LoopCalls
from tiered_kv.values.plan import SlabHandle


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
    """A worker process."""

    def __init__(self, rank: int, planner: Planner) -> None:
        self.pipe, theirs = FORKING.Pipe()
        self.process = FORKING.Process(target=serve, args=(rank, planner.slabs(), theirs), daemon=True)
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
    """A planner and two workers: bytes go out of two processes' tensors and back, through one slab each."""
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


async def test_a_worker_that_ended_is_watched_no_more() -> None:
    """A planner that sees many come and go has as many descriptors as workers."""
    recorder, before = Recorder(), num_watched()
    async with open_any(AnyEngine(), cpu(32), emit=recorder) as kv:
        planner = kv.planner()
        for n in range(3):
            with idle_process() as process:
                planner.register_worker(pid=process.pid)
            await until(lambda n=n: len(recorder.of(WorkerEnded)) > n)  # type: ignore[misc]  # mypy knows no default of a lambda
            assert num_watched() <= before


def num_watched() -> int:
    """Count the processes that this one watches."""
    num_watched = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed by now
            num_watched += "pidfd" in str(each.readlink())
    return num_watched


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


async def test_memory_that_is_not_what_was_meant_is_not_attached() -> None:
    """Neither that of another cache that has the file descriptor by now, nor blocks of another layout."""
    engine = AnyEngine()
    async with open_any(engine, CPU) as kv:
        before = kv.planner().slabs()
    async with open_any(engine, CPU) as kv:
        slabs = kv.planner().slabs()
        assert [vars(handle)["fd"] for handle in slabs] == [vars(handle)["fd"] for handle in before]
        with pytest.raises(ConfigurationError, match="not there any more"):
            Worker(before, layout=SMALL, device="cpu")
        fewer = KVLayout((replace(SMALL.groups[0], num_layers=1),))
        with pytest.raises(LayoutMismatchError, match="768 bytes here, 1536 where"):
            Worker(slabs, layout=fewer, device="cpu")
        halved = KVLayout((replace(SMALL.groups[0], num_kv_heads=2, head_dim=24),))
        assert halved.groups[0].payload_bytes == SMALL.groups[0].payload_bytes
        with pytest.raises(LayoutMismatchError, match=r"head_dim=24.* here, .*head_dim=48.* where"):
            Worker(slabs, layout=halved, device="cpu")


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


async def test_workers_that_cannot_all_be_told_of_cost_no_descriptors() -> None:
    """Where the process has no more of them, those that it had got are closed: a shortage passes."""
    workers = WorkerProcesses(8, LoopCalls(asyncio.get_running_loop()), lambda _rank, _pid: None)
    for rank in range(8):
        workers.register(rank, os.getpid())
    try:
        with descriptors_left(4):
            for _ in range(3):
                with pytest.raises(OSError, match="Too many open files"):
                    workers.descriptors(workers.unlike([]))
                os.close(os.dup(0))
    finally:
        workers.close()
