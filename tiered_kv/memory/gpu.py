"""Devices that torch drives, their side streams and events; and which device a set of tensors needs (`make_device`).

Copies are enqueued in the caller's thread, so that their order is the order of the calls. One thread a stream waits for
their events, blocked in the driver with the GIL released, and reports them in order: no polling, and no Python in a
driver's callback, which would deadlock on the GIL.

What could block the caller is enqueued by that thread instead: copies to and from memory that is not page-locked, once
the device is past all before it; and what more operations are ahead of than a stream's queue holds, while the copy
before it is under way, so that the device goes from one to the other.

An error of the device is sticky: after one, nothing this process does on the device can be trusted.

CUDA alone (and ROCm, which torch calls CUDA) has blocking events, and page-locks memory that exists already. Through
torch alone an event's ``synchronize`` spins on a core, and a slab in a memfd cannot be page-locked.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from tiered_kv.memory import driver
from tiered_kv.memory.cpu import CPUDevice
from tiered_kv.memory.device import After, Copy, Device, Done, Stream, ThreadStream, attempt, report
from tiered_kv.memory.host import HostSlab, PageLocking, TryAgainError, node_of_gpu
from tiered_kv.memory.lanes import LateEvent
from tiered_kv.memory.staging import Staging
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.events import Emit

DeviceLike = Device | torch.device | str
"""A device of ours, torch's, or the name of one."""
MOST_AHEAD: Final = 512
"""Operations of one stream that the device has not come to. Its queue holds about 1,000; one more copy has to fit. 80
layers of a load take 240."""
_SUCCESS: Final = 0
_FORBIDDEN_BY_A_CAPTURE: Final = 900
"""Of the results of CUDA's runtime."""


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
        """Raise `ConfigurationError` unless ``after`` is a torch event that was recorded."""
        if isinstance(after, LateEvent):
            return
        if not isinstance(
            after, torch.Event | torch.cuda.Event
        ):  # in a torch without CUDA the latter is no torch.Event
            raise ConfigurationError(f"after must be a torch event on {self.torch_device}, got {type(after).__name__}")
        if not handle_of(after):
            raise ConfigurationError(
                "after was never recorded: call event.record(stream) first, or nothing waits for it"
            )

    def to_wait_for(self, after: After | None) -> After | None:
        """Record an event where there is none; on a device that has failed nothing is waited for."""
        if after is not None or self.error is not None:
            return super().to_wait_for(after)
        with self.here():
            event = self.new_event()
            stream = torch.get_device_module(self.torch_device).current_stream(self.torch_device)
            if (broken := attempt(partial(event.record, stream))) is not None:
                self.fail(broken)
                return None
        return event

    def has_happened(self, after: After) -> bool:
        """Ask the driver; of a late event it is known."""
        with self.here():
            return super().has_happened(after)

    def free_bytes(self) -> int:
        """Return what the driver says is free; memory that torch has cached is not counted."""
        return int(torch.get_device_module(self.torch_device).mem_get_info(self.torch_device)[0])

    def empty_pool(self, num_slots: int, stride_bytes: int) -> Tensor:
        """Allocate slots; they are zeros for whichever stream is the first to use them.

        Raises:
            ConfigurationError: The device does not have the memory.
        """
        with self.here():
            try:
                pool = super().empty_pool(num_slots, stride_bytes)
            except torch.OutOfMemoryError as error:
                raise ConfigurationError(
                    f"{num_slots * stride_bytes >> 20} MiB of {self.torch_device} are wanted for a gpu tier, and it "
                    f"has {self.free_bytes() >> 20} MiB: give the tier less capacity, or leave the engine less"
                ) from error
            torch.get_device_module(self.torch_device).current_stream(self.torch_device).synchronize()
        return pool

    # What a stream is made of; each may be had in a better way from a kind of device itself.

    def here(self) -> AbstractContextManager[object]:
        """Have this thread's calls go to the device inside the ``with`` block, and disturb nobody else's."""
        return nullcontext()

    def new_stream(self) -> torch.Stream:
        """Make a stream on the device."""
        return torch.Stream(self.torch_device)

    def new_event(self) -> torch.Event:
        """Make an event whose ``synchronize`` blocks the thread."""
        return torch.Event(self.torch_device, blocking=True)

    def wait_for(self, event: torch.Event) -> None:
        """Block this thread until an event of `new_event` has happened."""
        event.synchronize()

    def on(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Have what is enqueued inside the ``with`` block, and inside `here`, go to ``stream``."""
        return _on(stream)

    def _new_stream(self, name: str) -> Stream:
        return AcceleratorStream(name, self)

    def _new_page_locking(self, slab: HostSlab, emit: Emit) -> PageLocking:
        return PageLocking(slab, reason=f"nothing locks memory for {self.kind}", is_wanted=True, emit=emit)


@contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    """Set the current stream, and with it the current device, as torch does; set both back."""
    here, there = torch.accelerator.current_stream(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(there)
        torch.accelerator.set_stream(here)


@dataclass
class _Submitted:
    copy: Copy
    done: Done
    error: BaseException | None
    event: torch.Event | None = None
    """Recorded after the copy; None if the device was past recording, or before a late copy is enqueued."""
    num_operations: int = 0
    late: LateEvent | None = None
    """Set if the stream's thread is to enqueue the copy."""
    may_block: bool = False
    """Whether that is because enqueueing it may take as long as all before it: nothing is to wait for a report then."""


class AcceleratorStream(ThreadStream[_Submitted]):
    """A side stream and the thread that waits for its events."""

    def __init__(self, name: str, device: AcceleratorDevice) -> None:
        self._device = device
        with device.here():
            self._stream = device.new_stream()
        self._staging = Staging(self._stream, device.new_stream, device.on)
        self._num_ahead = 0
        self._num_late = 0
        self._unordered: BaseException | None = None
        """Why the last wait could not be enqueued: until the next one nothing is."""
        super().__init__(name)

    def wait(self, after: After) -> None:
        """Have the stream wait for ``after``: the device waits, no thread does.

        What is late then waits for it too: the event may be recorded anew once this returns.
        """
        self._device.check(after)
        if isinstance(after, LateEvent) and not after.is_recorded:
            self._submit(partial(self._staging.wait, after), _nobody, is_late=True)
            return
        with self._lock:
            self._check_open()
            if self._device.error is None:
                with self._device.here():
                    self._unordered = attempt(partial(self._staging.wait, after))
                    # A device that has failed refuses everything, not this event alone.
                    if self._unordered is not None and attempt(partial(self._device.new_event().record, self._stream)):
                        self._device.fail(self._unordered)

    def forgive(self) -> None:
        """Enqueue copies again, in whatever order the last wait would have had them."""
        with self._lock:
            self._check_open()
            self._unordered = None

    def submit(self, copy: Copy, done: Done) -> After:
        """Enqueue ``copy`` now, with this stream as the current one, and ``done`` for when the device gets past it.

        A copy that could block the caller is enqueued later, and the event is a `LateEvent`.
        """
        return self._submit(copy, done, is_late=not self._device.is_page_locked)

    def reserve(self, num_buffers: int, buffer_bytes: int) -> None:
        """Allocate staging buffers in the stream; on a device that has failed, none."""
        device = self._device
        if device.error is not None:
            return
        with device.here(), device.on(self._stream):
            try:
                self._staging.reserve(num_buffers, buffer_bytes, device.torch_device)
            except torch.OutOfMemoryError as error:
                raise ConfigurationError(
                    f"{num_buffers * buffer_bytes >> 20} MiB of {device.torch_device} are wanted for copies of "
                    f"{self.name!r}, and it has {device.free_bytes() >> 20} MiB: leave the engine less of it"
                ) from error

    def _submit(self, copy: Copy, done: Done, *, is_late: bool) -> After:
        with self._lock:
            self._check_open()
            item = _Submitted(copy, done, self._device.error or self._unordered, may_block=is_late)
            if item.error is None and (is_late or self._num_late or self._num_ahead > MOST_AHEAD):
                item.late = LateEvent()
                self._num_late += 1
            elif item.error is None:
                with self._device.here():
                    self._enqueue(item)
            self._num_ahead += item.num_operations
            self._queue.put(item)
            return item.late or item.event

    def _enqueue(self, item: _Submitted) -> None:
        device, before = self._device, self._staging.num_operations
        event = device.new_event()  # first: from the copy on nothing may raise, for its memory is in use
        with device.on(self._stream), self._staging.used():
            item.error = attempt(item.copy)
        # Recorded before the waiter can see it, for an unrecorded event reports "done"; and after a copy that failed
        # half-way too, since the part that was enqueued uses memory until then.
        broken = attempt(partial(event.record, self._stream))
        if broken is None:
            item.event = event
        else:
            device.fail(broken)
            item.error = broken
        item.num_operations = self._staging.num_operations - before + 1

    def _run(self) -> None:
        here = ExitStack()
        if (broken := attempt(partial(here.enter_context, self._device.here()))) is not None:
            self._device.fail(broken)  # so that all that is queued, or comes, ends with it
        self._serve()
        attempt(here.close)  # of a device that has failed that may be refused too
        self._device.stream_ended(self)

    def _serve(self) -> None:
        taken: deque[_Submitted | None] = deque()
        while (item := taken.popleft() if taken else self._queue.get()) is not None:
            self._enqueue_late(item)
            if not taken and not self._queue.empty():
                taken.append(self._queue.get())
            following = taken[0] if taken else None
            if following is not None and not following.may_block and self._num_ahead <= MOST_AHEAD:
                self._enqueue_late(following)
            self._finish(item)
            del item, following  # what a copy held must not outlive it until the next one comes
        self._staging.free()

    def _enqueue_late(self, item: _Submitted) -> None:
        """Enqueue what its caller did not, if that is still to be done."""
        if item.late is None or item.late.is_recorded:
            return
        item.error = self._device.error
        if item.error is None and (broken := attempt(partial(self._enqueue, item))) is not None:
            self._device.fail(broken)  # nothing is lost with it but this: all that is queued behind is told
            item.error = broken
        item.late.settle(item.event)
        with self._lock:
            self._num_late -= 1
            self._num_ahead += item.num_operations

    def _finish(self, item: _Submitted) -> None:
        if item.event is not None:
            broken = attempt(partial(self._device.wait_for, item.event))  # blocked in the driver, the GIL released
            if broken is not None:
                self._device.fail(broken)
            item.error = item.error or broken
        with self._lock:
            self._num_ahead -= item.num_operations
        report(item.done, item.error)


def _nobody(error: BaseException | None) -> None:
    """Tell nobody: whoever waits behind it will hear."""


class CUDADevice(AcceleratorDevice):
    """One GPU of NVIDIA's, or of AMD's under ROCm."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        """Use ``device``, the current one if it has no index.

        Raises:
            ConfigurationError: This torch sees no such GPU.
        """
        if torch.device(device).type != "cuda":
            raise ConfigurationError(f"{device} is no CUDA device")
        super().__init__(device)
        self._bound = threading.local()

    def check(self, after: After) -> None:
        """Raise `ConfigurationError` unless ``after`` is an event that was recorded, and in no capture."""
        super().check(after)
        if isinstance(after, LateEvent):
            return
        with self.here():
            if driver.was_captured(handle_of(after)):
                raise ConfigurationError(
                    "after was recorded in the capture of a CUDA graph, where it stands for no work: record one outside"
                )

    def to_wait_for(self, after: After | None) -> After | None:
        """Record an event where there is none, unless that would be a part of a graph."""
        with self.here():
            if after is None and torch.cuda.is_current_stream_capturing():
                raise ConfigurationError(
                    "this thread's current stream captures a CUDA graph: after= must be an event recorded outside of it"
                )
        return super().to_wait_for(after)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Choose this GPU, and set the thread apart from all captures of CUDA graphs; then set both back.

        While a thread captures in the default mode, an event query or a registration of memory by any other thread is
        refused (900), and spoils the capture. The GPU comes first: the second call makes a context on the current one.
        """
        with torch.cuda.device(self.torch_device):
            mode = driver.exchange_capture_mode(driver.CAPTURE_RELAXED)
            try:
                if not hasattr(self._bound, "to_context"):
                    # Choosing the GPU that is chosen does nothing, and the driver's own calls need a context.
                    self._bound.to_context = torch.cuda.mem_get_info(self.torch_device)
                    mode = driver.exchange_capture_mode(driver.CAPTURE_RELAXED) if mode is None else mode
                yield
            finally:
                if mode is not None:
                    driver.exchange_capture_mode(mode)

    def new_stream(self) -> torch.Stream:
        """Make a CUDA stream of high priority: a copy is awaited, and its kernels are short."""
        return torch.cuda.Stream(self.torch_device, priority=-1)  # type: ignore[no-untyped-call]  # of torch

    def new_event(self) -> torch.Event:
        """Make an event whose ``synchronize`` sleeps in the driver."""
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # of torch

    def wait_for(self, event: torch.Event) -> None:
        """Ask the driver: from torch's ``synchronize`` a thread can't end with the program, but aborts it."""
        if (code := driver.wait_for(handle_of(event))) is None:
            event.synchronize()
        elif code:
            raise RuntimeError(f"copies could not be waited for: CUDA error {code}")

    def on(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Have what is enqueued inside the ``with`` block go to ``stream``."""
        return torch.cuda.stream(stream)  # type: ignore[arg-type]  # made by new_stream

    def _new_page_locking(self, slab: HostSlab, emit: Emit) -> PageLocking:
        lock, unlock = self._cuda_host_register, self._cuda_host_unregister
        return PageLocking(slab, lock=lock, unlock=unlock, node=self._numa_node(), emit=emit)

    def _numa_node(self) -> int | None:
        facts = torch.cuda.get_device_properties(self.torch_device)
        numbers = [getattr(facts, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        domain, bus, slot = numbers
        if domain is None or bus is None or slot is None:
            return None  # torch before 2.7 does not tell
        return node_of_gpu(f"{domain:04x}:{bus:02x}:{slot:02x}.0")

    def _cuda_host_register(self, address: int, num_bytes: int) -> None:
        with self.here():
            _check(_runtime().cudaHostRegister(address, num_bytes, 0), f"page-lock {num_bytes} bytes")

    def _cuda_host_unregister(self, address: int) -> None:
        with self.here():
            _check(_runtime().cudaHostUnregister(address), "unlock host memory")


def handle_of(event: torch.Event) -> int:
    """Return the device's own handle of an event, 0 of one that was never recorded.

    In torch 2.6 and 2.7 the ``event_id`` of a `torch.cuda.Event` is always 0: https://github.com/pytorch/pytorch/pull/151226.
    """
    return int(getattr(event, "cuda_event", 0) or event.event_id)


def has_cuda() -> bool:
    """Say whether torch sees a GPU, by NVML where it can: to ask CUDA itself would be the end of forks that use it."""
    return torch.cuda.device_count() > 0


def resolve(device: DeviceLike | None) -> DeviceLike:
    """Return a device, or say which one is meant *here*: ``"cuda"`` is this thread's current GPU, not another's.

    None is the GPU if torch has one, else the CPU.

    Raises:
        ConfigurationError: There is no device of this name.
    """
    if isinstance(device, Device):
        return device
    if device is None:
        device = "cuda" if has_cuda() else "cpu"
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(f"there is no device {device!r:.80}: write e.g. 'cpu', 'cuda' or 'cuda:0'") from error
    if wanted.type == "cuda" and wanted.index is None and has_cuda():
        # Before CUDA is initialised no thread can have chosen one; and asking would initialise it, for forks to fail.
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)
    return wanted


def make_device(device: torch.device | str | None = None) -> Device:
    """Return the device the engine's tensors are on, ``"cpu"`` or ``"cuda:0"``; the caller closes it.

    Without a name it is the GPU if torch has one, else the CPU.

    Raises:
        ConfigurationError: There is no such device, or none of a kind known here.
    """
    wanted = resolve(device)
    if isinstance(wanted, Device):
        return wanted
    wanted = torch.device(wanted)
    if wanted.type == "cpu":
        return CPUDevice()
    if wanted.type == "cuda":
        return CUDADevice(wanted)
    if wanted.type == "xpu":
        return AcceleratorDevice(wanted)
    raise ConfigurationError(f"KV on {wanted} is not supported: tensors must be on a CPU, a CUDA or an XPU device")


def _runtime() -> Any:  # noqa: ANN401 - a module without stubs
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # of torch


def _check(code: Any, doing: str) -> None:  # noqa: ANN401 - torch's cudaError, an enum without stubs
    number = int(code)  # all that it tells: success alone has a name in it
    if number == _FORBIDDEN_BY_A_CAPTURE:
        raise TryAgainError(f"could not {doing} while a CUDA graph is captured")
    if number != _SUCCESS:
        raise RuntimeError(f"could not {doing}: CUDA error {number}")
