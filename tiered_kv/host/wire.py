"""How a server and its clients encode what they say: MessagePack in frames, by msgspec; see ``docs/format.md``.

Each side begins with a greeting that no version changes, so that two versions can at least name each other. Nothing
that arrives is trusted: a frame has a bound, and each message is checked against its type when it is decoded.
"""

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.errors import (
    BackendUnavailableError,
    CapacityError,
    ClosedError,
    ConfigurationError,
    LayoutMismatchError,
    TieredKVError,
)

try:
    import msgspec
    from msgspec import Struct
except ModuleNotFoundError as missing:
    raise ConfigurationError("a cache for a host needs msgspec: pip install 'tiered-kv[host]'") from missing

VERSION: Final = 5
"""Of all that follows the greeting. Both sides must have the same."""
MOST_FRAME_BYTES: Final = 32 << 20
"""A batch of half a million keys; what is longer ends the connection."""
_GREETING: Final = struct.Struct("<6sH")
_MAGIC: Final = b"KVHOST"
GREETING_BYTES: Final = _GREETING.size
LENGTH: Final = struct.Struct("<I")

Ids = NDArray[np.int64]


class Field(Struct, frozen=True, array_like=True):
    """Base of what a field of a message may be: an array of fields of its own."""


class Message(Struct, frozen=True, array_like=True):
    """Base of all messages: an array of its tag and its fields."""


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=str)  # what a backend says of itself may be anything


class WireError(Exception):
    """What came is none of ours: whoever reads it ends the connection."""


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


def frame(message: Message) -> bytes:
    """Encode a message, with its length before it.

    Raises:
        ConfigurationError: It is longer than the other side would take.
    """
    body = _encoder.encode(message)
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
        except msgspec.DecodeError as error:  # one that does not fit its type included
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
