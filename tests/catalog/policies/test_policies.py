"""What the policies keep: recency, frequency, and ARC's memory of what it let go."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.catalog.indexed import names_of
from tiered_kv.catalog import TierIndex
from tiered_kv.catalog.policies import ARCPolicy, LHDPolicy, LRUPolicy, MQPolicy, Policy, make_policy
from tiered_kv.catalog.policies.make_policy import POLICIES
from tiered_kv.testing import PolicyTests
from tiered_kv.values.errors import ConfigurationError


class TestEachPolicy(PolicyTests):
    """What every policy promises."""

    @pytest.fixture(params=POLICIES.values())
    def policy(self, request: pytest.FixtureRequest) -> type[Policy]:
        """One after the other."""
        chosen: type[Policy] = request.param
        return chosen


def ask(index: TierIndex, batch: list[int]) -> int:
    """Ask for blocks as a request does: read what is there, store the rest; return the hits."""
    names = names_of(*batch)
    hits = int(np.count_nonzero(index.ready(names)))
    index.touch(names)
    with index.reserve(names) as reservation:
        reservation.commit().release()
    return hits


def test_policies_by_name_and_class() -> None:
    """A policy is made from its name or its class; an unknown name says which there are."""
    assert isinstance(make_policy("lru", 1), LRUPolicy)
    assert isinstance(make_policy("arc", 1), ARCPolicy)
    assert isinstance(make_policy("mq", 1), MQPolicy)
    assert isinstance(make_policy("lhd", 1), LHDPolicy)
    assert isinstance(make_policy(ARCPolicy, 1), ARCPolicy)
    with pytest.raises(ConfigurationError, match="lru, arc, mq, lhd, or a class"):
        make_policy("no such policy", 1)


@pytest.mark.parametrize("policy", POLICIES.values())
def test_victims_are_only_looked_at(policy: type[Policy]) -> None:
    """Choosing victims changes nothing, and keeps what it is told to keep."""
    made = policy(6)
    slots = np.arange(6)
    made.add(slots, names_of(0, 1, 2, 3, 4, 5))
    made.use(slots[3:])
    made.unpark(slots)
    order = made.order().tolist()
    victims = made.victims(3, np.array([1, 4]))
    assert len(set(victims.tolist()) - {1, 4}) == 3
    assert made.order().tolist() == order
    assert len(made) == 6


def test_what_is_used_again_is_kept_from_a_scan() -> None:
    """Blocks used twice outlive a scan of blocks used once, where LRU loses them; with some a very long one."""
    hits = {}
    for policy, num_scanned in (("lru", 12), ("arc", 100), ("mq", 12), ("lhd", 100)):
        index = TierIndex(10, policy=policy)
        ask(index, [1, 2, 3, 4])
        ask(index, [1, 2, 3, 4])
        for block in range(100, 100 + num_scanned):
            ask(index, [block])
        hits[policy] = ask(index, [1, 2, 3, 4])
    assert hits == {"lru": 0, "arc": 4, "mq": 4, "lhd": 4}


def test_arc_learns_from_its_ghosts() -> None:
    """A block wanted back soon after its eviction makes room for its kind: first the recent, then the frequent."""
    policy = ARCPolicy(4)

    def store(slots: list[int], names: list[int]) -> None:
        policy.add(np.array(slots), names_of(*names))
        policy.unpark(np.array(slots))

    def evict(name: int) -> int:
        victims = policy.victims(1, np.empty(0, dtype=np.int64))
        policy.evict(victims, names_of(name))
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
            policy.evict(slot, names_of(block - 4))
        policy.add(slot, names_of(block))
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
        assert index.ready(names_of(*batch)).all()
        assert 0 <= made[0].target <= 8
        assert made[0].num_ghosts <= 8


def test_mq_counts_on_what_it_evicted() -> None:
    """A block that was used often before it was evicted is no stranger when it comes back."""
    policy = MQPolicy(4)
    none = np.empty(0, dtype=np.int64)
    often = np.array([0])
    policy.add(often, names_of(7))
    policy.unpark(often)
    for _ in range(5):
        policy.park(often)
        policy.use(often)
        policy.unpark(often)
    assert policy.victims(1, none).tolist() == [0]
    policy.evict(often, names_of(7))
    policy.add(np.array([1, 2]), names_of(8, 9))
    policy.add(np.array([3]), names_of(7))
    policy.unpark(np.array([3, 1, 2]))
    assert policy.victims(3, none).tolist() == [1, 2, 3]


def test_mq_forgets_what_was_popular_long_ago() -> None:
    """A block that was used often and is not used any more goes down queue by queue, and then out."""
    index = TierIndex(10, policy="mq")
    for _ in range(5):
        ask(index, [1, 2, 3, 4])
    for block in range(100, 400):
        ask(index, [block])
    assert ask(index, [1, 2, 3, 4]) == 0


def test_mq_learns_how_long_blocks_stay_away() -> None:
    """A life is as long as two thirds of the pauses between two uses, also of blocks that were evicted meanwhile."""
    policies = []
    for pause in (5, 200):
        made: list[MQPolicy] = []

        class WatchedMQ(MQPolicy):
            def __init__(self, num_slots: int) -> None:
                super().__init__(num_slots)
                made.append(self)  # noqa: B023 - used in this turn of the loop

        index = TierIndex(20, policy=WatchedMQ)
        for n in range(2000):
            ask(index, [n % pause])
        policies.append(made[0])
    assert [pause / 2 < policy.life < 2 * pause for pause, policy in zip((5, 200), policies, strict=True)] == [True] * 2
