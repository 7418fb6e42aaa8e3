"""Calls into an event loop from other threads, many for one wake-up.

Waking a loop costs a lock and a write to its socket, and a busy tier finishes hundreds of copies and calls at a time:
all that is queued before the loop gets to run shares one wake-up.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")


class LoopCalls:
    """Runs functions on one event loop, in the order they were given in. `call` may be used from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()  # held for a few instructions, never while something runs
        self._calls: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self._waking = False
        self._closed = False

    def call(self, function: Callable[[*Ts], object], *args: *Ts) -> None:
        """Run ``function(*args)`` on the loop, soon, never before this returns. Dropped once the loop is closed.

        An exception of ``function`` goes to the loop's exception handler, and the calls behind it run.
        """
        with self._lock:
            if self._closed:
                return
            self._calls.append((function, args))
            if self._waking:
                return
            self._waking = True
        try:
            self._loop.call_soon_threadsafe(self._run)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            with self._lock:
                self._closed = True
                self._calls.clear()  # what they hold must not live as long as this object

    def _run(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
            self._waking = False
        for function, args in calls:
            self._loop.call_soon(function, *args)  # so that the loop itself deals with each one's exception
