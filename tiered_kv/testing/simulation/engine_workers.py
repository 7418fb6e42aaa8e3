"""Engines whose workers are other processes: they plan, lose plans, cancel them, and their workers die."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered_kv.cache.planner import Planner
from tiered_kv.cache.worker import Worker
from tiered_kv.system import Queue, system
from tiered_kv.testing.simulation.engine import LAYOUT, Memory, span
from tiered_kv.testing.simulation.known import WrongAnswer, names_of
from tiered_kv.testing.simulation.threads import SimulatedProcess
from tiered_kv.testing.simulation.world import LIMITS, LONGEST_S, World
from tiered_kv.transfers.jobs import Job
from tiered_kv.values.errors import ClosedError, ConfigurationError
from tiered_kv.values.plan import Outcomes, Plan, SlabHandle

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.workload import Requests

_PLANNED_S: Final = LIMITS.load_timeout_s + 0.3
"""A plan is there by then, with what is in host memory."""


def make_worker(
    world: World, process: SimulatedProcess, slabs: Sequence[SlabHandle], memory: Memory, *, rank: int = 0
) -> Worker:
    """Make a worker of an engine, which has this memory, in a thread of its own process."""
    device = world.device(process)
    worker = Worker(slabs, layout=LAYOUT, rank=rank, device=device)
    world.bury(worker, device)
    for group, caches in enumerate(memory.caches):
        worker.register_kv_caches(caches, group=group)
    return worker


def carried_out(world: World, worker: Worker, plan: Plan) -> Outcomes:
    """Have a worker carry out a plan, and wait in its thread until it has."""
    ended: list[Outcomes] = []
    worker.start(plan).add_done_callback(lambda future: ended.append(future.result()))
    world.turns.wait(lambda: bool(ended), what="a worker's copies")
    return ended[0]


class Planning:
    """The planner of one process's cache, and a worker process that carries out what is planned."""

    def __init__(self, requests: "Requests") -> None:
        self._requests = requests
        self._planner = requests.kv.planner()
        self._worker: SimulatedProcess | None = None
        self._plans: Queue[Plan | None] = system().queue()
        self._answers: Queue[Outcomes | None] = system().queue()
        self._num_workers = 0
        requests.world.start_thread(requests.process, self._take_answers, f"{requests.process.name}: answers")

    async def one(self, numbers: tuple[int, int, int, int]) -> None:
        """Plan one load or store."""
        memory = self._requests.memory
        self.with_worker()
        if (region := memory.take()) is None:
            return
        try:
            with self.unless_ended():
                await self._job(region, numbers)
        finally:
            memory.give(region)

    def with_worker(self) -> Planner:
        """Return the planner, which has a worker, if only for a moment."""
        if self._worker is None or self._worker.is_dead:
            self._start_worker()
        return self._planner

    @contextmanager
    def unless_ended(self) -> Iterator[None]:
        """Pass over what is raised as the worker or the cache has ended."""
        try:
            yield
        except (ConfigurationError, ClosedError) as error:
            is_known = isinstance(error, ClosedError) or "worker" in str(error)
            if not self._requests.ending and not (is_known and (self._worker is None or self._worker.is_dead)):
                raise

    async def _job(self, region: int, numbers: tuple[int, int, int, int]) -> None:
        requests, known = self._requests, self._requests.world.known
        keys, weights, is_load = span(numbers), requests.weights, numbers[3] % 2 == 0
        names = names_of(keys, weights)
        asked = known.ask(names)
        how = numbers[2] % 8
        into = requests.memory.pages(keys, region)
        known.used(names, requests.now)
        if is_load:
            job = self._planner.plan_load(keys, into, gaps=numbers[1] % 5 == 0)
        else:
            requests.memory.fill(keys, weights, region)
            known.store_begins(names, requests.now)
            job = self._planner.plan_store(keys, into)
        worker, is_sure = self._worker, False
        is_whole = is_cancelled = False
        try:
            if how in (0, 1):  # cancelled before anybody has looked, at once or in a while
                for _ in range(numbers[1] % 12):
                    await asyncio.sleep(0)
                job.cancel()
                is_cancelled = True
            plan = await requests.within(_PLANNED_S, "planned()", job.planned())
            if is_cancelled and any(len(move.host) for move in plan.moves):
                raise WrongAnswer("cancelled plan", "a plan with slots was given out after it was cancelled")
            await self._hand_out(job, plan, how)
            result = await requests.within(LONGEST_S, "the end of a job", job.ended())
            is_sure = how > 3 and worker is self._worker and not (worker is None or worker.is_dead)
            is_whole = len(result.mask) == len(keys) and bool(result.mask.all())
        finally:
            requests.count_asked("load" if is_load else "store", len(keys), is_sure=is_sure)
            if not is_load:
                may_be_lost = requests.may_be_lost(is_planned=True)
                known.store_ends(names, requests.now, is_whole=is_whole, may_be_lost=may_be_lost)
        if is_load:
            mask = result.mask if len(result.mask) else np.zeros(len(keys), np.bool_)
            requests.memory.check(keys, weights, region, mask, "a planned load")
            known.check(asked, mask, "a planned load")
            known.used(names, requests.now)
            known.loaded(name for name, is_there in zip(names, mask, strict=True) if is_there)

    async def _hand_out(self, job: Job, plan: Plan, how: int) -> None:
        """Give a worker the plan; or lose it, kill the worker, or try to cancel it then."""
        if how == 2:
            job.cancel(undelivered=True)
        elif how == 3 and self._worker is not None:
            self._plans.put(plan)
            await asyncio.sleep(0)
            self._requests.world.tell("the worker is killed")
            self._requests.world.turns.kill(self._worker)
        elif plan.moves:
            self._plans.put(plan)
            if how == 4:
                self._cancel_late(job)

    def _cancel_late(self, job: Job) -> None:
        """A worker has the plan and may be copying: nobody else gets its slots or the engine's blocks by a cancel."""
        try:
            job.cancel()
        except ConfigurationError:
            return
        if job.result is None:
            raise WrongAnswer("cancelled plan", "a job was cancelled while a worker may be copying")

    async def end(self) -> None:
        """End the worker."""
        if self._worker is not None and not self._worker.is_dead:
            self._plans.put(None)
        self._answers.put(None)

    def _start_worker(self) -> None:
        requests, world = self._requests, self._requests.world
        self._num_workers += 1
        plans: Queue[Plan | None] = system().queue()
        self._plans = plans
        process = world.new_process(f"worker {self._num_workers}")
        self._worker = process
        slabs, memory, answers = self._planner.slabs(), requests.memory, self._answers

        def work() -> None:
            worker = make_worker(world, process, slabs, memory)
            while (plan := plans.get()) is not None:
                answers.put(carried_out(world, worker, plan))
            process.has_ended = True

        world.start_thread(process, work, process.name)
        self._planner.register_worker(pid=process.pid)

    def _take_answers(self) -> None:
        while (outcomes := self._answers.get()) is not None:
            self._planner.complete(outcomes)
