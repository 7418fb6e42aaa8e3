"""What happens to the slots of one owned tier: from free to pending, to ready, to doomed and free again.

Each step keeps all that belongs to it in agreement: names and states, leases, the order of eviction, dirty blocks, free
slots and counts. `TierIndex` says what the steps are for.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.books import DOOMED, FREE, PENDING, READY, Books, Change, IndexStatistics, OnChange
from tiered_kv.catalog.leases import Lease
from tiered_kv.catalog.policies import Policy
from tiered_kv.catalog.slots import Expiry, FreeSlots, SlotQueue
from tiered_kv.catalog.table import Slots
from tiered_kv.errors import CapacityError
from tiered_kv.keys import Names

NO_SLOTS: Slots = np.empty(0, dtype=np.int64)
_MOST_TAKERS: Final = 128
_FEW: Final = 64
"""Of so many slots Python finds repeats sooner than numpy begins."""
OnLeft = Callable[[Names, Lease], None]
"""Is called on the owning thread once blocks of the tier's own that were readable have left the books, with their names
and a lease that keeps their slots: it is the callee's to release. Must not raise, and must not change the index."""


class Occupancy(Books):
    """The slots of one owned tier and what is in them, for the thread that owns it.

    Attributes:
        num_slots: The present capacity; may be 0: then every block passes through bounce slots.
        on_change: Is told whatever changes of the tier's own readable blocks, if not None.
        on_left: Takes over the slots of blocks that leave, if not None, whatever they leave for: until it has let go of
            them nothing is put there. Not of those that make room for others, whose slots are filled at once, nor of
            those whose slots are withheld, nor of all that `TierIndex.clear` removes.
        on_undirtied: Is told of slots whose blocks are dirty no more though nobody took them, and why, if not None.
    """

    def __init__(
        self,
        num_slots: int,
        max_slots: int,
        num_transient: int,
        policy: Policy,
        expiry: Expiry | None,
        dirty: SlotQueue,
        on_change: OnChange | None,
    ) -> None:
        """Hold nothing yet. ``dirty`` is empty, and takes no slots where none can be marked dirty."""
        super().__init__(max_slots, num_transient)
        total = max_slots + num_transient
        self.num_slots = num_slots
        self.on_change = on_change
        self.on_left: OnLeft | None = None
        self.on_undirtied: Callable[[Slots, Change], object] | None = None
        self._policy = policy
        self._policy.resize(num_slots)
        self._expiry = expiry
        self._dirty = dirty  # the oldest first; each of these is held by one lease
        self._free = FreeSlots(max_slots, range(num_slots))
        self._transient_free = FreeSlots(num_transient, range(max_slots, total))
        self._takers = np.full(num_transient, 0, dtype=np.int8)  # of each bounce slot that holds something, who took it
        self._num_taken = [0] * _MOST_TAKERS
        self._num_leases = np.full(total, 0, dtype=np.int32)
        self._was_used = np.full(total, fill_value=False)  # while leased: another's cold release must not chill it
        self._is_unwanted = np.full(total, fill_value=False)  # by a hint: to go first once nobody leases it
        self._has_unwanted = False
        self._ready = self._pending = self._doomed = self._leased = 0
        self._withheld: NDArray[np.bool_] | None = None  # (max_slots,): not to be used for now

    @property
    def num_free(self) -> int:
        """How many of the tier's own slots hold nothing."""
        return len(self._free)

    @property
    def num_transient_free(self) -> int:
        """How many bounce slots hold nothing."""
        return len(self._transient_free)

    def num_transient_taken(self, taker: int) -> int:
        """How many bounce slots hold what was reserved for ``taker``."""
        return self._num_taken[taker]

    def room_for(self, names: Names) -> int:
        """How many blocks of a long batch may be added, head first, without evicting what the tier has of its head."""
        if len(names) <= len(self._free):
            return len(names)
        room = len(self._free) + len(self._policy)
        return room - int(np.count_nonzero(self.ready(names[:room])))

    def statistics(self) -> IndexStatistics:
        """Count slots by what they hold."""
        used = self._pending + self._ready + self._doomed
        withheld = 0 if self._withheld is None else int(np.count_nonzero(self._is_free())) - len(self._free)
        return IndexStatistics(
            num_slots=self.num_slots,
            free=len(self._free),
            ready=self._ready,
            evictable=len(self._policy),
            leased=self._leased,
            pending=self._pending,
            doomed=self._doomed,
            transient_free=len(self._transient_free),
            retired=self.max_slots + self.num_transient - len(self._free) - len(self._transient_free) - used - withheld,
            withheld=withheld,
            dirty=len(self._dirty),
        )

    # Leases.

    def _hold(self, slots: Slots) -> None:
        self._leased += int(np.count_nonzero(self._num_leases[slots] == 0))
        self._num_leases[slots] += 1

    def _release(self, held: Slots, *, cold: bool, is_use: bool) -> None:
        tail_first = held[::-1]  # of a prefix the head is the most useful: it goes last
        own = self._own(tail_first)
        if is_use and not cold:
            self._policy.use(own)
        num_leases = self._num_leases.take(tail_first) - 1
        self._num_leases[tail_first] = num_leases
        is_plain = not cold and len(own) == len(tail_first) and not num_leases.any() and not self._any_unwanted(own)
        if is_plain and (self._states.take(tail_first) == READY).all():  # as a rule: nobody else has them, and all stay
            self._leased -= len(tail_first)
            self._was_used[tail_first] = False
            self._policy.unpark(tail_first)
            return
        is_last = num_leases == 0
        if not cold:
            self._was_used[tail_first[~is_last]] = True
        idle = tail_first[is_last]
        self._leased -= len(idle)
        was_used = self._was_used[idle]
        self._was_used[idle] = False
        is_ready = self._states[idle] == READY
        is_own = ~self.is_transient(idle)
        is_chilled = self._is_unwanted[idle] | (~was_used if cold else False)
        self._policy.unpark(idle[is_ready & is_own & is_chilled], cold=True)
        self._policy.unpark(idle[is_ready & is_own & ~is_chilled])
        passed = idle[is_ready & ~is_own]  # transient blocks live no longer than their leases
        if len(passed):
            with self.lock:
                self._table.remove(passed)
                self._states[passed] = DOOMED
            self._ready -= len(passed)
            self._doomed += len(passed)
        self._free_doomed(idle[~(is_ready & is_own)])

    def _want(self, slots: Slots) -> None:
        """Forget that blocks were not expected: they were asked for, or stored."""
        if self._has_unwanted:
            self._is_unwanted[slots] = False

    def _any_unwanted(self, slots: Slots) -> bool:
        return self._has_unwanted and bool(self._is_unwanted[slots].any())

    # Filling and emptying.

    def _make_room(self, n: int, *, keep: Slots) -> tuple[Names, Slots]:
        """Take ``n`` own slots, evicting blocks outside ``keep`` if need be; return their names and the slots."""
        shortage = max(0, n - len(self._free))
        if not shortage:
            return self._table.names(NO_SLOTS), self._free.take(n)
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
        return names, np.sort(np.concatenate((self._free.take(n - shortage), victims)))

    def _idle(self, slots: Slots) -> Slots:
        """Return those own slots, each once, that nobody leases: without these a batch has to find its room."""
        own = self._own(slots)
        return unique(own[self._num_leases[own] == 0])

    def _take_transient(self, n: int, taker: int) -> Slots:
        num_free = len(self._transient_free)
        if n > num_free:
            raise CapacityError(f"{n - num_free} more transient slots needed, none evictable")
        taken = self._transient_free.take(n)
        self._takers[taken - self.max_slots] = taker
        self._num_taken[taker] += n
        return taken

    def _commit(self, slots: Slots) -> Lease:
        """Make the pending ones of these slots, -1 where there is none, ready, and lease them."""
        is_live = self._states.take(slots) == PENDING
        filled = slots[is_live]
        with self.lock:
            self._states[filled] = READY
        self._pending -= len(filled)
        self._ready += len(filled)
        self._want(filled)
        own = self._own(filled)
        names = self._table.names(own)
        self._policy.add(own, names)
        self._hold(filled)
        if self._expiry is not None:
            self._expiry.start(own)
        self._tell(Change.ADDED, names)
        # To be filled is not to be used: a policy that counts uses counts the second call for a block.
        return Lease(np.where(is_live, slots, -1), filled, partial(self._release, is_use=False))

    def _give_back(self, slots: Slots) -> None:
        if not len(slots):
            return
        is_pending = self._states[slots] == PENDING
        pending = slots[is_pending]
        with self.lock:
            self._table.remove(pending)
            self._states[pending] = DOOMED
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
        num_ready = int(np.count_nonzero(is_ready))
        self._ready -= num_ready
        self._pending -= len(slots) - num_ready
        self._doomed += len(slots)
        self._free_doomed(slots[is_ready & (self._num_leases[slots] == 0)])
        removed = self._table.names(left)
        self._tell(change, removed)
        if on_left is not None and len(left):
            on_left(removed, Lease(left, left, partial(self._release, is_use=False)))
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
        self._was_used[idle] = False
        if self.on_undirtied is not None and len(dirty):
            self.on_undirtied(dirty, why)

    def _free_doomed(self, slots: Slots) -> None:
        self._states[slots] = FREE
        self._doomed -= len(slots)
        own = slots[slots < self.num_slots]
        self._free.give(own if self._withheld is None else own[~self._withheld[own]])
        transient = slots[slots >= self.max_slots]  # between these two lie the retired
        if len(transient):
            for taker in self._takers[transient - self.max_slots].tolist():
                self._num_taken[taker] -= 1
            self._transient_free.give(transient)

    def _find_free(self) -> None:
        """Have just those slots free that hold nothing and can be used."""
        is_free = self._is_free()
        if self._withheld is not None:
            is_free &= ~self._withheld[: self.num_slots]
        self._free.reset(np.flatnonzero(is_free))

    def _is_free(self) -> NDArray[np.bool_]:
        is_free: NDArray[np.bool_] = self._states[: self.num_slots] == FREE
        return is_free

    def _own(self, slots: Slots) -> Slots:
        return slots[slots < self.max_slots] if self.num_transient else slots

    def _tell(self, change: Change, names: Names) -> None:
        if self.on_change is not None and len(names):
            self.on_change(change, names)


def unique(slots: Slots) -> Slots:
    """Drop repeats, keep the order of first occurrences."""
    if len(slots) <= _FEW and len(set(slots.tolist())) == len(slots):
        return slots
    # Not by np.unique: its first call imports numpy.ma, a pause of 7 ms.
    ordered = np.sort(slots)
    if not (ordered[1:] == ordered[:-1]).any():
        return slots
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    return slots[np.sort(order[np.flatnonzero(np.diff(ordered, prepend=-1))])]
