"""The server: it listens on a Unix socket, and keeps one cache for each model that clients attach for.

Who may attach is decided by the socket's mode, owner and group; whose process it is, the system says. Whatever a client
does, the server goes on: a message that cannot be ends that client, and none waits for another's answer.
"""

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tiered_kv.cache import seat_at
from tiered_kv.chain_settings import tier_name
from tiered_kv.errors import BackendUnavailableError, ConfigurationError, TieredKVError
from tiered_kv.events import Emit
from tiered_kv.host import handshake, link, wire
from tiered_kv.host.attached_client import AttachedClient
from tiered_kv.host.listening import listen
from tiered_kv.host.opening import (
    Attach,
    Attached,
    Health,
    Healthy,
    Introduce,
    Join,
    Joined,
    Mapped,
    MapSlab,
    Opening,
    Slab,
    Tier,
)
from tiered_kv.host.reception import OPENING_S, Peer, Reception
from tiered_kv.host.session import Session
from tiered_kv.host.session_changes import places_of
from tiered_kv.host.shares import Share, Shares
from tiered_kv.host.showing_models import HostMetrics, Pages
from tiered_kv.log import log, log_event
from tiered_kv.settings import TieredKVSettings
from tiered_kv.telemetry.page.server import PageServer
from tiered_kv.tier_settings import OwnedTierSettings
from tiered_kv.tiers.pins import Pins
from tiered_kv.tiers.tasks import Tasks

_RECLAIM_EVERY_S: Final = 60.0
_LEND_EVERY_S: Final = 1.0
_LONGEST_NAME: Final = 200
"""Characters of what a client calls itself, in logs."""


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
        self._emit = emit
        self._clients: dict[bytes, AttachedClient] = {}
        self._tasks = Tasks()
        self._started = time.monotonic()
        self._num_attaching = 0
        self._reception: Reception | None = None
        self._page: PageServer | None = None
        self._metrics: HostMetrics | None = None
        self._is_draining = False
        self._shares: Shares | None = None
        self._listener: socket.socket | None = None
        self._lock_fd = -1

    @property
    def _num_refused(self) -> int:
        return self._reception.num_refused if self._reception else 0

    def _by_model(self) -> list[tuple[str, dict[str, Any]]]:
        """Say of each client whose it is, and what it has under way."""
        return [(client.model, client.session.statistics()) for client in list(self._clients.values())]

    @property
    def path(self) -> Path:
        """Where it listens."""
        return self._settings.host.socket

    def health(self) -> dict[str, Any]:
        """Say how it is: what it keeps, and who is attached."""
        return {
            "is_ready": self._listener is not None and not self._is_draining,
            "is_draining": self._is_draining,
            "version": wire.VERSION,
            "pid": os.getpid(),
            "up_s": round(time.monotonic() - self._started, 3),
            "num_descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
            "num_refused": self._num_refused,
            "clients": [client.session.statistics() for client in self._clients.values()],
            "shares": [_facts_of(share) for share in self._shares or ()],
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
        connection, answer, descriptors = handshake.begin(os.fspath(path), Health(), timeout_s)
        handshake.give_back(connection, descriptors)
        if not isinstance(answer, Healthy):
            raise ConfigurationError(f"{path} answered {type(answer).__name__} to a question about its health")
        return answer.facts

    async def drain(self) -> bool:
        """Take no more clients and stores, and wait until what was stored is written; loads go on until it is closed.

        Returns:
            Whether all was, within `CacheLimits.close_timeout_s`.
        """
        self._is_draining = True
        return self._shares is None or await self._shares.drain()

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            ConfigurationError: Another server listens there, or the socket cannot be made.
        """
        self._shares = shares = Shares(self._settings, self._emit)
        if self._settings.page:
            pages = Pages(lambda: list(shares), has_metrics=self._settings.metrics)
            self._page = PageServer(pages, self._settings.page)
        self._listener, self._lock_fd = listen(self._settings.host)
        try:
            if self._settings.metrics:
                self._metrics = HostMetrics(self._by_model, lambda: list(shares), lambda: self._num_refused)
            if self._page is not None:
                self._emit(self._page.start())
        except BaseException:  # such as an address that another has: nothing of this server may stay
            await self.aclose()
            raise
        self._reception = Reception(self._listener, self._tasks, self._admit)
        self._tasks.keep_running(self._reception.receive, "receive connections")
        self._tasks.keep_running(self._reclaim, "reclaim")
        self._tasks.keep_running(self._lend, "lend")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End: what was stored is written, within `CacheLimits.close_timeout_s`. Clients come back to the next one."""
        if self._listener is None or self._shares is None:
            return
        listener, self._listener = self._listener, None
        self._is_draining = True
        with suppress(OSError):
            self.path.unlink()
        await self._tasks.aclose(0.0)
        listener.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._page is not None:
            await self._page.stop()
        await self._shares.aclose()
        # Only now: what a client may be writing to is nobody else's any more.
        for client in list(self._clients.values()):
            client.link.close()
            client.end()
            await client.session.ended()
        os.close(self._lock_fd)

    # Clients.

    async def _reclaim(self) -> None:
        assert self._shares is not None  # noqa: S101 - it is open
        after_s = self._settings.host.reclaim_after_s
        while True:
            await asyncio.sleep(min(_RECLAIM_EVERY_S, after_s))
            await self._shares.reclaim(after_s)

    async def _lend(self) -> None:
        assert self._shares is not None  # noqa: S101 - it is open
        after_s = self._settings.host.lend_after_s
        while True:
            await asyncio.sleep(min(_LEND_EVERY_S, after_s))
            await self._shares.lend(after_s)

    async def _admit(self, connection: socket.socket, opening: Opening, who: Peer) -> bool:
        """Answer what a connection is for; say whether it is a client's now."""
        match opening:
            case Health():
                await handshake.send_opened(connection, Healthy(self.health()))
                return False
            case Join(token=token):
                return await self._join(connection, token)
            case Introduce():
                await self._introduce(connection, opening)
                return False
            case MapSlab():
                await self._map(connection, opening)
                return False
            case Attach():
                return await self._attach(connection, opening, who)

    async def _attach(self, connection: socket.socket, opening: Attach, who: Peer) -> bool:
        name = f"{opening.name:.{_LONGEST_NAME}} ({who})"
        log("info", "host.attaching", client=name, gid=who.gid, model=f"{opening.model:.{_LONGEST_NAME}}")
        self._check_goes_on()
        num_clients = len(self._clients) + self._num_attaching
        if num_clients >= self._settings.host.clients:
            raise ConfigurationError(f"the server has {num_clients} clients, which is what it may have")
        self._num_attaching += 1
        try:
            return await self._join_share(connection, opening, name, who.uid)
        finally:
            self._num_attaching -= 1

    def _check_goes_on(self) -> None:
        if self._is_draining or self._shares is None:
            raise BackendUnavailableError("the server is about to end")

    async def _join_share(self, connection: socket.socket, opening: Attach, name: str, uid: int) -> bool:
        assert self._shares is not None  # noqa: S101 - looked at by the caller
        host = self._settings.host
        model, layout, shards = opening.parts()
        share, ranks = await self._shares.join(model, layout, shards)
        client = None
        try:
            self._check_goes_on()  # while it was opened, too
            assert share.cache is not None  # noqa: S101 - it was joined
            pins = Pins(self._settings.limits.pin_quota, share.pins)
            session = Session(
                name, share.cache, ranks, pins, host,
                is_read_only=opening.is_read_only or uid in host.read_only_uids,
            )  # fmt: skip
            token = secrets.token_bytes(16)
            client = AttachedClient(session, share.name, connection, partial(self._ended, token, share))
            self._clients[token] = client
            limits = self._settings.limits
            with ExitStack() as given:
                slabs, descriptors = _slabs_of(share, ranks, pins, given, is_read_only=session.is_read_only)
                answer = Attached(
                    token,
                    slabs,
                    self._settings.codec,
                    tuple(
                        Tier(tier_name(tier), tier.medium, isinstance(tier, OwnedTierSettings))
                        for tier in self._settings.tiers
                    ),
                    places_of(seat_at(share.cache, ranks, b"", (), pins)[1]),
                    limits.load_timeout_s,
                    limits.store_timeout_s,
                    int(limits.swap_space),
                    int(limits.window),
                    session.is_read_only,
                )
                await handshake.send_opened(connection, answer, descriptors)
            await link.start(client.link, connection)
        except BaseException:
            if client is not None:
                client.end()  # nothing was asked for yet
            else:
                self._shares.leave(share)
            raise
        return True

    async def _join(self, connection: socket.socket, token: bytes) -> bool:
        beside = self._client(token).beside()
        try:
            await handshake.send_opened(connection, Joined())
            await link.start(beside, connection)
        except BaseException:
            beside.connection_lost(None)
            raise
        return True

    async def _introduce(self, connection: socket.socket, opening: Introduce) -> None:
        client = self._client(opening.token)
        await handshake.send_opened(connection, Joined())
        async with asyncio.timeout(OPENING_S):
            pidfds = await handshake.receive_descriptors(connection, len(opening.ranks))
        client.session.jobs.watch(opening.ranks, pidfds)
        await handshake.send_opened(connection, Joined())

    async def _map(self, connection: socket.socket, opening: MapSlab) -> None:
        session = self._client(opening.token).session
        fd = session.slab(opening.name).fd
        with _descriptor(fd, is_read_only=session.is_read_only) as given:
            await handshake.send_opened(connection, Mapped(session.is_read_only), [given])

    def _client(self, token: bytes) -> AttachedClient:
        client = self._clients.get(token)
        if client is None:
            raise BackendUnavailableError("no client has this token: attach again")
        return client

    def _ended(self, token: bytes, share: Share) -> None:
        self._clients.pop(token, None)
        if self._shares is not None:
            self._shares.leave(share)


def _slabs_of(
    share: Share, ranks: "list[Any]", pins: Pins, given: ExitStack, *, is_read_only: bool
) -> tuple[tuple[Slab, ...], list[int]]:
    """Return what a client maps, and descriptors of it, to be passed on as long as ``given`` is open."""
    assert share.cache is not None  # noqa: S101 - it was joined
    _, cache = seat_at(share.cache, ranks, b"", (), pins)
    slabs, descriptors = [], []
    for number, chain in enumerate(cache.chains):
        slab = chain.host.slab
        group, rank = divmod(number, len(ranks))
        slabs.append(Slab(slab.name, slab.num_slots, slab.stride_bytes, slab.payload_bytes, group, rank))
        descriptors.append(given.enter_context(_descriptor(slab.fd, is_read_only=is_read_only)))
    return tuple(slabs), descriptors


@contextmanager
def _descriptor(fd: int, *, is_read_only: bool) -> Iterator[int]:
    """Give a descriptor of memory to pass on: one that cannot be written by, to who only reads."""
    if not is_read_only:
        yield fd
        return
    given = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield given
    finally:
        os.close(given)


def _facts_of(share: Share) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "model": share.name,
        "directory": share.directory,
        "weight": share.weight,
        "clients": share.num_clients,
        "right": dict(share.right),
        "given": dict(share.given),
    }
    if share.cache is not None:
        with suppress(TieredKVError):  # about to be closed
            stats = share.cache.stats()
            facts["transfers"] = stats.transfers
            facts["tiers"] = [
                {name: getattr(tier, name) for name in ("tier", "num_slots", "ready", "leased", "pending", "hits")}
                for tier in stats.tiers
            ]
    return facts
