"""What a caller holds of a transfer that the cache owns.

Waiting may be cancelled by AnyIO scopes, `task.cancel()` or `asyncio.wait_for`; an AnyIO shield holds against the first
only. So the wait catches the cancellation, revokes what has not been submitted, waits again until no copy touches the
caller's memory, and only then lets the cancellation through.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Generator, Sequence
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

from anyio import CancelScope

from tiered_kv.memory.lanes import Lane, LaneCopy, wait_in
from tiered_kv.system import system
from tiered_kv.tiers.tasks import to_the_end
from tiered_kv.values.errors import ClosedError, ConfigurationError
from tiered_kv.values.integers import as_int
from tiered_kv.values.results import LoadResult

T = TypeVar("T")
LAST_COPIES_S: Final = 0.1
"""Copies take milliseconds, unless they wait for an event."""


class Handle(Generic[T]):
    """A transfer under way. Await it for its result; `cancel` it, or cancel the await, to revoke it."""

    def __init__(self, ended: "asyncio.Future[T]", revoke: Callable[[], None]) -> None:
        self._ended = ended
        self._revoke = revoke

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'done' if self.done else 'under way'})"

    @property
    def done(self) -> bool:
        """Whether the transfer has ended: the caller's memory is the caller's alone."""
        return self._ended.done()

    def result(self) -> T:
        """Return the result of a transfer that has ended."""
        return self._ended.result()

    def when_done(self, callback: "Callable[[asyncio.Future[T]], object]") -> None:
        """Call ``callback`` on the loop, with the future that has its result, once it has ended."""
        self._ended.add_done_callback(callback)

    def cancel(self) -> None:
        """Stop as soon as possible: what is not submitted is dropped. Await the handle to learn when it has stopped."""
        if not self._ended.done():
            self._revoke()

    async def _wait(self) -> T:
        try:
            if self._ended.done():
                await asyncio.sleep(0)  # whoever awaits one transfer after another leaves turns for others
            else:
                await until_done([self._ended])
        except asyncio.CancelledError:
            self.cancel()
            with CancelScope(shield=True):
                await to_the_end([self._ended], self.cancel)
            raise
        if self._ended.cancelled():  # by the end of the cache: nobody has cancelled the caller
            raise ClosedError("this TieredKV was closed before this was done")
        return self._ended.result()


class Awaited(Protocol):
    """What can be waited for with others: a future, or a fill."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Call ``callback`` with this object when it is done: perhaps before this returns."""

    def remove_done_callback(self, callback: Callable[[Any], object], /) -> object:
        """Do not call ``callback`` any more."""


async def until_done(futures: Collection[Awaited], deadline: float = math.inf) -> None:
    """Wait until all are done, or it is ``deadline``; a cancellation of the wait reaches none of them.

    As `asyncio.wait` does, for a third of its time.
    """
    loop, num_left = asyncio.get_running_loop(), len(futures)
    waiter = loop.create_future()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def one_done(_: object) -> None:
        nonlocal num_left
        num_left -= 1
        if not num_left:
            wake()

    timer = None if deadline == math.inf else loop.call_at(deadline, wake)
    for each in futures:
        each.add_done_callback(one_done)
    try:
        await waiter
    finally:
        if timer is not None:
            timer.cancel()
        for each in futures:
            each.remove_done_callback(one_done)


class Loading(Protocol):
    """The load behind a `LoadHandle`.

    Attributes:
        num_layers: Of its KV group.
        thread: The event loop's.
        num_from_back: Blocks of a load from the back, which can be stopped before one of them; None of another load.
    """

    num_layers: int
    thread: int
    num_from_back: int | None = None

    @property
    def is_admitted(self) -> bool:
        """Whether it is known how many blocks will be in place."""

    async def wait_admitted(self) -> int:
        """Wait until that is known, and return it."""

    def copy_of(self, layer: int) -> LaneCopy | None:
        """Return the copy after which a layer of all admitted blocks is in place; None if there is no need to wait."""
        return None

    @property
    def is_copying(self) -> bool:
        """Whether something may have been written to the engine's blocks: where nothing better is known, it may."""
        return True

    def stop_before(self, block: int) -> int:
        """Claim the blocks before ``block`` for the engine; return from which block on the load still writes.

        Asked of a load from the back only, with one of its blocks or its end.
        """
        raise NotImplementedError

    def revoke(self) -> None:
        """Stop as soon as possible."""


class LoadHandle(Handle[LoadResult]):
    """A load under way. Await it for its result: the blocks that are in place.

    `admitted` says sooner how many there will be. From then on the engine may go on layer by layer, by `wait_layer` or
    `layer`, and awaits the handle before it trusts what it computed: only the result tells whether the device failed,
    the load was cancelled or its ``after`` came too late, or the weights changed meanwhile.
    """

    def __init__(self, ended: "asyncio.Future[LoadResult]", load: Loading) -> None:
        super().__init__(ended, load.revoke)
        self._load = load
        self._loop = asyncio.get_running_loop()

    async def admitted(self) -> int:
        """Return how many blocks will be in place: all are verified, and in slots that are theirs until copied.

        Cancellation ends the wait only.
        """
        return await self._load.wait_admitted()

    @property
    def is_admitted(self) -> bool:
        """Whether `admitted` would answer at once."""
        return self._load.is_admitted

    @property
    def is_copying(self) -> bool:
        """Whether the load may have begun to write to the engine's blocks."""
        return self._load.is_copying

    def stop_before(self, block: int) -> int:
        """Claim the blocks before ``block`` for the engine, which is about to compute them.

        Of a load with ``order="back"``. Parts of it that have not begun to be copied are given up where they are
        claimed; the engine never waits for a medium.

        Returns:
            The block from which on the load writes, ``block`` or one before it: all before are the engine's for good.
            Once that is where the engine is already, the two have met, and awaiting the handle takes no longer than
            copies do. Where the load has ended early, what it brought is from there on.

        Raises:
            ConfigurationError: The load is of another order, or there is no such block.
        """
        block = as_int("block", block, least=None)
        if (num_blocks := self._load.num_from_back) is None:
            raise ConfigurationError(
                "only a load from the back can be stopped before a block: start_load(order='back')"
            )
        if not 0 <= block <= num_blocks:
            raise ConfigurationError(f"block {block} is not one of the load's {num_blocks}")
        return self._load.stop_before(block)

    async def layer(self, layer: int) -> None:
        """Wait until a layer of all admitted blocks has been copied. Cancellation ends the wait only."""
        await self.admitted()
        if (copy := self._copy_of(layer)) is not None:
            await asyncio.wait({copy.ended})

    def wait_layer(self, layer: int, stream: object = None) -> None:
        """Have ``stream`` wait for a layer of all admitted blocks, without waiting for it here.

        Of a load that was not started with ``layerwise=True`` all layers come at once, the last block's last.

        Args:
            layer: Its position in the KV group.
            stream: A torch stream of the engine's device. None blocks the calling thread instead, which must not be the
                event loop's: there, await `layer`.

        Raises:
            ConfigurationError: No such layer, nothing is admitted yet, or there is nothing that could wait.
        """
        if stream is None:
            self._block(layer)
            return
        if not self._load.is_admitted:
            raise ConfigurationError("await handle.admitted() comes before handle.wait_layer()")
        if (copy := self._copy_of(layer)) is not None and copy.event is not None:
            wait_in(stream, copy.event)

    def _block(self, layer: int) -> None:
        if system().get_ident() == self._load.thread:
            raise ConfigurationError("wait_layer() without a stream would block the event loop: await handle.layer()")
        asyncio.run_coroutine_threadsafe(self.layer(layer), self._loop).result()

    def _copy_of(self, layer: int) -> LaneCopy | None:
        return self._load.copy_of(check_layer(layer, self._load.num_layers))


def check_layer(layer: int, num_layers: int) -> int:
    """Return a layer's position in its KV group; raise `ConfigurationError` unless the group has that layer."""
    if not 0 <= (layer := as_int("layer", layer, least=None)) < num_layers:
        raise ConfigurationError(f"layer {layer} is not one of the KV group's {num_layers}")
    return layer


async def each_of(handles: "Sequence[Handle[T]]") -> list[T]:
    """Wait for several transfers, which go on side by side; cancelled, stop all of them, and still wait for all."""
    await to_the_end([handle._ended for handle in handles], partial(cancel_each, handles))  # noqa: SLF001 - of this file
    return [handle.result() for handle in handles]


def cancel_each(handles: "Sequence[Handle[T]]") -> None:
    """Stop several transfers as soon as possible."""
    for handle in handles:
        handle.cancel()


class Revocable:
    """Base of transfers that can be told to stop: their task is cancelled once, and no copy begins any more."""

    def __init__(self) -> None:
        self.revoked = False
        self._copies: set[LaneCopy] = set()
        self._task: asyncio.Task[Any] | None = None

    def start(self, task: "asyncio.Task[T]", lane: Lane | None = None) -> "Handle[T]":
        """Give the task that runs this transfer, for a handle; ``lane`` is released when it has ended."""
        self._task = task

        def over(_: object) -> None:
            if lane is not None:
                lane.release()
            self._is_over()

        task.add_done_callback(over)
        return Handle(task, self.revoke)

    def _is_over(self) -> None:
        """Take note that the task has ended, however it did, before whoever waits for it does."""

    def _is_late(self) -> None:
        """Take note that its time is up, and that somebody touches memory for it yet, who may hang."""

    def revoke(self) -> None:
        """Stop as soon as possible."""
        if not self.revoked:
            self.revoked = True
            self.revoke_copies()
            if self._task is not None:  # once it has begun: cancelled before, it would never run, nor settle
                asyncio.get_running_loop().call_soon(self._task.cancel)

    def revoke_copies(self) -> None:
        """Let no copy begin that has not begun."""
        for copy in list(self._copies):
            copy.revoke()

    def watch(self, copy: LaneCopy, then: Callable[[BaseException | None], None]) -> None:
        """Count a copy as under way; ``then`` is called on the loop when it has ended, before the drain does."""

        def ended(future: "asyncio.Future[None]") -> None:
            self._copies.discard(copy)
            then(future.exception())

        self._copies.add(copy)
        copy.ended.add_done_callback(ended)

    async def drain_copies(self, deadline: float = math.inf) -> bool:
        """Wait until no copy of this transfer touches anyone's memory, however often this task is cancelled.

        Args:
            deadline: On the loop's clock. Copies that have not begun by then, after an event perhaps, are revoked; but
                what is at hand when the time is up is still copied.

        Returns:
            Whether the deadline was met.
        """
        loop = asyncio.get_running_loop()
        deadline = max(deadline, loop.time() + LAST_COPIES_S)
        in_time = True
        if self.revoked:
            self.revoke_copies()
        while self._copies:
            waiting = [copy.ended for copy in self._copies]
            try:
                await until_done(waiting, deadline if in_time else math.inf)
                if not any(each.done() for each in waiting):
                    in_time = False
                    self.revoke_copies()
                    self._is_late()
            except asyncio.CancelledError:
                self.revoked = True
                self.revoke_copies()
        return in_time
