from collections import OrderedDict
from itertools import takewhile

import numpy as np
import pytest

from tiered_kv.replay import BlockCost, Curve, TierPlan, lru_curve, replay, sampled_curve
from tiered_kv.traces import Request, Trace, agents, api_batches, chat, zipf_prompts

COST = BlockCost(token_bytes=8, prefill_tokens_a_s=100.0)
MAKERS = (chat, agents, zipf_prompts, api_batches)


def replayed(trace: Trace, num_blocks: int, policy: str = "lru") -> float:
    """Return what a replay on one memory tier finds."""
    return replay(trace, [TierPlan("cpu", num_blocks * 4096, policy, is_memory=True)], COST).hit_rate


def by_hand(trace: Trace, num_blocks: int) -> float:
    """Return the hit rate of a list of blocks in order of use, looked through from its end."""
    order: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace.requests:
        newest = set(list(order)[::-1][:num_blocks])
        hits += len(list(takewhile(newest.__contains__, request.ids.tolist())))
        known = list(takewhile(order.__contains__, request.ids.tolist()))
        for block in known[::-1] + request.ids.tolist()[len(known) :][::-1]:
            order[block] = None
            order.move_to_end(block)
    return hits / trace.num_references


def test_the_curve_of_lru_is_exact() -> None:
    """At every size, against a list that is looked through: what was there is used, then comes what is new."""
    trace = chat(num_requests=60, seed=2)
    curve = lru_curve(trace)
    assert len(curve.rates) == trace.num_blocks + 1
    for num_blocks in range(trace.num_blocks + 1):
        assert curve.at(num_blocks) == pytest.approx(by_hand(trace, num_blocks))
    assert curve.at(10**9) == curve.rates[-1]


@pytest.mark.parametrize("make", MAKERS)
def test_what_is_foretold_is_what_a_replay_finds(make: type) -> None:
    """Within 0.01 of the catalog's own LRU, where a few prompts fit."""
    trace = make(num_requests=400)
    curve = lru_curve(trace)
    longest = max(len(each.ids) for each in trace.requests)
    for num_blocks in (4 * longest, 8 * longest, trace.num_blocks // 2, trace.num_blocks):
        assert curve.at(num_blocks) == pytest.approx(replayed(trace, num_blocks), abs=0.01)


@pytest.mark.parametrize("policy", ["arc", "mq"])
def test_other_policies_are_foretold_from_all_blocks_of_a_short_trace(policy: str) -> None:
    """Where nothing is left out, what is served at some sizes is what a replay serves there."""
    trace = chat(num_requests=250)
    curve = sampled_curve(trace, policy, lru_curve(trace), num_sizes=4)
    for num_blocks in np.geomspace(32, trace.num_blocks, 4).round().astype(int).tolist():
        assert curve.at(num_blocks) == pytest.approx(replayed(trace, num_blocks, policy), abs=0.01)


def test_other_policies_are_foretold_from_a_sample() -> None:
    """Of half of the blocks, within 0.02 at sizes between those that are tried."""
    trace = chat(num_requests=400)
    curve = sampled_curve(trace, "mq", lru_curve(trace), most_samples=trace.num_blocks // 2, num_sizes=8)
    for num_blocks in (trace.num_blocks // 10, trace.num_blocks * 2 // 5):
        assert curve.at(num_blocks) == pytest.approx(replayed(trace, num_blocks, "mq"), abs=0.02)


def test_curves_never_fall() -> None:
    """More room is never worse, whatever a sample says; and no policy finds what nobody has stored."""
    trace = zipf_prompts(num_requests=300)
    lru = lru_curve(trace)
    curve = sampled_curve(trace, "mq", lru, most_samples=100, num_sizes=5)
    assert (np.diff(curve.rates) >= 0).all()
    assert curve.rates[-1] <= lru.rates[-1]


def test_a_trace_of_one_block() -> None:
    """Is found from its second request on."""
    one = Trace("one", [Request(float(n), np.array([7]), 16) for n in range(4)], 16)
    curve: Curve = lru_curve(one)
    assert curve.rates.tolist() == [0.0, 0.75]
    assert sampled_curve(one, "mq", curve).at(1) == 0.75
