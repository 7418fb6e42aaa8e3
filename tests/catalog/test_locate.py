"""Where a prefix is found, over several tiers."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.catalog.indexed import names_of
from tiered_kv.catalog import TierIndex, locate
from tiered_kv.values.keys import Names
from tiered_kv.values.results import TierRun, num_found


def tier_with(blocks: list[int]) -> TierIndex:
    """Return a tier in which these blocks are ready."""
    index = TierIndex(max(1, len(blocks)))
    with index.reserve(names_of(*blocks)) as reservation:
        reservation.commit().release()
    return index


class UnaskedTier(TierIndex):
    """A tier that nobody may look into."""

    def find(self, names: Names) -> tuple[np.ndarray, np.ndarray]:
        """Fail."""
        raise AssertionError("a lower tier was asked")

    ready_prefix = find  # type: ignore[assignment]


few_blocks = st.lists(st.integers(0, 15), unique=True)
ranges = st.lists(st.builds(range, st.integers(0, 300), st.integers(0, 300)), max_size=4)
long_runs = ranges.map(lambda parts: sorted(set().union(*parts)))


@given(held=st.lists(few_blocks | long_runs, max_size=3), num_blocks=st.integers(0, 16) | st.integers(0, 320))
def test_each_block_comes_from_the_fastest_tier(held: list[list[int]], num_blocks: int) -> None:
    """The runs cover the longest prefix without gaps or overlaps, each block from the first tier that has it."""
    runs = locate({f"{i}": tier_with(blocks) for i, blocks in enumerate(held)}, names_of(*range(num_blocks)))
    expected = []
    for block in range(num_blocks):
        tier = next((tier for tier, blocks in enumerate(held) if block in blocks), None)
        if tier is None:
            break
        expected.append(f"{tier}")
    assert num_found(runs) == len(expected)
    assert [run.tier for run in runs for _ in range(run.start, run.stop)] == expected
    ends = [0] + [run.stop for run in runs]
    assert [run.start for run in runs] == ends[:-1]
    assert all(a.tier != b.tier for a, b in pairwise(runs))


def test_long_prefixes_join_over_chunks() -> None:
    """Runs do not end where a chunk does."""
    upper, lower = tier_with(list(range(100, 2_200))), tier_with(list(range(4_000)))
    runs = locate({"upper": upper, "lower": lower}, names_of(*range(5_000)))
    assert runs == [TierRun("lower", 0, 100), TierRun("upper", 100, 2_200), TierRun("lower", 2_200, 4_000)]


def test_lower_tiers_are_not_asked_in_vain() -> None:
    """When the upper tier answers all, no other is asked."""
    tiers = {"upper": tier_with([1, 2, 3]), "lower": UnaskedTier(1)}
    assert locate(tiers, names_of(1, 2, 3)) == [TierRun("upper", 0, 3)]


def test_pending_blocks_do_not_count() -> None:
    """A block that is being written ends the prefix; looking changes nothing."""
    index = tier_with([1, 2])
    index.remove(names_of(2))
    with index.reserve(names_of(2)):
        before = index.statistics(), ids(index)
        assert locate({"cpu": index}, names_of(1, 2)) == [TierRun("cpu", 0, 1)]
        assert (index.statistics(), ids(index)) == before


def test_nothing_to_find() -> None:
    """No tiers, no names, or nothing there: an empty prefix."""
    assert not locate({}, names_of(1))
    assert not locate({"cpu": tier_with([1])}, names_of())
    assert not locate({"cpu": tier_with([1]), "nvme": tier_with([2])}, names_of(3))


def ids(index: TierIndex) -> list[int]:
    """Return the blocks of a tier in order of use."""
    listed: list[int] = index.names_in_order()[0][:, 0].tolist()
    return listed
