"""A storage tier: a backend with its deadlines, its byte budget and its verdicts. No fault of a tier raises here.

Every call of a backend runs to its end, in a task of the cache: only waiting for it is bounded. A call that is late has
its waiters told, keeps its buffers (they stay reserved: quarantined), and until it returns the tier is bypassed.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tiered_kv.backend import Block, Outcome, OwnedTierSettings, RecordShape, TierSettings
from tiered_kv.events import TierFailed
from tiered_kv.keys import BlockKey
from tiered_kv.record import encode, verify
from tiered_kv.tiers.budget import Budget, Priority, Ticket
from tiered_kv.tiers.health import StorageHealth
from tiered_kv.tiers.memory import Batch, Tier
from tiered_kv.tiers.tasks import Tasks, WorkerPool

T = TypeVar("T")
Mask = NDArray[np.bool_]


@dataclass
class Rate:
    """Bytes a second as seen lately; 0 before anything was seen."""

    bytes_per_s: float = 0.0

    def saw(self, num_bytes: int, seconds: float) -> None:
        """Take one more transfer into account."""
        if num_bytes and seconds > 0:
            seen = num_bytes / seconds
            self.bytes_per_s = seen if not self.bytes_per_s else 0.8 * self.bytes_per_s + 0.2 * seen


@dataclass
class WriteReport:
    """What became of the blocks of one write, by position. Every position is in exactly one of them."""

    written: Mask
    present: Mask
    dropped: Mask
    failed: Mask = field(init=False)

    def __post_init__(self) -> None:
        self.failed = ~(self.written | self.present | self.dropped)

    @classmethod
    def nothing_of(cls, n: int) -> "WriteReport":
        """All of ``n`` blocks dropped."""
        nothing = np.zeros(n, np.bool_)
        return cls(nothing, nothing, ~nothing)

    @classmethod
    def failure_of(cls, n: int) -> "WriteReport":
        """All of ``n`` blocks failed."""
        nothing = np.zeros(n, np.bool_)
        return cls(nothing, nothing, nothing)

    def counts(self) -> dict[str, int]:
        """How many blocks, by what became of them."""
        return {name: int(np.count_nonzero(mask)) for name, mask in vars(self).items()}


class StorageTier(Tier, ABC):
    """One KV group of one storage tier."""

    def __init__(
        self,
        health: StorageHealth,
        settings: TierSettings,
        group: int,
        shape: RecordShape,
        budget: Budget,
        codec_threads: WorkerPool,
        tasks: Tasks,
    ) -> None:
        super().__init__(health.name)
        self.health = health
        self.settings = settings
        self.group = group
        self.shape = shape
        self.budget = budget
        self.load_rate = Rate()
        self._codec = codec_threads
        self._tasks = tasks
        health.on_stall.append(budget.room.changed)

    @property
    def is_written_back(self) -> bool:
        """Whether blocks wait above this tier for the cleaner."""
        return self.settings.write == "back"

    @property
    def is_exclusive(self) -> bool:
        """Whether a block is either here or in the CPU tier."""
        return isinstance(self.settings, OwnedTierSettings) and self.settings.exclusive

    @abstractmethod
    async def find(self, batch: Batch) -> Mask:
        """Say which blocks can be read, as far as is known: in a tier that is not owned, a prefix at most."""

    @abstractmethod
    async def read(self, batch: Batch, blocks: list[Block], ticket: Ticket, on_late: Callable[[], None]) -> Mask:
        """Fill the blocks and verify them; say which are right. Returns when the medium has let go of the buffers."""

    @abstractmethod
    async def write(
        self,
        batch: Batch,
        blocks: list[Block],
        is_wanted: Callable[[], Mask],
        on_late: Callable[[], None],
        priority: Priority,
    ) -> WriteReport:
        """Encode and write blocks, as long as they are wanted: checked when their turn has come, and behind it."""

    @abstractmethod
    def touch(self, batch: Batch) -> None:
        """Note that the blocks were used, wherever they were served from."""

    @abstractmethod
    async def forget(self, batch: Batch) -> int:
        """Make blocks unfindable at once (in an owned tier, before the first await), and after a restart too."""

    def _num_bytes(self, n: int) -> int:
        return n * self.shape.stride_bytes

    async def _take(self, n: int, ticket: Ticket) -> Callable[[], None]:
        """Wait for our turn to move ``n`` blocks, or until the tier stalls: behind a hung call it might never come."""
        return await self.budget.take(self._num_bytes(n), ticket, lambda: self._is_off(ticket))

    def _is_off(self, ticket: Ticket) -> bool:
        is_store = ticket.priority in {Priority.STORE, Priority.DEMOTE}
        return self.health.is_shedding if is_store else self.health.is_bypassed

    async def _call(
        self, call: Awaitable[list[Outcome]], n: int, doing: str, on_late: Callable[[], None]
    ) -> list[Outcome]:
        """Make one call of the backend: what it raises, or a wrong number of answers, is one FAILED per block."""
        try:
            outcomes = await self.health.timed(call, doing, on_late)
            if len(outcomes) == n:
                self.health.went(doing, well=outcomes.count(Outcome.FAILED) < n)
                return list(outcomes)
            error = f"{len(outcomes)} outcomes for {n} blocks"
        except Exception as caught:  # noqa: BLE001 - whatever a medium raises, serving goes on without it
            error = f"{type(caught).__name__}: {caught}"
        self.health.went(doing, well=False)
        self.health.emit(TierFailed(self.name, doing, error, n))
        return [Outcome.FAILED] * n

    async def _verify(self, keys: list[BlockKey], blocks: list[Block], outcomes: list[Outcome]) -> list[Outcome]:
        """Replace each HIT by what the record itself says."""
        verdicts = await self._codec.run(_verify_hits, keys, blocks, outcomes, self.shape)
        self.counters.corrupt += verdicts.count(Outcome.CORRUPT)
        self.counters.failed += verdicts.count(Outcome.FAILED)
        return verdicts

    async def _encode(self, batch: Batch, blocks: list[Block]) -> list[BlockKey]:
        keys = batch.keys()
        await self._codec.run(_encode_all, keys, blocks, self.shape)
        return keys


def _verify_hits(
    keys: Sequence[BlockKey], blocks: Sequence[Block], outcomes: Sequence[Outcome], shape: RecordShape
) -> list[Outcome]:
    return [
        verify(key, block, codec=shape.codec) if outcome is Outcome.HIT else outcome
        for key, block, outcome in zip(keys, blocks, outcomes, strict=True)
    ]


def _encode_all(keys: Sequence[BlockKey], blocks: Sequence[Block], shape: RecordShape) -> None:
    for key, block in zip(keys, blocks, strict=True):
        encode(key, block, codec=shape.codec, decoded_bytes=shape.decoded_bytes)


def ignore() -> None:
    """What a late call calls where nobody waits for it."""
