"""One client of the server: its connection and process, what it asks for, what is held for it, and how that ends.

A transfer of a client is an ordinary transfer of the cache, with the engine's memory far away (`session_transfers`).
The session ends when the client's process, or its last copy, is known to have ended: nothing held for it goes back
before.

What a client asks beside its transfers is answered by the same call of the face, if `asked_calls.CALLS` names it.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from tiered_kv.cache.seat import PAST_EPOCHS, Seat
from tiered_kv.cache.tiered_kv import SeatCalls, TierCalls, TieredKV
from tiered_kv.catalog.leases import Lease
from tiered_kv.host import protocol, wire
from tiered_kv.host.asked_calls import CALLS, Remote
from tiered_kv.host.protocol import MOST_BLOCKS
from tiered_kv.host.session_jobs import MOST_STREAMS, SessionChanges, SessionJobs
from tiered_kv.host.session_transfers import Account, SessionTransfers
from tiered_kv.memory.host import HostSlab
from tiered_kv.settings.tier_settings import HostSettings
from tiered_kv.system import files, system
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.gate import Priority
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.tiers.tier import Batch
from tiered_kv.transfers.prefetch import bringing, lease_prefix, start_bringing
from tiered_kv.values.errors import (
    BackendUnavailableError,
    CapacityError,
    ClosedError,
    ConfigurationError,
    Reason,
    TieredKVError,
    in_words,
)
from tiered_kv.values.keys import Shard
from tiered_kv.values.log import log

_SO_PEERPIDFD: Final = 77  # Linux 6.5; the socket module does not name it
_EPOCHS: Final = 16
"""Weights that one client names by turns; of more, the first is made ready again."""
_LAST_S: Final = 5.0
"""What questions that are under way may take to end, once their client has."""

Answering = Callable[[], Coroutine[Any, Any, protocol.Answer]]
_AT_ONCE: Final[Mapping[str, Callable[..., object]]] = {"lookup": TierCalls.lookup_at_once}
"""What answers a call without a task; None where somebody is to be waited for."""


class Session:
    """What a server has of one client: its seat, transfers, jobs and leases. For the event loop's thread.

    It ends once the client's process touches no slot any more. That says so itself before it goes. Else its end of the
    connection is closed by the system when it ends, and it is watched as well where the system lets us: a GPU may be
    copying yet when the connection is closed.

    Attributes:
        name: What the client calls itself, with its process and user as the system knows them.
        model: The name of its model.
        link: The connection, which the caller starts.
        is_read_only: Whether it may not change what is stored.
        is_ending: Whether nothing is begun for it any more: the server is about to end.
        jobs: Those of its planner.
    """

    def __init__(
        self,
        name: str,
        model: str,
        cache: TieredKV,
        shards: Sequence[Shard],
        num_workers: int,
        account: Account,
        limits: HostSettings,
        connection: socket.socket,
        pid: int,
        ended: Callable[[], None],
        *,
        is_read_only: bool,
    ) -> None:
        """Begin, and watch the process behind a connection.

        Args:
            name: For people.
            model: See the attribute.
            cache: The cache of its model, open.
            shards: Which parts of the heads it stands for.
            num_workers: That its planner has, see `CacheParts`.
            account: Of what it has, and its pins.
            limits: What one client may have under way.
            connection: To the client.
            pid: Of its process, 0 if that is of another PID namespace.
            ended: Called once.
            is_read_only: See the attribute.
        """
        self.name = name
        self.model = model
        self.link: wire.Link[protocol.Request] = wire.Link(
            protocol.request_from, self._take, self._lost, broken=self._break
        )
        self.is_read_only = is_read_only
        self.is_ending = False
        self._cache = cache
        self._shards = shards
        self._account = account
        self._limits = limits
        self._seats: dict[bytes, SeatCalls] = {}
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._leases: dict[int, tuple[Chain, Lease]] = {}
        self._num_leasing = 0  # asked for, and being brought
        self._tasks = Tasks()
        self._epoch = b""  # until the client has said that it serves others than those that it attached with
        said = account, self._tasks, self._serves, self.link.send
        self._transfers = SessionTransfers(limits, *said, is_read_only=is_read_only)
        self.jobs = SessionJobs(self.seat.cache.new_jobs(num_workers), *said)
        self._changes = SessionChanges(self._tasks, self.link.send)
        self._keep_no_more: Callable[[], None] | None = None
        self._ended = ended
        self._has_left = self._has_ended = False
        self._pidfd = _pidfd_of(connection, pid)
        if self._pidfd >= 0:
            asyncio.get_running_loop().add_reader(self._pidfd, self.end)

    @property
    def seat(self) -> Seat:
        """The client's seat at the cache, with the weights that it attached with."""
        return self._seat(b"").seat

    def keep_memory(self) -> None:
        """Give none of its model's memory back while it is attached: it, or a worker of its, may page-lock that."""
        if self._keep_no_more is None:
            self._keep_no_more = self.seat.cache.keep_memory()

    def statistics(self) -> dict[str, object]:
        """Count what is under way for it."""
        return {
            "name": self.name,
            "is_read_only": self.is_read_only,
            **self._transfers.statistics(),
            "leases": len(self._leases),
            "questions": len(self._asked),
            "jobs": len(self.jobs),
            "streams": len(self._changes),
            "pinned_bytes": self._account.pins.num_bytes,
            "bytes": self._account.num_bytes,
        }

    @property
    def is_touching(self) -> bool:
        """Whether the client may be reading or writing slots: by copies, or under a lease."""
        return bool(self._leases) or self._transfers.is_touching

    def end(self) -> None:
        """End what is held for a client that is gone, whichever way that was noticed first. It touches no slot now."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            files().close(self._pidfd)
        self._leave()
        for id_ in list(self._leases):
            self._give_up(id_)
        if self._keep_no_more is not None:
            self._keep_no_more()
        self.link.close()
        log("info", "host.client_ended", client=self.name)
        self._ended()

    async def ended(self) -> None:
        """Wait until nothing is under way for it."""
        await self._tasks.aclose(_LAST_S)

    # For its connection.

    def _take(self, request: protocol.Request) -> None:
        if isinstance(request, protocol.Bye):
            self.end()
        elif not self._has_left or isinstance(request, protocol.Cancel):
            try:
                self._do(request)
            except wire.WireError:
                raise
            except Exception as error:  # else nobody would hear of the client's end any more
                log("error", "host.request_crashed", exc_info=error, client=self.name)
                raise wire.WireError("the server cannot take this") from error

    def _break(self, why: str) -> None:
        """Take nothing more of it. What is held for it is, until it is gone: it may be copying."""
        log("warning", "host.client_broken", client=self.name, error=why)
        self.link.end_writing()

    def _lost(self) -> None:
        """Nothing comes any more. While it may be copying, the end of its process is waited for where that is known."""
        if self._pidfd < 0 or not self.is_touching:
            self.end()

    def _do(self, request: protocol.Request) -> None:
        """Do what the client asks. What is wrong with a request is answered: the client raises it, or counts it."""
        match request:
            case protocol.Copied():
                self._transfers.copied(request)
            case protocol.Cancel():
                self._give_up(request.id)
            case protocol.LeaveJobs():
                self.jobs.leave()
            case protocol.Preempted():
                with suppress(ClosedError):  # the cache has ended, and its counts
                    self.seat.fates.preemptions += 1
            case protocol.Advanced():
                self._epoch = request.epoch
                self._transfers.overtake()
            case protocol.Call(id=0):
                self._note(request)
            case protocol.Closing():
                self._leave()
            case protocol.Bye():
                pass  # see `_take`
            case _:
                try:
                    self._begin(request)
                except (TieredKVError, ValueError) as error:  # a ValueError is e.g. of a priority there is none of
                    kind = wire.kind_of(error) if isinstance(error, TieredKVError) else ConfigurationError.__name__
                    self.link.send(protocol.Failed(request.id, kind, str(error)))

    def _leave(self) -> None:
        """The client has closed: let go of all but what it leases, which it may be reading yet."""
        self._has_left = True
        self._transfers.end()
        for task in list(self._asked.values()):
            task.cancel()
        self.jobs.leave()
        self._changes.end_all()
        self._account.pins.close()

    def _begin(self, request: protocol.Answerable) -> None:
        """Begin what the client asks for, or have it go otherwise on.

        Raises:
            TieredKVError, ValueError: It cannot be.
        """
        match request:
            case protocol.Load() | protocol.Store():
                self._move(request)
            case protocol.StopBefore() | protocol.StoreLayer():
                self._transfers.steer(request)
            case protocol.PlanJob():
                self._plan(request)
            case protocol.BindJob() | protocol.JobMoved() | protocol.JobMovedKeys():
                self.jobs.take(request)
            case protocol.Follow():
                self._new(request.id)
                if len(self._changes) >= min(MOST_STREAMS, self._limits.leases_per_client):
                    raise CapacityError(f"this client follows changes {len(self._changes)} times")
                self._changes.follow(request.id, self.seat)
            case protocol.Taken():
                self._changes.taken(request.id, request.num_messages)
            case protocol.Lease() | protocol.Call():
                self._ask(request)
            case protocol.Ping():
                self.link.send(protocol.Answered(request.id, wire.encoded(None)))

    def _move(self, request: protocol.Load | protocol.Store) -> None:
        seat = self._seat(request.keys.epoch).seat
        if self.is_ending:
            self._transfers.refuse(request, seat, Reason.SERVER_ENDING)
            return
        self._new(request.id)
        if len(request.keys) > MOST_BLOCKS:
            self._transfers.refuse(request, seat, Reason.TOO_MANY_KEYS)
        elif isinstance(request, protocol.Load):
            self._transfers.load(request, seat)
        else:
            self._transfers.store(request, seat)

    def _plan(self, request: protocol.PlanJob) -> None:
        self._new(request.id)
        seat = self._seat(request.keys.epoch).seat
        if request.direction == "store" and self.is_read_only:
            self.jobs.refuse(request, seat, Reason.READ_ONLY)
            raise ConfigurationError("read only")
        if len(self.jobs) >= self._limits.jobs_per_client:
            self.jobs.refuse(request, seat)
            raise CapacityError("too many jobs")
        self.jobs.plan(request, seat)

    def _serves(self, epoch: bytes) -> bool:
        """Say whether the client serves these weights, as far as it has said."""
        return self._epoch in {b"", epoch}

    def _give_up(self, id_: int) -> None:
        """End a transfer, a question before it is answered, or a lease: its client does not wait for it any more."""
        if id_ in self._transfers:
            self._transfers.cancel(id_)
        elif (held := self._leases.pop(id_, None)) is not None:
            chain, lease = held
            chain.release(lease)
            self._account.hold(-len(lease.slots) * chain.stride_bytes)
        elif (task := self._asked.get(id_)) is not None:
            task.cancel()
        elif id_ in self.jobs:
            self.jobs.cancel(id_)
        elif id_ in self._changes:
            self._changes.end(id_)

    # Questions.

    def _ask(self, request: protocol.Lease | protocol.Call) -> None:
        """Answer a question: at once if that needs no waiting, else when the answer is known."""
        self._new(request.id)
        if len(self._asked) >= self._limits.questions_per_client:
            raise CapacityError(f"{self._limits.questions_per_client} questions of this client are under way")
        if isinstance(request, protocol.Lease):
            self._wait(request.id, partial(self._lease, request))
            return
        remote = _allowed(request.name)
        if remote.changes and self.is_read_only:
            raise ConfigurationError("a read-only client evicts nothing")
        kv, arguments = self._called(remote, request)
        if remote.name in _AT_ONCE and (found := _AT_ONCE[remote.name](kv, **arguments)) is not None:
            self.link.send(remote.answered(request.id, found))
            return
        call = partial(getattr(kv, remote.name), **arguments)
        if remote.is_counted:
            self._wait(request.id, partial(self._answered, remote, request.id, partial(self._count, call)))
        elif remote.is_awaited:
            self._wait(request.id, partial(self._answered, remote, request.id, call))
        else:
            self.link.send(remote.answered(request.id, call()))

    def _wait(self, id_: int, answer: Answering) -> None:
        task = self._tasks.spawn(self._say(id_, answer), f"answer {id_}")
        self._asked[id_] = task
        task.add_done_callback(lambda _: self._asked.pop(id_, None))

    async def _say(self, id_: int, answer: Answering) -> None:
        try:
            self.link.send(await answer())
        except TieredKVError as error:
            self.link.send(protocol.Failed(id_, wire.kind_of(error), str(error)))
        except Exception as error:
            self.link.send(
                protocol.Failed(id_, TieredKVError.__name__, in_words(error))
            )  # else who asked waits for good
            raise

    async def _answered(self, remote: Remote, id_: int, call: Callable[[], Awaitable[object]]) -> protocol.Answered:
        return remote.answered(id_, await call())

    async def _count(self, call: Callable[[], object]) -> object:
        """Count, what the client knows to have ended included."""
        await self._caught_up()
        return call()

    async def _caught_up(self) -> None:
        """Wait until what the client knows to have ended has ended here, which takes a few turns more."""
        tasks = self.seat.tasks
        while self._transfers.is_behind:
            await tasks.turn(Priority.STORE)

    def _note(self, request: protocol.Call) -> None:
        """Do what has no answer."""
        try:
            remote = _allowed(request.name)
            if not remote.is_noted:
                raise ConfigurationError(f"{remote.name}() has an answer: give it a number")
            kv, arguments = self._called(remote, request)
            getattr(kv, remote.name)(**arguments)
        except TieredKVError as error:
            log("warning", "host.request_refused", client=self.name, error=str(error))

    def _called(self, remote: Remote, request: protocol.Call) -> tuple[TierCalls, dict[str, Any]]:
        """Return whose method a call is of, and its arguments.

        Raises:
            ConfigurationError: They are not what the face says.
        """
        epoch, arguments = remote.heard(request.args, len(self._shards))
        kv = self._seat(epoch)
        if remote.knows_past:
            kv.seat.past_epochs = list(request.before[:PAST_EPOCHS])
        return (self._cache if remote.is_of_all else kv), arguments

    async def _lease(self, request: protocol.Lease) -> protocol.Leased:
        if len(request.keys) > MOST_BLOCKS:
            raise ConfigurationError(f"a lease of {len(request.keys)} keys, {MOST_BLOCKS} at most")
        chain, batch = self._seat(request.keys.epoch).seat.batch(request.keys.block_keys())
        num_leases = len(self._leases) + self._num_leasing
        if num_leases >= self._limits.leases_per_client:
            raise CapacityError(f"this client holds {num_leases} leases")
        self._num_leasing += 1
        try:
            await self._caught_up()
            batch = batch[: int(min(len(batch), self._account.room_bytes // chain.stride_bytes))]
            lease = await self._lease_within(chain, batch)
        finally:
            self._num_leasing -= 1
        self._leases[request.id] = chain, lease
        return protocol.Leased(request.id, chain.host.slab.name, wire.as_bytes(lease.slots))

    async def _lease_within(self, chain: Chain, batch: Batch) -> Lease:
        """Bring a prefix that there is room for and hold it; the room is taken meanwhile, and then what it needs."""
        num_leased = 0
        self._account.hold(len(batch) * chain.stride_bytes)
        try:
            async with bringing(*start_bringing([(chain, batch)])):
                (lease,) = lease_prefix([(chain, batch)])
            num_leased = len(lease.slots)
        finally:
            self._account.hold((num_leased - len(batch)) * chain.stride_bytes)
        return lease

    # What requests are about.

    @property
    def slabs(self) -> list[HostSlab]:
        """The client's slabs: by KV group, then by rank."""
        return [chain.host.slab for chain in self.seat.chains]

    def slab(self, name: str) -> HostSlab:
        """Return one of the client's slabs.

        Raises:
            ConfigurationError: There is none of this name.
        """
        slabs = {slab.name: slab for slab in self.slabs}
        if name not in slabs:
            raise ConfigurationError(f"no slab {name!r}; there are {', '.join(slabs)}")
        return slabs[name]

    def _seat(self, epoch: bytes) -> SeatCalls:
        """Return the client's seat at the cache, with the weights of a request."""
        if (seat := self._seats.get(epoch)) is None:
            if len(self._seats) >= _EPOCHS:
                self._seats.clear()
            seat = self._seats[epoch] = SeatCalls(self._cache, self._shards, epoch, self._account.pins)
        return seat

    def _new(self, id_: int) -> None:
        """Raise unless a number is nobody's: what had it would be forgotten, and what is held for that."""
        if self.is_ending:
            raise BackendUnavailableError("the server is about to end")
        for those in (self._transfers, self._asked, self._leases, self.jobs, self._changes):
            if id_ in those:
                raise ConfigurationError(f"number {id_} is of something that has not ended")


def _pidfd_of(connection: socket.socket, pid: int) -> int:
    """Return a descriptor of the client's process, or -1 where the system gives none."""
    with suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    with suppress(OSError):
        return system().pidfd_open(pid) if pid > 0 else -1  # 0: of a PID namespace that is not ours
    return -1


def _allowed(name: str) -> Remote:
    """Return a call that a client may make.

    Raises:
        ConfigurationError: It may not.
    """
    if name not in CALLS:
        raise ConfigurationError(f"a client may not call {name!r:.80}; there are {', '.join(CALLS)}")
    return CALLS[name]
