"""The threads of a shared directory's calls, and how the event loop waits for them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import ParamSpec, TypeVar, cast

from tiered_kv.backend import Workers

P = ParamSpec("P")
T = TypeVar("T")


class Threads(Executor):
    """The tier's own threads, in the shape that aiofiles wants.

    They are daemons: a call that is stuck on a dead server keeps neither asyncio's default threads nor the
    interpreter's exit waiting.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "asyncio.Future[T]":
        """Run ``function`` in one of the threads."""
        return asyncio.ensure_future(self._workers.run(partial(function, *args, **kwargs)))

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Do the same for `loop.run_in_executor`, which passes an asyncio future on as it is."""
        return cast("Future[T]", self.run(function, *args, **kwargs))


async def each_of(calls: Sequence[Awaitable[T]]) -> list[T | Exception]:
    """Wait for every call, and leave them running if this is cancelled: buffers are lent until the last one ends."""
    futures = [asyncio.ensure_future(call) for call in calls]
    for future in futures:
        future.add_done_callback(look_at)
    if futures:
        await asyncio.wait(futures)
    results: list[T | Exception] = []
    for future in futures:
        error = future.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        results.append(future.result() if error is None else error)
    return results


def look_at(future: "asyncio.Future[T]") -> None:
    """Have asyncio not complain of an error that nobody waited for: whoever did has given up."""
    if not future.cancelled():
        future.exception()


def text_of(error: Exception) -> str:
    """Return what an error says, for messages."""
    return f"{error.filename or ''} {error.strerror}".strip() if isinstance(error, OSError) else str(error)
