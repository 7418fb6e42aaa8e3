"""What operators and routers see: logs and metrics, made from events, and KV events, made from changes."""

from tiered_kv.telemetry.kv_event_values import KVEventStatistics
from tiered_kv.telemetry.kv_events import KVEventPublisher
from tiered_kv.telemetry.metrics import Metrics
from tiered_kv.telemetry.page import Page
from tiered_kv.telemetry.spans import Spans
from tiered_kv.telemetry.trace_recorder import TraceRecorder
from tiered_kv.values.log import log_event

__all__ = ["KVEventPublisher", "KVEventStatistics", "Metrics", "Page", "Spans", "TraceRecorder", "log_event"]
