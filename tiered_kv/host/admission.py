"""Who comes to a server, and what for: clients, which stay, and connections for one question.

Who may attach is decided by the socket's mode, owner and group; whose process it is, the system says.
"""

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from tiered_kv.cache.tiered_kv import seat_of
from tiered_kv.host import handshake, protocol
from tiered_kv.host.protocol import (
    LONGEST_NAME,
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
from tiered_kv.settings.chain_settings import tier_name
from tiered_kv.settings.settings import TieredKVSettings
from tiered_kv.settings.tier_settings import BookedTierSettings
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError
from tiered_kv.values.log import log


class Admission:
    """Decides who may attach to one server, and keeps those who are. For the event loop's thread.

    Attributes:
        clients: Those that are attached, by token.
        is_draining: Whether no more may attach.
    """

    def __init__(self, settings: TieredKVSettings, shares: Shares, health: Callable[[], dict[str, Any]]) -> None:
        """Admit clients to ``shares``; ``health`` is told to whoever asks."""
        self.clients: dict[bytes, Session] = {}
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
        name = f"{opening.name:.{LONGEST_NAME}} ({who})"
        log("info", "host.attaching", client=name, gid=who.gid, model=f"{opening.model:.{LONGEST_NAME}}")
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
            share, parts = await self._shares.join(model, layout, shards)
        finally:
            self._num_attaching -= 1  # from here to its place among the clients nothing is waited for
        session = None
        try:
            self._check_goes_on()  # while it was opened, too
            assert share.cache is not None  # noqa: S101 - it was joined
            token = secrets.token_bytes(16)
            session = self.clients[token] = Session(
                name, share.name, share.cache, parts, len(shards),
                Account(host, self._settings.limits.pin_quota, seat_of(share.cache).pins), host,
                connection, who.pid, partial(self._ended, token, share),
                is_read_only=opening.is_read_only or who.uid in host.read_only_uids,
            )  # fmt: skip
            if opening.page_locks:
                session.keep_memory()
            with ExitStack() as given:
                descriptors = [given.enter_context(_descriptor(session, slab.fd)) for slab in session.slabs]
                await handshake.send_opened(connection, self._attached(token, session), descriptors)
            await session.link.start(connection)
        except BaseException:  # cancelled, too: what was taken for a client that is none goes back
            if session is not None:
                session.end()  # nothing was asked for yet
            else:
                self._shares.leave(share)
            raise
        return True

    def _attached(self, token: bytes, session: Session) -> Attached:
        """Return what a client is told that may begin."""
        settings, limits, slabs = self._settings, self._settings.limits, []
        for number, slab in enumerate(session.slabs):
            group, rank = divmod(number, len(session.seat.shards))
            slabs.append(protocol.Slab(slab.name, slab.num_slots, slab.stride_bytes, slab.payload_bytes, group, rank))
        tiers = (
            protocol.Tier(tier_name(tier), tier.medium, isinstance(tier, BookedTierSettings)) for tier in settings.tiers
        )
        return Attached(
            token, tuple(slabs), settings.codec, tuple(tiers), places_of(session.seat), limits.load_timeout_s,
            limits.store_timeout_s, int(limits.swap_space), int(limits.window), session.is_read_only,
        )  # fmt: skip

    async def _introduce(self, connection: socket.socket, opening: Introduce) -> None:
        session = self._client(opening.token)
        async with asyncio.timeout(OPENING_S):
            pidfds = await handshake.receive_descriptors(connection, len(opening.ranks))
        session.jobs.watch(opening.ranks, pidfds)
        await handshake.send_opened(connection, Introduced())

    async def _map(self, connection: socket.socket, opening: MapSlab) -> None:
        session = self._client(opening.token)
        fd = session.slab(opening.name).fd
        if opening.page_locks:
            session.keep_memory()
        with _descriptor(session, fd) as given:
            await handshake.send_opened(connection, Mapped(session.is_read_only), [given])

    def begin_no_more(self) -> None:
        """Admit nobody, and begin nothing more for any client: the caches are about to be closed."""
        self.is_draining = True
        for session in self.clients.values():
            session.is_ending = True

    async def end_all(self) -> None:
        """End all clients: nobody else uses any more what one of them may be writing to."""
        for session in list(self.clients.values()):
            session.end()
            await session.ended()

    def _client(self, token: bytes) -> Session:
        if (session := self.clients.get(token)) is None:
            raise BackendUnavailableError("no client has this token: attach again")
        return session

    def _ended(self, token: bytes, share: Share) -> None:
        self.clients.pop(token, None)
        self._shares.leave(share)


@contextmanager
def _descriptor(session: Session, fd: int) -> Iterator[int]:
    """Give a descriptor of memory to pass on to a client: one that cannot be written by, to who only reads."""
    if not session.is_read_only:
        yield fd
        return
    given = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield given
    finally:
        os.close(given)
