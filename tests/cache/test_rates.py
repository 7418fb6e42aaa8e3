"""Rates of a storage tier: how fast it is read and written, on the full path and in virtual time."""

import asyncio

import numpy as np
import pytest

from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import assert_nothing_left, keep, open_cache
from tests.support.engine import PAYLOAD_BYTES, Engine, contents, prompt
from tests.support.virtual import CountingDevice, pools_of, run, watch
from tiered_kv import (
    BackendUnavailableError,
    CacheLimits,
    ConfigurationError,
    CPULoadStoreSpec,
    CPUTier,
    GPULoadStoreSpec,
    Outcome,
    TieredKVSettings,
)

RECORD = PAYLOAD_BYTES + 4096
LIMITS = CacheLimits(
    window=4 * PAYLOAD_BYTES, bounce=16 * PAYLOAD_BYTES, load_timeout_s=1000, store_timeout_s=1000, close_timeout_s=1000
)
N = 16
SLOW = {"medium": "memory", "capacity": "1MiB", "read_bandwidth": RECORD}  # a block a second


def test_a_tier_is_read_and_written_at_its_rates() -> None:
    """A block a second in one direction, two in the other, but for the first window; and every byte arrives."""

    async def main() -> None:
        engine, keys, device, loop = Engine(), prompt(N), CountingDevice(), asyncio.get_running_loop()
        memory = {"medium": "memory", "capacity": "1MiB", "write_bandwidth": RECORD, "read_bandwidth": 2 * RECORD}
        async with open_cache(memory, engine=engine, limits=LIMITS, device=device) as kv:
            watch(device, pools_of(kv))
            started = loop.time()
            await keep(kv, engine, keys)
            assert loop.time() - started == pytest.approx(N - 4)
            engine.poison()
            started = loop.time()
            assert (await kv.load(keys, GPULoadStoreSpec(range(N)))).num_blocks == N
            assert loop.time() - started == pytest.approx((N - 4) / 2)
            assert engine.read(range(N)) == contents(keys)
            tier = kv.stats()["memory"]
            assert tier.failed == 0
            assert tier.write_queue_s >= N - 4  # windows wait side by side
            assert tier.read_queue_s >= (N - 4) / 2
            assert tier.write_s == tier.read_s == 0

    run(main)


@pytest.mark.parametrize("is_promoted", [False, True])
def test_a_load_that_was_given_up_holds_up_no_other(*, is_promoted: bool) -> None:
    """What it began to read, and nobody waits for any more, comes after what somebody waits for."""

    async def main() -> None:
        engine, given_up, wanted = Engine(), prompt(2 * N), prompt(4, seed=1)
        device, loop = CountingDevice(), asyncio.get_running_loop()
        tiers = [CPUTier(capacity=64 * PAYLOAD_BYTES)] * is_promoted + [SLOW]
        async with open_cache(*tiers, engine=engine, limits=LIMITS, device=device) as kv:
            watch(device, pools_of(kv))
            for keys in (given_up, wanted):
                await keep(kv, engine, keys)
                if is_promoted:
                    await kv.evict(keys, tier="cpu")
            started = loop.time()
            assert (await kv.load(given_up, GPULoadStoreSpec(range(2 * N)), deadline_s=1)).num_blocks == 4
            assert (await kv.load(wanted, GPULoadStoreSpec(range(4)))).num_blocks == 4
            assert loop.time() - started == pytest.approx(4)  # the first window's 4 blocks, at 1 a second
            await asyncio.sleep(4 * N)
            assert_nothing_left(kv)

    run(main)


def test_closing_waits_for_no_turn_that_nobody_wants() -> None:
    """Of a load that was given up, blocks whose turn to be read has not come are not waited for."""

    async def main() -> None:
        engine, keys, device, loop = Engine(), prompt(2 * N), CountingDevice(), asyncio.get_running_loop()
        async with open_cache(SLOW, engine=engine, limits=LIMITS, device=device) as kv:
            watch(device, pools_of(kv))
            await keep(kv, engine, keys)
            before = kv.start_load(keys, GPULoadStoreSpec(range(2 * N)), deadline_s=100)
            assert (await kv.load(keys[N:], GPULoadStoreSpec(range(N)), deadline_s=1)).num_blocks == 0
            before.cancel()
            await before
            started = loop.time()
        assert loop.time() - started <= 4  # what is being read: one window, at 1 block a second

    run(main)


@pytest.mark.parametrize("end", ["deadline", "cancel", "close"])
def test_a_direct_load_that_waits_for_its_turn_ends_in_time(end: str) -> None:
    """Its medium has not been given the memory yet: so neither its deadline nor a cancellation nor closing waits."""

    async def main() -> None:
        engine, keys, device, loop = Engine(), prompt(N), CountingDevice(), asyncio.get_running_loop()
        memory = np.zeros((2 * N, PAYLOAD_BYTES), np.uint8)
        start = -memory.ctypes.data % 4096
        pool = memory.ravel()[start : start + N * PAYLOAD_BYTES].reshape(N, PAYLOAD_BYTES)
        limits = LIMITS.model_copy(update={"close_timeout_s": 2.0})
        async with open_cache(SLOW, engine=engine, limits=limits, device=device) as kv:
            watch(device, pools_of(kv))
            kv.register_host_pool("pool", pool, direct=True)
            await keep(kv, engine, keys)
            assert (await kv.load(keys, CPULoadStoreSpec(range(N), "pool"))).num_blocks == N
            pool[:] = 0
            started = loop.time()
            handle = kv.start_load(keys, CPULoadStoreSpec(range(N), "pool"), deadline_s=2 if end == "deadline" else 900)
            await asyncio.sleep(1)
            if end == "cancel":
                handle.cancel()
            elif end == "close":
                await kv.aclose()
            assert (await handle).num_blocks == 0
            assert loop.time() - started <= 3
            await asyncio.sleep(10 * N)
            assert not pool.any()

    run(main)


def test_memory_has_no_rates() -> None:
    """They are for storage, and a rate of nothing is none."""
    for wrong in ({"medium": "cpu", "read_bandwidth": "1GiB"}, {"medium": "gpu", "capacity": 1, "write_bandwidth": 1}):
        with pytest.raises(ConfigurationError, match="for storage tiers only"):
            TieredKVSettings(tiers=[wrong])
    with pytest.raises(ConfigurationError, match="must be positive"):
        TieredKVSettings(tiers=[CPUTier(), {"medium": "memory", "capacity": "1GiB", "read_bandwidth": 0}])


@pytest.mark.parametrize("write", ["through", "back"])
def test_a_medium_is_not_worn_faster_than_allowed(write: str) -> None:
    """What would be too much for the day is dropped at once, and counted; the tiers above keep it, and time helps."""

    async def main() -> None:
        engine, device, loop = Engine(), CountingDevice(), asyncio.get_running_loop()
        worn = {"medium": "memory", "capacity": "1MiB", "write": write, "max_write_bytes_per_day": 24 * 4 * RECORD}
        async with open_cache(
            CPUTier(capacity=64 * PAYLOAD_BYTES), worn, engine=engine, limits=LIMITS, device=device
        ) as kv:
            watch(device, pools_of(kv))
            for seed in range(4):
                await keep(kv, engine, prompt(4, seed=seed))
                await kv.flush()
            tier = kv.stats()["memory"]
            assert (tier.written, tier.held_back, tier.dropped) == (4, 12, 12)
            assert tier.dropped_because == {"held back": 12}
            assert kv.stats()["cpu"].ready == 16
            started = loop.time()
            await asyncio.sleep(3600)
            await keep(kv, engine, prompt(4, seed=5))
            await kv.flush()
            assert loop.time() - started < 3700
            assert kv.stats()["memory"].written == 8

    run(main)


@pytest.mark.parametrize("most_at_once", [1, 4], ids=["one by one", "at once"])
async def test_no_more_than_an_hours_share_is_written_at_once(most_at_once: int) -> None:
    """However many stores are under way; what was not written after all may be written by another."""
    engine, share, backend = Engine(), 8 * RECORD, ScriptedBackend(max_write_bytes_per_day=24 * 8 * RECORD)
    async with open_cache(CPUTier(capacity=64 * PAYLOAD_BYTES), backend, engine=engine, limits=LIMITS) as kv:
        backend.on_write.hold()
        stored = []
        for seed in range(6):
            stored.append(await kv.store(keys := prompt(4, seed=seed), engine.compute(keys)))
            if len(stored) >= most_at_once:
                backend.on_write.release()
                await stored[-1].settled()
        backend.on_write.release()
        for each in stored:
            await each.settled()
        tier = kv.stats()["keyed"]
        assert (tier.bytes_written, tier.written, tier.held_back) == (share, 8, 16)


async def test_what_was_refused_is_no_wear() -> None:
    """It leaves its share to others."""
    engine, backend = Engine(), ScriptedBackend(max_write_bytes_per_day=24 * 4 * RECORD)
    async with open_cache(CPUTier(capacity=64 * PAYLOAD_BYTES), backend, engine=engine, limits=LIMITS) as kv:
        backend.on_write.change_next(lambda outcomes: [Outcome.REFUSED] * len(outcomes))
        await keep(kv, engine, prompt(4))
        assert (kv.stats()["keyed"].written, kv.stats()["keyed"].dropped) == (0, 4)
        await keep(kv, engine, prompt(4, seed=1))
        assert (kv.stats()["keyed"].written, kv.stats()["keyed"].held_back) == (4, 0)
        await keep(kv, engine, prompt(4, seed=2))
        assert (kv.stats()["keyed"].written, kv.stats()["keyed"].held_back) == (4, 4)


@pytest.mark.parametrize("kind", [ScriptedBackend, ScriptedSlotBackend])
async def test_what_failed_counts_as_written(kind: type[ScriptedBackend | ScriptedSlotBackend]) -> None:
    """The medium may have got all of it: so no more than an hour's share goes there, however writes end."""
    engine, backend = Engine(), kind(name="worn", max_write_bytes_per_day=24 * 8 * RECORD)
    async with open_cache(CPUTier(capacity=64 * PAYLOAD_BYTES), backend, engine=engine, limits=LIMITS) as kv:
        backend.on_write.change_next(lambda outcomes: outcomes)  # of the call that fails
        backend.on_write.fail_next(BackendUnavailableError("the link broke"))
        await keep(kv, engine, prompt(4))
        backend.on_write.change_next(lambda outcomes: [Outcome.FAILED, *outcomes[1:]])
        await keep(kv, engine, prompt(4, seed=1))
        assert (kv.stats()["worn"].written, kv.stats()["worn"].failed) == (3, 5)
        await keep(kv, engine, prompt(4, seed=2))
        assert (kv.stats()["worn"].written, kv.stats()["worn"].held_back) == (3, 4)
