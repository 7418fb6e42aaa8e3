"""Checkpoints and forgetting in an owned tier that hangs: bounded, and nobody's slots wait for them."""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tests.support.backends import ScriptedSlotBackend
from tests.support.caches import Recorder, inside, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, contents, prompt
from tiered_kv import Block, CacheLimits, GPULoadStoreSpec, Outcome
from tiered_kv.tiers.gate import Kind, Waiter
from tiered_kv.values.events import TierFailed, TierStalled
from tiered_kv.values.keys import Names

KEYS = prompt(4)
INTO = GPULoadStoreSpec(range(4))
CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}
SOON_S = 0.05
"""A timeout that is expected to pass."""


async def test_a_checkpoint_that_hangs_ends_a_flush_in_time() -> None:
    """The tier is bypassed until the medium has answered; what others hold is served, and then all is as it was."""
    engine, emit, disk = Engine(), Recorder(), ScriptedSlotBackend(name="disk", timeout_s=SOON_S)
    async with open_cache(CPU, disk, engine=engine, emit=emit) as kv:
        await keep(kv, engine, KEYS)
        disk.on_checkpoint.hold()
        await kv.flush(sync=True)
        assert [event.doing for event in emit.of(TierStalled)] == ["checkpoint"]
        assert kv.stats()["disk"].is_bypassed
        assert (await kv.load(KEYS, INTO)).by_tier == {"cpu": 4}
        disk.on_checkpoint.release()
        await until_idle(kv)
        await kv.evict(KEYS, tier="cpu")
        assert (await kv.load(KEYS, INTO)).by_tier == {"disk": 4}


async def test_who_waits_for_bytes_in_flight_is_told_of_a_checkpoint_that_hangs() -> None:
    """A load, too, gives up a tier that is bypassed: whoever has the bytes may look at the medium for ever."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk", timeout_s=SOON_S)
    async with open_cache(disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        budget = inside(kv).chains[0].storage[0].calls.budget
        give_back = await budget.take(budget.limit, Waiter(Kind.LOAD))
        load = kv.start_load(KEYS, INTO, deadline_s=600.0)
        await until(lambda: budget.room.num_waiting == 1)
        disk.on_checkpoint.hold()
        await kv.flush(sync=True)
        await until(lambda: load.done)
        assert (await load).num_blocks == 0
        assert disk.on_read.num_calls == 0
        give_back()
        disk.on_checkpoint.release()
        await until_idle(kv)


async def test_what_waits_behind_a_checkpoint_gives_up() -> None:
    """Blocks evicted meanwhile are unfindable at once; that the medium could not be told is an event."""
    engine, emit, disk = Engine(), Recorder(), ScriptedSlotBackend(name="disk", timeout_s=SOON_S)
    async with open_cache(CPU, disk, engine=engine, emit=emit) as kv:
        await keep(kv, engine, KEYS)
        disk.on_checkpoint.hold()
        flushing = asyncio.create_task(kv.flush(sync=True))
        await until(lambda: disk.on_checkpoint.num_held == 1)
        await kv.evict(KEYS[2:])
        assert (await kv.lookup(KEYS)).num_blocks == 2
        await flushing
        await until(lambda: bool(emit.of(TierFailed)))
        assert [(event.doing, event.blocks) for event in emit.of(TierFailed)] == [("forget", 2)]
        assert disk.on_forget.num_calls == 0
        disk.on_checkpoint.release()
        await until_idle(kv)


async def test_a_read_does_not_wait_until_the_medium_has_forgotten() -> None:
    """A load that met a broken block has ended, and its slots are free, while the medium hangs in forgetting it."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk")
    async with open_cache(disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        disk.flip_byte(2)
        disk.on_forget.hold()
        engine.poison()
        loaded = await kv.load(KEYS, INTO)
        assert engine.read(INTO[: loaded.num_blocks]) == contents(KEYS[:2])
        await until(lambda: disk.on_forget.num_held == 1)
        stats = kv.stats()
        assert stats.bounce_free == stats.bounce_slots
        assert (await kv.lookup(KEYS)).num_blocks == 2
        disk.on_forget.release()
        await until_idle(kv)


async def test_a_medium_that_has_a_block_twice_is_opened_all_the_same() -> None:
    """A write that was given up may come through after the one that replaced it: one of the two is found."""
    engine, owned, keys = Engine(), ScriptedSlotBackend(8), prompt(3)
    async with open_cache(owned, engine=engine) as kv:
        await keep(kv, engine, keys)
    owned.records[0, 7] = next(iter(owned.records.values()))
    async with open_cache(owned, engine=engine) as kv:
        assert kv.stats()["slots"].ready == len(keys)
        engine.poison()
        into = GPULoadStoreSpec(range(len(keys)))
        assert (await kv.load(keys, into)).num_blocks == len(keys)
        assert engine.read(into) == contents(keys)


class NotedSlots(ScriptedSlotBackend):
    """Notes which block it is given for which slot."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[dict[bytes, int]] = []
        self.remembered: list[tuple[bytes, int]] = []

    async def write(self, group: int, slots: NDArray[np.int64], names: Names, blocks: Sequence[Block]) -> list[Outcome]:
        """Note what begins to be written."""
        self.begun.append({name.tobytes(): slot for name, slot in zip(names, slots.tolist(), strict=True)})
        return await super().write(group, slots, names, blocks)

    async def checkpoint(self, group: int, names: Names, slots: NDArray[np.int64], *, sync: bool = False) -> None:
        """Note what is to be remembered."""
        self.remembered = [(name.tobytes(), slot) for name, slot in zip(names, slots.tolist(), strict=True)]
        await super().checkpoint(group, names, slots, sync=sync)


async def test_a_checkpoint_knows_what_is_being_written_and_what_was_evicted_meanwhile() -> None:
    """The one a restart would lose, the other it would bring back; and of a block in two writes the later counts."""
    engine, disk, keys = Engine(), NotedSlots(), prompt(2)
    limits = CacheLimits(window=4 * PAYLOAD_BYTES, bounce=64 * PAYLOAD_BYTES)  # of which both writes have room
    async with open_cache(CPU, disk, engine=engine, limits=limits) as kv:
        (tier,) = inside(kv).chains[0].owned
        disk.on_write.hold()
        await kv.store(keys, engine.compute(keys))
        await until(lambda: disk.on_write.num_held == 1)
        evicting = asyncio.create_task(kv.evict(keys[:1]))
        await until(lambda: kv.lookup_nowait(keys).num_blocks == 0)
        await tier.checkpoint(sync=False)
        evicted, kept = disk.begun[0]
        assert disk.remembered == [(kept, disk.begun[0][kept])]
        await kv.store(keys[:1], engine.compute(keys[:1]))
        await until(lambda: disk.on_write.num_held == 2)
        await tier.checkpoint(sync=False)
        assert disk.begun[1][evicted] != disk.begun[0][evicted]
        assert disk.remembered == [(kept, disk.begun[0][kept]), (evicted, disk.begun[1][evicted])]
        disk.on_write.release()
        await evicting
        await until_idle(kv)


async def test_a_medium_that_forgets_and_notes_nothing_is_read_on() -> None:
    """It may be full: what was evicted is unfindable here all the same, the rest is served, and it is tried again."""
    engine, disk, others = Engine(), ScriptedSlotBackend(name="disk"), prompt(4, seed=1)
    async with open_cache(disk, engine=engine) as kv:
        for keys in (KEYS, others):
            await keep(kv, engine, keys)
        for _ in range(4):
            disk.on_forget.fail_next(OSError("full"))
        for number in range(4):
            await kv.evict(KEYS[number : number + 1])
        assert not kv.stats()["disk"].is_bypassed
        assert kv.stats()["disk"].open_breakers == ("upkeep",)
        assert (await kv.lookup(KEYS)).num_blocks == 0
        assert (await kv.load(others, INTO)).by_tier == {"disk": 4}
        assert engine.read(INTO) == contents(others)
        await until(lambda: disk.num_records == 4)  # by a checkpoint, which makes up for it
        await until_idle(kv)
    async with open_cache(disk, engine=engine) as kv:
        assert (await kv.lookup(KEYS)).num_blocks == 0
        assert (await kv.lookup(others)).num_blocks == 4
