"""The CUDA device: side streams, events, page-locked host memory.

Copies are enqueued in the caller's thread, so that their order is the order of the calls. One thread a stream waits for
their events, blocked in the driver with the GIL released, and reports them in order: no polling, and no Python in a
driver's callback, which would deadlock on the GIL.

An error of the device is sticky in CUDA: after one, nothing this process does on the device can be trusted.
"""

import queue
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tiered_kv.errors import ClosedError, ConfigurationError
from tiered_kv.memory.device import After, Copy, Device, Done, Stream, attempt, report
from tiered_kv.memory.host import HostSlab
from tiered_kv.memory.pinning import Pinning

_CUDA_SUCCESS = 0


class CUDADevice(Device):
    """One GPU."""

    kind = "cuda"

    def __init__(self, device: torch.device | str = "cuda") -> None:
        """Use ``device``, the current one if it has no index.

        Raises:
            ConfigurationError: This torch sees no such GPU.
        """
        super().__init__()
        wanted = torch.device(device)
        if wanted.type != "cuda" or not torch.cuda.is_available() or (wanted.index or 0) >= torch.cuda.device_count():
            raise ConfigurationError(f"{wanted} is not one of the {torch.cuda.device_count()} CUDA devices torch sees")
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        self.torch_device = torch.device("cuda", index)
        self.error: BaseException | None = None

    def check(self, after: After) -> None:
        """Raise `ConfigurationError` unless ``after`` is a recorded CUDA event."""
        if not isinstance(after, torch.cuda.Event | torch.Event):
            raise ConfigurationError(
                f"after must be a torch.cuda.Event or torch.Event on {self.torch_device}, got {type(after).__name__}"
            )
        if isinstance(after, torch.cuda.Event) and not after.cuda_event:
            raise ConfigurationError(
                "after was never recorded: call event.record(stream) first, or nothing waits for it"
            )

    def free_bytes(self) -> int:
        """Return what the driver says is free; memory that torch has cached is not counted."""
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def _new_stream(self, name: str) -> Stream:
        return CUDAStream(name, self)

    def _new_pinning(self, slab: HostSlab) -> Pinning:
        return Pinning(slab, lock=self._lock, unlock=self._unlock)

    def _lock(self, address: int, num_bytes: int) -> None:
        with torch.cuda.device(self.torch_device):  # the pinning's thread has not chosen one
            _check(_runtime().cudaHostRegister(address, num_bytes, 0), f"page-lock {num_bytes} bytes")

    def _unlock(self, address: int) -> None:
        with torch.cuda.device(self.torch_device):
            _check(_runtime().cudaHostUnregister(address), "unlock host memory")


@dataclass(frozen=True)
class _Submitted:
    event: torch.cuda.Event | None
    """Recorded behind the copy; None if the device was past recording."""
    error: BaseException | None
    copy: Copy
    done: Done


class CUDAStream(Stream):
    """A side stream and the thread that waits for its events."""

    def __init__(self, name: str, device: CUDADevice) -> None:
        self.name = name
        self._device = device
        self._stream = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]
        self._queue: queue.SimpleQueue[_Submitted | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # what is reported in order has to be enqueued in that order
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"tiered_kv-{name}", daemon=True)
        self._thread.start()

    def wait(self, after: After) -> None:
        """Have the stream wait for ``after``: the GPU waits, no thread does."""
        self._device.check(after)
        with self._lock:
            self._check_open()
            error = attempt(partial(after.wait, self._stream))
            self._device.error = self._device.error or error

    def submit(self, copy: Copy, done: Done) -> None:
        """Enqueue ``copy`` now, with this stream as the current one, and ``done`` for when the GPU gets past it."""
        with self._lock:
            self._check_open()
            event: torch.cuda.Event | None = None
            error = self._device.error
            if error is None:
                with torch.cuda.stream(self._stream):
                    error = attempt(copy)
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                # Recorded before the waiter can see it, for an unrecorded event reports "done"; and behind a copy that
                # failed half-way too, since the part that was enqueued uses memory until then.
                broken = attempt(partial(event.record, self._stream))
                if broken is not None:
                    self._device.error, event, error = broken, None, broken
            self._queue.put(_Submitted(event, error, copy, done))

    def close(self) -> None:
        """End the thread after what is queued."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the GPU is past all that was submitted."""
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
                self._device.error = self._device.error or broken
                error = error or broken
            report(item.done, error)
            del item, error  # what a copy held must not outlive it until the next one comes


def _runtime() -> Any:  # noqa: ANN401 - a module without stubs
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(code: Any, doing: str) -> None:  # noqa: ANN401 - torch's cudaError, an enum without stubs
    if int(code) != _CUDA_SUCCESS:
        raise RuntimeError(f"could not {doing}: CUDA error {code}")
