"""One job of a planner whose cache is a server's: what it is about, its plan in this process's words, how it ended."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from tiered_kv.hints import ReuseHint
from tiered_kv.host import wire
from tiered_kv.host.attachment import Attachment
from tiered_kv.host.fields import Keys
from tiered_kv.host.job_messages import JobEnded, JobPlan
from tiered_kv.host.messages import Reply
from tiered_kv.keys import BlockKeys
from tiered_kv.plan import JobResult, Move, Plan
from tiered_kv.specs import CPULoadStoreSpec, GPULoadStoreSpec
from tiered_kv.transfers.job import Job
from tiered_kv.transfers.underway import bind


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


class Hearing(Protocol):
    """Who takes what the server says of jobs."""

    def hear(self, far: "FarJob", reply: Reply) -> None:
        """Take what it says of a job."""

    def lose(self, far: "FarJob") -> None:
        """It is gone, and says nothing any more."""


class FarJob:
    """One job, from its beginning until the server says nothing more about it.

    Attributes:
        job: What the caller has of it.
        request: What it is about.
        there: The server that knows of it, if one does.
        number: What it is called there.
        is_bound: Whether the engine's blocks are known.
    """

    def __init__(self, book: Hearing, job: Job, request: FarRequest, clock: Callable[[], float]) -> None:
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

    def result(self, said: JobEnded) -> JobResult:
        """Return how it ended: with nothing, if that is of weights that are not served any more."""
        if self.request.direction == "load" and not self.request.is_current():
            return replace(self.nothing(*said.errors, "epoch advanced"), moved_s=said.moved_s)
        return replace(
            self.nothing(*said.errors), num_blocks=said.num_blocks, num_bytes=said.num_bytes, moved_s=said.moved_s,
            by_tier=said.by_tier, mask=np.frombuffer(said.mask, np.bool_),
        )  # fmt: skip

    def nothing(self, *errors: str) -> JobResult:
        """Return that it ended with nothing, and why."""
        seconds, mask = self._clock() - self._begun, np.zeros(len(self.request.keys), np.bool_)
        return JobResult(self.job.number, 0, errors, seconds=seconds, planned_s=self._planned - self._begun, mask=mask)
