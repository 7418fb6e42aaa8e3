"""Engines with a synchronous loop: any thread submits, polls and looks up, and none waits for the event loop."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.support.backends import ScriptedBackend
from tests.support.caches import inside, keep, open_cache, until, until_idle
from tests.support.engine import MODEL, PAYLOAD_BYTES, Engine, contents, prompt, small_layout
from tiered_kv import (
    CacheLimits,
    ClosedError,
    ConfigurationError,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LayoutMismatchError,
    LoadResult,
    StoreResult,
    TieredKV,
)
from tiered_kv.testing import ScriptedDevice, ScriptedEvent

CPU = {"medium": "cpu", "capacity": 64 * PAYLOAD_BYTES}
WAIT_S = 30.0
"""For what comes at once unless something is broken."""


async def in_thread(function: Callable[[], object]) -> None:
    """Run ``function`` in a thread of its own; raise what it raises."""
    await in_threads([function])


async def in_threads(functions: list[Callable[[], object]]) -> None:
    """Run each in a thread of its own; raise what the first raises."""
    errors: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised in the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    await until(lambda: not any(thread.is_alive() for thread in threads))
    if errors:
        raise errors[0]


async def test_a_thread_stores_and_loads_the_same_bytes() -> None:
    """What a thread submits comes back by `poll`, with the ticket, its result and the right bytes."""
    engine, keys = Engine(), prompt(9)
    source, into = engine.compute(keys), GPULoadStoreSpec(range(20, 29))
    async with open_cache(CPU, engine=engine) as kv:

        def serve() -> None:
            assert kv.lookup_nowait(keys).num_blocks == 0
            storing = kv.submit_store(keys, source)
            [(ticket, stored)] = kv.poll(WAIT_S)
            assert ticket is storing
            assert isinstance(stored, StoreResult)
            assert stored.num_stored == 9
            assert kv.lookup_nowait(keys).by_tier == {"cpu": 9}
            loading = kv.submit_load(keys, into)
            [(ticket, loaded)] = kv.poll(WAIT_S)
            assert ticket is loading
            assert isinstance(loaded, LoadResult)
            assert loaded.num_blocks == 9
            assert loading.result is loaded
            assert kv.poll() == []

        await in_thread(serve)
        assert engine.read(into) == contents(keys)
        await until_idle(kv)


async def test_lookup_from_a_thread_is_that_of_the_loop(tmp_path: Path) -> None:
    """Over memory and an owned disk both say the same, tier by tier; a shared tier is not asked."""
    nvme = {"medium": "nvme", "path": str(tmp_path), "capacity": "64MiB"}
    engine, keys = Engine(), prompt(9)
    async with open_cache({"medium": "cpu", "capacity": 4 * PAYLOAD_BYTES}, nvme, engine=engine) as kv:
        await keep(kv, engine, keys)
        found: list[object] = []
        await in_thread(lambda: found.append(kv.lookup_nowait(keys)))
        assert found == [await kv.lookup(keys)]
        assert kv.lookup_nowait(keys).num_blocks == 9
    shared = ScriptedBackend()
    async with open_cache(shared, engine=engine) as kv:
        await keep(kv, engine, keys)
        asked = shared.on_lookup.num_calls
        assert kv.lookup_nowait(keys).num_blocks == 0
        assert shared.on_lookup.num_calls == asked


async def test_nothing_is_read_before_the_event_that_was_given() -> None:
    """The wait is on the stream when `submit_store` returns, before the event loop has had a turn."""
    device, engine, keys, after = ScriptedDevice(), Engine(), prompt(2), ScriptedEvent()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        source = engine.compute(keys)
        engine.poison()
        before = len(device.log)
        storing = kv.submit_store(keys, source, after=after)
        assert [what for _, what in device.log[before:]] == ["wait"]
        await until(lambda: device.pending > 0)
        device.run_all()
        assert storing.result is None
        engine.compute(keys)
        after.fire()
        await until(lambda: storing.result is not None, on_wait=device.run_all)
        into = GPULoadStoreSpec([5, 6])
        loading = kv.submit_load(keys, into)
        await until(lambda: loading.result is not None, on_wait=device.run_all)
        assert engine.read(into) == contents(keys)


async def test_what_is_wrong_raises_in_the_thread() -> None:
    """Arguments are checked before `submit_load` returns, and nothing is left to poll."""
    engine, keys = Engine(), prompt(3)
    async with open_cache(CPU, engine=engine) as kv:

        def submit() -> None:
            with pytest.raises(LayoutMismatchError, match="3 block ids, got 2"):
                kv.submit_load(keys, GPULoadStoreSpec([1, 2]))
            with pytest.raises(ConfigurationError, match="not in"):
                kv.submit_store(keys, GPULoadStoreSpec([1, 2, 64]))
            with pytest.raises(ConfigurationError, match="after"):
                kv.submit_store(keys, GPULoadStoreSpec([1, 2, 3]), after="now")
            assert kv.poll(WAIT_S) == []

        await in_thread(submit)
        await until_idle(kv)


async def test_the_other_calls_stay_on_the_loop() -> None:
    """What is not made for threads says so instead of racing."""
    engine, keys = Engine(), prompt(3)
    async with open_cache(CPU, engine=engine) as kv:

        def call() -> None:
            with pytest.raises(ConfigurationError, match="other threads use submit_load"):
                kv.start_load(keys, GPULoadStoreSpec(range(3)))
            with pytest.raises(ConfigurationError, match="other threads use submit_load"):
                kv.stats()

        await in_thread(call)


async def test_the_loops_own_thread_does_not_block_itself() -> None:
    """A wait that could never end is refused; polling without one is fine there."""
    engine, keys = Engine(), prompt(3)
    async with open_cache(CPU, engine=engine) as kv:
        storing = kv.submit_store(keys, engine.compute(keys))
        with pytest.raises(ConfigurationError, match="must not block"):
            storing.wait()
        with pytest.raises(ConfigurationError, match="must not block"):
            kv.poll(1.0)
        assert kv.poll() == []
        await until(lambda: storing.result is not None)
        assert kv.poll() == [(storing, storing.result)]


async def test_a_result_that_is_waited_for_is_not_polled() -> None:
    """Each result is handed out once: a thread that waits for its own takes it away from whoever polls."""
    engine, keys = Engine(), prompt(3)
    async with open_cache(CPU, engine=engine) as kv:
        source = engine.compute(keys)

        def serve() -> None:
            storing = kv.submit_store(keys, source)
            assert storing.wait(WAIT_S).num_stored == 3
            assert kv.poll() == []
            assert storing.wait() is storing.result

        await in_thread(serve)


async def test_a_wait_that_takes_too_long_ends_and_the_transfer_goes_on() -> None:
    """`Ticket.wait` raises TimeoutError, `poll` answers with what there is; both can be called again."""
    shared, engine, keys = ScriptedBackend(), Engine(), prompt(3)
    async with open_cache(shared, engine=engine) as kv:
        await keep(kv, engine, keys)
        shared.on_read.hold()
        into = GPULoadStoreSpec(range(10, 13))
        ended: list[object] = []

        def wait_briefly() -> None:
            loading = kv.submit_load(keys, into)
            with pytest.raises(TimeoutError):
                loading.wait(0.001)
            assert kv.poll(0.001) == []

        await in_thread(wait_briefly)
        shared.on_read.release()
        await in_thread(lambda: ended.extend(result for _, result in kv.poll(WAIT_S)))
        assert [result.num_blocks for result in ended if isinstance(result, LoadResult)] == [3]
        assert engine.read(into) == contents(keys)
        await until_idle(kv)


async def test_a_thread_cancels_what_it_submitted() -> None:
    """A cancelled load ends soon, with a result, and does not touch the blocks any more."""
    device, engine, keys = ScriptedDevice(), Engine(), prompt(9)
    async with open_cache(CPU, engine=engine, device=device) as kv:
        storing = kv.submit_store(keys, engine.compute(keys))
        await until(lambda: storing.result is not None, on_wait=device.run_all)
        engine.poison()
        loading = kv.submit_load(keys, GPULoadStoreSpec(range(9)), after=ScriptedEvent())
        await until(lambda: device.pending > 0)
        await in_thread(loading.cancel)
        await until(lambda: loading.result is not None)
        assert loading.result is not None
        assert loading.result.num_blocks == 0
        at_once = kv.submit_load(keys, GPULoadStoreSpec(range(9)), after=ScriptedEvent())
        at_once.cancel()
        await until(lambda: at_once.result is not None)
        device.run_all()
        assert engine.is_poisoned()
        assert len(kv.poll()) == 3


@pytest.mark.parametrize("medium", ["cpu", "nvme"])
async def test_many_threads_at_once(medium: str, tmp_path: Path) -> None:
    """Four threads store, look up, load and evict one another's room, and every byte that is loaded is right."""
    nvme = {"medium": "nvme", "path": str(tmp_path), "capacity": "64MiB"}
    tiers = [CPU] if medium == "cpu" else [{"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, nvme]
    engine = Engine(num_pages=4 * 64)  # each thread has pages of its own
    loaded_blocks = [0] * 4

    async with open_cache(*tiers, engine=engine) as kv:

        def serve(number: int) -> None:
            first = number * 64
            for turn in range(60):
                keys = prompt(6, seed=(turn * (number + 1)) % 13)  # threads meet on many of them
                source = engine.compute(keys, range(first, first + 6))
                kv.submit_store(keys, source).wait(WAIT_S)
                found = kv.lookup_nowait(keys)
                assert found.num_blocks <= 6
                into = GPULoadStoreSpec(range(first + 10, first + 16))
                loaded = kv.submit_load(keys, into).wait(WAIT_S)
                n = loaded.num_blocks
                assert engine.read(into.ids[:n]) == contents(keys[:n])
                loaded_blocks[number] += n

        await in_threads([partial(serve, number) for number in range(4)])
        assert min(loaded_blocks) > 0
        assert kv.poll() == []
        await until_idle(kv)


async def test_one_poller_hears_of_what_all_threads_submit() -> None:
    """Nothing is lost and nothing comes twice, however submissions and polls meet."""
    engine, keys = Engine(num_pages=256), prompt(4)
    async with open_cache(CPU, engine=engine) as kv:
        await keep(kv, engine, keys)
        submitted: list[list[object]] = [[] for _ in range(3)]
        polled: list[object] = []
        num_wanted = 3 * 50

        def submit(number: int) -> None:
            pages = GPULoadStoreSpec(range(10 + 10 * number, 14 + 10 * number))
            for _ in range(50):
                submitted[number].append(kv.submit_load(keys, pages))

        def poll() -> None:
            while len(polled) < num_wanted:
                polled.extend(ticket for ticket, _ in kv.poll(0.01))

        await in_threads([poll, *(partial(submit, number) for number in range(3))])
        assert len(polled) == len(set(polled)) == num_wanted
        assert set(polled) == {ticket for each in submitted for ticket in each}


@pytest.mark.parametrize(
    "spec", [GPULoadStoreSpec(range(1)), CPULoadStoreSpec(range(1), pool="pool")], ids=["caches", "pool"]
)
async def test_a_thread_that_closing_overtakes_is_told_so(spec: GPULoadStoreSpec | CPULoadStoreSpec) -> None:
    """Not that nothing was registered, though the engine's memory was let go of by then."""
    async with open_cache(CPU, engine=Engine()) as kv:
        bindings = inside(kv).bindings
    with pytest.raises(ClosedError):
        bindings.find(spec, 0)


async def test_closing_while_threads_submit() -> None:
    """A thread gets ClosedError from some call on; what was accepted before ends, and can be polled afterwards."""
    engine, keys = Engine(), prompt(4)
    accepted: list[object] = []
    begun = threading.Event()

    def submit(kv: TieredKV) -> None:
        with suppress(ClosedError):
            while True:
                accepted.append(kv.submit_load(keys, GPULoadStoreSpec(range(4))))
                begun.set()

    async with open_cache(CPU, engine=engine) as kv:
        await keep(kv, engine, keys)
        thread = threading.Thread(target=submit, args=(kv,), daemon=True)
        thread.start()
        await until(begun.is_set)
    await until(lambda: not thread.is_alive())
    ended = kv.poll()
    assert {ticket for ticket, _ in ended} == set(accepted)
    assert all(isinstance(result, LoadResult) for _, result in ended)
    with pytest.raises(ClosedError):
        kv.lookup_nowait(keys)


async def test_what_hangs_at_close_ends_for_whoever_waits() -> None:
    """A thread that waits for a load which closing gives up is not left waiting."""
    shared, engine, keys = ScriptedBackend(), Engine(), prompt(4)
    limits = CacheLimits(window=4 * PAYLOAD_BYTES, bounce=16 * PAYLOAD_BYTES, close_timeout_s=0.01)
    results: list[LoadResult] = []
    async with open_cache(shared, engine=engine, limits=limits) as kv:
        await keep(kv, engine, keys)
        shared.on_read.hold()
        loading = kv.submit_load(keys, GPULoadStoreSpec(range(4)))
        thread = threading.Thread(target=lambda: results.append(loading.wait(WAIT_S)), daemon=True)
        thread.start()
        await until(lambda: shared.on_read.num_held > 0)
    await until(lambda: not thread.is_alive())
    assert [result.num_blocks for result in results] == [0]


async def test_before_opening_nothing_is_taken() -> None:
    """As for the other calls."""
    cache = TieredKV([CPU], model=MODEL, layout=small_layout())
    with pytest.raises(ClosedError):
        cache.submit_load(prompt(1), GPULoadStoreSpec([0]))
    assert cache.poll(WAIT_S) == []


def test_an_event_loop_that_is_gone() -> None:
    """Whoever waits is told, whoever submits too, if a program ends the loop and not the cache."""
    engine, keys, never = Engine(), prompt(2), threading.Event()
    loop = asyncio.new_event_loop()
    opening = open_cache(CPU, engine=engine)
    kv = loop.run_until_complete(opening.__aenter__())
    ticket = kv.submit_store(keys, engine.compute(keys), after=never)
    told: list[ClosedError] = []

    def wait() -> None:
        for call in (ticket.wait, lambda: kv.poll(timeout_s=10.0), kv.poll):
            try:
                call()
            except ClosedError as error:
                told.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    loop.close()
    waiting.join()
    assert len(told) == 3
    with pytest.raises(ClosedError, match="event loop that opened this TieredKV is closed"):
        kv.submit_store(keys, GPULoadStoreSpec([0, 1]))
    with pytest.raises(ClosedError, match="event loop that opened this TieredKV is closed"):
        kv.stats()
    never.set()
