"""Loads with gaps: what is there is loaded block by block, a mask says what is in place, and a hole ends nothing."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.support.any_layout import AnyEngine, open_any
from tests.support.any_layout import prompt as any_prompt
from tests.support.backends import ScriptedBackend, ScriptedSlotBackend, only
from tests.support.caches import Recorder, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, POISON, Engine, contents, prompt
from tiered_kv import (
    BlockKeys,
    ConfigurationError,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KVGroup,
    KVLayout,
    LoadHandle,
    Outcome,
    TieredKV,
)
from tiered_kv.testing import ScriptedDevice, ScriptedEvent
from tiered_kv.transfers import engine_memory
from tiered_kv.values.events import BlocksLoaded

CPU = {"medium": "cpu", "capacity": 64 * PAYLOAD_BYTES}
KEYS = prompt(12)
PAGES = GPULoadStoreSpec(range(20, 32))
HOLES = [True, False, True, True, False, False, True, True, True, True, False, True]
"""Which of them are kept by `keep_some`."""


async def keep_some(kv: TieredKV, engine: Engine) -> None:
    """Keep the blocks of `HOLES`, and no others."""
    for i in np.flatnonzero(HOLES).tolist():
        await keep(kv, engine, KEYS[i : i + 1])
    engine.poison()


def assert_right(engine: Engine, mask: list[bool]) -> None:
    """Assert that these blocks of the prompt are in the pages, byte for byte."""
    for is_there, found, expected in zip(mask, engine.read(PAGES), contents(KEYS), strict=True):
        assert not is_there or found == expected


async def test_what_is_there_is_loaded_around_what_is_not(tmp_path: Path) -> None:
    """From every kind of tier, some blocks here and some there; of the prefix as many as without gaps."""
    nvme = {"medium": "nvme", "path": tmp_path, "capacity": "4MiB"}
    engine, shared, recorder = Engine(), ScriptedBackend(), Recorder()
    async with open_cache(CPU, nvme, shared, engine=engine, emit=recorder) as kv:
        await keep_some(kv, engine)
        await kv.evict(KEYS[2:8], tier="cpu")
        await kv.evict(KEYS[6:7], tier="nvme")
        before = kv.stats()
        loaded = await kv.load(KEYS, PAGES, gaps=True)
        assert loaded.mask.tolist() == HOLES
        assert_right(engine, HOLES)
        assert (loaded.num_blocks, loaded.num_requested) == (1, 12)
        assert loaded.by_tier == {"cpu": 4, "nvme": 3, "keyed": 1}
        assert loaded.num_bytes == 8 * PAYLOAD_BYTES
        assert loaded.faults == ()
        assert (await kv.load(KEYS, PAGES)).mask.tolist() == [True] + [False] * 11
        after = kv.stats()
        assert (after.requested - before.requested, after.missed - before.missed) == (24, 4 + 11)
        assert [event.blocks for event in recorder.of(BlocksLoaded)] == [8, 1]  # each load is told of once
        await until_idle(kv)


async def test_a_shared_tier_is_asked_once() -> None:
    """What it has said of blocks is what their load goes by: a question is a round trip."""
    engine, shared = Engine(), ScriptedBackend()
    async with open_cache(CPU, shared, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS, tier="cpu")
        engine.poison()
        assert (await kv.load(KEYS, PAGES, gaps=True)).mask.all()
        assert_right(engine, [True] * 12)
        assert shared.on_lookup.num_calls == 1


async def test_what_is_not_there_is_untouched() -> None:
    """Nothing is written to blocks that no tier has: the cache promises less, but it need not write there."""
    engine = Engine()
    async with open_cache(CPU, engine=engine) as kv:
        await keep_some(kv, engine)
        await kv.load(KEYS, PAGES, gaps=True)
        nothing = bytes([POISON]) * PAYLOAD_BYTES
        assert [content != nothing for content in engine.read(PAGES)] == HOLES


@pytest.mark.parametrize("num_blocks", [0, 12])
async def test_all_or_nothing(num_blocks: int) -> None:
    """Where there are no gaps it is a load like any other; where there is nothing, it brings nothing."""
    engine = Engine()
    async with open_cache(CPU, ScriptedBackend(), engine=engine) as kv:
        await keep(kv, engine, KEYS[:num_blocks])
        loaded = await kv.load(KEYS, PAGES, gaps=True)
        assert loaded.mask.tolist() == [True] * num_blocks + [False] * (12 - num_blocks)
        assert loaded.num_blocks == num_blocks
        assert (await kv.load(KEYS[:0], PAGES[:0], gaps=True)).mask.tolist() == []
        await until_idle(kv)


@pytest.mark.parametrize("medium", ["slots", "keyed"])
async def test_a_block_that_is_lost_is_one_gap_more(medium: str) -> None:
    """A broken record, or one that has gone since it was asked for: what is behind it comes all the same."""
    engine, below = Engine(), ScriptedBackend() if medium == "keyed" else ScriptedSlotBackend()
    async with open_cache(below, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        engine.poison()
        below.flip_byte(3)
        below.flip_byte(4)
        below.flip_byte(11)
        loaded = await kv.load(KEYS, PAGES, gaps=True)
        assert loaded.mask.tolist() == [i not in (3, 4, 11) for i in range(12)]
        assert_right(engine, loaded.mask.tolist())
        assert {(fault.tier, fault.reason) for fault in loaded.faults} == {(medium, "unreadable")}
        await until_idle(kv)


async def test_a_medium_that_fails_costs_its_blocks_only() -> None:
    """What another tier has is loaded, also behind them."""
    engine, disk, shared = Engine(), ScriptedSlotBackend(), ScriptedBackend()
    async with open_cache(disk, shared, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS[6:], tier="slots")
        engine.poison()
        shared.on_read.change_next(only(0, Outcome.FAILED))
        loaded = await kv.load(KEYS, PAGES, gaps=True)
        assert loaded.mask.sum() >= 8
        assert_right(engine, loaded.mask.tolist())
        await until_idle(kv)


async def test_a_thread_submits_one() -> None:
    """As any load, and the result of a load without gaps has a mask too."""
    engine = Engine()
    async with open_cache(CPU, engine=engine) as kv:
        await keep_some(kv, engine)

        def serve() -> list[bool]:
            mask: list[bool] = kv.submit_load(KEYS, PAGES, gaps=True).wait(30).mask.tolist()
            return mask

        assert await asyncio.to_thread(serve) == HOLES
        assert_right(engine, HOLES)
        await until_idle(kv)


async def test_into_host_pools_too() -> None:
    """Copied there, or read straight into them; what only the GPU pool has is in no reach of theirs."""
    engine, pools = Engine(), {name: np.zeros((12, PAYLOAD_BYTES), np.uint8) for name in ("copied", "direct")}
    aligned = np.zeros(13 * PAYLOAD_BYTES, np.uint8)
    start = -aligned.ctypes.data % PAYLOAD_BYTES
    pools["direct"] = aligned[start : start + 12 * PAYLOAD_BYTES].reshape(12, PAYLOAD_BYTES)
    tiers = {"medium": "gpu", "capacity": 16 * PAYLOAD_BYTES}, CPU, ScriptedSlotBackend()
    async with open_cache(*tiers, engine=engine) as kv:
        for name, pool in pools.items():
            kv.register_host_pool(name, pool, direct=name == "direct")
        await keep_some(kv, engine)
        await kv.flush()
        await kv.evict(KEYS[:8], tier="cpu")
        await kv.evict(KEYS[2:3], tier="slots")  # in the GPU pool only
        expected = [is_there and i != 2 for i, is_there in enumerate(HOLES)]
        for name, pool in pools.items():
            loaded = await kv.load(KEYS, CPULoadStoreSpec(range(12), pool=name), gaps=True)
            assert loaded.mask.tolist() == expected
            for is_there, row, content in zip(expected, pool, contents(KEYS), strict=True):
                assert not is_there or row.tobytes() == content
        await until_idle(kv)


async def test_new_weights_meanwhile_leave_nothing() -> None:
    """A load that is overtaken says so, and counts as missed."""
    device, engine, after = ScriptedDevice(), Engine(), ScriptedEvent()
    async with open_cache(CPU, ScriptedBackend(), engine=engine, device=device) as kv:
        storing = kv.start_store(KEYS[2:4], engine.compute(KEYS[2:4]))
        await until(lambda: storing.done, on_wait=device.run_all)
        await kv.flush()
        loading = kv.start_load(KEYS[:4], PAGES[:4], after=after, gaps=True)
        await until(lambda: device.pending > 0)
        kv.advance_epoch("w1")
        after.fire()
        await until(lambda: loading.done, on_wait=device.run_all)
        loaded = await loading
        assert loaded.mask.tolist() == [False] * 4
        assert (loaded.num_blocks, loaded.num_bytes, loaded.by_tier) == (0, 0, {})
        assert [fault.reason for fault in loaded.faults] == ["epoch advanced"]
        assert (kv.stats()["cpu"].hits, kv.stats().missed) == (0, 4)
        await until_idle(kv, on_wait=device.run_all)


async def test_cancelled_it_has_stopped_touching_the_blocks() -> None:
    """While a tier is asked, while blocks are read, and while they wait for an event."""
    engine, below = Engine(), ScriptedBackend()
    async with open_cache(below, engine=engine) as kv:
        await keep_some(kv, engine)
        for act in (below.on_lookup, below.on_read):
            act.hold()
            loading = asyncio.create_task(kv.load(KEYS, PAGES, gaps=True))
            await until(lambda act=act: act.num_held > 0)  # type: ignore[misc]  # a default, to bind it now
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            act.release()
            await until_idle(kv)
        handle = kv.start_load(KEYS, PAGES, gaps=True)
        handle.cancel()
        assert (await handle).num_blocks == 0
        assert await handle.admitted() == 0
        assert engine.is_poisoned()
        await until_idle(kv)


async def test_its_handle_knows_no_layers() -> None:
    """How many blocks there are is known at its end, when all layers are in place; layer-wise it is refused."""
    engine = Engine()
    async with open_cache(CPU, ScriptedBackend(), engine=engine) as kv:
        await keep_some(kv, engine)
        handle = kv.start_load(KEYS, PAGES, gaps=True)
        assert await handle.admitted() == sum(HOLES)
        await handle.layer(1)
        assert_right(engine, HOLES)
        with pytest.raises(ConfigurationError, match="either layerwise or has gaps"):
            kv.start_load(KEYS, PAGES, layerwise=True, gaps=True)
        await handle


async def test_a_deadline_ends_it() -> None:
    """A medium that does not answer costs its own blocks; what is in memory is there, also behind them."""
    engine, below = Engine(), ScriptedBackend()
    async with open_cache(CPU, below, engine=engine) as kv:
        await keep_some(kv, engine)
        await kv.evict(KEYS[:6], tier="cpu")
        below.on_read.hold()
        loaded = await kv.load(KEYS, PAGES, gaps=True, deadline_s=0.05)
        assert "deadline" in {fault.reason for fault in loaded.faults}
        assert loaded.mask.tolist() == [is_there and i >= 6 for i, is_there in enumerate(HOLES)]
        assert_right(engine, loaded.mask.tolist())
        below.on_read.release()
        await until_idle(kv)


async def test_one_that_begins_too_late_says_so() -> None:
    """As every load does; it is no miss."""
    engine = Engine()
    async with open_cache(CPU, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        loaded = await kv.load(KEYS, PAGES, gaps=True, deadline_s=1e-9)
        assert (loaded.num_blocks, [fault.reason for fault in loaded.faults]) == (0, ["deadline"])
        assert loaded.missed_because == "deadline"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_one_part_ends_it_once_the_other_has(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """What is in memory is copied at once, which a signal's handler may interrupt; the rest is being read meanwhile."""
    engine, below, loop = Engine(), ScriptedBackend(), asyncio.new_event_loop()
    cache = open_cache(CPU, below, engine=engine)

    def interrupted(*_: object, **__: object) -> None:
        raise error

    async def have(kv: TieredKV) -> None:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS[:4], tier="cpu")
        below.on_read.hold()

    async def end(kv: TieredKV) -> None:
        await until(lambda: handles[0].done)
        engine.poison()  # it has ended, and these are the engine's again
        below.on_read.release()
        await until_idle(kv)
        assert engine.is_poisoned()

    handles = list[LoadHandle]()
    kv = loop.run_until_complete(cache.__aenter__())
    loop.run_until_complete(have(kv))
    loop.call_soon(lambda: handles.append(kv.start_load(KEYS, PAGES, gaps=True)))
    with monkeypatch.context() as patch:
        patch.setattr(engine_memory, "scatter_blocks", interrupted)
        with pytest.raises(error):
            loop.run_forever()
    loop.run_until_complete(end(kv))
    loop.run_until_complete(cache.__aexit__(None, None, None))
    loop.close()


async def test_of_any_layout() -> None:
    """MLA, and several pages a block."""
    layout = KVLayout((KVGroup(2, 1, 48, "bfloat16", 4, order="MLA"), KVGroup(2, 1, 48, "bfloat16", 4, page_size=2)))
    engine = AnyEngine(layout)
    async with open_any(engine, {"medium": "cpu", "capacity": "1MiB"}) as kv:
        for group in range(2):
            keys = any_prompt(6, group=group)
            for i in (0, 2, 5):
                await kv.store(keys[i : i + 1], engine.fill(keys[i : i + 1], [i]))
            engine.wipe()
            loaded = await kv.load(keys, engine.spec(range(6), group), gaps=True)
            assert loaded.mask.tolist() == engine.right(keys, range(6)) == [True, False, True, False, False, True]
        await until_idle(kv)


async def test_one_that_is_cancelled_while_tiers_are_asked_ends_at_once() -> None:
    """With nothing, as every load that is cancelled; nobody waits for the answer."""
    engine, shared = Engine(), ScriptedBackend()
    async with open_cache(shared, engine=engine) as kv:
        await keep_some(kv, engine)
        shared.on_lookup.hold()
        handle = kv.start_load(KEYS, PAGES, gaps=True)
        await until(lambda: shared.on_lookup.num_held > 0)
        handle.cancel()
        loaded = await handle
        assert loaded.num_blocks == 0
        assert not loaded.mask.any()
        shared.on_lookup.release()
        await until_idle(kv)


@pytest.mark.parametrize(("stored", "first", "why"), [(KEYS, 8, "unreadable"), (KEYS[6:], 0, "never stored")])
async def test_it_is_short_for_what_befell_its_first_missing_block(stored: BlockKeys, first: int, why: str) -> None:
    """Whatever befell others, of which the result names the faults."""
    engine, below = Engine(), ScriptedBackend()
    async with open_cache(below, engine=engine) as kv:
        await keep(kv, engine, stored)
        below.flip_byte(len(stored) - 4)  # the block 8
        loaded = await kv.load(KEYS, PAGES, gaps=True)
        assert {fault.reason for fault in loaded.faults} == {"unreadable"}
        assert not loaded.mask[8]
        assert loaded.num_blocks == first
        assert kv.stats().missed_because == {why: 13 - len(stored)}
        await until_idle(kv)
