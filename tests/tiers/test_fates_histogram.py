"""Counts of ranges."""

from tiered_kv.tiers.fates import Histogram


def test_each_value_counts_in_the_first_range_that_it_fits_in() -> None:
    """However many are told before anybody looks; and a copy stays as it was."""
    histogram = Histogram((1.0, 2.0))
    for number in range(1000):
        histogram.saw((0.5, 1.0, 1.5, 9.0)[number % 4])
    copied = histogram.copy()
    histogram.saw(0.0)
    assert copied.cumulated() == [("1", 500.0), ("2", 750.0), ("+Inf", 1000.0)]
    assert copied.total == 250 * 12.0
    assert histogram.cumulated()[0] == ("1", 501.0)


def test_of_nothing_there_is_nothing() -> None:
    """In any range."""
    assert Histogram((1.0,)).cumulated() == [("1", 0.0), ("+Inf", 0.0)]
