"""Where log entries go, and events: to structlog where the program has configured it, else to logging.

The library configures neither. As long as the program does not either, warnings go to stderr by logging's last resort,
and what is below is not printed at all. Nothing that happens to an entry reaches whoever made it: a full disk, a closed
pipe or a processor that raises costs the entry and no transfer.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Literal

import structlog

from tiered_kv.values.events import Emit, Event

Level = Literal["debug", "info", "warning", "error"]
_NAME: Final = "tiered_kv"
_NUMBERS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_structlog = structlog.get_logger(_NAME)
_logging = logging.getLogger(_NAME)


def log(level: Level, event: str, /, *, exc_info: BaseException | None = None, **values: object) -> None:
    """Log one entry. Any thread may call; never raises.

    Args:
        level: Its level.
        event: Its name. A record of logging has it as ``event``, and the values as ``values``.
        exc_info: What led to it, shown with its traceback.
        **values: What there is to say.
    """
    try:
        if not _is_wanted(level):
            return
        if structlog.is_configured():
            told = values if exc_info is None else {**values, "exc_info": exc_info}
            getattr(_structlog, level)(event, **told)
        else:
            text = " ".join([event, *(f"{name}={_told(value)}" for name, value in values.items())])
            extra = {"event": event, "values": values}
            _logging.log(_NUMBERS[level], "%s", text, exc_info=exc_info, extra=extra)
    except Exception:  # noqa: BLE001, S110 - a sink of the program's; whom could we tell?
        pass


def _is_wanted(level: Level) -> bool:
    if structlog.is_configured():
        return not _drops(structlog.get_config()["wrapper_class"], _NUMBERS[level])
    return _logging.isEnabledFor(_NUMBERS[level])


def _told(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


@lru_cache(maxsize=64)
def _drops(wrapper: type[Any], number: int) -> bool:
    """Whether loggers of a class drop what is of a level, as far as the class says so: to make one takes 10 us."""
    try:
        is_enabled = getattr(wrapper, "is_enabled_for", None)
        return is_enabled is not None and not is_enabled(wrapper(None, (), {}), number)
    except Exception:  # noqa: BLE001 - a class of the program's, which will be asked again when it logs
        return False


def log_event(event: Event) -> None:
    """Log an event under its name, its fields as values."""
    if _is_wanted(event.level):  # to gather what there is to say takes longer
        log(event.level, event.name, **vars(event))


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
