"""A cache that a server of this host keeps: how it is made, by `TieredKV.connect`, and opened and closed.

The server decides and has the storage; this process copies between its tensors and memory that both have mapped. So a
call asks the server, or starts what moves blocks in this process.

What is promised is said in `BlockCache`, and here what differs. While no server is there, or none answers in time,
lookups miss, loads bring 0 blocks, and stores are dropped and counted; it is attached again as soon as there is one.
Nothing of that raises where an engine serves.
"""

import asyncio
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Final, NoReturn, Self

import torch

from tiered_kv.cache.checks import (
    LoadCall,
    StoreCall,
    check_emit,
    check_seconds,
    check_shards,
    check_ttl,
    parts_of,
)
from tiered_kv.cache.planner import Planner
from tiered_kv.host import protocol, wire
from tiered_kv.host.asked_calls import CALLS, AskedCalls
from tiered_kv.host.attachment import Attachment
from tiered_kv.host.client_changes import FarSubscribers
from tiered_kv.host.client_planner import FarPlanner
from tiered_kv.host.client_transfers import Starts
from tiered_kv.host.connection import Connection, FarSide
from tiered_kv.host.protocol import Advanced, Attach, Keys, Preempted
from tiered_kv.memory.device import Device
from tiered_kv.memory.gpu import DeviceLike, resolve
from tiered_kv.tiers.changes import Changes
from tiered_kv.transfers.handles import LoadHandle
from tiered_kv.transfers.prefetch import HostLease, PrefetchHandle
from tiered_kv.transfers.store import StoreHandle
from tiered_kv.transfers.submissions import LoadTicket, StoreTicket
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError
from tiered_kv.values.events import BlocksPrefetched, Emit, EpochAdvanced, SequencePreempted
from tiered_kv.values.integers import as_rank
from tiered_kv.values.keys import BlockKeys, ModelIdentity, Namespace, Shard, epoch_digest, salt_digest
from tiered_kv.values.layout import KVLayout, fingerprint
from tiered_kv.values.log import guarded, log, log_event
from tiered_kv.values.results import CacheStatistics, LoadResult, PinResult, PrefetchResult, StoreResult, SwapOutResult
from tiered_kv.values.specs import GPULoadStoreSpec

_SCHEME: Final = "unix:"


class ConnectedKV(AskedCalls):
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
        check_seconds("timeout_s", timeout_s, may_be_none=False)
        if not isinstance(name, str) or not isinstance(read_only, bool):
            raise ConfigurationError(f"name must be text, and read_only a bool, got {name!r:.80} and {read_only!r:.80}")
        name = name or f"{os.path.basename(sys.argv[0]) or 'python'}-{os.getpid()}"  # noqa: PTH119 - of no path
        shards, emit = check_shards(shard), guarded(check_emit(emit))
        device = resolve(device)
        kind = device.kind if isinstance(device, Device) else torch.device(device).type
        page_locks = kind != "cpu" and not read_only  # what is only read is mapped otherwise, and copied by the CPU
        opening = Attach.of(name, model, layout, shards, is_read_only=read_only, page_locks=page_locks)
        make_side = partial(FarSide, device, layout, parts_of(shards), emit)
        self._num_workers = len(shards)
        connection = Connection(_path_in(url), opening, make_side, timeout_s)
        super().__init__(connection, Starts(connection, epoch_digest(model.weights), emit))
        self._model = model
        self._layout = layout
        self._emit = emit
        self._planner: Planner | None = None
        self._subscribers: FarSubscribers | None = None

    @property
    def media(self) -> Mapping[str, str]:
        """See `BlockCache.media`: of the last server that was there."""
        attached = self._connection.attached
        return {tier.name: tier.medium for tier in attached.tiers if tier.is_owned} if attached is not None else {}

    @property
    def is_attached(self) -> bool:
        """See `BlockCache.is_attached`."""
        there = self._connection.there
        return there is not None and there.is_open and not there.is_silent

    def stats(self) -> CacheStatistics:
        """See `BlockCache.stats`: of the model's cache in the server, and what no server was told of."""
        stats = super().stats()
        refused, missed = self._starts.refused, self._starts.missed
        return replace(
            stats,
            requested=stats.requested + missed.total(),
            missed=stats.missed + missed.total(),
            missed_because=dict(Counter(stats.missed_because) + missed),
            store_requested=stats.store_requested + refused.total(),
            dropped=stats.dropped + refused.total(),
            dropped_because=dict(Counter(stats.dropped_because) + refused),
            is_device_usable=self._open(anywhere=True).device.error is None,
        )

    # How blocks move.

    def _open(self, *, anywhere: bool = False) -> FarSide:
        return self._connection.here(anywhere=anywhere)

    def _load(self, call: LoadCall, *, anywhere: bool = False) -> Callable[[], LoadHandle]:
        return partial(self._starts.begin_load, self._starts.load_request(call, self._open(anywhere=anywhere)))

    def _store(self, call: StoreCall, *, anywhere: bool = False) -> Callable[[], StoreHandle]:
        return partial(self._starts.begin_store, self._starts.store_request(call, self._open(anywhere=anywhere)))

    def poll(self, timeout_s: float = 0.0) -> list[tuple[LoadTicket, LoadResult] | tuple[StoreTicket, StoreResult]]:
        """See `BlockCache.poll`."""
        check_seconds("timeout_s", timeout_s, may_be_none=False)
        return self._connection.poll(timeout_s)

    # What stays.

    def prefetch(self, keys: BlockKeys, *, to: str = "cpu") -> PrefetchHandle:
        """See `BlockCache.prefetch`."""
        self._open()
        known = [name for name, medium in self.media.items() if medium == "cpu"]
        if to not in known:
            raise ConfigurationError(f"prefetch goes to a memory tier; here: {', '.join(known)}; not {to!r}")
        handle = super().prefetch(keys, to=to)
        handle.when_done(partial(self._say_prefetched, to, asyncio.get_running_loop().time()))
        return handle

    def _say_prefetched(self, to: str, started: float, ended: "asyncio.Future[PrefetchResult]") -> None:
        if not ended.cancelled() and ended.exception() is None:
            took_ms = (asyncio.get_running_loop().time() - started) * 1e3
            self._emit(BlocksPrefetched(ended.result().num_blocks, ended.result().num_moved, to, took_ms))

    def lease(self, keys: BlockKeys) -> AbstractAsyncContextManager[HostLease]:
        """See `BlockCache.lease`; it ends with the server, or this process, at the latest."""
        return _FarLease(self._connection, self._starts.said(keys))

    async def swap_out(
        self, keys: BlockKeys, source: GPULoadStoreSpec, *, after: object = None, ttl_s: float = 600.0
    ) -> SwapOutResult:
        """See `BlockCache.swap_out`."""
        check_ttl(ttl_s)
        stored = await self.start_store(keys, source, after=after)
        pin = CALLS["pin"]
        pinned: PinResult = await self._ask(pin, pin.bind(keys, ttl_s=ttl_s))
        self._connection.send(Preempted())
        self._emit(SequencePreempted(len(keys), stored.num_dropped, pinned.num_blocks))
        return SwapOutResult(**vars(stored), num_pinned=pinned.num_blocks)

    # What goes, and why.

    async def resize(self, tier: str, capacity: int | str) -> NoReturn:
        """Tiers are the server's: whoever runs it sets their sizes."""
        raise ConfigurationError("resize() is for a cache in this process")

    async def drain(self, *, timeout_s: float | None = None) -> bool:
        """Take no more stores, and wait until all that were made are settled; say whether they were in time."""
        here = self._connection.here()
        check_seconds("timeout_s", timeout_s)
        here.loop_calls.catch_up()  # what was submitted before is taken
        self._starts.is_draining = True
        flush = CALLS["flush"]
        try:
            is_written: bool = await self._ask(flush, flush.bind(sync=True), timeout_s)
        except BackendUnavailableError:
            return False
        return is_written

    def advance_epoch(self, weights: str) -> None:
        """See `BlockCache.advance_epoch`; of this engine alone: others go on with the weights that they serve."""
        self._connection.here()
        self._starts.advance_epoch(epoch_digest(weights))
        self._connection.send(Advanced(self._starts.epoch))
        if self._subscribers is not None:
            self._subscribers.start_over()
        self._emit(EpochAdvanced(weights))

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
        here.group(group)
        shard = here.shards[as_rank(rank, len(here.shards))]
        name = fingerprint(self._model, self._layout, group, here.attached.codec)
        return Namespace(name, self._starts.epoch, salt_digest(salt), shard.part)

    # Opening and closing.

    async def __aenter__(self) -> Self:
        """Attach.

        Raises:
            ConfigurationError: The server refuses this client, or is of another version.
            BackendUnavailableError: There is none, within the time of a call.
        """
        await self._connection.open()
        self._planner = FarPlanner(self._connection, self._starts, self._num_workers)
        self._subscribers = FarSubscribers(self._connection)
        return self

    async def aclose(self) -> None:
        """See `BlockCache.aclose`. What was stored stays with the server; what is leased, for its block."""
        await self._connection.aclose()


class _FarLease(AbstractAsyncContextManager[HostLease]):
    """A lease of slots in a server's memory.

    No generator: an event loop that ends ends those as well, and a thread may be in the block yet.
    """

    def __init__(self, connection: Connection, said: Keys) -> None:
        self._connection = connection
        self._said = said
        self._held: tuple[Attachment, int] | None = None
        self._is_used = False

    async def __aenter__(self) -> HostLease:
        if self._is_used:
            raise ConfigurationError("a lease is for one `async with` block: ask for another by lease()")
        self._is_used = True
        there = self._connection.there
        answer = await self._connection.ask(lambda id_: protocol.Lease(id_, self._said), math.inf)
        if there is None or not isinstance(answer, protocol.Leased) or not there.lease_begins():
            return HostLease([])
        self._held = there, answer.id
        return HostLease(_views(there, answer))

    async def __aexit__(self, *_: object) -> None:
        held, self._held = self._held, None
        if held is not None:
            there, number = held
            there.send(protocol.Cancel(number))
            there.lease_ended()


def _views(there: Attachment, answer: protocol.Leased) -> list[memoryview]:
    """Return the blocks that are leased, or none where the server names slots that it has not."""
    try:
        slab = there.slabs[answer.pool]
        return [slab.payload(slot).toreadonly() for slot in wire.as_ids(answer.slots).tolist()]
    except (KeyError, wire.WireError, ConfigurationError) as error:
        log("error", "host.server_broken", error=f"a lease of slots that are not there: {error}")
        return []


def _path_in(url: str) -> str:
    given = url if isinstance(url, str) and url.startswith(_SCHEME) else ""
    path = given.removeprefix(_SCHEME).removeprefix("//")
    if not path.startswith("/"):
        raise ConfigurationError(f"a server's address is e.g. 'unix:///run/tiered-kv/kv.sock', got {url!r:.200}")
    wire.check_socket(path)
    return path
