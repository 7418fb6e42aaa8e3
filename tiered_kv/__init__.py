"""tiered_kv: the KV cache of a language model beyond the GPU, behind one async facade.

What is public is imported from here, or from `tiered_kv.testing`. All modules below are private: where a name lives,
and what is not named here, may change in any version.

What needs torch is imported when it is first asked for: a router that reads events never waits for that.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from tiered_kv.backend import (
    Backend,
    BackendContext,
    Block,
    Missing,
    Outcome,
    RecordShape,
    Recovered,
    SlotBackend,
    Workers,
    check_lengths,
)
from tiered_kv.catalog.policies import Policy
from tiered_kv.changes import Added, Changes, Cleared, Mirror, Removed, Snapshot, TierChange
from tiered_kv.encryption import Encryption
from tiered_kv.errors import (
    BackendError,
    BackendUnavailableError,
    BlockCorruptError,
    CapacityError,
    ClosedError,
    ConfigurationError,
    LayoutMismatchError,
    TieredKVError,
)
from tiered_kv.events import (
    BlocksCorrupted,
    BlocksLoaded,
    BlocksNotEncoded,
    BlocksPrefetched,
    BlocksSettled,
    BlocksStored,
    CacheClosed,
    CacheOpened,
    DeviceFailed,
    Emit,
    EpochAdvanced,
    Event,
    HostMemoryPageable,
    HostMemoryReady,
    MemoryPageLocked,
    PageLockingDoubted,
    PageNotServed,
    PageServed,
    RecordsRefused,
    SequencePreempted,
    TierFailed,
    TierResized,
    TierResumed,
    TierScrubbed,
    TierStalled,
    TierTripped,
    TraceEnded,
    TraceFailed,
    WorkerEnded,
)
from tiered_kv.groups import GroupNeed, GroupsLoad, GroupsLookup, full, window
from tiered_kv.hashing import hash_blocks, hash_tail
from tiered_kv.hints import ReuseHint
from tiered_kv.host_settings import HostSettings
from tiered_kv.inventory import Found, Inventory, Place
from tiered_kv.keys import BlockKey, BlockKeys, ModelIdentity, Names, Namespace, Shard, epoch_digest, salt_digest
from tiered_kv.layout import KVGroup, KVLayout
from tiered_kv.load_costs import LoadCost, Split
from tiered_kv.plan import JobResult, Move, Outcomes, Plan, SlabHandle, TierShare
from tiered_kv.record import Record, parse_record
from tiered_kv.record import encode as encode_record
from tiered_kv.record import verify as verify_record
from tiered_kv.results import (
    BlockState,
    CacheStatistics,
    LoadResult,
    LookupResult,
    PinResult,
    PrefetchResult,
    StoreResult,
    SwapOutResult,
    SwapResult,
    TierFault,
    TierRun,
    TierStatistics,
    TierStore,
)
from tiered_kv.specs import (
    CPULoadStoreSpec,
    FileLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    ObjectLoadStoreSpec,
    RemoteLoadStoreSpec,
)
from tiered_kv.tier_settings import OwnedTierSettings, TierSettings, WritePolicy
from tiered_kv.tiers.budget import Priority

if TYPE_CHECKING:
    from tiered_kv.block_cache import BlockCache
    from tiered_kv.blocking import BlockingTieredKV, open_blocking
    from tiered_kv.cache import TieredKV
    from tiered_kv.chain_settings import CPUTier, GPUTier
    from tiered_kv.closing import Draining
    from tiered_kv.explain import Explanation
    from tiered_kv.host.client import ConnectedKV
    from tiered_kv.host.server import TieredKVServer
    from tiered_kv.memory.device import Device
    from tiered_kv.planner import Planner
    from tiered_kv.sessions import SessionPlanner, SessionStatistics
    from tiered_kv.settings import CacheLimits, TieredKVSettings
    from tiered_kv.transfers.handles import LoadHandle
    from tiered_kv.transfers.job import Job
    from tiered_kv.transfers.prefetch import HostLease, PrefetchHandle
    from tiered_kv.transfers.store import StoreHandle
    from tiered_kv.transfers.submissions import LoadTicket, StoreTicket
    from tiered_kv.worker import Worker

__version__ = "0.1.0"

_IMPORTED_LATER: Final = {
    "BlockCache": "block_cache",
    "BlockingTieredKV": "blocking",
    "CPUTier": "chain_settings",
    "CacheLimits": "settings",
    "Device": "memory.device",
    "Draining": "closing",
    "Explanation": "explain",
    "GPUTier": "chain_settings",
    "HostLease": "transfers.prefetch",
    "Job": "transfers.job",
    "LoadHandle": "transfers.handles",
    "LoadTicket": "transfers.submissions",
    "Planner": "planner",
    "PrefetchHandle": "transfers.prefetch",
    "SessionPlanner": "sessions",
    "SessionStatistics": "sessions",
    "StoreHandle": "transfers.store",
    "StoreTicket": "transfers.submissions",
    "ConnectedKV": "host.client",
    "TieredKV": "cache",
    "TieredKVServer": "host.server",
    "TieredKVSettings": "settings",
    "Worker": "worker",
    "open_blocking": "blocking",
}
"""What needs torch, and the module that has it."""

__all__ = [
    "Added",
    "Backend",
    "BackendContext",
    "BackendError",
    "BackendUnavailableError",
    "Block",
    "BlockCache",
    "BlockCorruptError",
    "BlockKey",
    "BlockKeys",
    "BlockState",
    "BlockingTieredKV",
    "BlocksCorrupted",
    "BlocksLoaded",
    "BlocksNotEncoded",
    "BlocksPrefetched",
    "BlocksSettled",
    "BlocksStored",
    "CPULoadStoreSpec",
    "CPUTier",
    "CacheClosed",
    "CacheLimits",
    "CacheOpened",
    "CacheStatistics",
    "CapacityError",
    "Changes",
    "Cleared",
    "ClosedError",
    "ConfigurationError",
    "ConnectedKV",
    "Device",
    "DeviceFailed",
    "Draining",
    "Emit",
    "Encryption",
    "EpochAdvanced",
    "Event",
    "Explanation",
    "FileLoadStoreSpec",
    "Found",
    "GPULoadStoreSpec",
    "GPUTier",
    "GroupNeed",
    "GroupsLoad",
    "GroupsLookup",
    "HostLease",
    "HostMemoryPageable",
    "HostMemoryReady",
    "HostSettings",
    "Inventory",
    "Job",
    "JobResult",
    "KVGroup",
    "KVLayout",
    "LayoutMismatchError",
    "LoadCost",
    "LoadHandle",
    "LoadResult",
    "LoadStoreSpec",
    "LoadTicket",
    "LookupResult",
    "MemoryPageLocked",
    "Mirror",
    "Missing",
    "ModelIdentity",
    "Move",
    "Names",
    "Namespace",
    "ObjectLoadStoreSpec",
    "Outcome",
    "Outcomes",
    "OwnedTierSettings",
    "PageLockingDoubted",
    "PageNotServed",
    "PageServed",
    "PinResult",
    "Place",
    "Plan",
    "Planner",
    "Policy",
    "PrefetchHandle",
    "PrefetchResult",
    "Priority",
    "Record",
    "RecordShape",
    "RecordsRefused",
    "Recovered",
    "RemoteLoadStoreSpec",
    "Removed",
    "ReuseHint",
    "SequencePreempted",
    "SessionPlanner",
    "SessionStatistics",
    "Shard",
    "SlabHandle",
    "SlotBackend",
    "Snapshot",
    "Split",
    "StoreHandle",
    "StoreResult",
    "StoreTicket",
    "SwapOutResult",
    "SwapResult",
    "TierChange",
    "TierFailed",
    "TierFault",
    "TierResized",
    "TierResumed",
    "TierRun",
    "TierScrubbed",
    "TierSettings",
    "TierShare",
    "TierStalled",
    "TierStatistics",
    "TierStore",
    "TierTripped",
    "TieredKV",
    "TieredKVError",
    "TieredKVServer",
    "TieredKVSettings",
    "TraceEnded",
    "TraceFailed",
    "Worker",
    "WorkerEnded",
    "Workers",
    "WritePolicy",
    "__version__",
    "check_lengths",
    "encode_record",
    "epoch_digest",
    "full",
    "hash_blocks",
    "hash_tail",
    "open_blocking",
    "parse_record",
    "salt_digest",
    "verify_record",
    "window",
]


def __getattr__(name: str) -> object:
    """Import what needs torch at its first use."""
    if name not in _IMPORTED_LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_IMPORTED_LATER[name]}"), name)
    return value


def __dir__() -> list[str]:
    """Name what is public."""
    return __all__
