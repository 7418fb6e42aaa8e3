"""What operators see, made from events and from nothing else."""

from tiered_kv.telemetry.logs import log_event

__all__ = ["log_event"]
