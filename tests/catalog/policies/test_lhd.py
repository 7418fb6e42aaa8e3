"""Least hit density: what it computes from what was counted, and what comes of it."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tiered_kv.catalog import TierIndex
from tiered_kv.catalog.policies import LHDPolicy
from tiered_kv.catalog.policies.base import Policy
from tiered_kv.catalog.policies.lhd import NUM_AGES, age_classes, hit_densities
from tiered_kv.catalog.table import Slots
from tiered_kv.traces import SYNTHETIC, names_of
from tiered_kv.values.hints import ReuseHint

NONE = np.empty(0, dtype=np.int64)
UNTOLD = np.full((2, NUM_AGES), np.nan)


def ask(index: TierIndex, ids: list[int]) -> int:
    """Ask for a prompt's blocks: read what is there, store the rest; return the leading hits."""
    names = names_of(np.array(ids))
    num_hits = index.ready_prefix(names)
    index.touch(names)
    with index.reserve(names[: index.num_slots]) as reservation:
        reservation.commit().release()
    return num_hits


def slow_densities(seen: float, hits: list[float], shared: list[float]) -> list[float]:
    """Compute one class's densities by the definition, one age after the other."""
    starts = [0.0] + [16 * 2 ** (n / 2) for n in range(NUM_AGES)]
    hazards, left = [], seen
    for num_hits, prior in zip(hits, shared, strict=True):
        hazards.append(min(0.999, (num_hits + prior) / (max(left, num_hits) + 1)))
        left -= num_hits
    densities = []
    for begin in range(NUM_AGES):
        living, num_hits, spent, best = 1.0, 0.0, 0.0, 0.0
        for age in range(begin, NUM_AGES):
            spent += living * (1 - hazards[age] / 2) * (starts[age + 1] - starts[age])
            num_hits += living * hazards[age]
            living *= 1 - hazards[age]
            best = max(best, num_hits / spent)
        densities.append(best)
    return densities


@given(
    hits=arrays(np.float64, (2, NUM_AGES), elements=st.integers(0, 3).map(float)),
    unused=arrays(np.float64, 2, elements=st.integers(0, 50).map(float)),
)
def test_densities_are_what_is_defined(hits: np.ndarray, unused: np.ndarray) -> None:
    """The quick computation and the definition agree, whatever was counted."""
    seen = hits.sum(axis=1) + unused
    shared, left = [], seen.sum()
    for num_hits in hits.sum(axis=0).tolist():
        shared.append(min(0.999, num_hits / (max(left, num_hits) + 1)))
        left -= num_hits
    expected = [slow_densities(seen[n], hits[n].tolist(), shared) for n in range(2)]
    # Of what is all but certainly used before, the two differ by what is left of 64 bits.
    np.testing.assert_allclose(hit_densities(seen, hits, UNTOLD[:2]), expected, rtol=0.05, atol=1e-9)


def test_a_block_is_worth_most_just_before_its_time() -> None:
    """What was always used again at one age promises more the nearer that is, and nothing much afterwards."""
    hits = np.zeros((1, NUM_AGES))
    (due,) = age_classes(np.array([1000]))
    hits[0, due] = 90
    (densities,) = hit_densities(np.array([100.0]), hits, UNTOLD[:1])
    assert (np.diff(densities[: due + 1]) > 0).all()
    assert densities[due + 1] < densities[0] / 10


def test_an_unknown_class_passes_for_all_together() -> None:
    """Blocks of which none was seen yet are expected to do as all others did."""
    hits = np.zeros((2, NUM_AGES))
    hits[0, 10:20] = 5
    known, unknown = hit_densities(np.array([100.0, 0.0]), hits, UNTOLD[:2])
    np.testing.assert_allclose(unknown, known, rtol=0.05)


def test_a_loop_larger_than_the_cache_has_hits() -> None:
    """Of prompts that come round and round some stay, although LRU loses each just before it is due."""
    hits = {}
    for policy in ("lru", "lhd"):
        index = TierIndex(500, policy=policy)
        rounds = [[ask(index, list(range(10 * n, 10 * n + 10))) for n in range(100)] for _ in range(10)]
        hits[policy] = sum(rounds[-1])
    assert hits["lru"] == 0
    assert hits["lhd"] > 200


def test_the_head_of_a_prompt_outlives_its_tail() -> None:
    """Blocks leave from the end of a prompt, also where the memory of its first ones was lost."""
    policy = LHDPolicy(8)
    names = names_of(np.arange(4))
    slots = np.arange(4)
    policy.add(slots, names)
    policy.unpark(slots[::-1])
    for _ in range(3):
        policy.park(slots[::-1])
        policy.use(slots[::-1])
        policy.unpark(slots[::-1])
    assert policy.victims(4, NONE).tolist() == [3, 2, 1, 0]
    policy.evict(slots[::-1], names[::-1])
    others = names_of(np.array([100, 101, 2, 3]))  # it remembers the last two only
    policy.add(slots, others)
    policy.unpark(slots[::-1])
    assert policy.victims(4, NONE).tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize("num_slots", [100, 600])
@pytest.mark.parametrize("trace", sorted(SYNTHETIC))
def test_hardly_ever_worse_than_lru(trace: str, num_slots: int) -> None:
    """On every kind of traffic that there is a made-up trace of it has the hits of LRU, but for one in a hundred."""
    requests = [each.ids.tolist() for each in SYNTHETIC[trace](num_requests=600).requests]
    rates = {}
    for policy in ("lru", "lhd"):
        index = TierIndex(num_slots, policy=policy)
        rates[policy] = sum(ask(index, ids) for ids in requests) / sum(map(len, requests))
    assert rates["lhd"] > rates["lru"] - 0.01


@pytest.mark.parametrize(
    ("trace", "num_slots", "options"),
    [("twice", 200, {"mean_lag": 30.0}), ("shifts", 600, {"num_documents": 30, "lasts": 200})],
)
def test_what_misleads_costs_little(trace: str, num_slots: int, options: dict[str, float]) -> None:
    """Where what was learned is wrong, or has become so, it is not believed for long."""
    requests = [each.ids.tolist() for each in SYNTHETIC[trace](num_requests=2_000, **options).requests]
    rates = {}
    for policy in ("lru", "lhd"):
        index = TierIndex(num_slots, policy=policy)
        rates[policy] = sum(ask(index, ids) for ids in requests) / sum(map(len, requests))
    assert rates["lhd"] > rates["lru"] - 0.003


def test_the_order_kept_for_a_restart_is_the_order_of_eviction() -> None:
    """What is entered anew in the order that was kept goes in it."""
    index = TierIndex(200, policy="lhd")
    for n in range(300):
        ask(index, [n % 7, 50 + n % 31])
        ask(index, [1000 + n])
    names, slots = index.names_in_order()
    again = TierIndex(200, policy="lhd")
    again.restore(names, slots)
    assert (again.names_in_order()[0] == names).all()
    for evicts in (index, again):
        with evicts.reserve(names_of(5000 + np.arange(60))) as reservation:
            assert (reservation.evicted == names[:60]).all()


def test_a_hint_counts_until_experience_outweighs_it() -> None:
    """Blocks that are expected the least go first; and a hint that proves wrong is believed less and less."""
    index = TierIndex(100, policy="lhd")

    def say(ids: list[int], hint: ReuseHint) -> None:
        ask(index, ids)
        index.hint(names_of(np.array(ids)), hint)

    likely, unlikely = ReuseHint(0.9, category="tool call"), ReuseHint(0.1, category="question")
    say(list(range(50)), likely)
    say(list(range(50, 100)), unlikely)
    ask(index, list(range(100, 140)))
    assert index.ready(names_of(np.arange(50))).all()
    for n in range(400):  # now tool calls never come back, and questions always do
        say([1000 + 2 * n], likely)
        say([10_000 + n % 40], unlikely)
    assert index.ready(names_of(10_000 + np.arange(40))).all()


def test_more_kinds_of_hints_than_there_is_room_for_do_no_harm() -> None:
    """Hints beyond the seventh kind are as none."""
    index = TierIndex(20, policy="lhd")
    for n in range(30):
        ask(index, [n])
        index.hint(names_of(np.array([n])), ReuseHint(0.5, within_s=float(n + 1), category=str(n)))
    assert ask(index, [29]) == 1


def test_what_was_said_before_a_clear_is_forgotten() -> None:
    """Slots that held blocks of hints hold others by then, which can be evicted whatever is said of them."""
    index, names = TierIndex(8, policy="lhd"), names_of(np.arange(8))
    ask(index, list(range(8)))
    for category in ("one", "two", "three"):
        index.hint(names, ReuseHint(0.5, category=category))
    index.clear()
    with index.reserve(names) as reservation:
        lease = reservation.commit()
    index.hint(names[:1], ReuseHint(0.5))
    lease.release()
    with index.reserve(names_of(np.arange(100, 108))) as reservation:
        assert len(reservation.evicted) == len(reservation.slots) == 8


def test_uses_of_no_block_take_no_memory() -> None:
    """However often blocks are asked for or touched of which a tier has none."""
    index, absent = TierIndex(8, policy="lhd"), names_of(np.arange(4))
    index.touch(absent)
    tracemalloc.start()
    try:
        for _ in range(3000):
            index.touch(absent)
            index.lease(absent).release()
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 100_000


def serve_below(index: TierIndex, engine: TierIndex, ids: list[int], *, tells: bool) -> int:
    """Serve a prompt from an engine's own cache and a tier that takes what leaves there; return all hits."""
    names = names_of(np.array(ids))
    with engine.lease(names) as held:
        num_here = held.num_prefix
    num_hits = num_here + index.ready_prefix(names[num_here:])
    index.touch(names[:num_hits])
    with engine.reserve(names[: engine.num_slots]) as reservation:
        reservation.commit().release()
    if tells:
        index.resident(names)
        index.leaving(reservation.evicted)
    absent = reservation.evicted[~index.ready(reservation.evicted)]
    with index.reserve(absent[: index.num_slots]) as below:
        below.commit().release()
    return num_hits


def test_it_learns_of_uses_in_the_engine_above() -> None:
    """What is told of blocks that it does not have counts: which come back is known when they come down."""
    trace = SYNTHETIC["zipf"](num_requests=1_500)
    hits = {}
    for tells in (False, True):
        index, engine = TierIndex(300, policy="lhd"), TierIndex(300)
        hits[tells] = sum(serve_below(index, engine, each.ids.tolist(), tells=tells) for each in trace.requests)
    assert hits[True] > 1.05 * hits[False]


class InThreeSteps(LHDPolicy):
    """Is touched as the base class says."""

    def touch(self, slots: Slots) -> None:
        """Park, use and unpark."""
        Policy.touch(self, slots)


@pytest.mark.parametrize("seed", range(5))
def test_a_touch_is_a_use_of_blocks_that_nobody_leases(seed: int) -> None:
    """In one step it changes just what it changes in three: the same blocks go, and in the same order."""
    random, policies = np.random.default_rng(seed), (LHDPolicy(64), InThreeSteps(64))
    strangers = random.integers(0, 2**63, (500, 4)).astype(np.uint64)
    here = np.arange(0)
    for step in range(300):
        if step % 3 == 0 and len(here) <= 60:
            slots = np.setdiff1d(np.arange(64), here)[:4]
            for policy in policies:
                policy.add(slots, strangers[slots + step])
                policy.unpark(slots)
            here = np.concatenate((here, slots))
        elif step % 3 == 1:
            touched = random.permutation(here)[: int(random.integers(1, 41))]
            for policy in policies:
                policy.touch(touched)
        elif len(here) > 8:
            victims = [policy.victims(3, np.arange(0)) for policy in policies]
            assert victims[0].tolist() == victims[1].tolist()
            for policy in policies:
                policy.evict(victims[0], strangers[victims[0] + step])
            here = np.setdiff1d(here, victims[0])
    assert policies[0].order().tolist() == policies[1].order().tolist()


@pytest.mark.parametrize("seed", range(5))
def test_what_few_blocks_are_asked_for_is_learned_from_together(seed: int) -> None:
    """Nothing is different for it: each batch has its own time, and a block that comes twice was used twice."""
    random, policies = np.random.default_rng(seed), (LHDPolicy(64), InThreeSteps(64))
    for policy in policies:
        policy.add(np.arange(64), np.arange(256, dtype=np.uint64).reshape(64, 4))
        policy.unpark(np.arange(64))
    num_wanted = (64, 5)[seed % 2]  # the head of a prompt that everybody asks for is touched again and again
    for most in random.choice([2, 4, 9], 300).tolist():
        touched = random.permutation(num_wanted)[: int(random.integers(1, most))]
        for policy in policies:
            policy.touch(touched)
    assert policies[0].order().tolist() == policies[1].order().tolist()
