"""What the workers of a client's planner need of the server: that it watches them, and the memory that they copy to.

Both go by file descriptors on connections of their own, so that it does not matter what number a process has to whom.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tiered_kv.errors import ConfigurationError
from tiered_kv.host import handshake
from tiered_kv.host.connection import Connection
from tiered_kv.host.far_side import FarSide
from tiered_kv.host.opening import Introduce, Mapped, MapSlab
from tiered_kv.log import log
from tiered_kv.plan import SlabHandle
from tiered_kv.tiers.tasks import in_a_thread
from tiered_kv.transfers.workers import Process, Workers

_MAP_S: Final = 10.0


@dataclass(frozen=True)
class ServedSlab(SlabHandle):
    """A slab of a server's; it can be attached as long as the client is, which has the token.

    Attributes:
        path: Of the server's socket.
        token: Of the client.
        name: The slab's, there.
    """

    path: str
    token: bytes
    name: str

    def descriptor(self) -> tuple[int, bool]:
        """See `SlabHandle.descriptor`.

        Raises:
            ConfigurationError: The server has no such slab.
            BackendUnavailableError: It is away, or the client is not attached any more.
        """
        connection, answer, descriptors = handshake.begin(self.path, MapSlab(self.token, self.name), _MAP_S)
        if not isinstance(answer, Mapped) or len(descriptors) != 1:
            handshake.give_back(connection, descriptors)
            raise ConfigurationError(f"the server answered {type(answer).__name__} to who wants to map a slab")
        connection.close()
        return descriptors[0], answer.is_read_only


class Introductions:
    """What has the server watch the workers of one client's planner. For the event loop's thread."""

    def __init__(self, connection: Connection, workers: Workers, here: FarSide, ended: Callable[[str], None]) -> None:
        """Have each server know ``workers``; ``ended`` is told whenever it does, or why it does not."""
        self._connection = connection
        self._workers = workers
        self._here = here
        self._ended = ended
        self._known: set[Process] = set()
        self._underway: asyncio.Task[None] | None = None
        self._is_open = True

    @property
    def are_due(self) -> bool:
        """Whether there are workers that the server does not know."""
        return bool(self._workers.unlike(self._known))

    def start_over(self) -> None:
        """Another server is there, which knows none."""
        self._known = set()
        self.soon()

    def soon(self) -> None:
        """Introduce those that the server does not know."""
        if self._underway is None and self._connection.there is not None and self._is_open:
            self._underway = self._here.tasks.spawn(self._introduce(), "introduce workers")

    def close(self) -> None:
        """Introduce none any more."""
        self._is_open = False

    async def _introduce(self) -> None:
        why, workers = "", self._workers
        try:
            while (there := self._connection.there) is not None and (strangers := workers.unlike(self._known)):
                said = there.path, there.attached.token, workers, strangers, self._connection.timeout_s
                await in_a_thread(self._here.loop_calls, introduce, *said)
                if self._connection.there is there:
                    self._known.update(strangers)
        except Exception as error:  # noqa: BLE001 - whatever it is, e.g. no descriptor is left: who waits hears of it
            why = str(error) or type(error).__name__
            log("warning", "host.workers_refused", path=self._connection.path, error=why)
        self._underway = None
        self._ended(why)


def introduce(path: str, token: bytes, workers: Workers, processes: Sequence[Process], timeout_s: float) -> None:
    """Have the server watch the processes that work for ranks of a client; blocks the thread.

    Raises:
        ConfigurationError: A rank has a worker that is alive, or one of these has ended.
        BackendUnavailableError: The server is away, or the client is not attached any more.
    """
    ranks = tuple((process.rank, process.pid) for process in processes)
    connection, _, came = handshake.begin(path, Introduce(token, ranks), timeout_s)
    sent: list[int] = []
    try:
        sent = workers.descriptors(processes)
        handshake.hand_over(connection, sent)
    finally:
        handshake.give_back(connection, came)
        for each in sent:
            os.close(each)
