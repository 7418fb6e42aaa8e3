"""A loop whose clock stands still until the test moves it: no timer fires before, and threads take no time."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Whoever waits for a timer waits for `advance`."""

    def __init__(self) -> None:
        super().__init__(_Selector())
        self._now_s = 0.0

    def time(self) -> float:
        """Return virtual seconds."""
        return self._now_s


class _Selector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for no timer: only for what threads and files have to say."""
        return super().select(None if timeout is None or timeout > 0 else 0)


async def advance(seconds: float) -> None:
    """Let time pass, and the timers that are due run."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop._now_s += seconds  # noqa: SLF001 - its own module
    for _ in range(3):
        await asyncio.sleep(0)


def run(program: Coroutine[Any, Any, T]) -> T:
    """Run a program in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(program)
