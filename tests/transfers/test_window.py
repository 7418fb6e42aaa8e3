"""What the windows of a transfer ask for, and of whom."""

import asyncio
import math
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import inside, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, SMALL_LIMITS, Engine, contents, prompt
from tiered_kv import BlockKey, BlockKeys, CacheLimits, GPULoadStoreSpec
from tiered_kv.media.backend import Block, Outcome
from tiered_kv.tiers.gate import Kind
from tiered_kv.tiers.tier import Batch
from tiered_kv.transfers.window import Bringer, Presence, WindowResult

CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}
UNKEPT = SMALL_LIMITS.model_copy(update={"promote": False})


def only(medium: ScriptedBackend, *prompts: BlockKeys) -> None:
    """Have a medium lose all but some blocks."""
    wanted = {bytes(key) for keys in prompts for key in keys}
    for key in [key for key in medium._records if key.hash not in wanted]:  # noqa: SLF001 - it is ours
        del medium._records[key]  # noqa: SLF001 - it is ours


async def test_what_is_read_is_never_longer_than_a_window() -> None:
    """A window that was to be as long as what is resident, and is not resident any more, takes no more slots."""
    medium, engine = ScriptedBackend(), Engine()
    async with open_cache(medium, engine=engine, limits=UNKEPT) as kv:
        keys = prompt(16)
        await keep(kv, engine, keys)
        cache = inside(kv)
        chain = cache.chains[0]
        batch = chain.naming.batch(keys, cache.epoch)
        bringer = Bringer(chain, batch, Kind.LOAD, keep=False)
        window = await bringer.begin(0, batch, may_wait=True)
        assert window is not None
        assert len(window.batch) == chain.window_blocks == 4
        assert not window.is_last
        bringer.abandon(window)
        bringer.close()
        await until_idle(kv)


async def test_a_long_load_goes_in_larger_windows_but_for_its_ends() -> None:
    """Each window costs the loop as much; the first and the last are usual ones, as nothing overlaps them."""
    sizes: list[int] = []

    class Sizes(ScriptedBackend):
        async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
            sizes.append(len(keys))
            return await super().read(keys, into)

    engine = Engine(num_pages=256)
    limits = CacheLimits(window=2 * PAYLOAD_BYTES, bounce=64 * PAYLOAD_BYTES, promote=False)
    async with open_cache(Sizes(), engine=engine, limits=limits) as kv:
        keys = prompt(100)
        await keep(kv, engine, keys)
        loaded = await kv.load(keys, GPULoadStoreSpec(range(100, 200)))
        assert (loaded.num_blocks, sum(sizes)) == (100, 100)
        assert (sizes[0], max(sizes)) == (2, 4)  # two usual windows at most
        assert sizes[-1] <= 2
        assert len(sizes) < 35  # and not 50
        await until_idle(kv)


async def test_a_window_ends_where_blocks_have_left() -> None:
    """What is still resident of it is taken by itself, and waits for nothing."""
    engine = Engine()
    async with open_cache(CPU, ScriptedBackend(), engine=engine, limits=UNKEPT) as kv:
        keys = prompt(16)
        await keep(kv, engine, keys)
        await kv.evict(keys[10:12], tier="cpu")
        cache = inside(kv)
        chain = cache.chains[0]
        batch = chain.naming.batch(keys, cache.epoch)
        bringer = Bringer(chain, batch, Kind.LOAD, keep=False)
        window = await bringer.begin(0, batch, may_wait=True)
        assert window is not None
        assert (len(window.batch), window.fills) == (10, [])
        bringer.abandon(window)
        await until_idle(kv)


async def test_blocks_that_leave_before_a_load_begins_hold_up_no_other() -> None:
    """A load whose blocks leave the CPU tier, while a hung call holds slots, keeps nobody waiting who needs fewer."""
    hung, well, engine = ScriptedBackend(name="hung", timeout_s=0.2), ScriptedBackend(name="well"), Engine()
    limits = UNKEPT.model_copy(update={"load_timeout_s": 60.0, "close_timeout_s": 0.5})
    async with open_cache(CPU, hung, well, engine=engine, limits=limits) as kv:
        long, lost, small = prompt(16), prompt(2, seed=1), prompt(2, seed=2)
        for keys in (lost, small, long):
            await keep(kv, engine, keys)
        await kv.evict(lost, tier="cpu")
        await kv.evict(small, tier="cpu")
        only(hung, lost)
        hung.on_read.hold()
        assert (await kv.load(lost, GPULoadStoreSpec([60, 61]))).num_blocks == 0
        evicting = asyncio.create_task(kv.evict(long, tier="cpu"))  # runs once the load has looked what is resident
        racing = kv.start_load(long, GPULoadStoreSpec(range(16)))
        await evicting
        async with asyncio.timeout(30):
            loaded = await kv.load(small, GPULoadStoreSpec([50, 51]))
            assert loaded.num_blocks == 2
            assert (await racing).num_blocks == 16
        assert engine.read(range(16)) == contents(long)
        hung.on_read.release()
        await until_idle(kv)


async def test_who_waits_for_slots_holds_none() -> None:
    """A window of which a part is passing through already gets the rest once nobody else needs that part."""
    medium, engine, keys, others = ScriptedBackend(), Engine(), prompt(4), prompt(14, seed=1)
    async with open_cache(medium, engine=engine) as kv:
        await keep(kv, engine, keys)
        await keep(kv, engine, others)
        cache = inside(kv)
        chain = cache.chains[0]
        batch, rest = (chain.naming.batch(each, cache.epoch) for each in (keys, others))
        first, second, last = (Bringer(chain, each, Kind.LOAD, keep=False) for each in (batch, rest, batch))

        async def landed(bringer: Bringer, start: int, part: Batch) -> WindowResult:
            window = await bringer.begin(start, part, may_wait=False)
            assert window is not None
            return await bringer.land(window, math.inf)

        head = await landed(first, 0, batch[:2])
        others_have = [await landed(second, start, rest[start : start + 4]) for start in range(0, 14, 4)]
        assert kv.stats().bounce_free == 0
        waiting = asyncio.create_task(last.begin(0, batch, may_wait=True))
        await until(lambda: chain.room.num_waiting == 1)
        chain.release(*head.leases)
        async with asyncio.timeout(30):
            window = await waiting
        assert window is not None
        last.abandon(window)
        for each in others_have:
            chain.release(*each.leases)
        for bringer in (first, second, last):
            bringer.close()
        await until_idle(kv)


async def test_a_load_asks_a_shared_tier_once() -> None:
    """Whatever the number of windows: the whole prefix is asked for when the first block is."""
    medium, engine = ScriptedBackend(), Engine()
    async with open_cache(medium, engine=engine) as kv:
        keys = prompt(60)
        await keep(kv, engine, keys)
        medium.on_lookup.num_calls = 0
        loaded = await kv.load(keys, GPULoadStoreSpec(range(60)))
        assert (loaded.num_blocks, medium.on_lookup.num_calls) == (60, 1)
        assert engine.read(range(60)) == contents(keys)
        await until_idle(kv)


@pytest.mark.parametrize(
    ("first", "second", "questions"),
    [
        ([(0, 60)], [], 1),
        ([], [(0, 60)], 2),
        ([(0, 20)], [(20, 60)], 3),
        ([(0, 20), (30, 60)], [(20, 60)], 3),
        ([(0, 20), (30, 60)], [(20, 30)], 4),
    ],
)
async def test_what_one_tier_lacks_another_has(
    first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]], questions: int
) -> None:
    """Each block is found wherever it is, and no tier is asked again for what it has said."""
    keys, engine = prompt(60), Engine()
    upper, lower = ScriptedBackend(name="upper"), ScriptedBackend(name="lower")
    async with open_cache(upper, lower, engine=engine) as kv:
        await keep(kv, engine, keys)
        for medium, parts in ((upper, first), (lower, second)):
            only(medium, *(keys[start:stop] for start, stop in parts))
            medium.on_lookup.num_calls = 0
        loaded = await kv.load(keys, GPULoadStoreSpec(range(60)))
        assert loaded.num_blocks == 60
        assert engine.read(range(60)) == contents(keys)
        assert upper.on_lookup.num_calls + lower.on_lookup.num_calls <= questions
        await until_idle(kv)


async def test_what_owned_tiers_have_is_asked_of_nobody() -> None:
    """A shared tier is asked for the blocks that are not here, and for no others."""
    shared, owned, engine = ScriptedBackend(), ScriptedSlotBackend(64), Engine()
    async with open_cache(owned, shared, engine=engine, limits=CacheLimits(window=4 * PAYLOAD_BYTES)) as kv:
        keys = prompt(40)
        await keep(kv, engine, keys)
        await kv.evict(keys[8:16], tier="slots")
        shared.on_lookup.num_calls = shared.on_lookup.num_blocks = 0
        loaded = await kv.load(keys, GPULoadStoreSpec(range(40)))
        assert loaded.by_tier == {"slots": 32, "keyed": 8}
        assert (shared.on_lookup.num_calls, shared.on_lookup.num_blocks) == (1, 8)
        assert engine.read(np.arange(40)) == contents(keys)
        await until_idle(kv)


async def test_a_tier_is_not_asked_for_what_one_above_it_has() -> None:
    """Nor is one asked again for what it has said; where a block leaves memory, it alone is asked for."""
    above, below, engine, keys = ScriptedBackend(name="above"), ScriptedBackend(name="below"), Engine(), prompt(8)
    async with open_cache(CPU, above, below, engine=engine) as kv:
        await keep(kv, engine, keys)
        only(above, keys[1:])
        await kv.evict(keys[1:], tier="cpu")
        cache = inside(kv)
        chain = cache.chains[0]
        presence = Presence(chain, chain.naming.batch(keys, cache.epoch))
        asked = [above.on_lookup.num_blocks, below.on_lookup.num_blocks]
        assert (await presence.sources(np.arange(1, 8), every)).tolist() == [1] * 7
        await kv.evict(keys[:1], tier="cpu")
        assert (await presence.sources(np.arange(8), every)).tolist() == [2] + [1] * 7
        asked = [each.on_lookup.num_blocks - n for each, n in zip((above, below), asked, strict=True)]
        assert asked == [7 + 1, 1]


def every(at: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Say that each block ends the prefix."""
    return np.ones(len(at), np.bool_)


async def test_what_the_gpu_pool_has_is_brought_to_the_host_for_who_reads_it_there() -> None:
    """Its shared tier is asked for all of it, as no copy from the pool is what a plan or a prefetch makes."""
    engine, keys = Engine(), prompt(8)
    pool = {"medium": "gpu", "capacity": 16 * PAYLOAD_BYTES}
    async with open_cache(pool, CPU, ScriptedBackend(), engine=engine) as kv:
        await keep(kv, engine, keys)
        await kv.evict(keys, tier="cpu")
        assert (await kv.prefetch(keys, to="cpu")).num_blocks == 8
        await until_idle(kv)


async def test_a_transfer_that_begins_no_more_plans_no_more() -> None:
    """Else a tier would be taken for busy, by whoever asks what it costs to read from it, for as long as it lives."""
    medium, engine, keys = ScriptedBackend(), Engine(), prompt(16)
    async with open_cache(medium, engine=engine, limits=UNKEPT) as kv:
        await keep(kv, engine, keys)
        cache = inside(kv)
        chain = cache.chains[0]
        batch = chain.naming.batch(keys, cache.epoch)
        bringer = Bringer(chain, batch, Kind.LOAD, keep=False)
        window = await bringer.begin(0, batch[:4], may_wait=True)
        assert window is not None
        landed = await bringer.land(window, math.inf)
        chain.release(*landed.leases)
        await until(lambda: kv.stats().transfers == 0)
        before = chain.storage[0].speed.estimate()
        bringer.close()
        after = chain.storage[0].speed.estimate()
        assert before is not None
        assert after is not None
        assert (before.others_bytes > 0, after.others_bytes) == (True, 0)
        await until_idle(kv)


@pytest.mark.parametrize("is_first", [False, True])
async def test_a_load_is_short_for_what_befell_its_first_missing_block(is_first: bool) -> None:  # noqa: FBT001 - a case
    """Of two tiers that fail one window, the one that had that block is to blame, wherever it is in the chain."""
    engine, keys = Engine(), prompt(4)
    hung, broken = ScriptedBackend(name="hung", timeout_s=0.2), ScriptedBackend(name="broken")
    tiers = (hung, broken) if is_first else (broken, hung)
    async with open_cache(*tiers, engine=engine) as kv:
        await keep(kv, engine, keys)
        for tier, part in zip(tiers, (keys[:2], keys[2:]), strict=True):
            only(tier, part)
        broken.flip_byte(1)
        hung.on_read.hold()
        loaded = await kv.load(keys, GPULoadStoreSpec(range(4)))
        assert loaded.num_blocks == (0 if is_first else 1)
        assert {(fault.tier, fault.reason) for fault in loaded.faults} == {
            ("hung", "timeout"),
            ("broken", "unreadable"),
        }
        assert kv.stats().missed_because == ({"timeout": 4} if is_first else {"unreadable": 3})
        hung.on_read.release()
        await until_idle(kv)
