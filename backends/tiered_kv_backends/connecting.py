"""Connections to hosts by their names, which only threads of ours ask for.

The event loop's own threads are the program's: a few questions of a resolver that hangs would leave it none, and hold
up its end.
"""

import asyncio
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


ADDRESS_S = 1.0
"""For how long one of several addresses of a host is waited for: packets to it may go nowhere."""


async def connected(address: Address) -> socket.socket:
    """Return a socket that is connected to the first address of the host that answers.

    Raises:
        OSError: Not reachable, or there is no such host.
    """
    loop, found = asyncio.get_running_loop(), await _look_up(address)
    for n, (family, kind, protocol, _, where) in enumerate(found, 1):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)  # noqa: FBT003 - the name of the method says what it is
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            async with asyncio.timeout(ADDRESS_S if n < len(found) else None):
                await loop.sock_connect(sock, where)
        except BaseException as error:  # cancelled, too; only what the address refuses leads to the next one
            sock.close()
            if n == len(found) or not isinstance(error, OSError):
                raise
        else:
            return sock
    raise OSError(f"{address.host} has no address")


_Found = Sequence[tuple[int, int, int, str, Any]]
_looking_up: "dict[tuple[asyncio.AbstractEventLoop, Address], asyncio.Future[_Found]]" = {}
"""One question for each name at a time, whoever gives up waiting for it: a resolver may hang."""


async def _look_up(address: Address) -> _Found:
    """Return where a host is, what is a number at once. For others there is a thread of ours.

    Raises:
        OSError: There is no such host, or no thread.
    """
    with suppress(socket.gaierror, UnicodeError):
        return socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    loop = asyncio.get_running_loop()
    question = loop, address
    if (asked := _looking_up.get(question)) is None:
        asked = _looking_up[question] = loop.create_future()
        asked.add_done_callback(asyncio.Future.exception)  # nobody may be left to hear of it
        try:
            threading.Thread(target=_look_up_in_a_thread, args=(question, asked), daemon=True).start()
        except RuntimeError as error:
            del _looking_up[question]
            raise OSError(f"{address.host}: {error}") from error
    return await asyncio.shield(asked)


def _look_up_in_a_thread(question: tuple[asyncio.AbstractEventLoop, Address], asked: "asyncio.Future[_Found]") -> None:
    loop, address = question
    try:
        found: _Found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        end = partial(asked.set_result, found)
    except (OSError, UnicodeError) as error:  # the latter of what can be no name
        end = partial(asked.set_exception, OSError(f"{address.host}: {error}"))
    del _looking_up[question]
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(end)
