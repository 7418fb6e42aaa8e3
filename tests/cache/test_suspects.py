"""Blocks of a shared tier that are broken or unreadable: repaired by a store, deleted late, not asked for often."""

from collections.abc import Sequence

import pytest

from tests.support.backends import ScriptedBackend, only
from tests.support.caches import Recorder, inside, keep, open_cache, until, until_idle
from tests.support.engine import Engine, contents, prompt
from tiered_kv import Block, BlockKey, GPULoadStoreSpec, Outcome, TieredKV
from tiered_kv.tiers.shared import SharedTier
from tiered_kv.values.events import BlocksCorrupted

KEYS = prompt(4)
BROKEN = 2


async def load(kv: TieredKV, engine: Engine) -> int:
    """Load all keys, check that the prefix is right, and return its length."""
    engine.poison()
    loaded = await kv.load(KEYS, GPULoadStoreSpec(range(len(KEYS))))
    assert engine.read(range(loaded.num_blocks)) == contents(KEYS[: loaded.num_blocks])
    await until_idle(kv)
    return loaded.num_blocks


def a_minute_passes(kv: TieredKV) -> None:
    """Turn the clock by which blocks are suspected."""
    tier = inside(kv).chains[0].storage[0]  # nothing public turns a clock
    assert isinstance(tier, SharedTier)
    tier.suspects._clock = lambda: tier.health.clock() + 61.0  # noqa: SLF001 - no public call tells it


async def test_a_store_repairs_a_broken_block_that_is_still_there() -> None:
    """The first broken read deletes nothing; the block counts as absent, so that a store does not skip it."""
    engine, emit, shared = Engine(), Recorder(), ScriptedBackend(name="shared")
    async with open_cache(shared, engine=engine, emit=emit) as kv:
        await keep(kv, engine, KEYS)
        shared.flip_byte(BROKEN)
        assert await load(kv, engine) == BROKEN
        assert shared.on_delete.num_calls == 0
        assert shared.num_records == 4
        assert (await kv.lookup(KEYS)).num_blocks == BROKEN
        num_read = shared.on_read.num_blocks
        assert await load(kv, engine) == BROKEN
        assert shared.on_read.num_blocks == num_read + BROKEN  # the broken one is not read again
        stored = await kv.store(KEYS, engine.compute(KEYS))
        assert (stored.num_stored, stored.num_present) == (1, 3)
        await stored.settled()
        assert await load(kv, engine) == 4
        assert [event.blocks for event in emit.of(BlocksCorrupted)] == [1]


async def test_a_block_that_is_broken_a_second_time_is_deleted() -> None:
    """Nobody has stored it anew for a minute: it is read again, and deleted for the sake of other hosts."""
    engine, shared = Engine(), ScriptedBackend(name="shared")
    async with open_cache(shared, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        shared.flip_byte(BROKEN)
        assert await load(kv, engine) == BROKEN
        a_minute_passes(kv)
        assert await load(kv, engine) == BROKEN
        assert shared.on_delete.num_blocks == 1
        assert shared.num_records == 3


class KeepingBackend(ScriptedBackend):
    """Keeps the first record of a key, and says that each was stored."""

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Write what is not there."""
        first = dict(self._records)
        outcomes = await super().write(keys, blocks)
        self._records.update(first)
        return outcomes


async def test_a_store_that_replaces_nothing_leaves_a_broken_block_to_its_second_read() -> None:
    """Some media keep what they have: as it is broken still, it is deleted, and the next store repairs it."""
    engine, shared = Engine(), KeepingBackend(name="shared")
    async with open_cache(shared, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        shared.flip_byte(BROKEN)
        assert await load(kv, engine) == BROKEN
        await keep(kv, engine, KEYS)
        assert await load(kv, engine) == BROKEN
        await until(lambda: shared.num_records == 3)
        await until_idle(kv)
        await keep(kv, engine, KEYS)
        assert await load(kv, engine) == 4
        assert kv.stats()["shared"].corrupt == 2


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.MISS])
async def test_a_block_that_cannot_be_read_is_not_tried_by_every_load(outcome: Outcome) -> None:
    """After three loads that asked for it in vain it is absent for a while: no livelock between verdict and read."""
    engine, shared = Engine(), ScriptedBackend(name="shared")
    async with open_cache(shared, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        for _ in range(3):
            shared.on_read.change_next(only(BROKEN, outcome))
            assert await load(kv, engine) == BROKEN
        num_read = shared.on_read.num_blocks
        assert await load(kv, engine) == BROKEN
        assert shared.on_read.num_blocks == num_read + BROKEN
        await keep(kv, engine, KEYS)
        assert await load(kv, engine) == 4


async def test_a_read_is_not_kept_waiting_by_the_deletion_of_what_is_broken() -> None:
    """A deletion that hangs holds no slots of a load, which has ended before."""
    engine, shared = Engine(), ScriptedBackend(name="shared")
    async with open_cache(shared, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        shared.on_delete.hold()
        shared.flip_byte(BROKEN)
        assert await load(kv, engine) == BROKEN
        a_minute_passes(kv)
        engine.poison()
        loaded = await kv.load(KEYS, GPULoadStoreSpec(range(4)))
        assert loaded.num_blocks == BROKEN
        await until(lambda: shared.on_delete.num_held > 0)
        stats = kv.stats()
        assert stats.bounce_free == stats.bounce_slots
        shared.on_delete.release()
        await until_idle(kv)
