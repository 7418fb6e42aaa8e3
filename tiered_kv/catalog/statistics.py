"""What an index says of itself: how many slots hold what, and what changes."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from tiered_kv.keys import Names


@dataclass(frozen=True, slots=True)
class IndexStatistics:
    """Counts of slots at one moment.

    Each slot of the index is counted once in ``free + pending + ready + doomed + transient_free + retired``.

    Attributes:
        num_slots: The tier's own slots at its present capacity, transient ones not counted.
        free: Own slots that hold nothing.
        ready: Readable blocks, those in transient slots included.
        evictable: Readable blocks that nobody uses and that are not dirty.
        leased: Slots under at least one lease, doomed ones included. A dirty block counts as leased.
        pending: Slots being filled.
        doomed: Removed blocks that still have a user.
        transient_free: Transient slots that hold nothing.
        retired: Slots beyond the present capacity that hold nothing.
        dirty: Blocks that wait to be written below.
    """

    num_slots: int
    free: int
    ready: int
    evictable: int
    leased: int
    pending: int
    doomed: int
    transient_free: int
    retired: int = 0
    dirty: int = 0


class Change(StrEnum):
    """How the set of a tier's own readable blocks changed: some came, or some went and why, or all went at once."""

    ADDED = "added"
    EVICTED = "evicted"
    REMOVED = "removed"
    EXPIRED = "expired"
    CORRUPT = "corrupt"
    CLEARED = "cleared"


OnChange = Callable[[Change, Names], None]
"""Is called on the owning thread once the books have changed, in the order of the changes. Must not raise, and must not
change the index. ``CLEARED`` comes with no names; every other change with at least one."""
