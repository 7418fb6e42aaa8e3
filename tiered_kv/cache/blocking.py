"""A cache for programs without an event loop: every call blocks until it has its answer.

The cache runs on an event loop in a thread of its own, AnyIO's blocking portal, and ends with it. Loads and stores take
no round trip through the portal: they are submitted, as by any thread.

A program that ends while its cache is open loses nothing of what it has stored: the interpreter waits until it is
written, within `CacheLimits.close_timeout_s`.
"""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, contextmanager, suppress
from functools import partial, update_wrapper
from typing import Any, Concatenate, Final, ParamSpec, TypeAlias, TypeVar, overload

from anyio import CancelScope
from anyio.from_thread import BlockingPortal, start_blocking_portal

from tiered_kv.cache.block_cache import BlockCache
from tiered_kv.cache.checks import LoadCall, StoreCall
from tiered_kv.cache.seat import check_process, parents
from tiered_kv.system import system
from tiered_kv.transfers.submissions import LoadTicket, StoreTicket, Ticket
from tiered_kv.values.errors import ClosedError, ConfigurationError

P = ParamSpec("P")
T = TypeVar("T")
Blocking: TypeAlias = Callable[Concatenate["BlockingTieredKV", P], T]
"""A method of `BlockingTieredKV` with the arguments of a call of `BlockCache`."""
_LOOK_S: Final = 0.25
"""How often it is looked whether the program is ending."""


@contextmanager
def open_blocking(cache: BlockCache) -> "Iterator[BlockingTieredKV]":
    """Open a cache in a thread of its own, for a ``with`` block.

    Give it as `TieredKV.from_settings` or `TieredKV.connect` makes it.

    It is closed when the block ends, by an exception or KeyboardInterrupt too, as `TieredKV.aclose` does it; and when
    the main thread ends, whoever has entered the block and not left it. A process that was forked in the block leaves
    it at once, and closes nothing.

    Raises:
        ConfigurationError, BackendUnavailableError: As opening it on a loop does; or it is no cache.
    """
    if not isinstance(cache, BlockCache):
        raise ConfigurationError(f"open_blocking opens a TieredKV, or what TieredKV.connect makes, got {cache!r:.80}")
    num_parents = len(parents)
    with start_blocking_portal(name="tiered_kv") as portal:
        portal.call(cache.__aenter__)
        kv = BlockingTieredKV(cache, portal)
        try:
            with _closing_at_the_end(kv, portal):
                yield kv
        finally:
            if len(parents) != num_parents:  # AnyIO's own calls, too, would wait for good: the loop is not here
                portal._event_loop_thread_id = None  # noqa: SLF001 - what makes them raise RuntimeError
            kv._portal = None  # noqa: SLF001 - its own module's
            with suppress(RuntimeError):  # the program has ended, and the cache with it
                portal.call(cache.aclose)


@overload
def _blocking(call: Callable[Concatenate[Any, P], Awaitable[T]]) -> "Blocking[P, T]": ...
@overload
def _blocking(call: Callable[Concatenate[Any, P], T]) -> "Blocking[P, T]": ...


def _blocking(call: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method that calls a cache on its loop and waits: of a coroutine or a handle, for what that gives."""

    def blocking(kv: "BlockingTieredKV", /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as `call` has it
        return kv.call(getattr(kv.cache, call.__name__), *args, **kwargs)

    update_wrapper(blocking, call)
    return blocking


def _submitted(
    call: Callable[Concatenate[Any, P], Awaitable[T]], submit: Callable[Concatenate[Any, P], Ticket[T]]
) -> "Blocking[P, T]":
    """Make a method that does what ``call`` does by way of ``submit``, with no round trip through the loop."""

    def blocking(kv: "BlockingTieredKV", /, *args: P.args, **kwargs: P.kwargs) -> T:
        kv._open_portal()  # noqa: SLF001 - its own module's
        whose = object()

        def submit_and_wait() -> T:
            ticket: Ticket[T] = submit(_Submitting(kv.cache, whose), *args, **kwargs)
            return ticket.wait()

        # Not by its ticket: who is interrupted as it submits may not have been handed that. Nor by when it came, or
        # from which thread: what signals' handlers submit meanwhile is not this call's.
        return _ended(submit_and_wait, partial(kv._submissions.end_of, whose))  # noqa: SLF001 - its own module's

    update_wrapper(blocking, call)
    return blocking


def _holding(
    call: Callable[Concatenate[Any, P], AbstractAsyncContextManager[T]],
) -> "Blocking[P, AbstractContextManager[T]]":
    """Make a method for a ``with`` block of what a cache has for ``async with``."""

    @contextmanager
    def blocking(kv: "BlockingTieredKV", /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        held_later: AbstractAsyncContextManager[T] = kv.call(getattr(kv.cache, call.__name__), *args, **kwargs)
        portal, num_parents = kv._open_portal(), len(parents)  # noqa: SLF001 - its own module's
        stack = AsyncExitStack()

        def leave() -> None:
            if len(parents) != num_parents:
                return  # a process that was forked meanwhile holds nothing: its parent does
            try:
                portal.call(stack.aclose)
            except RuntimeError:  # the cache has been closed, and its loop has ended: what is a server's goes back
                with suppress(RuntimeError), kv._leaving, start_blocking_portal() as another:  # noqa: SLF001
                    another.call(stack.aclose)

        try:
            try:
                yield kv.call(stack.enter_async_context, held_later)  # leaves no task: the loop would not end before it
            finally:
                leave()
        except BaseException:  # whoever is interrupted on the way leaves all the same
            _ended(leave, leave)
            raise

    update_wrapper(blocking, call)
    return blocking


class BlockingTieredKV:
    """An open `TieredKV`, for any thread but its loop's. Its calls are made of those of `BlockCache`.

    Each takes the same arguments and keeps the same promises, and returns what awaiting gives there: ``load`` a
    `LoadResult`, ``prefetch`` a `PrefetchResult`; ``lease`` is for a ``with`` block. ``load`` ends by its deadline.

    The end of `open_blocking` does not wait for ``lease`` blocks of other threads: what they show stays as it is.

    A thread that is interrupted in a call, by whatever signals' handlers raise, leaves only when no copy of it touches
    the engine's memory any more, and raises the last of that.

    Attributes:
        cache: For the calls that any thread may make as they are, and for `call`.
    """

    def __init__(self, cache: BlockCache, portal: BlockingPortal) -> None:
        """Made by `open_blocking` only."""
        self.cache = cache
        self._submissions = cache._open(anywhere=True).submissions  # noqa: SLF001 - of this library
        self.submit_load = cache.submit_load
        self.submit_store = cache.submit_store
        self.poll = cache.poll
        self.lookup_nowait = cache.lookup_nowait
        self.membership = cache.membership
        self.count_lookup = cache.count_lookup
        self.namespace = cache.namespace
        self.planner = cache.planner
        self._portal: BlockingPortal | None = portal
        self._leaving = threading.Lock()  # for one at a time of those who leave a block when its loop has ended
        self._num_parents, self._loop_thread = len(parents), portal.call(system().get_ident)

    def __repr__(self) -> str:
        return f"BlockingTieredKV({self.cache!r})"

    @overload
    def call(self, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def call(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...

    def call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make any call on the cache's loop, and wait for its answer: ``kv.call(kv.cache.events)``.

        Of a coroutine method or a handle it is what awaiting gives: ``kv.call(kv.cache.start_swap, {3: 0})``.

        Raises:
            ConfigurationError: It is nothing that can be called.
        """
        if not callable(call):
            raise ConfigurationError(f"call() takes a function and its arguments, got {call!r:.80}")
        answer = _Answer(partial(call, *args, **kwargs))
        return _ended(partial(self._open_portal().call, answer.run), answer.give_up)

    register_kv_caches = _blocking(BlockCache.register_kv_caches)
    unregister_kv_caches = _blocking(BlockCache.unregister_kv_caches)
    register_host_pool = _blocking(BlockCache.register_host_pool)
    lookup = _blocking(BlockCache.lookup)
    presence = _blocking(BlockCache.presence)
    lookup_groups = _blocking(BlockCache.lookup_groups)
    load = _submitted(BlockCache.load, BlockCache.submit_load)
    load_groups = _blocking(BlockCache.load_groups)
    store = _submitted(BlockCache.store, BlockCache.submit_store)
    prefetch = _blocking(BlockCache.prefetch)
    lease = _holding(BlockCache.lease)
    touch = _blocking(BlockCache.touch)
    resident = _blocking(BlockCache.resident)
    leaving = _blocking(BlockCache.leaving)
    pin = _blocking(BlockCache.pin)
    unpin = _blocking(BlockCache.unpin)
    swap_out = _blocking(BlockCache.swap_out)
    swap_in = _blocking(BlockCache.swap_in)
    swap = _blocking(BlockCache.swap)
    evict = _blocking(BlockCache.evict)
    resize = _blocking(BlockCache.resize)
    clear = _blocking(BlockCache.clear)
    advance_epoch = _blocking(BlockCache.advance_epoch)
    flush = _blocking(BlockCache.flush)
    drain = _blocking(BlockCache.drain)
    explain = _blocking(BlockCache.explain)
    stats = _blocking(BlockCache.stats)

    def _open_portal(self) -> BlockingPortal:
        portal = self._portal  # another thread may leave the block meanwhile
        if portal is None:
            raise ClosedError("this TieredKV is closed")
        check_process(self._num_parents)
        if system().get_ident() == self._loop_thread:
            raise ConfigurationError("the event loop's thread must not block: there, await the calls of kv.cache")
        return portal


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


class _Submitting:
    """Stands for a cache in its `submit_load` and `submit_store`: what these submit is marked as one call's own."""

    def __init__(self, cache: BlockCache, whose: object) -> None:
        self._cache = cache
        self._whose = whose

    def _submit_load(self, call: LoadCall) -> LoadTicket:
        call.whose = self._whose
        return self._cache._submit_load(call)  # noqa: SLF001 - of this library

    def _submit_store(self, call: StoreCall) -> StoreTicket:
        call.whose = self._whose
        return self._cache._submit_store(call)  # noqa: SLF001 - of this library


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
        """Cancel the call and wait for its end; if it has not begun, it never will. Interrupted, it is called again."""
        self._is_given_up = True
        if self._scope is not None and not self._has_ended.is_set() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._scope.cancel)
            self._has_ended.wait()


def _ended(make: Callable[[], T], stop: Callable[[], object]) -> T:
    """Return what a call comes to. Where it raises, raise that once ``stop`` has come to its end.

    That is called again and again, whatever signals' handlers raise in it. The last of that is raised, as of what comes
    in any ``except`` block of Python; it names the first as its cause.
    """
    try:
        return make()
    except BaseException as first:
        last = first
        while True:
            try:
                while True:  # in a ``try`` of its own: a handler may be called between two rounds as well
                    try:
                        stop()
                        break
                    except BaseException as error:  # noqa: BLE001 - raised once all is over
                        last = error
                break
            except BaseException as error:  # noqa: BLE001 - likewise
                last = error
        if last is not first:
            raise last from first
        raise
