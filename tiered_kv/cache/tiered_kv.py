"""`TieredKV`: the cache whose tiers are this process's own. How it is made and opened, what it answers, how it ends.

`TierCalls` has its calls while it is open; what each promises is said in `BlockCache`. A call checks what it is given
and decides on the spot, at the `Seat` that it has; the moving is left to the transfers.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from importlib import import_module
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.cache.answers import (
    Explanation,
    explain,
    lookup_result,
    states_of,
    why_not_found,
    why_not_more,
    with_pending,
    with_specs,
)
from tiered_kv.cache.block_cache import BlockCache
from tiered_kv.cache.checks import (
    LoadCall,
    StoreCall,
    check_asyncio,
    check_capacity,
    check_emit,
    check_found,
    check_identity,
    check_limits,
    check_metrics,
    check_one_rank,
    check_page,
    check_recorder,
    check_seconds,
    check_shards,
    check_ttl,
    metrics_of,
    page_of,
    parts_of,
)
from tiered_kv.cache.closing import Draining, begin_to_close, drain, draining_on
from tiered_kv.cache.hinted import Hints
from tiered_kv.cache.opening import open_cache
from tiered_kv.cache.parts import CacheParts, chain_parts
from tiered_kv.cache.planner import OwnPlanner, Planner
from tiered_kv.cache.seat import Seat
from tiered_kv.catalog.locate import locate_from_any_thread
from tiered_kv.media.backend import Backend, SlotBackend
from tiered_kv.memory.codec import CodecName, make_codec
from tiered_kv.memory.gpu import DeviceLike, resolve
from tiered_kv.settings.settings import CacheLimits, TieredKVSettings
from tiered_kv.settings.tier_settings import TierSettings
from tiered_kv.telemetry.metrics import Metrics
from tiered_kv.telemetry.page import Page
from tiered_kv.telemetry.trace_recorder import TraceRecorder
from tiered_kv.telemetry.watch import Watch, Watcher
from tiered_kv.tiers import upkeep
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.changes import Changes
from tiered_kv.tiers.pins import Pins
from tiered_kv.tiers.records import make_record_codec
from tiered_kv.tiers.tier import Batch
from tiered_kv.transfers.handles import Handle, LoadHandle
from tiered_kv.transfers.prefetch import HostLease, PrefetchHandle, hold_on_host, start_prefetch
from tiered_kv.transfers.start import start_load, start_store
from tiered_kv.transfers.store import StoreHandle
from tiered_kv.transfers.submissions import LoadTicket, StoreTicket
from tiered_kv.values.errors import ClosedError, ConfigurationError
from tiered_kv.values.events import BlocksLookedUp, Emit, EpochAdvanced, SequencePreempted
from tiered_kv.values.hints import ReuseHint, check_hint
from tiered_kv.values.keys import BlockKeys, ModelIdentity, Namespace, Shard, salt_digest
from tiered_kv.values.layout import KVLayout
from tiered_kv.values.log import guarded, log_event
from tiered_kv.values.results import (
    CacheStatistics,
    LoadResult,
    LookupResult,
    PinResult,
    RemovalResult,
    StoreResult,
    SwapOutResult,
    TierRun,
)
from tiered_kv.values.specs import GPULoadStoreSpec


class TierCalls(BlockCache):
    """The calls of a cache whose tiers are in this process, from its opening to its closing."""

    def __init__(self, media: Mapping[str, str], seat: Seat | None = None) -> None:
        """Answer for a cache with tiers of these media, once it is open at this seat."""
        self._media = media
        self._seat = seat
        self._planner: Planner | None = None

    @property
    @override
    def media(self) -> Mapping[str, str]:
        return self._media

    @property
    @override
    def is_attached(self) -> bool:
        return self._seat is not None and self._seat.cache.closing is None

    # What is there, and what is done ahead.

    @override
    async def lookup(self, keys: BlockKeys, *, where: bool = False) -> LookupResult:
        seat = self._open()
        parts = seat.batches(keys)
        if seat.cache.recorder is not None:
            seat.cache.note("lookup", keys)
        if where:
            check_one_rank(parts)
        runs = [chain.locate(batch) for chain, batch in parts]
        if parts[0][0].shared and any(
            chain.may_be_longer(part, run) for (chain, part), run in zip(parts, runs, strict=True)
        ):
            started = asyncio.get_running_loop().time()
            with seat.cache.callers.waiting():
                found = zip(parts, runs, strict=True)
                runs = await asyncio.gather(*(chain.locate_on(part, run) for (chain, part), run in found))
            result = _looked_up(seat, parts, runs)
            took_ms = (asyncio.get_running_loop().time() - started) * 1e3
            seat.emit(BlocksLookedUp(result.num_blocks, len(keys), result.by_tier, took_ms))
        else:  # nobody waited: to tell of it would take as long again
            result = _looked_up(seat, parts, runs)
        if where:
            with seat.cache.callers.waiting():
                return await with_specs(*parts[0], result)
        return result

    def lookup_at_once(self, keys: BlockKeys, *, where: bool = False) -> LookupResult | None:
        """`lookup` if nobody has to be waited for; None if there are tiers to ask. For the event loop's thread."""
        seat = self._open()
        parts = seat.batches(keys)
        if where or any(chain.shared for chain, _ in parts):
            return None
        seat.cache.note("lookup", keys)
        return _looked_up(seat, parts, [chain.locate(batch) for chain, batch in parts])

    @override
    async def presence(self, keys: BlockKeys) -> NDArray[np.bool_]:
        seat = self._open()
        parts = seat.batches(keys)
        seat.cache.note("lookup", keys)
        with seat.cache.callers.waiting():
            of_ranks = await asyncio.gather(*(chain.find_each(batch) for chain, batch in parts))
        there: NDArray[np.bool_] = np.logical_and.reduce(of_ranks)
        return there

    @override
    def prefetch(self, keys: BlockKeys, *, to: str = "cpu") -> PrefetchHandle:
        return start_prefetch(self._open().batches(keys), to)

    @override
    def lease(self, keys: BlockKeys) -> AbstractAsyncContextManager[HostLease]:
        chain, batch = self._open().batch(keys)
        if not chain.host.index.num_slots:
            raise ConfigurationError("lease() holds blocks in the CPU tier, and this cache has none")
        return hold_on_host(chain, batch)

    # From any thread, for engines with a synchronous loop: nothing waits for the event loop.

    @override
    def poll(self, timeout_s: float = 0.0) -> list[tuple[LoadTicket, LoadResult] | tuple[StoreTicket, StoreResult]]:
        check_seconds("timeout_s", timeout_s, may_be_none=False)
        return self._seat.submissions.poll(timeout_s) if self._seat else []

    @override
    def lookup_nowait(self, keys: BlockKeys) -> LookupResult:
        seat = self._open(anywhere=True)
        parts = seat.batches(keys)
        seat.cache.note("lookup", keys)
        found = [locate_from_any_thread(chain.books(), batch.names) for chain, batch in parts]
        return lookup_result([chain for chain, _ in parts], found)

    @override
    def membership(self, keys: BlockKeys, *, tier: str | None = None, prefix_only: bool = False) -> NDArray[np.int8]:
        seat = self._open(anywhere=True)
        if prefix_only and tier is None and isinstance(keys, BlockKeys) and not seat.may_have_prefix(keys):
            return np.zeros(len(keys), np.int8)
        return states_of(seat.batches(keys), tier, prefix_only=prefix_only)

    @override
    def count_lookup(self, keys: BlockKeys, found: NDArray[np.bool_]) -> None:
        seat = self._open(anywhere=True)
        check_found(keys, found)
        if (watch := seat.cache.watch) is None or not len(keys):
            return
        parts, num_found, first = seat.batches(keys), int(np.count_nonzero(found)), int(np.argmin(found))

        def count() -> None:
            watch.looked_up(parts[0][1], num_found, why_not_found(parts, num_found, first))

        seat.call_soon(count)

    # What stays, and what must leave the engine for a while.

    @override
    def touch(self, keys: BlockKeys, *, hint: ReuseHint | None = None) -> None:
        check_hint(hint)
        for chain, batch in self._open().batches(keys):
            if hint is None or hint.probability > 0:
                chain.touch(batch)
            if hint is not None:
                chain.hint(batch, hint)

    @override
    def resident(self, keys: BlockKeys) -> None:
        for chain, batch in self._open().batches(keys):
            for memory in chain.memory:
                memory.index.resident(batch.names)

    @override
    def leaving(self, keys: BlockKeys) -> None:
        for chain, batch in self._open().batches(keys):
            for memory in chain.memory:
                memory.index.leaving(batch.names)

    @override
    def pin(self, keys: BlockKeys, *, ttl_s: float) -> PinResult:
        seat = self._open()
        return PinResult(seat.pins.pin(seat.batches(keys), keys, check_ttl(ttl_s)))

    @override
    def unpin(self, keys: BlockKeys) -> None:
        seat = self._open()
        seat.pins.unpin(seat.batches(keys), keys)

    @override
    async def swap_out(
        self, keys: BlockKeys, source: GPULoadStoreSpec, *, after: object = None, ttl_s: float = 600.0
    ) -> SwapOutResult:
        seat = self._open()
        check_ttl(ttl_s)
        stored = await self.start_store(keys, source, after=after)
        pinned = self.pin(keys, ttl_s=ttl_s)
        seat.fates.preemptions += 1
        seat.emit(SequencePreempted(len(keys), stored.num_dropped, pinned.num_blocks))
        return SwapOutResult(**vars(stored), num_pinned=pinned.num_blocks)

    # What goes, what is written, and why: for operators and schedulers, now and then.

    @override
    async def evict(self, keys: BlockKeys, *, tier: str | None = None) -> RemovalResult:
        seat = self._open_so_far()
        parts = seat.batches(keys)
        names = parts[0][0].names
        if tier is not None and tier not in names:
            raise ConfigurationError(f"no tier {tier!r} here; there are {', '.join(names)}")
        with seat.cache.callers.waiting():
            removed = [upkeep.evict(chain, batch, tier) for chain, batch in parts]
            kept_by = await upkeep.kept_by([each for _, removals in removed for each in removals])
        num_blocks = int(np.count_nonzero(np.logical_or.reduce([found for found, _ in removed])))
        return RemovalResult(num_blocks, tuple(dict.fromkeys(kept_by)))

    @override
    async def resize(self, tier: str, capacity: int | str) -> int:
        return await self._open().cache.resize(tier, check_capacity(capacity))

    @override
    async def clear(self) -> RemovalResult:
        seat = self._open_so_far()
        with seat.cache.callers.waiting():
            num_blocks, kept_by = await upkeep.clear(seat.cache.chains)
        return RemovalResult(num_blocks, tuple(dict.fromkeys(kept_by)))

    @override
    def advance_epoch(self, weights: str) -> None:
        seat = self._open()
        seat.advance_epoch(weights)
        seat.emit(EpochAdvanced(weights))

    @override
    async def flush(self, *, sync: bool = False) -> bool:
        seat = self._open_so_far()
        with seat.cache.callers.waiting():
            is_written = await seat.cache.settle()
        if sync:
            is_written &= await seat.cache.finish(upkeep.checkpoint(seat.cache.chains, sync=True), "checkpoint")
        return is_written

    @override
    async def drain(self, *, timeout_s: float | None = None) -> bool:
        seat = self._open_so_far()
        check_seconds("timeout_s", timeout_s)
        return await drain(seat.cache, timeout_s)

    @override
    async def explain(self, keys: BlockKeys, *, ask: bool = False) -> list[Explanation]:
        seat = self._open()
        with seat.cache.callers.waiting():
            return await explain(seat, keys, ask=ask)

    @override
    def stats(self) -> CacheStatistics:
        return self._open().statistics()

    @override
    def events(self) -> Changes:
        return self._open().cache.subscribers.subscribe()

    @override
    def namespace(self, salt: str | bytes = b"", *, group: int = 0, rank: int = 0) -> Namespace:
        return self._open(anywhere=True).namespace(salt_digest(salt), group=group, rank=rank)

    @override
    def planner(self) -> Planner:
        seat = self._open(anywhere=True)
        if self._planner is None:
            self._planner = OwnPlanner(seat, partial(self._open, anywhere=True))
        return self._planner

    # What every call asks first, and once.

    @override
    def _open(self, *, anywhere: bool = False) -> Seat:
        seat = self._seat
        if seat is None:
            raise ClosedError("this TieredKV is not open yet: use it with 'async with'")
        if seat.cache.closing is not None:
            raise ClosedError("this TieredKV is closed")
        seat.check_loop(anywhere=anywhere)
        return seat

    def _open_so_far(self) -> Seat:
        """Return the seat, with all begun that was submitted and planned so far: in this thread, too, without a turn.

        For coroutines only, which begin where nobody is in the midst of anything.
        """
        seat = self._open()
        seat.cache.loop_calls.catch_up()
        return seat

    @override
    def _load(self, call: LoadCall, *, anywhere: bool = False) -> Callable[[], LoadHandle]:
        return partial(start_load, self._open(anywhere=anywhere).load_request(call))

    @override
    def _store(self, call: StoreCall, *, anywhere: bool = False) -> Callable[[], StoreHandle]:
        return partial(start_store, self._open(anywhere=anywhere).store_request(call))


class TieredKV(TierCalls):
    """A KV cache over a chain of tiers, for one model on one event loop. Open it with ``async with``.

    Its calls are those of `BlockCache`, and what only the owner of tiers can do.
    """

    def __init__(
        self,
        tiers: Sequence[TierSettings | Mapping[str, Any] | str | Backend | SlotBackend],
        *,
        model: ModelIdentity,
        layout: KVLayout,
        shard: Shard | tuple[Shard, ...] | None = None,
        limits: CacheLimits | Mapping[str, Any] | None = None,
        device: DeviceLike | None = None,
        codec: CodecName = "none",
        emit: Emit | Sequence[Emit] = log_event,
        metrics: bool | Metrics = False,
        page: bool | int | str | Page = False,
        record_trace: str | os.PathLike[str] | TraceRecorder = "",
    ) -> None:
        """Check the parts; nothing is allocated before opening.

        Args:
            tiers: Fastest first: settings, what makes them (a dict or URL), or backends of one's own. ``{rank}`` in
                their texts and paths is the rank of ``shard``: ranks of one host need directories of their own.
            model: Which weights computed the KV.
            layout: What a block is made of.
            shard: Which part of the heads this process holds; all of them by default. A scheduler gives
                ``Shard.every(size)``: then a block is there when every rank's part is, and only the ranks move bytes.
                Of what n workers all hold, ``Shard.every(1, copies=n)``: then it is kept once.
            limits: Bounds in time, memory and work: `CacheLimits`, or a dict of its fields.
            device: Where the engine's tensors live, e.g. ``"cuda:1"``, or a ``torch.device``; the GPU if torch has one,
                else the CPU. Without an index it is the current GPU of the thread that calls this.
            codec: How blocks are kept: see `TieredKVSettings`.
            emit: Takes every event, at once, on the event loop; one function or several. Logs them by default.
            metrics: Whether to tell Prometheus what happens: True, or where, `tiered_kv.telemetry.Metrics`.
            page: Whether to show it on a page: an address to serve it at, as in `TieredKVSettings`, or a
                `tiered_kv.telemetry.Page` that the program serves itself.
            record_trace: A file to record requests to, as in `TieredKVSettings`, or a
                `tiered_kv.telemetry.TraceRecorder`.

        Raises:
            ConfigurationError: The tiers cannot make a chain, the codec cannot keep the layout's blocks, or an
                argument is no such thing.
        """
        check_identity(tiers, model, layout)
        shards = check_shards(shard)
        watchers: list[Watcher] = [*check_metrics(metrics), *check_page(page)]
        watch = Watch(watchers, self._explain, self._make_hints) if watchers else None
        self._parts = CacheParts(
            tiers=chain_parts(tiers, shards),
            model=model,
            layout=layout,
            codecs=tuple(make_codec(codec, group) for group in layout.groups),
            record_codecs=tuple(make_record_codec(codec, group) for group in layout.groups),
            shards=parts_of(shards),
            num_workers=len(shards),
            limits=check_limits(limits),
            device=resolve(device),
            emit=guarded([*check_emit(emit), *([watch] if watch else [])]),
            watch=watch,
            recorder=check_recorder(record_trace),
        )
        if watch is not None:
            watch.claim()
        if self._parts.recorder is not None:
            self._parts.recorder.claim()
        super().__init__(self._parts.tiers.media)
        self._is_opening = False

    @classmethod
    def from_settings(
        cls,
        settings: TieredKVSettings | Mapping[str, Any] | None = None,
        *,
        model: ModelIdentity,
        layout: KVLayout,
        shard: Shard | tuple[Shard, ...] | None = None,
        device: DeviceLike | None = None,
        emit: Emit | Sequence[Emit] = log_event,
        metrics: bool | Metrics | None = None,
        page: bool | int | str | Page | None = None,
        record_trace: str | os.PathLike[str] | TraceRecorder | None = None,
    ) -> Self:
        """Make a cache of `TieredKVSettings`: given, as a dict too, or read from the environment.

        ``metrics``, ``page`` and ``record_trace`` go before the settings of these names.
        """
        settings = TieredKVSettings.of(settings)
        limits, codec = settings.limits, settings.codec
        return cls(
            settings.tiers,
            model=model,
            layout=layout,
            shard=shard,
            limits=limits,
            device=device,
            codec=codec,
            emit=emit,
            metrics=metrics_of(settings, given=metrics),
            page=page_of(settings, given=page),
            record_trace=settings.record_trace if record_trace is None else record_trace,
        )

    @staticmethod
    def connect(
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
    ) -> BlockCache:
        """Attach to the cache that a server of this host keeps: ``async with TieredKV.connect("unix:///...") as kv``.

        The same calls, and the same promises. The server, ``tiered-kv serve``, decides and has the storage; copies run
        in this process. While it is away nothing raises where an engine serves: lookups miss, loads bring 0 blocks,
        and stores are dropped and counted. It is attached again by itself.

        Args:
            url: ``"unix://"`` and the path of the server's socket.
            model: As for a cache of one's own. Equal models and layouts share blocks.
            layout: The same.
            shard: The same; replicas share one copy.
            device: The same.
            emit: Takes what becomes of this process's transfers; all other events are the server's.
            name: For people, in what the server logs and says of itself.
            read_only: Load, and change nothing.
            timeout_s: What a call without a deadline of its own waits for an answer; and entering for a server.

        Raises:
            ConfigurationError: An argument that cannot be right.

        Entering raises `BackendUnavailableError` if no server listens there after ``timeout_s``.
        """
        # Above this module in the house, and in need of msgspec.
        connected: Callable[..., BlockCache] = import_module("tiered_kv.host.client").ConnectedKV
        return connected(
            url, model=model, layout=layout, shard=shard, device=device, emit=emit,
            name=name, read_only=read_only, timeout_s=timeout_s,
        )  # fmt: skip

    # Opening and closing.

    async def __aenter__(self) -> Self:
        """Open all tiers.

        Raises:
            ConfigurationError: A tier can never work as it is set up, or the machine lacks the memory.
            BackendUnavailableError: A tier cannot be reached.
        """
        if self._seat is not None or self._is_opening:
            raise ClosedError("a TieredKV is opened once; make another")
        check_asyncio()
        self._is_opening = True
        try:
            self._seat = await open_cache(self._parts)
        finally:
            self._is_opening = False
        return self

    def __enter__(self) -> NoReturn:
        raise ConfigurationError(
            "a TieredKV is opened with 'async with'; without an event loop: with open_blocking(cache) as kv"
        )

    def __exit__(self, *_: object) -> None:
        """Is here for ``with`` to get as far as `__enter__`."""

    async def aclose(self) -> None:
        """End: what is being moved ends, or is given up after `CacheLimits.close_timeout_s`. Idempotent.

        A cancellation is raised when everything has ended.

        Raises:
            ConfigurationError: Called elsewhere than on the event loop that opened it. Nothing has ended.
        """
        seat = self._seat
        if seat is not None and not (seat.cache.closing and seat.cache.closing.done()):
            seat.check_loop()
            # A task of its own, as a shield does not hold against task.cancel().
            await Handle(begin_to_close(seat), lambda: None)

    def drain_on(self, *signals: signal.Signals, timeout_s: float | None = None) -> AbstractContextManager[Draining]:
        """Drain when a signal comes: ``with kv.drain_on(signal.SIGTERM) as draining: await draining.wait()``.

        A second signal does what it does by default: it ends the process. For an event loop in the main thread. While
        the block lasts, handlers set before are not called, but those of other caches; leaving it puts them back.
        """
        seat = self._open()
        check_seconds("timeout_s", timeout_s)
        return draining_on(seat.cache, signals, timeout_s)

    async def _explain(self, keys: BlockKeys) -> list[Explanation]:
        return await self.explain(keys, ask=True)

    def _make_hints(self, favoured: Callable[[int, int], object]) -> Hints | None:
        layout, num_ranks = self._parts.layout, len(self._open().shards)
        return Hints.of(self, layout=layout, num_ranks=num_ranks, each=1 / 8, together=1 / 4, favoured=favoured)


def seat_of(cache: TierCalls) -> Seat:
    """Return the seat of an open cache: engines that share it have theirs beside it."""
    return cache._open()  # noqa: SLF001 - its own module's


class SeatCalls(TierCalls):
    """The calls of an open cache, for one engine of several. It is never closed: what it moves ends with the cache.

    Attributes:
        seat: What its transfers are made with.
    """

    def __init__(self, cache: TierCalls, shards: Sequence[Shard], epoch: bytes, pins: Pins) -> None:
        """Take a seat at an open cache; the arguments are a `Seat`'s."""
        self.seat = Seat(seat_of(cache).cache, shards, epoch, pins)
        super().__init__(cache.media, self.seat)

    @override
    async def __aenter__(self) -> Self:
        return self

    @override
    async def aclose(self) -> None:
        pass


def _looked_up(seat: Seat, parts: Sequence[tuple[Chain, Batch]], runs: Sequence[list[TierRun]]) -> LookupResult:
    """Say what was found, and show it to whoever watches."""
    result = with_pending(parts, lookup_result([chain for chain, _ in parts], runs))
    if seat.cache.watch is not None:
        why = why_not_more(parts, runs, result.num_blocks)
        seat.cache.watch.looked_up(parts[0][1], result.num_blocks, why)
    return result
