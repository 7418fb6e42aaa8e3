"""What the policies keep: recency, frequency, and ARC's memory of what it let go."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.catalog import TierIndex
from tiered_kv.catalog.policies import ARCPolicy, LRUPolicy, Policy, make_policy
from tiered_kv.errors import ConfigurationError
from tiered_kv.keys import Names


def names_of(batch: list[int]) -> Names:
    """Return names that differ in their first words."""
    names = np.zeros((len(batch), 4), dtype=np.uint64)
    names[:, 0] = batch
    return names


def ask(index: TierIndex, batch: list[int]) -> int:
    """Ask for blocks as a request does: read what is there, store the rest; return the hits."""
    names = names_of(batch)
    with index.lease(names) as lease:
        hits = int(np.count_nonzero(lease.slots >= 0))
    with index.reserve(names) as reservation:
        reservation.commit().release()
    return hits


def test_policies_by_name_and_class() -> None:
    """A policy is made from its name or its class; an unknown name says which there are."""
    assert isinstance(make_policy("lru", 1), LRUPolicy)
    assert isinstance(make_policy("arc", 1), ARCPolicy)
    assert isinstance(make_policy(ARCPolicy, 1), ARCPolicy)
    with pytest.raises(ConfigurationError, match="lru, arc"):
        make_policy("fifo", 1)


@pytest.mark.parametrize("policy", [LRUPolicy, ARCPolicy])
def test_victims_are_only_looked_at(policy: type[Policy]) -> None:
    """Choosing victims changes nothing, and keeps what it is told to keep."""
    made = policy(6)
    slots = np.arange(6)
    made.add(slots, names_of([0, 1, 2, 3, 4, 5]))
    made.use(slots[3:])
    made.unpark(slots)
    order = made.order().tolist()
    victims = made.victims(3, np.array([1, 4]))
    assert len(set(victims.tolist()) - {1, 4}) == 3
    assert made.order().tolist() == order
    assert len(made) == 6


def test_arc_keeps_what_is_used_again_from_a_scan() -> None:
    """Blocks used twice outlive a long scan of blocks used once, where LRU loses them."""
    hits = {}
    for policy in ("lru", "arc"):
        index = TierIndex(10, policy=policy)
        ask(index, [1, 2, 3, 4])
        ask(index, [1, 2, 3, 4])
        for block in range(100, 200):
            ask(index, [block])
        hits[policy] = ask(index, [1, 2, 3, 4])
    assert hits == {"lru": 0, "arc": 4}


def test_arc_learns_from_its_ghosts() -> None:
    """A block wanted back soon after its eviction makes room for its kind: first the recent, then the frequent."""
    policy = ARCPolicy(4)

    def store(slots: list[int], names: list[int]) -> None:
        policy.add(np.array(slots), names_of(names))
        policy.unpark(np.array(slots))

    def evict(name: int) -> int:
        victims = policy.victims(1, np.empty(0, dtype=np.int64))
        policy.evict(victims, names_of([name]))
        return int(victims[0])

    store([0, 1], [10, 11])
    policy.park(np.array([0, 1]))
    policy.use(np.array([0, 1]))
    policy.unpark(np.array([0, 1]))
    store([2, 3], [12, 13])
    assert policy.target == 0
    assert evict(12) == 2  # the coldest of the recent
    store([2], [12])
    assert policy.target == 1
    assert evict(10) == 0  # the only recent block is now within the target: the coldest of the frequent
    store([0], [10])
    assert policy.target == 0
    assert evict(13) == 3


def test_arc_forgets_a_scan() -> None:
    """Blocks used once and their ghosts together count no more than the slots: a scan leaves hardly a trace."""
    policy = ARCPolicy(4)
    for block in range(20):
        slot = np.array([block % 4])
        if block >= 4:
            assert policy.victims(1, slot[:0]).tolist() == slot.tolist()
            policy.evict(slot, names_of([block - 4]))
        policy.add(slot, names_of([block]))
        policy.unpark(slot)
    assert policy.num_ghosts == 1


@given(requests=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True), max_size=60))
def test_arc_stays_within_its_bounds(requests: list[list[int]]) -> None:
    """Whatever is asked for, ARC remembers no more ghosts than it has slots, and its target stays a number of slots."""
    made: list[ARCPolicy] = []

    class WatchedARC(ARCPolicy):
        def __init__(self, num_slots: int) -> None:
            super().__init__(num_slots)
            made.append(self)

    index = TierIndex(8, policy=WatchedARC)
    for batch in requests:
        ask(index, batch)
        assert index.ready(names_of(batch)).all()
        assert 0 <= made[0].target <= 8
        assert made[0].num_ghosts <= 8
