"""Jobs: transfers that other processes carry out. Their slots are held until every rank has answered, or has died.

Any thread begins, completes and polls jobs, and waits for nothing; what is decided is decided on the event loop, soon.
A worker that is late keeps its slots, since it may write to them at any time; only its answer or its end frees them.
What one rank did not copy out does not become readable on any.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, TypeVar, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

from tiered_kv.errors import ClosedError, ConfigurationError
from tiered_kv.events import Emit, WorkerEnded
from tiered_kv.integers import as_int
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.plan import JobResult, Move, Outcomes, Plan
from tiered_kv.specs import CPULoadStoreSpec, GPULoadStoreSpec
from tiered_kv.tiers.base import Mask
from tiered_kv.tiers.batch import Batch
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.transfers.held import Held, HeldLoad, reserve_all
from tiered_kv.transfers.polled import Polled
from tiered_kv.transfers.prefetch import PrefetchHandle, bring_each, lease_prefix, start_bringing
from tiered_kv.transfers.workers import Workers

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_LEAST_INT: Final = -(1 << 63)
"""Of the blocks that a rank says it has moved: less than none is none."""


class Job:
    """A load or store that workers carry out: planned, executed by each rank, completed. Any thread may use it.

    Attributes:
        number: Names it, among the jobs of all planners: `Plan.job`.
        plan: What workers are to do; None until that is decided. A job that ends before has one without moves.
        result: How it ended; None until then. It is there first where a job ends at once.
    """

    def __init__(self, jobs: "Jobs", number: int) -> None:
        """Made by `Jobs.begin` only."""
        self.number = number
        self.plan: Plan | None = None
        self.result: JobResult | None = None
        self._jobs = jobs

    async def planned(self) -> Plan:
        """Wait for the plan, on the cache's event loop; other threads poll. Cancellation ends the wait only."""
        return await self._jobs.wait(self, lambda: self.plan)

    async def ended(self) -> JobResult:
        """Wait for the end, on the cache's event loop; other threads poll. Cancellation ends the wait only."""
        return await self._jobs.wait(self, lambda: self.result)

    def cancel(self) -> None:
        """End it with nothing, soon. Of a job that is over it is no error.

        Only while no worker has its plan: what a worker may execute ends by the worker's answer, as it may be writing.
        """
        self._jobs.cancel(self)


@dataclass(frozen=True)
class JobRequest:
    """What a job is about, once it has been checked: made in any thread, planned on the event loop.

    Attributes:
        direction: Of the bytes.
        parts: Per rank, the tiers and the blocks.
        engine: The engine's blocks, the same on every rank.
        is_current: False once what was loaded is of other weights than are served.
    """

    direction: Literal["load", "store"]
    parts: Sequence[tuple[Chain, Batch]]
    engine: GPULoadStoreSpec
    is_current: Callable[[], bool]

    @property
    def num_keys(self) -> int:
        """How many blocks it is about."""
        return len(self.parts[0][1])


@dataclass
class _Underway:
    """A job on the event loop: what it holds, and the ranks that have not answered."""

    job: Job
    request: JobRequest
    held: Sequence[Held] = ()
    waiting_for: set[int] = field(default_factory=set)
    outcomes: dict[int, Outcomes] = field(default_factory=dict)
    task: "asyncio.Task[None] | None" = None


class Jobs:
    """The jobs of one cache and the workers that carry them out. Any thread may call what does not say otherwise."""

    def __init__(self, num_ranks: int, loop_calls: LoopCalls, tasks: Tasks, emit: Emit) -> None:
        """Take jobs from now on. In the event loop's thread."""
        self.workers = Workers(num_ranks, loop_calls, self._lose)
        self._num_ranks = num_ranks
        self._loop_calls = loop_calls
        self._tasks = tasks
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._polled: Polled[Job, None] = Polled(loop_calls)
        self._calls: deque[Callable[[], None]] = deque()
        self._underway: dict[int, _Underway] = {}
        self._waiters: dict[Job, set[asyncio.Future[None]]] = {}
        self._is_open = True
        # Begins anywhere: what workers still answer to a planner before this one must end no job of this one.
        self._last_number = secrets.randbits(62)

    def begin(self, request: JobRequest) -> Job:
        """Begin a job. It is planned on the event loop, in the order of calls.

        Raises:
            ConfigurationError: Some rank has no worker.
            ClosedError: The cache is closed.
        """
        self.workers.pids()
        with self._polled.lock:
            if not self._is_open:
                raise ClosedError("this TieredKV is closed")
            self._last_number += 1
            job = Job(self, self._last_number)
            underway = self._underway[job.number] = _Underway(job, request)
        self._soon(self._start, underway)
        return job

    def complete(self, outcomes: Outcomes) -> None:
        """Take one rank's answer, in any order; of a job that is over it is passed over.

        Raises:
            ConfigurationError: They are no `Outcomes` of a rank here. Nothing has changed.
        """
        if not isinstance(outcomes, Outcomes) or as_int("rank", outcomes.rank) >= self._num_ranks:
            raise ConfigurationError(f"a job is completed with the Outcomes of one of its ranks, got {outcomes!r:.200}")
        number, rank = as_int("job", outcomes.job), as_int("rank", outcomes.rank)
        num_moved = as_int("num_moved", outcomes.num_moved, least=_LEAST_INT)
        self._soon(self._take, Outcomes(number, rank, num_moved, outcomes.error))

    def poll(self, timeout_s: float) -> list[Job]:
        """Return the jobs that were planned or have ended since the last time, each once, in that order.

        Waits for the first of them, at most ``timeout_s``, as long as any job is under way.

        Raises:
            ClosedError: There is none, and as the event loop is closed there will be none.
        """
        return [job for job, _ in self._polled.poll(timeout_s, lambda: bool(self._underway))]

    def cancel(self, job: Job) -> None:
        """See `Job.cancel`."""
        self._soon(self._give_up, job.number, "cancelled")

    def _soon(self, call: Callable[[*Ts], None], *args: *Ts) -> None:
        self._calls.append(partial(call, *args))
        self._loop_calls.call(self._call_next)

    # On the event loop.

    def _call_next(self) -> None:
        if self._calls:  # else `close` has made the call
            self._calls.popleft()()

    async def wait(self, job: Job, answer: Callable[[], T | None]) -> T:
        """Wait until a job has an answer. Nobody is polled for it any more.

        Raises:
            ConfigurationError: This is another event loop.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise ConfigurationError("a job is awaited on the event loop that opened its cache; other threads poll")
        while (answered := answer()) is None:
            waiter = self._loop.create_future()
            waiters = self._waiters.setdefault(job, set())
            waiters.add(waiter)
            try:
                await waiter
            finally:
                waiters.discard(waiter)
        if answered is job.result or job.result is None:
            self._polled.forget(job)
        return answered

    def close(self) -> None:
        """Take no more jobs, end every one with nothing, and watch no worker any more.

        What workers may be writing to yet stays reserved for good: what else is under way must not get these slots.
        """
        with self._polled.lock:
            self._is_open = False
        while self._calls:  # what was answered before the end counts
            self._calls.popleft()()
        for number in list(self._underway):
            self._give_up(number, "closed", may_be_writing=True)
        self.workers.close()

    def _start(self, underway: _Underway) -> None:
        if underway.job.result is not None:
            return  # cancelled, or closed
        request = underway.request
        try:
            if request.direction == "store":
                self._plan(underway, lambda: reserve_all(request.parts))
                return
            sources, handles = start_bringing(request.parts)
            if handles:
                underway.task = self._tasks.spawn(self._bring(underway, sources, handles), "bring blocks for a plan")
            else:
                self._plan(underway, lambda: _lease_all(request, sources))
        except Exception as error:
            self._give_up(underway.job.number, repr(error))  # whoever polls has to hear of it
            raise

    async def _bring(
        self, underway: _Underway, sources: Sequence[NDArray[np.int8]], handles: Sequence[PrefetchHandle]
    ) -> None:
        try:
            await bring_each(handles)
            if underway.job.result is None:
                self._plan(underway, lambda: _lease_all(underway.request, sources))
        except Exception as error:
            self._give_up(underway.job.number, repr(error))
            raise

    def _plan(self, underway: _Underway, hold: Callable[[], Sequence[Held]]) -> None:
        """Hold host memory for every rank, and say who moves what. Where there is nothing to move the job is over."""
        job, request = underway.job, underway.request
        try:
            pids = self.workers.pids()
        except ConfigurationError as error:  # one has ended meanwhile: nobody would end this job
            self._give_up(job.number, str(error))
            return
        underway.held = hold()
        per_block = request.parts[0][0].group.pages_per_block
        pages, group = request.engine.ids.reshape(-1, per_block), request.engine.group
        moves = tuple(
            Move(
                rank, pid, GPULoadStoreSpec(pages[held.positions].ravel(), group),
                CPULoadStoreSpec(held.slots, held.chain.host.slab.name), tuple(held.positions.tolist()),
            )
            for rank, (pid, held) in enumerate(zip(pids, underway.held, strict=True))
        )  # fmt: skip
        num_blocks = len(moves[0].positions) if request.direction == "load" else request.num_keys
        underway.waiting_for = {move.rank for move in moves if move.positions}
        plan = Plan(job.number, request.direction, num_blocks, moves)
        if underway.waiting_for:
            self._tell(job, plan, None)
        else:
            self._end(underway, plan)

    def _take(self, outcomes: Outcomes) -> None:
        underway = self._underway.get(outcomes.job)
        if underway is None or underway.job.plan is None or outcomes.rank not in underway.waiting_for:
            return
        underway.waiting_for.discard(outcomes.rank)
        underway.outcomes[outcomes.rank] = outcomes
        if not underway.waiting_for:
            self._end(underway, underway.job.plan)

    def _end(self, underway: _Underway, plan: Plan) -> None:
        request = underway.request
        moved: Mask = np.full(request.num_keys, fill_value=True)
        for move, held in zip(plan.moves, underway.held, strict=True):
            moved &= held.present | _moved(move, underway.outcomes.get(move.rank), request.num_keys)
        errors = [f"rank {rank}: {each.error}" for rank, each in sorted(underway.outcomes.items()) if each.error]
        if request.direction == "load" and not request.is_current():
            moved[:] = False
            errors.append("epoch advanced")
        for held in underway.held:
            held.end(moved)
        if request.direction == "load":
            num_blocks = [*moved.tolist(), False].index(False)
        else:
            num_blocks = int(np.count_nonzero(moved & ~np.logical_and.reduce([held.present for held in underway.held])))
        self._tell(underway.job, plan, JobResult(plan.job, num_blocks, tuple(errors)))

    def _give_up(self, number: int, why: str, *, may_be_writing: bool = False) -> None:
        """End a job with nothing, for the whole of it; what a worker may be writing to stays reserved for good."""
        underway = self._underway.get(number)
        if underway is None:
            return
        if underway.task is not None:
            underway.task.cancel()
        nothing: Mask = np.zeros(underway.request.num_keys, np.bool_)
        for rank, held in enumerate(underway.held):
            if may_be_writing and rank in underway.waiting_for:
                held.abandon()
            else:
                held.end(nothing)
        plan = underway.job.plan or Plan(number, underway.request.direction, 0, ())
        self._tell(underway.job, plan, JobResult(number, 0, (why,)))

    def _tell(self, job: Job, plan: Plan, result: JobResult | None) -> None:
        with self._polled.lock:
            if result is not None:
                job.result = result  # before the plan: who sees a plan of nothing must not think that it is to be done
                del self._underway[job.number]
            job.plan = plan
            self._polled.tell(job, None)
        for waiter in self._waiters.pop(job, ()):
            if not waiter.done():
                waiter.set_result(None)

    def _lose(self, rank: int, pid: int) -> None:
        """A worker has ended: it touches no slot any more, and what it had not answered it will not."""
        unanswered = [
            underway.job.number
            for underway in list(self._underway.values())
            if rank in underway.waiting_for and underway.job.plan and underway.job.plan.move_of(rank).pid == pid
        ]
        self._emit(WorkerEnded(rank, pid, len(unanswered)))
        for number in unanswered:
            self._take(Outcomes(number, rank, 0, f"the worker of process {pid} has ended"))


def _lease_all(request: JobRequest, sources: Sequence[NDArray[np.int8]]) -> Sequence[Held]:
    return [
        HeldLoad(chain, lease, source)
        for (chain, _), lease, source in zip(request.parts, lease_prefix(request.parts), sources, strict=True)
    ]


def _moved(move: Move, outcomes: Outcomes | None, num_keys: int) -> Mask:
    """Say which of the job's blocks a rank has moved: the first slots of its part."""
    moved: Mask = np.zeros(num_keys, np.bool_)
    if outcomes is not None:
        moved[np.array(move.positions[: max(0, outcomes.num_moved)], np.int64)] = True
    return moved
