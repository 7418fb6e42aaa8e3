"""Who may move next at a tier: bytes in flight, given out by priority; the pace of its reads; wear by its writes.

A `Budget` bounds the bytes in flight in one place. Loads come first, then prefetches, stores and demotions. Lower
priorities may fill only a part of it, so that an urgent load never finds it full of theirs; and each kind of call may
always have one piece in flight. Who was overtaken sixteen times is asked before those of higher priorities, once: so
that none starves where a pace, or a medium that takes few calls at once, is never free.

`ReadSpeed` says how fast a storage tier reads now, as learned from its reads, for the choice between loading blocks and
computing them. A tier is taken for a pipe: a read that finds ``ahead`` bytes asked for before it, itself included,
takes ``first_s + ahead x byte_s``. Both numbers are fitted to the reads of late, by least squares with weights that
fade; what waits in the tier's line is part of ``ahead``, so the estimate rises and falls with the load. A read that
takes longer than that says so before it ends: whoever comes waits at least for as long. What was given up would have
taken longer than it was waited for, and that is remembered for a while. Loads read a few windows at a time, so they
also say how much more each of them is going to read: with these a load takes turns.

`Wear` bounds how much may be written to a medium that wears out by it, or is paid for by the byte: so many bytes a day.
"""

import asyncio
import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar, cast

T = TypeVar("T")
Give = Callable[[], None]
_LOOKS_AHEAD: Final = 16
_PASSES: Final = 16
_FIRST_HOLD_S: Final = 0.05
_LONGEST_HOLD_S: Final = 2.0
"""A window wants at most a quarter of the host's slots: so many get free within the longest hold, unless what has them
takes more than eight seconds."""
_OPEN: Final = 3
"""Times as long as a line was held up it is open before it is held up again."""


class Priority(enum.IntEnum):
    """The order in which transfers are served; lower goes first."""

    LOAD = 0
    PREFETCH = 1
    STORE = 2
    DEMOTE = 3


class Kind(enum.IntEnum):
    """What a transfer does, whatever its priority is."""

    LOAD = 0
    """Somebody waits for the blocks."""
    PREFETCH = 1
    STORE = 2
    CLEAN = 3
    """Writes down what waited, see `transfers.writedown.Cleaner`."""
    LOOK = 4
    """Reads for nobody who is to have the blocks: a scrub, or `explain`."""


_PRIORITIES: Final = (*Priority, Priority.DEMOTE)
"""That of each kind."""
_SHARE: Final = {Priority.LOAD: 1.0, Priority.PREFETCH: 0.75, Priority.STORE: 0.5, Priority.DEMOTE: 0.25}


class Waiter:
    """Someone who waits for a turn: what kind of transfer they are, and who goes first.

    Attributes:
        lends: Whether memory of the engine's own is lent to the call that they wait for, so that nothing ends it early.
    """

    __slots__ = ("_places", "is_given_up", "kind", "lends", "priority")

    def __init__(self, kind: Kind, priority: Priority | None = None, *, lends: bool = False) -> None:
        """Make a waiter; its priority is that of the kind if left out."""
        self.kind = kind
        self.lends = lends
        self.priority = _PRIORITIES[kind] if priority is None else priority
        self.is_given_up = False
        self._places: set[_Place] = set()

    @property
    def is_waiting(self) -> bool:
        """Whether it stands in a line."""
        return bool(self._places)

    def hurry(self, kind: Kind, priority: Priority) -> None:
        """Be of this kind and priority from now on, wherever this waits. It gets no slower by it."""
        is_faster = priority < self.priority
        if not is_faster and kind >= self.kind:
            return
        self.kind, self.priority = min(kind, self.kind), min(priority, self.priority)
        self._look_again(moves=is_faster)

    def nobody_waits(self) -> None:
        """Be a prefetch from now on if this was a load, until it is hurried again."""
        if self.kind is Kind.LOAD:
            self.kind, self.priority = Kind.PREFETCH, max(self.priority, Priority.PREFETCH)
            self._look_again(moves=True)

    def give_up(self) -> None:
        """Want nothing any more for which the turn has not come: who looks at that is told now, not in its turn."""
        self.is_given_up = True
        for place in list(self._places):
            place.room.attempt_now(place)

    def _look_again(self, *, moves: bool) -> None:
        for place in list(self._places):
            if moves:
                place.room.move(place)
            else:
                place.room.changed()


class _Place:
    """A waiter's place in a line of a room."""

    __slots__ = (
        "attempt",
        "hold",
        "hold_s",
        "lane",
        "line",
        "num_overtaken",
        "num_passed",
        "open_until",
        "room",
        "size",
        "turn",
        "waiter",
    )

    def __init__(self, room: "Room", lane: int, waiter: Waiter, attempt: Callable[[], Any], size: int) -> None:
        self.room = room
        self.lane = lane
        self.waiter = waiter
        self.attempt = attempt
        self.size = size
        self.turn: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.line: OrderedDict[_Place, None] = OrderedDict()
        self.num_passed = self.num_overtaken = 0
        self.hold: asyncio.TimerHandle | None = None
        self.hold_s = _FIRST_HOLD_S
        self.open_until = 0.0

    def enter(self, line: "OrderedDict[_Place, None]") -> None:
        """Stand at the end of a line."""
        self.line = line
        line[self] = None
        self.room.num_waiting += 1
        self.waiter._places.add(self)  # noqa: SLF001 - the two of them keep this together

    def leave(self) -> None:
        """Stand in no line any more."""
        if self in self.line:
            del self.line[self]
            self.room.num_waiting -= 1
        self.waiter._places.discard(self)  # noqa: SLF001 - the two of them keep this together
        if self.hold is not None:
            self.hold.cancel()
            self.num_passed, self.hold = 0, None  # in another line it begins anew

    @property
    def is_due(self) -> bool:
        """Whether so many of higher priorities were served meanwhile that it is its turn."""
        return self.num_overtaken >= _PASSES

    def was_passed(self) -> None:
        """Count one who was served first though later in line; after some, hold up the line for a while."""
        self.num_passed += 1
        loop = self.turn.get_loop()
        if self.num_passed >= _PASSES and loop.time() >= self.open_until:
            self.hold = loop.call_later(self.hold_s, self._let_pass)

    def _let_pass(self) -> None:
        self.open_until = self.turn.get_loop().time() + _OPEN * self.hold_s
        self.num_passed, self.hold, self.hold_s = 0, None, min(2 * self.hold_s, _LONGEST_HOLD_S)
        self.room.changed()


class Room:
    """Lines of waiters for something that each gets whole and at once, or waits for.

    There is one line for each lane and priority: who can be served in one lane does not wait for those in another. Of
    one lane those of higher priorities come first; but a first before which 16 were served is asked before all others.

    A line is served in its order, with one exception: who wants less than the first, and can have it, may go before a
    first that cannot be served. After 16 of these all that gets free is kept for the first, for a while, twice as long
    each time, up to two seconds; and between two such times the line is open for longer. So neither does what can never
    be had hold up the others, nor do they starve it.

    Call `changed` whenever there may be more to have. No call's time grows with the number of waiters.

    Attributes:
        num_waiting: How many wait.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        self._lines: tuple[dict[int, OrderedDict[_Place, None]], ...] = tuple({} for _ in Priority)  # each by lane
        self._is_serving = False
        self._num_changes = 0

    def is_wanted(self, lanes: Iterable[int]) -> bool:
        """Whether anyone waits in one of these lanes."""
        return self.num_waiting > 0 and any(line.get(lane) for lane in lanes for line in self._lines)

    async def acquire(
        self, attempt: Callable[[], T | None], waiter: Waiter, undo: Callable[[T], object], size: int = 1, lane: int = 0
    ) -> T:
        """Return what ``attempt`` gives once it is our turn and it gives something.

        Args:
            attempt: Takes it, or changes nothing and returns None. Called on the event loop, never concurrently.
            waiter: Which line to wait in.
            undo: Gives back what was taken for a waiter that was cancelled meanwhile.
            size: How much is wanted: who wants less may pass who wants more.
            lane: In which to wait.
        """
        got, place = self._take(attempt, waiter, size, lane)
        if place is None:
            return cast("T", got)
        try:
            won: T = await place.turn
        except BaseException:
            place.leave()
            if place.turn.done() and not place.turn.cancelled() and place.turn.exception() is None:
                undo(place.turn.result())
            self.changed()
            raise
        return won

    def take(
        self, attempt: Callable[[], T | None], waiter: Waiter, then: Callable[[T], object], size: int = 1, lane: int = 0
    ) -> T | None:
        """Return what ``attempt`` gives if it is our turn and it gives something now.

        Else wait as `acquire` does, without a task: ``then`` is told in the turn of the loop after ``attempt`` gives.
        """
        got, place = self._take(attempt, waiter, size, lane)
        if place is not None:
            place.turn.add_done_callback(lambda turn: then(turn.result()))
        return got

    def _take(
        self, attempt: Callable[[], T | None], waiter: Waiter, size: int, lane: int
    ) -> "tuple[T | None, _Place | None]":
        """Return what ``attempt`` gives, or None and the place in line."""
        num_changes = self._num_changes
        is_second = self.num_waiting and (
            any(lanes.get(lane) for lanes in self._lines[: waiter.priority + 1])
            or any(each.is_due for each in self._slower(waiter.priority, lane))
        )
        if not is_second and (got := attempt()) is not None:
            if self.num_waiting:
                self._overtake(waiter.priority, lane, 1)
            return got, None
        place = _Place(self, lane, waiter, attempt, size)
        place.enter(self._line(place))
        if is_second or num_changes < self._num_changes:  # else it has just been asked for in vain
            self.changed()
        return None, place

    def move(self, place: _Place) -> None:
        """Move a place to the end of the line that its waiter belongs to now."""
        place.leave()
        place.enter(self._line(place))
        self.changed()

    def attempt_now(self, place: _Place) -> None:
        """Serve a place out of its turn, if it can be: whoever wants nothing any more waits for nobody before it."""
        _is_served(place)
        self.changed()

    def _line(self, place: _Place) -> "OrderedDict[_Place, None]":
        """Return the line that a place belongs to now."""
        return self._lines[place.waiter.priority].setdefault(place.lane, OrderedDict())

    def _slower(self, priority: int, lane: int) -> list[_Place]:
        """Return the first of each line of lower priorities in a lane."""
        return [next(iter(line)) for lanes in self._lines[priority + 1 :] if (line := lanes.get(lane))]

    def _overtake(self, priority: int, lane: int, num_served: int) -> None:
        for each in self._slower(priority, lane):
            each.num_overtaken += num_served

    def changed(self) -> None:
        """Serve everyone who can be served now, line by line. A line's first waiter holds up only its own line."""
        self._num_changes += 1
        if not self.num_waiting or self._is_serving:  # whoever serves goes round once more
            return
        self._is_serving, num_seen = True, 0
        try:
            while num_seen < self._num_changes:
                num_seen = self._num_changes
                lines = [
                    (priority, lane, line)
                    for priority, lanes in enumerate(self._lines)
                    for lane, line in lanes.items()
                    if line
                ]
                for _, _, line in reversed(lines):
                    if line and (first := next(iter(line))).is_due:
                        _is_served(first)
                for priority, lane, line in lines:
                    if line:  # still: to serve one line may end a wait in another
                        self._overtake(priority, lane, _serve(line))
        finally:
            self._is_serving = False


def _serve(line: "OrderedDict[_Place, None]") -> int:
    """Serve those of a line who can be served; return how many."""
    first, num_served = next(iter(line)), 0
    while _is_served(first):
        num_served += 1
        if not line:
            return num_served
        first = next(iter(line))
    least = first.size
    for place in list(islice(line, 1, 1 + _LOOKS_AHEAD)) if len(line) > 1 else ():
        if first.hold is not None:
            break
        if place.size < least:  # as much, or more, has just been asked for in vain
            if _is_served(place):
                num_served += 1
                first.was_passed()
            else:
                least = place.size
    return num_served


def _is_served(place: _Place) -> bool:
    if not place.turn.done():
        try:
            got = place.attempt()
        except BaseException as error:  # noqa: BLE001 - it is for who waits, not for who gave something back
            place.turn.set_exception(error)
        else:
            if got is None:
                return False
            place.turn.set_result(got)
    place.leave()
    return True


class Budget:
    """Bytes in flight, at most ``limit`` of them, or one piece of each kind if that is more; and how fast they come.

    Attributes:
        scrubs: How fast the medium is scrubbed.
    """

    def __init__(
        self,
        limit: int,
        reads: "Pace | None" = None,
        writes: "Pace | None" = None,
        scrubs: "Bandwidth | None" = None,
    ) -> None:
        self.limit = limit
        self.scrubs = scrubs
        self.room = Room()
        self._in_flight = [0] * len(Kind)
        paces = {Kind.LOAD: reads, Kind.PREFETCH: reads, Kind.LOOK: reads, Kind.STORE: writes, Kind.CLEAN: writes}
        self._paces = {kind: pace for kind, pace in paces.items() if pace is not None and pace.is_limited}

    @property
    def in_flight(self) -> int:
        """Bytes given out."""
        return sum(self._in_flight)

    async def take(self, num_bytes: int, waiter: Waiter) -> Give:
        """Wait until ``num_bytes`` more may be in flight; return what gives them back, when it is first called."""
        attempt = partial(self.attempt, num_bytes, waiter)
        return await self.room.acquire(attempt, waiter, lambda give: give(), num_bytes)

    def attempt(self, num_bytes: int, waiter: Waiter) -> Give | None:
        """Have so many bytes in flight, and return what gives them back; None if they have to wait."""
        fits = sum(self._in_flight) + num_bytes <= self.limit * _SHARE[waiter.priority]
        if self._in_flight[waiter.kind] and not fits:
            return None
        pace = self._paces.get(waiter.kind)
        if pace is not None and not pace.take(num_bytes, self.room.changed):
            return None
        self._in_flight[waiter.kind] += num_bytes
        return partial(self._give, [num_bytes], waiter.kind)

    def _give(self, taken: list[int], kind: Kind) -> None:
        if taken:
            self._in_flight[kind] -= taken.pop()
            self.room.changed()


class Bandwidth:
    """A rate that several share. Unused bandwidth is not saved up; a large piece is let go at once and paid for later.

    Decides at once, never waits; for the event loop's thread.
    """

    def __init__(self, bytes_per_s: float | None, clock: Callable[[], float]) -> None:
        """Make a bandwidth; None is no limit."""
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


class Pace:
    """The limit of bytes a second of one tier in one direction. For the event loop's thread."""

    def __init__(self, bytes_per_s: float | None, clock: Callable[[], float]) -> None:
        """Make a pace; None is no limit."""
        self.is_limited = bytes_per_s is not None
        self._bytes = Bandwidth(bytes_per_s, clock)
        self._timer: asyncio.TimerHandle | None = None

    def take(self, num_bytes: int, try_again: Callable[[], None]) -> bool:
        """Let so many bytes begin to move, or have ``try_again`` called when they may; say whether they may now."""
        if wait_s := self._bytes.wait_s():
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._wake, try_again)
            return False
        self._bytes.take(num_bytes)
        return True

    def _wake(self, try_again: Callable[[], None]) -> None:
        self._timer = None
        try_again()


_FADE: Final = 0.9
"""Of the weight of each read before, at one more: some ten reads count."""
_SPREAD: Final = 0.05
"""How much sizes have to differ, relative to their mean, before time is split into one for each byte and the rest."""
_USUAL: Final = 2.0
"""Times as long as foretold a read may take before it is late."""
_HALF_LIFE_S: Final = 30.0
"""A tier that nobody has read from for long is taken for faster and faster, so that it is tried again."""
_GIVEN_UP_HALF_LIFE_S: Final = 5.0
"""Sooner where the last read did not end, and nothing is known of it but that it took long."""


@dataclass(frozen=True, eq=False)
class Read:
    """A read under way: when it began, and how many bytes the tier had to bring then, its own included."""

    num_bytes: int
    ahead: int
    started: float


@dataclass(frozen=True)
class Estimate:
    """What one more transfer would meet.

    Attributes:
        first_s: Seconds before its first byte: what was asked for before it has come.
        byte_s: Seconds for each byte.
        num_others: Transfers that go on reading, and with which it would take turns.
        others_bytes: What they are going to read, all together, beside what they have asked for.
    """

    first_s: float
    byte_s: float
    num_others: int
    others_bytes: int


@dataclass
class ReadSpeed:
    """How fast one tier brings one kind of block, learned from its reads. For the event loop's thread.

    Attributes:
        clock: Seconds, monotonic.
    """

    clock: Callable[[], float]
    _ahead: int = 0
    _weight: float = 0.0
    _sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])
    _seen_at: float = 0.0
    _plans: dict[object, int] = field(default_factory=dict)
    _planned: int = 0
    _underway: set[Read] = field(default_factory=set)
    _urgent: dict[Read, None] = field(default_factory=dict)
    """Those of them that wait for no other kind of read, the first one first."""
    _given_up_s: float = 0.0
    """How late the last one was that was given up, if none has gone well since."""
    _given_up_at: float = 0.0

    def begin(self, num_bytes: int, *, goes_first: bool = True) -> Read:
        """Count a read that is asked for now; `end` follows, however it goes.

        Args:
            num_bytes: Its own.
            goes_first: Whether it is served before others: what is put off for these is not late by it.
        """
        self._ahead += num_bytes
        read = Read(num_bytes, self._ahead, self.clock())
        self._underway.add(read)
        if goes_first:
            self._urgent[read] = None
        return read

    def give_up(self, read: Read) -> None:
        """Take note that nobody waits for a read any more, which has not ended; `end` follows."""
        if read in self._urgent and (late_s := self._lateness(read)) > self._given_up():
            self._given_up_s, self._given_up_at = late_s, self.clock()

    def end(self, read: Read, *, is_well: bool) -> None:
        """Count a read off, once, and learn from it if it brought blocks."""
        if read not in self._underway:
            return
        self._underway.remove(read)
        self._urgent.pop(read, None)
        self._ahead -= read.num_bytes
        if not is_well:
            return
        self._given_up_s = 0.0
        self._seen_at = now = self.clock()
        x, y = float(read.ahead), now - read.started
        self._weight = _FADE * self._weight + 1.0
        for at, value in enumerate((x, y, x * x, x * y)):
            self._sums[at] = _FADE * self._sums[at] + value

    def plan(self, who: object, num_bytes: int) -> None:
        """Say how much a transfer is going to read, beside what it has asked for: 0 once it asks for nothing more."""
        self._planned += num_bytes - self._plans.pop(who, 0)
        if num_bytes:
            self._plans[who] = num_bytes

    def estimate(self) -> Estimate | None:
        """Say what one more transfer would meet; None before anything was read, or takes long."""
        first = next(iter(self._urgent), None)
        late_s = max(self._given_up(), 0.0 if first is None else self._lateness(first))
        if not self._weight:
            return Estimate(late_s, 0.0, len(self._plans), self._planned) if late_s else None
        first_s, byte_s = self._usual()
        faded = 0.5 ** (max(0.0, self.clock() - self._seen_at) / _HALF_LIFE_S)
        first_s += self._ahead * byte_s
        return Estimate(faded * first_s + late_s, faded * byte_s, len(self._plans), self._planned)

    def _usual(self) -> tuple[float, float]:
        """Return what reads of late took before the first byte, and for each; 0 before any."""
        if not self._weight:
            return 0.0, 0.0
        x, y, xx, xy = (each / self._weight for each in self._sums)
        spread = xx - x * x
        byte_s = min(max(0.0, (xy - x * y) / spread), y / x) if spread > (_SPREAD * x) ** 2 else y / x
        return max(0.0, y - byte_s * x), byte_s

    def _lateness(self, read: Read) -> float:
        """Say for how long a read under way has been late."""
        first_s, byte_s = self._usual()
        return max(0.0, self.clock() - read.started - _USUAL * (first_s + read.ahead * byte_s))

    def _given_up(self) -> float:
        if not self._given_up_s:
            return 0.0
        faded: float = 0.5 ** ((self.clock() - self._given_up_at) / _GIVEN_UP_HALF_LIFE_S)
        return self._given_up_s * faded


_DAY_S: Final = 24 * 3600.0
_SAVED_UP_S: Final = 3600.0
"""What was not written for a while may be written at once, up to so long's share of the day."""


class Wear:
    """The limit of bytes a day that one backend writes, shared by its tiers. Decides at once, never waits.

    Bytes count from when they may be written, so that writes at once share what was saved up. One write of more than an
    hour's share is let go on when an hour's share is saved up, and paid for later.
    """

    def __init__(self, bytes_per_day: int | None, clock: Callable[[], float]) -> None:
        """Make a limit; None is no limit."""
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
