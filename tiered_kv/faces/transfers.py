"""Finding and moving blocks: what a serving engine does for every request."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from tiered_kv.core import Core
from tiered_kv.errors import ConfigurationError, LayoutMismatchError
from tiered_kv.groups import GroupNeed, GroupsLoad, GroupsLookup, check_needs, length_in_place, longest
from tiered_kv.keys import BlockKeys
from tiered_kv.layout import KVCaches
from tiered_kv.lookups import lookup_result
from tiered_kv.results import LoadResult, LookupResult, PrefetchResult, StoreResult
from tiered_kv.specs import EngineBlocks, GPULoadStoreSpec
from tiered_kv.tiers.batch import Batch
from tiered_kv.tiers.budget import Priority
from tiered_kv.tiers.chain import Chain
from tiered_kv.transfers.handles import Handle, cancel_each, each_of
from tiered_kv.transfers.load import LoadHandle
from tiered_kv.transfers.prefetch import Prefetch, bring_to_host, lease_prefix
from tiered_kv.transfers.start import start_load, start_store
from tiered_kv.transfers.store import StoreHandle
from tiered_kv.validation import check_pages, load_request, store_request

PrefetchHandle = Handle[PrefetchResult]


class HostLease:
    """A prefix held in host memory: readable in place until the ``async with`` block ends.

    Attributes:
        num_blocks: The prefix that is held.
        views: One read-only view per block, of its bytes as they are kept: the payload's, or what a codec made of it.
            Not to be used after the ``async with`` block has ended.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.num_blocks = len(views)
        self.views = views


class Transfers:
    """Lookups, loads and stores, on the event loop."""

    _core: Core

    def register_kv_caches(self, kv_caches: KVCaches, *, group: int = 0, axes: str | None = None) -> None:
        """Bind the engine's paged tensors of one KV group. A process that only stores bytes skips this.

        The first time on a GPU it takes a second or so: kernels are compiled, and ways to copy are compared.

        Args:
            kv_caches: As for `KVLayout.from_tensors`. Kept by reference until the cache is closed.
            group: The KV group.
            axes: Letters for the axes, where shapes alone do not tell.

        Raises:
            LayoutMismatchError: They are not what the layout says.
        """
        chain = self._core.of_rank(group)
        self._core.bindings.register_caches(kv_caches, chain, group=group, axes=axes)

    def register_host_pool(
        self,
        name: str,
        buffer: KVCaches,
        *,
        group: int = 0,
        axes: str | None = None,
        slot_bytes: int | None = None,
        direct: bool = False,
    ) -> None:
        """Bind host memory of the engine's own, to load into and store from by ``CPULoadStoreSpec(ids, pool=name)``.

        Args:
            name: Of the pool.
            buffer: One contiguous tensor or writable buffer of whole blocks, where an id is a slot; or fragments, paged
                tensors as for `register_kv_caches`. Kept by reference until the cache is closed.
            group: The KV group.
            axes: Letters for the axes of fragments; they make one tensor a paged one.
            slot_bytes: From one whole block to the next. A row by default, or of a flat buffer a block's payload.
            direct: Let storage read straight into slots, which must be page-aligned, taking no host slots. A load then
                ends only when the medium has let go of them, whatever its deadline.

        Raises:
            ConfigurationError: Memory that can not be used so, or a name that is taken.
            LayoutMismatchError: Blocks of this group do not fit.
        """
        chain = self._core.of_rank(group)
        assert self._core.lifetime is not None  # noqa: S101 - the cache is open
        self._core.bindings.register_pool(
            name, buffer, chain, self._core.lifetime, group=group, axes=axes, slot_bytes=slot_bytes, direct=direct
        )

    async def lookup(self, keys: BlockKeys) -> LookupResult:
        """Find the longest prefix that could be loaded now. Reads, never moves, never pins.

        Exact for the tiers that this cache owns; for others an estimate, which `load` decides.
        """
        parts = self._core.batches(keys)
        chains = [chain for chain, _ in parts]
        if len(parts) == 1:  # as a rule; a task would cost more than the answer
            return lookup_result(chains, [await chain.locate(batch) for chain, batch in parts])
        return lookup_result(chains, await asyncio.gather(*(chain.locate(batch) for chain, batch in parts)))

    async def lookup_groups(self, needs: Sequence[GroupNeed]) -> GroupsLookup:
        """Find the longest length at which every KV group has what it needs: ``[full(keys), window(others, 4096)]``.

        A hole outside every window costs nothing; a block that some group lacks does not count. Reads, like `lookup`.
        """

        async def count(keys: BlockKeys) -> int:
            return (await self.lookup(keys)).num_blocks

        num_tokens = await longest(needs, count)
        return GroupsLookup(num_tokens, tuple(need.at(num_tokens) for need in needs))

    async def load(
        self,
        keys: BlockKeys,
        into: EngineBlocks,
        *,
        after: object = None,
        deadline_s: float | None = None,
        priority: Priority = Priority.LOAD,
    ) -> LoadResult:
        """Fill the engine's blocks with the longest prefix that can be had; see `start_load`."""
        return await self.start_load(keys, into, after=after, deadline_s=deadline_s, priority=priority)

    async def load_groups(
        self, needs: Sequence[GroupNeed], into: Sequence[GPULoadStoreSpec], *, after: object = None
    ) -> GroupsLoad:
        """Load what each KV group needs to go on at the longest length that all have; see `load`.

        Args:
            needs: What each group needs, cut to the length that `lookup_groups` found: ``need.until(num_tokens)``.
            into: Per group, the blocks of its ``need.at(length)``, for the length that the keys have in common.
            after: As for `start_load`.

        Raises:
            ConfigurationError, LayoutMismatchError: As for `start_load`; of block ids, the group is named.
        """
        step = check_needs(needs)
        length = min(len(need.keys) * need.keys.block_size for need in needs) // step * step
        wanted = [need.at(length) for need in needs]
        if not isinstance(into, list | tuple) or len(into) != len(needs):
            given = f"{len(into)} of them" if isinstance(into, list | tuple) else f"a {type(into).__name__}"
            raise ConfigurationError(f"{len(needs)} KV groups need a list of as many specs, got {given}")
        for keys, spec in zip(wanted, into, strict=True):  # all are right before any is started
            try:
                check_pages(self._core.bindings.find(spec, keys.group), keys, spec)
            except LayoutMismatchError as error:
                raise LayoutMismatchError(
                    f"KV group {keys.group}: {error}. Where less was found than asked for, cut what is needed first: "
                    "needs = [need.until(found.num_tokens) for need in needs]"
                ) from None
        handles = [self.start_load(keys, spec, after=after) for keys, spec in zip(wanted, into, strict=True)]
        task = self._core.tasks.spawn(each_of(handles), f"load {len(needs)} KV groups")
        results = await Handle(task, partial(cancel_each, handles))
        return GroupsLoad(length_in_place(needs, wanted, results), tuple(results))

    def start_load(
        self,
        keys: BlockKeys,
        into: EngineBlocks,
        *,
        after: object = None,
        deadline_s: float | None = None,
        priority: Priority = Priority.LOAD,
        layerwise: bool = False,
    ) -> LoadHandle:
        """Start to fill the engine's blocks. Await the handle for the `LoadResult`.

        Args:
            keys: What to load, in prompt order. Shared: the cache only reads them.
            into: ``pages_per_block`` block ids per key. They belong to the load until the handle has ended; past the
                prefix that it reports they may hold anything.
            after: An event behind the blocks' last use: nothing is written before it. The wait is enqueued before this
                returns. A GPU event, or on a CPU anything with ``synchronize()`` or ``wait()``.
            deadline_s: How long it may take; `CacheLimits.load_timeout_s` by default.
            priority: `Priority.LOAD`, or a lower one.
            layerwise: Copy layer by layer, so that attention of the first can start while the others are on their way:
                see `LoadHandle.wait_layer`. All blocks are brought to memory first; those that do not fit there at once
                are not loaded.

        Raises:
            ConfigurationError, LayoutMismatchError: Arguments that can not be right. Nothing has moved.
            ClosedError: The cache is not open.
        """
        return start_load(load_request(self._core, keys, into, after, deadline_s, priority, layerwise=layerwise))

    async def store(
        self, keys: BlockKeys, source: EngineBlocks, *, after: object = None, epoch: str | None = None
    ) -> StoreResult:
        """Keep the engine's blocks; returns as soon as they may be reused. See `start_store`."""
        return await self.start_store(keys, source, after=after, epoch=epoch)

    def start_store(
        self,
        keys: BlockKeys,
        source: EngineBlocks,
        *,
        after: object = None,
        epoch: str | None = None,
        layerwise: bool = False,
    ) -> StoreHandle:
        """Start to copy blocks out of the engine. Await the handle for the `StoreResult`.

        Args:
            keys: What to store, in prompt order.
            source: ``pages_per_block`` block ids per key. They must not change until the handle has ended.
            after: An event that the blocks' computation is behind: nothing is read before it.
            epoch: The weights that computed the blocks, where they are not the current ones any more.
            layerwise: Copy each layer when `StoreHandle.store_layer` says that it is computed. Slots are reserved now,
                without waiting for any; a store of which some layer is still missing at its deadline, after
                `CacheLimits.store_timeout_s`, is dropped.

        Raises:
            ConfigurationError, LayoutMismatchError: Arguments that can not be right. Nothing has moved.
            ClosedError: The cache is not open.
        """
        return start_store(store_request(self._core, keys, source, after, epoch, layerwise=layerwise))

    def prefetch(self, keys: BlockKeys, *, to: str = "cpu") -> PrefetchHandle:
        """Start to copy blocks up to a memory tier (its name), before anyone waits for them.

        Bounded by `CacheLimits.prefetch_quota`, and by what the tier can take beside what is leased. Await the handle
        for a `PrefetchResult`, or cancel it, or leave it alone.
        """
        chain, batch = self._core.batch(keys)
        target = next((tier for tier in chain.memory if tier.name == to and tier.index.num_slots), None)
        if target is None:
            known = ", ".join(tier.name for tier in chain.memory if tier.index.num_slots) or "none"
            raise ConfigurationError(f"prefetch goes to a memory tier; here: {known}; not {to!r}")
        prefetch = Prefetch(chain, batch, target)
        return prefetch.start(self._core.tasks.spawn(prefetch.run(), f"prefetch {len(keys)} blocks"))

    def lease(self, keys: BlockKeys) -> AbstractAsyncContextManager[HostLease]:
        """Hold a prefix in host memory: ``async with kv.lease(keys) as lease``. Inside, it cannot be evicted.

        Brings to the CPU tier what is below it. Needs a CPU tier; what does not fit is not held. With a codec its views
        are of encoded bytes; to have the engine's, load into a host pool.
        """
        chain, batch = self._core.batch(keys)
        if not chain.host.index.num_slots:
            raise ConfigurationError("lease() holds blocks in the CPU tier, and this cache has none")
        return self._lease(chain, batch)

    @asynccontextmanager
    async def _lease(self, chain: Chain, batch: Batch) -> AsyncGenerator[HostLease]:
        await bring_to_host([(chain, batch)])
        (lease,) = lease_prefix([(chain, batch)])
        try:
            yield HostLease([chain.host.slab.payload(int(slot)).toreadonly() for slot in lease.slots])
        finally:
            chain.release(lease)
