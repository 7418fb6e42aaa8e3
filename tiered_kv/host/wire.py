"""How a server and its clients encode what they say: MessagePack in frames, by msgspec; see ``docs/format.md``.

Each side begins with a greeting that no version changes, so that two versions can at least name each other. Nothing
that arrives is trusted: a frame has a bound, and each message is checked against its type when it is decoded.

Frames that come and go on a connection between a server and a client, once it has begun (`handshake`).
"""

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Final, Generic, TypeVar, cast

import numpy as np

from tiered_kv.values.errors import (
    BackendUnavailableError,
    CapacityError,
    ClosedError,
    ConfigurationError,
    LayoutMismatchError,
    TieredKVError,
)
from tiered_kv.values.integers import Ids
from tiered_kv.values.keys import DIGEST_BYTES

try:
    import msgspec
    from msgspec import Struct
except ModuleNotFoundError as missing:
    raise ConfigurationError("a cache for a host needs msgspec: pip install 'tiered-kv[host]'") from missing

VERSION: Final = 15
"""Of all that follows the greeting. Both sides must have the same."""
MOST_FRAME_BYTES: Final = 32 << 20
"""A batch of a million keys; what is longer ends the connection."""
_GREETING: Final = struct.Struct("<6sH")
_MAGIC: Final = b"KVHOST"
GREETING_BYTES: Final = _GREETING.size
_LONGEST_PATH: Final = 107
LENGTH: Final = struct.Struct("<I")

Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
"""What names weights or a salt: it is kept, and so nothing longer may pass for one."""


class Field(Struct, frozen=True, array_like=True):
    """Base of what a field of a message may be: an array of fields of its own."""


class Message(Struct, frozen=True, array_like=True):
    """Base of all messages: an array of its tag and its fields."""


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=str)  # what a backend says of itself may be anything


class WireError(Exception):
    """What came is none of ours: whoever reads it ends the connection."""


def check_socket(path: str | os.PathLike[str]) -> None:
    """Refuse a path that no socket can have, before anybody waits for a server there.

    Raises:
        ConfigurationError: It is too long, has a zero byte, or is no path at all.
    """
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:  # half a character, which the system has no bytes for
        name = b"\0"
    if len(name) > _LONGEST_PATH or b"\0" in name:
        raise ConfigurationError(
            f"the path of a socket has {_LONGEST_PATH} bytes at most, and no zero byte nor half a character: "
            f"{str(path)!r:.200}"
        )


def greeting() -> bytes:
    """Return what each side sends first."""
    return _GREETING.pack(_MAGIC, VERSION)


def version_in(greeting: bytes) -> int:
    """Return the version that the other side has.

    Raises:
        WireError: It is something else than a server or client of ours.
    """
    magic, version = _GREETING.unpack(greeting)
    if magic != _MAGIC:
        raise WireError(f"the other side is no tiered_kv: it began with {greeting!r}")
    return int(version)


def encoded(value: object) -> bytes:
    """Encode a value; half a character in a text, of an error about a file of any name, say, as Python writes it."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(value, builtin_types=(bytes, bytearray, memoryview), enc_hook=str)
        return _encoder.encode(_in_whole_characters(plain))


def _in_whole_characters(value: object) -> object:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {_in_whole_characters(key): _in_whole_characters(each) for key, each in value.items()}
        case list() | tuple():
            return tuple(map(_in_whole_characters, value))  # which may be a name in a dict
    return value


def frame(message: Message) -> bytes:
    """Encode a message, with its length before it.

    Raises:
        ConfigurationError: It is longer than the other side would take.
    """
    body = encoded(message)
    if len(body) > MOST_FRAME_BYTES:
        raise ConfigurationError(
            f"a message of {len(body)} bytes, {MOST_FRAME_BYTES} at most: give fewer keys to a call"
        )
    return LENGTH.pack(len(body)) + body


def checked(length: int) -> int:
    """Return the length of a frame that is about to come.

    Raises:
        WireError: It is longer than one may be.
    """
    if length > MOST_FRAME_BYTES:
        raise WireError(f"a frame of {length} bytes, {MOST_FRAME_BYTES} at most")
    return length


def decoder(messages: Any) -> Callable[[bytes | memoryview], Any]:  # noqa: ANN401 - a union of classes has no type
    """Return what decodes one of these messages.

    It raises `WireError` of anything else.
    """
    decode = msgspec.msgpack.Decoder(messages).decode

    def decoded(body: bytes | memoryview) -> Any:  # noqa: ANN401 - one of them
        try:
            return decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:  # of a text that is none, a ValueError
            raise WireError(f"a message that cannot be: {error}") from error

    return decoded


def as_bytes(ids: Ids) -> bytes:
    """Encode ids."""
    return ids.astype("<i8", copy=False).tobytes()


def as_ids(encoded: bytes) -> Ids:
    """Decode ids; read-only.

    Raises:
        WireError: It is no number of ids.
    """
    if len(encoded) % 8:
        raise WireError(f"{len(encoded)} bytes are no number of ids")
    return np.frombuffer(encoded, "<i8").astype(np.int64, copy=False)


_ERRORS: Final[Mapping[str, type[TieredKVError]]] = {
    each.__name__: each
    for each in (ConfigurationError, LayoutMismatchError, CapacityError, ClosedError, BackendUnavailableError)
}


def kind_of(error: TieredKVError) -> str:
    """Name an error's class as the other side knows it."""
    return next(name for kind in type(error).__mro__ for name in [kind.__name__] if name in (*_ERRORS, "TieredKVError"))


def error_of(kind: str, why: str) -> TieredKVError:
    """Make the error again."""
    return _ERRORS.get(kind, TieredKVError)(why)


M = TypeVar("M")
_MESSAGES_A_TURN: Final = 8
"""Of one client: to begin a load takes up to a millisecond, and the others wait for as long."""
_BYTES_A_TURN: Final = 1 << 20
"""Of one client: after a message that goes beyond the others have a turn, as each key in it takes time."""
_READ_ON_BYTES: Final = 1 << 20
"""What one client may have sent that is not looked at yet; of a frame that is longer, the frame."""
_UNREAD_BYTES: Final = 8 << 20
"""Of answers to a client that does not read them: until it does, its requests are not read either."""


class Link(asyncio.Protocol, Generic[M]):
    """Frames on one connection of a server, whose other side may be hostile. For the event loop's thread.

    No more is read than is looked at, and nothing as long as the other side reads no answers.
    """

    def __init__(
        self,
        decode: Callable[[memoryview], M],
        take: Callable[[M], None],
        lost: Callable[[], None],
        *,
        broken: Callable[[str], None],
    ) -> None:
        """Take each message that comes with ``take``.

        Args:
            decode: Makes a message of a frame.
            take: Called with each, in order.
            lost: Called once, when the other side has closed its end and all that it had sent is taken.
            broken: Called with what was wrong, when something comes that cannot be taken. Nothing is read any more.
        """
        self._decode = decode
        self._take = take
        self._lost = lost
        self._broken = broken
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._connection: socket.socket | None = None
        self._unsent: list[bytes] = []  # what is said to messages that came together goes together
        self._is_taking = self._is_waiting = self._is_broken = self._is_over = self._is_unread = False
        self._has_ended_writing = False

    async def start(self, connection: socket.socket) -> None:
        """Take over a connection that has begun."""
        self._connection = connection
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)
        except BaseException:  # cancelled: not every event loop tells of its end then, and uvloop's never knows it
            self.connection_lost(None)
            raise

    @property
    def is_open(self) -> bool:
        """Whether what is sent may arrive."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: Message) -> None:
        """Send a message; nothing if the connection has ended.

        Raises:
            ConfigurationError: It is longer than a message may be.
        """
        self._unsent.append(frame(message))
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
        if self._is_over:
            return
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
        self._is_unread = True
        self._read_or_wait()

    def resume_writing(self) -> None:
        """Go on."""
        self._is_unread = False
        if not self._is_waiting:
            self._take_some()
        self._read_or_wait()

    def _read_or_wait(self) -> None:
        """Read on, unless there is enough to look at already, or to be read over there."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._is_unread or (self._is_waiting and len(self._received) > _READ_ON_BYTES):
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """End, once what has come is taken; a second time does nothing."""
        if self._is_over:
            return
        if exc is not None and self._connection is not None and not self._is_broken:
            self._read_rest(self._connection)
        self._is_over, self._is_unread, self._transport, self._connection = True, False, None, None
        if not self._is_waiting:
            self._take_some()

    def _read_rest(self, connection: socket.socket) -> None:
        """Read what had come when a write failed, which no transport does: the other side may have said goodbye."""
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RD)  # whoever writes on is not read for as long
            while data := connection.recv(_READ_ON_BYTES):
                self._received += data

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
        at, size = 0, LENGTH.size
        received = memoryview(self._received)
        try:
            for _ in range(_MESSAGES_A_TURN):
                if len(received) < at + size:
                    break
                (length,) = LENGTH.unpack_from(received, at)
                if len(received) < at + size + checked(length):
                    break
                with received[at + size : at + size + length] as body:  # an error that is kept would keep it too
                    message = self._decode(body)
                at += size + length
                self._take(message)
                if at >= _BYTES_A_TURN:
                    self._is_waiting = True
                    break
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
            self._received.clear()  # of a frame that will not be whole: who else knows this link may know it for long
            self._lost()

    def _take_more(self) -> None:
        self._take_some()
        self._read_or_wait()
