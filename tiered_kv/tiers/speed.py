"""How fast a storage tier reads now: learned from its reads, for the choice between loading blocks and computing them.

A tier is taken for a pipe: a read that finds ``ahead`` bytes asked for before it, itself included, takes ``first_s +
ahead x byte_s``. Both numbers are fitted to the reads of late, by least squares with weights that fade; what waits in
the tier's line is part of ``ahead``, so the estimate rises and falls with the load. Loads read a few windows at a time,
so they also say how much more each of them is going to read: with these a load takes turns.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

_FADE: Final = 0.9
"""Of the weight of each read before, at one more: some ten reads count."""
_SPREAD: Final = 0.05
"""How much sizes have to differ, relative to their mean, before time is split into one for each byte and the rest."""
_HALF_LIFE_S: Final = 30.0
"""A tier that nobody has read from for long is taken for faster and faster, so that it is tried again."""


@dataclass(frozen=True)
class Read:
    """One read under way: since when, and how many bytes the tier had to bring then, its own included."""

    num_bytes: int
    ahead: int
    started: float


@dataclass(frozen=True)
class Estimate:
    """What one more transfer would meet.

    Attributes:
        first_s: Seconds before its first byte: what was asked for before it has come.
        byte_s: Seconds for each byte.
        num_others: Transfers that go on reading, and with which it would take turns.
        others_bytes: What they are going to read, all together, beside what they have asked for.
    """

    first_s: float
    byte_s: float
    num_others: int
    others_bytes: int


@dataclass
class ReadSpeed:
    """Of one tier and kind of block. For the event loop's thread.

    Attributes:
        clock: Seconds, monotonic.
    """

    clock: Callable[[], float]
    _ahead: int = 0
    _weight: float = 0.0
    _sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])
    _seen_at: float = 0.0
    _plans: dict[object, int] = field(default_factory=dict)
    _planned: int = 0

    def begin(self, num_bytes: int) -> Read:
        """Count a read that is asked for now; `end` follows, however it goes."""
        self._ahead += num_bytes
        return Read(num_bytes, self._ahead, self.clock())

    def end(self, read: Read, *, is_well: bool) -> None:
        """Count it off, and learn from it if it brought blocks."""
        self._ahead -= read.num_bytes
        if not is_well:
            return
        x, y, self._seen_at = float(read.ahead), self.clock() - read.started, self.clock()
        self._weight = _FADE * self._weight + 1.0
        for at, value in enumerate((x, y, x * x, x * y)):
            self._sums[at] = _FADE * self._sums[at] + value

    def plan(self, who: object, num_bytes: int) -> None:
        """Say how much a transfer is going to read, beside what it has asked for: 0 once it asks for nothing more."""
        self._planned += num_bytes - self._plans.pop(who, 0)
        if num_bytes:
            self._plans[who] = num_bytes

    def estimate(self) -> Estimate | None:
        """Say what one more transfer would meet; None before anything was read."""
        if not self._weight:
            return None
        x, y, xx, xy = (each / self._weight for each in self._sums)
        spread = xx - x * x
        byte_s = min(max(0.0, (xy - x * y) / spread), y / x) if spread > (_SPREAD * x) ** 2 else y / x
        first_s = max(0.0, y - byte_s * x)
        faded = 0.5 ** (max(0.0, self.clock() - self._seen_at) / _HALF_LIFE_S)
        first_s += self._ahead * byte_s
        return Estimate(faded * first_s, faded * byte_s, len(self._plans), self._planned)
