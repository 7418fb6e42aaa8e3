"""A cache for programs without an event loop: every call blocks until it has its answer.

The cache runs on an event loop in a thread of its own, AnyIO's blocking portal, and ends with it. Loads and stores take
no round trip through the portal: they are submitted, as by any thread.

A program that ends while its cache is open loses nothing of what it has stored: the interpreter waits until it is
written, within `CacheLimits.close_timeout_s`.
"""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar, overload

from anyio import CancelScope
from anyio.from_thread import BlockingPortal, start_blocking_portal

from tiered_kv.cache.answers import Explanation
from tiered_kv.cache.block_cache import BlockCache
from tiered_kv.cache.groups import GroupNeed, GroupsLoad, GroupsLookup
from tiered_kv.tiers.gate import Priority
from tiered_kv.transfers.prefetch import HostLease
from tiered_kv.transfers.submissions import Ticket
from tiered_kv.values.errors import ClosedError
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.keys import BlockKeys
from tiered_kv.values.layout import KVCaches
from tiered_kv.values.results import (
    CacheStatistics,
    LoadResult,
    LookupResult,
    PinResult,
    PrefetchResult,
    StoreResult,
    SwapOutResult,
)
from tiered_kv.values.specs import EngineBlocks, GPULoadStoreSpec

P = ParamSpec("P")
T = TypeVar("T")
_LOOK_S: Final = 0.25
"""How often it is looked whether the program is ending."""


@contextmanager
def open_blocking(cache: BlockCache) -> "Iterator[BlockingTieredKV]":
    """Open a cache in a thread of its own, for a ``with`` block.

    Give it as `TieredKV.from_settings` or `TieredKV.connect` makes it.

    It is closed when the block ends, by an exception or KeyboardInterrupt too, as `TieredKV.aclose` does it; and when
    the main thread ends, whoever has entered the block and not left it.

    Raises:
        ConfigurationError, BackendUnavailableError: As opening it on a loop does.
    """
    with start_blocking_portal(name="tiered_kv") as portal:
        portal.call(cache.__aenter__)
        kv = BlockingTieredKV(cache, portal)
        try:
            with _closing_at_the_end(kv, portal):
                yield kv
        finally:
            kv._portal = None  # noqa: SLF001 - its own module's
            with suppress(RuntimeError):  # the program has ended, and the cache with it
                portal.call(cache.aclose)


class BlockingTieredKV:
    """An open `TieredKV`, for any thread but its loop's. Its calls are the cache's, and say there what they do.

    A thread that is interrupted in a call leaves only when no copy of it touches the engine's memory any more.

    Attributes:
        cache: For the calls that any thread may make as they are, and for `call`.
    """

    def __init__(self, cache: BlockCache, portal: BlockingPortal) -> None:
        """Made by `open_blocking` only."""
        self.cache = cache
        self.submit_load = cache.submit_load
        self.submit_store = cache.submit_store
        self.poll = cache.poll
        self.lookup_nowait = cache.lookup_nowait
        self.membership = cache.membership
        self.count_lookup = cache.count_lookup
        self.planner = cache.planner
        self._portal: BlockingPortal | None = portal

    @overload
    def call(self, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def call(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...

    def call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make any call on the cache's loop, and wait for its answer: ``kv.call(kv.cache.namespace, "tenant-7")``.

        Of a coroutine method or a handle it is what awaiting gives: ``kv.call(kv.cache.start_swap, {3: 0})``.
        """
        answer = _Answer(partial(call, *args, **kwargs))
        try:
            return self._open_portal().call(answer.run)
        except BaseException:
            answer.give_up()
            raise

    def register_kv_caches(self, kv_caches: KVCaches, *, group: int = 0, axes: str | None = None) -> None:
        """See `TieredKV.register_kv_caches`."""
        self.call(self.cache.register_kv_caches, kv_caches, group=group, axes=axes)

    def unregister_kv_caches(self, *, group: int = 0) -> None:
        """See `TieredKV.unregister_kv_caches`."""
        self.call(self.cache.unregister_kv_caches, group=group)

    def register_host_pool(
        self,
        name: str,
        buffer: KVCaches,
        *,
        group: int = 0,
        axes: str | None = None,
        slot_bytes: int | None = None,
        direct: bool = False,
    ) -> None:
        """See `TieredKV.register_host_pool`."""
        register = self.cache.register_host_pool
        self.call(register, name, buffer, group=group, axes=axes, slot_bytes=slot_bytes, direct=direct)

    def lookup(self, keys: BlockKeys, *, where: bool = False) -> LookupResult:
        """See `TieredKV.lookup`; `lookup_nowait` asks no shared tier."""
        return self.call(self.cache.lookup, keys, where=where)

    def load(
        self,
        keys: BlockKeys,
        into: EngineBlocks,
        *,
        after: object = None,
        deadline_s: float | None = None,
        priority: Priority = Priority.LOAD,
        gaps: bool = False,
    ) -> LoadResult:
        """See `TieredKV.load`. Ends by the deadline."""
        submit = self.cache.submit_load
        return _ended(submit(keys, into, after=after, deadline_s=deadline_s, priority=priority, gaps=gaps))

    def store(
        self,
        keys: BlockKeys,
        source: EngineBlocks,
        *,
        after: object = None,
        epoch: str | None = None,
        hint: ReuseHint | None = None,
    ) -> StoreResult:
        """See `TieredKV.store`. For what becomes of the blocks in the tiers below, see `flush`."""
        return _ended(self.cache.submit_store(keys, source, after=after, epoch=epoch, hint=hint))

    def lookup_groups(self, needs: Sequence[GroupNeed]) -> GroupsLookup:
        """See `TieredKV.lookup_groups`."""
        return self.call(self.cache.lookup_groups, needs)

    def load_groups(
        self, needs: Sequence[GroupNeed], into: Sequence[GPULoadStoreSpec], *, after: object = None
    ) -> GroupsLoad:
        """See `TieredKV.load_groups`."""
        return self.call(self.cache.load_groups, needs, into, after=after)

    def swap_out(
        self, keys: BlockKeys, source: GPULoadStoreSpec, *, after: object = None, ttl_s: float = 600.0
    ) -> SwapOutResult:
        """See `TieredKV.swap_out`."""
        return self.call(self.cache.swap_out, keys, source, after=after, ttl_s=ttl_s)

    def swap_in(
        self, keys: BlockKeys, into: GPULoadStoreSpec, *, after: object = None, deadline_s: float | None = None
    ) -> LoadResult:
        """See `TieredKV.swap_in`."""
        return self.call(self.cache.swap_in, keys, into, after=after, deadline_s=deadline_s)

    def prefetch(self, keys: BlockKeys, *, to: str = "cpu") -> PrefetchResult:
        """See `TieredKV.prefetch`. Waits until it has ended."""
        return self.call(self.cache.prefetch, keys, to=to)

    @contextmanager
    def lease(self, keys: BlockKeys) -> Iterator[HostLease]:
        """See `TieredKV.lease`: ``with kv.lease(keys) as lease``."""
        lease_later = self.call(self.cache.lease, keys)
        with self._open_portal().wrap_async_context_manager(lease_later) as lease:
            yield lease

    def touch(self, keys: BlockKeys, *, hint: ReuseHint | None = None) -> None:
        """See `TieredKV.touch`."""
        self.call(self.cache.touch, keys, hint=hint)

    def pin(self, keys: BlockKeys, *, ttl_s: float) -> PinResult:
        """See `TieredKV.pin`."""
        return self.call(self.cache.pin, keys, ttl_s=ttl_s)

    def unpin(self, keys: BlockKeys) -> None:
        """See `TieredKV.unpin`."""
        self.call(self.cache.unpin, keys)

    def explain(self, keys: BlockKeys, *, ask: bool = False) -> list[Explanation]:
        """See `TieredKV.explain`."""
        return self.call(self.cache.explain, keys, ask=ask)

    def evict(self, keys: BlockKeys, *, tier: str | None = None) -> int:
        """See `TieredKV.evict`."""
        return self.call(self.cache.evict, keys, tier=tier)

    def resize(self, tier: str, capacity: int | str) -> int:
        """See `TieredKV.resize`."""
        return self.call(self.cache.resize, tier, capacity)

    def clear(self) -> None:
        """See `TieredKV.clear`."""
        self.call(self.cache.clear)

    def advance_epoch(self, weights: str) -> None:
        """See `TieredKV.advance_epoch`."""
        self.call(self.cache.advance_epoch, weights)

    def flush(self, *, sync: bool = False) -> None:
        """See `TieredKV.flush`."""
        self.call(self.cache.flush, sync=sync)

    def drain(self, *, timeout_s: float | None = None) -> bool:
        """See `TieredKV.drain`."""
        return self.call(self.cache.drain, timeout_s=timeout_s)

    def stats(self) -> CacheStatistics:
        """See `TieredKV.stats`."""
        return self.call(self.cache.stats)

    def _open_portal(self) -> BlockingPortal:
        if self._portal is None:
            raise ClosedError("this TieredKV is closed")
        return self._portal


@contextmanager
def _closing_at_the_end(kv: "BlockingTieredKV", portal: BlockingPortal) -> Iterator[None]:
    """Have a cache and its event loop end when the main thread does, if this block has not ended by then."""
    is_left = threading.Event()

    def watch() -> None:
        while not is_left.wait(_LOOK_S):
            if not threading.main_thread().is_alive():
                with suppress(RuntimeError):  # the block has just been left, and the loop has ended
                    thread = portal.call(threading.current_thread)
                    portal.call(kv.cache.aclose)
                    kv._portal = None  # noqa: SLF001 - its own module's
                    portal.call(portal.stop)
                    thread.join()  # a daemon, which would stop where it is
                return

    # No daemon: a program that ends waits for it. What atexit calls may start no threads, which closing does.
    watching = threading.Thread(target=watch, name="tiered_kv-end", daemon=False)
    watching.start()
    try:
        yield
    finally:
        is_left.set()
        watching.join()


class _Answer:
    """What one call comes to, made on the loop while a thread waits."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._scope: CancelScope | None = None
        self._is_given_up = False
        self._has_ended = threading.Event()

    async def run(self) -> object:
        """Make the call, unless it was given up."""
        self._loop = asyncio.get_running_loop()
        try:
            with CancelScope() as self._scope:  # before the look at what give_up() sets before it looks here
                if not self._is_given_up:
                    answered = self._call()
                    return await answered if inspect.isawaitable(answered) else answered
        finally:
            self._has_ended.set()
        return None

    def give_up(self) -> None:
        """Cancel the call and wait for its end; if it has not begun, it never will."""
        self._is_given_up = True
        while self._scope is not None and not self._has_ended.is_set():
            with suppress(KeyboardInterrupt):
                self._loop.call_soon_threadsafe(self._scope.cancel)
                self._has_ended.wait()


def _ended(ticket: Ticket[T]) -> T:
    """Wait for a transfer; if that is interrupted, until it has stopped touching the caller's memory."""
    try:
        return ticket.wait()
    except BaseException:
        ticket.cancel()
        while True:
            with suppress(KeyboardInterrupt):  # what has begun to be copied takes milliseconds
                ticket.wait()
                break
        raise
