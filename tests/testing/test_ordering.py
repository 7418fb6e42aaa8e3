"""The account of what orders what, tried with streams, events and the host alone."""

from collections.abc import Callable

import pytest

from tiered_kv.testing import ScriptedDevice, ScriptedEvent, ScriptedStream

Script = Callable[[ScriptedDevice, ScriptedStream, ScriptedStream], object]


def _by_an_event(device: ScriptedDevice, a: ScriptedStream, b: ScriptedStream) -> None:
    event = a.writes("x")
    b.wait(event)
    b.reads("x")


def _by_the_host(device: ScriptedDevice, a: ScriptedStream, b: ScriptedStream) -> None:
    a.submit(lambda: device.accessed(["x"], writes=True), lambda _: None)
    device.run_all()  # the host has been told that it has ended
    b.writes("x")


def _by_an_event_that_the_host_saw(device: ScriptedDevice, a: ScriptedStream, b: ScriptedStream) -> None:
    event = a.reads("x")
    while not event.is_set():
        device.step()
    b.writes("x")


def _by_a_third(device: ScriptedDevice, a: ScriptedStream, b: ScriptedStream) -> None:
    c = device.stream("c")
    c.wait(a.writes("x"))
    b.wait(c.reads("y"))
    b.writes("x")


def _in_one_stream(device: ScriptedDevice, a: ScriptedStream, b: ScriptedStream) -> None:
    a.writes("x")
    a.reads("x")
    a.writes("x")


def _only_reads(device: ScriptedDevice, a: ScriptedStream, b: ScriptedStream) -> None:
    a.reads("x")
    b.reads("x")


def _elsewhere(device: ScriptedDevice, a: ScriptedStream, b: ScriptedStream) -> None:
    a.writes("x")
    b.writes("y")


def _by_nothing(device: ScriptedDevice, a: ScriptedStream, b: ScriptedStream) -> None:
    a.writes("x")
    b.reads("x")


def _by_nobody_who_was_told(device: ScriptedDevice, a: ScriptedStream, b: ScriptedStream) -> None:
    a.writes("x")
    device.run_all()
    b.reads("x")


def _by_luck(device: ScriptedDevice, a: ScriptedStream, b: ScriptedStream) -> None:
    a.reads("x")
    b.writes("x")


def _by_an_event_of_something_else(device: ScriptedDevice, a: ScriptedStream, b: ScriptedStream) -> None:
    event = a.reads("y")
    a.writes("x")
    b.wait(event)
    b.writes("x")


def _the_wrong_way_round(device: ScriptedDevice, a: ScriptedStream, b: ScriptedStream) -> None:
    a.reads("x")
    event = b.writes("x")
    a.wait(event)


def _by_an_event_of_nobody(device: ScriptedDevice, a: ScriptedStream, b: ScriptedStream) -> None:
    event = ScriptedEvent()
    a.writes("x")
    b.wait(event)
    b.writes("x")
    event.fire()


@pytest.mark.parametrize(
    "script",
    [
        _by_an_event,
        _by_the_host,
        _by_an_event_that_the_host_saw,
        _by_a_third,
        _in_one_stream,
        _only_reads,
        _elsewhere,
    ],
)
def test_what_is_ordered_is_no_race(script: Script) -> None:
    """By an event, by the host's knowing, by a third stream, by one stream's own order; or where nothing need be."""
    device = ScriptedDevice()
    script(device, device.stream("a"), device.stream("b"))
    device.run_all()
    assert device.races == []


@pytest.mark.parametrize(
    "script",
    [
        _by_nothing,
        _by_nobody_who_was_told,
        _by_luck,
        _by_an_event_of_something_else,
        _the_wrong_way_round,
        _by_an_event_of_nobody,
    ],
)
def test_what_nothing_orders_is_a_race(script: Script) -> None:
    """Though it came in a good order this time."""
    device = ScriptedDevice()
    script(device, device.stream("a"), device.stream("b"))
    device.run_all()
    (race,) = device.races
    assert race.region == "x"
    assert {race.first.actor[0], race.second.actor[0]} == {"a", "b"}
