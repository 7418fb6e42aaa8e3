"""One owned tier's books: which block is in which slot, who reads it, who fills it, and what goes when room is needed.

A slot is free, *pending* (reserved: being filled, unreadable), *ready* (readable), or *doomed* (removed while someone
still uses it: unfindable at once, freed by its last user). Many may read a block under a `Lease`; one may fill a slot
under a `Reservation`; both are context managers and give everything back on any error or cancellation.

All calls take batches of names, decide at once and never wait. No call's time grows with the number of blocks in the
tier, save `clear`, `restore` and `names_in_order`, which say so. No locks: one thread owns an index, the event loop's.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.policies import Policy, make_policy
from tiered_kv.catalog.rights import Lease, Reservation
from tiered_kv.catalog.slots import FreeSlots
from tiered_kv.catalog.table import NameTable, Slots, first_occurrences
from tiered_kv.errors import CapacityError, ConfigurationError
from tiered_kv.keys import Names

_NONE: Slots = np.empty(0, dtype=np.int64)
_CHUNK = 1024  # names hashed at once: enough that the fixed cost of a batch vanishes, little when the first is a miss
_LONG_RUN = 64  # names in neighbouring slots that make it worth to look for another such run
_RESTORE_CHUNK = 1 << 16


class SlotState(IntEnum):
    """What a slot holds. `FREE` also answers for a name that is not there."""

    FREE = 0
    PENDING = 1
    READY = 2
    DOOMED = 3


# numpy takes 4 us longer to compare an array with a member of an enum than with a plain int.
_FREE, _PENDING, _READY, _DOOMED = map(int, SlotState)


@dataclass(frozen=True, slots=True)
class IndexStatistics:
    """Counts of slots at one moment: ``free + pending + ready + doomed + transient_free`` is all slots of the index.

    Attributes:
        num_slots: The tier's own slots, transient ones not counted.
        free: Own slots that hold nothing.
        ready: Readable blocks, those in transient slots included.
        evictable: Readable blocks that nobody uses.
        leased: Slots under at least one lease, doomed ones included.
        pending: Slots being filled.
        doomed: Removed blocks that still have a user.
        transient_free: Transient slots that hold nothing.
    """

    num_slots: int
    free: int
    ready: int
    evictable: int
    leased: int
    pending: int
    doomed: int
    transient_free: int


class TierIndex:
    """The blocks of one owned tier.

    Slots ``0 <= slot < num_slots`` are the tier's own. The ``num_transient`` slots above them are bounce slots: a block
    in one can be read only while it is leased, is freed by its last release, and is never evicted. ``num_slots`` may be
    0: then every block passes through transient slots.
    """

    def __init__(self, num_slots: int, *, num_transient: int = 0, policy: str | type[Policy] = "lru") -> None:
        """Make an empty index.

        Args:
            num_slots: Slots whose blocks stay until they are evicted.
            num_transient: Slots whose blocks stay while they are leased.
            policy: A policy's name, ``"lru"`` or ``"arc"``, or its class.

        Raises:
            ConfigurationError: A negative size, more than 2**31 - 2 slots, or no such policy.
        """
        total = num_slots + num_transient
        if min(num_slots, num_transient) < 0 or total > np.iinfo(np.int32).max - 1:
            raise ConfigurationError(
                f"an index holds 0 to 2**31 - 2 slots, got {num_slots} own, {num_transient} transient"
            )
        self.num_slots = num_slots
        self.num_transient = num_transient
        self._table = NameTable(total)
        self._policy = make_policy(policy, num_slots)
        self._free = FreeSlots(range(num_slots))
        self._transient_free = FreeSlots(range(num_slots, total))
        self._states = np.full(total + 1, _FREE, dtype=np.uint8)  # the last one answers for slot -1: FREE, always
        self._num_leases = np.full(total, 0, dtype=np.int32)
        self._was_used = np.full(total, fill_value=False)  # while leased: another's cold release must not chill it
        self._ready = self._pending = self._doomed = self._leased = 0

    # Reading: no side effects.

    def find(self, names: Names) -> tuple[Slots, NDArray[np.uint8]]:
        """Return each name's slot, or -1, and the `SlotState` of that slot: PENDING, READY, or FREE where absent."""
        if len(names) > 1:
            first, run = self._ready_run(names)
            if run == len(names):
                return np.arange(first, first + run), np.full(run, _READY, dtype=np.uint8)
        slots = self._table.find(names)
        return slots, self._states.take(slots)

    def ready(self, names: Names) -> NDArray[np.bool_]:
        """Say of each name whether its block can be read."""
        _, states = self.find(names)
        is_ready: NDArray[np.bool_] = states == _READY
        return is_ready

    def ready_prefix(self, names: Names) -> int:
        """Count the leading names whose blocks can be read."""
        done, run = 0, _LONG_RUN
        while run >= _LONG_RUN and done < len(names):
            _, run = self._ready_run(names[done:])
            done += run
        if run == 0:
            return done
        while done < len(names):
            slots = self._table.find(names[done : done + _CHUNK])
            unready = np.flatnonzero(self._states.take(slots) != _READY)
            if len(unready):
                return done + int(unready[0])
            done += len(slots)
        return done

    def names_in_order(self) -> tuple[Names, Slots]:
        """Return the tier's own readable blocks, the least recently used first, leased ones last. Walks the tier.

        Takes 0.2 s a million blocks: for a checkpoint at close, not for one in traffic.
        """
        leased = np.flatnonzero((self._states[: self.num_slots] == _READY) & (self._num_leases[: self.num_slots] > 0))
        slots = np.concatenate((self._policy.order(), leased))
        return self._table.names(slots), slots

    def statistics(self) -> IndexStatistics:
        """Count slots by what they hold."""
        return IndexStatistics(
            num_slots=self.num_slots,
            free=len(self._free),
            ready=self._ready,
            evictable=len(self._policy),
            leased=self._leased,
            pending=self._pending,
            doomed=self._doomed,
            transient_free=len(self._transient_free),
        )

    # Using blocks.

    def lease(self, names: Names) -> Lease:
        """Hold the ready ones of these blocks in place until the lease is released. Repeated names are harmless."""
        slots, states = self.find(names)
        slots = np.where(states == _READY, slots, -1)
        held = _unique(slots[slots >= 0])
        self._policy.park(self._own(held[self._num_leases[held] == 0])[::-1])
        self._hold(held)
        return Lease(slots, held, partial(self._release, is_use=True))

    def touch(self, names: Names) -> None:
        """Make the ready ones of these blocks the most recently used, the head of the batch most of all."""
        slots, states = self.find(names)
        used = _unique(slots[states == _READY])[::-1]
        is_leased = self._num_leases[used] > 0
        self._was_used[used[is_leased]] = True
        idle = used[~is_leased]
        self._policy.park(idle)
        self._policy.use(self._own(used))
        self._policy.unpark(idle)

    # Filling and emptying slots.

    def reserve(self, names: Names, *, transient: bool = False) -> Reservation:
        """Get a slot for every name that is neither ready nor pending, evicting other blocks if there is no room.

        The slots come in runs of neighbouring ids, ascending in batch order. A block of the batch itself is never
        evicted. Until the reservation commits a name, `find` says PENDING.

        Args:
            names: What is to be stored. Names that are there, and repeats, get slot -1.
            transient: Take transient slots instead of the tier's own; nothing is evicted for them.

        Raises:
            CapacityError: Too few slots can be had. Nothing has changed, recency included.
        """
        found, states = self.find(names)
        absent = np.flatnonzero(found < 0)
        wanted = absent[first_occurrences(names.take(absent, axis=0))] if len(absent) else absent
        if transient:
            evicted, taken = self._table.names(_NONE), self._take_transient(len(wanted))
        else:
            evicted, taken = self._make_room(len(wanted), keep=found[states == _READY])
        self._table.insert(names.take(wanted, axis=0), taken)
        self._states[taken] = _PENDING
        self._pending += len(taken)
        slots = np.full(len(names), -1, dtype=np.int64)
        slots[wanted] = taken
        return Reservation(slots, evicted, commit=self._commit, give_back=self._give_back)

    def remove(self, names: Names) -> int:
        """Make blocks unfindable at once; return how many were there.

        The slot of a leased block is freed by its last release. A pending block becomes doomed: it is never committed,
        and its slot is freed when its reservation closes.
        """
        found, _ = self.find(names)
        slots = _unique(found[found >= 0])[::-1]  # tail first, as they lie in the policy's queues
        is_ready = self._states[slots] == _READY
        is_idle = is_ready & (self._num_leases[slots] == 0)
        self._table.remove(slots)
        self._policy.park(slots[is_idle])
        self._states[slots] = _DOOMED
        num_ready = int(np.count_nonzero(is_ready))
        self._ready -= num_ready
        self._pending -= len(slots) - num_ready
        self._doomed += len(slots)
        self._free_doomed(slots[is_idle])
        return len(slots)

    def clear(self) -> None:
        """Remove every block. Takes time in the size of the tier: some 10 ms a million slots."""
        states = self._states[:-1]
        is_idle = (states == _READY) & (self._num_leases == 0)
        states[is_idle] = _FREE
        states[states != _FREE] = _DOOMED
        self._table.clear()
        self._policy.clear()
        self._free.reset(np.flatnonzero(states[: self.num_slots] == _FREE))
        self._ready = self._pending = 0
        self._doomed = int(np.count_nonzero(states))

    def restore(self, names: Names, slots: Slots) -> None:
        """Enter blocks that outlived a restart. Takes time in their number, about a second a million.

        Args:
            names: The least recently used first.
            slots: Where they are: own slots, free now.

        Raises:
            ConfigurationError: A name or a slot is there already, or twice in the batch, or not the tier's own. Nothing
                has changed.
        """
        if len(slots) and not (slots.min() >= 0 and slots.max() < self.num_slots):
            raise ConfigurationError(f"slots {slots.min()} to {slots.max()} in a tier of {self.num_slots} slots")
        num_taken = int(np.count_nonzero(self._states[slots]))
        num_known = int(np.count_nonzero(self._table.find(names) >= 0))
        num_repeats = 2 * len(slots) - len(first_occurrences(names)) - len(np.unique(slots))
        if num_taken or num_known or num_repeats:
            raise ConfigurationError(
                f"{len(slots)} blocks to restore: {num_taken} slots are not free, {num_known} names are known, "
                f"{num_repeats} are repeats"
            )
        for start in range(0, len(slots), _RESTORE_CHUNK):
            part = slice(start, start + _RESTORE_CHUNK)
            self._table.insert(names[part], slots[part])
            self._policy.add(slots[part], names[part])
            self._policy.unpark(slots[part])
        self._states[slots] = _READY
        self._ready += len(slots)
        self._free.reset(np.flatnonzero(self._states[: self.num_slots] == _FREE))

    # What rights do when they end.

    def _commit(self, slots: Slots) -> Lease:
        """Make the pending ones of these slots, -1 where there is none, ready, and lease them."""
        is_live = self._states.take(slots) == _PENDING
        filled = slots[is_live]
        self._states[filled] = _READY
        self._pending -= len(filled)
        self._ready += len(filled)
        own = self._own(filled)
        self._policy.add(own, self._table.names(own))
        self._hold(filled)
        # To be filled is not to be used: a policy that counts uses counts the second call for a block.
        return Lease(np.where(is_live, slots, -1), filled, partial(self._release, is_use=False))

    def _give_back(self, slots: Slots) -> None:
        is_pending = self._states[slots] == _PENDING
        pending = slots[is_pending]
        self._table.remove(pending)
        self._states[pending] = _DOOMED
        self._pending -= len(pending)
        self._doomed += len(pending)
        self._free_doomed(slots)

    def _hold(self, slots: Slots) -> None:
        self._leased += int(np.count_nonzero(self._num_leases[slots] == 0))
        self._num_leases[slots] += 1

    def _release(self, held: Slots, *, cold: bool, is_use: bool) -> None:
        tail_first = held[::-1]  # of a prefix the head is the most useful: it goes last
        if is_use and not cold:
            self._policy.use(self._own(tail_first))
        self._num_leases[tail_first] -= 1
        is_last = self._num_leases[tail_first] == 0
        if not cold:
            self._was_used[tail_first[~is_last]] = True
        idle = tail_first[is_last]
        self._leased -= len(idle)
        was_used = self._was_used[idle]
        self._was_used[idle] = False
        is_ready = self._states[idle] == _READY
        is_own = idle < self.num_slots
        if cold:
            self._policy.unpark(idle[is_ready & is_own & ~was_used], cold=True)
            self._policy.unpark(idle[is_ready & is_own & was_used])
        else:
            self._policy.unpark(idle[is_ready & is_own])
        passed = idle[is_ready & ~is_own]  # transient blocks live no longer than their leases
        self._table.remove(passed)
        self._states[passed] = _DOOMED
        self._ready -= len(passed)
        self._doomed += len(passed)
        self._free_doomed(idle[~(is_ready & is_own)])

    # Slots.

    def _ready_run(self, names: Names) -> tuple[int, int]:
        """Return the first name's slot and how many leading names are ready in it and its neighbours.

        A chain stored at once lies in neighbouring slots, and comparing those takes a tenth of the time of hashing.
        """
        first = self._table.find_one(names)
        if first < 0:
            return first, 0
        run = self._table.run_at(first, names)
        unready = np.flatnonzero(self._states[first : first + run] != _READY)
        return first, int(unready[0]) if len(unready) else run

    def _make_room(self, n: int, *, keep: Slots) -> tuple[Names, Slots]:
        """Take ``n`` own slots, evicting blocks outside ``keep`` if need be; return their names and the slots."""
        shortage = max(0, n - len(self._free))
        if not shortage:
            return self._table.names(_NONE), self._free.take(n)
        keep = np.unique(keep[self._num_leases[keep] == 0])
        num_evictable = len(self._policy) - len(keep)
        if shortage > num_evictable:
            raise CapacityError(f"{shortage} more slots needed, {num_evictable} evictable")
        victims = self._policy.victims(shortage, keep)
        names = self._table.names(victims)
        self._table.remove(victims)
        self._policy.evict(victims, names)
        self._states[victims] = _FREE
        self._ready -= shortage
        return names, np.sort(np.concatenate((self._free.take(n - shortage), victims)))

    def _take_transient(self, n: int) -> Slots:
        num_free = len(self._transient_free)
        if n > num_free:
            raise CapacityError(f"{n - num_free} more transient slots needed, none evictable")
        return self._transient_free.take(n)

    def _free_doomed(self, slots: Slots) -> None:
        self._states[slots] = _FREE
        self._doomed -= len(slots)
        self._free.give(slots[slots < self.num_slots])
        self._transient_free.give(slots[slots >= self.num_slots])

    def _own(self, slots: Slots) -> Slots:
        return slots[slots < self.num_slots] if self.num_transient else slots


def _unique(slots: Slots) -> Slots:
    """Drop repeats, keep the order of first occurrences."""
    ordered = np.sort(slots)
    if not (ordered[1:] == ordered[:-1]).any():
        return slots
    _, first = np.unique(slots, return_index=True)
    return slots[np.sort(first)]
