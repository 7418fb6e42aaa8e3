"""Which blocks are taken for absent after an eviction, and how many are remembered."""

import numpy as np

from tiered_kv.keys import Namespace
from tiered_kv.tiers.batch import Batch
from tiered_kv.tiers.tombstones import Tombstones

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
