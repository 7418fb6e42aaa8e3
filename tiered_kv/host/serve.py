"""A server as a process of its own: it says when it is ready, and drains when it is told to end."""

import asyncio
import gc
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
        gc.freeze()  # what is imported stays, and need not be looked through with what models leave behind
        log("info", "host.ready", path=str(server.path), pid=os.getpid())
        _notify("READY=1")
        ready()
        watched = asyncio.create_task(_say_alive(), name="say alive")
        await told.wait()
        watched.cancel()
        _notify("STOPPING=1\nWATCHDOG_USEC=0")  # what is to be written may take as long as systemd lets it
        is_written = await server.drain()
        log("info", "host.drained", is_written=is_written)
    return is_written


async def _say_alive() -> None:
    """Tell systemd again and again that the event loop runs, if it wants to hear that (``WatchdogSec``)."""
    every_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6 / 2
    while every_s:
        await asyncio.sleep(every_s)
        _notify("WATCHDOG=1", socket.MSG_DONTWAIT)


def _notify(state: str, flags: int = 0) -> None:
    """Tell systemd, where it has started this."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.sendto(
                state.encode(), flags, "\0" + address[1:] if address.startswith("@") else str(Path(address))
            )
