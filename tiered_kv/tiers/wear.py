"""How much may be written to a medium that wears out by it, or is paid for by the byte: so many bytes a day."""

from collections.abc import Callable
from typing import Final

_DAY_S: Final = 24 * 3600.0
_SAVED_UP_S: Final = 3600.0
"""What was not written for a while may be written at once, up to so long's share of the day."""


class Wear:
    """Of one backend, shared by the tiers that KV groups make of it. Decides at once, never waits.

    Bytes count from when they may be written, so that writes at once share what was saved up. One write of more than an
    hour's share is let go on when an hour's share is saved up, and paid for later.
    """

    def __init__(self, bytes_per_day: int | None, clock: Callable[[], float]) -> None:
        """Make one; None is no limit."""
        self._bytes_per_s = None if bytes_per_day is None else bytes_per_day / _DAY_S
        self._clock = clock
        self._seen_at = clock()
        self._most = self._saved = _SAVED_UP_S * (self._bytes_per_s or 0.0)

    def take(self, num_bytes: int) -> bool:
        """Count bytes that are to be written from now on, or say that they must not be."""
        if self._bytes_per_s is None:
            return True
        now = self._clock()
        grown = self._saved + (now - self._seen_at) * self._bytes_per_s
        self._saved, self._seen_at = min(grown, self._most), now
        if self._saved < min(num_bytes, self._most):
            return False
        self._saved -= num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """Count bytes off that were taken and not written."""
        self._saved = min(self._saved + num_bytes, self._most)
