"""A client as its server sees it: its process, its connections, and a session that ends with both."""

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tiered_kv.errors import CapacityError
from tiered_kv.host import messages
from tiered_kv.host.link import Link
from tiered_kv.host.session import Send, Session
from tiered_kv.host.wire import WireError
from tiered_kv.log import log

_SO_PEERPIDFD: Final = 77  # Linux 6.5; the socket module does not name it
_PEER: Final = struct.Struct("3i")
_MOST_BESIDE: Final = 8
"""Connections of one client beside its first; ours has one."""
_MOST_EARLY: Final = 1024
"""Questions on these that came before what they follow."""


class AttachedClient:
    """The connections of one client, and its session, which ends once its process touches no slot any more.

    It says so itself before it goes. Else its end of the connection is closed by the system when its process ends, and
    the process is watched as well where the system lets us: a GPU may be copying yet when the connection is closed.
    """

    def __init__(self, session: Session, model: str, connection: socket.socket, ended: Callable[[], None]) -> None:
        """Watch the process behind a connection; `link` is started by the caller, and ``ended`` called once."""
        self.session = session
        self.model = model
        self.link: Link[messages.Request] = Link(
            messages.request_from, self._take, self._lost, broken=self._break, is_bounded=True
        )
        self._ended = ended
        self._beside: list[Link[messages.Request]] = []
        self._num_taken = 0
        self._early: list[tuple[int, messages.Request, Send]] = []  # came on another connection before what it follows
        self._has_ended = False
        self._pidfd = _pidfd_of(connection)
        if self._pidfd >= 0:
            asyncio.get_running_loop().add_reader(self._pidfd, self.end)

    def beside(self) -> "Link[messages.Request]":
        """Return the link of another connection of this client.

        Raises:
            CapacityError: It has enough of them.
        """
        if len(self._beside) >= _MOST_BESIDE:
            raise CapacityError(f"this client has {len(self._beside)} connections beside its first")
        after = 0

        def take(request: messages.Request) -> None:
            nonlocal after
            if isinstance(request, messages.After):
                after = request.num_messages
            elif self._num_taken >= after:
                self.session.take(request, made.send)
            elif len(self._early) >= _MOST_EARLY:
                raise WireError(f"{len(self._early)} questions follow what has not come")
            else:
                self._early.append((after, request, made.send))

        made: Link[messages.Request] = Link(
            messages.request_from,
            take,
            lambda: self._beside.remove(made),
            broken=lambda _: made.close(),
            is_bounded=True,
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
        """Nothing comes any more. While it may be copying, the end of its process is waited for where that is known."""
        if self._pidfd < 0 or not self.session.is_touching:
            self.end()


def _pidfd_of(connection: socket.socket) -> int:
    """Return a descriptor of the client's process, or -1 where the system gives none."""
    with suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    pid, _, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    with suppress(OSError):
        return os.pidfd_open(pid) if pid > 0 else -1  # 0: of a PID namespace that is not ours
    return -1
