"""Replays of traces, and plans of capacity made from them: for the command line and for benchmarks."""

from tiered_kv.replay.choices import Choice, Medium, Prices, choices
from tiered_kv.replay.curves import Curve, lru_curve
from tiered_kv.replay.report import EngineReport, ReplayReport
from tiered_kv.replay.simulated import BlockCost, replay
from tiered_kv.replay.simulated_chain import TierPlan, plans_from, tier_plans
from tiered_kv.replay.surveys import Survey

__all__ = [
    "BlockCost",
    "Choice",
    "Curve",
    "EngineReport",
    "Medium",
    "Prices",
    "ReplayReport",
    "Survey",
    "TierPlan",
    "choices",
    "lru_curve",
    "plans_from",
    "replay",
    "tier_plans",
]
