"""The jobs of a client's planner, in the server: its workers copy, and what is held for them is held here.

The server has the processes of the workers from their client, as descriptors, and watches them itself. So what a job
holds goes back when each has answered, by way of the client, or has ended; whatever has become of the client.
"""

import os
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from tiered_kv.errors import ConfigurationError
from tiered_kv.host import wire
from tiered_kv.host.fields import Part
from tiered_kv.host.job_messages import (
    AboutJob,
    BindJob,
    JobEnded,
    JobMoved,
    JobMovedKeys,
    JobPlan,
    JobPlanned,
    PlanJob,
)
from tiered_kv.keys import BlockKeys
from tiered_kv.open_cache import OpenCache
from tiered_kv.plan import Outcomes, Plan
from tiered_kv.specs import GPULoadStoreSpec
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.transfers.job import Job
from tiered_kv.transfers.jobs import Jobs
from tiered_kv.transfers.requests import JobRequest

Send = Callable[[wire.Message], None]
_SAID_BYTES: Final = 16
"""Of a plan, for each block and rank: its position and its slot."""


class SessionJobs:
    """Those of one client. For the event loop's thread."""

    def __init__(self, jobs: Jobs, tasks: Tasks) -> None:
        """Keep ``jobs``, which are this client's alone, and tell of them in ``tasks``."""
        self._jobs = jobs
        self._tasks = tasks
        self._by_id: dict[int, tuple[Job, BlockKeys, int]] = {}  # with the engine's blocks a key

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, id_: int) -> bool:
        return id_ in self._by_id

    def watch(self, ranks: Sequence[tuple[int, int]], pidfds: Sequence[int]) -> None:
        """Count on processes for ranks; the descriptors are taken over.

        Raises:
            ConfigurationError: No such rank, or it has a worker that is alive; of those before it the end is watched.
        """
        left = list(pidfds)
        try:
            for rank, pid in ranks:
                self._jobs.workers.register(rank, pid, left[0])
                del left[0]
        finally:
            for each in left:
                os.close(each)

    def plan(self, request: PlanJob, seat: OpenCache, send: Send) -> None:
        """Begin a job, and tell of its plan and its end.

        Raises:
            TieredKVError: It cannot be: `Jobs.begin` says why.
        """
        keys = request.keys.block_keys()
        parts = seat.batches(keys)
        # Else slots would be held that nobody hears of.
        if _SAID_BYTES * len(keys) * len(parts) > wire.MOST_FRAME_BYTES // 2:
            raise ConfigurationError(f"the plan of {len(keys)} keys for {len(parts)} ranks: give fewer keys to a job")
        per_block = parts[0][0].group.pages_per_block
        engine = _some_blocks(len(keys) * per_block, keys.group) if request.is_bound else None
        seat.note(request.direction, keys)
        job = self._jobs.begin(
            JobRequest(
                request.direction, keys, parts, engine, lambda: True, seat.deadline(None), request.gaps, request.hint,
                is_far=True,
            )
        )  # fmt: skip
        self._by_id[request.id] = job, keys, per_block
        self._tasks.spawn(self._tell(request.id, job, send), f"tell of a job to {request.direction}")

    def take(self, request: AboutJob) -> None:
        """Take what a client says of a job; of one that is over it is passed over.

        Raises:
            TieredKVError: It cannot be right.
        """
        if (found := self._by_id.get(request.id)) is None:
            return
        job, keys, per_block = found
        match request:
            case BindJob(start=start, num_blocks=num_blocks):
                if not 0 <= num_blocks <= len(keys):
                    raise ConfigurationError(f"{num_blocks} blocks for a job of {len(keys)} keys")
                job.bind(_some_blocks(num_blocks * per_block, keys.group), start=start)
            case JobMoved():
                self._jobs.complete(
                    Outcomes(job.number, request.rank, request.num_moved, request.error, request.seconds)
                )
            case JobMovedKeys():
                positions = wire.as_ids(request.positions)
                if len(positions) and not 0 <= positions.min() <= positions.max() < len(keys):
                    raise ConfigurationError(f"positions of a job of {len(keys)} keys")
                named = keys.words[positions]
                job.complete([row.tobytes() for row in named], rank=request.rank, moved=request.moved)

    def cancel(self, id_: int) -> None:
        """End a job whose plan no worker has, as only its client knows."""
        self._by_id[id_][0].cancel(undelivered=True)

    def leave(self) -> None:
        """The client is gone."""
        self._jobs.leave()

    async def _tell(self, id_: int, job: Job, send: Send) -> None:
        try:
            plan = await job.planned()
            is_told = job.result is None
            if is_told:
                send(JobPlanned(id_, _said(plan)))
            result = await job.ended()
            send(
                JobEnded(
                    id_, None if is_told else _said(plan), result.num_blocks, result.errors, result.num_bytes,
                    result.moved_s, dict(result.by_tier), result.mask.tobytes(),
                )
            )  # fmt: skip
        finally:
            del self._by_id[id_]


def _some_blocks(num_pages: int, group: int) -> GPULoadStoreSpec:
    """Stand in for blocks of the engine: which they are the client knows; that there are some is what counts here."""
    return GPULoadStoreSpec(range(num_pages), group)


def _said(plan: Plan) -> JobPlan:
    parts = (
        Part(move.host.pool, wire.as_bytes(move.host.ids), wire.as_bytes(np.array(move.positions, np.int64)))
        for move in plan.moves
    )
    return JobPlan(plan.num_blocks, tuple(move.pid for move in plan.moves), tuple(parts))
