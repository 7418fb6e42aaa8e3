"""A prefix on its way to memory loses neither its head to its tail nor what memory has of its tail to its head.

Nor, once it has begun, either of them to what others bring there. Whatever the tier's policy would have go first.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from typing_extensions import override

from tests.support.any_layout import STRIDE, AnyEngine, cpu, gpu, open_any, prompt
from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import inside, until, until_idle
from tiered_kv import BackendError, BlockKeys, GPULoadStoreSpec, Planner, Shard, TieredKV
from tiered_kv.catalog.policies import LRUPolicy
from tiered_kv.catalog.policies.make_policy import POLICIES
from tiered_kv.catalog.table import Slots

SLOTS = 24
KEYS = prompt(20)
OTHERS = prompt(20, salt="others")


class NewestFirst(LRUPolicy):
    """Evicts what came last: as a policy may that goes by hits, of which the newest have none."""

    @override
    def unpark(self, slots: Slots, *, cold: bool = False) -> None:
        super().unpark(slots, cold=not cold)


NEWEST_FIRST = {"policy": f"{__name__}:NewestFirst"}


@asynccontextmanager
async def full(*above: dict[str, Any]) -> AsyncIterator[tuple[TieredKV, ScriptedBackend]]:
    """Open a cache with both prompts in storage, whose memory is full of one: windows are of four blocks."""
    engine, below = AnyEngine(), ScriptedBackend()
    async with open_any(engine, *above, cpu(SLOTS) | NEWEST_FIRST, below) as kv:
        for keys in (KEYS, OTHERS):
            await (await kv.store(keys, engine.fill(keys, range(20)))).settled()
            await kv.evict(keys, tier="cpu")
        assert (await kv.prefetch(OTHERS)).num_blocks == 20
        assert inside(kv).chains[0].window_blocks < 20
        yield kv, below
        await until_idle(kv)


@pytest.mark.parametrize("gaps", [False, True])
async def test_a_plan_has_all_that_there_is_room_for(*, gaps: bool) -> None:
    """Twenty blocks where four slots are free, and the others hold what nobody uses."""
    async with full() as (kv, _):
        planner = kv.planner()
        planner.register_worker()
        job = planner.plan_load(KEYS, gaps=gaps)
        assert (await job.planned()).num_blocks == 20
        job.cancel()
        await job.ended()


async def test_a_lease_has_all_that_there_is_room_for() -> None:
    """Likewise, for who reads in place."""
    async with full() as (kv, _), kv.lease(KEYS) as held:
        assert held.num_blocks == 20


@pytest.mark.parametrize("to", ["cpu", "gpu"])
async def test_a_prefetch_brings_all_that_there_is_room_for(to: str) -> None:
    """Likewise, for who holds nothing: the tail goes to where others were, in a GPU pool too."""
    above = [gpu(SLOTS) | NEWEST_FIRST] if to == "gpu" else []
    async with full(*above) as (kv, _):
        if to == "gpu":
            assert (await kv.prefetch(OTHERS, to="gpu")).num_blocks == 20
        assert (await kv.prefetch(KEYS, to=to)).num_blocks == 20


async def test_a_load_leaves_in_memory_all_that_there_is_room_for() -> None:
    """Not a tail that has had its own head go: without that it is of no use."""
    async with full() as (kv, _):
        assert (await kv.load(KEYS, GPULoadStoreSpec(range(20)))).by_tier == {"keyed": 20}
        assert (await kv.load(KEYS, GPULoadStoreSpec(range(20)))).by_tier == {"cpu": 20}


async def test_a_load_leaves_in_a_gpu_pool_all_that_there_is_room_for() -> None:
    """What the pool had of the head, and what has come to it by now, stays while the rest comes: others make room."""
    async with full(gpu(SLOTS) | NEWEST_FIRST) as (kv, _):
        await kv.evict(KEYS, tier="gpu")
        assert (await kv.prefetch(OTHERS, to="gpu")).num_blocks == 20
        assert (await kv.prefetch(KEYS[:4], to="gpu")).num_blocks == 4
        assert not kv.stats()["gpu"].free
        await kv.load(KEYS, GPULoadStoreSpec(range(20)))
        assert (await kv.load(KEYS, GPULoadStoreSpec(range(20)))).by_tier == {"gpu": 20}


@pytest.mark.parametrize("layerwise", [False, True])
async def test_a_store_leaves_in_memory_all_that_there_is_room_for(*, layerwise: bool) -> None:
    """What it has found there and what it has stored by now stay while the rest comes: others make room."""
    async with full() as (kv, _):
        assert (await kv.prefetch(KEYS[:4])).num_blocks == 4
        assert not kv.stats()["cpu"].free
        storing = kv.start_store(KEYS, GPULoadStoreSpec(range(20)), layerwise=layerwise)
        for layer in range(2) if layerwise else ():
            storing.store_layer(layer)
        assert (await storing).num_present == 4
        assert (await kv.load(KEYS, GPULoadStoreSpec(range(20)))).by_tier == {"cpu": 20}


async def test_a_store_longer_than_memory_leaves_its_head_there() -> None:
    """What it holds is not more than there is room for: the rest goes below, and others are left alone then."""
    async with full() as (kv, _):
        keys = prompt(40, salt="long")
        stored = await kv.store(keys, GPULoadStoreSpec(range(40)))
        await stored.settled()
        assert stored.num_stored == 40
        assert kv.membership(keys, tier="cpu").astype(bool).nonzero()[0].tolist() == list(range(SLOTS))


@pytest.mark.parametrize("policy", ["lru", NEWEST_FIRST["policy"]])
@pytest.mark.parametrize("num_slots", [SLOTS, 44])
async def test_a_store_to_a_gpu_pool_leaves_its_head_on_the_host(policy: str, num_slots: int) -> None:
    """All that there is room for: windows come there one by one, and none makes room for the next. All goes below."""
    engine, others, keys = AnyEngine(), prompt(num_slots, salt="others"), prompt(40)
    async with open_any(engine, gpu(44), cpu(num_slots) | {"policy": policy}, ScriptedSlotBackend(128)) as kv:
        for each in (others, keys):
            await (await kv.store(each, engine.fill(each, range(len(each))))).settled()
            await until_idle(kv)
        on_host = kv.membership(keys, tier="cpu").astype(bool)
        assert on_host.nonzero()[0].tolist() == list(range(min(40, num_slots)))
        assert kv.membership(keys, tier="slots").astype(bool).all()


async def test_a_store_that_is_cancelled_holds_nothing() -> None:
    """Between two of its windows, as it waits for slots."""
    async with full() as (kv, below):
        below.on_write.hold()
        storing = kv.start_store(prompt(60, salt="long"), GPULoadStoreSpec(range(60)))
        await until(lambda: inside(kv).chains[0].room.num_waiting > 0)
        storing.cancel()
        await until(lambda: storing.done)
        below.on_write.release()


@asynccontextmanager
async def tail_in(tier: str) -> AsyncIterator[TieredKV]:
    """Have one tier of memory, which is full, be the only one that has the tail of a prompt; it came last."""
    above = [gpu(SLOTS) | NEWEST_FIRST] if tier == "gpu" else []
    async with full(*above) as (kv, _):
        if tier == "gpu":
            await kv.evict(KEYS, tier="gpu")
            assert (await kv.prefetch(OTHERS, to="gpu")).num_blocks == 20
        assert (await kv.prefetch(KEYS[16:], to=tier)).num_blocks == 4
        assert not kv.stats()[tier].free
        for other in {"gpu": ("keyed", "cpu"), "cpu": ("keyed",)}[tier]:
            await kv.evict(KEYS[16:], tier=other)
        assert (await kv.lookup(KEYS)).num_blocks == 20
        yield kv


@pytest.mark.parametrize("tier", ["cpu", "gpu"])
@pytest.mark.parametrize("layerwise", [False, True])
async def test_a_load_brings_the_tail_that_memory_alone_has(tier: str, *, layerwise: bool) -> None:
    """What is of no prompt that is wanted makes room for its head; and there it is in the end, too."""
    async with tail_in(tier) as kv:
        loaded = await kv.start_load(KEYS, GPULoadStoreSpec(range(20)), layerwise=layerwise)
        assert loaded.by_tier == {"keyed": 16, tier: 4}
        assert (await kv.load(KEYS, GPULoadStoreSpec(range(20)))).num_blocks == 20


@pytest.mark.parametrize("tier", ["cpu", "gpu"])
@pytest.mark.parametrize("how", [{"gaps": True}, {"order": "back"}])
async def test_a_load_in_parts_brings_what_memory_alone_has(tier: str, how: dict[str, Any]) -> None:
    """Of its head, too, which is in no part that is loaded at the time: others make room for that."""
    async with full(*[gpu(SLOTS) | NEWEST_FIRST] * (tier == "gpu")) as (kv, _):
        if tier == "gpu":
            await kv.evict(KEYS, tier="gpu")
            assert (await kv.prefetch(OTHERS, to="gpu")).num_blocks == 20
        assert (await kv.prefetch(KEYS[:4], to=tier)).num_blocks == 4
        for other in {"gpu": ("keyed", "cpu"), "cpu": ("keyed",)}[tier]:
            await kv.evict(KEYS[:4], tier=other)
        loaded = await kv.start_load(KEYS, GPULoadStoreSpec(range(20)), **how)
        assert loaded.by_tier == {tier: 4, "keyed": 16}
        assert kv.membership(KEYS[:4], tier=tier).astype(bool).all()


@pytest.mark.parametrize("how", [{"gaps": True}, {"order": "back"}])
async def test_what_makes_room_after_a_load_in_parts_is_the_tail_first(how: dict[str, Any]) -> None:
    """Whichever part memory had, and whichever came last."""
    for resident in (slice(8), slice(4, 12)):
        engine, below, keys = AnyEngine(), ScriptedBackend(), prompt(12)
        async with open_any(engine, cpu(12), below) as kv:
            await (await kv.store(keys, engine.fill(keys, range(12)))).settled()
            await kv.evict(keys, tier="cpu")
            await kv.prefetch(keys[resident])
            assert (await kv.start_load(keys, GPULoadStoreSpec(range(12)), **how)).mask.all()
            more = prompt(4, salt="more")
            await kv.store(more, engine.fill(more, range(4)))
            assert kv.membership(keys, tier="cpu").astype(bool).nonzero()[0].tolist() == list(range(8))
            await until_idle(kv)


@pytest.mark.parametrize("tier", ["cpu", "gpu"])
async def test_a_prefetch_leaves_the_tail_that_memory_alone_has(tier: str) -> None:
    """Likewise; it has all of it where it was to be."""
    async with tail_in(tier) as kv:
        assert (await kv.prefetch(KEYS, to=tier)).num_blocks == 20


@pytest.mark.parametrize("gaps", [False, True])
async def test_a_plan_has_the_tail_that_memory_alone_has(*, gaps: bool) -> None:
    """Likewise, for workers."""
    async with tail_in("cpu") as kv:
        planner = kv.planner()
        planner.register_worker()
        job = planner.plan_load(KEYS, gaps=gaps)
        assert (await job.planned()).num_blocks == 20
        job.cancel()
        await job.ended()


async def test_a_lease_has_the_tail_that_memory_alone_has() -> None:
    """Likewise, for who reads in place."""
    async with tail_in("cpu") as kv, kv.lease(KEYS) as held:
        assert held.num_blocks == 20


@pytest.mark.parametrize("how", ["load", "layerwise", "plan", "lease"])
async def test_what_memory_had_as_it_began_stays_for_it(how: str) -> None:
    """While it waits for what a tier below says of its head: what others bring to memory has others make room."""
    async with full() as (kv, below):
        assert (await kv.prefetch(KEYS[16:])).num_blocks == 4
        await kv.evict(KEYS[16:], tier="keyed")
        below.on_lookup.hold()
        brought = asyncio.ensure_future(_num_brought(kv, how))
        await until(lambda: below.on_lookup.num_held > 0)
        assert (await kv.store(prompt(4, salt="more"), GPULoadStoreSpec(range(40, 44)))).num_stored == 4
        below.on_lookup.release()
        assert await brought == 20


async def test_what_one_rank_has_stays_while_another_reads() -> None:
    """For a plan of all ranks: what others bring there meanwhile has others make room."""
    engine, below = AnyEngine(), ScriptedBackend()
    async with open_any(engine, cpu(12, 2 * STRIDE) | NEWEST_FIRST, below, shard=Shard.every(2)) as kv:
        planner = kv.planner()
        for rank in range(2):
            planner.register_worker(rank=rank)
        for keys in (KEYS[:6], OTHERS[:6]):
            await _store(planner, keys)
            await kv.flush()
        await kv.evict(KEYS, tier="cpu")
        below.on_read.fail_next(BackendError("of one rank"))
        assert (await kv.prefetch(KEYS[:6])).num_moved == 6
        below.on_read.hold()
        job = planner.plan_load(KEYS[:6])
        await until(lambda: below.on_read.num_held > 0)
        await _store(planner, prompt(4, salt="more"))
        below.on_read.release()
        assert (await job.planned()).num_blocks == 6
        job.cancel()
        await job.ended()
        await until_idle(kv)


async def _store(planner: Planner, keys: BlockKeys) -> None:
    job = planner.plan_store(keys)
    await job.planned()
    for rank in range(2):
        job.complete(keys, rank=rank)
    assert (await job.ended()).num_blocks == len(keys)


async def _num_brought(kv: TieredKV, how: str) -> int:
    if how == "lease":
        async with kv.lease(KEYS) as held:
            return held.num_blocks
    if how != "plan":
        return (await kv.start_load(KEYS, GPULoadStoreSpec(range(20)), layerwise=how == "layerwise")).num_blocks
    planner = kv.planner()
    planner.register_worker()
    job = planner.plan_load(KEYS)
    num_blocks = (await job.planned()).num_blocks
    job.cancel()
    await job.ended()
    return num_blocks


async def test_what_makes_room_after_a_prefetch_is_the_tail_first() -> None:
    """Where the tail was in memory, and was held while the head came, it is still what goes before the head."""
    engine, below, keys = AnyEngine(), ScriptedBackend(), prompt(12)
    async with open_any(engine, cpu(12), below) as kv:
        await (await kv.store(keys, engine.fill(keys, range(12)))).settled()
        await kv.evict(keys[:8], tier="cpu")
        assert (await kv.prefetch(keys)).num_moved == 8
        more = prompt(4, salt="more")
        await kv.store(more, engine.fill(more, range(4)))
        assert kv.membership(keys, tier="cpu").astype(bool).nonzero()[0].tolist() == list(range(8))
        await until_idle(kv)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_above_storage", [False, True])
async def test_what_makes_room_after_a_store_is_the_tail_first(policy: str, *, is_above_storage: bool) -> None:
    """It goes window by window, and each is let go of by itself: a prefix is left all the same."""
    engine, below = AnyEngine(num_blocks=64), ScriptedBackend()
    async with open_any(engine, cpu(44) | {"policy": policy}, *([below] if is_above_storage else [])) as kv:
        for keys in (prompt(40), prompt(12, salt="more")):
            await (await kv.store(keys, engine.fill(keys, range(len(keys))))).settled()
            await until_idle(kv)
        assert kv.membership(prompt(40), tier="cpu").astype(bool).nonzero()[0].tolist() == list(range(32))


async def test_what_makes_room_below_after_a_store_is_the_tail_first() -> None:
    """Likewise in an owned tier below, to which it is written window by window."""
    engine = AnyEngine(num_blocks=64)
    async with open_any(engine, cpu(64), ScriptedSlotBackend(44)) as kv:
        for keys in (prompt(40), prompt(12, salt="more")):
            await (await kv.store(keys, engine.fill(keys, range(len(keys))))).settled()
            await until_idle(kv)
        assert kv.membership(prompt(40), tier="slots").astype(bool).nonzero()[0].tolist() == list(range(32))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("has_pool", [False, True])
async def test_what_makes_room_after_cleaning_is_the_tail_first(policy: str, *, has_pool: bool) -> None:
    """In memory, where blocks have waited, and below: they go from one to the other window by window."""
    engine, slots = AnyEngine(), ScriptedSlotBackend(44, write="back")
    host = cpu(44) | {"policy": policy}
    memory = [gpu(64), host | {"write": "back"}] if has_pool else [host]
    async with open_any(engine, *memory, slots) as kv:
        for keys in (prompt(40), prompt(12, salt="more")):
            await kv.store(keys, engine.fill(keys, range(len(keys))))
            assert await kv.flush()
            await until_idle(kv)
        for tier in ("cpu", "slots"):
            assert kv.membership(prompt(40), tier=tier).astype(bool).nonzero()[0].tolist() == list(range(32))


async def test_cleaning_leaves_the_head_on_a_host_that_is_too_small() -> None:
    """As the last windows come from the GPU pool they have others make room, but for those that come at the time."""
    engine, keys = AnyEngine(), prompt(40)
    async with open_any(engine, gpu(44), cpu(SLOTS) | {"write": "back"}) as kv:
        window = inside(kv).chains[0].window_blocks
        await kv.store(keys, engine.fill(keys, range(40)))
        assert await kv.flush()
        await until_idle(kv)
        on_host = kv.membership(keys, tier="cpu").astype(bool)
        assert on_host[: SLOTS - 2 * window].all()
        assert on_host.sum() == SLOTS


async def test_a_store_that_waits_to_pass_through_holds_nothing() -> None:
    """Nothing more of it comes to memory to stay: others find room there, however long a tier below hangs."""
    async with full() as (kv, below):
        long = prompt(60, salt="long")
        await (await kv.store(long[:SLOTS], GPULoadStoreSpec(range(SLOTS)))).settled()
        below.on_write.hold()
        storing = kv.start_store(long, GPULoadStoreSpec(range(60)))
        await until(lambda: inside(kv).chains[0].room.num_waiting > 0)
        assert (await kv.store(OTHERS[:4], GPULoadStoreSpec(range(60, 64)))).num_stored == 4
        storing.cancel()
        await until(lambda: storing.done)
        below.on_write.release()


async def test_who_gives_up_holds_nothing() -> None:
    """A plan that is cancelled between two windows lets go of the first, and of what is still coming."""
    async with full() as (kv, below):
        planner = kv.planner()
        planner.register_worker()
        below.on_read.hold()
        job = planner.plan_load(KEYS)
        await until(lambda: below.on_read.num_held > 0)
        below.on_read.release()
        below.on_read.hold()  # those that come now
        await until(lambda: kv.stats()["cpu"].leased > 0)
        job.cancel()
        assert not (await job.ended()).num_blocks
        below.on_read.release()
