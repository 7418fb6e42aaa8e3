"""How fast a tier reads, learned from its reads: right for a pipe, whatever sizes it was seen with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.tiers.gate import ReadSpeed

FIRST_S, BYTE_S = 0.02, 1e-8


class Pipe:
    """A medium that takes a while to begin, and then one byte after another."""

    def __init__(self) -> None:
        self.now = 100.0
        self.speed = ReadSpeed(lambda: self.now)

    def read(self, *sizes: int, is_well: bool = True) -> None:
        """Have it read all of them, asked for at once."""
        started, reads = self.now, [self.speed.begin(size) for size in sizes]
        for read in reads:
            self.now = started + FIRST_S + read.ahead * BYTE_S
            self.speed.end(read, is_well=is_well)

    def estimate(self) -> tuple[float, float]:
        """Return the seconds before the first byte and of each, which must be known."""
        estimate = self.speed.estimate()
        assert estimate is not None
        return estimate.first_s, estimate.byte_s


def test_nothing_is_said_before_anything_was_read() -> None:
    """A guess would have blocks computed that nobody ever tried to load; and a failed read says nothing of speed."""
    pipe = Pipe()
    assert pipe.speed.estimate() is None
    pipe.read(1 << 20, is_well=False)
    assert pipe.speed.estimate() is None


@given(st.lists(st.lists(st.integers(1 << 10, 1 << 26), min_size=1, max_size=8), min_size=3, max_size=20))
def test_a_pipe_is_known_by_reads_of_different_sizes(batches: list[list[int]]) -> None:
    """Alone or side by side: what a read takes is foretold for all sizes between those that were seen."""
    pipe = Pipe()
    for sizes in batches:
        pipe.read(*sizes)
    seen = [sum(sizes[: at + 1]) for sizes in batches[-3:] for at in range(len(sizes))]
    first_s, byte_s = pipe.estimate()
    for size in (min(seen), max(seen)):
        expected = FIRST_S + size * BYTE_S
        is_split = max(seen) > 4 * min(seen)
        assert first_s + size * byte_s == pytest.approx(expected, rel=0.05 if is_split else 0.8)


def test_reads_of_one_size_are_foretold_for_that_size() -> None:
    """There is no telling what part of the time is of each byte: it is foretold as if all were."""
    pipe = Pipe()
    for _ in range(5):
        pipe.read(1 << 20)
    first_s, byte_s = pipe.estimate()
    assert first_s == 0
    assert byte_s * (1 << 20) == pytest.approx(FIRST_S + (1 << 20) * BYTE_S)


def test_what_waits_in_line_comes_first() -> None:
    """The first byte of one more read comes after all that was asked for before."""
    pipe = Pipe()
    for size in (1 << 20, 1 << 24, 1 << 22):
        pipe.read(size)
    alone, byte_s = pipe.estimate()
    waiting = pipe.speed.begin(1 << 26)
    behind, same = pipe.estimate()
    assert same == byte_s
    assert behind - alone == pytest.approx((1 << 26) * BYTE_S, rel=0.01)
    pipe.speed.end(waiting, is_well=False)
    assert pipe.estimate()[0] == pytest.approx(alone)


def test_a_change_is_followed_within_some_reads() -> None:
    """What a medium did long ago says nothing of what it does under the load of now."""
    pipe = Pipe()
    for size in (1 << 20, 1 << 24) * 10:
        pipe.read(size)
    for size in (1 << 20, 1 << 24) * 10:
        read = pipe.speed.begin(size)
        pipe.now += 10 * (FIRST_S + size * BYTE_S)
        pipe.speed.end(read, is_well=True)
    first_s, byte_s = pipe.estimate()
    assert first_s == pytest.approx(10 * FIRST_S, rel=0.3)
    assert byte_s == pytest.approx(10 * BYTE_S, rel=0.3)


def test_a_tier_that_nobody_reads_is_tried_again() -> None:
    """Blocks that are computed because a medium was slow once would else be computed for ever."""
    pipe = Pipe()
    for size in (1 << 20, 1 << 24):
        pipe.read(size)
    before = pipe.estimate()
    pipe.now += 120
    assert pipe.estimate() == pytest.approx([each / 16 for each in before])


def test_a_read_that_hangs_is_felt_before_it_ends() -> None:
    """The first one of all, too: else whoever comes waits for it until its time is up. What has been put off is not."""
    pipe = Pipe()
    pipe.speed.begin(1 << 20, goes_first=False)
    assert pipe.speed.estimate() is None
    first = pipe.speed.begin(1 << 20)
    pipe.now += 3.0
    assert pipe.estimate() == (3.0, 0.0)
    pipe.speed.end(first, is_well=False)
    assert pipe.speed.estimate() is None
    for size in (1 << 20, 1 << 24):
        pipe.read(size)
    usual, _ = pipe.estimate()
    hanging = pipe.speed.begin(1 << 20)
    pipe.speed.begin(1 << 20)
    pipe.now += 0.01
    assert pipe.estimate()[0] == pytest.approx(usual + (1 << 21) * BYTE_S, rel=0.01)
    pipe.now += 3.0
    assert pipe.estimate()[0] > 2.9
    pipe.speed.end(hanging, is_well=False)
    pipe.speed.end(hanging, is_well=True)
    assert pipe.estimate()[0] > 2.9
    assert sum(read.num_bytes for read in pipe.speed._underway) == 1 << 21  # noqa: SLF001 - counted off once


def test_a_read_that_was_given_up_is_remembered_for_a_while() -> None:
    """Of the first one of all, too: else each request that comes waits in vain for a tier that hangs."""
    pipe = Pipe()
    for late_s in (0.25, 0.1):  # what was given up sooner says less
        read = pipe.speed.begin(1 << 20)
        pipe.now += late_s
        pipe.speed.give_up(read)
        pipe.speed.end(read, is_well=False)
        assert pipe.estimate()[0] == pytest.approx(0.25, rel=0.1)
    pipe.now += 30
    assert pipe.estimate()[0] < 0.005
    pipe.read(1 << 20)
    usual = pipe.estimate()
    read = pipe.speed.begin(1 << 20)
    pipe.now += FIRST_S
    pipe.speed.give_up(read)  # others gave it up, and not for its being late
    pipe.speed.end(read, is_well=False)
    assert pipe.estimate() == pytest.approx(usual, rel=0.01)
    read = pipe.speed.begin(1 << 20)
    pipe.now += 3.0
    pipe.speed.give_up(read)
    pipe.speed.end(read, is_well=False)
    assert pipe.estimate()[0] > 2.9
    pipe.read(1 << 20)
    assert pipe.estimate()[0] < 0.01


def test_what_others_are_going_to_read_is_told() -> None:
    """Transfers take turns, so what each of them has left counts, and what has ended does not."""
    pipe = Pipe()
    pipe.read(1 << 20)
    for who, num_bytes in (("a", 100), ("b", 30), ("a", 50), ("c", 0), ("b", 0)):
        pipe.speed.plan(who, num_bytes)
    estimate = pipe.speed.estimate()
    assert estimate is not None
    assert (estimate.num_others, estimate.others_bytes) == (1, 50)
    pipe.speed.plan("a", 0)
    pipe.speed.plan("a", 0)
    estimate = pipe.speed.estimate()
    assert estimate is not None
    assert (estimate.num_others, estimate.others_bytes) == (0, 0)
