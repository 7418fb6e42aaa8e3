"""Plans: what one process has decided and others move. Frozen and picklable; a job id ties what belongs together.

A planner makes a `Plan`, which holds leases or reservations under its job; workers execute their parts of it and answer
with `Outcomes`; the planner completes the job with these, in whatever order they come.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.values.errors import ConfigurationError, TierFault
from tiered_kv.values.layout import KVGroup
from tiered_kv.values.specs import CPULoadStoreSpec, GPULoadStoreSpec


@dataclass(frozen=True)
class SlabHandle(ABC):
    """How another process attaches a slab of host memory: where that is to be had, and its sizes. Picklable.

    Attributes:
        num_slots: As the slab has it, like all that follows.
        stride_bytes: From one slot to the next.
        payload_bytes: What a slot holds.
        pool: The slab's name, by which a `CPULoadStoreSpec` says which it means.
        group: The KV group whose blocks it holds.
        rank: Whose part of them.
        codec: How they are kept.
        layout: What they are made of, as the planner has it.
    """

    num_slots: int
    stride_bytes: int
    payload_bytes: int
    pool: str
    group: int
    rank: int
    codec: str
    layout: KVGroup

    @abstractmethod
    def descriptor(self, *, page_locks: bool = True) -> tuple[int, bool]:
        """Return a file descriptor of the memory, which is the caller's, and whether it can only be read by.

        Args:
            page_locks: Whether it is going to be page-locked for a GPU: then none of it is given back to the system.

        Raises:
            ConfigurationError: The memory is not there any more, or not for this process.
        """


@dataclass(frozen=True)
class ProcessSlab(SlabHandle):
    """A slab that a process of the same user has made; it can be attached as long as that lives.

    Attributes:
        pid: The process.
        fd: The file descriptor there.
        inode: Which memory that was: another's may have the number by now.
    """

    pid: int
    fd: int
    inode: int

    @override
    def descriptor(self, *, page_locks: bool = True) -> tuple[int, bool]:
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigurationError(
                f"the host memory of process {self.pid} cannot be attached ({error.strerror}): it must be alive, of "
                "the same user and in the same PID namespace"
            ) from error
        if os.fstat(fd).st_ino != self.inode:
            os.close(fd)
            raise ConfigurationError(f"the host memory that process {self.pid} had as {self.fd} is not there any more")
        return fd, False


@dataclass(frozen=True)
class Move:
    """One rank's part of a plan: the engine's blocks and the host slots, ``pages_per_block`` block ids a slot.

    Attributes:
        rank: Who moves it.
        pid: The process that moves it. No other may: once that has ended, the slots are another's.
        engine: The engine's block ids; None until `Job.bind` says them.
        host: Slots of the slab ``host.pool``.
        positions: Of each slot, which of the job's keys it is for.
    """

    rank: int
    pid: int
    engine: GPULoadStoreSpec | None
    host: CPULoadStoreSpec
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """What to move for one job.

    Attributes:
        job: Names it, among those of all planners.
        direction: ``"load"`` from host to engine, or ``"store"``.
        num_blocks: Of a load, the prefix that is held on the host for every rank. Of a store, and of a load with gaps,
            the keys it was given: `Move.positions` says which of them are to be moved.
        moves: One per rank, perhaps of nothing; none if the job ended before it was planned.
    """

    job: int
    direction: Literal["load", "store"]
    num_blocks: int
    moves: tuple[Move, ...]

    def move_of(self, rank: int) -> Move:
        """Return one rank's part."""
        return next(move for move in self.moves if move.rank == rank)


@dataclass(frozen=True)
class Outcomes:
    """What became of one rank's part of a job.

    Attributes:
        job: As in the plan.
        rank: Whose part.
        num_moved: How many of its slots were moved, from the first on; the others were not touched or are half written.
        error: Why not all were; empty otherwise.
        seconds: How long that took the worker, waiting for its event included.
    """

    job: int
    rank: int
    num_moved: int
    error: str = ""
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class TierShare:
    """One tier's part of what a job moved, of all ranks together; what several hold counts once.

    Attributes:
        num_bytes: Payload bytes.
        seconds: Of a load, from the call until the last of them was in host memory: near 0 of what was there. Of a
            store, until the last of them was there.
    """

    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class JobResult:
    """How a job ended, for all ranks.

    Attributes:
        job: As in the plan.
        num_blocks: Of a load, the prefix that is in place on every rank. Of a store, the blocks that were new and that
            every rank has copied out.
        errors: What went wrong with the workers or the job itself, per rank.
        num_bytes: Payload bytes of the blocks that were moved, of all ranks together; what several hold counts once.
        seconds: From the call to the end, on the cache's clock.
        planned_s: From the call to the plan: of a load, until the blocks were in host memory.
        moved_s: What the slowest rank says that it took.
        by_tier: Which tiers had what is in place, or took what was stored first; the others get that later.
        mask: ``(n,)`` over the job's keys, those that are in place on every rank, or after a store on the host of each.
        faults: Of a load, what kept blocks from being brought to host memory, as in `LoadResult`: each tier once for
            each reason, with the blocks of all ranks together.
    """

    job: int
    num_blocks: int
    errors: tuple[str, ...] = ()
    num_bytes: int = 0
    seconds: float = field(default=0.0, compare=False)
    planned_s: float = field(default=0.0, compare=False)
    moved_s: float = field(default=0.0, compare=False)
    by_tier: Mapping[str, TierShare] = field(default_factory=dict, compare=False)
    mask: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_), compare=False, repr=False)
    faults: tuple[TierFault, ...] = ()
