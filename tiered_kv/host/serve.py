"""A server as a process of its own: it says when it is ready, and drains when it is told to end."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from tiered_kv.host.server import TieredKVServer
from tiered_kv.settings.settings import TieredKVSettings
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.log import log

try:
    import uvloop
except ModuleNotFoundError as missing:
    raise ConfigurationError("a server needs uvloop: pip install 'tiered-kv[host]'") from missing

_ENDING: Final = (signal.SIGTERM, signal.SIGINT)


def run(settings: TieredKVSettings, *, ready: Callable[[], object] = lambda: None) -> bool:
    """`serve` on an event loop of its own: uvloop's, which answers sooner than asyncio's."""
    return uvloop.run(serve(settings, ready=ready))


async def serve(settings: TieredKVSettings, *, ready: Callable[[], object] = lambda: None) -> bool:
    """Serve until SIGTERM or SIGINT; then write what was stored, and end. A second one ends it at once.

    Args:
        settings: As for `TieredKVServer`.
        ready: Called once clients may attach.

    Returns:
        Whether all was written in time.

    Raises:
        ConfigurationError: It cannot listen, or its settings cannot work.
    """
    loop, told = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        for each in _ENDING:
            loop.remove_signal_handler(each)
        told.set()

    async with TieredKVServer(settings) as server:
        for each in _ENDING:
            loop.add_signal_handler(each, tell)
        log("info", "host.ready", path=str(server.path), pid=os.getpid())
        _notify("READY=1")
        ready()
        await told.wait()
        _notify("STOPPING=1")
        is_written = await server.drain()
        log("info", "host.drained", is_written=is_written)
    return is_written


def _notify(state: str) -> None:
    """Tell systemd, where it has started this."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else str(Path(address)))
