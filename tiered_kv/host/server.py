"""The server: it listens on a Unix socket, and keeps one cache for each model that clients attach for.

Who may attach is decided by the socket's mode, owner and group; whose process it is, the system says. Whatever a client
does, the server goes on: a message that cannot be ends that client, and none waits for another's answer.
"""

import asyncio
import fcntl
import grp
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tiered_kv.backend import OwnedTierSettings
from tiered_kv.cache import seat_at
from tiered_kv.errors import BackendUnavailableError, ConfigurationError, TieredKVError
from tiered_kv.events import Emit
from tiered_kv.host import link, messages, wire
from tiered_kv.host.link import Link
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
    Refused,
    Slab,
    Tier,
)
from tiered_kv.host.session import Send, Session
from tiered_kv.host.session_changes import places_of
from tiered_kv.host.shares import Share, Shares
from tiered_kv.host_settings import HostSettings
from tiered_kv.log import log
from tiered_kv.settings import TieredKVSettings, tier_name
from tiered_kv.telemetry.logs import log_event
from tiered_kv.tiers.pins import Pins
from tiered_kv.tiers.tasks import Tasks

_BACKLOG: Final = 128
_OPENING_S: Final = 10.0
"""What a connection may take to say what it is for."""
_RECLAIM_EVERY_S: Final = 60.0
_LONGEST_PATH: Final = 107
_PEER: Final = struct.Struct("3i")
_SO_PEERPIDFD: Final = 77  # Linux 6.5; the socket module does not name it


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
        self._clients: dict[bytes, _Client] = {}
        self._tasks = Tasks()
        self._started = time.monotonic()
        self._num_refused = 0
        self._is_draining = False
        self._shares: Shares | None = None
        self._listener: socket.socket | None = None
        self._lock_fd = -1

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
        connection, answer, descriptors = link.begin(os.fspath(path), Health(), timeout_s)
        link.give_back(connection, descriptors)
        if not isinstance(answer, Healthy):
            raise ConfigurationError(f"{path} answered {type(answer).__name__} to a question about its health")
        return answer.facts

    async def drain(self) -> bool:
        """Take no more clients and stores, and wait until what was stored is written; loads go on until it is closed.

        Returns:
            Whether all was, within `CacheLimits.close_timeout_s`.
        """
        self._is_draining = True
        caches = [share.cache for share in self._shares or () if share.cache is not None]
        return all(await asyncio.gather(*(cache.drain() for cache in caches)))

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            ConfigurationError: Another server listens there, or the socket cannot be made.
        """
        self._shares = Shares(self._settings, self._emit)
        self._listener = self._listen()
        self._tasks.keep_running(self._accept, "accept")
        self._tasks.keep_running(self._reclaim, "reclaim")
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
        await self._shares.aclose()
        # Only now: what a client may be writing to is nobody else's any more.
        for client in list(self._clients.values()):
            client.link.close()
            client.end()
            await client.session.ended()
        os.close(self._lock_fd)

    # Listening.

    def _listen(self) -> socket.socket:
        path, host = self.path, self._settings.host
        if len(os.fsencode(path)) > _LONGEST_PATH:
            raise ConfigurationError(f"the path of a socket has {_LONGEST_PATH} bytes at most: {path}")
        new = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            lock_fd = _lock(path.with_name(f"{path.name}.lock"))
            try:
                listener = _bound(new, path, host)
            except BaseException:
                os.close(lock_fd)
                raise
            self._lock_fd = lock_fd
            return listener  # noqa: TRY300 - what fails before this is told alike
        except OSError as error:
            raise ConfigurationError(f"cannot listen at {path}: {error.strerror or error}") from error

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while self._listener is not None:
            connection, _ = await loop.sock_accept(self._listener)
            connection.settimeout(0.0)
            self._tasks.spawn(self._begin(connection), "attach a client")

    async def _reclaim(self) -> None:
        assert self._shares is not None  # noqa: S101 - it is open
        after_s = self._settings.host.reclaim_after_s
        while True:
            await asyncio.sleep(min(_RECLAIM_EVERY_S, after_s))
            await self._shares.reclaim(after_s)

    async def _begin(self, connection: socket.socket) -> None:
        """Find out what a connection is for, and answer it; whatever goes wrong ends this connection alone."""
        pid, uid, gid = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        who = f"process {pid}, user {uid}"
        is_taken = False
        try:
            async with asyncio.timeout(_OPENING_S):
                version = await link.greeted(connection)
                if version != wire.VERSION:
                    log("warning", "host.version_refused", client=who, theirs=version, ours=wire.VERSION)
                    return
                opening = await link.receive_opening(connection)
            match opening:
                case Health():
                    await link.send_opened(connection, Healthy(self.health()))
                case Join(token=token):
                    is_taken = await self._join(connection, token)
                case Introduce():
                    await self._introduce(connection, opening)
                case MapSlab():
                    await self._map(connection, opening)
                case Attach():
                    log("info", "host.attaching", client=opening.name, pid=pid, uid=uid, gid=gid, model=opening.model)
                    is_taken = await self._attach(connection, opening, who, uid)
        except TieredKVError as error:
            self._num_refused += 1
            log("warning", "host.client_refused", client=who, error=str(error))
            with suppress(OSError):
                await link.send_opened(connection, Refused(wire.kind_of(error), str(error)))
        except (OSError, wire.WireError) as error:  # a TimeoutError included
            log("warning", "host.client_gave_up", client=who, error=str(error) or type(error).__name__)
        finally:
            if not is_taken:
                connection.close()

    async def _attach(self, connection: socket.socket, opening: Attach, who: str, uid: int) -> bool:
        host = self._settings.host
        if self._is_draining or self._shares is None:
            raise BackendUnavailableError("the server is about to end")
        if len(self._clients) >= host.clients:
            raise ConfigurationError(f"the server has {len(self._clients)} clients, which is what it may have")
        model, layout, shards = opening.parts()
        share, ranks = await self._shares.join(model, layout, shards)
        client = None
        try:
            assert share.cache is not None  # noqa: S101 - it was joined
            pins = Pins(self._settings.limits.pin_quota, share.pins)
            session = Session(
                f"{opening.name} ({who})", share.cache, ranks, pins, host,
                is_read_only=opening.is_read_only or uid in host.read_only_uids,
            )  # fmt: skip
            token = secrets.token_bytes(16)
            client = _Client(session, connection, partial(self._ended, token, share))
            slabs, descriptors = _slabs_of(share, ranks, pins, is_read_only=session.is_read_only)
            self._clients[token] = client
            try:
                limits = self._settings.limits
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
                    session.is_read_only,
                )
                await link.send_opened(connection, answer, descriptors)
            finally:
                if session.is_read_only:
                    for each in descriptors:
                        os.close(each)
            await link.start(client.link, connection)
        except BaseException:
            if client is not None:
                client.end()  # nothing was asked for yet
            else:
                self._shares.leave(share)
            raise
        return True

    async def _join(self, connection: socket.socket, token: bytes) -> bool:
        client = self._client(token)
        await link.send_opened(connection, Joined())
        await link.start(client.beside(), connection)
        return True

    async def _introduce(self, connection: socket.socket, opening: Introduce) -> None:
        client = self._client(opening.token)
        await link.send_opened(connection, Joined())
        async with asyncio.timeout(_OPENING_S):
            pidfds = await link.receive_descriptors(connection, len(opening.ranks))
        client.session.jobs.watch(opening.ranks, pidfds)
        await link.send_opened(connection, Joined())

    async def _map(self, connection: socket.socket, opening: MapSlab) -> None:
        session = self._client(opening.token).session
        fd = session.slab(opening.name).fd
        with _descriptor(fd, is_read_only=session.is_read_only) as given:
            await link.send_opened(connection, Mapped(session.is_read_only), [given])

    def _client(self, token: bytes) -> "_Client":
        client = self._clients.get(token)
        if client is None:
            raise BackendUnavailableError("no client has this token: attach again")
        return client

    def _ended(self, token: bytes, share: Share) -> None:
        self._clients.pop(token, None)
        if self._shares is not None:
            self._shares.leave(share)


class _Client:
    """The connections of one client, and its session, which ends once its process touches no slot any more.

    It says so itself before it goes. Else its end of the connection is closed by the system when its process ends, and
    the process is watched as well where the system lets us: a GPU may be copying yet when the connection is closed.
    """

    def __init__(self, session: Session, connection: socket.socket, ended: "partial[None]") -> None:
        self.session = session
        self.link: Link[messages.Request] = Link(messages.request_from, self._take, self._lost, broken=self._break)
        self._ended = ended
        self._beside: list[Link[messages.Request]] = []
        self._num_taken = 0
        self._early: list[tuple[int, messages.Request, Send]] = []  # came on another connection before what it follows
        self._has_ended = False
        self._pidfd = _pidfd_of(connection)
        if self._pidfd >= 0:
            asyncio.get_running_loop().add_reader(self._pidfd, self.end)

    def beside(self) -> "Link[messages.Request]":
        """Return the link of another connection of this client."""
        after = 0

        def take(request: messages.Request) -> None:
            nonlocal after
            if isinstance(request, messages.After):
                after = request.num_messages
            elif self._num_taken >= after:
                self.session.take(request, made.send)
            else:
                self._early.append((after, request, made.send))

        made: Link[messages.Request] = Link(
            messages.request_from, take, lambda: self._beside.remove(made), broken=lambda _: made.close()
        )
        self._beside.append(made)
        return made

    def end(self) -> None:
        """It is gone, whichever way that was noticed first."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
        self.session.end()
        for each in [self.link, *self._beside]:
            each.close()
        log("info", "host.client_ended", client=self.session.name)
        self._ended()

    def _take(self, request: messages.Request) -> None:
        self._num_taken += 1
        if isinstance(request, messages.Bye):
            self.end()
            return
        self.session.take(request, self.link.send)
        while self._early and self._early[0][0] <= self._num_taken:
            _, early, send = self._early.pop(0)
            self.session.take(early, send)

    def _break(self, why: str) -> None:
        """Take nothing more of it. What is held for it is, until it is gone: it may be copying."""
        log("warning", "host.client_broken", client=self.session.name, error=why)
        self.link.end_writing()

    def _lost(self) -> None:
        if self._pidfd < 0:
            self.end()  # else its process has ended or is about to


def _slabs_of(
    share: Share, ranks: "list[Any]", pins: Pins, *, is_read_only: bool
) -> tuple[tuple[Slab, ...], list[int]]:
    """Return what a client maps, and descriptors of it: those of a client that only reads cannot be written by."""
    assert share.cache is not None  # noqa: S101 - it was joined
    _, cache = seat_at(share.cache, ranks, b"", (), pins)
    if len(cache.chains) > link.MOST_DESCRIPTORS:
        raise ConfigurationError(f"{len(cache.chains)} slabs, of which {link.MOST_DESCRIPTORS} can be passed")
    slabs, descriptors = [], []
    for number, chain in enumerate(cache.chains):
        slab = chain.host.slab
        group, rank = divmod(number, len(ranks))
        slabs.append(Slab(slab.name, slab.num_slots, slab.stride_bytes, slab.payload_bytes, group, rank))
        path = f"/proc/self/fd/{slab.fd}"
        descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC) if is_read_only else slab.fd)
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


def _pidfd_of(connection: socket.socket) -> int:
    """Return a descriptor of the client's process, or -1 where the system gives none."""
    with suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    pid, _, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    with suppress(OSError):
        return os.pidfd_open(pid) if pid > 0 else -1  # 0: of a PID namespace that is not ours
    return -1


def _bound(new: Path, path: Path, host: HostSettings) -> socket.socket:
    """Return a socket that listens at ``path``. It is made as ``new``: nobody sees it before it has mode and group."""
    with suppress(FileNotFoundError):
        new.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(new))
        new.chmod(int(host.mode, 8))
        if host.group:
            os.chown(new, -1, _group_id(host.group))
        listener.listen(_BACKLOG)
        listener.settimeout(0.0)
        new.rename(path)
    except BaseException:
        listener.close()
        raise
    return listener


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise ConfigurationError(f"another server listens at {path.with_suffix('')}: {path} is locked") from None
    return fd


def _group_id(group: str) -> int:
    if group.isdecimal():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigurationError(f"there is no group {group!r}") from None
