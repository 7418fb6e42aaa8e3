"""One client of the server: what it asks for, what is held for it, and what becomes of that when it ends.

A transfer of a client is an ordinary transfer of the cache, with the engine's memory far away (`far`). The session ends
when the client's process, or its last copy, is known to have ended: nothing held for it goes back before.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from tiered_kv.cache import TieredKV, seat_at
from tiered_kv.catalog.leases import Lease
from tiered_kv.errors import CapacityError, ConfigurationError, TieredKVError
from tiered_kv.host import messages, questions, wire
from tiered_kv.host.change_messages import AboutChanges, Follow, Taken
from tiered_kv.host.far import FarMemory
from tiered_kv.host.job_messages import AboutJob, BindJob, JobMoved, JobMovedKeys, PlanJob
from tiered_kv.host.questions import Answered, Answering
from tiered_kv.host.session_changes import SessionChanges
from tiered_kv.host.session_jobs import SessionJobs
from tiered_kv.host_settings import HostSettings
from tiered_kv.keys import Shard
from tiered_kv.log import log
from tiered_kv.memory.host import HostSlab
from tiered_kv.memory.lanes import Lane
from tiered_kv.open_cache import OpenCache
from tiered_kv.results import LoadResult, StoreResult, TierFault
from tiered_kv.tier_calls import TierCalls
from tiered_kv.tiers.budget import Priority
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.pins import Pins
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.transfers.handles import Handle, LoadHandle
from tiered_kv.transfers.prefetch import bring_each, lease_prefix, start_bringing
from tiered_kv.transfers.requests import LoadRequest, Order, StoreRequest
from tiered_kv.transfers.start import start_load, start_store
from tiered_kv.transfers.store import StoreHandle
from tiered_kv.validation import check_kind, check_seconds

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
        self._cache = cache
        self._shards = shards
        self._pins = pins
        self._limits = limits
        self._seats: dict[bytes, tuple[TierCalls, OpenCache]] = {}
        self._promised: set[int] = set()  # loads of which the client knows how they end once it has copied
        self._loads: dict[int, tuple[LoadHandle, FarMemory]] = {}
        self._stores: dict[int, tuple[StoreHandle, FarMemory]] = {}
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._leases: dict[int, tuple[Chain, Lease]] = {}
        self._num_leasing = 0  # asked for, and being brought
        self._num_bytes = 0  # of loads and stores
        self._tasks = Tasks()
        self.jobs = SessionJobs(self._seat(b"")[1].new_jobs(len(shards)), self._tasks)
        self._changes = SessionChanges(self._tasks)
        self._has_ended = False

    def statistics(self) -> dict[str, object]:
        """Count what is under way for it."""
        transfers = [*self._loads.values(), *self._stores.values()]
        return {
            "name": self.name,
            "is_read_only": self.is_read_only,
            "loads": len(self._loads),
            "stores": len(self._stores),
            "copies": sum(far.num_copying for _, far in transfers),
            "leases": len(self._leases),
            "questions": len(self._asked),
            "jobs": len(self.jobs),
            "streams": len(self._changes),
            "pinned_bytes": self._pins.num_bytes,
        }

    @property
    def is_touching(self) -> bool:
        """Whether the client may be reading or writing slots: by copies, or under a lease."""
        return bool(self._leases) or any(far.num_copying for _, far in [*self._loads.values(), *self._stores.values()])

    def take(self, request: messages.Request, send: Send) -> None:
        """Do what the client asks; ``send`` answers on the connection on which it did.

        What is wrong with a request is answered: the client raises it, or counts it.
        """
        if self._has_ended:
            return
        match request:
            case messages.Copied():
                self._copied(request)
            case messages.Load():
                self._checked(request.id, send, partial(self._load, request, send))
            case messages.Store():
                self._checked(request.id, send, partial(self._store, request, send))
            case messages.StopBefore() | messages.StoreLayer():
                self._checked(request.id, send, partial(self._steer, request))
            case PlanJob() | BindJob() | JobMoved() | JobMovedKeys() | Follow() | Taken():
                self._checked(request.id, send, partial(self._plan_or_follow, request, send))
            case messages.Cancel() | messages.Release():
                self._give_up(request.id)
            case messages.Touch() | messages.CountLookup() | messages.Unpin():
                self._note(request)
            case messages.After() | messages.Bye():
                pass  # the connection's
            case _:
                self._checked(request.id, send, partial(self._ask, request, send))

    def end(self) -> None:
        """The client is gone: let go of everything. Nothing of its touches a slot any more."""
        self._has_ended = True
        transfers: list[tuple[Handle[Any], FarMemory]] = [*self._loads.values(), *self._stores.values()]
        for handle, far in transfers:
            far.lose()
            handle.cancel()
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

    # Transfers.

    def _load(self, request: messages.Load, send: Send) -> None:
        self._new(request.id)
        check_seconds("deadline_s", request.deadline_s)
        order: Order = "back" if request.is_from_back else "front"
        check_kind(order, layerwise=request.layerwise, gaps=request.gaps)
        (_, cache), keys = self._seat(request.keys.epoch), request.keys.block_keys()
        chain, batch = cache.batch(keys)
        far = FarMemory(request.id, len(keys), chain, send)
        if len(self._loads) >= self._limits.loads_per_client or not self._has_room(far):
            fault = TierFault("host", "too many loads", len(keys))
            send(messages.Loaded(request.id, 0, {}, 0, 0.0, (fault,), None))
            return
        handle = start_load(
            LoadRequest(
                chain,
                batch,
                far,
                np.arange(len(keys))[:, np.newaxis],
                Lane(far, None),
                cache.deadline(request.deadline_s),
                Priority(request.priority),
                lambda: True,  # which weights are current, the client knows
                layerwise=request.layerwise,
                gaps=request.gaps,
                order=order,
            )
        )
        self._loads[request.id] = handle, far
        self._num_bytes += far.num_bytes
        if handle.is_admitted and not handle.done:  # it is in memory, and needs no task
            self._promised.add(request.id)
            send(messages.Admitted(request.id, len(keys), {chain.host.name: len(keys)}))
        elif request.layerwise:
            self._tasks.spawn(self._say_admitted(request.id, handle, send), "admit")
        handle.when_done(partial(self._loaded, request, send))

    async def _say_admitted(self, id_: int, handle: LoadHandle, send: Send) -> None:
        send(messages.Admitted(id_, await handle.admitted(), {}))

    def _loaded(self, request: messages.Load, send: Send, ended: "asyncio.Future[LoadResult]") -> None:
        _, far = self._loads.pop(request.id)
        self._num_bytes -= far.num_bytes
        self._promised.discard(request.id)
        if ended.cancelled() or ended.exception() is not None:
            fault = TierFault("host", "failed", 0, "" if ended.cancelled() else repr(ended.exception()))
            send(messages.Loaded(request.id, 0, {}, 0, 0.0, (fault,), None))
            return
        result = ended.result()
        mask = result.mask.tobytes() if request.gaps else None
        by_tier, seconds = dict(result.by_tier), result.seconds
        send(messages.Loaded(request.id, result.num_blocks, by_tier, result.num_bytes, seconds, result.faults, mask))

    def _store(self, request: messages.Store, send: Send) -> None:
        self._new(request.id)
        (_, cache), keys = self._seat(request.keys.epoch), request.keys.block_keys()
        chain, batch = cache.batch(keys)
        far = FarMemory(request.id, len(keys), chain, send)
        why = "read only" if self.is_read_only else ""
        if len(self._stores) >= self._limits.stores_per_client or not self._has_room(far):
            why = "too many stores"
        if why:
            send(messages.Stored(request.id, 0, 0, {why: len(keys)} if len(keys) else {}, 0, 0.0))
            send(messages.Settled(request.id, ()))
            return
        positions = np.arange(len(keys))[:, np.newaxis]
        handle = start_store(
            StoreRequest(chain, batch, far, positions, Lane(far, None), request.layerwise, request.hint)
        )
        self._stores[request.id] = handle, far
        self._num_bytes += far.num_bytes
        handle.when_done(partial(self._stored, request.id, len(keys), send))

    def _stored(self, id_: int, num_keys: int, send: Send, ended: "asyncio.Future[StoreResult]") -> None:
        _, far = self._stores.pop(id_)
        self._num_bytes -= far.num_bytes
        if ended.cancelled() or ended.exception() is not None:
            send(messages.Stored(id_, 0, 0, {"failed": num_keys}, 0, 0.0))
            send(messages.Settled(id_, ()))
            return
        result = ended.result()
        dropped = dict(result.drop_reasons)
        send(messages.Stored(id_, result.num_stored, result.num_present, dropped, result.num_bytes, result.seconds))
        self._tasks.spawn(self._say_settled(id_, result, send), "settle")

    async def _say_settled(self, id_: int, result: StoreResult, send: Send) -> None:
        send(messages.Settled(id_, await result.settled()))

    def _has_room(self, far: FarMemory) -> bool:
        """Say whether the client may have one more transfer; one alone may be of any size."""
        most = self._limits.bytes_per_client
        return most is None or not self._num_bytes or self._num_bytes + far.num_bytes <= most

    def _steer(self, request: messages.Steering) -> None:
        """Pass on what is said of a transfer under way; of one that has ended it is passed over."""
        if isinstance(request, messages.StopBefore) and (loading := self._loads.get(request.id)) is not None:
            loading[0].stop_before(request.block)
        elif isinstance(request, messages.StoreLayer) and (storing := self._stores.get(request.id)) is not None:
            storing[0].store_layer(request.layer)

    def _copied(self, request: messages.Copied) -> None:
        transfer = self._loads.get(request.id) or self._stores.get(request.id)
        if transfer is not None:
            transfer[1].answered(request.number, request.error)

    def _give_up(self, id_: int) -> None:
        """End a transfer, a question before it is answered, or a lease: its client does not wait for it any more."""
        if (loading := self._loads.get(id_)) is not None:
            loading[0].cancel()
        elif (storing := self._stores.get(id_)) is not None:
            storing[0].cancel()
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

    def _ask(self, request: messages.Question, send: Send) -> None:
        """Answer one: at once if that needs no waiting, else when it is known."""
        self._new(request.id)
        if len(self._asked) >= self._limits.questions_per_client:
            raise CapacityError(f"{self._limits.questions_per_client} questions of this client are under way")
        if self.is_read_only and isinstance(request, messages.Evict | messages.Clear):
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
            send(messages.Failed(id_, wire.kind_of(error), str(error)))

    def _answer(self, request: messages.Question) -> Answered:
        match request:
            case messages.Stats():
                return partial(self._count, request)
            case messages.Flush():
                return questions.flush(self._cache, request)
            case messages.Clear():
                return questions.clear(self._cache, request)
            case messages.Lease():
                return partial(self._lease, request)
        kv, seat = self._seat(request.keys.epoch)
        if isinstance(request, messages.Explain):
            seat.past_epochs = list(request.before)
        return questions.answer(kv, request)

    async def _count(self, request: messages.Stats) -> messages.Counted:
        """Count, what the client knows to have ended included: it takes a few turns more here."""
        _, cache = self._seat(b"")
        while any(not self._loads[id_][1].num_copying for id_ in self._promised):
            await cache.tasks.turn()
        return messages.Counted(request.id, cache.statistics())

    async def _lease(self, request: messages.Lease) -> messages.Leased:
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
        return messages.Leased(request.id, chain.host.slab.name, wire.as_bytes(lease.slots))

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
        taken = self._loads, self._stores, self._asked, self._leases, self.jobs, self._changes
        if any(id_ in those for those in taken):
            raise ConfigurationError(f"number {id_} is of something that has not ended")

    def _checked(self, id_: int, send: Send, call: Callable[[], object]) -> None:
        try:
            call()
        except (TieredKVError, ValueError) as error:  # a ValueError is e.g. of a priority there is none of
            kind = wire.kind_of(error) if isinstance(error, TieredKVError) else ConfigurationError.__name__
            send(messages.Failed(id_, kind, str(error)))

    def _note(self, request: messages.Noting) -> None:
        """Do what has no answer."""
        try:
            (kv, _), keys = self._seat(request.keys.epoch), request.keys.block_keys()
            match request:
                case messages.Touch():
                    kv.touch(keys, hint=request.hint)
                case messages.CountLookup():
                    kv.count_lookup(keys, np.frombuffer(request.found, np.uint8) != 0)
                case messages.Unpin():
                    kv.unpin(keys)
        except TieredKVError as error:
            log("warning", "host.request_refused", client=self.name, error=str(error))
