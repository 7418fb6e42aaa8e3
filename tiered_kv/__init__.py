"""tiered_kv: the KV cache of a language model beyond the GPU, behind one async facade."""

from tiered_kv.backend import Backend, BackendContext, Block, Outcome, SlotBackend, TierSettings
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
from tiered_kv.keys import BlockKey, BlockKeys, ModelIdentity, Namespace, Shard, hash_blocks
from tiered_kv.layout import KVGroup, KVLayout
from tiered_kv.results import LoadResult, LookupResult, PrefetchResult, StoreResult, TierFault, TierRun, TierStore
from tiered_kv.specs import (
    CPULoadStoreSpec,
    FileLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    ObjectLoadStoreSpec,
    RemoteLoadStoreSpec,
)

__all__ = [
    "Backend",
    "BackendContext",
    "BackendError",
    "BackendUnavailableError",
    "Block",
    "BlockCorruptError",
    "BlockKey",
    "BlockKeys",
    "CPULoadStoreSpec",
    "CapacityError",
    "ClosedError",
    "ConfigurationError",
    "FileLoadStoreSpec",
    "GPULoadStoreSpec",
    "KVGroup",
    "KVLayout",
    "LayoutMismatchError",
    "LoadResult",
    "LoadStoreSpec",
    "LookupResult",
    "ModelIdentity",
    "Namespace",
    "ObjectLoadStoreSpec",
    "Outcome",
    "PrefetchResult",
    "RemoteLoadStoreSpec",
    "Shard",
    "SlotBackend",
    "StoreResult",
    "TierFault",
    "TierRun",
    "TierSettings",
    "TierStore",
    "TieredKVError",
    "hash_blocks",
]
