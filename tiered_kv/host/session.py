"""One client of the server: what it asks for, what is held for it, and what becomes of that when it ends.

A transfer of a client is an ordinary transfer of the cache, with the engine's memory far away (`far`). The session ends
when the client's process, or its last copy, is known to have ended: nothing held for it goes back before.

What a client asks beside its transfers, and how a server answers: by the same call of the face.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from tiered_kv.cache.block_cache import BlockCache
from tiered_kv.cache.open_cache import OpenCache
from tiered_kv.cache.tiered_kv import TierCalls, TieredKV, seat_at
from tiered_kv.catalog.leases import Lease
from tiered_kv.host import protocol as messages
from tiered_kv.host import protocol as questions
from tiered_kv.host import wire
from tiered_kv.host.protocol import (
    AboutChanges,
    AboutJob,
    BindJob,
    Follow,
    JobMoved,
    JobMovedKeys,
    Place,
    PlanJob,
    Taken,
)
from tiered_kv.host.session_jobs import SessionChanges, SessionJobs
from tiered_kv.host.session_transfers import SessionTransfers
from tiered_kv.memory.host import HostSlab
from tiered_kv.settings.tier_settings import HostSettings
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.gate import Priority
from tiered_kv.tiers.pins import Pins
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.transfers.prefetch import bring_each, lease_prefix, start_bringing
from tiered_kv.values.errors import BackendUnavailableError, CapacityError, ConfigurationError, TieredKVError
from tiered_kv.values.keys import BlockKeys, Shard
from tiered_kv.values.log import log
from tiered_kv.values.results import LookupResult

T = TypeVar("T")
Answering = Callable[[], Coroutine[Any, Any, questions.Answer]]
Answered = questions.Answer | Answering
"""At once, or what finds it out."""


def answer(kv: TierCalls, request: questions.Asking) -> Answered:
    """Answer a question about keys.

    Args:
        kv: The client's seat at the cache.
        request: The question.

    Raises:
        TieredKVError: There is something wrong with it.
    """
    return _ANSWERS[type(request)](kv, request, request.keys.block_keys())


def _lookup(kv: TierCalls, request: questions.Lookup, keys: BlockKeys) -> Answered:
    if request.is_owned:
        return _found(request.id, kv.lookup_nowait(keys))
    if not request.where and (found := kv.lookup_at_once(keys)) is not None:
        return _found(request.id, found)
    return _then(partial(kv.lookup, keys, where=request.where), partial(_found, request.id))


def _membership(kv: BlockCache, request: questions.Membership, keys: BlockKeys) -> Answered:
    return questions.States(request.id, kv.membership(keys).tobytes())


def _pin(kv: BlockCache, request: questions.Pin, keys: BlockKeys) -> Answered:
    return questions.Number(request.id, kv.pin(keys, ttl_s=request.ttl_s).num_blocks)


def _prefetch(kv: BlockCache, request: questions.Prefetch, keys: BlockKeys) -> Answered:
    return _then(
        partial(kv.prefetch, keys, to=request.to),
        lambda got: questions.Prefetched(request.id, got.num_blocks, got.num_moved, got.faults),
    )


def _evict(kv: BlockCache, request: questions.Evict, keys: BlockKeys) -> Answered:
    return _then(partial(kv.evict, keys, tier=request.tier), partial(questions.Number, request.id))


def _explain(kv: BlockCache, request: questions.Explain, keys: BlockKeys) -> Answered:
    return _then(
        partial(kv.explain, keys, ask=request.ask), lambda blocks: questions.Explained(request.id, tuple(blocks))
    )


def flush(cache: BlockCache, request: questions.Flush) -> Answered:
    """Wait until every store of every client is settled."""
    return _then(partial(cache.flush, sync=request.sync), lambda _: questions.Number(request.id, 0))


def clear(cache: BlockCache, request: questions.Clear) -> Answered:
    """Empty the tiers of all clients of the model."""
    return _then(cache.clear, lambda _: questions.Number(request.id, 0))


_ANSWERS: Final[Mapping[type[wire.Message], Callable[..., Answered]]] = {
    questions.Lookup: _lookup,
    questions.Membership: _membership,
    questions.Pin: _pin,
    questions.Prefetch: _prefetch,
    questions.Evict: _evict,
    questions.Explain: _explain,
}


def _then(ask: Callable[[], Awaitable[T]], make: Callable[[T], questions.Answer]) -> Answered:
    async def answer() -> questions.Answer:
        return make(await ask())

    return answer


def _found(id_: int, result: LookupResult) -> questions.Found:
    runs = tuple((run.tier, run.start, run.stop) for run in result.runs)
    places = tuple(Place.of(run.spec) for run in result.runs) if any(run.spec for run in result.runs) else ()
    return questions.Found(
        id_, result.num_blocks, runs, result.num_bytes, dict(result.costs), result.num_pending, places
    )


_EPOCHS: Final = 16
"""Weights that one client names by turns; of more, the first is made ready again."""
_LAST_S: Final = 5.0
"""What questions that are under way may take to end, once their client has."""

Send = Callable[[wire.Message], None]


class Session:
    """One client. For the event loop's thread.

    Attributes:
        name: What the client calls itself, with its process and user as the system knows them.
        is_read_only: Whether it may not change what is stored.
        is_ending: Whether nothing is begun for it any more: the server is about to end.
        jobs: Those of its planner.
    """

    def __init__(
        self,
        name: str,
        cache: TieredKV,
        shards: Sequence[Shard],
        pins: Pins,
        limits: HostSettings,
        *,
        is_read_only: bool,
    ) -> None:
        """Begin.

        Args:
            name: For people.
            cache: The cache of its model, open.
            shards: Which parts of the heads it stands for.
            pins: Its own.
            limits: What one client may have under way.
            is_read_only: See the attribute.
        """
        self.name = name
        self.is_read_only = is_read_only
        self.is_ending = False
        self._cache = cache
        self._shards = shards
        self._pins = pins
        self._limits = limits
        self._seats: dict[bytes, tuple[TierCalls, OpenCache]] = {}
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._leases: dict[int, tuple[Chain, Lease]] = {}
        self._num_leasing = 0  # asked for, and being brought
        self._tasks = Tasks()
        self._transfers = SessionTransfers(limits, self._tasks, is_read_only=is_read_only)
        self.jobs = SessionJobs(self._seat(b"")[1].new_jobs(len(shards)), self._tasks)
        self._changes = SessionChanges(self._tasks)
        self._has_ended = False

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
            "pinned_bytes": self._pins.num_bytes,
        }

    @property
    def is_touching(self) -> bool:
        """Whether the client may be reading or writing slots: by copies, or under a lease."""
        return bool(self._leases) or self._transfers.is_touching

    def take(self, request: messages.Request, send: Send) -> None:
        """Do what the client asks; ``send`` answers on the connection on which it did.

        What is wrong with a request is answered: the client raises it, or counts it.
        """
        if self._has_ended:
            return
        match request:
            case messages.Copied():
                self._transfers.copied(request)
            case messages.Load() | messages.Store():
                self._checked(request.id, send, partial(self._move, request, send))
            case messages.StopBefore() | messages.StoreLayer():
                self._checked(request.id, send, partial(self._transfers.steer, request))
            case PlanJob() | BindJob() | JobMoved() | JobMovedKeys() | Follow() | Taken():
                self._checked(request.id, send, partial(self._plan_or_follow, request, send))
            case messages.Cancel():
                self._give_up(request.id)
            case questions.Touch() | questions.CountLookup() | questions.Unpin():
                self._note(request)
            case messages.After() | messages.Bye():
                pass  # the connection's
            case _:
                self._checked(request.id, send, partial(self._ask, request, send))

    def end(self) -> None:
        """The client is gone: let go of everything. Nothing of its touches a slot any more."""
        self._has_ended = True
        self._transfers.end()
        for task in list(self._asked.values()):
            task.cancel()
        for id_ in list(self._leases):
            self._give_up(id_)
        self.jobs.leave()
        self._changes.end_all()
        self._pins.close()

    async def ended(self) -> None:
        """Wait until nothing is under way for it."""
        await self._tasks.aclose(_LAST_S)

    def _move(self, request: messages.Load | messages.Store, send: Send) -> None:
        self._new(request.id)
        _, cache = self._seat(request.keys.epoch)
        if isinstance(request, messages.Load):
            self._transfers.load(request, cache, send)
        else:
            self._transfers.store(request, cache, send)

    def _give_up(self, id_: int) -> None:
        """End a transfer, a question before it is answered, or a lease: its client does not wait for it any more."""
        if id_ in self._transfers:
            self._transfers.cancel(id_)
        elif (held := self._leases.pop(id_, None)) is not None:
            chain, lease = held
            chain.release(lease)
        elif (task := self._asked.get(id_)) is not None:
            task.cancel()
        elif id_ in self.jobs:
            self.jobs.cancel(id_)
        elif id_ in self._changes:
            self._changes.end(id_)

    # Jobs of its planner, and streams of changes.

    def _plan_or_follow(self, request: AboutJob | AboutChanges, send: Send) -> None:
        match request:
            case PlanJob():
                self._new(request.id)
                if request.direction == "store" and self.is_read_only:
                    raise ConfigurationError("read only")
                if len(self.jobs) >= self._limits.jobs_per_client:
                    raise CapacityError("too many jobs")
                self.jobs.plan(request, self._seat(request.keys.epoch)[1], send)
            case Follow():
                self._new(request.id)
                if len(self._changes) >= self._limits.leases_per_client:
                    raise CapacityError(f"this client follows changes {len(self._changes)} times")
                self._changes.follow(request.id, self._seat(b"")[1], send)
            case Taken():
                self._changes.taken(request.id, request.num_messages)
            case _:
                self.jobs.take(request)

    # Questions.

    def _ask(self, request: questions.Question, send: Send) -> None:
        """Answer one: at once if that needs no waiting, else when it is known."""
        self._new(request.id)
        if len(self._asked) >= self._limits.questions_per_client:
            raise CapacityError(f"{self._limits.questions_per_client} questions of this client are under way")
        if self.is_read_only and isinstance(request, questions.Evict | questions.Clear):
            raise ConfigurationError("a read-only client evicts nothing")
        answered = self._answer(request)
        if isinstance(answered, wire.Message):
            send(answered)
            return
        task = self._tasks.spawn(self._say(request.id, answered, send), type(request).__name__)
        self._asked[request.id] = task
        task.add_done_callback(lambda _: self._asked.pop(request.id, None))

    async def _say(self, id_: int, answer: Answering, send: Send) -> None:
        try:
            send(await answer())
        except TieredKVError as error:
            send(questions.Failed(id_, wire.kind_of(error), str(error)))

    def _answer(self, request: questions.Question) -> Answered:
        match request:
            case questions.Stats():
                return partial(self._count, request)
            case questions.Flush():
                return flush(self._cache, request)
            case questions.Clear():
                return clear(self._cache, request)
            case questions.Lease():
                return partial(self._lease, request)
        kv, seat = self._seat(request.keys.epoch)
        if isinstance(request, questions.Explain):
            seat.past_epochs = list(request.before)
        return answer(kv, request)

    async def _count(self, request: questions.Stats) -> questions.Counted:
        """Count, what the client knows to have ended included: it takes a few turns more here."""
        _, cache = self._seat(b"")
        while self._transfers.is_behind:
            await cache.tasks.turn(Priority.STORE)
        return questions.Counted(request.id, cache.statistics())

    async def _lease(self, request: questions.Lease) -> questions.Leased:
        chain, batch = self._seat(request.keys.epoch)[1].batch(request.keys.block_keys())
        num_leases = len(self._leases) + self._num_leasing
        if num_leases >= self._limits.leases_per_client:
            raise CapacityError(f"this client holds {num_leases} leases")
        self._num_leasing += 1
        try:
            _, handles = start_bringing([(chain, batch)])
            await bring_each(handles)
            (lease,) = lease_prefix([(chain, batch)])
        finally:
            self._num_leasing -= 1
        self._leases[request.id] = chain, lease
        return questions.Leased(request.id, chain.host.slab.name, wire.as_bytes(lease.slots))

    # What requests are about.

    def slab(self, name: str) -> HostSlab:
        """Return one of the client's slabs.

        Raises:
            ConfigurationError: There is none of this name.
        """
        slabs = {chain.host.slab.name: chain.host.slab for chain in self._seat(b"")[1].chains}
        if name not in slabs:
            raise ConfigurationError(f"no slab {name!r}; there are {', '.join(slabs)}")
        return slabs[name]

    def _seat(self, epoch: bytes) -> tuple[TierCalls, OpenCache]:
        """Return the cache with the weights of a request, and what transfers are made with."""
        if (seat := self._seats.get(epoch)) is None:
            if len(self._seats) >= _EPOCHS:
                self._seats.clear()
            seat = self._seats[epoch] = seat_at(self._cache, self._shards, epoch, (), self._pins)
        return seat

    def _new(self, id_: int) -> None:
        """Raise unless a number is nobody's: what had it would be forgotten, and what is held for that."""
        if self.is_ending:
            raise BackendUnavailableError("the server is about to end")
        for those in (self._transfers, self._asked, self._leases, self.jobs, self._changes):
            if id_ in those:
                raise ConfigurationError(f"number {id_} is of something that has not ended")

    def _checked(self, id_: int, send: Send, call: Callable[[], object]) -> None:
        try:
            call()
        except (TieredKVError, ValueError) as error:  # a ValueError is e.g. of a priority there is none of
            kind = wire.kind_of(error) if isinstance(error, TieredKVError) else ConfigurationError.__name__
            send(questions.Failed(id_, kind, str(error)))

    def _note(self, request: questions.Noting) -> None:
        """Do what has no answer."""
        try:
            (kv, _), keys = self._seat(request.keys.epoch), request.keys.block_keys()
            match request:
                case questions.Touch():
                    kv.touch(keys, hint=request.hint)
                case questions.CountLookup():
                    kv.count_lookup(keys, np.frombuffer(request.found, np.uint8) != 0)
                case questions.Unpin():
                    kv.unpin(keys)
        except TieredKVError as error:
            log("warning", "host.request_refused", client=self.name, error=str(error))
