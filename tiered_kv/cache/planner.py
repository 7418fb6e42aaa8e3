"""A planner: the face of a cache whose bytes are moved by other processes. Plan here, execute there, complete here.

A scheduler decides and has no tensors; its workers have tensors and decide nothing (`tiered_kv.cache.worker.Worker`).
What is planned is held under a job until every rank's worker has answered, or has ended.

Every method may be called from any thread, and waits for nothing: not for storage, and not for the event loop. A
scheduler without an event loop asks `Planner.poll` in each of its steps; a coroutine awaits the `Job`.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import cached_property

from typing_extensions import override

from tiered_kv.cache.checks import check_planned, check_seconds
from tiered_kv.cache.seat import Seat
from tiered_kv.system import system
from tiered_kv.transfers.jobs import Job, JobBook
from tiered_kv.transfers.transfer_requests import JobRequest
from tiered_kv.values.hints import ReuseHint, check_hint
from tiered_kv.values.keys import BlockKeys, stored_keys
from tiered_kv.values.plan import Outcomes, ProcessSlab, SlabHandle
from tiered_kv.values.specs import GPULoadStoreSpec


class Planner(ABC):
    """The face for an engine whose workers are other processes. Ends with the cache, or when it is closed."""

    def __init__(self, jobs: JobBook) -> None:
        """Made by a cache only."""
        self._jobs = jobs

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_ranks={self._jobs.num_ranks}, num_jobs={self._jobs.num_not_over})"

    @abstractmethod
    def slabs(self) -> tuple[SlabHandle, ...]:
        """Return what a `Worker` in another process attaches: the host memory of every KV group and rank. Picklable.

        With a cache in this process always the same. With a server's they are others after that has restarted, and none
        while it is away: compare by ``is``, and give them to `Worker.attach`.
        """

    @abstractmethod
    def register_worker(self, *, rank: int = 0, pid: int | None = None) -> None:
        """Say which process executes the plans of a rank: this one by default. Its end ends its part of every job.

        Where several workers hold the same part of blocks, each is a rank here: those of the first part come first.
        Workers may come long after the cache was opened; until every rank has one, nothing can be planned.

        Raises:
            ConfigurationError: No such process or rank, or the rank has a worker that is alive, and may be writing.
            ClosedError: The cache is not open any more, or the planner was closed.
        """

    @abstractmethod
    def plan_load(self, keys: BlockKeys, into: GPULoadStoreSpec | None = None, *, gaps: bool = False) -> Job:
        """Bring a prefix to host memory and hold it there, for workers to copy into the engine's blocks.

        The plan is there when the bytes are, or after `CacheLimits.load_timeout_s`, with what is there by then; its
        ``num_blocks`` is the prefix that is held for every rank, shorter where the CPU tier has no room for more.

        Args:
            keys: What to load, in prompt order.
            into: ``pages_per_block`` block ids per key, the same on every rank. They are the workers' from `execute`
                on. Left out where the engine has not chosen any yet: see `Job.bind`.
            gaps: Load what every rank has, block by block, also behind a hole: `JobResult.mask` says what is in place,
                and elsewhere the blocks may hold anything.

        Raises:
            ConfigurationError, LayoutMismatchError: Arguments that cannot be right, no CPU tier, or a rank without a
                worker. Nothing is held. If a worker ends before the plan is made, the job's result says so.
            ClosedError: The cache is not open any more, or the planner was closed.
        """

    @abstractmethod
    def plan_store(
        self,
        keys: BlockKeys | Sequence[BlockKeys],
        source: GPULoadStoreSpec | None = None,
        *,
        epoch: str | None = None,
        hint: ReuseHint | None = None,
    ) -> Job:
        """Reserve host slots for workers to copy the engine's blocks to.

        What is there already, or another plan has slots for, is left out, rank by rank. Where the CPU tier has no room
        for all nothing is stored.

        Args:
            keys: What to store, in prompt order; or blocks of several prompts, in a list: of other salts too, each
                prompt's by themselves. Whatever they are, one job costs the event loop as much.
            source: ``pages_per_block`` block ids per key, the same on every rank. They must not change until the
                workers have copied them. Left out where they are not known yet: see `Job.bind`.
            epoch: The weights that computed the blocks, where they are not the current ones any more.
            hint: What is known of the future of those blocks that are new.

        Raises:
            ConfigurationError, LayoutMismatchError, ClosedError: As for `plan_load`.
        """

    def complete(self, outcomes: Outcomes) -> None:
        """Take one rank's answer, in any order. The job ends, soon, with the last one that has something to move.

        Only what every rank has copied out becomes readable; it is then written to the tiers below. Answers to jobs
        that are over, and to a planner or a cache that is closed, are passed over.

        Raises:
            ConfigurationError: They are no `Outcomes` of a rank here.
        """
        self._jobs.complete(outcomes)

    def close(self) -> None:
        """Plan no more, and wait for no worker: for a scheduler that ends, and brings no answers any more.

        What no worker has the plan of ends. What workers are copying out is in no tier, as nobody says that they did,
        and their slots are held until they end. `BlockCache.flush` and `BlockCache.drain` wait for none of that.
        """
        self._jobs.leave_soon()

    def poll(self, timeout_s: float = 0.0) -> list[Job]:
        """Return the jobs that were planned or have ended since they were last returned: look at ``job.result`` first.

        Waits for the first of them, at most ``timeout_s``, and only while any job is under way. Each is given to one
        caller only; what a coroutine awaits is not polled. Of jobs that nobody asks for, the newest 65,536 are kept.
        """
        if timeout_s != 0.0:
            check_seconds("timeout_s", timeout_s, may_be_none=False)
        return self._jobs.poll(timeout_s)

    def wait_planned(self, jobs: Collection[Job], timeout_s: float) -> bool:
        """Wait until each of these jobs has a plan or has ended, at most ``timeout_s``; return whether they have.

        They are polled as before. Not in the event loop's thread.
        """
        check_seconds("timeout_s", timeout_s, may_be_none=False)
        return self._jobs.wait_planned(jobs, timeout_s)


class OwnPlanner(Planner):
    """The planner of a cache in this process."""

    def __init__(self, seat: Seat, check_open: Callable[[], object]) -> None:
        """Made by `TieredKV` only; ``check_open`` raises when the cache may not be called any more."""
        super().__init__(seat.cache.jobs)
        self._seat = seat
        self._check_open = check_open

    @override
    def slabs(self) -> tuple[SlabHandle, ...]:
        self._check_open()
        return self._slabs

    @cached_property
    def _slabs(self) -> tuple[SlabHandle, ...]:
        seat = self._seat
        seat.cache.keep_memory()  # for good: nobody says which workers page-lock it, nor when they have ended
        num_parts, pid = len(seat.shards), os.getpid()
        copies = self._jobs.num_ranks // num_parts
        return tuple(
            ProcessSlab(
                slab.num_slots, slab.stride_bytes, slab.payload_bytes, slab.name, number // num_parts,
                number % num_parts * copies + copy, codec.name if codec else "none", group, pid, slab.fd,
                os.fstat(slab.fd).st_ino,
            )
            for number, (slab, codec, group) in enumerate(
                (chain.host.slab, chain.codec, chain.group) for chain in seat.chains
            )
            for copy in range(copies)
        )  # fmt: skip

    @override
    def register_worker(self, *, rank: int = 0, pid: int | None = None) -> None:
        self._check_open()
        self._seat.cache.jobs.check_open()
        self._seat.cache.jobs.workers.register(rank, system().getpid() if pid is None else pid)

    @override
    def plan_load(self, keys: BlockKeys, into: GPULoadStoreSpec | None = None, *, gaps: bool = False) -> Job:
        self._check_open()
        seat = self._seat
        epoch = seat.epoch  # before the keys are named by it: if it advances in between, the load is overtaken
        parts = seat.batches(keys)
        check_planned("load", parts[0][0], keys, into)
        seat.cache.note("load", keys)
        deadline = seat.deadline(None)
        return seat.cache.jobs.begin(JobRequest("load", keys, parts, into, lambda: seat.epoch == epoch, deadline, gaps))

    @override
    def plan_store(
        self,
        keys: BlockKeys | Sequence[BlockKeys],
        source: GPULoadStoreSpec | None = None,
        *,
        epoch: str | None = None,
        hint: ReuseHint | None = None,
    ) -> Job:
        self._check_open()
        seat, known, stored = self._seat, check_hint(hint), stored_keys(keys)
        parts = seat.batches(stored, epoch)
        check_planned("store", parts[0][0], stored, source)
        seat.cache.note("store", stored)
        return seat.cache.jobs.begin(JobRequest("store", stored, parts, source, lambda: True, math.inf, hint=known))
