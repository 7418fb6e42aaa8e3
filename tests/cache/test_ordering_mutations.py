"""What must be ordered is, and the tests would notice: each wait is taken away in turn, and the device finds the race.

The device's account covers the engine's computing, on a stream of its own, copies both ways, and slots that the catalog
gives to others. It does not depend on luck: an order that only happened to be good is a race too.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from anyio.lowlevel import checkpoint

from tests.support.caches import AnyTier, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, prompt
from tests.support.watching import NUM_LAYERS, pages
from tiered_kv import GPULoadStoreSpec, LoadHandle, TieredKV
from tiered_kv.catalog.leases import Reservation
from tiered_kv.memory.lanes import LaneCopy
from tiered_kv.testing import ScriptedDevice, ScriptedStream
from tiered_kv.transfers.layerwise import LayerLoad, LayerStore
from tiered_kv.transfers.load import Load
from tiered_kv.transfers.start import ReadyLoad
from tiered_kv.transfers.store import Store

T = TypeVar("T")
KEYS, OTHERS = prompt(6), prompt(6, seed=1)
INTO, SOURCE, ELSEWHERE = (GPULoadStoreSpec(range(start, start + 6)) for start in (0, 10, 20))
CPU: AnyTier = {"medium": "cpu", "capacity": 6 * PAYLOAD_BYTES}
GPU: AnyTier = {"medium": "gpu", "capacity": 6 * PAYLOAD_BYTES}


class Script:
    """A cache on a scripted device, beside an engine that computes on a stream of that device."""

    def __init__(self, kv: TieredKV, engine: Engine, device: ScriptedDevice) -> None:
        self.kv, self.engine, self.device = kv, engine, device
        self.compute = device.stream("compute")

    async def end(self, *awaitables: Awaitable[T]) -> list[T]:
        """Let the device work until all of these have ended, always after the host has done all that it could."""
        tasks = [asyncio.ensure_future(self._result(each)) for each in awaitables]
        await _some_turns()
        while not all(task.done() for task in tasks):
            assert self.device.step()
            await _some_turns()
        return [task.result() for task in tasks]

    async def have(self, tier: str) -> None:
        """Have `KEYS` in one tier alone."""
        storing = asyncio.ensure_future(keep(self.kv, self.engine, KEYS))
        await until(storing.done, on_wait=self.device.run_all)
        for each in self.kv.stats().tiers:
            if each.tier != tier:
                await self.kv.evict(KEYS, tier=each.tier)

    @staticmethod
    async def _result(awaitable: Awaitable[T]) -> T:
        return await awaitable


async def _some_turns() -> None:
    for _ in range(10):
        await checkpoint()


# What engines do.


async def load_into_used_pages(script: Script) -> None:
    """Pages that are still read get other blocks, are used, and are given up."""
    await script.have("cpu")
    after = script.compute.reads(pages(INTO.ids))
    await script.end(script.kv.start_load(KEYS, INTO, after=after))
    script.compute.writes(pages(INTO.ids))


async def store_what_is_computed(script: Script) -> None:
    """Blocks are stored after their computation, and the pages computed anew once the store has returned."""
    after = script.compute.writes(pages(SOURCE.ids))
    await script.end(script.kv.start_store(KEYS, SOURCE, after=after))
    script.compute.writes(pages(SOURCE.ids))


async def store_into_slots_in_use(script: Script, *, layerwise: bool = False) -> None:
    """While blocks are loaded, others are stored that would like to have their slots."""
    await script.have("cpu")
    loading = script.kv.start_load(KEYS, INTO, layerwise=layerwise)
    await _some_turns()
    await script.end(loading, script.kv.start_store(OTHERS, SOURCE))


async def store_into_slots_in_use_by_layers(script: Script) -> None:
    """The same, of a layer-wise load."""
    await store_into_slots_in_use(script, layerwise=True)


async def load_what_is_being_stored(script: Script) -> None:
    """A load joins a store under way."""
    storing = script.kv.start_store(KEYS, SOURCE, after=script.compute.writes(pages(SOURCE.ids)))
    await _some_turns()
    await script.end(storing, script.kv.start_load(KEYS, INTO))


async def load_what_is_being_promoted(script: Script) -> None:
    """Two loads of blocks of the host, of which the first takes them to the GPU pool too."""
    await script.have("cpu")
    first = script.kv.start_load(KEYS, INTO)
    await _some_turns()
    await script.end(first, script.kv.start_load(KEYS, ELSEWHERE, after=script.compute.reads(pages(ELSEWHERE.ids))))


async def attend_layer_by_layer(script: Script) -> None:
    """Each layer is read as soon as it is there, and the pages are given up in the end."""
    await script.have("cpu")
    handle = script.kv.start_load(KEYS, INTO, after=script.compute.reads(pages(INTO.ids)), layerwise=True)
    admitted = asyncio.ensure_future(handle.admitted())
    await until(admitted.done, on_wait=_nothing)
    assert admitted.result() == 6
    for layer in range(NUM_LAYERS):
        handle.wait_layer(layer, script.compute)
        script.compute.reads(pages(INTO.ids, slice(layer, layer + 1)))
    await script.end(handle)


async def compute_layer_by_layer(script: Script) -> None:
    """Each layer is stored as soon as it is computed, another load joins, and the pages are computed anew."""
    handle = script.kv.start_store(KEYS, SOURCE, layerwise=True)
    loading = script.kv.start_load(KEYS, INTO)
    for layer in range(NUM_LAYERS):
        after = script.compute.writes(pages(SOURCE.ids, slice(layer, layer + 1)))
        handle.store_layer(layer, after=after)
        for _ in range(2):  # so that the first layer may be there before the second is computed
            script.device.step()
            await _some_turns()
    await script.end(handle, loading)
    script.compute.writes(pages(SOURCE.ids))


def _nothing() -> None:
    pass


SCRIPTS: dict[Callable[[Script], Awaitable[None]], list[AnyTier]] = {
    load_into_used_pages: [CPU],
    store_what_is_computed: [CPU],
    store_into_slots_in_use: [CPU],
    store_into_slots_in_use_by_layers: [CPU],
    load_what_is_being_stored: [CPU],
    load_what_is_being_promoted: [GPU, CPU],
    attend_layer_by_layer: [CPU],
    compute_layer_by_layer: [CPU],
}

# What could be forgotten: the method that does without, and what it does instead, given the one that is right.


def _no_wait_of(direction: str) -> Callable[[Any], Any]:
    def mutate(right: Any) -> Any:  # noqa: ANN401 - any method
        def wait(self: ScriptedStream, after: object) -> None:
            if not self.name.startswith(direction):
                right(self, after)

        return wait

    return mutate


def _release_the_lease_at_once(right: Any) -> Any:  # noqa: ANN401 - whatever it is, it is passed on
    def start(self: ReadyLoad) -> Any:  # noqa: ANN401 - whatever it is, it is passed on
        handle = right(self)
        self._leases[0].release()
        return handle

    return start


def _end_at_once(right: Any) -> Any:  # noqa: ANN401 - whatever it is, it is passed on
    def start(self: ReadyLoad) -> Any:  # noqa: ANN401 - whatever it is, it is passed on
        handle = right(self)
        assert self._copy is not None
        self._copy.ended.remove_done_callback(self._stream_copied)
        self._copied(self._copy.ended.exception() if self._copy.ended.done() else None)
        return handle

    return start


def _release_layers_at_once(right: Any) -> Any:  # noqa: ANN401 - whatever it is, it is passed on
    async def admit(self: LayerLoad) -> None:
        await right(self)
        self._release()

    return admit


def _commit_at_once(right: Any) -> Any:  # noqa: ANN401 - whatever it is, it is passed on
    def copy_out(self: Store, placed: Any) -> Any:  # noqa: ANN401 - whatever it is, it is passed on
        copy = right(self, placed)
        placed.reservation.commit(placed.fresh).release()
        return copy

    return copy_out


def _end_before_the_copy(right: Any) -> Any:  # noqa: ANN401 - whatever it is, it is passed on
    def copy_out(self: Store, placed: Any) -> LaneCopy:  # noqa: ANN401 - whatever it is, it is passed on
        right(self, placed)
        ended = LaneCopy(lambda: None)
        ended.resolve(None)
        return ended

    return copy_out


def _commit_with_the_first_layer(right: Any) -> Any:  # noqa: ANN401 - whatever it is, it is passed on
    def end_layer(self: LayerStore, error: BaseException | None) -> None:
        right(self, error)
        for placed in self._placed:
            placed.reservation.commit(placed.fresh).release()
            assert placed.fill
            placed.fill.finish()

    return end_layer


def _commit_promotions_at_once(right: Any) -> Any:  # noqa: ANN401 - whatever it is, it is passed on
    def promote(self: Load, landed: Any) -> tuple[Any, Reservation | None]:  # noqa: ANN401
        promoted, reservation = right(self, landed)
        if reservation is not None:
            reservation.commit().release()
        return promoted, reservation

    return promote


def _do_not_wait(right: Any) -> Any:  # noqa: ANN401 - whatever it is, it is passed on
    def wait_layer(self: LoadHandle, layer: int, stream: object = None) -> None:
        pass

    return wait_layer


MUTATIONS = [
    # what is forgotten, in which method, found by which script
    (_no_wait_of("h2d"), ScriptedStream, "wait", load_into_used_pages),
    (_no_wait_of("d2h"), ScriptedStream, "wait", store_what_is_computed),
    (_no_wait_of("h2d"), ScriptedStream, "wait", attend_layer_by_layer),
    (_no_wait_of("d2h"), ScriptedStream, "wait", compute_layer_by_layer),
    (_no_wait_of("compute"), ScriptedStream, "wait", attend_layer_by_layer),
    (_release_the_lease_at_once, ReadyLoad, "start", store_into_slots_in_use),
    (_release_layers_at_once, LayerLoad, "_admit", store_into_slots_in_use_by_layers),
    (_commit_at_once, Store, "_copy_out", load_what_is_being_stored),
    (_commit_with_the_first_layer, LayerStore, "_end_layer", compute_layer_by_layer),
    (_commit_promotions_at_once, Load, "_promote", load_what_is_being_promoted),
    (_end_at_once, ReadyLoad, "start", load_into_used_pages),
    (_end_before_the_copy, Store, "_copy_out", store_what_is_computed),
    (_do_not_wait, LoadHandle, "wait_layer", attend_layer_by_layer),
]


async def _races(work: Callable[[Script], Awaitable[None]], seed: int, *, is_right: bool) -> int:
    device, engine = ScriptedDevice(chance=random.Random(seed)), Engine()
    async with open_cache(*SCRIPTS[work], engine=engine, device=device) as kv:
        await work(Script(kv, engine, device))
        device.run_all()
        if is_right:
            await until_idle(kv, on_wait=device.run_all)
        else:
            await until(lambda: kv.stats().transfers == 0, on_wait=device.run_all)
        found = len(device.races)
        device.races.clear()  # else closing would fail for them
    return found


@pytest.mark.parametrize("work", SCRIPTS)
async def test_everything_is_ordered(work: Callable[[Script], Awaitable[None]]) -> None:
    """Whichever stream goes first."""
    assert [await _races(work, seed, is_right=True) for seed in range(20)] == [0] * 20


@pytest.mark.parametrize(
    ("mutate", "place", "name", "work"),
    [pytest.param(*row, id=f"{row[0].__qualname__.split('.')[0].strip('_')}: {row[3].__name__}") for row in MUTATIONS],
)
async def test_whatever_is_forgotten_is_found(
    mutate: Callable[[Any], Any],
    place: type,
    name: str,
    work: Callable[[Script], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In every run, whichever stream goes first."""
    monkeypatch.setattr(place, name, mutate(getattr(place, name)))
    assert 0 not in [await _races(work, seed, is_right=False) for seed in range(5)]
