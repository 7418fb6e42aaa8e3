"""Where a page is served, and whose hints it takes: said in settings, and read by the command line."""

import ipaddress
import re
from typing import Final

from tiered_kv.values.errors import ConfigurationError

DEFAULT: Final = "127.0.0.1:8420"
LEAST_TOKEN: Final = 16
"""Characters: a shorter one is guessed."""
_UNIX: Final = "unix:"
_HOST_PORT: Final = re.compile(r"(?P<host>[\w.-]+|\[[0-9a-fA-F:.%]+\]|):(?P<port>\d{1,5})")


def page_address(given: object) -> str:
    """Return an address in the one form that is used below: ``"host:port"``, ``"unix:/path"``, or ``""`` for none.

    Args:
        given: That, a port of this host, True for the default, or False or None for none.

    Raises:
        ConfigurationError: It is no such thing.
    """
    text = "" if given is None else str(given)
    if text.lower() in {"", "false"}:
        return ""
    if text.lower() == "true":
        return DEFAULT
    if text.startswith(_UNIX) and len(text) > len(_UNIX):
        return text
    match = _HOST_PORT.fullmatch(f"127.0.0.1:{text}" if text.isdecimal() else text)
    if not isinstance(given, int | str) or match is None or int(match["port"]) > 65535:
        raise ConfigurationError(
            f'page must be an address to serve it at, e.g. "{DEFAULT}", a port, "unix:/path/of.sock" or true, '
            f"got {given!r:.80}"
        )
    return f"{match['host'] or '127.0.0.1'}:{match['port']}"


def checked_token(token: str) -> str:
    """Return a token for hints, if it is empty or hard to guess.

    Raises:
        ConfigurationError: It is too short, or no header can have it.
    """
    if token and (len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token):
        raise ConfigurationError(
            f"a token for hints has {LEAST_TOKEN} characters or more, all of them ASCII and no spaces: "
            "openssl rand -hex 32 makes one"
        )
    return token


def parts_of(address: str) -> tuple[str, int] | str:
    """Return host and port, or the path of a socket, of what `page_address` returned."""
    if address.startswith(_UNIX):
        return address.removeprefix(_UNIX)
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_of_this_host(host: str) -> bool:
    """Say whether only this host can reach what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
