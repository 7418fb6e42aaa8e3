"""An engine of several ranks: its scheduler plans for all of them, and a worker of each moves its part of every block.

The scheduler is a process with a cache of its own, in which each rank has its part of host memory; workers are
processes too, that are late, die in the middle, get a plan or lose it. Parts of one block differ, so that whoever is
served another rank's part, or a slot that is another's by now, is found out. Below is the store that all share.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.cache.tiered_kv import TieredKV
from tiered_kv.system import Queue, system
from tiered_kv.testing.simulation.engine import Memory, span
from tiered_kv.testing.simulation.engine_workers import carried_out, make_worker
from tiered_kv.testing.simulation.known import Name, WrongAnswer, names_of, within
from tiered_kv.testing.simulation.neighbours import until_ended
from tiered_kv.testing.simulation.threads import SimulatedProcess
from tiered_kv.testing.simulation.world import LIMITS, LONGEST_S, TIMEOUT_S, World, what_is_held
from tiered_kv.transfers.jobs import Job
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError
from tiered_kv.values.keys import BlockKeys, Shard
from tiered_kv.values.plan import Outcomes, Plan

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.requester import Numbers
    from tiered_kv.testing.simulation.workload import Requests

NUM_RANKS: Final = 2
_DRIVERS: Final = 3
_REQUESTS: Final = 6
"""Of each driver."""
_CALLS: Final = ("load", "load", "store", "store", "store", "evict", "lookup", "flush", "wait", "lose")
_PROMPTS: Final = (0, 4, 5)
"""Two tenants' blocks of the same hashes, and those of another KV group: few, so that most are there."""
_LATE_S: Final = (0.0, 0.0, 0.01, 0.3, 4.0)
"""How long a worker does something else before it does what is planned, and before it says that it has."""
_PLANNED_S: Final = LIMITS.load_timeout_s + 0.3
_DIES_S: Final = (0.0, 0.002, 0.01, 0.1)


async def plan_for_ranks(requests: "Requests", numbers: "Numbers") -> None:
    """An engine of several ranks loads and stores by plans: every rank has its part of a block, or none is used."""
    world = requests.world
    if world.scheduler is not None and not (world.scheduler.is_dead or world.scheduler.has_ended):
        return  # what one evicts another would store again

    async def main(process: SimulatedProcess) -> None:
        device = world.device(process)
        shape = replace(requests.shape, chain=("cpu", "store"), cpu_slots=(10, 20, 40)[numbers[1] % 3])
        cache = world.new_cache(process, shape, device, requests.weights, shard=Shard.every(NUM_RANKS))
        world.bury(cache, device, asyncio.current_task())
        await _Scheduler(world, process, cache, requests.weights).serve()

    world.scheduler = world.start_process(f"scheduler {world.number()}", main)
    await until_ended(world, world.scheduler)


class _Scheduler:
    """A scheduler without tensors: it plans, has workers carry plans out, and looks at what has become of blocks."""

    def __init__(self, world: World, process: SimulatedProcess, cache: TieredKV, weights: str) -> None:
        self._world = world
        self._process = process
        self._cache = cache
        self._weights = weights
        self._known = world.known_of_ranks
        self._known.restarted(lost_power=False)
        self._answers: Queue[Outcomes | None] = system().queue()
        self._ranks = [_Rank(rank, world, self._answers) for rank in range(NUM_RANKS)]
        self._began = self._now

    @property
    def _now(self) -> float:
        return self._world.turns.now

    async def serve(self) -> None:
        """Open the cache, plan beside each other, see that nothing is held in the end, and close it."""
        try:
            await self._cache.__aenter__()
        except BackendUnavailableError:
            if not self._world.may_have_been_wrong(self._began):
                raise
            return
        self._planner = self._cache.planner()
        self._world.start_thread(self._process, self._take_answers, f"{self._process.name}: answers")
        try:
            await asyncio.gather(*(self._drive() for _ in range(_DRIVERS)))
            await self._within(LONGEST_S, "the end of all transfers", self._settle())
        finally:
            self._answers.put(None)
            for rank in self._ranks:
                rank.may_be_late = True
            await self._within(LONGEST_S, "closing", self._cache.aclose())
            for rank in self._ranks:
                rank.end()

    async def _drive(self) -> None:
        tape = self._world.tape
        for _ in range(_REQUESTS):
            if self._world.is_over:
                return
            self._world.num_steps += 1
            what, numbers = tape.pick("ranks", _CALLS), [tape.draw("ranks", 1 << 16) for _ in range(4)]
            keys = span((_PROMPTS[numbers[0] % len(_PROMPTS)], *numbers[1:3]))
            self._world.tell(f"{what} {' '.join(str(number % 97) for number in numbers)}")
            await self._request(what, keys, numbers)
            for rank in self._ranks:
                rank.check_untouched()

    async def _request(self, what: str, keys: BlockKeys, numbers: Sequence[int]) -> None:
        known, names = self._known, names_of(keys, self._weights)
        if what == "wait":
            await asyncio.sleep(0.01 * (numbers[2] % 20))
        elif what == "flush":
            await self._within(LONGEST_S, "flush", self._cache.flush())
        elif what == "lose":
            self._lose_part(Shard(numbers[0] % NUM_RANKS, NUM_RANKS))
            await self._within(TIMEOUT_S, "evict", self._cache.evict(keys, tier="cpu"))
        elif what == "lookup":
            asked = known.ask(names)
            found = await self._within(LONGEST_S, "lookup", self._cache.lookup(keys))
            known.check(asked, np.arange(len(keys)) < found.num_blocks, "a lookup of all ranks")
        elif what == "evict":
            known.removing(names)
            since = known.moment()
            result = await self._within(TIMEOUT_S + 0.3, "evict", self._cache.evict(keys))
            known.removed(names, since, self._now, "evicted", weakly=bool(result.kept_by))
        else:
            await self._plan(keys, names, numbers, is_load=what == "load")

    def _lose_part(self, shard: Shard) -> None:
        """Have the store lose half of what one rank has there, as stores do that are full; hidden names say of none."""
        store = self._world.store
        for path in [path for path in store.records if f"/{shard}/" in path]:
            if self._world.tape.chance("ranks", 0.5):
                store.drop(path)

    async def _plan(self, keys: BlockKeys, names: list[Name], numbers: Sequence[int], *, is_load: bool) -> None:
        """Have one load or store planned and carried out, in a region of its own on every rank."""
        for rank in self._ranks:
            if rank.start(self._planner.slabs()):
                self._planner.register_worker(rank=rank.number, pid=rank.process.pid)
        if (region := self._ranks[0].memory.take()) is None:
            return
        for rank in self._ranks[1:]:
            rank.memory.free.remove(region)
        try:
            await self._carry_out(keys, names, region, numbers, is_load=is_load)
        except ConfigurationError as error:  # one has just ended
            if "worker" not in str(error) or all(rank.is_alive for rank in self._ranks):
                raise
        finally:
            for rank in self._ranks:
                rank.memory.give(region)

    async def _carry_out(
        self, keys: BlockKeys, names: list[Name], region: int, numbers: Sequence[int], *, is_load: bool
    ) -> None:
        known, asked, how = self._known, self._known.ask(names), numbers[3] % 8
        into = self._ranks[0].memory.pages(keys, region)
        if is_load:
            job = self._planner.plan_load(keys, into, gaps=numbers[3] >> 3 & 3 == 0)
        else:
            job = self._planner.plan_store(keys, into)
            for rank in self._ranks:
                rank.memory.fill(keys, rank.version(self._weights), region)
            known.store_begins(names, self._now)
        mask = np.zeros(len(keys), np.bool_)
        try:
            if how == 0:
                for _ in range(numbers[2] % 12):
                    await asyncio.sleep(0)
                job.cancel()
            plan = await self._within(_PLANNED_S, "planned()", job.planned())
            if how == 0 and plan.moves:
                raise WrongAnswer("cancelled plan", "a plan was given out after it was cancelled")
            await self._hand_out(job, plan, how, numbers)
            result = await self._within(LONGEST_S, "the end of a job", job.ended())
            if busy := [rank.number for rank in self._ranks if rank.is_moving(plan.job)]:
                raise WrongAnswer("too early", f"a job has ended, and ranks {busy} are moving its blocks yet")
            if len(result.mask):
                mask = result.mask
        finally:
            if not is_load:
                known.store_ends(names, self._now, is_whole=bool(mask.all()))
        if is_load:
            self._check_load(asked.names, keys, region, mask)
            known.check(asked, mask, "a load of all ranks")

    async def _hand_out(self, job: Job, plan: Plan, how: int, numbers: Sequence[int]) -> None:
        """Give every rank the plan, one of them perhaps before it dies; or lose it before anybody has it."""
        if how == 1:
            job.cancel(undelivered=True)
            return
        if not plan.moves:
            return
        first = numbers[2] % NUM_RANKS
        for rank in (*self._ranks[first:], *self._ranks[:first]):
            rank.plans.put(plan)
            await asyncio.sleep(0.001 * (numbers[0] % 3))
        if how in (2, 4, 5):
            await asyncio.sleep(_DIES_S[numbers[0] % len(_DIES_S)])
            self._ranks[first].die()
        elif how == 3:
            try:
                job.cancel()
            except ConfigurationError:
                return
            if job.result is None:
                raise WrongAnswer("cancelled plan", "a job was cancelled while workers may be copying")

    def _check_load(self, names: list[Name], keys: BlockKeys, region: int, mask: NDArray[np.bool_]) -> None:
        """What is said to be in place is so on every rank."""
        for rank in self._ranks:
            said = f"a planned load on rank {rank.number}"
            rank.memory.check(keys, rank.version(self._weights), region, mask, said)
        if (found := np.flatnonzero(mask & ~self._known.were_stored(names))).size:
            raise WrongAnswer("came back", f"a planned load found blocks {found.tolist()}, which were never stored")

    async def _settle(self) -> None:
        """Let everything end: then nothing is held, whatever has become of workers."""
        await self._cache.flush()
        if self._world.may_have_been_wrong(self._began) or self._world.may_be_late:
            return
        while (stats := self._cache.stats()).transfers or any(tier.dirty for tier in stats.tiers):
            await asyncio.sleep(1.0)
            await self._cache.flush()
        is_well = not self._world.may_have_been_wrong(self._began)
        if is_well and (held := what_is_held(stats)):
            raise WrongAnswer("leak", "; ".join(held))

    async def _within(self, limit_s: float, what: str, call: Any) -> Any:  # noqa: ANN401 - its result
        return await within(limit_s, f"{what} of a scheduler", call)

    def _take_answers(self) -> None:
        while (outcomes := self._answers.get()) is not None:
            self._planner.complete(outcomes)


class _Rank:
    """One rank of an engine: its memory, and the worker process that has it now.

    Attributes:
        may_be_late: Whether the scheduler closes its cache: a worker that has just been started may not find it.
    """

    def __init__(self, number: int, world: World, answers: "Queue[Outcomes | None]") -> None:
        self.number = number
        self.memory = Memory()
        self.plans: Queue[Plan] = system().queue()
        self.process = SimulatedProcess("none yet", 0, is_dead=True)
        self._world = world
        self._answers = answers
        self._moving: set[int] = set()
        self.may_be_late = False

    @property
    def is_alive(self) -> bool:
        """Whether there is a worker."""
        return not self.process.is_dead

    def version(self, weights: str) -> str:
        """Return what this rank's parts of blocks are computed with: parts of others differ."""
        return f"{weights} of rank {self.number}"

    def start(self, slabs: Sequence[Any]) -> bool:
        """Have a worker, if there is none; say whether it is a new one."""
        if self.is_alive:
            return False
        world = self._world
        self._moving.clear()
        self.plans = system().queue()
        self.process = process = world.new_process(f"rank {self.number}")
        world.start_thread(process, lambda: self._work(process, self.plans, slabs), process.name)
        return True

    def die(self) -> None:
        """End the worker suddenly."""
        self._world.tape.num_faults += 1
        self._world.tell(f"rank {self.number} is killed")
        self._world.turns.kill(self.process)

    def end(self) -> None:
        """End the worker, which has nothing more to do."""
        self._world.turns.kill(self.process)

    def is_moving(self, job: int) -> bool:
        """Whether the worker, which lives, has begun with a job and not answered yet."""
        return self.is_alive and job in self._moving

    def check_untouched(self) -> None:
        """Nobody writes to memory of the engine that is in no call."""
        if touched := self.memory.touched():
            raise WrongAnswer("foreign memory", f"somebody has written to regions {touched} of rank {self.number}")

    def _work(self, process: SimulatedProcess, plans: "Queue[Plan]", slabs: Sequence[Any]) -> None:
        world = self._world
        try:
            worker = make_worker(world, process, slabs, self.memory, rank=self.number)
        except ConfigurationError:
            if not self.may_be_late:
                raise
            return  # its memory has gone with the scheduler's cache before this process got to run
        while True:
            plan = plans.get()
            self._wait()
            move = plan.move_of(self.number)
            if move.positions:  # else nobody waits for it
                self._moving.add(plan.job)
            try:
                outcomes = carried_out(world, worker, plan)
            except ConfigurationError:
                if move.pid == process.pid:
                    raise
                self._moving.discard(plan.job)
                continue  # it was for the worker before this one, which had died before it was handed out
            self._wait()
            self._moving.discard(plan.job)
            self._answers.put(outcomes)

    def _wait(self) -> None:
        if (late_s := self._world.tape.pick("ranks", _LATE_S)) > 0:
            self._world.turns.sleep(late_s)
