"""What changes in the tiers that a cache owns, in order: for routers that want to know which cache has which blocks.

A subscriber gets a `Snapshot` of each place first, then every change of it; applied one after another they give exactly
what the tiers hold (`Mirror` does that). Nobody waits for a subscriber: one that falls behind gets new snapshots.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self
from weakref import WeakSet

from typing_extensions import override

from tiered_kv.catalog.books import Change
from tiered_kv.tiers.fates import Fates, HasIndex, IndexPlace
from tiered_kv.values.keys import Names, rows_of

_MOST_NAMES: Final = 1 << 16
_NAMES_PER_CHANGE: Final = 8
"""What a queued change weighs beside its names: an object takes as much memory as so many."""


@dataclass(frozen=True, eq=False)
class TierChange:
    """Something changed in one place: one KV group of one rank in one tier.

    Attributes:
        sequence: 0, 1, 2, ... for each subscriber: whoever forwards changes can tell that one was lost.
        tier: The tier's name.
        group: The KV group.
        rank: The rank; workers that hold the same are one.
    """

    sequence: int
    tier: str
    group: int
    rank: int

    @property
    def place(self) -> tuple[str, int, int]:
        """Tier, group and rank."""
        return self.tier, self.group, self.rank


@dataclass(frozen=True, eq=False)
class Snapshot(TierChange):
    """All that is readable in the place now, whatever was known before. ``names`` is ``(n, 4)`` uint64."""

    names: Names


@dataclass(frozen=True, eq=False)
class Added(TierChange):
    """These can be read in the place from now on."""

    names: Names


@dataclass(frozen=True, eq=False)
class Removed(TierChange):
    """These are not in the place any more.

    ``why`` is "evicted", "removed" (by a call), "expired", "corrupt", or "lost" (with a disk).
    """

    names: Names
    why: str


@dataclass(frozen=True, eq=False)
class Cleared(TierChange):
    """Nothing is in the place any more."""


class Changes(ABC):
    """The changes of one cache, for one subscriber: ``async for change in kv.events()``. For the event loop's thread.

    It is unsubscribed when nobody refers to it, as after the loop over it is left. Ends when the cache is closed. Where
    several tasks iterate over one of these, each change goes to one of them.

    Attributes:
        num_overflows: How often it fell behind, and began again with snapshots.
    """

    num_overflows: int

    @property
    @abstractmethod
    def places(self) -> tuple[tuple[str, int, int], ...]:
        """The places that the changes tell of: tier, group and rank of each, the fastest tier first."""

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> TierChange: ...


class OwnChanges(Changes):
    """The changes of a cache in this process, for one subscriber."""

    def __init__(self, tiers: Mapping[IndexPlace, HasIndex], max_names: int) -> None:
        """Made by `Subscribers` only."""
        self.num_overflows = 0
        self._tiers = tiers
        self._max_names = max_names
        self._unseen = dict.fromkeys(tiers)  # places that a snapshot is due of; an ordered set
        self._queue: deque[tuple[IndexPlace, Change, Names]] = deque()
        self._weight = 0
        self._sequence = 0
        self._has_ended = False
        self._woken = asyncio.Event()

    @property
    @override
    def places(self) -> tuple[tuple[str, int, int], ...]:
        return tuple((place.tier, place.group, place.rank) for place in self._tiers)

    @override
    async def __anext__(self) -> TierChange:
        while not self._has_ended and not self._unseen and not self._queue:
            self._woken.clear()
            await self._woken.wait()
        if self._has_ended:
            raise StopAsyncIteration
        change = self._snapshot() if self._unseen else self._next()
        self._sequence += 1
        return change

    def tell(self, place: IndexPlace, change: Change, names: Names) -> None:
        """Queue a change, unless a snapshot will tell."""
        if place in self._unseen:
            return
        self._queue.append((place, change, names))
        self._weight += len(names) + _NAMES_PER_CHANGE
        if self._weight > self._max_names:
            self.num_overflows += 1
            self.start_over()
        self._woken.set()

    def start_over(self) -> None:
        """Begin again with a snapshot of each place; those that are due one come first, else some never get theirs."""
        self._queue.clear()
        self._weight = 0
        self._unseen = dict.fromkeys([*self._unseen, *self._tiers])
        self._woken.set()

    def end(self) -> None:
        """Give nothing more."""
        self._has_ended = True
        self._woken.set()

    def _snapshot(self) -> TierChange:
        place = next(iter(self._unseen))
        del self._unseen[place]
        names, _ = self._tiers[place].index.readable()
        return Snapshot(self._sequence, place.tier, place.group, place.rank, names)

    def _next(self) -> TierChange:
        place, change, names = self._queue.popleft()
        self._weight -= len(names) + _NAMES_PER_CHANGE
        where = self._sequence, place.tier, place.group, place.rank
        match change:
            case Change.ADDED:
                return Added(*where, names)
            case Change.CLEARED:
                return Cleared(*where)
            case _:
                return Removed(*where, names, change.value)


def places_in(fates: Fates) -> dict[IndexPlace, HasIndex]:
    """Return the places of a cache in which blocks may stay: in a medium that is not open yet, too."""
    return {place: tier for place, tier in fates.tiers.items() if tier.may_hold_blocks}


class Subscribers:
    """The subscribers of one cache. Without any, no change costs anything."""

    def __init__(self, fates: Fates) -> None:
        self._fates = fates
        self._subscribers: WeakSet[OwnChanges] = WeakSet()

    def subscribe(self, max_names: int = _MOST_NAMES) -> OwnChanges:
        """Return the changes from now on; about ``max_names`` names are kept for a subscriber that is slow."""
        changes = OwnChanges(places_in(self._fates), max_names)
        self._subscribers.add(changes)
        if self._tell not in self._fates.listeners:
            self._fates.listeners.append(self._tell)
        return changes

    def start_over(self) -> None:
        """Begin again with snapshots: the names that routers look for are others now."""
        for each in list(self._subscribers):
            each.start_over()

    def close(self) -> None:
        """End the changes of all subscribers."""
        for each in list(self._subscribers):
            each.end()

    def _tell(self, place: IndexPlace, change: Change, names: Names) -> None:
        for each in list(self._subscribers):
            each.tell(place, change, names)
        if not self._subscribers:
            self._fates.listeners = [each for each in self._fates.listeners if each != self._tell]


class Mirror:
    """What a cache's tiers hold, kept up to date by its changes. Needs nothing of the cache: it may live elsewhere."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int, int], set[bytes]] = {}

    def apply(self, change: TierChange) -> None:
        """Take a change into account; each once, in order."""
        held = self._held.setdefault(change.place, set())
        match change:
            case Snapshot(names=names):
                self._held[change.place] = set(rows_of(names))
            case Added(names=names):
                held.update(rows_of(names))
            case Removed(names=names):
                held.difference_update(rows_of(names))
            case Cleared():
                held.clear()

    def count(self, tier: str | None = None) -> int:
        """Count the blocks in one tier, or in all; a block counts in each tier that has it."""
        return sum(len(held) for (name, _, _), held in self._held.items() if tier in (None, name))

    def prefix(self, names: Names, tier: str | None = None) -> int:
        """Count the leading names that are in one tier, or in any.

        Args:
            names: ``(n, 4)``, as ``kv.namespace(...).names(keys)`` makes them.
            tier: Its name.
        """
        places = [held for (name, _, _), held in self._held.items() if tier in (None, name)]
        rows = rows_of(names)
        return next((n for n, row in enumerate(rows) if not any(row in held for held in places)), len(rows))
