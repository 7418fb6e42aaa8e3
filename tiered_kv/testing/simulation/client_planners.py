"""Planners of clients of a host's server: the clients' code and the server's, with streams in memory between them.

A client is a process with an event loop, whose planner has a worker process load and store what it plans. Its
connection breaks, or says nothing for a while, and it attaches again; it is killed, and so are workers, at any moment;
plans are bound late, lost and cancelled. What a planned load copies is right, and nothing is held once all have ended.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from tiered_kv.host import protocol
from tiered_kv.settings.tier_settings import HostSettings
from tiered_kv.system import Queue, files, system
from tiered_kv.testing.simulation.acting import scene
from tiered_kv.testing.simulation.client_connections import ClientSocket
from tiered_kv.testing.simulation.clients import Served
from tiered_kv.testing.simulation.engine import STRIDE
from tiered_kv.testing.simulation.planning_clients import PlanningClient
from tiered_kv.testing.simulation.world import LONGEST_S
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError, TieredKVError

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.requester import Numbers
    from tiered_kv.testing.simulation.workload import Requests

_LIVES: Final = 2
_LIMITS: Final = HostSettings(jobs_per_client=4, bytes_per_client=40 * STRIDE)
_BEFALLS: Final = (
    "nothing", "is cut off", "hears nothing", "says rubbish", "is cut off", "has a server that hangs", "dies", "closes",
)  # fmt: skip
_WHEN_S: Final = (0.0, 0.001, 0.01, 0.1, 0.5)
_AWAY_S: Final = (0.0, 0.01, 0.3, 2.0)
"""How long a client is without a server, or hears nothing from it: longer than its patience, too."""
_UNHEARD: Final = 0.1
"""How often a client does not hear that its worker was introduced."""


@scene(lambda shape: shape.codec == "none" and shape.has("cpu"), alone=5)
async def plan(requests: "Requests", numbers: "Numbers") -> None:
    """A client plans, and goes in some way or other; then another comes."""
    for _ in range(1 + numbers[1] % _LIVES):
        if requests.ending or requests.world.is_over:
            return
        await _Planned(requests).serve()


class _Planned:
    """One client that plans, and what the server has of it: a session for each of its connections."""

    def __init__(self, requests: "Requests") -> None:
        self._requests = requests
        self._loop = asyncio.get_running_loop()
        self._client = PlanningClient(requests, self._introduced)
        self._served: dict[bytes, Served] = {}  # by token, the last one last

    async def serve(self) -> None:
        """Let it plan, and things befall it; see that nothing is held for it in the end."""
        client, world, tape = self._client, self._requests.world, self._requests.world.tape
        await world.until("a client's beginning", lambda: client.is_begun)
        self._attach()
        for _ in range(tape.draw("plan", 4)):
            await asyncio.sleep(tape.pick("plan", _WHEN_S))
            if client.is_done or client.leaves_early or client.process.is_dead or world.failures:
                break
            await self._befall(tape.pick("plan", _BEFALLS), tape.pick("plan", _AWAY_S))
        await world.until("a client's planning", lambda: client.is_done or client.process.is_dead)
        if not client.process.is_dead:
            # Workers have answered all that they were given; of a connection before this one nobody hears that.
            if not client.leaves_early:
                await world.until("a planner's job", lambda: not self._last.session.statistics()["jobs"])
            client.may_leave()
            await world.until("the end of a client", lambda: client.process.has_ended or client.process.is_dead)
            world.turns.kill(client.process)
        else:
            await asyncio.sleep(tape.pick("plan", _WHEN_S))  # its worker goes on
        client.give_up()
        for served in self._served.values():
            served.stream.cut()
        await world.until("the end of what is held", self._is_rid)
        for served in self._served.values():
            await self._requests.within(LONGEST_S, "what is under way for a planner", served.session.ended())

    @property
    def _last(self) -> Served:
        return list(self._served.values())[-1]

    async def _befall(self, what: str, away_s: float) -> None:
        client, world = self._client, self._requests.world
        if what == "nothing":
            return
        world.tape.num_faults += 1
        world.tell(f"{client.process.name} {what}")
        if what == "dies":
            world.turns.kill(client.process)
            return
        if what == "closes":
            client.may_leave()
            return
        socket = client.sockets[-1]
        if what in {"hears nothing", "has a server that hangs"}:
            socket.hold(is_mute=what == "has a server that hangs")
            await asyncio.sleep(away_s)
            socket.let_go()
            return
        if what == "says rubbish":
            self._last.stream.deliver(b"\xff" * 64)
        else:
            self._last.stream.cut()
        await world.until("a lost server", lambda: socket.is_closed or client.process.is_dead or client.is_done)
        await asyncio.sleep(away_s)
        if not client.process.is_dead:
            self._attach()

    def _attach(self) -> None:
        """Have a session for the client from now on, as after a handshake."""
        client, socket = self._client, ClientSocket(self._requests.world)
        served = Served(self._requests, client.process, _LIMITS, lambda: None, socket)
        socket.stream = served.stream
        token = system().token_bytes(16)
        self._served[token] = served
        client.attach(socket, token, self._requests.slabs())

    def _introduced(self, opening: protocol.Introduce, given: Sequence[int]) -> None:
        """Have the server hear of a client's workers, and wait for its answer, in a thread of the client's."""
        answers: Queue[Exception | None] = system().queue()
        sent, late_s = [files().dup(each) for each in given], 0.0
        if is_late := self._requests.world.tape.chance("plan", _UNHEARD):
            self._requests.world.tape.num_faults += 1
            late_s = self._requests.world.tape.pick("plan", _WHEN_S)
        self._loop.call_soon_threadsafe(self._loop.call_later, late_s, self._watch, opening, sent, answers)
        if is_late:
            raise BackendUnavailableError("nobody has heard the answer")
        if (answer := answers.get()) is not None:
            raise answer

    def _watch(self, opening: protocol.Introduce, given: Sequence[int], answers: Queue[Exception | None]) -> None:
        """Do in the server what it does with an introduction."""
        served = self._served.get(opening.token)
        try:
            if served is None or served.stream.is_closing():
                for each in given:
                    files().close(each)
                raise BackendUnavailableError("no client has this token: attach again")
            served.session.jobs.watch(opening.ranks, given)
        except TieredKVError as error:
            answers.put(ConfigurationError(str(error)))
        else:
            answers.put(None)

    def _is_rid(self) -> bool:
        """Whether nothing is under way or held for the client, of any of its connections."""
        told = [served.session.statistics() for served in self._served.values()]
        return not any(each["jobs"] or each["bytes"] for each in told)
