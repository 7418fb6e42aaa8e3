"""What the workers of a client's planner need of the server: that it watches them, and the memory that they copy to.

Both go by file descriptors on connections of their own, so that it does not matter what number a process has to whom.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tiered_kv.errors import ConfigurationError
from tiered_kv.host import handshake
from tiered_kv.host.opening import Introduce, Mapped, MapSlab
from tiered_kv.plan import SlabHandle
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
