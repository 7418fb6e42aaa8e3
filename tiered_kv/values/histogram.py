"""How often which of some ranges was seen: cheap to tell, worked out when somebody looks."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import numpy as np

SECONDS: Final = tuple(digit * 10.0**power for power in range(-4, 2) for digit in (1, 2.5, 5))
"""Upper bounds of a histogram's ranges; what takes longer is in one more."""
_COUNTED_AT_ONCE: Final = 256


class Histogram:
    """Counts of ranges. For one thread.

    Attributes:
        bounds: Upper bounds of the ranges, ascending; the last range has none.
    """

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        self._total = 0.0
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._seen: list[float] = []  # not counted yet

    def saw(self, value: float) -> None:
        """Count one value."""
        self._seen.append(value)
        if len(self._seen) == _COUNTED_AT_ONCE:
            self._count()

    @property
    def total(self) -> float:
        """The sum of what was seen."""
        self._count()
        return self._total

    def copy(self) -> "Histogram":
        """Return one with the same counts."""
        self._count()
        copied = Histogram(self.bounds)
        copied._total, copied._counts = self._total, self._counts.copy()
        return copied

    def cumulated(self) -> list[tuple[str, float]]:
        """Return how many values were at most each bound, as Prometheus has it: the last one is ``"+Inf"``."""
        self._count()
        names = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts.tolist())), strict=True))

    def _count(self) -> None:
        seen = np.array(self._seen)
        self._seen.clear()
        self._total += float(seen.sum())
        self._counts += np.bincount(np.searchsorted(self.bounds, seen), minlength=len(self._counts))
