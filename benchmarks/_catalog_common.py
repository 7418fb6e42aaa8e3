"""What the measurements of our catalog and of vLLM's share. Standard library only: other interpreters import it."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import TypeVar

BATCH = 1000
NUM_CALLS = 300

Figures = dict[str, float]
T = TypeVar("T")


class Stopwatch:
    """Times single calls, and remembers the longest of all."""

    def __init__(self) -> None:
        self.longest_ms = 0.0

    def median_ms(self, call: Callable[[T], object], batches: Iterable[T]) -> float:
        """Call with each batch; making a batch is not timed."""
        times = []
        for batch in batches:
            start = time.perf_counter()
            call(batch)
            times.append((time.perf_counter() - start) * 1e3)
        self.longest_ms = max(self.longest_ms, *times)
        return median(times)


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
