"""Traces: which blocks requests asked for, and when. Hashes only; no torch, no cache."""

from tiered_kv.traces.reading import BadLine, open_trace, read_trace, write_trace
from tiered_kv.traces.requests import Request, Trace, names_of
from tiered_kv.traces.synthetic import (
    SYNTHETIC,
    agents,
    api_batches,
    chat,
    rounds,
    shifts,
    timers,
    twice,
    zipf_prompts,
)

__all__ = [
    "SYNTHETIC",
    "BadLine",
    "Request",
    "Trace",
    "agents",
    "api_batches",
    "chat",
    "names_of",
    "open_trace",
    "read_trace",
    "rounds",
    "shifts",
    "timers",
    "twice",
    "write_trace",
    "zipf_prompts",
]
