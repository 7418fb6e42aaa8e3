"""What a shared tier has said lately: short-lived, bounded, and asked for by one."""

import numpy as np
import pytest

from tiered_kv.tiers.shared import Answers
from tiered_kv.values.keys import Names
from tiered_kv.values.results import BlockState

MISS, ASKING, HIT = BlockState.MISS, BlockState.ASKING, BlockState.HIT


class Clock:
    """A clock that stands still."""

    now = 100.0

    def __call__(self) -> float:
        """Return when it stopped."""
        return self.now


def names(*numbers: int) -> Names:
    """Names of blocks."""
    return np.repeat(np.array(numbers, np.uint64)[:, None], 4, axis=1)


def tell(answers: Answers, about: Names, *states: BlockState) -> None:
    """Have a question asked, and answered by HIT or MISS."""
    with answers.asking(about) as question:
        answers.take(about, np.array(states) == HIT, question)


def test_one_asks_and_all_are_told() -> None:
    """The first to look is to ask; then the answer is there for a second."""
    clock = Clock()
    answers = Answers(clock, 5.0)
    for is_first in (True, False):
        states, to_ask = answers.look(names(1, 2))
        assert states.tolist() == [ASKING] * 2
        assert to_ask.tolist() == [is_first] * 2
    tell(answers, names(1, 2), HIT, MISS)
    states, to_ask = answers.look(names(1, 2, 3))
    assert states.tolist() == [HIT, MISS, ASKING]
    assert to_ask.tolist() == [False, False, True]
    clock.now += 1.0
    assert answers.look(names(1, 2))[1].all()


def test_a_question_under_way_is_waited_for() -> None:
    """However long its turn takes to come: whoever looks then asks nothing, and gets its answer."""
    clock = Clock()
    answers = Answers(clock, 5.0)
    with answers.asking(names(1)) as question:
        clock.now += 1000.0
        assert not answers.look(names(1))[1].any()
        answers.take(names(1), np.array([True]), question)
    assert answers.look(names(1))[0].tolist() == [HIT]


def test_what_asking_takes_is_known_and_what_part_was_there() -> None:
    """By the last questions, and by one that has had no answer for longer; one that is given up says nothing."""
    clock = Clock()
    answers = Answers(clock, 5.0)
    assert answers.cost() == (0.0, 1.0)
    with answers.asking(names(1, 2)) as question:
        clock.now += 0.5
        assert answers.cost() == (0.5, 1.0)
        answers.take(names(1), np.array([False]), question)  # it ends there
    assert answers.cost() == (0.5, 0.8)
    for _ in range(30):
        tell(answers, names(1), MISS)
    assert max(answers.cost()) < 0.01
    with answers.asking(names(3)):
        clock.now += 60.0
        assert answers.cost()[0] == 60.0
    for _ in range(30):
        tell(answers, names(4), HIT)
    assert answers.cost() == pytest.approx((0.0, 1.0), abs=0.01)


def test_what_nobody_began_to_ask_is_asked_by_another() -> None:
    """Nothing that gets lost keeps a block from ever being found."""
    clock = Clock()
    answers = Answers(clock, 5.0)
    answers.look(names(1))
    clock.now += 4.9
    assert not answers.look(names(1))[1].any()
    clock.now += 0.1
    assert answers.look(names(1))[1].all()


def test_a_question_that_raises_is_asked_by_another() -> None:
    """An interrupt of the program's came while a backend ran: nobody is asking any more."""
    answers = Answers(Clock(), 5.0)
    answers.look(names(1, 2))
    with pytest.raises(KeyboardInterrupt), answers.asking(names(1, 2)):
        raise KeyboardInterrupt
    assert answers.look(names(1, 2))[1].all()


def test_what_is_forgotten_is_asked_anew() -> None:
    """And what was never known is no error."""
    answers = Answers(Clock(), 5.0)
    tell(answers, names(1, 2), HIT, HIT)
    answers.forget(names(2, 3))
    assert answers.look(names(1, 2))[0].tolist() == [HIT, ASKING]


def test_a_doubt_is_about_what_is_said_to_be_there() -> None:
    """A question under way is not asked twice for it, and what is absent stays so."""
    answers = Answers(Clock(), 5.0)
    answers.look(names(1))
    tell(answers, names(2, 3), HIT, MISS)
    answers.doubt(names(1, 2, 3, 4))
    states, to_ask = answers.look(names(1, 2, 3))
    assert states.tolist() == [ASKING, ASKING, MISS]
    assert to_ask.tolist() == [False, True, False]


def test_the_oldest_answers_go_first() -> None:
    """However many are asked for, so many are kept; an answer that came anew is a new one."""
    answers = Answers(Clock(), 5.0, most_names=2)
    for name in (1, 2, 1, 3):
        tell(answers, names(name), HIT)
    assert answers.look(names(1, 3))[0].tolist() == [HIT, HIT]
    assert answers.look(names(2))[0].tolist() == [ASKING]


def test_what_has_happened_since_the_question_is_not_known_to_its_answer() -> None:
    """Of a block that was stored or evicted meanwhile it says nothing; another question does."""
    answers = Answers(Clock(), 5.0)
    with answers.asking(names(1, 2)) as before:
        answers.forget(names(1))
        with answers.asking(names(1)) as after:
            answers.take(names(1, 2), np.array([False, False]), before)
            assert answers.look(names(1, 2))[0].tolist() == [ASKING, MISS]
            answers.take(names(1), np.array([True]), after)
    assert answers.look(names(1))[0].tolist() == [HIT]
