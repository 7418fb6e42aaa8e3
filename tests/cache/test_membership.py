"""Whether each block is there, for engines that ask key by key, from a thread, and take "later" for an answer."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.backends import ScriptedBackend
from tests.support.caches import inside, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, prompt
from tiered_kv import BlockKeys, BlockState, ClosedError, Outcome, TieredKV
from tiered_kv.testing import ScriptedDevice

MISS, ASKING, PENDING, HIT = BlockState.MISS, BlockState.ASKING, BlockState.PENDING, BlockState.HIT
CPU = {"medium": "cpu", "capacity": 64 * PAYLOAD_BYTES}
KEYS = prompt(8)


async def ask(kv: TieredKV, keys: BlockKeys = KEYS) -> Sequence[int]:
    """Ask once, from another thread."""
    states: list[int] = (await asyncio.to_thread(kv.membership, keys)).tolist()
    return states


async def answered(kv: TieredKV, keys: BlockKeys = KEYS) -> Sequence[int]:
    """Ask until there is an answer of every tier."""
    await until(lambda: ASKING not in kv.membership(keys))
    return await ask(kv, keys)


async def test_owned_tiers_answer_at_once_also_behind_a_hole(tmp_path: Path) -> None:
    """In memory or on disk, and nothing is asked of anyone."""
    engine = Engine()
    nvme = {"medium": "nvme", "path": tmp_path, "capacity": "4MiB"}
    async with open_cache(CPU, nvme, engine=engine) as kv:
        await keep(kv, engine, KEYS[:3])
        await keep(kv, engine, KEYS[5:6])
        await kv.evict(KEYS[:1], tier="cpu")
        assert await ask(kv) == [HIT] * 3 + [MISS] * 2 + [HIT] + [MISS] * 2
        assert await ask(kv, KEYS[:0]) == []
        await until_idle(kv)
    with pytest.raises(ClosedError):
        kv.membership(KEYS)


async def test_who_wants_a_prefix_is_answered_by_a_first_block_that_is_nowhere(tmp_path: Path) -> None:
    """What is behind it is not looked for; else all is as without."""
    engine = Engine()
    nvme = {"medium": "nvme", "path": tmp_path, "capacity": "4MiB"}
    async with open_cache(CPU, nvme, engine=engine) as kv:
        await keep(kv, engine, KEYS[:3])
        await keep(kv, engine, KEYS[5:6])
        assert kv.membership(KEYS, prefix_only=True).tolist() == [HIT] * 3 + [MISS] * 2 + [HIT] + [MISS] * 2
        await kv.evict(KEYS[:1], tier="cpu")
        assert kv.membership(KEYS, prefix_only=True)[:3].tolist() == [HIT] * 3
        assert kv.membership(KEYS, tier="cpu", prefix_only=True).tolist() == [MISS] * 8
        assert kv.membership(KEYS[4:], prefix_only=True).tolist() == [MISS] * 4
        assert kv.membership(KEYS[:0], prefix_only=True).tolist() == []


async def test_who_wants_a_prefix_has_a_shared_tier_asked_no_further() -> None:
    """Its end is known by one call; nobody asks for what is behind it, as long as that is believed."""
    backend, engine = ScriptedBackend(), Engine()
    async with open_cache(CPU, backend, engine=engine) as kv:
        await keep(kv, engine, KEYS[:3])
        await keep(kv, engine, KEYS[5:7])
        await kv.evict(KEYS[1:6], tier="cpu")
        backend.on_lookup.num_calls = 0
        await until(lambda: ASKING not in kv.membership(KEYS, prefix_only=True))
        assert kv.membership(KEYS, prefix_only=True).tolist() == [HIT] * 3 + [MISS] * 3 + [HIT, MISS]
        assert backend.on_lookup.num_calls == 1
        assert await answered(kv) == [HIT] * 3 + [MISS] * 2 + [HIT] * 2 + [MISS]
        await until_idle(kv)


async def test_of_two_shared_tiers_each_may_have_what_the_other_lacks() -> None:
    """What is behind the end of one's prefix goes on in the other."""
    first, second, engine = ScriptedBackend(), ScriptedBackend(), Engine()
    first.settings = first.settings.model_copy(update={"name": "first"})
    second.settings = second.settings.model_copy(update={"name": "second"})
    async with open_cache(CPU, first, second, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS, tier="cpu")
        await kv.evict(KEYS[:2], tier="second")
        await kv.evict(KEYS[2:], tier="first")
        await until(lambda: ASKING not in kv.membership(KEYS, prefix_only=True))
        assert kv.membership(KEYS, prefix_only=True).tolist() == [HIT] * 8
        await until_idle(kv)


async def test_what_is_being_stored_is_pending() -> None:
    """It is no hit before its last byte is in place."""
    device, engine = ScriptedDevice(), Engine()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        storing = kv.start_store(KEYS[:2], engine.compute(KEYS[:2]))
        await until(lambda: device.pending > 0)
        assert await ask(kv) == [PENDING] * 2 + [MISS] * 6
        await until(lambda: storing.done, on_wait=device.run_all)
        assert await ask(kv) == [HIT] * 2 + [MISS] * 6
        await until_idle(kv, on_wait=device.run_all)


async def test_a_shared_tier_is_asked_in_the_background_once() -> None:
    """Whoever asks meanwhile is told that it is being asked; then the answer is there, holes and all."""
    engine, backend = Engine(), ScriptedBackend()
    async with open_cache(backend, engine=engine) as kv:
        await keep(kv, engine, KEYS[:3])
        await keep(kv, engine, KEYS[5:6])
        backend.on_lookup.hold()
        calls = backend.on_lookup.num_calls
        for _ in range(3):
            assert await ask(kv) == [ASKING] * 8
        await until(lambda: backend.on_lookup.num_held > 0)
        assert backend.on_lookup.num_calls == calls + 1
        backend.on_lookup.release()
        assert await answered(kv) == [HIT] * 3 + [MISS] * 2 + [HIT] + [MISS] * 2
        assert backend.on_lookup.num_calls == calls + 2  # for the prefix, and for what is behind its end
        await until_idle(kv)


async def test_only_what_is_nowhere_above_is_asked_for() -> None:
    """The CPU tier's blocks are no question."""
    engine, backend = Engine(), ScriptedBackend()
    async with open_cache(CPU, backend, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        asked = backend.on_lookup.num_blocks
        await kv.evict(KEYS[6:], tier="cpu")
        assert await answered(kv) == [HIT] * 8
        assert backend.on_lookup.num_blocks == asked + 2
        await until_idle(kv)


async def test_an_answer_gives_way_to_what_happens_here() -> None:
    """A store, an eviction and a read that found nothing are known at once; nothing waits for an answer to grow old."""
    engine, backend = Engine(), ScriptedBackend()
    async with open_cache(backend, engine=engine) as kv:
        assert await answered(kv) == [MISS] * 8
        await keep(kv, engine, KEYS)
        assert await answered(kv) == [HIT] * 8
        await kv.evict(KEYS[4:])
        assert HIT not in await ask(kv, KEYS[4:])
        assert await answered(kv) == [HIT] * 4 + [MISS] * 4
        await backend.delete(backend.keys()[2:4])  # others evict as well
        assert (await kv.load(KEYS[2:4], engine.compute(KEYS[2:4]))).num_blocks == 0
        assert await answered(kv) == [HIT] * 2 + [MISS] * 6
        await until_idle(kv)


async def test_what_is_being_deleted_is_not_asked_for() -> None:
    """A medium that is asked meanwhile may answer as of before, when the deletion is long done."""
    engine, backend = Engine(), ScriptedBackend()
    async with open_cache(backend, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        backend.on_delete.hold()
        evicting = asyncio.ensure_future(kv.evict(KEYS))
        await until(lambda: backend.on_delete.num_held > 0)
        backend.on_lookup.hold()
        backend.on_lookup.change_next(lambda outcomes: [Outcome.HIT] * len(outcomes))
        await until(lambda: ASKING not in kv.membership(KEYS) or backend.on_lookup.num_held > 0)
        backend.on_delete.release()
        await evicting
        backend.on_lookup.calm()
        assert await answered(kv) == [MISS] * 8
        await until_idle(kv)


async def test_an_eviction_overtakes_a_question() -> None:
    """What a medium had said before is no hit."""
    engine, backend = Engine(), ScriptedBackend()
    async with open_cache(backend, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        backend.on_lookup.hold()
        await ask(kv)
        await until(lambda: backend.on_lookup.num_held > 0)
        backend.on_delete.hold()
        evicting = asyncio.create_task(kv.evict(KEYS[3:]))
        await until(lambda: backend.on_delete.num_held > 0)
        backend.on_lookup.release()
        assert await answered(kv) == [HIT] * 3 + [MISS] * 5
        backend.on_delete.release()
        await evicting
        await until_idle(kv)


async def test_a_tier_that_fails_has_nothing() -> None:
    """Errors and answers that cannot be are a miss, and so is all in a tier that is bypassed: nobody waits for good."""
    engine, backend = Engine(), ScriptedBackend()
    async with open_cache(backend, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        tier = inside(kv).chains[0].shared[0]
        for _ in range(3):
            backend.on_lookup.fail_next(OSError("gone"))
            backend.on_lookup.fail_next(OSError("gone"))
            assert await answered(kv) == [MISS] * 8
            backend.on_lookup.calm()
            tier.answers.forget(inside(kv).batch(KEYS)[1].names)
        assert tier.health.is_bypassed
        assert await ask(kv) == [MISS] * 8
        cost = kv.lookup_nowait(KEYS).costs[backend.settings.name]
        assert (cost.answer_s, cost.found_part) == (0.0, 0.0)  # which needs no question
        await until_idle(kv)


async def test_a_lookup_says_what_it_costs_to_ask() -> None:
    """By the last answers, and one that has not come; a tier that this cache owns need not be asked."""
    engine, backend = Engine(), ScriptedBackend()
    async with open_cache(CPU, backend, engine=engine) as kv:
        assert "cpu" not in kv.lookup_nowait(KEYS).costs
        before = kv.lookup_nowait(KEYS).costs[backend.settings.name]
        assert (before.answer_s, before.found_part) == (0.0, 1.0)
        backend.on_lookup.hold()
        await ask(kv)
        await until(lambda: backend.on_lookup.num_held > 0)
        waiting = kv.lookup_nowait(KEYS).costs[backend.settings.name]
        assert kv.lookup_nowait(KEYS).costs[backend.settings.name].answer_s > waiting.answer_s > 0.0
        backend.on_lookup.release()
        assert await answered(kv) == [MISS] * 8
        assert kv.lookup_nowait(KEYS).costs[backend.settings.name].found_part == pytest.approx(0.8)
        await until_idle(kv)


async def test_a_store_overtakes_a_question() -> None:
    """What a medium lacked when it was asked, and has been given since, is not said to be absent."""
    engine, backend = Engine(), ScriptedBackend()
    async with open_cache(CPU, backend, engine=engine) as kv:
        backend.on_lookup.hold()
        backend.on_lookup.change_next(lambda outcomes: [Outcome.MISS] * len(outcomes))
        await ask(kv)
        await until(lambda: backend.on_lookup.num_held > 0)
        await (await kv.store(KEYS, engine.compute(KEYS))).settled()
        await kv.evict(KEYS, tier="cpu")
        backend.on_lookup.release()
        assert await answered(kv) == [HIT] * 8
        await until_idle(kv)
