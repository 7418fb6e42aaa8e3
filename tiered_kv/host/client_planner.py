"""The planner of a client: plans are made by the server, and carried out by workers that map its memory as we do.

The server plans and holds; here jobs are bound, and whoever waits is told. A job (`FarJob`) ends here whatever the
server does: when it is gone, when it does not answer, and when the job is cancelled. The server is told what workers
have moved all the same, as long as it is there: it holds slots until then.

Workers need the server to watch them, and the memory that they copy to (`introduce`, `ServedSlab`). Both go by file
descriptors on connections of their own, so that it does not matter what number a process has to whom.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from typing_extensions import override

from tiered_kv.cache.checks import check_engine_blocks
from tiered_kv.cache.planner import Planner
from tiered_kv.host import handshake, wire
from tiered_kv.host.attachment import Attachment
from tiered_kv.host.client_transfers import Starts
from tiered_kv.host.connection import Begin, Connection
from tiered_kv.host.protocol import (
    BindJob,
    Cancel,
    Failed,
    Introduce,
    JobEnded,
    JobMoved,
    JobMovedKeys,
    JobPlan,
    JobPlanned,
    Keys,
    LeaveJobs,
    Mapped,
    MapSlab,
    PlanJob,
    Reply,
)
from tiered_kv.system import files
from tiered_kv.tiers.tasks import in_a_thread
from tiered_kv.transfers.job_state import bind
from tiered_kv.transfers.jobs import Job, JobBook, named_of, with_a_worker
from tiered_kv.transfers.workers import Process, WorkerProcesses
from tiered_kv.values.errors import ConfigurationError, Reason, TieredKVError
from tiered_kv.values.hints import ReuseHint, check_hint
from tiered_kv.values.integers import as_rank
from tiered_kv.values.keys import BlockKeys, StoredKeys, epoch_digest, stored_keys
from tiered_kv.values.log import log
from tiered_kv.values.plan import JobResult, Move, Outcomes, Plan, SlabHandle
from tiered_kv.values.specs import CPULoadStoreSpec, GPULoadStoreSpec


@dataclass(frozen=True)
class FarRequest:
    """A load or store to be planned by a server, once it has been checked.

    Attributes:
        direction: Of the bytes.
        keys: What to move.
        said: The same, for the server, by prompt.
        engine: The engine's blocks; None if they are to be bound.
        per_block: Of the engine's blocks, a key.
        gaps: Whether to load what is there, block by block, and not a prefix.
        hint: What the caller of a store says of the blocks' future.
    """

    direction: Literal["load", "store"]
    keys: StoredKeys
    said: tuple[Keys, ...]
    engine: GPULoadStoreSpec | None
    per_block: int
    gaps: bool = False
    hint: ReuseHint | None = None


class FarJob:
    """A job of a client's planner, from its beginning until the server says nothing more about it.

    Attributes:
        job: What the caller has of it.
        request: What it is about.
        there: The server that knows of it, if one does.
        number: What it is called there.
        is_bound: Whether the engine's blocks are known.
    """

    def __init__(self, book: "FarJobs", job: Job, request: FarRequest, clock: Callable[[], float]) -> None:
        self.job = job
        self.request = request
        self.there: Attachment | None = None
        self.number = 0
        self.is_bound = request.engine is not None
        self._book = book
        self._clock = clock
        self._begun = self._planned = clock()

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

    def miss(self) -> None:
        """See `Transferring.miss`."""
        self._book.miss(self)

    def lose(self) -> None:
        """See `Transferring.lose`."""
        self._book.lose(self)

    def take_plan(self, said: JobPlan) -> Plan:
        """Return the plan that the server has made."""
        assert self.there is not None  # noqa: S101 - it was sent there
        self._planned = self._clock()
        request, moves = self.request, []
        for rank, (pid, part) in enumerate(zip(said.pids, said.parts, strict=True)):
            host = CPULoadStoreSpec(wire.as_ids(part.slots), self.there.pool_of(part.pool))
            moves.append(Move(rank, pid, None, host, tuple(wire.as_ids(part.positions).tolist())))
        plan = Plan(self.job.number, request.direction, said.num_blocks, tuple(moves))
        if request.engine is None:
            return plan
        return bind(plan, request.per_block, request.engine[: said.num_blocks * request.per_block])

    def result(self, said: JobEnded, epoch: bytes) -> JobResult:
        """Return how it ended: with nothing, if that is of other weights than those of ``epoch``, which are served."""
        if self.request.direction == "load" and self.request.said[0].epoch != epoch:
            errors = dict.fromkeys([*said.errors, Reason.EPOCH_ADVANCED])  # the server may have said it, too
            return replace(self.nothing(*errors), moved_s=said.moved_s, faults=said.faults)
        return replace(
            self.nothing(*said.errors), num_blocks=said.num_blocks, num_bytes=said.num_bytes, moved_s=said.moved_s,
            by_tier=said.by_tier, mask=np.frombuffer(said.mask, np.bool_), faults=said.faults,
        )  # fmt: skip

    def nothing(self, *errors: str) -> JobResult:
        """Return the result of a job that ended with nothing, and why."""
        seconds, mask = self._clock() - self._begun, np.zeros(len(self.request.keys), np.bool_)
        return JobResult(self.job.number, 0, errors, seconds=seconds, planned_s=self._planned - self._begun, mask=mask)


_MAP_S: Final = 10.0


@dataclass(frozen=True)
class ServedSlab(SlabHandle):
    """A slab of a server's; it can be attached as long as the client is, which has the token.

    Attributes:
        path: Of the server's socket.
        token: Of the client.
        name: The slab's, there.
    """

    path: str
    token: bytes
    name: str

    def descriptor(self, *, page_locks: bool = True) -> tuple[int, bool]:
        """See `SlabHandle.descriptor`.

        Raises:
            ConfigurationError: The server has no such slab.
            BackendUnavailableError: It is away, or the client is not attached any more.
        """
        connection, answer, descriptors = handshake.begin(self.path, MapSlab(self.token, self.name, page_locks), _MAP_S)
        if not isinstance(answer, Mapped) or len(descriptors) != 1:
            handshake.give_back(connection, descriptors)
            raise ConfigurationError(f"the server answered {type(answer).__name__} to who wants to map a slab")
        connection.close()
        return descriptors[0], answer.is_read_only


def introduce(
    begin: Begin, path: str, token: bytes, workers: WorkerProcesses, processes: Sequence[Process], timeout_s: float
) -> None:
    """Have the server watch the processes that work for ranks of a client; blocks the thread.

    Raises:
        ConfigurationError: A rank has a worker that is alive, or one of these has ended.
        BackendUnavailableError: The server is away, or the client is not attached any more.
    """
    ranks = tuple((process.rank, process.pid) for process in processes)
    pidfds = workers.descriptors(processes)
    try:
        connection, _, came = begin(path, Introduce(token, ranks), timeout_s, given=pidfds)
        handshake.give_back(connection, came)
    finally:
        for each in pidfds:
            files().close(each)


class FarJobs(JobBook):
    """The jobs of one client's planner. Any thread may call what does not say otherwise."""

    def __init__(self, connection: Connection, starts: Starts, num_workers: int) -> None:
        """Take jobs from now on. In the event loop's thread."""
        here = connection.here()
        super().__init__(num_workers, here.loop_calls)
        self._workers = WorkerProcesses(self.num_ranks, here.loop_calls, lambda _rank, _pid: self._lose_unbound())
        self._connection = connection
        self._starts = starts
        self._here = here
        self._underway: dict[Job, FarJob] = {}
        # The event loop's thread alone changes these.
        self._sent: dict[int, FarJob] = {}  # of which the server has more to say
        self._waiting: list[FarJob] = []  # until the server knows the workers
        self._known: set[Process] = set()  # to the server
        self._introduction: asyncio.Task[None] | None = None
        connection.follow(self)

    def register(self, rank: int, pid: int) -> None:
        """See `Planner.register_worker`."""
        self.check_open()
        self._workers.register(rank, pid)
        self._loop_calls.call(self._introduce_soon)

    def begin(self, request: FarRequest) -> Job:
        """Begin a job. The server is told of it on the event loop, in the order of calls.

        Raises:
            ConfigurationError: Some rank has no worker.
            ClosedError: The client is closed.
        """
        self.check_open()
        self._workers.pids()
        with self._polled.lock:
            job = self._new(request.direction)
            far = self._underway[job] = FarJob(self, job, request, self._loop.time)
        self._loop_calls.call(self._start, far)
        return job

    @override
    def _about(self, job: Job) -> tuple[StoredKeys, int] | None:
        far = self._underway.get(job)
        return None if far is None else (far.request.keys, far.request.per_block)

    @override
    def _note_bound(self, job: Job, start: int, num_blocks: int) -> None:
        far = self._underway[job]
        far.is_bound = True
        self._loop_calls.call(far.send, BindJob(far.number, start, num_blocks))

    def complete_keys(self, job: Job, keys: Sequence[bytes], rank: int, *, moved: bool) -> None:
        """See `Job.complete`."""
        rank = as_rank(rank, self.num_ranks)
        # Of one that has ended here too: the server may hold its slots until it hears of them.
        if (far := self._underway.get(job) or self._sent.get(job.number)) is not None:
            at = np.flatnonzero(named_of(far.request.keys, keys))
            self._loop_calls.call(far.send, JobMovedKeys(far.number, rank, wire.as_bytes(at), moved))

    def cancel(self, job: Job, *, undelivered: bool) -> None:
        """See `Job.cancel`."""
        with self._polled.lock:
            far = self._underway.get(job) or self._sent.get(job.number)
            may_be_out = far is not None and far.is_with_workers and not undelivered
            if may_be_out and job in self._underway:
                raise with_a_worker(job)
            if is_over := self._take_out(job) is None:
                job.withdraw()
        if far is not None and not is_over:
            self._loop_calls.call(self._give_up, far)
        elif far is not None and not may_be_out:  # over here, but the server may hold its slots yet
            self._loop_calls.call(far.send, Cancel(far.number))

    def _take(self, outcomes: Outcomes) -> None:
        self._loop_calls.call(self._say_moved, outcomes)

    # On the event loop.

    def attached(self, there: Attachment) -> None:
        """See `Follower.attached`."""
        self._known = set()
        self._introduce_soon()

    @override
    def leave(self) -> None:
        self.close()
        self._connection.send(LeaveJobs())

    def close(self) -> None:
        """See `Follower.close`: end every job with nothing, and watch no worker any more."""
        with self._polled.lock:
            self._is_open = False
        for far in list(self._underway.values()):
            self._end(far, "closed")
        self._workers.close()

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

    def miss(self, far: FarJob) -> None:
        """The server says nothing: it is told all the same what was moved, as it may hear that yet."""
        self._end(far, "server away", may_be_written=far.request.direction == "store")

    def lose(self, far: FarJob) -> None:
        """The server is gone: its workers' copies touch memory that is nobody's any more."""
        self._forget(far)
        self._end(far, "server away")

    def _start(self, far: FarJob) -> None:
        if self._starts.is_draining and far.request.direction == "store":
            self._refuse(far, Reason.DRAINING)
        else:
            self._plan(far)

    def _plan(self, far: FarJob) -> None:
        """Have the server plan a job, once it knows the workers."""
        there = self._connection.there
        if there is None or not there.is_open or there.is_silent:
            self._refuse(far, Reason.SERVER_AWAY)
        elif self._workers.unlike(self._known):
            self._waiting.append(far)
            self._introduce_soon()
        elif far.job in self._underway:  # else cancelled meanwhile
            self._send(far, there)

    def _refuse(self, far: FarJob, why: Reason) -> None:
        """End what no server is told of, unless it was cancelled meanwhile."""
        if far.job in self._underway:
            self._starts.count_untold(far.request.direction, why, len(far.request.keys))
            self._end(far, why)

    def _send(self, far: FarJob, there: Attachment) -> None:
        request, far.there, far.number = far.request, there, there.number()
        there.transfers[far.number] = self._sent[far.job.number] = far
        try:
            is_bound, (keys, *more) = request.engine is not None, request.said
            said = request.direction, keys, tuple(more), request.gaps, is_bound, request.hint
            there.send(PlanJob(far.number, *said))
        except TieredKVError as error:  # more keys than a message may have
            self._forget(far)
            self._starts.count_untold(request.direction, Reason.TOO_MANY_KEYS, len(request.keys))
            self._end(far, str(error))

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
                self._tell(far.job, plan, far.result(said, self._starts.epoch))

    def _give_up(self, far: FarJob) -> None:
        """Tell of a job that was cancelled, and the server too, which may have nothing to do for it any more."""
        far.send(Cancel(far.number))
        self._tell(far.job, None, far.nothing("cancelled"))

    def _end(self, far: FarJob, why: str, *, unless_bound: bool = False, may_be_written: bool = False) -> None:
        """End a job with nothing; with ``may_be_written``, whoever has its plan may copy, if it is bound or not."""
        if self._take_out(far.job, unless_bound=unless_bound) is None:
            return
        is_out = far.is_with_workers or (may_be_written and far.job.is_seen)
        if not is_out and far.job.number in self._sent:
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

    # Workers, which the server is to watch.

    def _introduce_soon(self) -> None:
        if self._introduction is None and self._connection.there is not None and self._is_open:
            self._introduction = self._here.tasks.spawn(self._introduce(), "introduce workers")

    async def _introduce(self) -> None:
        """Introduce those that the server does not know; then it hears of the jobs that have waited, or they end."""
        why = ""
        try:
            while (there := self._connection.there) is not None and (strangers := self._workers.unlike(self._known)):
                said = there.path, there.attached.token, self._workers, strangers, self._connection.timeout_s
                await in_a_thread(self._loop_calls, introduce, self._connection.begin, *said)
                if self._connection.there is there:
                    self._known.update(strangers)
        except Exception as error:  # noqa: BLE001 - whatever it is, e.g. no descriptor is left: who waits hears of it
            why = str(error) or type(error).__name__
            log("warning", "host.workers_refused", path=self._connection.path, error=why)
        self._introduction = None
        waiting, self._waiting = self._waiting, []
        for far in waiting:
            if why:
                self._end(far, why)
            else:
                self._plan(far)


class FarPlanner(Planner):
    """The planner of a client, made by `ConnectedKV`. While no server is there jobs end at once: ``"server away"``."""

    def __init__(self, connection: Connection, starts: Starts, num_workers: int = 1) -> None:
        self._far_jobs = FarJobs(connection, starts, num_workers)
        super().__init__(self._far_jobs)
        self._connection = connection
        self._starts = starts
        self._slabs: tuple[bytes, tuple[SlabHandle, ...]] = b"", ()

    @override
    def slabs(self) -> tuple[SlabHandle, ...]:
        here, there = self._connection.here(anywhere=True), self._connection.there
        if there is None:
            return ()
        token, copies = there.attached.token, self._jobs.num_ranks // len(here.shards)
        if self._slabs[0] != token:
            self._slabs = token, tuple(
                ServedSlab(
                    slab.num_slots, slab.stride_bytes, slab.payload_bytes, there.pool_of(slab.name), slab.group,
                    slab.rank * copies + copy, here.attached.codec, here.group(slab.group).group, there.path, token,
                    slab.name,
                )
                for slab in there.attached.slabs
                for copy in range(copies)
            )  # fmt: skip
        return self._slabs[1]

    @override
    def register_worker(self, *, rank: int = 0, pid: int | None = None) -> None:
        self._connection.here(anywhere=True)
        self._far_jobs.register(rank, os.getpid() if pid is None else pid)

    @override
    def plan_load(self, keys: BlockKeys, into: GPULoadStoreSpec | None = None, *, gaps: bool = False) -> Job:
        said = self._starts.said(keys, anywhere=True)  # if it advances from here on, the load is overtaken
        return self._far_jobs.begin(FarRequest("load", keys, (said,), into, self._check("load", keys, into), gaps))

    @override
    def plan_store(
        self,
        keys: BlockKeys | Sequence[BlockKeys],
        source: GPULoadStoreSpec | None = None,
        *,
        epoch: str | None = None,
        hint: ReuseHint | None = None,
    ) -> Job:
        stored = stored_keys(keys)
        digest = self._starts.epoch if epoch is None else epoch_digest(epoch)  # which another thread may advance
        said = tuple(self._starts.said(run, epoch=digest, anywhere=True) for run in stored.runs)
        per_block = self._check("store", stored, source)
        return self._far_jobs.begin(FarRequest("store", stored, said, source, per_block, hint=check_hint(hint)))

    def _check(self, direction: Literal["load", "store"], keys: StoredKeys, blocks: GPULoadStoreSpec | None) -> int:
        """Raise unless blocks of the engine can be planned for these keys; return how many a key needs."""
        group = self._connection.here(anywhere=True).group(keys.group).group
        check_engine_blocks(direction, group, keys, blocks)
        return group.pages_per_block
