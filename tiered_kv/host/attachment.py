"""A client's attachment to one server process: its memory as mapped here, its connection, and what waits for answers.

An attachment ends once and for good, with the server or with this client; whoever attaches again gets another. It says
goodbye only when no copy of this process touches the slabs any more, and no lease is open: what the server holds for
those it holds until then.

Whether a server is there is told by what it says, whatever that is about: a call that takes long says nothing of that.
"""

import asyncio
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Final, Protocol

from tiered_kv.host import protocol, wire
from tiered_kv.host.protocol import Answer, Attached, Reply
from tiered_kv.memory.device import Device
from tiered_kv.memory.host import HostSlab
from tiered_kv.values.events import Emit
from tiered_kv.values.log import log
from tiered_kv.values.loop_calls import LoopCalls

_READ_BYTES: Final = 256 << 10
_MESSAGES_A_TURN: Final = 64
_LOOK_S: Final = 0.05
"""How often a thread that reads looks whether another has something to write that did not go at once."""


class Line:
    """The messages of a client on its connection. Any thread sends and asks; the loop reads, or a thread that waits.

    A thread that waits for an answer reads for itself, that of the event loop too: so it needs no turn of it. What
    comes for others meanwhile is taken on the event loop as soon as it runs, in order.

    Attributes:
        num_heard: Messages; any thread may look.
        heard_at: When the last of them came, or this was made; likewise.
        is_open: Whether something may come; any thread may look.
    """

    def __init__(self, connection: socket.socket, loop_calls: LoopCalls, take: Callable[[Reply], None]) -> None:
        """Have ``take`` take each message, on the event loop. `start` comes next."""
        self.num_heard = 0
        self.heard_at = time.monotonic()
        self.is_open = True
        self._connection = connection
        self._loop_calls = loop_calls
        self._take = take
        self._lost: Callable[[], None] = lambda: None
        self._changed = threading.Condition()  # held for all that follows, but not while somebody waits
        self._unsent = bytearray()
        self._received = bytearray()
        self._answers: dict[int, Answer | None] = {}  # that threads wait for
        self._is_read = False  # by a thread that waits
        self._is_gathering = False  # what is said to messages that came together goes together
        self._is_writing = self._is_shut = self._is_told = False
        self._heard: deque[Reply] = deque()  # to be taken on the event loop
        self._numbers = count(1)

    @property
    def num_unsent(self) -> int:
        """How many bytes wait for the server to read those before them."""
        return len(self._unsent)

    def number(self) -> int:
        """Return a number that no other question or transfer has."""
        return next(self._numbers)

    def start(self, lost: Callable[[], None]) -> None:
        """Read from now on; ``lost`` is called once, on the event loop, when all that came from the server is taken."""
        self._lost = lost
        asyncio.get_running_loop().add_reader(self._connection, self._readable)

    def send(self, message: wire.Message) -> None:
        """Send a message; nothing if the connection has ended.

        Raises:
            ConfigurationError: It is longer than a message may be.
        """
        data = wire.frame(message)
        with self._changed:
            if self.is_open:
                self._unsent += data
                if not self._is_gathering:
                    self._write()

    def answer_to(self, number: int, message: wire.Message, timeout_s: float) -> Answer | None:
        """Ask with a message of this number, and block the thread for the answer; None if there is none in time.

        Half-way, the server is asked whether it is there at all: `heard_at` tells.

        Raises:
            ConfigurationError: The message is longer than one may be.
        """
        now = time.monotonic()
        half, until = now + timeout_s / 2, now + timeout_s
        self._answers[number] = None
        try:
            self.send(message)
            if (answer := self._awaited(number, half)) is None:
                self.send(protocol.Ping(self.number()))
                answer = self._awaited(number, until)
            return answer
        finally:
            del self._answers[number]

    def hear_no_more(self) -> None:
        """Take nothing that is yet to come; on the event loop."""
        with self._changed:
            self.is_open, self._received = False, bytearray()
            self._changed.notify_all()

    def close(self) -> None:
        """Close this end, after what was sent; on the event loop."""
        with self._changed:
            self._write()
            self.is_open = False
            if not self._is_shut:
                asyncio.get_running_loop().remove_reader(self._connection)
                self._shut()
        self._loop_calls.call(self._take_heard)

    # On the event loop.

    def _readable(self) -> None:
        with self._changed:
            if self._is_read:  # the thread that does is about to
                return
            self._receive()
        self._take_heard()

    def _take_heard(self) -> None:
        """Take what has come, a few in each turn of the loop."""
        self._is_gathering = True
        try:
            for _ in range(min(_MESSAGES_A_TURN, len(self._heard))):
                self._take(self._heard.popleft())
        finally:
            self._is_gathering = False
            with self._changed:
                self._write()
            if self._heard:
                self._loop_calls.call(self._take_heard)
            elif not self.is_open and not self._is_told:
                self._is_told = True
                if not self._is_shut:  # its end is there to be read for as long as it is open
                    asyncio.get_running_loop().remove_reader(self._connection)
                self._lost()

    def _begin_writing(self) -> None:
        if not self._is_shut:
            asyncio.get_running_loop().add_writer(self._connection, self._writable)

    def _writable(self) -> None:
        with self._changed:
            self._write()
            if not self._unsent:
                self._is_writing = False
                asyncio.get_running_loop().remove_writer(self._connection)
                self._shut()

    def _shut(self) -> None:
        """Close the connection, if nothing is to come or to go any more, once no thread reads."""
        if self.is_open or self._unsent or self._is_shut:
            return
        self._is_shut = True
        if self._is_read:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # which the thread sees
        else:
            self._connection.close()

    # In any thread that waits.

    def _awaited(self, number: int, until: float) -> Answer | None:
        while True:
            with self._changed:
                left_s = until - time.monotonic()
                if (answer := self._answers[number]) is not None or not self.is_open or left_s <= 0:
                    return answer
                if self._is_read:
                    self._changed.wait(left_s)
                    continue
                self._is_read = True
            try:
                self._read(number, until)
            finally:
                with self._changed:
                    self._is_read = False
                    if self._is_shut:
                        self._connection.close()
                    self._changed.notify_all()  # another that waits reads from here on

    def _read(self, number: int, until: float) -> None:
        """Read until the answer is there, the time is up, or nothing comes any more."""
        poll = select.poll()
        while True:
            with self._changed:
                left_s = until - time.monotonic()
                if self._answers[number] is not None or not self.is_open or left_s <= 0:
                    return
                poll.register(self._connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            poll.poll(1e3 * min(left_s, _LOOK_S) + 1)
            with self._changed:
                self._write()
                self._receive()
            if self._heard or not self.is_open:
                self._loop_calls.call(self._take_heard)

    # With the lock held, in any thread.

    def _write(self) -> None:
        try:
            while self._unsent and not self._is_shut:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            if not self._is_writing:
                self._is_writing = True
                self._loop_calls.call(self._begin_writing)
        except OSError:  # it has ended, or part of a message is lost: whoever reads, here and there, sees its end
            self._unsent.clear()
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        if not self.is_open:
            return
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        try:
            self._decode()
        except wire.WireError as error:
            log("error", "host.server_broken", error=str(error))
            data = b""
        if not data:
            self.is_open, self._received = False, bytearray()
        self._changed.notify_all()

    def _decode(self) -> None:
        """Make messages of what is whole."""
        at, size = 0, wire.LENGTH.size
        with memoryview(self._received) as received:
            while len(received) >= at + size:
                (length,) = wire.LENGTH.unpack_from(received, at)
                if len(received) < at + size + wire.checked(length):
                    break
                at += size
                reply = protocol.reply_from(received[at : at + length])
                at += length
                self.num_heard += 1
                self.heard_at = time.monotonic()
                if reply.id in self._answers and isinstance(reply, Answer):
                    self._answers[reply.id] = reply
                else:
                    self._heard.append(reply)
        del self._received[:at]


class Transferring(Protocol):
    """A load, a store or a job of this client, as its attachment knows it."""

    def take(self, reply: protocol.Reply) -> None:
        """Take what the server says about it."""

    def miss(self) -> None:
        """The server says nothing at all: who waits for its word alone is told; it may speak again."""

    def lose(self) -> None:
        """The server is gone: it says nothing any more."""


class Attachment(Line):
    """A client's attachment to one server process. For the event loop's thread, but for `ask_now` and what `Line` says.

    Attributes:
        path: Of the server's socket.
        attached: What the server said.
        slabs: By name.
        transfers: Those under way, by number.
        is_silent: Whether it was asked, and has said nothing for too long, nor since.
    """

    def __init__(
        self,
        path: str,
        connection: socket.socket,
        attached: Attached,
        descriptors: list[int],
        device: Device,
        loop_calls: LoopCalls,
        lost: Callable[["Attachment"], None],
        patience_s: float,
        *,
        emit: Emit,
    ) -> None:
        """Map the slabs, and let the server's messages come. Connection and descriptors are closed here in any case.

        ``patience_s`` is how long a server that is asked may say nothing at all. ``emit`` is told in other threads how
        the slabs are got ready.
        """
        super().__init__(connection, loop_calls, self._take_reply)
        self.path = path
        self.attached = attached
        self.slabs: dict[str, HostSlab] = {}
        self.transfers: dict[int, Transferring] = {}
        self.is_silent = False
        self._device = device
        self._on_lost = lost
        self._patience_s = patience_s
        self._num_seen = self._num_quiet = 0
        self._waiting: dict[int, asyncio.Future[Answer | None]] = {}
        self._num_copying = self._num_leases = 0
        self._is_ending = False
        try:
            for slab, fd in zip(attached.slabs, descriptors, strict=True):
                sizes = slab.num_slots, slab.stride_bytes, slab.payload_bytes
                self.slabs[slab.name] = HostSlab(*sizes, name=slab.name, fd=fd, is_read_only=attached.is_read_only)
        except BaseException:
            self._close_slabs()
            connection.close()
            raise
        finally:
            for fd in descriptors:
                os.close(fd)
        self._lockings = [device.page_lock(slab, emit=emit) for slab in self.slabs.values() if device.kind != "cpu"]
        self.start(self._lose)

    def pool_of(self, slab: str) -> str:
        """Return what workers know a slab as: another server's has another name, and is not taken for it."""
        return f"{slab}@{self.attached.token.hex()[:8]}"

    async def ask(self, make: Callable[[int], wire.Message], timeout_s: float) -> Answer | None:
        """Ask, and return the answer; None if there is none in time. Cancellation ends the wait only.

        ``timeout_s`` may be infinite: a server that says nothing at all is not waited for.
        """
        if not self.is_open or self.is_silent:
            return None
        number = self.number()
        future: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        answer: Answer | None = None
        try:
            self.send(make(number))
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s if timeout_s < math.inf else None):
                    answer = await future
        finally:
            del self._waiting[number]
            if answer is None:  # it may have come by now: what it granted is nobody's
                self.send(protocol.Cancel(number))
        return answer

    def ask_now(self, make: Callable[[int], wire.Message], timeout_s: float, since: float) -> Answer | None:
        """`ask` from any thread, which blocks meanwhile; a server that says nothing ``since`` then is silent.

        Raises:
            ConfigurationError: The question is longer than a message may be.
        """
        if not self.is_open or self.is_silent:
            return None
        number = self.number()
        if (answer := self.answer_to(number, make(number), timeout_s)) is None:
            self.send(protocol.Cancel(number))
            self.is_silent = self.is_open and self.heard_at < since
        return answer

    def look(self, every_s: float) -> None:
        """Notice a server that says nothing, though something is waited for: to be called so often while it is there.

        Looks are counted, not seconds: where this event loop is held up, the server may have answered long since.
        """
        if self._num_seen != self.num_heard or not (self._waiting or self.transfers or self.is_silent):
            self._num_seen, self._num_quiet = self.num_heard, 0
            return
        is_asked_yet = self.is_silent and self.num_unsent  # more of it would pile up, as long as nothing is read
        if not is_asked_yet:
            self.send(protocol.Ping(self.number()))  # whatever comes ends the silence
        self._num_quiet += 1
        if self._num_quiet * every_s < self._patience_s:
            return
        self.is_silent = self.is_open
        self._answer_none()
        for transfer in list(self.transfers.values()):
            transfer.miss()

    # Copies and leases, which the end of an attachment waits for.

    def copy_begins(self) -> None:
        """A copy that the server has asked for is queued."""
        self._num_copying += 1

    def copy_ended(self) -> None:
        """Take note that a copy touches no memory any more."""
        self._num_copying -= 1
        self._end_if_still()

    def lease_begins(self) -> bool:
        """Stay until `lease_ended`; False if it has ended: what was leased is somebody else's by now."""
        is_there = self.is_open and self._num_copying >= 0
        self._num_leases += is_there
        return is_there

    def lease_ended(self) -> None:
        """Nobody looks at what was leased any more."""
        self._num_leases -= 1
        self._end_if_still()

    def end(self) -> None:
        """Say goodbye, as soon as no copy is under way, nor a lease open."""
        self._is_ending = True
        self._end_if_still()

    def _end_if_still(self) -> None:
        if not self._is_ending or self._num_copying:
            return
        if self._num_leases:
            self.send(protocol.Closing())
            self._answer_none()  # nothing else will
            return
        self._num_copying = -1  # once
        self.send(protocol.Bye())
        self.close()
        self._close_slabs()
        for locking in self._lockings:  # else the memory of a server that is gone would stay
            threading.Thread(target=self._device.page_unlock, args=(locking,), daemon=True).start()

    def _close_slabs(self) -> None:
        for slab in self.slabs.values():
            slab.close()

    # From the server.

    def _take_reply(self, reply: Reply) -> None:
        self.is_silent = False
        if (transfer := self.transfers.get(reply.id)) is not None:
            try:
                transfer.take(reply)
            except Exception as error:  # noqa: BLE001 - what cannot be, else who waits for this would wait for good
                log("error", "host.server_broken", exc_info=error)
                self.hear_no_more()
        elif isinstance(reply, Answer) and (future := self._waiting.get(reply.id)) is not None:
            _answer(future, reply)
        elif isinstance(reply, protocol.Copy):  # of a transfer that is over here
            self.send(protocol.Copied(reply.id, reply.number, protocol.REVOKED))

    def _lose(self) -> None:
        """Nothing comes from the server any more."""
        self._answer_none()
        for transfer in list(self.transfers.values()):
            transfer.lose()
        self._on_lost(self)
        self.end()

    def _answer_none(self) -> None:
        for future in self._waiting.values():
            _answer(future, None)


def _answer(future: "asyncio.Future[Answer | None]", answer: Answer | None) -> None:
    if not future.done():
        future.set_result(answer)
