"""The only place that calls a backend.

Others' code runs here, so anything may happen: an exception of any kind, a cancellation that nobody asked for, a wrong
number of answers, an answer that comes late or never. Each call runs to its end in a task of its own, or in threads of
the medium, and gives back an `Answer`. Whoever waits may stop waiting; only the end of the cache ends a call, and not
even that one which has memory of the engine's own: a thread would go on to write there. Methods that answer at once are
asked by `Calls.ask`.

What moves blocks waits in one line of the tier, `Calls.when_due`: until its bytes may be in flight, one more such call
may be under way, and the breaker lets it. With that `Turn` it makes its call, or gives it back.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, NoReturn, TypeVar

from tiered_kv.media.backend import Ended, Outcome, Then
from tiered_kv.tiers.gate import Budget, Give, Kind, Room, Waiter
from tiered_kv.tiers.health import StorageHealth
from tiered_kv.tiers.tasks import Tasks, is_being_cancelled
from tiered_kv.values.errors import Reason, TierFault, in_words
from tiered_kv.values.events import TierFailed
from tiered_kv.values.log import Seldom

T = TypeVar("T")
_FIRST_CALLS: Final = 16
_FEWEST_CALLS: Final = 2
_MOST_CALLS: Final = 64
_ASKED: Final = ("lookup", "locate", "delete")
_MOVES: Final = {"read": 0, "write": 1}
"""With these, calls that traffic makes, as many as it likes; moves wait for bytes as well, each kind in a lane of its
own. All others are made one at a time by whoever makes them."""
CLOSED: Final = "the cache was closed"
"""The error of a call that the end of the cache has ended: nobody knows what the medium did."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """How a call went: what it returned, or why it returned nothing.

    Attributes:
        value: What it returned; None unless it went well.
        error: Why it did not go well, in words; empty if it did.
        is_late: It has not ended within its time, and goes on.
        was_made: False where the tier is bypassed: the backend was not asked.
        seconds: How long the backend took, without the wait for a turn.
    """

    value: T | None = None
    error: str = ""
    is_late: bool = False
    was_made: bool = True
    seconds: float = 0.0

    @property
    def is_well(self) -> bool:
        """Whether there is a value."""
        return not self.error

    def fault(self, tier: str, num_blocks: int) -> TierFault:
        """Name what kept a tier from saying which of some blocks it has, of an answer that is not well."""
        reason = Reason.TIMEOUT if self.is_late else Reason.UNREADABLE if self.was_made else Reason.TIER_AWAY
        return TierFault(tier, reason, num_blocks, self.error)


Outcomes = Answer[list[Outcome]]
NOT_MADE: Final[Answer[Any]] = Answer(error="the tier is bypassed", was_made=False)


class Calls:
    """Makes the calls of one backend. For the event loop's thread; ``tasks`` are ended last when the cache closes.

    Attributes:
        health: Hears how they end.
        budget: Of the bytes that its reads and writes move.
        late: Those past their time, which have not returned and are waited for.
        is_over: Whether no more are made: the medium is being closed.
    """

    def __init__(self, health: StorageHealth, tasks: Tasks, budget: Budget) -> None:
        self.health = health
        self.is_over = False
        self.budget = budget
        self._tasks = tasks
        self._turns = {doing: _Turns(health, doing, Room()) for doing in _ASKED}
        self._turns |= {doing: _Turns(health, doing, budget.room) for doing in _MOVES}
        self._limits: dict[float, _TimeLimit] = {}
        self.late = set[_Underway]()
        self._seldom = defaultdict[str, Seldom](partial(Seldom, health.clock))
        health.on_stall += [room.changed for room in self._rooms]

    @property
    def _rooms(self) -> list[Room]:
        """Where calls of traffic wait."""
        return [self.budget.room, *[self._turns[doing].room for doing in _ASKED]]

    def limit(self, seconds: float) -> "_TimeLimit":
        """Return what tells calls that they are late after so many seconds: there are few such numbers."""
        if (limit := self._limits.get(seconds)) is None:
            limit = self._limits[seconds] = _TimeLimit(seconds)
        return limit

    @property
    def num_underway(self) -> int:
        """Calls of traffic that have not returned."""
        return sum(turns.num_taken for turns in self._turns.values())

    @property
    def num_waiting(self) -> int:
        """Calls of traffic that wait for their turn."""
        return sum(room.num_waiting for room in self._rooms)

    def let_go_of_late(self) -> None:
        """Use the medium on although calls are late: the part of it that they hang on has been taken out of use."""
        while self.late:
            call = self.late.pop()
            call.is_let_go = True
            call.end_turn()
            self.health.let_go(call.doing)

    def ask(
        self, doing: str, method: Callable[[], T], default: T, *, problem_of: Callable[[T], str] = lambda _: ""
    ) -> T:
        """Return what a method says that answers at once; ``default`` where it fails. Never raises.

        A failure is told as `TierFailed`, at most once a minute for each ``doing``: the next one counts those between.

        Args:
            doing: Which method it is, in events. It has no part in the breakers.
            method: Calls it.
            default: What to go on with where it raises, or says what is wrong.
            problem_of: Says what is wrong with a value that was returned; what it raises is wrong as well.
        """
        try:
            value = method()
            if value is default or not (error := problem_of(value)):
                return value
        except KeyboardInterrupt:
            raise  # the program's own, which happened to come while a backend ran
        except BaseException as caught:  # noqa: BLE001 - whatever a medium raises, serving goes on without its answer
            error = in_words(caught)
        self.tell_seldom(doing, error, 0)
        return default

    def tell_seldom(self, doing: str, error: str, num_blocks: int) -> None:
        """Tell of a failure as `TierFailed`, at most once a minute for each ``doing``."""
        if (num_untold := self._seldom[doing].due()) is None:
            return
        if num_untold:
            error = f"{error} (and {num_untold} times since it was last told)"
        self.health.emit(TierFailed(self.health.name, doing, error, num_blocks))

    async def make(
        self,
        doing: str,
        call: Callable[[], Awaitable[T]],
        *,
        num_blocks: int = 0,
        timeout_s: float | None = None,
        until_late: bool = False,
        is_raised: bool = False,
        on_late: Callable[[], None] | None = None,
        problem_of: Callable[[T], str] = lambda _: "",
        is_failure: Callable[[T], bool] = lambda _: False,
    ) -> Answer[T]:
        """Make one call when its turn has come, and wait for it. Never raises, but for a cancellation of the wait.

        Args:
            doing: Which call it is, in events and for the breakers.
            call: Makes it. Runs in a task of its own, whoever stops to wait.
            num_blocks: For events.
            timeout_s: After so long it is late; the tier's time limit if left out.
            until_late: Wait no longer than that.
            is_raised: Whether whoever makes it tells of a failure, and no event does.
            on_late: Called at the moment when it is late.
            problem_of: Says what is wrong with a value that was returned; what it raises is wrong as well.
            is_failure: Says whether the medium has failed according to a value with which nothing is wrong.
        """
        if self.is_over and doing != "close":
            return NOT_MADE
        turns = self._turns.get(doing)
        if turns is None:
            self.health.breaker(doing).begin(doing)
        elif not await turns.take():
            return NOT_MADE
        late = asyncio.get_running_loop().create_future()

        def is_late() -> None:
            if not late.done():
                late.set_result(None)
            if on_late is not None:
                on_late()

        limit_s = self.health.timeout_s if timeout_s is None else timeout_s
        underway = _Underway(self, doing, turns, num_blocks, limit_s, is_late)
        underway.is_raised = is_raised
        answers: list[Answer[T]] = []
        making = asyncio.get_running_loop().create_task(_made(call), name=f"{doing} in {self.health.name}")
        self._tasks.watch(making, making.cancel)
        making.add_done_callback(lambda made: answers.append(underway.ended(_end_of(made), problem_of, is_failure)))
        await asyncio.wait({making, late} if until_late else {making}, return_when=asyncio.FIRST_COMPLETED)
        if not answers:
            return Answer(error=f"not done within {limit_s:g} s", is_late=True)
        if not making.cancelled():
            making.result()  # which raises what is the program's own
        return answers[0]

    def when_due(
        self, doing: str, num_bytes: int, waiter: Waiter, tasks: Tasks, then: Callable[["Turn | None"], None]
    ) -> None:
        """Tell ``then`` once a call may be made that moves so many bytes: now, or else in a later turn of the loop.

        None, if by then the tier is bypassed or the waiter has given up, as it does at the end of the cache.

        Args:
            doing: Which call: "read" or "write".
            num_bytes: Of its records.
            waiter: Its place in line.
            tasks: Those that it belongs to.
            then: Makes the call, or gives the turn back.
        """

        def is_due(due: tuple[Turn | None]) -> None:
            over()
            then(*due)

        attempt = partial(self._attempt, doing, num_bytes, waiter, tasks)
        if (due := self.budget.room.take(attempt, waiter, is_due, num_bytes, _MOVES[doing])) is not None:
            then(*due)
        else:
            over = tasks.hold(waiter.give_up)

    async def due(self, doing: str, num_bytes: int, waiter: Waiter, tasks: Tasks) -> "Turn | None":
        """Wait for what `when_due` tells. A cancellation leaves no turn behind."""

        def give_back(due: tuple[Turn | None]) -> None:
            if (turn := due[0]) is not None:
                turn.give_back()

        attempt, over = partial(self._attempt, doing, num_bytes, waiter, tasks), tasks.hold(waiter.give_up)
        try:
            (turn,) = await self.budget.room.acquire(attempt, waiter, give_back, num_bytes, _MOVES[doing])
        finally:
            over()
        return turn

    def _attempt(self, doing: str, num_bytes: int, waiter: Waiter, tasks: Tasks) -> "tuple[Turn | None] | None":
        """Return a turn; None in its place where there is none to come, and None alone where it is to be waited for."""
        turns = self._turns[doing]
        waiter.is_given_up |= tasks.is_ending  # its own stop may be to come, after that of who has what is free now
        if waiter.is_given_up or self.health.is_off(doing):
            return (None,)
        if not turns.has_room or (give := self.budget.attempt(num_bytes, waiter)) is None:
            return None
        turns.begin()
        return (Turn(self, doing, turns, give, waiter, tasks),)


async def _made(call: Callable[[], Awaitable[T]]) -> Callable[[], T]:
    """Make a call; return what returns or raises what it did."""
    try:
        made = await call()
    except KeyboardInterrupt:
        raise  # the program's own, which happened to come while a backend ran
    except BaseException as caught:  # noqa: BLE001 - handed on
        is_closing = isinstance(caught, asyncio.CancelledError) and is_being_cancelled()
        return partial(_raise, _ClosedMeanwhile() if is_closing else caught)
    return lambda: made


def _end_of(made: "asyncio.Task[Callable[[], T]]") -> Callable[[], T]:
    """Return what returns or raises what a call did whose task has ended."""
    return _closed if made.cancelled() or made.exception() is not None else made.result()


class Turn:
    """The right to make one call that moves blocks: `make` it, or `give_back`."""

    __slots__ = ("_calls", "_doing", "_give_bytes", "_tasks", "_turns", "_waiter")

    def __init__(
        self, calls: Calls, doing: str, turns: "_Turns", give_bytes: Give, waiter: Waiter, tasks: Tasks
    ) -> None:
        self._calls = calls
        self._doing = doing
        self._turns = turns
        self._give_bytes = give_bytes
        self._waiter = waiter
        self._tasks = tasks

    @property
    def is_off(self) -> bool:
        """Whether calls like this have come to hang since the turn did: to make it would lend one more its buffers."""
        return self._turns.breaker.num_late > 0

    def give_back(self) -> None:
        """Make no call."""
        self._turns.not_made()
        self._give_bytes()

    def make(
        self,
        begin: Callable[[Then], bool] | None,
        call: Callable[[], Awaitable[list[Outcome]]],
        then: Callable[[Outcomes], None],
        *,
        allowed: tuple[Outcome, ...],
        num_blocks: int,
        on_late: Callable[[], None],
    ) -> None:
        """Make the call. The end of the cache ends it, unless the waiter lends memory.

        Args:
            begin: Has threads of the medium make it, and tell how it ended; says False if it cannot yet.
            call: Makes it then, or where there is no ``begin``: in a task.
            then: Told on the event loop, once, how it ended, perhaps before this returns. Its buffers are the caller's
                again, unless the cache has ended it.
            allowed: What may become of a block.
            num_blocks: How many there are to be answers for.
            on_late: Called at the moment when it is late: nobody has to wait for its bytes from then on.
        """
        calls, lends, loop = self._calls, self._waiter.lends, asyncio.get_running_loop()
        problem_of = partial(outcomes_problem, num_blocks, allowed)
        late = both(self._give_bytes, on_late)
        underway = _Underway(calls, self._doing, self._turns, num_blocks, calls.health.timeout_s, late)
        is_told = False

        def tell(ended: Ended) -> None:
            nonlocal is_told
            if not is_told:
                is_told = True
                over()
                answer = underway.ended(ended, problem_of, all_failed)
                self._give_bytes()
                then(answer)

        over = self._tasks.hold(_go_on if lends else partial(tell, _closed))
        try:
            is_begun = begin is not None and begin(tell)
        except BaseException as caught:  # noqa: BLE001 - whatever a medium raises, serving goes on without it
            is_programs = isinstance(caught, KeyboardInterrupt) or (is_told and isinstance(caught, SystemExit))
            if is_programs:
                loop.call_soon(_raise, caught)  # once what it came in has ended
            tell(_closed if is_programs else partial(_raise, caught))
            return
        if is_begun or is_told:
            return
        over()
        making = loop.create_task(_made(call), name=f"{self._doing} in {calls.health.name}")
        over = self._tasks.hold(_go_on if lends else making.cancel)
        making.add_done_callback(lambda made: tell(_end_of(made)))


class _ClosedMeanwhile(Exception):  # noqa: N818 - no error: how a call ends
    """Stands for the end of a call that the cache has ended."""


def _closed() -> NoReturn:
    raise _ClosedMeanwhile


def _raise(error: BaseException) -> NoReturn:
    raise error


class _Underway:
    """A call that has not returned.

    Attributes:
        doing: Which it is.
        is_let_go: Whether nothing waits for it any more: how it ends says nothing about the medium as it is now.
        is_raised: Whether whoever made it tells what goes wrong.
    """

    def __init__(
        self,
        calls: "Calls",
        doing: str,
        turns: "_Turns | None",
        num_blocks: int,
        timeout_s: float,
        on_late: Callable[[], None],
    ) -> None:
        """Count the call from now on; it is late after ``timeout_s``."""
        self.doing = doing
        self.is_let_go = self.is_raised = False
        self._calls = calls
        self._turns = turns
        self._num_blocks = num_blocks
        self._timeout_s = timeout_s
        self._on_late = on_late
        self._started = calls.health.clock()
        self._limit = calls.limit(timeout_s)
        self._limit.add(self)

    def ended(
        self, value: Callable[[], T], problem_of: Callable[[T], str], is_failure: Callable[[T], bool]
    ) -> Answer[T]:
        """Say how the call ended: with what ``value`` returns or raises."""
        calls, health = self._calls, self._calls.health
        seconds, error, has_failed = health.clock() - self._started, CLOSED, True
        made: T | None = None
        try:
            made = value()
            error = problem_of(made)
            has_failed = bool(error) or is_failure(made)
        except KeyboardInterrupt:
            raise  # the program's own, which happened to come while a backend ran
        except BaseException as caught:  # noqa: BLE001 - whatever a medium raises, serving goes on without it
            error = CLOSED if isinstance(caught, _ClosedMeanwhile) else in_words(caught)
        finally:
            self._limit.drop(self)
            if not self.is_let_go:
                if self._turns is not None:
                    self._turns.saw(seconds)
                health.ended(self.doing, seconds, is_late=self in calls.late, has_failed=has_failed)
                calls.late.discard(self)
            self.end_turn()
        if error and error != CLOSED and not self.is_raised:
            health.emit(TierFailed(health.name, self.doing, error, self._num_blocks))
        return Answer(None if error else made, error, seconds=seconds)

    def end_turn(self) -> None:
        """Let another call be made, once."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.give_back()

    def is_late(self) -> None:
        """Take note that its time is up."""
        self._calls.late.add(self)
        self._calls.health.late(self.doing, self._timeout_s)
        self._on_late()


class _TimeLimit:
    """One time limit, which tells its calls that they are late: by one timer for all, as nearly all end in time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due: dict[_Underway, float] = {}
        """When they are late, the first to be so first."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: _Underway) -> None:
        """Count a call's time from now on."""
        loop = asyncio.get_running_loop()
        due = self._due[call] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_at(due, self._look)

    def drop(self, call: _Underway) -> None:
        """Take note that it has ended."""
        self._due.pop(call, None)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer, now = None, loop.time()
        try:
            while self._due and self._due[first := next(iter(self._due))] <= now:
                del self._due[first]
                first.is_late()
        finally:
            if self._due:
                self._timer = loop.call_at(next(iter(self._due.values())), self._look)


class _Turns:
    """The turns of one kind of call: fewer calls are under way at once while they take long for their time limit.

    A medium that is slow, and well, must not be given so many calls that those at the end of its own line are late:
    it would be bypassed for them.
    """

    def __init__(self, health: StorageHealth, doing: str, room: Room) -> None:
        """Have turns of one kind; whoever waits for one does so in ``room``."""
        self.room = room
        self.breaker = health.breaker(doing)
        self._health = health
        self._doing = doing
        self._limit = float(_FIRST_CALLS)
        self.num_taken = 0

    async def take(self) -> bool:
        """Wait for a turn, and take it; False, and none taken, once the tier is bypassed."""
        return await self.room.acquire(self._attempt, Waiter(Kind.LOAD), lambda taken: self._undo(taken=taken))

    @property
    def has_room(self) -> bool:
        """Whether one more may be under way."""
        return self.num_taken < self._limit

    def begin(self) -> None:
        """Begin a turn."""
        self.num_taken += 1
        self.breaker.begin(self._doing)  # at once: of a tier that fails, one call is the probe

    def give_back(self) -> None:
        """End a turn."""
        self.num_taken -= 1
        self.room.changed()

    def not_made(self) -> None:
        """End a turn of which no call came."""
        self.breaker.not_made(self._doing)
        self.give_back()

    def _attempt(self) -> bool | None:
        if self._health.is_off(self._doing):
            return False
        if not self.has_room:
            return None
        self.begin()
        return True

    def _undo(self, *, taken: bool) -> None:
        if taken:
            self.not_made()

    def saw(self, seconds: float) -> None:
        """Take into account how long a call took."""
        if seconds > self._health.timeout_s / 2:
            self._limit = max(_FEWEST_CALLS, self._limit / 2)
        elif seconds < self._health.timeout_s / 4:
            self._limit = min(_MOST_CALLS, self._limit + 1 / self._limit)


def all_failed(outcomes: Sequence[Outcome]) -> bool:
    """Whether a call that answers so has failed."""
    return 0 < len(outcomes) == outcomes.count(Outcome.FAILED)


def outcomes_problem(num_blocks: int, allowed: tuple[Outcome, ...], outcomes: list[Outcome] | None) -> str:
    """Say what is wrong with a backend's answer: one outcome a block is right, of those that such a call has."""
    if outcomes is None:  # a backend of others may have forgotten to answer
        return f"no outcomes for {num_blocks} blocks"
    if len(outcomes) != num_blocks:
        return f"{len(outcomes)} outcomes for {num_blocks} blocks"
    if sum(map(outcomes.count, allowed)) < num_blocks:
        odd = next(each for each in outcomes if each not in allowed)
        return f"no outcome of such a call: {odd!r:.80}"
    return ""


def both(first: Callable[[], object], then: Callable[[], object]) -> Callable[[], None]:
    """Return what calls both."""

    def call() -> None:
        first()
        then()

    return call


def _go_on() -> None:
    pass
