"""Calls into an event loop from other threads, many for one wake-up.

Waking a loop costs a lock and a write to its socket, and a busy tier finishes hundreds of copies and calls at a time:
all that is queued before the loop gets to run shares one wake-up.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVarTuple

from tiered_kv.values.errors import in_words

Ts = TypeVarTuple("Ts")
_MOST_A_TURN: Final = 256
"""Others on the loop have turns between so many: threads may give in more than it runs, for as long as it runs them."""


class LoopCalls:
    """Runs functions on one event loop, in the order they were given in.

    `call` may be used from any thread, and from a signal's handler, which may interrupt another `call` of its thread
    anywhere: so there is no lock, and each step that others see is one operation of the interpreter.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._waking = False
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the loop is closed: nothing runs there any more."""
        return self._loop.is_closed()

    def call(self, function: Callable[[*Ts], object], *args: *Ts) -> None:
        """Run ``function(*args)`` on the loop, soon, never before this returns. Dropped once the loop is closed.

        An exception of ``function`` goes to the loop's exception handler, and the calls after it run. A call that an
        interrupt of its thread ends may run or not; it holds up no other.
        """
        if self._closed:
            return
        try:
            self._calls.append((function, args))
            if self._waking:
                return  # `_run` looks at the calls after it has said that nobody wakes it any more
            self._waking = True
            self._loop.call_soon_threadsafe(self._run)
        except BaseException as error:
            self._waking = False
            if self._loop.is_closed():
                self._closed = True
                self._calls.clear()  # what they hold must not live as long as this object
                if isinstance(error, RuntimeError):
                    return
                raise
            # An interrupt, perhaps: others may rely on the wake-up by now. Two of them do no harm.
            self._loop.call_soon_threadsafe(self._run)
            raise

    def catch_up(self) -> None:
        """Run now what was given in so far: for whoever promises something of all that came before.

        In the thread of the loop, which may have called and not had a turn since; not from a signal's handler.
        """
        self._run_first(len(self._calls))  # who was to wake the loop for the rest does

    def _run(self) -> None:
        self._waking = False
        self._run_first(min(_MOST_A_TURN, len(self._calls)))  # those that come meanwhile wake the loop again
        if self._calls and not self._waking:
            self._waking = True
            self._loop.call_soon(self._run)

    def _run_first(self, num_calls: int) -> None:
        for _ in range(num_calls):
            if not self._calls:
                return  # one of them has caught up
            function, args = self._calls.popleft()
            try:
                function(*args)
            except (SystemExit, KeyboardInterrupt):
                self._loop.call_soon(self._run)  # the loop lets these end it; whoever runs it again finds the rest
                raise
            except BaseException as error:  # noqa: BLE001 - as the loop itself deals with one
                self._loop.call_exception_handler({"message": f"exception in {function!r}", "exception": error})


def carried(error: BaseException, whose: str) -> Exception:
    """Return an error as a future can carry it to whoever awaits it.

    A future refuses StopIteration, and who awaits one takes a CancelledError for a cancellation and a SystemExit for
    the end of the program: these, and whatever else is no Exception, become the cause of a RuntimeError.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    carrier = RuntimeError(f"{whose} raised {in_words(error)}")
    carrier.__cause__ = error
    return carrier
