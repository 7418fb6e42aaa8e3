"""What became of blocks is remembered, at a bounded cost a call."""

import numpy as np

from tests.support.work import num_calls
from tiered_kv.catalog.uses import Fate
from tiered_kv.tiers.fates import Fates
from tiered_kv.values.keys import Names


def names_of(start: int, n: int) -> Names:
    """Return names that differ in their first words."""
    names = np.zeros((n, 4), dtype=np.uint64)
    names[:, 0] = np.arange(start, start + n)
    return names


def test_no_note_pays_for_thousands_before_it() -> None:
    """Single blocks that leave two full tiers in turns: no one of them pays for thousands before it."""
    fates = Fates()
    most = 0
    for number in range(10_000):
        name, tier = names_of(number, 1), ("cpu", "disk")[number % 2]
        most = max(most, num_calls(lambda name=name, tier=tier: fates.note(name, Fate.EVICTED, tier)))  # type: ignore[misc] # a lambda with defaults
    assert most < 500
    assert fates.of(names_of(0, 3)) == [(Fate.EVICTED, "cpu"), (Fate.EVICTED, "disk"), (Fate.EVICTED, "cpu")]
    assert fates.of(names_of(10_000, 1)) == [(Fate.UNKNOWN, "")]


def test_many_blocks_are_noted_as_fast_as_few() -> None:
    """A long prompt that finds the queue full must not hold the event loop."""
    fates = Fates()
    fates.note(names_of(50_000, 1), Fate.EVICTED, "cpu")
    counts = [num_calls(lambda n=n: fates.note(names_of(0, n), Fate.DROPPED, "queue full")) for n in (300, 60_000)]  # type: ignore[misc] # as above
    assert counts[1] < 2 * counts[0]
    assert fates.of(names_of(0, 60_001)[[0, 50_000, 59_999, 60_000]]) == 3 * [(Fate.DROPPED, "queue full")] + [
        (Fate.UNKNOWN, "")
    ]


def test_the_last_of_what_befell_a_block_counts() -> None:
    """Also when one call names more blocks than are noted together, and some of them twice."""
    fates = Fates()
    fates.note(names_of(0, 5000), Fate.DROPPED, "queue full")
    fates.note(names_of(2000, 3000), Fate.FAILED, "disk")
    fates.note(names_of(0, 0), Fate.REMOVED, "nobody")
    fates.note(np.concatenate([names_of(4999, 1), names_of(4999, 1)]), Fate.CORRUPT, "disk")
    said = fates.of(names_of(0, 5001))
    assert set(said[:2000]) == {(Fate.DROPPED, "queue full")}
    assert set(said[2000:4999]) == {(Fate.FAILED, "disk")}
    assert said[4999:] == [(Fate.CORRUPT, "disk"), (Fate.UNKNOWN, "")]


def test_every_fate_is_told_from_the_others() -> None:
    """Whatever befell a block, and wherever."""
    fates = Fates()
    all_fates = ["EVICTED", "REMOVED", "EXPIRED", "CORRUPT", "FAILED", "DROPPED", "UNADMITTED"]
    told = [(fate, tier) for fate in all_fates for tier in ("cpu", "disk")]
    for number, (fate, tier) in enumerate(told):
        fates.note(names_of(number, 1), Fate[fate], tier)
    assert [(fate.name, tier) for fate, tier in fates.of(names_of(0, len(told)))] == told
