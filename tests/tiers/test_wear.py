"""How much is written to a medium in a day: no more than was said, whatever is stored."""

from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.tiers.wear import Wear

DAY_S = 24 * 3600.0


def test_without_a_limit_all_is_written() -> None:
    """However much that is."""
    wear = Wear(None, lambda: 0.0)
    for _ in range(3):
        assert wear.may_write()
        wear.wrote(1 << 50)


@given(st.lists(st.tuples(st.floats(0, 7200), st.integers(1, 5000)), min_size=1, max_size=200))
def test_no_day_has_more_than_its_share(writes: list[tuple[float, int]]) -> None:
    """An hour's share that was saved up, what time brings, and the write that was under way when it was used up."""
    now, written, largest = 0.0, 0, 0
    wear = Wear(24_000, lambda: now)
    for pause_s, num_bytes in writes:
        now += pause_s
        if wear.may_write():
            wear.wrote(num_bytes)
            written, largest = written + num_bytes, max(largest, num_bytes)
        assert written <= 1_000 + now * 24_000 / DAY_S + largest + 1e-6


def test_it_goes_on_when_time_has_passed() -> None:
    """What was written too much is made up for first."""
    now = 0.0
    wear = Wear(24_000, lambda: now)
    wear.wrote(3_000)
    assert not wear.may_write()
    now = 2 * 3600.0 - 1
    assert not wear.may_write()
    now = 2 * 3600.0 + 1
    assert wear.may_write()
