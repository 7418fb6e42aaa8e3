"""What threads poll for: what has happened on the event loop and nobody has asked about yet, the newest at least.

A signal's handler may come in too, whatever its thread was doing here: the lock is one that its thread may take again,
and each step inside it is one operation of the interpreter.
"""

import math
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from tiered_kv.errors import ClosedError, ConfigurationError
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.system import system

K = TypeVar("K")
V = TypeVar("V")
_LOOK_AGAIN_S: Final = 0.5
"""How often who waits looks whether the event loop is still there: one that is closed tells nobody."""
MOST_KEPT: Final = 1 << 16
"""News that nobody has polled: a program may look at what it has submitted instead, and never poll."""


class Polled(Generic[K, V]):
    """News by what they are about, in the order in which they came. Any thread may call.

    Attributes:
        lock: Held for a few instructions, never while something is checked, started or waited for. Who holds it may
            change what others wait for, and then calls `tell`.
    """

    def __init__(self, loop_calls: LoopCalls, most_kept: int = MOST_KEPT) -> None:
        """Keep so many news that nobody has asked for. In the event loop's thread."""
        self.lock = system().condition()
        self._news: dict[K, V] = {}
        self._most_kept = most_kept
        self._loop_calls = loop_calls
        self._loop_thread = system().get_ident()

    def tell(self, about: K, news: V) -> None:
        """Have it polled, and wake who waits; with the lock held."""
        self._news[about] = news
        if len(self._news) > self._most_kept:
            del self._news[next(iter(self._news))]
        self.lock.notify_all()

    def forget(self, about: K) -> None:
        """Do not have it polled any more: whoever would be told knows."""
        self._news.pop(about, None)

    def poll(self, timeout_s: float, is_any_coming: Callable[[], bool]) -> list[tuple[K, V]]:
        """Return the news, each once. Waits for the first, at most ``timeout_s``, as long as any is coming.

        Raises:
            ClosedError: There is none, and as the event loop is closed there will be none.
        """
        with self.lock:
            if timeout_s > 0:
                self.check_may_block()
            self.wait_until(lambda: bool(self._news) or not is_any_coming(), timeout_s)
            news, self._news = self._news, {}
        return list(news.items())

    def wait_until(self, is_over: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait until ``is_over()``, at most so long, and not for an event loop that is closed; with the lock held."""
        deadline = system().monotonic() + timeout_s if timeout_s is not None else math.inf
        while not is_over():
            if self._loop_calls.is_closed:
                raise ClosedError("the event loop of this TieredKV was closed before the cache: no transfer will end")
            left_s = deadline - system().monotonic()
            if left_s <= 0:
                return
            self.lock.wait(min(left_s, _LOOK_AGAIN_S))

    def check_may_block(self) -> None:
        """Raise `ConfigurationError` in the event loop's thread."""
        if system().get_ident() == self._loop_thread:
            raise ConfigurationError("the event loop's thread must not block: await what was started there instead")
