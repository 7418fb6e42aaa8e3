"""For each promise of a `Policy` some that break it: the conformance tests have to say so."""

import numpy as np
import pytest
from typing_extensions import override

from tiered_kv.catalog.policies import LRUPolicy, Policy
from tiered_kv.catalog.table import Slots
from tiered_kv.testing import PolicyTests
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.keys import Names


class ChoosesWhatIsNew(LRUPolicy):
    @override
    def add(self, slots: Slots, names: Names) -> None:
        super().unpark(slots)

    @override
    def unpark(self, slots: Slots, *, cold: bool = False) -> None:
        super().park(slots[self._queue.holds(slots)])
        super().unpark(slots, cold=cold)


class ChoosesWhatIsLeased(LRUPolicy):
    @override
    def park(self, slots: Slots) -> None:
        pass

    @override
    def unpark(self, slots: Slots, *, cold: bool = False) -> None:
        super().unpark(slots[~self._queue.holds(slots)], cold=cold)


class ChoosesWhatIsToStay(LRUPolicy):
    @override
    def victims(self, n: int, keep: Slots) -> Slots:
        return super().victims(n, keep[:0])


class ChoosesTooFew(LRUPolicy):
    @override
    def victims(self, n: int, keep: Slots) -> Slots:
        return super().victims(min(n, 2), keep)


class ChoosesOneTwice(LRUPolicy):
    @override
    def victims(self, n: int, keep: Slots) -> Slots:
        return np.resize(super().victims(n, keep)[: max(1, n - 1)], n)


class ChoosesAsItGoes(LRUPolicy):
    @override
    def victims(self, n: int, keep: Slots) -> Slots:
        chosen = super().victims(n, keep)
        self.touch(chosen)
        return chosen


class CountsWhatIsLeased(LRUPolicy):
    @override
    def __len__(self) -> int:
        return self.num_slots


class OrdersNothing(LRUPolicy):
    @override
    def order(self) -> Slots:
        return super().order()[:0]


class SortsWhatItIsGiven(LRUPolicy):
    @override
    def unpark(self, slots: Slots, *, cold: bool = False) -> None:
        slots.sort()
        super().unpark(slots, cold=cold)


class NeverCools(LRUPolicy):
    @override
    def unpark(self, slots: Slots, *, cold: bool = False) -> None:
        super().unpark(slots)


class KeepsWhatIsEvicted(LRUPolicy):
    @override
    def evict(self, slots: Slots, names: Names) -> None:
        pass


class KeepsWhatIsCleared(LRUPolicy):
    @override
    def clear(self) -> None:
        pass


class KnowsNobodyOnceCleared(LRUPolicy):
    """It counts by name, and fails on what was cleared while it was leased."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.uses: dict[int, int] = {}

    @override
    def add(self, slots: Slots, names: Names) -> None:
        self.uses |= dict.fromkeys(slots.tolist(), 0)

    @override
    def use(self, slots: Slots) -> None:
        for slot in slots.tolist():
            self.uses[slot] += 1

    @override
    def clear(self) -> None:
        super().clear()
        self.uses.clear()


class UsesWhatIsHintedAt(LRUPolicy):
    @override
    def hint(self, slots: Slots, hint: ReuseHint, elapsed_s: float) -> None:
        self.unpark(slots)


class DropsWhatIsHeld(LRUPolicy):
    @override
    def hold(self, slots: Slots, absent: Names) -> None:
        self._queue.clear()


class StartsAnewWhenResized(LRUPolicy):
    @override
    def resize(self, num_slots: int) -> None:
        super().resize(num_slots)
        self._queue.clear()


class HasNoPlacesBeyondItsEnd(LRUPolicy):
    @override
    def add(self, slots: Slots, names: Names) -> None:
        assert (slots < self.num_slots).all()


class FailsOnNothing(LRUPolicy):
    @override
    def use(self, slots: Slots) -> None:
        slots.max()


class NeedsASlot(LRUPolicy):
    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.share = 1 / num_slots


class TiresOfCooling(LRUPolicy):
    """Each call is right by itself."""

    num_cooled = num_cleared = 0

    @override
    def unpark(self, slots: Slots, *, cold: bool = False) -> None:
        self.num_cooled += cold
        super().unpark(slots, cold=cold and not (self.num_cooled and self.num_cleared))

    @override
    def clear(self) -> None:
        self.num_cleared += 1
        super().clear()


BROKEN: dict[str, list[type[Policy]]] = {
    "test_what_is_unparked_can_be_chosen": [
        ChoosesWhatIsNew, ChoosesWhatIsLeased, ChoosesWhatIsToStay, ChoosesTooFew, ChoosesOneTwice, ChoosesAsItGoes,
        CountsWhatIsLeased, OrdersNothing, SortsWhatItIsGiven, KeepsWhatIsEvicted,
    ],
    "test_what_is_cold_goes_next": [NeverCools],
    "test_what_is_gone_is_forgotten": [KeepsWhatIsEvicted, KeepsWhatIsCleared, KnowsNobodyOnceCleared],
    "test_hints_are_no_uses": [UsesWhatIsHintedAt, DropsWhatIsHeld],
    "test_a_tier_may_be_resized": [StartsAnewWhenResized, HasNoPlacesBeyondItsEnd],
    "test_a_call_may_be_about_nothing": [FailsOnNothing, NeedsASlot],
    "test_calls_come_in_any_order": [TiresOfCooling],
}  # fmt: skip


@pytest.mark.parametrize(("promise", "broken"), [(name, each) for name, some in BROKEN.items() for each in some])
def test_a_broken_promise_is_caught(promise: str, broken: type[Policy]) -> None:
    """The test of a promise fails on a policy that breaks it."""
    with pytest.raises((AssertionError, LookupError, ValueError, ZeroDivisionError)):
        getattr(PolicyTests(), promise)(broken)


def test_a_failure_says_what_was_promised_and_what_was_found() -> None:
    """The promise comes first, then the call, and what was answered."""
    with pytest.raises(AssertionError, match=r"^Of blocks that are unparked cold .*\n.*goes next"):
        PolicyTests().test_what_is_cold_goes_next(NeverCools)


def test_no_promise_is_left_out() -> None:
    """There is a broken policy for each promise."""
    assert set(BROKEN) == {name for name in vars(PolicyTests) if name.startswith("test_")}
