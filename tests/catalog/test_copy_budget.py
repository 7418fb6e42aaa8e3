"""What is copied out of an engine that drops it: enough, the right ones, and not too much."""

import numpy as np
import pytest

from tiered_kv.catalog.copy_budget import COPIES, CopyBudget
from tiered_kv.traces import names_of
from tiered_kv.values.keys import Names


def named(first: int, count: int = 16) -> Names:
    """Name the blocks of a prompt."""
    return names_of(np.arange(first, first + count))


class Engine:
    """Drops each prompt after ``holds`` others, and counts which are copied."""

    def __init__(self, *, holds: int = 8) -> None:
        self.budget = CopyBudget(engine_blocks=16 * holds, memory_blocks=32 * holds)
        self.copied: dict[int, int] = {}
        self.asked = 0
        self._holds = holds
        self._here: list[int] = []

    def serve(self, first: int) -> None:
        """Serve a prompt that nobody else has dropped yet, or has."""
        self.asked += 16
        self.budget.ask(named(first))
        if first in self._here:
            self._here.remove(first)
        self._here.append(first)
        if len(self._here) > self._holds:
            gone = self._here.pop(0)
            num_copied = int(np.count_nonzero(self.budget.drop(named(gone))))
            self.copied[gone] = self.copied.get(gone, 0) + num_copied

    @property
    def rate(self) -> float:
        """Copies for each block asked for."""
        return sum(self.copied.values()) / self.asked


def test_all_is_copied_while_nothing_is_known() -> None:
    """There is room for it."""
    engine = Engine()
    for number in range(20):
        engine.serve(16 * number)
    assert engine.rate == 12 / 20


def test_of_what_never_comes_back_half_is_copied_and_no_more() -> None:
    """Whole prompts, but for those where a period begins or what it may copy ends."""
    engine = Engine()
    for number in range(8_000):
        engine.serve(16 * number)
    assert engine.rate == pytest.approx(COPIES, abs=0.002)
    whole = sum(count in {0, 16} for count in engine.copied.values())
    assert whole >= 0.95 * len(engine.copied)


def test_what_comes_back_goes_first() -> None:
    """Here what was asked for twice: that is copied each time, and of the rest what there is room for."""
    engine = Engine()
    popular = [10**6 + 16 * number for number in range(20)]
    for number in range(8_000):
        engine.serve(16 * number)
        if number % 3 == 0:
            engine.serve(popular[number // 3 % len(popular)])
    late = [engine.copied.pop(each) for each in popular]
    assert min(late) >= 0.85 * 16 * 133  # of the times that it was dropped
    assert engine.rate < COPIES


def test_what_comes_back_soon_is_copied_whatever_it_takes() -> None:
    """Each prompt comes twice, soon after it was dropped: once in two is often."""
    engine = Engine()
    for number in range(4_000):
        engine.serve(16 * number)
        if number >= 12:
            engine.serve(16 * (number - 12))
    late = [count for first, count in engine.copied.items() if first > 16 * 2_000]
    assert min(late[:-100]) >= 16
    assert engine.rate > COPIES


def test_what_comes_back_too_late_for_memory_is_no_reason_to_copy_more() -> None:
    """Round and round, a hundred times what both hold."""
    engine = Engine()
    for number in range(8_000):
        engine.serve(16 * (number % 2_400))
    assert engine.rate <= COPIES + 0.01


def test_what_was_passed_over_is_judged_all_the_same() -> None:
    """Once it comes back, it is copied: nothing depends on whether it was."""
    engine = Engine()
    for number in range(4_000):
        engine.serve(16 * number)
    engine.copied.clear()
    for number in range(4_000, 8_000):
        engine.serve(16 * number)
        engine.serve(16 * (number - 10))
    late = [count for first, count in engine.copied.items() if 16 * 6_000 < first < 16 * 7_900]
    assert np.mean(late) >= 16


def test_copies_that_take_longer_than_they_save_are_not_made() -> None:
    """One in two comes back, and a copy takes as long as to compute the block twice; others go on being made."""
    engine = Engine()
    for number in range(2_000):
        engine.serve(16 * number)
        if number % 2 and number >= 12:
            engine.serve(16 * (number - 12))
    before = sum(engine.copied.values())
    engine.budget.cost = 2.0
    for number in range(2_000, 2_200):
        engine.serve(16 * number)
    assert sum(engine.copied.values()) - before <= 16 * 64  # those of the period that had begun


def test_now_and_then_it_is_tried_how_long_copies_take_now() -> None:
    """Whoever copies nothing can't know: so what is said of the cost counts less and less, until there are some."""
    engine = Engine()
    engine.budget.cost = 8.0
    for number in range(4_000):
        engine.serve(16 * number)
        if number >= 12:
            engine.serve(16 * (number - 12))
    before = sum(engine.copied.values())
    for number in range(4_000, 6_000):
        engine.serve(16 * number)
        engine.serve(16 * (number - 12))
    tried = (sum(engine.copied.values()) - before) / (2 * 16 * 2_000)
    assert 0 < tried < 0.25
    engine.budget.cost = 0.01
    before = sum(engine.copied.values())
    for number in range(6_000, 8_000):
        engine.serve(16 * number)
        engine.serve(16 * (number - 12))
    assert (sum(engine.copied.values()) - before) / (2 * 16 * 2_000) > COPIES
