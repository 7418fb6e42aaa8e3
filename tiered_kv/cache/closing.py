"""How an open cache ends: it takes no more stores and writes what it has, by a call or a signal; then it is closed."""

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from anyio import move_on_after

from tiered_kv.cache.open_cache import OpenCache
from tiered_kv.cache.seat import Seat
from tiered_kv.tiers import upkeep
from tiered_kv.values.errors import ClosedError, ConfigurationError
from tiered_kv.values.events import CacheClosed

_UNHANDLED = (signal.SIGKILL, signal.SIGSTOP)


class Draining:
    """A drain that a signal begins.

    Attributes:
        begun: Is set when the signal has come.
    """

    def __init__(self, cache: OpenCache, timeout_s: float | None) -> None:
        """Made by `TieredKV.drain_on` only."""
        self.begun = asyncio.Event()
        self._cache = cache
        self._timeout_s = timeout_s
        self._task: asyncio.Task[bool] | None = None

    async def wait(self) -> bool:
        """Wait for the signal, then until all is written; return what `TieredKV.drain` does.

        Cancellation ends the wait only.

        Raises:
            ClosedError: The cache is closed, and no signal has come.
        """
        with self._cache.callers.waiting(for_the_program=True):
            await self.begun.wait()
        assert self._task is not None  # noqa: S101 - it has begun
        await asyncio.wait({self._task})
        return not self._task.cancelled() and self._task.result()

    def begin(self) -> None:
        """Begin, once; on the loop."""
        if self._task is None:
            self._task = self._cache.tasks.spawn(drain(self._cache, self._timeout_s), "drain on a signal")
            self.begun.set()


async def drain(cache: OpenCache, timeout_s: float | None) -> bool:
    """Take no more stores, write what there is; say whether all is written, or gone if it is to be, in time."""
    for chain in cache.chains:
        chain.quotas.takes_stores = False
    writing = cache.tasks.spawn(_write_all(cache), "drain")
    try:
        await asyncio.wait({writing}, timeout=cache.limits.close_timeout_s if timeout_s is None else timeout_s)
        return writing.done() and not writing.cancelled() and writing.result()
    finally:
        writing.cancel()  # it only waits: what it waits for goes on


async def _write_all(cache: OpenCache) -> bool:
    """Write what there is, as far as the tiers let it; say whether that is all."""
    try:
        await cache.settle()
        while late := [chain.unwritten for chain in cache.chains if chain.unwritten.num_late]:
            await late[0].one_ended()
            await cache.settle()  # what it has copied goes on below
    except ClosedError:
        return False
    is_noted = await upkeep.checkpoint(cache.chains, sync=True) and await upkeep.pay(cache.chains)
    is_short = any(chain.unwritten.num_blocks or chain.unwritten.has_lost for chain in cache.chains)
    return is_noted and not is_short and not any(tier.has_lost for chain in cache.chains for tier in chain.owned)


@contextmanager
def draining_on(cache: OpenCache, signals: tuple[signal.Signals, ...], timeout_s: float | None) -> Iterator[Draining]:
    """Drain on the first of these signals; from then on each does what it does by default. See `TieredKV.drain_on`."""
    if not signals or not all(isinstance(each, signal.Signals) and each not in _UNHANDLED for each in signals):
        given = ", ".join(map(repr, signals))
        raise ConfigurationError(f"drain_on({given}) takes signals that can be handled: write drain_on(signal.SIGTERM)")
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("drain_on() is called in the main thread: Python handles signals nowhere else")
    loop = asyncio.get_running_loop()
    draining = Draining(cache, timeout_s)
    handler = _Handler(signals, lambda: loop.call_soon_threadsafe(draining.begin))
    try:
        yield draining
    finally:
        handler.end()


class _Handler:
    """Handles signals for one cache, and then passes them on to whoever handled them before: there may be several.

    Attributes:
        former: Who has handled each of them before.
        has_come: Whether one of them has.
    """

    def __init__(self, signals: tuple[signal.Signals, ...], begin: Callable[[], object]) -> None:
        self._begin = begin
        self.has_come = False
        self.former: dict[signal.Signals, Any] = {}
        _open_handlers.append(self)
        for each in dict.fromkeys(signals):
            come = [other for other in _open_handlers if each in other.former and other.has_come]
            self.former[each] = come[-1] if come else signal.getsignal(each)
            signal.signal(each, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Begin to drain. The next signal that is handled here does what it does by default."""
        self.has_come = True
        for each in self.former:
            signal.signal(each, _by_default(each))
        if self in _open_handlers:
            self._begin()
        if isinstance(former := self.former[signal.Signals(number)], _Handler):
            former(number, frame)

    def end(self) -> None:
        """Put back who handled them before; where another cache has taken one since, that does it when it ends."""
        later = _open_handlers[_open_handlers.index(self) + 1 :]
        _open_handlers.remove(self)
        for each, former in self.former.items():
            if any(each in handler.former for handler in later):
                continue
            while isinstance(former, _Handler) and former not in _open_handlers:
                former = former.former[each]  # noqa: PLW2901 - of an ended one
            is_by_default = former is None or (isinstance(former, _Handler) and former.has_come)
            signal.signal(each, _by_default(each) if is_by_default else former)


def _by_default(each: signal.Signals) -> Any:  # noqa: ANN401 - what `signal` takes
    return signal.default_int_handler if each is signal.SIGINT else signal.SIG_DFL


_open_handlers: Final[list[_Handler]] = []
"""The latest last. For the main thread."""


def begin_to_close(seat: Seat, *, has_opened: bool = True) -> "asyncio.Task[None]":
    """Let no call in any more, and return the task that ends the cache: the same one to all who close it.

    ``has_opened``: it was said to be open, so its end is said too.
    """
    cache = seat.cache
    if cache.closing is None:
        cache.closing = asyncio.get_running_loop().create_task(_close(seat, has_opened=has_opened), name="close")
    return cache.closing


async def _close(seat: Seat, *, has_opened: bool) -> None:
    """Let what is under way end, or give it up after `CacheLimits.close_timeout_s`; then close every tier.

    Every step is taken, whatever one of them raises; that is raised at the end.
    """
    cache, loop = seat.cache, asyncio.get_running_loop()
    limit_s = cache.limits.close_timeout_s
    started = loop.time()
    deadline = started + limit_s
    num_abandoned, errors = 0, list[BaseException]()

    async def end_transfers() -> None:
        nonlocal num_abandoned
        num_abandoned = await cache.tasks.aclose(max(0.0, deadline - loop.time()))

    steps: tuple[Callable[[], Awaitable[object] | None], ...] = (
        seat.submissions.close,
        seat.pins.close,
        cache.subscribers.close,
        cache.close_jobs,
        lambda: _begin_no_more(cache),
        lambda: _within(limit_s, cache.settle()),
        lambda: cache.background.aclose(0.0),
        lambda: cache.callers.aclose(max(0.0, deadline - loop.time())),  # before what they wait for is given up
        end_transfers,
        lambda: _within(limit_s, upkeep.checkpoint(cache.chains, sync=False)),
        cache.lifetime.aclose,
    )
    for step in steps:
        try:
            if (waiting := step()) is not None:
                await waiting
        except BaseException as error:  # noqa: BLE001 - what comes after must be closed as well
            errors.append(error)
    if has_opened:
        num_unwritten = sum(chain.unwritten.num_blocks for chain in cache.chains)
        cache.emit(CacheClosed(num_abandoned, (loop.time() - started) * 1e3, num_unwritten))
    if errors:
        raise errors[0]


def _begin_no_more(cache: OpenCache) -> None:
    for chain in cache.chains:
        chain.fills.close()


async def _within(limit_s: float, waiting: Awaitable[object]) -> None:
    with move_on_after(limit_s):
        await waiting
