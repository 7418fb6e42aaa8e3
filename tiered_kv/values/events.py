"""What happened, in the past tense: one event per operation. Logs and metrics are made from these alone."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from tiered_kv.values.errors import Reason
from tiered_kv.values.results import TierStore

Level = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True)
class Event:
    """Base of all events. ``name`` is the log event's, ``level`` its log level.

    What may come with every call, as ``may_come_often`` says, is logged so once a minute for each tier, and else below
    what is printed as a rule: at level debug, as loads and stores are.
    """

    name: ClassVar[str]
    level: ClassVar[Level]
    may_come_often: ClassVar[bool]

    def __init_subclass__(cls, *, name: str, level: Level = "debug", may_come_often: bool = False) -> None:
        cls.name, cls.level, cls.may_come_often = name, level, may_come_often


@dataclass(frozen=True)
class CacheOpened(Event, name="cache.opened", level="info"):
    """All tiers are ready; ``recovered`` counts the blocks that each owned tier found of an earlier run."""

    tiers: tuple[str, ...]
    recovered: Mapping[str, int]
    took_ms: float


@dataclass(frozen=True)
class PageLockingDoubted(Event, name="host_memory.page_locking_doubted", level="warning"):
    """A limit of the system is below what is to be page-locked; copies to the GPU may be slower for it."""

    reason: str


@dataclass(frozen=True)
class GPUPoolInHostMemory(Event, name="gpu_pool.in_host_memory", level="warning"):
    """The engine's device is the CPU, so what a tier is to keep in GPU memory takes as much of the host's."""

    tier: str
    num_bytes: int


@dataclass(frozen=True)
class MemoryPageLocked(Event, name="host_memory.page_locked"):
    """One more GiB of a slab is page-locked, or the last of it: how far it is, and how long the driver took for it."""

    slab: str
    page_locked_bytes: int
    wanted_bytes: int
    took_ms: float


@dataclass(frozen=True)
class HostMemoryReady(Event, name="host_memory.ready", level="info"):
    """A slab is as ready as it will be: touched, near the GPU if ``node`` says where, and page-locked for a GPU."""

    slab: str
    num_bytes: int
    page_locked_bytes: int
    node: int | None
    took_ms: float


@dataclass(frozen=True)
class HostMemoryPageable(Event, name="host_memory.pageable", level="warning"):
    """A GPU copies to and from memory that is not page-locked: right, but at a fraction of the speed of the bus."""

    slab: str
    reason: str
    page_locked_bytes: int
    wanted_bytes: int


@dataclass(frozen=True)
class DeviceFailed(Event, name="device.failed", level="error"):
    """The device of the engine's KV cannot be used any more: no load or store moves; lookups and storage go on."""

    device: str
    error: str


@dataclass(frozen=True)
class CacheClosed(Event, name="cache.closed", level="info"):
    """Everything ended; ``abandoned`` counts transfers that had not ended within the limit.

    ``unwritten`` counts blocks that still waited for tiers with ``write="back"``, and are lost.
    """

    abandoned: int
    took_ms: float
    unwritten: int = 0


@dataclass(frozen=True)
class BlocksLookedUp(Event, name="blocks.looked_up"):
    """`TieredKV.lookup` answered that had to ask a tier: how long a prefix there is, and in which tiers."""

    blocks: int
    requested: int
    by_tier: Mapping[str, int]
    took_ms: float


@dataclass(frozen=True)
class BlocksLoaded(Event, name="blocks.loaded"):
    """A load ended; ``missed_because`` says what befell the first block that it did not bring, if there is one.

    Not of one that is planned for workers, nor are stores told of that are: a `JobResult` says what these did.
    """

    blocks: int
    requested: int
    by_tier: Mapping[str, int]
    took_ms: float
    faults: tuple[str, ...] = ()
    missed_because: str = ""


@dataclass(frozen=True)
class BlocksStored(Event, name="blocks.stored"):
    """A store let go of its source."""

    blocks: int
    present: int
    dropped: int
    reasons: Mapping[Reason, int]
    took_ms: float


@dataclass(frozen=True)
class BlocksSettled(Event, name="blocks.settled"):
    """A store reached every tier that would take it: blocks written per tier, and lost (dropped or failed) per tier."""

    written: Mapping[str, int]
    lost: Mapping[str, int]

    @classmethod
    def of(cls, tiers: Iterable[TierStore]) -> "BlocksSettled":
        """Say what became of a store's blocks, tier by tier."""
        written: dict[str, int] = {}
        lost: dict[str, int] = {}
        for each in tiers:
            written[each.tier] = each.written
            if num_lost := each.dropped + each.failed:
                lost[each.tier] = num_lost
        return cls(written, lost)


@dataclass(frozen=True)
class BlocksPrefetched(Event, name="blocks.prefetched"):
    """A prefetch ended."""

    blocks: int
    moved: int
    target: str
    took_ms: float


@dataclass(frozen=True)
class SequencePreempted(Event, name="sequence.preempted"):
    """A sequence was swapped out: so many blocks, of which some could not be kept; the pinned ones wait for it."""

    blocks: int
    dropped: int
    pinned: int


@dataclass(frozen=True)
class BlocksCorrupted(Event, name="blocks.corrupted", level="warning", may_come_often=True):
    """Blocks that a tier had were not what they should be, and were served as a miss.

    An owned tier forgets them; what is shared is deleted when it is broken a second time, if no store has repaired it.
    ``keys`` says which, the first eight of them: `BlockKey.path` as the medium has it, which ends in the block's hash,
    or where names are hidden, in what stands for it. Who verifies in the background knows names alone; then it is
    these, in hexadecimal digits, as `Namespace.names` makes them of keys.
    """

    tier: str
    blocks: int
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecordsRefused(Event, name="records.refused", level="error", may_come_often=True):
    """Whole records were not served for their seal: of a key that the tier lacks, or none where there should be one.

    Each is a miss, and stays until a store replaces it, or it is evicted by name: a start that has the key serves it.
    Of an owned tier at most an eighth is kept so.
    """

    tier: str
    blocks: int
    reason: str


@dataclass(frozen=True)
class BlocksNotEncoded(Event, name="blocks.not_encoded", level="warning", may_come_often=True):
    """Blocks were not written to a tier: its codec does not make them smaller. They may stay in the tiers above it."""

    tier: str
    blocks: int
    codec: str


@dataclass(frozen=True)
class TierFailed(Event, name="tier.failed", level="warning"):
    """A call of a tier went wrong; serving went on without it."""

    tier: str
    doing: str
    error: str
    blocks: int


@dataclass(frozen=True)
class TierStalled(Event, name="tier.stalled", level="warning"):
    """A call did not return in time: its buffers are quarantined, and the tier is bypassed until it returns."""

    tier: str
    doing: str
    timeout_s: float


@dataclass(frozen=True)
class TierTripped(Event, name="tier.tripped", level="warning"):
    """Calls failed one after another: the tier is bypassed, but for a probe now and then, until one goes well."""

    tier: str
    doing: str


@dataclass(frozen=True)
class TierResumed(Event, name="tier.resumed", level="info"):
    """The last late call of a tier returned, or a call went well again: the tier is in use again."""

    tier: str
    stalled_s: float


@dataclass(frozen=True)
class TierResized(Event, name="tier.resized", level="info"):
    """A tier has another capacity: for ``blocks`` of prompts instead of ``before``; ``evicted`` had to go."""

    tier: str
    blocks: int
    before: int
    evicted: int


@dataclass(frozen=True)
class TierScrubbed(Event, name="tier.scrubbed", level="info"):
    """So many blocks of one kind of a tier, all that could be read, were verified; ``removed`` were broken."""

    tier: str
    blocks: int
    removed: int
    took_s: float


@dataclass(frozen=True)
class PageServed(Event, name="page.served", level="info"):
    """The cache serves its page there, until it is closed."""

    address: str


@dataclass(frozen=True)
class PageNotServed(Event, name="page.not_served", level="warning"):
    """The page cannot be served at its address; the cache works without it."""

    address: str
    error: str


@dataclass(frozen=True)
class WorkerEnded(Event, name="worker.ended", level="info"):
    """A worker process has ended: its part of so many jobs came to nothing."""

    rank: int
    pid: int
    jobs: int


@dataclass(frozen=True)
class TraceEnded(Event, name="trace.ended", level="info"):
    """A recording of requests ended, with the cache or by its size; ``dropped`` calls came too fast to be written."""

    path: str
    requests: int
    dropped: int


@dataclass(frozen=True)
class TraceFailed(Event, name="trace.failed", level="warning"):
    """A recording of requests ended early: no file could be written, or no thread begun. The cache goes on."""

    path: str
    requests: int
    error: str


@dataclass(frozen=True)
class EpochAdvanced(Event, name="epoch.advanced", level="info"):
    """Blocks of other weights are no longer served."""

    weights: str


Emit = Callable[[Event], None]
"""Takes an event, at once and without failing."""
