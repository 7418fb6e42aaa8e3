"""A cache that a server of this host keeps: how it is made, by `TieredKV.connect`, and opened and closed.

The server decides and has the storage; this process copies between its tensors and memory that both have mapped. While
no server is there lookups miss, loads bring 0 blocks, and stores are dropped and counted; it is attached again as soon
as there is one. Nothing of that raises where an engine serves.

What a client of a host's server answers: it asks the server, or starts what moves blocks in this process.

What is promised is said in `BlockCache` and `TransferCalls`, and here what differs. While no server is there, or none
answers in time, nothing raises where an engine serves.
"""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final, NoReturn, Self
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from tiered_kv.cache.answers import Explanation
from tiered_kv.cache.block_cache import BlockCache
from tiered_kv.cache.checks import (
    LoadCall,
    StoreCall,
    check_emit,
    check_found,
    check_one_rank,
    check_seconds,
    check_shards,
    check_ttl,
)
from tiered_kv.cache.planner import Planner
from tiered_kv.host import protocol as messages
from tiered_kv.host import protocol as questions
from tiered_kv.host import wire
from tiered_kv.host.client_changes import FarSubscribers
from tiered_kv.host.client_planner import FarJobs, FarPlanner
from tiered_kv.host.client_transfers import Starts
from tiered_kv.host.connection import Connection, FarSide
from tiered_kv.host.protocol import Attach, Keys
from tiered_kv.memory.make import DeviceLike, resolve
from tiered_kv.tiers.changes import Changes
from tiered_kv.transfers.handles import Handle, LoadHandle
from tiered_kv.transfers.prefetch import HostLease, PrefetchHandle
from tiered_kv.transfers.store import StoreHandle
from tiered_kv.transfers.submissions import LoadTicket, StoreTicket
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError
from tiered_kv.values.events import Emit, EpochAdvanced, SequencePreempted
from tiered_kv.values.hints import ReuseHint, check_hint
from tiered_kv.values.keys import BlockKeys, ModelIdentity, Namespace, Shard, epoch_digest, salt_digest
from tiered_kv.values.layout import KVLayout, fingerprint
from tiered_kv.values.log import guarded, log_event
from tiered_kv.values.results import (
    BlockState,
    CacheStatistics,
    LoadResult,
    LookupResult,
    PinResult,
    PrefetchResult,
    StoreResult,
    SwapOutResult,
    TierFault,
    TierRun,
)
from tiered_kv.values.specs import GPULoadStoreSpec

_LONG_S: Final = 60.0
"""What calls for operators may take: `flush`, `clear`, `evict`."""
_PAST_EPOCHS: Final = 8
_NO_STATISTICS: Final = CacheStatistics((), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


class FarCalls(BlockCache):
    """The calls of a client, from its opening to its closing."""

    def __init__(
        self, connection: Connection, model: ModelIdentity, layout: KVLayout, shards: Sequence[Shard], emit: Emit
    ) -> None:
        """Ask by way of ``connection``, and tell ``emit`` how transfers end."""
        self._connection = connection
        self._model = model
        self._layout = layout
        self._shards = shards
        self._emit = emit
        self._starts = Starts(connection, epoch_digest(model.weights), emit)
        self._past_epochs: list[bytes] = []
        self._media: Mapping[str, str] = {}
        self._planner: Planner | None = None
        self._subscribers: FarSubscribers | None = None

    @property
    def media(self) -> Mapping[str, str]:
        """See `BlockCache.media`: of the last server that was there."""
        there = self._connection.there
        if there is not None:
            self._media = {tier.name: tier.medium for tier in there.attached.tiers if tier.is_owned}
        return self._media

    # What is there, and how blocks move.

    async def lookup(self, keys: BlockKeys, *, where: bool = False) -> LookupResult:
        """See `BlockCache.lookup`. ``where`` says it as the server sees it: slots and paths are the server's."""
        said = self._starts.said(keys)
        if where:
            check_one_rank(self._shards)
        return _found(keys, await self._connection.ask(lambda id_: questions.Lookup(id_, said, where=where)))

    def _open(self, *, anywhere: bool = False) -> FarSide:
        return self._connection.here(anywhere=anywhere)

    def _prepare_load(self, call: LoadCall, *, anywhere: bool = False) -> Callable[[], LoadHandle]:
        return self._starts.prepare_load(call, anywhere=anywhere)

    def _prepare_store(self, call: StoreCall, *, anywhere: bool = False) -> Callable[[], StoreHandle]:
        return self._starts.prepare_store(call, anywhere=anywhere)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[LoadTicket, LoadResult] | tuple[StoreTicket, StoreResult]]:
        """See `BlockCache.poll`."""
        check_seconds("timeout_s", timeout_s)
        return self._connection.poll(timeout_s)

    # What is done ahead, and what stays.

    def prefetch(self, keys: BlockKeys, *, to: str = "cpu") -> PrefetchHandle:
        """See `BlockCache.prefetch`."""
        said = self._starts.said(keys)
        task = self._connection.here().tasks.spawn(self._prefetch(said, len(keys), to), f"prefetch {len(keys)} blocks")
        return Handle(task, partial(_cancel, task))

    async def _prefetch(self, said: Keys, num_blocks: int, to: str) -> PrefetchResult:
        timeout_s = self._connection.load_timeout_s
        try:
            answer = await self._connection.ask(lambda id_: questions.Prefetch(id_, said, to), timeout_s)
        except asyncio.CancelledError:
            return PrefetchResult(0, 0)
        if isinstance(answer, questions.Prefetched):
            return PrefetchResult(answer.num_blocks, answer.num_moved, answer.faults)
        return PrefetchResult(0, 0, (TierFault("host", "server away", num_blocks),))

    def lease(self, keys: BlockKeys) -> AbstractAsyncContextManager[HostLease]:
        """See `BlockCache.lease`; it ends with the server, or this process, at the latest."""
        return self._lease(self._starts.said(keys))

    @asynccontextmanager
    async def _lease(self, said: Keys) -> AsyncGenerator[HostLease]:
        there, timeout_s = self._connection.there, self._connection.load_timeout_s
        answer = await self._connection.ask(lambda id_: questions.Lease(id_, said), timeout_s)
        if there is None or not isinstance(answer, questions.Leased):
            yield HostLease([])
            return
        slab = there.slabs[answer.pool]
        try:
            yield HostLease([slab.payload(slot).toreadonly() for slot in wire.as_ids(answer.slots).tolist()])
        finally:
            there.send(messages.Cancel(answer.id))

    def touch(self, keys: BlockKeys, *, hint: ReuseHint | None = None) -> None:
        """See `BlockCache.touch`."""
        said = self._starts.said(keys)
        self._connection.send(questions.Touch(said, check_hint(hint)))

    def pin(self, keys: BlockKeys, *, ttl_s: float) -> PinResult:
        """See `BlockCache.pin`. Pins end with this process, too; others' are their own."""
        said = self._starts.said(keys)
        check_ttl(ttl_s)
        answer = self._connection.ask_now(lambda id_: questions.Pin(id_, said, ttl_s))
        return PinResult(answer.number if isinstance(answer, questions.Number) else 0)

    def unpin(self, keys: BlockKeys) -> None:
        """See `BlockCache.unpin`: of the pins of this process."""
        self._connection.send(questions.Unpin(self._starts.said(keys)))

    async def swap_out(
        self, keys: BlockKeys, source: GPULoadStoreSpec, *, after: object = None, ttl_s: float = 600.0
    ) -> SwapOutResult:
        """See `BlockCache.swap_out`."""
        check_ttl(ttl_s)
        stored = await self.start_store(keys, source, after=after)
        said = self._starts.said(keys)
        answer = await self._connection.ask(lambda id_: questions.Pin(id_, said, ttl_s))
        num_pinned = answer.number if isinstance(answer, questions.Number) else 0
        self._emit(SequencePreempted(len(keys), stored.num_dropped, num_pinned))
        return SwapOutResult(**vars(stored), num_pinned=num_pinned)

    # From any thread; these block it for the time that the server needs to answer.

    def lookup_nowait(self, keys: BlockKeys) -> LookupResult:
        """See `BlockCache.lookup_nowait`. It asks the server, at most for a second."""
        said = self._starts.said(keys, anywhere=True)
        answer = self._connection.ask_now(lambda id_: questions.Lookup(id_, said, is_owned=True), anywhere=True)
        return _found(keys, answer)

    def membership(self, keys: BlockKeys) -> NDArray[np.int8]:
        """See `BlockCache.membership`. It asks the server, at most for a second."""
        said = self._starts.said(keys, anywhere=True)
        answer = self._connection.ask_now(lambda id_: questions.Membership(id_, said), anywhere=True)
        if isinstance(answer, questions.States):
            return np.frombuffer(answer.states, np.int8)
        return np.full(len(keys), BlockState.MISS, np.int8)

    def count_lookup(self, keys: BlockKeys, found: NDArray[np.bool_]) -> None:
        """See `BlockCache.count_lookup`: in the server's metrics. While it is away nothing is counted."""
        said = self._starts.said(keys, anywhere=True)
        check_found(keys, found)
        if len(keys):
            counted = questions.CountLookup(said, np.asarray(found, np.bool_).tobytes())
            self._open(anywhere=True).loop_calls.call(self._connection.send, counted)

    # What goes, and why.

    async def evict(self, keys: BlockKeys, *, tier: str | None = None) -> int:
        """See `BlockCache.evict`; of all engines that share these blocks.

        Raises:
            BackendUnavailableError: The server has not answered: they may be there.
        """
        said = self._starts.said(keys)
        return self._number_in(await self._connection.ask(lambda id_: questions.Evict(id_, said, tier), _LONG_S))

    async def resize(self, tier: str, capacity: int | str) -> NoReturn:
        """Tiers are the server's: whoever runs it sets their sizes."""
        raise ConfigurationError("resize() is for a cache in this process")

    async def clear(self) -> None:
        """Empty every tier that the server owns of this model's blocks, for all engines that share them.

        Raises:
            BackendUnavailableError: The server has not answered.
        """
        self._number_in(await self._connection.ask(questions.Clear, _LONG_S))

    async def flush(self, *, sync: bool = False) -> None:
        """See `BlockCache.flush`; of all engines that share these blocks.

        Raises:
            BackendUnavailableError: The server has not answered.
        """
        self._number_in(await self._connection.ask(lambda id_: questions.Flush(id_, sync), _LONG_S))

    async def drain(self, *, timeout_s: float | None = None) -> bool:
        """Take no more stores, and wait until all that were made are settled; say whether they were in time."""
        self._connection.here()
        check_seconds("timeout_s", timeout_s)
        self._starts.is_draining = True
        answer = await self._connection.ask(
            lambda id_: questions.Flush(id_, sync=True), _LONG_S if timeout_s is None else timeout_s
        )
        return isinstance(answer, questions.Number)

    def advance_epoch(self, weights: str) -> None:
        """See `BlockCache.advance_epoch`; of this engine alone: others go on with the weights that they serve."""
        self._connection.here()
        epoch = epoch_digest(weights)
        past = [self._starts.epoch, *self._past_epochs]
        self._past_epochs = [each for each in past if each != epoch][:_PAST_EPOCHS]
        self._starts.epoch = epoch
        if self._subscribers is not None:
            self._subscribers.start_over()
        self._emit(EpochAdvanced(weights))

    async def explain(self, keys: BlockKeys, *, ask: bool = False) -> list[Explanation]:
        """See `BlockCache.explain`; ``"server away"`` is a state, too."""
        said, before = self._starts.said(keys), tuple(self._past_epochs)
        timeout_s = _LONG_S if ask else None
        answer = await self._connection.ask(lambda id_: questions.Explain(id_, said, ask, before), timeout_s)
        if isinstance(answer, questions.Explained):
            return list(answer.blocks)
        return [Explanation("server away")] * len(keys)

    def stats(self) -> CacheStatistics:
        """See `BlockCache.stats`: of the model's cache in the server; without tiers while that is away."""
        answer = self._connection.ask_now(questions.Stats)
        return answer.stats if isinstance(answer, questions.Counted) else _NO_STATISTICS

    def events(self) -> Changes:
        """See `BlockCache.events`: of the server's tiers, whoever changes them. While none is there they are empty.

        With each server they begin again with snapshots; tiers that the first one did not have are left out.
        """
        self._connection.here()
        assert self._subscribers is not None  # noqa: S101 - it is open
        return self._subscribers.subscribe()

    def planner(self) -> Planner:
        """See `BlockCache.planner`. Workers map the server's memory; see `Planner.slabs` for what its end means."""
        self._connection.here(anywhere=True)
        assert self._planner is not None  # noqa: S101 - it is open
        return self._planner

    def namespace(self, salt: str | bytes = b"", *, group: int = 0, rank: int = 0) -> Namespace:
        """See `BlockCache.namespace`."""
        here = self._connection.here(anywhere=True)
        here.of_rank(group)
        if not 0 <= rank < len(self._shards):
            raise ConfigurationError(f"rank {rank!r} of {len(self._shards)}: this cache has no such rank")
        name = fingerprint(self._model, self._layout, group, here.attached.codec)
        return Namespace(name, self._starts.epoch, salt_digest(salt), self._shards[rank].part)

    def _number_in(self, answer: questions.Answer | None) -> int:
        if not isinstance(answer, questions.Number):
            raise BackendUnavailableError(f"the server at {self._connection.path} has not answered")
        return answer.number


def _cancel(task: "asyncio.Task[Any]") -> None:
    task.cancel()


def _found(keys: BlockKeys, answer: questions.Answer | None) -> LookupResult:
    if not isinstance(answer, questions.Found):
        return LookupResult(0, (), 0, keys.block_size)
    specs = [place.spec() if place else None for place in answer.places] or [None] * len(answer.runs)
    runs = tuple(TierRun(*run, spec) for run, spec in zip(answer.runs, specs, strict=True))
    return LookupResult(answer.num_blocks, runs, answer.num_bytes, keys.block_size, answer.costs, answer.num_pending)


_SCHEME: Final = "unix"


class ConnectedKV(FarCalls):
    """A cache whose tiers are a server's; made by `TieredKV.connect`. Its calls are those of `BlockCache`."""

    def __init__(
        self,
        url: str,
        *,
        model: ModelIdentity,
        layout: KVLayout,
        shard: Shard | tuple[Shard, ...] | None = None,
        device: DeviceLike | None = None,
        emit: Emit | Sequence[Emit] = log_event,
        name: str = "",
        read_only: bool = False,
        timeout_s: float = 5.0,
    ) -> None:
        """See `TieredKV.connect`."""
        if not isinstance(model, ModelIdentity) or not isinstance(layout, KVLayout):
            raise ConfigurationError("connect() needs model=ModelIdentity(...) and layout=KVLayout(...)")
        check_seconds("timeout_s", timeout_s)
        name = name or f"{os.path.basename(sys.argv[0]) or 'python'}-{os.getpid()}"  # noqa: PTH119 - of no path
        shards, emit = check_shards(shard), guarded(check_emit(emit))
        opening = Attach.of(name, model, layout, shards, is_read_only=read_only)
        make_side = partial(FarSide, resolve(device), layout, shards, emit)
        super().__init__(Connection(_path_in(url), opening, make_side, timeout_s), model, layout, shards, emit)

    @property
    def is_attached(self) -> bool:
        """Whether a server is there and answers."""
        there = self._connection.there
        return there is not None and there.is_open and not there.is_silent

    # Opening and closing.

    async def __aenter__(self) -> Self:
        """Attach.

        Raises:
            ConfigurationError: The server refuses this client, or is of another version.
            BackendUnavailableError: There is none, within the time of a call.
        """
        await self._connection.open()
        jobs = FarJobs(self._connection, len(self._shards))
        self._planner = FarPlanner(self._connection, self._starts, jobs)
        self._subscribers = FarSubscribers(self._connection)
        return self

    async def aclose(self) -> None:
        """See `BlockCache.aclose`. What was stored stays with the server."""
        await self._connection.aclose()


def _path_in(url: str) -> str:
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme != _SCHEME or parts.netloc or not parts.path:
        raise ConfigurationError(f"a server's address is e.g. 'unix:///run/tiered-kv/kv.sock', got {url!r:.200}")
    return parts.path
