from structlog.testing import capture_logs

from tiered_kv.values.events import BlocksCorrupted, BlocksNotEncoded, RecordsRefused
from tiered_kv.values.log import Seldom, guarded, log_event


def test_what_comes_with_every_call_is_told_once_a_minute() -> None:
    """At once, and then with how often it came and was not told of."""
    now_s = 1000.0
    seldom = Seldom(lambda: now_s)
    assert [seldom.due() for _ in range(100)] == [0] + [None] * 99
    now_s += 59.9
    assert seldom.due() is None
    now_s += 0.1
    assert [seldom.due() for _ in range(3)] == [100, None, None]
    now_s += 3600.0
    assert seldom.due() == 2
    now_s += 60.0
    assert seldom.due() == 0


def test_events_that_come_with_every_call_do_not_fill_the_log() -> None:
    """A warning a minute of each tier and kind; the others are there for who looks at loads and stores, too."""
    with capture_logs() as logs:
        for _ in range(20):
            for tier in ("one of this test", "another"):
                log_event(BlocksCorrupted(tier, 1, ("key",)))
                log_event(RecordsRefused(tier, 1, "no key"))
                log_event(BlocksNotEncoded(tier, 1, "exponent"))
    told = [each["tier"] for each in logs if each["log_level"] != "debug"]
    assert told == ["one of this test"] * 3 + ["another"] * 3
    assert len(logs) == 120


def test_a_cache_hides_no_other_ones_events() -> None:
    """Their tiers may have the same name, as those of one server's models have."""
    event = BlocksCorrupted("a name of two", 1, ("key",))
    with capture_logs() as logs:
        for emit in [guarded([log_event]) for _ in range(2)]:
            emit(event)
            emit(event)
        log_event(event)
    assert [each["log_level"] for each in logs] == ["warning", "debug", "warning", "debug", "warning"]
