"""Replays of traces, and plans of capacity made from them: for the command line and for benchmarks."""

from tiered_kv.replay.chain import SimulatedChain, TierPlan, plans_from, tier_plans
from tiered_kv.replay.report import ReplayReport, TierReport
from tiered_kv.replay.simulated import BlockCost, replay

__all__ = [
    "BlockCost",
    "ReplayReport",
    "SimulatedChain",
    "TierPlan",
    "TierReport",
    "plans_from",
    "replay",
    "tier_plans",
]
