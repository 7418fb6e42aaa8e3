"""Whether to go on without a tier: one circuit breaker per tier and direction, and the shedding of slow stores.

Closed, calls pass. After a few failures in a row, or one call that is late, it opens: nothing passes until a pause is
over. Then it is half open: one call passes as a probe, and its end closes the breaker or opens it for longer.
"""

import random
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
        self._num_failures = 0
        self._pause_s = 0.0
        self._retry_at = 0.0
        self._num_late = 0
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether calls should not be made now. False once in a while for a tier that fails: for the probe."""
        if self._num_late or self._probing:
            return True
        return self._pause_s > 0 and self._clock() < self._retry_at

    @property
    def is_tripped(self) -> bool:
        """Whether it opened and no call has gone well since."""
        return self._pause_s > 0

    @property
    def num_late(self) -> int:
        """Calls that are past their time and have not returned."""
        return self._num_late

    def begin(self) -> None:
        """A call is being made."""
        self._probing = self._pause_s > 0

    def late(self) -> None:
        """A call is past its time: open until it returns, and then for a pause."""
        self._num_late += 1
        self._open()

    def late_returned(self) -> None:
        """A late call has returned, however it went: well, it closes; badly, the pause since it was late is awaited."""
        self._num_late -= 1

    def succeeded(self) -> None:
        """A call went well."""
        self._num_failures = 0
        self._pause_s = 0.0
        self._probing = False

    def failed(self) -> None:
        """A call failed."""
        self._num_failures += 1
        was_probe, self._probing = self._probing, False
        if was_probe or self._num_failures >= _FAILURES_TO_OPEN:
            self._open()

    def _open(self) -> None:
        self._probing = False
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
