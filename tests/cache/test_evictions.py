"""What is evicted stays away, whatever its medium is doing just then: opening late, writing, failing, being asked."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import pytest

from tests.support.backends import Act, ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import Recorder, inside, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, SMALL_LIMITS, Engine, contents, prompt
from tests.support.virtual import CountingDevice, pools_of, run, watch
from tiered_kv import BackendUnavailableError, Block, BlockKey, BlockKeys, GPULoadStoreSpec, Outcome, TieredKV
from tiered_kv.media.backend import Missing, Recovered
from tiered_kv.testing import ScriptedDevice
from tiered_kv.tiers import owned
from tiered_kv.tiers.gate import Kind, Waiter
from tiered_kv.tiers.tombstones import Tombstones
from tiered_kv.values.events import TierFailed

T = TypeVar("T")
KEYS, OTHERS = prompt(4), prompt(4, seed=1)
INTO = GPULoadStoreSpec(range(4))
CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}


async def evict(kv: TieredKV, how: str) -> None:
    """Evict the keys, or all there is."""
    await (kv.evict(KEYS) if how == "evict" else kv.clear())


async def late_with(engine: Engine, others: BlockKeys) -> ScriptedSlotBackend:
    """Return a medium that has the keys, and others, and opens later than the next cache."""
    slots = ScriptedSlotBackend(8, required=False)
    async with open_cache(slots, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await keep(kv, engine, others)
    slots.on_open.fail_next(BackendUnavailableError("not yet"))
    return slots


@pytest.mark.parametrize("how", ["evict", "clear"])
async def test_a_tier_that_opens_late_has_nothing_that_was_evicted_before(how: str) -> None:
    """Neither then nor after another restart; what was not evicted is there."""
    engine, others = Engine(), prompt(2, seed=1)
    slots = await late_with(engine, others)
    async with open_cache(CPU, slots, engine=engine) as kv:
        await evict(kv, how)
        await until(lambda: not kv.stats()["slots"].is_bypassed)
        assert (await kv.lookup(KEYS)).num_blocks == 0
        assert (await kv.load(KEYS, INTO)).num_blocks == 0
        assert (await kv.lookup(others)).num_blocks == (2 if how == "evict" else 0)
        await until_idle(kv)
    async with open_cache(CPU, slots, engine=engine) as kv:
        assert (await kv.lookup(KEYS)).num_blocks == 0


async def test_a_load_from_a_tier_that_opened_late_begins_in_its_call() -> None:
    """As from one that opened in time: it goes by the books that were found on the medium."""
    engine, others = Engine(), prompt(2, seed=1)
    slots = await late_with(engine, others)
    async with open_cache(CPU, slots, engine=engine) as kv:
        await until(lambda: not kv.stats()["slots"].is_bypassed)
        loading = kv.start_load(others, GPULoadStoreSpec(range(2)))
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("load ")]
        assert (await loading).num_blocks == 2


@pytest.mark.parametrize("how", ["evict", "clear"])
async def test_what_is_evicted_as_a_tier_opens_is_evicted_for_good(how: str) -> None:
    """While it is told what was evicted before: it is told of this too, and says so when it is done."""
    engine, others = Engine(), prompt(2, seed=1)
    slots = await late_with(engine, others)
    async with open_cache(CPU, slots, engine=engine) as kv:
        await kv.evict(KEYS)
        slots.on_checkpoint.hold()
        await until(lambda: slots.on_checkpoint.num_held > 0)
        evicting = asyncio.ensure_future(kv.evict(others) if how == "evict" else kv.clear())
        await asyncio.sleep(0)
        slots.on_checkpoint.release()
        await evicting
        assert await kv.flush(sync=True)
        assert (await kv.evict(others)).kept_by == ()
        assert slots.num_records == 0
        await until_idle(kv)


async def test_a_tier_that_opens_late_with_books_that_cannot_be_is_tried_again() -> None:
    """What it found is checked before it is used, and a wrong answer is a failed opening like any other."""
    slots, engine, emit = ScriptedSlotBackend(8, required=False), Engine(), Recorder()
    async with open_cache(slots, engine=engine) as kv:
        await keep(kv, engine, KEYS)
    slots.on_open.fail_next(BackendUnavailableError("not yet"))
    slots.on_open.change_next(lambda found: found)  # of the call that fails
    slots.on_open.change_next(lambda _: [Recovered(4, np.zeros((1, 4), np.uint64), np.array([17]))])
    async with open_cache(CPU, slots, engine=engine, emit=emit) as kv:
        await until(lambda: not kv.stats()["slots"].is_bypassed)
        assert "slots 17 to 17 in a tier of 4 slots" in emit.of(TierFailed)[-1].error
        assert (await kv.load(KEYS, INTO)).num_blocks == 4
        assert engine.read(INTO) == contents(KEYS)
        await until_idle(kv)


async def test_a_shared_tier_that_opens_late_is_told_what_was_evicted() -> None:
    """It is unfindable from the first moment, and deleted soon."""
    shared, engine = ScriptedBackend(required=False), Engine()
    async with open_cache(shared, engine=engine) as kv:
        await keep(kv, engine, KEYS)
    shared.on_open.fail_next(BackendUnavailableError("not yet"))
    async with open_cache(CPU, shared, engine=engine) as kv:
        await kv.evict(KEYS)
        await until(lambda: not kv.stats()["keyed"].is_bypassed)
        assert (await kv.lookup(KEYS)).num_blocks == 0
        await until(lambda: shared.num_records == 0)


async def test_a_delete_that_fails_is_made_again() -> None:
    """Meanwhile the block is unfindable here; a store of it makes it findable, and it stays."""
    shared, engine = ScriptedBackend(), Engine()
    async with open_cache(shared, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await keep(kv, engine, prompt(4, seed=1))
        shared.on_delete.fail_next(BackendUnavailableError("busy"))
        await kv.evict(KEYS)
        assert shared.num_records == 8
        assert (await kv.lookup(KEYS)).num_blocks == (await kv.load(KEYS, INTO)).num_blocks == 0
        await keep(kv, engine, KEYS[:2])
        assert (await kv.lookup(KEYS)).num_blocks == 2
        await until(lambda: shared.num_records == 6)
        assert (await kv.lookup(KEYS)).num_blocks == 2
        await until_idle(kv)


async def test_a_delete_that_is_made_again_spares_what_is_stored_anew() -> None:
    """It waits for the write under way, and then there is nothing left to delete: what was written stays."""
    shared, engine = ScriptedBackend(), Engine()
    async with open_cache(CPU, shared, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        shared.on_delete.fail_next(BackendUnavailableError("busy"))
        await kv.evict(KEYS)
        shared.on_write.hold()
        stored = await kv.store(KEYS, engine.compute(KEYS))
        await until(lambda: shared.on_write.num_held == 1)
        shared.on_delete.hold()
        inside(kv).chains[0].storage[0].tick()
        for _ in range(10):
            await asyncio.sleep(0)
        shared.on_write.release()
        assert [tier.written for tier in await stored.settled()] == [4, 4]
        shared.on_delete.release()
        await until_idle(kv)
        assert shared.num_records == (await kv.lookup(KEYS)).num_blocks == 4


async def test_a_tier_that_deletes_nothing_is_read_on() -> None:
    """It may lack the right: what was evicted is unfindable here all the same, and the rest is served."""
    shared, engine, others = ScriptedBackend(), Engine(), prompt(4, seed=1)
    async with open_cache(CPU, shared, engine=engine) as kv:
        for keys in (KEYS, others):
            await keep(kv, engine, keys)
        await kv.evict(others, tier="cpu")
        for _ in range(5):
            shared.on_delete.fail_next(PermissionError("read and write only"))
        for number in range(4):
            await kv.evict(KEYS[number : number + 1])
        assert not kv.stats()["keyed"].is_bypassed
        assert (await kv.lookup(KEYS)).num_blocks == 0
        assert (await kv.load(others, INTO)).by_tier == {"keyed": 4}
        assert engine.read(INTO) == contents(others)
        await until_idle(kv)


class SlowAnswer(ScriptedBackend):
    """Looks for blocks at once, and answers when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.on_answer = Act()

    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Go through `on_answer` with what is known by now."""
        found = await super().lookup(keys)

        async def answer() -> list[Outcome]:
            return found

        return await self.on_answer.play(len(keys), answer)


@pytest.mark.parametrize("what", ["lookup", "store"])
async def test_nobody_shares_an_answer_from_before_an_eviction(what: str) -> None:
    """A question that was asked before is another one: by its answer the block would be found, or not stored anew."""
    shared, engine = SlowAnswer(), Engine()
    async with open_cache(shared, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        shared.on_answer.hold()
        before = asyncio.create_task(kv.lookup(KEYS))
        await until(lambda: shared.on_answer.num_held == 1)
        await kv.evict(KEYS)
        later = asyncio.create_task(keep(kv, engine, KEYS) if what == "store" else asyncio.sleep(0))
        finding = asyncio.create_task(kv.lookup(KEYS))
        await until(lambda: shared.on_answer.num_held == 2)
        shared.on_answer.release()
        await asyncio.wait({before, later})
        assert (await finding).num_blocks == 0
        assert (await kv.lookup(KEYS)).num_blocks == (4 if what == "store" else 0)
        await until_idle(kv)


async def test_nobody_shares_an_answer_from_before_a_store() -> None:
    """What a tier has been written is found there by whoever asks from then on."""
    shared, engine = SlowAnswer(), Engine()
    async with open_cache(CPU, shared, engine=engine) as kv:
        shared.on_answer.hold()
        before = asyncio.create_task(kv.lookup(KEYS))
        await until(lambda: shared.on_answer.num_held == 1)
        await (await kv.store(KEYS, engine.compute(KEYS))).settled()
        await kv.evict(KEYS, tier="cpu")
        loading = asyncio.create_task(kv.load(KEYS, INTO))
        await until(lambda: shared.on_answer.num_held == 2)
        shared.on_answer.release()
        assert (await loading).num_blocks == 4
        await before
        await until_idle(kv)


async def test_evicted_while_written_to_a_shared_tier() -> None:
    """The eviction ends when the block has been deleted after the write, even if that takes a second try."""
    shared, engine = ScriptedBackend(), Engine()
    async with open_cache(CPU, shared, engine=engine) as kv:
        shared.on_write.hold()
        await kv.store(KEYS, engine.compute(KEYS))
        await until(lambda: shared.on_write.num_held == 1)
        evicting = asyncio.create_task(kv.evict(KEYS))
        await until(lambda: kv.lookup_nowait(KEYS).num_blocks == 0)
        shared.on_delete.fail_next(BackendUnavailableError("busy"))
        shared.on_write.release()
        await evicting
        assert (await kv.lookup(KEYS)).num_blocks == 0
        await until(lambda: shared.num_records == 0)
        await until_idle(kv)


def test_evicted_while_a_write_to_a_shared_tier_hangs() -> None:
    """However long it hangs, who has evicted it waits to delete what it writes, and nobody else waits for that."""

    async def main() -> None:
        engine, shared, device = Engine(), ScriptedBackend(), CountingDevice()
        async with open_cache(CPU, shared, engine=engine, device=device) as kv:
            watch(device, pools_of(kv))
            await keep(kv, engine, OTHERS)
            shared.on_write.hold()
            await kv.store(KEYS, engine.compute(KEYS))
            await until(lambda: shared.on_write.num_held == 1)
            assert (await kv.evict(KEYS)).kept_by == ("keyed",)
            shared.on_delete.fail_next(BackendUnavailableError("once"))
            assert (await kv.evict(OTHERS)).kept_by == ("keyed",)
            await asyncio.sleep(100.0)
            assert (shared.on_delete.num_calls, shared.num_records) == (2, 0)
            shared.on_write.release()
            await until(lambda: shared.on_delete.num_calls == 3)
            await until_idle(kv)
            assert shared.num_records == 0

    run(main)


class LateBackend(ScriptedBackend):
    """Gives up what it is to write, which a server that stands still carries out when it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: dict[BlockKey, bytes] = {}

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Send the records, and hear nothing of them."""
        self._sent.update({key: bytes(block) for key, block in zip(keys, blocks, strict=True)})
        raise BackendUnavailableError("no answer")

    def carry_out(self) -> None:
        """Have the server write what it was sent."""
        self._records.update(self._sent)


def test_a_write_that_failed_brings_nothing_back_that_was_deleted_since() -> None:
    """It may be carried out behind the deletion: until that is over nobody finds the block here, or says it is gone."""

    async def main() -> None:
        engine, shared, device = Engine(), LateBackend(), CountingDevice()
        async with open_cache(CPU, shared, engine=engine, device=device) as kv:
            watch(device, pools_of(kv))
            stored = await kv.store(KEYS, engine.compute(KEYS))
            assert [tier.failed for tier in await stored.settled()] == [0, 4]
            assert (await kv.evict(KEYS)).kept_by == ("keyed",)
            assert shared.on_delete.num_blocks == 4  # at once, all the same
            await asyncio.sleep(30.0)
            shared.carry_out()
            assert (await kv.lookup(KEYS)).num_blocks == 0
            await asyncio.sleep(32.0)
            assert shared.num_records == (await kv.lookup(KEYS)).num_blocks == 0
            assert shared.on_delete.num_blocks == 8  # once more, when that is over
            assert (await kv.evict(KEYS)).kept_by == ()
            await until_idle(kv)

    run(main)


def test_what_may_come_yet_keeps_nothing_else_from_being_deleted_at_the_end() -> None:
    """A drain says No for it, and has told the medium of all that is evicted."""

    async def main() -> None:
        engine, keys, shared, device = Engine(), prompt(3000), ScriptedBackend(), CountingDevice()
        async with open_cache(CPU, shared, engine=engine, device=device) as kv:
            watch(device, pools_of(kv))
            await keep(kv, engine, keys[-4:])
            shared.on_write.fail_next(BackendUnavailableError("no"))
            await (await kv.store(OTHERS, engine.compute(OTHERS))).settled()
            for each in (OTHERS, keys):
                shared.on_delete.fail_next(BackendUnavailableError("no"))
                await kv.evict(each)
            assert shared.num_records == 4
            assert not await kv.drain()
            assert shared.num_records == 0

    run(main)


async def test_evicted_before_its_turn_to_be_read_from_a_shared_tier() -> None:
    """The medium has said that it has the block, and has it yet: nobody reads it any more."""
    shared, engine = ScriptedBackend(), Engine()
    async with open_cache(shared, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        budget = inside(kv).chains[0].storage[0].calls.budget
        give_back = await budget.take(budget.limit, Waiter(Kind.LOAD))
        load = kv.start_load(KEYS, INTO)
        await until(lambda: budget.room.num_waiting == 1)
        shared.on_delete.hold()
        evicting = asyncio.create_task(kv.evict(KEYS))
        await until(lambda: shared.on_delete.num_held == 1)
        give_back()
        assert (await load).num_blocks == 0
        assert shared.on_read.num_calls == 0
        shared.on_delete.release()
        await evicting
        await until_idle(kv)


async def test_evicted_while_it_waits_for_room_on_the_host() -> None:
    """A block of the GPU pool that goes down later goes no further than it has come."""
    slots, engine, host = ScriptedSlotBackend(), Engine(), {"medium": "cpu", "capacity": 4 * PAYLOAD_BYTES}
    async with open_cache({"medium": "gpu", "capacity": 64 * PAYLOAD_BYTES}, host, slots, engine=engine) as kv:
        slots.on_write.hold()
        room = inside(kv).chains[0].room
        for seed in range(1, 20):
            keys = prompt(4, seed=seed)
            await kv.store(keys, engine.compute(keys))
            await until(lambda: kv.stats().transfers == 0 or room.num_waiting > 0 or slots.on_write.num_held > 0)
        await until(lambda: room.num_waiting > 0)
        evicting = asyncio.create_task(kv.evict(keys))
        await until(lambda: kv.lookup_nowait(keys).num_blocks == 0)
        slots.on_write.release()
        await evicting
        await until_idle(kv)
        assert kv.lookup_nowait(keys).num_blocks == 0
        assert (await kv.load(keys, INTO)).num_blocks == 0


@pytest.mark.parametrize("medium", [ScriptedBackend, ScriptedSlotBackend])
async def test_a_store_counts_on_no_read_of_what_was_evicted_before_that_had_slots(
    medium: type[ScriptedBackend | ScriptedSlotBackend],
) -> None:
    """A load that waits for slots knows of a tier that had the blocks: what is stored since has to be copied."""
    engine, storage = Engine(), medium()
    async with open_cache(CPU, storage, engine=engine, limits=SMALL_LIMITS) as kv:
        chain = inside(kv).chains[0]
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS, tier="cpu")
        num_own, num_bounce = chain.host.index.num_slots, chain.host.index.num_bounce
        _, others = inside(kv).batch(prompt(num_own + num_bounce, seed=2))
        held = [
            chain.reserve(chain.host, others[:num_own]),
            chain.reserve(chain.host, others[num_own:], bounce=True),
        ]
        budget = chain.storage[0].calls.budget
        give_back = await budget.take(budget.limit, Waiter(Kind.LOAD))
        load = kv.start_load(KEYS, INTO)
        await until(lambda: chain.room.num_waiting > 0)
        await kv.evict(KEYS)
        for each in held:
            assert each is not None
            each.close()
        chain.room.changed()
        await until(lambda: load.done or budget.room.num_waiting > 0)
        stored = await kv.store(KEYS, engine.compute(KEYS))
        give_back()
        await load
        await stored.settled()
        assert stored.num_dropped == 0
        assert (await kv.load(KEYS, INTO)).num_blocks == len(KEYS)
        await until_idle(kv)


@pytest.mark.parametrize("how", ["evict", "clear"])
async def test_evicted_before_a_store_has_any_slots(how: str) -> None:
    """It waits for slots that others have: what was to go when it had begun does not come once it gets them."""
    engine, disk = Engine(num_pages=128), ScriptedSlotBackend(64)
    async with open_cache(disk, engine=engine, limits=SMALL_LIMITS) as kv:
        disk.on_write.hold()
        others = [kv.start_store(keys, engine.compute(keys)) for keys in (prompt(8, seed=seed) for seed in range(1, 5))]
        await until(lambda: inside(kv).chains[0].room.num_waiting > 0)
        storing = kv.start_store(KEYS, engine.compute(KEYS))
        evicting = asyncio.create_task(evict(kv, how))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        disk.on_write.release()
        await evicting
        for each in (*others, storing):
            await (await each).settled()
        assert kv.lookup_nowait(KEYS).num_blocks == 0
        assert kv.lookup_nowait(prompt(8, seed=1)).num_blocks == (8 if how == "evict" else 0)
        await until_idle(kv)


async def test_evicted_while_written_to_an_owned_tier() -> None:
    """Once the eviction has ended, no crash at any moment brings the block back."""
    slots, engine = ScriptedSlotBackend(16), Engine()
    async with open_cache(CPU, slots, engine=engine) as kv:
        slots.on_write.hold()
        await kv.store(KEYS, engine.compute(KEYS))
        await until(lambda: slots.on_write.num_held == 1)
        evicting = asyncio.create_task(kv.evict(KEYS))
        await until(lambda: kv.lookup_nowait(KEYS).num_blocks == 0)
        slots.on_forget.hold()
        slots.on_write.release()
        await until(lambda: slots.on_forget.num_held > 0)
        assert slots.num_records == 4  # a crash now would bring them back: so
        assert not evicting.done()
        slots.on_forget.release()
        await evicting
        assert slots.num_records == 0
        await until_idle(kv)


async def test_an_eviction_that_is_cancelled_has_happened() -> None:
    """A load meanwhile leaves the block nowhere; the medium is told all the same."""
    shared, engine = ScriptedBackend(), Engine()
    async with open_cache(CPU, shared, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        shared.on_delete.hold()
        evicting = asyncio.create_task(kv.evict(KEYS))
        await until(lambda: shared.on_delete.num_held == 1)
        await kv.load(KEYS, INTO)
        evicting.cancel()
        await asyncio.wait({evicting})
        shared.on_delete.release()
        await until_idle(kv)
        assert shared.num_records == (await kv.lookup(KEYS)).num_blocks == 0


async def test_a_long_prompt_is_deleted_part_by_part() -> None:
    """All of it is unfindable at once; a block that is stored before its part's turn stays."""
    engine, keys, shared = Engine(), prompt(3000), ScriptedBackend()
    async with open_cache({"medium": "cpu", "capacity": 0}, shared, engine=engine) as kv:
        await keep(kv, engine, keys[:4])
        await keep(kv, engine, keys[-4:])
        shared.on_delete.hold()
        evicting = asyncio.create_task(kv.evict(keys))
        await until(lambda: shared.on_delete.num_held == 1)
        assert shared.on_delete.num_blocks == 1024
        assert (await kv.lookup(keys[:4])).num_blocks == (await kv.lookup(keys[-4:])).num_blocks == 0
        await (await kv.store(keys[-4:], engine.compute(keys[-4:]))).settled()
        assert (await kv.lookup(keys[-4:])).num_blocks == 4
        shared.on_delete.release()
        await evicting
        await until_idle(kv)
        assert (shared.on_delete.num_calls, shared.on_delete.num_blocks) == (3, 2996)
        assert [key.hash for key in shared.keys()]  # noqa: SIM118 - no dict == list(keys[-4:])
        assert (await kv.lookup(keys[-4:])).num_blocks == 4


def test_a_deletion_that_fails_is_gone_on_with_later() -> None:
    """A medium that fails is not asked for the rest of a long prompt; it is asked again until all is deleted."""

    async def main() -> None:
        engine, keys, shared, device = Engine(), prompt(3000), ScriptedBackend(), CountingDevice()
        async with open_cache(CPU, shared, engine=engine, device=device) as kv:
            watch(device, pools_of(kv))
            await keep(kv, engine, keys[-4:])
            shared.on_delete.fail_next(BackendUnavailableError("busy"))
            await kv.evict(keys)
            assert (shared.on_delete.num_calls, shared.num_records) == (1, 4)
            assert (await kv.lookup(keys[-4:])).num_blocks == 0
            await asyncio.sleep(10.0)
            assert (shared.on_delete.num_blocks, shared.num_records) == (1024 + 3000, 0)
            await until_idle(kv)

    run(main)


class GrippingBackend(ScriptedBackend):
    """Cannot delete one key."""

    kept = b""

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Delete the others."""
        others = [key for key in keys if key.hash != self.kept]
        await super().delete(others)
        if len(others) < len(keys):
            raise BackendUnavailableError("held by somebody")


def test_what_cannot_be_deleted_holds_up_no_others() -> None:
    """However much waits, each has its turn."""

    async def main() -> None:
        engine, keys, shared, device = Engine(), prompt(3000), GrippingBackend(), CountingDevice()
        async with open_cache(CPU, shared, engine=engine, device=device) as kv:
            watch(device, pools_of(kv))
            await keep(kv, engine, keys[:1])
            shared.kept = shared.keys()[0].hash
            await keep(kv, engine, keys[-4:])
            assert (await kv.evict(keys)).kept_by == ("keyed",)
            await asyncio.sleep(30.0)
            assert [key.hash for key in shared.keys()] == [shared.kept]  # noqa: SIM118 - no dict
            assert (await kv.lookup(keys)).num_blocks == 0
            await until_idle(kv)

    run(main)


class SluggishBackend(ScriptedBackend):
    """Has time for few deletions in one call."""

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Delete them, unless they are too many."""
        if len(keys) > 100:
            raise BackendUnavailableError("not begun in time")
        await super().delete(keys)


def test_a_medium_that_deletes_slowly_is_asked_for_fewer_at_once() -> None:
    """It has no time for a long prompt in one call, however often that is made: all of it is deleted nevertheless."""

    async def main() -> None:
        engine, keys, shared, device = Engine(), prompt(3000), SluggishBackend(), CountingDevice()
        async with open_cache(CPU, shared, engine=engine, device=device) as kv:
            watch(device, pools_of(kv))
            await keep(kv, engine, keys[-4:])
            assert (await kv.evict(keys)).kept_by == ("keyed",)
            await asyncio.sleep(120.0)
            assert shared.num_records == 0
            await until_idle(kv)

    run(main)


async def test_a_forget_that_fails_is_made_up_for() -> None:
    """The medium is told what it holds soon after: then no restart finds what was evicted."""
    slots, engine = ScriptedSlotBackend(16), Engine()
    async with open_cache(slots, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        slots.on_forget.fail_next(BackendUnavailableError("busy"))
        await kv.evict(KEYS)
        assert slots.num_records == 4
        await until(lambda: slots.num_records == 0)


async def test_what_was_lost_is_kept_until_the_medium_remembers_without_it() -> None:
    """A disk that is away takes its blocks out of the books: a restart finds them unless others noted that it is."""
    slots, engine = Losing(8), Engine()
    async with open_cache(slots, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        slots.lost = Missing(np.ones(8, np.bool_), "away")
        await kv.load(KEYS, INTO)
        for _ in range(3):  # at a tick too
            slots.on_checkpoint.fail_next(BackendUnavailableError("nobody could note that"))
        assert (await kv.evict(KEYS)).kept_by == ("slots",)
        slots.on_checkpoint.calm()
        assert (await kv.evict(KEYS)).kept_by == ()
        await until_idle(kv)


class Losing(ScriptedSlotBackend):
    """An owned medium of several parts, of which some may be away.

    Attributes:
        lost: Which slots are.
    """

    lost: Missing | None = None

    def missing(self, group: int) -> Missing | None:
        """Say what the test says."""
        return self.lost


async def test_what_is_being_read_is_forgotten_all_the_same() -> None:
    """Nobody waits for a read that may hang, as a restart would bring the block back; what is read is a miss."""
    slots, engine = ScriptedSlotBackend(16), Engine()
    async with open_cache(CPU, slots, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS, tier="cpu")
        slots.on_read.hold()
        load = kv.start_load(KEYS, INTO)
        await until(lambda: slots.on_read.num_held == 1)
        await kv.evict(KEYS)
        assert slots.num_records == 0
        slots.on_read.release()
        assert (await load).num_blocks == 0
        assert slots.clashes == []
        await until_idle(kv)


async def test_a_slot_that_is_forgotten_is_not_written() -> None:
    """What is being forgotten keeps its slots: a store has to wait for them, and loses nothing by the forgetting."""
    slots, engine, others = ScriptedSlotBackend(4), Engine(), prompt(4, seed=1)
    async with open_cache(slots, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        slots.on_forget.hold()
        evicting = asyncio.create_task(kv.evict(KEYS))
        await until(lambda: slots.on_forget.num_held == 1)
        stored = await kv.store(others, engine.compute(others))
        assert [tier.dropped for tier in await stored.settled()] == [4]  # there is no slot that is free
        slots.on_forget.release()
        await evicting
        await keep(kv, engine, others)
        assert slots.clashes == []
        engine.poison()
        assert (await kv.load(others, INTO)).num_blocks == 4
        assert engine.read(INTO) == contents(others)
        await until_idle(kv)


async def test_a_block_found_broken_keeps_its_slot_until_it_is_forgotten() -> None:
    """The same for what a read has found broken, which is removed by the cache itself."""
    slots, engine = ScriptedSlotBackend(4), Engine()
    async with open_cache(slots, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        slots.flip_byte(1)
        slots.on_forget.hold()
        assert (await kv.load(KEYS, INTO)).num_blocks == 1
        await until(lambda: slots.on_forget.num_held == 1)
        await (await kv.store(KEYS, engine.compute(KEYS))).settled()  # into another's slot, which has to go for it
        slots.on_forget.release()
        await until_idle(kv)
        await keep(kv, engine, KEYS)
        assert slots.clashes == []
        assert (await kv.load(KEYS, INTO)).num_blocks == 4
        await until_idle(kv)


async def test_a_tier_that_opens_late_has_nothing_if_too_much_was_evicted_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is remembered is bounded; where that was not enough it begins empty rather than with one block too many."""
    monkeypatch.setattr(owned, "Tombstones", partial(Tombstones, most_names=1))
    slots, engine, others = ScriptedSlotBackend(8, required=False), Engine(), prompt(2, seed=1)
    async with open_cache(slots, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await keep(kv, engine, others)
    slots.on_open.fail_next(BackendUnavailableError("not yet"))
    async with open_cache(CPU, slots, engine=engine) as kv:
        for number in range(4):
            await kv.evict(KEYS[number : number + 1])
        await until(lambda: not kv.stats()["slots"].is_bypassed)
        assert [(await kv.lookup(keys)).num_blocks for keys in (KEYS, KEYS[3:], others)] == [0, 0, 0]
        await until_idle(kv)
    async with open_cache(CPU, slots, engine=engine) as kv:
        assert (await kv.lookup(KEYS)).num_blocks == 0


async def test_what_had_to_go_for_a_write_that_was_refused_is_forgotten() -> None:
    """The medium still has it, and nobody could evict it by name any more: a restart would bring it back."""
    engine, disk = Engine(), ScriptedSlotBackend(4)
    async with open_cache(CPU, disk, engine=engine) as kv:
        await keep(kv, engine, prompt(4))
        other = prompt(2, seed=1)
        disk.on_write.change_next(lambda outcomes: [Outcome.REFUSED] * len(outcomes))
        await keep(kv, engine, other)
        assert kv.stats()["slots"].ready == disk.num_records == 2
        await until_idle(kv)


@pytest.mark.parametrize("how", ["evict", "clear"])
@pytest.mark.parametrize("moves", ["load", "prefetch"])
async def test_evicted_between_two_reads_for_the_gpu_pool(moves: str, how: str) -> None:
    """What was on the host when its load began is loaded, as was said, and goes into no pool: it was evicted."""
    engine, slots, pool = Engine(), ScriptedSlotBackend(), {"medium": "gpu", "capacity": 16 * PAYLOAD_BYTES}
    async with open_cache(pool, CPU, slots, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS, tier="gpu")
        await kv.evict(KEYS[3:], tier="cpu")
        slots.on_read.hold()
        moving = kv.start_load(KEYS, INTO) if moves == "load" else kv.prefetch(KEYS, to="gpu")
        await until(lambda: slots.on_read.num_held > 0)
        evicting = asyncio.create_task(evict(kv, how))
        await until(lambda: kv.lookup_nowait(KEYS).num_blocks == 0)
        slots.on_read.release()
        await moving
        await evicting
        await until_idle(kv)
        assert not (await kv.presence(KEYS)).any()


@pytest.mark.parametrize("how", ["evict", "clear"])
@pytest.mark.parametrize("moves", ["load", "prefetch"])
async def test_evicted_while_copied_to_the_gpu_pool(moves: str, how: str) -> None:
    """The copy has its slots in the pool, and goes on: what it leaves there nobody finds."""
    engine, device, pool = Engine(), ScriptedDevice(), {"medium": "gpu", "capacity": 16 * PAYLOAD_BYTES}
    async with open_cache(pool, CPU, engine=engine, device=device) as kv:
        storing = asyncio.create_task(keep(kv, engine, KEYS))
        await until(storing.done, on_wait=device.run_all)
        await kv.evict(KEYS, tier="gpu")
        moving = kv.start_load(KEYS, INTO) if moves == "load" else kv.prefetch(KEYS, to="gpu")
        await until(lambda: device.pending > 0)
        await evict(kv, how)
        await until(lambda: moving.done, on_wait=device.run_all)
        await until_idle(kv, on_wait=device.run_all)
        assert not (await kv.presence(KEYS)).any()
