"""Statistics add up: whatever is loaded, stored, evicted and cancelled, each block asked for is counted once."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, prompt
from tiered_kv import BlockKeys, CacheStatistics, GPULoadStoreSpec, Outcomes, TieredKV

PROMPTS = [prompt(12, seed=seed) for seed in range(3)]
SPANS = st.tuples(st.sampled_from(PROMPTS), st.integers(0, 11), st.integers(1, 12)).map(lambda at: at[0][at[1] : at[2]])
STEPS = st.lists(
    st.tuples(st.sampled_from(["load", "store", "evict", "advance"]), SPANS, st.integers(1, 40)),
    min_size=1,
    max_size=12,
)
"""What to do, with which blocks, and after how many turns of the loop to cancel it; 40 is mostly never."""


def cpu(num_blocks: int) -> dict[str, object]:
    """A CPU tier of so many blocks."""
    return {"medium": "cpu", "capacity": num_blocks * PAYLOAD_BYTES}


def assert_conserved(stats: CacheStatistics) -> None:
    """Assert that both sums come out."""
    assert sum(tier.hits for tier in stats.tiers) + stats.missed == stats.requested
    assert stats.stored + stats.present + stats.dropped == stats.store_requested


@settings(max_examples=60)
@given(steps=STEPS, num_cpu_blocks=st.sampled_from([0, 6, 32]))
def test_each_block_asked_for_is_counted_once(steps: list[tuple[str, BlockKeys, int]], num_cpu_blocks: int) -> None:
    """By loads that are cancelled, late or overtaken too; and the sums are those of what the calls were given."""

    async def scenario() -> None:
        engine, disk = Engine(), ScriptedSlotBackend(num_slots=16, name="disk")
        tiers = [cpu(num_cpu_blocks), disk] if num_cpu_blocks else [disk]
        async with open_cache(*tiers, engine=engine) as kv:
            for kind, keys, turns in steps:
                await cancelled_after(turns, call_of(kv, kind, keys, engine))
            await kv.flush()
            await until_idle(kv)
            stats = kv.stats()
            asked = {kind: sum(len(keys) for each, keys, _ in steps if each == kind) for kind in ("load", "store")}
            assert (stats.requested, stats.store_requested) == (asked["load"], asked["store"])
            assert_conserved(stats)

    asyncio.run(scenario())


def call_of(kv: TieredKV, kind: str, keys: BlockKeys, engine: Engine) -> Callable[[], Awaitable[object]]:
    """Return what starts a call."""

    async def advance() -> None:
        kv.advance_epoch("w1")
        kv.advance_epoch("w0")

    spec = GPULoadStoreSpec(range(len(keys)))
    return {
        "load": lambda: kv.load(keys, spec),
        "store": lambda: kv.store(keys, engine.compute(keys)),
        "evict": lambda: kv.evict(keys),
        "advance": advance,
    }[kind]


async def cancelled_after(turns: int, call: Callable[[], Awaitable[object]]) -> None:
    """Make a call, and cancel it if it has not ended after so many turns of the loop."""
    task = asyncio.ensure_future(call())
    for _ in range(turns):
        await asyncio.sleep(0)
    if turns < 40:
        task.cancel()
    await asyncio.wait({task})


async def test_a_hit_counts_where_the_block_was_before_it_was_promoted() -> None:
    """The first load is the disk's, the second, of the same blocks, the memory's."""
    engine, disk, keys = Engine(), ScriptedSlotBackend(name="disk"), prompt(4)
    async with open_cache(cpu(16), disk, engine=engine) as kv:
        await keep(kv, engine, keys)
        await kv.evict(keys, tier="cpu")
        for _ in range(2):
            await kv.load(prompt(6), GPULoadStoreSpec(range(6)))
        stats = kv.stats()
        assert (stats["disk"].hits, stats["cpu"].hits, stats.missed, stats.requested) == (4, 4, 4, 12)
        assert stats["cpu"].promoted == 4
        assert_conserved(stats)


async def test_what_an_engine_without_memory_tier_stores_again_counts_as_present() -> None:
    """Where a store finds part of a window below and no slot for the rest in time, no block counts twice."""
    engine, disk, keys = Engine(), ScriptedSlotBackend(name="disk"), prompt(8)
    async with open_cache(disk, engine=engine) as kv:
        await keep(kv, engine, keys[:2])
        disk.on_write.hold()
        handles = [
            kv.start_store(each, GPULoadStoreSpec(np.arange(len(each))))
            for each in (prompt(16, seed=1), prompt(16, seed=2), keys)
        ]
        await until(lambda: disk.on_write.num_held > 0)
        handles[-1].cancel()
        disk.on_write.release()
        results = [await handle for handle in handles]
        await until_idle(kv)
        assert [each.num_stored + each.num_present + each.num_dropped for each in results] == [16, 16, 8]
        assert_conserved(kv.stats())


async def test_what_plans_move_is_counted_too() -> None:
    """When the job has ended: what workers did not move, and what there was no room for, is missed or dropped."""
    engine, disk, keys, all_pages = Engine(), ScriptedSlotBackend(name="disk"), prompt(12), GPULoadStoreSpec(range(12))
    async with open_cache(cpu(8), disk, engine=engine) as kv:
        planner = kv.planner()
        planner.register_worker()
        for num_blocks, num_moved in ((4, 4), (6, 1), (12, 0)):
            job = planner.plan_store(keys[:num_blocks], all_pages[:num_blocks])
            await job.planned()
            planner.complete(Outcomes(job.number, 0, num_moved))
            await job.ended()
        await until_idle(kv)
        stats = kv.stats()
        assert (stats.store_requested, stats.stored, stats.present, stats.dropped) == (22, 5, 9, 8)
        await kv.evict(keys[:2], tier="cpu")
        job = planner.plan_load(keys, all_pages)
        await job.planned()
        planner.complete(Outcomes(job.number, 0, 4))
        await job.ended()
        stats = kv.stats()
        assert (stats["disk"].hits, stats["cpu"].hits, stats.missed, stats.requested) == (2, 2, 8, 12)
        job = planner.plan_load(keys, all_pages)
        await job.planned()
        kv.advance_epoch("w1")
        planner.complete(Outcomes(job.number, 0, 5))
        await job.ended()
        assert (kv.stats().missed, kv.stats().requested) == (20, 24)
        assert_conserved(kv.stats())
        await until_idle(kv)


async def test_bytes_and_seconds_are_told_for_each_call_and_each_tier() -> None:
    """Of what a store copied and a load brought; and of what media took and brought for them, as far as they did."""
    engine, disk, keys = Engine(), ScriptedSlotBackend(name="disk"), prompt(8)
    async with open_cache(cpu(16), disk, engine=engine) as kv:
        first = await kv.store(keys[:2], engine.compute(keys[:2]))
        stored = await kv.store(keys, engine.compute(keys))
        assert first.num_bytes == 2 * PAYLOAD_BYTES
        assert stored.num_bytes == 6 * PAYLOAD_BYTES  # what is there is not copied
        assert stored.seconds > 0.0
        await kv.flush()
        record_bytes, odd = divmod(kv.stats()["disk"].bytes_written, 8)
        assert (odd, record_bytes >= PAYLOAD_BYTES) == (0, True)
        assert kv.stats()["disk"].write_s > 0.0
        await kv.evict(keys[5:], tier="cpu")
        loaded = await kv.load(keys, GPULoadStoreSpec(range(8)))
        assert loaded.num_bytes == 8 * PAYLOAD_BYTES
        stats = kv.stats()
        assert stats["disk"].bytes_read == 3 * record_bytes
        assert stats["disk"].read_s > 0.0
        assert (stats["cpu"].bytes_read, stats["cpu"].bytes_written) == (0, 0)
        await until_idle(kv)


async def test_what_is_under_way_in_a_tier_is_counted() -> None:
    """Bytes in flight and calls that are not answered; nothing of them is left when nothing moves."""
    engine, backend = Engine(), ScriptedBackend()
    async with open_cache(cpu(16), backend, engine=engine) as kv:
        backend.on_write.hold()
        await kv.store(prompt(4), engine.compute(prompt(4)))
        await until(lambda: backend.on_write.num_held > 0)
        memory, tier = kv.stats().tiers
        assert tier.in_flight_bytes >= 4 * PAYLOAD_BYTES
        assert tier.num_calls == backend.on_write.num_held
        assert memory.used_bytes * 16 == memory.capacity_bytes * 4
        backend.on_write.release()
        await until_idle(kv)
        tier = kv.stats().tiers[1]
        assert (tier.in_flight_bytes, tier.num_calls, tier.num_waiting) == (0, 0, 0)
