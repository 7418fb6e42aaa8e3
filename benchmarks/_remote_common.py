"""What each medium of ``remote.py`` gives: a running server, and two ways to use it."""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from tiered_kv.backend import Backend, Block

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
        round_trips: What one `Backend.lookup_prefix` costs.
    """

    backend: Backend
    bare: str
    store: Bare
    load: Bare
    count_present: Callable[[Sequence[str]], Awaitable[int]]
    round_trips: int
