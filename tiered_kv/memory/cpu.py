"""A device whose memory is the host's: its streams are threads, and its copies those of the processor."""

import inspect
import os
import threading

import torch

from tiered_kv.memory.device import After, Copy, Device, Done, Stream, ThreadStream, attempt, nothing, report
from tiered_kv.memory.host import HostSlab, PageLocking
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.events import Emit


class CPUDevice(Device):
    """The engine's KV is in host memory: copies run in daemon threads, one a stream."""

    kind = "cpu"
    torch_device = torch.device("cpu")

    def check(self, after: After) -> None:
        """Raise `ConfigurationError` unless ``after`` has a blocking ``synchronize()`` or ``wait()``."""
        _blocking_wait(after)

    def free_bytes(self) -> int:
        """Return the machine's free memory, caches of files not counted."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def _new_stream(self, name: str) -> Stream:
        return CPUStream(name)

    def _new_page_locking(self, slab: HostSlab, emit: Emit) -> PageLocking:
        return PageLocking(slab, reason="no GPU copies from this memory", emit=emit)


class CPUStream(ThreadStream[tuple[Copy, Done | None, threading.Event]]):
    """A thread that takes waits and copies off a queue. A copy that fails fails only itself."""

    def __init__(self, name: str) -> None:
        self._num_queued = 0
        super().__init__(name)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or running, and more may come."""
        return not self._num_queued and not self._closed

    def wait(self, after: After) -> None:
        """Have everything submitted later wait for ``after`` in the stream's thread."""
        self._put(_blocking_wait(after), None)

    def forgive(self) -> None:
        """Forget a failure once the thread is past all that was queued."""
        self._put(nothing, None)

    def submit(self, copy: Copy, done: Done) -> After:
        """Run ``copy`` in the stream's thread, then ``done`` there."""
        return self._put(copy, done)

    def _put(self, work: Copy, done: Done | None) -> threading.Event:
        ended = threading.Event()
        with self._lock:
            self._check_open()
            self._num_queued += 1
            self._queue.put((work, done, ended))
        return ended

    def _run(self) -> None:
        broken: BaseException | None = None
        while (item := self._queue.get()) is not None:
            work, done, ended = item
            if done is None:
                broken = attempt(work)  # the bytes after a failed wait may be half written: copy none of them
            else:
                error = broken or attempt(work)
                ended.set()
                report(done, error)
                del error
            with self._lock:
                self._num_queued -= 1
            del item, work, done, ended  # what a copy held must not outlive it until the next one comes


def _blocking_wait(after: After) -> Copy:
    """Return what blocks until ``after``. ``synchronize`` goes first: a torch event's ``wait`` blocks no thread."""
    for name in ("synchronize", "wait"):
        wait = getattr(after, name, None)
        if callable(wait) and not isinstance(after, type) and not inspect.iscoroutinefunction(wait):
            return wait  # type: ignore[no-any-return]  # whatever it returns is not looked at
    raise ConfigurationError(
        f"after must be a torch event, or on a CPU have a blocking synchronize() or wait(), got {type(after).__name__}"
    )
