"""Clients of a host's server, whose cache an engine has: they load, store and lease, and die, hang and come back.

The server's side is what is shipped from the connection on: messages, the session of a client, its account, its end.
Streams are in memory, in pieces, and may be cut; a client is a thread of a process of its own, which copies a block in
two steps. So what it copies, or looks at under a lease, must be its alone from the first step to the last, however long
that takes and whatever has become of its connection meanwhile. Not here: sockets, the handshake, shares of models.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.host import protocol, wire
from tiered_kv.host.session import Session
from tiered_kv.host.session_transfers import Account
from tiered_kv.settings.tier_settings import HostSettings
from tiered_kv.system import Queue, system
from tiered_kv.testing.simulation.acting import scene
from tiered_kv.testing.simulation.engine import LAYOUT, STRIDE, content, span
from tiered_kv.testing.simulation.known import Asked, Name, WrongAnswer, names_of
from tiered_kv.testing.simulation.threads import SimulatedProcess
from tiered_kv.testing.simulation.world import LIMITS, LONGEST_S
from tiered_kv.tiers.pins import Pins
from tiered_kv.values.keys import BlockKeys, Shard, epoch_digest

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.requester import Numbers
    from tiered_kv.testing.simulation.workload import Requests

_LIVES: Final = 3
_REQUESTS: Final = 5
_MOST_AT_ONCE: Final = 3
_HANGS_S: Final = 20.0
"""Longer than any time limit of the server's."""
_HELD_S: Final = 2.0
_MOST_BYTES: Final = 6 * STRIDE
"""A dozen blocks: more than one transfer has, and fewer than three do."""
_LIMITS: Final = HostSettings(
    loads_per_client=2, stores_per_client=2, leases_per_client=1, questions_per_client=2, bytes_per_client=_MOST_BYTES
)


@scene(lambda shape: shape.codec == "none", alone=5)
async def serve(requests: "Requests", numbers: "Numbers") -> None:
    """A client attaches, asks for some things, and goes in some way or other; then another comes, or the same again."""
    for life in range(1 + numbers[1] % _LIVES):
        if requests.ending or requests.world.is_over:
            return
        await _Attached(requests, numbers[2] >> 3 * life, numbers[3] >> 3 * life).serve()


class _Attached:
    """One client and what the server has of it, from its first message until nothing is held for it."""

    def __init__(self, requests: "Requests", how: int, when: int) -> None:
        self._requests = requests
        self._way = ("leaves", "dies", "dies", "hangs", "is cut off", "is cut off, and dies", "says rubbish")[how % 7]
        self._when_s = (0.0, 0.002, 0.02, 0.3)[when % 4]
        world = requests.world
        self._process = world.new_process(f"client {world.number()}")
        self._num_ends = 0
        served = Served(requests, self._process, _LIMITS, self._has_ended)
        self._session, self._stream = served.session, served.stream
        self._thread = _ClientThread(requests, self._stream, hangs=self._way == "hangs")
        world.bury(self._thread)

    async def serve(self) -> None:
        """Have the client do its work and end in its way; see that the server is rid of it then."""
        requests, world = self._requests, self._requests.world
        world.start_thread(self._process, self._thread.run, self._process.name)
        if self._way not in {"leaves", "hangs"}:
            await asyncio.sleep(self._when_s)
            world.tape.num_faults += 1
            world.tell(f"{self._process.name} {self._way}")
        if self._way == "says rubbish":
            self._stream.deliver(b"\xff" * 64)
        if self._way.startswith("is cut off"):
            self._stream.cut()
        if self._way.endswith("dies"):
            await asyncio.sleep(self._when_s)
            world.turns.kill(self._process)
        await world.until("a client's end", self._has_gone)
        if not self._process.is_dead:
            world.turns.kill(self._process)
        self._stream.cut()
        self._thread.give_up()
        await world.until("the end of what is held for a client", self._is_rid)
        await requests.within(LONGEST_S, "what is under way for a client", self._session.ended())

    def _has_gone(self) -> bool:
        self._check_limits()
        return self._process.is_dead or self._thread.has_ended

    def _is_rid(self) -> bool:
        """Whether the client has ended, and nothing is under way or held for it, and nothing of it is counted."""
        self._check_limits()
        told = self._session.statistics()
        return self._num_ends == 1 and not any(
            told[each] for each in ("loads", "stores", "copies", "leases", "questions", "jobs", "bytes")
        )

    def _check_limits(self) -> None:
        """A client has no more under way than it may, but for one transfer alone."""
        told = self._session.statistics()
        for what, most in (("loads", 2), ("stores", 2), ("leases", 1), ("questions", 2)):
            if told[what] > most:  # type: ignore[operator]  # a number
                raise WrongAnswer("limit", f"{told[what]} {what} of one client, {most} at most")
        if told["bytes"] > _MOST_BYTES and told["loads"] + told["stores"] > 1:  # type: ignore[operator]  # the same
            raise WrongAnswer("limit", f"{told['bytes']} bytes of one client, {_MOST_BYTES} at most")

    def _has_ended(self) -> None:
        self._num_ends += 1
        if not self._process.is_dead and self._thread.is_touching:
            self._requests.world.fail(WrongAnswer("too early", "a client is gone for the server, and copies yet"))


class Served:
    """What a server has of one connection of a client, as after a handshake: its session, and its end of a stream."""

    def __init__(
        self,
        requests: "Requests",
        process: SimulatedProcess,
        limits: HostSettings,
        has_ended: Callable[[], None],
        inbox: Queue[bytes | None] | None = None,
    ) -> None:
        """Begin; what is sent to the client goes to ``inbox``, a queue if that is left out."""
        account = Account(limits, 8 * STRIDE, Pins(0))
        connection: Any = PeerConnection()  # all that it asks of a socket
        self.session = session = Session(
            process.name, "model", requests.kv, (Shard(0, 1),), 1, account, limits, connection, process.pid, has_ended,
            is_read_only=False,
        )  # fmt: skip
        self.stream = ServerStream(session.link, inbox)
        session.link.connection_made(self.stream)
        requests.world.bury(session, self.stream)


class PeerConnection:
    """What a server asks of a socket: for a descriptor of the process at the other end."""

    def getsockopt(self, *_: int) -> int:
        """Say that it is an old system, which gives none."""
        raise OSError("no such option")


class ServerStream(asyncio.Transport):
    """The server's end of a stream in memory: what is sent comes in order, in pieces, until it is cut."""

    def __init__(self, link: wire.Link[Any], inbox: Queue[bytes | None] | None) -> None:
        """Have ``link`` take what comes, on this event loop; what it sends goes to ``inbox``, or a queue."""
        super().__init__()
        self.inbox: Queue[bytes | None] = system().queue() if inbox is None else inbox
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._is_cut = self._is_closing = False

    # The client's side, any thread.

    def deliver(self, data: bytes) -> None:
        """Have the server receive bytes."""
        if not self._is_cut:
            self._loop.call_soon_threadsafe(self._link.data_received, data)

    def cut(self) -> None:
        """Have nothing more come through, either way."""
        if not self._is_cut:
            self._is_cut = self._is_closing = True
            self.inbox.put(None)
            self._loop.call_soon_threadsafe(self._link.connection_lost, None)

    # The server's side.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send."""
        if not self._is_cut:
            self.inbox.put(bytes(data))

    def close(self) -> None:
        """End both ways."""
        self.cut()

    def write_eof(self) -> None:
        """Say that nothing comes any more."""
        self.inbox.put(None)

    def can_write_eof(self) -> bool:
        """It can."""
        return True

    def is_closing(self) -> bool:
        """Whether it was closed."""
        return self._is_closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Have none: what is in memory is there."""

    def pause_reading(self) -> None:
        """The client waits for answers, and has few requests under way."""

    def resume_reading(self) -> None:
        """The same."""


@dataclass(eq=False)
class _Asked:
    """A request of a client that has not ended.

    Attributes:
        keys: Of its blocks.
        names: The same, as the model knows them.
        asked: What must not be found, of a load or a lease.
        what: Which of the three it is.
        got: What was copied so far, block by block.
        is_promised: Whether the server has said how it will end.
    """

    keys: BlockKeys
    names: list[Name]
    asked: Asked
    what: str
    got: dict[int, bytes] = field(default_factory=dict)
    is_promised: bool = False


class _ClientThread:
    """What a client does: some requests at a time, and what the server has it copy."""

    def __init__(
        self,
        requests: "Requests",
        stream: ServerStream,
        *,
        hangs: bool,
    ) -> None:
        self.has_ended = False
        self.is_touching = False
        self._requests = requests
        self._world = requests.world
        self._stream = stream
        self._rows = requests.rows()
        self._hangs = hangs
        self._asked: dict[int, _Asked] = {}
        self._num_asked = 0

    def run(self) -> None:
        """Ask, copy, check; then say that it leaves, unless nobody hears it any more."""
        received = bytearray()
        self._ask_more()
        while self._asked:
            data = self._stream.inbox.get()
            if data is None:
                break
            received += data
            while (reply := _first(received)) is not None:
                self._take(reply)
            self._ask_more()
        if not self._asked:
            self._send(protocol.Bye())
        self.has_ended = True

    def give_up(self) -> None:
        """Nobody hears how the rest has ended: what was being stored may be there."""
        for each in self._asked.values():
            if each.what == "store":
                self._world.known.store_ends(each.names, self._requests.now, is_whole=False, may_be_lost=True)
        self._asked.clear()

    def _ask_more(self) -> None:
        while len(self._asked) < _MOST_AT_ONCE and self._num_asked < _REQUESTS:
            self._num_asked += 1
            self._ask(self._num_asked)

    def _ask(self, id_: int) -> None:
        requests, tape = self._requests, self._world.tape
        keys, weights = span([tape.draw("plan", 1 << 16) for _ in range(3)]), requests.weights
        what = tape.pick("plan", ("load", "store", "load", "lease"))
        names = names_of(keys, weights)
        sent = protocol.Keys.of(keys, epoch_digest(weights))
        self._asked[id_] = _Asked(keys, names, self._world.known.ask(names), what)
        self._world.tell(f"{what} {id_}: {len(keys)} blocks")
        self._world.known.used(names, requests.now)
        if what == "lease":
            self._send(protocol.Lease(id_, sent))
            return
        requests.count_asked(what, len(keys), is_sure=False)
        if what == "load":
            self._send(protocol.Load(id_, sent, LIMITS.load_timeout_s, 0, layerwise=False, gaps=False))
        else:
            self._world.known.store_begins(names, requests.now)
            self._send(protocol.Store(id_, sent, layerwise=False, hint=None))

    def _send(self, message: wire.Message) -> None:
        data = wire.frame(message)
        at = self._world.tape.draw("turns", len(data))  # in two pieces, of which one may never come
        for piece in (data[:at], data[at:]):
            if piece:
                self._stream.deliver(piece)
                self._world.turns.pause()

    def _take(self, reply: protocol.Reply) -> None:
        known, now = self._world.known, self._requests.now
        if isinstance(reply, protocol.Copy):
            self._copy(reply)
        elif isinstance(reply, protocol.Loaded):
            self._loaded(self._asked.pop(reply.id), reply.num_blocks)
        elif isinstance(reply, protocol.Leased):
            self._look(reply)
        elif isinstance(reply, protocol.Stored):
            each = self._asked.pop(reply.id)
            may_be_lost = self._requests.may_be_lost(is_planned=True)  # nor does it hear what became of them below
            known.store_ends(each.names, now, is_whole=not reply.dropped, may_be_lost=may_be_lost)
        elif isinstance(reply, protocol.Failed):
            each = self._asked.pop(reply.id)
            if each.what == "store":
                known.store_ends(each.names, now, is_whole=False)

    def _copy(self, copy: protocol.Copy) -> None:
        each = self._asked[copy.id]
        each.is_promised |= bool(copy.by_tier)
        self.is_touching = True
        for part in copy.parts:
            rows = self._rows[part.pool]
            for slot, position in zip(wire.as_ids(part.slots), wire.as_ids(part.positions), strict=True):
                self._copy_one(each, rows[slot], int(position))
        self.is_touching = False
        self._send(protocol.Copied(copy.id, copy.number, ""))
        if each.is_promised and len(each.got) == len(each.keys):
            self._loaded(self._asked.pop(copy.id), len(each.keys))

    def _copy_one(self, each: _Asked, row: NDArray[np.uint8], position: int) -> None:
        """Copy a block in two steps; who hangs does so between them."""
        size = LAYOUT.groups[each.keys.group].payload_bytes
        data, half = content(each.names[position]), size // 2
        if each.what == "store":
            row[:half] = np.frombuffer(data[:half], np.uint8)
            if self._hangs:  # who loads the same blocks may wait for these
                self._requests.copies_until = max(self._requests.copies_until, self._requests.now + _HANGS_S)
            self._wait_a_while()
            row[half:size] = np.frombuffer(data[half:], np.uint8)
        else:
            first = row[:half].tobytes()
            self._wait_a_while()
            each.got[position] = first + row[half:size].tobytes()
            if each.got[position] != data:
                raise WrongAnswer("wrong bytes", f"block {position} of a client's load")

    def _wait_a_while(self) -> None:
        turns = self._world.turns
        if self._hangs:
            self._hangs = False
            self._world.tape.num_faults += 1
            self._world.tell("hangs in a copy")
            turns.sleep(_HANGS_S)
        elif self._world.tape.chance("turns", 0.1):
            turns.sleep(0.01)
        else:
            turns.pause()

    def _loaded(self, each: _Asked, num_blocks: int) -> None:
        if missing := [i for i in range(num_blocks) if i not in each.got]:
            raise WrongAnswer("counts", f"blocks {missing} of a client's load were not copied")
        self._world.known.check(each.asked, np.arange(len(each.keys)) < num_blocks, "a client's load")
        self._world.known.loaded(each.names[:num_blocks])

    def _look(self, leased: protocol.Leased) -> None:
        """Look at blocks under a lease, now and later: they are what they are called, until they are given back."""
        each, rows, slots = self._asked[leased.id], self._rows[leased.pool], wire.as_ids(leased.slots)
        self._world.known.check(each.asked, np.arange(len(each.keys)) < len(slots), "a client's lease")
        size = LAYOUT.groups[each.keys.group].payload_bytes
        self.is_touching = len(slots) > 0
        for wait_s in (0.0, _HANGS_S if self._hangs else _HELD_S):
            self._world.turns.sleep(wait_s)
            for i, slot in enumerate(slots):
                if rows[slot][:size].tobytes() != content(each.names[i]):
                    raise WrongAnswer("wrong bytes", f"block {i} of a client's lease")
        self.is_touching = False
        del self._asked[leased.id]
        self._send(protocol.Cancel(leased.id))


def _first(received: bytearray) -> protocol.Reply | None:
    """Take the first message that has come whole, if any."""
    size = wire.LENGTH.size
    if len(received) < size or len(received) < size + wire.LENGTH.unpack_from(received)[0]:
        return None
    end = size + wire.LENGTH.unpack_from(received)[0]
    reply: protocol.Reply = protocol.reply_from(bytes(received[size:end]))
    del received[:end]
    return reply
