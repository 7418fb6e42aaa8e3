"""A simulated client that plans: the shipped code of clients, from their end of a connection on, and a worker process.

The planner and its loop are one process, the worker another. A region of the engine's is a worker's from when it is
given a plan until it has answered, refused the plan or died, whatever has become of the job meanwhile.
"""

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from tiered_kv.host import protocol
from tiered_kv.host.attachment import Attachment
from tiered_kv.host.client_planner import FarPlanner, Introducing
from tiered_kv.host.client_transfers import Starts
from tiered_kv.host.connection import FarSide
from tiered_kv.memory.device import Device
from tiered_kv.memory.host import HostSlab
from tiered_kv.system import Queue, system
from tiered_kv.testing.simulation.client_connections import (
    LOOK_S,
    PATIENCE_S,
    ClientSocket,
    GivenSlab,
    NoGPU,
    PlannersConnection,
)
from tiered_kv.testing.simulation.engine import LAYOUT, Memory, span
from tiered_kv.testing.simulation.engine_workers import carried_out, make_worker
from tiered_kv.testing.simulation.known import Name, WrongAnswer, names_of, within
from tiered_kv.testing.simulation.threads import SimulatedProcess
from tiered_kv.testing.simulation.world import LIMITS, LONGEST_S, World
from tiered_kv.tiers.tasks import in_a_thread
from tiered_kv.transfers.jobs import Job
from tiered_kv.values.errors import ClosedError, ConfigurationError, Reason
from tiered_kv.values.keys import BlockKeys, Shard, epoch_digest
from tiered_kv.values.loop_calls import LoopCalls
from tiered_kv.values.plan import JobResult, Outcomes, Plan, SlabHandle

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.requester import Numbers
    from tiered_kv.testing.simulation.workload import Requests

_DRIVERS: Final = 3
_JOBS: Final = 4
"""Of each driver."""
_LATE_S: Final = (0.0, 0.0, 0.0, 0.01, 0.3, 3.0)
"""How long a worker does something else before it does what is planned, and before it says that it has."""
_PLANNED_S: Final = LIMITS.load_timeout_s + 3 * PATIENCE_S
"""By then there is a plan with what is in host memory, or it is known that there is no server."""
_AWAY_S: Final = 0.1
"""Before the next plan where there was no server for the last."""
_MAY_WAIT_S: Final = 15.0
"""For so long who loads may wait for blocks that a worker is to copy."""


class PlanningClient:
    """A client whose planner uses servers, from the beginning of its process.

    Attributes:
        process: Where it plans.
        sockets: Its ends of its connections.
        is_begun: Whether it waits for its first server.
        is_done: Whether all that it has planned has ended.
        leaves_early: Whether it closes before that.
    """

    def __init__(self, requests: "Requests", introducing: Introducing) -> None:
        self.sockets: list[ClientSocket] = []
        self.is_begun = self.is_done = self.leaves_early = False
        self._requests = requests
        self._world = requests.world
        self._weights = requests.weights
        self._introducing = introducing
        self._memory = Memory()
        self._storing: dict[int, list[Name]] = {}
        self._num_stores = count()
        self._slabs: tuple[GivenSlab, ...] = ()
        self._answers: Queue[Outcomes | None] = system().queue()
        self._worker = _Worker(self._world, self._memory, self._answers)
        self.process = self._world.start_process(f"planning client {self._world.number()}", self._main)
        self._world.bury(self)

    # The server's side.

    def attach(self, socket: ClientSocket, token: bytes, slabs: Sequence[HostSlab]) -> None:
        """Have a connection; in the server's process."""
        self.sockets.append(socket)
        self._calls.call(self._attached, socket, token, slabs)

    def may_leave(self) -> None:
        """Let the client end, with what it has planned."""
        self.leaves_early |= not self.is_done
        self._calls.call(self._leaving.set)

    def give_up(self) -> None:
        """End the worker of a client that has ended: nobody hears how stores have ended that it had planned."""
        self._worker.die()
        for names in self._storing.values():
            self._known.store_ends(names, self._now, is_whole=False, may_be_lost=True)
        self._storing.clear()

    # Its own.

    @property
    def _known(self) -> Any:  # noqa: ANN401 - `Known`
        return self._world.known

    @property
    def _now(self) -> float:
        return self._world.turns.now

    async def _main(self, process: SimulatedProcess) -> None:
        self._world.bury(asyncio.current_task())
        self._process = process
        self._calls = LoopCalls(asyncio.get_running_loop())
        self._leaving, self._opened = asyncio.Event(), asyncio.Event()
        self._connection: PlannersConnection | None = None
        self.is_begun = True
        await self._opened.wait()
        connection = cast(Any, self._connection)
        looking = asyncio.ensure_future(connection.look())
        starts = Starts(connection, epoch_digest(self._weights), lambda _: None)
        self._planner = FarPlanner(connection, starts, self._introducing)
        self._world.start_thread(process, self._take_answers, f"{process.name}: answers")
        driving: asyncio.Future[Any] = asyncio.gather(*(self._drive() for _ in range(_DRIVERS)))
        leaving: asyncio.Future[Any] = asyncio.ensure_future(self._leaving.wait())
        await asyncio.wait({driving, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if driving.done():
            driving.result()  # what was found counts first
            self.is_done = True
            await leaving
        await connection.aclose()
        await self._within(LONGEST_S, "the end of what was planned", driving)
        self.is_done = True
        await looking
        self._answers.put(None)

    def _attached(self, socket: ClientSocket, token: bytes, slabs: Sequence[HostSlab]) -> None:
        said = tuple(
            protocol.Slab(slab.name, slab.num_slots, slab.stride_bytes, slab.payload_bytes, group, 0)
            for group, slab in enumerate(slabs)
        )
        limits = LIMITS
        attached = protocol.Attached(
            token, said, "none", (), (), limits.load_timeout_s, limits.store_timeout_s, 0, 1 << 20, is_read_only=False
        )
        loop_calls = self._calls
        if self._connection is None:
            device = self._world.device(self._process)
            side = FarSide(device, LAYOUT, (Shard(0, 1),), lambda _: None, attached, loop_calls)
            self._connection = PlannersConnection(side)
            self._world.bury(device, side, self._connection)
        connection = self._connection
        descriptors = [os.dup(slab.fd) for slab in slabs]
        there = Attachment(
            connection.path, cast(Any, socket), attached, descriptors, cast(Device, NoGPU()), loop_calls,
            connection.lost, PATIENCE_S, emit=lambda _: None,
        )  # fmt: skip
        self._world.bury(there)
        self._slabs = tuple(
            GivenSlab(
                each.num_slots, each.stride_bytes, each.payload_bytes, there.pool_of(each.name), each.group, 0, "none",
                LAYOUT.groups[each.group], slab.fd,
            )
            for each, slab in zip(said, slabs, strict=True)
        )  # fmt: skip
        connection.attach(there)
        self._worker.attach(self._slabs)
        self._opened.set()

    async def _drive(self) -> None:
        tape = self._world.tape
        for _ in range(_JOBS):
            if self._world.is_over or self._requests.ending:
                return
            numbers = tuple(tape.draw("planners", 1 << 16) for _ in range(4))
            if tape.chance("planners", 0.2):
                await asyncio.sleep(0.01 * (numbers[0] % 30))
            if (region := self._memory.take()) is None:
                continue
            try:
                await self._plan(region, cast("Numbers", numbers), is_load=bool(tape.draw("planners", 2)))
            except ConfigurationError as error:  # it has just ended
                if "worker" not in str(error):
                    raise
            except ClosedError:
                if not self.leaves_early:
                    raise
                return
            finally:
                self._memory.give(region)
            if touched := self._memory.touched():
                raise WrongAnswer("foreign memory", f"somebody has written to regions {touched} of a client")

    async def _plan(self, region: int, numbers: "Numbers", *, is_load: bool) -> None:
        """Have one load or store planned, and carried out or not."""
        if self._worker.start(self._slabs):
            self._planner.register_worker(pid=self._worker.process.pid)
        keys, known = span(numbers), self._known
        names, into, worker = names_of(keys, self._weights), self._memory.pages(keys, region), self._worker.process
        is_bound = numbers[3] >> 4 & 1 == 0
        self._world.tell(f"plans {'a load' if is_load else 'a store'} of {len(keys)} blocks, {numbers[3] % 10}")
        asked = known.ask(names)
        known.used(names, self._now)
        requests, storing = self._requests, next(self._num_stores)
        requests.count_asked("load" if is_load else "store", len(keys), is_sure=False)
        given = into if is_bound else None
        if is_load:
            job = self._planner.plan_load(keys, given, gaps=numbers[3] >> 5 & 3 == 0)
        else:
            self._memory.fill(keys, self._weights, region)
            job = self._planner.plan_store(keys, given)
            known.store_begins(names, self._now)
            self._storing[storing] = names
            requests.copies_until = max(requests.copies_until, self._now + _MAY_WAIT_S)
        mask: NDArray[np.bool_] = np.zeros(len(keys), np.bool_)
        try:
            wanted = await self._carry_out(job, keys, region, numbers, is_bound=is_bound)
            result = await self._within(LONGEST_S, "the end of a job", job.ended())
            if len(result.mask):
                mask = result.mask
            await self._settle(job, result)
            if not worker.is_dead and "worker" in str(result.errors):
                raise WrongAnswer("refused", f"a client's worker lives, and a job ends by {result.errors}")
            if Reason.SERVER_AWAY in result.errors:
                await asyncio.sleep(_AWAY_S)
        finally:
            if not is_load and not self._process.is_dead:
                may_be_lost = requests.may_be_lost(is_planned=True) or not mask.all()
                known.store_ends(names, self._now, is_whole=bool(mask.all()), may_be_lost=may_be_lost)
                del self._storing[storing]
        if is_load:
            right = self._memory.are_right(keys, self._weights, region)
            right[: wanted.start], right[wanted.stop :] = False, False
            if (wrong := np.flatnonzero(mask & ~right)).size:
                raise WrongAnswer("wrong bytes", f"blocks {wrong.tolist()} of a client's planned load")
            known.check(asked, mask, "a client's planned load")
            known.loaded(name for name, is_there in zip(names, mask, strict=True) if is_there)

    async def _carry_out(self, job: Job, keys: BlockKeys, region: int, numbers: "Numbers", *, is_bound: bool) -> slice:
        """Give the worker the plan, or end it at some stage; return which keys it is about."""
        how, wanted = numbers[3] % 10, slice(0, len(keys))
        do = self._in_a_thread if numbers[3] >> 7 & 1 else _at_once
        if how == 0:
            await _turns(numbers[2] % 12)
            await do(job.cancel)
        plan = await self._planned(job, is_polled=bool(numbers[3] >> 8 & 1))
        if how == 0 and any(len(move.host) for move in plan.moves):
            raise WrongAnswer("cancelled plan", "a client's plan with slots was given out after it was cancelled")
        if numbers[2] >> 8 & 1:
            await asyncio.sleep(0.001 * (numbers[2] % 100))  # in which a server may go, or a worker end
        if how == 1:
            await do(partial(job.cancel, undelivered=True))
        elif is_bound:
            await self._hand_out(job, plan, how, numbers)
        elif how == 2:
            await do(job.cancel)  # nobody copies what no block of the engine's is named for
        elif how == 3:
            await do(partial(job.complete, list(keys), moved=False))
        elif how:
            start = numbers[1] % (plan.num_blocks + 1)
            wanted = slice(start, start + numbers[0] % (plan.num_blocks + 1 - start))
            bound = await do(partial(job.bind, self._memory.pages(keys, region)[wanted], start=start))
            await asyncio.sleep(0.001 * (numbers[0] % 100) * (numbers[2] >> 9 & 1))
            await self._hand_out(job, bound, how, numbers)
        return wanted

    async def _planned(self, job: Job, *, is_polled: bool) -> Plan:
        """Wait for a plan, before that perhaps in a thread, as a scheduler does that has no event loop."""

        def poll() -> None:
            while job.plan is None and job.result is None:
                self._planner.poll(LOOK_S)

        if is_polled:
            await self._within(_PLANNED_S, "poll()", self._in_a_thread(poll))
        plan: Plan = await self._within(_PLANNED_S, "planned()", job.planned())
        return plan

    async def _hand_out(self, job: Job, plan: Plan, how: int, numbers: "Numbers") -> None:
        """Give the worker a plan; then kill it, or try to cancel the job."""
        if not plan.moves:
            return
        if job.result is not None:
            job.cancel(undelivered=True)  # it has ended, and the server may not know that
            return
        self._worker.give(plan)
        if how == 4:
            await asyncio.sleep((0.0, 0.002, 0.01, 0.1)[numbers[0] % 4])
            self._world.tape.num_faults += 1
            self._world.tell("a client's worker is killed")
            self._worker.die()
        elif how == 5:
            await _turns(numbers[0] % 6)
            try:
                await (self._in_a_thread if numbers[3] >> 7 & 1 else _at_once)(job.cancel)
            except ConfigurationError:
                return
            if job.result is None:
                raise WrongAnswer("cancelled plan", "a client's job was cancelled while its worker may be copying")

    async def _settle(self, job: Job, result: JobResult) -> None:
        """Wait until the worker touches nothing of a job that has ended: it does so first, where a server is there."""
        is_away = Reason.SERVER_AWAY in result.errors or self.leaves_early
        if self._worker.is_moving(job.number) and not is_away:
            raise WrongAnswer("too early", f"a client's job has ended, and its worker moves blocks: {result.errors}")
        for _ in range(int(50 * LONGEST_S)):
            if not self._worker.is_moving(job.number):
                return
            await asyncio.sleep(0.02)
        raise WrongAnswer("never ends", "a client's worker")

    async def _in_a_thread(self, call: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401 - its result
        return await in_a_thread(self._calls, call, *args)

    async def _within(self, limit_s: float, what: str, call: Any) -> Any:  # noqa: ANN401 - its result
        return await within(limit_s, f"{what} of a client's planner", call)

    def _take_answers(self) -> None:
        while (outcomes := self._answers.get()) is not None:
            self._planner.complete(outcomes)


async def _at_once(call: Callable[[], Any]) -> Any:  # noqa: ANN401 - its result
    return call()


async def _turns(num: int) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


class _Worker:
    """The worker process that a client has now."""

    def __init__(self, world: World, memory: Memory, answers: "Queue[Outcomes | None]") -> None:
        self.process = SimulatedProcess("none yet", 0, is_dead=True)
        self._world = world
        self._memory = memory
        self._answers = answers
        self._inbox: Queue[Plan | Collection[SlabHandle]] = system().queue()
        self._moving: set[int] = set()

    def start(self, slabs: Sequence[SlabHandle]) -> bool:
        """Start a worker, if there is none; say whether it is a new one."""
        if not self.process.is_dead:
            return False
        self._moving = set()
        self._inbox = system().queue()
        self.process = process = self._world.new_process(f"worker {self._world.number()}")
        self._world.start_thread(process, lambda: self._work(process, self._inbox, slabs, self._moving), process.name)
        return True

    def attach(self, slabs: Sequence[SlabHandle]) -> None:
        """Have the worker use other memory."""
        self._inbox.put(slabs)

    def give(self, plan: Plan) -> None:
        """Have the worker carry out a plan."""
        # What is for the worker before this one is refused, and for a move of nothing nobody waits.
        if any(move.positions and move.pid == self.process.pid for move in plan.moves):
            self._moving.add(plan.job)
        self._inbox.put(plan)

    def is_moving(self, job: int) -> bool:
        """Whether the worker was given a plan, lives, and has not answered."""
        return not self.process.is_dead and job in self._moving

    def die(self) -> None:
        """End the worker suddenly."""
        self._world.turns.kill(self.process)

    def _work(
        self, process: SimulatedProcess, inbox: "Queue[Any]", slabs: Sequence[SlabHandle], moving: set[int]
    ) -> None:
        world = self._world
        worker = make_worker(world, process, slabs, self._memory)
        while True:
            given = inbox.get()
            if not isinstance(given, Plan):
                worker.attach(given)
                continue
            self._wait()
            try:
                outcomes = carried_out(world, worker, given)
            except ConfigurationError as error:  # of a server, or for a worker, before these
                world.tell(f"refuses: {error}")
                moving.discard(given.job)
                continue
            self._wait()
            moving.discard(given.job)
            self._answers.put(outcomes)

    def _wait(self) -> None:
        if (late_s := self._world.tape.pick("planners", _LATE_S)) > 0:
            self._world.turns.sleep(late_s)
