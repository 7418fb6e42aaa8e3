"""Which accesses to memory are ordered, and which only happened to come in a good order: vector clocks, for tests.

Each *actor* (a stream, or the host) acts in order. What one actor learns of another, by a wait, an event, a submission
or the report of an ended copy, orders all the other did before. Two accesses of one region of which one writes, and
neither of which is ordered before the other, are a race, even where this run of the test got away with it.

Source: vector clocks as in Lamport, "Time, Clocks, and the Ordering of Events", and in dynamic race detectors.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

Clock = dict[str, int]
"""By actor, how much of what it did is known."""
Region = Hashable


@dataclass
class Actor:
    """Someone who does one thing after another. ``clock`` is what it knows, its own deeds included."""

    name: str
    clock: Clock = field(default_factory=dict)

    def act(self) -> Clock:
        """Do one more thing; return what is known with it."""
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return dict(self.clock)

    def learn(self, clock: Clock) -> None:
        """Come after all that ``clock`` knows."""
        for name, time in clock.items():
            self.clock[name] = max(time, self.clock.get(name, 0))

    def knows(self, access: "Access") -> bool:
        """Say whether ``access`` is ordered before what this actor does now."""
        return self.clock.get(access.actor, 0) >= access.time


@dataclass(frozen=True)
class Access:
    """Someone read or wrote a region: the ``time``-th thing that ``actor`` did."""

    actor: str
    time: int
    doing: str


@dataclass(frozen=True)
class Race:
    """Two accesses of one region that nothing orders."""

    region: Region
    first: Access
    second: Access


class Ordering:
    """Takes down who accesses what.

    Attributes:
        races: What went wrong, in the order of the accesses.
    """

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._written: dict[Region, Access] = {}
        self._read: defaultdict[Region, dict[str, Access]] = defaultdict(dict)

    def access(self, actor: Actor, regions: Iterable[Region], *, writes: bool) -> None:
        """Take down that ``actor`` reads or writes ``regions`` now."""
        access = Access(actor.name, actor.act()[actor.name], "write" if writes else "read")
        for region in regions:
            earlier = [self._written[region]] if region in self._written else []
            if writes:
                earlier += self._read.pop(region, {}).values()
                self._written[region] = access
            else:
                self._read[region][actor.name] = access
            self.races += [Race(region, each, access) for each in earlier if not actor.knows(each)]
