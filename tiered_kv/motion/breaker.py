"""Whether to go on without a tier: one circuit breaker per tier and direction, and the shedding of slow stores.

Closed, calls pass. After a few failures in a row, or one call that is late, it opens: nothing passes until a pause is
over. Then it is half open: one call passes as a probe, and its end closes the breaker or opens it for longer.

Failures are counted by kind of call, and what a kind has opened only that kind closes: a medium that answers every
lookup and fails every read is of no use.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_FAILURES_TO_OPEN: Final = 3
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 3.5
"""So that a tier that is well again is in use again within five seconds, jitter and the probe itself included."""
_JITTER: Final = 0.2
_HALF_LIFE_S: Final = 1.0


class Breaker:
    """Of one tier in one direction. Decides at once, never waits; all time comes from ``clock``."""

    def __init__(self, clock: Callable[[], float], rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._num_failures = Counter[str]()
        self._opened_by: set[str] = set()
        self._pause_s = 0.0
        self._retry_at = 0.0
        self._num_late = 0
        self._probe = ""

    @property
    def is_open(self) -> bool:
        """Whether calls should not be made now. False once in a while for a tier that fails: for the probe."""
        if self._num_late or self._probe:
            return True
        return self.is_tripped and self._clock() < self._retry_at

    @property
    def is_tripped(self) -> bool:
        """Whether it opened, and no call of the kind that opened it has gone well since."""
        return bool(self._opened_by)

    @property
    def num_late(self) -> int:
        """Calls that are past their time and have not returned."""
        return self._num_late

    def begin(self, kind: str) -> None:
        """A call is being made."""
        if kind in self._opened_by:
            self._probe = kind

    def late(self, kind: str) -> None:
        """A call is past its time: open until it returns, and then for a pause."""
        self._num_late += 1
        self._open(kind)

    def late_returned(self) -> None:
        """A late call has returned, however it went: well, it closes; badly, the pause since it was late is awaited."""
        self._num_late -= 1

    def succeeded(self, kind: str) -> None:
        """A call went well."""
        self._num_failures[kind] = 0
        self._opened_by.discard(kind)
        self._ends(kind)
        if not self._opened_by:
            self._pause_s = 0.0

    def failed(self, kind: str) -> None:
        """A call failed."""
        self._num_failures[kind] += 1
        if self._ends(kind) or self._num_failures[kind] >= _FAILURES_TO_OPEN:
            self._open(kind)

    def _ends(self, kind: str) -> bool:
        """End the probe if it was of this kind, and say whether it was."""
        was_probe = self._probe == kind
        if was_probe:
            self._probe = ""
        return was_probe

    def _open(self, kind: str) -> None:
        self._opened_by.add(kind)
        self._ends(kind)
        if self._clock() < self._retry_at:
            return  # the calls that were under way when it opened fail of the same trouble: one pause for all
        self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
        jitter = 1 + self._rng.uniform(-_JITTER, _JITTER)  # so that many hosts do not probe a server as one
        self._retry_at = self._clock() + self._pause_s * jitter


@dataclass
class LatencyAverage:
    """A moving average of how long calls took, halved every second without one: a slow tier is tried again."""

    clock: Callable[[], float]
    seconds: float = 0.0
    seen_at: float = 0.0

    def saw(self, seconds: float) -> None:
        """Take one more call into account."""
        self.seconds = 0.7 * self.now() + 0.3 * seconds
        self.seen_at = self.clock()

    def now(self) -> float:
        """The average at this moment."""
        age: float = max(0.0, self.clock() - self.seen_at)
        return self.seconds * float(0.5 ** (age / _HALF_LIFE_S))
