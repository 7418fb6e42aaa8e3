"""Policies of the program's own: whatever they do, no block is lost, and none is evicted that may not be."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from tiered_kv.catalog import TierIndex
from tiered_kv.catalog.policies import LRUPolicy, Policy
from tiered_kv.catalog.slots import SlotQueue
from tiered_kv.catalog.table import Slots
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.keys import Names

METHODS = [
    "add",
    "use",
    "hint",
    "hold",
    "leave",
    "park",
    "unpark",
    "touch",
    "victims",
    "evict",
    "order",
    "clear",
    "resize",
]


def names(*numbers: int) -> Names:
    """Names of blocks."""
    return np.repeat(np.array(numbers, np.uint64)[:, None], 4, axis=1)


def fill(index: TierIndex, *numbers: int) -> None:
    """Keep blocks, one after another."""
    for number in numbers:
        with index.reserve(names(number)) as reservation:
            reservation.commit().release()


def changed(method: str, change: Callable[..., Any]) -> type[Policy]:
    """Make a policy that is right but for one method."""
    return type("Changed", (LRUPolicy,), {method: change})


def failing(method: str, after: int = 0) -> type[Policy]:
    """Make a policy of which one method does as it should so often, and then raises."""
    calls = []

    def fail(self: LRUPolicy, *args: object, **more: object) -> object:
        calls.append(args)
        if len(calls) > after:
            raise RuntimeError("a mistake")
        return getattr(LRUPolicy, method)(self, *args, **more)

    return changed(method, fail)


def use_all(index: TierIndex) -> None:
    """Fill, use, evict, remove, resize and clear, and see that the books are right all the time."""
    fill(index, 1, 2, 3, 4)
    held = index.lease(names(1, 2))
    fill(index, 5, 6)
    assert index.ready(names(1, 2, 6)).all()
    assert np.count_nonzero(index.ready(names(3, 4, 5))) == 1
    index.touch(names(1, 5))
    index.hint(names(5), ReuseHint(0.5))
    index.resident(names(5, 11))
    index.leaving(names(5, 11))
    held.release()
    assert len(index.names_in_order()[0]) == 4
    index.remove(names(6))
    index.resize(3)
    statistics = index.statistics()
    assert (statistics.leased, statistics.pending, statistics.doomed) == (0, 0, 0)
    assert statistics.evictable == statistics.ready == 3 - statistics.free
    fill(index, 7, 8, 9)
    assert index.ready(names(7, 8, 9)).all()
    index.clear()
    fill(index, 1, 2, 3)
    assert index.statistics().evictable == 3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_policy_that_raises_costs_nothing_but_its_order(
    method: str, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No lease, slot or block is lost, wherever it raises; it is said once, and the tier goes by LRU."""
    caplog.set_level(logging.ERROR, "tiered_kv")
    use_all(TierIndex(4, policy=failing(method, after)))
    assert [record.message.partition(" ")[0] for record in caplog.records] in (["policy.failed"], [])


@pytest.mark.parametrize(
    "choose",
    [
        lambda *_: np.array([], np.int64),
        lambda *_: np.array([0, 0]),
        lambda *_: [1, 99],
        lambda _, n, __: list(range(n)),
        lambda *_: [-1, 3],
        lambda *_: [[2], [3]],
        lambda *_: None,
    ],
    ids=["too few", "twice", "none of the tier", "leased ones", "below zero", "in a column", "nothing"],
)
def test_a_policy_that_chooses_what_it_may_not_is_not_asked_again(choose: Callable[..., Any]) -> None:
    """Else a block would be overwritten that somebody reads."""
    index = TierIndex(4, policy=changed("victims", choose))
    fill(index, 1, 2, 3, 4)
    held = index.lease(names(1, 2))
    with index.reserve(names(5, 6)) as reservation:
        assert sorted(reservation.slots.tolist()) == [2, 3]
        assert held.slots.tolist() == [0, 1]
    held.release()


def test_an_order_that_is_none_is_not_noted_down() -> None:
    """A checkpoint lists each block once."""
    index = TierIndex(4, policy=changed("order", lambda _: np.array([0, 0, 1])))
    fill(index, 1, 2, 3)
    listed, slots = index.names_in_order()
    assert (sorted(listed[:, 0].tolist()), sorted(slots.tolist())) == ([1, 2, 3], [0, 1, 2])


def fail_to_be_made(_: LRUPolicy, __: int) -> None:
    """Raise, as a policy may that looks for a file of its own."""
    raise OSError("no file")


@pytest.mark.parametrize(
    ("init", "why"), [(fail_to_be_made, "OSError: no file"), (lambda _: None, "TypeError: .* 2 were given")]
)
def test_a_policy_that_cannot_be_made_is_told_as_a_mistake_of_the_settings(init: Callable[..., None], why: str) -> None:
    """It is named, and what it raised: no tier is opened with another one."""
    with pytest.raises(ConfigurationError, match=rf"policy '.*Changed' cannot be made over 4 slots: {why}"):
        TierIndex(4, policy=changed("__init__", init))


def test_a_policy_need_not_note_how_many_slots_there_are() -> None:
    """Who makes it knows: its `__init__` may leave the base's out."""

    def make(self: LRUPolicy, num_slots: int) -> None:
        self._queue = SlotQueue(num_slots)

    use_all(TierIndex(4, policy=changed("__init__", make)))


class OneArray(LRUPolicy):
    """Right, and chooses victims by a view of the one array that it keeps the order in."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._kept = np.zeros(num_slots, np.int64)

    @override
    def park(self, slots: Slots) -> None:
        super().park(slots)
        self._keep()

    @override
    def unpark(self, slots: Slots, *, cold: bool = False) -> None:
        super().unpark(slots, cold=cold)
        self._keep()

    @override
    def evict(self, slots: Slots, names: Names) -> None:
        super().evict(slots, names)
        self._keep()

    @override
    def victims(self, n: int, keep: Slots) -> Slots:
        return super().victims(n, keep) if len(keep) else self._kept[:n]

    def _keep(self) -> None:
        self._kept[: len(self)] = self.order()


def test_a_policy_may_answer_with_a_view_of_what_it_changes_next() -> None:
    """The blocks that it chose are those that go, whatever becomes of its array once it is told."""
    index = TierIndex(4, policy=OneArray)
    fill(index, 1, 2, 3, 4)
    with index.reserve(names(5, 6)) as reservation:
        assert reservation.slots.tolist() == [0, 1]
        reservation.commit().release()
    assert index.ready(names(1, 2, 3, 4, 5, 6)).tolist() == [False, False, True, True, True, True]


def test_every_method_of_a_policy_is_guarded_and_has_to_be_there() -> None:
    """One that a policy leaves out is told when it is made, not in traffic."""
    assert {*METHODS, "__len__"} == {
        name for name, each in vars(Policy).items() if inspect.isfunction(each) and name != "__init__"
    }
    assert {*METHODS, "__len__"} - {"resize", "hint", "hold", "leave", "touch"} == Policy.__abstractmethods__
