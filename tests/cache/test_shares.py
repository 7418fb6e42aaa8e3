"""A tier that is slow, throttled or hangs has its share of the bounce slots, and no other tier waits for it."""

import asyncio
from collections.abc import Sequence

import pytest

from tests.support.backends import ScriptedBackend
from tests.support.caches import keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, SMALL_LIMITS, Engine, contents, prompt
from tests.support.virtual import CountingDevice, pools_of, run, watch
from tiered_kv import BlockKeys, CacheLimits, GPULoadStoreSpec

SLOW = [prompt(4, seed=1 + seed) for seed in range(30)]
QUICK = prompt(12)
PASSING = SMALL_LIMITS.model_copy(update={"load_timeout_s": 900.0, "promote": False})
"""Windows of 4 blocks, 16 bounce slots, and nothing stays in the CPU tier."""


def only(medium: ScriptedBackend, prompts: Sequence[BlockKeys]) -> None:
    """Let a medium have lost all but these prompts."""
    hashes = {each for keys in prompts for each in keys}
    for lost in [key for key in medium.keys() if key.hash not in hashes]:  # noqa: SIM118 - no dict
        del medium._records[lost]  # noqa: SLF001 - as if it had evicted it


@pytest.mark.parametrize("why", ["throttled", "slow", "cpu tier full"])
def test_a_load_from_one_tier_does_not_wait_for_slots_that_another_has(why: str) -> None:
    """Behind thirty loads from a slow tier, one of three windows from a fast tier ends before any of these."""

    async def main() -> None:
        engine, device, loop = Engine(160), CountingDevice(), asyncio.get_running_loop()
        rate = {"read_bandwidth": PAYLOAD_BYTES} if why == "throttled" else {}
        slow, fast = ScriptedBackend(name="slow", **rate), ScriptedBackend(name="fast")
        cpu = [{"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}] if why == "cpu tier full" else []
        limits = PASSING.model_copy(update={"promote": bool(cpu)})
        async with open_cache(*cpu, slow, fast, engine=engine, limits=limits, device=device) as kv:
            watch(device, pools_of(kv))
            for keys in (*SLOW, QUICK):
                await keep(kv, engine, keys)
                if cpu:
                    await kv.evict(keys, tier="cpu")
            only(slow, SLOW)
            only(fast, [QUICK])
            if why != "throttled":
                slow.on_read.hold()
            loads = [kv.start_load(keys, GPULoadStoreSpec(range(4 * n, 4 * n + 4))) for n, keys in enumerate(SLOW)]
            await asyncio.sleep(1e-3)
            started = loop.time()
            loaded = await kv.load(QUICK, GPULoadStoreSpec(range(140, 152)))
            assert (loaded.by_tier, engine.read(range(140, 152))) == ({"fast": 12}, contents(QUICK))
            assert loop.time() == started
            slow.on_read.release()
            assert [(await each).num_blocks for each in loads] == [4] * 30
            await until_idle(kv)

    run(main)


@pytest.mark.parametrize("num_tiers", [2, 3, 4, 6])
@pytest.mark.parametrize("window", [1, 4])
def test_every_tier_but_one_may_hang(num_tiers: int, window: int) -> None:
    """Of several tiers the last one serves, if there are slots for each; of fewer slots none is kept unused."""

    async def main() -> None:
        engine, device = Engine(160), CountingDevice()
        media = [ScriptedBackend(name=f"tier{n}", timeout_s=60.0) for n in range(num_tiers)]
        sizes = {"window": window * PAYLOAD_BYTES, "bounce": 4 * window * PAYLOAD_BYTES}
        limits = CacheLimits.model_validate({**sizes, "load_timeout_s": 900.0, "promote": False})
        async with open_cache(*media, engine=engine, limits=limits, device=device) as kv:
            watch(device, pools_of(kv))
            prompts = [prompt(8, seed=n) for n in range(num_tiers)]
            for keys in prompts:
                await keep(kv, engine, keys)
            for medium, keys in zip(media, prompts, strict=True):
                only(medium, [keys])
                medium.on_read.hold()
            media[-1].on_read.release()
            loads = [
                kv.start_load(keys, GPULoadStoreSpec(range(8 * n, 8 * n + 8))) for n, keys in enumerate(prompts[:-1])
            ]
            await asyncio.sleep(1e-3)
            last = kv.start_load(prompts[-1], GPULoadStoreSpec(range(100, 108)))
            await asyncio.sleep(1e-3)
            assert last.done or kv.stats().bounce_slots <= num_tiers
            for medium in media:
                medium.on_read.release()
            assert [(await each).num_blocks for each in (*loads, last)] == [8] * num_tiers
            await until_idle(kv)

    run(main)


async def test_stores_leave_every_tier_its_slots() -> None:
    """Blocks that wait to be written to a tier that hangs keep none from being loaded."""
    engine = Engine(160)
    media = [ScriptedBackend(name=f"tier{n}") for n in range(3)]
    async with open_cache(*media, engine=engine, limits=PASSING) as kv:
        prompts = [prompt(4, seed=n) for n in range(3)]
        for keys in prompts:
            await keep(kv, engine, keys)
        for medium, keys in zip(media, prompts, strict=True):
            only(medium, [keys])
            medium.on_write.hold()
            medium.on_read.hold()
        stores = [kv.start_store(keys, GPULoadStoreSpec(range(4))) for keys in SLOW]
        loads = [kv.start_load(keys, GPULoadStoreSpec(range(4 * n, 4 * n + 4))) for n, keys in enumerate(prompts)]
        await until(lambda: all(medium.on_read.num_held for medium in media))
        for medium in media:
            medium.on_read.release()
        assert [(await each).num_blocks for each in loads] == [4] * 3
        for medium in media:
            medium.on_write.release()
        for each in stores:
            await (await each).settled()
        await until_idle(kv)
