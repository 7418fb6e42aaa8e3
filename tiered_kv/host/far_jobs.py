"""A planner's jobs whose cache is a server's: that plans and holds; here they are bound, and whoever waits is told.

A job ends here whatever the server does: when it is gone, when it does not answer, and when the job is cancelled. The
server is told what workers have moved all the same, as long as it is there: it holds slots until then.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from typing_extensions import override

from tiered_kv.errors import TieredKVError
from tiered_kv.hints import ReuseHint
from tiered_kv.host import wire
from tiered_kv.host.attachment import Attachment
from tiered_kv.host.connection import Connection
from tiered_kv.host.fields import Keys
from tiered_kv.host.for_workers import Introductions
from tiered_kv.host.job_messages import BindJob, JobEnded, JobMoved, JobMovedKeys, JobPlan, JobPlanned, PlanJob
from tiered_kv.host.messages import Cancel, Reply
from tiered_kv.host.questions import Failed, Stats
from tiered_kv.keys import BlockKeys
from tiered_kv.plan import JobResult, Move, Outcomes, Plan
from tiered_kv.specs import CPULoadStoreSpec, GPULoadStoreSpec
from tiered_kv.transfers.job import Job, JobBook, with_a_worker
from tiered_kv.transfers.underway import bind
from tiered_kv.transfers.workers import Workers

_LOOK_S: Final = 1.0
"""How often it is looked whether a server answers that jobs wait for."""


@dataclass(frozen=True)
class FarRequest:
    """What a job is about, once it has been checked.

    Attributes:
        direction: Of the bytes.
        keys: What to move.
        said: The same, for the server.
        engine: The engine's blocks; None if they are to be bound.
        per_block: Of the engine's blocks, a key.
        is_current: False once what was loaded is of other weights than are served.
        gaps: Whether to load what is there, block by block, and not a prefix.
        hint: What the caller of a store says of the blocks' future.
        refused: Why it ends with nothing, if it does.
    """

    direction: Literal["load", "store"]
    keys: BlockKeys
    said: Keys
    engine: GPULoadStoreSpec | None
    per_block: int
    is_current: Callable[[], bool]
    gaps: bool = False
    hint: ReuseHint | None = None
    refused: str = ""


class _FarJob:
    """One job, from its beginning until the server says nothing more about it."""

    def __init__(self, book: "FarJobs", job: Job, request: FarRequest, begun: float) -> None:
        self.job = job
        self.request = request
        self.begun = self.planned = begun
        self.there: Attachment | None = None
        self.number = 0
        self.is_bound = request.engine is not None
        self._book = book

    @property
    def is_with_workers(self) -> bool:
        """Whether a worker may have its plan, and copy: who asks has taken the job out, so that none gets it yet."""
        return self.is_bound and self.job.is_seen

    def send(self, message: wire.Message) -> None:
        """Tell the server, if it knows of the job."""
        if self.there is not None:
            self.there.send(message)

    def take(self, reply: Reply) -> None:
        """See `Transferring.take`."""
        self._book.hear(self, reply)

    def lose(self) -> None:
        """See `Transferring.lose`."""
        self._book.lose(self)


class FarJobs(JobBook):
    """The jobs of one client's planner. Any thread may call what does not say otherwise."""

    def __init__(self, connection: Connection, num_ranks: int) -> None:
        """Take jobs from now on. In the event loop's thread."""
        here = connection.here()
        super().__init__(num_ranks, here.loop_calls)
        self._workers = Workers(num_ranks, here.loop_calls, lambda _rank, _pid: self._lose_unbound())
        self._connection = connection
        self._tasks = here.tasks
        self._underway: dict[Job, _FarJob] = {}
        # The event loop's thread alone changes these.
        self._sent: dict[int, _FarJob] = {}  # of which the server has more to say
        self._waiting: list[_FarJob] = []  # until the server knows the workers
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
            job = self._new()
            far = self._underway[job] = _FarJob(self, job, request, self._loop.time())
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

    def hear(self, far: _FarJob, reply: Reply) -> None:
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

    def lose(self, far: _FarJob) -> None:
        """The server is gone: its workers' copies touch memory that is nobody's any more."""
        self._forget(far)
        self._end(far, "server away")

    def _start(self, far: _FarJob) -> None:
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

    def _send(self, far: _FarJob, there: Attachment) -> None:
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

    def _planned(self, far: _FarJob, said: JobPlan) -> None:
        plan = self._plan_of(far, said)
        far.planned = self._loop.time()
        with self._polled.lock:
            if far.job in self._underway:  # else cancelled meanwhile
                self._tell(far.job, plan, None)
        self._lose_unbound()  # a worker may have ended since

    def _lose_unbound(self) -> None:
        """End what a worker that has ended was to move too, unless it is bound: then the server sees to that."""
        for far in list(self._underway.values()):
            for move in far.job.decided.moves if far.job.decided is not None and not far.is_bound else ():
                if len(move.host) and not self._workers.is_watched(move.rank, move.pid):
                    self._end(far, f"rank {move.rank}: the worker of process {move.pid} has ended", unless_bound=True)

    def _plan_of(self, far: _FarJob, said: JobPlan) -> Plan:
        assert far.there is not None  # noqa: S101 - it was sent there
        moves = []
        for rank, (pid, part) in enumerate(zip(said.pids, said.parts, strict=True)):
            host = CPULoadStoreSpec(wire.as_ids(part.slots), far.there.pool_of(part.pool))
            moves.append(Move(rank, pid, None, host, tuple(wire.as_ids(part.positions).tolist())))
        request = far.request
        plan = Plan(far.job.number, request.direction, said.num_blocks, tuple(moves))
        if request.engine is None:
            return plan
        return bind(plan, request.per_block, request.engine[: said.num_blocks * request.per_block])

    def _ended(self, far: _FarJob, said: JobEnded) -> None:
        plan = self._plan_of(far, said.plan) if said.plan is not None else None
        if self._take_out(far.job) is None:
            return
        now, request = self._loop.time(), far.request
        far.planned = far.planned if plan is None else now
        mask = np.frombuffer(said.mask, np.bool_)
        seconds, planned_s = now - far.begun, far.planned - far.begun
        result = JobResult(
            far.job.number, said.num_blocks, said.errors, said.num_bytes,
            seconds, planned_s, said.moved_s, said.by_tier, mask,
        )  # fmt: skip
        if request.direction == "load" and not request.is_current():
            nothing = self._nothing(far, "epoch advanced")
            result = replace(result, num_blocks=0, num_bytes=0, by_tier={}, mask=nothing.mask)
            result = replace(result, errors=(*said.errors, *nothing.errors))
        self._tell(far.job, plan or far.job.decided or self._no_plan(far), result)

    def _give_up(self, far: _FarJob) -> None:
        """Tell of a job that was cancelled, and the server too, which may have nothing to do for it any more."""
        far.send(Cancel(far.number))
        self._tell(far.job, far.job.decided or self._no_plan(far), self._nothing(far, "cancelled"))

    def _end(self, far: _FarJob, why: str, *, unless_bound: bool = False) -> None:
        if self._take_out(far.job, unless_bound=unless_bound) is None:
            return
        if not far.is_with_workers and far.job.number in self._sent:
            far.send(Cancel(far.number))
        self._tell(far.job, far.job.decided or self._no_plan(far), self._nothing(far, why))

    def _no_plan(self, far: _FarJob) -> Plan:
        return Plan(far.job.number, far.request.direction, 0, ())

    def _nothing(self, far: _FarJob, why: str) -> JobResult:
        seconds, mask = self._loop.time() - far.begun, np.zeros(len(far.request.keys), np.bool_)
        return JobResult(far.job.number, 0, (why,), seconds=seconds, planned_s=far.planned - far.begun, mask=mask)

    def _take_out(self, job: Job, *, unless_bound: bool = False) -> _FarJob | None:
        """Let nobody bind a job any more that is about to end, nor hear of its plan; return it. Any thread may call."""
        with self._polled.lock:
            far = self._underway.get(job)
            if far is None or (unless_bound and far.is_bound):
                return None
            self._polled.forget(job)
            if not job.is_seen:
                job.decided = None
            return self._underway.pop(job)

    def _forget(self, far: _FarJob) -> None:
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
