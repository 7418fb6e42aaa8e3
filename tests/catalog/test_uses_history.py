"""What the history of fates remembers, and for how long."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.catalog.indexed import names_of
from tiered_kv.catalog import Fate, History


@given(
    notes=st.lists(st.tuples(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 255)), max_size=40),
    capacity=st.integers(0, 10),
)
def test_the_latest_fates_are_remembered(notes: list[tuple[list[int], int]], capacity: int) -> None:
    """The last ``capacity`` names noted are known by what befell them last; all older ones are forgotten."""
    history = History(capacity)
    model: dict[int, int] = {}
    for batch, fate in notes:
        history.note(names_of(*batch), fate)
        for name in batch:
            model.pop(name, None)
            model[name] = fate
        while len(model) > capacity:
            del model[next(iter(model))]
        assert history.fates(names_of(*range(21))).tolist() == [model.get(name, 0) for name in range(21)]
        assert len(history) == len(model)


@given(
    batches=st.lists(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 255)), max_size=12), max_size=10),
    capacity=st.integers(0, 10),
)
def test_fates_noted_together_are_remembered_as_one_after_another(
    batches: list[list[tuple[int, int]]], capacity: int
) -> None:
    """A batch of many fates, with repeats, leaves what as many calls of one name each would leave."""
    together, apart = History(capacity), History(capacity)
    for batch in batches:
        together.note(names_of(*(name for name, _ in batch)), np.array([fate for _, fate in batch], np.uint8))
        for name, fate in batch:
            apart.note(names_of(name), fate)
        every = names_of(*range(21))
        assert together.fates(every).tolist() == apart.fates(every).tolist()


def test_nothing_is_known_at_first_and_after_clearing() -> None:
    """A name that was never noted, or before a clear, has no known fate."""
    history = History()
    assert history.fates(names_of(1)).tolist() == [Fate.UNKNOWN]
    history.note(names_of(1, 2, 1), Fate.EVICTED)
    assert history.fates(names_of(1, 3)).tolist() == [Fate.EVICTED, Fate.UNKNOWN]
    history.clear()
    assert history.fates(names_of(1, 2)).tolist() == [Fate.UNKNOWN] * 2
    history.note(names_of(2), Fate.CORRUPT)
    assert history.fates(names_of(1, 2)).tolist() == [Fate.UNKNOWN, Fate.CORRUPT]
