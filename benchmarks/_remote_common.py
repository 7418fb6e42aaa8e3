"""What each medium of ``remote.py`` gives: a running server, and two ways to use it."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from tiered_kv.media.backend import Backend, Block

Bare = Callable[[Sequence[str], Sequence[Block], int], Coroutine[Any, Any, None]]


class MissingError(Exception):
    """No server to measure against: what is missing, and how to get it."""


@dataclass(frozen=True)
class Sides:
    """Ours and the bare one, on the same server.

    Attributes:
        backend: Not open yet.
        bare: What the bare side is; the JSON's ``<medium>_store_over_<bare>``.
        store: Writes each block under its name, as many at once as the last argument says. Its own keys, not ours.
        load: Reads them.
        count_present: Asks for all names in the best way the client has; returns how many there are.
        num_questions: How many times the backend has asked its medium about presence so far. Some of them go together,
            so that there are no more round trips than this.
        reset: Called before each round: forget what was stored.
    """

    backend: Backend
    bare: str
    store: Bare
    load: Bare
    count_present: Callable[[Sequence[str]], Awaitable[int]]
    num_questions: Callable[[], int]
    reset: Callable[[], None] = lambda: None


async def share(
    moves: Iterable[Callable[[str, Any], Awaitable[object]]], names: Iterable[str], blocks: Iterable[object]
) -> None:
    """Move all blocks, each by whichever of ``moves`` is free; each of these moves one at a time."""
    todo = iter(zip(names, blocks, strict=True))

    async def one(move: Callable[[str, Any], Awaitable[object]]) -> None:
        for name, block in todo:
            await move(name, block)

    await asyncio.gather(*map(one, moves))


@contextmanager
def counted(owner: type, method: str) -> Iterator[Callable[[], int]]:
    """Yield what says how often a method of a class was called inside."""
    original, num_calls = getattr(owner, method), 0

    @wraps(original)
    def counting(*args: object, **kwargs: object) -> object:
        nonlocal num_calls
        num_calls += 1
        return original(*args, **kwargs)

    setattr(owner, method, counting)
    try:
        yield lambda: num_calls
    finally:
        setattr(owner, method, original)
