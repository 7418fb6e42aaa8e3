"""What the scheduler's side and the workers' side of the connector say to each other. vLLM pickles and carries it.

What the scheduler's side of the connector knows of a request, and of its loads and stores that are under way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tiered_kv.integrations.vllm.configuration import EngineGroup
from tiered_kv.transfers.jobs import Job
from tiered_kv.values.layout import KVLayout
from tiered_kv.values.plan import Outcomes, Plan, SlabHandle


@dataclass(frozen=True)
class Hello(KVConnectorHandshakeMetadata):
    """A worker's tensors, once it has them.

    Attributes:
        rank: Of its part of each block: tensor parallel ranks of the first pipeline stage, then those of the next.
        pid: Its process.
        layout: What a block of its part is made of. All ranks' must be equal.
        groups: The layout's groups as vLLM has them. Its scheduler is told of one layer of each block table only.
    """

    rank: int
    pid: int
    layout: KVLayout
    groups: tuple[EngineGroup, ...]


@dataclass(frozen=True)
class LoadOrder:
    """One request's load: a part for each KV group of which it needs blocks.

    Attributes:
        request_id: Who waits for it.
        parts: vLLM's blocks, in prompt order, and how to fill the first of them; None where nothing is to be had.
        comes_first: Whether the step itself computes what needs them, and nobody waits to hear of their end.
    """

    request_id: str
    parts: tuple[tuple[tuple[int, ...], Plan | None], ...]
    comes_first: bool = False


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
        loads: To start before this step's computing.
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
    """What ended on the workers since the last report.

    Attributes:
        outcomes: Of jobs.
        is_wrong: Whether the step has computed with blocks that it was to load first, and that did not come.
    """

    outcomes: list[Outcomes] = field(default_factory=list)
    is_wrong: bool = False

    def aggregate(self, other: Self) -> "Report":
        """Put the reports of two ranks together."""
        return Report(self.outcomes + other.outcomes, self.is_wrong or other.is_wrong)


@dataclass(eq=False)
class Tracked:
    """One request of vLLM's, from its first look-up to its end.

    Attributes:
        request: vLLM's.
        asks: Whether tiers that others use too are asked for it. They are where nobody has said that it came.
        waits_since_s: When it began to wait for tiers that others use too.
        patience_s: How long it waits for them; 0 once it does not, None before it was to, and once it was preempted.
        is_counted: Whether its look-up is in the metrics.
        num_here: Tokens that vLLM's own cache had of it. The tiers have not heard yet that they are used.
        num_found: Tokens found behind those that are in place.
        by_tier: Tokens found, by the tier that had them, of tiers that no other cache uses.
        num_shared: Tokens found of those groups that need all their blocks, where others lacked theirs.
        num_stored: Of its first tokens, how many have blocks in place that are stored, being stored, due, or not to be.
        num_noted: Of its first tokens, of how many the blocks are known to be in vLLM's cache.
        may_hurry: Whether to bring what was found to host memory before vLLM has blocks for it: until it had none then.
        may_load: False once a load brought less than was found: it would find the same again, and again.
        may_store: False once other weights are served than those that have computed what it has.
        is_worth: How many of the tokens that were found pay, by where they begin and how many they are: decided once.
        said: What vLLM was told last of what was found, until it has room for the request.
        in_line_since_s: Since when it waits for room in memory; None while it does not.
        is_measured: Whether it was seen how long its prompt takes, or that is being seen.
        is_wanted: Whether what it computes is to be stored, as others' blocks are of use; None before it was seen.
        num_due: Blocks of it that no job holds yet: vLLM's, to be copied.
        stores: What holds blocks of it that not every rank has copied.
        leaving: Of such blocks and of those that are due, those that it may leave behind before they are copied.
    """

    request: Any
    asks: bool = True
    waits_since_s: float = 0.0
    patience_s: float | None = None
    is_counted: bool = False
    num_here: int = 0
    num_found: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    num_shared: int = 0
    num_stored: int = 0
    num_noted: int = 0
    may_hurry: bool = True
    may_load: bool = True
    may_store: bool = True
    is_wanted: bool | None = None
    is_worth: tuple[int, int, int] | None = None
    said: "Finding | None" = None
    in_line_since_s: float | None = None
    is_measured: bool = False
    num_due: int = 0
    stores: "set[Store]" = field(default_factory=set)
    leaving: "list[Due]" = field(default_factory=list)

    @property
    def ends(self) -> set[int]:
        """Where prefixes of it are likely to end, in tokens: those of its prompt, and of what others had of it."""
        num_prompt = self.request.num_prompt_tokens
        return {num_prompt - 1, num_prompt, self.num_shared, self.request.shared_prefix_boundary}


@dataclass(frozen=True)
class Finding:
    """What was found for a request, which vLLM asks for in each step until it has room.

    Attributes:
        of: Behind how many tokens it was looked, of how many.
        num_found: Tokens behind them; None to be asked again later.
        until_s: Until when that is told again.
        num_more: Blocks that memory has no room for: it is told again while that is so.
    """

    of: tuple[int, int]
    num_found: int | None
    until_s: float = 0.0
    num_more: int = 0


@dataclass(eq=False)
class Bringing:
    """What is brought to host memory for a request that has no blocks of vLLM's yet, nor was told that it is there.

    Attributes:
        jobs: By KV group.
        of: Behind how many tokens it was found, of how many.
        num_tokens: That were found.
        num_blocks: Of all groups.
        num_more: Of these, those that memory had not.
        num_bytes: Of each rank.
        is_told: Whether vLLM was told in this step that it is to be loaded.
        comes_first: See `LoadOrder`; decided then.
    """

    tracked: Tracked
    jobs: dict[int, Job]
    of: tuple[int, int]
    num_tokens: int
    num_blocks: int
    num_more: int
    num_bytes: int
    begun_s: float
    is_told: bool = False
    comes_first: bool = False

    @property
    def is_over(self) -> bool:
        """Whether what there is of it is in host memory."""
        return all(job.result is not None or job.plan is not None for job in self.jobs.values())

    @property
    def num_held(self) -> int:
        """Blocks of it that host memory holds, once it is over."""
        plans = [job.plan for job in self.jobs.values() if job.result is None]
        return sum(plan.num_blocks for plan in plans if plan is not None)


@dataclass
class Load:
    """What is to be loaded for a request, of which ``first`` tokens come before.

    Attributes:
        parts: For each KV group of which blocks are needed, a job, and vLLM's blocks for its keys.
        num_tokens: That are in place once all of it is.
        comes_first: See `LoadOrder`.
        not_ended: Jobs whose end is not told yet.
        num_more: Of its blocks, those that memory had not.
        num_lost: Blocks that were found as well, and could not be brought to host memory.
    """

    parts: tuple[tuple[Job, tuple[int, ...]], ...]
    tracked: Tracked
    first: int
    num_tokens: int
    begun_s: float
    comes_first: bool = False
    is_given_up: bool = False
    not_ended: set[int] = field(default_factory=set)
    num_more: int = 0
    num_lost: int = 0
    is_short: bool = False

    def num_blocks_of(self, number: int) -> int:
        """Count the blocks of one of its jobs."""
        return sum(len(ids) for job, ids in self.parts if job.number == number)

    def fall_short(self) -> None:
        """The request computes what did not come; that is stored, like all that it computes."""
        self.is_short = True
        self.tracked.may_load = False
        self.tracked.num_stored = min(self.tracked.num_stored, self.first)


@dataclass(eq=False)
class Due:
    """Neighbouring blocks of a request, of one KV group, that are to be stored, from its number ``first`` on.

    Attributes:
        num_held: How many of the first of them the request has left behind, or soon will: they are held in vLLM's pool.
        end: Tokens of a prefix that ends inside of the last one, and of which that has what it is stored for; or None.
    """

    tracked: Tracked
    group: EngineGroup
    first: int
    block_ids: list[int]
    num_held: int = 0
    end: int | None = None

    @property
    def stop(self) -> int:
        """The number of the block behind them."""
        return self.first + len(self.block_ids)


@dataclass(eq=False)
class Store:
    """A store of blocks of several requests, of one KV group.

    Attributes:
        job: Of the planner.
        dues: Which blocks.
        tracked: Whose blocks.
        num_blocks: How many.
        num_unanswered: Ranks that may read the blocks yet, or have not begun.
        is_told: Whether the workers have it.
        is_counted: Whether the end of its job is.
        num_steps: For how many they have had it.
        nobodys: vLLM's blocks that no request has, which are held in its pool.
        turns: Of blocks of vLLM's, among them these, see `PendingStores.copy_out`.
        num_whole: How many of the first blocks hold what they are named by, whatever the workers say.
    """

    job: Job
    tracked: frozenset[Tracked]
    num_blocks: int
    num_unanswered: int
    dues: list[Due] = field(default_factory=list)
    is_told: bool = False
    is_counted: bool = False
    num_steps: int = 0
    nobodys: list[int] = field(default_factory=list)
    turns: Mapping[int, int] = field(default_factory=dict)
    num_whole: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_whole = self.num_blocks

    @cached_property
    def names(self) -> frozenset[str]:
        """The requests, by name."""
        return frozenset(each.request.request_id for each in self.tracked)

    def held_behind(self, num_blocks: int) -> "list[Due]":
        """Return those of it that its requests still have, not preempted since, and not all in its first blocks."""
        ends = accumulate(len(due.block_ids) for due in self.dues)
        return [
            due for due, end in zip(self.dues, ends, strict=True) if end > num_blocks and self in due.tracked.stores
        ]
