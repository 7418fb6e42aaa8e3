"""Carries the changes of a cache, and descriptions of its blocks, to the thread that has the sockets.

A task takes the changes from `TieredKV.events`, and hands the thread a few at a time. If the thread falls behind, that
stream begins anew with snapshots. The books compare these with what routers were told, so that routers hear of the
difference alone. The cache never waits.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from tiered_kv.telemetry.kv_event_values import HasChanges, KVEventStatistics
from tiered_kv.telemetry.router_books import Batch, Description, RouterBooks
from tiered_kv.telemetry.router_socket import Work
from tiered_kv.tiers.changes import Changes
from tiered_kv.values.errors import ClosedError
from tiered_kv.values.keys import BlockKeys

_MOST_CHANGES: Final = 64
_MOST_BLOCKS: Final = 1 << 16
_CLOSE_TIMEOUT_S: Final = 5.0


class Outlet(Protocol):
    """Takes the batches that work yields, and has the thread that does the work: `RouterSocket`, or vLLM's own stream.

    Attributes:
        num_batches: Batches that went there.
        num_snapshots: How often all was told anew.
    """

    num_batches: int
    num_snapshots: int

    def start(self, on_end: Callable[[], None]) -> None:
        """Begin to work; ``on_end`` is called when it has ended."""

    def put(self, work: Work) -> None:
        """Have this done after what was put before. Returns at once. Any thread may call."""

    def stop(self) -> None:
        """End the thread soon."""


class RouterFeed:
    """The task and the thread of a publisher. The task belongs to the event loop; `describe` to any thread."""

    def __init__(
        self,
        kv: HasChanges,
        changes: Changes,
        books: RouterBooks,
        outlet: Outlet,
    ) -> None:
        self._kv, self._changes, self._books, self._outlet = kv, changes, books, outlet
        places = changes.places
        self._ranks = {group: 1 + max(rank for _, each, rank in places if each == group) for _, group, _ in places}
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(_MOST_CHANGES)
        self._waiting = _Waiting(_MOST_BLOCKS)
        self._ended = asyncio.Event()
        self._is_closed = False
        outlet.start(partial(self._on_loop, self._ended.set))
        self._following = self._loop.create_task(self._follow(), name="KV events")

    def describe(
        self,
        keys: BlockKeys,
        *,
        hashes: NDArray[np.uint64],
        parent: int | None,
        tokens: NDArray[np.uint32],
        lora_id: int | None = None,
        lora_name: str | None = None,
        extra_keys: Sequence[tuple[Any, ...] | None] | None = None,
    ) -> None:
        """Hand over a `Description` of neighbouring blocks, or drop it where too many wait."""
        if self._is_closed:
            raise ClosedError("this KVEventPublisher is closed")
        ranks = range(self._ranks.get(keys.group, 0))
        namespaces = [replace(self._kv.namespace(group=keys.group, rank=n), salt=keys.salt_id) for n in ranks]
        if not len(keys) or not namespaces or not self._waiting.take(len(keys)):
            return
        description = Description(
            namespaces[0].epoch, [namespace.names(keys) for namespace in namespaces], hashes, parent, keys.start,
            keys.group, tokens, lora_id, lora_name, extra_keys,
        )  # fmt: skip
        give_back = partial(self._waiting.give_back, len(keys))
        self._outlet.put(_before(give_back, partial(self._books.describe, description)))

    async def aclose(self) -> None:
        """End the task, then the thread, which ends by itself if this is cancelled."""
        self._is_closed = True
        self._following.cancel()
        self._outlet.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._ended.wait()

    def statistics(self) -> KVEventStatistics:
        """Return what has been published until now, and what was lost on the way."""
        return KVEventStatistics(
            num_batches=self._outlet.num_batches,
            num_snapshots=self._outlet.num_snapshots,
            num_overflows=self._changes.num_overflows,
            num_undescribed=self._books.num_undescribed,
            num_refused=self._waiting.num_refused,
        )

    async def _follow(self) -> None:
        try:
            async for change in self._changes:
                await self._room.acquire()
                epoch = self._kv.namespace(group=change.group, rank=change.rank).epoch
                made = partial(self._on_loop, self._room.release)
                self._outlet.put(_before(made, partial(self._books.apply, change, epoch)))
        except ClosedError:  # the cache began to close between a change and this
            pass
        finally:
            self._outlet.put(self._books.nothing)  # whatever ends this: better a router that knows nothing

    def _on_loop(self, act: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(act)


class _Waiting:
    """Counts the blocks whose descriptions wait for the thread, and keeps them bounded."""

    def __init__(self, most: int) -> None:
        self.num_refused = 0
        self._most = self._free = most
        self._lock = threading.Lock()

    def take(self, num: int) -> bool:
        """Make room for so many; a single description may always wait."""
        with self._lock:
            if num > self._free and self._free < self._most:
                self.num_refused += num
                return False
            self._free -= num
            return True

    def give_back(self, num: int) -> None:
        """Free the room of so many."""
        with self._lock:
            self._free += num


def _before(first: Callable[[], None], work: Work) -> Work:
    """Return work that begins with something else."""

    def both() -> Iterable[Batch]:
        first()
        return work()

    return both
