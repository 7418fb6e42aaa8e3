"""How one backend is doing, shared by the tiers that its KV groups make of it: late calls, breakers, shedding."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tiered_kv.values.events import Emit, TierResumed, TierStalled, TierTripped

_FAILURES_TO_OPEN: Final = 3
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 3.5
"""So that a tier that is well again is in use again within five seconds, jitter and the probe itself included."""
_JITTER: Final = 0.2
_HALF_LIFE_S: Final = 1.0
_BY_HAND: Final = "resize"
"""Nobody repeats it: that others of its breaker go well has to do."""
_BREAKERS: Final = ("reads", "writes", "deletes", "upkeep", "locates")
"""Reads: all calls but those of the others. Deletes: what is not deleted is unfindable all the same, and the tier is
read on. Upkeep: what a medium is to remember or to make of itself; while it fails in that it is read on. Locates:
questions where blocks are; nothing else depends on the answers."""
_BREAKER_OF: Final = {"write": "writes", "delete": "deletes", "locate": "locates"} | dict.fromkeys(
    ("forget", "checkpoint", _BY_HAND), "upkeep"
)


class Breaker:
    """The circuit breaker of one tier, for one use of it. Decides at once, never waits; time comes from ``clock``.

    Attributes:
        num_late: Calls that are past their time and have not returned.
    """

    def __init__(self, clock: Callable[[], float], rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._num_failures = Counter[str]()
        self._opened_by: set[str] = set()
        self._pause_s = 0.0
        self._retry_at = 0.0
        self.num_late = 0
        self._probe = ""

    @property
    def is_open(self) -> bool:
        """Whether calls should not be made now. False once in a while for a tier that fails: for the probe."""
        if self.num_late or self._probe:
            return True
        return bool(self._opened_by) and self._clock() < self._retry_at

    @property
    def is_tripped(self) -> bool:
        """Whether it opened, and no call of the kind that opened it has gone well since."""
        return bool(self._opened_by)

    def begin(self, kind: str) -> None:
        """A call is being made."""
        if kind in self._opened_by:
            self._probe = kind

    def not_made(self, kind: str) -> None:
        """The call that was about to be made is not: the next one may be the probe."""
        self._ends(kind)

    def late(self, kind: str) -> None:
        """A call is past its time: open until it returns, and then for a pause."""
        self.num_late += 1
        self._open(kind)

    def late_returned(self) -> None:
        """A late call has returned, however it went: well, it closes; badly, the pause since it was late is awaited."""
        self.num_late -= 1

    def succeeded(self, kind: str) -> None:
        """A call went well."""
        self._num_failures[kind] = 0
        self._opened_by -= {kind, _BY_HAND}
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
        now = self.clock()
        self.seconds, self.seen_at = 0.7 * self._at(now) + 0.3 * seconds, now

    def now(self) -> float:
        """The average at this moment."""
        return self._at(self.clock())

    def _at(self, now: float) -> float:
        return self.seconds * float(0.5 ** (max(0.0, now - self.seen_at) / _HALF_LIFE_S))


class StorageHealth:
    """Whether to use a backend now, decided by how its calls went.

    Attributes:
        name: The tier's.
        timeout_s: How long a call is waited for.
        clock: Seconds, monotonic: what all its waits are measured by.
        why_not_open: How the last attempt failed to open a backend that is not required; empty once it is open.
        on_stall: Called when a call is late: whoever waits for this tier should look again.
    """

    def __init__(
        self,
        name: str,
        timeout_s: float,
        emit: Emit,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        shed_stores_after_s: float = float("inf"),
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.emit = emit
        self.why_not_open = ""
        self.on_stall: list[Callable[[], None]] = []
        self._breakers = {name: Breaker(clock, rng) for name in _BREAKERS}
        self.clock = clock
        self._write_latency = LatencyAverage(clock)
        self._shed_after_s = shed_stores_after_s
        self._stalled_since = 0.0
        self._tripped_at: dict[Breaker, float] = {}

    @property
    def is_open(self) -> bool:
        """Whether the backend could be opened."""
        return not self.why_not_open

    @property
    def is_bypassed(self) -> bool:
        """Whether loads go on without this tier: it fails, or hangs."""
        return bool(self.why_not_open) or self._breakers["upkeep"].num_late > 0 or self._breakers["reads"].is_open

    @property
    def is_shedding(self) -> bool:
        """Whether stores go on without this tier: it fails, is late, or has become slow."""
        if not self.is_open or self._breakers["writes"].is_open:
            return True
        latency = self._write_latency
        return latency.seconds > self._shed_after_s and latency.now() > self._shed_after_s

    def open_breakers(self) -> tuple[str, ...]:
        """Name what is bypassed now: ``"reads"``, ``"writes"``, ``"deletes"``, ``"upkeep"``, ``"locates"``."""
        return tuple(name for name, breaker in self._breakers.items() if breaker.is_open or breaker.is_tripped)

    def is_off(self, doing: str) -> bool:
        """Whether calls of a kind should not be made now."""
        if doing == "write":
            return self.is_shedding
        return self.is_bypassed or (doing in _BREAKER_OF and self.breaker(doing).is_open)

    def breaker(self, doing: str) -> Breaker:
        """Return the one that calls of a kind count with. Of a tier that fails, who begins a call is the probe."""
        return self._breakers[_BREAKER_OF.get(doing, "reads")]

    def late(self, doing: str, timeout_s: float) -> None:
        """A call has not ended within its time."""
        if not self.num_late:
            self._stalled_since = self.clock() - timeout_s
        self.breaker(doing).late(doing)
        self.emit(TierStalled(self.name, doing, timeout_s))
        for each in self.on_stall:
            each()

    def ended(self, doing: str, seconds: float, *, is_late: bool, has_failed: bool) -> None:
        """A call has ended, however long it took. A failure that opens the breaker is said once."""
        breaker = self.breaker(doing)
        if doing == "write":
            self._write_latency.saw(seconds)
        if is_late:
            self.let_go(doing)
        if has_failed:
            was_tripped = breaker.is_tripped
            breaker.failed(doing)
            if breaker.is_tripped and not was_tripped:
                self._tripped_at[breaker] = self.clock()
                self.emit(TierTripped(self.name, doing))
                for each in self.on_stall:
                    each()
            return
        breaker.succeeded(doing)
        if breaker in self._tripped_at and not breaker.is_tripped:
            self.emit(TierResumed(self.name, self.clock() - self._tripped_at.pop(breaker)))

    def let_go(self, doing: str) -> None:
        """A late call is waited for no more: it has returned, or what it hangs on is not used any more."""
        self.breaker(doing).late_returned()
        if not self.num_late:
            self.emit(TierResumed(self.name, self.clock() - self._stalled_since))

    @property
    def num_late(self) -> int:
        """How many calls are past their time and have not returned: until then nothing else is asked of the medium."""
        return sum(each.num_late for each in self._breakers.values())
