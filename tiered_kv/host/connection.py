"""A client's connection to whatever server listens on a socket: it attaches, asks, and attaches again after a loss.

While no server is there, or it does not answer in time, questions have no answer; nothing raises for that. `Attempts`
connects in a thread, so that nobody waits for a server that hangs. `FarSide` is what the client has in its own process
while it is open, whatever server there is: memory, a device, and transfers.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, Protocol

from typing_extensions import override

from tiered_kv.cache.checks import check_are_keys, check_asyncio, check_group, check_keys, check_one_rank
from tiered_kv.cache.seat import EngineSide
from tiered_kv.host import handshake, wire
from tiered_kv.host.attachment import Attachment
from tiered_kv.host.protocol import Answer, Attach, Attached, Failed, Opened
from tiered_kv.memory.codec import Codec, make_codec
from tiered_kv.memory.device import Device
from tiered_kv.memory.gpu import DeviceLike, make_device
from tiered_kv.memory.lanes import Lanes
from tiered_kv.tiers.tasks import Tasks, WorkerPool, in_a_thread
from tiered_kv.tiers.tier import MemoryTier
from tiered_kv.transfers.handles import Handle
from tiered_kv.transfers.submissions import Ticket
from tiered_kv.transfers.swap import SwapSide, SwapSpace
from tiered_kv.values.errors import (
    BackendUnavailableError,
    ClosedError,
    ConfigurationError,
    LayoutMismatchError,
    TieredKVError,
    in_words,
)
from tiered_kv.values.events import DeviceFailed, Emit
from tiered_kv.values.integers import as_int
from tiered_kv.values.keys import BlockKeys, Shard
from tiered_kv.values.layout import KVGroup, KVLayout
from tiered_kv.values.log import log
from tiered_kv.values.loop_calls import LoopCalls

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 2.0
_LOOK_S: Final = 0.5
"""How often to look whether a server has said what is waited for."""
_MOST_UNSENT: Final = 1 << 22
"""Bytes that a server has not read yet; beyond these, messages that it need not hear are not sent."""
_NOW_S: Final = 1.0
"""What a call that blocks its thread may take at most."""
Begun = tuple[socket.socket, Attached, list[int]]
Begin = Callable[..., tuple[socket.socket, Opened, list[int]]]
"""Does what `handshake.begin` does, perhaps by other means than a socket."""


class Follower(Protocol):
    """What has to do something whenever a server is there anew."""

    def attached(self, there: Attachment) -> None:
        """A server is there."""

    def close(self) -> None:
        """The client closes: what waits for a server waits no more."""


@dataclass
class FarGroup:
    """A KV group of a client, with all that is needed to bind memory to it."""

    group: KVGroup
    codec: Codec | None
    h2d: Lanes
    d2h: Lanes
    loop_calls: LoopCalls
    gpu: MemoryTier | None = None


class FarSide(EngineSide):
    """What a client has in its own process while a server keeps its blocks. `lifetime` ends it.

    Attributes:
        attached: What the last server has said that was there. Any thread may look.
    """

    reads_direct: ClassVar = False

    def __init__(
        self,
        device: DeviceLike,
        layout: KVLayout,
        shards: Sequence[Shard],
        emit: Emit,
        attached: Attached,
        loop_calls: LoopCalls,
    ) -> None:
        """Begin, as the first server says that it keeps blocks."""
        codecs = [make_codec(attached.codec, each) for each in layout.groups]  # first: with an unknown one nothing is
        lifetime = AsyncExitStack()
        self.device = device if isinstance(device, Device) else make_device(device)
        if self.device is not device:
            lifetime.push_async_callback(in_a_thread, loop_calls, self.device.close, 1.0)
        kind = self.device.kind
        self.device.on_failure = lambda error: loop_calls.call(emit, DeviceFailed(kind, in_words(error)))
        h2d, d2h = Lanes(self.device, "h2d"), Lanes(self.device, "d2h")
        lifetime.callback(h2d.close)
        lifetime.callback(d2h.close)
        super().__init__(shards, Tasks(), loop_calls, lifetime)
        lifetime.callback(self.bindings.forget)
        self.attached = attached
        self.loop_calls = loop_calls
        self.emit = emit
        self.groups = [
            FarGroup(each, codec, h2d, d2h, loop_calls) for each, codec in zip(layout.groups, codecs, strict=True)
        ]

    @override
    def of_rank(self, group: int) -> FarGroup:
        check_one_rank(self.shards)
        return self.group(group)

    @override
    def swap_space(self, group: int) -> SwapSpace:
        """The slots are in this process's memory, and there whatever the server does."""
        self.of_rank(group)
        side = SwapSide(self.device, self.loop_calls, self.emit, self.attached.window_bytes)
        caches = self.bindings.caches_of(group)
        return self.swaps.of(group, side, caches, self.attached.swap_space_bytes, self.lifetime)

    @override
    def deadline(self, deadline_s: float | None) -> float:
        return self.loop.time() + (self.attached.load_timeout_s if deadline_s is None else deadline_s)

    def group(self, group: int) -> FarGroup:
        """Return a KV group.

        Raises:
            ConfigurationError: The layout has none of this number.
        """
        check_group(group := as_int("a KV group's number", group), len(self.groups))
        return self.groups[group]

    def check(self, keys: BlockKeys) -> None:
        """Raise unless these are keys of this layout, of one prompt: others have no form on the wire."""
        check_are_keys(keys, of_one_prompt=True)
        check_keys(keys, self.group(keys.group).group)

    def attach(self, attached: Attached) -> None:
        """Count on what a server has said; raise unless it keeps blocks as memory is bound for here."""
        now, was = attached.codec, self.attached.codec
        if now != was:
            raise ConfigurationError(f"the server keeps blocks as {now!r} now, it was {was!r}")
        for slab in attached.slabs:
            group = self.group(slab.group)
            wanted = group.codec.stored_bytes if group.codec else group.group.payload_bytes
            if slab.payload_bytes != wanted:
                raise LayoutMismatchError(f"the server's slots hold {slab.payload_bytes} bytes, a block has {wanted}")
        self.attached = attached


class Connection:
    """A client's connection to whichever server is there. For the event loop's thread, but for what says otherwise.

    Attributes:
        path: Of the server's socket.
        timeout_s: What a question without a time of its own may take.
        there: The attachment to the server that is there, if one is. Any thread may look.
        begin: Begins each connection to a server. Any thread may call.
    """

    def __init__(
        self,
        path: str,
        opening: Attach,
        make_side: Callable[[Attached, LoopCalls], FarSide],
        timeout_s: float,
        *,
        begin: Begin = handshake.begin,
    ) -> None:
        """Prepare a connection; `open` comes next.

        Args:
            path: See the attribute.
            opening: Who attaches.
            make_side: Makes what the client has in this process, when the first server says how it keeps blocks.
            timeout_s: See the attribute.
            begin: See the attribute.
        """
        self.path = path
        self.timeout_s = timeout_s
        self.there: Attachment | None = None
        self._opening = opening
        self.begin = begin
        self._make_side = make_side
        self._here: FarSide | None = None
        self._is_opening = False
        self._closing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._tasks = Tasks()
        self._followers: list[Follower] = []

    def follow(self, follower: Follower) -> None:
        """Have a follower told of each server from now on; on the event loop."""
        self._followers.append(follower)

    @property
    def attached(self) -> Attached | None:
        """What the last server has said that was there, if one was. Any thread may look."""
        return self._here.attached if self._here is not None else None

    # Questions.

    def here(self, *, anywhere: bool = False) -> FarSide:
        """Return this process's side, to a call on its event loop, or from ``anywhere``.

        Raises:
            ClosedError: It is not open yet, or not any more.
            ConfigurationError: This is another thread or event loop.
        """
        if self._here is None or (self._is_opening and self.there is None):
            raise ClosedError("this TieredKV is not open yet: use it with 'async with'")
        if self._closing is not None:
            raise ClosedError("this TieredKV is closed")
        self._here.check_loop(anywhere=anywhere)
        return self._here

    def send(self, message: wire.Message) -> None:
        """Say what has no answer. Any thread may."""
        if (there := self.there) is not None:  # which the event loop may change meanwhile
            there.send(message)

    def note(self, message: wire.Message) -> None:
        """Say what need not be heard: nothing to a server that says nothing, or has much to read yet."""
        if (there := self.there) is not None and not there.is_silent and there.num_unsent < _MOST_UNSENT:
            there.send(message)

    async def ask(self, make: Callable[[int], wire.Message], timeout_s: float | None = None) -> Answer | None:
        """Ask the server; None if it is away. What is wrong with the call raises."""
        self.here()
        if self.there is None:
            return None
        return _raised(await self.there.ask(make, self.timeout_s if timeout_s is None else timeout_s))

    def ask_now(self, make: Callable[[int], wire.Message], since: float, *, anywhere: bool = False) -> Answer | None:
        """`ask` that blocks its thread, a second from ``since`` on at most; any thread may call it from ``anywhere``.

        One call may ask several times: whatever the server has said ``since`` then shows that it is there.
        """
        self.here(anywhere=anywhere)
        there, left_s = self.there, since + min(self.timeout_s, _NOW_S) - time.monotonic()
        return _raised(there.ask_now(make, left_s, since)) if there is not None and left_s > 0.0 else None

    def poll(self, timeout_s: float) -> list[tuple[Ticket[Any], Any]]:
        """Return the results of submissions that have ended, in any thread, after the end too."""
        return self._here.submissions.poll(timeout_s) if self._here else []

    # Opening and closing.

    async def open(self) -> None:
        """Attach.

        Raises:
            ConfigurationError: The server refuses this client, or is of another version.
            BackendUnavailableError: There is none, within the time of a call.
        """
        if self._here is not None or self._is_opening:
            raise ClosedError("a TieredKV is opened once; make another")
        check_asyncio()
        self._is_opening = True
        loop_calls = LoopCalls(asyncio.get_running_loop())
        self._attempts = Attempts(self.path, self._opening, self.timeout_s, loop_calls, begin=self.begin)
        try:
            begun = await self._attempts.begin_in_time()
            try:
                self._here = self._make_side(begun[1], loop_calls)
            except BaseException:
                handshake.give_back(begun[0], begun[2])
                raise
            self._attach(self._here, begun)
        except BaseException:
            try:
                await self._end()
            finally:
                self._here = self._closing = None  # it may be opened again
            raise
        finally:
            self._is_opening = False
        self._tasks.keep_running(partial(self._stay_attached, self._here), "stay attached")

    async def aclose(self) -> None:
        """Say goodbye, once no copy is under way."""
        here = self._here
        if here is None or (self._closing is not None and self._closing.done()):
            return
        here.check_loop()
        await self._end()

    async def _end(self) -> None:
        """End all that there is, in a task of its own: a cancellation is raised when that is done."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), name="close")
        await Handle(self._closing, lambda: None)

    async def _close(self) -> None:
        here = self._here
        if here is not None:
            here.submissions.close()
        for follower in self._followers:
            follower.close()
        await self._tasks.aclose(0.0)
        self._attempts.close()
        if self.there is not None:
            for transfer in list(self.there.transfers.values()):
                transfer.lose()  # what is being copied is waited for with the device
            self.there.end()
        if here is not None:
            await here.tasks.aclose(1.0)
            await here.lifetime.aclose()

    # Attaching.

    def _attach(self, here: FarSide, begun: Begun) -> None:
        connection, attached, descriptors = begun
        try:
            here.attach(attached)
        except ConfigurationError:
            handshake.give_back(connection, descriptors)
            raise
        connection.settimeout(0.0)
        self.there = there = Attachment(
            self.path, connection, attached, descriptors, here.device, here.loop_calls, self._lost, self.timeout_s,
            emit=lambda event: here.loop_calls.call(here.emit, event),
        )  # fmt: skip
        for follower in self._followers:
            follower.attached(there)

    async def _stay_attached(self, here: FarSide) -> None:
        """Attach again whenever the server is gone, and ask one that is silent whether it is there."""
        pause_s, look_s = FIRST_PAUSE_S, min(_LOOK_S, self.timeout_s / 4)
        while True:
            if self.there is None:
                try:
                    self._attach(here, await self._attempts.begin())
                    pause_s = FIRST_PAUSE_S
                    log("info", "host.attached_again", path=self.path)
                except (TieredKVError, OSError) as error:  # whatever it is, the next attempt may go well
                    if not isinstance(error, BackendUnavailableError):
                        log("error", "host.not_attached", path=self.path, error=str(error))
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            self.there.look(look_s)
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(look_s):
                    await self._changed.wait()

    def _lost(self, there: Attachment) -> None:
        if self.there is there:
            self.there = None
            self._changed.set()
            if self._closing is None:
                log("warning", "host.server_lost", path=self.path)


class Attempts:
    """The attempts of one client to attach to a server, one at a time. For the event loop's thread."""

    def __init__(
        self, path: str, opening: Attach, timeout_s: float, loop_calls: LoopCalls, *, begin: Begin = handshake.begin
    ) -> None:
        """Say ``opening`` to whoever listens at ``path``; each attempt may take ``timeout_s``."""
        self._said = path, opening, timeout_s
        self._begin = begin
        self._thread = WorkerPool("attach", 1, loop_calls)

    async def begin(self) -> Begun:
        """Connect; what comes of it is the caller's to close.

        Raises:
            ConfigurationError: The server refuses this client, or is of another version.
            BackendUnavailableError: There is none, or it does not answer.
        """
        attempt = _Attempt(self._begin)
        try:
            connection, attached, descriptors = await self._thread.run(attempt.make, *self._said)
        except asyncio.CancelledError:
            attempt.give_up()
            raise
        if not isinstance(attached, Attached):
            handshake.give_back(connection, descriptors)
            raise ConfigurationError(f"the server answered {type(attached).__name__} to a client that attaches")
        if len(descriptors) != len(attached.slabs):
            handshake.give_back(connection, descriptors)
            raise ConfigurationError(f"the server has {len(attached.slabs)} slabs and {len(descriptors)} descriptors")
        return connection, attached, descriptors

    async def begin_in_time(self) -> Begun:
        """`begin`, also with a server that has yet to come, within the time of one attempt."""
        loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
        deadline, is_last = loop.time() + self._said[2], False
        while True:
            try:
                return await self.begin()
            except BackendUnavailableError:
                left_s = deadline - loop.time()
                if is_last or left_s <= 0.0:
                    raise
            is_last = left_s <= pause_s
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def close(self) -> None:
        """Make no more; what one brings that is under way was given up by who awaited it."""
        self._thread.close()


class _Attempt:
    """An attempt to attach. When it ends, who awaited it may have gone, and the event loop too."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._lock = threading.Lock()
        self._begun: tuple[socket.socket, Opened, list[int]] | None = None
        self._is_given_up = False

    def make(self, path: str, opening: Attach, timeout_s: float) -> tuple[socket.socket, Opened, list[int]]:
        """Connect, and say who attaches; in a thread."""
        begun = self._begin(path, opening, timeout_s)
        with self._lock:
            self._begun, is_wanted = begun, not self._is_given_up
        if not is_wanted:
            handshake.give_back(begun[0], begun[2])
        return begun

    def give_up(self) -> None:
        """Have what comes of it go back, now or as soon as it comes."""
        with self._lock:
            begun, self._is_given_up = self._begun, True
        if begun is not None:
            handshake.give_back(begun[0], begun[2])


def _raised(answer: Answer | None) -> Answer | None:
    """Raise what the caller has done wrong; a server that cannot answer is one that is away."""
    if isinstance(answer, Failed):
        error = wire.error_of(answer.kind, answer.why)
        if isinstance(error, ConfigurationError):
            raise error
        return None
    return answer
