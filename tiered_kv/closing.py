"""How an open cache ends: it takes no more stores and writes what it has, by a call or a signal; then it is closed."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from anyio import move_on_after

from tiered_kv.errors import ConfigurationError
from tiered_kv.events import CacheClosed
from tiered_kv.open_cache import OpenCache
from tiered_kv.tiers import upkeep

_UNHANDLED = (signal.SIGKILL, signal.SIGSTOP)


class Draining:
    """A drain that a signal begins.

    Attributes:
        begun: Is set when the signal has come.
    """

    def __init__(self, start: "Callable[[], asyncio.Task[bool]]") -> None:
        """Made by `TieredKV.drain_on` only."""
        self.begun = asyncio.Event()
        self._start = start
        self._task: asyncio.Task[bool] | None = None

    async def wait(self) -> bool:
        """Wait for the signal, then until all is written; return what `TieredKV.drain` does.

        Cancellation ends the wait only.
        """
        await self.begun.wait()
        assert self._task is not None  # noqa: S101 - it has begun
        return await asyncio.shield(self._task)

    def begin(self) -> None:
        """Begin, once; on the loop."""
        if self._task is None:
            self._task = self._start()
            self.begun.set()


async def drain(cache: OpenCache, timeout_s: float | None) -> bool:
    """Take no more stores, write what there is; say whether that took no longer than ``timeout_s``."""
    for chain in cache.chains:
        chain.limits.takes_stores = False
    writing = cache.tasks.spawn(_write_all(cache), "drain")
    try:
        await asyncio.wait({writing}, timeout=cache.limits.close_timeout_s if timeout_s is None else timeout_s)
        return writing.done() and not writing.cancelled()
    finally:
        writing.cancel()  # it only waits: what it waits for goes on


async def _write_all(cache: OpenCache) -> None:
    await cache.settle()
    await upkeep.checkpoint(cache.chains, sync=True)


@contextmanager
def draining_on(signals: tuple[signal.Signals, ...], start: "Callable[[], asyncio.Task[bool]]") -> Iterator[Draining]:
    """Drain on the first of these signals; from then on each does what it does by default. See `TieredKV.drain_on`."""
    if not signals or not all(isinstance(each, signal.Signals) and each not in _UNHANDLED for each in signals):
        given = ", ".join(map(repr, signals))
        raise ConfigurationError(f"drain_on({given}) takes signals that can be handled: write drain_on(signal.SIGTERM)")
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("drain_on() is called in the main thread: Python handles signals nowhere else")
    loop = asyncio.get_running_loop()
    draining = Draining(start)

    def on_signal(*_: object) -> None:
        for each in signals:
            signal.signal(each, signal.default_int_handler if each is signal.SIGINT else signal.SIG_DFL)
        loop.call_soon_threadsafe(draining.begin)

    former = {each: signal.signal(each, on_signal) for each in signals}
    try:
        yield draining
    finally:
        for each, handler in former.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)


def begin_to_close(cache: OpenCache) -> "asyncio.Task[None]":
    """Let no call in any more, and return the task that ends the cache: the same one to all who close it."""
    if cache.closing is None:
        cache.closing = asyncio.get_running_loop().create_task(_close(cache), name="close")
    return cache.closing


async def _close(cache: OpenCache) -> None:
    """Let what is being moved end, or give it up after `CacheLimits.close_timeout_s`; then close every tier."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    deadline = started + cache.limits.close_timeout_s
    cache.submissions.close()
    cache.pins.close()
    cache.subscribers.close()
    cache.jobs.close()
    with move_on_after(cache.limits.close_timeout_s):
        await cache.settle()
    await cache.background.aclose(0.0)
    abandoned = await cache.tasks.aclose(max(0.0, deadline - loop.time()))
    unwritten = sum(cleaner.num_waiting for cleaner in cache.cleaners)
    with move_on_after(cache.limits.close_timeout_s):
        await upkeep.checkpoint(cache.chains, sync=False)
    await cache.lifetime.aclose()
    cache.emit(CacheClosed(abandoned, (loop.time() - started) * 1e3, unwritten))
