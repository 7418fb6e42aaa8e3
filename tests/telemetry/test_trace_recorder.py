"""Recordings of what real caches were asked for, read again as traces."""

import gzip
import threading
from pathlib import Path

import pytest

from tests.support.caches import Recorder, keep, open_cache, until
from tests.support.engine import BLOCK_SIZE, MODEL, PAYLOAD_BYTES, Engine, prompt, small_layout
from tiered_kv import (
    ConfigurationError,
    CPUTier,
    GPULoadStoreSpec,
    TieredKV,
    TieredKVSettings,
    TraceEnded,
    TraceFailed,
)
from tiered_kv.replay import BlockCost, TierPlan, replay
from tiered_kv.telemetry import TraceRecorder, trace_recorder
from tiered_kv.traces import Trace, read_trace

CPU = CPUTier(capacity=16 * PAYLOAD_BYTES)


def lengths(trace: Trace) -> list[int]:
    """Return how many blocks each request has."""
    return [len(each.ids) for each in trace.requests]


async def serve(kv: TieredKV, engine: Engine, num_blocks: int, seed: int = 0) -> int:
    """Do what an engine does for a prompt: look up, load what is there, store the rest; return what was there."""
    keys = prompt(num_blocks, seed=seed)
    n = (await kv.lookup(keys)).num_blocks
    if n:
        await kv.load(keys[:n], GPULoadStoreSpec(range(n)))
    if rest := keys[n:]:
        await kv.store(rest, engine.compute(rest))
    return n


async def test_a_recording_replays_as_the_cache_served(tmp_path: Path) -> None:
    """One request for each lookup, whatever load and stores follow it; a replay finds what the cache found."""
    path, emit, engine = tmp_path / "trace.jsonl", Recorder(), Engine()
    async with open_cache(CPU, engine=engine, emit=emit, record_trace=str(path)) as kv:
        served = [await serve(kv, engine, n, seed) for n, seed in [(4, 0), (5, 1), (6, 0), (5, 1), (2, 0), (5, 1)]]
    trace = read_trace(path)
    assert lengths(trace) == [4, 5, 6, 5, 2, 5]
    assert trace.block_size == BLOCK_SIZE
    assert trace.num_blocks == 11
    assert emit.of(TraceEnded) == [TraceEnded(str(path), 6, 0)]
    plan = TierPlan("cpu", 16 * PAYLOAD_BYTES, is_memory=True)
    report = replay(trace, [plan], BlockCost(PAYLOAD_BYTES // BLOCK_SIZE, 1.0))
    assert report.hit_rate * report.num_blocks == sum(served) == 4 + 5 + 2 + 5


async def test_nothing_of_a_prompt_is_in_it(tmp_path: Path) -> None:
    """Neither hashes nor what could be compared with another recording; and nobody else may read it."""
    files = [tmp_path / "a", tmp_path / "b"]
    keys = prompt(3)
    for file in files:
        async with open_cache(CPU, engine=Engine(), record_trace=str(file)) as kv:
            await kv.lookup(keys)
    first, second = (set(read_trace(file).requests[0].ids.tolist()) for file in files)
    assert not first & second
    words = [int(word) for word in keys.words.ravel()]
    assert not first & {*words, *(word >> 1 for word in words)}
    assert files[0].stat().st_mode & 0o777 == 0o600


async def test_loads_and_stores_that_nobody_asked_about_are_requests(tmp_path: Path) -> None:
    """As of engines that load without a lookup; but not what was generated, or computed after a load found less."""
    path, engine = tmp_path / "trace.jsonl.gz", Engine()
    async with open_cache(CPU, engine=engine, record_trace=str(path)) as kv:
        await keep(kv, engine, prompt(3))
        await kv.load(prompt(4), GPULoadStoreSpec(range(4)))
        await kv.store(prompt(6)[3:], engine.compute(prompt(6)[3:]))
        await kv.load(prompt(4), GPULoadStoreSpec(range(4)))
    with gzip.open(path) as lines:
        assert len(lines.readlines()) == 3
    assert lengths(read_trace(path)) == [3, 4, 4]


async def test_a_lookup_that_is_repeated_is_one_request(tmp_path: Path) -> None:
    """A scheduler asks at every step until there is room. Once it has loaded, the next one is another request."""
    path, engine = tmp_path / "trace", Engine()
    async with open_cache(CPU, engine=engine, record_trace=str(path)) as kv:
        await keep(kv, engine, prompt(3))
        for _ in range(5):
            await kv.lookup(prompt(3))
        await kv.load(prompt(3), GPULoadStoreSpec(range(3)))
        kv.lookup_nowait(prompt(3))
    assert lengths(read_trace(path)) == [3, 3, 3]


async def test_requests_at_once_that_share_a_prefix_are_told_apart(tmp_path: Path) -> None:
    """Each lookup lets one load of the shared blocks follow."""
    path, engine = tmp_path / "trace", Engine()
    async with open_cache(CPU, engine=engine, record_trace=str(path)) as kv:
        await keep(kv, engine, prompt(2))
        await kv.lookup(prompt(3))
        await kv.lookup(prompt(4))
        for _ in range(2):
            await kv.load(prompt(2), GPULoadStoreSpec(range(2)))
    assert lengths(read_trace(path)) == [2, 3, 4]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
async def test_what_was_asked_is_in_the_file_while_the_cache_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every few seconds, packed or not: a process that is killed loses no more."""
    monkeypatch.setattr(trace_recorder, "_FLUSH_EVERY_S", 0.0)
    path = tmp_path / name

    def is_there() -> bool:
        try:
            return lengths(read_trace(path)) == [3]
        except (ConfigurationError, FileNotFoundError):
            return False

    async with open_cache(CPU, engine=Engine(), record_trace=str(path)) as kv:
        await kv.lookup(prompt(3))
        await until(is_there)


async def test_a_file_that_cannot_be_written_is_told_and_harms_nothing(tmp_path: Path) -> None:
    """The cache opens, serves and closes."""
    emit, engine = Recorder(), Engine()
    async with open_cache(CPU, engine=engine, emit=emit, record_trace=str(tmp_path / "none" / "trace")) as kv:
        assert await serve(kv, engine, 3) == 0
        assert await serve(kv, engine, 3) == 3
    (failed,) = emit.of(TraceFailed)
    assert "No such file" in failed.error


async def test_a_thread_that_does_not_begin_is_told_and_harms_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same: nothing is queued for it, and the end of the cache does not wait for it."""
    start, emit, engine = threading.Thread.start, Recorder(), Engine()

    def start_no_recorder(thread: threading.Thread) -> None:
        if thread.name == "tiered_kv-trace":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_no_recorder)
    async with open_cache(CPU, engine=engine, emit=emit, record_trace=str(tmp_path / "trace")) as kv:
        assert await serve(kv, engine, 3) == 0
        assert await serve(kv, engine, 3) == 3
    (failed,) = emit.of(TraceFailed)
    assert failed.error == "can't start new thread"


async def test_a_recording_is_bounded_in_bytes_and_in_memory(tmp_path: Path) -> None:
    """It ends at its size; and what comes faster than it is written is left out, and counted."""
    emit = Recorder()
    small = TraceRecorder(tmp_path / "small", most_bytes=500)
    async with open_cache(CPU, emit=emit, record_trace=small) as kv:
        for seed in range(50):
            await kv.lookup(prompt(2, seed=seed))
    (ended,) = emit.of(TraceEnded)
    assert 0 < ended.requests < 10
    assert (tmp_path / "small").stat().st_size <= 500
    full = TraceRecorder(tmp_path / "full")
    for seed in range(70):
        full.note("lookup", prompt(1_000, seed=seed))
    emit = Recorder()
    async with open_cache(CPU, emit=emit, record_trace=full):
        pass
    (ended,) = emit.of(TraceEnded)
    assert (ended.requests, ended.dropped) == (65, 5)


async def test_a_recorder_is_one_caches_and_wants_a_path(tmp_path: Path) -> None:
    """What cannot work is refused."""
    recorder = TraceRecorder(tmp_path / "trace")
    async with open_cache(CPU, record_trace=recorder):
        pass
    with pytest.raises(ConfigurationError, match="another cache's"):  # before anything is opened
        TieredKV([CPU], model=MODEL, layout=small_layout(), record_trace=recorder)
    with pytest.raises(ConfigurationError, match="most_bytes"):
        TraceRecorder("x", most_bytes=0)
    with pytest.raises(ConfigurationError, match="record_trace must be a path"):
        async with open_cache(CPU, record_trace=7):  # type: ignore[arg-type] # is what is refused
            pass


def test_a_setting_says_where_to_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the environment, as all settings."""
    monkeypatch.setenv("TIERED_KV_RECORD_TRACE", "/srv/trace.jsonl.gz")
    assert TieredKVSettings().record_trace == "/srv/trace.jsonl.gz"
