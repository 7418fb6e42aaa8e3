"""One owned tier's books: which block is in which slot, who reads it, who fills it, and what goes when room is needed.

Many may read a block under a `Lease`; one may fill a slot under a `Reservation`; both are context managers and give
everything back on any error or cancellation. A readable block that has no copy below yet can be marked *dirty*: it
stays until it is taken to be written there.

All calls take batches of names and decide at once. No call's time grows with the number of blocks in the tier, save
`clear`, `resize`, `restore`, `withhold` and `names_in_order`, which say so.

One thread owns an index, the event loop's. Others may read what `Books` says they may.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.books import DOOMED, FREE, PENDING, READY, Change, OnChange
from tiered_kv.catalog.leases import Lease, Reservation
from tiered_kv.catalog.occupancy import NO_SLOTS, Occupancy, unique
from tiered_kv.catalog.policies import Policy, make_policy
from tiered_kv.catalog.policies.guarded import GuardedPolicy
from tiered_kv.catalog.slots import Expiry, SlotQueue
from tiered_kv.catalog.table import Slots, first_occurrences
from tiered_kv.errors import ClosedError, ConfigurationError
from tiered_kv.hints import ReuseHint
from tiered_kv.keys import Names
from tiered_kv.system import system

_RESTORE_CHUNK: Final = 1 << 16
_LOOKED_AT: Final = 1 << 14
"""Slots, by one call of `TierIndex.ready_from`."""


class TierIndex(Occupancy):
    """The blocks of one owned tier.

    Of its own slots those below ``num_slots`` are in use; `resize` moves that end. A block in a bounce slot can be read
    only while it is leased, is freed by its last release, and is never evicted.

    Attributes:
        num_slots: The present capacity; may be 0: then every block passes through bounce slots.
        ttl_s: For how long a block is kept, or None.
        on_change: Is told whatever changes of the tier's own readable blocks, if not None.
        on_left: Takes over the slots of blocks that leave, if not None; see `Occupancy`.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        max_slots: int | None = None,
        num_transient: int = 0,
        policy: str | type[Policy] = "lru",
        ttl_s: float | None = None,
        clock: Callable[[], float] | None = None,
        write_back: bool = False,
        on_change: OnChange | None = None,
    ) -> None:
        """Make an empty index.

        Args:
            num_slots: Slots whose blocks stay until they are evicted.
            max_slots: The most that `resize` may make of them; everything is allocated for so many. By default
                ``num_slots``.
            num_transient: Slots whose blocks stay while they are leased.
            policy: A policy's name, as `make_policy` takes it, or a class of one's own, which is guarded.
            ttl_s: After so many seconds from its commit a block is `expire`'s to remove. Takes 4 bytes a slot.
            clock: What tells the seconds; the system's by default.
            write_back: Blocks may be marked dirty. Takes 8 bytes a slot.
            on_change: See the attribute.

        Raises:
            ConfigurationError: A negative size, more than 2**31 - 2 slots, no such policy, or a ``ttl_s`` of 0 or less.
        """
        max_slots = num_slots if max_slots is None else max_slots
        total = max_slots + num_transient
        if not 0 <= num_slots <= max_slots or num_transient < 0 or total > np.iinfo(np.int32).max - 1:
            raise ConfigurationError(
                f"an index holds 0 to 2**31 - 2 slots, got {num_slots} own, {max_slots} at most, "
                f"{num_transient} transient"
            )
        clock = clock or system().monotonic
        super().__init__(
            num_slots,
            max_slots,
            num_transient,
            _policy_of(policy, max_slots),
            None if ttl_s is None else Expiry(max_slots, ttl_s, clock),
            SlotQueue(max_slots if write_back else 0),
            on_change,
        )
        self.ttl_s = ttl_s
        self._clock = clock
        self._opened_s = clock()
        self._write_back = write_back

    # Reading more than `Books` does: for the owning thread alone.

    def names_in_order(self) -> tuple[Names, Slots]:
        """Return the tier's own readable blocks, the least recently used first, leased ones last. Walks the tier.

        Takes 0.2 s a million blocks: for a checkpoint at close, not for one in traffic.
        """
        leased = np.flatnonzero((self._states[: self.num_slots] == READY) & (self._num_leases[: self.num_slots] > 0))
        slots = np.concatenate((self._policy.order(), leased))
        return self._table.names(slots), slots

    def ready_from(self, start: int, limit: int) -> tuple[Names, Slots, int]:
        """Return up to ``limit`` of the tier's own readable blocks in the order of their slots, from slot ``start`` on.

        Looks at few slots, so that it takes some 20 us; there may be none among them.

        Returns:
            Names, slots, and where to go on.
        """
        stop = min(start + _LOOKED_AT, self.num_slots)
        slots = start + np.flatnonzero(self._states[start:stop] == READY)[:limit]
        return self._table.names(slots), slots, int(slots[-1]) + 1 if len(slots) == limit else stop

    def idle_retired(self, start: int, stop: int) -> Slots:
        """Return those of the slots ``start <= slot < stop`` beyond the capacity that hold nothing, ascending."""
        start, stop = max(start, self.num_slots), min(stop, self.max_slots)
        return start + np.flatnonzero(self._states[start:stop] == FREE) if start < stop else NO_SLOTS

    # Using blocks.

    def lease(self, names: Names) -> Lease:
        """Hold the ready ones of these blocks in place until the lease is released. Repeated names are harmless."""
        slots, states = self.find(names)
        is_ready = states == READY
        if is_ready.all():
            held = unique(slots)
        else:
            slots = np.where(is_ready, slots, -1)
            held = unique(slots[is_ready])
        num_leases = self._num_leases.take(held)
        idle = held if not num_leases.any() else held[num_leases == 0]
        self._want(held)
        self._policy.park(self._own(idle)[::-1])
        self._leased += len(idle)
        self._num_leases[held] = num_leases + 1
        return Lease(slots, held, partial(self._release, is_use=True))

    def touch(self, names: Names) -> None:
        """Make the ready ones of these blocks the most recently used, the head of the batch most of all."""
        slots, states = self.find(names)
        used = unique(slots[states == READY])[::-1]
        is_leased = self._num_leases[used] > 0
        self._was_used[used[is_leased]] = True
        idle = used[~is_leased]
        self._want(used)
        self._policy.park(idle)
        self._policy.use(self._own(used))
        self._policy.unpark(idle)

    def hint(self, names: Names, hint: ReuseHint) -> None:
        """Take note of what a caller says of the ready ones of these blocks. Is no use of them.

        What is not expected at all goes first, from when nobody leases it; until it is leased, touched or stored again.
        """
        slots, states = self.find(names)
        told = self._own(unique(slots[states == READY])[::-1])
        idle = told[self._num_leases[told] == 0]
        is_unwanted = hint.probability == 0
        self._has_unwanted |= is_unwanted
        self._is_unwanted[told] = is_unwanted
        self._policy.park(idle)
        self._policy.hint(told, hint, self._clock() - self._opened_s)
        self._policy.unpark(idle, cold=is_unwanted)

    # Filling and emptying slots.

    def reserve(self, names: Names, *, transient: bool = False, taker: int = 0) -> Reservation:
        """Get a slot for every name that is neither ready nor pending, evicting other blocks if there is no room.

        The slots come in runs of neighbouring ids, ascending in batch order. A block of the batch itself is never
        evicted. Until the reservation commits a name, `find` says PENDING.

        Args:
            names: What is to be stored. Names that are there, and repeats, get slot -1.
            transient: Take transient slots instead of the tier's own; nothing is evicted for them.
            taker: On whose account these are, from 0 to 127: `num_transient_taken` counts them.

        Raises:
            CapacityError: Too few slots can be had. Nothing has changed, recency included.
        """
        found, states = self.find(names)
        absent = np.flatnonzero(found < 0)
        wanted = absent[first_occurrences(names.take(absent, axis=0))] if len(absent) else absent
        with self.lock:
            if transient:
                evicted, taken = self._table.names(NO_SLOTS), self._take_transient(len(wanted), taker)
            else:
                evicted, taken = self._make_room(len(wanted), keep=found[states == READY])
            self._table.insert(names.take(wanted, axis=0), taken)
            self._states[taken] = PENDING
        self._pending += len(taken)
        self._tell(Change.EVICTED, evicted)
        slots = np.full(len(names), -1, dtype=np.int64)
        slots[wanted] = taken
        return Reservation(slots, evicted, commit=self._commit, give_back=self._give_back)

    def fits(self, names: Names) -> bool:
        """Say whether `reserve` would find room now for what is absent of a batch. Changes nothing."""
        found, states = self.find(names)
        absent = np.flatnonzero(found < 0)
        num_wanted = len(first_occurrences(names.take(absent, axis=0))) if len(absent) else 0
        num_evictable = len(self._policy) - len(self._idle(found[states == READY]))
        return num_wanted <= len(self._free) + num_evictable

    def remove(self, names: Names, why: Change = Change.REMOVED, *, withhold: bool = False) -> int:
        """Make blocks unfindable at once; return how many were there.

        The slot of a leased block is freed by its last release. A pending block becomes doomed: it is never committed,
        and its slot is freed when its reservation closes.

        Args:
            names: Of the blocks; others and repeats are harmless.
            why: What ``on_change`` is told.
            withhold: Let what is there stay: ``on_left`` is not called, and no block is put into these slots any more
                until `use_again`, or `withhold` names others.
        """
        found, _ = self.find(names)
        slots = unique(found[found >= 0])
        if withhold:  # before they are free: no free slot is withheld
            if self._withheld is None:
                self._withheld = np.zeros(self.max_slots, np.bool_)
            self._withheld[self._own(slots)] = True
        self._remove(slots[::-1], why, has_left=not withhold)
        return len(slots)

    def expire(self, *, limit: int = 1 << 16) -> Names:
        """Remove blocks older than ``ttl_s`` among the next ``limit`` slots, as `remove` does; return their names.

        Call it again and again: it goes round the tier. A block can be read until then, so it lives at most for
        ``ttl_s`` and the time of one round. Removes at most 4,096 blocks a call, so that no call takes long.

        Returns:
            ``(n, 4)``; none where there is no ``ttl_s``.
        """
        if self._expiry is None:
            return self._table.names(NO_SLOTS)
        slots = self._expiry.overdue(self.num_slots, limit)
        return self._remove(slots[self._states[slots] == READY][::-1], Change.EXPIRED)

    def resize(self, num_slots: int) -> Names:
        """Change the tier's capacity, up to ``max_slots``; return the names of the readable blocks that had to go.

        The slots from ``num_slots`` on are given up, whatever is in them: their blocks are removed as by `remove`, and
        no such slot is used again until the capacity is raised. Takes some 1 ms a million slots of the new capacity
        and 0.6 us a block that goes: where many go, resize step by step.

        Raises:
            ConfigurationError: ``num_slots`` is negative or more than ``max_slots``. Nothing has changed.
        """
        if not 0 <= num_slots <= self.max_slots:
            raise ConfigurationError(f"{num_slots} slots in an index of 0 to {self.max_slots}")
        states = self._states[num_slots : self.num_slots]
        given_up = num_slots + np.flatnonzero((states == READY) | (states == PENDING))
        self.num_slots = num_slots
        evicted = self._remove(given_up[::-1], Change.EVICTED)
        self._find_free()
        self._policy.resize(num_slots)
        return evicted

    def withhold(self, is_withheld: NDArray[np.bool_] | None) -> int:
        """Put no blocks into some slots any more, until this is called again; return how many blocks that loses.

        Blocks in them are removed as by `remove`; ``on_left`` is not called, as nothing of them is left. Takes time in
        the size of the tier: some 5 ms a million slots.

        Args:
            is_withheld: ``(max_slots,)``, which ones; None: all can be used.
        """
        self._withheld = None if is_withheld is None else is_withheld.copy()
        lost = 0
        if is_withheld is not None:
            states = self._states[: self.num_slots]
            held = np.flatnonzero(is_withheld[: self.num_slots] & ((states == READY) | (states == PENDING)))
            lost = len(self._remove(held[::-1], Change.LOST, has_left=False))
        self._find_free()
        return lost

    def use_again(self, slots: Slots) -> None:
        """Put blocks into these of the tier's own slots again, if they were withheld."""
        if self._withheld is None:
            return
        slots = unique(slots[self._withheld[slots]])
        self._withheld[slots] = False
        self._free.give(slots[(slots < self.num_slots) & (self._states[slots] == FREE)])

    def clear(self) -> None:
        """Remove every block. Takes time in the size of the tier: some 10 ms a million slots."""
        self._forget_dirty(self._dirty.head(len(self._dirty)), Change.CLEARED)
        states = self._states[:-1]
        with self.lock:
            is_idle = (states == READY) & (self._num_leases == 0)
            states[is_idle] = FREE
            states[states != FREE] = DOOMED
            self._table.clear()
        self._policy.clear()
        self._find_free()
        self._ready = self._pending = 0
        self._doomed = int(np.count_nonzero(states))
        if self.on_change is not None:
            self.on_change(Change.CLEARED, self._table.names(NO_SLOTS))

    def restore(self, names: Names, slots: Slots, *, ages_s: NDArray[np.float32] | None = None) -> None:
        """Enter blocks that outlived a restart. Takes time in their number, about a second a million.

        Args:
            names: The least recently used first.
            slots: Where they are: own slots, free now.
            ages_s: ``(n,)``, for how long each has been there; by default all count as new.

        Raises:
            ConfigurationError: A name or a slot is there already, or twice in the batch, or not the tier's own. Nothing
                has changed.
        """
        if len(slots) and not (slots.min() >= 0 and slots.max() < self.num_slots):
            raise ConfigurationError(f"slots {slots.min()} to {slots.max()} in a tier of {self.num_slots} slots")
        num_taken = int(np.count_nonzero(self._states[slots]))
        num_known = int(np.count_nonzero(self._table.find(names) >= 0))
        num_repeats = 2 * len(slots) - len(first_occurrences(names)) - len(unique(slots))
        if num_taken or num_known or num_repeats:
            raise ConfigurationError(
                f"{len(slots)} blocks to restore: {num_taken} slots are not free, {num_known} names are known, "
                f"{num_repeats} are repeats"
            )
        for start in range(0, len(slots), _RESTORE_CHUNK):
            part = slice(start, start + _RESTORE_CHUNK)
            with self.lock:
                self._table.insert(names[part], slots[part])
                self._states[slots[part]] = READY
            self._want(slots[part])
            self._policy.add(slots[part], names[part])
            self._policy.unpark(slots[part])
        self._ready += len(slots)
        self._find_free()
        if self._expiry is not None:
            self._expiry.start(slots, 0.0 if ages_s is None else ages_s)
        self._tell(Change.ADDED, names)

    # Blocks that have no copy below yet.

    def mark_dirty(self, lease: Lease, slots: Slots | None = None) -> Slots:
        """Keep leased blocks of the tier's own, after the lease too, until `take_dirty` hands them out.

        What is removed meanwhile, by name, age, resizing or clearing, is no longer dirty: nobody wants it below. Blocks
        that are dirty already keep their place in the line.

        Args:
            lease: Over the blocks.
            slots: Those of its slots that are meant; all by default.

        Returns:
            The slots of the blocks that were not dirty and are now.

        Raises:
            ConfigurationError: The index was not made with ``write_back=True``.
            ClosedError: The lease is released: its slots may be another's by now.
        """
        if not self._write_back:
            raise ConfigurationError("mark_dirty() on an index made without write_back=True")
        if lease.is_released:
            raise ClosedError("mark_dirty() of a lease that is released: its slots may be another's by now")
        slots = lease.slots if slots is None else slots
        slots = self._own(unique(slots[slots >= 0]))
        fresh: Slots = slots[(self._states[slots] == READY) & ~self._dirty.holds(slots)]
        self._hold(fresh)
        self._dirty.push(fresh)
        return fresh

    def oldest_dirty(self, n: int) -> Slots:
        """Return the slots of the blocks that `take_dirty` would take."""
        return self._dirty.head(n)

    def is_dirty(self, names: Names) -> NDArray[np.bool_]:
        """Say of each name whether its block is dirty."""
        found = np.zeros(len(names), np.bool_)
        if len(self._dirty):
            slots, _ = self.find(names)
            own = np.flatnonzero((slots >= 0) & ~self.is_transient(slots))
            found[own] = self._dirty.holds(slots[own])
        return found

    def take_dirty(self, n: int) -> tuple[Names, Lease]:
        """Take the ``n`` blocks that are dirty for longest, or all if there are fewer, to be written below.

        Returns:
            Their names, and a lease over them: from its release on they can be evicted, unless `mark_dirty` puts them
            back first, behind all others.
        """
        slots = self._dirty.head(n)
        self._dirty.remove(slots)
        return self._table.names(slots), Lease(slots, slots, partial(self._release, is_use=False))


def _policy_of(policy: str | type[Policy], num_slots: int) -> Policy:
    """Make a policy; one of the program's own is guarded."""
    made = make_policy(policy, num_slots)
    return made if isinstance(policy, str) else GuardedPolicy(made)
