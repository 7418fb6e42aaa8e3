"""Jobs: transfers that other processes carry out. Their slots are held until every rank has answered, or has died.

A worker that is late keeps its slots, since it may write to them at any time; only its answer or its end frees them.
What one rank did not copy out does not become readable on any.
"""

import asyncio
import os
import secrets
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.leases import Lease, Reservation
from tiered_kv.errors import ConfigurationError
from tiered_kv.events import Emit, WorkerEnded
from tiered_kv.integers import as_int
from tiered_kv.plan import JobResult, Move, Outcomes, Plan
from tiered_kv.specs import CPULoadStoreSpec, GPULoadStoreSpec
from tiered_kv.tiers.base import Mask
from tiered_kv.tiers.batch import Batch
from tiered_kv.tiers.chain import Chain
from tiered_kv.transfers.writedown import Tally, write_down

_REMEMBERED: Final = 4096
"""Jobs of which it can be asked how they ended."""
_LEAST_INT: Final = -(1 << 63)
"""Of the blocks that a rank says it has moved: less than none is none."""


class LoadPart:
    """A prefix leased on the host for one rank.

    ``source`` says of every block asked for which tier had it, by its number in the chain; it is counted there.
    """

    def __init__(self, chain: Chain, lease: Lease, source: NDArray[np.int8]) -> None:
        self.chain = chain
        self._lease = lease
        self._source = source
        self.slots = lease.slots

    def moved(self, num_moved: int) -> Mask:
        """Say which blocks of the job are in place, of so many slots moved."""
        return np.arange(len(self.slots)) < num_moved

    def end(self, moved: Mask) -> None:
        """Let go of the slots; ``moved`` is what all ranks have in place."""
        chain, n = self.chain, int(np.count_nonzero(moved))
        # What another call brought meanwhile was on the host.
        source = np.where(self._source[:n] < 0, len(chain.memory) - 1, self._source[:n])
        chain.ledger.count_load(len(self._source), n)
        for tier, count in zip(chain.tiers, np.bincount(source, minlength=len(chain.tiers)), strict=True):
            tier.counters.hits += int(count)
        chain.release(self._lease)


class StorePart:
    """Slots reserved on the host for what one rank is to copy out."""

    def __init__(self, chain: Chain, batch: Batch, reservation: Reservation) -> None:
        self.chain = chain
        self._batch = batch
        self._reservation = reservation
        self.fresh = reservation.slots >= 0
        self.slots = reservation.slots[self.fresh]

    def moved(self, num_moved: int) -> Mask:
        """Say which blocks of the job are on the host, of so many slots moved: those that were there already too."""
        moved = ~self.fresh
        moved[np.flatnonzero(self.fresh)[: max(0, num_moved)]] = True
        return moved

    def count(self, num_requested: int, moved: Mask) -> None:
        """Count a store of so many blocks, of which there was room for these or for none."""
        stored, present = int(np.count_nonzero(moved & self.fresh)), int(np.count_nonzero(~self.fresh))
        dropped = num_requested - stored - present
        self.chain.ledger.count_store(num_requested, stored=stored, present=present, dropped=dropped)

    def end(self, moved: Mask) -> None:
        """Make readable what all ranks have copied out, give back the other slots, and write down."""
        chain = self.chain
        lease = self._reservation.commit(moved)
        self._reservation.close()
        chain.room.changed()
        live = lease.slots >= 0
        n = int(np.count_nonzero(live))
        tally = Tally(chain.tiers)
        tally.add(chain.host, written=n, dropped=int(np.count_nonzero(self.fresh)) - n)
        chain.count_use(self._batch[live])
        write_down(chain, tally, chain.host, self._batch[live], lease.slots[live], lease)


Part = LoadPart | StorePart


def reserve_parts(batches: Sequence[tuple[Chain, Batch]]) -> list[StorePart]:
    """Reserve slots for what each rank lacks, if there is room for all of it; else for nothing."""
    # Asked of all ranks first: what one would evict for its part must not be lost because another has no room.
    if not all(chain.limits.takes_stores and chain.host.index.fits(batch.names) for chain, batch in batches):
        batches = [(chain, batch[:0]) for chain, batch in batches]
    reservations = [chain.reserve(chain.host, batch) for chain, batch in batches]
    return [
        StorePart(chain, batch, reservation)
        for (chain, batch), reservation in zip(batches, reservations, strict=True)
        if reservation is not None  # it fits, as was said
    ]


def pages_of(source: GPULoadStoreSpec, pages_per_block: int, part: StorePart) -> GPULoadStoreSpec:
    """Return the engine's blocks that a part of a store copies out."""
    ids = source.ids.reshape(-1, pages_per_block)[: len(part.fresh)][part.fresh]
    return GPULoadStoreSpec(ids.ravel(), source.group)


@dataclass
class _Job:
    plan: Plan
    parts: Sequence[Part]
    is_current: Callable[[], bool]
    ended: "asyncio.Future[JobResult]"
    outcomes: dict[int, Outcomes] = field(default_factory=dict)


class Jobs:
    """The jobs of one cache and the workers that carry them out. For the event loop's thread."""

    def __init__(self, num_ranks: int, emit: Emit) -> None:
        self._num_ranks = num_ranks
        self._emit = emit
        self._jobs: dict[int, _Job] = {}
        self._over: dict[int, JobResult] = {}  # the last ones
        self._workers: dict[int, tuple[int, int]] = {}  # rank: (pid, pidfd)
        # Begins anywhere: what workers still answer to a planner before this one must end no job of this one.
        self._next = secrets.randbits(62)

    def __len__(self) -> int:
        return len(self._jobs)

    def register(self, rank: int, pid: int) -> None:
        """Count on a process for one rank; its end ends its part of every job.

        Raises:
            ConfigurationError: No such rank or process, or the rank has a worker that is alive, and may be writing.
        """
        rank, pid = as_int("rank", rank), as_int("pid", pid, least=1)
        if rank >= self._num_ranks:
            raise ConfigurationError(f"rank {rank} of {self._num_ranks}: this cache has no such rank")
        if rank in self._workers:
            before, fd = self._workers[rank]
            if not _has_ended(fd):
                raise ConfigurationError(f"rank {rank} has a worker already, process {before}, which is alive")
            self._lose(rank)
        try:
            fd = os.pidfd_open(pid)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"process {pid} cannot be the worker of rank {rank}: {getattr(error, 'strerror', None) or error}"
            ) from error
        try:
            asyncio.get_running_loop().add_reader(fd, self._lose, rank)
        except BaseException:
            os.close(fd)
            raise
        self._workers[rank] = pid, fd

    def check_workers(self) -> None:
        """Raise `ConfigurationError` unless every rank has a worker: else who would end a job?"""
        if missing := sorted(set(range(self._num_ranks)) - set(self._workers)):
            raise ConfigurationError(f"plans need a worker of every rank: register_worker() for ranks {missing}")

    def begin(
        self,
        direction: Literal["load", "store"],
        parts: Sequence[Part],
        engine: Sequence[GPULoadStoreSpec],
        num_blocks: int,
        is_current: Callable[[], bool],
    ) -> Plan:
        """Make a plan of what is held for each rank.

        Args:
            direction: Of the bytes.
            parts: By rank.
            engine: By rank, the engine's blocks that it moves.
            num_blocks: See `Plan`.
            is_current: False once what was loaded is of other weights than are served.
        """
        self._next += 1
        moves = tuple(
            Move(rank, self._workers[rank][0], blocks, CPULoadStoreSpec(part.slots, part.chain.host.slab.name))
            for rank, (part, blocks) in enumerate(zip(parts, engine, strict=True))
        )
        plan = Plan(self._next, direction, num_blocks, moves)
        self._jobs[plan.job] = _Job(plan, parts, is_current, asyncio.get_running_loop().create_future())
        return plan

    def ended(self, plan: Plan) -> "asyncio.Future[JobResult]":
        """Return what resolves when a job ends, by its ranks' answers or by their end; at once if it has.

        Raises:
            ConfigurationError: No job of this cache, or one of which the end is forgotten.
        """
        if (job := self._jobs.get(plan.job)) is not None:
            return job.ended
        if (result := self._over.get(plan.job)) is None:
            raise ConfigurationError(
                f"job {plan.job} is none of this cache's, or {_REMEMBERED} others have ended since it did"
            )
        ended: asyncio.Future[JobResult] = asyncio.get_running_loop().create_future()
        ended.set_result(result)
        return ended

    def complete(self, outcomes: Outcomes) -> JobResult | None:
        """Take one rank's answer, in any order; return how the job ended if it was the last. Of a job that has, None.

        Raises:
            ConfigurationError: They are no `Outcomes` of a rank here. Nothing has changed.
        """
        if not isinstance(outcomes, Outcomes) or as_int("rank", outcomes.rank) >= self._num_ranks:
            raise ConfigurationError(f"a job is completed with the Outcomes of one of its ranks, got {outcomes!r:.200}")
        number, rank = as_int("job", outcomes.job), as_int("rank", outcomes.rank)
        num_moved = as_int("num_moved", outcomes.num_moved, least=_LEAST_INT)
        job = self._jobs.get(number)
        if job is None:
            return None
        job.outcomes.setdefault(rank, Outcomes(number, rank, num_moved, outcomes.error))
        return self._end(job) if len(job.outcomes) == self._num_ranks else None

    def close(self) -> None:
        """End every job with nothing, and watch no worker any more.

        What workers may be writing to yet stays reserved for good: what else is under way must not get these slots.
        """
        for job in list(self._jobs.values()):
            unanswered = [part for rank, part in enumerate(job.parts) if rank not in job.outcomes]
            self._end(job, keep=[part for part in unanswered if isinstance(part, StorePart)])
        for rank in list(self._workers):
            self._forget(rank)

    def _end(self, job: _Job, keep: Sequence[Part] = ()) -> JobResult:
        del self._jobs[job.plan.job]
        moved = np.logical_and.reduce(
            [
                part.moved(job.outcomes[rank].num_moved if rank in job.outcomes else 0)
                for rank, part in enumerate(job.parts)
            ]
        )
        if job.plan.direction == "load" and not job.is_current():
            moved = np.zeros_like(moved)
        for part in job.parts:
            if isinstance(part, StorePart):
                part.count(job.plan.num_blocks, moved)
            if part not in keep:
                part.end(moved)
        result = JobResult(job.plan.job, self._num_blocks(job, moved), _errors(job))
        self._over[result.job] = result
        if len(self._over) > _REMEMBERED:
            del self._over[next(iter(self._over))]
        job.ended.set_result(result)
        return result

    def _num_blocks(self, job: _Job, moved: Mask) -> int:
        if job.plan.direction == "store":
            fresh = np.logical_or.reduce([part.fresh for part in job.parts if isinstance(part, StorePart)])
            return int(np.count_nonzero(moved & fresh))
        return [*moved.tolist(), False].index(False)

    def _lose(self, rank: int) -> None:
        """A worker has ended: it touches no slot any more, and what it had not answered it will not."""
        pid = self._forget(rank)
        unanswered = [job for job in self._jobs.values() if rank not in job.outcomes]
        self._emit(WorkerEnded(rank, pid, len(unanswered)))
        for job in unanswered:
            self.complete(Outcomes(job.plan.job, rank, 0, f"the worker of process {pid} has ended"))

    def _forget(self, rank: int) -> int:
        pid, fd = self._workers.pop(rank)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        return pid


def _has_ended(pidfd: int) -> bool:
    ended = select.poll()  # select() takes no descriptor above 1,023
    ended.register(pidfd, select.POLLIN)
    return bool(ended.poll(0))


def _errors(job: _Job) -> tuple[str, ...]:
    said = [f"rank {rank}: {outcomes.error}" for rank, outcomes in sorted(job.outcomes.items()) if outcomes.error]
    return tuple(said if job.is_current() else [*said, "epoch advanced"])
