"""A cache for programs without an event loop: it blocks, ends, and lets go of memory as the async one does."""

import gc
import inspect
import mmap
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import assert_type

import pytest

from tests.support import programs
from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import AnyTier, Recorder
from tests.support.engine import MODEL, PAYLOAD_BYTES, SMALL_LIMITS, Engine, contents, prompt, small_layout
from tests.support.interrupts import interrupted_everywhere
from tiered_kv import (
    BlockCache,
    BlockingTieredKV,
    ClosedError,
    ConfigurationError,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    HostLease,
    LayoutMismatchError,
    LoadTicket,
    LookupResult,
    PinResult,
    PrefetchResult,
    TieredKV,
    full,
    open_blocking,
)
from tiered_kv.values.events import CacheClosed

CPU = {"medium": "cpu", "capacity": 64 * PAYLOAD_BYTES}
KEYS = prompt(9)
INTO = GPULoadStoreSpec(range(20, 29))


def cache_of(*tiers: AnyTier, recorder: Recorder | None = None) -> TieredKV:
    """Return a cache that is not open yet."""
    emit = recorder or Recorder()
    return TieredKV(tiers, model=MODEL, layout=small_layout(), limits=SMALL_LIMITS, device="cpu", emit=emit)


def test_every_call_blocks_until_it_has_its_answer(tmp_path: Path) -> None:
    """The whole face, and after a restart what is on disk."""
    engine = Engine()
    tiers: list[AnyTier] = [CPU, {"medium": "nvme", "path": str(tmp_path), "capacity": "64MiB"}]
    with open_blocking(cache_of(*tiers)) as kv:
        kv.register_kv_caches(engine.caches)
        assert kv.store(KEYS, engine.compute(KEYS)).num_stored == 9
        kv.flush(sync=True)
        assert kv.lookup(KEYS).by_tier == kv.lookup_nowait(KEYS).by_tier == {"cpu": 9}
        assert kv.load(KEYS, INTO).num_blocks == 9
        assert engine.read(INTO) == contents(KEYS)
        kv.touch(KEYS)
        assert kv.evict(KEYS, tier="cpu").num_blocks == 9
        assert kv.prefetch(KEYS).num_moved == 9
        with kv.lease(KEYS) as lease:
            assert [bytes(view) for view in lease.views] == contents(KEYS)
        pool = bytearray(9 * PAYLOAD_BYTES)
        kv.call(kv.cache.register_host_pool, "swap", pool)
        assert kv.load(KEYS, CPULoadStoreSpec(range(9), pool="swap")).num_blocks == 9
        assert bytes(pool) == b"".join(contents(KEYS))
        kv.advance_epoch("w1")
        assert kv.lookup(KEYS).num_blocks == 0
        kv.advance_epoch(MODEL.weights)
        assert kv.stats()["cpu"].hits == 18
    with open_blocking(cache_of(*tiers)) as kv:
        assert kv.lookup(KEYS).by_tier == {"nvme": 9}
        kv.clear()
        assert kv.lookup(KEYS).num_blocks == 0


def test_each_call_is_spelled_once() -> None:
    """Every call takes the same arguments as in the face, and says the same, but for those that only a loop can use."""
    calls = {name: call for name, call in vars(BlockCache).items() if callable(call) and not name.startswith("_")}
    with open_blocking(cache_of(CPU)) as kv:
        for name in calls.keys() - {"start_load", "start_store", "start_swap", "events", "aclose"}:
            here, there = getattr(kv, name), getattr(BlockCache, name)
            arguments = list(inspect.signature(there).parameters.values())[1:]
            assert list(inspect.signature(here).parameters.values()) == arguments, name
            assert inspect.getdoc(here) == inspect.getdoc(there)


def test_a_type_checker_knows_the_arguments_and_the_answers() -> None:
    """A type checker reads this: a wrong argument is an error, and what is awaited elsewhere is a result here."""
    with open_blocking(cache_of(CPU)) as kv:
        assert_type(kv.lookup(KEYS, where=True), LookupResult)
        assert_type(kv.pin(KEYS, ttl_s=1.0), PinResult)
        assert_type(kv.prefetch(KEYS, to="cpu"), PrefetchResult)
        assert_type(kv.drain(timeout_s=1.0), bool)
        with kv.lease(KEYS) as lease:
            assert_type(lease, HostLease)
        for name in ("wher", "ttl_s"):
            with pytest.raises(TypeError, match=name):
                kv.lookup(KEYS, **{name: True})
        with pytest.raises(TypeError, match="tll_s"):
            kv.pin(KEYS, tll_s=1.0)  # type: ignore[call-arg]  # which strict mypy wants to be here
        with pytest.raises(ConfigurationError):
            kv.load(KEYS, "3")  # type: ignore[arg-type]  # likewise


def test_what_a_scheduler_and_an_operator_ask_blocks_too() -> None:
    """Pins, preemption, KV groups, host pools, explanations, capacities and draining, without `call`."""
    engine, keys = Engine(), KEYS[:8]
    with open_blocking(cache_of({**CPU, "max_capacity": 64 * PAYLOAD_BYTES})) as kv:
        kv.register_kv_caches(engine.caches)
        assert kv.swap_out(keys, engine.compute(keys)).num_pinned == 8
        assert all(each.is_pinned for each in kv.explain(keys))
        assert kv.swap_in(keys, GPULoadStoreSpec(range(20, 28))).num_blocks == 8
        assert kv.pin(keys, ttl_s=60).num_blocks == 8
        kv.unpin(keys)
        assert kv.lookup_groups([full(keys)]).num_tokens == 8 * keys.block_size
        assert kv.load_groups([full(keys)], [GPULoadStoreSpec(range(30, 38))]).num_tokens == 8 * keys.block_size
        kv.register_host_pool("swap", bytearray(8 * PAYLOAD_BYTES))
        assert kv.load(keys, CPULoadStoreSpec(range(8), pool="swap")).num_blocks == 8
        assert kv.resize("cpu", 32 * PAYLOAD_BYTES) == 32
        assert kv.drain()
        assert kv.store(prompt(1, seed=1), GPULoadStoreSpec([0])).drop_reasons == {"draining": 1}


def test_an_engine_that_sleeps_takes_its_memory_back() -> None:
    """What was registered is not referred to any more, calls are refused, and what is in tiers comes to new tensors."""
    engine = Engine()
    memory = weakref.ref(next(iter(engine.caches.values())))
    with open_blocking(cache_of(CPU)) as kv:
        kv.register_kv_caches(engine.caches)
        kv.store(KEYS, engine.compute(KEYS))
        for _ in range(2):
            kv.unregister_kv_caches()
        del engine
        gc.collect()
        assert memory() is None
        with pytest.raises(ConfigurationError, match="register_kv_caches"):
            kv.load(KEYS, INTO)
        awake = Engine()
        kv.register_kv_caches(awake.caches)
        assert kv.load(KEYS, INTO).num_blocks == 9
        assert awake.read(INTO) == contents(KEYS)


def test_the_face_for_threads_is_there_too() -> None:
    """Submit, poll, and block in another thread."""
    engine, loaded = Engine(), []
    with open_blocking(cache_of(CPU)) as kv:
        kv.register_kv_caches(engine.caches)
        storing = kv.submit_store(KEYS, engine.compute(KEYS))
        assert kv.poll(30.0) == [(storing, storing.result)]
        thread = threading.Thread(target=lambda: loaded.append(kv.load(KEYS, INTO).num_blocks))
        thread.start()
        thread.join()
        assert loaded == [9]


def test_what_is_wrong_raises_where_it_is_called() -> None:
    """Errors cross the threads as they are."""
    with open_blocking(cache_of(CPU)) as kv:
        with pytest.raises(ConfigurationError, match="register_kv_caches"):
            kv.load(KEYS, INTO)
        with pytest.raises(LayoutMismatchError, match="got the tensors of 1"):
            kv.register_kv_caches(list(Engine().caches.values())[:1])
        with pytest.raises(ConfigurationError, match="no tier 'disk'"):
            kv.evict(KEYS, tier="disk")
    with (
        pytest.raises(ConfigurationError, match="below one block"),
        open_blocking(cache_of({"medium": "cpu", "capacity": 64})),
    ):
        pass
    with (
        pytest.raises(ConfigurationError, match=r"open_blocking opens a TieredKV, .* got 'cpu'"),
        open_blocking("cpu"),  # type: ignore[arg-type]  # wrong on purpose
    ):
        pass


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_it_is_closed_whatever_ends_the_block(error: type[BaseException]) -> None:
    """The exception goes on; after it the cache is closed and its thread has ended."""
    recorder = Recorder()
    left: list[BlockingTieredKV] = []

    def serve() -> None:
        with open_blocking(cache_of(CPU, recorder=recorder)) as kv:
            left.append(kv)
            raise error

    with pytest.raises(error):
        serve()
    assert len(recorder.of(CacheClosed)) == 1
    assert "tiered_kv" not in {thread.name for thread in threading.enumerate()}
    for call in (left[0].stats, lambda: left[0].lookup_nowait(KEYS), lambda: left[0].load(KEYS, INTO)):
        with pytest.raises(ClosedError):
            call()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["open", "late", "daemon"])
def test_a_program_that_ends_with_it_open_loses_nothing(tmp_path: Path, end: str) -> None:
    """What was stored is written before the process is gone, whoever forgot to leave the block; and it ends."""
    done = programs.run("-m", "tests.cache.forgetful_program", tmp_path, end)
    assert (done.returncode, done.stdout, done.stderr) == (0, "9\n", "")
    with open_blocking(cache_of(CPU, {"medium": "nvme", "path": str(tmp_path), "capacity": "64MiB"})) as kv:
        assert kv.lookup(KEYS).by_tier == {"nvme": 9}


def test_the_loop_of_the_cache_is_not_blocked() -> None:
    """It would wait for itself: each call says so, and what any thread may call goes on."""
    with open_blocking(cache_of(CPU)) as kv:
        for call in (partial(kv.lookup, KEYS), kv.stats, partial(kv.call, kv.cache.stats)):
            with pytest.raises(ConfigurationError, match="the event loop's thread must not block"):
                kv.call(call)
        assert kv.call(kv.lookup_nowait, KEYS).num_blocks == kv.lookup(KEYS).num_blocks == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_that_was_forked_is_refused() -> None:
    """There no event loop runs that could answer: calls that any thread may make are refused, too."""
    engine = Engine()
    with open_blocking(cache_of(CPU)) as kv:
        kv.register_kv_caches(engine.caches)
        kv.store(KEYS, engine.compute(KEYS))
        calls = (kv.stats, partial(kv.lookup, KEYS), partial(kv.load, KEYS, INTO), partial(kv.lookup_nowait, KEYS))
        if not (child := os.fork()):
            signal.alarm(30)
            num_refused = 0
            for call in calls:
                with suppress(ConfigurationError):
                    call()
                    continue
                num_refused += 1
            os._exit(num_refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(calls)
        assert kv.load(KEYS, INTO).num_blocks == 9


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_that_was_forked_leaves_the_block_at_once() -> None:
    """It has no event loop to wait for: the cache is the other process's, and stays open there, as do its leases."""
    engine = Engine()
    with ExitStack() as stack:
        kv = stack.enter_context(open_blocking(cache_of(CPU)))
        kv.register_kv_caches(engine.caches)
        kv.store(KEYS[:1], engine.compute(KEYS[:1]))
        lease = stack.enter_context(kv.lease(KEYS[:1]))
        if not (child := os.fork()):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            try:
                stack.close()
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert [bytes(view) for view in lease.views] == contents(KEYS[:1])
        assert kv.store(KEYS, engine.compute(KEYS)).num_stored == 8
        assert kv.load(KEYS, INTO).num_blocks == 9


def test_leaving_the_block_waits_for_no_lease() -> None:
    """One that another thread holds, perhaps for good, stays readable there until its own block ends."""
    engine, is_held, is_left, seen = Engine(), threading.Event(), threading.Event(), list[list[bytes]]()

    def hold() -> None:
        with kv.lease(KEYS) as lease:
            is_held.set()
            is_left.wait()
            seen.append([bytes(view) for view in lease.views])

    holding = threading.Thread(target=hold)
    with open_blocking(cache_of(CPU)) as kv:
        kv.register_kv_caches(engine.caches)
        kv.store(KEYS, engine.compute(KEYS))
        holding.start()
        is_held.wait()
    is_left.set()
    holding.join()
    assert seen == [contents(KEYS)]


def test_what_cannot_be_called_is_refused() -> None:
    """By an error that says what to pass, before the loop hears of it."""
    with open_blocking(cache_of(CPU)) as kv:
        for call in (None, 5, "stats"):
            with pytest.raises(ConfigurationError, match="takes a function"):
                kv.call(call)  # type: ignore[call-overload]


def test_a_deadline_holds() -> None:
    """A tier that hangs costs a load no more than the time it was given."""
    backend, engine = ScriptedBackend(), Engine()
    with open_blocking(cache_of(backend)) as kv:
        kv.register_kv_caches(engine.caches)
        kv.store(KEYS, engine.compute(KEYS))
        kv.flush()
        backend.on_read.hold()
        loaded = kv.load(KEYS, INTO, deadline_s=0.05)
        assert loaded.num_blocks == 0
        assert any(fault.reason == "deadline" for fault in loaded.faults)
        kv.call(backend.on_read.release)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Have Ctrl-C raise, also where the tests were started in the background, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupted_load_lets_go_of_the_memory_first() -> None:
    """Ctrl-C while a load waits for its event: it is revoked before KeyboardInterrupt is raised."""
    engine, after, main = Engine(), threading.Event(), threading.get_ident()

    def interrupt() -> None:
        while not is_waiting(main):
            pass
        signal.pthread_kill(main, signal.SIGINT)

    with open_blocking(cache_of(CPU)) as kv:
        kv.register_kv_caches(engine.caches)
        kv.store(KEYS, engine.compute(KEYS))
        engine.poison()
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            kv.load(KEYS, INTO, after=after)
        thread.join()
        assert kv.poll() == []
        after.set()
        assert kv.load(KEYS[:1], GPULoadStoreSpec([0])).num_blocks == 1
        engine_pages = [page for page in range(engine.num_pages) if page]
        assert not any(block in contents(KEYS) for block in engine.read(engine_pages))


@pytest.mark.usefixtures("interrupts")
def test_any_interrupted_call_lets_go_of_the_memory_first() -> None:
    """The same for what is called by way of the loop: `call` waits until its transfer is revoked."""
    engine, after, main = Engine(), threading.Event(), threading.get_ident()

    def interrupt() -> None:
        while not is_in(main, "result"):
            pass
        signal.pthread_kill(main, signal.SIGINT)

    with open_blocking(cache_of(CPU)) as kv:
        kv.register_kv_caches(engine.caches)
        kv.store(KEYS, engine.compute(KEYS))
        engine.poison()
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            kv.call(kv.cache.swap_in, KEYS, INTO, after=after)
        thread.join()
        assert kv.stats().transfers == 0
        after.set()
        kv.flush()
        assert engine.is_poisoned()


class StoppedError(Exception):
    """What a program's own handler raises."""


def test_what_a_handler_submits_is_no_part_of_the_call_that_it_interrupts() -> None:
    """It goes on when that is ended, and is polled."""
    engine, after, main = Engine(), threading.Event(), threading.get_ident()
    submitted: list[LoadTicket] = []

    def handle(*_: object) -> None:
        submitted.append(kv.submit_load(KEYS[:1], GPULoadStoreSpec([30])))
        raise StoppedError

    def interrupt() -> None:
        while not is_waiting(main):
            pass
        signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    with open_blocking(cache_of(CPU)) as kv:
        kv.register_kv_caches(engine.caches)
        kv.store(KEYS, engine.compute(KEYS))
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(StoppedError):
            kv.load(KEYS, INTO, after=after)
        thread.join()
        after.set()
        ((ticket, _),) = kv.poll(timeout_s=30.0)
        assert ticket is submitted[0]
        assert submitted[0].wait().num_blocks == 1
        assert engine.read([30]) == contents(KEYS[:1])
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StoppedError])
@pytest.mark.parametrize("by", ["submission", "call"])
def test_a_medium_that_writes_to_the_memory_outlasts_every_interrupt(by: str, error: type[BaseException]) -> None:
    """Whatever handlers raise, and how often: the call leaves when the medium has let go, and raises the last of it."""
    slots, engine, main = ScriptedSlotBackend(), Engine(), threading.get_ident()
    raised, has_raised, has_left, has_let_go = list[BaseException](), *(threading.Event() for _ in range(3))

    was_let_go = list[bool]()

    def handle(*_: object) -> None:
        raised.append(error())
        has_raised.set()
        raise raised[-1]

    def interrupt(kv: BlockingTieredKV) -> None:
        while not slots.on_read.num_held:
            pass
        while len(raised) < 3 and not has_left.is_set():
            if waits(main):
                has_raised.clear()
                signal.pthread_kill(main, signal.SIGUSR1)
                has_raised.wait(0.1)  # one that comes just before its thread waits is handled with the next
        has_let_go.set()
        kv.call(slots.on_read.release)

    def load(kv: BlockingTieredKV) -> None:
        into = CPULoadStoreSpec(range(9), pool="pool")
        try:
            _ = kv.load(KEYS, into) if by == "submission" else kv.call(kv.cache.start_load, KEYS, into)
        finally:
            was_let_go.append(has_let_go.is_set())
            has_left.set()

    before = signal.signal(signal.SIGUSR1, handle)
    with open_blocking(cache_of(slots)) as kv:
        kv.register_kv_caches(engine.caches)
        pool = mmap.mmap(-1, 9 * PAYLOAD_BYTES)
        kv.register_host_pool("pool", memoryview(pool), direct=True)
        kv.store(KEYS, engine.compute(KEYS))
        kv.flush()
        slots.on_read.hold()
        thread = threading.Thread(target=interrupt, args=(kv,))
        thread.start()
        with pytest.raises(error) as left_by:
            load(kv)
        thread.join()
        assert was_let_go == [True]
        assert len(raised) >= 3
        assert (left_by.value, left_by.value.__cause__) == (raised[-1], raised[0])
        assert kv.poll() == []
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("of", ["tiered_kv.cache.blocking", "tiered_kv.cache.block_cache"])
def test_wherever_a_load_is_interrupted_nothing_of_it_goes_on(of: str) -> None:
    """Also where its thread has not been handed the ticket yet, or the result; and nobody polls it."""
    engine, after = Engine(), threading.Event()
    with open_blocking(cache_of(CPU)) as kv:
        kv.register_kv_caches(engine.caches)
        kv.store(KEYS[:1], engine.compute(KEYS[:1]))

        def load() -> None:
            with suppress(KeyboardInterrupt):
                kv.load(KEYS[:1], GPULoadStoreSpec([1]), after=after, deadline_s=0.02)
            sys.settrace(None)  # whatever comes now is no part of the call
            assert kv.stats().transfers == 0
            assert kv.poll() == []

        def interrupt() -> None:
            raise KeyboardInterrupt

        assert interrupted_everywhere(load, interrupt, of=of) > 10
        after.set()


def waits(thread: int) -> bool:
    """Say whether a thread waits for another."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - the only way to know, without a sleep
    return frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) == (threading.__file__, "wait")


def is_in(thread: int, name: str) -> bool:
    """Say whether a thread waits in a function of this name."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - the only way to know, without a sleep
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[:2] == ["wait", name]


def is_waiting(thread: int) -> bool:
    """Say whether a thread is in `Ticket.wait`."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - the only way to know, without a sleep
    names = []
    while frame is not None:
        names.append((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    return names[0] == (threading.__file__, "wait") and any(name == "_ended" for _, name in names)
