"""How a connection between a server and a client begins: one message each way, on the bare socket.

Descriptors of slabs come with the answer. Both messages are as long as they say, so that nothing of what follows is
read: then a `Link` takes the socket over.

How a server is, asked from any process. Whoever only asks needs no torch: a readiness probe does, all the time.
"""

import asyncio
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tiered_kv.host import wire
from tiered_kv.host.protocol import MOST_SLABS, Health, Healthy, Opened, Opening, Refused, opened_from, opening_from
from tiered_kv.host.wire import Message, WireError
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError

_MOST_OPENING_BYTES: Final = 1 << 18
_NOBODY_LISTENS: Final = (FileNotFoundError, ConnectionRefusedError)
_MOST_S: Final = 1e6
"""What a step of a client's may take at most: of more than 24 days a socket knows nothing."""
_OPENED_S: Final = 10.0
"""What a client may take to read the answer to its first message."""

# On the side of a server.


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
    """Answer an opening; whoever gets the descriptors has duplicates of them."""
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


def begin(
    path: str, opening: Message, timeout_s: float, *, given: Sequence[int] = ()
) -> tuple[socket.socket, Opened, list[int]]:
    """Connect, say what for, and return the connection, the answer, and descriptors, which are the caller's.

    Args:
        path: Of the server's socket.
        opening: The first message.
        timeout_s: How long to wait at each step.
        given: Descriptors that belong to it; the server gets duplicates.

    Raises:
        ConfigurationError: What answers is of another version, or no server of ours; or the message is too long.
        BackendUnavailableError: Nothing answers, or not in time.
    """
    said = wire.frame(opening)
    if (num_bytes := len(said) - wire.LENGTH.size) > _MOST_OPENING_BYTES:  # else a server hangs up without a word
        raise ConfigurationError(f"{num_bytes} bytes of model and layout to attach with, {_MOST_OPENING_BYTES} at most")
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:  # this process has no descriptor left, for now
        raise BackendUnavailableError(f"no server at {path}: {error.strerror}") from error
    descriptors: list[int] = []
    try:
        connection.settimeout(min(timeout_s, _MOST_S))
        connection.connect(path)
        connection.sendall(wire.greeting())
        version = wire.version_in(_receive_now(connection, wire.GREETING_BYTES, descriptors))
        _check_version(path, version)
        connection.sendall(said)
        if given:
            socket.send_fds(connection, [b"\0"], list(given))
        answer = _answered(_receive_message(connection, descriptors))
    except WireError as error:
        give_back(connection, descriptors)
        raise ConfigurationError(f"{path}: {error}") from error
    except OSError as error:
        give_back(connection, descriptors)
        raise BackendUnavailableError(f"no server at {path}: {_why(path, error)}") from error
    except BaseException:  # a Ctrl-C, too: descriptors that came are closed by nobody else
        give_back(connection, descriptors)
        raise
    return connection, answer, descriptors


def give_back(connection: socket.socket, descriptors: Sequence[int]) -> None:
    """Close a connection and descriptors that came with its beginning."""
    connection.close()
    for each in descriptors:
        socket.close(each)


def _why(path: str, error: OSError) -> str:
    """Say why nobody answers there, and what to do where nobody listens."""
    told = error.strerror or str(error)
    if isinstance(error, ConnectionRefusedError) and not Path(path).is_socket():
        return f"{told}: it is no socket"
    return f"{told}: 'tiered-kv serve' starts one" if isinstance(error, _NOBODY_LISTENS) else told


def _receive_message(connection: socket.socket, descriptors: list[int]) -> Opened:
    (length,) = wire.LENGTH.unpack(_receive_now(connection, wire.LENGTH.size, descriptors))
    return opened_from(_receive_now(connection, wire.checked(length), descriptors))


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


def health_at(path: str | os.PathLike[str], *, timeout_s: float = 5.0) -> dict[str, Any]:
    """See `TieredKVServer.health_at`."""
    connection, answer, descriptors = begin(os.fspath(path), Health(), timeout_s)
    give_back(connection, descriptors)
    if not isinstance(answer, Healthy):
        raise ConfigurationError(f"{path} answered {type(answer).__name__} to a question about its health")
    return answer.facts
