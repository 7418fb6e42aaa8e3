"""Streams of one direction: a transfer that waits holds up itself alone."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tiered_kv.memory import CPUDevice
from tiered_kv.memory.lanes import Lane, LaneCopy, Lanes, submit_copy
from tiered_kv.testing import ScriptedDevice, ScriptedEvent
from tiered_kv.values.errors import ClosedError, ConfigurationError
from tiered_kv.values.loop_calls import LoopCalls


class Copies:
    """Copies that note their running and their ending."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.ended: list[tuple[str, BaseException | None]] = []

    def submit(self, lane: Lane, name: str) -> None:
        """Submit a copy called ``name``."""
        lane.submit(lambda: self.ran.append(name), lambda error: self.ended.append((name, error)))


@pytest.fixture
def device() -> Iterator[ScriptedDevice]:
    """A device whose streams run when told."""
    device = ScriptedDevice()
    yield device
    device.close()


def test_an_event_that_never_fires_holds_up_its_own_transfer_only(device: ScriptedDevice) -> None:
    """Transfers with no event, and those with events of their own, pass by."""
    lanes, copies, second = Lanes(device, "h2d"), Copies(), ScriptedEvent()
    stuck = lanes.take(ScriptedEvent())
    copies.submit(stuck, "stuck")
    other = lanes.take(second)
    copies.submit(other, "other")
    copies.submit(lanes.take(None), "free")
    device.run_all()
    assert copies.ran == ["free"]
    second.fire()
    device.run_all()
    assert copies.ran == ["free", "other"]


def test_copies_of_one_lane_run_in_order_behind_each_of_its_events(device: ScriptedDevice) -> None:
    """Whichever of the events fires first."""
    lane, copies, events = Lanes(device, "d2h").take_own(), Copies(), [ScriptedEvent(), ScriptedEvent()]
    for number, event in enumerate(events):
        lane.wait(event)
        copies.submit(lane, str(number))
    events[1].fire()
    device.run_all()
    assert copies.ran == []
    events[0].fire()
    device.run_all()
    assert copies.ran == ["0", "1"]


def test_streams_are_used_again(device: ScriptedDevice) -> None:
    """One released, and past its copies, serves the next transfer; one that is neither does not while others can."""
    lanes, copies = Lanes(device, "h2d"), Copies()
    used = set()
    for _ in range(10):
        event = ScriptedEvent()
        lane = lanes.take(event)
        copies.submit(lane, "a")
        lane.release()
        lane.release()
        event.fire()
        device.run_all()
        used.add(id(lane.stream))
    assert len(used) == 1
    held = lanes.take(ScriptedEvent())
    copies.submit(held, "held")
    held.release()
    assert lanes.take(ScriptedEvent()).stream is not held.stream


def test_with_too_many_that_wait_the_ones_that_move_are_shared(device: ScriptedDevice) -> None:
    """Streams are bounded; beyond that a transfer goes where the event has fired, not behind one that may never."""
    lanes, copies = Lanes(device, "h2d"), Copies()
    events = [ScriptedEvent() for _ in range(4)]
    taken = [lanes.take(event) for event in events]
    assert len({id(lane.stream) for lane in taken}) == 4
    events[2].fire()
    late = ScriptedEvent()
    fifth = lanes.take(late)
    assert fifth.stream is taken[2].stream
    copies.submit(fifth, "fifth")
    late.fire()
    device.run_all()
    assert copies.ran == ["fifth"]


def test_two_threads_that_take_a_stream_at_once_do_not_wait_in_the_same(
    device: ScriptedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes second sees for what the first one waits, and goes where fewer do."""
    lanes, events, second = Lanes(device, "h2d"), [ScriptedEvent() for _ in range(4)], list[Lane]()
    streams = [lanes.take(event).stream for event in events]
    events[2].fire()
    thread = threading.Thread(target=lambda: second.append(lanes.take(ScriptedEvent())))
    enqueue = streams[2].wait

    def wait(after: object) -> None:
        thread.start()
        thread.join(0.2)  # long enough for what would be wrong; what is right waits for this to return
        enqueue(after)

    with monkeypatch.context() as patch:
        patch.setattr(streams[2], "wait", wait)
        first = lanes.take(ScriptedEvent())
        thread.join()
    assert first.stream is streams[2]
    assert second[0].stream is not first.stream


def test_a_transfer_that_copied_nothing_leaves_no_wait_to_the_next(device: ScriptedDevice) -> None:
    """Its stream may wait for its event still, or for ever: who comes next gets another."""
    lanes, copies, event = Lanes(device, "h2d"), Copies(), ScriptedEvent()
    lanes.take(ScriptedEvent()).release()
    copies.submit(lanes.take(event), "next")
    event.fire()
    device.run_all()
    assert copies.ran == ["next"]


def test_an_event_that_fails_is_not_forgotten_where_a_stream_is_shared(device: ScriptedDevice) -> None:
    """The wait of another transfer on the same stream does not make up for it: neither copies."""
    lanes, copies, error, lost = Lanes(device, "d2h"), Copies(), OSError("lost"), ScriptedEvent()
    first = lanes.take(lost)
    others = [lanes.take(ScriptedEvent()) for _ in range(3)]
    copies.submit(others[0], "busy")
    event = ScriptedEvent()
    shared = [lane for lane in (lanes.take(event) for _ in range(4)) if lane.stream is first.stream]
    assert shared
    event.fire()
    lost.fail(error)
    copies.submit(first, "lost")
    copies.submit(shared[0], "shared")
    device.run_all()
    assert (copies.ran, copies.ended) == ([], [("lost", error), ("shared", error)])
    for lane in (first, *shared):
        lane.release()
    again = lanes.take(fine := ScriptedEvent())
    assert again.stream is first.stream
    copies.submit(again, "again")
    fine.fire()
    device.run_all()
    assert copies.ran == ["again"]


def test_an_event_that_has_fired_needs_no_stream_of_its_own(device: ScriptedDevice) -> None:
    """Nor does none at all."""
    lanes, event = Lanes(device, "h2d"), ScriptedEvent()
    event.fire()
    assert lanes.take(event).stream is lanes.take(None).stream is lanes.main


def test_what_nobody_can_wait_for_is_refused(device: ScriptedDevice) -> None:
    """At once."""
    with pytest.raises(ConfigurationError, match="after must"):
        Lanes(device, "h2d").take(object())


def test_an_event_that_fails_fails_its_own_transfer_only(device: ScriptedDevice) -> None:
    """The next transfer on that stream, after an event of its own, is none the worse."""
    lanes, copies, error = Lanes(device, "d2h"), Copies(), OSError("lost")
    lost, fine = ScriptedEvent(), ScriptedEvent()
    lane = lanes.take(lost)
    copies.submit(lane, "lost")
    lane.release()
    lost.fail(error)
    device.run_all()
    lane = lanes.take(fine)
    copies.submit(lane, "fine")
    fine.fire()
    device.run_all()
    assert (copies.ran, copies.ended) == (["fine"], [("lost", error), ("fine", None)])


def test_an_event_that_fails_fails_no_transfer_that_waits_for_nothing_yet(device: ScriptedDevice) -> None:
    """One with more events to come may have its stream once nobody else has it: it begins anew there."""
    lanes, copies, error = Lanes(device, "d2h"), Copies(), OSError("lost")
    for _ in range(4):
        lost = ScriptedEvent()
        lane = lanes.take(lost)
        copies.submit(lane, "lost")
        lane.release()
        lost.fail(error)
    device.run_all()
    copies.submit(lanes.take_own(), "fine")
    device.run_all()
    assert copies.ran == ["fine"]


def test_an_event_that_fails_fails_what_waits_for_others_too(device: ScriptedDevice) -> None:
    """Also with no copy between two events of one lane; its next one, once it is released, is none the worse."""
    lanes, copies, error = Lanes(device, "d2h"), Copies(), OSError("lost")
    lost, fine = ScriptedEvent(), ScriptedEvent()
    lane = lanes.take_own(lost)
    lane.wait(fine)
    copies.submit(lane, "first")
    lane.wait(fine)
    copies.submit(lane, "second")
    lane.release()
    lost.fail(error)
    fine.fire()
    device.run_all()
    assert (copies.ran, copies.ended) == ([], [("first", error), ("second", error)])
    copies.submit(lanes.take_own(), "fine")
    device.run_all()
    assert copies.ran == ["fine"]


def test_threads_of_a_cpu_wait_for_each_transfer_apart() -> None:
    """A blocking wait of one holds up none of the others, and closing ends all but the one that hangs."""
    device, never = CPUDevice(), threading.Event()
    lanes, ended = Lanes(device, "h2d"), threading.Event()
    stuck = lanes.take(never)
    stuck.submit(lambda: None, lambda _: None)
    lanes.take(None).submit(lambda: None, lambda _: ended.set())
    assert ended.wait(60)
    assert not device.close(timeout_s=0.0)
    never.set()
    assert device.close(timeout_s=60)


def test_closed_lanes_take_no_more_and_do_what_is_queued(device: ScriptedDevice) -> None:
    """On the stream that all share, and on those of transfers of their own."""
    lanes, copies, event = Lanes(device, "h2d"), Copies(), ScriptedEvent()
    shared, own = lanes.take(None), lanes.take(event)
    copies.submit(shared, "shared")
    copies.submit(own, "own")
    lanes.close()
    for lane in (shared, own):
        with pytest.raises(ClosedError):
            copies.submit(lane, "late")
    event.fire()
    device.run_all()
    assert copies.ran == ["shared", "own"]


async def test_a_copy_that_raises_stop_iteration_ends() -> None:
    """A future refuses that error: whoever waits for the copy hears of it as the cause of another."""
    copy = LaneCopy(lambda: None)
    copy.resolve(StopIteration())
    error = copy.ended.exception()
    assert isinstance(error, RuntimeError)
    assert isinstance(error.__cause__, StopIteration)


def test_only_a_lane_that_waits_for_nothing_is_idle() -> None:
    """On one that is, a copy may be made at once; behind an event of a transfer's own it may not."""
    device, event = CPUDevice(), threading.Event()
    lanes = Lanes(device, "h2d")
    assert lanes.take(None).is_idle
    assert not lanes.take(event).is_idle
    event.set()
    device.close()


async def test_what_cannot_be_submitted_has_failed() -> None:
    """Whoever waits for the copy hears of it, as of one that failed on its way."""
    device = CPUDevice()
    lanes = Lanes(device, "h2d")
    lane = lanes.take(None)
    lanes.close()
    copy = submit_copy(lane, lambda: None, LoopCalls(asyncio.get_running_loop()))
    assert copy.ended.done()
    with pytest.raises(ClosedError, match="the stream 'h2d' is closed"):
        await copy.ended
    device.close()
