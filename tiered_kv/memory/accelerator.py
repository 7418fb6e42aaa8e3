"""A device that torch drives: side streams and events. What is CUDA's own is in ``cuda.py``.

Copies are enqueued in the caller's thread, so that their order is the order of the calls. One thread a stream waits for
their events, blocked in the driver with the GIL released, and reports them in order: no polling, and no Python in a
driver's callback, which would deadlock on the GIL.

An error of the device is sticky: after one, nothing this process does on the device can be trusted.
"""

import queue
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from tiered_kv.errors import ClosedError, ConfigurationError
from tiered_kv.events import Emit
from tiered_kv.memory.device import After, Copy, Device, Done, Stream, attempt, report
from tiered_kv.memory.host import HostSlab
from tiered_kv.memory.page_locking import PageLocking


class AcceleratorDevice(Device):
    """One accelerator, by `torch.accelerator`, `torch.Stream` and `torch.Event` alone: an Intel GPU (``"xpu"``) is one.

    Host memory stays pageable: torch can allocate page-locked memory everywhere, but cannot lock a slab that other
    processes attach.
    """

    def __init__(self, device: torch.device | str) -> None:
        """Use ``device``, the current one of its kind if it has no index.

        Raises:
            ConfigurationError: This torch sees no such device.
        """
        super().__init__()
        wanted = torch.device(device)
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        count = torch.accelerator.device_count() if here is not None and here.type == wanted.type else 0
        if (wanted.index or 0) >= count:
            raise ConfigurationError(f"{wanted} is not one of the {count} {wanted.type} devices torch sees")
        index = torch.get_device_module(wanted).current_device() if wanted.index is None else wanted.index
        self.torch_device = torch.device(wanted.type, index)
        self.kind = wanted.type

    def check(self, after: After) -> None:
        """Raise `ConfigurationError` unless ``after`` is a torch event."""
        if not isinstance(after, torch.Event):
            raise ConfigurationError(f"after must be a torch event on {self.torch_device}, got {type(after).__name__}")

    def free_bytes(self) -> int:
        """Return what the driver says is free; memory that torch has cached is not counted."""
        return int(torch.get_device_module(self.torch_device).mem_get_info(self.torch_device)[0])

    # What a stream is made of; each may be had in a better way from a kind of device itself.

    def new_stream(self) -> torch.Stream:
        """Make a stream on the device."""
        return torch.Stream(self.torch_device)

    def new_event(self) -> torch.Event:
        """Make an event whose ``synchronize`` blocks the thread."""
        return torch.Event(self.torch_device, blocking=True)

    def current(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Have what is enqueued inside the ``with`` block go to ``stream``."""
        return _current(stream)

    def _new_stream(self, name: str) -> Stream:
        return AcceleratorStream(name, self)

    def _new_page_locking(self, slab: HostSlab, emit: Emit) -> PageLocking:
        return PageLocking(slab, reason=f"nothing locks memory for {self.kind}", is_wanted=True, emit=emit)


@contextmanager
def _current(stream: torch.Stream) -> Iterator[None]:
    """Set the current stream, and with it the current device, as torch does; set both back."""
    here, there = torch.accelerator.current_stream(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(there)
        torch.accelerator.set_stream(here)


@dataclass(frozen=True)
class _Submitted:
    event: torch.Event | None
    """Recorded after the copy; None if the device was past recording."""
    error: BaseException | None
    copy: Copy
    done: Done


class AcceleratorStream(Stream):
    """A side stream and the thread that waits for its events."""

    def __init__(self, name: str, device: AcceleratorDevice) -> None:
        self.name = name
        self._device = device
        self._stream = device.new_stream()
        self._queue: queue.SimpleQueue[_Submitted | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # what is reported in order has to be enqueued in that order
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"tiered_kv-{name}", daemon=True)
        self._thread.start()

    def wait(self, after: After) -> None:
        """Have the stream wait for ``after``: the device waits, no thread does."""
        self._device.check(after)
        with self._lock:
            self._check_open()
            if self._device.error is None and (error := attempt(partial(after.wait, self._stream))) is not None:
                self._device.fail(error)

    def submit(self, copy: Copy, done: Done) -> After:
        """Enqueue ``copy`` now, with this stream as the current one, and ``done`` for when the device gets past it."""
        device = self._device
        with self._lock:
            self._check_open()
            event: torch.Event | None = None
            error = device.error
            if error is None:
                event = device.new_event()  # first: from the copy on nothing may raise, for its memory is in use
                with device.current(self._stream):
                    error = attempt(copy)
                # Recorded before the waiter can see it, for an unrecorded event reports "done"; and after a copy that
                # failed half-way too, since the part that was enqueued uses memory until then.
                broken = attempt(partial(event.record, self._stream))
                if broken is not None:
                    device.fail(broken)
                    event, error = None, broken
            self._queue.put(_Submitted(event, error, copy, done))
            return event

    def close(self) -> None:
        """End the thread after what is queued."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the device is past all that was submitted."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the stream {self.name!r} is closed")

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            error = item.error
            if item.event is not None:
                broken = attempt(item.event.synchronize)  # blocked in the driver, the GIL released
                if broken is not None:
                    self._device.fail(broken)
                error = error or broken
            report(item.done, error)
            del item, error  # what a copy held must not outlive it until the next one comes
