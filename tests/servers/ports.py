"""Ports for servers of tests, that are given when the server is started and bound by it seconds later; and for none.

And what looks names up, if it hangs.
"""

import itertools
import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

# A port that the kernel gave and took back is soon given again, to any connection that another test makes meanwhile.
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_reserved: list[socket.socket] = []
_LOWEST = 10_000


def free_port() -> int:
    """Return a port that nobody listens on, none of those that the kernel gives, and to nobody else while we live."""
    for port in _numbers:
        if not _reserve(port):
            continue
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError("an endless line of numbers has no end")


@contextmanager
def deaf_port() -> Iterator[int]:
    """Yield a port on which not even a connection is made: its queue is full, and nobody takes any."""
    with socket.socket() as deaf, ExitStack() as waiting:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(4):
            each = waiting.enter_context(socket.socket())
            each.settimeout(0)
            each.connect_ex(deaf.getsockname())
        yield deaf.getsockname()[1]


@contextmanager
def hung_resolver(patch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], threading.Event]]:
    """Yield who asks where ``a.server`` is, which is this machine, and what has them answered; others are found."""
    look_up, asked, may_answer = socket.getaddrinfo, list[str](), threading.Event()

    def hang(host: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as it is
        if host == "a.server" and not options.get("flags"):
            asked.append(threading.current_thread().name)
            may_answer.wait()
            host = "127.0.0.1"
        return look_up(host, *args, **options)

    patch.setattr(socket, "getaddrinfo", hang)
    try:
        yield asked, may_answer
    finally:
        may_answer.set()


def _reserve(port: int) -> bool:
    """Say whether no test that runs anywhere on this machine has the port; an abstract name ends with its process."""
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0tiered_kv-tests-port-{port}")
    except OSError:
        mark.close()
        return False
    _reserved.append(mark)
    return True


def _candidates() -> range:
    given = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    return range(_LOWEST, max(given, _LOWEST + 10_000))


# Other processes of the same run begin elsewhere.
_numbers = itertools.cycle(random.Random(os.getpid()).sample(_candidates(), k=len(_candidates())))
