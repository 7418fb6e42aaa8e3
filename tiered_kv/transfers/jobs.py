"""Jobs: transfers that other processes carry out. Their slots are held until every rank has answered, or has died.

Any thread begins, completes and polls jobs, and waits for nothing; what is decided is decided on the event loop, soon.
A worker that is late keeps its slots, since it may write to them at any time; only its answer or its end frees them.
What one rank did not copy out does not become readable on any.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar, TypeVarTuple

import numpy as np

from tiered_kv.errors import ClosedError, ConfigurationError, LayoutMismatchError
from tiered_kv.events import Emit, WorkerEnded
from tiered_kv.integers import as_int
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.plan import JobResult, Outcomes, Plan
from tiered_kv.specs import GPULoadStoreSpec
from tiered_kv.tiers.base import Mask
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.transfers.gaps import bring_around_gaps
from tiered_kv.transfers.polled import Polled
from tiered_kv.transfers.prefetch import Brought, PrefetchHandle, bring_each, start_bringing
from tiered_kv.transfers.requests import JobRequest
from tiered_kv.transfers.underway import Underway, bind
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

    def bind(self, blocks: GPULoadStoreSpec, *, start: int = 0) -> Plan:
        """Say which blocks of the engine a job is about that was planned without; return the plan for the workers.

        At once, and once. What is held beyond these blocks is let go when the job ends.

        Args:
            blocks: ``pages_per_block`` block ids for each of ``keys[start:start + n]``, the same on every rank.
            start: Where they begin: what comes before it the engine has by now.

        Returns:
            The job's plan from now on; its ``num_blocks`` is n. If the job is over meanwhile, because it was cancelled
            or a worker has ended, it has no moves.

        Raises:
            ConfigurationError: There is no plan yet, it names the engine's blocks already, or these are none.
            LayoutMismatchError: Ids for a part of a block, for more blocks than are held, or of another KV group.
        """
        return self._jobs.bind(self, blocks, start)

    def complete(self, keys: Sequence[bytes], *, rank: int = 0, moved: bool = True) -> None:
        """Answer for a rank key by key, in any order: for who copies to or from the slots himself.

        The job ends, soon, when all that was to be moved is answered for; then what every rank has moved is readable.
        Keys for which there is nothing to move, and a job that is over, are passed over.

        Args:
            keys: Of the job.
            rank: Whose part of them.
            moved: Whether they were.

        Raises:
            ConfigurationError: No such rank.
        """
        self._jobs.complete_keys(self, keys, rank, moved=moved)

    def cancel(self) -> None:
        """End it with nothing, soon. Of a job that is over it is no error.

        Only while no worker has its plan: what a worker may execute ends by the worker's answer, as it may be writing.
        """
        self._jobs.cancel(self)


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
        self._underway: dict[Job, Underway] = {}
        self._not_over: dict[int, Job] = {}
        self._is_open = True
        # Begins anywhere: what workers still answer to a planner before this one must end no job of this one.
        self._last_number = secrets.randbits(62)
        self._calls: deque[Callable[[], None]] = deque()
        # The event loop's thread alone uses these two; of who waits, what for.
        self._waiters: dict[Job, dict[asyncio.Future[None], Callable[[], object]]] = {}
        self._bringing: dict[Job, asyncio.Task[None]] = {}

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
            job = self._not_over[self._last_number] = Job(self, self._last_number)
            self._underway[job] = Underway(job.number, request, self._loop.time)
        self._soon(self._start, job)
        return job

    def bind(self, job: Job, blocks: GPULoadStoreSpec, start: int) -> Plan:
        """See `Job.bind`."""
        if not isinstance(blocks, GPULoadStoreSpec):
            raise ConfigurationError(f"blocks of the engine are given as GPULoadStoreSpec, got {type(blocks).__name__}")
        start = as_int("start", start)
        with self._polled.lock:
            underway, plan = self._underway.get(job), job.plan
            if plan is None:
                raise ConfigurationError("job.bind() comes when the job is planned: Planner.poll() tells")
            if underway is None:
                return replace(plan, num_blocks=0, moves=())
            request = underway.request
            if blocks.group != request.keys.group:
                raise LayoutMismatchError(f"keys of KV group {request.keys.group}, but block ids of {blocks.group}")
            bound = job.plan = bind(plan, request, blocks, start)
            underway.is_bound = True
        self._soon(self._take, job, lambda underway: underway.follow(bound, slice(start, start + bound.num_blocks)))
        return bound

    def complete(self, outcomes: Outcomes) -> None:
        """Take one rank's answer, in any order; of a job that is over it is passed over.

        Raises:
            ConfigurationError: They are no `Outcomes` of a rank here. Nothing has changed.
        """
        if not isinstance(outcomes, Outcomes):
            raise ConfigurationError(f"a job is completed with the Outcomes of one of its ranks, got {outcomes!r:.200}")
        number, rank = as_int("job", outcomes.job), self._rank(outcomes.rank)
        num_moved = as_int("num_moved", outcomes.num_moved, least=_LEAST_INT)
        if (job := self._not_over.get(number)) is not None:
            answer = rank, num_moved, str(outcomes.error), float(outcomes.seconds)
            self._soon(self._take, job, lambda underway: underway.take(*answer))

    def complete_keys(self, job: Job, keys: Sequence[bytes], rank: int, *, moved: bool) -> None:
        """See `Job.complete`."""
        rank = self._rank(rank)
        if (underway := self._underway.get(job)) is not None:
            named = set(keys)
            answered: Mask = np.array([key in named for key in underway.request.keys], np.bool_)
            self._soon(self._take, job, lambda underway: underway.take_keys(rank, answered, moved=moved))

    def poll(self, timeout_s: float) -> list[Job]:
        """Return the jobs that were planned or have ended since the last time, each once, in that order.

        Waits for the first of them, at most ``timeout_s``, as long as any job is under way.

        Raises:
            ClosedError: There is none, and as the event loop is closed there will be none.
        """
        return [job for job, _ in self._polled.poll(timeout_s, lambda: bool(self._not_over))]

    def cancel(self, job: Job) -> None:
        """See `Job.cancel`."""
        with self._polled.lock:
            if (underway := self._take_out(job)) is not None:  # now: it cannot be bound any more
                self._polled.forget(job)  # nor may anyone be told of its plan, whose slots are about to go
                self._soon(self._give_up, job, underway, "cancelled")

    def _rank(self, rank: object) -> int:
        number = as_int("rank", rank)
        if number >= self._num_ranks:
            raise ConfigurationError(f"rank {number} of {self._num_ranks}: this cache has no such rank")
        return number

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
            waiters = self._waiters.setdefault(job, {})
            waiters[waiter] = answer
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():  # it was told of nobody else
                    with self._polled.lock:
                        self._polled.tell(job, None)
                raise
            finally:
                waiters.pop(waiter, None)
        if _says_all(job, answered):
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
        for job in list(self._underway):
            self._end_early(job, "closed", may_be_writing=True)
        self.workers.close()

    def _start(self, job: Job) -> None:
        if (underway := self._underway.get(job)) is None:
            return
        request = underway.request
        try:
            if request.gaps:
                self._bringing[job] = self._tasks.spawn(self._bring_around_gaps(job), "bring blocks for a plan")
                return
            brought, handles = start_bringing(request.parts) if request.direction == "load" else ([], [])
            if handles:
                self._bringing[job] = self._tasks.spawn(self._bring(job, brought, handles), "bring blocks for a plan")
            else:
                self._plan(job, brought)
        except BaseException as error:
            self._end_early(job, repr(error))  # whoever polls has to hear of it
            raise

    async def _bring(self, job: Job, brought: Sequence[Brought], handles: Sequence[PrefetchHandle]) -> None:
        try:
            await bring_each(handles)
            self._plan(job, brought)
        except Exception as error:
            self._end_early(job, repr(error))
            raise
        finally:
            self._bringing.pop(job, None)

    async def _bring_around_gaps(self, job: Job) -> None:
        try:
            if (underway := self._underway.get(job)) is not None:
                self._plan(job, await bring_around_gaps(underway.request.parts))
        except Exception as error:
            self._end_early(job, repr(error))
            raise
        finally:
            self._bringing.pop(job, None)

    def _plan(self, job: Job, brought: Sequence[Brought]) -> None:
        if (underway := self._underway.get(job)) is None:
            return
        try:
            pids = self.workers.pids()
        except ConfigurationError as error:  # one has ended meanwhile: nobody would end this job
            self._end_early(job, str(error))
            return
        plan = underway.hold(pids, brought)
        if underway.is_over:  # there is nothing to move
            self._end(job)
            return
        with self._polled.lock:
            if job in self._underway:  # else cancelled meanwhile
                self._tell(job, plan, None)

    def _take(self, job: Job, answer: Callable[[Underway], None]) -> None:
        """Have a job that is planned look at an answer, or at what it is bound to."""
        underway = self._underway.get(job)
        if underway is not None and underway.plan is not None:
            answer(underway)
            if underway.is_over:
                self._end(job)

    def _end(self, job: Job) -> None:
        if (underway := self._take_out(job)) is not None:
            assert underway.plan is not None  # noqa: S101 - what is not planned waits for no answer
            self._tell(job, underway.plan, underway.end())

    def _end_early(self, job: Job, why: str, *, may_be_writing: bool = False) -> None:
        if (underway := self._take_out(job)) is not None:
            self._give_up(job, underway, why, may_be_writing=may_be_writing)

    def _give_up(self, job: Job, underway: Underway, why: str, *, may_be_writing: bool = False) -> None:
        """End a job that was taken out, with nothing."""
        if (task := self._bringing.get(job)) is not None and task is not asyncio.current_task():
            task.cancel()
        plan = underway.plan or Plan(job.number, underway.request.direction, 0, ())
        self._tell(job, plan, underway.give_up(why, may_be_writing=may_be_writing))

    def _take_out(self, job: Job, *, unless_bound: bool = False) -> Underway | None:
        """Let nobody bind or answer a job any more that is about to end; return it. Any thread may call."""
        with self._polled.lock:
            underway = self._underway.get(job)
            if underway is None or (unless_bound and underway.is_bound):
                return None
            return self._underway.pop(job)

    def _tell(self, job: Job, plan: Plan, result: JobResult | None) -> None:
        with self._polled.lock:
            if result is not None:
                job.result = result  # before the plan: who sees a plan of nothing must not think that it is to be done
                del self._not_over[job.number]
            job.plan = plan
            waiters = self._waiters.pop(job, {})
            if not any((said := answer()) is not None and _says_all(job, said) for answer in waiters.values()):
                self._polled.tell(job, None)
            else:  # whoever awaits it is to have it; who polls looks whether anything else is coming
                self._polled.lock.notify_all()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _lose(self, rank: int, pid: int) -> None:
        """A worker has ended: it touches no slot any more, and what it had not answered it will not."""
        lost = [job for job, underway in list(self._underway.items()) if underway.waits_for(rank, pid)]
        self._emit(WorkerEnded(rank, pid, len(lost)))
        said = f"the worker of process {pid} has ended"
        for job in lost:
            if (unbound := self._take_out(job, unless_bound=True)) is not None:
                self._give_up(job, unbound, f"rank {rank}: {said}")  # nobody has its plan, so nobody else will answer
            else:
                self._take(job, lambda underway: underway.take(rank, 0, said))


def _says_all(job: Job, answer: object) -> bool:
    """Whether who has this answer knows all that there is to know of a job now."""
    return answer is job.result or job.result is None
