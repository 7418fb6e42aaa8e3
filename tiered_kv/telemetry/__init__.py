"""What operators and routers see: logs, made from events, and KV events, made from changes."""

from tiered_kv.telemetry.kv_event_values import KVEventStatistics
from tiered_kv.telemetry.kv_events import KVEventPublisher
from tiered_kv.telemetry.logs import log_event

__all__ = ["KVEventPublisher", "KVEventStatistics", "log_event"]
