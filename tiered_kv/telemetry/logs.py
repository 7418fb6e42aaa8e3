"""One structlog event per operation. The library never configures structlog: the program that uses it does."""

from dataclasses import fields

import structlog

from tiered_kv.events import Emit, Event

_log = structlog.get_logger("tiered_kv")


def log_event(event: Event) -> None:
    """Log an event under its name, its fields as values."""
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    getattr(_log, event.level)(event.name, **values)


def guarded(emit: Emit) -> Emit:
    """Return an ``emit`` that cannot fail: an error in a program's own must not reach a transfer or a serving path."""

    def emit_or_log(event: Event) -> None:
        try:
            emit(event)
        except Exception:  # noqa: BLE001 - whatever a program's own code raises
            _log.exception("event.not_taken", name=event.name)

    return emit_or_log
