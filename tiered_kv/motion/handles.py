"""What a caller holds of a transfer that the cache owns.

Waiting may be cancelled by AnyIO scopes, `task.cancel()` or `asyncio.wait_for`; an AnyIO shield holds against the first
only. So the wait catches the cancellation, revokes what has not been submitted, waits again until no copy touches the
caller's memory, and only then lets the cancellation through.
"""

import asyncio
import math
from collections.abc import Callable, Generator, Sequence
from threading import Lock
from typing import Any, Final, Generic, TypeVar

from anyio import CancelScope

from tiered_kv.memory.device import After
from tiered_kv.memory.lanes import Lane

T = TypeVar("T")
_LAST_COPIES_S: Final = 0.1
"""Copies take milliseconds, unless they wait for an event."""


class Handle(Generic[T]):
    """A transfer under way. Await it for its result; `cancel` it, or cancel the await, to revoke it."""

    def __init__(self, task: "asyncio.Task[T]", revoke: Callable[[], None]) -> None:
        self._task = task
        self._revoke = revoke

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    @property
    def done(self) -> bool:
        """Whether it has ended: the caller's memory is the caller's alone."""
        return self._task.done()

    def when_done(self, callback: "Callable[[asyncio.Task[T]], object]") -> None:
        """Call ``callback`` on the loop, with the task, once it has ended."""
        self._task.add_done_callback(callback)

    def cancel(self) -> None:
        """Stop as soon as possible: what is not submitted is dropped. Await the handle to learn when it has stopped."""
        if not self._task.done():
            self._revoke()

    async def _wait(self) -> T:
        cancelled: asyncio.CancelledError | None = None
        while not self._task.done():
            try:
                with CancelScope(shield=cancelled is not None):
                    await asyncio.wait({self._task})
            except asyncio.CancelledError as caught:
                cancelled = caught
                self.cancel()
        if cancelled is not None:
            raise cancelled
        return self._task.result()


async def each_of(handles: "Sequence[Handle[T]]") -> list[T]:
    """Await several transfers one after another; they go on side by side."""
    return [await handle for handle in handles]


def cancel_each(handles: "Sequence[Handle[T]]") -> None:
    """Stop several transfers as soon as possible."""
    for handle in handles:
        handle.cancel()


class RevokedError(Exception):
    """What a copy that came too late reports: it has touched nothing."""


class Copy:
    """One copy in a stream's queue. Until it begins it can be revoked, and then never touches memory.

    Attributes:
        ended: Resolves once the copy touches no memory any more, with what it raised. Never cancel it.
        event: For streams that are to wait for the copy, from its submission on; None on a device that has failed.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.event: After = None
        self._work: Callable[[], None] | None = work
        self._lock = Lock()

    def __call__(self) -> None:
        """Do it; called by the stream, in any thread."""
        with self._lock:  # from here on a revocation is too late
            work, self._work = self._work, None
        if work is None:
            raise RevokedError
        work()

    @property
    def has_begun(self) -> bool:
        """Whether a revocation would be too late, or was not."""
        return self._work is None

    def revoke(self) -> None:
        """Let it not begin, if it has not; called on the loop."""
        with self._lock:
            revoked, self._work = self._work is not None, None
        if revoked:
            self.resolve(RevokedError())

    def resolve(self, error: BaseException | None) -> None:
        """Say how it ended; what a revoked copy says when its turn comes is passed over."""
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class Revocable:
    """Base of transfers that can be told to stop: their task is cancelled once, and no copy begins any more."""

    def __init__(self) -> None:
        self.revoked = False
        self._copies: set[Copy] = set()
        self._task: asyncio.Task[Any] | None = None

    def start(self, task: "asyncio.Task[T]", lane: Lane | None = None) -> "Handle[T]":
        """Give the task that runs this transfer, for a handle; ``lane`` is released when it has ended."""
        self._task = task
        if lane is not None:
            task.add_done_callback(lambda _: lane.release())
        return Handle(task, self.revoke)

    def revoke(self) -> None:
        """Stop as soon as possible."""
        if not self.revoked:
            self.revoked = True
            self.revoke_copies()
            if self._task is not None:  # behind its first step: a task cancelled before that would never run and settle
                asyncio.get_running_loop().call_soon(self._task.cancel)

    def revoke_copies(self) -> None:
        """Let no copy begin that has not begun."""
        for copy in list(self._copies):
            copy.revoke()

    def watch(self, copy: Copy, then: Callable[[BaseException | None], None]) -> None:
        """Count a copy as under way; ``then`` is called on the loop when it has ended, before the drain does."""

        def ended(future: "asyncio.Future[None]") -> None:
            self._copies.discard(copy)
            then(future.exception())

        self._copies.add(copy)
        copy.ended.add_done_callback(ended)

    async def drain_copies(self, deadline: float = math.inf) -> bool:
        """Wait until no copy of this transfer touches anyone's memory, however often this task is cancelled.

        Args:
            deadline: On the loop's clock. Copies that have not begun by then, behind an event perhaps, are revoked; but
                what is at hand when the time is up is still copied.

        Returns:
            Whether the deadline was met.
        """
        loop = asyncio.get_running_loop()
        deadline = max(deadline, loop.time() + _LAST_COPIES_S)
        in_time = True
        if self.revoked:
            self.revoke_copies()
        while self._copies:
            timeout_s = max(0.0, deadline - loop.time()) if in_time and deadline < math.inf else None
            try:
                ended, _ = await asyncio.wait({copy.ended for copy in self._copies}, timeout=timeout_s)
                if not ended:
                    in_time = False
                    self.revoke_copies()
            except asyncio.CancelledError:
                self.revoked = True
                self.revoke_copies()
        return in_time
