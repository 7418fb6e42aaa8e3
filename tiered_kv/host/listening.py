"""The socket of a server: made where clients look for it, with its mode and group, and never by two servers at once."""

import fcntl
import grp
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from tiered_kv.errors import ConfigurationError
from tiered_kv.host_settings import HostSettings

_BACKLOG: Final = 128
_LONGEST_PATH: Final = 107


def listen(host: HostSettings) -> tuple[socket.socket, int]:
    """Return a socket that listens at ``host.socket``, and a descriptor: until it is closed no other server listens.

    Raises:
        ConfigurationError: Another server listens there, something else than a socket lies there, or the socket cannot
            be made.
    """
    path = host.socket
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ConfigurationError(f"the path of a socket has {_LONGEST_PATH} bytes at most: {path}")
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
    new = path.with_name(f".{path.name}.{os.getpid()}")
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


def _group_id(group: str) -> int:
    if group.isdecimal():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigurationError(f"there is no group {group!r}") from None
