"""What shared tiers are asked before they are read: how long that waits, and what is said where no answer comes."""

import asyncio
from collections.abc import Sequence

import pytest

from tests.support.backends import ScriptedBackend
from tests.support.caches import Recorder, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, SMALL_LIMITS, Engine, contents, prompt
from tests.support.virtual import CountingDevice, pools_of, run, watch
from tiered_kv import BlockKey, GPULoadStoreSpec, Outcome, TieredKV
from tiered_kv.values.errors import Reason, TierFault
from tiered_kv.values.events import TierStalled
from tiered_kv.values.results import LoadResult

CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}
KEYS = prompt(4)
INTO = GPULoadStoreSpec(range(4))
PATIENT = SMALL_LIMITS.model_copy(update={"load_timeout_s": 900.0})


class SlowBackend(ScriptedBackend):
    """Answers two questions at a time, each after ``slow_s``."""

    slow_s = 0.0

    def __init__(self, *, timeout_s: float) -> None:
        super().__init__(timeout_s=timeout_s)
        self._two = asyncio.Semaphore(2)

    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Wait for one of the two."""
        async with self._two:
            await asyncio.sleep(self.slow_s)
            return await super().lookup(keys)


def test_waiting_for_a_turn_is_not_the_mediums_time() -> None:
    """150 loads of as many prompts are whole though the last question is asked long after the tier's time limit."""

    async def main() -> None:
        engine, medium, device, emit = Engine(), SlowBackend(timeout_s=3.0), CountingDevice(), Recorder()
        prompts = [prompt(1, seed=seed) for seed in range(150)]
        async with open_cache(medium, engine=engine, limits=PATIENT, device=device, emit=emit) as kv:
            watch(device, pools_of(kv))
            for keys in prompts:
                await keep(kv, engine, keys)
            medium.slow_s = 0.2
            started = asyncio.get_running_loop().time()
            loads = [kv.start_load(keys, GPULoadStoreSpec([0])) for keys in prompts]
            assert [((await load).num_blocks, (await load).faults) for load in loads] == [(1, ())] * 150
            assert asyncio.get_running_loop().time() - started == pytest.approx(15.0)
            assert (kv.stats().missed_because, emit.of(TierStalled)) == ({}, [])
            await until_idle(kv)

    run(main)


def test_whose_deadline_passes_waits_for_no_turn_and_asks_nothing() -> None:
    """It says so, and a load that comes then does not wait behind the questions that nobody asks any more."""

    async def main() -> None:
        engine, medium, device = Engine(), SlowBackend(timeout_s=30.0), CountingDevice()
        prompts = [prompt(1, seed=1 + seed) for seed in range(100)]
        async with open_cache(medium, engine=engine, limits=PATIENT, device=device) as kv:
            watch(device, pools_of(kv))
            await keep(kv, engine, KEYS)
            asked, medium.slow_s = medium.on_lookup.num_calls, 1.0
            loads = [kv.start_load(keys, GPULoadStoreSpec([0]), deadline_s=0.5) for keys in prompts]
            assert {fault.reason for load in loads for fault in (await load).faults} == {"deadline"}
            assert (await kv.load(KEYS, INTO)).num_blocks == 4
            assert medium.on_lookup.num_calls - asked < 25  # those that had their turn before, and the last
            await until_idle(kv)

    run(main)


async def _load(kv: TieredKV, engine: Engine) -> LoadResult:
    loaded = await kv.load(KEYS, INTO)
    assert engine.read(range(loaded.num_blocks)) == contents(KEYS[: loaded.num_blocks])
    return loaded


@pytest.mark.parametrize("gaps", [False, True])
async def test_a_load_names_the_tier_that_did_not_answer_in_time(gaps: bool) -> None:  # noqa: FBT001 - a parameter
    """Else it would look as if the blocks had never been stored."""
    engine, medium = Engine(), ScriptedBackend(timeout_s=0.05)
    async with open_cache(CPU, medium, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS[1:], tier="cpu")
        medium.on_lookup.hold()
        loaded = await kv.load(KEYS, INTO, gaps=gaps)
        (fault,) = loaded.faults
        assert (loaded.num_blocks, fault) == (1, TierFault("keyed", Reason.TIMEOUT, 3, fault.detail))
        assert "0.05 s" in fault.detail
        assert kv.stats().missed_because == {"timeout": 3}
        medium.on_lookup.release()
        await until_idle(kv)


async def test_a_load_names_the_tier_whose_answer_is_an_error() -> None:
    """In the words of the medium."""
    engine, medium = Engine(), ScriptedBackend()
    async with open_cache(medium, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        medium.on_lookup.fail_next(OSError("no route"))
        loaded = await _load(kv, engine)
        (fault,) = loaded.faults
        assert (loaded.num_blocks, fault) == (0, TierFault("keyed", Reason.UNREADABLE, 4, "OSError: no route"))
        assert (await _load(kv, engine)).faults == ()


async def test_a_load_names_the_tier_that_was_bypassed_before_its_turn() -> None:
    """It was not asked."""
    engine, medium = Engine(), ScriptedBackend(timeout_s=0.05)
    async with open_cache(medium, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        medium.on_lookup.hold()
        finding = [asyncio.create_task(kv.lookup(prompt(1, seed=1 + seed))) for seed in range(20)]
        await until(lambda: medium.on_lookup.num_held >= 16)
        assert [(fault.tier, fault.reason) for fault in (await _load(kv, engine)).faults] == [("keyed", "tier away")]
        await asyncio.wait(finding)
        medium.on_lookup.release()
        await until_idle(kv)


async def test_no_fault_is_named_where_another_tier_has_the_blocks() -> None:
    """What one tier did not say keeps nothing from being in place."""
    engine, silent, other = Engine(), ScriptedBackend(timeout_s=0.05), ScriptedBackend(name="other")
    async with open_cache(silent, other, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        silent.on_lookup.hold()
        loaded = await _load(kv, engine)
        assert (loaded.by_tier, loaded.faults) == ({"other": 4}, ())
        silent.on_lookup.release()
        await until_idle(kv)
