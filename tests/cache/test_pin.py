"""Pins keep what they hold from being evicted for want of room, and end: by a call, in time, and with the cache."""

import asyncio
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import virtual
from tests.support.any_layout import AnyEngine, open_any
from tests.support.any_layout import cpu as any_cpu
from tests.support.any_layout import prompt as any_prompt
from tests.support.backends import ScriptedSlotBackend
from tests.support.caches import inside, keep, open_cache, until, until_idle
from tests.support.engine import BLOCK_SIZE, MODEL, PAYLOAD_BYTES, SMALL_LIMITS, Engine, contents, prompt
from tests.support.virtual import advance
from tests.support.work import num_calls
from tiered_kv import BlockKeys, ConfigurationError, GPULoadStoreSpec, KVLayout, Shard, TieredKV, hash_blocks


def cpu(num_blocks: int) -> dict[str, object]:
    """A CPU tier of so many blocks, of which it is known which go first."""
    return {"medium": "cpu", "capacity": num_blocks * PAYLOAD_BYTES, "policy": "lru"}


def of_tenant(num_blocks: int, salt: str) -> BlockKeys:
    """Return a tenant's keys of a prompt."""
    return hash_blocks(np.arange(num_blocks * BLOCK_SIZE), block_size=BLOCK_SIZE, salt=salt)


async def crowd_out(kv: TieredKV, engine: Engine) -> None:
    """Store so much that all that can be evicted is."""
    for seed in (90, 91):
        keys = prompt(16, seed=seed)
        for start in range(0, 16, 4):
            await keep(kv, engine, keys[start : start + 4])


async def num_found(kv: TieredKV, keys: BlockKeys) -> int:
    """Count the prefix that is there."""
    return (await kv.lookup(keys)).num_blocks


def test_what_is_pinned_stays_until_its_time_is_up() -> None:
    """And is as easily evicted as anything else from then on."""

    async def program() -> None:
        engine, keys = Engine(), prompt(4)
        async with open_cache(cpu(16), engine=engine) as kv:
            await keep(kv, engine, keys)
            assert kv.pin(keys, ttl_s=60).num_blocks == 4
            await crowd_out(kv, engine)
            assert await num_found(kv, keys) == 4
            engine.poison()
            await kv.load(keys, GPULoadStoreSpec(range(4)))
            assert engine.read(range(4)) == contents(keys)
            await advance(59)
            assert kv.stats()["cpu"].leased == 4
            await advance(1)
            assert kv.stats()["cpu"].leased == 0
            await crowd_out(kv, engine)
            assert await num_found(kv, keys) == 0
            await until_idle(kv)

    virtual.run(program)


@pytest.mark.both_loops
async def test_a_pin_that_ends_at_once_holds_up_no_other() -> None:
    """On any event loop: one whose time is up in less than its clock tells has no timer there, but is called soon."""
    engine, keys = Engine(), prompt(8)
    async with open_cache(cpu(16), engine=engine) as kv:
        await keep(kv, engine, keys)
        assert kv.pin(keys[:4], ttl_s=1e-6).num_blocks == 4
        assert kv.pin(keys[4:], ttl_s=60).num_blocks == 4
        kv.unpin(keys[4:])
        await until(lambda: kv.stats()["cpu"].leased == 0)
        await until_idle(kv)


def test_pinned_again_a_block_stays_for_the_longer_time() -> None:
    """Whichever of the two calls came first; the part that only one of them named ends with that."""

    async def program() -> None:
        engine, keys = Engine(), prompt(6)
        async with open_cache(cpu(16), engine=engine) as kv:
            await keep(kv, engine, keys)
            kv.pin(keys[:4], ttl_s=10)
            kv.pin(keys[2:], ttl_s=30)
            kv.pin(keys, ttl_s=5)
            assert kv.stats()["cpu"].leased == 6
            await advance(5)
            assert kv.stats()["cpu"].leased == 6
            await advance(5)
            assert kv.stats()["cpu"].leased == 4
            await advance(20)
            await until_idle(kv)

    virtual.run(program)


async def test_a_part_can_be_unpinned() -> None:
    """The rest stays; what was not pinned is no error."""
    engine, keys = Engine(), prompt(6)
    async with open_cache(cpu(16), engine=engine) as kv:
        await keep(kv, engine, keys)
        kv.pin(keys[:4], ttl_s=60)
        kv.unpin(keys[2:])
        kv.unpin(prompt(3, seed=5))
        assert kv.stats()["cpu"].leased == 2
        await crowd_out(kv, engine)
        assert await num_found(kv, keys) == 2
        kv.unpin(keys)
        await until_idle(kv)


async def test_only_the_prefix_is_pinned() -> None:
    """What lies behind a hole cannot be loaded, and holds no room."""
    engine, keys = Engine(), prompt(6)
    async with open_cache(cpu(16), engine=engine) as kv:
        await keep(kv, engine, keys)
        await kv.evict(keys[2:3])
        assert kv.pin(keys, ttl_s=60).num_blocks == 2
        assert kv.stats()["cpu"].leased == 2


async def test_no_more_than_half_of_a_tier_is_pinned() -> None:
    """By all tenants together; from there on the tier below is pinned, where it has the block."""
    engine, disk = Engine(), ScriptedSlotBackend(num_slots=12, name="disk")
    async with open_cache(cpu(8), disk, engine=engine) as kv:
        first, second = of_tenant(4, "first"), of_tenant(8, "second")
        await keep(kv, engine, first)
        assert kv.pin(first, ttl_s=60).num_blocks == 4
        await keep(kv, engine, second)
        assert kv.pin(second, ttl_s=60).num_blocks == 6
        stats = kv.stats()
        assert (stats["cpu"].leased, stats["disk"].leased) == (4, 6)
        kv.unpin(first)
        kv.unpin(second)
        assert kv.pin(second, ttl_s=60).num_blocks == 8
        kv.unpin(second)
        await until_idle(kv)


async def test_a_tenant_pins_no_more_than_its_quota() -> None:
    """Another tenant's is its own; what is unpinned, or pinned again, does not count twice."""
    engine = Engine()
    limits = SMALL_LIMITS.model_copy(update={"pin_quota": 3 * PAYLOAD_BYTES})
    async with open_cache(cpu(32), engine=engine, limits=limits) as kv:
        first, second = of_tenant(6, "first"), of_tenant(6, "second")
        await keep(kv, engine, first)
        await keep(kv, engine, second)
        assert kv.pin(first, ttl_s=60).num_blocks == 3
        assert kv.pin(first, ttl_s=90).num_blocks == 3
        assert kv.pin(first[3:], ttl_s=90).num_blocks == 0
        assert kv.pin(second, ttl_s=60).num_blocks == 3
        kv.unpin(first[:2])
        assert kv.pin(first[3:], ttl_s=90).num_blocks == 2


async def test_evict_goes_through_a_pin() -> None:
    """The block is unfindable at once; its slot is free when it is unpinned, and can be pinned anew if stored again."""
    engine, keys = Engine(), prompt(4)
    async with open_cache(cpu(16), engine=engine) as kv:
        await keep(kv, engine, keys)
        kv.pin(keys, ttl_s=60)
        await kv.evict(keys[:2])
        assert await num_found(kv, keys) == 0
        assert kv.stats()["cpu"].doomed == 2
        await keep(kv, engine, keys)
        assert kv.pin(keys, ttl_s=60).num_blocks == 4
        assert kv.stats()["cpu"].doomed == 0
        await crowd_out(kv, engine)
        assert await num_found(kv, keys) == 4
        await kv.clear()
        assert kv.stats()["cpu"].doomed == 4
        kv.unpin(keys)
        await until_idle(kv)


async def test_pins_of_other_weights_end_too() -> None:
    """Keys name blocks of whatever weights: what was pinned before an epoch can be unpinned after it."""
    engine, keys = Engine(), prompt(4)
    async with open_cache(cpu(16), engine=engine) as kv:
        await keep(kv, engine, keys)
        kv.pin(keys, ttl_s=60)
        kv.advance_epoch("w1")
        assert kv.pin(keys, ttl_s=60).num_blocks == 0
        kv.unpin(keys)
        await until_idle(kv)


async def test_nothing_leaks_by_closing() -> None:
    """A cache with pins closes, and its timer with it."""
    engine, keys = Engine(), prompt(4)
    async with open_cache(cpu(16), engine=engine) as kv:
        await keep(kv, engine, keys)
        kv.pin(keys, ttl_s=3600)
        index = inside(kv).chains[0].host.index  # no statistics of a closed cache
        await kv.aclose()
        assert index.statistics().leased == 0


async def test_all_ranks_pin_the_same_prefix() -> None:
    """A block that one rank lacks is pinned on none."""
    layout = KVLayout.from_tensors(Engine(num_pages=1).caches, block_size=BLOCK_SIZE)
    tiers = [cpu(32)]
    async with TieredKV(tiers, model=MODEL, layout=layout, shard=Shard.every(2), limits=SMALL_LIMITS) as kv:
        keys = prompt(4)
        for n, (chain, batch) in zip((4, 2), inside(kv).batches(keys), strict=True):  # as workers would
            with chain.host.index.reserve(batch.names[:n]) as reservation:
                reservation.commit().release()
        assert kv.pin(keys, ttl_s=60).num_blocks == 2
        assert kv.stats()["cpu"].leased == 4
        kv.unpin(keys)
        assert kv.stats()["cpu"].leased == 0


async def test_a_pin_costs_what_its_blocks_cost_however_many_there_are() -> None:
    """Calls beside 1,000 pins of the same tenant do as much as beside one; what has ended leaves nothing."""
    engine, keys = Engine(), prompt(2008)
    limits = SMALL_LIMITS.model_copy(update={"pin_quota": 1 << 30})
    async with open_cache(cpu(5000), engine=engine, limits=limits) as kv:
        for start in range(0, 2008, 8):
            await kv.store(keys[start : start + 8], GPULoadStoreSpec(range(8)))

        def work(first: int) -> list[int]:
            two = keys[first : first + 2]
            calls = [
                num_calls(lambda: kv.pin(two, ttl_s=100)),
                num_calls(lambda: kv.pin(two, ttl_s=200)),
                num_calls(lambda: kv.unpin(two)),
            ]
            kv.pin(two, ttl_s=3600)
            return calls

        work(0)  # the first call of all has more to do
        beside_one = work(2)
        for first in range(4, 2004, 2):
            kv.pin(keys[first : first + 2], ttl_s=3600)
        beside_many = work(2004)
        assert all(many < one + 50 for one, many in zip(beside_one, beside_many, strict=True))
        for _ in range(1000):
            kv.pin(keys[:2], ttl_s=7200)
            kv.unpin(keys[:2])
        assert len(inside(kv).pins._ends) < 5000  # noqa: SLF001 - memory that no call tells
        kv.unpin(keys)
        await until_idle(kv)


def test_pins_that_end_together_do_not_hold_up_the_loop() -> None:
    """A thousand of them end in a few turns of the event loop, not in one."""

    async def program() -> None:
        engine, keys = Engine(), prompt(1000)
        limits = SMALL_LIMITS.model_copy(update={"pin_quota": 1 << 30})
        async with open_cache(cpu(2500), engine=engine, limits=limits) as kv:
            for start in range(0, 1000, 8):
                await kv.store(keys[start : start + 8], GPULoadStoreSpec(range(8)))
            for at in range(1000):
                kv.pin(keys[at : at + 1], ttl_s=60)
            seen = {kv.stats()["cpu"].leased}
            await advance(61)
            while kv.stats()["cpu"].leased:
                seen.add(kv.stats()["cpu"].leased)
                await asyncio.sleep(0)
            assert max(before - after for before, after in pairwise(sorted(seen | {0}, reverse=True))) <= 200
            await until_idle(kv)

    virtual.run(program)


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf"), "60"])
async def test_a_time_that_is_none_is_refused(ttl_s: float) -> None:
    """A pin without end would be a leak."""
    async with open_cache(cpu(4)) as kv:
        with pytest.raises(ConfigurationError):
            kv.pin(prompt(1), ttl_s=ttl_s)


SPANS = st.tuples(st.integers(0, 1), st.integers(0, 7), st.integers(1, 8))
STEPS = st.lists(st.tuples(st.sampled_from(["pin", "unpin", "evict", "store", "wait"]), SPANS, st.integers(1, 20)))


@settings(max_examples=60)
@given(steps=STEPS)
def test_pins_hold_what_they_say_whatever_else_is_called(steps: list[tuple[str, tuple[int, int, int], int]]) -> None:
    """Against a model: what is pinned and was not evicted by name is found; in the end nothing is held."""

    async def program() -> None:
        engine = AnyEngine(num_blocks=16)
        pinned: dict[bytes, float] = {}
        now = 0.0
        async with open_any(engine, any_cpu(10)) as kv:
            for kind, (seed, start, n), seconds in steps:
                keys = any_prompt(8, seed)[start : start + n]
                if kind == "store":
                    await (await kv.store(keys, engine.fill(keys, range(len(keys))))).settled()
                elif kind == "pin":
                    held = kv.pin(keys, ttl_s=seconds).num_blocks
                    for digest in keys[:held]:
                        pinned[digest] = max(pinned.get(digest, 0.0), now + seconds)
                elif kind == "wait":
                    await advance(seconds)
                    now += seconds
                else:
                    if kind == "unpin":
                        kv.unpin(keys)
                    else:
                        await kv.evict(keys)
                    pinned = {digest: until for digest, until in pinned.items() if digest not in keys}
                pinned = {digest: until for digest, until in pinned.items() if until > now}
                assert len(pinned) <= kv.stats()["cpu"].leased <= 5
                for each in (any_prompt(8, 0), any_prompt(8, 1)):
                    for at, digest in enumerate(each):
                        assert digest not in pinned or (await kv.lookup(each[at : at + 1])).num_blocks == 1
            await advance(100)
            await until_idle(kv)

    virtual.run(program)
