"""Who waits for a cache in a task of the program's, and is told of its end."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from anyio import CancelScope

from tiered_kv.errors import ClosedError

_LAST_STEPS_S: Final = 1.0
"""What a call that is told of the closing may take to end."""


class Callers:
    """Calls that wait in the tasks of their callers: the end of the cache ends their wait.

    Transfers end by themselves, with results, and need none of this.
    """

    def __init__(self) -> None:
        self._scopes: dict[CancelScope, bool] = {}
        self._changed = asyncio.Event()

    @contextmanager
    def waiting(self, *, for_the_program: bool = False) -> Iterator[None]:
        """Wait in this block; raise `ClosedError` from it if the cache is closed before the wait is over.

        ``for_the_program``: it is not the cache that will end the wait, so closing gives it no time.
        """
        with CancelScope() as scope:
            self._scopes[scope] = for_the_program
            try:
                yield
            finally:
                del self._scopes[scope]
                self._changed.set()
        if scope.cancelled_caught:
            raise ClosedError("this TieredKV was closed before the call was done")

    async def aclose(self, timeout_s: float) -> None:
        """Give the calls so long to end; then end them."""
        for scope, is_for_the_program in self._scopes.items():
            if is_for_the_program:
                scope.cancel()
        await self._left(timeout_s)
        for scope in self._scopes:
            scope.cancel()
        await self._left(_LAST_STEPS_S)

    async def _left(self, timeout_s: float) -> None:
        """Wait until no call is under way, for a limited time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._scopes:
                    self._changed.clear()
                    await self._changed.wait()
