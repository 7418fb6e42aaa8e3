"""One structlog event per operation. The library never configures structlog: the program that uses it does."""

from dataclasses import fields

import structlog

from tiered_kv.events import Event

_log = structlog.get_logger("tiered_kv")


def log_event(event: Event) -> None:
    """Log an event under its name, its fields as values."""
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    getattr(_log, event.level)(event.name, **values)
