"""Metrics as a Prometheus server would read them."""

import asyncio
import random
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from typing_extensions import override

from tests.support.backends import ScriptedBackend
from tests.support.caches import Recorder, keep, open_cache, until, until_idle
from tests.support.engine import BLOCK_SIZE, MODEL, PAYLOAD_BYTES, SMALL_LIMITS, Engine, prompt, small_layout
from tiered_kv import BlockState, ConfigurationError, CPUTier, TieredKV, TieredKVSettings, hash_blocks
from tiered_kv.telemetry import Metrics
from tiered_kv.telemetry.watch import Watch
from tiered_kv.values.events import HostMemoryReady

CPU = CPUTier(capacity=16 * PAYLOAD_BYTES)


class Scraper:
    """Reads one registry: sums of samples, by name and some labels."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)

    def samples(self) -> Iterator[tuple[str, Mapping[str, str], float]]:
        """Yield every sample."""
        for family in text_string_to_metric_families(generate_latest(self.registry).decode()):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value

    def sum_of(self, name: str, **labels: str) -> float:
        """Add up the samples of a name that have these labels."""
        return sum(
            value
            for each, has, value in self.samples()
            if each == f"tiered_kv_{name}" and labels.items() <= has.items()
        )


async def test_what_is_exported_adds_up_under_any_traffic() -> None:
    """Requested is hit or missed, store_requested is stored, present or dropped: at each scrape, whatever fails."""
    chance, scraper, engine = random.Random(0), Scraper(), Engine()
    backend = ScriptedBackend()
    async with open_cache(CPU, backend, engine=engine, metrics=Metrics(scraper.registry)) as kv:

        async def work(number: int) -> None:
            for _ in range(30):
                keys = prompt(chance.randrange(1, 13), seed=chance.randrange(4))
                if chance.random() < 0.1:
                    backend.on_read.fail_next(OSError("broken"))
                if chance.random() < 0.1:
                    kv.advance_epoch(f"w{chance.randrange(2)}")
                pages = range(16 * number, 16 * number + len(keys))
                call = kv.load(keys, engine.compute(keys, pages)) if chance.random() < 0.5 else None
                task = asyncio.ensure_future(call or kv.store(keys, engine.compute(keys, pages)))
                await asyncio.sleep(0)
                if chance.random() < 0.1:
                    task.cancel()
                await asyncio.wait({task})
                assert_adds_up(scraper)

        await asyncio.gather(*(work(number) for number in range(4)))
        await until_idle(kv)
        assert_adds_up(scraper)
        assert scraper.sum_of("requested_blocks_total") == kv.stats().requested > 0
        assert scraper.sum_of("requested_tokens_total") == kv.stats().requested * BLOCK_SIZE
        assert scraper.sum_of("hit_blocks_total", tier="cpu") == kv.stats()["cpu"].hits > 0
        assert scraper.sum_of("load_seconds_count") + scraper.sum_of("store_seconds_count") == 120


def assert_adds_up(scraper: Scraper) -> None:
    """Assert both sums in one scrape."""
    totals = dict.fromkeys(["requested", "hit", "missed", "store_requested", "stored", "present", "dropped"], 0.0)
    for name, _, value in scraper.samples():
        if (match := re.fullmatch(r"tiered_kv_(\w+)_blocks_total", name)) and match[1] in totals:
            totals[match[1]] += value
    assert totals["requested"] == totals["hit"] + totals["missed"]
    assert totals["store_requested"] == totals["stored"] + totals["present"] + totals["dropped"]


async def test_a_load_calls_three_functions_of_telemetry_whatever_its_blocks() -> None:
    """All else is counted anyway, or at a scrape: after a large copy what is called is not in a processor's caches."""
    engine, events, called = Engine(), Recorder(), list[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals["__name__"].startswith("tiered_kv.telemetry"):
            called.append(frame.f_code.co_qualname)

    async with open_cache(CPU, engine=engine, emit=events, metrics=Metrics(CollectorRegistry())) as kv:
        await keep(kv, engine, prompt(8))
        await until(lambda: bool(events.of(HostMemoryReady)))
        for num_blocks in (1, 8):
            called.clear()
            into = engine.compute(prompt(num_blocks))
            sys.setprofile(note)
            try:
                await kv.load(prompt(num_blocks), into)
            finally:
                sys.setprofile(None)
            assert called == ["Prompts.loaded", "Sampler.note", "Watch.__call__"]


async def test_a_miss_says_what_befell_the_block() -> None:
    """Never stored, evicted, removed: by what `explain` would say of the first block that is not there."""
    scraper, engine = Scraper(), Engine()
    async with open_cache(CPU, engine=engine, metrics=Metrics(scraper.registry)) as kv:
        await kv.load(prompt(3), engine.compute(prompt(3)))
        assert scraper.sum_of("missed_blocks_total", reason="never stored") == 3
        await keep(kv, engine, prompt(4))
        await kv.evict(prompt(4)[1:])
        await kv.load(prompt(4), engine.compute(prompt(4)))
        assert scraper.sum_of("missed_blocks_total", reason="removed") == 3
        for seed in range(1, 6):
            await keep(kv, engine, prompt(8, seed=seed))
        await kv.load(prompt(8, seed=1), engine.compute(prompt(8)))
        assert scraper.sum_of("missed_blocks_total", reason="evicted") == 8
        assert kv.stats().missed_because == {"never stored": 3, "removed": 3, "evicted": 8}


async def test_the_table_of_metrics_names_each() -> None:
    """Of the whole cache, of a tier, of salts and of events, by the names that Prometheus has."""
    table = (Path(__file__).parents[2] / "docs/how-to/observe.md").read_text()
    scraper = Scraper()
    metrics = Metrics(scraper.registry, salts=["a"], prefill_tokens_per_s=1.0)
    async with open_cache(CPU, ScriptedBackend(), engine=Engine(), metrics=metrics):
        families = [family.name.removeprefix("tiered_kv_") for family in scraper.registry.collect()]
    short = [re.sub("^tier_(.*)_blocks$", r"\1", name) for name in families]
    told = [f"`{name}`" in table or f"`{each}`" in table for name, each in zip(families, short, strict=True)]
    assert len(families) > 50
    assert [name for name, is_told in zip(families, told, strict=True) if not is_told] == []


async def test_the_salts_that_are_listed_are_counted_one_by_one() -> None:
    """Loads and lookups of these tenants, and of no other: a label's values are the operator's choice."""
    scraper, engine = Scraper(), Engine()
    metrics = Metrics(scraper.registry, salts=["a", "b"])
    async with open_cache(CPU, engine=engine, metrics=metrics) as kv:
        for salt, num_loaded in (("a", 4), ("c", 6)):
            keys = hash_blocks(range(6 * BLOCK_SIZE), block_size=BLOCK_SIZE, salt=salt)
            await keep(kv, engine, keys[:num_loaded])
            await kv.lookup(keys)
            await kv.load(keys, engine.compute(keys))
        found = {(name, has["salt"]): value for name, has, value in scraper.samples() if "salt" in has}
    assert found == {
        ("tiered_kv_salt_requested_blocks_total", "a"): 6,
        ("tiered_kv_salt_hit_blocks_total", "a"): 4,
        ("tiered_kv_salt_lookup_blocks_total", "a"): 6,
        ("tiered_kv_salt_lookup_missed_blocks_total", "a"): 2,
        **{(f"tiered_kv_salt_{what}_blocks_total", "b"): 0 for what in ("requested", "hit", "lookup", "lookup_missed")},
    }


async def test_seconds_of_prefill_saved_are_the_loaded_tokens_at_the_engines_rate() -> None:
    """Of a rate that was given; nothing is said where nobody knows one."""
    for rate, expected in ((100.0, [pytest.approx(4 * BLOCK_SIZE / 100)]), (0.0, [])):
        scraper, engine = Scraper(), Engine()
        async with open_cache(CPU, engine=engine, metrics=Metrics(scraper.registry, prefill_tokens_per_s=rate)) as kv:
            await keep(kv, engine, prompt(4))
            await kv.load(prompt(6), engine.compute(prompt(6)))
            said = [value for name, _, value in scraper.samples() if name == "tiered_kv_prefill_saved_seconds_total"]
            assert said == expected


async def test_evictions_tell_how_old_blocks_were() -> None:
    """By tier, in a histogram: as many as were evicted, of a cache so small that all are in the sample."""
    scraper, engine = Scraper(), Engine()
    async with open_cache(CPU, engine=engine, metrics=Metrics(scraper.registry)) as kv:
        for seed in range(6):
            await keep(kv, engine, prompt(8, seed=seed))
        evicted = kv.stats()["cpu"].evicted
        assert evicted == 32
        assert scraper.sum_of("tier_eviction_age_seconds_count", tier="cpu") == evicted
        assert scraper.sum_of("tier_eviction_idle_seconds_count", tier="cpu") == evicted


async def test_whoever_asks_for_membership_says_what_is_a_lookup() -> None:
    """Asking counts nothing, as it is done again and again; what the caller counts is, with what befell the rest."""
    scraper, engine = Scraper(), Engine()
    async with open_cache(CPU, engine=engine, metrics=Metrics(scraper.registry)) as kv:
        await keep(kv, engine, prompt(4))
        await kv.evict(prompt(4)[2:])
        found = kv.membership(prompt(4)) == BlockState.HIT
        assert scraper.sum_of("lookup_blocks_total") == 0
        await asyncio.to_thread(kv.count_lookup, prompt(4), found)
        kv.count_lookup(prompt(2), found[:2])
        kv.count_lookup(prompt(0), found[:0])
        await until(lambda: scraper.sum_of("lookup_blocks_total") == 6)
        assert scraper.sum_of("lookup_missed_blocks_total") == 2
        assert scraper.sum_of("lookup_missed_blocks_total", reason="removed") == 2
        with pytest.raises(ConfigurationError, match="4 keys"):
            kv.count_lookup(prompt(4), found[:3])


async def test_faults_and_breakers_are_told_by_tier() -> None:
    """What went wrong is counted where it went wrong, and a tier that is bypassed says so."""
    scraper, engine = Scraper(), Engine()
    backend = ScriptedBackend()
    async with open_cache(CPU, backend, engine=engine, metrics=Metrics(scraper.registry)) as kv:
        for seed in range(3):
            backend.on_write.fail_next(OSError("full"))
            await keep(kv, engine, prompt(2, seed=seed))
        tier = kv.stats().tiers[1].tier
        assert scraper.sum_of("tier_call_failures_total", tier=tier, call="write") == 3
        assert scraper.sum_of("tier_trips_total", tier=tier, call="write") == 1
        assert scraper.sum_of("tier_breaker_open", tier=tier, calls="writes") == 1
        assert scraper.sum_of("tier_breaker_open", tier=tier, calls="reads") == 0


async def test_any_thread_may_scrape_and_a_busy_loop_is_said() -> None:
    """A scrape from another thread waits for the loop a second at most, then gets what there was."""
    scraper, engine = Scraper(), Engine()
    async with open_cache(CPU, engine=engine, metrics=Metrics(scraper.registry)) as kv:
        await keep(kv, engine, prompt(4))
        assert await asyncio.to_thread(scraper.sum_of, "stored_blocks_total") == 4
        await keep(kv, engine, prompt(4, seed=1))
        seen: list[float] = []
        thread = threading.Thread(target=lambda: seen.append(scraper.sum_of("stored_blocks_total")))
        thread.start()
        thread.join()  # the loop cannot answer meanwhile
        assert seen == [4]


async def test_caches_of_one_registry_are_told_apart() -> None:
    """Two caches of a model have numbers; a closed one is gone, and its number free."""
    scraper = Scraper()
    async with open_cache(CPU, metrics=Metrics(scraper.registry)):
        async with open_cache(CPU, metrics=Metrics(scraper.registry)):
            assert scraper.sum_of("tier_slots", model=MODEL.name, cache="1") == 16
        assert scraper.sum_of("tier_slots") == 16
        async with open_cache(CPU, metrics=Metrics(scraper.registry)):
            assert scraper.sum_of("tier_slots", cache="1") == 16
    assert list(scraper.samples()) == []


class Uncollected(Metrics):
    """Metrics that raise when they are to be collected."""

    @override
    def begin(self, watch: Watch) -> None:
        raise ZeroDivisionError


async def test_a_cache_that_did_not_open_takes_no_number_from_another() -> None:
    """The registry goes on to have the metrics of those that are open."""
    scraper = Scraper()
    async with open_cache(CPU, metrics=Metrics(scraper.registry)):
        with pytest.raises(ZeroDivisionError):
            async with open_cache(CPU, metrics=Uncollected(scraper.registry)):
                pass
        assert scraper.sum_of("tier_slots", cache="0") == 16
    assert list(scraper.samples()) == []


async def test_the_setting_switches_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """``metrics = true`` is enough: prometheus_client's own registry has them as long as the cache is open."""
    monkeypatch.setenv("TIERED_KV_METRICS", "true")
    settings = TieredKVSettings(tiers=[CPU], limits=SMALL_LIMITS)
    async with TieredKV.from_settings(settings, model=MODEL, layout=small_layout(), device="cpu"):
        assert "tiered_kv_requested_blocks_total{" in generate_latest().decode()
    assert "tiered_kv_requested_blocks_total{" not in generate_latest().decode()


async def test_settings_name_the_salts_and_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """As arguments of `Metrics` do; what cannot be right is refused."""
    monkeypatch.setenv("TIERED_KV_METRICS_SALTS", '["a"]')
    settings = TieredKVSettings(tiers=[CPU], limits=SMALL_LIMITS, metrics=True, prefill_tokens_per_s=10.0)
    async with TieredKV.from_settings(settings, model=MODEL, layout=small_layout(), device="cpu"):
        said = generate_latest().decode()
    assert re.search(r'^tiered_kv_salt_hit_blocks_total\{.*salt="a"\} 0.0$', said, re.MULTILINE)
    assert "tiered_kv_prefill_saved_seconds_total{" in said
    with pytest.raises(ConfigurationError, match="a list of the salts"):
        Metrics(CollectorRegistry(), salts="a")
    with pytest.raises(ConfigurationError, match="a list of the salts"):
        Metrics(CollectorRegistry(), salts=5)  # type: ignore[arg-type]
    for rate in (-1.0, "8", True):
        with pytest.raises(ConfigurationError, match="tokens a second"):
            Metrics(CollectorRegistry(), prefill_tokens_per_s=rate)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="registry must be one of prometheus_client's, got 'r'"):
        Metrics("r")  # type: ignore[arg-type]


def test_metrics_are_one_caches() -> None:
    """What is given to a second cache is refused before that opens, and so is what is no metrics."""
    metrics = Metrics(CollectorRegistry())
    TieredKV([CPU], model=MODEL, layout=small_layout(), metrics=metrics)
    with pytest.raises(ConfigurationError, match="make one for each"):
        TieredKV([CPU], model=MODEL, layout=small_layout(), metrics=metrics)
    with pytest.raises(ConfigurationError, match="must be True"):
        TieredKV([CPU], model=MODEL, layout=small_layout(), metrics="yes")  # type: ignore[arg-type] # that is the test
