"""Where log entries go, and events: to structlog where the program has configured it, else to logging.

The library configures neither. As long as the program does not either, warnings go to stderr by logging's last resort,
and what is below is not printed at all. Nothing that happens to an entry reaches whoever made it: a full disk, a closed
pipe or a processor that raises costs the entry and no transfer.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Final

import structlog

from tiered_kv.values.events import Emit, Event, Level

_NAME: Final = "tiered_kv"
_SILENT_S: Final = 60.0
_NUMBERS: Final = logging.getLevelNamesMapping()
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
            _logging.log(_NUMBERS[level.upper()], "%s", text, exc_info=exc_info, extra=extra)
    except Exception:  # noqa: BLE001, S110 - a sink of the program's; whom could we tell?
        pass


class Seldom:
    """Says when to tell of what may come again with every call: at once, and then at most once a minute.

    Any thread may ask; of two at one moment both may be told to tell.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_at = float("-inf")
        self._num_untold = 0

    def due(self) -> int | None:
        """Return how often it came since it was last told, if it is to be told now; else None, and count it."""
        if (now := self._clock()) - self._told_at < _SILENT_S:
            self._num_untold += 1
            return None
        num_untold, self._told_at, self._num_untold = self._num_untold, now, 0
        return num_untold

    def failed(self, task: str, error: BaseException) -> None:
        """Log a fault of what goes on in the background, if it is due."""
        if (num_untold := self.due()) is not None:
            log("error", "background.failed", exc_info=error, task=task, untold=num_untold)


def _is_wanted(level: Level) -> bool:
    if structlog.is_configured():
        return not _drops(structlog.get_config()["wrapper_class"], _NUMBERS[level.upper()])
    return _logging.isEnabledFor(_NUMBERS[level.upper()])


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


_SeldomByTier = defaultdict[tuple[str, str], Seldom]
"""By an event's name and tier."""
_seldom = _SeldomByTier(Seldom)
"""Of whoever calls `log_event` by a function of its own."""


def log_event(event: Event) -> None:
    """Log an event under its name, its fields as values; one that comes too often, at level debug."""
    _log_event(_seldom, event)


def _log_event(seldom: _SeldomByTier, event: Event) -> None:
    level, values = event.level, vars(event)
    if event.may_come_often:
        num_untold = seldom[event.name, values.get("tier", "")].due()
        level, values = ("debug", values) if num_untold is None else (level, values | {"untold": num_untold})
    if _is_wanted(level):  # to gather what there is to say takes longer
        log(level, event.name, **values)


def guarded(receivers: Sequence[Emit]) -> Emit:
    """Return what gives each event to every receiver, and cannot fail.

    An error in a program's own must reach neither a transfer nor another receiver. It is logged, of each receiver at
    most once a minute: some events come with every call. So does `log_event` with these, and knows of no other cache's,
    whose tiers may have the same names.
    """
    own_log, seldom = partial(_log_event, _SeldomByTier(Seldom)), [Seldom() for _ in receivers]
    receivers = [own_log if each is log_event else each for each in receivers]

    def emit(event: Event) -> None:
        for receiver, told in zip(receivers, seldom, strict=True):
            try:
                receiver(event)
            except Exception as error:  # noqa: BLE001 - whatever a program's own code raises
                if (num_untold := told.due()) is not None:
                    log("error", "event.not_taken", exc_info=error, name=event.name, untold=num_untold)

    return emit
