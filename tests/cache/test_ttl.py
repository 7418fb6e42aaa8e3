"""Time to live: what has been in an owned tier for too long is not served, and makes room."""

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.support import virtual
from tests.support.backends import ScriptedBackend
from tests.support.caches import keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, contents, prompt
from tiered_kv import ConfigurationError, GPULoadStoreSpec, TieredKVSettings
from tiered_kv.catalog.index import TierIndex
from tiered_kv.testing import ScriptedDevice
from tiered_kv.values.keys import Names

KEYS = prompt(8)
INTO = GPULoadStoreSpec(range(8))


def test_blocks_live_for_their_time_in_each_tier(tmp_path: Path) -> None:
    """Not a second longer, used or not; each tier counts for itself, and says how many expired."""

    async def main() -> None:
        engine, device = Engine(), virtual.CountingDevice()
        cpu = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES, "ttl_s": 10.0}
        disk = {"medium": "nvme", "path": tmp_path, "capacity": "2MiB", "ttl_s": 30.0}
        async with open_cache(cpu, disk, engine=engine, device=device) as kv:
            virtual.watch(device, virtual.pools_of(kv))
            await keep(kv, engine, KEYS)
            await asyncio.sleep(9.0)
            assert (await kv.load(KEYS, INTO)).by_tier == {"cpu": 8}
            await asyncio.sleep(2.5)
            assert kv.stats()["cpu"].expired == 8
            assert kv.stats()["cpu"].ready == 0
            assert (await kv.load(KEYS, INTO)).by_tier == {"nvme": 8}
            await asyncio.sleep(20.0)
            assert kv.stats()["nvme"].expired == 8
            assert (await kv.lookup(KEYS)).num_blocks == 0
            await keep(kv, engine, KEYS)
            assert (await kv.lookup(KEYS)).num_blocks == 8
            await until_idle(kv)

    virtual.run(main)


def test_what_is_read_when_it_expires_is_read_to_the_end() -> None:
    """A lease holds the bytes; nobody else finds them any more."""

    async def main() -> None:
        engine, device = Engine(), virtual.CountingDevice()
        async with open_cache(
            {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES, "ttl_s": 10.0}, engine=engine, device=device
        ) as kv:
            virtual.watch(device, [])
            await keep(kv, engine, KEYS)
            async with kv.lease(KEYS) as lease:
                held = [bytes(view) for view in lease.views]
                await asyncio.sleep(12.0)
                assert (await kv.lookup(KEYS)).num_blocks == 0
                assert [bytes(view) for view in lease.views] == held
            await until_idle(kv)

    virtual.run(main)


def test_what_waits_to_be_copied_when_it_expires_is_copied_and_found_by_nobody_else(tmp_path: Path) -> None:
    """On its way from a disk a block is in a host slot: a load that began with it has it, and no other."""

    async def main() -> None:
        engine, device = Engine(), ScriptedDevice()
        disk = {"medium": "nvme", "path": tmp_path, "capacity": "2MiB", "ttl_s": 10.0}
        async with open_cache(disk, engine=engine, device=device) as kv:
            virtual.watch(virtual.CountingDevice(), virtual.pools_of(kv))
            storing = kv.start_store(KEYS, engine.compute(KEYS))
            await until(lambda: kv.stats()["nvme"].ready == 8, on_wait=device.run_all)
            assert (await storing).num_stored == 8
            loading, late = kv.start_load(KEYS, INTO, deadline_s=60.0), GPULoadStoreSpec(range(8, 12))
            await asyncio.sleep(12.0)
            assert kv.stats()["nvme"].expired == 8
            assert (await kv.lookup(KEYS)).num_blocks == 0
            assert (await kv.load(KEYS[:4], late)).num_blocks == 0
            await until(lambda: loading.done, on_wait=device.run_all)
            assert (await loading).num_blocks == 8
            assert engine.read(INTO) == contents(KEYS)
            await until_idle(kv)

    virtual.run(main)


def test_a_block_that_waits_for_a_tier_is_not_written_once_it_expired(tmp_path: Path) -> None:
    """Nobody wants it below."""

    async def main() -> None:
        engine, device = Engine(), virtual.CountingDevice()
        cpu = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES, "ttl_s": 5.0}
        disk = {"medium": "nvme", "path": tmp_path, "capacity": "2MiB", "write": "back"}
        async with open_cache(cpu, disk, engine=engine, device=device) as kv:
            virtual.watch(device, virtual.pools_of(kv))
            await kv.store(KEYS, engine.compute(KEYS))
            await asyncio.sleep(7.0)
            await kv.flush()
            assert (kv.stats()["cpu"].dirty, kv.stats()["nvme"].ready) == (0, 0)
            await until_idle(kv)

    virtual.run(main)


@pytest.mark.parametrize("leaves", ["expires", "is evicted from memory", "is evicted", "is cleared"])
def test_what_leaves_memory_while_it_is_written_stays_below(leaves: str) -> None:
    """What is written to a shared tier is its own, whatever memory does with its copy; unless it was evicted there."""
    few = KEYS[:4]

    async def main() -> None:
        engine, device, disk = Engine(), virtual.CountingDevice(), ScriptedBackend(timeout_s=60.0)
        cpu = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES, "ttl_s": 5.0}
        async with open_cache(cpu, disk, engine=engine, device=device) as kv:
            virtual.watch(device, virtual.pools_of(kv))
            disk.on_write.hold()
            await kv.store(few, engine.compute(few))
            await until(lambda: disk.on_write.num_held > 0)
            evicting = asyncio.create_task(kv.evict(few)) if leaves == "is evicted" else None
            if leaves == "is evicted from memory":
                await kv.evict(few, tier="cpu")
            if leaves == "is cleared":
                await kv.clear()
            await asyncio.sleep(7.0)
            assert kv.stats()["cpu"].ready == 0
            disk.on_write.release()
            await kv.flush()
            if evicting is not None:
                await evicting
            assert (await kv.lookup(few)).num_blocks == disk.num_records == (0 if evicting else 4)
            await until_idle(kv)

    virtual.run(main)


def test_no_time_is_refused() -> None:
    """A TTL is a positive number of seconds, and a setting of tiers that the cache owns."""
    for tier in ({"medium": "cpu", "ttl_s": 0}, {"medium": "memory", "capacity": "1GiB", "ttl_s": 5}):
        with pytest.raises(ConfigurationError, match="ttl_s"):
            TieredKVSettings(tiers=[tier])


def test_an_error_does_not_end_time_to_live_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ours, perhaps: it is logged, and after a pause blocks expire as before."""
    expire, left = TierIndex.expire, [2]

    def stumble(self: TierIndex, *, limit: int) -> Names:
        if left[0]:
            left[0] -= 1
            raise ZeroDivisionError
        return expire(self, limit=limit)

    async def main() -> None:
        engine, device = Engine(), virtual.CountingDevice()
        cpu = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES, "ttl_s": 10.0}
        async with open_cache(cpu, engine=engine, device=device) as kv:
            virtual.watch(device, [])
            await keep(kv, engine, KEYS)
            monkeypatch.setattr(TierIndex, "expire", stumble)
            with capture_logs() as logs:
                await asyncio.sleep(30.0)
            assert [entry["event"] for entry in logs] == ["background.failed"] * 2
            assert kv.stats()["cpu"].expired == 8
            await until_idle(kv)

    virtual.run(main)
