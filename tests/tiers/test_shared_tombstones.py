"""Which blocks are taken for absent after an eviction, and how many are remembered."""

import gc
from dataclasses import replace

import numpy as np

from tests.tiers.test_health import Clock
from tiered_kv.tiers.shared import FailedWrites
from tiered_kv.tiers.tier import Batch
from tiered_kv.tiers.tombstones import Tombstones
from tiered_kv.values.keys import Namespace

SPACE = Namespace(b"f" * 32, b"e" * 32, b"s" * 32)


def batch(*numbers: int) -> Batch:
    """Blocks by number."""
    names = np.repeat(np.array(numbers, np.uint64)[:, None], 4, axis=1)
    return Batch(SPACE, names, np.arange(len(numbers)))


def test_all_that_is_evicted_at_once_is_absent() -> None:
    """However much that is: the bound is for what was evicted before."""
    evicted = Tombstones(most_names=3)
    evicted.add(batch(1, 2))
    evicted.add(batch(*range(10, 20)))
    assert evicted.holds(batch(*range(10, 20))).all()
    assert not evicted.holds(batch(1, 2)).any()
    evicted.add(batch(30))
    assert evicted.holds(batch(17, 18, 19, 30)).tolist() == [False, True, True, True]
    assert evicted.num_lost == 2 + 8


def test_what_is_evicted_again_is_the_last_to_go() -> None:
    """Its tombstone is as young as its last eviction."""
    evicted = Tombstones(most_names=2)
    for number in (1, 2, 1, 3):
        evicted.add(batch(number))
    assert evicted.holds(batch(1, 2, 3)).tolist() == [True, False, True]


def test_the_oldest_are_of_one_namespace_and_know_their_place() -> None:
    """What is deleted together is named by one namespace; evicted again, a block is known as it was named last."""
    evicted, other = Tombstones(), Namespace(b"f" * 32, b"e" * 32, b"t" * 32)
    evicted.add(batch(1, 2, 3))
    evicted.add(Batch(other, batch(4).names, np.array([9])))
    evicted.add(Batch(SPACE, batch(2).names, np.array([7])))
    told = evicted.next(10)
    assert told is not None
    assert told.namespace == SPACE
    assert (told.names[:, 0].tolist(), told.positions.tolist()) == ([1, 3, 2], [0, 2, 7])
    evicted.lift(batch(1, 3), evicted.serial)
    evicted.lift(batch(2), evicted.serial - 1)
    told = evicted.next(10)
    assert told is not None
    assert (told.namespace, told.names[:, 0].tolist(), told.positions.tolist()) == (other, [4], [9])
    assert evicted.holds(batch(1, 2, 3, 4)).tolist() == [False, True, False, True]


def test_what_was_told_is_told_after_the_others_and_remembered_no_longer() -> None:
    """Until it is evicted again it is behind all that waits; for want of room those go that were evicted first."""
    evicted = Tombstones(most_names=3)
    evicted.add(batch(1, 2, 3))
    for expected in ([1], [2, 3], [1, 2]):
        told = evicted.next(len(expected))
        assert told is not None
        assert told.names[:, 0].tolist() == expected
    evicted.add(batch(4))
    assert evicted.holds(batch(1, 2, 3, 4, 9)).tolist() == [False, True, True, True, False]


def test_the_garbage_collector_walks_none_of_them() -> None:
    """However many are evicted: else the eviction of a long prompt is a pause in the size of the whole process."""
    evicted, many, begun = Tombstones(), batch(*range(20_000)), list[str]()

    def tell(phase: str, info: dict[str, int]) -> None:
        begun.append(phase)

    gc.collect()
    gc.freeze()
    before = len(gc.get_objects())
    gc.callbacks.append(tell)
    try:
        evicted.add(many)
        evicted.add(many)
        evicted.lift(many[:10_000], evicted.serial)
        evicted.holds(many)
    finally:
        gc.callbacks.remove(tell)
    assert begun == []
    gc.collect()
    assert len(gc.get_objects()) < before + 100


def test_blocks_of_several_salts_are_given_back_by_salt() -> None:
    """What one store held of several prompts is to be deleted under the salt of each."""
    of_other = replace(batch(3, 4), namespace=replace(SPACE, salt=bytes([7]) * 32))
    spaces = np.repeat(np.array([SPACE, of_other.namespace], object), 2)
    tombstones = Tombstones()
    tombstones.add(replace(batch(1, 2, 3, 4), spaces=spaces))
    first = tombstones.next(10)
    assert first is not None
    assert (first.namespace, first.spaces) == (SPACE, None)
    tombstones.lift(first, tombstones.serial)
    rest = tombstones.next(10)
    assert rest is not None
    assert (rest.namespace, rest.spaces) == (of_other.namespace, None)
    assert (rest.names == of_other.names).all()


def test_a_write_that_failed_may_come_for_a_minute() -> None:
    """Counted from its last failure; of more than are remembered those that failed last."""
    clock = Clock()
    failed = FailedWrites(clock, most_names=3)
    failed.add(batch(1, 2).names)
    clock.now += 45.0
    failed.add(batch(2, 3).names)
    assert failed.may_come(batch(1, 2, 3, 4).names).tolist() == [True, True, True, False]
    clock.now += 15.0
    assert failed.may_come(batch(1, 2, 3, 4).names).tolist() == [False, True, True, False]
    failed.add(batch(5, 6).names)
    assert failed.may_come(batch(1, 2, 3, 5, 6).names).tolist() == [False, False, True, True, True]
