"""An adapter to SGLang: a storage backend of HiCache. It is for SGLang 0.5.23 and refuses others."""

from tiered_kv.integrations.sglang.hicache_storage import TieredKVStorage

__all__ = ["TieredKVStorage"]
