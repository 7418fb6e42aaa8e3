"""A socket that never blocks the event loop, over TCP or TLS: a call is tried first, and waited for if it must be."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, Self, TypeVar

T = TypeVar("T")


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Socket:
    """One connected socket, for one call at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None

    @classmethod
    async def connect(cls, address: Address, tls: ssl.SSLContext | None = None) -> Self:
        """Connect to the first address of the host that answers, and start TLS.

        Raises:
            OSError: Not reachable, or TLS failed (`ssl.SSLError`).
        """
        connected = cls(await _connect(address))
        if tls is not None:
            try:
                await connected._start_tls(tls, address.host)
            except BaseException:  # cancelled, too: nobody else knows of the socket
                connected.close()
                raise
        return connected

    def is_silent(self) -> bool:
        """Say whether there is nothing to receive, and the server has not left."""
        try:
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Drop it at once. Nothing is received into anyone's buffers from here on."""
        self._unwatch()
        self._socket.close()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(ConnectionAbortedError("closed meanwhile"))

    async def receive(self, into: memoryview) -> int:
        """Receive up to ``len(into)`` bytes, one at least; return how many.

        Raises:
            OSError: The connection is lost.
        """
        num_bytes = await self._when_ready(lambda: self._socket.recv_into(into), self._loop.add_reader)
        if not num_bytes:
            raise ConnectionResetError("the server closed the connection")
        return num_bytes

    async def send(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Send all of the pieces.

        Raises:
            OSError: The connection is lost.
        """
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                rest = rest[await self._when_ready(partial(self._socket.send, rest), self._loop.add_writer) :]

    async def _start_tls(self, context: ssl.SSLContext, host: str) -> None:
        wrapped = context.wrap_socket(self._socket, server_hostname=host, do_handshake_on_connect=False)
        self._socket = wrapped
        await self._when_ready(wrapped.do_handshake, self._loop.add_reader)

    async def _when_ready(self, call: Callable[[], T], watch: Callable[..., object]) -> T:
        """Make a call of the socket that does not block, again whenever the socket is ready for it."""
        while True:
            try:
                return call()
            except BlockingIOError:
                await self._ready(watch)
            except ssl.SSLWantReadError:
                await self._ready(self._loop.add_reader)
            except ssl.SSLWantWriteError:
                await self._ready(self._loop.add_writer)

    async def _ready(self, watch: Callable[..., object]) -> None:
        self._waiting = self._loop.create_future()
        watch(self._socket.fileno(), _settle, self._waiting)
        try:
            await self._waiting
        finally:
            self._unwatch()

    def _unwatch(self) -> None:
        if (fd := self._socket.fileno()) >= 0:  # closed: its number may be another socket's by now
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)


async def _connect(address: Address) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
    for n, (family, kind, protocol, _, where) in enumerate(found, 1):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)  # noqa: FBT003 - the name of the method says what it is
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            await loop.sock_connect(sock, where)
        except BaseException as error:  # cancelled, too; only what the address refuses leads to the next one
            sock.close()
            if n == len(found) or not isinstance(error, OSError):
                raise
        else:
            return sock
    raise OSError(f"{address.host} has no address")


def _settle(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)
