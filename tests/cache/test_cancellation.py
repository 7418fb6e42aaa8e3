"""Cancelled anywhere, nothing is left behind, and the caller's memory is the caller's once the cancellation is raised.

The caller poisons its memory the moment it sees the cancellation: whoever still copies out of it stores poison, whoever
still copies into it spoils the poison. Two sweeps: one over every turn of the event loop, with nothing in threads; one,
coarser, over real threads, files and both event loops.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from anyio import CancelScope
from anyio.lowlevel import checkpoint

from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import AnyTier, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, contents, prompt
from tests.support.virtual import InlineWorkers
from tiered_kv import CacheLimits, GPULoadStoreSpec, LoadHandle, LoadResult, StoreHandle, TieredKV
from tiered_kv.testing import ScriptedDevice

Operation = Callable[[TieredKV, Engine], Awaitable[object]]
Cancel = Callable[["Caller"], object]

HERE, NEW = prompt(9), prompt(9, seed=1)
"""Blocks that are stored beforehand, the first few in the upper tiers, and blocks that are in the engine only."""
INTO, SOURCE = GPULoadStoreSpec(range(9)), GPULoadStoreSpec(range(10, 19))
LIMITS = CacheLimits(window=4 * PAYLOAD_BYTES, bounce=16 * PAYLOAD_BYTES, load_timeout_s=1e6, store_timeout_s=1e6)


async def _load(kv: TieredKV, engine: Engine) -> None:
    loaded = await kv.load(HERE, INTO)
    assert engine.read(INTO[: loaded.num_blocks]) == contents(HERE[: loaded.num_blocks])


async def _lease(kv: TieredKV, engine: Engine) -> None:
    async with kv.lease(HERE) as lease:
        await checkpoint()
        assert [bytes(view) for view in lease.views] == contents(HERE[: lease.num_blocks])
        await checkpoint()


async def _lookup(kv: TieredKV, engine: Engine) -> None:
    assert (await kv.lookup(HERE)).num_blocks == len(HERE)


async def _prefetch(kv: TieredKV, engine: Engine) -> None:
    await kv.prefetch(HERE)


async def _store(kv: TieredKV, engine: Engine) -> None:
    await kv.store(NEW, SOURCE)


async def _load_layers(kv: TieredKV, engine: Engine) -> None:
    loaded = await kv.start_load(HERE, INTO, layerwise=True)
    assert engine.read(INTO[: loaded.num_blocks]) == contents(HERE[: loaded.num_blocks])


async def _store_layers(kv: TieredKV, engine: Engine) -> None:
    handle = kv.start_store(NEW, SOURCE, layerwise=True)
    for layer in range(2):
        handle.store_layer(layer)
    await handle


OPERATIONS: dict[str, Operation] = {
    "load": _load,
    "load layers": _load_layers,
    "store": _store,
    "store layers": _store_layers,
    "lookup": _lookup,
    "prefetch": _prefetch,
    "lease": _lease,
}


async def test_a_cancelled_load_is_counted_as_cancelled() -> None:
    """Its blocks are missed as whoever asked for them has given up, and no tier and no deadline is to blame."""
    engine, slow = Engine(), ScriptedBackend(timeout_s=1e6)
    async with open_cache(slow, engine=engine, limits=LIMITS) as kv:
        await keep(kv, engine, HERE)
        slow.on_read.hold()
        loading = asyncio.ensure_future(_load(kv, engine))
        await until(lambda: slow.on_read.num_held > 0)
        loading.cancel()
        await asyncio.wait({loading})
        assert loading.cancelled()
        slow.on_read.release()
        await until_idle(kv)
        assert kv.stats().missed_because == {"revoked": len(HERE)}


def _tiers(chain: str, folder: Path | None = None) -> list[AnyTier]:
    """Make a chain where the memory tiers are too small for all that is moved."""
    gpu = {"medium": "gpu", "capacity": 3 * PAYLOAD_BYTES}
    cpu = {"medium": "cpu", "capacity": 6 * PAYLOAD_BYTES}
    nvme = {"medium": "nvme", "path": str(folder), "capacity": "1MiB", "timeout_s": 1e6}
    owned = ScriptedSlotBackend(timeout_s=1e6) if folder is None else nvme
    chains: dict[str, list[AnyTier]] = {
        "cpu, owned": [cpu, owned],
        "gpu, cpu, owned": [gpu, cpu, owned],
        "no cpu, owned": [owned],
        "cpu, keyed": [cpu, ScriptedBackend(timeout_s=1e6)],
    }
    return chains[chain]


CASES = [
    pytest.param(operation, chain, id=f"{name}: {chain}")
    for name, operation in OPERATIONS.items()
    for chain in ("cpu, owned", "gpu, cpu, owned", "no cpu, owned", "cpu, keyed")
    if not (name in ("prefetch", "lease") and chain == "no cpu, owned")  # these need a CPU tier
]


class Caller:
    """A task that poisons the engine's memory the moment its operation has let go of it, however it ends."""

    def __init__(self, operation: Awaitable[object], engine: Engine) -> None:
        self.operation = operation
        self.scope = CancelScope()
        self.task = asyncio.create_task(self._run(engine))

    async def _run(self, engine: Engine) -> None:
        with suppress(asyncio.CancelledError, TimeoutError), self.scope:
            try:
                await self.operation
            finally:
                engine.poison()


def _cancel_task(caller: Caller) -> None:
    caller.task.cancel()


def _cancel_scope(caller: Caller) -> None:
    caller.scope.cancel()


class Clock:
    """The event loop's clock, which a test may put forward: timers then fire in the next turn."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def __call__(self) -> float:
        """Tell the time in seconds."""
        return time.monotonic() + self._ahead_s

    def put_forward(self, seconds: float) -> None:
        """Let time pass at once."""
        self._ahead_s += seconds


@asynccontextmanager
async def _steps_of(device: ScriptedDevice) -> AsyncIterator[None]:
    """Have the device run one copy every third turn of the loop, so that copies lie in its queues for a while."""

    async def step() -> None:
        while True:
            for _ in range(3):
                await checkpoint()
            device.step()

    task = asyncio.create_task(step())
    try:
        yield
    finally:
        device.run_all()
        task.cancel()


async def _sweep(kv: TieredKV, engine: Engine, operation: Operation, cancel: Cancel, turns: Iterable[int]) -> int:
    """Cancel an operation after so many turns of the loop, for each of ``turns``, until it ends before; return them."""
    await keep(kv, engine, HERE)
    threads, tasks = threading.active_count(), asyncio.all_tasks()
    for num_turns in turns:
        for tier in kv.stats().tiers[:-1]:
            await kv.evict(HERE[2:], tier=tier.tier)
        await kv.evict(NEW)
        engine.compute(NEW, SOURCE.ids.tolist())
        caller = Caller(operation(kv, engine), engine)
        for _ in range(num_turns):
            await checkpoint()
        if has_ended := caller.task.done():
            caller.task.result()
        else:
            cancel(caller)
        await until(caller.task.done)
        caller.task.result()
        await until_idle(kv)
        assert engine.is_poisoned(), "somebody wrote to the caller's memory"
        # No more than before: what was ending then may have ended since, and what has just ended may still be counted.
        await until(lambda: threading.active_count() <= threads and asyncio.all_tasks() <= tasks)
        await _check_what_is_kept(kv, engine)
        if has_ended:
            return num_turns
    raise AssertionError("the operation never ended")


async def _check_what_is_kept(kv: TieredKV, engine: Engine) -> None:
    """Nothing that was there is lost, and of the new blocks each is as it was computed, or absent."""
    assert (await kv.load(HERE, INTO)).num_blocks == len(HERE)
    assert engine.read(INTO) == contents(HERE)
    position = 0
    while position < len(NEW):
        keys, into = NEW[position:], SOURCE[position:]
        n = (await kv.load(keys, into)).num_blocks
        assert engine.read(into[:n]) == contents(keys[:n])
        position += n or 1


@asynccontextmanager
async def _without_threads(chain: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TieredKV]:
    """Open a cache where everything happens on the event loop, in the same order each time."""
    monkeypatch.setattr("tiered_kv.cache.opening.WorkerPool", InlineWorkers)
    device = ScriptedDevice()
    async with _steps_of(device), open_cache(*_tiers(chain), engine=engine, limits=LIMITS, device=device) as kv:
        yield kv


def _every_turn() -> Iterable[int]:
    return range(1, 2000)


def _ever_later_turns() -> Iterator[int]:
    turns = 1.0
    while True:
        yield int(turns)
        turns = max(turns + 1, turns * 1.4)


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "chain"), CASES)
async def test_a_task_cancelled_at_any_turn(operation: Operation, chain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``task.cancel()`` at every turn of the loop leaves nothing behind and nobody in the caller's memory."""
    engine = Engine()
    async with _without_threads(chain, engine, monkeypatch) as kv:
        await _sweep(kv, engine, operation, _cancel_task, _every_turn())


@pytest.mark.parametrize("operation", [_load, _store, _lease])
async def test_a_scope_cancelled_at_any_turn(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does an AnyIO scope, which cancels anew at every turn until it is left."""
    engine = Engine()
    async with _without_threads("gpu, cpu, owned", engine, monkeypatch) as kv:
        turns = await _sweep(kv, engine, operation, _cancel_scope, _every_turn())
    assert turns > 5


@pytest.mark.parametrize("operation", [_load, _store, _lease])
async def test_a_wait_for_that_times_out_at_any_turn(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does the timeout of ``asyncio.wait_for``, whenever it comes."""
    clock, engine = Clock(), Engine()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", clock)

    async def bounded(kv: TieredKV, engine: Engine) -> None:
        await asyncio.wait_for(operation(kv, engine), 60.0)

    async with _without_threads("gpu, cpu, owned", engine, monkeypatch) as kv:
        turns = await _sweep(kv, engine, bounded, lambda _: clock.put_forward(100.0), _every_turn())
    assert turns > 5


@pytest.mark.parametrize("operation", [_load, _store])
async def test_a_task_cancelled_again_and_again(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cancels at every turn is not let go any earlier than who cancels once."""
    engine = Engine()

    def cancel(caller: Caller) -> None:
        if not caller.task.done():
            caller.task.cancel()
            asyncio.get_running_loop().call_soon(cancel, caller)

    async with _without_threads("gpu, cpu, owned", engine, monkeypatch) as kv:
        turns = await _sweep(kv, engine, operation, cancel, _every_turn())
    assert turns > 5


@pytest.mark.parametrize("chain", ["cpu, owned", "gpu, cpu, owned", "no cpu, owned", "cpu, keyed"])
@pytest.mark.parametrize("what", ["load", "store"])
async def test_a_handle_cancelled_at_any_turn(what: str, chain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle that is cancelled ends with a result, and the prefix that it reports is in place."""
    engine = Engine()
    handles: list[LoadHandle | StoreHandle] = []
    num_ended = 0

    async def operation(kv: TieredKV, engine: Engine) -> None:
        nonlocal num_ended
        handles.append(kv.start_load(HERE, INTO) if what == "load" else kv.start_store(NEW, SOURCE))
        result = await handles[-1]
        num_ended += 1
        assert handles[-1].done
        if isinstance(result, LoadResult):
            assert engine.read(INTO[: result.num_blocks]) == contents(HERE[: result.num_blocks])
        else:
            assert result.num_stored + result.num_present + result.num_dropped == len(NEW)

    async with _without_threads(chain, engine, monkeypatch) as kv:
        turns = await _sweep(kv, engine, operation, lambda _: handles[-1].cancel(), _every_turn())
    assert num_ended == turns > 5  # none was cancelled itself


@pytest.mark.both_loops
@pytest.mark.parametrize("chain", ["gpu, cpu, owned", "no cpu, owned", "cpu, keyed"])
@pytest.mark.parametrize("operation", [_load, _store])
async def test_cancelled_beside_threads_and_files(operation: Operation, chain: str, tmp_path: Path) -> None:
    """Where copies and files are in the hands of threads, a cancellation at any time leaves no more behind."""
    engine = Engine()
    ways: Iterator[Cancel] = itertools.cycle((_cancel_task, _cancel_scope))
    async with open_cache(*_tiers(chain, tmp_path), engine=engine, limits=LIMITS) as kv:
        turns = await _sweep(kv, engine, operation, lambda each: next(ways)(each), _ever_later_turns())  # noqa: PLW0108 - each time the next
    assert turns > 5
