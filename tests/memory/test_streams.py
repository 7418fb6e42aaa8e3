"""What every stream promises, whichever device it is of."""

import asyncio
import gc
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from tiered_kv.memory import CPUDevice, CUDADevice, Device, Stream, make_device
from tiered_kv.testing import ScriptedDevice, ScriptedEvent
from tiered_kv.values.errors import ClosedError, ConfigurationError


class Copies:
    """Copies that note their running and their ending."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.ended: list[tuple[str, BaseException | None]] = []

    def submit(self, stream: Stream, name: str, error: Exception | None = None) -> Any:  # noqa: ANN401 - any event
        """Submit a copy called ``name`` that fails with ``error``; return the event after it."""

        def copy() -> None:
            self.ran.append(name)
            if error is not None:
                raise error

        return stream.submit(copy, lambda result: self.ended.append((name, result)))

    @property
    def order(self) -> list[str]:
        """The names in the order in which they ended."""
        return [name for name, _ in self.ended]


class StreamTests(ABC):
    """Promises of all streams."""

    @pytest.fixture
    @abstractmethod
    def device(self) -> Iterator[Device]:
        """The device under test."""

    @abstractmethod
    def event(self) -> tuple[Any, Any]:
        """Return something to wait for that has not happened, and the function that makes it happen."""

    def finish(self, stream: Stream) -> None:
        """Let all that is queued end."""
        stream.close()
        assert stream.join(60)

    def test_copies_end_in_the_order_they_were_submitted_in(self, device: Device) -> None:
        """One after another, each reported once, without error."""
        copies, stream = Copies(), device.stream("load")
        names = [str(number) for number in range(100)]
        for name in names:
            copies.submit(stream, name)
        self.finish(stream)
        assert copies.ended == [(name, None) for name in names]
        assert copies.ran == names

    def test_a_failed_copy_fails_only_itself(self, device: Device) -> None:
        """Its error is reported as it was raised; those before and after it run."""
        copies, stream, error = Copies(), device.stream("load"), ZeroDivisionError("mine")
        copies.submit(stream, "a")
        copies.submit(stream, "b", error)
        copies.submit(stream, "c")
        self.finish(stream)
        assert copies.ended == [("a", None), ("b", error), ("c", None)]

    def test_a_callback_that_raises_does_not_end_the_stream(self, device: Device) -> None:
        """It is logged, and the next copy runs."""
        copies, stream = Copies(), device.stream("load")
        with capture_logs() as logs:
            stream.submit(lambda: None, lambda _: 1 / 0)  # type: ignore[arg-type]  # never returns
            copies.submit(stream, "next")
            self.finish(stream)
        assert copies.order == ["next"]
        assert [entry["event"] for entry in logs] == ["copy.callback_failed"]

    def test_done_is_never_called_inside_submit(self, device: Device) -> None:
        """A caller may hold a lock while it submits that its callback takes as well."""
        stream, lock, ended = device.stream("load"), threading.Lock(), []

        def done(error: BaseException | None) -> None:
            with lock:
                ended.append(error)

        with lock:
            for _ in range(10):
                stream.submit(lambda: None, done)
        self.finish(stream)
        assert len(ended) == 10

    def test_another_stream_can_wait_for_a_copy(self, device: Device) -> None:
        """By the event that `submit` returns, whether the copy goes well or not."""
        copies, first, second = Copies(), device.stream("load"), device.stream("store")
        for error in (None, ZeroDivisionError()):
            second.wait(copies.submit(first, "first", error))
            copies.submit(second, "second")
        self.finish(second)
        assert copies.order.count("second") == 2
        assert copies.ran.index("first") < copies.ran.index("second")

    def test_a_device_that_has_failed_says_so_once(self, device: Device) -> None:
        """Whoever finds out first."""
        said: list[BaseException] = []
        device.on_failure = said.append
        first = OSError("lost")
        device.fail(first)
        device.fail(OSError("lost again"))
        assert (said, device.error) == ([first], first)

    def test_nothing_is_taken_after_close(self, device: Device) -> None:
        """What was queued before ends; closing again does nothing."""
        copies, stream = Copies(), device.stream("load")
        copies.submit(stream, "a")
        stream.close()
        stream.close()
        with pytest.raises(ClosedError, match="load"):
            copies.submit(stream, "b")
        self.finish(stream)
        assert copies.ended == [("a", None)]

    @pytest.mark.parametrize("after", [None, object(), 3.5, asyncio.Event(), asyncio.Event])
    def test_what_nobody_can_wait_for_is_refused(self, device: Device, after: object) -> None:
        """At once, by check and by wait; an asyncio.Event too, whose wait() waits for nothing unless awaited."""
        stream = device.stream("load")
        for refuse in (device.check, stream.wait):
            with pytest.raises(ConfigurationError, match="after must"):
                refuse(after)

    def test_nothing_of_a_finished_copy_is_kept(self, device: Device) -> None:
        """An idle stream holds no tensor of its last copy."""
        stream, ended = device.stream("load"), threading.Event()
        tensor = torch.ones(3)
        kept = weakref.ref(tensor)
        stream.submit(tensor.sum, lambda _: ended.set())
        del tensor
        self.finish(stream)
        assert ended.is_set()
        gc.collect()
        assert kept() is None

    def test_closing_the_device_ends_all_its_streams(self, device: Device) -> None:
        """Copies that are queued are done first; a second close does no harm."""
        copies, streams = Copies(), [device.stream("load"), device.stream("store")]
        for stream in streams:
            copies.submit(stream, stream.name)
        assert device.close()
        assert sorted(copies.order) == ["load", "store"]
        assert device.close()
        with pytest.raises(ClosedError):
            copies.submit(streams[0], "late")

    def test_a_pool_is_rows_on_the_device(self, device: Device) -> None:
        """int64 words, a row a slot."""
        pool = device.empty_pool(3, 8192)
        assert (pool.shape, pool.dtype, pool.device) == ((3, 1024), torch.int64, device.torch_device)
        with pytest.raises(ConfigurationError, match="multiple of 8"):
            device.empty_pool(3, 4)

    def test_free_memory_is_known(self, device: Device) -> None:
        """A positive number of bytes."""
        assert device.free_bytes() > 0


class HeldEventTests(StreamTests):
    """Promises that need an event a test can hold back."""

    def test_a_copy_waits_for_what_was_enqueued_before_it(self, device: Device) -> None:
        """What is submitted before the wait runs, what is submitted after it does not until the event has happened."""
        copies, stream, (after, fire) = Copies(), device.stream("store"), self.event()
        copies.submit(stream, "before")
        stream.wait(after)
        copies.submit(stream, "behind")
        stream.close()
        assert not stream.join(0.0)
        assert "behind" not in copies.ran
        fire()
        self.finish(stream)
        assert copies.order == ["before", "behind"]

    def test_streams_do_not_wait_for_each_other(self, device: Device) -> None:
        """A store that waits for its event leaves loads alone."""
        copies, (after, fire) = Copies(), self.event()
        store, load = device.stream("store"), device.stream("load")
        store.wait(after)
        copies.submit(store, "store")
        copies.submit(load, "load")
        self.finish(load)
        assert copies.order == ["load"]
        fire()
        self.finish(store)
        assert copies.order == ["load", "store"]

    def test_close_says_when_something_hangs(self, device: Device) -> None:
        """An event that never happens keeps its stream, and nothing else."""
        copies, stream, (after, fire) = Copies(), device.stream("store"), self.event()
        stream.wait(after)
        copies.submit(stream, "a")
        assert not device.close(timeout_s=0.0)
        fire()
        assert device.close(timeout_s=60)
        assert copies.ended == [("a", None)]


class TestCPU(HeldEventTests):
    """Threads."""

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        """A CPU."""
        device = make_device("cpu")
        assert isinstance(device, CPUDevice)
        yield device
        assert device.close(60)

    def event(self) -> tuple[Any, Any]:
        """Return a threading.Event."""
        event = threading.Event()
        return event, event.set

    def test_a_wait_that_fails_fails_what_is_behind_it(self, device: Device) -> None:
        """Nobody knows then whether the bytes are there: none of them is copied."""

        class Broken:
            def synchronize(self) -> None:
                raise OSError("lost")

        copies, stream = Copies(), device.stream("store")
        copies.submit(stream, "before")
        stream.wait(Broken())
        copies.submit(stream, "behind")
        copies.submit(stream, "later")
        self.finish(stream)
        assert copies.ran == ["before"]
        assert [(name, type(error)) for name, error in copies.ended] == [
            ("before", type(None)),
            ("behind", OSError),
            ("later", OSError),
        ]

    def test_a_wait_that_failed_may_be_forgiven(self, device: Device) -> None:
        """What is submitted from then on is another's; what was submitted before fails all the same."""

        class Broken:
            def synchronize(self) -> None:
                raise OSError("lost")

        copies, stream = Copies(), device.stream("store")
        stream.wait(Broken())
        copies.submit(stream, "behind")
        stream.forgive()
        copies.submit(stream, "another's")
        self.finish(stream)
        assert copies.ran == ["another's"]

    def test_streams_are_daemons_and_end(self, device: Device) -> None:
        """No thread keeps a process alive, none is left after close."""
        stream = device.stream("only-here")
        (thread,) = [thread for thread in threading.enumerate() if thread.name.endswith("only-here")]
        assert thread.daemon
        self.finish(stream)
        assert not thread.is_alive()


class TestScripted(HeldEventTests):
    """Copies that run when told."""

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        """A scripted device."""
        device = ScriptedDevice()
        yield device
        device.close()

    def event(self) -> tuple[Any, Any]:
        """Return an event of the script."""
        event = ScriptedEvent()
        return event, event.fire

    def test_a_device_that_has_failed_runs_no_copy(self, device: Device) -> None:
        """All that is queued, after whatever event, and all that comes ends with its error."""
        copies, stream, error = Copies(), device.stream("store"), OSError("lost")
        stream.wait(ScriptedEvent())
        copies.submit(stream, "queued")
        device.fail(error)
        copies.submit(stream, "late")
        self.finish(stream)
        assert (copies.ran, copies.ended) == ([], [("queued", error), ("late", error)])


@pytest.mark.gpu
class TestCUDA(StreamTests):
    """A GPU."""

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        """The first GPU."""
        device = make_device("cuda:0")
        assert isinstance(device, CUDADevice)
        yield device
        assert device.close(60)

    def event(self) -> tuple[Any, Any]:
        """Return a recorded event."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of torch
        event.record()
        return event, lambda: None

    def test_an_unrecorded_event_is_refused(self, device: Device) -> None:
        """It would report "done" and order nothing."""
        with pytest.raises(ConfigurationError, match="never recorded"):
            device.check(torch.cuda.Event())  # type: ignore[no-untyped-call]  # of torch


@pytest.mark.parametrize("name", ["cuda:99", "meta"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    """With what there is instead."""
    with pytest.raises(ConfigurationError, match=name):
        make_device(name)
