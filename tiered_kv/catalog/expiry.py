"""Which blocks are too old: their times of arrival, by slot, looked through a bounded piece at a time."""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.table import Slots
from tiered_kv.errors import ConfigurationError

_MAX_FOUND: Final = 4096  # to remove so many blocks takes about 1 ms, to look at as many slots takes 3 us


class Expiry:
    """When each slot was last filled. Takes 4 bytes a slot.

    Times are 32-bit floats of seconds since the clock was first looked at: exact to 0.06 s after 10 days, to 4 s after
    two years.
    """

    def __init__(self, num_slots: int, ttl_s: float, clock: Callable[[], float]) -> None:
        """Make one over ``num_slots`` slots, none of them filled.

        Raises:
            ConfigurationError: ``ttl_s`` is no positive number.
        """
        if not ttl_s > 0:
            raise ConfigurationError(f"ttl_s must be positive, got {ttl_s}")
        self._ttl_s = ttl_s
        self._clock = clock
        self._zero_s = clock()
        self._filled_s = np.full(num_slots, 0, dtype=np.float32)
        self._next = 0

    def start(self, slots: Slots, ages_s: NDArray[np.float32] | float = 0.0) -> None:
        """Let these slots count from ``ages_s`` ago."""
        self._filled_s[slots] = self._clock() - self._zero_s - ages_s

    def overdue(self, num_slots: int, limit: int) -> Slots:
        """Look at the next ``limit`` of the first ``num_slots`` slots; return those filled too long ago, ascending.

        Finds at most 4,096, and then goes on behind the last of them at the next call.
        """
        start = self._next if self._next < num_slots else 0
        stop = min(start + limit, num_slots)
        deadline_s = self._clock() - self._zero_s - self._ttl_s
        found = np.flatnonzero(self._filled_s[start:stop] <= deadline_s)[:_MAX_FOUND] + start
        self._next = int(found[-1]) + 1 if len(found) == _MAX_FOUND else stop
        return found
