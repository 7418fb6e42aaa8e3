"""What the scheduler's side and the workers' side of the connector say to each other. vLLM pickles and carries it."""

from dataclasses import dataclass, field
from typing import Self

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tiered_kv.layout import KVLayout
from tiered_kv.plan import Outcomes, Plan, SlabHandle


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
    """One request's store: its blocks may not change until every rank has copied them out."""

    request_id: str
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
