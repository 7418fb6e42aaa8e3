"""One log entry per event, and receivers of events that can harm nobody."""

from collections.abc import Sequence
from dataclasses import fields

from tiered_kv.events import Emit, Event
from tiered_kv.log import log


def log_event(event: Event) -> None:
    """Log an event under its name, its fields as values."""
    log(event.level, event.name, **{field.name: getattr(event, field.name) for field in fields(event)})


def guarded(receivers: Sequence[Emit]) -> Emit:
    """Return what gives each event to every receiver, and cannot fail.

    An error in a program's own must reach neither a transfer nor another receiver.
    """

    def emit(event: Event) -> None:
        for receiver in receivers:
            try:
                receiver(event)
            except Exception as error:  # noqa: BLE001 - whatever a program's own code raises
                log("error", "event.not_taken", exc_info=error, name=event.name)

    return emit
