"""Blocks that could not be read, on a clock that the test turns."""

import numpy as np
import pytest

from tests.tiers.test_health import Clock
from tiered_kv import Outcome
from tiered_kv.tiers.shared import Suspects
from tiered_kv.values.keys import Names

HIT, MISS, CORRUPT, FAILED = Outcome.HIT, Outcome.MISS, Outcome.CORRUPT, Outcome.FAILED


def named(*numbers: int) -> Names:
    """Return a batch of names, equal for equal numbers."""
    return np.array([[number, 1, 2, 3] for number in numbers], np.uint64)


def fail(suspects: Suspects, number: int, times: int, outcome: Outcome = FAILED) -> None:
    """Have a block fail so often in a row, between two that are read."""
    for _ in range(times):
        assert not suspects.saw(named(100, number, 101), [HIT, outcome, HIT]).any()


def test_a_broken_block_is_absent_at_once_and_deleted_when_it_is_broken_again() -> None:
    """The first time it may have been broken on the way; until it is stored anew, or for a minute, it is absent."""
    clock = Clock()
    suspects = Suspects(clock)
    assert not suspects.saw(named(1, 2), [HIT, CORRUPT]).any()
    assert suspects.absent(named(1, 2)).tolist() == [False, True]
    clock.now += 60.0
    assert not suspects.absent(named(2)).any()
    assert suspects.saw(named(1, 2), [HIT, CORRUPT]).tolist() == [False, True]


def test_a_broken_block_that_was_stored_anew_is_right_once_it_is_read() -> None:
    """It is found at once. Broken again before that, it is one that its medium did not replace: it is deleted."""
    suspects = Suspects(Clock())
    suspects.saw(named(1, 2), [CORRUPT, CORRUPT])
    suspects.wrote(named(1, 2))
    assert not suspects.absent(named(1, 2)).any()
    suspects.saw(named(1), [HIT])
    assert suspects.saw(named(1, 2), [CORRUPT, CORRUPT]).tolist() == [False, True]


def test_a_block_that_was_not_read_and_is_stored_anew_starts_anew() -> None:
    """What failed before says nothing of the new record."""
    suspects = Suspects(Clock())
    fail(suspects, 1, 3)
    assert suspects.absent(named(1)).any()
    suspects.wrote(named(1))
    assert not suspects.absent(named(1)).any()
    fail(suspects, 1, 2)
    assert not suspects.absent(named(1)).any()


@pytest.mark.parametrize("outcome", [FAILED, MISS])
def test_a_block_that_is_not_read_is_absent_for_longer_and_longer(outcome: Outcome) -> None:
    """Three times in a row, then for half a second, a second ... but never for so long that nobody finds it again."""
    clock = Clock()
    suspects = Suspects(clock)
    fail(suspects, 1, 2, outcome)
    assert not suspects.absent(named(1)).any()
    pauses = []
    for _ in range(8):
        fail(suspects, 1, 1, outcome)
        start = clock.now
        while suspects.absent(named(1)).any():
            clock.now += 0.25
        pauses.append(clock.now - start)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0, 4.0]
    assert not suspects.absent(named(100, 101)).any()


def test_one_read_that_goes_well_clears_a_block() -> None:
    """Failures count in a row, and within a minute."""
    clock = Clock()
    suspects = Suspects(clock)
    fail(suspects, 1, 2)
    suspects.saw(named(1), [HIT])
    fail(suspects, 1, 2)
    clock.now += 61.0
    fail(suspects, 1, 2)
    assert not suspects.absent(named(1)).any()


def test_a_call_that_fails_for_every_block_is_no_fault_of_the_blocks() -> None:
    """A medium that is away must not leave its blocks unfindable once it is back; one block alone may be at fault."""
    suspects = Suspects(Clock())
    for _ in range(5):
        suspects.saw(named(1, 2, 3), [FAILED] * 3)
        suspects.saw(named(4), [FAILED])
    assert suspects.absent(named(1, 2, 3, 4)).tolist() == [False, False, False, True]


def test_only_so_many_blocks_are_remembered() -> None:
    """Those that went badly longest ago are trusted again."""
    suspects = Suspects(Clock(), most_keys=10)
    for number in range(25):
        suspects.saw(named(number), [CORRUPT])
    assert len(suspects) == 10
    assert np.flatnonzero(suspects.absent(named(*range(25)))).tolist() == list(range(15, 25))
