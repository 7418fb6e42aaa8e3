"""Load or recompute: how many leading blocks it pays to load."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.any_layout import AnyEngine, cpu, memory, open_any, prompt
from tiered_kv import ConfigurationError, LookupResult, TierRun
from tiered_kv.values.results import LoadCost

BLOCK = 16


def found(*runs: tuple[str, int], **costs: tuple[float, float]) -> LookupResult:
    """Return a lookup's answer of runs of these lengths, from tiers with these costs."""
    stops = list(itertools.accumulate(count for _, count in runs))
    made = tuple(TierRun(name, stop - n, stop) for (name, n), stop in zip(runs, stops, strict=True))
    return LookupResult(stops[-1], made, 0, BLOCK, {name: LoadCost(*cost) for name, cost in costs.items()})


def test_what_is_faster_is_done() -> None:
    """All is loaded where a tier is faster than computing, nothing where it is slower, in one formula."""
    fast = found(("nvme", 100), nvme=(0.001, 0.001)).split(prefill_tokens_per_s=8_000)
    assert (fast.num_blocks, fast.order) == (100, "front")
    assert [fast.load_s, fast.total_s] == pytest.approx([0.101, 0.101])
    slow = found(("s3", 100), s3=(0.001, 0.01)).split(prefill_tokens_per_s=8_000)
    assert slow.num_blocks == 0
    assert [slow.load_s, slow.total_s] == pytest.approx([0.0, 0.2])


def test_a_latency_has_to_pay() -> None:
    """Where the first block takes long, a few blocks are computed and many are loaded."""
    assert found(("s3", 10), s3=(0.1, 0.0001)).split(prefill_tokens_per_s=1_600).num_blocks == 0
    assert found(("s3", 20), s3=(0.1, 0.0001)).split(prefill_tokens_per_s=1_600).num_blocks == 20


def test_what_is_in_memory_is_loaded_and_what_is_slow_behind_it_is_computed() -> None:
    """A prefix may lie in several tiers: it is cut where the next one does not pay."""
    lying = found(("cpu", 10), ("nvme", 10), ("s3", 10), nvme=(0.0, 0.001), s3=(0.05, 0.02))
    assert lying.split(prefill_tokens_per_s=8_000).num_blocks == 20
    assert lying.split(prefill_tokens_per_s=100).num_blocks == 30


def test_loading_is_free_while_the_engine_is_busy() -> None:
    """In the time that the request waits for its turn anyway."""
    lying = found(("s3", 100), s3=(0.0, 0.01))
    assert lying.split(prefill_tokens_per_s=8_000).num_blocks == 0
    assert lying.split(prefill_tokens_per_s=8_000, queue_s=0.5).num_blocks == 50
    assert lying.split(prefill_tokens_per_s=8_000, queue_s=2.0).num_blocks == 100


def test_a_tier_that_was_never_read_is_loaded_from() -> None:
    """So that its cost is known the next time."""
    assert found(("new", 7)).split(prefill_tokens_per_s=1e9).num_blocks == 7


def test_tokens_from_storage_are_bounded() -> None:
    """What is in memory does not count; the first block that would be too many ends it."""
    lying = found(("nvme", 4), ("cpu", 4), ("nvme", 4), nvme=(0.0, 0.0))
    assert lying.split(prefill_tokens_per_s=1, max_storage_tokens=6 * BLOCK).num_blocks == 10
    assert lying.split(prefill_tokens_per_s=1, max_storage_tokens=3 * BLOCK + 15).num_blocks == 3
    assert lying.split(prefill_tokens_per_s=1, max_storage_tokens=0).num_blocks == 0


def test_nothing_found_is_nothing_to_load() -> None:
    """An empty answer is cut like any other."""
    nothing = LookupResult(0, (), 0, BLOCK)
    assert nothing.split(prefill_tokens_per_s=1).num_blocks == 0
    assert nothing.estimated_load_s == 0.0


def test_both_ends_at_once_where_that_is_faster() -> None:
    """An engine that can load meanwhile computes from the front, as long as a step of its own is short enough."""
    lying = found(("nvme", 100), nvme=(0.0, 0.001))
    both = lying.split(prefill_tokens_per_s=16_000, chunk_tokens=64)
    assert (both.order, both.num_blocks) == ("back", 100)
    assert both.total_s == pytest.approx(0.056)  # where the two meet, whole steps
    large = lying.split(prefill_tokens_per_s=16_000, chunk_tokens=1600)
    assert large.order == "front"
    assert large.total_s == pytest.approx(0.1)
    busy = lying.split(prefill_tokens_per_s=16_000, chunk_tokens=64, queue_s=0.2)
    assert busy.order == "front"
    assert busy.total_s == pytest.approx(0.2)
    few = lying.split(prefill_tokens_per_s=16_000, chunk_tokens=64, max_storage_tokens=160)
    assert few.order == "front"


def test_an_engine_whose_steps_are_shorter_than_a_block() -> None:
    """It goes on to the last block: where loading takes for ever all is computed, and of nothing nothing is loaded."""
    slow = found(("nvme", 10), nvme=(0.0, 1000.0)).split(prefill_tokens_per_s=16, chunk_tokens=8)
    assert (slow.order, slow.num_blocks) == ("front", 0)
    assert slow.total_s == pytest.approx(10.0)
    assert found(("nvme", 0)).split(prefill_tokens_per_s=16, chunk_tokens=8).num_blocks == 0


def test_a_load_takes_turns_with_others() -> None:
    """Two that read at once take twice as long, until the shorter one has all it wants."""
    cost = LoadCost(0.5, 0.01, num_others=2, others_blocks=100)
    assert cost.seconds(np.array([0, 10, 100])).tolist() == pytest.approx([0, 0.5 + 0.3, 0.5 + 2.0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefill_tokens_per_s": 0},
        {"prefill_tokens_per_s": 1, "queue_s": -1},
        {"prefill_tokens_per_s": 1, "chunk_tokens": 0},
        {"prefill_tokens_per_s": 1, "chunk_tokens": 64.5},
        {"prefill_tokens_per_s": "8"},
        {"prefill_tokens_per_s": None},
        {"prefill_tokens_per_s": 10**400},
        {"prefill_tokens_per_s": float("nan")},
        {"prefill_tokens_per_s": 1, "queue_s": "soon"},
        {"prefill_tokens_per_s": 1, "queue_s": 10**400},
        {"prefill_tokens_per_s": 1, "max_storage_tokens": 16.5},
        {"prefill_tokens_per_s": 1, "max_storage_tokens": float("nan")},
        {"prefill_tokens_per_s": 1, "max_storage_tokens": "16"},
    ],
)
def test_wrong_numbers_are_told(wrong: dict[str, Any]) -> None:
    """By name and with what was given, before anything is computed of them."""
    name, value = list(wrong.items())[-1]
    with pytest.raises(ConfigurationError, match=f"^{name} must be .*, got {value!r:.80}$"):
        found(("nvme", 1), nvme=(0.0, 0.0)).split(**wrong)


@pytest.mark.parametrize("number", [np.float32, np.int64, float, int])
def test_numbers_may_be_of_any_library(number: Callable[[int], Any]) -> None:
    """As an engine has them; it may also wait for ever, compute in no time, or have used up more than its budget."""
    lying = found(("nvme", 4), nvme=(0.0, 0.0))
    assert lying.split(prefill_tokens_per_s=number(1), queue_s=number(1)).num_blocks == 4
    assert lying.split(prefill_tokens_per_s=float("inf"), queue_s=float("inf")).num_blocks == 4
    assert lying.split(prefill_tokens_per_s=1, max_storage_tokens=-1).num_blocks == 0
    assert lying.split(prefill_tokens_per_s=1, max_storage_tokens=np.int64(2 * BLOCK)).num_blocks == 2  # type: ignore[arg-type]  # of numpy


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(1, 20)), min_size=1, max_size=5),
    st.dictionaries(st.sampled_from(["a", "b"]), st.tuples(st.floats(0, 1), st.floats(0, 0.1))),
    st.floats(1.0, 1e6),
    st.floats(0, 2),
)
def test_no_other_cut_is_faster(
    runs: list[tuple[str, int]], costs: dict[str, tuple[float, float]], rate: float, queue_s: float
) -> None:
    """By the costs that are given, against trying every length."""
    lying = found(*runs, **costs)

    def seconds(num_blocks: int) -> float:
        tiers = [run.tier for run in lying.runs for _ in range(run.start, run.stop)][:num_blocks]
        first_s = sum(costs[tier][0] for tier in set(tiers) if tier in costs)
        load_s = first_s + sum(costs[tier][1] for tier in tiers if tier in costs)
        return max(load_s, queue_s) + (lying.num_blocks - num_blocks) * BLOCK / rate

    split = lying.split(prefill_tokens_per_s=rate, queue_s=queue_s)
    assert seconds(split.num_blocks) == pytest.approx(min(map(seconds, range(lying.num_blocks + 1))), abs=1e-9)
    assert split.total_s == pytest.approx(seconds(split.num_blocks), abs=1e-9)
    assert split.order == "front"


async def test_tokens_from_storage_that_was_never_read_are_bounded() -> None:
    """A tier of which nothing is known is storage all the same: the first call takes no more from it, either."""
    engine, keys = AnyEngine(), prompt(6)
    async with open_any(engine, cpu(8), memory()) as kv:
        await (await kv.store(keys, engine.fill(keys, range(6)))).settled()
        await kv.evict(keys, tier="cpu")
        lying = await kv.lookup(keys)
        assert lying.by_tier == {"memory": 6}
        assert lying.split(prefill_tokens_per_s=1e9).num_blocks == 6
        assert lying.split(prefill_tokens_per_s=1, max_storage_tokens=2 * keys.block_size).num_blocks == 2
