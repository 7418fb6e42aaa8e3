"""Who comes to a server, and what for: clients, which stay, and connections for one question.

Who may attach is decided by the socket's mode, owner and group; whose process it is, the system says.

A client as its server sees it: its process, its connection, and a session that ends with both.
"""

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final

from tiered_kv.cache.seat import Seat
from tiered_kv.cache.tiered_kv import SeatCalls, seat_of
from tiered_kv.host import handshake, protocol, wire
from tiered_kv.host.protocol import (
    Attach,
    Attached,
    Health,
    Healthy,
    Introduce,
    Introduced,
    Mapped,
    MapSlab,
    Opening,
)
from tiered_kv.host.reception import OPENING_S, Peer
from tiered_kv.host.session import Session
from tiered_kv.host.session_jobs import places_of
from tiered_kv.host.session_transfers import Account
from tiered_kv.host.shares import Share, Shares
from tiered_kv.host.wire import Link
from tiered_kv.settings.chain_settings import tier_name
from tiered_kv.settings.settings import TieredKVSettings
from tiered_kv.settings.tier_settings import BookedTierSettings
from tiered_kv.system import files, system
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError
from tiered_kv.values.log import log

_SO_PEERPIDFD: Final = 77  # Linux 6.5; the socket module does not name it


class AttachedClient:
    """The connection of one client, and its session, which ends once its process touches no slot any more.

    It says so itself before it goes. Else its end of the connection is closed by the system when its process ends, and
    the process is watched as well where the system lets us: a GPU may be copying yet when the connection is closed.
    """

    def __init__(
        self, session: Session, model: str, connection: socket.socket, pid: int, ended: Callable[[], None]
    ) -> None:
        """Watch the process behind a connection; `link` is started by the caller, and ``ended`` called once."""
        self.session = session
        self.model = model
        self.link: Link[protocol.Request] = Link(protocol.request_from, self._take, self._lost, broken=self._break)
        self._ended = ended
        self._has_ended = False
        self._pidfd = _pidfd_of(connection, pid)
        if self._pidfd >= 0:
            asyncio.get_running_loop().add_reader(self._pidfd, self.end)

    def end(self) -> None:
        """End the session of a client that is gone, whichever way that was noticed first."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            files().close(self._pidfd)
        self.session.end()
        self.link.close()
        log("info", "host.client_ended", client=self.session.name)
        self._ended()

    def _take(self, request: protocol.Request) -> None:
        if isinstance(request, protocol.Bye):
            self.end()
            return
        try:
            self.session.take(request, self.link.send)
        except wire.WireError:
            raise
        except Exception as error:  # else nobody would hear of the client's end any more
            log("error", "host.request_crashed", exc_info=error, client=self.session.name)
            raise wire.WireError("the server cannot take this") from error

    def _break(self, why: str) -> None:
        """Take nothing more of it. What is held for it is, until it is gone: it may be copying."""
        log("warning", "host.client_broken", client=self.session.name, error=why)
        self.link.end_writing()

    def _lost(self) -> None:
        """Nothing comes any more. While it may be copying, the end of its process is waited for where that is known."""
        if self._pidfd < 0 or not self.session.is_touching:
            self.end()


def _pidfd_of(connection: socket.socket, pid: int) -> int:
    """Return a descriptor of the client's process, or -1 where the system gives none."""
    with suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    with suppress(OSError):
        return system().pidfd_open(pid) if pid > 0 else -1  # 0: of a PID namespace that is not ours
    return -1


_LONGEST_NAME: Final = 200
"""Characters of what a client calls itself, in logs."""


class Admission:
    """Decides who may attach to one server, and keeps those who are. For the event loop's thread.

    Attributes:
        clients: Those that are attached, by token.
        is_draining: Whether no more may attach.
    """

    def __init__(self, settings: TieredKVSettings, shares: Shares, health: Callable[[], dict[str, Any]]) -> None:
        """Admit clients to ``shares``; ``health`` is told to whoever asks."""
        self.clients: dict[bytes, AttachedClient] = {}
        self.is_draining = False
        self._settings = settings
        self._shares = shares
        self._health = health
        self._num_attaching = 0

    async def admit(self, connection: socket.socket, opening: Opening, who: Peer) -> bool:
        """Answer what a connection is for; say whether it is a client's now."""
        match opening:
            case Health():
                await handshake.send_opened(connection, Healthy(self._health()))
                return False
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
        num_clients = len(self.clients) + self._num_attaching
        if num_clients >= self._settings.host.clients:
            raise ConfigurationError(f"the server has {num_clients} clients, which is what it may have")
        return await self._join_share(connection, opening, name, who)

    def _check_goes_on(self) -> None:
        if self.is_draining:
            raise BackendUnavailableError("the server is about to end")

    async def _join_share(self, connection: socket.socket, opening: Attach, name: str, who: Peer) -> bool:
        host = self._settings.host
        model, layout, shards = opening.parts()
        self._num_attaching += 1
        try:
            share, ranks = await self._shares.join(model, layout, shards)
        finally:
            self._num_attaching -= 1  # from here to its place among the clients nothing is waited for
        client = None
        try:
            self._check_goes_on()  # while it was opened, too
            assert share.cache is not None  # noqa: S101 - it was joined
            account = Account(host, self._settings.limits.pin_quota, seat_of(share.cache).pins)
            session = Session(
                name, share.cache, ranks, account, host,
                is_read_only=opening.is_read_only or who.uid in host.read_only_uids,
            )  # fmt: skip
            token = secrets.token_bytes(16)
            client = AttachedClient(session, share.name, connection, who.pid, partial(self._ended, token, share))
            self.clients[token] = client
            if opening.page_locks:
                session.keep_memory()
            with ExitStack() as given:
                seat = SeatCalls(share.cache, ranks, b"", account.pins).seat
                slabs, descriptors = _slabs_of(seat, len(ranks), given, is_read_only=session.is_read_only)
                answer = self._attached(token, slabs, places_of(seat), is_read_only=session.is_read_only)
                await handshake.send_opened(connection, answer, descriptors)
            await client.link.start(connection)
        except BaseException:  # cancelled, too: what was taken for a client that is none goes back
            if client is not None:
                client.end()  # nothing was asked for yet
            else:
                self._shares.leave(share)
            raise
        return True

    def _attached(
        self,
        token: bytes,
        slabs: tuple[protocol.Slab, ...],
        places: tuple[tuple[str, int, int], ...],
        *,
        is_read_only: bool,
    ) -> Attached:
        settings, limits = self._settings, self._settings.limits
        tiers = (
            protocol.Tier(tier_name(tier), tier.medium, isinstance(tier, BookedTierSettings)) for tier in settings.tiers
        )
        return Attached(
            token, slabs, settings.codec, tuple(tiers), places, limits.load_timeout_s, limits.store_timeout_s,
            int(limits.swap_space), int(limits.window), is_read_only,
        )  # fmt: skip

    async def _introduce(self, connection: socket.socket, opening: Introduce) -> None:
        client = self._client(opening.token)
        async with asyncio.timeout(OPENING_S):
            pidfds = await handshake.receive_descriptors(connection, len(opening.ranks))
        client.session.jobs.watch(opening.ranks, pidfds)
        await handshake.send_opened(connection, Introduced())

    async def _map(self, connection: socket.socket, opening: MapSlab) -> None:
        session = self._client(opening.token).session
        fd = session.slab(opening.name).fd
        if opening.page_locks:
            session.keep_memory()
        with _descriptor(fd, is_read_only=session.is_read_only) as given:
            await handshake.send_opened(connection, Mapped(session.is_read_only), [given])

    def begin_no_more(self) -> None:
        """Admit nobody, and begin nothing more for any client: the caches are about to be closed."""
        self.is_draining = True
        for client in self.clients.values():
            client.session.is_ending = True

    async def end_all(self) -> None:
        """End all clients: nobody else uses any more what one of them may be writing to."""
        for client in list(self.clients.values()):
            client.link.close()
            client.end()
            await client.session.ended()

    def _client(self, token: bytes) -> AttachedClient:
        client = self.clients.get(token)
        if client is None:
            raise BackendUnavailableError("no client has this token: attach again")
        return client

    def _ended(self, token: bytes, share: Share) -> None:
        self.clients.pop(token, None)
        self._shares.leave(share)


def _slabs_of(
    seat: Seat, num_ranks: int, given: ExitStack, *, is_read_only: bool
) -> tuple[tuple[protocol.Slab, ...], list[int]]:
    """Return what a client maps, and descriptors of it, to be passed on as long as ``given`` is open."""
    slabs, descriptors = [], []
    for number, chain in enumerate(seat.chains):
        slab = chain.host.slab
        group, rank = divmod(number, num_ranks)
        slabs.append(protocol.Slab(slab.name, slab.num_slots, slab.stride_bytes, slab.payload_bytes, group, rank))
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
