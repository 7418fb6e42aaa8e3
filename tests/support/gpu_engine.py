"""A small engine on a GPU of `fake_cuda`, a cache opened for it, and the round that every byte makes."""

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from tests.support.caches import inside, open_cache, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, contents, prompt
from tests.support.fake_driver import GLOBAL, FakeDriver
from tiered_kv import GPULoadStoreSpec, TieredKV
from tiered_kv.memory import PageLockState, crossover

GPU = "cuda:3"
KEYS, INTO = prompt(13), GPULoadStoreSpec(range(20, 33))
CPU_TIER = {"medium": "cpu", "capacity": 32 * PAYLOAD_BYTES}
GPU_TIER = {"medium": "gpu", "capacity": 8 * PAYLOAD_BYTES}


def engine_on(fake: FakeDriver, device: int = 3, *, shift_bytes: int = 0) -> Engine:
    """Return an engine whose tensors are a GPU's; the second layer begins so far from a multiple of 16 bytes."""
    engine = Engine(shift_bytes=shift_bytes)
    for tensor in engine.caches.values():
        fake.keep(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes(), device, tensor)
    return engine


@asynccontextmanager
async def opened(engine: Engine, *tiers: Any, device: Any = GPU) -> AsyncIterator[TieredKV]:  # noqa: ANN401 - as the facade takes them
    """Open a cache for the engine, and bind its tensors."""
    async with open_cache(*(tiers or (CPU_TIER,)), engine=engine, device=device) as kv:
        yield kv


async def goes_round(kv: TieredKV, engine: Engine, *, layerwise: bool = False) -> None:
    """Store and load, and fail unless every byte comes back."""
    stored = await kv.store(KEYS, engine.compute(KEYS))
    assert stored.num_stored + stored.num_present == len(KEYS)
    engine.poison()
    handle = kv.start_load(KEYS, INTO, layerwise=layerwise)
    assert await handle.admitted() == len(KEYS)
    assert (await handle).num_blocks == len(KEYS)
    assert engine.read(INTO) == contents(KEYS)
    await until_idle(kv)


@contextmanager
def capturing(fake: FakeDriver) -> Iterator[None]:
    """Have another thread capture a CUDA graph in the default mode."""
    begun, end = threading.Event(), threading.Event()

    def capture() -> None:
        with fake.capture(GLOBAL):
            begun.set()
            assert end.wait(60)

    thread = threading.Thread(target=capture)
    thread.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        end.set()
        thread.join()


def only(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have blocks cross the bus in one way, whatever would be measured."""

    def measure(_: object, __: int, ___: int, ways: Sequence[crossover.Way], **____: object) -> object:
        (wanted,) = [each for each in ways if each.name == way]
        return dict.fromkeys((True, False), ((1, wanted),))

    monkeypatch.setattr(crossover, "measure", measure)


def locked(kv: TieredKV) -> None:
    """Wait until the host memory of a cache is page-locked."""
    for locking in inside(kv).cache.device._page_lockings:  # noqa: SLF001 - what the wait is for
        assert locking.wait(60) is PageLockState.LOCKED
