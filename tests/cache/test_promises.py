"""What each call of the facade promises, on chains of every kind and for blocks of every shape."""

import inspect
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.any_layout import STRIDE, AnyEngine, cpu, gpu, memory, nvme, open_any, prompt
from tests.support.backends import ScriptedSlotBackend, only
from tests.support.caches import Recorder, until, until_idle
from tiered_kv import (
    BlockKeys,
    BlockState,
    CacheStatistics,
    ConfigurationError,
    KVGroup,
    KVLayout,
    Outcome,
    StoreResult,
    TieredKV,
)
from tiered_kv.values.events import BlocksLoaded, BlocksPrefetched, BlocksStored

CHAINS = ("cpu", "cpu+nvme", "gpu+cpu+nvme", "nvme", "cpu+memory")
LAYOUTS = {
    "packed_words": KVLayout((KVGroup(3, 2, 32, "float16", 8, "HND"),)),
    "odd_bytes": KVLayout((KVGroup(1, 1, 3, "uint8", 5),)),
    "mla": KVLayout((KVGroup(2, 1, 72, "bfloat16", 8, "MLA"),)),
    "mla_of_pages": KVLayout((KVGroup(2, 1, 72, "bfloat16", 8, "MLA", 2),)),
    "four_pages_a_block": KVLayout((KVGroup(2, 2, 16, "float32", 16, "NHD", 4),)),
    "two_groups": KVLayout((KVGroup(2, 1, 48, "bfloat16", 4), KVGroup(1, 2, 64, "float32", 8, "HND", 4))),
}
Cache = tuple[TieredKV, AnyEngine]


def tiers_of(chain: str, path: Path, *, stride_bytes: int = STRIDE) -> list[dict[str, Any]]:
    """Return the tiers that a name like ``"cpu+nvme"`` stands for: all but the last are too small for long prompts."""
    is_alone = "+" not in chain
    made = {
        "gpu": gpu(12, stride_bytes),
        "cpu": cpu(64 if is_alone else 24, stride_bytes),
        "nvme": nvme(path),
        "memory": memory(),
    }
    return [made[medium] for medium in chain.split("+")]


@pytest.fixture(params=CHAINS)
async def cache(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cache]:
    """A cache of each kind of chain, and its engine. Nothing may be left behind by a test."""
    engine = AnyEngine()
    async with open_any(engine, *tiers_of(request.param, tmp_path)) as kv:
        yield kv, engine
        await kv.flush()
        await until_idle(kv)


async def store(cache: Cache, keys: BlockKeys, version: str = "", **how: Any) -> StoreResult:  # noqa: ANN401 - as given
    """Compute blocks of the engine from its first on, store them, and wait until every tier has them."""
    kv, engine = cache
    result = await kv.store(keys, engine.fill(keys, range(len(keys)), version), **how)
    await result.settled()
    return result


async def load(cache: Cache, keys: BlockKeys, version: str = "") -> int:
    """Load into the engine's blocks, backwards and wiped before; return how many came, all of them right."""
    kv, engine = cache
    engine.wipe()
    blocks = range(len(keys) - 1, -1, -1)
    loaded = await kv.load(keys, engine.spec(blocks, keys.group))
    assert loaded.num_requested == len(keys)
    assert loaded.num_blocks == sum(loaded.by_tier.values()) == engine.count_right(keys, blocks, version)
    return loaded.num_blocks


def hits(stats: CacheStatistics) -> dict[str, int]:
    """Return hits by tier, of those that had any."""
    return {tier.tier: tier.hits for tier in stats.tiers if tier.hits}


async def test_what_is_stored_is_found_and_loaded(cache: Cache) -> None:
    """Blocks come back byte for byte, from wherever they are; of a longer prompt, its known prefix."""
    kv, _ = cache
    keys = prompt(20)
    result = await store(cache, keys[:13])
    assert (result.num_requested, result.num_stored, result.num_present, result.num_dropped) == (13, 13, 0, 0)
    found = await kv.lookup(keys)
    assert found.num_blocks == sum(found.by_tier.values()) == 13
    assert found.num_bytes == 13 * 1536
    assert found.runs[0].start == 0
    assert all(a.stop == b.start for a, b in zip(found.runs, found.runs[1:], strict=False))
    assert await load(cache, keys) == 13
    assert await load(cache, keys[4:9]) == 5


async def test_a_hole_ends_the_prefix(cache: Cache) -> None:
    """What lies behind a missing block is not counted, though it can be had by itself."""
    kv, _ = cache
    keys = prompt(12)
    await store(cache, keys[:5])
    await store(cache, keys[6:])
    assert (await kv.lookup(keys)).num_blocks == await load(cache, keys) == 5
    assert (await kv.lookup(keys[6:])).num_blocks == await load(cache, keys[6:]) == 6


async def test_lookup_moves_nothing(cache: Cache) -> None:
    """However often it is asked, nothing changes, no use included."""
    kv, _ = cache
    keys = prompt(20)
    await store(cache, keys)
    before = kv.stats()
    for _ in range(3):
        assert (await kv.lookup(keys)).num_blocks == 20
        assert (await kv.lookup(prompt(5, seed=1))).num_blocks == 0
    assert kv.stats() == before


async def test_nothing_is_harmless(cache: Cache) -> None:
    """A prompt below one block has no keys, and every call takes that."""
    kv, engine = cache
    none = prompt(0)
    assert (await store(cache, none)).num_requested == 0
    assert (await kv.lookup(none)).num_blocks == await load(cache, none) == 0
    assert (await kv.evict(none)).num_blocks == 0
    kv.touch(none)
    assert engine.count_right(none, []) == 0


NO_KEYS: dict[str, Callable[[TieredKV, Any], object]] = {
    "lookup": lambda kv, keys: kv.lookup(keys),
    "presence": lambda kv, keys: kv.presence(keys),
    "lookup_nowait": lambda kv, keys: kv.lookup_nowait(keys),
    "membership": lambda kv, keys: kv.membership(keys),
    "prefetch": lambda kv, keys: kv.prefetch(keys),
    "touch": lambda kv, keys: kv.touch(keys),
    "resident": lambda kv, keys: kv.resident(keys),
    "leaving": lambda kv, keys: kv.leaving(keys),
    "pin": lambda kv, keys: kv.pin(keys, ttl_s=1.0),
    "unpin": lambda kv, keys: kv.unpin(keys),
    "evict": lambda kv, keys: kv.evict(keys),
    "explain": lambda kv, keys: kv.explain(keys),
}


async def finished(answer: object) -> None:
    """Wait for an answer that is to be awaited."""
    if inspect.isawaitable(answer):
        await answer


async def test_what_is_no_keys_is_refused_in_words(cache: Cache) -> None:
    """By every call that takes some, whatever it is."""
    for call in NO_KEYS.values():
        for keys in (None, 7, list(prompt(2))):
            with pytest.raises(ConfigurationError, match="keys must be BlockKeys"):
                await finished(call(cache[0], keys))


async def test_numbers_that_are_none_are_refused_in_words(cache: Cache) -> None:
    """Of a rank, a KV group, and of how long to wait."""
    kv, _ = cache
    wrong: Any
    for wrong in (None, "1", 1.5):
        with pytest.raises(ConfigurationError, match="must be an int"):
            kv.namespace(rank=wrong)
        with pytest.raises(ConfigurationError, match="must be an int"):
            kv.unregister_kv_caches(group=wrong)
    for wrong in (None, "1"):
        with pytest.raises(ConfigurationError, match="timeout_s must be a number of seconds"):
            kv.poll(wrong)


async def test_what_a_call_returns_says_what_it_is(cache: Cache) -> None:
    """What is printed or logged of it is a name and a state, and no address in memory."""
    kv, engine = cache
    keys = prompt(4)
    handle = kv.start_store(keys, engine.fill(keys, range(4)))
    await handle
    ticket = kv.submit_load(keys, engine.spec(range(4)))
    before = repr(ticket)
    while not ticket.result:
        await kv.load(keys[:1], engine.spec([5]))
    if "cpu" in kv.media:
        async with kv.lease(keys) as lease:
            assert repr(lease) == "HostLease(num_blocks=4)"
        planner = kv.planner()
        planner.register_worker()
        assert repr(planner) == f"{type(planner).__name__}(num_ranks=1, num_jobs=0)"
        job = planner.plan_load(keys)
        assert repr(job) == f"Job({job.number}, 'load', result={job.result})"
        job.cancel()
        await job.ended()
    assert repr(kv) == f"{type(kv).__name__}({', '.join(kv.media)})"
    assert repr(handle) == "StoreHandle(done)"
    assert (before, repr(ticket)) == ("Ticket(result=None)", f"Ticket(result={ticket.result})")
    assert repr(kv.namespace(salt="tenant")) == f"Namespace({kv.namespace(salt='tenant').path})"


async def test_a_second_store_copies_nothing(cache: Cache) -> None:
    """What is there already is counted as present, and keeps its first bytes: equal keys are equal blocks."""
    keys = prompt(10)
    await store(cache, keys[:6])
    again = await store(cache, keys)
    assert (again.num_stored, again.num_present, again.num_dropped) == (4, 6, 0)
    assert await load(cache, keys) == 10


async def test_a_block_named_twice_is_one_block(cache: Cache) -> None:
    """Repeats in a batch of an engine's own hashes are harmless: stored once, loaded to both places."""
    kv, _ = cache
    once = prompt(3)
    keys = BlockKeys.from_hashes([once[0], once[1], once[0], once[2]], block_size=once.block_size)
    result = await store(cache, keys)
    assert (result.num_stored, result.num_present) == (3, 1)
    assert await load(cache, keys) == 4
    assert (await kv.lookup(once)).num_blocks == 3


async def test_the_source_may_be_reused_at_once(cache: Cache) -> None:
    """When `store` returns, the engine may overwrite its blocks: what is on its way down is a copy."""
    kv, engine = cache
    keys = prompt(20)
    await kv.store(keys, engine.fill(keys, range(20)))
    engine.wipe()
    await kv.flush()
    assert await load(cache, keys) == 20


async def test_each_tier_settles_each_block_once(cache: Cache) -> None:
    """Per tier, written, present, deferred, dropped and failed make up the store: none is lost, none counted twice."""
    kv, engine = cache
    keys = prompt(50)
    for part in (keys[:20], keys[10:40], keys):
        result = await kv.store(part, engine.fill(part, range(len(part))))
        assert result.num_stored + result.num_present + result.num_dropped == len(part)
        settled = await result.settled()
        for tier in settled:
            assert tier.written + tier.present + tier.deferred + tier.dropped + tier.failed == len(part), tier
        kept_in = [tier.tier for tier in kv.stats().tiers if tier.tier != "cpu" or tier.num_slots]
        assert [tier.tier for tier in settled] == kept_in


async def test_each_loaded_block_is_counted_once(cache: Cache) -> None:
    """Hits of all tiers together are the blocks that loads reported, in the tier that had them before the load."""
    kv, engine = cache
    keys, num_loaded = prompt(30), 0
    await store(cache, keys)
    for part in (keys, keys[:7], keys[3:20], prompt(4, seed=1)):
        found = await kv.lookup(part)
        before = hits(kv.stats())
        loaded = await kv.load(part, engine.spec(range(len(part))))
        num_loaded += loaded.num_blocks
        assert loaded.num_blocks == found.num_blocks
        tiers = [tier.tier for tier in kv.stats().tiers]
        depths = [tiers.index(run.tier) for run in found.runs]
        # Where a shared tier was asked runs are estimates; and what is brought may have to go where the rest lies.
        if "memory" not in tiers and depths == sorted(depths):
            assert loaded.by_tier == found.by_tier
        after = hits(kv.stats())
        assert {tier: n - before.get(tier, 0) for tier, n in after.items() if n - before.get(tier, 0)} == loaded.by_tier
    assert sum(hits(kv.stats()).values()) == num_loaded


async def test_evicted_blocks_are_gone_everywhere(cache: Cache) -> None:
    """From the moment of the call nothing finds them; what is beside them stays."""
    kv, _ = cache
    keys = prompt(16)
    await store(cache, keys)
    await kv.evict(keys[10:])
    assert (await kv.lookup(keys)).num_blocks == await load(cache, keys) == 10
    assert await load(cache, keys[12:]) == 0
    await store(cache, keys)
    assert await load(cache, keys) == 16


async def test_a_cleared_cache_is_empty(cache: Cache) -> None:
    """In every tier that the cache owns nothing is left, and it can be filled again."""
    kv, _ = cache
    keys = prompt(16)
    await store(cache, keys)
    await kv.clear()
    assert all((tier.ready, tier.free) == (0, tier.num_slots) for tier in kv.stats().tiers)
    if "memory" not in [tier.tier for tier in kv.stats().tiers]:  # shared tiers are not the cache's to empty
        assert await load(cache, keys) == 0
    await store(cache, keys)
    assert await load(cache, keys) == 16


@pytest.mark.parametrize("removal", ["evict", "clear"])
async def test_what_was_submitted_before_it_is_removed_never_becomes_readable(cache: Cache, removal: str) -> None:
    """Submitted by the thread of the loop, which has had no turn since: it was asked for, and is filled by then."""
    kv, engine = cache
    keys = prompt(6)
    ticket = kv.submit_store(keys, engine.fill(keys, range(6)))
    await (kv.evict(keys) if removal == "evict" else kv.clear())
    await until(lambda: ticket.result is not None)
    await kv.flush()
    if removal == "evict" or "memory" not in [tier.tier for tier in kv.stats().tiers]:  # not the cache's to empty
        assert await load(cache, keys) == 0


@pytest.mark.parametrize("waiting", ["flush", "drain"])
async def test_what_was_submitted_before_is_waited_for(cache: Cache, waiting: str) -> None:
    """By the thread of the loop too, which has had no turn since; a drain takes it, and nothing after it."""
    kv, engine = cache
    keys = prompt(6)
    ticket = kv.submit_store(keys, engine.fill(keys, range(6)))
    assert await (kv.flush() if waiting == "flush" else kv.drain())
    owned = [tier.tier for tier in kv.stats().tiers if tier.tier != "memory"]
    assert kv.membership(keys, tier=owned[-1]).tolist() == [BlockState.HIT] * 6
    await until(lambda: ticket.result is not None)
    assert ticket.result is not None
    assert ticket.result.num_stored == 6


async def test_other_weights_see_nothing_of_these(cache: Cache) -> None:
    """An epoch is the identity of weights: others find nothing, and naming the first ones again finds all."""
    kv, _ = cache
    keys = prompt(12)
    await store(cache, keys, "w0")
    kv.advance_epoch("w1")
    assert (await kv.lookup(keys)).num_blocks == await load(cache, keys) == 0
    await store(cache, keys[:6], "w1")
    assert await load(cache, keys, "w1") == 6
    await store(cache, keys[6:], "w0", epoch="w0")
    assert await load(cache, keys, "w1") == 6
    kv.advance_epoch("w0")
    assert await load(cache, keys, "w0") == 12


async def test_tenants_see_nothing_of_each_other(cache: Cache) -> None:
    """Equal prompts of two salts share nothing, equal hashes of an engine's own included."""
    kv, _ = cache
    mine, yours = (BlockKeys.from_hashes(prompt(8), block_size=4, salt=salt) for salt in ("mine", "yours"))
    await store(cache, mine, "mine")
    assert (await kv.lookup(yours)).num_blocks == await load(cache, yours) == 0
    await store(cache, yours, "yours")
    assert await load(cache, mine, "mine") == await load(cache, yours, "yours") == 8


async def test_a_prefix_longer_than_the_memory_is_served(cache: Cache) -> None:
    """What does not fit above is served from below, in order; where nothing is below, its head is kept."""
    kv, _ = cache
    keys = prompt(60)
    await store(cache, keys)
    n = (await kv.lookup(keys)).num_blocks
    assert n == 60
    assert await load(cache, keys) == 60
    assert (await kv.lookup(keys)).num_blocks == 60


@pytest.mark.parametrize("chain", ["cpu+nvme", "gpu+cpu+nvme", "cpu+memory"])
async def test_promotion_brings_the_next_load_closer(chain: str, tmp_path: Path) -> None:
    """Blocks loaded from below are in the memory tiers afterwards, and the next load takes them from the fastest."""
    engine = AnyEngine()
    async with open_any(engine, *tiers_of(chain, tmp_path)) as kv:
        names = [tier.tier for tier in kv.stats().tiers]
        keys = prompt(10)
        await store((kv, engine), keys)
        for tier in names[:-1]:
            await kv.evict(keys, tier=tier)
        assert (await kv.lookup(keys)).by_tier == {names[-1]: 10}
        assert await load((kv, engine), keys) == 10
        assert (await kv.lookup(keys)).by_tier == {names[0]: 10}
        assert await load((kv, engine), keys) == 10
        assert hits(kv.stats()) == {names[-1]: 10, names[0]: 10}


@pytest.mark.parametrize("to", ["cpu", "gpu"])
async def test_prefetch_brings_blocks_up(to: str, tmp_path: Path) -> None:
    """Blocks are where they were wanted before anyone waits for them, and no load is counted."""
    engine = AnyEngine()
    async with open_any(engine, gpu(12), cpu(24), nvme(tmp_path)) as kv:
        keys = prompt(10)
        await store((kv, engine), keys)
        for tier in ("gpu", "cpu"):
            await kv.evict(keys, tier=tier)
        result = await kv.prefetch(keys, to=to)
        assert (result.num_blocks, result.num_moved, result.faults) == (10, 10, ())
        assert (await kv.lookup(keys)).by_tier == {to: 10}
        again = await kv.prefetch(keys, to=to)
        assert (again.num_blocks, again.num_moved) == (10, 0)
        assert hits(kv.stats()) == {}
        assert await load((kv, engine), keys) == 10
        await until_idle(kv)


async def test_prefetch_counts_as_moved_what_has_arrived() -> None:
    """Not what could not be read; but what was read behind that, which is in memory too."""
    engine, below, recorder = AnyEngine(), ScriptedSlotBackend(), Recorder()
    async with open_any(engine, cpu(10), below, emit=recorder) as kv:
        keys = prompt(4)
        await store((kv, engine), keys)
        await kv.evict(keys, tier="cpu")
        below.on_read.change_next(only(1, Outcome.FAILED))
        result = await kv.prefetch(keys)
        assert (result.num_blocks, result.num_moved) == (1, 3)
        assert kv.stats()["cpu"].promoted == 3
        assert [(event.blocks, event.moved) for event in recorder.of(BlocksPrefetched)] == [(1, 3)]
        await until_idle(kv)


async def test_prefetch_stops_at_what_the_tier_takes(tmp_path: Path) -> None:
    """It brings a prefix as long as the tier, and never evicts its own head."""
    engine = AnyEngine()
    async with open_any(engine, cpu(10), nvme(tmp_path)) as kv:
        keys = prompt(30)
        await store((kv, engine), keys)
        await kv.evict(keys, tier="cpu")
        result = await kv.prefetch(keys)
        assert result.num_blocks == result.num_moved == 10
        assert (await kv.lookup(keys)).by_tier == {"cpu": 10, "nvme": 20}


async def test_transfers_keep_their_own_head(tmp_path: Path) -> None:
    """A load, a store, a prefetch or a lease of more than a tier holds evicts no block of the prompt's head there."""
    engine = AnyEngine()
    async with open_any(engine, gpu(6), cpu(10), nvme(tmp_path)) as kv:
        keys = prompt(40)
        await store((kv, engine), keys[:10])
        for _ in range(2):
            await store((kv, engine), keys)
            assert (await kv.lookup(keys)).by_tier == {"gpu": 6, "cpu": 4, "nvme": 30}
            assert await load((kv, engine), keys) == 40
            assert (await kv.lookup(keys)).by_tier == {"gpu": 6, "cpu": 4, "nvme": 30}
            assert (await kv.prefetch(keys)).num_blocks == 10
            assert (await kv.prefetch(keys, to="gpu")).num_blocks == 6
            async with kv.lease(keys) as lease:
                assert lease.num_blocks == 10
        await kv.evict(keys, tier="gpu")
        assert (await kv.lookup(keys)).by_tier == {"cpu": 10, "nvme": 30}
        assert await load((kv, engine), keys) == 40
        assert (await kv.lookup(keys)).by_tier == {"gpu": 6, "cpu": 4, "nvme": 30}
        await until_idle(kv)


async def test_a_lease_shows_the_bytes_and_holds_them(tmp_path: Path) -> None:
    """Inside, each view is the block's payload, read-only, and no churn evicts it; outside, it may go."""
    engine = AnyEngine()
    async with open_any(engine, cpu(8), nvme(tmp_path)) as kv:
        keys = prompt(6)
        await store((kv, engine), keys)
        await kv.evict(keys, tier="cpu")
        async with kv.lease(keys) as lease:
            assert lease.num_blocks == len(lease.views) == 6
            seen = [bytes(view) for view in lease.views]
            for turn in range(1, 5):
                await store((kv, engine), prompt(8, seed=turn))
            assert [bytes(view) for view in lease.views] == seen
            assert all(view.readonly for view in lease.views)
            assert (await kv.lookup(keys)).by_tier == {"cpu": 6}
        for turn in range(5, 9):
            await store((kv, engine), prompt(8, seed=turn))
        assert "cpu" not in (await kv.lookup(keys)).by_tier
        assert await load((kv, engine), keys) == 6
        await until_idle(kv)


async def test_a_lease_holds_what_fits(tmp_path: Path) -> None:
    """Of a prefix longer than the CPU tier the head is held, and what is nowhere ends it."""
    engine = AnyEngine()
    async with open_any(engine, cpu(8), nvme(tmp_path)) as kv:
        keys = prompt(20)
        await store((kv, engine), keys)
        async with kv.lease(keys) as lease:
            assert lease.num_blocks == 8
        async with kv.lease(prompt(3, seed=1)) as lease:
            assert (lease.num_blocks, list(lease.views)) == (0, [])
        await until_idle(kv)


async def test_it_is_attached_while_it_is_open(tmp_path: Path) -> None:
    """To itself, or to a server."""
    async with open_any(AnyEngine(), cpu(8), nvme(tmp_path)) as kv:
        assert kv.is_attached
    assert not kv.is_attached


async def test_an_evicted_lease_keeps_its_bytes(tmp_path: Path) -> None:
    """Eviction by name makes blocks unfindable at once, but nobody writes to what is being read."""
    engine = AnyEngine()
    async with open_any(engine, cpu(8), nvme(tmp_path)) as kv:
        keys = prompt(6)
        await store((kv, engine), keys)
        async with kv.lease(keys) as lease:
            seen = [bytes(view) for view in lease.views]
            await kv.evict(keys)
            assert (await kv.lookup(keys)).num_blocks == 0
            for turn in range(1, 4):
                await store((kv, engine), prompt(8, seed=turn))
            assert [bytes(view) for view in lease.views] == seen
        await until_idle(kv)


async def test_touched_blocks_stay(tmp_path: Path) -> None:
    """Hits in the engine's own prefix cache count as use in every tier: what is touched outlives what is not."""
    engine = AnyEngine()
    async with open_any(engine, cpu(16), nvme(tmp_path, 500_000)) as kv:
        hot, cold = prompt(4), prompt(4, seed=1)
        for keys in (hot, cold):
            await store((kv, engine), keys)
        for turn in range(2, 2 + kv.stats()["nvme"].num_slots // 4 + 2):
            kv.touch(hot)
            await store((kv, engine), prompt(4, seed=turn))
        assert (await kv.lookup(hot)).by_tier == {"cpu": 4}
        await kv.evict(hot, tier="cpu")
        assert (await kv.lookup(hot)).by_tier == {"nvme": 4}
        assert (await kv.lookup(cold)).num_blocks == 0


async def test_what_the_engine_has_goes_first_in_memory(tmp_path: Path) -> None:
    """Until it is leaving there. What storage has is as it was, and memory's own is told apart from it."""
    engine = AnyEngine()
    async with open_any(engine, cpu(16), nvme(tmp_path, 500_000)) as kv:
        first, second, third = (prompt(4, seed=seed) for seed in range(3))
        for keys in (first, second, third):
            await store((kv, engine), keys)
        kv.resident(second)
        kv.resident(third)
        kv.leaving(third)
        await store((kv, engine), prompt(8, seed=3))
        found = [kv.membership(keys, tier="cpu").tolist() for keys in (first, second, third)]
        assert found == [[BlockState.HIT] * 4, [BlockState.MISS] * 4, [BlockState.HIT] * 4]
        assert kv.membership(second).tolist() == [BlockState.HIT] * 4
        with pytest.raises(ConfigurationError, match="no tier 'gpu' here"):
            kv.membership(first, tier="gpu")


@pytest.mark.parametrize("chain", ["gpu+cpu+nvme", "nvme"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
async def test_every_shape_of_block(layout: KVLayout, chain: str, tmp_path: Path) -> None:
    """Whatever the engine's tensors look like, each group's blocks come back byte for byte, and only in its group."""
    engine = AnyEngine(layout)
    stride = sum(group.stride_bytes for group in layout.groups)
    tiers = tiers_of(chain, tmp_path, stride_bytes=stride)
    keys = [prompt(20, group=number, block_size=group.block_size) for number, group in enumerate(layout.groups)]
    async with open_any(engine, *tiers) as kv:
        await store((kv, engine), keys[0])
        for other in keys[1:]:
            assert (await kv.lookup(other)).num_blocks == 0
            await store((kv, engine), other)
        for each in keys:
            assert await load((kv, engine), each) == 20
            for statistics in kv.stats().tiers[:-1]:
                await kv.evict(each, tier=statistics.tier)
            assert await load((kv, engine), each) == 20
        await until_idle(kv)


async def test_each_operation_is_one_event() -> None:
    """A load and a store are one event each, with the numbers of their results."""
    engine, recorder = AnyEngine(), Recorder()
    async with open_any(engine, cpu(8), emit=recorder) as kv:
        keys = prompt(12)
        stored = await kv.store(keys, engine.fill(keys, range(12)))
        loaded = await kv.load(keys, engine.spec(range(12)))
        (store_event,) = recorder.of(BlocksStored)
        assert (store_event.blocks, store_event.dropped) == (stored.num_stored, stored.num_dropped) == (8, 4)
        (load_event,) = recorder.of(BlocksLoaded)
        assert (load_event.blocks, load_event.requested, load_event.by_tier) == (loaded.num_blocks, 12, loaded.by_tier)


async def test_lease_and_prefetch_need_memory(tmp_path: Path) -> None:
    """Without a CPU tier there is nothing to hold blocks in, and the error says so."""
    async with open_any(AnyEngine(), nvme(tmp_path)) as kv:
        with pytest.raises(ConfigurationError, match="this cache has none"):
            kv.lease(prompt(1))
        with pytest.raises(ConfigurationError, match="here: none; not 'cpu'"):
            kv.prefetch(prompt(1))


async def test_flush_with_sync_survives(tmp_path: Path) -> None:
    """Behind `flush(sync=True)` every store is in every tier, and is found by whoever opens the tier next."""
    engine = AnyEngine()
    keys = prompt(20)
    async with open_any(engine, cpu(8), nvme(tmp_path)) as kv:
        await kv.store(keys, engine.fill(keys, range(20)))
        await kv.flush(sync=True)
        assert kv.stats()["nvme"].written == 20
        assert kv.stats().store_queue_bytes == 0
    async with open_any(engine, nvme(tmp_path)) as kv:
        assert await load((kv, engine), keys) == 20
