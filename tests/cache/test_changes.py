"""What `events()` gives, applied one after another, is exactly what the tiers hold; nobody waits for a subscriber."""

import asyncio
import gc
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.any_layout import AnyEngine, open_any
from tests.support.backends import ScriptedSlotBackend
from tests.support.caches import inside, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, prompt
from tiered_kv import (
    Added,
    BackendUnavailableError,
    BlockKeys,
    Cleared,
    KVGroup,
    KVLayout,
    Mirror,
    Namespace,
    Removed,
    Shard,
    Snapshot,
    TierChange,
    TieredKV,
)
from tiered_kv.tiers.changes import Changes
from tiered_kv.values.keys import Names

KEYS = prompt(4)
CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}


def rows(names: Names) -> set[bytes]:
    """Return names as a set."""
    return {row.tobytes() for row in names}


async def take(changes: Changes, most: int = 1000) -> list[TierChange]:
    """Take all that there is now, or the first of it."""
    taken: list[TierChange] = []
    try:
        while len(taken) < most:
            async with asyncio.timeout(0):
                taken.append(await anext(changes))
    except (TimeoutError, StopAsyncIteration):
        pass
    return taken


def assert_exact(kv: TieredKV, mirror: Mirror) -> None:
    """Assert that a mirror has the blocks of every owned tier, and no others."""
    for place, tier in inside(kv).fates.tiers.items():  # the books themselves
        names, _ = tier.index.names_in_order()
        assert mirror.count(place.tier) == len(names)
        assert mirror.prefix(names, place.tier) == len(names)


async def test_a_snapshot_comes_first_and_then_every_change_in_order() -> None:
    """With numbers that leave none out, and names that are the keys' own."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk")
    async with open_cache(CPU, disk, engine=engine) as kv:
        await keep(kv, engine, KEYS[:2])
        changes = kv.events()
        await keep(kv, engine, KEYS)
        first = await take(changes)
        await kv.evict(KEYS[3:], tier="cpu")
        await keep(kv, engine, prompt(2, seed=1))
        await kv.clear()
        later = await take(changes)
        names = kv.namespace().names
        assert {(type(each), each.tier) for each in first} == {(Snapshot, "cpu"), (Snapshot, "disk")}
        assert all(isinstance(each, Snapshot) and rows(each.names) == rows(names(KEYS)) for each in first)
        of_cpu = [each for each in later if each.tier == "cpu"]
        assert [type(each) for each in of_cpu] == [Removed, Added, Cleared]
        removed, added = of_cpu[0], of_cpu[1]
        assert isinstance(removed, Removed)
        assert (removed.why, rows(removed.names)) == ("removed", rows(names(KEYS[3:])))
        assert isinstance(added, Added)
        assert rows(added.names) == rows(names(prompt(2, seed=1)))
        assert [each.sequence for each in first + later] == list(range(len(first + later)))


async def test_what_is_evicted_for_room_says_so() -> None:
    """A router that learns it need not ask."""
    engine = Engine()
    async with open_cache(CPU, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        changes = kv.events()
        await take(changes)
        await keep(kv, engine, prompt(14, seed=1))
        gone = [each for each in await take(changes) if isinstance(each, Removed)]
        assert {each.why for each in gone} == {"evicted"}
        assert sum(len(each.names) for each in gone) == 2


@pytest.mark.parametrize("shard", [Shard.every(2), Shard(1, 2)])
async def test_places_are_what_a_namespace_is_asked_for(shard: Shard | tuple[Shard, ...]) -> None:
    """KV group and rank are numbers of the cache: one of a single rank has rank 0, whichever that is of its engine."""
    groups = KVLayout((KVGroup(2, 1, 48, "bfloat16", 4), KVGroup(1, 2, 64, "float32", 8)))
    num_ranks = len(shard) if isinstance(shard, tuple) else 1
    async with open_any(AnyEngine(groups), {"medium": "cpu", "capacity": "1MiB"}, shard=shard) as kv:
        places = kv.events().places
        assert places == tuple(("cpu", group, rank) for group in range(2) for rank in range(num_ranks))
        made = {kv.namespace(group=group, rank=rank) for _, group, rank in places}
        assert len(made) == len(places)


async def test_leaving_the_loop_unsubscribes() -> None:
    """Nothing is kept for it from then on, and no change costs anything once the last one has left."""
    engine = Engine()
    async with open_cache(CPU, engine=engine) as kv:
        async for change in kv.events():
            assert isinstance(change, Snapshot)
            break
        gc.collect()
        await keep(kv, engine, KEYS)
        assert inside(kv).fates.listeners == []  # no listener, no work


async def test_a_waiting_subscriber_is_woken_and_ends_with_the_cache() -> None:
    """By a change; and closing ends the loop instead of leaving it waiting."""
    engine, mirror = Engine(), Mirror()
    async with open_cache(CPU, engine=engine) as kv:

        async def follow() -> None:
            async for change in kv.events():
                mirror.apply(change)

        following = asyncio.create_task(follow())
        await asyncio.sleep(0)
        await keep(kv, engine, KEYS)
        await asyncio.sleep(0)
        assert mirror.count() == 4
    await asyncio.wait_for(following, 10)


async def test_one_that_falls_behind_gets_a_snapshot_and_is_counted() -> None:
    """What is kept for it is bounded, and afterwards it is exact all the same."""
    engine = Engine()
    async with open_cache(CPU, engine=engine) as kv:
        changes, mirror = inside(kv).cache.subscribers.subscribe(max_names=20), Mirror()  # a queue that is soon full
        for change in await take(changes):
            mirror.apply(change)
        for seed in range(8):
            await keep(kv, engine, prompt(4, seed=seed))
        assert changes.num_overflows == 1
        taken = await take(changes)
        assert [type(each) for each in taken] == [Snapshot]
        mirror.apply(taken[0])
        assert_exact(kv, mirror)


async def test_one_that_is_always_behind_hears_of_every_tier() -> None:
    """Though one tier changes more between two of its looks than is kept for it."""
    engine, below = Engine(), ScriptedSlotBackend(64)
    async with open_cache(CPU, below, engine=engine) as kv:
        changes, heard = inside(kv).cache.subscribers.subscribe(max_names=1), Counter[str]()
        for seed in range(12):
            await keep(kv, engine, prompt(2, seed=seed))
            heard[(await anext(changes)).tier] += 1
        assert changes.num_overflows > 5
        assert sorted(heard.values()) == [6, 6]


async def test_other_weights_begin_with_snapshots() -> None:
    """So that a router knows when to ask for another namespace; `places` says of what there will be one."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk")
    async with open_cache(CPU, disk, engine=engine) as kv:
        changes = kv.events()
        await take(changes)
        assert changes.places == (("cpu", 0, 0), ("disk", 0, 0))
        kv.advance_epoch("w1")
        taken = await take(changes)
        assert [(type(each), each.place) for each in taken] == [(Snapshot, place) for place in changes.places]
        assert changes.num_overflows == 0
        there = await asyncio.to_thread(kv.namespace)
        assert there == kv.namespace()


@pytest.mark.slow
async def test_a_tier_that_opens_late_is_told_of() -> None:
    """From the start it is a place, with nothing in it; what is found there, and changes there, is told as of any."""
    engine, slots = Engine(), ScriptedSlotBackend(8, required=False)
    async with open_cache(slots, engine=engine) as kv:
        await keep(kv, engine, KEYS)
    slots.on_open.fail_next(BackendUnavailableError("not yet"))
    async with open_cache(CPU, slots, engine=engine) as kv:
        changes, mirror = kv.events(), Mirror()
        assert [tier for tier, _, _ in changes.places] == ["cpu", "slots"]
        for change in await take(changes):
            mirror.apply(change)
        assert mirror.count() == 0
        await until(lambda: not kv.stats()["slots"].is_bypassed)
        for change in await take(changes):
            mirror.apply(change)
        assert mirror.count("slots") == 4
        await kv.evict(KEYS[:1])
        kv.advance_epoch("w1")  # from here on with snapshots
        for change in await take(changes):
            mirror.apply(change)
        assert_exact(kv, mirror)
        assert mirror.count("slots") == 3


async def test_a_router_in_another_process_matches_prompts() -> None:
    """It gets the changes and a namespace, pickled, and needs no cache."""
    engine = Engine()
    async with open_cache(CPU, engine=engine) as kv:
        changes = kv.events()
        await keep(kv, engine, KEYS)
        sent = pickle.dumps((await take(changes), kv.namespace(), prompt(6)))
        router = (
            "import pickle, sys; from tiered_kv import Mirror; mirror = Mirror();"
            "changes, namespace, keys = pickle.load(sys.stdin.buffer);"
            "[mirror.apply(change) for change in changes]; print(mirror.prefix(namespace.names(keys)))"
        )
        ran = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", router], input=sent, capture_output=True, check=True
        )
        assert ran.stdout == b"4\n"


SPANS = st.tuples(st.integers(0, 3), st.integers(0, 7), st.integers(1, 8)).map(
    lambda at: prompt(8, seed=at[0])[at[1] : at[1] + at[2]]
)
STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "load", "evict", "clear", "epoch", "take"]), SPANS, st.integers(0, 6)),
    max_size=16,
)


@settings(max_examples=80)
@given(steps=STEPS, max_names=st.sampled_from([1, 24, 60, 10_000]))
def test_replay_equals_the_index_at_every_quiescent_point(
    steps: Sequence[tuple[str, BlockKeys, int]], max_names: int
) -> None:
    """Whatever is called, however slow the subscriber is, and whether or not it has fallen behind meanwhile."""

    async def scenario() -> None:
        engine, disk, mirror = Engine(), ScriptedSlotBackend(num_slots=12, name="disk"), Mirror()
        async with open_cache({"medium": "cpu", "capacity": 10 * PAYLOAD_BYTES}, disk, engine=engine) as kv:
            changes = inside(kv).cache.subscribers.subscribe(max_names)  # queues that are soon full
            sequence = -1
            for kind, keys, n in steps:
                await do(kv, engine, kind, keys, n)
                if kind != "take":
                    continue
                for change in await take(changes, n or 1000):
                    mirror.apply(change)
                    assert change.sequence == sequence + 1
                    sequence = change.sequence
                if not n:
                    assert_exact(kv, mirror)
            await until_idle(kv)
            for change in await take(changes):
                mirror.apply(change)
            assert_exact(kv, mirror)

    asyncio.run(scenario())


async def do(kv: TieredKV, engine: Engine, kind: str, keys: BlockKeys, n: int) -> None:
    """Make one call, and wait until nothing moves."""
    if kind == "store":
        await keep(kv, engine, keys)
    elif kind == "load":
        await kv.load(keys, engine.compute(keys))
    elif kind == "evict":
        await kv.evict(keys, tier=[None, "cpu", "disk"][n % 3])
    elif kind == "clear":
        await kv.clear()
    elif kind == "epoch":
        kv.advance_epoch(f"w{n % 2}")
    await until_idle(kv)


def test_names_are_four_words_each() -> None:
    """As documented, so that a router in another language can compare them."""
    names = Namespace(b"\1" * 32, b"\2" * 32).names(KEYS)
    assert (names.shape, names.dtype) == ((4, 4), np.dtype(np.uint64))


async def test_several_tasks_share_one_subscription() -> None:
    """Each change goes to one of them, and all of them end with the cache."""
    engine = Engine()
    async with open_cache(CPU, engine=engine) as kv:
        changes, mirror = kv.events(), Mirror()

        async def follow() -> None:
            async for change in changes:
                mirror.apply(change)

        following = [asyncio.create_task(follow()) for _ in range(3)]
        for seed in range(3):
            await keep(kv, engine, prompt(4, seed=seed))
        await until_idle(kv)
        assert_exact(kv, mirror)
    async with asyncio.timeout(30):
        await asyncio.gather(*following)
