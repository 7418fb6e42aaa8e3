"""A cache that is being closed: what is under way ends with an answer or is told so, and everything is closed."""

import asyncio
import gc
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from typing_extensions import override

from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import Recorder, inside, keep, open_cache, until, until_idle
from tests.support.descriptors import slabs
from tests.support.engine import PAYLOAD_BYTES, SMALL_LIMITS, Engine, prompt
from tiered_kv import BlockKeys, ClosedError, ConfigurationError, GPULoadStoreSpec, TieredKV, full
from tiered_kv.telemetry import Page
from tiered_kv.telemetry.watch import Watch
from tiered_kv.transfers.writedown import Cleaner
from tiered_kv.values.events import CacheClosed, CacheOpened

KEYS = prompt(4)
INTO = GPULoadStoreSpec(range(4))
CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}
BRIEF = SMALL_LIMITS.model_copy(update={"close_timeout_s": 0.2})


async def keep_below(kv: TieredKV, engine: Engine, keys: BlockKeys = KEYS) -> None:
    """Have blocks in storage alone."""
    await keep(kv, engine, keys)
    await kv.evict(keys, tier="cpu")


WAITS: dict[str, Callable[[TieredKV], Awaitable[object]]] = {
    "lookup": lambda kv: kv.lookup(KEYS),
    "lookup_groups": lambda kv: kv.lookup_groups([full(KEYS)]),
    "explain": lambda kv: kv.explain(KEYS, ask=True),
    "evict": lambda kv: kv.evict(KEYS),
}


@pytest.mark.parametrize("name", WAITS)
async def test_a_call_that_waits_for_a_tier_is_told(name: str) -> None:
    """It gets a ClosedError once the time for closing is up: nobody has cancelled it."""
    medium = ScriptedBackend()
    async with open_cache(CPU, medium, limits=BRIEF) as kv:
        medium.on_lookup.hold()
        medium.on_delete.hold()
        call = asyncio.ensure_future(WAITS[name](kv))
        await until(lambda: medium.on_lookup.num_held + medium.on_delete.num_held > 0)
    with pytest.raises(ClosedError, match="was closed before"):
        await call


async def test_a_call_that_has_its_answer_in_time_returns_it() -> None:
    """Closing waits for it, as it does for transfers."""
    engine, medium = Engine(), ScriptedBackend()
    async with open_cache(CPU, medium, engine=engine) as kv:
        await keep_below(kv, engine)
        medium.on_lookup.hold()
        looking = asyncio.create_task(kv.lookup(KEYS))
        await until(lambda: medium.on_lookup.num_held > 0)
        closing = asyncio.create_task(kv.aclose())
        await until(lambda: inside(kv).cache.closing is not None)
        medium.on_lookup.release()
        assert (await looking).num_blocks == 4
        await closing


async def test_a_flush_says_that_it_was_cut_off() -> None:
    """It returns only when all that waited is written."""
    engine, medium = Engine(), ScriptedBackend()
    medium.settings = medium.settings.model_copy(update={"write": "back"})
    recorder = Recorder()
    limits = BRIEF.model_copy(update={"low_water": 0.0, "clean_after_s": 1000.0})
    async with open_cache(CPU, medium, engine=engine, emit=recorder, limits=limits) as kv:
        await kv.store(KEYS, engine.compute(KEYS))
        medium.on_write.hold()
        flushing = asyncio.create_task(kv.flush())
        await until(lambda: medium.on_write.num_held > 0)
    with pytest.raises(ClosedError, match="was closed before"):
        await flushing
    assert medium.num_records == 0


async def test_a_flush_through_a_loss_of_power_says_that_it_was_cut_off() -> None:
    """Nor does it return where the checkpoint was given up."""
    engine, disk = Engine(), ScriptedSlotBackend()
    async with open_cache(CPU, disk, engine=engine, limits=BRIEF) as kv:
        await keep(kv, engine, KEYS)
        disk.on_checkpoint.hold()
        flushing = asyncio.create_task(kv.flush(sync=True))
        await until(lambda: disk.on_checkpoint.num_held > 0)
    with pytest.raises(ClosedError, match="was closed before this was done: checkpoint"):
        await flushing


async def test_a_resize_says_that_it_was_cut_off() -> None:
    """What it waits for, blocks to be written, was given up."""
    engine, medium = Engine(), ScriptedBackend()
    medium.settings = medium.settings.model_copy(update={"write": "back"})
    limits = BRIEF.model_copy(update={"low_water": 0.0, "clean_after_s": 1000.0})
    async with open_cache(CPU, medium, engine=engine, limits=limits) as kv:
        await kv.store(KEYS, engine.compute(KEYS))
        medium.on_write.hold()
        resizing = asyncio.create_task(kv.resize("cpu", 8 * PAYLOAD_BYTES))
        await until(lambda: medium.on_write.num_held > 0)
    with pytest.raises(ClosedError, match="was closed before this was done: resize cpu"):
        await resizing


async def test_a_load_of_groups_ends_with_what_is_in_place() -> None:
    """As every load does; nobody has cancelled it."""
    engine, medium = Engine(), ScriptedBackend()
    async with open_cache(CPU, medium, engine=engine, limits=BRIEF) as kv:
        await keep_below(kv, engine)
        medium.on_read.hold()
        loading = asyncio.create_task(kv.load_groups([full(KEYS)], [INTO]))
        await until(lambda: medium.on_read.num_held > 0)
    assert (await loading).num_tokens == 0


async def test_who_waits_for_a_signal_is_told() -> None:
    """It will not drain any more: at once, as nothing here could end its wait."""
    async with open_cache(CPU, limits=SMALL_LIMITS.model_copy(update={"close_timeout_s": 3600.0})) as kv:
        with kv.drain_on(signal.SIGUSR1) as draining:
            waiting = asyncio.create_task(draining.wait())
            await asyncio.sleep(0)
            await kv.aclose()
    with pytest.raises(ClosedError, match="was closed before"):
        await waiting


async def test_all_who_close_wait_for_the_end() -> None:
    """Whichever call was the first: when any of them returns, nobody writes to the engine any more."""
    engine, medium = Engine(), ScriptedBackend()
    async with open_cache(CPU, medium, engine=engine) as kv:
        await keep_below(kv, engine)
        medium.on_read.hold()
        load = kv.start_load(KEYS, INTO)
        await until(lambda: medium.on_read.num_held > 0)
        first, second = asyncio.create_task(kv.aclose()), asyncio.create_task(kv.aclose())
        await until(lambda: inside(kv).cache.closing is not None)
        assert not first.done()
        assert not second.done()
        medium.on_read.release()
        await second
        assert load.done
        await first


async def test_a_fault_of_ours_does_not_keep_tiers_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of closing is taken; what one of them raised is raised at the end."""
    recorder, medium = Recorder(), ScriptedBackend()
    medium.settings = medium.settings.model_copy(update={"write": "back"})

    async def write(_: Cleaner, __: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with open_cache(CPU, medium, emit=recorder):
            monkeypatch.setattr(Cleaner, "write", write)
    assert medium.on_close.num_calls == 1
    assert recorder.of(CacheClosed)


class Unshowable(Page):
    """A page that raises when it is to show a cache."""

    @override
    def begin(self, watch: Watch) -> None:
        raise ZeroDivisionError


async def test_a_fault_of_ours_at_the_end_of_opening_leaves_nothing_open(tmp_path: Path) -> None:
    """Whoever enters has no cache to close: its tasks, threads and memory end, and its directory is free.

    Nobody is told that it has closed, as nobody was that it has opened.
    """
    nvme = {"medium": "nvme", "path": tmp_path / "kv", "capacity": "8MiB", "num_threads": 2}
    threads, tasks, memory = set(threading.enumerate()), asyncio.all_tasks(), slabs()
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError):
        async with open_cache(CPU, nvme, page=Unshowable(), emit=recorder):
            pass
    assert not recorder.of(CacheOpened)
    assert not recorder.of(CacheClosed)
    assert asyncio.all_tasks() == tasks
    assert slabs() <= memory
    await until(lambda: set(threading.enumerate()) <= threads)  # those of tests before may end meanwhile
    async with open_cache(CPU, nvme) as kv:
        assert not kv.stats()["nvme"].is_bypassed


async def test_threads_are_not_joined_on_the_loop() -> None:
    """A copy that hangs in a stream's thread holds up the closing, not the program's event loop."""
    engine, never = Engine(), threading.Event()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with open_cache(CPU, engine=engine, limits=BRIEF) as kv:
        await keep(kv, engine, KEYS)
        load = kv.start_load(KEYS, INTO, after=never)
        await until(lambda: kv.stats().transfers > 0)
        closing = asyncio.create_task(kv.aclose())
        await until(lambda: load.done)
        counting = asyncio.create_task(count())
        await closing
        counting.cancel()
        never.set()
    assert turns > 1000


def test_another_event_loop_is_refused() -> None:
    """A cache is for the loop that opened it, in the same thread too: the call would never end."""
    with asyncio.Runner() as first, asyncio.Runner() as second:
        opening = open_cache(CPU)
        kv = first.run(opening.__aenter__())
        with pytest.raises(ConfigurationError, match=r"event loop that opened it.*submit_load"):
            second.run(_lookup(kv))
        with pytest.raises(ConfigurationError, match="event loop that opened it"):
            second.run(kv.aclose())
        first.run(opening.__aexit__(None, None, None))
        second.run(kv.aclose())


async def _lookup(kv: TieredKV) -> None:
    await kv.lookup(KEYS)


async def test_a_cancelled_load_of_groups_ends_when_all_its_loads_have() -> None:
    """The engine's blocks of every group are the engine's again."""
    engine, medium = Engine(), ScriptedBackend()
    async with open_cache(CPU, medium, engine=engine) as kv:
        await keep_below(kv, engine)
        medium.on_read.hold()
        loading = asyncio.create_task(kv.load_groups([full(KEYS)], [INTO]))
        await until(lambda: medium.on_read.num_held > 0)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        engine.poison()
        medium.on_read.release()
        await until_idle(kv)
        assert engine.is_poisoned()


async def test_memory_goes_back_whoever_knows_the_cache_yet() -> None:
    """At once, not when garbage is collected: it may be most of what the machine has."""
    engine, medium = Engine(), ScriptedBackend()
    gc.disable()
    try:
        before = slabs()
        async with open_cache(CPU, medium, engine=engine) as kv:
            stored = await kv.store(KEYS, engine.compute(KEYS))
            await stored.settled()
            resident = kv.start_load(KEYS, INTO)
            await resident
            await kv.evict(KEYS, tier="cpu")
            loading = kv.start_load(KEYS, INTO)
            assert (await loading).num_blocks == 4
            assert len(slabs() - before) == 1
        assert slabs() <= before, (stored, resident, loading)
    finally:
        gc.enable()
