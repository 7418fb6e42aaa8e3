"""Connections between a server and its clients: how one begins, and frames that come and go on it afterwards.

A beginning is one message each way, on the bare socket, since descriptors of slabs come with the answer; and it is as
long as what it says, so that nothing of what follows is read. Then an event loop's transport takes the socket over.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar, cast

from tiered_kv.errors import BackendUnavailableError, ConfigurationError
from tiered_kv.host import wire
from tiered_kv.host.opening import MOST_SLABS, Opened, Opening, Refused, opened_from, opening_from
from tiered_kv.host.wire import Message, WireError

M = TypeVar("M")
_MESSAGES_A_TURN: Final = 64
_MOST_OPENING_BYTES: Final = 1 << 20
_OPENED_S: Final = 10.0
"""What a client may take to read the answer to its first message."""
_READ_ON_BYTES: Final = 1 << 20
"""What one client may have sent that is not looked at yet; of a frame that is longer, the frame."""
_UNREAD_BYTES: Final = 8 << 20
"""Of answers to a client that does not read them: until it does, its requests are not read either."""


class Link(asyncio.Protocol, Generic[M]):
    """Frames on one connection. For the event loop's thread.

    Attributes:
        num_sent: Messages; any thread may look.
    """

    def __init__(
        self,
        decode: Callable[[memoryview], M],
        take: Callable[[M], None],
        lost: Callable[[], None],
        *,
        broken: Callable[[str], None],
        is_bounded: bool = False,
    ) -> None:
        """Take each message that comes with ``take``.

        Args:
            decode: Makes a message of a frame.
            take: Called with each, in order.
            lost: Called once, when the other side has closed its end and all that it had sent is taken.
            broken: Called with what was wrong, when something comes that cannot be taken. Nothing is read any more.
            is_bounded: Whether the other side may be hostile: then no more is read than is looked at, and nothing as
                long as it reads no answers. On one side alone: two that wait for each other do so for ever.
        """
        self.num_sent = 0
        self._decode = decode
        self._take = take
        self._lost = lost
        self._broken = broken
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []  # what is said to messages that came together goes together
        self._is_bounded = is_bounded
        self._is_taking = self._is_waiting = self._is_broken = self._is_over = self._is_unread = False
        self._has_ended_writing = False

    @property
    def is_open(self) -> bool:
        """Whether what is sent may arrive."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: Message) -> None:
        """Send a message; nothing if the connection has ended.

        Raises:
            ConfigurationError: It is longer than a message may be, and is not counted: it never arrives.
        """
        data = wire.frame(message)
        self.num_sent += 1
        self._unsent.append(data)
        if not self._is_taking:
            self._send_all()

    def end_writing(self) -> None:
        """Tell the other side that nothing comes any more; it goes on to be heard until it has closed its end."""
        self._send_all()
        self._has_ended_writing = True
        if self._transport is not None and self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        """Close this end, after what was sent."""
        self._send_all()
        if self._transport is not None:
            self._transport.close()

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        # Of a stream socket; uvloop's are of no class of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_UNREAD_BYTES)

    def data_received(self, data: bytes) -> None:
        """Take what is whole."""
        if self._is_broken:
            return
        self._received += data
        if not self._is_waiting:
            self._take_some()
        self._read_or_wait()

    def pause_writing(self) -> None:
        """Take no requests of a side that reads no answers."""
        self._is_unread = self._is_bounded
        self._read_or_wait()

    def resume_writing(self) -> None:
        """Go on."""
        self._is_unread = False
        if not self._is_waiting:
            self._take_some()
        self._read_or_wait()

    def _read_or_wait(self) -> None:
        """Read on, unless there is enough to look at already, or to be read over there."""
        if self._transport is None or self._transport.is_closing() or not self._is_bounded:
            return
        if self._is_unread or (self._is_waiting and len(self._received) > _READ_ON_BYTES):
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """End, once what has come is taken."""
        self._is_over, self._is_unread = True, False
        if not self._is_waiting:
            self._take_some()

    def _send_all(self) -> None:
        is_open = self._transport is not None and not self._transport.is_closing() and not self._has_ended_writing
        if self._transport is not None and is_open and self._unsent:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def _take_some(self) -> None:
        """Take the messages that are whole, a few in each turn of the loop."""
        self._is_waiting = False
        if self._is_unread:
            return
        self._is_taking = True
        at, size = 0, wire.LENGTH.size
        received = memoryview(self._received)
        try:
            for _ in range(_MESSAGES_A_TURN):
                if len(received) < at + size:
                    break
                (length,) = wire.LENGTH.unpack_from(received, at)
                if len(received) < at + size + _checked(length):
                    break
                message = self._decode(received[at + size : at + size + length])
                at += size + length
                self._take(message)
            else:
                self._is_waiting = True
        except WireError as error:
            self._is_broken = True
            self._broken(str(error))
        finally:
            received.release()
            del self._received[:at]  # whatever was raised: nothing is taken twice
            self._is_taking = False
            self._send_all()
        if self._is_broken:
            self._received.clear()
        if self._is_waiting:
            asyncio.get_running_loop().call_soon(self._take_more)
        elif self._is_over:
            self._lost()

    def _take_more(self) -> None:
        self._take_some()
        self._read_or_wait()


async def start(link: Link[M], connection: socket.socket) -> None:
    """Have ``link`` take over a connection that has begun."""
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(lambda: link, sock=connection)


# How a connection begins, on the side of a server.


async def greeted(connection: socket.socket) -> int:
    """Exchange greetings with a client; return its version, which need not be ours.

    Raises:
        WireError, OSError: It is no client.
    """
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, wire.greeting())
    return wire.version_in(await _receive(loop, connection, wire.GREETING_BYTES))


async def receive_opening(connection: socket.socket) -> Opening:
    """Return the first message of a client."""
    loop = asyncio.get_running_loop()
    (length,) = wire.LENGTH.unpack(await _receive(loop, connection, wire.LENGTH.size))
    if length > _MOST_OPENING_BYTES:
        raise WireError(f"{length} bytes to begin with, {_MOST_OPENING_BYTES} at most")
    return opening_from(await _receive(loop, connection, length))


async def send_opened(connection: socket.socket, answer: Message, descriptors: Sequence[int] = ()) -> None:
    """Answer it; whoever gets the descriptors has duplicates of them."""
    data = wire.frame(answer)
    sent = socket.send_fds(connection, [data], list(descriptors)) if descriptors else 0
    if sent < len(data):  # else the other side may have closed its end, and sending nothing fails too
        async with asyncio.timeout(_OPENED_S):
            await asyncio.get_running_loop().sock_sendall(connection, data[sent:])


async def receive_descriptors(connection: socket.socket, num: int) -> list[int]:
    """Return so many descriptors, which come with one byte and are the caller's.

    Raises:
        WireError: It are not so many.
    """
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)
    _, came, _, _ = socket.recv_fds(connection, 1, MOST_SLABS)
    if len(came) != num:
        for each in came:
            socket.close(each)
        raise WireError(f"{num} descriptors were to come, {len(came)} did")
    return came


async def _receive(loop: asyncio.AbstractEventLoop, connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        if not (part := await loop.sock_recv(connection, num_bytes - len(received))):
            raise WireError("the other side has closed the connection before it began")
        received += part
    return received


# And on the side of a client, who may block: it begins in a thread.


def hand_over(connection: socket.socket, descriptors: Sequence[int]) -> None:
    """Send duplicates of descriptors on a connection that `begin` has returned, and wait for the answer.

    Raises:
        ConfigurationError, BackendUnavailableError: As for `begin`.
    """
    came: list[int] = []
    try:
        socket.send_fds(connection, [b"\0"], list(descriptors))
        _answered(_receive_message(connection, came))
    except WireError as error:
        raise ConfigurationError(f"the server: {error}") from error
    except OSError as error:
        raise BackendUnavailableError(f"the server has not answered: {error.strerror or error}") from error
    finally:
        for each in came:
            socket.close(each)


def begin(path: str, opening: Message, timeout_s: float) -> tuple[socket.socket, Opened, list[int]]:
    """Connect, say who attaches, and return the connection, the answer, and descriptors, which are the caller's.

    Raises:
        ConfigurationError: What answers is of another version, or no server of ours.
        BackendUnavailableError: Nothing answers, or not in time.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptors: list[int] = []
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
        connection.sendall(wire.greeting())
        version = wire.version_in(_receive_now(connection, wire.GREETING_BYTES, descriptors))
        _check_version(path, version)
        connection.sendall(wire.frame(opening))
        answer = _answered(_receive_message(connection, descriptors))
    except WireError as error:
        give_back(connection, descriptors)
        raise ConfigurationError(f"{path}: {error}") from error
    except OSError as error:
        give_back(connection, descriptors)
        raise BackendUnavailableError(f"no server at {path}: {error.strerror or error}") from error
    except BaseException:
        give_back(connection, descriptors)
        raise
    return connection, answer, descriptors


def give_back(connection: socket.socket, descriptors: Sequence[int]) -> None:
    """Close a connection and descriptors that came with its beginning."""
    connection.close()
    for each in descriptors:
        socket.close(each)


def _receive_message(connection: socket.socket, descriptors: list[int]) -> Opened:
    (length,) = wire.LENGTH.unpack(_receive_now(connection, wire.LENGTH.size, descriptors))
    return opened_from(_receive_now(connection, _checked(length), descriptors))


def _answered(answer: Opened) -> Opened:
    """Raise what a server says that refuses."""
    if isinstance(answer, Refused):
        raise wire.error_of(answer.kind, answer.why)
    return answer


def _receive_now(connection: socket.socket, num_bytes: int, descriptors: list[int]) -> bytes:
    received = b""
    while len(received) < num_bytes:
        part, came, _, _ = socket.recv_fds(connection, num_bytes - len(received), MOST_SLABS)
        descriptors += came
        if not part:
            raise ConnectionAbortedError("it has closed the connection before it began")
        received += part
    return received


def _check_version(path: str, version: int) -> None:
    if version != wire.VERSION:
        raise ConfigurationError(
            f"the server at {path} speaks version {version} of the wire format, this client version {wire.VERSION}: "
            "both need the same version of tiered_kv"
        )


def _checked(length: int) -> int:
    if length > wire.MOST_FRAME_BYTES:
        raise WireError(f"a frame of {length} bytes, {wire.MOST_FRAME_BYTES} at most")
    return length
