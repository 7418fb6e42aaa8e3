"""How fast something may go: bytes a second, on a clock that is given."""

from collections.abc import Callable


class Bandwidth:
    """A rate that several share. What was not used is not saved up, and what is large is let go and paid off behind.

    Decides at once, never waits; for the event loop's thread.
    """

    def __init__(self, bytes_per_s: float | None, clock: Callable[[], float]) -> None:
        """Make one; None is no limit."""
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = clock()

    def take(self, num_bytes: int) -> None:
        """Count bytes that begin to move."""
        if self._bytes_per_s is not None:
            self._free_at = max(self._free_at, self._clock()) + num_bytes / self._bytes_per_s

    def wait_s(self) -> float:
        """Say how long to wait before the next bytes; 0 for not at all."""
        return max(0.0, self._free_at - self._clock())
