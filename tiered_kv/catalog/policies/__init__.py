"""Eviction policies: which evictable blocks go first."""

from tiered_kv.catalog.policies.arc import ARCPolicy
from tiered_kv.catalog.policies.base import LRUPolicy, Policy
from tiered_kv.catalog.policies.lhd import LHDPolicy
from tiered_kv.catalog.policies.make_policy import make_policy
from tiered_kv.catalog.policies.mq import MQPolicy

__all__ = ["ARCPolicy", "LHDPolicy", "LRUPolicy", "MQPolicy", "Policy", "make_policy"]
