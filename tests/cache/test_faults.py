"""A tier that hangs, fails or lies shortens a prefix and is counted; nothing waits for it, nothing wrong is served."""

import asyncio
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from operator import attrgetter
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray
from typing_extensions import override

from tests.support.backends import Act, ScriptedBackend, ScriptedSlotBackend, only
from tests.support.caches import Recorder, inside, keep, open_cache, until, until_idle
from tests.support.engine import MODEL, PAYLOAD_BYTES, Engine, contents, prompt, small_layout
from tests.support.virtual import CountingDevice, pools_of, run, watch
from tiered_kv import (
    BackendContext,
    BackendUnavailableError,
    Block,
    BlockKey,
    CacheLimits,
    ConfigurationError,
    GPULoadStoreSpec,
    Outcome,
    TieredKV,
)
from tiered_kv.media.backend import Recovered, Workers
from tiered_kv.values.errors import Reason, TierFault
from tiered_kv.values.events import (
    BlocksCorrupted,
    BlocksLoaded,
    CacheClosed,
    TierFailed,
    TierResumed,
    TierStalled,
    TierTripped,
)
from tiered_kv.values.keys import Names
from tiered_kv.values.results import TierStore

KEYS = prompt(9)
INTO = GPULoadStoreSpec(range(9))
SOON_S = 0.02
"""A timeout that is expected to pass."""
CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}
Scripted = ScriptedBackend | ScriptedSlotBackend

both_kinds = pytest.mark.parametrize("kind", [ScriptedBackend, ScriptedSlotBackend])


def _limits(**values: float) -> CacheLimits:
    return CacheLimits.model_validate({"window": 4 * PAYLOAD_BYTES, "bounce": 16 * PAYLOAD_BYTES, **values})


async def _load(kv: TieredKV, engine: Engine, *, deadline_s: float | None = None) -> tuple[int, tuple[TierFault, ...]]:
    """Load all keys, check that the prefix is right, and return its length and the faults."""
    engine.poison()
    loaded = await kv.load(KEYS, INTO, deadline_s=deadline_s)
    assert engine.read(INTO[: loaded.num_blocks]) == contents(KEYS[: loaded.num_blocks])
    return loaded.num_blocks, loaded.faults


def _in(tiers: tuple[TierStore, ...], tier: str) -> TierStore:
    return next(each for each in tiers if each.tier == tier)


# Calls that do not return.


@both_kinds
async def test_a_read_that_hangs_ends_the_load_in_time(kind: type[Scripted]) -> None:
    """The load answers with the prefix that is in place; until the call returns its tier is bypassed, then in use."""
    engine, emit, slow = Engine(), Recorder(), kind(name="slow", timeout_s=SOON_S)
    async with open_cache(CPU, slow, engine=engine, emit=emit) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS[2:], tier="cpu")
        slow.on_read.hold()
        num_blocks, faults = await _load(kv, engine)
        assert num_blocks == 2
        assert ("slow", "timeout") in [(fault.tier, fault.reason) for fault in faults]
        assert kv.stats()["slow"].is_bypassed
        assert emit.of(TierStalled)
        num_calls = slow.on_read.num_calls
        assert await _load(kv, engine) == (2, (TierFault("slow", Reason.TIER_AWAY, 7),))
        assert (await kv.lookup(KEYS)).num_blocks == 2
        assert slow.on_read.num_calls == num_calls
        slow.on_read.release()
        await until_idle(kv)
        assert not kv.stats()["slow"].is_bypassed
        assert len(emit.of(TierResumed)) == 1
        assert await _load(kv, engine) == (9, ())


@both_kinds
@pytest.mark.parametrize("gaps", [False, True])
async def test_a_tier_that_is_not_asked_is_named_once(kind: type[Scripted], gaps: bool) -> None:  # noqa: FBT001 - a case
    """By the result, the event, the metric and the statistics of each load that lacks what the tier may have."""
    engine, emit, away = Engine(), Recorder(), kind(name="away", timeout_s=SOON_S, required=False)
    away.on_open.hold()
    async with open_cache(CPU, away, engine=engine, emit=emit) as kv:
        await keep(kv, engine, KEYS[:2])
        loaded = await kv.load(KEYS, INTO, gaps=gaps)
        assert (loaded.num_blocks, loaded.faults) == (2, (TierFault("away", Reason.TIER_AWAY, 7),))
        assert emit.of(BlocksLoaded)[-1].faults == ("away: tier away",)
        assert inside(kv).fates.load_faults == {"away: tier away": 1}
        assert kv.stats().missed_because == {Reason.TIER_AWAY: 7}
        last = await kv.load(KEYS[8:], INTO[8:], gaps=gaps)
        assert (last.num_blocks, last.faults) == (0, (TierFault("away", Reason.TIER_AWAY, 1),))
        away.on_open.release()


async def test_a_tier_that_is_not_missed_is_not_named() -> None:
    """While it is bypassed: neither where others have all blocks, nor for what its books say that it lacks."""
    engine, slow = Engine(), ScriptedSlotBackend(name="slow", timeout_s=0.2)
    other = ScriptedBackend(name="other")
    async with open_cache(CPU, slow, other, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS, tier="cpu")
        slow.on_read.hold()
        while not slow.on_read.num_held:
            await _load(kv, engine)
        await kv.evict(KEYS, tier="cpu")
        assert kv.stats()["slow"].is_bypassed
        assert await _load(kv, engine) == (9, ())
        never_stored = prompt(9, seed=1)
        assert (await kv.load(never_stored, INTO)).faults == ()
        slow.on_read.release()
        await until_idle(kv)


@both_kinds
async def test_slots_of_a_hung_read_are_nobody_elses(kind: type[Scripted]) -> None:
    """Whatever is stored while a read hangs lies in other slots: when the read fills its own at last, all is right."""
    engine, slow = Engine(), kind(name="slow", timeout_s=SOON_S)
    async with open_cache(CPU, slow, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS, tier="cpu")
        slow.on_read.hold()
        assert (await _load(kv, engine))[0] == 0
        num_slots = kv.stats()["cpu"].free
        assert num_slots < 16
        others = prompt(32, seed=1)  # twice what the CPU tier holds
        await kv.store(others, engine.compute(others))
        await until(lambda: kv.stats()["cpu"].ready == num_slots)
        slow.on_read.release()
        await until_idle(kv)
        for tail in range(len(others)):
            loaded = await kv.load(others[tail:], GPULoadStoreSpec(range(len(others) - tail)))
            n = loaded.num_blocks
            assert engine.read(range(n)) == contents(others[tail : tail + n])
        assert await _load(kv, engine) == (9, ())


@both_kinds
async def test_other_tiers_serve_while_one_hangs(kind: type[Scripted]) -> None:
    """What a tier below has too is loaded from there as soon as the hanging one is known to hang."""
    engine, slow, other = Engine(), kind(name="slow", timeout_s=SOON_S), ScriptedBackend(name="other")
    async with open_cache(slow, other, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        slow.on_read.hold()
        assert (await _load(kv, engine))[0] == 0
        assert await _load(kv, engine) == (9, ())
        assert other.on_read.num_blocks == 9
        slow.on_read.release()
        await until_idle(kv)


@both_kinds
async def test_a_hung_tier_leaves_slots_to_the_others(kind: type[Scripted]) -> None:
    """However few there are, with as many bounce slots as a window has: half of them are for the other tiers."""
    engine, slow, other = Engine(), kind(name="slow", timeout_s=SOON_S), ScriptedBackend(name="other")
    limits = CacheLimits(window=16 * PAYLOAD_BYTES, bounce=16 * PAYLOAD_BYTES)
    prompts = [prompt(9, seed=seed) for seed in range(4)]
    async with open_cache(slow, other, engine=engine, limits=limits) as kv:
        for keys in prompts:
            await keep(kv, engine, keys)
        slow.on_read.hold()
        for handle in [
            kv.start_load(keys, GPULoadStoreSpec(range(at, at + 9)))
            for at, keys in zip((0, 9, 18, 27), prompts, strict=True)
        ]:
            await handle
        await until(lambda: kv.stats().bounce_free >= 8)  # what the other is read for already arrives
        for keys in prompts:
            assert (await kv.load(keys, INTO)).num_blocks == 9
            assert engine.read(INTO) == contents(keys)
        slow.on_read.release()
        await until_idle(kv)


@both_kinds
def test_a_deadline_ends_a_load_before_the_tiers_own(kind: type[Scripted]) -> None:
    """A load's deadline is its own: the tier is not blamed, and what arrives later is kept for whoever asks next."""

    async def main() -> None:
        engine, slow, device = Engine(), kind(name="slow"), CountingDevice()
        async with open_cache(CPU, slow, engine=engine, device=device) as kv:
            watch(device, pools_of(kv))  # no time passes while memory is copied, however slow the machine is
            await keep(kv, engine, KEYS)
            await kv.evict(KEYS[3:], tier="cpu")
            slow.on_read.hold()
            started = asyncio.get_running_loop().time()
            num_blocks, faults = await _load(kv, engine, deadline_s=SOON_S)
            assert asyncio.get_running_loop().time() - started == pytest.approx(SOON_S)
            assert num_blocks == 3
            assert {fault.reason for fault in faults} == {"deadline"}
            assert not kv.stats()["slow"].is_bypassed
            slow.on_read.release()
            await until_idle(kv)
            assert await _load(kv, engine) == (9, ())

    run(main)


@both_kinds
async def test_a_write_that_hangs_is_given_up_and_its_slots_kept(kind: type[Scripted]) -> None:
    """The store settles: failed there, written elsewhere. The blocks stay where they are until the call returns."""
    engine, slow, other = Engine(), kind(name="slow", timeout_s=SOON_S), ScriptedBackend(name="other")
    async with open_cache(CPU, slow, other, engine=engine) as kv:
        slow.on_write.hold()
        stored = await kv.store(KEYS, engine.compute(KEYS))
        assert stored.num_stored == 9
        tiers = await stored.settled()
        slow_one = _in(tiers, "slow")
        assert slow_one == TierStore("slow", failed=slow_one.failed, dropped=9 - slow_one.failed)
        assert _in(tiers, "other") == TierStore("other", written=9)
        assert kv.stats()["slow"].is_bypassed
        assert kv.stats()["cpu"].leased == slow_one.failed > 0
        assert await _load(kv, engine) == (9, ())
        slow.on_write.release()
        await until_idle(kv)
        assert not kv.stats()["slow"].is_bypassed


@both_kinds
async def test_a_tier_that_hangs_is_given_no_write_whose_records_are_made_by_then(kind: type[Scripted]) -> None:
    """It goes without these blocks, as without those that wait in its line."""
    slow, engine, may_go_on = kind(name="slow", timeout_s=0.5), Engine(), threading.Event()
    async with open_cache(CPU, slow, engine=engine) as kv:
        slow.on_write.hold()
        hanging = await kv.store(KEYS[:1], engine.compute(KEYS[:1]))
        await until(lambda: slow.on_write.num_held == 1)
        making = inside(kv).chains[0].storage[0].records.threads
        busy = [making.run(may_go_on.wait) for _ in range(16)]
        stored = await kv.store(KEYS[1:2], engine.compute(KEYS[1:2]))
        assert (kv.stats()["slow"].num_calls, kv.stats()["slow"].num_waiting) == (2, 0)
        await until(lambda: kv.stats()["slow"].is_bypassed)
        may_go_on.set()
        assert _in(await stored.settled(), "slow") == TierStore("slow", dropped=1)
        assert kv.stats()["slow"].dropped_because == {Reason.TIER_AWAY: 1}
        assert slow.on_write.num_calls == 1
        slow.on_write.release()
        await hanging.settled()
        await asyncio.gather(*busy)
        await until_idle(kv)


async def test_a_lookup_that_hangs_answers_without_the_tier() -> None:
    """`lookup` and `load` answer with what the other tiers have, and with everything once the call has returned."""
    engine, slow = Engine(), ScriptedBackend(name="slow", timeout_s=SOON_S)
    async with open_cache(CPU, slow, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS[5:], tier="cpu")
        slow.on_lookup.hold()
        assert (await kv.lookup(KEYS)).num_blocks == 5
        assert await _load(kv, engine) == (5, (TierFault("slow", Reason.TIER_AWAY, 4),))
        slow.on_lookup.release()
        await until_idle(kv)
        assert (await kv.lookup(KEYS)).num_blocks == 9
        assert await _load(kv, engine) == (9, ())


@both_kinds
async def test_evict_and_clear_end_though_a_tier_hangs(kind: type[Scripted]) -> None:
    """What is evicted is unfindable in the tiers that the cache owns at once, and the call ends in time."""
    engine, slow = Engine(), kind(name="slow", timeout_s=SOON_S)
    async with open_cache(CPU, slow, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        acts = [slow.on_delete] if isinstance(slow, ScriptedBackend) else [slow.on_forget, slow.on_checkpoint]
        for act in acts:
            act.hold()
        await kv.evict(KEYS[4:])
        assert (await kv.lookup(KEYS)).num_blocks == 4
        await kv.clear()
        assert (await kv.lookup(KEYS)).num_blocks == (4 if isinstance(slow, ScriptedBackend) else 0)
        for act in acts:
            act.release()
        await until_idle(kv)


class _StuckInAThread(ScriptedSlotBackend):
    """Reads in a worker thread that is stuck until ``free`` is set."""

    def __init__(self) -> None:
        super().__init__(name="stuck", timeout_s=SOON_S)
        self.free, self.ended = threading.Event(), threading.Event()
        self._workers: Workers

    async def open(self, context: BackendContext) -> list[Recovered]:
        self._workers = context.workers(1)
        return await super().open(context)

    async def read(self, group: int, slots: NDArray[np.int64], into: Sequence[Block]) -> list[Outcome]:
        return await self._workers.run(self._read_late, slots, into)

    def _read_late(self, slots: NDArray[np.int64], into: Sequence[Block]) -> list[Outcome]:
        self.free.wait()
        for slot, block in zip(slots.tolist(), into, strict=True):
            block.fill(self.records[0, slot][1])
        self.ended.set()
        return [Outcome.HIT] * len(into)


async def test_close_leaves_a_stuck_thread_behind_and_says_so() -> None:
    """Closing ends in time though a thread is stuck in a read; when it writes at last, its memory is still there."""
    engine, emit, stuck = Engine(), Recorder(), _StuckInAThread()
    async with open_cache(CPU, stuck, engine=engine, emit=emit, limits=_limits(close_timeout_s=SOON_S)) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS, tier="cpu")
        assert (await _load(kv, engine))[0] == 0
        engine.poison()
    assert emit.of(CacheClosed)[0].abandoned > 0
    stuck.free.set()
    await until(stuck.ended.is_set)
    assert engine.is_poisoned()


@both_kinds
async def test_close_ends_though_every_call_hangs(kind: type[Scripted]) -> None:
    """Reads, writes and the closing of the backend itself are given up; whoever waits gets an answer, not an error."""
    engine, emit, slow = Engine(), Recorder(), kind(name="slow", timeout_s=10.0)
    async with open_cache(CPU, slow, engine=engine, emit=emit, limits=_limits(close_timeout_s=SOON_S)) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS, tier="cpu")
        for act in (slow.on_read, slow.on_write, slow.on_close):
            act.hold()
        others = prompt(4, seed=1)
        stored = await kv.store(others, engine.compute(others, range(20, 24)))
        settled = asyncio.create_task(stored.settled())
        loading = asyncio.create_task(kv.load(KEYS, INTO))
        await until(lambda: slow.on_read.num_held > 0 and slow.on_write.num_held > 0)
    assert emit.of(CacheClosed)[0].abandoned > 0
    assert (await loading).num_blocks == 0
    assert _in(await settled, "slow") == TierStore("slow", failed=4)


# Calls that fail or lie.


class SpeechlessError(Exception):
    """Fails to say what it is, as one does that a client library has made without its arguments."""

    def __str__(self) -> str:
        raise TypeError("not enough arguments for format string")


@both_kinds
@pytest.mark.parametrize(
    "error", [BackendUnavailableError("away"), RuntimeError("a bug"), OSError(5, "EIO"), SpeechlessError()]
)
async def test_a_read_that_raises(kind: type[Scripted], error: Exception) -> None:
    """It is a fault of its blocks alone: the windows before are served, it is named and counted, a retry works."""
    engine, emit, flaky = Engine(), Recorder(), kind(name="flaky")
    async with open_cache(flaky, engine=engine, emit=emit) as kv:
        await keep(kv, engine, KEYS)
        flaky.on_read.fail_next(error)
        num_blocks, faults = await _load(kv, engine)
        assert num_blocks == 0
        assert faults[0] == TierFault("flaky", Reason.UNREADABLE, 4, emit.of(TierFailed)[0].error)
        assert kv.stats()["flaky"].failed == 4
        assert [event.doing for event in emit.of(TierFailed)] == ["read"]
        assert type(error).__name__ in emit.of(TierFailed)[0].error
        await until_idle(kv)
        assert await _load(kv, engine) == (9, ())


def _truth(outcomes: list[Outcome]) -> list[Outcome]:
    return outcomes


@both_kinds
@pytest.mark.parametrize("k", range(9))
@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CORRUPT, Outcome.MISS])
async def test_a_block_that_is_not_read(kind: type[Scripted], outcome: Outcome, k: int) -> None:
    """The prefix ends right before the block; it can be had again: by a retry, or after the next store."""
    engine, emit, flaky = Engine(), Recorder(), kind(name="flaky")
    async with open_cache(flaky, engine=engine, emit=emit) as kv:
        await keep(kv, engine, KEYS)
        for _ in range(k // 4):
            flaky.on_read.change_next(_truth)
        flaky.on_read.change_next(only(k % 4, outcome))
        flaky.last_error = "node 1 is away"
        num_blocks, faults = await _load(kv, engine)
        assert num_blocks == k
        reason = Reason.GONE if outcome is Outcome.MISS else Reason.UNREADABLE  # a tier that only evicts is not blamed
        detail = flaky.last_error if outcome is Outcome.FAILED else ""
        assert faults == (TierFault("flaky", reason, 1, detail),)
        counts = kv.stats()["flaky"]
        assert counts.corrupt == (outcome is Outcome.CORRUPT)
        assert counts.failed == (outcome is Outcome.FAILED)
        assert [event.doing for event in emit.of(TierFailed)] == ["read"] * counts.failed
        await until_idle(kv)
        is_gone = outcome is Outcome.CORRUPT or (outcome is Outcome.MISS and kind is ScriptedSlotBackend)
        assert await _load(kv, engine) == (k if is_gone else 9, ())
        await keep(kv, engine, KEYS)
        assert await _load(kv, engine) == (9, ())


@both_kinds
@pytest.mark.parametrize("k", [0, 5, 8])
async def test_a_flipped_bit_is_a_miss_and_is_repaired(kind: type[Scripted], k: int) -> None:
    """A broken record is never served: it is deleted, counted once, and written anew by the next store."""
    engine, emit, medium = Engine(), Recorder(), kind(name="medium")
    async with open_cache(CPU, medium, engine=engine, emit=emit) as kv:
        for window in (KEYS[:8], KEYS[8:]):  # of one store either may be written first
            await keep(kv, engine, window)
        await kv.evict(KEYS, tier="cpu")
        medium.flip_byte(k)
        assert (await _load(kv, engine))[0] == k
        await until_idle(kv)
        path = kv.namespace().keys(KEYS)[k].path
        assert emit.of(BlocksCorrupted) == [BlocksCorrupted("medium", 1, (path,))]
        assert path.endswith(KEYS[k].hex())
        assert kv.stats()["medium"].corrupt == 1
        assert (await kv.lookup(KEYS)).num_blocks == k
        stored = await kv.store(KEYS, engine.compute(KEYS))
        assert stored.num_stored == 1  # the others were promoted
        await stored.settled()
        await kv.evict(KEYS, tier="cpu")
        assert await _load(kv, engine) == (9, ())


@both_kinds
@pytest.mark.parametrize("num_answers", [0, 3, 5])
async def test_a_wrong_number_of_outcomes_is_no_outcome(kind: type[Scripted], num_answers: int) -> None:
    """Whoever answers for too few or too many blocks is believed for none of them, in reads and in writes."""
    engine, emit, flaky = Engine(), Recorder(), kind(name="flaky")

    def lie(outcomes: list[Outcome]) -> list[Outcome]:
        return (outcomes + outcomes)[:num_answers]

    async with open_cache(CPU, flaky, engine=engine, emit=emit) as kv:
        flaky.on_write.change_next(lie)
        stored = await kv.store(KEYS[:4], engine.compute(KEYS[:4]))
        assert _in(await stored.settled(), "flaky") == TierStore("flaky", failed=4)
        await until_idle(kv)
        await kv.evict(KEYS)
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS, tier="cpu")
        flaky.on_read.change_next(lie)
        assert (await _load(kv, engine))[0] == 0
        assert [event.doing for event in emit.of(TierFailed)] == ["write", "read"]
        await until_idle(kv)
        assert await _load(kv, engine) == (9, ())


@both_kinds
async def test_a_deletion_in_the_way_of_a_probe_does_not_keep_a_tier_out(kind: type[Scripted]) -> None:
    """Behind reads that failed, a deletion may be the first call that goes well: then the tier is in use again."""
    engine, flaky = Engine(), kind(name="flaky", timeout_s=0.05)
    async with open_cache(CPU, flaky, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS, tier="cpu")
        flaky.on_read.hold()
        for _ in range(3):  # one for each window
            flaky.on_read.fail_next(BackendUnavailableError("gone"))
        await _load(kv, engine)
        flaky.on_read.release()
        await until_idle(kv)
        await kv.evict(KEYS[8:])
        await until(lambda: not kv.stats()["flaky"].is_bypassed)


@both_kinds
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.REFUSED])
async def test_a_block_that_is_not_written(kind: type[Scripted], outcome: Outcome, k: int) -> None:
    """It is counted, the others are written, and it is not found there; what fails is told, too."""
    if kind is ScriptedSlotBackend and outcome is Outcome.REFUSED:
        outcome = Outcome.FAILED  # owned media refuse nothing
    engine, emit, flaky = Engine(), Recorder(), kind(name="flaky")
    async with open_cache(CPU, flaky, engine=engine, emit=emit) as kv:
        flaky.on_write.change_next(only(k, outcome))
        stored = await kv.store(KEYS[:4], engine.compute(KEYS[:4]))
        counts = {"failed": 1} if outcome is Outcome.FAILED else {"dropped": 1}
        assert await stored.settled() == (TierStore("cpu", written=4), TierStore("flaky", written=3, **counts))
        told = [TierFailed("flaky", "write", "a part of the medium did not answer", 1)]
        assert emit.of(TierFailed) == (told if outcome is Outcome.FAILED else [])
        await until_idle(kv)
        assert (await _load(kv, engine))[0] == 4
        if isinstance(flaky, ScriptedSlotBackend):
            await kv.evict(KEYS, tier="cpu")
            assert (await kv.lookup(KEYS)).num_blocks == k
            assert (await _load(kv, engine))[0] == k


class _Full(ScriptedSlotBackend):
    """Says why blocks failed."""

    def describe(self) -> dict[str, object]:
        """Say what a full disk says."""
        return {"last_error": "No space left on device"}


class _Busy(ScriptedBackend):
    """Has another call fail as soon as what a read says has been heard."""

    @override
    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        outcomes, loop = await super().read(keys, into), asyncio.get_running_loop()
        self.last_error = "node 1 is away"
        loop.call_soon(loop.call_soon, setattr, self, "last_error", "node 2 is full")
        return outcomes


async def test_why_a_read_fails_in_part_is_what_it_said_itself() -> None:
    """Not what another call says while the blocks that were read are verified."""
    engine, emit, busy = Engine(), Recorder(), _Busy(name="busy")
    async with open_cache(busy, engine=engine, emit=emit) as kv:
        await keep(kv, engine, KEYS)
        busy.on_read.change_next(only(2, Outcome.FAILED))
        assert (await kv.load(KEYS[:4], GPULoadStoreSpec(range(4)))).num_blocks == 2
        assert emit.of(TierFailed) == [TierFailed("busy", "read", "node 1 is away", 1)]


def test_why_every_block_of_every_call_fails_is_told_once_a_minute() -> None:
    """A full disk is named before the tier is bypassed for it, and not again with every call."""

    def fail(outcomes: list[Outcome]) -> list[Outcome]:
        return [Outcome.FAILED] * len(outcomes)

    async def main() -> None:
        engine, emit, full, device = Engine(), Recorder(), _Full(name="full"), CountingDevice()
        async with open_cache(CPU, full, engine=engine, emit=emit, device=device) as kv:
            watch(device, pools_of(kv))
            for seed, pause_s in enumerate([0, 0, 0, 61]):
                await asyncio.sleep(pause_s)
                full.on_write.change_next(fail)
                keys = prompt(4, seed=seed)
                settled = await (await kv.store(keys, engine.compute(keys))).settled()
                assert _in(settled, "full") == TierStore("full", failed=4)
            await until_idle(kv)
        told = [event for event in emit.events if isinstance(event, TierFailed | TierTripped)]
        why = "No space left on device"
        assert told == [
            TierFailed("full", "write", why, 4),
            TierTripped("full", "write"),
            TierFailed("full", "write", f"{why} (and 2 times since it was last told)", 4),
        ]

    run(main)


@both_kinds
async def test_a_write_that_raises(kind: type[Scripted]) -> None:
    """The store settles with its blocks failed in that tier alone; the next store of others goes there again."""
    engine, emit, flaky, other = Engine(), Recorder(), kind(name="flaky"), ScriptedBackend(name="other")
    async with open_cache(CPU, flaky, other, engine=engine, emit=emit) as kv:
        flaky.on_write.fail_next(OSError(28, "no space"))
        stored = await kv.store(KEYS[:4], engine.compute(KEYS[:4]))
        expected = TierStore("cpu", written=4), TierStore("flaky", failed=4), TierStore("other", written=4)
        assert await stored.settled() == expected
        assert [event.doing for event in emit.of(TierFailed)] == ["write"]
        assert kv.stats()["flaky"].failed == 4
        stored = await kv.store(KEYS[4:8], engine.compute(KEYS[4:8]))
        assert _in(await stored.settled(), "flaky") == TierStore("flaky", written=4)
        await until_idle(kv)


async def test_a_lookup_that_raises() -> None:
    """The tier has nothing for this call, and everything for the next one."""
    engine, emit, flaky = Engine(), Recorder(), ScriptedBackend(name="flaky")
    async with open_cache(CPU, flaky, engine=engine, emit=emit) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS[5:], tier="cpu")
        flaky.on_lookup.fail_next(BackendUnavailableError("away"))
        assert (await kv.lookup(KEYS)).num_blocks == 5
        flaky.on_lookup.fail_next(RuntimeError("a bug"))
        assert (await _load(kv, engine))[0] == 5
        assert [event.doing for event in emit.of(TierFailed)] == ["lookup", "lookup"]
        assert await _load(kv, engine) == (9, ())


async def test_a_lookup_that_fails_in_part() -> None:
    """What a part of a medium could not tell ends a prefix, and the load says so; what the others have is found."""
    engine, emit, parted = Engine(), Recorder(), ScriptedBackend(name="parted")
    async with open_cache(parted, engine=engine, emit=emit) as kv:
        await keep(kv, engine, KEYS)
        for hole in (0, 5):
            parted.on_lookup.change_next(only(hole, Outcome.FAILED))
            parted.last_error = f"node {hole} is away"
            num_blocks, faults = await _load(kv, engine)
            assert (num_blocks, faults) == (
                hole,
                (TierFault("parted", Reason.UNREADABLE, 9 - hole, parted.last_error),),
            )
        for part in (2, 4):  # of the question for the prefix, and of that for what is behind its end
            parted.on_lookup.change_next(only(part, Outcome.FAILED))
        assert (await kv.presence(KEYS)).nonzero()[0].tolist() == [0, 1, 3, 4, 5, 6, 8]
        assert emit.of(TierFailed) == [TierFailed("parted", "lookup", "node 0 is away", 9)]
        assert await _load(kv, engine) == (9, ())


@pytest.mark.parametrize("asks", ["prefix", "each"])
def test_why_lookups_fail_in_part_is_told_once_a_minute(asks: str) -> None:
    """Whichever question it was; and a medium that says nothing of itself has a part that did not answer."""

    async def main() -> None:
        engine, emit, parted, device = Engine(), Recorder(), ScriptedBackend(name="parted"), CountingDevice()
        async with open_cache(parted, engine=engine, emit=emit, device=device) as kv:
            watch(device, pools_of(kv))
            await keep(kv, engine, KEYS)
            await kv.evict(KEYS[1:2])
            for pause_s in (0, 0, 0, 61):
                await asyncio.sleep(pause_s)
                if asks == "each":
                    parted.on_lookup.change_next(_truth)
                parted.on_lookup.change_next(only(0, Outcome.FAILED))
                await kv.presence(KEYS)
        why, n = "a part of the medium did not answer", 1 if asks == "each" else 9
        assert emit.of(TierFailed) == [
            TierFailed("parted", "lookup", why, n),
            TierFailed("parted", "lookup", f"{why} (and 2 times since it was last told)", n),
        ]

    run(main)


class _Liar(ScriptedBackend):
    """Says that any prefix there is has ``lie`` blocks."""

    lie: object = 0

    async def lookup_prefix(self, keys: Sequence[BlockKey]) -> int:
        return self.lie  # type: ignore[return-value]  # what it says need not even be a number


@pytest.mark.parametrize("lie", [-1, 10, None, 2.5])
async def test_a_lookup_that_lies(lie: object) -> None:
    """A prefix that cannot be is no answer: a read decides, and nothing wrong is served."""
    engine, liar = Engine(), _Liar(name="liar")
    async with open_cache(CPU, liar, engine=engine) as kv:
        await keep(kv, engine, KEYS[:4])
        await kv.evict(KEYS, tier="cpu")
        liar.lie = lie
        assert (await kv.lookup(KEYS)).num_blocks <= 9
        assert (await _load(kv, engine))[0] <= 4
        await until_idle(kv)


@both_kinds
async def test_a_tier_that_cannot_forget(kind: type[Scripted]) -> None:
    """Evict, clear and flush raise nothing for a tier; what the cache owns is unfindable all the same."""
    engine, emit, flaky = Engine(), Recorder(), kind(name="flaky")
    async with open_cache(CPU, flaky, engine=engine, emit=emit) as kv:
        await keep(kv, engine, KEYS)
        act: Act = flaky.on_delete if isinstance(flaky, ScriptedBackend) else flaky.on_forget
        act.fail_next(OSError(30, "read-only"))
        await kv.evict(KEYS[4:])
        assert len(emit.of(TierFailed)) == 1
        if isinstance(flaky, ScriptedSlotBackend):
            assert (await kv.lookup(KEYS)).num_blocks == 4
            flaky.on_checkpoint.fail_next(OSError(30, "read-only"))
            flaky.on_checkpoint.fail_next(OSError(30, "read-only"))
            await kv.clear()
            assert (await kv.lookup(KEYS)).num_blocks == 0
            await kv.flush(sync=True)
            assert len(emit.of(TierFailed)) == 3


# Opening and closing.


async def test_a_backend_that_cannot_be_opened() -> None:
    """Its error is the caller's, and what was opened before it is closed again, threads and all."""

    class Broken(ScriptedBackend):
        async def open(self, context: BackendContext) -> None:
            raise ConfigurationError("no such bucket")

    first, before = ScriptedBackend(name="first"), set(threading.enumerate())
    with pytest.raises(ConfigurationError, match="no such bucket"):
        async with open_cache(CPU, first, Broken(name="broken")):
            pass
    assert first.on_close.num_calls == 1
    await until(lambda: set(threading.enumerate()) <= before)  # those of tests before may end meanwhile


@both_kinds
async def test_a_backend_that_cannot_be_closed(kind: type[Scripted]) -> None:
    """Closing raises nothing for a tier, and closes all the others, threads and all."""
    emit, first, last, before = Recorder(), ScriptedBackend(name="first"), kind(name="last"), set(threading.enumerate())
    last.on_close.fail_next(OSError(5, "EIO"))
    async with open_cache(CPU, first, last, emit=emit):
        pass
    assert first.on_close.num_calls == 1
    assert [(event.tier, event.doing) for event in emit.of(TierFailed)] == [("last", "close")]
    assert len(emit.of(CacheClosed)) == 1
    await until(lambda: set(threading.enumerate()) <= before)  # those of tests before may end meanwhile


async def test_closing_twice_or_before_opening_is_harmless() -> None:
    """A second close does nothing, and so does one of a cache that never was open."""
    emit = Recorder()
    cache = TieredKV([CPU], model=MODEL, layout=small_layout(), emit=emit, device="cpu")
    await cache.aclose()
    async with open_cache(CPU, emit=emit) as kv:
        await kv.aclose()
        await kv.aclose()
    assert len(emit.of(CacheClosed)) == 1


def _invert(blocks: Sequence[Block]) -> None:
    """Do to what is to be written what a compression or a change of byte order in place would do."""
    for block in blocks:
        for segment in (block.payload, block.header):
            np.frombuffer(segment, np.uint8)[:] ^= 0xFF


class InvertingBackend(ScriptedBackend):
    """Changes the buffers it is to write."""

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Change them, then keep them."""
        _invert(blocks)
        return await super().write(keys, blocks)


class InvertingSlotBackend(ScriptedSlotBackend):
    """The same, of an owned medium."""

    async def write(self, group: int, slots: NDArray[np.int64], names: Names, blocks: Sequence[Block]) -> list[Outcome]:
        """Change them, then keep them."""
        _invert(blocks)
        return await super().write(group, slots, names, blocks)


@pytest.mark.parametrize("kind", [InvertingBackend, InvertingSlotBackend])
async def test_a_backend_that_changes_what_it_writes_harms_itself_alone(kind: type[Scripted]) -> None:
    """The CPU tier's blocks are the buffers that it is given: it fails, and what memory serves stays right."""
    engine, events = Engine(), Recorder()
    async with open_cache(CPU, kind(), engine=engine, emit=events) as kv:
        await keep(kv, engine, KEYS)
        assert await _load(kv, engine) == (9, ())
        assert {event.doing for event in events.of(TierFailed)} == {"write"}
        await until_idle(kv)


class SortingBackend(ScriptedBackend):
    """Sorts what it is given, for neighbours on its medium."""

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Sort, and read."""
        cast("list[BlockKey]", keys).sort(key=attrgetter("path"))
        return await super().read(keys, into)


class SortingSlotBackend(ScriptedSlotBackend):
    """The same, of an owned medium."""

    async def read(self, group: int, slots: NDArray[np.int64], into: Sequence[Block]) -> list[Outcome]:
        """Sort, and read."""
        slots[:] = slots[::-1]
        return await super().read(group, slots, into)


@pytest.mark.parametrize("kind", [SortingBackend, SortingSlotBackend])
async def test_a_backend_that_sorts_what_it_is_given_reads_wrong_blocks_and_none_is_served(
    kind: type[Scripted],
) -> None:
    """What is verified goes by the order that the cache has asked in."""
    engine = Engine()
    async with open_cache(kind(), engine=engine) as kv:
        await keep(kv, engine, KEYS)
        num_blocks, _ = await _load(kv, engine)
        assert num_blocks < len(KEYS)
        if kind is SortingSlotBackend:
            assert kv.lookup_nowait(KEYS).num_blocks < len(KEYS), "what is not what the books say is removed"


class AssigningBackend(ScriptedBackend):
    """Puts what it has read beside the buffers that it is to fill."""

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Read into memory of its own."""
        own = [Block.empty(PAYLOAD_BYTES) for _ in keys]
        outcomes = await super().read(keys, own)
        for block, read in zip(into, own, strict=True):
            block.header, block.payload = read.header, read.payload
        return outcomes


async def test_a_backend_that_assigns_a_buffer_instead_of_filling_it_has_filled_none() -> None:
    """What is verified are the cache's own buffers, not what a backend has made of the objects it was given."""
    engine = Engine()
    async with open_cache(AssigningBackend(), engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await keep(kv, engine, prompt(9, seed=1))
        assert (await _load(kv, engine))[0] == 0


@pytest.mark.parametrize("kind", [ScriptedBackend, ScriptedSlotBackend])
async def test_what_there_is_no_memory_for_fails_and_is_not_waited_for(
    kind: type[ScriptedBackend | ScriptedSlotBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system gives none for the headers of records: that write or read fails, is told, and the next goes well."""

    def none(*_: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    engine, said, medium = Engine(), Recorder(), kind(name="medium")
    async with open_cache({"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, medium, engine=engine, emit=said) as kv:
        with monkeypatch.context() as without_memory:
            without_memory.setattr(mmap, "mmap", none)
            (_, settled) = await (await kv.store(KEYS, engine.compute(KEYS))).settled()
            assert (settled.written, settled.failed) == (0, len(KEYS))
            await kv.flush()
        await until_idle(kv)
        await kv.clear()
        await until(lambda: not kv.stats()["medium"].is_bypassed)
        await keep(kv, engine, KEYS)
    async with open_cache(medium, engine=engine, emit=said) as kv:
        with monkeypatch.context() as without_memory:
            without_memory.setattr(mmap, "mmap", none)
            assert (await kv.load(KEYS, INTO)).num_blocks == 0
            await until_idle(kv)
        await until(lambda: not kv.stats()["medium"].is_bypassed)
        assert (await kv.load(KEYS, INTO)).num_blocks > 0  # which tries the tier
        assert (await kv.load(KEYS, INTO)).num_blocks == len(KEYS)
    assert {failed.doing for failed in said.of(TierFailed)} == {"write", "read"}
