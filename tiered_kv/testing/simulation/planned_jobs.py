"""Engines whose workers are other processes: they plan, lose plans, cancel them, and their workers are late and die.

A region of an engine's memory is a worker's from when it is given a plan until it has answered, refused the plan or
died, whatever has become of the job meanwhile.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.cache.planner import Planner
from tiered_kv.cache.worker import Worker
from tiered_kv.system import Queue, system
from tiered_kv.testing.simulation.engine import LAYOUT, Memory
from tiered_kv.testing.simulation.known import Known, Name, WrongAnswer, names_of, within
from tiered_kv.testing.simulation.threads import SimulatedProcess
from tiered_kv.testing.simulation.world import LIMITS, LONGEST_S, World
from tiered_kv.tiers.tasks import in_a_thread
from tiered_kv.transfers.jobs import Job
from tiered_kv.values.errors import ClosedError, ConfigurationError
from tiered_kv.values.keys import BlockKeys
from tiered_kv.values.loop_calls import LoopCalls
from tiered_kv.values.plan import JobResult, Outcomes, Plan, SlabHandle

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.requester import Requester

PLANNED_S: Final = LIMITS.load_timeout_s + 0.3
"""A plan is there by then, with what is in host memory."""
_WAYS: Final = ("", "", "", "", "cancelled", "cancelled late", "lost", "a worker dies")
"""What becomes of a plan; most are carried out."""
_UNNAMED: Final = ("a part", "a part", "a part", "all", "let go", "not moved")
"""What becomes of a plan that names no blocks of the engine's: mostly it is carried out for a part of them, or all."""
_POLLED_S: Final = 0.25
_DIES_S: Final = (0.0, 0.002, 0.01, 0.1)
_WAITS_S: Final = (0.0, 0.0, 0.001, 0.03, 0.1)
"""How long a planner does something else before it gives a plan to workers."""


class WorkerProcess:
    """The worker process that one rank of an engine has now, if it has one.

    Attributes:
        memory: The engine's, on this rank.
        rank: Which one it is.
        process: Where the worker runs.
    """

    def __init__(
        self, world: World, name: str, memory: Memory, *, rank: int = 0, version: str = "", late_s: Sequence[float] = ()
    ) -> None:
        """Have none yet.

        Args:
            world: Where it is.
            name: In timelines.
            memory: The engine's, on this rank.
            rank: Which one it is.
            version: What this rank's parts of blocks are computed with, besides the weights.
            late_s: How long it does something else, before it does what is planned and before it says that it has.
        """
        self.memory = memory
        self.rank = rank
        self.process = SimulatedProcess("none yet", 0, is_dead=True)
        self._world = world
        self._name = name
        self._version = version
        self._late_s = late_s
        self._inbox: Queue[Any] = system().queue()
        self._moving: set[int] = set()
        self._is_attached_anew = False

    @property
    def is_alive(self) -> bool:
        """Whether there is a worker."""
        return not self.process.is_dead

    def version(self, weights: str) -> str:
        """Return what this rank's parts of blocks are computed with: parts of others differ."""
        return weights + self._version

    def start(self, slabs: Sequence[SlabHandle], answers: "Queue[Outcomes]") -> bool:
        """Have a worker, if there is none; say whether it is a new one."""
        if self.is_alive:
            return False
        self._inbox, self._moving, self._is_attached_anew = system().queue(), set(), False
        self.process = self._world.new_process(self._name)
        self._world.start_thread(self.process, partial(self._work, slabs, answers), self._name)
        return True

    def attach(self, slabs: Sequence[SlabHandle]) -> None:
        """Have the worker use other memory; what is planned for the memory before it refuses."""
        self._is_attached_anew = True
        self._inbox.put(slabs)

    def give(self, plan: Plan) -> None:
        """Have the worker carry out a plan."""
        # What is for the worker before this one is refused, and for a move of nothing nobody waits.
        if self._has_to(plan) and plan.move_of(self.rank).positions:
            self._moving.add(plan.job)
        self._inbox.put(plan)

    def is_moving(self, job: int) -> bool:
        """Whether the worker was given a plan, lives, and has not answered."""
        return self.is_alive and job in self._moving

    def die(self) -> None:
        """End the worker suddenly."""
        self._world.tape.num_faults += 1
        self._world.tell(f"{self._name} is killed")
        self._world.turns.kill(self.process)

    def _has_to(self, plan: Plan) -> bool:
        return plan.move_of(self.rank).pid == self.process.pid

    def _work(self, slabs: Sequence[SlabHandle], answers: "Queue[Outcomes]") -> None:
        world, inbox, device = self._world, self._inbox, self._world.device(self.process)
        worker = Worker(slabs, layout=LAYOUT, rank=self.rank, device=device)
        world.bury(worker, device)
        for group, caches in enumerate(self.memory.caches):
            worker.register_kv_caches(caches, group=group)
        while True:
            given = inbox.get()
            if not isinstance(given, Plan):
                worker.attach(given)
                continue
            self._wait()
            try:
                outcomes = self._carried_out(worker, given)
            except ConfigurationError as error:
                if self._has_to(given) and not self._is_attached_anew:
                    raise
                world.tell(f"refuses: {error}")
                self._moving.discard(given.job)
                continue
            self._wait()
            self._moving.discard(given.job)
            answers.put(outcomes)

    def _carried_out(self, worker: Worker, plan: Plan) -> Outcomes:
        ended: list[Outcomes] = []
        worker.start(plan).add_done_callback(lambda future: ended.append(future.result()))
        self._world.turns.wait(lambda: bool(ended), what="a worker's copies")
        return ended[0]

    def _wait(self) -> None:
        if self._late_s and (late_s := self._world.tape.pick("plan", self._late_s)) > 0:
            self._world.turns.sleep(late_s)


class Planning:
    """Loads and stores that are planned in one process, and the workers of each rank that carry them out.

    Attributes:
        ranks: The workers.
    """

    def __init__(self, world: World, planner: Planner, ranks: Sequence[WorkerProcess], known: Known) -> None:
        """Begin in the process that plans, on its event loop; ``known`` is what may be in its cache."""
        self.ranks = ranks
        self._world = world
        self._planner = planner
        self._known = known
        self._process = world.turns.current.process
        self._calls = LoopCalls(asyncio.get_running_loop())
        self._answers: Queue[Outcomes] = system().queue()
        self._storing: dict[int, list[Name]] = {}
        self._num_stores = count()
        world.bury(self)
        world.start_thread(self._process, self._take_answers, f"{self._process.name}: answers")

    # What differs from engine to engine.

    planned_s = PLANNED_S

    def slabs(self) -> Sequence[SlabHandle]:
        """Return the host memory that workers use."""
        return self._planner.slabs()

    def begins(self, keys: BlockKeys, *, is_load: bool) -> None:
        """A load or store is planned."""

    def is_counted(self, keys: BlockKeys, *, is_load: bool) -> None:
        """It has ended with everybody alive, so that it is sure to be counted."""

    def may_be_lost(self, mask: NDArray[np.bool_]) -> bool:
        """Whether what a store kept in memory may be lost on its way down, and nobody is told."""
        del mask
        return False

    def may_end_early(self, result: JobResult) -> bool:
        """Whether a job may have ended so though its workers are moving blocks."""
        del result
        return False

    def is_explained(self, error: ClosedError | ConfigurationError) -> bool:
        """Whether an error comes of the end of a worker or of the cache."""
        return "worker" in str(error) and not all(rank.is_alive for rank in self.ranks)

    # For all of them.

    def with_workers(self) -> Planner:
        """Return the planner, which has workers, if only for a moment."""
        for rank in self.ranks:
            if rank.start(self.slabs(), self._answers):
                self._planner.register_worker(rank=rank.rank, pid=rank.process.pid)
        return self._planner

    @contextmanager
    def unless_ended(self) -> Iterator[None]:
        """Pass over what is raised as a worker or the cache has ended."""
        try:
            yield
        except (ClosedError, ConfigurationError) as error:
            if not self.is_explained(error):
                raise

    async def one(self, keys: BlockKeys, weights: str, *, is_load: bool, is_plain: bool = False) -> JobResult | None:
        """Plan one load or store, in a region that all ranks have for it; return how it has ended, if it has."""
        first, *others = self.ranks
        if (region := first.memory.take()) is None:
            return None
        for rank in others:
            rank.memory.free.remove(region)
        result = None
        try:
            with self.unless_ended():
                self.with_workers()
                result = await self._job(keys, weights, region, is_load=is_load, is_plain=is_plain)
        finally:
            for rank in self.ranks:
                rank.memory.give(region)
        if touched := [each for rank in self.ranks for each in rank.memory.touched()]:
            raise WrongAnswer("foreign memory", f"somebody has written to regions {touched}, which are nobody's")
        return result

    def give_up(self) -> None:
        """End the workers of a planner that has ended: nobody hears how stores have ended that it had planned."""
        for rank in self.ranks:
            self._world.turns.kill(rank.process)
        for names in self._storing.values():
            self._known.store_ends(names, self._world.turns.now, is_whole=False, may_be_lost=True)
        self._storing.clear()

    async def _job(self, keys: BlockKeys, weights: str, region: int, *, is_load: bool, is_plain: bool) -> JobResult:
        known, tape, turns, names = self._known, self._world.tape, self._world.turns, names_of(keys, weights)
        pages, workers = self.ranks[0].memory.pages(keys, region), [rank.process for rank in self.ranks]
        is_named = is_plain or not tape.draw("plan", 2)
        asked, storing = known.ask(names), next(self._num_stores)
        known.used(names, turns.now)
        self.begins(keys, is_load=is_load)
        if is_load:
            job = self._planner.plan_load(
                keys, pages if is_named else None, gaps=not is_plain and tape.pick("plan", (False, False, True))
            )
        else:
            for rank in self.ranks:
                rank.memory.fill(keys, rank.version(weights), region)
            job = self._planner.plan_store(keys, pages if is_named else None)
            known.store_begins(names, turns.now)
            self._storing[storing] = names
        mask: NDArray[np.bool_] = np.zeros(len(keys), np.bool_)
        try:
            way = "" if is_plain else tape.pick("plan", _WAYS)
            self._world.tell(f"plans {'a load' if is_load else 'a store'} of {len(keys)} blocks, {way}")
            wanted = await self._carry_out(job, keys, region, way, is_named=is_named, is_plain=is_plain)
            result: JobResult = await self._within(LONGEST_S, "the end of a job", job.ended())
            mask = result.mask if len(result.mask) else mask
            await self._see_ended(job, result)
            are_alive = all(not worker.is_dead for worker in workers)
            if are_alive and "worker" in str(result.errors):
                raise WrongAnswer("refused", f"all workers live, and a job ends by {result.errors}")
            if are_alive and is_named and way in {"", "cancelled late"}:
                self.is_counted(keys, is_load=is_load)
        finally:
            if not is_load and not self._process.is_dead:
                may_be_lost = self.may_be_lost(mask)
                known.store_ends(names, turns.now, is_whole=bool(mask.all()), may_be_lost=may_be_lost)
                del self._storing[storing]
        if is_load:
            self._check_load(keys, weights, region, mask, wanted)
            known.check(asked, mask, "a planned load")
            known.used(names, turns.now)
            known.loaded(name for name, is_there in zip(names, mask, strict=True) if is_there)
        return result

    async def _carry_out(
        self, job: Job, keys: BlockKeys, region: int, way: str, *, is_named: bool, is_plain: bool
    ) -> slice:
        """Give workers the plan, or end it at some stage; return which keys it is about."""
        tape, wanted = self._world.tape, slice(0, len(keys))
        do = self._in_a_thread if not is_plain and tape.draw("plan", 2) else _at_once
        if way == "cancelled":  # before anybody has looked
            await _turns(tape.draw("plan", 12))
            await do(job.cancel)
        plan = await self._planned(job, is_polled=not is_plain and tape.draw("plan", 2) == 1)
        if way == "cancelled" and any(len(move.host) for move in plan.moves):
            raise WrongAnswer("cancelled plan", "a plan with slots was given out after it was cancelled")
        if not is_plain:
            await asyncio.sleep(tape.pick("plan", _WAITS_S))  # in which a server may go, or a worker end
        what = "all" if is_named else tape.pick("plan", _UNNAMED)
        if way == "lost":
            await do(partial(job.cancel, undelivered=True))
        elif what == "let go":
            await do(job.cancel)  # nobody copies what no block of the engine's is named for
        elif what == "not moved":
            for rank in self.ranks:
                await do(partial(job.complete, list(keys), rank=rank.rank, moved=False))
        else:
            if not is_named:
                start = tape.draw("plan", plan.num_blocks + 1) if what == "a part" else 0
                stop = plan.num_blocks - (tape.draw("plan", plan.num_blocks + 1 - start) if what == "a part" else 0)
                wanted = slice(start, stop)
                plan = await do(partial(job.bind, self.ranks[0].memory.pages(keys, region)[wanted], start=start))
                await asyncio.sleep(tape.pick("plan", _WAITS_S))
            await self._hand_out(job, plan, way, do)
        return wanted

    async def _planned(self, job: Job, *, is_polled: bool) -> Plan:
        """Wait for a plan, before that perhaps in a thread, as a scheduler does that has no event loop."""

        def poll() -> None:
            while job.plan is None and job.result is None:
                self._planner.poll(_POLLED_S)

        if is_polled:
            await self._within(self.planned_s, "poll()", self._in_a_thread(poll))
        plan: Plan = await self._within(self.planned_s, "planned()", job.planned())
        return plan

    async def _hand_out(self, job: Job, plan: Plan, way: str, do: Callable[[Any], Awaitable[Any]]) -> None:
        """Give every rank's worker a plan; then kill one, or try to cancel the job."""
        tape = self._world.tape
        if not plan.moves:
            return
        if job.result is not None:
            job.cancel(undelivered=True)  # it has ended, and a server may not know that
            return
        at = tape.draw("plan", len(self.ranks))
        first, *others = *self.ranks[at:], *self.ranks[:at]
        first.give(plan)
        for rank in others:
            await asyncio.sleep(0.001 * tape.draw("plan", 3))
            rank.give(plan)
        if way == "a worker dies":
            await asyncio.sleep(tape.pick("plan", _DIES_S))
            first.die()
        elif way == "cancelled late":
            await _turns(tape.draw("plan", 6))
            try:
                await do(job.cancel)
            except ConfigurationError:
                return
            if job.result is None:
                raise WrongAnswer("cancelled plan", "a job was cancelled while its workers may be copying")

    async def _see_ended(self, job: Job, result: JobResult) -> None:
        """See that no worker touches anything of a job that has ended, or wait for that where it may."""

        def is_still() -> bool:
            return not any(rank.is_moving(job.number) for rank in self.ranks)

        if not (is_still() or self.may_end_early(result)):
            raise WrongAnswer("too early", f"a job has ended, and a worker moves its blocks: {result.errors}")
        await self._world.until("the end of a worker's copies", is_still)

    def _check_load(self, keys: BlockKeys, weights: str, region: int, mask: NDArray[np.bool_], wanted: slice) -> None:
        """What is said to be in place is so on every rank."""
        for rank in self.ranks:
            right = rank.memory.are_right(keys, rank.version(weights), region)
            right[: wanted.start], right[wanted.stop :] = False, False
            if (wrong := np.flatnonzero(mask & ~right)).size:
                raise WrongAnswer("wrong bytes", f"blocks {wrong.tolist()} of a planned load on rank {rank.rank}")

    async def _in_a_thread(self, call: Callable[[], Any]) -> Any:  # noqa: ANN401 - its result
        return await in_a_thread(self._calls, call)

    async def _within(self, limit_s: float, what: str, call: Awaitable[Any]) -> Any:  # noqa: ANN401 - its result
        return await within(limit_s, f"{what} of {self._process.name}", call)

    def _take_answers(self) -> None:
        while True:
            self._planner.complete(self._answers.get())


class EnginesPlanning(Planning):
    """The planner of an engine that has a cache of its own, and a worker for its memory."""

    def __init__(self, requests: "Requester") -> None:
        self._requests = requests
        world = requests.world
        worker = WorkerProcess(world, "a worker", requests.memory)
        super().__init__(world, requests.kv.planner(), [worker], world.known)

    @override
    def begins(self, keys: BlockKeys, *, is_load: bool) -> None:
        self._requests.count_asked("load" if is_load else "store", len(keys), is_sure=False)

    @override
    def is_counted(self, keys: BlockKeys, *, is_load: bool) -> None:
        self._requests.count_asked("load" if is_load else "store", -len(keys), is_sure=False)
        self._requests.count_asked("load" if is_load else "store", len(keys), is_sure=True)

    @override
    def may_be_lost(self, mask: NDArray[np.bool_]) -> bool:
        return self._requests.may_be_lost(is_planned=True)

    @override
    def is_explained(self, error: ClosedError | ConfigurationError) -> bool:
        return bool(self._requests.ending) or super().is_explained(error)


async def _at_once(call: Callable[[], Any]) -> Any:  # noqa: ANN401 - its result
    return call()


async def _turns(num: int) -> None:
    for _ in range(num):
        await asyncio.sleep(0)
