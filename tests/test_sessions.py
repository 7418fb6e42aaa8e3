"""Forecasts of conversations, and prefetches of a real cache by them, on a clock that the tests turn."""

from dataclasses import replace

import pytest

from tests.support.caches import inside, keep, open_cache, until
from tests.support.engine import MODEL, PAYLOAD_BYTES, Engine, prompt, small_layout
from tiered_kv import CacheStatistics, ConfigurationError, CPUTier, GPULoadStoreSpec, SessionPlanner, TieredKV
from tiered_kv.cache.sessions import SessionForecast, SessionStatistics

CPU = CPUTier(capacity=16 * PAYLOAD_BYTES)
FAR = {"medium": "memory", "capacity": "1MiB"}


class Clock:
    """Seconds that a test turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return them."""
        return self.now


def taught(gap_s: float, *, of: int = 50, end: int = 0) -> SessionForecast:
    """Return a forecast that has seen conversations come back after the same time, and some not at all."""
    forecast = SessionForecast()
    for number in range(of):
        forecast.turn(number, number * 1000.0)
        forecast.due(number * 1000.0 + gap_s)
        if number >= end:
            forecast.turn(number, number * 1000.0 + gap_s)
        forecast.due(number * 1000.0 + 999.0)
    return forecast


def test_a_forecast_learns_when_conversations_come_back() -> None:
    """Likely about the time that it took others, and neither long before nor long after."""
    forecast = taught(60.0)
    forecast.turn("new", 10**6)
    assert forecast.chance("new", 10**6 + 5.0, 10.0) < 0.05
    assert forecast.chance("new", 10**6 + 55.0, 20.0) > 0.3
    assert forecast.chance("new", 10**6 + 5.0, 10.0) < forecast.chance("new", 10**6 + 55.0, 20.0)
    assert forecast.chance("new", 10**6 + 300.0, 100.0) < 0.05
    assert forecast.chance("unknown", 10**6, 100.0) == 0.0


def test_conversations_that_end_make_the_next_ones_less_likely() -> None:
    """Nobody has to say so."""
    few, many = taught(60.0), taught(60.0, end=40)
    for forecast in (few, many):
        forecast.turn("new", 10**6)
    assert many.chance("new", 10**6 + 55.0, 20.0) < few.chance("new", 10**6 + 55.0, 20.0)


def test_what_is_known_goes_before_what_was_learned() -> None:
    """A timer is prepared in the last tenth of its time, if the blocks stay for so long."""
    forecast = SessionForecast()
    forecast.turn("timer", 0.0, back_in_s=100.0)
    assert "timer" not in [each for each in forecast.due(80.0) if forecast.chance(each, 80.0, 1e9)]
    assert "timer" in forecast.due(90.0)
    assert forecast.chance("timer", 90.0, 30.0) == 1.0
    assert forecast.chance("timer", 90.0, 5.0) == 0.0
    assert forecast.chance("timer", 200.0, 30.0) == 0.0


def test_a_forecast_is_bounded() -> None:
    """The oldest conversations are forgotten, and so are looks at turns that are over."""
    forecast = SessionForecast(most_sessions=10)
    for number in range(1_000):
        forecast.turn(number % 40, float(number))
    assert len(forecast) == 10
    assert len(forecast._looks) <= 41  # noqa: SLF001 - what is to be bounded
    forecast.close(39)
    assert len(forecast) == 9


async def test_blocks_are_in_memory_before_a_turn_is_due() -> None:
    """They were evicted meanwhile; once the turn comes, what was brought counts as used."""
    clock, engine, keys = Clock(), Engine(), prompt(6)
    async with open_cache(CPU, FAR, engine=engine) as kv:
        planner = SessionPlanner(kv, clock=clock)
        await keep(kv, engine, keys)
        planner.turn("a", keys, back_in_s=100.0)
        for seed in (1, 2):
            clock.now += 10.0
            await keep(kv, engine, prompt(8, seed=seed))
            planner.tick()
        host = inside(kv).chains[0].host.index
        assert host.ready_prefix(inside(kv).batch(keys)[1].names) == 0
        clock.now = 95.0
        planner.tick()
        await until(lambda: host.ready_prefix(inside(kv).batch(keys)[1].names) == 6)
        await until(lambda: kv.stats().transfers == 0)
        assert (await kv.load(keys, GPULoadStoreSpec(range(6)))).by_tier == {"cpu": 6}
        planner.turn("a", keys)
        assert planner.statistics() == SessionStatistics(1, prefetches=1, moved=6, used=6, wasted=0)


async def test_what_is_brought_is_a_part_of_the_tier_and_waste_is_counted() -> None:
    """Others wait for room; a conversation that ends has wasted what was brought for it."""
    clock, engine = Clock(), Engine()
    async with open_cache(CPU, FAR, engine=engine) as kv:
        planner = SessionPlanner(kv, clock=clock, share=0.5)
        for seed in range(4):
            await keep(kv, engine, prompt(6, seed=seed))
            planner.turn(seed, prompt(6, seed=seed), back_in_s=100.0)
        clock.now = 95.0
        planner.tick()
        assert planner.statistics().prefetches == 1  # 6 of 8 blocks
        await until(lambda: kv.stats().transfers == 0)
        planner.close(0)
        clock.now = 99.9
        planner.tick()
        assert planner.statistics().prefetches == 2
        await until(lambda: kv.stats().transfers == 0)
        planner.close(1)
        found = planner.statistics()
        assert (found.sessions, found.used, found.wasted) == (2, 0, found.moved)


async def test_it_runs_by_itself_and_ends_with_the_cache() -> None:
    """Leaving it, or closing the cache first, leaves nothing behind."""
    async with open_cache(CPU, engine=Engine()) as kv:
        async with SessionPlanner(kv) as planner:
            planner.turn("a", prompt(2))
        for wrong in ({"share": 0.0}, {"least_chance": 2.0}, {"to": "gpu"}):
            with pytest.raises(ConfigurationError):
                SessionPlanner(kv, **wrong)
        with pytest.raises(ConfigurationError, match="back_in_s"):
            planner.turn("a", prompt(2), back_in_s=0.0)


async def test_a_server_that_is_away_ends_no_planner() -> None:
    """Its statistics name no tier then: nothing is brought, and conversations are looked at again."""

    class Away(TieredKV):
        """A cache that can be made to know nothing, as a client of a server that is away."""

        is_away = False

        def stats(self) -> CacheStatistics:
            """Say what there is, or nothing."""
            stats = super().stats()
            return replace(stats, tiers=()) if self.is_away else stats

    clock, engine = Clock(), Engine()
    async with Away([CPU, FAR], model=MODEL, layout=small_layout(), device="cpu") as kv:
        kv.register_kv_caches(engine.caches)
        planner = SessionPlanner(kv, clock=clock)
        planner.turn("timer", prompt(4), back_in_s=100.0)
        Away.is_away = True
        clock.now = 95.0
        planner.tick()
        assert planner.statistics().prefetches == 0
