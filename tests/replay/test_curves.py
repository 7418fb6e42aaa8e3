from collections import OrderedDict
from itertools import takewhile

import pytest

from tiered_kv.replay import BlockCost, TierPlan, lru_curve, replay
from tiered_kv.traces import Trace, agents, api_batches, chat, zipf_prompts

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
