"""Traces: which blocks requests asked for, and when. Hashes only; no torch, no cache."""

from tiered_kv.traces.reading import BadLine, open_trace, read_trace
from tiered_kv.traces.requests import Request, Trace, names_of
from tiered_kv.traces.synthetic import SYNTHETIC, agents, api_batches, chat, timers, zipf_prompts
from tiered_kv.traces.writing import write_trace

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
    "timers",
    "write_trace",
    "zipf_prompts",
]
