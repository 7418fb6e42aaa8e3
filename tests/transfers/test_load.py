"""Loads in windows: what they hold while they wait, and how often they try again."""

import asyncio

import pytest

from tests.support.backends import ScriptedBackend
from tests.support.caches import keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, contents, prompt
from tiered_kv import GPULoadStoreSpec
from tiered_kv.transfers import load
from tiered_kv.transfers.window import Bringer, Window, WindowResult


class Losing(Bringer):
    """Lets go, so many times, of what it has brought: as another load may that brought it for both."""

    num_losses = 0
    num_tries = 0

    async def land(self, window: Window, deadline: float) -> WindowResult:
        """Land the window, and perhaps lose it."""
        type(self).num_tries += 1
        landed = await super().land(window, deadline)
        if not self.num_losses:
            return landed
        type(self).num_losses -= 1
        self.chain.release(*landed.leases)
        return WindowResult(window, 0, landed.gpu[:0], landed.host[:0], [], is_worth_another=True)


@pytest.mark.parametrize(("num_losses", "num_blocks", "num_tries"), [(3, 16, 12), (1_000_000, 0, 4)])
async def test_what_others_let_go_too_soon_is_looked_for_again(
    monkeypatch: pytest.MonkeyPatch, num_losses: int, num_blocks: int, num_tries: int
) -> None:
    """Three times in a row and not for ever; and of the windows begun meanwhile nothing is held."""
    medium, engine, keys = ScriptedBackend(), Engine(), prompt(16)
    monkeypatch.setattr(Losing, "num_losses", num_losses)
    monkeypatch.setattr(Losing, "num_tries", 0)
    monkeypatch.setattr(load, "Bringer", Losing)
    async with open_cache(medium, engine=engine) as kv:
        await keep(kv, engine, keys)
        engine.poison()
        async with asyncio.timeout(30):
            loaded = await kv.load(keys, GPULoadStoreSpec(range(16)))
        assert loaded.num_blocks == num_blocks
        assert min(num_losses, 3) < Losing.num_tries <= num_tries  # some are lost in earnest, or read before
        assert engine.read(range(num_blocks)) == contents(keys[:num_blocks])
        await until_idle(kv)


async def test_each_window_may_be_lost_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that came whole ends the row: what was lost before it says nothing of those behind it."""
    medium, engine, keys = ScriptedBackend(), Engine(), prompt(16)

    class LosingTwice(Losing):
        """Loses each window twice."""

        async def land(self, window: Window, deadline: float) -> WindowResult:
            """Land the window when it has been lost twice."""
            times = lost.get(window.start, 0)
            lost[window.start] = times + 1
            type(self).num_losses = int(times < 2)
            return await super().land(window, deadline)

    lost: dict[int, int] = {}
    monkeypatch.setattr(load, "Bringer", LosingTwice)
    async with open_cache(medium, engine=engine) as kv:
        await keep(kv, engine, keys)
        async with asyncio.timeout(30):
            assert (await kv.load(keys, GPULoadStoreSpec(range(16)))).num_blocks == 16
        await until_idle(kv)


async def test_loads_that_hold_slots_wait_for_no_more() -> None:
    """As many loads as there are slots for, each of more than one window: none of them waits for another."""
    medium, engine = ScriptedBackend(), Engine()
    prompts = [prompt(8, seed=seed) for seed in range(4)]
    async with open_cache(medium, engine=engine) as kv:
        for keys in prompts:
            await keep(kv, engine, keys)
        engine.poison()
        medium.on_read.hold()
        handles = [
            kv.start_load(keys, GPULoadStoreSpec(range(8 * n, 8 * n + 8)), deadline_s=5.0)
            for n, keys in enumerate(prompts)
        ]
        await until(lambda: kv.stats().bounce_free == 0)
        medium.on_read.release()
        assert [(await handle).num_blocks for handle in handles] == [8] * 4
        assert engine.read(range(32)) == [each for keys in prompts for each in contents(keys)]
        await until_idle(kv)


async def test_each_tier_is_credited_with_the_blocks_it_had() -> None:
    """Of one load that finds its head in the GPU pool, then some in the CPU tier, and the rest below."""
    gpu, cpu = ({"medium": medium, "capacity": 16 * PAYLOAD_BYTES} for medium in ("gpu", "cpu"))
    medium, engine, keys = ScriptedBackend(), Engine(), prompt(9)
    async with open_cache(gpu, cpu, medium, engine=engine) as kv:
        await keep(kv, engine, keys)
        await kv.evict(keys[2:], tier="gpu")
        await kv.evict(keys[5:], tier="cpu")
        engine.poison()
        loaded = await kv.load(keys, GPULoadStoreSpec(range(9)))
        assert loaded.by_tier == {"gpu": 2, "cpu": 3, "keyed": 4}
        assert [each.hits for each in kv.stats().tiers] == [2, 3, 4]
        assert engine.read(range(9)) == contents(keys)
        await until_idle(kv)


async def test_of_a_long_load_the_head_is_evicted_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its uses are counted in parts, for the loop's sake, and the order is as if they were counted at once."""
    monkeypatch.setattr(load, "_TOUCHED_AT_ONCE", 3)
    cpu = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}
    medium, engine, keys = ScriptedBackend(), Engine(), prompt(16)
    async with open_cache(cpu, medium, engine=engine) as kv:
        await keep(kv, engine, keys)
        await kv.evict(keys, tier="cpu")
        assert (await kv.load(keys, GPULoadStoreSpec(range(16)))).num_blocks == 16
        await keep(kv, engine, prompt(5, seed=1))
        run = (await kv.lookup(keys)).runs[0]
        assert (run.tier, run.start, run.stop) == ("cpu", 0, 11)
