"""What is counted of blocks' lives."""

import numpy as np
import pytest

from tiered_kv.catalog.policies.lhd import NUM_AGES, Lives, age_classes

ALL = slice(0, 4)


def classes_of(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return classes as they are noted."""
    return np.array(numbers, np.uint8)


def test_lives_are_counted_by_class_and_by_age() -> None:
    """Each that begins counts in its class, each that ends in a use by its age as well."""
    lives = Lives(4, half_life=1000.0)
    lives.begin(classes_of(0, 2, 2, 3))
    lives.end(classes_of(2, 2), np.array([20, 20]))
    lives.begin(classes_of(3), -1)
    seen, hits = lives.of(ALL)
    assert seen.tolist() == [1, 0, 2, 0]
    assert hits.sum() == hits[2, age_classes(np.array([20]))[0]] == 2


def test_what_was_seen_a_half_life_ago_counts_half() -> None:
    """Also what is noted still, and what was counted before the weights grew too large."""
    lives = Lives(4, half_life=10.0)
    for _ in range(30):
        lives.begin(classes_of(1))
        lives.advance(10)
    seen, _ = lives.of(ALL)
    assert seen[1] == pytest.approx(sum(0.5**n for n in range(1, 31)))


def test_the_counts_are_the_same_however_seldom_they_are_looked_at() -> None:
    """More is noted than is kept uncounted."""
    rng = np.random.default_rng(0)
    often, seldom = Lives(4, half_life=500.0), Lives(4, half_life=500.0)
    for _ in range(200):
        classes, ages = rng.integers(0, 4, 30).astype(np.uint8), rng.integers(0, 1 << 20, 30)
        for each in (often, seldom):
            each.begin(classes)
            each.end(classes[:20], ages[:20])
            each.advance(30)
        often.of(ALL)
    for one, other in zip(often.of(ALL), seldom.of(ALL), strict=True):
        assert one == pytest.approx(other)
    assert often.of(ALL)[1].shape == (4, NUM_AGES)
