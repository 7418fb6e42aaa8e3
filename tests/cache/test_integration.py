"""The facade in its surroundings: event loops, several caches, backends of others, settings from outside, logs."""

import io
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from tests.support.any_layout import LIMITS, MODEL, SMALL, STRIDE, AnyEngine, cpu, memory, nvme, open_any, prompt
from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import AnyTier, until_idle
from tiered_kv import ModelIdentity, TieredKV, TieredKVSettings
from tiered_kv_backends.memory import MemoryBackend

KEYS = prompt(6)

ANOTHER_PACKAGE = """
    from tiered_kv_backends.memory import MemoryBackend

    class Shelf(MemoryBackend):
        class Settings(MemoryBackend.Settings):
            medium: str = "shelf"
            colour: str = "grey"
        made = []
        def __init__(self, settings):
            super().__init__(settings)
            self.made.append(settings.colour)
"""


async def round_trip(kv: TieredKV, engine: AnyEngine, version: str = "") -> None:
    """Store the keys, drop them from the memory above, load them from the last tier, and compare."""
    last = kv.stats().tiers[-1].tier
    await (await kv.store(KEYS, engine.fill(KEYS, range(6), version))).settled()
    for tier in kv.stats().tiers[:-1]:
        await kv.evict(KEYS, tier=tier.tier)
    engine.wipe()
    loaded = await kv.load(KEYS, engine.spec(range(6)))
    assert loaded.by_tier == {last: 6}
    assert engine.count_right(KEYS, range(6), version) == 6
    await until_idle(kv)


@pytest.mark.both_loops
async def test_both_event_loops(tmp_path: Path) -> None:
    """The same under asyncio's own loop and under uvloop."""
    engine = AnyEngine()
    async with open_any(engine, cpu(8), nvme(tmp_path)) as kv:
        await round_trip(kv, engine)
        async with kv.lease(KEYS) as lease:
            assert lease.num_blocks == 6
        assert (await kv.prefetch(KEYS)).num_blocks == 6


async def test_two_caches_in_one_process(tmp_path: Path) -> None:
    """Two models are served side by side; neither sees the other's blocks, and one closes without the other."""
    one, two = AnyEngine(), AnyEngine()
    other = ModelIdentity("another", weights="w0")
    async with open_any(one, cpu(8), nvme(tmp_path / "one")) as first:
        async with open_any(two, cpu(8), nvme(tmp_path / "two"), model=other) as second:
            await round_trip(first, one, "one")
            assert (await second.lookup(KEYS)).num_blocks == 0
            await round_trip(second, two, "two")
        await round_trip(first, one, "one")


@pytest.mark.parametrize("kind", ["instance of keys", "instance of slots", "dotted path", "class path in TOML"])
async def test_a_backend_of_ones_own(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend is given as an object, or named by its class's path, in code or in a file."""
    engine = AnyEngine()
    dotted = {"medium": "tiered_kv_backends.memory:MemoryBackend", "capacity": "1MiB"}
    tiers: list[AnyTier]
    match kind:
        case "instance of keys":
            tiers = [cpu(8), ScriptedBackend()]
        case "instance of slots":
            tiers = [cpu(8), ScriptedSlotBackend()]
        case "dotted path":
            tiers = [cpu(8), dotted]
        case _:
            toml = f"[[tiers]]\nmedium = 'cpu'\n[[tiers]]\nmedium = '{dotted['medium']}'\ncapacity = '1MiB'\n"
            (tmp_path / "kv.toml").write_text(toml)
            monkeypatch.setenv("TIERED_KV_CONFIG", str(tmp_path / "kv.toml"))
            tiers = list(TieredKVSettings().tiers)
    async with open_any(engine, *tiers) as kv:
        await round_trip(kv, engine)


async def test_a_backend_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package's backend is asked for by its name, with its own settings, typed as ours are."""
    (tmp_path / "shelf_backend.py").write_text(textwrap.dedent(ANOTHER_PACKAGE))
    info = tmp_path / "shelf-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tiered_kv.backends]\nshelf = shelf_backend:Shelf\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    engine = AnyEngine()
    tiers = [cpu(8), {"medium": "shelf", "capacity": "1MiB", "colour": "red"}]
    async with open_any(engine, *tiers) as kv:
        assert [tier.tier for tier in kv.stats().tiers] == ["cpu", "shelf"]
        await round_trip(kv, engine)
    assert sys.modules["shelf_backend"].Shelf.made == ["red"]


async def test_two_backends_of_one_medium() -> None:
    """Tiers of one medium have names of their own, and each is written."""
    engine = AnyEngine()
    async with open_any(engine, cpu(8), memory() | {"name": "near"}, memory() | {"name": "far"}) as kv:
        await (await kv.store(KEYS, engine.fill(KEYS, range(6)))).settled()
        assert {tier.tier: tier.written for tier in kv.stats().tiers} == {"cpu": 6, "near": 6, "far": 6}
        await kv.evict(KEYS, tier="cpu")
        await kv.evict(KEYS, tier="near")
        assert (await kv.load(KEYS, engine.spec(range(6)))).by_tier == {"far": 6}


@pytest.mark.parametrize("source", ["environment", "TOML", "arguments"])
async def test_settings_make_a_whole_cache(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiers and limits from each source make the same cache."""
    capacity, path = 8 * STRIDE, tmp_path / "kv"
    if source == "environment":
        monkeypatch.setenv("TIERED_KV_TIERS", f'["cpu://?capacity={capacity}", "file://{path}?capacity=8MiB"]')
        monkeypatch.setenv("TIERED_KV_LIMITS__WINDOW", str(LIMITS.window))
        monkeypatch.setenv("TIERED_KV_LIMITS__BOUNCE", str(LIMITS.bounce))
        settings = TieredKVSettings()
    elif source == "TOML":
        (tmp_path / "kv.toml").write_text(
            f"[[tiers]]\nmedium = 'cpu'\ncapacity = {capacity}\n"
            f"[[tiers]]\nmedium = 'nvme'\npath = '{path}'\ncapacity = '8MiB'\n"
            f"[limits]\nwindow = {LIMITS.window}\nbounce = {LIMITS.bounce}\n"
        )
        settings = TieredKVSettings.from_toml(tmp_path / "kv.toml")
    else:
        settings = TieredKVSettings(tiers=[cpu(8), nvme(path)], limits=LIMITS)
    engine = AnyEngine()
    async with TieredKV.from_settings(settings, model=MODEL, layout=SMALL) as kv:
        kv.register_kv_caches(engine.caches[0])
        stats = kv.stats()
        assert [(tier.tier, tier.num_slots) for tier in stats.tiers] == [("cpu", 8), ("nvme", 999)]
        assert stats.bounce_slots == 16
        await round_trip(kv, engine)


@pytest.fixture
def unconfigured() -> Iterator[None]:
    """Structlog as a program finds it, before the test and after it."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


async def test_one_log_entry_per_operation(unconfigured: None, tmp_path: Path) -> None:
    """Each operation is one event, under its name, with its numbers as values."""
    engine = AnyEngine()
    with capture_logs() as logs:
        async with TieredKV([cpu(8), nvme(tmp_path)], model=MODEL, layout=SMALL) as kv:
            kv.register_kv_caches(engine.caches[0])
            await (await kv.store(KEYS, engine.fill(KEYS, range(6)))).settled()
            await kv.load(KEYS, engine.spec(range(6)))
            await kv.evict(KEYS, tier="cpu")
            await kv.prefetch(KEYS)
            kv.advance_epoch("w1")
    names = [entry["event"] for entry in logs]
    assert sorted(names) == sorted(
        [
            "cache.opened",
            "blocks.stored",
            "blocks.settled",
            "blocks.loaded",
            "blocks.prefetched",
            "epoch.advanced",
            "cache.closed",
        ]
    )
    values = {entry["event"]: entry for entry in logs}
    assert values["blocks.loaded"]["by_tier"] == {"cpu": 6}
    assert values["blocks.settled"]["written"] == {"cpu": 6, "nvme": 6}
    assert values["cache.opened"]["tiers"] == ("cpu", "nvme")


async def test_structlog_is_the_programs_to_configure(unconfigured: None) -> None:
    """The library writes where the program says, and leaves its configuration as it was: none here."""
    assert not structlog.is_configured()
    written = io.StringIO()
    async with open_any(AnyEngine(), cpu(8)) as kv:
        kv.touch(KEYS)
    assert not structlog.is_configured()
    structlog.configure(logger_factory=structlog.WriteLoggerFactory(written), cache_logger_on_first_use=False)
    async with TieredKV([cpu(8)], model=MODEL, layout=SMALL):
        pass
    assert "cache.opened" in written.getvalue()


@pytest.mark.slow
def test_importing_configures_nothing() -> None:
    """Import changes neither structlog, nor logging, nor the warnings, and starts no thread."""
    check = (
        "import logging, threading, structlog, torch, pydantic_settings\n"
        "handlers, threads = list(logging.root.handlers), threading.active_count()\n"
        "import tiered_kv\n"
        "assert not structlog.is_configured()\n"
        "assert logging.root.handlers == handlers and threading.active_count() == threads\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", check], check=True)


async def test_a_process_that_only_stores_bytes(tmp_path: Path) -> None:
    """Without an engine's tensors, blocks of others can be found, prefetched, leased and evicted."""
    engine = AnyEngine()
    async with open_any(engine, cpu(8), nvme(tmp_path)) as kv:
        await kv.store(KEYS, engine.fill(KEYS, range(6)))
    async with TieredKV([cpu(8), nvme(tmp_path)], model=MODEL, layout=SMALL, limits=LIMITS) as kv:
        assert (await kv.prefetch(KEYS)).num_moved == 6
        async with kv.lease(KEYS) as lease:
            assert [len(view) for view in lease.views] == [1536] * 6
        assert (await kv.evict(KEYS)).num_blocks == 6


async def test_a_backend_given_twice_over(tmp_path: Path) -> None:
    """A backend that is an object serves one cache after the other, if it can be opened again."""
    backend = MemoryBackend(MemoryBackend.Settings.model_validate({"capacity": "1MiB"}))
    for expected in (0, 6):
        engine = AnyEngine()
        async with open_any(engine, backend) as kv:
            assert (await kv.lookup(KEYS)).num_blocks == expected
            await (await kv.store(KEYS, engine.fill(KEYS, range(6)))).settled()
