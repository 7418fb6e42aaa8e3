"""Connections to one server, logged in and kept for the next call.

A connection whose call did not end (cancelled, late, lost), or that has said more than it was asked, is closed and
never lent again: its next reply would be another call's.
"""

import asyncio
import copy
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pydantic import SecretStr

from tiered_kv_backends.resp import Connection, ProtocolError, command
from tiered_kv_backends.resp_socket import Address, Socket
from tiered_kv_backends.secrets import scrubbed


@dataclass(frozen=True)
class Login:
    """What a new connection says first."""

    username: str | None = None
    password: SecretStr | None = None
    database: int = 0
    tls: ssl.SSLContext | None = None

    def commands(self) -> list[bytes]:
        """AUTH and SELECT, as far as they are needed."""
        commands = []
        if self.password is not None:
            user = [self.username.encode()] if self.username else []
            commands.append(command(b"AUTH", *user, self.password.get_secret_value().encode()))
        if self.database:
            commands.append(command(b"SELECT", b"%d" % self.database))
        return commands

    def secrets(self) -> list[str]:
        """What must not be repeated, whatever a server says."""
        return [self.password.get_secret_value()] if self.password is not None else []


class LoginError(ConnectionError):
    """The server did not accept a login; its own words are the message."""


async def log_in(address: Address, login: Login) -> Connection:
    """Return a connection that is ready for blocks.

    Raises:
        OSError: Not reachable, or TLS failed (`ssl.SSLError`), or a `LoginError`.
    """
    connection = Connection(await Socket.connect(address, login.tls))
    try:
        for each in login.commands():
            _check(await connection.say(each), login)
    except BaseException:  # cancelled, too: nobody else knows of the connection
        connection.close()
        raise
    return connection


def _check(said: str, login: Login) -> None:
    if not said.startswith("+"):
        said = scrubbed(said, login.secrets())
        raise LoginError(said[1:]) if said.startswith("-") else ProtocolError(f"it says {said[:80]!r}")


class Pool:
    """At most ``size`` connections to one server: lent one call each, kept while they are whole."""

    def __init__(self, address: Address, login: Login, size: int, connect_timeout_s: float) -> None:
        self.address = address
        self._is_asking = False
        self._login = login
        self._connect_timeout_s = connect_timeout_s
        self._room = asyncio.Semaphore(size)
        self._idle: list[Connection] = []
        self._lent: set[Connection] = set()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Lend a connection; whatever is raised inside, cancellation included, closes it.

        Raises:
            OSError: As `log_in`; also `TimeoutError`.
        """
        async with self._room:
            connection = self._take_idle()
            if connection is None:
                async with asyncio.timeout(self._connect_timeout_s):
                    connection = await log_in(self.address, self._login)
            connection.is_asking = self._is_asking
            self._lent.add(connection)
            try:
                yield connection
            except BaseException:  # cancelled, too: half of an answer may be left in it
                connection.close()
                raise
            finally:
                self._lent.discard(connection)
            self._idle.append(connection)

    def asking(self) -> "Pool":
        """Return the same connections, for what a node is just getting."""
        other = copy.copy(self)
        other._is_asking = True  # noqa: SLF001 - of the same class
        return other

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_clean():
                return connection
            connection.close()
        return None

    def drop_idle(self) -> None:
        """Close those that nobody uses: the next call makes a new one."""
        while self._idle:
            self._idle.pop().close()

    def close(self) -> None:
        """Close all, those in use too: their calls end with an error."""
        self.drop_idle()
        for connection in self._lent:
            connection.close()
