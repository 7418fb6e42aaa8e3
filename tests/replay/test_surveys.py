from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tiered_kv import ConfigurationError
from tiered_kv.catalog.policies import LRUPolicy
from tiered_kv.replay import BlockCost, Survey, TierPlan, lru_curve, replay
from tiered_kv.replay.surveys import sessions_of
from tiered_kv.traces import Request, Trace, agents, api_batches, chat, zipf_prompts

COST = BlockCost(token_bytes=8, prefill_tokens_a_s=100.0)
PAIRS: list[tuple[Callable[..., Trace], str]] = [
    (chat, "lhd"),
    (agents, "mq"),
    (zipf_prompts, "arc"),
    (api_batches, "lhd"),
]


def replayed(trace: Trace, num_blocks: int, policy: str) -> float:
    """Return what a replay on one memory tier finds."""
    return replay(trace, [TierPlan("cpu", num_blocks * 4096, policy, is_memory=True)], COST).hit_rate


@pytest.mark.parametrize(("make", "policy"), PAIRS)
def test_what_is_foretold_of_a_policy_is_what_a_replay_finds(make: Callable[..., Trace], policy: str) -> None:
    """Within 0.01 of the catalog's own, at sizes that nobody chose: from a hundredth of the blocks to two fifths."""
    trace = make(num_requests=50)
    curve = Survey(trace, policy, lru_curve(trace)).explore()
    for part in (0.01, 0.04, 0.15, 0.4):
        size = round(part * trace.num_blocks)
        assert curve.at(size) == pytest.approx(replayed(trace, size, policy), abs=0.01)


@pytest.mark.parametrize("make", [chat, zipf_prompts])
def test_a_part_of_the_conversations_stands_for_all(make: Callable[..., Trace]) -> None:
    """Of a long trace; the more it has, the better. A half of a few hundred is within 0.03."""
    trace = make(num_requests=400)
    survey = Survey(trace, "mq", lru_curve(trace), most_blocks=trace.num_blocks // 2)
    survey.serve(size := trace.num_blocks // 5)
    assert survey.curve.at(size) == pytest.approx(replayed(trace, size, "mq"), abs=0.03)


def test_conversations_are_told_by_their_prompts_where_the_trace_does_not_say() -> None:
    """A prompt that goes on where another one ended belongs to the same; a few share too little to tell."""
    trace = chat(num_requests=300)
    nameless = Trace("nameless", [replace(each, session=None) for each in trace.requests], trace.block_size)
    named: dict[int, int | None] = {}
    wrong = sum(
        named.setdefault(found, each.session) != each.session
        for found, each in zip(sessions_of(nameless), trace.requests, strict=True)
    )
    assert wrong < 0.05 * len(trace.requests)


@pytest.mark.parametrize("session", range(6))
def test_of_few_long_conversations_one_is_looked_at(session: int) -> None:
    """Whichever number it has; where it is the only one, it is the whole trace."""
    requests = [Request(float(n), np.arange(n * 10, n * 10 + 10), 160, session=session) for n in range(50)]
    trace = Trace("one", [*requests, replace(requests[0], at_s=50.0)], 16)
    curve = Survey(trace, "mq", lru_curve(trace), most_blocks=100).explore()
    assert curve.at(trace.num_blocks) == pytest.approx(10 / 510)


def test_a_size_that_was_served_is_exact() -> None:
    """So a plan serves the sizes that it chooses; a second time costs nothing."""
    trace = chat(num_requests=60)
    survey = Survey(trace, "mq", lru_curve(trace))
    size = trace.num_blocks // 7
    assert survey.serve(size)
    assert survey.curve.at(size) == pytest.approx(replayed(trace, size, "mq"))
    assert not survey.serve(size)


def test_what_a_survey_takes_is_bounded() -> None:
    """It tells how many sizes it has served, which are never more than it said; a class of one's own will do."""
    trace, told = zipf_prompts(num_requests=60), list[int]()
    survey = Survey(trace, LRUPolicy, lru := lru_curve(trace))
    curve = survey.explore(told.append)
    assert curve.policy == "LRUPolicy"
    assert told == list(range(1, len(told) + 1))
    assert len(told) <= survey.most_sizes
    assert abs(curve.rates - lru.rates).max() < 0.01


def test_a_trace_of_one_block() -> None:
    """Is found from its second request on; and of a trace of which nothing is looked at, what LRU does is told."""
    one = Trace("one", [Request(float(n), np.array([7]), 16) for n in range(4)], 16)
    lru = lru_curve(one)
    assert Survey(one, "mq", lru).explore().at(1) == 0.75
    assert Survey(one, "mq", lru, most_blocks=0).explore().rates.tolist() == lru.rates.tolist()
    with pytest.raises(ConfigurationError, match="policy must be one of"):
        Survey(one, "best", lru)


def test_what_is_foretold_below_an_engine_is_what_tiers_add_there() -> None:
    """By whatever policy, LRU too: an engine copies out what comes back, of which LRU's curve knows nothing."""
    trace = zipf_prompts(num_requests=100)
    for policy in ("lru", "mq"):
        curve = Survey(trace, policy, lru_curve(trace).below(40), engine_blocks=40).explore()
        for size in (40, 160):
            plan = TierPlan("cpu", size * 4096, policy, is_memory=True)
            found = replay(trace, [plan], COST, engine_blocks=40, store_when="evicted").tiers_hit_rate
            assert curve.at(size) == pytest.approx(found, abs=0.005)
