"""A client's attachment to one server process: its memory as mapped here, its connections, and what waits for answers.

An attachment ends once and for good, with the server or with this client; whoever attaches again gets another. It says
goodbye only when no copy of this process touches the slabs any more: what the server holds for us it holds until then.
"""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from tiered_kv.host import handshake, protocol, wire
from tiered_kv.host.protocol import Attached, Join
from tiered_kv.host.wire import Link
from tiered_kv.memory.device import Device
from tiered_kv.memory.host import HostSlab
from tiered_kv.values.log import log

_JOIN_S: Final = 1.0


class Transferring(Protocol):
    """A load, a store or a job of this client, as its attachment knows it."""

    def take(self, reply: protocol.Reply) -> None:
        """Take what the server says about it."""

    def lose(self) -> None:
        """The server is gone: it says nothing any more."""


class Attachment:
    """One attachment. For the event loop's thread, but for `ask_now`.

    Attributes:
        path: Of the server's socket.
        attached: What the server said.
        slabs: By name.
        transfers: Those under way, by number.
        is_open: Whether the server may answer.
        is_silent: Whether it has not answered in time, and has said nothing since.
    """

    def __init__(
        self,
        path: str,
        connection: socket.socket,
        attached: Attached,
        descriptors: list[int],
        device: Device,
        lost: Callable[["Attachment"], None],
        patience_s: float,
    ) -> None:
        """Map the slabs; `start` comes next. The connection is closed here, whatever happens; descriptors too.

        ``patience_s`` is how long a server that is asked may say nothing at all.
        """
        self.path = path
        self.attached = attached
        self.slabs: dict[str, HostSlab] = {}
        self.transfers: dict[int, Transferring] = {}
        self.is_open = True
        self.is_silent = False
        self._device = device
        self._connection = connection
        self._on_lost = lost
        self._patience_s = patience_s
        self._num_heard = 0
        self._last_number = 0
        self._waiting: dict[int, asyncio.Future[protocol.Answer]] = {}
        self._num_copying = 0
        self._is_ending = False
        self._door = _Door(path, attached.token)
        try:
            for slab, fd in zip(attached.slabs, descriptors, strict=True):
                sizes = slab.num_slots, slab.stride_bytes, slab.payload_bytes
                self.slabs[slab.name] = HostSlab.attach(fd, *sizes, name=slab.name, is_read_only=attached.is_read_only)
        except BaseException:
            self._close_slabs()
            connection.close()
            raise
        finally:
            for fd in descriptors:
                os.close(fd)
        self._lockings = [device.page_lock(slab) for slab in self.slabs.values()] if device.kind != "cpu" else []
        self._link: Link[protocol.Reply] = Link(protocol.reply_from, self._take, self._lose, broken=self._break)

    def pool_of(self, slab: str) -> str:
        """Return what workers know a slab as: another server's has another name, and is not taken for it."""
        return f"{slab}@{self.attached.token.hex()[:8]}"

    async def start(self) -> None:
        """Let the server's messages come."""
        await wire.start(self._link, self._connection)

    def send(self, message: wire.Message) -> None:
        """Send what needs no answer, or has one that `transfers` takes."""
        self._link.send(message)

    def number(self) -> int:
        """Return a number that no other question or transfer has."""
        self._last_number += 1
        return self._last_number

    async def ask(self, make: Callable[[int], wire.Message], timeout_s: float) -> protocol.Answer | None:
        """Ask, and return the answer; None if there is none in time. Cancellation ends the wait only."""
        if not self.is_open or self.is_silent:
            return None
        number = self.number()
        future: asyncio.Future[protocol.Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        answer: protocol.Answer | None = None
        try:
            self._link.send(make(number))
            async with asyncio.timeout(timeout_s):
                if timeout_s > self._patience_s:
                    await self._while_it_speaks(future)
                answer = await future
        except TimeoutError:
            self.is_silent = self.is_open
        finally:
            del self._waiting[number]
            if answer is None:  # it may have come by now: what it granted is nobody's
                self._link.send(protocol.Cancel(number))
        return answer

    def ask_now(self, make: Callable[[int], wire.Message], timeout_s: float) -> protocol.Answer | None:
        """`ask` from any thread, which blocks meanwhile.

        Raises:
            ConfigurationError: The question is longer than a message may be.
        """
        if not self.is_open or self.is_silent:
            return None
        return self._door.ask(make, timeout_s, self._link.num_sent)

    async def _while_it_speaks(self, future: asyncio.Future[protocol.Answer]) -> None:
        """Wait for an answer that may take long, but not for a server that hangs: that says nothing to any question."""
        half_s = self._patience_s / 2
        while not (await asyncio.wait([future], timeout=half_s))[0]:
            num_heard = self._num_heard
            self._link.send(protocol.ping(self.number()))
            if not (await asyncio.wait([future], timeout=half_s))[0] and self._num_heard == num_heard:
                raise TimeoutError

    # Copies, which the end of an attachment waits for.

    def copy_begins(self) -> None:
        """A copy that the server has asked for is queued."""
        self._num_copying += 1

    def copy_ended(self) -> None:
        """It touches no memory any more."""
        self._num_copying -= 1
        self._end_if_still()

    def end(self) -> None:
        """Say goodbye, as soon as no copy is under way."""
        self._is_ending = True
        self._end_if_still()

    def _end_if_still(self) -> None:
        if not self._is_ending or self._num_copying:
            return
        self._num_copying = -1  # once
        self._link.send(protocol.Bye())
        self._link.close()
        self._door.close()
        self._close_slabs()
        for locking in self._lockings:  # else the memory of a server that is gone would stay
            threading.Thread(target=self._device.page_unlock, args=(locking,), daemon=True).start()

    def _close_slabs(self) -> None:
        for slab in self.slabs.values():
            slab.close()

    # From the server.

    def _take(self, reply: protocol.Reply) -> None:
        self.is_silent = False
        self._num_heard += 1
        if (transfer := self.transfers.get(reply.id)) is not None:
            transfer.take(reply)
        elif isinstance(reply, protocol.Answer) and (future := self._waiting.get(reply.id)) is not None:
            if not future.done():
                future.set_result(reply)
        elif isinstance(reply, protocol.Copy):  # of a transfer that is over here
            self._link.send(protocol.Copied(reply.id, reply.number, protocol.REVOKED))

    def _break(self, why: str) -> None:
        log("error", "host.server_broken", error=why)
        self._lose()

    def _lose(self) -> None:
        """Nothing comes from the server any more."""
        if not self.is_open:
            return
        self.is_open = False
        for future in self._waiting.values():
            if not future.done():
                future.set_result(protocol.Failed(0, "BackendUnavailableError", "the server is gone"))
        for transfer in list(self.transfers.values()):
            transfer.lose()
        self._on_lost(self)
        self.end()


class _Door:
    """A second connection, for threads that wait. It is opened when it is first used."""

    def __init__(self, path: str, token: bytes) -> None:
        self._path = path
        self._token = token
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._last_number = 0  # downwards: numbers above are the other connection's
        self._is_closed = False

    def ask(self, make: Callable[[int], wire.Message], timeout_s: float, after: int) -> protocol.Answer | None:
        until = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            return None
        try:
            self._last_number -= 1
            asked = wire.frame(protocol.After(after)) + wire.frame(make(self._last_number))
            return None if self._is_closed else self._answer(asked, until)
        finally:
            self._lock.release()

    def _answer(self, asked: bytes, until: float) -> protocol.Answer | None:
        try:
            connection = self._open(until)
            connection.settimeout(max(0.001, until - time.monotonic()))
            connection.sendall(asked)
            while True:
                (length,) = wire.LENGTH.unpack(_receive(connection, wire.LENGTH.size, until))
                reply = protocol.reply_from(_receive(connection, length, until))
                if isinstance(reply, protocol.Answer) and reply.id == self._last_number:
                    return reply  # else a late one, to a question that was given up
        except Exception as error:  # noqa: BLE001 - whatever it is, the next question tries again
            log("warning", "host.question_failed", error=str(error) or type(error).__name__)
            self._drop()
            return None

    def close(self) -> None:
        self._is_closed = True
        if self._lock.acquire(blocking=False):  # else the thread that has it is told by the server's end
            self._drop()
            self._lock.release()

    def _open(self, until: float) -> socket.socket:
        if self._connection is None:
            timeout_s = min(_JOIN_S, max(0.001, until - time.monotonic()))
            self._connection, _, _ = handshake.begin(self._path, Join(self._token), timeout_s)
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _receive(connection: socket.socket, num_bytes: int, until: float) -> bytes:
    received = bytearray()
    while len(received) < num_bytes:
        connection.settimeout(max(0.001, until - time.monotonic()))
        if not (part := connection.recv(num_bytes - len(received))):
            raise wire.WireError("the server is gone")
        received += part
    return bytes(received)
