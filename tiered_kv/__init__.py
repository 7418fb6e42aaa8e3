"""tiered_kv: the KV cache of a language model beyond the GPU, behind one async facade.

What is public is imported from here, or from `tiered_kv.testing`. All modules below are private: where a name lives,
and what is not named here, may change in any version.

What needs torch is imported when it is first asked for: a router that reads events never waits for that.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from tiered_kv.cache.groups import GroupNeed, GroupsLoad, GroupsLookup, chunk, full, state, window
from tiered_kv.catalog.policies import Policy
from tiered_kv.media.backend import (
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
from tiered_kv.media.inventory import Found, Inventory, Place
from tiered_kv.media.record import Record, parse_record
from tiered_kv.media.record import encode as encode_record
from tiered_kv.media.record import verify as verify_record
from tiered_kv.settings.encryption import Encryption
from tiered_kv.settings.tier_settings import (
    HostSettings,
    OwnedTierSettings,
    Size,
    StorageTierSettings,
    TierSettings,
    WritePolicy,
    default_size,
)
from tiered_kv.tiers.changes import Added, Changes, Cleared, Mirror, Removed, Snapshot, TierChange
from tiered_kv.tiers.gate import Priority
from tiered_kv.values.errors import (
    BackendError,
    BackendUnavailableError,
    BlockCorruptError,
    CapacityError,
    ClosedError,
    ConfigurationError,
    LayoutMismatchError,
    Reason,
    TieredKVError,
    TierFault,
)
from tiered_kv.values.events import (
    BlocksCorrupted,
    BlocksLoaded,
    BlocksLookedUp,
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
    GPUPoolInHostMemory,
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
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.keys import (
    BlockKey,
    BlockKeys,
    ModelIdentity,
    Names,
    Namespace,
    Shard,
    epoch_digest,
    hash_blocks,
    hash_tail,
    salt_digest,
)
from tiered_kv.values.layout import KVGroup, KVLayout
from tiered_kv.values.plan import JobResult, Move, Outcomes, Plan, SlabHandle, TierShare
from tiered_kv.values.results import (
    BlockState,
    CacheStatistics,
    LoadCost,
    LoadResult,
    LookupResult,
    PinResult,
    PrefetchResult,
    RemovalResult,
    Split,
    StoreResult,
    SwapOutResult,
    SwapResult,
    TierRun,
    TierStatistics,
    TierStore,
)
from tiered_kv.values.specs import (
    CPULoadStoreSpec,
    FileLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    ObjectLoadStoreSpec,
    RemoteLoadStoreSpec,
)

if TYPE_CHECKING:
    from tiered_kv.cache.answers import Explanation
    from tiered_kv.cache.block_cache import BlockCache
    from tiered_kv.cache.blocking import BlockingTieredKV, open_blocking
    from tiered_kv.cache.closing import Draining
    from tiered_kv.cache.planner import Planner
    from tiered_kv.cache.tiered_kv import TieredKV
    from tiered_kv.cache.worker import Worker
    from tiered_kv.host.client import ConnectedKV
    from tiered_kv.host.server import TieredKVServer
    from tiered_kv.memory.device import Device
    from tiered_kv.settings.chain_settings import CPUTier, GPUTier
    from tiered_kv.settings.settings import CacheLimits, TieredKVSettings
    from tiered_kv.transfers.handles import LoadHandle
    from tiered_kv.transfers.jobs import Job
    from tiered_kv.transfers.prefetch import HostLease, PrefetchHandle
    from tiered_kv.transfers.store import StoreHandle
    from tiered_kv.transfers.submissions import LoadTicket, StoreTicket

__version__ = "0.1.0"

_IMPORTED_LATER: Final = {
    "BlockCache": "cache.block_cache",
    "BlockingTieredKV": "cache.blocking",
    "CPUTier": "settings.chain_settings",
    "CacheLimits": "settings.settings",
    "Device": "memory.device",
    "Draining": "cache.closing",
    "Explanation": "cache.answers",
    "GPUTier": "settings.chain_settings",
    "HostLease": "transfers.prefetch",
    "Job": "transfers.jobs",
    "LoadHandle": "transfers.handles",
    "LoadTicket": "transfers.submissions",
    "Planner": "cache.planner",
    "PrefetchHandle": "transfers.prefetch",
    "StoreHandle": "transfers.store",
    "StoreTicket": "transfers.submissions",
    "ConnectedKV": "host.client",
    "TieredKV": "cache.tiered_kv",
    "TieredKVServer": "host.server",
    "TieredKVSettings": "settings.settings",
    "Worker": "cache.worker",
    "open_blocking": "cache.blocking",
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
    "BlocksLookedUp",
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
    "GPUPoolInHostMemory",
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
    "Reason",
    "Record",
    "RecordShape",
    "RecordsRefused",
    "Recovered",
    "RemoteLoadStoreSpec",
    "RemovalResult",
    "Removed",
    "ReuseHint",
    "SequencePreempted",
    "Shard",
    "Size",
    "SlabHandle",
    "SlotBackend",
    "Snapshot",
    "Split",
    "StorageTierSettings",
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
    "TieredKVSettings",
    "TraceEnded",
    "TraceFailed",
    "Worker",
    "WorkerEnded",
    "Workers",
    "WritePolicy",
    "__version__",
    "check_lengths",
    "chunk",
    "default_size",
    "encode_record",
    "epoch_digest",
    "full",
    "hash_blocks",
    "hash_tail",
    "open_blocking",
    "parse_record",
    "salt_digest",
    "state",
    "verify_record",
    "window",
]
if find_spec("msgspec") is not None:  # else who asks for them hears of the extra; `help` and ``import *`` ask for all
    __all__ += ["ConnectedKV", "TieredKVServer"]


def __getattr__(name: str) -> object:
    """Import what needs torch at its first use."""
    if name not in _IMPORTED_LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_IMPORTED_LATER[name]}"), name)
    return value


def __dir__() -> list[str]:
    """Name what is public."""
    return __all__
