"""Many who want one block cause one read of it, and none of them pays for another's haste or patience."""

import asyncio

import pytest
from anyio.lowlevel import checkpoint

from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import inside, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, contents, prompt
from tiered_kv import CacheLimits, GPULoadStoreSpec, TieredKV

CPU = {"medium": "cpu", "capacity": 32 * PAYLOAD_BYTES}
KEYS = prompt(9)
Scripted = ScriptedBackend | ScriptedSlotBackend

both_kinds = pytest.mark.parametrize("kind", [ScriptedBackend, ScriptedSlotBackend])


def _start_loads(kv: TieredKV, n: int) -> list["asyncio.Task[int]"]:
    """Start loads of `KEYS`, each into pages of its own."""

    async def load(number: int) -> int:
        return (await kv.load(KEYS, _pages(number))).num_blocks

    return [asyncio.create_task(load(number)) for number in range(n)]


def _pages(number: int) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(range(number * len(KEYS), (number + 1) * len(KEYS)))


@both_kinds
async def test_many_loads_of_a_cold_prefix_read_it_once(kind: type[Scripted]) -> None:
    """Ten loads at once read each block once from storage, and all of them have it whole."""
    engine, medium = Engine(num_pages=90), kind(name="medium")
    async with open_cache(CPU, medium, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS, tier="cpu")
        engine.poison()
        assert await asyncio.gather(*_start_loads(kv, 10)) == [9] * 10
        assert medium.on_read.num_blocks == 9
        assert engine.read(range(90)) == contents(KEYS) * 10
        await until_idle(kv)


@both_kinds
async def test_without_a_cpu_tier_many_loads_share_windows(kind: type[Scripted]) -> None:
    """Where no block stays on the host, those who come while a window is there share it."""
    engine, medium = Engine(num_pages=90), kind(name="medium")
    async with open_cache(medium, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        engine.poison()
        assert await asyncio.gather(*_start_loads(kv, 10)) == [9] * 10
        assert 9 <= medium.on_read.num_blocks <= 18
        assert engine.read(range(90)) == contents(KEYS) * 10
        await until_idle(kv)


@both_kinds
async def test_who_joins_a_read_is_told_where_it_reads_from(kind: type[Scripted]) -> None:
    """The tier that had the blocks is credited with them, for each load; the one they are brought to is not."""
    engine, medium, keys = Engine(), kind(name="medium"), KEYS[:4]
    async with open_cache(CPU, medium, engine=engine) as kv:
        await keep(kv, engine, keys)
        await kv.evict(keys, tier="cpu")
        medium.on_read.hold()
        handles = [kv.start_load(keys, GPULoadStoreSpec(range(4)))]
        await until(lambda: medium.on_read.num_held > 0)
        handles.append(kv.start_load(keys, GPULoadStoreSpec(range(4, 8))))
        for _ in range(20):
            await checkpoint()
        medium.on_read.release()
        assert [dict((await handle).by_tier) for handle in handles] == [{"medium": 4}] * 2
        assert (kv.stats()["medium"].hits, kv.stats()["cpu"].hits, medium.on_read.num_blocks) == (8, 0, 4)
        await until_idle(kv)


@both_kinds
async def test_a_joiner_keeps_its_own_deadline(kind: type[Scripted]) -> None:
    """Who joins a read and is in a hurry leaves with what is there; who has time gets everything."""
    engine, medium = Engine(), kind(name="medium")
    async with open_cache(CPU, medium, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS[2:], tier="cpu")
        medium.on_read.hold()
        patient = asyncio.create_task(kv.load(KEYS, _pages(0)))
        await until(lambda: medium.on_read.num_held > 0)
        hasty = await kv.load(KEYS, _pages(1), deadline_s=0.3)
        assert hasty.num_blocks == 2
        assert {fault.reason for fault in hasty.faults} == {"deadline"}
        medium.on_read.release()
        assert (await patient).num_blocks == 9
        assert medium.on_read.num_blocks == 7
        await until_idle(kv)


@both_kinds
async def test_the_first_may_leave_without_harm_to_who_joined(kind: type[Scripted]) -> None:
    """A read goes on when the load that started it is cancelled: it is the cache's."""
    engine, medium = Engine(), kind(name="medium")
    async with open_cache(CPU, medium, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS, tier="cpu")
        engine.poison()
        medium.on_read.hold()
        first, second = asyncio.create_task(kv.load(KEYS, _pages(0))), asyncio.create_task(kv.load(KEYS, _pages(1)))
        await until(lambda: medium.on_read.num_held > 0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        medium.on_read.release()
        assert (await second).num_blocks == 9
        assert engine.read(_pages(1)) == contents(KEYS)
        assert medium.on_read.num_blocks == 9
        await until_idle(kv)


@both_kinds
async def test_who_joins_a_prefetch_hurries_it(kind: type[Scripted]) -> None:
    """A load that wants what a queued prefetch is to bring has it brought as a load, before other prefetches."""
    engine, medium = Engine(), kind(name="medium", timeout_s=1e6)
    others = prompt(9, seed=1)
    async with open_cache(CPU, medium, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await keep(kv, engine, others)
        await kv.evict(KEYS, tier="cpu")
        await kv.evict(others, tier="cpu")
        medium.on_read.hold()
        ahead = kv.prefetch(others)
        await until(lambda: medium.on_read.num_held == 1)
        wanted = kv.prefetch(KEYS[:4])  # one window: the load has none to start itself
        budget = inside(kv).chains[0].storage[0].calls.budget  # who waits in line is in no statistics
        await until(lambda: budget.room.num_waiting == 1)
        loading = asyncio.create_task(kv.load(KEYS[:4], _pages(0)[:4]))
        await until(lambda: medium.on_read.num_held == 2)
        medium.on_read.release()
        assert (await loading).num_blocks == 4
        assert ((await ahead).num_blocks, (await wanted).num_blocks) == (9, 4)
        assert medium.on_read.num_blocks == 13
        await until_idle(kv)


async def test_who_waits_for_another_blames_the_tiers_that_are_late() -> None:
    """And no other one: not for the blocks that another load is bringing, of which it knows nothing."""
    engine, late, idle = Engine(), ScriptedBackend(name="late", timeout_s=1e6), ScriptedBackend(name="idle")
    async with open_cache(CPU, late, idle, engine=engine) as kv:
        await keep(kv, engine, KEYS[:2])
        await kv.evict(KEYS, tier="cpu")
        late.on_read.hold()
        first = asyncio.create_task(kv.load(KEYS[:1], GPULoadStoreSpec([0])))
        await until(lambda: late.on_read.num_held == 1)
        faults = (await kv.load(KEYS[:2], GPULoadStoreSpec([1, 2]), deadline_s=0.05)).faults
        assert {fault.tier for fault in faults if fault.reason == "deadline"} <= {"late", ""}
        assert "late" in {fault.tier for fault in faults}
        late.on_read.release()
        assert (await first).num_blocks == 1
        await until_idle(kv)


@both_kinds
async def test_a_load_joins_a_store_under_way(kind: type[Scripted]) -> None:
    """Blocks that are being copied to the host are loaded from there once they are, and not read at all."""
    engine, medium = Engine(), kind(name="medium")
    async with open_cache(CPU, medium, engine=engine) as kv:
        storing = kv.start_store(KEYS, engine.compute(KEYS))
        loading = asyncio.create_task(kv.load(KEYS, GPULoadStoreSpec(range(20, 29))))
        await storing
        assert (await loading).num_blocks in (0, 9)  # 0: it came before the first block was announced
        assert medium.on_read.num_blocks == 0
        await until_idle(kv)


@pytest.mark.parametrize("quota", [1, 4, 8])
async def test_prefetches_stay_within_their_quota(quota: int) -> None:
    """However many are asked for, no more bytes of prefetches are under way at once, unless one piece is more."""
    engine, medium = Engine(), ScriptedSlotBackend(128, name="medium", timeout_s=1e6)
    limits = CacheLimits(window=2 * PAYLOAD_BYTES, bounce=16 * PAYLOAD_BYTES, prefetch_quota=quota * PAYLOAD_BYTES)
    prompts = [prompt(6, seed=seed) for seed in range(5)]
    async with open_cache(CPU, medium, engine=engine, limits=limits) as kv:
        for keys in prompts:
            await keep(kv, engine, keys)
            await kv.evict(keys, tier="cpu")
        medium.on_read.hold()
        handles = [kv.prefetch(keys) for keys in prompts]
        await until(lambda: medium.on_read.num_held > 0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert 2 * medium.on_read.num_held <= max(quota, 2)
        assert inside(kv).chains[0].quotas.prefetches.in_flight >= 2 * PAYLOAD_BYTES * medium.on_read.num_held
        medium.on_read.release()
        assert [(await handle).num_blocks for handle in handles] == [6] * 5
        await until_idle(kv)
