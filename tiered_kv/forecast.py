"""When conversations come back, learned from all of them as they come.

For each span of time since the last turn it is counted how many that had waited so long came back within it. That is
E. L. Kaplan and P. Meier's estimate, "Nonparametric Estimation from Incomplete Observations", JASA 1958, and needs no
end of a conversation to be told.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

MOST_SESSIONS: Final = 1 << 16
_FIRST_S: Final = 0.25
_STEPS_PER_OCTAVE: Final = 4
_NUM_SPANS: Final = 80
"""Spans of time since the last turn, each 1.2 times as long as the one before: to about two days."""
_MEMORY: Final = 2_000.0
"""Turns after which what was learned counts half."""
_EARLY: Final = 0.9
"""A turn that is known to come is prepared after this part of the time."""
_AGAIN: Final = 0.05
"""What could not be brought is looked at again after this part of the time since the last turn."""


class SessionForecast:
    """How likely conversations come back, and when to look at each again. Bounded; looks at no clock."""

    def __init__(self, *, most_sessions: int = MOST_SESSIONS) -> None:
        """Make one that has seen nothing; of more conversations than ``most_sessions`` the oldest are forgotten."""
        self._most = most_sessions
        self._at_risk = [0.0] * _NUM_SPANS
        self._came = [0.0] * _NUM_SPANS
        self._waiting: OrderedDict[Hashable, _Waiting] = OrderedDict()
        self._looks: list[tuple[float, int, Hashable]] = []
        self._num_turns = 0

    def __len__(self) -> int:
        """Count the conversations that are waited for."""
        return len(self._waiting)

    def turn(self, session: Hashable, at_s: float, back_in_s: float | None = None) -> None:
        """A turn came: learn from how long it took, and wait for the next, which may be known to come after so long."""
        self._num_turns += 1
        if (waiting := self._waiting.pop(session, None)) is not None:
            self._pass(waiting, at_s)
            self._came[waiting.span] += 1.0
        if self._num_turns % int(_MEMORY) == 0:
            self._at_risk = [each / 2 for each in self._at_risk]
            self._came = [each / 2 for each in self._came]
        self._waiting[session] = waiting = _Waiting(self._num_turns, at_s, back_in_s)
        self._at_risk[0] += 1.0
        self._look_later(session, waiting)
        if back_in_s is not None:
            heapq.heappush(self._looks, (at_s + _EARLY * back_in_s, waiting.number, session))
        while len(self._waiting) > self._most:
            self._waiting.popitem(last=False)
        if len(self._looks) > 4 * self._most:  # of turns that are over
            self._looks = [each for each in self._looks if self._is_current(each)]
            heapq.heapify(self._looks)

    def close(self, session: Hashable) -> None:
        """It will not come back."""
        self._waiting.pop(session, None)

    def due(self, now_s: float) -> list[Hashable]:
        """Return the conversations that are to be looked at now: those that have entered another span of time."""
        found: dict[Hashable, None] = {}
        while self._looks and self._looks[0][0] <= now_s:
            look = heapq.heappop(self._looks)
            if not self._is_current(look):
                continue
            waiting = self._waiting[look[2]]
            span = waiting.span
            self._pass(waiting, now_s)
            if waiting.span > span:
                self._look_later(look[2], waiting)
            found[look[2]] = None
        return list(found)

    def look_again(self, session: Hashable, now_s: float) -> None:
        """Have `due` return it once more before long: there was no room for it now."""
        if (waiting := self._waiting.get(session)) is not None:
            heapq.heappush(self._looks, (now_s + _AGAIN * (now_s - waiting.since_s), waiting.number, session))

    def chance(self, session: Hashable, now_s: float, within_s: float) -> float:
        """Return how likely it comes back within so many seconds, as it has not yet."""
        waiting = self._waiting.get(session)
        if waiting is None:
            return 0.0
        if waiting.back_in_s is not None:
            age_s = now_s - waiting.since_s
            return float(_EARLY * waiting.back_in_s <= age_s <= waiting.back_in_s / _EARLY <= age_s + within_s)
        stays = 1.0
        for span in range(_span_of(now_s - waiting.since_s), _span_of(now_s - waiting.since_s + within_s) + 1):
            part = _part_of(span, now_s - waiting.since_s, within_s)
            if self._at_risk[span] > 0:
                stays *= max(0.0, 1.0 - part * min(1.0, self._came[span] / self._at_risk[span]))
        return 1.0 - stays

    def _pass(self, waiting: "_Waiting", now_s: float) -> None:
        """Count that it waits, in each span of time that it has entered."""
        span = _span_of(now_s - waiting.since_s)
        while waiting.span < span:
            waiting.span += 1
            self._at_risk[waiting.span] += 1.0

    def _look_later(self, session: Hashable, waiting: "_Waiting") -> None:
        if waiting.span + 1 < _NUM_SPANS:
            heapq.heappush(self._looks, (waiting.since_s + _start_of(waiting.span + 1), waiting.number, session))

    def _is_current(self, look: tuple[float, int, Hashable]) -> bool:
        waiting = self._waiting.get(look[2])
        return waiting is not None and waiting.number == look[1]


@dataclass(slots=True)
class _Waiting:
    """A conversation that may come back; ``number`` tells its turn from all others."""

    number: int
    since_s: float
    back_in_s: float | None = None
    span: int = 0


def _span_of(seconds: float) -> int:
    if seconds < _FIRST_S:
        return 0
    seconds = min(seconds, _start_of(_NUM_SPANS))
    return min(_NUM_SPANS - 1, 1 + int(_STEPS_PER_OCTAVE * math.log2(seconds / _FIRST_S)))


def _start_of(span: int) -> float:
    return 0.0 if span == 0 else _FIRST_S * 2.0 ** ((span - 1) / _STEPS_PER_OCTAVE)


def _part_of(span: int, since_s: float, within_s: float) -> float:
    """Return the part of a span that lies between ``since_s`` and ``since_s + within_s``."""
    start, stop = _start_of(span), _start_of(span + 1)
    if span == _NUM_SPANS - 1:
        return 1.0
    return (min(stop, since_s + within_s) - max(start, since_s)) / (stop - start)
