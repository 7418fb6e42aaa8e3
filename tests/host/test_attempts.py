"""How long a client that is entered waits for a server that has yet to come."""

import asyncio
import errno
import os
import socket

import pytest

from tests.support.virtual import VirtualLoop, run
from tiered_kv.host import handshake
from tiered_kv.host.connection import Attempts, Begun
from tiered_kv.host.protocol import Health
from tiered_kv.values.errors import BackendUnavailableError


class NoServer(Attempts):
    """Attempts that fail, each after some time."""

    def __init__(self, timeout_s: float, takes_s: float) -> None:
        self._said = "nowhere", None, timeout_s  # type: ignore[assignment]  # nothing is said to nobody
        self._takes_s = takes_s
        self.num_made = 0

    async def begin(self) -> Begun:
        """Find none."""
        self.num_made += 1
        await asyncio.sleep(self._takes_s)
        raise BackendUnavailableError("no server")


def waited_s(attempts: Attempts) -> float:
    """Return how long it takes until they are given up."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.is_busy = lambda: False
        started = loop.time()
        with pytest.raises(BackendUnavailableError):
            await attempts.begin_in_time()
        return loop.time() - started

    return run(main)


def test_who_has_no_descriptor_left_finds_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """For now: it is no other error than one that passes, and is tried again as that is."""

    def refused(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socket", refused)
    with pytest.raises(BackendUnavailableError, match="no server at /run/kv: Too many open files"):
        handshake.begin("/run/kv", Health(), 1.0)


@pytest.mark.parametrize("timeout_s", [0.0, 0.07, 5.0])
def test_a_server_is_waited_for_as_long_as_was_said(timeout_s: float) -> None:
    """Not for less, though the pauses between attempts grow."""
    assert waited_s(NoServer(timeout_s, takes_s=0.0)) == pytest.approx(timeout_s)


def test_a_server_that_hangs_is_asked_once() -> None:
    """An attempt that took all the time there is is the last."""
    attempts = NoServer(5.0, takes_s=5.0)
    assert waited_s(attempts) == pytest.approx(5.0)
    assert attempts.num_made == 1
