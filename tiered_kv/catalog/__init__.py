"""Decisions: which block is where, who may read or fill it, and what goes when room is needed. No I/O, no waiting."""

from tiered_kv.catalog.books import Change, IndexStatistics, OnChange, SlotState
from tiered_kv.catalog.index import TierIndex
from tiered_kv.catalog.leases import Lease, Reservation
from tiered_kv.catalog.locate import locate, locate_from_any_thread
from tiered_kv.catalog.policies import Policy, make_policy
from tiered_kv.catalog.uses import Fate, History, UseCounts

__all__ = [
    "Change",
    "Fate",
    "History",
    "IndexStatistics",
    "Lease",
    "OnChange",
    "Policy",
    "Reservation",
    "SlotState",
    "TierIndex",
    "UseCounts",
    "locate",
    "locate_from_any_thread",
    "make_policy",
]
