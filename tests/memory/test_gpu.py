"""Streams of an accelerator, with streams and events of our own in the place of torch's."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import pytest
import torch

from tests.support.caches import Recorder, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, prompt
from tiered_kv import GPULoadStoreSpec
from tiered_kv.memory.device import After, Device
from tiered_kv.memory.gpu import AcceleratorDevice
from tiered_kv.memory.host import HostSlab, PageLocking
from tiered_kv.values.events import DeviceFailed

KEYS, INTO = prompt(9), GPULoadStoreSpec(range(9))


class FakeStream:
    """A stream that takes down what is done to it."""

    def __init__(self) -> None:
        self.waits: list[FakeEvent] = []


class FakeEvent:
    """An event that fires, or fails, when the driver says so."""

    def __init__(self, driver: "FakeAccelerator") -> None:
        self._driver = driver
        self._settled = threading.Event()
        self.error: BaseException | None = None

    def record(self, stream: FakeStream) -> None:
        """Count among the driver's events."""
        if self._driver.record_error is not None:
            raise self._driver.record_error
        self._driver.recorded.append(self)
        if self._driver.is_idle:
            self.settle()

    def settle(self, error: BaseException | None = None) -> None:
        """Fire or fail."""
        self.error = error
        self._settled.set()

    def synchronize(self) -> None:
        """Block as a driver does."""
        assert self._settled.wait(60)
        if self.error is not None:
            raise self.error

    def wait(self, stream: FakeStream) -> None:
        """Have a stream wait."""
        stream.waits.append(self)


class FakeAccelerator(AcceleratorDevice):
    """An accelerator whose memory is the host's, and whose copies are done when they are enqueued."""

    def __init__(self, *, is_idle: bool = False) -> None:
        Device.__init__(self)  # the accelerator's own would look for one
        self.kind, self.torch_device = "fake", torch.device("cpu")
        self.is_idle = is_idle
        self.recorded: list[FakeEvent] = []
        self.record_error: BaseException | None = None
        self.now: FakeStream | None = None

    is_page_locked = True

    def check(self, after: After) -> None:
        """Take all."""

    def to_wait_for(self, after: After | None) -> After | None:
        """Return it: torch has no stream here."""
        return after

    def free_bytes(self) -> int:
        """Return 1 GiB."""
        return 1 << 30

    def new_stream(self) -> Any:  # noqa: ANN401 - in the place of torch's
        """Make a stream."""
        return FakeStream()

    def new_event(self) -> Any:  # noqa: ANN401 - whatever it is, it is passed on
        """Make an event."""
        return FakeEvent(self)

    def on(self, stream: Any) -> AbstractContextManager[None]:  # noqa: ANN401 - whatever it is, it is passed on
        """Take down which stream is the current one."""
        return self._current(stream)

    @contextmanager
    def _current(self, stream: FakeStream) -> Iterator[None]:
        self.now = stream
        yield
        self.now = None

    def _new_page_locking(self, slab: HostSlab, emit: Any) -> PageLocking:  # noqa: ANN401 - whatever it is, it is passed on
        return PageLocking(slab, reason="fake", emit=emit)


def _end(device: FakeAccelerator) -> None:
    for event in device.recorded:
        event.settle(event.error)
    assert device.close(60)


def test_copies_are_enqueued_at_once_and_reported_in_order() -> None:
    """In the caller's thread, on the stream; reported when the device is past them, the first one first."""
    device = FakeAccelerator()
    stream, threads, ended = device.stream("h2d"), list[int](), list[str]()
    reported = threading.Semaphore(0)

    def done(name: str, _: BaseException | None) -> None:
        ended.append(name)
        reported.release()

    def copy() -> None:
        assert device.now is not None
        threads.append(threading.get_ident())

    for name in ("a", "b"):
        stream.submit(copy, partial(done, name))
    assert threads == [threading.get_ident()] * 2
    device.recorded[1].settle()
    assert not reported.acquire(timeout=0.0)
    device.recorded[0].settle()
    for _ in range(2):
        assert reported.acquire(timeout=60)
    assert ended == ["a", "b"]
    _end(device)


@pytest.mark.parametrize("where", ["synchronize", "record"])
def test_an_error_of_the_device_is_for_good(where: str) -> None:
    """It is the result of the copy, and of all that come; these are not even enqueued. It is said once."""
    device, error, said = FakeAccelerator(), OSError("illegal memory access"), list[BaseException]()
    device.on_failure = said.append
    stream, ran, ended = device.stream("h2d"), list[str](), list[BaseException | None]()
    reported = threading.Semaphore(0)

    def done(result: BaseException | None) -> None:
        ended.append(result)
        reported.release()

    if where == "record":
        device.record_error = error
    event = stream.submit(lambda: ran.append("first"), done)
    assert (event is None) == (where == "record")
    if where == "synchronize":
        device.recorded[0].settle(error)
    assert reported.acquire(timeout=60)
    waits = cast("Any", stream)._stream.waits  # noqa: SLF001 - torch's stream has no such thing
    stream.wait(FakeEvent(device))
    assert waits == []
    assert stream.submit(lambda: ran.append("second"), done) is None
    assert reported.acquire(timeout=60)
    assert (ran, ended, said, device.error) == (["first"], [error, error], [error], error)
    _end(device)


def test_a_copy_that_fails_is_none_of_the_devices_faults() -> None:
    """It is reported once the device is past what it had enqueued; the next one runs."""
    device, error, ended = FakeAccelerator(), MemoryError("no staging"), list[BaseException | None]()
    stream, reported = device.stream("h2d"), threading.Semaphore(0)

    def copy() -> None:
        raise error

    def done(result: BaseException | None) -> None:
        ended.append(result)
        reported.release()

    stream.submit(copy, done)
    stream.submit(lambda: None, done)
    assert not reported.acquire(timeout=0.0)
    for event in device.recorded:
        event.settle()
    for _ in range(2):
        assert reported.acquire(timeout=60)
    assert (ended, device.error) == ([error, None], None)
    _end(device)


async def test_a_cache_goes_on_without_its_device() -> None:
    """From the waiter's thread the failure becomes the load's fault, one event, and the answer of all later calls."""
    device, engine, emit = FakeAccelerator(is_idle=True), Engine(), Recorder()
    async with open_cache(
        {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, engine=engine, device=device, emit=emit
    ) as kv:
        assert (await kv.store(KEYS, engine.compute(KEYS))).num_stored == 9
        assert (await kv.load(KEYS, INTO)).num_blocks == 9
        device.is_idle = False
        num_recorded = len(device.recorded)
        loading = kv.start_load(KEYS, INTO)
        await until(lambda: len(device.recorded) > num_recorded)
        device.is_idle = True
        for event in device.recorded[num_recorded:]:
            event.settle(OSError("illegal memory access"))
        loaded = await loading
        assert loaded.num_blocks == 0
        assert {fault.reason for fault in loaded.faults} == {"copy failed"}
        await until(lambda: bool(emit.of(DeviceFailed)))
        assert emit.of(DeviceFailed) == [DeviceFailed("fake", "OSError: illegal memory access")]
        assert [fault.reason for fault in (await kv.load(KEYS, INTO)).faults] == ["device unusable"]
        assert (await kv.lookup(KEYS)).num_blocks == 9
        await until_idle(kv)
    _end(device)
