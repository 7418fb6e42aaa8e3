"""How a client connects to a server that may not be there yet, in a thread: nobody has to wait for one that hangs."""

import asyncio
import socket
import threading
from typing import Final

from tiered_kv.errors import BackendUnavailableError, ConfigurationError
from tiered_kv.host import handshake
from tiered_kv.host.opening import Attach, Attached, Opened
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.tiers.tasks import WorkerPool

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 2.0

Begun = tuple[socket.socket, Attached, list[int]]


class Attempts:
    """Those of one client, one at a time. For the event loop's thread."""

    def __init__(self, path: str, opening: Attach, timeout_s: float, loop_calls: LoopCalls) -> None:
        """Say ``opening`` to whoever listens at ``path``; each attempt may take ``timeout_s``."""
        self._said = path, opening, timeout_s
        self._thread = WorkerPool("attach", 1, loop_calls)

    async def begin(self) -> Begun:
        """Connect; what comes of it is the caller's to close.

        Raises:
            ConfigurationError: The server refuses this client, or is of another version.
            BackendUnavailableError: There is none, or it does not answer.
        """
        attempt = _Attempt()
        try:
            connection, attached, descriptors = await self._thread.run(attempt.make, *self._said)
        except asyncio.CancelledError:
            attempt.give_up()
            raise
        if not isinstance(attached, Attached):
            handshake.give_back(connection, descriptors)
            raise ConfigurationError(f"the server answered {type(attached).__name__} to a client that attaches")
        return connection, attached, descriptors

    async def begin_in_time(self) -> Begun:
        """`begin`, also with a server that has yet to come, within the time of one attempt."""
        loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
        deadline = loop.time() + self._said[2]
        while True:
            try:
                return await self.begin()
            except BackendUnavailableError:
                if loop.time() + pause_s > deadline:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def close(self) -> None:
        """Make no more; what one brings that is under way was given up by who awaited it."""
        self._thread.close()


class _Attempt:
    """One of them, by whose end nobody may wait for it any more, nor its event loop be there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: tuple[socket.socket, Opened, list[int]] | None = None
        self._is_given_up = False

    def make(self, path: str, opening: Attach, timeout_s: float) -> tuple[socket.socket, Opened, list[int]]:
        """Make it, in a thread."""
        begun = handshake.begin(path, opening, timeout_s)
        with self._lock:
            self._begun, is_wanted = begun, not self._is_given_up
        if not is_wanted:
            handshake.give_back(begun[0], begun[2])
        return begun

    def give_up(self) -> None:
        """Have what comes of it go back, now or as soon as it comes."""
        with self._lock:
            begun, self._is_given_up = self._begun, True
        if begun is not None:
            handshake.give_back(begun[0], begun[2])
