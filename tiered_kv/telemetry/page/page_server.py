"""Serves the page by itself: uvicorn in a thread of its own, so that requests cost the cache's event loop nothing.

If the port is taken, the socket may not be made or no thread begins, the cache opens without its page.
"""

import asyncio
import os
import socket
import stat
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tiered_kv.settings.page_address import is_of_this_host, page_address, parts_of
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.events import Event, PageNotServed, PageServed

if TYPE_CHECKING:  # the extra "page" may not be installed
    import uvicorn

_MOST_CONNECTIONS: Final = 64
"""With more, requests are answered with 503."""
_MOST_SILENT: Final = 32
"""Connections without a whole request: fewer, so that they leave room for others."""
_REQUEST_WITHIN_S: Final = 10.0
_AT_MOST_S: Final = 180.0
"""Who is slow, and goes on, has so long: the largest answer takes it at 50 KB/s."""
_CLOSE_TIMEOUT_S: Final = 3.0
App = Callable[[Any, Any, Any], Awaitable[None]]


class PageServer:
    """Serves one application at one address, from `start` until `stop`. For the cache's event loop."""

    def __init__(self, app: App, address: str) -> None:
        """Make a server; nothing is bound yet.

        Raises:
            ConfigurationError: It is no address, or uvicorn is not installed.
        """
        self._app = app
        self._address = page_address(address)
        try:
            import uvicorn  # noqa: PLC0415 - an extra; a cache that lacks it does not open
        except ImportError as error:
            raise ConfigurationError("serving the page needs uvicorn: pip install 'tiered-kv[page]'") from error
        self._socket: tuple[Path, os.stat_result] | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> Event:
        """Begin to serve, and say where, or why not."""
        where = parts_of(self._address)
        try:
            listening = _listen(where)
        except OSError as error:
            return PageNotServed(self._address, error.strerror or str(error))
        try:
            self._begin(where, listening)
        except BaseException as error:  # nobody serves: who comes must not wait in its queue
            if self._socket is not None:
                _remove_own(*self._socket)
            listening.close()
            if isinstance(error, RuntimeError):  # the system gives no more threads
                return PageNotServed(self._address, str(error))
            raise
        if isinstance(where, str):
            return PageServed(self._address)
        host, port = listening.getsockname()[:2]
        return PageServed(f"http://{f'[{host}]' if ':' in host else host}:{port}/")

    def _begin(self, where: tuple[str, int] | str, listening: socket.socket) -> None:
        """Serve what comes to a socket, which the thread then closes."""
        import uvicorn  # noqa: PLC0415 - an extra

        if isinstance(where, str):
            with suppress(FileNotFoundError):  # removed at once
                self._socket = Path(where), Path(where).lstat()
        app = self._app
        if not isinstance(where, str) and is_of_this_host(where[0]):
            app = _of_this_host_alone(app)
        config = uvicorn.Config(
            app, lifespan="off", log_config=None, access_log=False, ws="none", proxy_headers=False, server_header=False,
            limit_concurrency=_MOST_CONNECTIONS, timeout_graceful_shutdown=1, loop="asyncio", http=_protocol(),
        )  # fmt: skip
        server = uvicorn.Server(config)
        thread = threading.Thread(target=_serve, args=(server, listening), name="tiered_kv-page", daemon=True)
        thread.start()
        self._server, self._thread = server, thread  # which `stop` waits for: only if it has begun

    async def stop(self) -> None:
        """Serve no more; waits for the thread for a limited time."""
        if self._server is not None and self._thread is not None:
            if self._socket is not None:
                _remove_own(*self._socket)
            self._server.should_exit = True
            await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_S)


def _serve(server: "uvicorn.Server", listening: socket.socket) -> None:
    with listening:
        server.run(sockets=[listening])


def _remove_own(path: Path, made: os.stat_result) -> None:
    """Remove a socket while it is listened at: later the next process may have taken its place."""
    with suppress(OSError):
        if os.path.samestat(path.lstat(), made):
            path.unlink()


@dataclass
class _Wait:
    """The wait for one connection.

    Attributes:
        timer: When it is looked at next.
        until_s: When it ends, whatever has come by then; on the loop's clock.
        num_unread: Bytes of answers that it had not taken when it was looked at last.
        has_said: Whether anything has come from it since then.
    """

    timer: asyncio.TimerHandle
    until_s: float
    num_unread: int
    has_said: bool = False


class Waits:
    """Connections of which a whole request is awaited, the oldest first. For the thread that serves.

    Each has so many seconds for it, and as many again whenever it has sent or taken something meanwhile, up to a bound.
    """

    def __init__(self) -> None:
        self._waits: dict[asyncio.Transport, _Wait] = {}

    def wait(self, transport: asyncio.Transport) -> None:
        """Wait for one; if that makes too many, end the one that was waited for longest."""
        if (waiting := self._waits.get(transport)) is not None:
            waiting.has_said = True
            return
        if len(self._waits) >= _MOST_SILENT:
            oldest = next(iter(self._waits))
            self.end(oldest)
            oldest.abort()
        until_s = asyncio.get_running_loop().time() + _AT_MOST_S
        self._waits[transport] = _Wait(self._look_later(transport), until_s, transport.get_write_buffer_size())

    def end(self, transport: asyncio.Transport) -> None:
        """Stop waiting for one."""
        if (waiting := self._waits.pop(transport, None)) is not None:
            waiting.timer.cancel()

    def _look_later(self, transport: asyncio.Transport) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(_REQUEST_WITHIN_S, self._look, transport)

    def _look(self, transport: asyncio.Transport) -> None:
        waiting, num_unread = self._waits[transport], transport.get_write_buffer_size()
        goes_on = waiting.has_said or num_unread < waiting.num_unread
        if not goes_on or asyncio.get_running_loop().time() >= waiting.until_s:
            self.end(transport)
            transport.abort()
            return
        waiting.timer, waiting.num_unread, waiting.has_said = self._look_later(transport), num_unread, False


def _protocol() -> type[asyncio.Protocol]:
    """Return what speaks HTTP for one server, and ends connections that say nothing for too long.

    The time for a whole request begins when the connection does, or with the end of the last answer; see `Waits`.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol  # noqa: PLC0415 - an extra

    waits = Waits()

    class Bounded(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
            super().connection_made(transport)
            waits.wait(transport)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._look()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            waits.end(self.transport)

        def _look(self) -> None:
            asked = self.cycle
            if asked is not None and not asked.more_body and not asked.response_complete:
                waits.end(self.transport)
            elif self in self.connections:
                waits.wait(self.transport)

    return Bounded


def _listen(where: tuple[str, int] | str) -> socket.socket:
    if not isinstance(where, str):
        family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        return socket.create_server(where, family=family)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            _remove_if_left(where)
        mask = os.umask(0o177)
        try:
            listening.bind(where)
        finally:
            os.umask(mask)
        listening.listen()
    except BaseException:
        listening.close()
        raise
    return listening


def _remove_if_left(path: str) -> None:
    """Remove a socket that nobody listens at any more; one that is listened at is kept, and so is what is none."""
    if not stat.S_ISSOCK(Path(path).lstat().st_mode):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()


def _of_this_host_alone(app: App) -> App:
    """Refuse who came by another name: a web site may have its name lead here, and would read what is shown."""

    async def guarded(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
        named = dict(scope.get("headers", ())).get(b"host", b"localhost").decode("latin-1")
        host = named.partition("]")[0].lstrip("[") if named.startswith("[") else named.partition(":")[0]
        if is_of_this_host(host):
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 421, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"this page is for this host: use localhost\n"})

    return guarded
