"""A device for tests and simulations: nothing runs until the script says so, and nothing depends on time or threads.

Streams are queues as everywhere; `ScriptedDevice.step` runs the copy at the head of one, in the caller's thread. The
device knows what orders what, and lists as `ScriptedDevice.races` the accesses to memory that nothing orders.
"""

import inspect
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tiered_kv.memory.device import After, Copy, Device, Done, Stream, attempt, report
from tiered_kv.memory.host import HostSlab, PageLocking
from tiered_kv.testing.ordering import Actor, Clock, Ordering, Race, Region
from tiered_kv.values.errors import ClosedError, ConfigurationError
from tiered_kv.values.events import Emit, Event


class ScriptedEvent:
    """Something to wait for, which has happened once the script calls `fire`, or a stream has come to it."""

    def __init__(self, observer: Actor | None = None) -> None:
        """Make an event; an ``observer`` of a stream's event is ordered after it once it sees that it has fired."""
        self.fired = False
        self.error: BaseException | None = None
        self.clock: Clock = {}
        """What is ordered before it."""
        self._observer = observer

    def fire(self, clock: Clock | None = None) -> None:
        """Let what waits for it go on, ordered after ``clock``."""
        self.fired = True
        self.clock = clock or {}

    def fail(self, error: BaseException) -> None:
        """Let it never happen: what waits for it fails with ``error``."""
        self.error = error

    def is_set(self) -> bool:
        """Say whether it has fired, as a ``threading.Event`` does."""
        if self.fired and self._observer is not None:
            self._observer.learn(self.clock)
        return self.fired


@dataclass(frozen=True)
class _Work:
    number: int
    after: After
    copy: Copy | None
    done: Done | None
    event: ScriptedEvent
    submitted: Clock


class ScriptedDevice(Device):
    """Host memory, with copies that run when told. For one thread.

    Attributes:
        log: What was enqueued and what ran, in order: ``(stream, "wait" | "forgive" | "submit" | "done" | "failed")``.
        host: Who submits, and learns how copies ended: this thread, in the account of what orders what.
        running: Whose copy is being run.
    """

    kind = "scripted"
    torch_device = torch.device("cpu")

    def __init__(self, *, chance: random.Random | None = None) -> None:
        """Make a device that has run nothing.

        Args:
            chance: Chooses between streams that could go on. Without it, whatever was enqueued first goes first.
        """
        super().__init__()
        self.log: list[tuple[str, str]] = []
        self.host = Actor("host")
        self.running = self.host
        self._ordering = Ordering()
        self._chance = chance
        self._failures: deque[BaseException] = deque()
        self._scripted: list[ScriptedStream] = []
        self._number = 0

    @property
    def pending(self) -> int:
        """Count the copies that have not run."""
        return sum(work.copy is not None for stream in self._scripted for work in stream.queue)

    @property
    def races(self) -> list[Race]:
        """Accesses, by copies or by `ScriptedStream.reads` and `writes`, that conflict and that nothing orders."""
        return self._ordering.races

    def accessed(self, regions: Iterable[Region], *, writes: bool) -> None:
        """Take down that the copy being run, or else the host, reads or writes ``regions``."""
        self._ordering.access(self.running, regions, writes=writes)

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
        stream.run_next(self.error or (self._failures.popleft() if self._failures else None))
        return True

    def is_any_ready(self) -> bool:
        """Say whether `step` would run one."""
        return any(stream.is_ready() for stream in self._scripted)

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

    def stream(self, name: str) -> "ScriptedStream":
        """Make a stream; the script may make some of its own, e.g. for the engine's computing."""
        stream = super().stream(name)
        assert isinstance(stream, ScriptedStream)
        return stream

    def next_number(self) -> int:
        """Number what is enqueued, over all streams."""
        self._number += 1
        return self._number

    def _new_stream(self, name: str) -> "ScriptedStream":
        stream = ScriptedStream(name, self)
        self._scripted.append(stream)
        return stream

    def _new_page_locking(self, slab: HostSlab, emit: Emit) -> PageLocking:
        told: list[Event] = []
        locking = PageLocking(slab, reason="scripted", emit=told.append)
        locking.wait()
        for event in told:  # here, as its own thread has no turn of any script
            emit(event)
        return locking


class ScriptedStream(Stream):
    """A queue that its device works off."""

    def __init__(self, name: str, device: ScriptedDevice) -> None:
        self.name = name
        self.queue: deque[_Work] = deque()
        self._device = device
        self._actor = Actor(f"{name} (stream {device.next_number()})")
        self._broken: BaseException | None = None
        self._closed = False

    def wait(self, after: After) -> None:
        """Have everything submitted later wait for ``after``."""
        self._device.check(after)
        self._put("wait", after, None, None)

    def forgive(self) -> None:
        """Have no copy submitted later fail for an event before it."""
        nothing = ScriptedEvent()
        nothing.fire()
        self._put("forgive", nothing, None, None)

    def submit(self, copy: Copy, done: Done) -> ScriptedEvent:
        """Run ``copy`` in some later `ScriptedDevice.step`."""
        return self._put("submit", None, copy, done)

    def reads(self, regions: Iterable[Region]) -> ScriptedEvent:
        """Submit work that only reads ``regions``; return an event after it, all that the host hears of it."""
        return self._use(list(regions), writes=False)

    def writes(self, regions: Iterable[Region]) -> ScriptedEvent:
        """Submit work that only writes ``regions``; return an event after it, all that the host hears of it."""
        return self._use(list(regions), writes=True)

    def close(self) -> None:
        """Take no more."""
        self._closed = True

    def join(self, timeout_s: float | None = None) -> bool:
        """Run what can go on, of all streams; False if something of this one is left waiting."""
        self._device.run_all()
        return self._closed and not any(work.copy is not None for work in self.queue)

    def is_ready(self) -> bool:
        """Say whether a copy is next; waits whose events have fired or failed are taken off."""
        while self.queue and self.queue[0].copy is None and self._is_past(self.queue[0].after):
            self.queue.popleft()
        return bool(self.queue) and self.queue[0].copy is not None

    def run_next(self, error: BaseException | None) -> None:
        """Run the next copy, or fail it with ``error``; only if `is_ready`."""
        device, work = self._device, self.queue.popleft()
        assert work.copy is not None and work.done is not None  # noqa: PT018 - is_ready() has said so
        self._actor.learn(work.submitted)
        device.running = self._actor
        error = error or self._broken or attempt(work.copy)
        device.running = device.host
        clock = self._actor.act()
        work.event.fire(clock)
        device.log.append((self.name, "done" if error is None else "failed"))
        if work.done is not _nobody:
            device.host.learn(clock)
        report(work.done, error)

    def _use(self, regions: list[Region], *, writes: bool) -> ScriptedEvent:
        return self.submit(lambda: self._device.accessed(regions, writes=writes), _nobody)

    def _is_past(self, after: After) -> bool:
        if self._device.error is not None:
            return True  # nothing waits on a device that has failed
        self._broken = getattr(after, "error", None)
        if self._broken is None:
            if not (after.is_set() if hasattr(after, "is_set") else after.query()):
                return False
            self._actor.learn(getattr(after, "clock", {}))
        return True

    def _put(self, what: str, after: After, copy: Copy | None, done: Done | None) -> ScriptedEvent:
        if self._closed:
            raise ClosedError(f"the stream {self.name!r} is closed")
        device = self._device
        device.log.append((self.name, what))
        event = ScriptedEvent(device.host)
        self.queue.append(_Work(device.next_number(), after, copy, done, event, device.host.act()))
        return event


def _nobody(error: BaseException | None) -> None:
    """Tell nobody that the work has ended."""
