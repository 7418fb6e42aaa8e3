"""A simulated client that plans: the shipped code of clients, from their end of a connection on, and a worker process.

The planner and its loop are one process, the worker another.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.cache.planner import Planner
from tiered_kv.host import protocol, wire
from tiered_kv.host.attachment import Attachment
from tiered_kv.host.client_planner import FarPlanner
from tiered_kv.host.client_transfers import Starts
from tiered_kv.host.connection import Connection, FarSide
from tiered_kv.memory.host import HostSlab
from tiered_kv.system import Queue, system
from tiered_kv.testing.simulation.client_connections import PATIENCE_S, ClientSocket, GivenSlab, NoGPU
from tiered_kv.testing.simulation.engine import LAYOUT, Memory, span
from tiered_kv.testing.simulation.known import within
from tiered_kv.testing.simulation.planned_jobs import PLANNED_S, Planning, WorkerProcess
from tiered_kv.testing.simulation.threads import SimulatedProcess
from tiered_kv.testing.simulation.world import LIMITS, LONGEST_S
from tiered_kv.values.errors import ClosedError, ConfigurationError, Reason
from tiered_kv.values.keys import BlockKeys, ModelIdentity, Shard, epoch_digest
from tiered_kv.values.loop_calls import LoopCalls
from tiered_kv.values.plan import JobResult, SlabHandle

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.requester import Requester
    from tiered_kv.testing.simulation.workload import Requests

_DRIVERS: Final = 3
_JOBS: Final = 4
"""Of each driver."""
_LATE_S: Final = (0.0, 0.0, 0.0, 0.01, 0.3, 3.0)
"""How long a worker does something else before it does what is planned, and before it says that it has."""
_AWAY_S: Final = 0.1
"""Before the next plan where there was no server for the last."""
_MAY_WAIT_S: Final = 15.0
"""For so long who loads may wait for blocks that a worker is to copy."""


class _ClientsPlanning(Planning):
    """What a client plans: some of it may not be counted by the server, nor kept, as a connection may be lost."""

    planned_s = PLANNED_S + 3 * PATIENCE_S
    """By then there is a plan, or it is known that there is no server."""

    def __init__(self, client: "PlanningClient", requests: "Requester", planner: Planner) -> None:
        self._client = client
        self._requests = requests
        super().__init__(requests.world, planner, [client.worker], requests.world.known)

    @override
    def slabs(self) -> Sequence[SlabHandle]:
        return self._client.slabs

    @override
    def begins(self, keys: BlockKeys, *, is_load: bool) -> None:
        requests = self._requests
        requests.count_asked("load" if is_load else "store", len(keys), is_sure=False)
        if not is_load:
            requests.copies_until = max(requests.copies_until, requests.now + _MAY_WAIT_S)

    @override
    def may_be_lost(self, mask: NDArray[np.bool_]) -> bool:
        return self._requests.may_be_lost(is_planned=True) or not mask.all()

    @override
    def may_end_early(self, result: JobResult) -> bool:
        return Reason.SERVER_AWAY in result.errors or self._client.leaves_early

    @override
    def is_explained(self, error: ClosedError | ConfigurationError) -> bool:
        is_closed = isinstance(error, ClosedError)
        return self._client.leaves_early if is_closed else "worker" in str(error)  # it has just ended


class PlanningClient:
    """A client whose planner uses servers, from the beginning of its process.

    Attributes:
        process: Where it plans.
        sockets: Its ends of its connections.
        is_begun: Whether it waits for its first server.
        is_done: Whether all that it has planned has ended.
        leaves_early: Whether it closes before that.
        worker: The process that copies.
        slabs: The memory of its server, as a worker is given it.
    """

    def __init__(self, requests: "Requests", introduced: Callable[[protocol.Introduce, Sequence[int]], None]) -> None:
        self.sockets: list[ClientSocket] = []
        self.is_begun = self.is_done = self.leaves_early = False
        self._requests = requests
        self._world = requests.world
        self._weights = requests.weights
        self._introduced = introduced
        self.slabs: tuple[GivenSlab, ...] = ()
        self._begun: Queue[tuple[ClientSocket, protocol.Attached, list[int]]] = system().queue()
        self.worker = WorkerProcess(self._world, "a client's worker", Memory(), late_s=_LATE_S)
        self._planning: _ClientsPlanning | None = None
        self.process = self._world.start_process(f"planning client {self._world.number()}", self._main)
        self._world.bury(self)

    # The server's side.

    def attach(self, socket: ClientSocket, token: bytes, slabs: Sequence[HostSlab]) -> None:
        """Have a connection; in the server's process."""
        said = tuple(
            protocol.Slab(slab.name, slab.num_slots, slab.stride_bytes, slab.payload_bytes, group, 0)
            for group, slab in enumerate(slabs)
        )
        attached = protocol.Attached(
            token, said, "none", (), (), LIMITS.load_timeout_s, LIMITS.store_timeout_s, 0, 1 << 20, is_read_only=False
        )
        self.sockets.append(socket)
        self._begun.put((socket, attached, [slab.fd for slab in slabs]))

    def may_leave(self) -> None:
        """Let the client end, with what it has planned."""
        self.leaves_early |= not self.is_done
        self._calls.call(self._leaving.set)

    def give_up(self) -> None:
        """End the worker of a client that has ended: nobody hears how stores have ended that it had planned."""
        if self._planning is not None:
            self._planning.give_up()

    # Its own.

    async def _main(self, process: SimulatedProcess) -> None:
        self._world.bury(asyncio.current_task())
        self._calls = LoopCalls(asyncio.get_running_loop())
        self._leaving = asyncio.Event()
        self.is_begun = True
        shards, device = (Shard(0, 1),), NoGPU()
        opening = protocol.Attach.of(process.name, ModelIdentity("model", self._weights), LAYOUT, shards)
        make_side = partial(FarSide, device, LAYOUT, shards, lambda _: None)
        connection = Connection("/sim/kv.sock", opening, make_side, PATIENCE_S, begin=self._begin)
        self._world.bury(device, connection)
        connection.follow(self)
        await connection.open()
        starts = Starts(connection, epoch_digest(self._weights), lambda _: None)
        planning = self._planning = _ClientsPlanning(self, self._requests, FarPlanner(connection, starts))
        driving: asyncio.Future[Any] = asyncio.gather(*(self._drive(planning) for _ in range(_DRIVERS)))
        leaving: asyncio.Future[Any] = asyncio.ensure_future(self._leaving.wait())
        await asyncio.wait({driving, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if driving.done():
            driving.result()  # what was found counts first
            self.is_done = True
            await leaving
        await connection.aclose()
        await within(LONGEST_S, "the end of what a client has planned", driving)
        self.is_done = True

    def _begin(
        self, path: str, opening: wire.Message, timeout_s: float, *, given: Sequence[int] = ()
    ) -> tuple[Any, protocol.Opened, list[int]]:
        """Do as `tiered_kv.host.handshake.begin`, in a thread of the client's; attach once there is a server."""
        if isinstance(opening, protocol.Introduce):
            self._introduced(opening, given)
            ended = ClientSocket(self._world)
            ended.hold(is_mute=True)
            return ended, protocol.Introduced(), []
        socket, attached, descriptors = self._begun.get()
        self._descriptors = descriptors
        return socket, attached, [os.dup(fd) for fd in descriptors]

    def attached(self, there: Attachment) -> None:
        """See `Follower.attached`: the worker uses this server's memory from now on."""
        self._world.bury(there)
        self.slabs = tuple(
            GivenSlab(
                each.num_slots, each.stride_bytes, each.payload_bytes, there.pool_of(each.name), each.group, 0, "none",
                LAYOUT.groups[each.group], fd,
            )
            for each, fd in zip(there.attached.slabs, self._descriptors, strict=True)
        )  # fmt: skip
        self.worker.attach(self.slabs)

    def close(self) -> None:
        """See `Follower.close`: nothing waits here."""

    async def _drive(self, planning: _ClientsPlanning) -> None:
        tape = self._world.tape
        for _ in range(_JOBS):
            if self._world.is_over or self._requests.ending or self.leaves_early:
                return
            numbers = tuple(tape.draw("plan", 1 << 16) for _ in range(3))
            if tape.chance("plan", 0.2):
                await asyncio.sleep(0.01 * (numbers[0] % 30))
            is_load = bool(tape.draw("plan", 2))
            result = await planning.one(span(numbers), self._weights, is_load=is_load)
            if result is not None and Reason.SERVER_AWAY in result.errors:
                await asyncio.sleep(_AWAY_S)
