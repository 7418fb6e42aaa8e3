"""Why a block is there or not: for each thing that can befall it, the word that says so, and to its tenant alone."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.support.any_layout import AnyEngine, nvme, open_any
from tests.support.any_layout import cpu as any_cpu
from tests.support.any_layout import prompt as any_prompt
from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import Recorder, inside, keep, open_cache, until, until_idle
from tests.support.engine import BLOCK_SIZE, MODEL, PAYLOAD_BYTES, SMALL_LIMITS, Engine, prompt, small_layout
from tiered_kv import (
    BlockKeys,
    CacheLimits,
    ClosedError,
    Explanation,
    GPULoadStoreSpec,
    ModelIdentity,
    Shard,
    TieredKV,
    hash_blocks,
)
from tiered_kv.catalog.books import Change
from tiered_kv.catalog.uses import Fate
from tiered_kv.testing import ScriptedDevice
from tiered_kv.tiers.fates import Fates, IndexPlace
from tiered_kv.tiers.tier import Batch, Naming
from tiered_kv.values.keys import epoch_digest
from tiered_kv.values.plan import Outcomes

KEYS = prompt(4)
INTO = GPULoadStoreSpec(range(4))


def cpu(num_blocks: int) -> dict[str, object]:
    """A CPU tier of so many blocks."""
    return {"medium": "cpu", "capacity": num_blocks * PAYLOAD_BYTES}


async def words(kv: TieredKV, keys: BlockKeys) -> list[str]:
    """Explain blocks, in words."""
    return [str(each) for each in await kv.explain(keys)]


async def test_what_is_there_says_where() -> None:
    """Each tier that has it, fastest first; what was never stored, and what lies behind a hole, is explained too."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk")
    async with open_cache(cpu(16), disk, engine=engine) as kv:
        assert await words(kv, KEYS[:1]) == ["never stored"]
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS[1:2], tier="cpu")
        await kv.evict(KEYS[2:3], tier="disk")
        await kv.evict(KEYS[3:])
        assert await words(kv, KEYS) == ["ready, in cpu, in disk", "ready, in disk", "ready, in cpu", "removed (disk)"]
        await keep(kv, engine, KEYS[3:])
        assert await words(kv, KEYS[3:]) == ["ready, in cpu, in disk"]


@pytest.mark.parametrize("is_planned", [False, True], ids=["stored", "planned"])
async def test_what_was_removed_while_it_was_copied_was_not_never_stored(*, is_planned: bool) -> None:
    """Its neighbours are there."""
    engine, keys = AnyEngine(), any_prompt(3)
    async with open_any(engine, any_cpu(16)) as kv:
        source = engine.fill(keys, range(3))
        if is_planned:
            planner = kv.planner()
            planner.register_worker()
            job = planner.plan_store(keys, source)
            plan = await job.planned()
            await kv.evict(keys[1:2])
            planner.complete(Outcomes(plan.job, 0, 3))
            await job.ended()
        else:
            storing = kv.start_store(keys, source, layerwise=True)
            await kv.evict(keys[1:2])
            for layer in range(2):
                storing.store_layer(layer)
            await storing
        assert await words(kv, keys) == ["ready, in cpu", "removed (cpu)", "ready, in cpu"]


async def test_others_have_their_turns_while_many_blocks_are_explained() -> None:
    """However many are asked for at once: one turn of the event loop explains a few."""
    num_turns, engine, many = 0, Engine(), prompt(3000)
    async with open_cache(cpu(16), engine=engine) as kv:
        await keep(kv, engine, KEYS)
        explaining = asyncio.ensure_future(kv.explain(many))
        while not explaining.done():
            await asyncio.sleep(0)
            num_turns += 1
        assert num_turns > 40
        assert [str(each) for each in await explaining] == ["ready, in cpu"] * 4 + ["never stored"] * 2996


async def test_others_have_their_turns_while_many_ask_why() -> None:
    """However many calls are under way, as of a host's clients: one turn explains a few blocks of one of them."""
    num_turns, engine, many = 0, Engine(), prompt(640)
    async with open_cache(cpu(16), engine=engine) as kv:
        await keep(kv, engine, KEYS)
        explaining = asyncio.gather(*(kv.explain(many) for _ in range(20)))
        while not explaining.done():
            await asyncio.sleep(0)
            num_turns += 1
        assert num_turns > 20 * 10
        for answer in await explaining:
            assert [str(each) for each in answer] == ["ready, in cpu"] * 4 + ["never stored"] * 636


@pytest.mark.parametrize("ask", [False, True])
async def test_one_turn_names_a_few_blocks(monkeypatch: pytest.MonkeyPatch, *, ask: bool) -> None:
    """To name all of a long prompt, and to look whether all are there, takes as long as to explain them."""
    named, name = list[int](), Naming.batch

    def batch(naming: Naming, keys: BlockKeys, epoch: bytes) -> Batch:
        named.append(len(keys))
        return name(naming, keys, epoch)

    async with open_cache(cpu(16), ScriptedSlotBackend(name="disk")) as kv:
        monkeypatch.setattr(Naming, "batch", batch)
        assert len(await kv.explain(prompt(3000), ask=ask)) == 3000
    assert max(named) <= 64


async def test_what_had_to_go_for_others_says_from_where() -> None:
    """The last tier that had it."""
    engine, disk = Engine(), ScriptedSlotBackend(num_slots=8, name="disk")
    async with open_cache(cpu(4), disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await keep(kv, engine, prompt(4, seed=1))
        assert await words(kv, KEYS) == ["ready, in disk"] * 4
        await keep(kv, engine, prompt(8, seed=2))
        assert await words(kv, KEYS) == ["evicted (disk)"] * 4


async def test_what_was_broken_says_so() -> None:
    """Until it is stored again."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk")
    async with open_cache(disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        disk.flip_byte(2)
        await kv.load(KEYS, INTO)
        await until_idle(kv)
        assert (await words(kv, KEYS))[1:] == ["ready, in disk", "corrupt (disk)", "ready, in disk"]


async def test_what_was_not_stored_says_why() -> None:
    """For want of room, because its store was revoked, or because the medium failed."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk")
    async with open_cache(cpu(4), engine=engine) as kv:
        await kv.store(prompt(6), engine.compute(prompt(6)))
        assert await words(kv, prompt(6)) == ["ready, in cpu"] * 4 + ["dropped (no room)"] * 2
    async with open_cache(disk, engine=engine, device=ScriptedDevice()) as kv:
        handle = kv.start_store(KEYS, engine.compute(KEYS))
        handle.cancel()
        await handle
        assert await words(kv, KEYS) == ["dropped (revoked)"] * 4
    async with open_cache(disk, engine=engine) as kv:
        disk.on_write.fail_next(OSError("no disk"))
        await keep(kv, engine, KEYS)
        assert await words(kv, KEYS) == ["failed (disk)"] * 4


async def test_what_is_on_its_way_is_pending() -> None:
    """Into memory, where a load waits for it."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk")
    async with open_cache(cpu(16), disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS, tier="cpu")
        disk.on_read.hold()
        loading = kv.start_load(KEYS, INTO)
        await until(lambda: disk.on_read.num_held > 0)
        assert await words(kv, KEYS) == ["ready, in disk"] * 4
        await kv.evict(KEYS, tier="disk")
        assert await words(kv, KEYS) == ["pending"] * 4
        disk.on_read.release()
        await loading


async def test_what_is_only_on_its_way_to_a_disk_is_being_written() -> None:
    """It was evicted from memory meanwhile: neither a lookup nor a load waits for it, and the statistics say why."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk")
    async with open_cache(cpu(16), disk, engine=engine) as kv:
        disk.on_write.hold()
        stored = await kv.store(KEYS, engine.compute(KEYS))
        await until(lambda: disk.on_write.num_held > 0)
        assert await words(kv, KEYS) == ["ready, in cpu"] * 4
        await kv.evict(KEYS, tier="cpu")
        found = await kv.lookup(KEYS)
        assert (found.num_blocks, found.num_pending) == (0, 0)
        assert await words(kv, KEYS) == ["being written (disk)"] * 4
        assert (await kv.load(KEYS, INTO)).num_blocks == 0
        assert kv.stats().missed_because == {"being written": 4}
        disk.on_write.release()
        await stored.settled()
        assert await words(kv, KEYS) == ["ready, in disk"] * 4


async def test_what_is_of_other_weights_says_of_which() -> None:
    """By the beginning of their digest; of those served lately."""
    engine = Engine()
    async with open_cache(cpu(16), engine=engine) as kv:
        await keep(kv, engine, KEYS)
        kv.advance_epoch("w1")
        assert await kv.explain(KEYS) == [Explanation("old epoch", epoch_digest("w0").hex()[:8])] * 4
        for n in range(2, 20):
            kv.advance_epoch(f"w{n}")
        assert await words(kv, KEYS) == ["never stored"] * 4
        kv.advance_epoch("w0")
        assert await words(kv, KEYS) == ["ready, in cpu"] * 4


async def test_weights_that_an_earlier_start_served_are_found_on_the_disk(tmp_path: Path) -> None:
    """If it may be read: some of what lies there says of which they are. Of another salt nothing is told by it."""
    engine, keys = AnyEngine(), any_prompt(6)
    async with open_any(engine, nvme(tmp_path)) as kv:
        await kv.store(keys, engine.fill(keys, range(6)))
        await kv.flush()
    async with open_any(engine, nvme(tmp_path), model=ModelIdentity("model", weights="w1")) as kv:
        assert await words(kv, keys) == ["never stored"] * 6
        old = [Explanation("old epoch", epoch_digest("w0").hex()[:8])] * 6
        assert await kv.explain(keys, ask=True) == old
        theirs = BlockKeys.from_hashes(list(keys), block_size=keys.block_size, salt="theirs")
        assert [each.state for each in await kv.explain(theirs, ask=True)] == ["never stored"] * 6


async def test_a_disk_that_hangs_keeps_nobody_waiting() -> None:
    """What lies there is not asked for longer than a call may take; its slot is nobody else's until that returns.

    Seed 9000419 had a question that never ended.
    """
    engine, disk = Engine(), ScriptedSlotBackend(name="disk", timeout_s=0.05)
    async with open_cache(disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        disk.on_read.hold()
        explained = await kv.explain(prompt(4, seed=1), ask=True)
        assert [each.state for each in explained] == ["never stored"] * 4
        await kv.evict(KEYS)
        disk.on_read.release()
        await until_idle(kv)
        assert not disk.clashes


async def test_what_is_to_be_read_in_its_turn_is_not_held_before() -> None:
    """It can be evicted, and its slot is another's then."""
    engine, disk = Engine(), ScriptedSlotBackend(4, read_bandwidth=1)  # a record at once, the next one in hours
    limits = SMALL_LIMITS.model_copy(update={"close_timeout_s": 0.1})  # which the question waits for
    async with open_cache(disk, engine=engine, limits=limits) as kv:
        await keep(kv, engine, KEYS)
        explaining = asyncio.ensure_future(kv.explain(prompt(4, seed=1), ask=True))
        await until(lambda: inside(kv).chains[0].storage[0].calls.num_waiting == 1)
        assert kv.stats()["slots"].leased == 0
        await kv.evict(KEYS)
        assert kv.stats()["slots"].free == 4
    with pytest.raises(ClosedError):
        await explaining


async def test_whoever_is_cancelled_before_its_turn_leaves_the_line() -> None:
    """Closing does not wait for what nobody is to hear."""
    engine, disk = Engine(), ScriptedSlotBackend(4, read_bandwidth=1)  # a record at once, the next one in hours
    async with open_cache(disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        explaining = asyncio.ensure_future(kv.explain(prompt(4, seed=1), ask=True))
        calls = inside(kv).chains[0].storage[0].calls
        await until(lambda: calls.num_waiting == 1)
        explaining.cancel()
        await asyncio.wait({explaining})
        assert calls.num_waiting == 0


async def test_prefetches_without_end_keep_nobody_waiting() -> None:
    """A record is read in the line that they read in, however much of the tier is theirs."""
    engine, disk, prompts = Engine(num_pages=64), ScriptedSlotBackend(512), [prompt(64, seed=seed) for seed in range(8)]
    limits = CacheLimits(window=4 * PAYLOAD_BYTES, bounce=32 * PAYLOAD_BYTES)  # two of their windows at once
    async with open_cache(cpu(512), disk, engine=engine, limits=limits) as kv:
        for keys in prompts:
            await keep(kv, engine, keys)
            await kv.evict(keys, tier="cpu")
        moving = [asyncio.ensure_future(kv.prefetch(keys)) for keys in prompts]
        await until(lambda: disk.on_read.num_calls > 0)
        await kv.explain(prompt(4, seed=8), ask=True)
        assert not any(each.done() for each in moving)
        await asyncio.gather(*moving)


async def test_what_is_held_says_so() -> None:
    """Pinned by a call: whoever wonders why a tier is full can see it."""
    engine = Engine()
    async with open_cache(cpu(16), engine=engine) as kv:
        await keep(kv, engine, KEYS)
        kv.pin(KEYS[:2], ttl_s=60)
        assert await words(kv, KEYS) == ["ready, in cpu, pinned"] * 2 + ["ready, in cpu"] * 2
        await kv.evict(KEYS[:1])
        assert await words(kv, KEYS[:2]) == ["removed (cpu)", "ready, in cpu, pinned"]


async def test_tiers_that_are_not_ours_are_asked_only_if_told_to() -> None:
    """Else what they have is unknown; and one that does not answer stays so."""
    engine, shared = Engine(), ScriptedBackend(name="shared")
    async with open_cache(cpu(16), shared, engine=engine) as kv:
        await keep(kv, engine, KEYS[:2])
        await kv.evict(KEYS, tier="cpu")
        num_calls = shared.on_lookup.num_calls
        assert await words(kv, KEYS[1:3]) == ["removed (cpu), unknown in shared", "never stored, unknown in shared"]
        assert shared.on_lookup.num_calls == num_calls
        asked = await kv.explain(KEYS, ask=True)
        assert [str(each) for each in asked] == ["ready, in shared"] * 2 + ["never stored"] * 2


async def test_a_tier_that_does_not_answer_is_named() -> None:
    """What only it has cannot be loaded now."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk", timeout_s=0.05)
    async with open_cache(disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        disk.on_read.hold()
        await kv.load(KEYS, INTO)
        assert await words(kv, KEYS) == ["bypassed (disk)"] * 4
        disk.on_read.release()
        await until_idle(kv)


async def test_no_salt_learns_of_another() -> None:
    """Of the same tokens, and even of the same hashes given by an engine, whatever befell them under another salt."""
    engine = Engine()
    tokens = np.arange(4 * BLOCK_SIZE)
    ours = hash_blocks(tokens, block_size=BLOCK_SIZE, salt="ours")
    theirs = hash_blocks(tokens, block_size=BLOCK_SIZE, salt="theirs")
    stolen = BlockKeys.from_hashes(list(ours), block_size=BLOCK_SIZE, salt="theirs")
    async with open_cache(cpu(16), engine=engine) as kv:
        await keep(kv, engine, ours)
        await kv.evict(ours[2:])
        kv.pin(ours[:1], ttl_s=60)
        kv.advance_epoch("w1")
        kv.advance_epoch("w0")
        assert await words(kv, ours) == ["ready, in cpu, pinned", "ready, in cpu", "removed (cpu)", "removed (cpu)"]
        for keys in (theirs, stolen):
            assert await words(kv, keys) == ["never stored"] * 4


async def test_of_several_ranks_the_one_that_lacks_a_block_speaks() -> None:
    """A block is there when every rank has its part."""
    cache = TieredKV(
        [cpu(16)], model=MODEL, layout=small_layout(), shard=Shard.every(2), limits=SMALL_LIMITS, emit=Recorder()
    )
    async with cache as kv:
        for n, (chain, batch) in zip((4, 2), inside(kv).batches(KEYS), strict=True):  # as workers would
            with chain.host.index.reserve(batch.names[:n]) as reservation:
                reservation.commit().release()
        assert await words(kv, KEYS) == ["ready, in cpu"] * 2 + ["never stored"] * 2


async def test_clearing_forgets_the_past() -> None:
    """Of an empty cache nothing is explained by what was before."""
    engine = Engine()
    async with open_cache(cpu(16), engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS)
        await kv.clear()
        assert await words(kv, KEYS) == ["never stored"] * 4


def test_the_history_keeps_the_last_fate_in_the_order_noted() -> None:
    """However many are noted before anyone asks; more reasons than there are numbers lose their detail, no more."""
    fates, place = Fates(), IndexPlace("cpu", 0, 0)
    names = np.random.default_rng(0).integers(0, 2**63, (10_000, 4)).astype(np.uint64)
    fates.changed(place, Change.EVICTED, names)
    for n in range(40):
        fates.note(names[n : n + 1], Fate.DROPPED, f"reason {n}")
    fates.changed(place, Change.CORRUPT, names[:1])
    said = fates.of(names)
    assert said[0] == (Fate.CORRUPT, "cpu")
    assert said[1] == (Fate.DROPPED, "reason 1")
    assert said[39] == (Fate.DROPPED, "")
    assert said[40:] == [(Fate.EVICTED, "cpu")] * 9960


@pytest.mark.parametrize("n", [0, 1])
async def test_few_blocks_are_explained_too(n: int) -> None:
    """One by one, or none."""
    async with open_cache(cpu(4), ScriptedBackend(name="shared")) as kv:
        await asyncio.sleep(0)
        assert [each.state for each in await kv.explain(KEYS[:n], ask=True)] == ["never stored"] * n


async def test_whoever_asks_and_is_cancelled_leaves_what_is_being_read_in_its_place() -> None:
    """Nothing is written where a medium reads yet, though nobody waits for it any more."""
    engine, disk, others = Engine(), ScriptedSlotBackend(4), prompt(4, seed=2)
    async with open_cache(cpu(16), disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        disk.on_read.hold()
        asking = asyncio.create_task(kv.explain(prompt(4, seed=1), ask=True))
        await until(lambda: disk.on_read.num_held == 1)
        asking.cancel()
        await asyncio.wait({asking})
        await (await kv.store(others, engine.compute(others))).settled()
        disk.on_read.release()
        await until_idle(kv)
        assert disk.clashes == []


async def test_what_waits_to_be_written_below_says_so() -> None:
    """It is kept in memory until then."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk")
    disk.settings = disk.settings.model_copy(update={"write": "back"})
    async with open_cache(cpu(16), disk, engine=engine) as kv:
        await kv.store(KEYS, engine.compute(KEYS))
        assert await words(kv, KEYS) == ["ready, in cpu, dirty"] * 4
        await kv.flush()
        await until_idle(kv)
        assert await words(kv, KEYS) == ["ready, in cpu, in disk"] * 4


async def test_what_is_not_used_often_enough_says_so() -> None:
    """For the tier that wants it more often."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk")
    disk.settings = disk.settings.model_copy(update={"admit_after": 3})
    async with open_cache(cpu(4), disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        assert await words(kv, KEYS) == ["ready, in cpu"] * 4
        assert {fate for fate, _ in inside(kv).fates.of(kv.namespace().names(KEYS))} == {Fate.UNADMITTED}
        await keep(kv, engine, prompt(4, seed=1))
        assert await words(kv, KEYS) == ["evicted (cpu)"] * 4
