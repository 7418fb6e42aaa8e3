import json
import pickle
import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from tiered_kv import LoadResult, LookupResult, Reason, StoreResult, TierRun, TierStore


def test_runs_add_up_by_tier_in_the_order_they_come() -> None:
    """A tier met twice along a prefix is counted once, with all its blocks."""
    runs = (TierRun("cpu", 0, 2), TierRun("nvme", 2, 7), TierRun("cpu", 7, 8))
    found = LookupResult(num_blocks=8, runs=runs, num_bytes=0, block_size=16)
    assert found.by_tier == {"cpu": 3, "nvme": 5}
    assert list(found.by_tier) == ["cpu", "nvme"]


def test_a_reason_is_the_word_that_it_stands_for() -> None:
    """A program that counts by text, a label of a metric and a line of a log see the word, and nothing around it."""
    counted = {Reason.NO_ROOM: 2}
    assert counted == {"no room": 2}
    assert (f"{Reason.NO_ROOM}", f"{counted}", json.dumps(counted)) == ("no room", "{'no room': 2}", '{"no room": 2}')
    assert pickle.loads(pickle.dumps(Reason.NO_ROOM)) is Reason.NO_ROOM
    assert all(re.fullmatch("[a-z]+( [a-z]+){0,2}", each) for each in Reason)


def test_the_pages_tell_of_every_reason() -> None:
    """Who meets a word finds what it means, and what helps."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "operate.md").read_text()
    assert [each for each in Reason if f"| `{each}` |" not in page] == []


async def test_a_store_with_nothing_below_is_settled_at_once() -> None:
    """There is nothing to wait for where no tier is written later."""
    assert await StoreResult(num_requested=1, num_stored=0, num_present=1, num_dropped=0).settled() == ()


async def test_settled_says_what_each_tier_did() -> None:
    """As often as it is asked."""
    told = (TierStore("cpu", written=2), TierStore("nvme", written=1, failed=1))

    async def settle() -> tuple[TierStore, ...]:
        return told

    result = StoreResult(2, 2, 0, 0, _settled=settle)
    assert (await result.settled(), await result.settled()) == (told, told)


def test_results_are_values() -> None:
    """They cannot be changed, and a load's crosses processes."""
    loaded = LoadResult(num_blocks=2, num_requested=3, by_tier={"cpu": 2})
    with pytest.raises(FrozenInstanceError):
        loaded.num_blocks = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(loaded)) == loaded
