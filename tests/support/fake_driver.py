"""A CUDA driver for GPUs that are not there, as strict as the one it stands in for: host memory, and queues of work.

Work runs when some thread waits for it, or when a test says so (`held`), in any order that the streams allow. What the
real driver makes a caller wait for is done here too, and taken down in `blocked`: who waited, and for what.
"""

import ctypes
import random
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import numpy as np
import torch

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
INVALID_VALUE, INVALID_CONTEXT, ILLEGAL_ADDRESS, ALREADY_REGISTERED = 1, 201, 700, 712
NOT_REGISTERED, MISALIGNED, CAPTURING, CAPTURED_EVENT = 713, 716, 900, 907
NOT_READY = 600
QUEUE_DEPTH = 1024
Work = Callable[[], object]


class Marker:
    """A place in a queue, which fires when the stream gets there."""

    fired = False
    is_captured = False
    """Recorded by a stream that captures: it stands for nothing that runs."""
    queue: "Queue | None" = None


@dataclass
class Queue:
    """What a stream still has to do: a marker to wait for and work, one of them None."""

    device: int
    items: deque[tuple[Marker | None, Work | None]] = field(default_factory=deque)


class Code(int):
    """What the runtime library answers, as torch hands it on: an enum that has a name for 0 alone."""

    def __str__(self) -> str:
        return "cudaError.???" if self else "cudaError.success"


class PerThread(threading.local):
    """What CUDA keeps for each thread."""

    device = 0
    is_bound = False
    """Whether the thread has the context of its device: not by `device` alone, if that was never chosen."""
    saved_device = -1
    """torch's: set back to once something is done there, so that no context is made."""
    capture_mode = GLOBAL
    capturing: int | None = None
    is_gpu = False
    """Running work now: nothing it does is enqueued."""


class FakeDriver:
    """Several GPUs.

    Attributes:
        contexts: GPUs on which somebody has made a context: 500 MiB each.
        blocked: Threads that had to wait inside a call that should only enqueue, and why.
        waits: Threads that waited for an event or a stream, and the streams' queues.
        held: Whether work runs only in `step`.
        failure: What the GPU does next is fail with this code, and so does every call from then on.
        spoilt: Whether a capture of a CUDA graph was spoilt by a call outside of it.
        refusals: Codes that ``cudaHostRegister`` answers with next; 0 is no refusal.
        attributes: What ``cuDeviceGetAttribute`` answers, by number; else 0. If 91 is 0, memory that was registered has
            another address on the GPU: what reads or writes it by the host's fails there (700).
        batches: The sizes of the copies of each batch.
        room: Bytes that a GPU has left for one allocation.
    """

    def __init__(self, num_devices: int = 4, seed: int = 0) -> None:
        self.num_devices = num_devices
        self.contexts: set[int] = set()
        self.blocked: list[tuple[str, str]] = []
        self.waits: list[tuple[str, Queue | None]] = []
        self.held = False
        self.failure = 0
        self.spoilt = False
        self.refusals: list[int] = []
        self.attributes = {91: 1, 88: 1, 100: 0}
        self.batches: list[list[int]] = []
        self.room = 1 << 34
        self.registered: dict[int, int] = {}
        self._made_locked: set[int] = set()
        self.allocated: dict[int, tuple[int, int]] = {}
        self._starts: list[int] = []
        self.num_enqueued = 0
        self.deepest = 0
        self.here = PerThread()
        self._kept: list[object] = []
        self._captures: dict[int, int] = {}
        self._captured: list[Queue] = []
        self._markers = WeakValueDictionary[int, Marker]()
        self._queues: dict[tuple[int, int], Queue] = {}
        self._chance = random.Random(seed)
        self._moved = threading.Condition(threading.RLock())

    # Devices.

    def set_device(self, device: int) -> None:
        """Choose a GPU for this thread, as CUDA 12 does: that makes a context on it."""
        self.here.saved_device = -1
        if device != self.here.device:
            self.check()
            self.here.device = device
            self.use_context()

    def current_device(self) -> int:
        """Return the one torch thinks of."""
        return self.here.saved_device if self.here.saved_device >= 0 else self.here.device

    def use_context(self) -> None:
        """Do what needs a context on the current GPU."""
        self.contexts.add(self.here.device)
        self.here.is_bound = True

    # Captures.

    @contextmanager
    def capture(self, mode: int = GLOBAL, queue: Queue | None = None) -> Iterator[None]:
        """Capture a CUDA graph in this thread, out of a stream's queue."""
        self.here.capturing = self._captures[threading.get_ident()] = mode
        self._captured += [] if queue is None else [queue]
        try:
            yield
        finally:
            self.here.capturing = None
            del self._captures[threading.get_ident()]
            self._captured.clear()

    def is_capturing(self) -> bool:
        """Say whether some thread captures a graph."""
        return bool(self._captures)

    def is_captured(self, queue: Queue) -> bool:
        """Say whether a stream captures what it is given."""
        return any(each is queue for each in self._captured)

    def unsafe(self) -> int:
        """Return the code of a call that may not be made beside a capture, and spoil the capture; 0 if it may."""
        mine, mode = self.here.capturing, self.here.capture_mode
        others = [each for thread, each in self._captures.items() if thread != threading.get_ident()]
        is_own = mine is not None and RELAXED not in {mine, mode}
        if is_own or (mode == GLOBAL and GLOBAL in others):
            self.spoilt = True
            return CAPTURING
        return 0

    # Streams.

    def queue(self, device: int, number: int) -> Queue:
        """Return the queue of a stream."""
        with self._moved:
            return self._queues.setdefault((device, number), Queue(device))

    def queues_of(self, device: int) -> list[Queue]:
        """Return the queues of all streams of a GPU."""
        with self._moved:
            return [queue for (index, _), queue in self._queues.items() if index == device]

    def enqueue(self, queue: Queue, work: Work | None = None, after: Marker | None = None) -> None:
        """Append work, or a wait; where the queue is full this blocks as the driver does."""
        with self._moved:
            if len(queue.items) >= QUEUE_DEPTH:
                self.block("a full queue")
                self._until(lambda: len(queue.items) < QUEUE_DEPTH)
            queue.items.append((after, work))
            self.num_enqueued += 1
            self.deepest = max(self.deepest, len(queue.items))

    def mark(self, queue: Queue) -> Marker:
        """Record an event."""
        marker = Marker()
        marker.queue = queue
        self._markers[id(marker)] = marker
        if self.is_captured(queue):
            marker.is_captured = True
            return marker

        def fire() -> None:
            marker.fired = True

        self.enqueue(queue, fire)
        return marker

    def wait_for(self, marker: Marker) -> None:
        """Block this thread until a marker has fired."""
        self.waits.append((threading.current_thread().name, marker.queue))
        self._until(lambda: marker.fired)

    def block(self, why: str) -> None:
        """Take down that this thread waits for the GPU inside a call."""
        self.blocked.append((threading.current_thread().name, why))

    def step(self) -> bool:
        """Have one stream do the next thing; False if none can."""
        with self._moved:
            ready = [
                queue for queue in self._queues.values()
                if queue.items and (queue.items[0][0] is None or queue.items[0][0].fired)
            ]  # fmt: skip
            if not ready:
                return False
            _, work = self._chance.choice(ready).items.popleft()
            if work is not None and not self.failure:
                self.here.is_gpu = True
                try:
                    with torch.inference_mode():  # a GPU knows nothing of it, and writes to any tensor
                        work()
                finally:
                    self.here.is_gpu = False
            self._moved.notify_all()
            return True

    def run(self) -> None:
        """Do all there is to do."""
        while self.step():
            pass

    def release(self) -> None:
        """Let work run when somebody waits for it, again."""
        with self._moved:
            self.held = False
            self._moved.notify_all()

    def fail(self, code: int) -> NoReturn:
        """Raise as torch does."""
        raise RuntimeError(f"CUDA error: {code}")

    def check(self) -> None:
        """Raise if the GPU has failed: it stays so."""
        if self.failure:
            self.fail(self.failure)

    def _until(self, is_so: Callable[[], bool]) -> None:
        with self._moved:
            while not is_so():
                self.check()
                is_stuck = self.held and threading.current_thread() is threading.main_thread()
                assert not is_stuck, "the test's own thread waits for what only it can release"
                if self.held or not self.step():
                    assert self._moved.wait(60), "the GPU waits for something that never happens"
        self.check()

    # Memory.

    def keep(self, address: int, num_bytes: int, device: int, what: object) -> None:
        """Call memory a GPU's, for good: its address will not be another's."""
        self._kept.append(what)
        self.allocated[address] = num_bytes, device
        self._starts = sorted(self.allocated)  # a new list: others may read it just now

    def lock(self, address: int, num_bytes: int, what: object) -> None:
        """Call memory page-locked, for good: it was allocated so."""
        self._kept.append(what)
        self._made_locked.add(address)
        self.registered[address] = num_bytes

    def device_of(self, address: int) -> int | None:
        """Return which GPU's memory is at an address; None for the host's."""
        starts = self._starts
        if not (at := bisect_right(starts, address)):
            return None
        num_bytes, device = self.allocated[starts[at - 1]]
        return device if address < starts[at - 1] + max(1, num_bytes) else None

    def is_locked(self, address: int, num_bytes: int = 1) -> bool:
        """Say whether host memory is page-locked, in one piece."""
        return any(start <= address and address + num_bytes <= start + n for start, n in list(self.registered.items()))

    def is_elsewhere(self, address: int) -> bool:
        """Say whether the GPU knows host memory by another address: never what CUDA has allocated."""
        start = next((each for each, n in list(self.registered.items()) if each <= address < each + n), None)
        return not self.attributes[91] and start is not None and start not in self._made_locked

    def kind_of(self, address: int, num_bytes: int) -> str:
        """Say what memory is: ``"gpu"``, ``"locked"``, or ``"pageable"``; raises where a DMA would cross two pieces."""
        if self.device_of(address) is not None:
            return "gpu"
        if self.is_locked(address, num_bytes):
            return "locked"
        if self.is_locked(address) or self.is_locked(address + num_bytes - 1):
            self.fail(INVALID_VALUE)
        return "pageable"

    # The runtime library's and the driver's own functions.

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's
        """Page-lock memory."""
        self.use_context()
        if code := self.failure or self.unsafe():
            return Code(code)
        if self.refusals and (code := self.refusals.pop(0)):
            return Code(code)
        if not num_bytes:
            return Code(INVALID_VALUE)
        if any(start < address + num_bytes and address < start + n for start, n in self.registered.items()):
            return Code(ALREADY_REGISTERED)
        self.registered[address] = num_bytes
        return Code(0)

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's
        """Undo it."""
        self.use_context()
        return Code(self.failure or self.unsafe() or (0 if self.registered.pop(address, None) else NOT_REGISTERED))

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: ANN401, N802 - a reference of C
        """Swap the thread's mode."""
        value = mode._obj  # noqa: SLF001 - how ctypes names what it refers to
        value.value, self.here.capture_mode = self.here.capture_mode, value.value
        return 0

    def cuEventQuery(self, event: Any) -> int:  # noqa: ANN401, N802 - a pointer of C
        """Say whether an event has fired; of a captured one there is nothing to say."""
        marker = self._markers[event.value]
        if marker.is_captured:
            return CAPTURED_EVENT
        return self.failure or self.unsafe() or (0 if marker.fired else NOT_READY)

    def cuEventSynchronize(self, event: Any) -> int:  # noqa: ANN401, N802 - a pointer of C
        """Wait for an event."""
        marker = self._markers[event.value]
        if marker.is_captured:
            return CAPTURED_EVENT
        if code := self.failure or self.unsafe():
            return code
        try:
            self.wait_for(marker)
        except RuntimeError:
            return self.failure
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:  # noqa: ANN401, N802 - of C
        """Answer as a GPU on PCIe does, or see ``attributes``."""
        value._obj.value = self.attributes.get(attribute, 0)  # noqa: SLF001 - how ctypes names what it refers to
        return 0

    def cuMemcpyBatchAsync(self, *arguments: Any) -> int:  # noqa: ANN401, N802 - of C
        """Enqueue copies; its own arrays are read before it returns, but its memory is not."""
        *addresses, count, attributes, first, num_attributes, _, stream = arguments
        n, handle = count.value, stream.value or 0
        assert n <= 8192, "some drivers end the process here"
        if not self.here.is_bound:
            return INVALID_CONTEXT
        if not handle or attributes._obj[0] != 1 or first._obj.value or num_attributes.value != 1:  # noqa: SLF001 - of ctypes
            return INVALID_VALUE
        arrays = [np.ctypeslib.as_array((ctypes.c_int64 * n).from_address(each.value)).copy() for each in addresses]
        for target, source, size in zip(*(array.tolist() for array in arrays), strict=True):
            if {self.kind_of(target, size), self.kind_of(source, size)} - {"gpu", "locked"}:
                return INVALID_VALUE

        self.batches.append(arrays[2].tolist())

        def move() -> None:
            for target, source, size in zip(*(array.tolist() for array in arrays), strict=True):
                if self.is_elsewhere(target) or self.is_elsewhere(source):
                    self.failure = self.failure or ILLEGAL_ADDRESS
                    return
                ctypes.memmove(target, source, size)

        self.enqueue(self.queue(handle >> 16, handle & 0xFFFF), move)
        return 0
