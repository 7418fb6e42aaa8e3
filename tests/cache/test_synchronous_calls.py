"""Methods of a backend that answer at once: one that raises, or answers nonsense, is counted and takes nothing down."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.backends import ScriptedSlotBackend, only
from tests.support.caches import Recorder, keep, open_cache, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, contents, prompt
from tests.support.virtual import CountingDevice, pools_of, run, watch
from tiered_kv import GPULoadStoreSpec
from tiered_kv.media.backend import Missing, Outcome
from tiered_kv.values.events import TierFailed
from tiered_kv.values.results import TierStore

KEYS, OTHERS = prompt(4), prompt(4, seed=1)
INTO = GPULoadStoreSpec(range(4))
NUM_SLOTS = 16
CPU = {"medium": "cpu", "capacity": 8 * PAYLOAD_BYTES}
SYNCHRONOUS = ["missing", "try_again", "find_hung", "describe"]


class Wrong(ScriptedSlotBackend):
    """An owned medium of which a test says what some methods do.

    Attributes:
        does: By method, what is called in its place.
        num_calls: By method.
    """

    def __init__(self, num_slots: int = NUM_SLOTS, **more: object) -> None:
        super().__init__(num_slots, **more)  # type: ignore[arg-type]  # they are settings
        self.does: dict[str, Callable[[], Any]] = {}
        self.num_calls = dict.fromkeys(SYNCHRONOUS, 0)

    def missing(self, group: int) -> Missing | None:
        """Do as the test says."""
        missing: Missing | None = self._do("missing", None)
        return missing

    def try_again(self) -> None:
        """Do as the test says."""
        self._do("try_again", None)

    def find_hung(self) -> None:
        """Do as the test says."""
        self._do("find_hung", None)

    def describe(self) -> dict[str, object]:
        """Do as the test says."""
        facts: dict[str, object] = self._do("describe", {})
        return facts

    def _do(self, method: str, otherwise: object) -> Any:  # noqa: ANN401 - a backend may say anything
        self.num_calls[method] += 1
        return self.does[method]() if method in self.does else otherwise


def _raising(error: BaseException) -> Callable[[], Any]:
    def do() -> None:
        raise error

    return do


def _slots(*lost: int) -> NDArray[np.bool_]:
    return np.isin(np.arange(NUM_SLOTS), lost)


def test_a_medium_is_asked_to_try_again_though_nothing_is_missing() -> None:
    """It may have failed at something that costs blocks only later."""

    async def main() -> None:
        backend, device = Wrong(), CountingDevice()
        async with open_cache(CPU, backend, engine=Engine(), device=device) as kv:
            watch(device, pools_of(kv))
            await asyncio.sleep(5.0)
            assert backend.num_calls["try_again"] >= 3

    run(main)


@pytest.mark.parametrize("error", [RuntimeError("no"), asyncio.CancelledError(), SystemExit(1)], ids=repr)
@pytest.mark.parametrize("method", SYNCHRONOUS)
def test_what_raises_fails_nothing(method: str, error: BaseException) -> None:
    """Loads, stores, statistics and time to live go on; the failure is told, and of many failures only one."""

    async def main() -> None:
        engine, device, emit = Engine(), CountingDevice(), Recorder()
        backend = Wrong(ttl_s=60.0, timeout_s=0.5)
        async with open_cache(CPU, backend, engine=engine, device=device, emit=emit) as kv:
            watch(device, pools_of(kv))
            lost = Missing(_slots(NUM_SLOTS - 1), "away")
            backend.does = {"missing": lambda: lost}  # so that it is to be tried again
            await keep(kv, engine, KEYS)
            await kv.evict(KEYS, tier="cpu")
            backend.on_read.hold()  # so that what it hangs on is to be found
            assert (await kv.load(KEYS, INTO)).num_blocks == 0
            backend.does[method] = _raising(error)
            await asyncio.sleep(5.0)
            assert min(backend.num_calls["try_again"], backend.num_calls["find_hung"]) >= 3
            backend.on_read.calm()
            await until_idle(kv)
            await asyncio.sleep(5.0)

            engine.poison()
            assert (await kv.load(KEYS, INTO)).num_blocks == 4
            assert engine.read(INTO) == contents(KEYS)
            await keep(kv, engine, OTHERS)
            assert kv.stats()["slots"].ready == 8
            assert kv.stats()["slots"].facts == {}
            told = [each for each in emit.of(TierFailed) if each.doing == method]
            assert len(told) == 1
            assert type(error).__name__ in told[0].error
            assert told[0].tier == "slots"

            await asyncio.sleep(62.0)
            assert kv.stats()["slots"].expired == 8
            await until_idle(kv)

    run(main)


@pytest.mark.parametrize(
    "answer", [Missing(_slots(0)[:-1], "short"), Missing(_slots(0).astype(np.int8), "no bool"), "away"], ids=repr
)
async def test_what_is_missing_nonsensically_is_not_missing(answer: object) -> None:
    """Slots that the tier does not have, or that are no truth values, change nothing in its books."""
    engine, emit, backend = Engine(), Recorder(), Wrong()
    async with open_cache(CPU, backend, engine=engine, emit=emit) as kv:
        await keep(kv, engine, KEYS)
        backend.does = {"missing": lambda: answer}
        await keep(kv, engine, OTHERS)
        await kv.evict(KEYS, tier="cpu")
        assert (await kv.load(KEYS, INTO)).num_blocks == 4
        assert [each.doing for each in emit.of(TierFailed)] == ["missing"]
        assert (kv.stats()["slots"].ready, kv.stats()["slots"].withheld) == (8, 0)


async def test_what_was_missing_stays_so_while_nobody_can_say() -> None:
    """A medium that does not say any more which part of it is away is not written to there."""
    engine, backend = Engine(), Wrong()
    async with open_cache(CPU, backend, engine=engine) as kv:
        lost = Missing(_slots(*range(4, NUM_SLOTS)), "away")
        backend.does = {"missing": lambda: lost}
        await keep(kv, engine, KEYS)
        backend.does = {"missing": _raising(RuntimeError("no answer"))}
        await keep(kv, engine, OTHERS)
        assert all(slot < 4 for _, slot in backend.records)
        assert kv.stats()["slots"].withheld == NUM_SLOTS - 4


@pytest.mark.parametrize("answer", [None, ["io"], 3], ids=repr)
async def test_facts_that_are_none_are_left_out(answer: object) -> None:
    """Statistics say what is known without them."""
    backend, emit = Wrong(), Recorder()
    async with open_cache(CPU, backend, emit=emit) as kv:
        backend.does = {"describe": lambda: answer}
        assert kv.stats()["slots"].facts == {}
        assert kv.stats()["slots"].write_amplification == 0.0
        assert [each.doing for each in emit.of(TierFailed)] == ["describe"]


class _Speechless(Exception):  # noqa: N818 - named for what it does
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("answer", [{"last_error": _Speechless()}, {"last_error": np.zeros(2)}, None], ids=type)
async def test_blocks_that_fail_for_no_reason_that_can_be_said_are_told_of(answer: object) -> None:
    """Their store settles, and nothing of it stays in flight."""
    engine, emit, backend = Engine(), Recorder(), Wrong()
    async with open_cache(CPU, backend, engine=engine, emit=emit) as kv:
        backend.does = {"describe": lambda: answer}
        backend.on_write.change_next(only(0, Outcome.FAILED))
        settled = await (await kv.store(KEYS, engine.compute(KEYS))).settled()
        assert settled[-1] == TierStore("slots", written=3, failed=1)
        backend.on_read.change_next(only(0, Outcome.FAILED))
        await kv.evict(KEYS, tier="cpu")
        assert (await kv.load(KEYS[1:], INTO[:3])).num_blocks == 0
        await until_idle(kv)
        told = [(each.doing, each.error) for each in emit.of(TierFailed) if each.doing != "describe"]
        assert told == [(doing, "a part of the medium did not answer") for doing in ("write", "read")]


async def test_a_backend_that_raises_from_the_start_is_opened() -> None:
    """It is asked what is missing before anything is stored."""
    engine, backend, emit = Engine(), Wrong(), Recorder()
    backend.does = {"missing": _raising(RuntimeError("not yet"))}
    async with open_cache(CPU, backend, engine=engine, emit=emit) as kv:
        await keep(kv, engine, KEYS)
        assert kv.stats()["slots"].ready == 4
        assert [each.doing for each in emit.of(TierFailed)] == ["missing"]
