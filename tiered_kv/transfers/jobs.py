"""Jobs: transfers that other processes carry out. Their slots are held until every rank has answered, or has died.

Any thread begins, completes and polls jobs, and waits for nothing; what is decided is decided on the event loop, soon.
A worker that is late keeps its slots, since it may write to them at any time; only its answer or its end frees them.
What one rank did not copy out does not become readable on any.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVarTuple

import numpy as np
from typing_extensions import override

from tiered_kv.errors import ConfigurationError
from tiered_kv.events import Emit, WorkerEnded
from tiered_kv.keys import BlockKeys
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.plan import Outcomes
from tiered_kv.tiers.base import Mask
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.transfers.gaps import bring_around_gaps
from tiered_kv.transfers.job import Job, JobBook, with_a_worker
from tiered_kv.transfers.prefetch import Brought, PrefetchHandle, bring_each, start_bringing
from tiered_kv.transfers.requests import JobRequest
from tiered_kv.transfers.underway import Underway
from tiered_kv.transfers.workers import Workers

Ts = TypeVarTuple("Ts")


class Jobs(JobBook):
    """The jobs of one planner and the workers that carry them out. Any thread may call what does not say otherwise."""

    def __init__(self, num_ranks: int, loop_calls: LoopCalls, tasks: Tasks, emit: Emit) -> None:
        """Take jobs from now on. In the event loop's thread."""
        super().__init__(num_ranks, loop_calls)
        self.workers = Workers(num_ranks, loop_calls, self._lose)
        self._tasks = tasks
        self._emit = emit
        self._underway: dict[Job, Underway] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._bringing: dict[Job, asyncio.Task[None]] = {}  # the event loop's thread alone uses it
        self._is_left = False

    def begin(self, request: JobRequest) -> Job:
        """Begin a job. It is planned on the event loop, in the order of calls.

        Raises:
            ConfigurationError: Some rank has no worker.
            ClosedError: The cache is closed.
        """
        self.workers.pids()
        with self._polled.lock:
            job = self._new(request.direction)
            self._underway[job] = Underway(job.number, request, self._loop.time)
        self._soon(self._start, job)
        return job

    @override
    def _about(self, job: Job) -> tuple[BlockKeys, int] | None:
        underway = self._underway.get(job)
        return None if underway is None else (underway.request.keys, underway.request.pages_per_block)

    @override
    def _note_bound(self, job: Job, start: int, num_blocks: int) -> None:
        bound = job.decided
        assert bound is not None  # noqa: S101 - it was bound just now
        self._underway[job].is_bound = True
        self._soon(self._answer, job, lambda underway: underway.follow(bound, slice(start, start + num_blocks)))

    def complete_keys(self, job: Job, keys: Sequence[bytes], rank: int, *, moved: bool) -> None:
        """See `Job.complete`."""
        rank = self._rank(rank)
        if (underway := self._underway.get(job)) is not None:
            named = set(keys)
            answered: Mask = np.array([key in named for key in underway.request.keys], np.bool_)
            self._soon(self._answer, job, lambda underway: underway.take_keys(rank, answered, moved=moved))

    def cancel(self, job: Job, *, undelivered: bool) -> None:
        """See `Job.cancel`."""
        with self._polled.lock:
            if job.is_seen and not undelivered and job in self._underway and self._underway[job].may_be_out:
                raise with_a_worker(job)
            if (underway := self._take_out(job)) is not None:  # now, with the look: a plan that is handed out is not
                self._soon(self._give_up, job, underway, "cancelled")

    def _take(self, outcomes: Outcomes) -> None:
        if (job := self._not_over.get(outcomes.job)) is not None:
            answer = outcomes.rank, outcomes.num_moved, outcomes.error, outcomes.seconds
            self._soon(self._answer, job, lambda underway: underway.take(*answer))

    def _soon(self, call: Callable[[*Ts], None], *args: *Ts) -> None:
        self._calls.append(partial(call, *args))
        self._loop_calls.call(self._call_next)

    # On the event loop.

    def _call_next(self) -> None:
        if self._calls:  # else `close` has made the call
            self._calls.popleft()()

    def answers(self) -> "list[asyncio.Future[None]]":
        """Return what is done once each store that a worker may have is answered, cancelled if it was closed over.

        Those are bound, and somebody was handed the plan: others nobody copies out yet, and may never.
        """
        return [
            each
            for job, underway in list(self._underway.items())
            if underway.is_bound and job.is_seen
            for each in underway.answers
        ]

    def leave(self) -> None:
        """Who planned is gone: end what no worker has the plan of. The rest ends with the workers' processes."""
        self._begin_no_more()
        self._is_left = True
        for job, underway in list(self._underway.items()):
            if underway.plan is None or not underway.may_be_out:
                self._end_early(job, "the planner has ended")
        self._close_if_left()

    def close(self) -> None:
        """Take no more jobs, end every one with nothing, and watch no worker any more.

        What workers may be writing to yet stays reserved for good: what else is under way must not get these slots.
        """
        self._begin_no_more()
        for job in list(self._underway):
            self._end_early(job, "closed", may_be_writing=True)
        self.workers.close()

    def _begin_no_more(self) -> None:
        with self._polled.lock:
            self._is_open = False
        while self._calls:  # what was answered before the end counts
            self._calls.popleft()()

    def _start(self, job: Job) -> None:
        if (underway := self._underway.get(job)) is None:
            return
        request = underway.request
        try:
            if request.gaps:
                self._bringing[job] = self._tasks.spawn(self._bring_around_gaps(job), "bring blocks for a plan")
                return
            brought, handles = (
                start_bringing(request.parts, deadline=request.deadline) if request.direction == "load" else ([], [])
            )
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
                self._plan(job, await bring_around_gaps(underway.request.parts, underway.request.deadline))
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

    def _answer(self, job: Job, answer: Callable[[Underway], None]) -> None:
        """Have a job that is planned look at an answer, or at what it is bound to."""
        underway = self._underway.get(job)
        if underway is not None and underway.plan is not None:
            answer(underway)
            if underway.is_over:
                self._end(job)

    def _end(self, job: Job) -> None:
        with self._polled.lock:
            underway = self._underway.pop(job, None)
        if underway is not None:
            assert underway.plan is not None  # noqa: S101 - what is not planned waits for no answer
            self._tell(job, underway.plan, underway.end())
            self._close_if_left()

    def _end_early(self, job: Job, why: str, *, may_be_writing: bool = False) -> None:
        if (underway := self._take_out(job)) is not None:
            self._give_up(job, underway, why, may_be_writing=may_be_writing)

    def _give_up(self, job: Job, underway: Underway, why: str, *, may_be_writing: bool = False) -> None:
        """End a job that was taken out, with nothing."""
        if (task := self._bringing.get(job)) is not None and task is not asyncio.current_task():
            task.cancel()
        self._tell(job, None, underway.give_up(why, may_be_writing=may_be_writing))

    def _take_out(self, job: Job, *, unless_out: bool = False) -> Underway | None:
        """Let nobody see, bind or answer a job any more that is about to end early; return it. Any thread may call."""
        with self._polled.lock:
            underway = self._underway.get(job)
            if underway is None or (unless_out and underway.may_be_out):
                return None
            self._withdraw(job)
            return self._underway.pop(job)

    def _lose(self, rank: int, pid: int) -> None:
        """A worker has ended: it touches no slot any more, and what it had not answered it will not."""
        lost = [job for job, underway in list(self._underway.items()) if underway.waits_for(rank, pid)]
        self._emit(WorkerEnded(rank, pid, len(lost)))
        said = f"the worker of process {pid} has ended"
        for job in lost:
            if (unbound := self._take_out(job, unless_out=True)) is not None:
                self._give_up(job, unbound, f"rank {rank}: {said}")  # nobody has its plan, so nobody else will answer
            else:
                self._answer(job, lambda underway: underway.take(rank, 0, said))

    def _close_if_left(self) -> None:
        if self._is_left and not self._underway:
            self.workers.close()
