"""What a cache answers whose tiers are in this process. What is promised is said in `BlockCache` and `TransferCalls`.

Each call checks what it is given and decides on the spot, over the `OpenCache`; the moving is the transfers'.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.block_cache import BlockCache
from tiered_kv.changes import Changes
from tiered_kv.closing import drain
from tiered_kv.errors import ClosedError, ConfigurationError
from tiered_kv.events import EpochAdvanced, SequencePreempted
from tiered_kv.explain import Explanation, explain
from tiered_kv.hints import ReuseHint, check_hint
from tiered_kv.keys import BlockKeys, Namespace, salt_digest
from tiered_kv.lookups import (
    lookup_result,
    owned_runs,
    states_of,
    why_not_found,
    why_not_more,
    with_pending,
    with_specs,
)
from tiered_kv.open_cache import OpenCache
from tiered_kv.planner import OwnPlanner, Planner
from tiered_kv.results import CacheStatistics, LoadResult, LookupResult, PinResult, StoreResult, SwapOutResult, TierRun
from tiered_kv.specs import GPULoadStoreSpec
from tiered_kv.tiers import upkeep
from tiered_kv.tiers.batch import Batch
from tiered_kv.tiers.chain import Chain
from tiered_kv.transfers.handles import LoadHandle
from tiered_kv.transfers.prefetch import HostLease, PrefetchHandle, hold_on_host, start_prefetch
from tiered_kv.transfers.start import start_load, start_store
from tiered_kv.transfers.store import StoreHandle
from tiered_kv.transfers.submissions import LoadTicket, StoreTicket
from tiered_kv.validation import (
    LoadCall,
    StoreCall,
    check_capacity,
    check_found,
    check_one_rank,
    check_seconds,
    check_ttl,
)


class TierCalls(BlockCache):
    """The calls of such a cache, from its opening to its closing."""

    def __init__(self, media: Mapping[str, str], cache: OpenCache | None = None) -> None:
        """Answer for a cache with tiers of these media, which is open, or will be."""
        self._media = media
        self._cache = cache
        self._planner: Planner | None = None

    @property
    @override
    def media(self) -> Mapping[str, str]:
        return self._media

    # What is there, and what is done ahead.

    @override
    async def lookup(self, keys: BlockKeys, *, where: bool = False) -> LookupResult:
        cache = self._open()
        parts = cache.batches(keys)
        cache.note("lookup", keys)
        if where:
            check_one_rank(parts)
        found = [(chain, batch, chain.locate(batch)) for chain, batch in parts]
        if any(chain.may_be_longer(batch, runs) for chain, batch, runs in found):
            with cache.callers.waiting():
                runs = await asyncio.gather(*(chain.locate_on(batch, runs) for chain, batch, runs in found))
        else:
            runs = [runs for _, _, runs in found]
        result = _looked_up(cache, keys, parts, runs)
        if where:
            with cache.callers.waiting():
                return await with_specs(*parts[0], result)
        return result

    def lookup_at_once(self, keys: BlockKeys) -> LookupResult | None:
        """`lookup` if nobody has to be waited for; None if there are tiers to ask. For the event loop's thread."""
        cache = self._open()
        parts = cache.batches(keys)
        if any(chain.shared for chain, _ in parts):
            return None
        cache.note("lookup", keys)
        return _looked_up(cache, keys, parts, [chain.locate(batch) for chain, batch in parts])

    @override
    def prefetch(self, keys: BlockKeys, *, to: str = "cpu") -> PrefetchHandle:
        return start_prefetch(*self._open().batch(keys), to)

    @override
    def lease(self, keys: BlockKeys) -> AbstractAsyncContextManager[HostLease]:
        chain, batch = self._open().batch(keys)
        if not chain.host.index.num_slots:
            raise ConfigurationError("lease() holds blocks in the CPU tier, and this cache has none")
        return hold_on_host(chain, batch)

    # From any thread, for engines with a synchronous loop: nothing waits for the event loop.

    @override
    def poll(self, timeout_s: float = 0.0) -> list[tuple[LoadTicket, LoadResult] | tuple[StoreTicket, StoreResult]]:
        check_seconds("timeout_s", timeout_s)
        return self._cache.submissions.poll(timeout_s) if self._cache else []

    @override
    def lookup_nowait(self, keys: BlockKeys) -> LookupResult:
        cache = self._open(anywhere=True)
        parts = cache.batches(keys)
        cache.note("lookup", keys)
        return lookup_result([chain for chain, _ in parts], [owned_runs(chain, batch) for chain, batch in parts])

    @override
    def membership(self, keys: BlockKeys) -> NDArray[np.int8]:
        return states_of(self._open(anywhere=True).batches(keys))

    @override
    def count_lookup(self, keys: BlockKeys, found: NDArray[np.bool_]) -> None:
        cache = self._open(anywhere=True)
        check_found(keys, found)
        if (watch := cache.watch) is None or not len(keys):
            return
        parts, num_found, first = cache.batches(keys), int(np.count_nonzero(found)), int(np.argmin(found))

        def count() -> None:
            watch.looked_up(keys.salt_id, len(keys), num_found, why_not_found(parts, num_found, first))

        cache.call_soon(count)

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
    def pin(self, keys: BlockKeys, *, ttl_s: float) -> PinResult:
        cache = self._open()
        return PinResult(cache.pins.pin(cache.batches(keys), keys, check_ttl(ttl_s)))

    @override
    def unpin(self, keys: BlockKeys) -> None:
        cache = self._open()
        cache.pins.unpin(cache.batches(keys), keys)

    @override
    async def swap_out(
        self, keys: BlockKeys, source: GPULoadStoreSpec, *, after: object = None, ttl_s: float = 600.0
    ) -> SwapOutResult:
        cache = self._open()
        check_ttl(ttl_s)
        stored = await self.start_store(keys, source, after=after)
        pinned = self.pin(keys, ttl_s=ttl_s)
        cache.ledger.preemptions += 1
        cache.emit(SequencePreempted(len(keys), stored.num_dropped, pinned.num_blocks))
        return SwapOutResult(**vars(stored), num_pinned=pinned.num_blocks)

    # What goes, what is written, and why: for operators and schedulers, now and then.

    @override
    async def evict(self, keys: BlockKeys, *, tier: str | None = None) -> int:
        cache = self._open()
        parts = cache.batches(keys)
        names = parts[0][0].names
        if tier is not None and tier not in names:
            raise ConfigurationError(f"no tier {tier!r} here; there are {', '.join(names)}")
        with cache.callers.waiting():
            found = await asyncio.gather(*(upkeep.evict(chain, batch, tier) for chain, batch in parts))
        return int(np.count_nonzero(np.logical_or.reduce(found)))

    @override
    async def resize(self, tier: str, capacity: int | str) -> int:
        return await self._open().resize(tier, check_capacity(capacity))

    @override
    async def clear(self) -> None:
        cache = self._open()
        with cache.callers.waiting():
            await upkeep.clear(cache.chains)

    @override
    def advance_epoch(self, weights: str) -> None:
        cache = self._open()
        cache.advance_epoch(weights)
        cache.emit(EpochAdvanced(weights))

    @override
    async def flush(self, *, sync: bool = False) -> None:
        cache = self._open()
        with cache.callers.waiting():
            await cache.settle()
        if sync:
            await cache.finish(upkeep.checkpoint(cache.chains, sync=True), "checkpoint")

    @override
    async def drain(self, *, timeout_s: float | None = None) -> bool:
        cache = self._open()
        check_seconds("timeout_s", timeout_s)
        return await drain(cache, timeout_s)

    @override
    async def explain(self, keys: BlockKeys, *, ask: bool = False) -> list[Explanation]:
        cache = self._open()
        with cache.callers.waiting():
            return await explain(cache, keys, ask=ask)

    @override
    def stats(self) -> CacheStatistics:
        return self._open().statistics()

    @override
    def events(self) -> Changes:
        return self._open().subscribers.subscribe()

    @override
    def namespace(self, salt: str | bytes = b"", *, group: int = 0, rank: int = 0) -> Namespace:
        return self._open(anywhere=True).namespace(salt_digest(salt), group=group, rank=rank)

    @override
    def planner(self) -> Planner:
        cache = self._open(anywhere=True)
        if self._planner is None:
            self._planner = OwnPlanner(cache, partial(self._open, anywhere=True))
        return self._planner

    # What every call asks first, and once.

    @override
    def _open(self, *, anywhere: bool = False) -> OpenCache:
        cache = self._cache
        if cache is None:
            raise ClosedError("this TieredKV is not open yet: use it with 'async with'")
        if cache.closing is not None:
            raise ClosedError("this TieredKV is closed")
        cache.check_loop(anywhere=anywhere)
        return cache

    @override
    def _prepare_load(self, call: LoadCall, *, anywhere: bool = False) -> Callable[[], LoadHandle]:
        return partial(start_load, self._open(anywhere=anywhere).load_request(call))

    @override
    def _prepare_store(self, call: StoreCall, *, anywhere: bool = False) -> Callable[[], StoreHandle]:
        return partial(start_store, self._open(anywhere=anywhere).store_request(call))


def _looked_up(
    cache: OpenCache, keys: BlockKeys, parts: Sequence[tuple[Chain, Batch]], runs: Sequence[list[TierRun]]
) -> LookupResult:
    """Say what was found, and show it to whoever watches."""
    result = with_pending(parts, lookup_result([chain for chain, _ in parts], runs))
    if cache.watch is not None:
        why = why_not_more(parts, runs, result.num_blocks)
        cache.watch.looked_up(keys.salt_id, len(keys), result.num_blocks, why)
    return result
