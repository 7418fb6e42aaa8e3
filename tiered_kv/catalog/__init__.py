"""Decisions: which block is where, who may read or fill it, and what goes when room is needed. No I/O, no waiting."""

from tiered_kv.catalog.index import IndexStatistics, SlotState, TierIndex
from tiered_kv.catalog.planner import Located, Run, locate
from tiered_kv.catalog.policies import Policy, make_policy
from tiered_kv.catalog.rights import Lease, Reservation

__all__ = [
    "IndexStatistics",
    "Lease",
    "Located",
    "Policy",
    "Reservation",
    "Run",
    "SlotState",
    "TierIndex",
    "locate",
    "make_policy",
]
