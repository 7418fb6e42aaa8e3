"""What the counts of uses promise: never too low within a window, seldom too high, always the same memory."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.catalog.indexed import names_of
from tiered_kv.catalog import UseCounts
from tiered_kv.catalog.uses import AdmissionFilter
from tiered_kv.values.errors import ConfigurationError


@given(batches=st.lists(st.lists(st.integers(0, 30), max_size=40), max_size=30), window=st.integers(1, 50))
def test_never_below_the_truth_between_halvings(batches: list[list[int]], window: int) -> None:
    """Uses are never undercounted until the counts are halved, and then never below what was halved."""
    counts = UseCounts(window)
    truth = Counter[int]()
    left = window
    for batch in batches:
        counts.add(names_of(*batch))
        truth.update(batch)
        left -= len(batch)
        if left <= 0:
            truth = Counter({name: uses // 2 for name, uses in truth.items()})
            left = window
        known = list(range(31))
        assert (counts.estimate(names_of(*known)) >= [min(truth[name], 255) for name in known]).all()


def test_counts_stop_at_255() -> None:
    """A name used without end is counted up to 255, and never as unused again."""
    counts = UseCounts(100_000)
    for _ in range(3):
        counts.add(names_of(*([7] * 200)))
    assert counts.estimate(names_of(7, 8)).tolist() == [255, 0]


def test_old_uses_fade() -> None:
    """What is not used again is forgotten after a few windows."""
    counts = UseCounts(100)
    counts.add(names_of(1, 1, 1))
    for turn in range(1, 4):
        counts.add(names_of(*range(1000 * turn, 1000 * turn + 100)))
    assert counts.estimate(names_of(1)).tolist() == [0]


def test_strangers_are_seldom_taken_for_friends() -> None:
    """With a full window of names used once after it and another under way, few names never used look used."""
    random = np.random.default_rng(0)
    counts = UseCounts(20_000)
    for _ in range(39):
        counts.add(random.integers(0, 1 << 63, (1_000, 4), dtype=np.uint64))
    strangers = counts.estimate(random.integers(0, 1 << 63, (20_000, 4), dtype=np.uint64))
    assert np.count_nonzero(strangers) < 20_000 / 40


def test_impossible_window() -> None:
    """A window without uses is refused."""
    with pytest.raises(ConfigurationError):
        UseCounts(0)


def test_each_tier_admits_after_its_own_number_of_uses() -> None:
    """One that wants none takes all; of the others each is told once, with the use that is enough."""
    admission, names = AdmissionFilter([1, 2, 3], window=100), names_of(1, 2)
    assert admission.admits(0, names).all()
    assert not admission.admits(1, names).any()
    told = [[(tier, enough.tolist()) for tier, enough in admission.use(names[:1])] for _ in range(4)]
    assert told == [
        [(1, [False]), (2, [False])],
        [(1, [True]), (2, [False])],
        [(1, [False]), (2, [True])],
        [(1, [False]), (2, [False])],
    ]
    assert [admission.admits(tier, names).tolist() for tier in (1, 2)] == [[True, False]] * 2


def test_tiers_that_want_no_uses_cost_no_counting() -> None:
    """Nothing is counted for them, and nobody is told."""
    admission = AdmissionFilter([1, 0], window=1 << 20)
    assert admission.use(names_of(1, 2)) == []
    assert admission.admits(1, names_of(3)).all()


def test_what_a_tier_did_not_get_is_enough_by_one_more_use() -> None:
    """Once, of what is remembered, and by no use of others; a tier that wants no uses has nothing to remember."""
    admission = AdmissionFilter([1, 2], window=1 << 20)
    names, many = names_of(0, 1, 2), names_of(*range(70_000))
    for _ in range(3):
        admission.use(many)
    admission.again(0, names)
    admission.again(1, names[:2])
    assert [mask.tolist() for _, mask in admission.use(names[1:])] == [[True, False]]
    assert [mask.tolist() for _, mask in admission.use(names)] == [[True, False, False]]
    assert [mask.tolist() for _, mask in admission.use(names)] == [[False, False, False]]
    admission.again(1, many)
    assert [int(mask.sum()) for _, mask in admission.use(many)] == [1 << 16]
