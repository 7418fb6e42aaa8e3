"""The socket of a server, and where connections wait until they have said what they are for: not long, and not many.

`listen` makes the socket where clients look for it, with its mode and group, and never for two servers at once.

Anyone who may write to the socket may connect ten thousand times and say nothing. So if too many connections are
silent, a new one ends the oldest of the process that has most of them. A client that says at once who it is gets in,
however many there are. A connection for one question counts as silent until it has its answer: who asks may be slow to
send what belongs to it, or to read.
"""

import asyncio
import errno
import fcntl
import grp
import os
import socket
import stat
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from tiered_kv.host import handshake, wire
from tiered_kv.host.protocol import Attach, Opening, Refused
from tiered_kv.settings.tier_settings import HostSettings
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.values.errors import ConfigurationError, TieredKVError
from tiered_kv.values.log import log

OPENING_S: Final = 10.0
"""What a connection may take to say what it is for."""
_MOST_SILENT: Final = 64
_PAUSE_S: Final = 0.1
_NO_MORE: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PEER: Final = struct.Struct("3i")
_BACKLOG: Final = 128
_LONGEST_NAME: Final = 32
"""Of the socket's name, in that of the file that is to become it."""


class Peer(NamedTuple):
    """Whose process connects, as the system says it; a ``pid`` of 0 is of another PID namespace."""

    pid: int
    uid: int
    gid: int

    def __str__(self) -> str:
        """Name the process, for people."""
        return f"process {self.pid}, user {self.uid}"


Admit = Callable[[socket.socket, Opening, Peer], Awaitable[bool]]


class Reception:
    """Accepts connections on one listening socket, and hears what they are for. For the event loop's thread.

    Attributes:
        num_refused: Clients that were told why they may not begin.
    """

    def __init__(self, listener: socket.socket, tasks: Tasks, admit: Admit) -> None:
        """Give each connection to ``admit``, with what it is for, and close those that it does not keep.

        Args:
            listener: Non-blocking.
            tasks: For one connection each.
            admit: Says whether it has taken a connection over; a `TieredKVError` is told to the client.
        """
        self.num_refused = 0
        self._listener = listener
        self._tasks = tasks
        self._admit = admit
        self._silent: dict[socket.socket, Peer] = {}  # the oldest first

    async def receive(self) -> None:
        """Take connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno not in _NO_MORE:
                    raise
                log("warning", "host.cannot_accept", error=error.strerror or str(error), silent=len(self._silent))
                self._drop_oldest()
                await asyncio.sleep(_PAUSE_S)
                continue
            connection.settimeout(0.0)
            if len(self._silent) >= _MOST_SILENT:
                self._drop_oldest()
            who = Peer(*_PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)))
            self._silent[connection] = who
            self._tasks.spawn(self._begin(connection, who), "begin a connection")
            await asyncio.sleep(0)  # an accept that need not wait gives nobody else a turn

    def _drop_oldest(self) -> None:
        """Have one silent connection end, of whoever has most: its task sees that nothing comes any more."""
        for most, _ in Counter(self._silent.values()).most_common(1):
            oldest = next(connection for connection, who in self._silent.items() if who == most)
            del self._silent[oldest]
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)

    async def _begin(self, connection: socket.socket, who: Peer) -> None:
        """Find out what a connection is for, and answer it; whatever goes wrong ends this connection alone."""
        is_taken = False
        try:
            async with asyncio.timeout(OPENING_S):
                version = await handshake.greeted(connection)
                if version != wire.VERSION:
                    log("warning", "host.version_refused", client=str(who), theirs=version, ours=wire.VERSION)
                    return
                opening = await handshake.receive_opening(connection)
            if isinstance(opening, Attach):
                self._silent.pop(connection, None)
            is_taken = await self._admit(connection, opening, who)
        except TieredKVError as error:
            self.num_refused += 1
            log("warning", "host.client_refused", client=str(who), error=str(error))
            with suppress(OSError):
                await handshake.send_opened(connection, Refused(wire.kind_of(error), str(error)))
        except (OSError, wire.WireError) as error:  # a TimeoutError included
            log("warning", "host.client_gave_up", client=str(who), error=str(error) or type(error).__name__)
        finally:
            self._silent.pop(connection, None)
            if not is_taken:
                connection.close()


def listen(host: HostSettings) -> tuple[socket.socket, int]:
    """Return a socket that listens at ``host.socket``, and a descriptor: until it is closed no other server listens.

    Raises:
        ConfigurationError: Another server listens there, something else than a socket lies there, or the socket cannot
            be made.
    """
    path = host.socket
    wire.check_socket(path)
    try:
        _check_place(path)
        lock_fd = _lock(path.with_name(f"{path.name}.lock"))
        try:
            return _bound(path, host), lock_fd
        except BaseException:
            os.close(lock_fd)
            raise
    except OSError as error:
        raise ConfigurationError(f"cannot listen at {path}: {error.strerror or error}") from error


def _check_place(path: Path) -> None:
    """Raise unless there is a directory, and in it nothing, or a socket that another server has left."""
    if not path.parent.is_dir():
        raise ConfigurationError(f"cannot listen at {path}: there is no directory {path.parent}, make it first")
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigurationError(f"cannot listen at {path}: something else than a socket is there, which stays")


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise ConfigurationError(f"another server listens at {path.with_suffix('')}: {path} is locked") from None
    return fd


def _bound(path: Path, host: HostSettings) -> socket.socket:
    """Return the socket. It is made under another name: nobody sees it before it has mode and group."""
    new = path.with_name(f".{os.getpid()}.{path.name[:_LONGEST_NAME]}")
    with suppress(FileNotFoundError):
        new.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{new.name}")  # which is short enough, however long the folder's path is
        new.chmod(int(host.mode, 8))
        if host.group:
            os.chown(new, -1, _group_id(host.group))
        listener.listen(_BACKLOG)
        listener.settimeout(0.0)
        new.rename(path)
    except BaseException:
        listener.close()
        with suppress(OSError):
            new.unlink()
        raise
    finally:
        os.close(folder)
    return listener


def _group_id(group: str) -> int:
    if group.isdecimal():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigurationError(f"there is no group {group!r}") from None
