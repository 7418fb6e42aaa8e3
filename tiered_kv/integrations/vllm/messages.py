"""What the scheduler's side and the workers' side of the connector say to each other. vLLM pickles and carries it.

What the scheduler's side of the connector knows of a request, and of its loads and stores that are under way.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tiered_kv.transfers.jobs import Job
from tiered_kv.values.layout import KVLayout
from tiered_kv.values.plan import Outcomes, Plan, SlabHandle


@dataclass(frozen=True)
class Hello(KVConnectorHandshakeMetadata):
    """A worker's tensors, once it has them.

    Attributes:
        rank: Its tensor parallel rank.
        pid: Its process.
        layout: What a block of its part is made of. All ranks' must be equal.
    """

    rank: int
    pid: int
    layout: KVLayout


@dataclass(frozen=True)
class LoadOrder:
    """One request's load.

    Attributes:
        request_id: Who waits for it.
        block_ids: vLLM's blocks, in prompt order.
        plan: How to fill the first of them; None where nothing is to be had any more.
    """

    request_id: str
    block_ids: tuple[int, ...]
    plan: Plan | None


@dataclass(frozen=True)
class StoreOrder:
    """A store of some requests' blocks, which may not change until every rank has copied them out."""

    request_ids: frozenset[str]
    plan: Plan


@dataclass
class Step(KVConnectorMetadata):
    """What the workers are to do in one step of the engine.

    Attributes:
        slabs: The scheduler's host memory, in the first step, and when it is another or gone.
        loads: To start now.
        stores: To start after this step's computing.
        flushes: To do before this step's computing: their requests were preempted, and their blocks are others' now.
        preempted: Requests whose stores under way must end before this step's computing.
        leaving: Requests that have ended, whose blocks vLLM keeps until the workers say that their stores have ended.
    """

    slabs: tuple[SlabHandle, ...] | None = None
    loads: list[LoadOrder] = field(default_factory=list)
    stores: list[StoreOrder] = field(default_factory=list)
    flushes: list[StoreOrder] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)


@dataclass
class Report(KVConnectorWorkerMetadata):
    """What ended on the workers since the last one."""

    outcomes: list[Outcomes] = field(default_factory=list)

    def aggregate(self, other: Self) -> "Report":
        """Put the reports of two ranks together."""
        return Report(self.outcomes + other.outcomes)


@dataclass(eq=False)
class Tracked:
    """One request of vLLM's, from its first look-up to its end.

    Attributes:
        request: vLLM's.
        first_asked_s: When it first looked for blocks; None before, and once it was preempted.
        is_counted: Whether its look-up is in the metrics.
        num_here: Blocks that vLLM's own cache had of it. The tiers have not heard yet that they are used.
        num_found: Blocks found behind those that are in place.
        by_tier: Tokens found, by the tier that had them, of tiers that no other cache uses.
        num_stored: How many of its first blocks are in place, and stored, being stored, due, or not to be.
        may_load: False once a load brought less than was found: it would find the same again, and again.
        may_store: False once other weights are served than those that have computed what it has.
        num_due: Blocks of it that no job holds yet: vLLM's, to be copied.
        stores: What holds blocks of it that not every rank has copied.
    """

    request: Any
    first_asked_s: float | None = None
    is_counted: bool = False
    num_here: int = 0
    num_found: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    num_stored: int = 0
    may_load: bool = True
    may_store: bool = True
    num_due: int = 0
    stores: "set[Store]" = field(default_factory=set)


@dataclass
class Load:
    """What is to be loaded for a request into ``block_ids``, of which ``first`` blocks come before."""

    job: Job
    tracked: Tracked
    first: int
    block_ids: tuple[int, ...]
    begun_s: float
    is_given_up: bool = False

    def fall_short(self) -> None:
        """The request computes what did not come; that is stored, like all that it computes."""
        self.tracked.may_load = False
        self.tracked.num_stored = min(self.tracked.num_stored, self.first)


@dataclass(frozen=True)
class Due:
    """Neighbouring blocks of a request that are to be stored, from its number ``first`` on."""

    tracked: Tracked
    first: int
    block_ids: list[int]

    @property
    def stop(self) -> int:
        """The number of the block behind them."""
        return self.first + len(self.block_ids)


@dataclass(eq=False)
class Store:
    """A store of blocks of several requests.

    Attributes:
        job: Of the planner.
        tracked: Whose blocks.
        num_blocks: How many.
        num_unanswered: Ranks that may read the blocks yet, or have not begun.
        is_told: Whether the workers have it.
    """

    job: Job
    tracked: frozenset[Tracked]
    num_blocks: int
    num_unanswered: int
    is_told: bool = False

    @cached_property
    def names(self) -> frozenset[str]:
        """The requests, by name."""
        return frozenset(each.request.request_id for each in self.tracked)
