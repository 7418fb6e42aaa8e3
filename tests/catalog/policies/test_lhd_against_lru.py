"""Whether LRU would do better, as told from when blocks were used last."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.catalog.policies.lhd import AgainstLRU

NUM_SLOTS = 1280
NOBODY = np.empty(0, np.int64)


def filled() -> tuple[AgainstLRU, int]:
    """Use 20 tiers full of new blocks, one after the other."""
    against = AgainstLRU(NUM_SLOTS, 0)
    for now in range(20 * NUM_SLOTS):
        against.count(now, 1, NOBODY, is_hit=False)
    return against, 20 * NUM_SLOTS


def miss(against: AgainstLRU, now: int, ages: list[int]) -> None:
    """Use blocks of these ages that are not here."""
    against.count(now, 0, now - np.array(ages), is_hit=False)


def test_lru_is_preferred_once_a_tenth_of_the_slots_was_lost() -> None:
    """Misses of blocks that LRU would have count, and not before there are so many."""
    against, now = filled()
    miss(against, now, [NUM_SLOTS // 2] * (NUM_SLOTS // 10))
    assert not against.prefers_lru
    miss(against, now, [NUM_SLOTS // 2])
    assert against.prefers_lru


def test_what_lru_would_have_lost_too_counts_for_nothing() -> None:
    """Misses of blocks last used before as many others as there are slots are nobody's fault."""
    against, now = filled()
    miss(against, now, [NUM_SLOTS * 5 // 4] * NUM_SLOTS)
    assert not against.prefers_lru


def test_blocks_that_are_used_again_and_again_make_lru_reach_further_back() -> None:
    """LRU holds the blocks used last, however often each was: a few that are used all the time leave it its room."""
    against, now = filled()
    for step in range(10 * NUM_SLOTS):  # nine of ten uses are of the same block
        against.count(now, 1, NOBODY, is_hit=False) if step % 10 == 0 else against.count(
            now, 0, np.array([now - 1]), is_hit=True
        )
        now += 1
    miss(against, now, [5 * NUM_SLOTS] * (NUM_SLOTS // 5))
    assert against.prefers_lru


def test_hits_that_lru_would_not_have_had_make_up_for_losses() -> None:
    """Who loses some and gains as many is no worse."""
    against, now = filled()
    for _ in range(20):
        miss(against, now, [NUM_SLOTS // 2] * (NUM_SLOTS // 20))
        against.count(now, 0, now - np.full(NUM_SLOTS // 20, 5 * NUM_SLOTS), is_hit=True)
    assert not against.prefers_lru


def test_each_try_that_loses_makes_the_next_one_wait_twice_as_long() -> None:
    """So in the end hardly anything is lost where there is nothing to gain."""
    against, now = filled()
    waits = []
    for _ in range(4):
        miss(against, now, [NUM_SLOTS // 2] * NUM_SLOTS)
        began = now
        while against.prefers_lru:
            now += NUM_SLOTS
            against.count(now, NUM_SLOTS, NOBODY, is_hit=False)
        waits.append(now - began)
    assert waits == [4 * NUM_SLOTS * 2**n for n in range(4)]


def test_time_that_passes_without_uses_does_no_harm() -> None:
    """After a long leap, all that was used before is long ago."""
    against, now = filled()
    now += 10**9
    miss(against, now, [10**9 + 5] * NUM_SLOTS)
    assert not against.prefers_lru


@given(
    uses=st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 40), st.lists(st.integers(1, 3000), max_size=40), st.booleans()),
        max_size=60,
    )
)
def test_it_judges_the_same_however_seldom_it_is_asked(uses: list[tuple[int, int, list[int], bool]]) -> None:
    """What is noted together is counted as if each batch had been counted by itself."""
    often, seldom = AgainstLRU(100, 0), AgainstLRU(100, 0)
    now = 5000
    for passed, num_new, ages, is_hit in uses:
        now += passed
        for each in (often, seldom):
            each.count(now, num_new, np.maximum(now - np.array(ages, np.int64), 0), is_hit=is_hit)
        was_preferred = often.prefers_lru
    assert not uses or seldom.prefers_lru == was_preferred
