"""tiered_kv: the KV cache of a language model beyond the GPU, behind one async facade."""

from tiered_kv.backend import Backend, BackendContext, Block, Outcome, SlotBackend, TierSettings
from tiered_kv.blocking import BlockingTieredKV, open_blocking
from tiered_kv.cache import TieredKV
from tiered_kv.changes import Added, Cleared, Mirror, Removed, Snapshot, TierChange
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
from tiered_kv.explain import Explanation
from tiered_kv.groups import GroupNeed, GroupsLoad, GroupsLookup, full, window
from tiered_kv.keys import BlockKey, BlockKeys, ModelIdentity, Namespace, Shard, hash_blocks, hash_tail
from tiered_kv.layout import KVGroup, KVLayout
from tiered_kv.plan import JobResult, Move, Outcomes, Plan, SlabHandle
from tiered_kv.planner import Planner
from tiered_kv.results import (
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
from tiered_kv.settings import CacheLimits, CPUTier, GPUTier, TieredKVSettings
from tiered_kv.specs import (
    CPULoadStoreSpec,
    FileLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    ObjectLoadStoreSpec,
    RemoteLoadStoreSpec,
)
from tiered_kv.tiers.budget import Priority
from tiered_kv.transfers.load import LoadHandle
from tiered_kv.transfers.prefetch import HostLease, PrefetchHandle
from tiered_kv.transfers.store import StoreHandle
from tiered_kv.transfers.submissions import LoadTicket, StoreTicket
from tiered_kv.worker import Worker

__all__ = [
    "Added",
    "Backend",
    "BackendContext",
    "BackendError",
    "BackendUnavailableError",
    "Block",
    "BlockCorruptError",
    "BlockKey",
    "BlockKeys",
    "BlockingTieredKV",
    "CPULoadStoreSpec",
    "CPUTier",
    "CacheLimits",
    "CacheStatistics",
    "CapacityError",
    "Cleared",
    "ClosedError",
    "ConfigurationError",
    "Explanation",
    "FileLoadStoreSpec",
    "GPULoadStoreSpec",
    "GPUTier",
    "GroupNeed",
    "GroupsLoad",
    "GroupsLookup",
    "HostLease",
    "JobResult",
    "KVGroup",
    "KVLayout",
    "LayoutMismatchError",
    "LoadHandle",
    "LoadResult",
    "LoadStoreSpec",
    "LoadTicket",
    "LookupResult",
    "Mirror",
    "ModelIdentity",
    "Move",
    "Namespace",
    "ObjectLoadStoreSpec",
    "Outcome",
    "Outcomes",
    "PinResult",
    "Plan",
    "Planner",
    "PrefetchHandle",
    "PrefetchResult",
    "Priority",
    "RemoteLoadStoreSpec",
    "Removed",
    "Shard",
    "SlabHandle",
    "SlotBackend",
    "Snapshot",
    "StoreHandle",
    "StoreResult",
    "StoreTicket",
    "SwapOutResult",
    "SwapResult",
    "TierChange",
    "TierFault",
    "TierRun",
    "TierSettings",
    "TierStatistics",
    "TierStore",
    "TieredKV",
    "TieredKVError",
    "TieredKVSettings",
    "Worker",
    "full",
    "hash_blocks",
    "hash_tail",
    "open_blocking",
    "window",
]
