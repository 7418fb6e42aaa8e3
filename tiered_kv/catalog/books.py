"""What can be found in one owned tier: which name is in which slot, and in what state the slot is.

A slot is free, *pending* (reserved: being filled, unreadable), *ready* (readable), or *doomed* (removed while someone
still uses it: unfindable at once, freed by its last user).

One thread owns the books, the event loop's, and it alone may change them; it reads without a lock. Any other thread may
read them too, inside ``with books.lock``, which the owner takes only while what can be found changes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.table import NameTable, Slots, counted
from tiered_kv.system import system
from tiered_kv.values.keys import Names

_CHUNK: Final = 1024  # names hashed at once: the fixed cost of a batch vanishes, and little is lost at an early miss
_LONG_RUN: Final = 64  # names in neighbouring slots that make it worth to look for another such run


class SlotState(IntEnum):
    """What a slot holds. `FREE` also answers for a name that is not there."""

    FREE = 0
    PENDING = 1
    READY = 2
    DOOMED = 3


# numpy takes 4 us longer to compare an array with a member of an enum than with a plain int.
FREE, PENDING, READY, DOOMED = map(int, SlotState)


class Books:
    """The names and states of a tier's slots, for reading; `TierIndex` writes them.

    Slots ``0 <= slot < max_slots`` are the tier's own, the ``num_bounce`` slots above them bounce slots.

    Attributes:
        max_slots: The most own slots that there can be.
        num_bounce: How many bounce slots there are.
        lock: Held by the owning thread while what can be found changes, and by any other thread while it reads. Nobody
            holds it for longer than a batch takes, save in `TierIndex.clear`, `TierIndex.resize` and at a restart.
    """

    def __init__(self, max_slots: int, num_bounce: int) -> None:
        """Make empty books."""
        total = max_slots + num_bounce
        self.max_slots = max_slots
        self.num_bounce = num_bounce
        self.lock = system().rlock()  # re-entrant: a signal's handler that reads, on the owning thread, must not wait
        self._table = NameTable(total)
        self._states = np.full(total + 1, FREE, dtype=np.uint8)  # the last one answers for slot -1: FREE, always
        self._found: tuple[Names, Slots] | None = None
        """Where `find` found names last, until others come or go: a transfer asks again and again about its own."""

    def find(self, names: Names) -> tuple[Slots, NDArray[np.uint8]]:
        """Return each name's slot, or -1, and the `SlotState` of that slot: PENDING, READY, or FREE where absent.

        The slots are read-only, and may be returned again. ``names`` are not changed any more by whoever asks.
        """
        found = self._found
        if found is None or (found[0] is not names and not _are_same(found[0], names)):
            slots = self._find(names)
            slots.flags.writeable = False
            self._found = found = names, slots
        return found[1], self._states[found[1]]

    def _find(self, names: Names) -> Slots:
        if len(names) == 1:
            return np.array([self._table.find_one(names.tobytes())])
        if len(names):
            first, run = self._ready_run(names)
            if run == len(names):
                return first + counted(run)
        return self._table.find(names)

    def state_of(self, name: bytes) -> int:
        """Return the `SlotState` of one name."""
        slot = self._table.find_one(name)
        return int(self._states[slot]) if slot >= 0 else FREE

    def ready(self, names: Names) -> NDArray[np.bool_]:
        """Say of each name whether its block can be read."""
        _, states = self.find(names)
        is_ready: NDArray[np.bool_] = states == READY
        return is_ready

    def unready_prefix(self, names: Names) -> int:
        """Count the leading names whose blocks cannot be read."""
        is_ready = self._states[self._table.find(names)] == READY
        first = is_ready.tobytes().find(1)
        return first if first >= 0 else len(names)

    def ready_prefix(self, names: Names) -> int:
        """Count the leading names whose blocks can be read."""
        if len(names) == 1:
            return int(self.state_of(names.tobytes()) == READY)
        done, run = 0, _LONG_RUN
        while run >= _LONG_RUN and done < len(names):
            _, run = self._ready_run(names[done:])
            done += run
        if run == 0:
            return done
        while done < len(names):
            slots = self._table.find(names[done : done + _CHUNK])
            unready = (self._states[slots] != READY).nonzero()[0]
            if len(unready):
                return done + int(unready[0])
            done += len(slots)
        return done

    def is_bounce(self, slots: Slots) -> NDArray[np.bool_]:
        """Say of each slot whether it is a bounce slot."""
        return slots >= self.max_slots

    def _ready_run(self, names: Names) -> tuple[int, int]:
        """Return the first name's slot and how many leading names are ready in it and its neighbours.

        A chain stored at once lies in neighbouring slots, and comparing those takes a tenth of the time of hashing.
        """
        first = self._table.find_one(names[0].tobytes())
        if first < 0:
            return first, 0
        run = self._table.run_at(first, names)
        unready = (self._states[first : first + run] != READY).nonzero()[0]
        return first, int(unready[0]) if len(unready) else run


def _are_same(names: Names, others: Names) -> bool:
    return len(names) == len(others) and names.tobytes() == others.tobytes()


@dataclass(frozen=True, slots=True)
class IndexStatistics:
    """Counts of slots at one moment: of the tier's own ones, unless they say otherwise.

    Each own slot is counted once in ``free + pending + ready + doomed + retired + withheld``.

    Attributes:
        num_slots: At the present capacity.
        free: Slots that hold nothing.
        ready: Readable blocks.
        evictable: Readable blocks that nobody uses and that are not dirty.
        leased: Slots under at least one lease, doomed ones included. A dirty block counts as leased.
        pending: Slots being filled.
        doomed: Removed blocks that still have a user.
        bounce_free: Bounce slots that hold nothing.
        retired: Slots beyond the present capacity that hold nothing.
        dirty: Blocks that wait to be written below.
        withheld: Slots that hold nothing and cannot be used for now, see `TierIndex.withhold`.
    """

    num_slots: int
    free: int
    ready: int
    evictable: int
    leased: int
    pending: int
    doomed: int
    bounce_free: int
    retired: int = 0
    dirty: int = 0
    withheld: int = 0


class Change(StrEnum):
    """How the set of a tier's own readable blocks changed: some came, or some went and why, or all went at once."""

    ADDED = "added"
    EVICTED = "evicted"
    REMOVED = "removed"
    EXPIRED = "expired"
    CORRUPT = "corrupt"
    LOST = "lost"
    CLEARED = "cleared"


OnChange = Callable[[Change, Names], None]
"""Is called on the owning thread once the books have changed, in the order of the changes. Must not raise, and must not
change the index. ``CLEARED`` comes with no names; every other change with at least one."""
