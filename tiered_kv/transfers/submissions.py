"""Transfers submitted from any thread, for engines with a synchronous loop. Nobody waits for a turn of the event loop.

Arguments are checked, and the wait for the caller's event is enqueued, in the caller's thread. Then one wake-up, shared
by all that is submitted meanwhile, lets the event loop start the transfers. What has ended, and nobody has asked about
yet, is kept until it is polled (`Polled`), the newest at least.

A signal's handler may come in too, whatever its thread was doing here: the lock of `Polled` is one that its thread may
take again, and each step inside it is one operation of the interpreter.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Generic, TypeVar

from tiered_kv.system import system
from tiered_kv.transfers.handles import Handle
from tiered_kv.values.errors import ClosedError, ConfigurationError, Reason, TierFault
from tiered_kv.values.integers import is_number
from tiered_kv.values.loop_calls import LoopCalls
from tiered_kv.values.results import LoadResult, StoreResult

K = TypeVar("K")
_LOOK_AGAIN_S: Final = 0.5
"""How often who waits looks whether the event loop is still there: one that is closed tells nobody."""
MOST_KEPT: Final = 1 << 16
"""News that nobody has polled: a program may look at what it has submitted instead, and never poll."""


class Polled(Generic[K]):
    """News of transfers, in the order in which they came, to be polled. Any thread may call.

    Attributes:
        lock: Held for a few instructions, never while something is checked, started or waited for. Who holds it may
            change what others wait for, and then calls `tell`.
    """

    def __init__(self, loop_calls: LoopCalls, most_kept: int = MOST_KEPT) -> None:
        """Keep so many news that nobody has asked for. In the event loop's thread."""
        self.lock = system().condition()
        self._news: dict[K, None] = {}
        self._most_kept = most_kept
        self._loop_calls = loop_calls
        self._loop_thread = system().get_ident()

    def tell(self, about: K) -> None:
        """Add news about a transfer, and wake who waits; with the lock held."""
        self._news[about] = None
        if len(self._news) > self._most_kept:
            del self._news[next(iter(self._news))]
        self.lock.notify_all()

    def forget(self, about: K) -> None:
        """Drop the news about a transfer: whoever would be told knows."""
        self._news.pop(about, None)

    def told(self) -> list[K]:
        """Return what there are news of, for `poll` too; with the lock held."""
        return list(self._news)

    def poll(self, timeout_s: float, is_any_coming: Callable[[], bool]) -> list[K]:
        """Return what there are news of, each once.

        Waits for the first, at most ``timeout_s``, as long as any is coming.

        Raises:
            ClosedError: There is none, and as the event loop is closed there will be none.
        """
        if timeout_s <= 0 and not self._news and not self._loop_calls.is_closed:
            return []  # most steps of an engine's: nothing is waited for, nor a lock taken
        with self.lock:
            if timeout_s > 0:
                self.check_may_block()
            self.wait_until(lambda: bool(self._news) or not is_any_coming(), timeout_s)
            news, self._news = self._news, {}
        return list(news)

    def wait_until(self, is_over: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait until ``is_over()``, at most so long, and not for an event loop that is closed; with the lock held."""
        deadline = system().monotonic() + timeout_s if timeout_s is not None else math.inf
        while not is_over():
            if self._loop_calls.is_closed:
                raise ClosedError("the event loop of this TieredKV was closed before the cache: no transfer will end")
            left_s = deadline - system().monotonic()
            if left_s <= 0:
                return
            self.lock.wait(min(left_s, _LOOK_AGAIN_S))

    def check_may_block(self) -> None:
        """Raise `ConfigurationError` in the event loop's thread."""
        if system().get_ident() == self._loop_thread:
            raise ConfigurationError("the event loop's thread must not block: await what was started there instead")


T = TypeVar("T")


class Ticket(Generic[T]):
    """A transfer submitted from some thread. Any thread may use it.

    The blocks of the engine belong to the transfer from the submission until ``result`` is set.

    Attributes:
        result: None while it is under way.
        whose: See `Submissions.end_of`.
    """

    def __init__(self, submissions: "Submissions", whose: object) -> None:
        """Made by `Submissions.submit` only."""
        self.result: T | None = None
        self.whose = whose
        self._submissions = submissions

    def __repr__(self) -> str:
        return f"Ticket(result={self.result!r})"

    def cancel(self) -> None:
        """Stop as soon as possible: what has not begun to be copied is dropped. It still ends with a result."""
        self._submissions.cancel(self)

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until it has ended, and return the result, which `TieredKV.poll` will not give any more.

        Raises:
            TimeoutError: It has not ended in time, and goes on. So it does when the wait is interrupted.
            ClosedError: The event loop was closed before it ended, and the cache was not: nobody will say how it ends.
            ConfigurationError: No number of seconds, or called in the event loop's thread, which must not block.
        """
        return self._submissions.wait(self, timeout_s)


LoadTicket = Ticket[LoadResult]
StoreTicket = Ticket[StoreResult]


class Submissions:
    """What threads have submitted to one cache. Any thread may call what does not say otherwise."""

    def __init__(self, loop_calls: LoopCalls, most_kept: int = MOST_KEPT) -> None:
        """Take submissions from now on, and keep so many results for `poll`. In the event loop's thread."""
        self._polled: Polled[Ticket[Any]] = Polled(loop_calls, most_kept)
        self._starts: deque[tuple[Ticket[Any], Callable[[], Handle[Any]], Callable[[BaseException], Any]]] = deque()
        self._started: set[Ticket[Any]] = set()  # a ticket that has not ended is here, or still there
        self._waiting: dict[Ticket[Any], set[object]] = {}  # for each of those, whose its result is
        self._is_open = True
        self._loop_calls = loop_calls
        self._handles: dict[Ticket[Any], Handle[Any]] = {}  # the event loop's thread alone uses them

    def close(self) -> None:
        """Take no more, and start what has been taken. In the event loop's thread."""
        with self._polled.lock:
            self._is_open = False
        self._start_all()

    def submit(
        self, start: Callable[[], Handle[T]], failed: Callable[[BaseException], T], whose: object = None
    ) -> Ticket[T]:
        """Have the event loop call ``start``, soon, in the order of submissions.

        Args:
            start: Begins the transfer. Everything that can be wrong has been checked.
            failed: Makes the result of a transfer that raised, which none does by design.
            whose: For `end_of`.

        Raises:
            ClosedError: The cache is closed; ``start`` is not called.
        """
        ticket: Ticket[T] = Ticket(self, whose)
        with self._polled.lock:
            if not self._is_open:
                raise ClosedError("this TieredKV is closed")
            self._starts.append((ticket, start, failed))
        self._loop_calls.call(self._start_all)
        return ticket

    def poll(self, timeout_s: float) -> list[tuple[Ticket[Any], Any]]:
        """Return what has ended and was not returned before, with its result, in the order of ending.

        Waits for the first of them, at most ``timeout_s``, as long as anything is under way.

        Raises:
            ClosedError: Nothing has ended, and as the event loop is closed nothing of what is under way will.
        """
        ended = self._polled.poll(timeout_s, lambda: bool(self._starts or self._started))
        return [(ticket, ticket.result) for ticket in ended]

    def wait(self, ticket: Ticket[T], timeout_s: float | None) -> T:
        """Wait for a transfer to end, and return its result, which `poll` then does not.

        Raises:
            ConfigurationError: The event loop's thread would wait for itself, or the time is no number of seconds.
            TimeoutError: It has not ended within ``timeout_s``; it goes on.
        """
        if timeout_s is not None and not (is_number(timeout_s) and timeout_s >= 0):
            raise ConfigurationError(f"timeout_s must be a number of seconds, 0 or more, got {timeout_s!r:.80}")
        with self._polled.lock:
            if ticket.result is None:
                self._polled.check_may_block()
                self._wait_for(ticket, timeout_s)
            self._polled.forget(ticket)
            if ticket.result is None:
                raise TimeoutError(f"the transfer has not ended within {timeout_s} s; it goes on")
            return ticket.result

    def _wait_for(self, ticket: Ticket[Any], timeout_s: float | None) -> None:
        """Wait for a result, which is told to nobody else meanwhile; with the lock held."""
        me, waiting, has_it = object(), self._waiting.setdefault(ticket, set()), False
        try:
            waiting.add(me)
            self._polled.wait_until(lambda: ticket.result is not None, timeout_s)
            has_it = ticket.result is not None
        finally:
            waiting.discard(me)
            if not waiting:
                self._waiting.pop(ticket, None)
                if not has_it and ticket.result is not None:  # interrupted as it ended: `poll` must tell of it
                    self._polled.tell(ticket)

    def cancel(self, ticket: Ticket[Any]) -> None:
        """Have a transfer stop as soon as possible; it ends, and is polled, as all do."""
        if ticket.result is None:
            self._loop_calls.call(self._cancel, ticket)

    def end_of(self, whose: object) -> None:
        """Cancel what was submitted with this object, if it was, and wait until it has ended; `poll` does not tell it.

        For a thread that was interrupted, and may not have been handed its ticket. Interrupted again, it calls again.
        """
        with self._polled.lock:
            known = [*(ticket for ticket, _, _ in list(self._starts)), *list(self._started), *self._polled.told()]
        mine = [ticket for ticket in known if ticket.whose is whose]
        for ticket in mine:
            self.cancel(ticket)
        with suppress(ClosedError):  # nobody will say how it ends
            for ticket in mine:
                self.wait(ticket, None)

    # On the event loop.

    def _start_all(self) -> None:
        for _ in range(len(self._starts)):  # those that come meanwhile are started by a call of their own
            ticket, start, failed = self._starts[0]
            self._started.add(ticket)
            self._starts.popleft()
            try:
                handle = self._handles[ticket] = start()
            except BaseException as error:
                self._finish(ticket, failed(error))  # whoever polls has to hear of it
                if not isinstance(error, Exception):
                    raise  # the program's own, see `LoopCalls`: those behind have calls of their own too
            else:
                handle.when_done(partial(self._ended, ticket, failed))

    def _cancel(self, ticket: Ticket[Any]) -> None:
        self._start_all()  # another thread may have added it to a list and not have called yet
        if (handle := self._handles.get(ticket)) is not None:
            handle.cancel()

    def _ended(self, ticket: Ticket[T], failed: Callable[[BaseException], T], task: "asyncio.Task[T]") -> None:
        del self._handles[ticket]
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._finish(ticket, task.result() if error is None else failed(error))

    def _finish(self, ticket: Ticket[T], result: T) -> None:
        with self._polled.lock:
            ticket.result = result
            self._started.discard(ticket)
            if self._waiting.get(ticket):
                self._polled.lock.notify_all()
            else:
                self._polled.tell(ticket)


def load_failed(num_blocks: int, error: BaseException) -> LoadResult:
    """Make the result of a load that raised."""
    fault = TierFault("engine", Reason.COPY_FAILED, num_blocks, repr(error))
    return LoadResult(0, num_blocks, faults=(fault,), missed_because=fault.reason)


def store_failed(num_blocks: int, error: BaseException) -> StoreResult:  # noqa: ARG001 - a store has no prose
    """Make the result of a store that raised."""
    return StoreResult(num_blocks, 0, 0, num_blocks, {Reason.COPY_FAILED: num_blocks})
