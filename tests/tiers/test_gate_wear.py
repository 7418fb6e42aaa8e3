"""How much is written to a medium in a day: no more than was said, whatever is stored."""

from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.tiers.gate import Wear

DAY_S = 24 * 3600.0
A_DAY, AN_HOUR = 24_000, 1_000


def test_without_a_limit_all_is_written() -> None:
    """However much that is."""
    wear = Wear(None, lambda: 0.0)
    for _ in range(3):
        assert wear.take(1 << 50)
        wear.give_back(1 << 49)


@given(st.lists(st.tuples(st.floats(0, 7200), st.integers(1, 5000), st.floats(0, 1)), min_size=1, max_size=200))
def test_no_time_has_more_than_its_share(writes: list[tuple[float, int, float]]) -> None:
    """An hour's share that was saved up, or one write that is larger, and what time brings; many may be at once."""
    now, written, largest = 0.0, 0, AN_HOUR
    wear, underway = Wear(A_DAY, lambda: now), list[tuple[int, int]]()
    for pause_s, num_bytes, part in writes:
        now += pause_s
        if wear.take(num_bytes):
            largest = max(largest, num_bytes)
            underway.append((num_bytes, int(part * num_bytes)))
        most = written + sum(num_written for _, num_written in underway)
        assert most <= largest + now * A_DAY / DAY_S + 1e-6
        if part > 0.5 and underway:
            admitted, num_written = underway.pop(0)
            wear.give_back(admitted - num_written)
            written += num_written


def test_writes_at_once_share_what_was_saved_up() -> None:
    """They count from when they are let go on, not from when they have ended."""
    wear = Wear(A_DAY, lambda: 0.0)
    assert [wear.take(400) for _ in range(5)] == [True, True, False, False, False]
    assert wear.take(200)
    wear.give_back(400)  # of one that was not written
    assert wear.take(400)


def test_a_write_of_more_than_an_hours_share_waits_for_all_of_it() -> None:
    """It is let go on when nothing more can be saved up, and what was written too much is made up for first."""
    now = 0.0
    wear = Wear(A_DAY, lambda: now)
    assert wear.take(1)
    assert not wear.take(3_000)
    now = 10.0
    assert wear.take(3_000)
    assert not wear.take(1)
    now += 2 * 3600.0 - 1
    assert not wear.take(1)
    now += 10
    assert wear.take(1)
