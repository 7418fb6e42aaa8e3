"""Which records are kept although nobody can open them, and the slots they hold."""

import numpy as np

from tiered_kv.tiers.owned import Refused
from tiered_kv.values.keys import Names


def names_of(*numbers: int) -> Names:
    """Names by number."""
    return np.repeat(np.array(numbers, np.uint64)[:, None], 4, axis=1)


def test_an_eighth_of_the_tier_is_kept() -> None:
    """The first ones met; a record that is met again takes no more room."""
    refused = Refused()
    assert refused.keep(names_of(1, 2, 1), np.array([4, 5, 4]), 16).tolist() == [True, True, True]
    assert refused.keep(names_of(3), np.array([6]), 16).tolist() == [False]
    assert refused.keep(names_of(2), np.array([5]), 16).tolist() == [True]
    assert len(refused) == 2


def test_a_name_is_kept_in_one_slot() -> None:
    """Of a second one the slot would be nobody's to give back."""
    refused = Refused()
    assert refused.keep(names_of(1), np.array([4]), 64).tolist() == [True]
    assert refused.keep(names_of(1), np.array([7]), 64).tolist() == [False]
    assert refused.take(names_of(1, 2)).tolist() == [4]
    assert len(refused) == 0


def test_who_drops_them_hears_which_slots_they_held() -> None:
    """Those that the tier does not have any more, and those that its medium has lost."""
    refused, lost = Refused(), np.arange(64) == 5
    refused.keep(names_of(1, 2, 3), np.array([4, 5, 30]), 64)
    assert refused.drop_beyond(30, None).tolist() == [30]
    assert refused.drop_beyond(30, lost).tolist() == [5]
    assert refused.drop_beyond(30, lost).tolist() == []
    names, slots = refused.all()
    assert (names[:, 0].tolist(), slots.tolist()) == ([1], [4])


def test_what_is_taken_holds_its_slot_until_it_is_forgotten() -> None:
    """The medium has it still."""
    refused = Refused()
    refused.keep(names_of(1, 2), np.array([4, 5]), 64)
    slots = refused.take(names_of(2))
    withheld = refused.withheld(None, 64)
    assert withheld is not None
    assert np.flatnonzero(withheld).tolist() == [4, 5]
    refused.forgotten(slots)
    withheld = refused.withheld(None, 64)
    assert withheld is not None
    assert np.flatnonzero(withheld).tolist() == [4]
