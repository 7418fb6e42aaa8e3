"""One owned tier's books: which block is in which slot, who reads it, who fills it, and what goes when room is needed.

Many may read a block under a `Lease`; one may fill a slot under a `Reservation`; both are context managers and give
everything back on any error or cancellation. A readable block that has no copy below yet can be marked *dirty*: it
stays until it is taken to be written there.

A slot goes from free to pending, to ready, to doomed and free again. `TierIndex` ends with these steps, each of which
keeps all that belongs to it in agreement: names and states, leases, the order of eviction, dirty blocks, free slots and
counts.

All calls take batches of names and decide at once. No call's time grows with the number of blocks in the tier, save
`clear`, `resize`, `restore`, `withhold`, `readable` and `names_in_order`, which say so.

One thread owns an index, the event loop's. Others may read what `Books` says they may.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.books import DOOMED, FREE, PENDING, READY, Books, Change, IndexStatistics, OnChange, SlotState
from tiered_kv.catalog.leases import Lease, Reservation
from tiered_kv.catalog.policies import Policy
from tiered_kv.catalog.policies.make_policy import guarded_policy
from tiered_kv.catalog.slots import Expiry, FreeSlots, SlotQueue, ascending
from tiered_kv.catalog.table import Slots, absent_from, first_occurrences, names_at, unique
from tiered_kv.system import system
from tiered_kv.values.errors import CapacityError, ClosedError, ConfigurationError
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.keys import Names

NO_SLOTS: Slots = np.empty(0, dtype=np.int64)
_NO_NAMES: Final[Names] = np.empty((0, 4), dtype=np.uint64)
_RESTORE_CHUNK: Final = 1 << 16
_LOOKED_AT: Final = 1 << 14
"""Slots, by one call of `TierIndex.ready_from`."""
_MOST_TAKERS: Final = 128
_UNWANTED: Final = 1
"""By a hint."""
_RESIDENT: Final = 2
"""The engine has the block, too."""
OnLeft = Callable[[Names, Lease], None]
"""Is called on the owning thread once blocks of the tier's own that were readable have left the books, with their names
and a lease that keeps their slots: it is the callee's to release. Must not raise, and must not change the index."""


class TierIndex(Books):
    """The blocks of one owned tier, for the thread that owns it.

    Of its own slots those below ``num_slots`` are in use; `resize` moves that end. A block in a bounce slot can be read
    only while it is leased, is freed by its last release, and is never evicted.

    Attributes:
        num_slots: The present capacity; may be 0: then every block passes through bounce slots.
        ttl_s: For how long a block is kept, or None.
        bounce_free: The bounce slots that hold nothing.
        on_change: Is told whatever changes of the tier's own readable blocks, if not None.
        on_left: Takes over the slots of blocks that leave, if not None, whatever they leave for: until it has let go of
            them nothing is put there. Not of those that make room for others, whose slots are filled at once, nor of
            those whose slots are withheld, nor of all that `clear` removes.
        on_undirtied: Is told which blocks are dirty no more though nobody took them, in which slots, and why, if not
            None.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        max_slots: int | None = None,
        num_bounce: int = 0,
        policy: str | type[Policy] = "lru",
        ttl_s: float | None = None,
        clock: Callable[[], float] | None = None,
        write_back: bool = False,
    ) -> None:
        """Make an empty index.

        Args:
            num_slots: Slots whose blocks stay until they are evicted.
            max_slots: The most that `resize` may make of them; everything is allocated for so many. By default
                ``num_slots``.
            num_bounce: Slots whose blocks stay while they are leased.
            policy: A policy's name, as `make_policy` takes it, or a class of one's own, which is guarded.
            ttl_s: After so many seconds from its commit a block is `expire`'s to remove. Takes 4 bytes a slot.
            clock: What tells the seconds; the system's by default.
            write_back: Blocks may be marked dirty. Takes 8 bytes a slot.

        Raises:
            ConfigurationError: A negative size, more than 2**31 - 2 slots, no such policy, or a ``ttl_s`` of 0 or less.
        """
        max_slots = num_slots if max_slots is None else max_slots
        total = max_slots + num_bounce
        if not 0 <= num_slots <= max_slots or num_bounce < 0 or total > np.iinfo(np.int32).max - 1:
            raise ConfigurationError(
                f"an index holds 0 to 2**31 - 2 slots, got {num_slots} own, {max_slots} at most, "
                f"{num_bounce} bounce slots"
            )
        super().__init__(max_slots, num_bounce)
        self.num_slots = num_slots
        self.ttl_s = ttl_s
        self.on_change: OnChange | None = None
        self.on_left: OnLeft | None = None
        self.on_undirtied: Callable[[Names, Slots, Change], object] | None = None
        self._policy = guarded_policy(policy, max_slots)
        self._policy.resize(num_slots)
        self._clock = clock or system().monotonic
        self._opened_s = self._clock()
        self._expiry = None if ttl_s is None else Expiry(max_slots, ttl_s, self._clock)
        self._write_back = write_back
        self._dirty = SlotQueue(max_slots if write_back else 0)  # the oldest first; each is held by one lease
        self._free = FreeSlots(max_slots, range(num_slots))
        self.bounce_free = FreeSlots(num_bounce, range(max_slots, total))
        self._takers = np.full(num_bounce, 0, dtype=np.int8)  # of each bounce slot that holds something, who took it
        self._num_taken = [0] * _MOST_TAKERS
        self._num_leases = np.full(total, 0, dtype=np.int32)
        self._goes_first = np.full(total, 0, dtype=np.uint8)  # why, once unleased: `_UNWANTED`, `_RESIDENT`
        self._any_goes_first = False
        self._ready = self._pending = self._doomed = self._leased = 0
        self._withheld: NDArray[np.bool_] | None = None  # (max_slots,): not to be used for now
        self._goes_when_idle = False  # what is held beyond the capacity, see `resize`
        self._gone_when_idle: list[Names] = []  # of that, since the last `resize`

    # Counts.

    @property
    def num_dirty(self) -> int:
        """How many blocks have no copy below yet."""
        return len(self._dirty)

    def num_bounce_taken(self, taker: int) -> int:
        """How many bounce slots hold what was reserved for ``taker``."""
        return self._num_taken[taker]

    def passes_for(self, slots: Slots, taker: int) -> NDArray[np.bool_]:
        """Say of each slot whether it is a bounce slot that was reserved for ``taker``."""
        passes = slots >= self.max_slots
        passes[passes] = self._takers[slots[passes] - self.max_slots] == taker
        return passes

    def room_for(self, names: Names) -> int:
        """How many blocks of a long batch may be added, head first, without evicting what the tier has of its head."""
        num_free = self._free.num
        if len(names) <= num_free or not self.num_slots:
            return min(len(names), num_free)
        return int(np.count_nonzero(self.find(names)[0][: self.num_fitting(names)] < 0))

    def num_fitting(self, names: Names) -> int:
        """How many leading blocks of a long batch can be in the tier at once, beside what is leased."""
        room = self._free.num + len(self._policy)
        if len(names) <= room:
            return len(names)
        slots, states = self.find(names)
        taken = np.cumsum((slots < 0) | ((states == READY) & (self._num_leases[slots] == 0)))
        return int(np.count_nonzero(taken <= room))

    def statistics(self) -> IndexStatistics:
        """Count slots by what they hold."""
        used = self._pending + self._ready + self._doomed
        withheld = 0 if self._withheld is None else int(np.count_nonzero(self._is_free())) - self._free.num
        passing, leased_there = [0] * len(SlotState), 0
        if self.bounce_free.num < self.num_bounce:
            above = slice(self.max_slots, self.max_slots + self.num_bounce)
            passing = np.bincount(self._states[above], minlength=len(SlotState)).tolist()
            leased_there = int(np.count_nonzero(self._num_leases[above]))
        return IndexStatistics(
            num_slots=self.num_slots,
            free=self._free.num,
            ready=self._ready - passing[READY],
            evictable=len(self._policy),
            leased=self._leased - leased_there,
            pending=self._pending - passing[PENDING],
            doomed=self._doomed - passing[DOOMED],
            bounce_free=self.bounce_free.num,
            retired=self.max_slots + self.num_bounce - self._free.num - self.bounce_free.num - used - withheld,
            withheld=withheld,
            dirty=len(self._dirty),
        )

    # Reading more than `Books` does: for the owning thread alone.

    def names_in_order(self) -> tuple[Names, Slots]:
        """Return what `readable` does, the least recently used first, leased ones last. Walks the policy.

        Takes 0.2 s a million blocks: for a checkpoint at close, not for one in traffic.
        """
        leased = ((self._states[: self.max_slots] == READY) & (self._num_leases[: self.max_slots] > 0)).nonzero()[0]
        slots = np.concatenate((self._policy.order(), leased))
        return self._table.names(slots), slots

    def readable(self) -> tuple[Names, Slots]:
        """Return the tier's own readable blocks in the order of their slots. Takes 20 ms a million blocks."""
        slots = (self._states[: self.max_slots] == READY).nonzero()[0]
        return self._table.names(slots), slots

    def ready_from(self, start: int, limit: int) -> tuple[Names, Slots, int]:
        """Return up to ``limit`` of the tier's own readable blocks in the order of their slots, from slot ``start`` on.

        Looks at few slots, so that it takes some 20 us; there may be none among them.

        Returns:
            Names, slots, and where to go on.
        """
        stop = min(start + _LOOKED_AT, self.num_slots)
        slots = start + (self._states[start:stop] == READY).nonzero()[0][:limit]
        return self._table.names(slots), slots, int(slots[-1]) + 1 if len(slots) == limit else stop

    def idle_retired(self, start: int, stop: int) -> Slots:
        """Return those of the slots ``start <= slot < stop`` beyond the capacity that hold nothing, ascending."""
        start, stop = max(start, self.num_slots), min(stop, self.max_slots)
        return start + (self._states[start:stop] == FREE).nonzero()[0] if start < stop else NO_SLOTS

    # Using blocks.

    def lease(self, names: Names) -> Lease:
        """Hold the ready ones of these blocks in place until the lease is released. Repeated names are harmless.

        Is no use of them: see `Lease.release`, and `touch`.
        """
        slots, states = self.find(names)
        if states.tobytes().count(READY) < len(slots):
            slots = np.where(states == READY, slots, -1)
        held = unique(slots[slots >= 0])
        if not len(held):
            return Lease(slots, held, self._release)
        num_leases = self._num_leases[held]
        idle = held[num_leases == 0] if len(num_leases.nonzero()[0]) else held
        self._want(held)
        self._policy.park(self._own(idle)[::-1])
        self._leased += len(idle)
        self._num_leases[held] = num_leases + 1
        return Lease(slots, held, self._release)

    def touch(self, names: Names) -> None:
        """Make the ready ones of these blocks the most recently used, the head of the batch most of all."""
        if self.max_slots:
            slots, states = self.find(names)
            self.use(slots[states == READY])

    def use(self, slots: Slots) -> None:
        """`touch` the blocks in these slots, which are ready; repeats are harmless."""
        used = self._own(unique(slots)[::-1])
        if not len(used):
            self._policy.use(used)  # a policy's time goes on with whatever is asked for
            return
        self._want(used)
        num_leases = self._num_leases[used]
        if not len(num_leases.nonzero()[0]):
            self._policy.touch(used)
            return
        idle = used[num_leases == 0]
        self._policy.park(idle)
        self._policy.use(used)
        self._policy.unpark(idle)

    def line_up(self, names: Names) -> None:
        """Have the unleased ones of these blocks evicted in the order of their prompt, tail first. Counts as no use."""
        idle = self._idle(self._here(names))
        self._policy.park(idle)
        self._unpark(idle)

    def hint(self, names: Names, hint: ReuseHint) -> None:
        """Take note of what a caller says of the ready ones of these blocks. Is no use of them.

        What is not expected at all goes first, from when nobody leases it; until it is leased, touched or stored again.
        """
        told = self._here(names)
        idle = told[self._num_leases[told] == 0]
        is_unwanted = hint.probability == 0
        self._any_goes_first |= is_unwanted
        others = self._goes_first[told] & ~np.uint8(_UNWANTED)
        self._goes_first[told] = others | is_unwanted
        self._policy.park(idle)
        self._policy.hint(told, hint, self._clock() - self._opened_s)
        self._unpark(idle)

    def resident(self, names: Names) -> None:
        """Take note that the engine has these blocks in its own cache, and has used those of them that are not here.

        What is here goes first, from when nobody leases it; until `leaving`, or until it is leased, touched or stored
        again. Is no use of it.
        """
        here = self._here(names)
        idle = here[self._num_leases[here] == 0]
        absent = absent_from(names, self.find(names)[0])[::-1]
        self._any_goes_first = True
        self._goes_first[here] |= _RESIDENT
        self._policy.park(idle)
        self._policy.hold(here, names_at(names, absent))
        self._policy.unpark(idle, cold=True)

    def leaving(self, names: Names) -> None:
        """Take note that the engine drops these blocks: from now on they are evicted here like all others."""
        here = self._here(names)
        here = here[(self._goes_first[here] & _RESIDENT) > 0]
        self._goes_first[here] &= ~np.uint8(_RESIDENT)
        here = here[self._goes_first[here] == 0]  # what nobody expects goes first all the same
        idle = here[self._num_leases[here] == 0]
        self._policy.park(idle)
        self._policy.leave(here)
        self._policy.unpark(idle)

    def _here(self, names: Names) -> Slots:
        """Return the tier's own slots that have these blocks, ready ones alone, the tail first."""
        slots, states = self.find(names)
        return self._own(unique(slots[states == READY]))[::-1]

    # Filling and emptying slots.

    def reserve(self, names: Names, *, bounce: bool = False, taker: int = 0) -> Reservation:
        """Get a slot for every name that is neither ready nor pending, evicting other blocks if there is no room.

        The slots come in runs of neighbouring ids, ascending in batch order. A block of the batch itself is never
        evicted. Until the reservation commits a name, `find` says PENDING.

        Args:
            names: What is to be stored. Names that are there, and repeats, get slot -1.
            bounce: Take bounce slots instead of the tier's own; nothing is evicted for them.
            taker: On whose account these are, from 0 to 127: `num_bounce_taken` counts them.

        Raises:
            CapacityError: Too few slots can be had. Nothing has changed, recency included.
        """
        found, states = self.find(names)
        wanted = absent_from(names, found)
        with self.lock:
            self._found = None  # and once more in the end: a policy may raise in between
            if bounce:
                evicted, taken = _NO_NAMES, self._take_bounce(len(wanted), taker)
            else:
                evicted, taken = self._make_room(len(wanted), keep=found[states == READY])
            self._table.insert(names if len(wanted) == len(names) else names_at(names, wanted), taken)
            self._states[taken] = PENDING
            taken.flags.writeable = False
            self._found = (names, taken) if len(taken) == len(names) else None
        self._pending += len(taken)
        self._tell(Change.EVICTED, evicted)
        slots = taken
        if len(taken) < len(names):
            slots = np.full(len(names), -1, dtype=np.int64)
            slots[wanted] = taken
        return Reservation(slots, evicted, commit=self._commit, keep=self._keep, give_back=self._give_back)

    def fits(self, names: Names, num_more: int = 0) -> bool:
        """Say if `reserve` would find room now for what is absent of a batch, and so many more. Changes nothing."""
        found, states = self.find(names)
        num_evictable = len(self._policy) - len(self._idle(found[states == READY]))
        return len(absent_from(names, found)) + num_more <= self._free.num + num_evictable

    def remove(self, names: Names, why: Change = Change.REMOVED) -> int:
        """Make blocks unfindable at once; return how many were there.

        The slot of a leased block is freed by its last release. A pending block becomes doomed: it is never committed,
        and its slot is freed when its reservation closes.

        Args:
            names: Of the blocks; others and repeats are harmless.
            why: What ``on_change`` is told.
        """
        found, _ = self.find(names)
        slots = unique(found[found >= 0])
        self._remove(slots[::-1], why)
        return len(slots)

    def expire(self, *, limit: int = 1 << 16) -> Names:
        """Remove blocks older than ``ttl_s`` among the next ``limit`` slots, as `remove` does; return their names.

        Call it again and again: it goes round the tier. A block can be read until then, so it lives at most for
        ``ttl_s`` and the time of one round. Removes at most 4,096 blocks a call, so that no call takes long.

        Returns:
            ``(n, 4)``; none where there is no ``ttl_s``.
        """
        slots = NO_SLOTS if self._expiry is None else self._expiry.overdue(self.num_slots, limit)
        return self._remove(slots[self._states[slots] == READY][::-1], Change.EXPIRED)

    def resize(self, num_slots: int, *, keep_held: bool = False) -> Names:
        """Change the tier's capacity, up to ``max_slots``; return the names of the readable blocks that had to go.

        The slots from ``num_slots`` on are given up, whatever is in them: their blocks are removed as by `remove`, and
        no such slot is used again until the capacity is raised. Takes some 1 ms a million slots of the new capacity
        and 0.6 us a block that goes: where many go, resize step by step.

        Args:
            num_slots: The new capacity.
            keep_held: What is leased, dirty or being filled stays there, and can be found, until nobody holds it any
                more; or until `give_up`.

        Raises:
            ConfigurationError: ``num_slots`` is negative or more than ``max_slots``. Nothing has changed.
        """
        if not 0 <= num_slots <= self.max_slots:
            raise ConfigurationError(f"{num_slots} slots in an index of 0 to {self.max_slots}")
        beyond = slice(num_slots, self.max_slots)
        idle = num_slots + ((self._states[beyond] == READY) & (self._num_leases[beyond] == 0)).nonzero()[0]
        self.num_slots = num_slots
        evicted = self._remove(idle[::-1], Change.EVICTED)
        self._goes_when_idle = bool((self._states[beyond] != FREE).any())  # else each release would have to look
        self._find_free()
        self._policy.resize(num_slots)
        return evicted if keep_held else np.concatenate((evicted, self.give_up(num_slots)))

    def give_up(self, start: int) -> Names:
        """Remove what `resize` has let stay in the slots from ``start`` on, which is the capacity or more.

        Returns:
            The names of the readable blocks that went, and of those that have since, as nobody held them any more.
        """
        states = self._states[start : self.max_slots]
        held = start + ((states == READY) | (states == PENDING)).nonzero()[0]
        gone = [self._remove(held[::-1], Change.EVICTED), *self._gone_when_idle]
        self._gone_when_idle.clear()
        self._goes_when_idle = start > self.num_slots
        return np.concatenate(gone)

    def is_filled_from(self, start: int) -> bool:
        """Say whether a slot from ``start`` on is being filled."""
        return bool((self._states[start : self.max_slots] == PENDING).any())

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
            states = self._states[: self.max_slots]
            held = (is_withheld & ((states == READY) | (states == PENDING))).nonzero()[0]
            lost = len(self._remove(held[::-1], Change.LOST, has_left=False))
        self._find_free()
        return lost

    def clear(self) -> None:
        """Remove every block. Takes time in the size of the tier: some 10 ms a million slots."""
        self._forget_dirty(self._dirty.head(len(self._dirty)), Change.CLEARED)
        states = self._states[:-1]
        with self.lock:
            is_idle = (states == READY) & (self._num_leases == 0)
            states[is_idle] = FREE
            states[states != FREE] = DOOMED
            self._table.clear()
            self._found = None
        self._policy.clear()
        self._find_free()
        self._ready = self._pending = 0
        self._doomed = int(np.count_nonzero(states))
        if self.on_change is not None:
            self.on_change(Change.CLEARED, _NO_NAMES)

    def restore(self, names: Names, slots: Slots) -> None:
        """Enter blocks that outlived a restart, which count as new. Takes time in their number, about 1 s a million.

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
                self._found = None
            self._want(slots[part])
            self._policy.add(slots[part], names[part])
            self._policy.unpark(slots[part])
        self._ready += len(slots)
        self._find_free()
        if self._expiry is not None:
            self._expiry.start(slots)
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
            own = ((slots >= 0) & ~self.is_bounce(slots)).nonzero()[0]
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
        return self._table.names(slots), Lease(slots, slots, self._release)

    # The steps of a slot: its leases.

    def _hold(self, slots: Slots) -> None:
        num_leases = self._num_leases[slots]
        self._leased += len(slots) - len(num_leases.nonzero()[0])
        self._num_leases[slots] = num_leases + 1

    def _release(self, held: Slots, *, is_use: bool) -> None:
        tail_first = held[::-1].copy()  # of a prefix the head is the most useful: it goes last
        own = self._own(tail_first)
        if is_use and len(own):
            self._policy.use(own)
        num_leases = self._num_leases[tail_first] - 1
        self._num_leases[tail_first] = num_leases
        any_goes = self._goes_when_idle or (self._any_goes_first and self._goes_first[own].any())
        is_plain = len(own) == len(tail_first) and not len(num_leases.nonzero()[0]) and not any_goes
        states = self._states[tail_first].tobytes() if is_plain else b""
        if is_plain and states.count(READY) == len(states):  # as a rule: nobody else has them, and all stay
            self._leased -= len(tail_first)
            self._policy.unpark(tail_first)
            return
        idle = tail_first[num_leases == 0]
        self._leased -= len(idle)
        is_ready, is_own = self._states[idle] == READY, ~self.is_bounce(idle)
        stays = is_ready & is_own
        if len(staying := idle[stays]):
            self._unpark(staying)
        if self._goes_when_idle and len(beyond := idle[stays & (idle >= self.num_slots)]):
            self._gone_when_idle.append(self._remove(beyond, Change.EVICTED))
        passed = idle[is_ready & ~is_own]  # blocks in bounce slots live no longer than their leases
        if len(passed):
            with self.lock:
                self._table.remove(passed)
                self._states[passed] = DOOMED
                self._found = None
            self._ready -= len(passed)
            self._doomed += len(passed)
        self._free_doomed(idle[~stays])

    def _unpark(self, slots: Slots) -> None:
        """Make parked blocks evictable, of which some are to go first."""
        goes_first = self._goes_first[slots] > 0
        self._policy.unpark(slots[goes_first], cold=True)
        self._policy.unpark(slots[~goes_first])

    def _want(self, slots: Slots) -> None:
        """Forget that blocks were to go first: they were asked for, or stored."""
        if self._any_goes_first:
            self._goes_first[slots] = 0

    # The steps of a slot: filling and emptying.

    def _make_room(self, n: int, *, keep: Slots) -> tuple[Names, Slots]:
        """Take ``n`` own slots, evicting blocks outside ``keep`` if need be; return their names and the slots."""
        shortage = max(0, n - self._free.num)
        if not shortage:
            return _NO_NAMES, self._free.take(n)
        keep = self._idle(keep)
        num_evictable = len(self._policy) - len(keep)
        if shortage > num_evictable:
            raise CapacityError(f"{shortage} more slots needed, {num_evictable} evictable")
        victims = self._policy.victims(shortage, keep)
        names = self._table.names(victims)
        self._table.remove(victims)
        self._policy.evict(victims, names)
        self._states[victims] = FREE
        self._ready -= shortage
        return names, ascending(np.concatenate((self._free.take(n - shortage), victims)))

    def _idle(self, slots: Slots) -> Slots:
        """Return those of these slots that are the tier's own and leased by nobody, each once."""
        own = self._own(slots)
        return unique(own[self._num_leases[own] == 0])

    def _take_bounce(self, n: int, taker: int) -> Slots:
        num_free = self.bounce_free.num
        if n > num_free:
            raise CapacityError(f"{n - num_free} more bounce slots needed, none evictable")
        taken = self.bounce_free.take(n)
        self._takers[taken - self.max_slots] = taker
        self._num_taken[taker] += n
        return taken

    def _commit(self, slots: Slots) -> Lease:
        """Make those of these slots that are pending ready, and lease them; -1 stands for no slot."""
        there, filled = self._make_ready(slots)
        self._hold(filled)
        return Lease(there, filled, self._release)

    def _keep(self, slots: Slots) -> Slots:
        """Do as `_commit`, and hold nothing; return the slots, -1 where there is none."""
        there, filled = self._make_ready(slots)
        if self._goes_when_idle or len(self._own(filled)) < len(filled):
            self._hold(filled)
            self._release(filled, is_use=False)
        elif len(filled):
            self._policy.unpark(filled[::-1].copy())  # of a prefix the head goes last
        return there

    def _make_ready(self, slots: Slots) -> tuple[Slots, Slots]:
        """Return ``slots``, which are the caller's, with -1 for those that are not pending, and those that were."""
        is_live = self._states[slots] == PENDING
        filled = slots[is_live]
        with self.lock:
            self._states[filled] = READY
        self._pending -= len(filled)
        self._ready += len(filled)
        self._want(filled)
        own = self._own(filled)
        if len(own):
            names = self._table.names(own)
            self._policy.add(own, names)
            if self._expiry is not None:
                self._expiry.start(own)
            self._tell(Change.ADDED, names)
        slots[~is_live] = -1
        return slots, filled

    def _give_back(self, slots: Slots) -> None:
        if not len(slots):
            return
        is_pending = self._states[slots] == PENDING
        pending = slots[is_pending]
        with self.lock:
            self._table.remove(pending)
            self._states[pending] = DOOMED
            self._found = None
        self._pending -= len(pending)
        self._doomed += len(pending)
        self._free_doomed(slots)

    def _remove(self, slots: Slots, change: Change, *, has_left: bool = True) -> Names:
        """Make the blocks in these slots unfindable, the tail first, as they lie in the policy's queues.

        Args:
            slots: Each once.
            change: What ``on_change`` is told.
            has_left: Whether ``on_left`` takes over the slots.

        Returns:
            The names of the tier's own ones that were readable.
        """
        is_ready = self._states[slots] == READY
        self._policy.park(slots[is_ready & (self._num_leases[slots] == 0)])
        self._forget_dirty(slots, change)
        on_left, left = self.on_left if has_left else None, self._own(slots[is_ready])
        if on_left is not None:
            self._hold(left)
        with self.lock:
            self._table.remove(slots)
            self._states[slots] = DOOMED
            self._found = None
        num_ready = int(np.count_nonzero(is_ready))
        self._ready -= num_ready
        self._pending -= len(slots) - num_ready
        self._doomed += len(slots)
        self._free_doomed(slots[is_ready & (self._num_leases[slots] == 0)])
        removed = self._table.names(left)
        self._tell(change, removed)
        if on_left is not None and len(left):
            on_left(removed, Lease(left, left, self._release))
        return removed

    def _forget_dirty(self, slots: Slots, why: Change) -> None:
        """Let go of those of these slots that are dirty. They are not put back into the order of eviction."""
        if not len(self._dirty):
            return
        own = self._own(slots)
        dirty = own[self._dirty.holds(own)]
        self._dirty.remove(dirty)
        self._num_leases[dirty] -= 1
        idle = dirty[self._num_leases[dirty] == 0]
        self._leased -= len(idle)
        if self.on_undirtied is not None and len(dirty):
            self.on_undirtied(self._table.names(dirty), dirty, why)

    def _free_doomed(self, slots: Slots) -> None:
        self._states[slots] = FREE
        self._doomed -= len(slots)
        own = slots[slots < self.num_slots]
        self._free.give(own if self._withheld is None else own[~self._withheld[own]])
        in_bounce = slots[slots >= self.max_slots]  # slots between `num_slots` and `max_slots` are retired
        if len(in_bounce):
            for taker in self._takers[in_bounce - self.max_slots].tolist():
                self._num_taken[taker] -= 1
            self.bounce_free.give(in_bounce)

    def _find_free(self) -> None:
        """Build the free list anew: the slots that hold nothing and can be used."""
        is_free = self._is_free()
        if self._withheld is not None:
            is_free &= ~self._withheld[: self.num_slots]
        self._free.reset(is_free.nonzero()[0])

    def _is_free(self) -> NDArray[np.bool_]:
        return np.equal(self._states[: self.num_slots], FREE)

    def _own(self, slots: Slots) -> Slots:
        return slots[slots < self.max_slots] if self.num_bounce else slots

    def _tell(self, change: Change, names: Names) -> None:
        if self.on_change is not None and len(names):
            self.on_change(change, names)
