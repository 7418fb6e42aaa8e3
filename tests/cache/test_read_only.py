"""Tiers with ``read_only``: a cache that reads what others have stored, and leaves no trace."""

import asyncio
from collections.abc import Sequence

import pytest

from tests.support.caches import Recorder, keep, open_cache, until_idle
from tests.support.engine import Engine, contents, prompt
from tests.support.virtual import CountingDevice, pools_of, run, watch
from tiered_kv import BlocksCorrupted, ConfigurationError, CPUTier, TieredKVSettings
from tiered_kv.media.backend import Block, Outcome
from tiered_kv.values.keys import BlockKey
from tiered_kv_backends.memory import MemoryBackend
from tiered_kv_backends.nvme import NVMeBackend

CPU = CPUTier(capacity=64 << 10)
SETTINGS = {"medium": "memory", "capacity": "1MiB"}


class ReadOnly(MemoryBackend):
    """What another cache has stored; a write or deletion fails the test."""

    def __init__(self, other: MemoryBackend) -> None:
        super().__init__({**SETTINGS, "read_only": True})
        self._records = other._records  # noqa: SLF001 - of the same class

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Fail."""
        raise AssertionError("written")

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Fail."""
        raise AssertionError("deleted")

    def break_block(self, digest: bytes) -> None:
        """Flip a bit."""
        key = next(key for key in self._records if key.hash == digest)
        self._records[key] = self._records[key][:-1] + bytes([self._records[key][-1] ^ 1])


async def filled(engine: Engine, num_blocks: int) -> MemoryBackend:
    """Return what a cache that may write has left."""
    backend, keys = MemoryBackend(SETTINGS), prompt(num_blocks)
    async with open_cache(backend, engine=engine) as kv:
        await kv.store(keys, engine.compute(keys))
        await kv.flush()
    return backend


async def test_it_is_read_and_never_written() -> None:
    """Loads find what others stored and promote it; stores go to the other tiers, and no tier counts them as lost."""
    engine, keys, more = Engine(), prompt(8), prompt(4, seed=1)
    shared, events = ReadOnly(await filled(engine, 8)), Recorder()
    async with open_cache(CPU, shared, engine=engine, emit=events) as kv:
        spec = engine.compute(keys)
        engine.poison()
        assert (await kv.load(keys, spec)).num_blocks == 8
        assert engine.read(spec) == contents(keys)
        result = await kv.store(more, engine.compute(more))
        assert [tier.tier for tier in await result.settled()] == ["cpu"]
        assert (await kv.lookup(more)).num_blocks == 4
        await keep(kv, engine, more)
        assert kv.stats()["memory"].written == kv.stats()["memory"].dropped == 0
        await kv.flush(sync=True)
        await until_idle(kv)


async def test_what_is_evicted_is_not_found_any_more() -> None:
    """By this cache; it stays where it is."""
    engine, keys = Engine(), prompt(8)
    shared = ReadOnly(await filled(engine, 8))
    async with open_cache(CPU, shared, engine=engine) as kv:
        await kv.load(keys, engine.compute(keys))
        await kv.evict(keys[3:])
        assert (await kv.lookup(keys)).num_blocks == 3
        await until_idle(kv)
    assert set(await shared.lookup(list(shared._records))) == {Outcome.HIT}  # noqa: SLF001 - of the medium


async def test_what_is_broken_stays_as_well() -> None:
    """However often it is read, it is a miss, and others' to repair."""
    engine, keys, events = Engine(), prompt(4), Recorder()
    shared = ReadOnly(await filled(engine, 4))
    shared.break_block(keys[2])
    for _ in range(3):
        async with open_cache(shared, engine=engine, emit=events) as kv:
            assert (await kv.load(keys, engine.compute(keys))).num_blocks == 2
            assert (await kv.load(keys, engine.compute(keys))).num_blocks == 2
            await until_idle(kv)
    assert events.of(BlocksCorrupted)


def test_what_others_repair_is_read_again() -> None:
    """A block that was broken, twice even, and is written anew by who may write, is found after a while."""

    async def main() -> None:
        engine, keys, device = Engine(), prompt(4), CountingDevice()
        backend = await filled(engine, 4)
        shared, whole = ReadOnly(backend), dict(backend._records)  # noqa: SLF001 - of the medium
        shared.break_block(keys[2])
        async with open_cache(shared, engine=engine, device=device) as kv:
            watch(device, pools_of(kv))
            for num_blocks in (2, 2, 4):
                if num_blocks == 4:
                    backend._records.update(whole)  # noqa: SLF001 - of the medium
                assert (await kv.load(keys, engine.compute(keys))).num_blocks == num_blocks
                await asyncio.sleep(100)

    run(main)


async def test_a_cache_that_can_keep_nothing_says_so() -> None:
    """With tiers that are only read, and none in memory, a store is dropped for that reason."""
    engine, keys = Engine(), prompt(4)
    async with open_cache(ReadOnly(await filled(engine, 2)), engine=engine) as kv:
        result = await kv.store(keys, engine.compute(keys))
        assert (result.num_stored, dict(result.drop_reasons)) == (0, {"read only": 4})
        assert (await kv.load(keys, engine.compute(keys))).num_blocks == 2


@pytest.mark.parametrize(
    "tier",
    [
        {"medium": "cpu", "capacity": "1GiB", "read_only": True},
        {"medium": "nvme", "path": "/mnt/kv", "capacity": "1GiB", "read_only": True},
        {**SETTINGS, "read_only": True, "write": "back"},
        {**SETTINGS, "read_only": True, "admit_after": 2},
    ],
)
def test_what_nobody_else_writes_is_not_read_only(tier: dict[str, object]) -> None:
    """Where it could only be a mistake, it is refused."""
    with pytest.raises(ConfigurationError, match="read_only"):
        TieredKVSettings(tiers=["cpu://?capacity=1GiB&name=first", tier] if tier["medium"] != "cpu" else [tier])


async def test_slots_are_not_read_only_whatever_they_are_set_up_with() -> None:
    """A backend of slots of one's own, whose settings do not know."""
    backend = NVMeBackend({"path": "kv", "capacity": "1MiB"})
    object.__setattr__(backend, "settings", MemoryBackend({**SETTINGS, "read_only": True}).settings)
    with pytest.raises(ConfigurationError, match="read_only"):
        async with open_cache(backend):
            pass
