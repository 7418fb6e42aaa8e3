"""What others' code may do in a backend's call, and what the cache makes of it: a shorter prefix, and no more."""

import asyncio
import mmap
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from anyio import fail_after
from anyio.lowlevel import checkpoint

from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import Recorder, assert_nothing_left, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, SMALL_LIMITS, Engine, prompt
from tests.support.virtual import advance, run
from tiered_kv import (
    BackendContext,
    BackendUnavailableError,
    BlockKey,
    ConfigurationError,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    Outcome,
    StorageTierSettings,
    TieredKV,
    TieredKVError,
)
from tiered_kv.media.backend import Recovered
from tiered_kv.values.events import TierFailed, TierStalled

KEYS = prompt(4)
INTO = GPULoadStoreSpec(range(4))


class PanicError(BaseException):
    """As the panic of a Rust extension is: no `Exception`."""


ODD = pytest.mark.parametrize("error", [asyncio.CancelledError, PanicError, StopAsyncIteration, SystemExit])


async def is_used_again(kv: TieredKV) -> None:
    """Wait until loads come from storage again."""
    with fail_after(30):
        while (await kv.load(KEYS, INTO)).num_blocks < len(KEYS):
            await until(lambda: not kv.stats()["keyed"].is_bypassed)


@ODD
@pytest.mark.both_loops
async def test_whatever_a_call_raises_is_a_miss(error: Callable[[], BaseException]) -> None:
    """All calls answer; nobody sees a cancellation that nobody asked for; nothing is left behind."""
    engine, keyed = Engine(), ScriptedBackend()
    async with open_cache(keyed, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        keyed.on_lookup.fail_next(error())
        assert (await kv.lookup(KEYS)).num_blocks == 0
        keyed.on_lookup.fail_next(error())
        assert (await kv.load(KEYS, INTO)).num_blocks == 0
        keyed.on_read.fail_next(error())
        assert (await kv.load(KEYS, INTO)).faults
        keyed.on_write.fail_next(error())
        other = prompt(4, seed=1)
        stored = await kv.store(other, engine.compute(other))
        assert [tier.failed for tier in await stored.settled()] == [4]
        keyed.on_delete.fail_next(error())
        await kv.evict(other)
        await until_idle(kv)


@ODD
async def test_a_probe_that_ends_oddly_is_a_failed_probe(error: Callable[[], BaseException]) -> None:
    """A tier that is bypassed is probed again after its pause, however the last probe ended."""
    engine, keyed = Engine(), ScriptedBackend()
    async with open_cache(keyed, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        for _ in range(3):
            keyed.on_read.fail_next(BackendUnavailableError("down"))
            await kv.load(KEYS, INTO)
        assert kv.stats()["keyed"].is_bypassed
        keyed.on_read.fail_next(error())
        await is_used_again(kv)


@ODD
async def test_closing_a_backend_raises_nothing(error: Callable[[], BaseException]) -> None:
    """What `aclose` of a backend raises is an event; the other tiers are closed, and ``async with`` ends well."""
    first, last, said = ScriptedBackend(name="first"), ScriptedBackend(name="last"), Recorder()
    last.on_close.fail_next(error())
    async with open_cache(first, last, emit=said):
        pass
    assert first.on_close.num_calls == 1
    assert [(each.tier, each.doing) for each in said.of(TierFailed)] == [("last", "close")]


class OddBackend(ScriptedBackend):
    """Says of a prefix what it is told to."""

    prefix: object = ()

    async def lookup_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Answer, whatever it is."""
        return await super().lookup_prefix(keys) if self.prefix == () else self.prefix  # type: ignore[return-value] # so


def _instead(answer: object, _: object) -> object:
    return answer


async def test_answers_that_are_none_are_failures() -> None:
    """A wrong number of outcomes, outcomes of another call, or no list: a miss, and an event."""
    engine, keyed, said = Engine(), OddBackend(), Recorder()
    async with open_cache(keyed, engine=engine, emit=said) as kv:
        await keep(kv, engine, KEYS)
        wrong: list[object] = [[Outcome.HIT], [Outcome.STORED] * 4, None]
        for answer in wrong:
            keyed.on_read.change_next(partial(_instead, answer))
            assert (await kv.load(KEYS, INTO)).num_blocks == 0
            await is_used_again(kv)
        assert len(said.of(TierFailed)) == len(wrong)
        for found in (-1, 99, 2.5, True, None, [Outcome.HIT] * 4):
            keyed.prefix = found
            assert (await kv.lookup(KEYS)).num_blocks == 0
            await until(lambda: not kv.stats()["keyed"].is_bypassed)
        await until_idle(kv)


@pytest.mark.parametrize("kind", [ScriptedBackend, ScriptedSlotBackend])
async def test_answers_to_writes_that_are_none_are_failures(
    kind: type[ScriptedBackend | ScriptedSlotBackend], caplog: pytest.LogCaptureFixture
) -> None:
    """One outcome too few or too many, or another call's: all blocks of the write have failed, and no task crashes."""
    engine, medium, said = Engine(), kind(name="medium"), Recorder()
    wrong: list[object] = [[Outcome.STORED] * 3, [Outcome.STORED] * 5, [Outcome.HIT] * 4, None, 7]
    async with open_cache(medium, engine=engine, emit=said) as kv:
        for seed, answer in enumerate(wrong):
            medium.on_write.change_next(partial(_instead, answer))
            keys = prompt(4, seed=seed)
            stored = await kv.store(keys, engine.compute(keys))
            assert [tier.failed for tier in await stored.settled()] == [4]
            await keep(kv, engine, prompt(1, seed=9 + seed))  # so that it is not bypassed
        await until_idle(kv)
    assert [each.doing for each in said.of(TierFailed)] == ["write"] * len(wrong)
    assert not caplog.records


class ThreadedBackend(ScriptedBackend):
    """Fills what it was lent in a step of its own, long after others have ended."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.has_let_go = False

    async def read(self, keys: object, into: object) -> list[Outcome]:
        """Go through `on_read`, and note when the buffers are free."""
        outcomes = await super().read(keys, into)  # type: ignore[arg-type] # handed on as they came
        self.has_let_go = True
        return outcomes


@ODD
async def test_a_direct_load_ends_when_every_medium_has_let_go(error: Callable[[], BaseException]) -> None:
    """One medium ends by any error at all: the load still waits for the other one, which has the engine's memory."""
    first, second, engine = ScriptedBackend(name="first"), ThreadedBackend("second"), Engine()
    async with open_cache(first, second, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await first.delete(first.keys()[2:])  # so that each of them has to read a part
        memory = torch.frombuffer(mmap.mmap(-1, 4 * PAYLOAD_BYTES), dtype=torch.bfloat16).view(4, -1)
        kv.register_host_pool("pool", memory, direct=True)
        second.on_read.hold()
        first.on_read.fail_next(error())
        handle = kv.start_load(KEYS, CPULoadStoreSpec(range(4), pool="pool"))
        await until(lambda: second.on_read.num_held == 1 and first.on_read.num_held == 0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not handle.done
        second.on_read.release()
        await handle
        assert second.has_let_go
        await until_idle(kv)


class CountingBackend(ScriptedBackend):
    """Counts how many of its calls are under way at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    async def lookup(self, keys: object) -> list[Outcome]:
        """Go through `on_lookup`."""
        self.most = max(self.most, self.on_lookup.num_held + 1)
        return await super().lookup(keys)  # type: ignore[arg-type] # handed on as they came


async def test_equal_questions_are_asked_once() -> None:
    """A hundred loads of one prefix at once ask a shared tier once whether it is there."""
    engine, keyed = Engine(), ScriptedBackend()
    async with open_cache(keyed, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        asked = keyed.on_lookup.num_calls
        keyed.on_lookup.hold()
        loads = [kv.start_load(KEYS, INTO) for _ in range(100)]
        await until(lambda: keyed.on_lookup.num_held > 0)
        for _turn in range(len(loads)):  # a few of them begin in each turn of the loop
            await checkpoint()
        keyed.on_lookup.release()
        assert [(await each).num_blocks for each in loads] == [len(KEYS)] * 100
        assert keyed.on_lookup.num_calls == asked + 1
        await until_idle(kv)


async def test_questions_under_way_are_bounded() -> None:
    """Two hundred loads of as many prompts ask a few questions at a time, and all of them are answered."""
    engine, keyed = Engine(), CountingBackend()
    async with open_cache(keyed, engine=engine) as kv:
        prompts = [prompt(1, seed=seed) for seed in range(200)]
        for each in prompts:
            await kv.store(each, engine.compute(each))
        await until(lambda: kv.stats().transfers == 0)
        keyed.on_lookup.hold()
        loads = [kv.start_load(each, GPULoadStoreSpec([0])) for each in prompts]
        await until(lambda: keyed.on_lookup.num_held > 0)
        for _ in range(50):
            await asyncio.sleep(0)
        assert keyed.on_lookup.num_held <= 64
        keyed.on_lookup.release()
        assert sum([(await each).num_blocks for each in loads]) == 200
        assert keyed.most <= 64
        await until_idle(kv)


async def test_a_question_whose_tier_fails_meanwhile_is_not_asked() -> None:
    """Those that wait for their turn are answered, with nothing, when the tier is bypassed."""
    engine, keyed = Engine(), ScriptedBackend(timeout_s=0.05)
    async with open_cache(keyed, engine=engine) as kv:
        keyed.on_lookup.hold()
        finding = [asyncio.create_task(kv.lookup(prompt(1, seed=seed))) for seed in range(40)]
        with fail_after(30):
            assert [found.num_blocks for found in await asyncio.gather(*finding)] == [0] * 40
        assert keyed.on_lookup.num_calls <= 16
        keyed.on_lookup.release()
        await until_idle(kv)


class LateBackend(ScriptedBackend):
    """Opens when it is told to."""

    def __init__(self, *, required: bool) -> None:
        super().__init__(timeout_s=0.05)
        self.settings = self.settings.model_copy(update={"required": required})
        self.gate = asyncio.Event()
        self.num_opened = 0

    async def open(self, context: BackendContext) -> None:
        """Wait for the gate."""
        self.num_opened += 1
        await self.gate.wait()


LIMITS = SMALL_LIMITS.model_copy(update={"open_timeout_s": 0.1})


async def test_an_opening_that_hangs_has_a_limit() -> None:
    """A tier that is required cannot be had; one that is not is used once its first call of `open` has returned."""
    with (
        fail_after(30),
        pytest.raises(BackendUnavailableError, match=r"tier 'keyed': not opened within 0\.1 s") as raised,
    ):
        async with open_cache(LateBackend(required=True), limits=LIMITS):
            pass
    assert "With required=false the cache opens without the tier 'keyed'" in raised.value.__notes__[0]
    late, engine, said = LateBackend(required=False), Engine(), Recorder()
    with fail_after(30):
        async with open_cache("cpu://?capacity=1MiB", late, engine=engine, limits=LIMITS, emit=said) as kv:
            assert kv.stats()["keyed"].is_bypassed
            await until(lambda: [each.doing for each in said.of(TierStalled)] == ["open"])
            late.gate.set()
            await until(lambda: not kv.stats()["keyed"].is_bypassed)
            await keep(kv, engine, KEYS)
    assert late.num_opened == 1
    assert late.num_records == len(KEYS)


@pytest.mark.parametrize("error", [BackendUnavailableError("no route"), OSError(5, "EIO")])
async def test_an_opening_that_fails_is_told_once(error: Exception) -> None:
    """By the exception where it raises; by an event where the cache opens without the tier."""
    for is_required in (True, False):
        medium, said = ScriptedBackend(required=is_required), Recorder()
        medium.on_open.fail_next(error)
        with fail_after(30), pytest.raises(BackendUnavailableError) if is_required else nullcontext() as raised:
            async with open_cache("cpu://?capacity=1MiB", medium, emit=said):
                pass
        told = [str(raised.value)] if raised is not None else []
        told += [each.error for each in said.of(TierFailed)]
        assert len(told) == 1
        assert str(error) in told[0]


@pytest.mark.parametrize("kind", [ScriptedBackend, ScriptedSlotBackend])
async def test_a_tier_that_cannot_be_opened_is_named(kind: type[ScriptedBackend | ScriptedSlotBackend]) -> None:
    """In the error that opening a cache raises: its medium's own words need not tell it from another of its kind."""
    away = kind(required=True)
    away.on_open.fail_next(BackendUnavailableError("no route"))
    with pytest.raises(BackendUnavailableError, match=f"^tier '{away.settings.name}': no route\n"):
        async with open_cache("cpu://?capacity=1MiB", away):
            pass


@pytest.mark.parametrize("kind", [ScriptedBackend, ScriptedSlotBackend])
async def test_why_a_tier_is_not_open_yet_is_told_and_shown(kind: type[ScriptedBackend | ScriptedSlotBackend]) -> None:
    """From the moment when the cache opens without it: that it takes long, then how each attempt has ended."""
    late, said = kind(timeout_s=0.05, required=False), Recorder()
    name = late.settings.name
    late.on_open.hold()
    errors = [ConfigurationError("no such bucket"), BackendUnavailableError("no route")]
    for error in errors:
        late.on_open.fail_next(error)
    shown = ["BackendUnavailableError: not opened within 0.05 s"]
    async with open_cache("cpu://?capacity=1MiB", late, emit=said) as kv:
        assert kv.stats()[name or ""].facts == {"last_error": shown[0]}
        assert [each.error for each in said.of(TierFailed)] == shown
        late.on_open.release()

        def look() -> bool:
            tier = kv.stats()[name or ""]
            if tier.is_bypassed and (why := str(tier.facts["last_error"])) != shown[-1]:
                shown.append(why)
            return not tier.is_bypassed

        await until(look)
        assert shown[1:] == ["ConfigurationError: no such bucket", "BackendUnavailableError: no route"]
        assert [each.error for each in said.of(TierFailed)] == shown
        assert "last_error" not in kv.stats()[name or ""].facts


@pytest.mark.parametrize(("error", "most"), [(BackendUnavailableError("no route"), 80), (ConfigurationError("x"), 20)])
def test_a_tier_that_never_opens_is_told_once_and_tried_less_often(error: TieredKVError, most: int) -> None:
    """What somebody has to mend more rarely than what may come back by itself; and it is used once that was done."""

    async def main() -> None:
        medium, said = ScriptedBackend(required=False), Recorder()
        for _ in range(1000):
            medium.on_open.fail_next(error)
        async with open_cache("cpu://?capacity=1MiB", medium, emit=said) as kv:
            for _ in range(600):
                await advance(1.0)
            assert 10 <= medium.on_open.num_calls <= most
            assert [each.error for each in said.of(TierFailed)] == [f"{type(error).__name__}: {error}"]
            medium.on_open.calm()
            for _ in range(70):
                await advance(1.0)
            assert not kv.stats()["keyed"].is_bypassed

    run(main)


class ResizableSlots(ScriptedSlotBackend):
    """A medium of up to 64 slots whose resizing can be held, fails as it is told, and is of what it is told fits."""

    def __init__(self, num_slots: int, timeout_s: float = 0.05) -> None:
        super().__init__(num_slots, timeout_s=timeout_s)
        self.settings = StorageTierSettings(medium="slots", name="slots", timeout_s=timeout_s)
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.fitting: list[Any] = []  # what it says, also what is no number
        self.was_cancelled = False

    async def open(self, context: BackendContext) -> list[Recovered]:
        """Say how large it may become."""
        (found,) = await super().open(context)
        return [Recovered(found.num_slots, found.names, found.slots, 64)]

    def fit(self, capacity_bytes: int) -> Any:  # noqa: ANN401 - as a medium of somebody else's may
        """Take blocks without headers."""
        return self.fitting[-1] if self.fitting else capacity_bytes // PAYLOAD_BYTES

    async def resize(self, num_slots: int) -> None:
        """Become larger or smaller, as it is told."""
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.error is not None:
            raise self.error
        self.num_slots = num_slots


async def test_a_resize_that_is_late_is_not_cancelled() -> None:
    """It raises in time, the books are as before, and no other begins until it has returned."""
    slots = ResizableSlots(8)
    async with open_cache(slots) as kv:
        slots.gate.clear()
        with pytest.raises(BackendUnavailableError, match=r"was not resized within 0\.05 s"):
            await kv.resize("slots", 16 * PAYLOAD_BYTES)
        assert kv.stats()["slots"].num_slots == 8
        with pytest.raises(BackendUnavailableError, match="still being resized"):
            await kv.resize("slots", 32 * PAYLOAD_BYTES)
        slots.gate.set()
        await until(lambda: kv.stats().transfers == 0)
        assert (slots.num_slots, slots.was_cancelled) == (16, False)
        assert await kv.resize("slots", 32 * PAYLOAD_BYTES) == 32


async def test_a_tier_that_is_not_open_yet_is_not_resized() -> None:
    """It says so, and asks the medium for nothing; it opens all the same, and can be resized then."""
    slots = ScriptedSlotBackend(8, required=False)
    slots.on_open.fail_next(BackendUnavailableError("not yet"))
    async with open_cache({"medium": "cpu", "capacity": 4 * PAYLOAD_BYTES}, slots) as kv:
        with pytest.raises(BackendUnavailableError, match="not open yet"):
            await kv.resize("slots", 4 * PAYLOAD_BYTES)
        assert slots.on_resize.num_calls == 0
        await until(lambda: not kv.stats()["slots"].is_bypassed)
        assert kv.stats()["slots"].num_slots == 8


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PanicError(), ConfigurationError("never")])
async def test_a_resize_that_fails_leaves_the_books_right(error: BaseException) -> None:
    """Growing: nothing has changed. Shrinking: the blocks are gone, and the medium's failure is an event."""
    slots, said, engine = ResizableSlots(8), Recorder(), Engine()
    async with open_cache(slots, emit=said, engine=engine) as kv:
        await keep(kv, engine, prompt(8))
        slots.error = error
        with pytest.raises((BackendUnavailableError, ConfigurationError)):
            await kv.resize("slots", 16 * PAYLOAD_BYTES)
        assert kv.stats()["slots"].num_slots == 8
        assert await kv.resize("slots", 4 * PAYLOAD_BYTES) == 4
        assert [each.doing for each in said.of(TierFailed)] == ["resize", "resize"]
        assert kv.stats()["slots"].ready == 4
        assert_nothing_left(kv)


@pytest.mark.parametrize("num_blocks", [0, -3, 65, 2.5, None])
async def test_a_medium_that_says_it_fits_what_cannot_be_is_not_resized(num_blocks: int) -> None:
    """It is told nothing, and what it holds stays: it was opened with 64 slots at most."""
    slots, engine = ResizableSlots(8), Engine()
    async with open_cache(slots, engine=engine) as kv:
        await keep(kv, engine, prompt(8))
        slots.fitting.append(num_blocks)
        with pytest.raises(ConfigurationError, match="tier 'slots' says it can hold"):
            await kv.resize("slots", 16 * PAYLOAD_BYTES)
        assert (slots.num_slots, kv.stats()["slots"].num_slots) == (8, 8)
        assert (await kv.lookup(prompt(8))).num_blocks == 8


class SaysYes(ScriptedBackend):
    """A medium whose lookup answers with bools."""

    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Say of each key whether it is there."""
        found = await super().lookup(keys)
        return [each is Outcome.HIT for each in found]  # type: ignore[misc]


async def test_a_lookup_that_answers_no_outcomes_is_a_failed_call() -> None:
    """Else nothing would ever be found there, and nobody would be told why."""
    engine, emit = Engine(), Recorder()
    async with open_cache(SaysYes(), engine=engine, emit=emit, limits=SMALL_LIMITS) as kv:
        await keep(kv, engine, KEYS)
        await kv.lookup(KEYS)
        errors = [each.error for each in emit.of(TierFailed)]
        assert errors
        assert all("lookup answered " in each and each.endswith(", which is no Outcome") for each in errors)


@pytest.mark.parametrize(
    ("answer", "num_answered"),
    [(None, 0), ([], 0), ([Outcome.HIT], 1), ([Outcome.MISS], 1), ([Outcome.HIT] * 5, 5)],
    ids=["none", "nothing", "a hit", "a miss", "one too many"],
)
async def test_a_lookup_that_answers_a_wrong_number_of_outcomes_is_a_failed_call(
    answer: list[Outcome] | None, num_answered: int
) -> None:
    """Its first outcomes are not believed, nor the rest taken for absent, and what falls short is told why."""
    engine, medium, emit = Engine(), ScriptedBackend(), Recorder()
    async with open_cache(medium, engine=engine, emit=emit, limits=SMALL_LIMITS) as kv:
        await keep(kv, engine, KEYS)
        medium.on_lookup.change_next(partial(_instead, answer))
        said = f"ValueError: lookup answered {num_answered} outcomes for 4 keys"
        loaded = await kv.load(KEYS, INTO)
        assert (loaded.num_blocks, [each.detail for each in loaded.faults]) == (0, [said])
        assert [each.error for each in emit.of(TierFailed)] == [said]


@pytest.mark.parametrize(
    ("change", "said"),
    [(lambda outcomes: outcomes[:-1], "3 outcomes for 4 blocks"), (lambda _: None, "no outcomes for 4 blocks")],
    ids=["one short", "none"],
)
@pytest.mark.parametrize("kind", [ScriptedBackend, ScriptedSlotBackend])
async def test_too_few_outcomes_are_a_failed_call(
    kind: type[ScriptedBackend | ScriptedSlotBackend], change: Callable[[list[Outcome]], list[Outcome]], said: str
) -> None:
    """Which block each stands for, nobody knows: none is taken for read, and none is served."""
    engine, medium, emit = Engine(), kind(), Recorder()
    async with open_cache(medium, engine=engine, emit=emit, limits=SMALL_LIMITS) as kv:
        await keep(kv, engine, KEYS)
        medium.on_read.change_next(change)
        assert (await kv.load(KEYS, INTO)).num_blocks == 0
        assert [each.error for each in emit.of(TierFailed)] == [said]
        await until_idle(kv)
