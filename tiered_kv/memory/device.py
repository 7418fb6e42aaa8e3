"""What the cache asks of the device that holds the engine's KV: ordered queues of copies, and memory it can reach.

One interface and its implementations: ``cpu.py``, ``gpu.py``, and ``testing/scripted.py``, whose copies run when a test
says so.
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from tiered_kv.memory.host import HostSlab, PageLocking, PageLockState, ignore
from tiered_kv.values.errors import ClosedError, ConfigurationError
from tiered_kv.values.events import Emit
from tiered_kv.values.log import log

After = Any
"""A caller's event: ``torch.cuda.Event`` or ``torch.Event``; on a CPU anything with ``synchronize()`` or ``wait()``."""
Copy = Callable[[], object]
Done = Callable[[BaseException | None], None]


class Stream(ABC):
    """A queue of copies that run one after another, in the order of the calls. Any thread may call.

    Attributes:
        name: For people.
        is_on_loop: Whether all of it is of the event loop's thread, ``done`` too.
    """

    name: str
    is_on_loop: ClassVar[bool] = False

    @abstractmethod
    def wait(self, after: After) -> None:
        """Have everything submitted later wait for ``after``. Returns at once.

        An ``after`` that fails leaves open what it stood for: it fails every copy submitted after it, until the next
        wait or `forgive`. One that never happens holds up the stream for good: see `Lanes`.

        Raises:
            ConfigurationError: ``after`` is nothing this device can wait for.
            ClosedError: The stream is closed.
        """

    def forgive(self) -> None:  # noqa: B027 - of some streams no wait fails
        """Have no ``after`` that failed fail a copy submitted later: that is of another transfer.

        Raises:
            ClosedError: The stream is closed.
        """

    @abstractmethod
    def submit(self, copy: Copy, done: Done) -> After:
        """Run ``copy`` after all that was enqueued.

        Args:
            copy: Does it, or on a GPU enqueues it. What it refers to is kept until it is done.
            done: Called exactly once, with the error or None, when the memory of the copy is free again: never inside
                this call, and from some other thread, or see `is_on_loop`. It must return soon and must not raise.

        Returns:
            An event after the copy, whether it goes well or not, for another stream to wait for; None on a device that
            has failed.

        Raises:
            ClosedError: The stream is closed.
        """

    @property
    def is_idle(self) -> bool:
        """Whether a copy may as well be made in the calling thread: it is a thread's work, and none is queued here."""
        return False

    def reserve(self, num_buffers: int, buffer_bytes: int) -> None:  # noqa: B027 - most streams need none
        """Take the device's memory that blocks go through, so many buffers, before the first copy needs it; maybe none.

        Raises:
            ConfigurationError: The device does not have it.
        """

    @abstractmethod
    def close(self) -> None:
        """Take no more, and end what serves the stream after what is queued. Does not wait: `join`."""

    @abstractmethod
    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until a closed stream has ended; False if ``timeout_s`` passed first."""


T = TypeVar("T")


class ThreadStream(Stream, Generic[T]):
    """A stream that a thread of its own serves, which takes off a queue what was submitted."""

    def __init__(self, name: str) -> None:
        """Start the thread: all that it uses is there already."""
        self.name = name
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # nothing is queued after the end, nor in another order than it was enqueued in
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"tiered_kv-{name}", daemon=True)
        self._thread.start()

    @abstractmethod
    def _run(self) -> None:
        """Serve the queue until None comes."""

    def _check_open(self) -> None:
        """Raise `ClosedError` once it is closed; with the lock held."""
        if self._closed:
            raise ClosedError(f"the stream {self.name!r} is closed")

    @override
    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)

    @override
    def join(self, timeout_s: float | None = None) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class Device(ABC):
    """Where the engine's KV is. Owns the streams and lockings made by it, until `close`."""

    kind: str
    """``"cpu"``, ``"cuda"``, ``"scripted"``: for people."""
    torch_device: torch.device

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """What made the device unusable: every copy fails with it from then on, and no other device minds."""
        self.on_failure: Callable[[BaseException], object] = ignore
        """Called once, with that, in whichever thread found out."""
        self._streams: list[Stream] = []
        self._page_lockings: list[PageLocking] = []
        self._failing = threading.Lock()
        self._closing = threading.Lock()
        self._num_ended = 0
        self._is_closing = False

    def fail(self, error: BaseException) -> None:
        """Count the device as unusable. Only the first call counts."""
        with self._failing:
            is_first, self.error = self.error is None, self.error or error
        if is_first:
            self.on_failure(error)

    def stream(self, name: str) -> Stream:
        """Make a stream. Copies of two streams may overlap."""
        stream = self._new_stream(name)
        self._streams.append(stream)
        return stream

    def page_lock(self, slab: HostSlab, *, emit: Emit = ignore) -> PageLocking:
        """Start getting ``slab`` ready for copies, in the background. It may be used meanwhile, and before.

        Args:
            slab: What is to be ready.
            emit: Told of the progress, in another thread.
        """
        locking = self._new_page_locking(slab, emit)
        self._page_lockings.append(locking)
        return locking

    def page_unlock(self, locking: PageLocking) -> None:
        """Undo a `page_lock` before the device is closed. No copy may use the slab any more. Blocks its thread."""
        locking.close()
        with self._closing:
            if locking in self._page_lockings:
                self._page_lockings.remove(locking)

    @property
    def page_locked_bytes(self) -> int:
        """Bytes page-locked by now, of all slabs."""
        return sum(locking.page_locked_bytes for locking in self._page_lockings)

    @property
    def is_pageable(self) -> bool:
        """Whether copies go to and from pageable memory, and it should be otherwise."""
        return any(locking.is_slow for locking in self._page_lockings)

    @property
    def is_page_locked(self) -> bool:
        """Whether all slabs are page-locked, so that no copy can block whoever enqueues it."""
        return all(locking.state is PageLockState.LOCKED for locking in self._page_lockings)

    @abstractmethod
    def check(self, after: After) -> None:
        """Raise `ConfigurationError` unless a stream of this device can wait for ``after``."""

    def to_wait_for(self, after: After | None) -> After | None:
        """Return what the copies of a caller in this thread are to come after; None is nothing.

        Args:
            after: As the caller gave it. None is all that this thread's current stream of the device was given by now:
                what torch does there next would come after that too. On a CPU it is nothing: what was called is done.

        Raises:
            ConfigurationError: ``after`` is nothing this device can wait for, or a CUDA graph is being captured here.
        """
        if after is not None:
            self.check(after)
        return after

    def has_happened(self, after: After) -> bool:
        """Say whether ``after`` has happened, as far as it can tell: False may mean that it cannot."""
        for name in ("query", "is_set"):
            if callable(ask := getattr(after, name, None)):
                try:
                    return ask() is True
                except Exception:  # noqa: BLE001 - an event of a device that has failed: whoever waits for it will hear
                    return False
        return False

    @abstractmethod
    def free_bytes(self) -> int:
        """Return how much memory the device could still give."""

    def empty_pool(self, num_slots: int, stride_bytes: int) -> Tensor:
        """Allocate slots on the device: ``(num_slots, stride_bytes // 8)`` int64, the caller's.

        All zeros, so that nothing of what the memory held before leaves the device past a payload.
        """
        if stride_bytes % 8:
            raise ConfigurationError(f"the stride of a pool must be a multiple of 8 bytes, got {stride_bytes}")
        with torch.inference_mode(mode=False):  # else it could be written nowhere but there
            return torch.zeros(num_slots, stride_bytes // 8, dtype=torch.int64, device=self.torch_device)

    def close(self, timeout_s: float | None = None) -> bool:
        """Close the streams, wait for what is queued, then unlock what was page-locked. Again does no harm.

        Returns:
            Whether all has ended. If not, a copy hangs in some stream. Page-locked memory then stays locked and mapped
            under it, until the last stream has ended and unlocks it.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for locking in self._page_lockings:
            locking.stop()
        with self._closing:
            self._is_closing = True
        for stream in self._streams:
            stream.close()
        if not all(stream.join(_left(deadline)) for stream in self._streams):
            return False
        self._unlock()
        return True

    def stream_ended(self, stream: Stream) -> None:
        """Take note; called by a stream's thread as the last thing it does."""
        with self._closing:
            self._num_ended += 1
            is_last = self._is_closing and self._num_ended == len(self._streams)
        if is_last:
            self._unlock()

    def _unlock(self) -> None:
        with self._closing:  # by whoever comes first, and once
            for locking in self._page_lockings:
                locking.close()

    @abstractmethod
    def _new_stream(self, name: str) -> Stream: ...

    @abstractmethod
    def _new_page_locking(self, slab: HostSlab, emit: Emit) -> PageLocking: ...


def nothing() -> None:
    """Copy nothing."""


def attempt(copy: Copy) -> BaseException | None:
    """Run ``copy`` and return its error."""
    try:
        copy()
    except BaseException as error:  # noqa: BLE001 - handed on, whatever it is
        return error
    return None


def raise_the_programs(error: BaseException | None) -> None:
    """Raise what a handler of signals raised in the thread that copied: it is no fault of the copy."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error


def report(done: Done, error: BaseException | None) -> None:
    """Call ``done``, whose own mistakes must not end the thread that the other copies need."""
    try:
        done(error)
    except Exception as caught:  # noqa: BLE001 - whatever it raises
        log("error", "copy.callback_failed", exc_info=caught)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
