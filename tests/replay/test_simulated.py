import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tiered_kv import ConfigurationError, CPUTier, TieredKVSettings
from tiered_kv.replay import BlockCost, EngineReport, ReplayReport, TierPlan, plans_from, replay, tier_plans
from tiered_kv.traces import SYNTHETIC, Request, Trace, chat, names_of
from tiered_kv.values.hints import StoreWhen, evicts

COST = BlockCost(token_bytes=256, prefill_tokens_a_s=100.0)
BLOCK = 16 * 256
"""Bytes of a block: a slot of memory."""


COST_OF_LARGE = BlockCost(token_bytes=BLOCK // 512, prefill_tokens_a_s=100.0)
"""Of tokens in blocks of 512."""


def trace_of(*prompts: Sequence[int], every_s: float = 1.0) -> Trace:
    """Make a trace of prompts, one after the other."""
    requests = [Request(n * every_s, np.array(ids), len(ids) * 16) for n, ids in enumerate(prompts)]
    return Trace("test", requests, 16)


def memory(num_blocks: int, name: str = "cpu", policy: str = "lru") -> TierPlan:
    """Imagine a memory tier."""
    return TierPlan(name, num_blocks * BLOCK, policy, is_memory=True)


def storage(
    num_blocks: int | None, name: str = "nvme", *, admit_after: int = 1, ttl_s: float | None = None
) -> TierPlan:
    """Imagine a storage tier: its records have a header, as large as these blocks."""
    capacity = None if num_blocks is None else num_blocks * 2 * BLOCK
    return TierPlan(name, capacity, admit_after=admit_after, ttl_s=ttl_s)


def hits(report: ReplayReport) -> list[int]:
    """Return the hits of each tier."""
    return [each.hits for each in report.tiers]


def test_a_prefix_counts_and_each_block_in_the_fastest_tier_that_has_it() -> None:
    """What is behind a hole does not count. A block from below is in memory the next time."""
    report = replay(trace_of([1, 2, 3, 4], [1, 2, 9], [1, 2, 3, 4]), [memory(4), storage(8)], COST)
    # The third prompt finds 1, 2 in memory; 3 or 4 had to go for 9 and is in storage.
    assert sum(hits(report)) == 2 + 4
    assert hits(report)[1] == 1
    assert report.hit_rate == 6 / 11
    assert replay(trace_of([1, 2, 3], [7, 2, 3]), [memory(9)], COST).hit_rate == 0.0


def test_bytes_are_counted_where_they_move() -> None:
    """Stores write to every tier, a promotion to memory alone; a record has a header."""
    report = replay(trace_of([1, 2], [3, 4], [1, 2], every_s=43_200.0), [memory(2), storage(9)], COST)
    cpu, nvme = report.tiers
    assert (cpu.written_blocks, cpu.promoted_blocks, cpu.written_bytes) == (4, 2, 6 * BLOCK)
    assert (nvme.written_blocks, nvme.promoted_blocks, nvme.written_bytes) == (4, 0, 4 * 2 * BLOCK)
    assert (cpu.read_bytes, nvme.read_bytes) == (0, 2 * BLOCK)
    assert (cpu.evicted_blocks, nvme.evicted_blocks) == (4, 0)
    assert nvme.written_bytes_a_day == nvme.written_bytes
    assert (report.saved_tokens, report.saved_s, report.input_tokens) == (32, 0.32, 96)


def test_tokens_saved_are_no_more_than_the_prompt_has() -> None:
    """The last block of a trace's prompt may be partly filled."""
    trace = Trace("t", [Request(0.0, np.array([1, 2]), 17), Request(1.0, np.array([1, 2]), 17)], 16)
    assert replay(trace, [memory(4)], COST).saved_tokens == 17


def test_a_prompt_longer_than_a_tier_keeps_its_head() -> None:
    """As a store does."""
    report = replay(trace_of(range(10), range(10)), [memory(4)], COST)
    assert hits(report) == [4]


def test_admission_and_time_to_live_are_those_of_the_cache() -> None:
    """A block is written at its n-th use, and is gone after its time."""
    twice = trace_of([1], [1], [5], [6], [1], [1])
    report = replay(twice, [memory(1), storage(9, admit_after=2)], COST)
    assert report.tiers[1].written_blocks == 1
    assert hits(report) == [2, 1]
    late = replay(trace_of([1], [1], [1], every_s=50.0), [storage(9, ttl_s=60.0)], COST)
    assert hits(late) == [1]


def test_without_promotion_blocks_stay_below() -> None:
    """As `CacheLimits.promote` says."""
    trace, plans = trace_of([1, 2], [3, 4], [1, 2], [1, 2]), [memory(2), storage(9)]
    assert hits(replay(trace, plans, COST)) == [2, 2]
    assert hits(replay(trace, plans, COST, promote=False)) == [0, 4]


def test_a_tier_without_a_bound_holds_everything() -> None:
    """As a store without a capacity is imagined; and a huge one takes no more memory than the trace has blocks."""
    trace = chat(num_requests=200)
    report = replay(trace, [TierPlan("s3", None)], COST)
    assert report.tiers[0].evicted_blocks == 0
    assert report.tiers[0].written_blocks == trace.num_blocks
    assert replay(trace, [TierPlan("x", 2**60)], COST).tiers[0].capacity_blocks == trace.num_blocks


def test_tiers_are_read_from_the_command_line_or_from_settings() -> None:
    """Names of memory tiers are theirs alone."""
    assert tier_plans(["cpu=16GiB", "nvme=1TiB:arc", "s3"], "mq") == [
        TierPlan("cpu", 2**34, "mq", is_memory=True),
        TierPlan("nvme", 2**40, "arc"),
        TierPlan("s3", None, "mq"),
    ]
    settings = TieredKVSettings(
        tiers=[CPUTier(capacity=2**30, policy="arc"), {"medium": "memory", "capacity": 9, "admit_after": 3}]
    )
    assert plans_from(settings)[0] == TierPlan("cpu", 2**30, "arc", is_memory=True)
    assert plans_from(settings)[1].admit_after == 3
    for wrong in (["cpu=lots"], ["cpu"], ["cpu=:lru"], ["cpu=1GiB", "cpu=2GiB"], ["=1GiB"]):
        with pytest.raises(ConfigurationError):
            tier_plans(wrong, "lru")


@pytest.mark.parametrize(
    ("tier", "why"),
    [
        ("1GiB", r"no medium is called '1GiB': write NAME=SIZE, e\.g\. cpu=1GiB"),
        ("1GiB:arc", r"write NAME=SIZE, e\.g\. cpu=1GiB:arc"),
        ("ssd=1GiB", "no medium is called 'ssd': did you mean 'nvme'"),
        ("ram", "no medium is called 'ram': did you mean 'cpu'"),
        ("no_such:lru", "'no_such:lru' cannot be imported"),
    ],
)
def test_a_tier_is_called_by_its_medium(tier: str, why: str) -> None:
    """A size, or a name that nothing has, would be a tier without a bound, or one that is not memory."""
    with pytest.raises(ConfigurationError, match=why):
        tier_plans([tier], "lru")


def test_what_cannot_be_imagined_is_refused() -> None:
    """Before anything is served."""
    with pytest.raises(ConfigurationError, match="no tier holds a block"):
        replay(trace_of([1]), [memory(0)], COST)
    with pytest.raises(ConfigurationError, match="policy must be one of"):
        replay(trace_of([1]), [memory(3, policy="best")], COST)


def test_names_are_ids() -> None:
    """The catalog compares whole names."""
    assert len(np.unique(names_of(np.arange(5)), axis=0)) == 5


def test_what_a_prompt_finds_behind_a_hole_counts_as_used() -> None:
    """Its head was lost and is stored anew; the rest was there, and is as recent then as LRU would have it."""
    trace = trace_of([1], [1, 2, 3], [9, 8], [1, 2, 3], [7], [1, 2, 3])
    assert hits(replay(trace, [memory(4)], COST)) == [1 + 3]


def below_engine(trace: Trace, engine_blocks: int, when: StoreWhen, *plans: TierPlan) -> ReplayReport:
    """Serve a trace from tiers below an engine with a cache of its own."""
    cost = BlockCost(BLOCK // trace.block_size, 100.0)
    return replay(trace, plans, cost, engine_blocks=engine_blocks, store_when=when)


def test_what_is_stored_as_it_is_computed_is_the_engine_s_own_again() -> None:
    """A tier as large as the engine's cache adds nothing to it; and what it has lost is stored again."""
    trace = trace_of([1, 2], [3, 4], [1, 2], [3, 4], [3, 4])
    report = below_engine(trace, 2, "computed", memory(2))
    assert report.engine == EngineReport(2, "computed", 0.2, 8, 0.8)
    assert (hits(report), report.hit_rate, report.loads) == ([0], 0.2, 0)


def test_what_is_stored_when_it_is_dropped_adds_to_the_engine_s_own() -> None:
    """Two caches of two blocks have four; what came back from below is the first to go there."""
    trace = trace_of([1, 2], [3, 4], [1, 2], [3, 4], [1, 2])
    report = below_engine(trace, 2, "evicted", memory(2))
    assert report.engine is not None
    assert (report.engine.stores, report.engine.hit_rate, hits(report)) == ("evicted", 0.0, [6])
    assert report.engine.copied_blocks == 8
    assert (report.saved_tokens, report.tiers_hit_rate) == (96, 0.6)


def test_two_caches_are_as_good_as_one_of_both_sizes() -> None:
    """Under LRU, but for what is dropped as the prompt is served that would have found it."""
    trace = chat(num_requests=600)
    alone = below_engine(trace, 0, "auto", memory(500)).hit_rate
    together = below_engine(trace, 200, "evicted", memory(300)).hit_rate
    assert together == pytest.approx(alone, abs=0.01)
    assert together > below_engine(trace, 200, "computed", memory(300)).hit_rate + 0.1


def test_what_is_copied_out_ahead_is_in_both_for_a_while() -> None:
    """The engine's own hits are the same; below there is as much less, and a block that stays is copied in vain."""
    trace = SYNTHETIC["agents"](num_requests=300)
    cost, below = BlockCost(BLOCK // trace.block_size, 100.0), [memory(200)]
    reports = [
        replay(trace, below, cost, engine_blocks=200, engine_ahead=ahead, store_when="evicted") for ahead in (0, 25, 50)
    ]
    engines = [report.engine for report in reports if report.engine is not None]
    assert len({engine.hit_rate for engine in engines}) == 1
    assert reports[0].hit_rate > reports[1].hit_rate > reports[2].hit_rate
    assert engines[0].copied_rate < engines[1].copied_rate < engines[2].copied_rate


@pytest.mark.slow
@pytest.mark.parametrize("make", SYNTHETIC.values(), ids=SYNTHETIC)
def test_auto_is_never_worse_than_computed(make: Callable[..., Trace]) -> None:
    """On every made-up trace, for tiers from half of the engine's cache to eight times as much."""
    trace = make(num_requests=400)
    for times in (0.5, 2, 8):
        tier = memory(round(200 * times), policy="lhd")
        auto, computed = (below_engine(trace, 200, when, tier).hit_rate for when in ("auto", "computed"))
        assert auto >= computed - 0.005


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batches", "rounds", "timers", "twice", "zipf"])
def test_half_a_block_is_copied_at_most_for_each_asked_for(name: str) -> None:
    """Whatever is dropped, and for no fewer hits than from storing all that is computed."""
    trace = SYNTHETIC[name](num_requests=1_500)
    evicted, computed = (below_engine(trace, 300, when, memory(600, policy="lhd")) for when in ("evicted", "computed"))
    assert evicted.engine is not None
    assert evicted.engine.copied_rate <= 0.5
    assert evicted.hit_rate >= computed.hit_rate


@pytest.mark.slow
@pytest.mark.parametrize(("times", "most_missed"), [(1, 0.235), (2, 0.115)])
def test_agents_miss_little_below_an_engine_that_stores_what_it_drops(times: int, most_missed: float) -> None:
    """Half of what they do where blocks are stored as they are computed: .49 and .21."""
    report = below_engine(SYNTHETIC["agents"](), 250, "auto", memory(250 * times, policy="lhd"))
    assert report.engine is not None
    assert 1 - report.hit_rate <= most_missed
    assert report.engine.copied_rate <= 0.5


@pytest.mark.slow
def test_agents_that_say_when_they_are_back_find_all_in_memory() -> None:
    """At a quarter of boundless memory, over storage, nearly as much as there; and wrong at random it costs little."""
    trace = SYNTHETIC["agents"](num_requests=1_500)
    quarter = memory(trace.num_blocks // 4, policy="lhd")
    (boundless,) = (each.hit_rate for each in replay(trace, [memory(trace.num_blocks)], COST_OF_LARGE).tiers)
    plans = [quarter, storage(None)]
    without, right, wrong = (
        replay(trace, plans, COST_OF_LARGE, hints=hints).tiers[0].hit_rate for hints in ("none", "right", "random")
    )
    assert right >= boundless - 0.02
    assert wrong >= without - 0.01
    assert without < boundless - 0.05, "there is something to gain"


def test_who_comes_back_is_told_by_prompts_where_a_trace_does_not_say() -> None:
    """Else all requests would be one conversation, which is back at once, and hints that are right would be wrong."""
    trace = SYNTHETIC["agents"](num_requests=300)
    nameless = Trace("nameless", [dataclasses.replace(each, session=None) for each in trace.requests], trace.block_size)
    plans = [memory(trace.num_blocks // 4, policy="lhd"), storage(None)]
    said, told = (replay(each, plans, COST_OF_LARGE, hints="right").tiers[0].hit_rate for each in (trace, nameless))
    assert told == pytest.approx(said, abs=0.01)


def test_storage_has_what_memory_has_lost_and_the_engine_never_dropped_is_nowhere_else() -> None:
    """Below, a block is written once; memory gets it each time that the engine drops it."""
    trace = trace_of([1, 2], [3, 4], [5, 6], [1, 2], [3, 4])
    report = below_engine(trace, 2, "evicted", memory(2), storage(9))
    assert [each.written_blocks for each in report.tiers] == [8, 6]
    assert hits(report) == [0, 4]


def test_how_much_memory_there_is_decides_when_to_store() -> None:
    """Where memory has many times what the engine has, what it has twice matters little, and copies cost."""
    assert evicts("auto", engine_blocks=100, memory_blocks=399)
    assert not evicts("auto", engine_blocks=100, memory_blocks=400)
    assert not evicts("auto", engine_blocks=100, memory_blocks=0)
    assert evicts("evicted", engine_blocks=100, memory_blocks=0)
    assert not evicts("computed", engine_blocks=100, memory_blocks=1)
