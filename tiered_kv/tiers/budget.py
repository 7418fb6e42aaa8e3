"""Who may move next: a bound on the bytes in flight in one place, given out by priority.

Loads come first, then prefetches, stores and demotions. Lower classes may fill only a part of the budget, so that a
load never finds it full of theirs; and each class may always have one piece in flight, so that none starves.
"""

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

T = TypeVar("T")


class Priority(enum.IntEnum):
    """The order in which transfers are served; lower goes first."""

    LOAD = 0
    PREFETCH = 1
    STORE = 2
    DEMOTE = 3


_SHARE: Final = {Priority.LOAD: 1.0, Priority.PREFETCH: 0.75, Priority.STORE: 0.5, Priority.DEMOTE: 0.25}


class Ticket:
    """Someone's place in line. Its priority may be raised while it waits (`Room.hurry`)."""

    __slots__ = ("priority",)

    def __init__(self, priority: Priority) -> None:
        self.priority = priority


class Room:
    """Lines of waiters, one per priority, for things that are had whole and at once, or not yet.

    Call `changed` whenever there may be more to have.
    """

    def __init__(self) -> None:
        self._lines: dict[Priority, deque[tuple[Ticket, Callable[[], Any], asyncio.Future[Any]]]] = {
            priority: deque() for priority in Priority
        }

    @property
    def num_waiting(self) -> int:
        """How many wait."""
        return sum(not turn.done() for line in self._lines.values() for *_, turn in line)

    async def acquire(self, attempt: Callable[[], T | None], ticket: Ticket, undo: Callable[[T], object]) -> T:
        """Return what ``attempt`` gives once it is our turn and it gives something.

        Args:
            attempt: Takes it, or changes nothing and returns None. Called on the event loop, never concurrently.
            ticket: Which line to wait in; within a line, first come, first served.
            undo: Gives back what was taken for a waiter that was cancelled meanwhile.
        """
        ahead = any(self._lines[each] for each in Priority if each <= ticket.priority)
        if not ahead and (got := attempt()) is not None:
            return got
        turn: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._lines[ticket.priority].append((ticket, attempt, turn))
        self.changed()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                undo(turn.result())
            self.changed()
            raise

    def hurry(self, ticket: Ticket, priority: Priority) -> None:
        """Move a waiter to the end of a faster line. Its ticket keeps the new priority, waiting or not."""
        ticket.priority = min(priority, ticket.priority)
        for line in [line for each, line in self._lines.items() if each > priority]:
            for place in list(line):  # not the line of its priority: it may have been hurried in another room first
                if place[0] is ticket:
                    line.remove(place)
                    self._lines[priority].append(place)
        self.changed()

    def changed(self) -> None:
        """Serve everyone who can be served now, line by line. A line's first waiter holds up only its own line."""
        for line in self._lines.values():
            while line:
                _, attempt, turn = line[0]
                if not turn.done():
                    if (got := attempt()) is None:
                        break
                    turn.set_result(got)
                line.popleft()


class Budget:
    """Bytes in flight, at most ``limit`` of them, or one piece of each class if that is more."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.room = Room()
        self._in_flight = dict.fromkeys(Priority, 0)

    @property
    def in_flight(self) -> int:
        """Bytes given out."""
        return sum(self._in_flight.values())

    async def take(
        self, num_bytes: int, ticket: Ticket, is_off: Callable[[], bool] = lambda: False
    ) -> Callable[[], None]:
        """Wait until ``num_bytes`` more may be in flight; return what gives them back, to be called once.

        Once ``is_off()``, nobody waits and nothing is taken: whoever asks has to look. `Room.changed` makes them.
        """

        def attempt() -> Callable[[], None] | None:
            if is_off():
                return _nothing
            priority = ticket.priority
            fits = self.in_flight + num_bytes <= self.limit * _SHARE[priority]
            if self._in_flight[priority] and not fits:
                return None
            self._in_flight[priority] += num_bytes
            return partial(self._give, num_bytes, priority)

        return await self.room.acquire(attempt, ticket, lambda give: give())

    def _give(self, num_bytes: int, priority: Priority) -> None:
        self._in_flight[priority] -= num_bytes
        self.room.changed()


def _nothing() -> None:
    pass


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
