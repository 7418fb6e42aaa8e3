"""The circuit breaker and the average that sheds stores, on a clock that the test turns."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.tiers.health import Breaker, LatencyAverage, StorageHealth
from tiered_kv.values.events import TierResumed, TierTripped


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def tripped(clock: Clock) -> Breaker:
    """Return a breaker that has just opened."""
    breaker = Breaker(clock, random.Random(1))
    for _ in range(3):
        breaker.begin("read")
        breaker.failed("read")
    return breaker


def test_a_few_failures_in_a_row_open_it_and_one_success_between_does_not() -> None:
    """One lost call is no reason to go on without a tier; three in a row are."""
    breaker = Breaker(Clock(), random.Random(1))
    for well in (False, False, True, False, False):
        breaker.succeeded("read") if well else breaker.failed("read")
        assert not breaker.is_open
    breaker.failed("read")
    assert breaker.is_open


def test_what_is_only_done_by_hand_is_well_once_others_are() -> None:
    """A resize for which a disk has no room is repeated by nobody: it must not be said to be out of use for good."""
    breaker = Breaker(Clock(), random.Random(1))
    for _ in range(3):
        breaker.begin("resize")
        breaker.failed("resize")
    assert breaker.is_tripped
    breaker.begin("checkpoint")
    breaker.succeeded("checkpoint")
    assert not breaker.is_tripped


def test_a_pause_ends_with_one_probe() -> None:
    """While the probe is under way nobody else calls; if it goes well everyone may."""
    clock = Clock()
    breaker = tripped(clock)
    clock.now += 0.25 * 1.2
    assert not breaker.is_open
    breaker.begin("read")
    assert breaker.is_open
    breaker.succeeded("read")
    assert not breaker.is_open
    assert not breaker.is_tripped


def test_pauses_grow_and_are_bounded() -> None:
    """A tier that is well again is in use again within five seconds, however long it was ill."""
    clock = Clock()
    breaker = tripped(clock)
    pauses = []
    for _ in range(12):
        start = clock.now
        while breaker.is_open:
            clock.now += 0.01
        pauses.append(clock.now - start)
        breaker.begin("read")
        breaker.failed("read")
    assert pauses[0] < 0.31
    assert pauses[-1] > 2.5
    assert max(pauses) < 4.5


def test_a_late_call_opens_it_until_it_returns() -> None:
    """A call that hangs is never joined by another one; its return long after is worth a probe at once."""
    clock = Clock()
    breaker = Breaker(clock, random.Random(1))
    breaker.begin("read")
    breaker.late("read")
    clock.now += 3600
    assert breaker.is_open
    breaker.late_returned()
    assert not breaker.is_open


def test_a_late_call_that_fails_when_it_returns_is_no_reason_for_a_probe() -> None:
    """A client that gives up by itself, just after its time, leaves the pause as it is."""
    clock = Clock()
    breaker = Breaker(clock, random.Random(1))
    breaker.begin("read")
    breaker.late("read")
    breaker.late_returned()
    breaker.failed("read")
    assert breaker.is_open
    clock.now += 0.25 * 1.2
    assert not breaker.is_open


def test_many_calls_that_fail_at_once_make_one_pause() -> None:
    """However many were under way, the first pause is the short one; the next failure is another trouble."""
    for fails in ("failed", "late"):
        clock = Clock()
        breaker = Breaker(clock, random.Random(1))
        for call in ("begin", fails):
            for _ in range(16):
                getattr(breaker, call)("read")
        while breaker.num_late:
            breaker.late_returned()
        assert breaker.is_open
        clock.now += 0.25 * 1.2
        assert not breaker.is_open


def test_lookups_that_go_well_do_not_hide_reads_that_fail() -> None:
    """A tier is found by lookups and judged by reads: three that fail open it, whatever was answered between them."""
    clock = Clock()
    breaker = Breaker(clock, random.Random(1))
    for _ in range(3):
        assert not breaker.is_open
        for kind in ("lookup", "read"):
            breaker.begin(kind)
            breaker.succeeded(kind) if kind == "lookup" else breaker.failed(kind)
    assert breaker.is_open


def test_what_reads_opened_only_a_read_closes() -> None:
    """Half open, lookups pass as they have to come first; the first read is the probe, and each failure costs more."""
    clock = Clock()
    breaker = tripped(clock)
    pauses = []
    for _ in range(6):
        start = clock.now
        while breaker.is_open:
            clock.now += 0.01
        pauses.append(clock.now - start)
        for _ in range(4):
            breaker.begin("lookup")
            assert not breaker.is_open
            breaker.succeeded("lookup")
        breaker.begin("read")
        assert breaker.is_open
        breaker.failed("read")
    assert pauses[-1] > 4 * pauses[0]
    clock.now += 5.0
    breaker.begin("read")
    breaker.succeeded("read")
    assert not breaker.is_tripped


CALLS = st.tuples(
    st.sampled_from(["begin", "succeeded", "failed", "late", "late_returned", "wait"]),
    st.sampled_from(["lookup", "read", "delete"]),
)


@given(st.lists(CALLS, max_size=60))
def test_it_never_stays_open_for_good(steps: list[tuple[str, str]]) -> None:
    """Whatever happened, five seconds after the last late call has returned a probe may be made."""
    clock = Clock()
    breaker = Breaker(clock, random.Random(1))
    for step, kind in steps:
        if step == "wait":
            clock.now += 1.0
        elif step != "late_returned":
            getattr(breaker, step)(kind)
        elif breaker.num_late:
            breaker.late_returned()
    while breaker.num_late:
        breaker.late_returned()
    for kind in ("lookup", "read", "delete"):
        breaker.failed(kind)  # whatever probe was under way has ended
    clock.now += 5.0
    assert not breaker.is_open


def test_a_latency_is_forgotten_with_time() -> None:
    """Stores are shed while writes are slow, and tried again some seconds later."""
    clock = Clock()
    latency = LatencyAverage(clock)
    for _ in range(20):
        latency.saw(10.0)
    assert latency.now() == pytest.approx(10.0, rel=0.01)
    clock.now += 4.0
    assert latency.now() < 1.0


def test_only_slow_writes_shed_stores() -> None:
    """A medium that reads slowly, or deletes or remembers slowly, is written to all the same."""
    clock = Clock()
    health = StorageHealth("medium", 10.0, lambda _: None, clock=clock, rng=random.Random(1), shed_stores_after_s=1.0)
    for doing in ("lookup", "read", "delete", "forget", "checkpoint"):
        health.breaker(doing).begin(doing)
        health.ended(doing, 9.0, is_late=False, has_failed=False)
        assert not health.is_shedding, doing
    health.breaker("write").begin("write")
    health.ended("write", 9.0, is_late=False, has_failed=False)
    assert health.is_shedding
    assert not health.is_bypassed


def test_a_failure_that_opens_a_breaker_is_said_once_and_so_is_its_end() -> None:
    """Two failures say nothing, the third does, later ones do not, and the success that closes it says for how long."""
    clock, said = Clock(), list[object]()
    health = StorageHealth("medium", 1.0, said.append, clock=clock, rng=random.Random(1))

    def call(*, has_failed: bool) -> None:
        health.breaker("read").begin("read")
        health.ended("read", 0.01, is_late=False, has_failed=has_failed)

    call(has_failed=True)
    call(has_failed=True)
    assert not said
    call(has_failed=True)
    assert said == [TierTripped("medium", "read")]
    clock.now += 60
    call(has_failed=True)
    assert len(said) == 1
    clock.now += 60
    call(has_failed=False)
    assert said[1:] == [TierResumed("medium", 120.0)]
