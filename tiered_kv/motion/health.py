"""How one backend is doing, shared by the tiers that its KV groups make of it: late calls, breakers, shedding."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tiered_kv.events import Emit, TierResumed, TierStalled, TierTripped
from tiered_kv.motion.breaker import Breaker, LatencyAverage

T = TypeVar("T")


class StorageHealth:
    """Whether to use a backend now, decided by how its calls went.

    Attributes:
        name: The tier's.
        timeout_s: How long a call is waited for.
        clock: Seconds, monotonic: what all its waits are measured by.
        is_open: False while a backend that is not required could not be opened yet.
        reads: Breaker of lookups, reads and deletions.
        writes: Breaker of writes.
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
        self.is_open = True
        self.on_stall: list[Callable[[], None]] = []
        self.reads = Breaker(clock, rng)
        self.writes = Breaker(clock, rng)
        self.clock = clock
        self._write_latency = LatencyAverage(clock)
        self._shed_after_s = shed_stores_after_s
        self._stalled_since = 0.0
        self._tripped_at: dict[Breaker, float] = {}

    @property
    def is_bypassed(self) -> bool:
        """Whether loads go on without this tier."""
        return not self.is_open or self.reads.is_open

    @property
    def is_shedding(self) -> bool:
        """Whether stores go on without this tier: it fails, is late, or has become slow."""
        return not self.is_open or self.writes.is_open or self._write_latency.now() > self._shed_after_s

    async def timed(self, call: Awaitable[T], doing: str, on_late: Callable[[], None]) -> T:
        """Await a call to its end; if it takes longer than ``timeout_s``, say so at that moment.

        Whoever makes the call says how it went (`went`) if it was in time.
        """
        breaker = self._breaker(doing)
        is_late = False

        def late() -> None:
            nonlocal is_late
            is_late = True
            if not self._num_late:
                self._stalled_since = self.clock() - self.timeout_s
            breaker.late(doing)
            self.emit(TierStalled(self.name, doing, self.timeout_s))
            on_late()
            for each in self.on_stall:
                each()

        breaker.begin(doing)
        started = self.clock()
        timer = asyncio.get_running_loop().call_later(self.timeout_s, late)
        try:
            return await call
        finally:
            timer.cancel()
            if doing == "write":
                self._write_latency.saw(self.clock() - started)
            if is_late:
                breaker.late_returned()
                if not self._num_late:
                    self.emit(TierResumed(self.name, self.clock() - self._stalled_since))

    def went(self, doing: str, *, well: bool) -> None:
        """Take into account how a call ended. A failure that opens the breaker is said once."""
        breaker = self._breaker(doing)
        was_tripped = breaker.is_tripped
        if not well:
            breaker.failed(doing)
            if breaker.is_tripped and not was_tripped:
                self._tripped_at[breaker] = self.clock()
                self.emit(TierTripped(self.name, doing))
            return
        breaker.succeeded(doing)
        if not breaker.is_tripped and (since := self._tripped_at.pop(breaker, None)) is not None:
            self.emit(TierResumed(self.name, self.clock() - since))

    @property
    def _num_late(self) -> int:
        return self.reads.num_late + self.writes.num_late

    def _breaker(self, doing: str) -> Breaker:
        # A tier that does not delete must not be read either: what was evicted is unfindable at once.
        return self.writes if doing == "write" else self.reads
