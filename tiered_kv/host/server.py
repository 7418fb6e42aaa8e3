"""The server: it listens on a Unix socket, and keeps one cache for each model that clients attach for.

Whatever a client does, the server goes on: a message that cannot be ends that client, and none waits for another's.
"""

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from tiered_kv.host import wire
from tiered_kv.host.admission import Admission
from tiered_kv.host.handshake import health_at
from tiered_kv.host.reception import Reception, listen
from tiered_kv.host.shares import Shares
from tiered_kv.host.showing_models import HostMetrics, Pages
from tiered_kv.settings.settings import TieredKVSettings
from tiered_kv.telemetry.page.page_server import PageServer
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.transfers.handles import Handle
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.events import Emit
from tiered_kv.values.log import log_event

_RECLAIM_EVERY_S: Final = 60.0
_LEND_EVERY_S: Final = 1.0


class TieredKVServer:
    """One cache for all engines of a host: ``async with TieredKVServer(settings) as server``.

    Engines attach by ``TieredKV.connect("unix:///run/tiered-kv/kv.sock", model=..., layout=...)``. Equal models share
    blocks; each model has its share of the tiers.
    """

    def __init__(self, settings: TieredKVSettings | Mapping[str, Any] | None = None, *, emit: Emit = log_event) -> None:
        """Check the settings; nothing is opened before entering.

        Args:
            settings: The tiers, as for a cache, and ``host``: how to listen, and what a client may have.
            emit: Takes the events of all caches.

        Raises:
            ConfigurationError: They cannot work.
        """
        self._settings = TieredKVSettings.of(settings)
        if self._settings.record_trace:
            raise ConfigurationError(
                "record_trace is for a cache in its engine's process: a server records no requests"
            )
        self._emit = emit
        self._tasks = Tasks()
        self._started = time.monotonic()
        self._shares: Shares | None = None
        self._admission: Admission | None = None
        self._reception: Reception | None = None
        self._page: PageServer | None = None
        self._metrics: HostMetrics | None = None
        self._listener: socket.socket | None = None
        self._closing: asyncio.Task[None] | None = None
        self._lock_fd = -1

    @property
    def path(self) -> Path:
        """Where the server listens."""
        return self._settings.host.socket

    def health(self) -> dict[str, Any]:
        """Say how it is: what it keeps, and who is attached."""
        is_draining = self._admission is not None and self._admission.is_draining
        return {
            "is_ready": self._listener is not None and not is_draining,
            "is_draining": is_draining,
            "version": wire.VERSION,
            "pid": os.getpid(),
            "up_s": round(time.monotonic() - self._started, 3),
            "num_descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
            "num_refused": self._num_refused(),
            "clients": [counts for _, counts in self._by_model()],
            "shares": [share.facts() for share in self._shares or ()],
        }

    @staticmethod
    def health_at(path: str | os.PathLike[str], *, timeout_s: float = 5.0) -> dict[str, Any]:
        """Ask the server that listens at ``path`` for its `health`, from any process. Blocks the thread.

        Args:
            path: Of its socket.
            timeout_s: How long to wait.

        Raises:
            ConfigurationError: What answers is no server of this version.
            BackendUnavailableError: Nothing answers in time.
        """
        return health_at(path, timeout_s=timeout_s)

    async def drain(self) -> bool:
        """Take no more clients and stores, and wait until what was stored is written; loads go on until it is closed.

        Returns:
            Whether all was, within `CacheLimits.close_timeout_s`.
        """
        if self._shares is None or self._admission is None:
            return True
        self._admission.is_draining = True
        return await self._shares.drain()

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            ConfigurationError: Another server listens there, or the socket, or a directory of a tier, cannot be made.
        """
        self._shares = shares = Shares(self._settings, self._emit)
        self._admission = Admission(self._settings, shares, self.health)
        if self._settings.page:
            pages = Pages(lambda: list(shares), has_metrics=self._settings.metrics)
            self._page = PageServer(pages, self._settings.page)
        self._listener, self._lock_fd = listen(self._settings.host)
        try:
            if self._settings.metrics:
                self._metrics = HostMetrics(self._by_model, lambda: list(shares), self._num_refused)
            if self._page is not None:
                self._emit(self._page.start())
        except BaseException:  # such as an address that another has: nothing of this server may stay
            await self.aclose()
            raise
        self._reception = Reception(self._listener, self._tasks, self._admission.admit)
        self._tasks.keep_running(self._reception.receive, "receive connections")
        reclaim_s, lend_s = self._settings.host.reclaim_after_s, self._settings.host.lend_after_s
        self._tasks.keep_running(partial(_repeat, shares.reclaim, reclaim_s, _RECLAIM_EVERY_S), "reclaim")
        self._tasks.keep_running(partial(_repeat, shares.lend, lend_s, _LEND_EVERY_S), "lend")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End: what was stored is written, within `CacheLimits.close_timeout_s`. Clients come back to the next one.

        A cancellation is raised when everything has ended.
        """
        if self._listener is not None and self._shares is not None and self._admission is not None:
            listener, self._listener = self._listener, None
            closing = self._close(listener, self._shares, self._admission)
            self._closing = asyncio.get_running_loop().create_task(closing, name="close the server")
        if self._closing is not None:
            await Handle(self._closing, lambda: None)

    async def _close(self, listener: socket.socket, shares: Shares, admission: Admission) -> None:
        """End all that there is, in a task of its own: a scope that is cancelled would interrupt each wait."""
        admission.begin_no_more()
        with suppress(OSError):
            self.path.unlink()
        await self._tasks.aclose(0.0)
        listener.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._page is not None:
            await self._page.stop()
        await shares.aclose()
        await admission.end_all()  # only now: what a client may be writing to is nobody else's any more
        os.close(self._lock_fd)

    def _by_model(self) -> list[tuple[str, dict[str, Any]]]:
        """Say of each client whose it is, and what it has under way; to any thread."""
        clients = self._admission.clients if self._admission is not None else {}
        return [(session.model, session.statistics()) for session in list(clients.values())]

    def _num_refused(self) -> int:
        return self._reception.num_refused if self._reception is not None else 0


async def _repeat(work: Callable[[float], Awaitable[None]], after_s: float, most_s: float) -> None:
    """Do ``work(after_s)`` again and again, as often as it may have something to do."""
    while True:
        await asyncio.sleep(min(most_s, after_s))
        await work(after_s)
