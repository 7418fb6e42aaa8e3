"""Loads from the back: the engine computes from the front, claims what it computes, and the two meet."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.backends import ScriptedBackend
from tests.support.caches import Recorder, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, POISON, Engine, contents, prompt
from tiered_kv import CacheLimits, ConfigurationError, GPULoadStoreSpec, LoadHandle, TieredKV
from tiered_kv.values.events import BlocksLoaded

CPU = {"medium": "cpu", "capacity": 64 * PAYLOAD_BYTES}
KEYS = prompt(32)
PAGES = GPULoadStoreSpec(range(32))
NOTHING = bytes([POISON]) * PAYLOAD_BYTES
ONE_AT_A_TIME = CacheLimits(window=2 * PAYLOAD_BYTES, bounce=16 * PAYLOAD_BYTES, reads_in_flight=1)


@asynccontextmanager
async def held(engine: Engine, recorder: Recorder | None = None) -> AsyncIterator[tuple[TieredKV, ScriptedBackend]]:
    """Yield a cache whose only blocks are in a medium, and it."""
    medium = ScriptedBackend()
    async with open_cache(medium, engine=engine, limits=ONE_AT_A_TIME, emit=recorder) as kv:
        await keep(kv, engine, KEYS)
        engine.poison()
        yield kv, medium


async def parts_under_way(kv: TieredKV, medium: ScriptedBackend) -> LoadHandle:
    """Start a load from the back, and have its first reads wait in the medium."""
    medium.on_read.hold()
    handle = kv.start_load(KEYS, PAGES, order="back")
    await until(lambda: medium.on_read.num_held == 2)
    return handle


@pytest.mark.parametrize("tier", ["cpu", "nvme", "keyed"])
async def test_whole_if_nobody_computes(tmp_path: Path, tier: str) -> None:
    """Nothing is claimed: it brings everything, like a load from the front, and counts the same."""
    below = {"nvme": {"medium": "nvme", "path": tmp_path, "capacity": "4MiB"}, "keyed": ScriptedBackend(), "cpu": CPU}
    engine, recorder = Engine(), Recorder()
    async with open_cache(below[tier], engine=engine, emit=recorder) as kv:  # type: ignore[arg-type] # one of each kind
        await keep(kv, engine, KEYS)
        engine.poison()
        loaded = await kv.start_load(KEYS, PAGES, order="back")
        assert (loaded.num_blocks, loaded.num_requested, loaded.by_tier) == (32, 32, {tier: 32})
        assert loaded.mask.all()
        assert engine.read(PAGES) == contents(KEYS)
        assert [event.blocks for event in recorder.of(BlocksLoaded)] == [32]
        await until_idle(kv)


async def test_what_is_claimed_is_not_touched() -> None:
    """From the claim on nothing is written to it, and the rest arrives, to the byte."""
    engine, recorder = Engine(), Recorder()
    async with held(engine, recorder) as (kv, medium):
        handle = await parts_under_way(kv, medium)
        assert handle.stop_before(10) == 10
        medium.on_read.release()
        loaded = await handle
        assert loaded.mask.tolist() == [False] * 10 + [True] * 22
        assert engine.read(PAGES) == [NOTHING] * 10 + contents(KEYS)[10:]
        assert (loaded.num_blocks, loaded.num_requested) == (0, 32)
        assert loaded.faults == ()
        stats = kv.stats()
        assert (stats.requested, stats.missed) == (22, 0)  # what was claimed was not asked for in the end
        await until_idle(kv)


@pytest.mark.parametrize("block", [28, 29, 31, 32])
async def test_what_a_medium_is_reading_can_be_claimed(block: int) -> None:
    """An engine never waits for a medium: parts that have not begun to be copied are given up, or cut."""
    engine = Engine()
    async with held(engine) as (kv, medium):
        handle = await parts_under_way(kv, medium)
        assert handle.stop_before(block) == block
        medium.on_read.release()
        loaded = await handle
        assert loaded.mask.tolist() == [False] * block + [True] * (32 - block)
        assert engine.read(PAGES) == [NOTHING] * block + contents(KEYS)[block:]
        await until_idle(kv)


async def test_all_claimed_ends_while_the_medium_still_hangs() -> None:
    """The engine has computed everything: the load ends, and what the medium brings later touches nothing."""
    engine = Engine()
    async with held(engine) as (kv, medium):
        handle = await parts_under_way(kv, medium)
        assert handle.stop_before(32) == 32
        handle.cancel()
        loaded = await handle
        assert not loaded.mask.any()
        assert loaded.faults == ()  # nothing was wanted any more
        medium.on_read.release()
        await until_idle(kv)
        assert engine.is_poisoned()


async def test_what_is_in_place_is_not_given_back() -> None:
    """Once the two have met, a claim says where; all from there on is in place."""
    engine = Engine()
    async with held(engine) as (kv, medium):
        handle = kv.start_load(KEYS, PAGES, order="back")
        await until(lambda: medium.on_read.num_blocks >= 8)
        medium.on_read.hold()
        claimed = handle.stop_before(32)
        assert claimed < 32
        medium.on_read.release()
        loaded = await handle
        assert loaded.mask.tolist() == [False] * claimed + [True] * (32 - claimed)
        assert engine.read(PAGES)[claimed:] == contents(KEYS)[claimed:]
        assert handle.stop_before(32) == claimed
        await until_idle(kv)


async def test_what_is_resident_comes_at_once() -> None:
    """There is nothing to compute then: the first claim says so."""
    engine = Engine()
    async with open_cache(CPU, engine=engine) as kv:
        await keep(kv, engine, KEYS[:4])
        engine.poison()
        handle = kv.start_load(KEYS[:4], PAGES[:4], order="back")
        assert handle.stop_before(2) == 0
        assert (await handle).num_blocks == 4
        assert engine.read(PAGES[:4]) == contents(KEYS[:4])


async def test_a_hole_ends_it_and_the_engine_computes_up_to_what_came() -> None:
    """Blocks before a hole are of no use; what came before the hole was met stays, and claims go up to there."""
    engine = Engine()
    async with held(engine) as (kv, medium):
        medium.flip_byte(20)
        handle = kv.start_load(KEYS, PAGES, order="back")
        loaded = await handle
        first = 32 - int(loaded.mask.sum())
        assert 20 < first <= 22
        assert loaded.mask.tolist() == [False] * first + [True] * (32 - first)
        assert engine.read(PAGES)[first:] == contents(KEYS)[first:]
        assert handle.stop_before(32) == first
        assert sum(loaded.by_tier.values()) == 32 - first
        assert [fault.reason for fault in loaded.faults] == ["unreadable"]
        stats = kv.stats()
        assert stats.requested == stats["keyed"].hits + stats.missed == 32
        await until_idle(kv)


async def test_it_is_short_for_what_befell_the_block_that_ended_it() -> None:
    """Not for what is behind that in its part, which was there and is of no use."""
    engine = Engine()
    async with open_cache(CPU, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS[17:18])
        loaded = await kv.start_load(KEYS, PAGES, order="back")
        assert not loaded.mask[:18].any()
        assert loaded.missed_because == "removed"
        assert kv.stats().missed_because == {"removed": 32 - int(loaded.mask.sum())}
        await until_idle(kv)


async def test_cancelled_it_waits_until_nothing_moves() -> None:
    """Like every load: the caller's memory is the caller's once the cancellation is raised."""
    engine = Engine()
    async with held(engine) as (kv, medium):
        handle = await parts_under_way(kv, medium)
        waiting = asyncio.ensure_future(handle._wait())  # noqa: SLF001 - what an await of the handle runs
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        medium.on_read.release()
        await until_idle(kv)
        assert engine.is_poisoned()


async def test_weights_that_change_leave_nothing_in_place() -> None:
    """What was computed for other weights counts as missed, as in every load."""
    engine = Engine()
    async with held(engine) as (kv, medium):
        handle = await parts_under_way(kv, medium)
        kv.advance_epoch("w1")
        medium.on_read.release()
        loaded = await handle
        assert not loaded.mask.any()
        assert "epoch advanced" in {fault.reason for fault in loaded.faults}
        assert handle.stop_before(32) == 32
        await until_idle(kv)


async def test_its_deadline_leaves_the_rest_to_the_engine() -> None:
    """A medium that hangs costs what it has not brought, and no more time than was given."""
    engine = Engine()
    async with held(engine) as (kv, medium):
        medium.on_read.hold()
        loaded = await kv.start_load(KEYS, PAGES, order="back", deadline_s=0.02)
        assert not loaded.mask.any()
        assert {fault.reason for fault in loaded.faults} == {"deadline"}
        medium.on_read.release()
        await until_idle(kv)


async def test_what_cannot_be_is_told_at_once() -> None:
    """Another order, other kinds of loads, blocks that are none; an empty load is whole."""
    engine = Engine()
    async with open_cache(CPU, ScriptedBackend(), engine=engine) as kv:
        with pytest.raises(ConfigurationError, match="'front' or 'back'"):
            kv.start_load(KEYS, PAGES, order="tail")  # type: ignore[arg-type] # what is wrong is the point
        for other in ({"layerwise": True}, {"gaps": True}):
            with pytest.raises(ConfigurationError, match="from the back"):
                kv.start_load(KEYS, PAGES, order="back", **other)  # type: ignore[arg-type] # of these bools
        handle = kv.start_load(KEYS, PAGES, order="back")
        with pytest.raises(ConfigurationError, match="block 33"):
            handle.stop_before(33)
        await handle
        front = kv.start_load(KEYS, PAGES)
        with pytest.raises(ConfigurationError, match="order='back'"):
            front.stop_before(3)
        await front
        assert (await kv.start_load(KEYS[:0], PAGES[:0], order="back")).mask.tolist() == []
