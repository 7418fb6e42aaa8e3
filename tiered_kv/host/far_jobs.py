"""A planner's jobs whose cache is a server's: that plans and holds; here they are bound, and whoever waits is told.

A job ends here whatever the server does: when it is gone, when it does not answer, and when the job is cancelled. The
server is told what workers have moved all the same, as long as it is there: it holds slots until then.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import numpy as np
from typing_extensions import override

from tiered_kv.errors import TieredKVError
from tiered_kv.host import wire
from tiered_kv.host.attachment import Attachment
from tiered_kv.host.connection import Connection
from tiered_kv.host.far_job import FarJob, FarRequest
from tiered_kv.host.for_workers import Introductions
from tiered_kv.host.job_messages import BindJob, JobEnded, JobMoved, JobMovedKeys, JobPlan, JobPlanned, PlanJob
from tiered_kv.host.messages import Cancel, Reply
from tiered_kv.host.questions import Failed, Stats
from tiered_kv.keys import BlockKeys
from tiered_kv.plan import Outcomes
from tiered_kv.transfers.job import Job, JobBook, with_a_worker
from tiered_kv.transfers.workers import Workers

_LOOK_S: Final = 1.0
"""How often it is looked whether a server answers that jobs wait for."""


class FarJobs(JobBook):
    """The jobs of one client's planner. Any thread may call what does not say otherwise."""

    def __init__(self, connection: Connection, num_ranks: int) -> None:
        """Take jobs from now on. In the event loop's thread."""
        here = connection.here()
        super().__init__(num_ranks, here.loop_calls)
        self._workers = Workers(num_ranks, here.loop_calls, lambda _rank, _pid: self._lose_unbound())
        self._connection = connection
        self._tasks = here.tasks
        self._underway: dict[Job, FarJob] = {}
        # The event loop's thread alone changes these.
        self._sent: dict[int, FarJob] = {}  # of which the server has more to say
        self._waiting: list[FarJob] = []  # until the server knows the workers
        self._introductions = Introductions(connection, self._workers, here, self._introduced)
        self._watching: asyncio.Task[None] | None = None
        connection.follow(self)

    def register(self, rank: int, pid: int) -> None:
        """See `Planner.register_worker`."""
        self._workers.register(rank, pid)
        self._loop_calls.call(self._introductions.soon)

    def begin(self, request: FarRequest) -> Job:
        """Begin a job. The server is told of it on the event loop, in the order of calls.

        Raises:
            ConfigurationError: Some rank has no worker.
            ClosedError: The client is closed.
        """
        self._workers.pids()
        with self._polled.lock:
            job = self._new(request.direction)
            far = self._underway[job] = FarJob(self, job, request, self._loop.time)
        self._loop_calls.call(self._start, far)
        return job

    @override
    def _about(self, job: Job) -> tuple[BlockKeys, int] | None:
        far = self._underway.get(job)
        return None if far is None else (far.request.keys, far.request.per_block)

    @override
    def _note_bound(self, job: Job, start: int, num_blocks: int) -> None:
        far = self._underway[job]
        far.is_bound = True
        self._loop_calls.call(far.send, BindJob(far.number, start, num_blocks))

    def complete_keys(self, job: Job, keys: Sequence[bytes], rank: int, *, moved: bool) -> None:
        """See `Job.complete`."""
        rank = self._rank(rank)
        # Of one that has ended here too: the server may hold its slots until it hears of them.
        if (far := self._underway.get(job) or self._sent.get(job.number)) is not None:
            named = set(keys)
            at = np.flatnonzero(np.array([key in named for key in far.request.keys], np.bool_))
            self._loop_calls.call(far.send, JobMovedKeys(far.number, rank, wire.as_bytes(at), moved))

    def cancel(self, job: Job, *, undelivered: bool) -> None:
        """See `Job.cancel`."""
        with self._polled.lock:
            far = self._underway.get(job) or self._sent.get(job.number)
            may_be_out = far is not None and far.is_with_workers and not undelivered
            if may_be_out and job in self._underway:
                raise with_a_worker(job)
            is_over = self._take_out(job) is None
        if far is not None and not is_over:
            self._loop_calls.call(self._give_up, far)
        elif far is not None and not may_be_out:  # over here, but the server may hold its slots yet
            self._loop_calls.call(far.send, Cancel(far.number))

    def _take(self, outcomes: Outcomes) -> None:
        self._loop_calls.call(self._say_moved, outcomes)

    # On the event loop.

    def attached(self, there: Attachment) -> None:
        """See `Follower.attached`."""
        self._introductions.start_over()

    def close(self) -> None:
        """See `Follower.close`: end every job with nothing, and watch no worker any more."""
        with self._polled.lock:
            self._is_open = False
        for far in list(self._underway.values()):
            self._end(far, "closed")
        self._introductions.close()
        self._workers.close()
        if self._watching is not None:
            self._watching.cancel()  # else closing would wait for its next look

    def hear(self, far: FarJob, reply: Reply) -> None:
        """Take what the server says of a job."""
        match reply:
            case JobPlanned():
                self._planned(far, reply.plan)
            case JobEnded():
                self._forget(far)
                self._ended(far, reply)
            case Failed():
                self._forget(far)
                self._end(far, reply.why)

    def lose(self, far: FarJob) -> None:
        """The server is gone: its workers' copies touch memory that is nobody's any more."""
        self._forget(far)
        self._end(far, "server away")

    def _start(self, far: FarJob) -> None:
        there = self._connection.there
        if far.request.refused:
            self._end(far, far.request.refused)
        elif there is None or not there.is_open or there.is_silent:
            self._end(far, "server away")
        elif self._introductions.are_due:
            self._waiting.append(far)
            self._introductions.soon()
        elif far.job in self._underway:  # else cancelled meanwhile
            self._send(far, there)

    def _send(self, far: FarJob, there: Attachment) -> None:
        request, far.there, far.number = far.request, there, there.number()
        there.transfers[far.number] = self._sent[far.job.number] = far
        try:
            is_bound = request.engine is not None
            there.send(PlanJob(far.number, request.direction, request.said, request.gaps, is_bound, request.hint))
        except TieredKVError as error:  # more keys than a message may have
            self._forget(far)
            self._end(far, str(error))
        if self._watching is None:
            self._watching = self._tasks.spawn(self._watch(), "watch the server")

    def _say_moved(self, outcomes: Outcomes) -> None:
        if (far := self._sent.get(outcomes.job)) is not None:
            said = outcomes.rank, outcomes.num_moved, outcomes.error, outcomes.seconds
            far.send(JobMoved(far.number, *said))

    def _planned(self, far: FarJob, said: JobPlan) -> None:
        plan = far.take_plan(said)
        with self._polled.lock:
            if far.job in self._underway:  # else cancelled meanwhile
                self._tell(far.job, plan, None)
        self._lose_unbound()  # a worker may have ended since

    def _lose_unbound(self) -> None:
        """End what a worker that has ended was to move too, unless it is bound: then the server sees to that."""
        for far in list(self._underway.values()):
            for move in far.job.decided.moves if far.job.decided is not None else ():
                if not far.is_bound and len(move.host) and not self._workers.is_watched(move.rank, move.pid):
                    self._end(far, f"rank {move.rank}: the worker of process {move.pid} has ended", unless_bound=True)

    def _ended(self, far: FarJob, said: JobEnded) -> None:
        plan = far.take_plan(said.plan) if said.plan is not None else None
        with self._polled.lock:
            if self._underway.pop(far.job, None) is not None:
                if not far.job.is_seen:
                    self._withdraw(far.job)
                self._tell(far.job, plan, far.result(said))

    def _give_up(self, far: FarJob) -> None:
        """Tell of a job that was cancelled, and the server too, which may have nothing to do for it any more."""
        far.send(Cancel(far.number))
        self._tell(far.job, None, far.nothing("cancelled"))

    def _end(self, far: FarJob, why: str, *, unless_bound: bool = False) -> None:
        if self._take_out(far.job, unless_bound=unless_bound) is None:
            return
        if not far.is_with_workers and far.job.number in self._sent:
            far.send(Cancel(far.number))
        self._tell(far.job, None, far.nothing(why))

    def _take_out(self, job: Job, *, unless_bound: bool = False) -> FarJob | None:
        """Let nobody see or bind a job any more that is about to end early; return it. Any thread may call."""
        with self._polled.lock:
            far = self._underway.get(job)
            if far is None or (unless_bound and far.is_bound):
                return None
            self._withdraw(job)
            return self._underway.pop(job)

    def _forget(self, far: FarJob) -> None:
        self._sent.pop(far.job.number, None)
        if far.there is not None:
            far.there.transfers.pop(far.number, None)

    # The server.

    async def _watch(self) -> None:
        """As long as jobs are under way, see to it that they end if the server does not answer any more."""
        try:
            while self._sent:
                await asyncio.sleep(min(_LOOK_S, self._connection.timeout_s))
                there = self._connection.there
                if there is None or there.is_silent or await there.ask(Stats, self._connection.timeout_s) is None:
                    for far in list(self._sent.values()):
                        self._end(far, "server away")
                    return  # what workers have is told of yet
        finally:
            self._watching = None

    def _introduced(self, why: str) -> None:
        """Tell the server of the jobs that have waited until it knows the workers, or end them."""
        waiting, self._waiting = self._waiting, []
        for far in waiting:
            if why:
                self._end(far, why)
            else:
                self._start(far)
