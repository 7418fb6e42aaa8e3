"""A job as who plans it sees it, wherever it is decided; and the book of a planner's jobs: who is told of them.

Any thread may use a job and ask for news of all. Of each piece of news one is told, once: who awaits it, or who polls.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Literal, TypeVar

from tiered_kv.errors import ClosedError, ConfigurationError, LayoutMismatchError
from tiered_kv.integers import as_int
from tiered_kv.keys import BlockKeys
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.plan import JobResult, Outcomes, Plan
from tiered_kv.specs import GPULoadStoreSpec
from tiered_kv.system import system
from tiered_kv.transfers.polled import Polled
from tiered_kv.transfers.underway import bind

T = TypeVar("T")
_LEAST_INT: Final = -(1 << 63)
"""Of the blocks that a rank says it has moved: less than none is none."""


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
            ConfigurationError: There is no plan yet, it names the engine's blocks already, or these are none.
            LayoutMismatchError: Ids for a part of a block, for more blocks than are held, or of another KV group.
        """
        return self._book.bind(self, blocks, start)

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
        self._book.complete_keys(self, keys, rank, moved=moved)

    def cancel(self, *, undelivered: bool = False) -> None:
        """End it with nothing, soon. Of a job that is over it is no error.

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
        self._num_ranks = num_ranks
        self._loop_calls = loop_calls
        self._loop = asyncio.get_running_loop()
        self._polled: Polled[Job, None] = Polled(loop_calls)
        self._not_over: dict[int, Job] = {}
        self._is_open = True
        # Begins anywhere: what workers still answer to a planner before this one must end no job of this one.
        self._last_number = int.from_bytes(system().token_bytes(7))
        # The event loop's thread alone uses this; of who waits, whether it is for the end.
        self._waiters: dict[Job, dict[asyncio.Future[None], bool]] = {}

    # What is asked of jobs, by any thread.

    def show(self, job: Job) -> Plan | None:
        """See `Job.plan`."""
        with self._polled.lock:
            plan = job.decided
            job.is_seen = job.is_seen or (plan is not None and plan.moves != ())
            return plan

    def bind(self, job: Job, blocks: GPULoadStoreSpec, start: int) -> Plan:
        """See `Job.bind`."""
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
            bound = job.decided = bind(plan, per_block, blocks, start)
            self._note_bound(job, start, bound.num_blocks)
        return bound

    @abstractmethod
    def _about(self, job: Job) -> tuple[BlockKeys, int] | None:
        """Return what a job is to move, and how many blocks of the engine a key needs; None if it is over."""

    @abstractmethod
    def _note_bound(self, job: Job, start: int, num_blocks: int) -> None:
        """Take into account, with the lock held, that workers may have the job's plan from now on: of these keys."""

    @abstractmethod
    def complete_keys(self, job: Job, keys: Sequence[bytes], rank: int, *, moved: bool) -> None:
        """See `Job.complete`."""

    @abstractmethod
    def cancel(self, job: Job, *, undelivered: bool) -> None:
        """See `Job.cancel`."""

    def complete(self, outcomes: Outcomes) -> None:
        """Take one rank's answer, in any order; of a job that is over it is passed over.

        Raises:
            ConfigurationError: They are no `Outcomes` of a rank here. Nothing has changed.
        """
        if not isinstance(outcomes, Outcomes):
            raise ConfigurationError(f"a job is completed with the Outcomes of one of its ranks, got {outcomes!r:.200}")
        number, rank = as_int("job", outcomes.job), self._rank(outcomes.rank)
        num_moved = as_int("num_moved", outcomes.num_moved, least=_LEAST_INT)
        self._take(Outcomes(number, rank, num_moved, str(outcomes.error), float(outcomes.seconds)))

    @abstractmethod
    def _take(self, outcomes: Outcomes) -> None:
        """Have an answer that can be right taken into account, soon, if its job is not over."""

    def poll(self, timeout_s: float) -> list[Job]:
        """Return the jobs that were planned or have ended since the last time, each once, in that order.

        Waits for the first of them, at most ``timeout_s``, as long as any job is under way.

        Raises:
            ClosedError: There is none, and as the event loop is closed there will be none.
        """
        return [job for job, _ in self._polled.poll(timeout_s, lambda: bool(self._not_over))]

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
                        self._polled.tell(job, None)
                raise
            finally:
                waiters.pop(waiter, None)
        if _says_all(job, answered):
            self._polled.forget(job)
        return answered

    # For who decides about jobs.

    def _rank(self, rank: object) -> int:
        number = as_int("rank", rank)
        if number >= self._num_ranks:
            raise ConfigurationError(f"rank {number} of {self._num_ranks}: this cache has no such rank")
        return number

    def _new(self, direction: Literal["load", "store"]) -> Job:
        """Return a new job; with the lock of ``_polled`` held. Any thread may call.

        Raises:
            ClosedError: The cache is closed.
        """
        if not self._is_open:
            raise ClosedError("this TieredKV is closed")
        self._last_number += 1
        job = self._not_over[self._last_number] = Job(self, self._last_number, direction)
        return job

    def _withdraw(self, job: Job) -> None:
        """Have nobody be handed anything to do for a job that is about to end with nothing; with the lock held."""
        job.decided = Plan(job.number, job.direction, 0, ())
        self._polled.forget(job)

    def _tell(self, job: Job, plan: Plan | None, result: JobResult | None) -> None:
        """Have who waits or polls hear of a plan, and of the end if it is there; on the event loop.

        Without a plan it stays what it is: that of a job that was withdrawn.
        """
        with self._polled.lock:
            if result is not None:
                job.result = result  # before the plan: who sees a plan of nothing must not think that it is to be done
                del self._not_over[job.number]
            job.decided = plan or job.decided
            waiters = self._waiters.pop(job, {})
            if (result is not None) not in waiters.values():  # nobody awaits the latest that there is to know
                self._polled.tell(job, None)
            else:  # whoever awaits it is to have it; who polls looks whether anything else is coming
                self._polled.lock.notify_all()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def with_a_worker(job: Job) -> ConfigurationError:
    """Say why a job is not cancelled."""
    return ConfigurationError(
        f"job {job.number}: a worker may have its plan, and be writing. It ends by planner.complete(); if no worker "
        "has it, say job.cancel(undelivered=True)"
    )


def _says_all(job: Job, answer: object) -> bool:
    """Whether who has this answer knows all that there is to know of a job now."""
    return answer is job.result or job.result is None
