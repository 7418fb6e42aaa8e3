from dataclasses import replace

from tiered_kv.replay import BlockCost, TierPlan, replay
from tiered_kv.replay.sessions import sessions_of
from tiered_kv.traces import Trace, chat, timers

COST = BlockCost(token_bytes=8, prefill_tokens_a_s=100.0)


def two_tiers(num_blocks: int) -> list[TierPlan]:
    """Imagine memory of so many blocks over a store of all."""
    return [TierPlan("cpu", num_blocks * 4096, is_memory=True), TierPlan("s3", None)]


def test_conversations_that_come_back_by_a_timer_are_found_in_memory() -> None:
    """Memory of least recently used blocks has none of them: each comes back just after it had to go."""
    trace, plans = timers(num_requests=700, num_sessions=60), two_tiers(360)
    without, helped = replay(trace, plans, COST), replay(trace, plans, COST, prefetch=True)
    assert without.loads_in_memory < 0.1 * without.loads
    assert helped.loads_in_memory > 0.5 * helped.loads
    assert helped.hit_rate == without.hit_rate
    assert helped.prefetch is not None
    assert helped.prefetch.wasted_blocks < 0.3 * helped.prefetch.moved_blocks


def test_where_nothing_can_be_foretold_nothing_is_lost() -> None:
    """Readers think for as long as they like: a guess that is not worth it is not made."""
    trace, plans = chat(num_requests=400), two_tiers(150)
    without, helped = replay(trace, plans, COST), replay(trace, plans, COST, prefetch=True)
    assert helped.loads_in_memory > 0.98 * without.loads_in_memory


def test_conversations_are_told_by_their_prompts_where_the_trace_does_not_say() -> None:
    """A prompt that goes on where another one ended belongs to the same; a few share too little to tell."""
    trace = chat(num_requests=300)
    nameless = Trace("nameless", [replace(each, session=None) for each in trace.requests], trace.block_size)
    named: dict[object, object] = {}
    wrong = sum(named.setdefault(found, each.session) != each.session
                for found, each in zip(sessions_of(nameless), trace.requests, strict=True))  # fmt: skip
    assert wrong < 0.05 * len(trace.requests)
