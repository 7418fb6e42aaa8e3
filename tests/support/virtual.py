"""Virtual time: an event loop whose clock stands still until a test moves it, or lets it jump when nothing is done.

A test says `advance`, or `watch`: from then on time jumps to the next timer whenever there is no work. Threads do real
work meanwhile, so it may only jump while none of them has any: `VirtualLoop.is_busy` says so.
"""

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tests.support.caches import inside
from tiered_kv import TieredKV
from tiered_kv.memory.cpu import CPUDevice, CPUStream
from tiered_kv.memory.device import After, Copy, Done
from tiered_kv.testing.helpers import ended
from tiered_kv.tiers.tasks import WorkerPool
from tiered_kv.values.loop_calls import LoopCalls

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Waits for what is real; where there is nothing, lets the loop's time pass instead."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        is_busy = self.loop.is_busy()  # before the look: whoever ends his work wakes the loop first, and is seen below
        events = super().select(0)
        if events or timeout == 0:
            return events
        if self.loop.on_idle():
            return []
        if timeout is None:
            return super().select(10.0)
        if is_busy:
            return super().select(0.01)
        self.loop.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop that waits for nothing but work.

    Attributes:
        now: Virtual seconds.
        is_busy: Whether somebody works elsewhere, so that no time may pass. As long as nobody says, none does.
        on_idle: Called before the loop waits for anything; does work that is left for then, and says whether there was.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.is_busy: Callable[[], bool] = lambda: True
        self.on_idle: Callable[[], bool] = lambda: False
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Return the virtual time."""
        return self.now


async def advance(seconds: float) -> None:
    """Let time pass, and the timers that are due run."""
    _loop().now += seconds
    for _ in range(3):
        await asyncio.sleep(0)


class CountingDevice(CPUDevice):
    """A CPU device that knows how many of its copies have not ended."""

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = 0

    def _new_stream(self, name: str) -> "_CountingStream":
        return _CountingStream(name, self)


class _CountingStream(CPUStream):
    def __init__(self, name: str, device: CountingDevice) -> None:
        self._device = device
        super().__init__(name)

    def submit(self, copy: Copy, done: Done) -> After:
        def ended(error: BaseException | None) -> None:
            done(error)  # wakes the loop first
            self._device.num_copies -= 1

        self._device.num_copies += 1
        return super().submit(copy, ended)


class InlineWorkers:
    """Workers without threads: each call is one turn of the event loop, so that every run takes the same turns."""

    def __init__(self, name: str, num_threads: int, loop_calls: LoopCalls) -> None:
        self._loop = asyncio.get_running_loop()

    @property
    def is_closed(self) -> bool:
        """Never: there are no threads to end."""
        return False

    def run(self, function: Callable[..., T], *args: object) -> "asyncio.Future[T]":
        """Run the call in the next turn."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._loop.call_soon(self._run, future, lambda: function(*args))
        return future

    def begin_each(self, calls: Sequence[Callable[[], T]], then: Callable[[Callable[[], list[T]]], object]) -> None:
        """Run the calls in the next turn."""
        asyncio.ensure_future(ended(*(self.run(call) for call in calls))).add_done_callback(
            lambda each: then(each.result)
        )

    def close(self) -> None:
        """Nothing to end."""

    @staticmethod
    def _run(future: "asyncio.Future[T]", call: Callable[[], T]) -> None:
        if not future.done():
            future.set_result(call())


def watch(device: CountingDevice, pools: list[WorkerPool]) -> None:
    """Let time jump from now on whenever neither the device nor a thread of the pools has work."""
    _loop().is_busy = lambda: bool(device.num_copies or sum(pool.num_unfinished for pool in pools))


def pools_of(kv: TieredKV) -> list[WorkerPool]:
    """Return the threads of an open cache: of the codec, and of NVMe tiers."""
    found = []
    for tier in inside(kv).chains[0].storage:
        found.append(tier.records.threads)
        disks = getattr(getattr(tier, "backend", None), "_open_disks", None)
        found += [pool for disk in disks or () for pool in vars(disk.threads).values()]
    return found


def run(main: Callable[[], Awaitable[T]]) -> T:
    """Run a test in virtual time."""

    async def body() -> T:
        return await main()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(body())


def _loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop
