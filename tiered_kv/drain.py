"""Ending well: no new stores, and what was stored is written; begun by a call, or by a signal."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tiered_kv.core import Core
from tiered_kv.errors import ConfigurationError
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


async def drain(core: Core, timeout_s: float | None) -> bool:
    """Take no more stores, write what there is; say whether that took no longer than ``timeout_s``."""
    for chain in core.chains:
        chain.limits.takes_stores = False
    writing = core.tasks.spawn(_write_all(core), "drain")
    try:
        await asyncio.wait({writing}, timeout=core.limits.close_timeout_s if timeout_s is None else timeout_s)
        return writing.done() and not writing.cancelled()
    finally:
        writing.cancel()  # it only waits: what it waits for goes on


async def _write_all(core: Core) -> None:
    await core.settle()
    await upkeep.checkpoint(core.chains, sync=True)


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
