"""Jobs: transfers that worker processes carry out. Host slots are held until every rank has answered, or has died.

A `Job` is what the planner sees; a `JobBook` knows who is told of the jobs of one planner; `Jobs` carries them out on
the tiers of this process. Any thread begins, completes and polls jobs without waiting; decisions are made on the event
loop, soon after. Each piece of news is told once: to who awaits the job, or to who polls.

A late worker keeps its slots, since it may write to them at any time: only its answer or its end frees them. What one
rank did not copy out does not become readable on any rank.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Final, Literal, TypeVar

import numpy as np
from typing_extensions import override

from tiered_kv.system import system
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.transfers.handles import cancel_each
from tiered_kv.transfers.job_state import Underway, bind, check_apart
from tiered_kv.transfers.load_parts import bring_around_gaps
from tiered_kv.transfers.prefetch import Brought, PrefetchHandle, bringing, start_bringing
from tiered_kv.transfers.submissions import Polled
from tiered_kv.transfers.transfer_requests import JobRequest
from tiered_kv.transfers.workers import WorkerProcesses
from tiered_kv.values.errors import ClosedError, ConfigurationError, LayoutMismatchError
from tiered_kv.values.events import Emit, WorkerEnded
from tiered_kv.values.integers import Mask, as_int, as_rank
from tiered_kv.values.keys import BlockKeys, KeyRuns, StoredKeys
from tiered_kv.values.loop_calls import LoopCalls
from tiered_kv.values.plan import JobResult, Outcomes, Plan
from tiered_kv.values.specs import GPULoadStoreSpec

T = TypeVar("T")
_LEAST_INT: Final = -(1 << 63)
"""The least number of moved blocks that a rank's answer may have: anything below 0 counts as 0."""


class Job:
    """A load or store that workers carry out: planned, executed by each rank, completed. Any thread may use it.

    Attributes:
        number: Names it, among the jobs of all planners: `Plan.job`.
        direction: Of the bytes.
        result: How it ended; None until then. It is there first where a job ends at once.
    """

    def __init__(self, book: "JobBook", number: int, direction: Literal["load", "store"]) -> None:
        """Made by a `JobBook` only, which changes what follows with its lock held."""
        self.number = number
        self.direction = direction
        self.result: JobResult | None = None
        self.decided: Plan | None = None
        self.is_seen = False  # whoever was handed a plan with moves may give it to workers
        self._book = book

    def __repr__(self) -> str:
        return f"Job({self.number}, {self.direction!r}, result={self.result!r})"

    def withdraw(self) -> None:
        """Have a plan without moves from now on: its slots may be another's. With the book's lock held."""
        self.decided = Plan(self.number, self.direction, 0, ())

    @property
    def plan(self) -> Plan | None:
        """What workers are to do; None until that is decided.

        A job that ends before has one without moves. So has one that was cancelled, as soon as `cancel` returns.
        """
        return self._book.show(self)

    async def planned(self) -> Plan:
        """Wait for the plan, on the cache's event loop; other threads poll. Cancellation ends the wait only."""
        return await self._book.wait(self, self._plan_or_end, is_for_end=False)

    async def ended(self) -> JobResult:
        """Wait for the end, on the cache's event loop; other threads poll. Cancellation ends the wait only."""
        return await self._book.wait(self, lambda: self.result, is_for_end=True)

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
            ConfigurationError: There is no plan yet, it names the engine's blocks already, or these are none, or one is
                there twice. Of a store it may be for the same key.
            LayoutMismatchError: Ids for a part of a block, for more blocks than are held, or of another KV group.
        """
        return self._book.bind(self, blocks, start)

    def complete(self, keys: Sequence[bytes], *, rank: int = 0, moved: bool = True) -> None:
        """Answer for a rank key by key, in any order: for who copies to or from the slots himself.

        The job ends, soon, when all that was to be moved is answered for; then what every rank has moved is readable.
        Keys for which there is nothing to move, and a job that is over, are passed over.

        Args:
            keys: Of the job. `BlockKeys` are those of their salt; bare hashes will do where none is of several salts.
            rank: Whose part of them.
            moved: Whether they were.

        Raises:
            ConfigurationError: No such rank, no keys, or bare hashes that the job has of several salts.
        """
        if not isinstance(keys, BlockKeys):
            are_many = isinstance(keys, Collection) and not isinstance(keys, str | bytes)
            if not (are_many and all(isinstance(each, bytes) for each in keys)):
                raise ConfigurationError(f"keys must be BlockKeys, or a sequence of their hashes, got {keys!r:.80}")
        self._book.complete_keys(self, keys, rank, moved=moved)

    def cancel(self, *, undelivered: bool = False) -> None:
        """End the job with nothing, soon. If it is over, nothing happens.

        When this returns nobody is handed a plan with moves any more, in whatever thread. Once somebody was, and it
        says the engine's blocks, the job ends by the worker's answer, as that may be writing.

        Args:
            undelivered: No worker has such a plan, or will get it. A server lets go of what it holds for it, also where
                the job has ended meanwhile.

        Raises:
            ConfigurationError: A worker may have its plan, and nobody says that none has. Nothing has changed.
        """
        self._book.cancel(self, undelivered=undelivered)

    def _plan_or_end(self) -> Plan | None:
        """Return the plan; of a job that was cancelled once its result is there, too: there is nothing to be done."""
        plan = self.plan
        return plan if plan is not None and (plan.moves or self.result is not None) else None


class JobBook(ABC):
    """The jobs of one planner that are not over, and who waits for them."""

    def __init__(self, num_ranks: int, loop_calls: LoopCalls) -> None:
        """Take jobs from now on. In the event loop's thread."""
        self.num_ranks = num_ranks
        self._loop_calls = loop_calls
        self._loop = asyncio.get_running_loop()
        self._polled: Polled[Job] = Polled(loop_calls)
        self._not_over: dict[int, Job] = {}
        self._is_open = True
        # Begins anywhere: what workers still answer to a planner before this one must end no job of this one.
        self._last_number = int.from_bytes(system().token_bytes(7))
        # The event loop's thread alone uses this; of who waits, whether it is for the end.
        self._waiters: dict[Job, dict[asyncio.Future[None], bool]] = {}

    @property
    def num_not_over(self) -> int:
        """How many have not ended. Any thread may ask."""
        return len(self._not_over)

    # What is asked of jobs, by any thread.

    def check_open(self) -> None:
        """Raise `ClosedError` once the planner or the cache is closed."""
        if not self._is_open:
            raise ClosedError("this TieredKV, or its planner, is closed")

    def show(self, job: Job) -> Plan | None:
        """Return a job's plan if it has one; from then on it counts as handed out, and the job ends by its answer."""
        with self._polled.lock:
            plan = job.decided
            job.is_seen = job.is_seen or (plan is not None and plan.moves != ())
            return plan

    def bind(self, job: Job, blocks: GPULoadStoreSpec, start: int) -> Plan:
        """Return a planned job's plan with the engine's blocks, from its block ``start`` on.

        Raises:
            ConfigurationError: It is not planned yet, or ids that do not fit.
            LayoutMismatchError: Blocks of another KV group.
        """
        if not isinstance(blocks, GPULoadStoreSpec):
            raise ConfigurationError(f"blocks of the engine are given as GPULoadStoreSpec, got {type(blocks).__name__}")
        start = as_int("start", start)
        with self._polled.lock:
            if (plan := job.plan) is None:
                raise ConfigurationError("job.bind() comes when the job is planned: Planner.poll() tells")
            if (about := self._about(job)) is None:
                return replace(plan, num_blocks=0, moves=())
            keys, per_block = about
            if blocks.group != keys.group:
                raise LayoutMismatchError(f"keys of KV group {keys.group}, but block ids of {blocks.group}")
            bound = bind(plan, per_block, blocks, start)
            check_apart(job.direction, keys, blocks, per_block, start)
            job.decided = bound
            self._note_bound(job, start, bound.num_blocks)
        return bound

    @abstractmethod
    def _about(self, job: Job) -> tuple[StoredKeys, int] | None:
        """Return what a job is to move, and how many blocks of the engine a key needs; None if it is over."""

    @abstractmethod
    def _note_bound(self, job: Job, start: int, num_blocks: int) -> None:
        """Take into account, with the lock held, that workers may have the job's plan from now on: of these keys."""

    @abstractmethod
    def complete_keys(self, job: Job, keys: Sequence[bytes], rank: int, *, moved: bool) -> None:
        """Take note of what one rank's worker has done; in any thread."""

    @abstractmethod
    def cancel(self, job: Job, *, undelivered: bool) -> None:
        """End a job, unless a worker may have its plan; see there for what ``undelivered`` says."""

    def complete(self, outcomes: Outcomes) -> None:
        """Take one rank's answer, in any order; if the job is over, it is passed over.

        Raises:
            ConfigurationError: They are no `Outcomes` of a rank here. Nothing has changed.
        """
        if not isinstance(outcomes, Outcomes):
            raise ConfigurationError(f"a job is completed with the Outcomes of one of its ranks, got {outcomes!r:.200}")
        number, rank = as_int("job", outcomes.job), as_rank(outcomes.rank, self.num_ranks)
        num_moved = as_int("num_moved", outcomes.num_moved, least=_LEAST_INT)
        if self._is_open:
            self._take(Outcomes(number, rank, num_moved, str(outcomes.error), float(outcomes.seconds)))

    def leave_soon(self) -> None:
        """Begin no more jobs, and `leave`, soon."""
        with self._polled.lock:
            self._is_open = False
        self._loop_calls.call(self.leave)

    @abstractmethod
    def leave(self) -> None:
        """Who planned is gone: end what no worker has the plan of, and wait for nobody's answers. On the event loop."""

    @abstractmethod
    def _take(self, outcomes: Outcomes) -> None:
        """Have an answer that can be right taken into account, soon, if its job is not over."""

    def poll(self, timeout_s: float) -> list[Job]:
        """Return the jobs that were planned or have ended since the last time, each once, in that order.

        Waits for the first of them, at most ``timeout_s``, as long as any job is under way.

        Raises:
            ClosedError: There is none, and as the event loop is closed there will be none.
        """
        return self._polled.poll(timeout_s, lambda: bool(self._not_over))

    def wait_planned(self, jobs: Collection[Job], timeout_s: float) -> bool:
        """Wait until each of these has a plan or has ended, at most so long; return whether they have.

        Raises:
            ClosedError: The event loop is closed.
            ConfigurationError: This is its thread, or they are no jobs.
        """
        if not (isinstance(jobs, Collection) and all(isinstance(job, Job) for job in jobs)):
            raise ConfigurationError(f"jobs must be those that a planner has returned, got {jobs!r:.80}")

        def are_planned() -> bool:
            return all(job.decided is not None or job.result is not None for job in jobs)

        if not are_planned():
            with self._polled.lock:
                self._polled.check_may_block()
                self._polled.wait_until(are_planned, timeout_s)
        return are_planned()

    async def wait(self, job: Job, answer: Callable[[], T | None], *, is_for_end: bool) -> T:
        """Wait until a job has an answer, on the event loop. Nobody is polled for it any more.

        Raises:
            ConfigurationError: This is another event loop.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise ConfigurationError("a job is awaited on the event loop that opened its cache; other threads poll")
        while (answered := answer()) is None:
            waiter = self._loop.create_future()
            waiters = self._waiters.setdefault(job, {})
            waiters[waiter] = is_for_end
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():  # it was told of nobody else
                    with self._polled.lock:
                        self._polled.tell(job)
                raise
            finally:
                waiters.pop(waiter, None)
        if _says_all(job, answered):
            self._polled.forget(job)
        return answered

    # For who decides about jobs.

    def _new(self, direction: Literal["load", "store"]) -> Job:
        """Return a new job; with the lock of ``_polled`` held. Any thread may call.

        Raises:
            ClosedError: The planner or the cache is closed.
        """
        self.check_open()
        self._last_number += 1
        job = self._not_over[self._last_number] = Job(self, self._last_number, direction)
        return job

    def _withdraw(self, job: Job) -> None:
        """Have nobody be handed anything to do for a job that is about to end with nothing; with the lock held."""
        job.withdraw()
        self._polled.forget(job)

    def _tell(self, job: Job, plan: Plan | None, result: JobResult | None) -> None:
        """Have who waits or polls hear of a plan, and of the end if it is there; on the event loop.

        Without a plan it stays what it is: that of a job that was withdrawn.
        """
        with self._polled.lock:
            if result is not None:
                job.result = result  # before the plan: nobody may take an empty plan for one to carry out
                del self._not_over[job.number]
            job.decided = plan or job.decided
            waiters = self._waiters.pop(job, {})
            if (result is not None) not in waiters.values():  # nobody awaits the latest that there is to know
                self._polled.tell(job)
            else:  # whoever awaits it is to have it; who polls looks whether anything else is coming
                self._polled.lock.notify_all()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Jobs(JobBook):
    """The jobs of one planner and the workers that carry them out. Any thread may call what does not say otherwise."""

    def __init__(self, num_ranks: int, loop_calls: LoopCalls, tasks: Tasks, emit: Emit) -> None:
        """Take jobs from now on. In the event loop's thread."""
        super().__init__(num_ranks, loop_calls)
        self.workers = WorkerProcesses(num_ranks, loop_calls, self._lose)
        self._tasks = tasks
        self._emit = emit
        self._underway: dict[Job, Underway] = {}
        self._bringing: dict[Job, asyncio.Task[None]] = {}  # the event loop's thread alone uses it
        self._is_left = False

    def begin(self, request: JobRequest) -> Job:
        """Begin a job. It is planned on the event loop, in the order of calls.

        Raises:
            ConfigurationError: Some rank has no worker.
            ClosedError: The cache is closed.
        """
        self.check_open()
        self.workers.pids()
        with self._polled.lock:
            job = self._new(request.direction)
            self._underway[job] = Underway(job.number, request, self._loop.time)
        self._loop_calls.call(self._start, job)
        return job

    @override
    def _about(self, job: Job) -> tuple[StoredKeys, int] | None:
        underway = self._underway.get(job)
        return None if underway is None else (underway.request.keys, underway.request.pages_per_block)

    @override
    def _note_bound(self, job: Job, start: int, num_blocks: int) -> None:
        bound = job.decided
        assert bound is not None  # noqa: S101 - it was bound just now
        self._underway[job].is_bound = True
        keys = slice(start, start + num_blocks)
        self._loop_calls.call(self._answer, job, lambda underway: underway.follow(bound, keys))

    @override
    def complete_keys(self, job: Job, keys: Sequence[bytes], rank: int, *, moved: bool) -> None:
        rank = as_rank(rank, self.num_ranks)
        if (underway := self._underway.get(job)) is not None:
            self.complete_some(job, named_of(underway.request.keys, keys), rank, moved=moved)

    def complete_some(self, job: Job, answered: Mask, rank: int, *, moved: bool) -> None:
        """Do as `complete_keys`, with a mask of the job's keys."""
        rank = as_rank(rank, self.num_ranks)
        if self._is_open:
            self._loop_calls.call(self._answer, job, lambda underway: underway.take_keys(rank, answered, moved=moved))

    @override
    def cancel(self, job: Job, *, undelivered: bool) -> None:
        with self._polled.lock:
            if job.is_seen and not undelivered and job in self._underway and self._underway[job].may_be_out:
                raise with_a_worker(job)
            if (underway := self._take_out(job)) is not None:  # now, with the look: a plan that is handed out is not
                self._loop_calls.call(self._give_up, job, underway, "cancelled")
            else:
                job.withdraw()

    def _take(self, outcomes: Outcomes) -> None:
        if (job := self._not_over.get(outcomes.job)) is not None:
            answer = outcomes.rank, outcomes.num_moved, outcomes.error, outcomes.seconds
            self._loop_calls.call(self._answer, job, lambda underway: underway.take(*answer))

    # On the event loop.

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

    @override
    def leave(self) -> None:
        """Who planned is gone: end what no worker has the plan of.

        The rest ends with the workers' processes. They may outlive this by days: until then their slots are nobody's,
        and nobody waits for their answers.
        """
        if self._is_left:
            return
        self._begin_no_more()
        self._is_left = True
        for job, underway in list(self._underway.items()):
            if self._take_out(job, unless_out=True) is not None:
                self._give_up(job, underway, "the planner has ended")
            else:
                underway.disown()
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
        self._loop_calls.catch_up()  # what was answered before the end counts

    def _start(self, job: Job) -> None:
        if (underway := self._underway.get(job)) is None:
            return
        request = underway.request
        try:
            if request.gaps:
                self._spawn(job, self._bring(job, bring_around_gaps(request.parts, request.deadline)))
                return
            brought, handles = (
                start_bringing(request.parts, deadline=request.deadline) if request.direction == "load" else ([], [])
            )
            if handles:
                self._spawn(job, self._bring(job, bringing(brought, handles)), brought, handles)
            else:
                self._plan(job, brought)
        except BaseException as error:
            self._end_early(job, repr(error))  # whoever polls has to hear of it
            raise

    def _spawn(
        self,
        job: Job,
        work: Coroutine[Any, Any, None],
        brought: Sequence[Brought] = (),
        handles: Sequence[PrefetchHandle] = (),
    ) -> None:
        """Have blocks brought for a job, of which some are under way; let go of these where that never begins."""

        def ended(_: asyncio.Task[None]) -> None:
            del self._bringing[job]
            cancel_each(handles)  # who cancels a task that has not had a turn yet has it do nothing
            for each in brought:
                each.let_go()

        task = self._bringing[job] = self._tasks.spawn(work, "bring blocks for a plan")
        task.add_done_callback(ended)

    async def _bring(self, job: Job, bringing_all: AbstractAsyncContextManager[Sequence[Brought]]) -> None:
        try:
            if job in self._underway:
                async with bringing_all as brought:
                    self._plan(job, brought)
        except Exception as error:
            self._end_early(job, repr(error))
            raise

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
            if underway is None or (unless_out and job.is_seen and underway.may_be_out):
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


def named_of(keys: StoredKeys, named: Sequence[bytes]) -> Mask:
    """Say which of a job's keys are named: those of one salt alone, by `BlockKeys`.

    Raises:
        ConfigurationError: Bare hashes, and keys of several salts have one of them.
    """
    runs, hashes = keys.runs if isinstance(keys, KeyRuns) else (keys,), set(named)
    salt = named.salt_id if isinstance(named, BlockKeys) else None
    ours = [run for run in runs if salt in (None, run.salt_id)]
    if len({run.salt_id for run in ours}) > 1:
        of_hash = {each: run.salt_id for run in ours for each in run}
        if any(of_hash[each] != run.salt_id for run in ours for each in run if each in hashes):
            raise ConfigurationError("the job has blocks of several salts by these hashes: name them by BlockKeys")
    return np.array([each in hashes and salt in (None, run.salt_id) for run in runs for each in run], np.bool_)


def with_a_worker(job: Job) -> ConfigurationError:
    """Say why a job is not cancelled."""
    return ConfigurationError(
        f"job {job.number}: a worker may have its plan, and be writing. It ends by planner.complete(); if no worker "
        "has it, say job.cancel(undelivered=True)"
    )


def _says_all(job: Job, answer: object) -> bool:
    """Whether who has this answer knows all that there is to know of a job now."""
    return answer is job.result or job.result is None
