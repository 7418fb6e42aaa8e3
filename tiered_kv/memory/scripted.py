"""A device for tests and simulations: nothing runs until the script says so, and nothing depends on time or threads.

Streams are queues as everywhere; `ScriptedDevice.step` runs the copy at the head of one, in the caller's thread.
"""

import inspect
import random
from collections import deque
from dataclasses import dataclass

import torch

from tiered_kv.errors import ClosedError, ConfigurationError
from tiered_kv.memory.device import After, Copy, Device, Done, Stream, attempt, report
from tiered_kv.memory.host import HostSlab
from tiered_kv.memory.pinning import Pinning


class ScriptedEvent:
    """Something to wait for, which has happened once the script calls `fire`."""

    def __init__(self) -> None:
        self.fired = False

    def fire(self) -> None:
        """Let what waits for it go on."""
        self.fired = True

    def is_set(self) -> bool:
        """Say whether it has fired, as a ``threading.Event`` does."""
        return self.fired


@dataclass(frozen=True)
class _Work:
    number: int
    after: After
    copy: Copy | None
    done: Done | None


class ScriptedDevice(Device):
    """Host memory, with copies that run when told. For one thread.

    Attributes:
        log: What was enqueued and what ran, in order: ``(stream, "wait" | "submit" | "done" | "failed")``.
    """

    kind = "scripted"
    torch_device = torch.device("cpu")

    def __init__(self, *, chance: random.Random | None = None) -> None:
        """Make one.

        Args:
            chance: Chooses between streams that could go on. Without it, whatever was enqueued first goes first.
        """
        super().__init__()
        self.log: list[tuple[str, str]] = []
        self._chance = chance
        self._failures: deque[BaseException] = deque()
        self._scripted: list[ScriptedStream] = []
        self._number = 0

    @property
    def pending(self) -> int:
        """Count the copies that have not run."""
        return sum(work.copy is not None for stream in self._scripted for work in stream.queue)

    def fail_next(self, error: BaseException) -> None:
        """Have the next copy that comes to its turn end with ``error`` instead of running."""
        self._failures.append(error)

    def step(self) -> bool:
        """Run one copy, and its ``done``; False if there is none or each waits for an event that has not fired."""
        ready = [stream for stream in self._scripted if stream.is_ready()]
        if not ready:
            return False
        if self._chance is not None:
            stream = self._chance.choice(ready)
        else:
            stream = min(ready, key=lambda each: each.queue[0].number)
        copy, done = stream.take()
        error = self._failures.popleft() if self._failures else attempt(copy)
        self.log.append((stream.name, "done" if error is None else "failed"))
        report(done, error)
        return True

    def run_all(self) -> int:
        """Step until nothing can go on; return how many copies ran."""
        steps = 0
        while self.step():
            steps += 1
        return steps

    def check(self, after: After) -> None:
        """Raise `ConfigurationError` unless ``after`` can say whether it has happened: ``is_set()`` or ``query()``."""
        asks = callable(getattr(after, "is_set", None)) or callable(getattr(after, "query", None))
        # An asyncio.Event could be asked as well, but no real device takes one.
        if not asks or isinstance(after, type) or inspect.iscoroutinefunction(getattr(after, "wait", None)):
            raise ConfigurationError(f"after must have is_set() or query() here, got {type(after).__name__}")

    def free_bytes(self) -> int:
        """Return 64 GiB."""
        return 64 << 30

    def next_number(self) -> int:
        """Number what is enqueued, over all streams."""
        self._number += 1
        return self._number

    def _new_stream(self, name: str) -> Stream:
        stream = ScriptedStream(name, self)
        self._scripted.append(stream)
        return stream

    def _new_pinning(self, slab: HostSlab) -> Pinning:
        pinning = Pinning(slab, reason="scripted")
        pinning.wait()
        return pinning


class ScriptedStream(Stream):
    """A queue that its device works off."""

    def __init__(self, name: str, device: ScriptedDevice) -> None:
        self.name = name
        self.queue: deque[_Work] = deque()
        self._device = device
        self._closed = False

    def wait(self, after: After) -> None:
        """Have everything submitted later wait for ``after``."""
        self._device.check(after)
        self._put("wait", after, None, None)

    def submit(self, copy: Copy, done: Done) -> None:
        """Run ``copy`` in some later `ScriptedDevice.step`."""
        self._put("submit", None, copy, done)

    def close(self) -> None:
        """Take no more."""
        self._closed = True

    def join(self, timeout_s: float | None = None) -> bool:
        """Run what can go on, of all streams; False if something of this one is left waiting."""
        self._device.run_all()
        return self._closed and not any(work.copy is not None for work in self.queue)

    def is_ready(self) -> bool:
        """Say whether a copy is next; waits whose events have fired are taken off."""
        while self.queue and self.queue[0].copy is None and _has_happened(self.queue[0].after):
            self.queue.popleft()
        return bool(self.queue) and self.queue[0].copy is not None

    def take(self) -> tuple[Copy, Done]:
        """Take the next copy off the queue; only if `is_ready`."""
        work = self.queue.popleft()
        assert work.copy is not None and work.done is not None  # noqa: S101, PT018 - is_ready() has said so
        return work.copy, work.done

    def _put(self, what: str, after: After, copy: Copy | None, done: Done | None) -> None:
        if self._closed:
            raise ClosedError(f"the stream {self.name!r} is closed")
        self._device.log.append((self.name, what))
        self.queue.append(_Work(self._device.next_number(), after, copy, done))


def _has_happened(after: After) -> bool:
    return bool(after.is_set() if hasattr(after, "is_set") else after.query())
