"""TieredKV: the facade, and the only place where tiers, memory and motion are put together.

Every call checks its arguments first, before anything moves; then decides synchronously, in the catalog; then hands the
moving to a transfer that the cache owns. `load` and `store` are `start_load` and `start_store`, awaited.
"""

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
from anyio import move_on_after

from tiered_kv.arguments import (
    check_capacity,
    check_deadline,
    check_identity,
    check_pages,
    check_priority,
    check_shards,
    check_ttl,
)
from tiered_kv.assembly import Kind, build_chains, open_backends, parts_of
from tiered_kv.backend import Backend, SlotBackend, TierSettings
from tiered_kv.changes import Changes, Subscribers
from tiered_kv.core import Core
from tiered_kv.drain import Draining, drain, draining_on
from tiered_kv.errors import ClosedError, ConfigurationError
from tiered_kv.events import CacheClosed, CacheOpened, Emit, EpochAdvanced, SequencePreempted
from tiered_kv.explain import Explanation, explain
from tiered_kv.groups import GroupNeed, GroupsLoad, GroupsLookup, check_needs, length_in_place, longest
from tiered_kv.keys import BlockKeys, ModelIdentity, Namespace, Shard, salt_digest
from tiered_kv.layout import KVCaches, KVLayout, fingerprint
from tiered_kv.lookups import lookup_result, owned_runs
from tiered_kv.memory.caches import PagedCaches
from tiered_kv.memory.codec import CodecName, make_codec
from tiered_kv.memory.crossover import prepare
from tiered_kv.memory.device import Device
from tiered_kv.motion import removal
from tiered_kv.motion.budget import Priority
from tiered_kv.motion.chain import Chain
from tiered_kv.motion.direct import DirectLoad
from tiered_kv.motion.handles import Handle, cancel_each, each_of
from tiered_kv.motion.hold import bring_to_host, lease_prefix
from tiered_kv.motion.layerwise import LayerLoad, LayerStore
from tiered_kv.motion.load import Load, LoadHandle
from tiered_kv.motion.naming import Naming
from tiered_kv.motion.pins import Pins
from tiered_kv.motion.pools import HostPools
from tiered_kv.motion.prefetch import Prefetch
from tiered_kv.motion.storage import OwnedTier
from tiered_kv.motion.store import Store, StoreHandle
from tiered_kv.motion.swap import Copies, Moves, Swap, SwapSpaces
from tiered_kv.motion.threads import Submissions, Ticket, load_failed, store_failed
from tiered_kv.motion.tiers import Batch
from tiered_kv.planner import Planner
from tiered_kv.results import (
    CacheStatistics,
    LoadResult,
    LookupResult,
    PinResult,
    PrefetchResult,
    StoreResult,
    SwapResult,
)
from tiered_kv.settings import CacheLimits, TieredKVSettings
from tiered_kv.specs import EngineBlocks, GPULoadStoreSpec
from tiered_kv.statistics import cache_statistics
from tiered_kv.telemetry.logs import guarded, log_event

PrefetchHandle = Handle[PrefetchResult]
LoadTicket = Ticket[LoadResult]
StoreTicket = Ticket[StoreResult]


class HostLease:
    """A prefix held in host memory: readable in place until the ``async with`` block ends.

    Attributes:
        num_blocks: The prefix that is held.
        views: One read-only view per block, of the payload's bytes. Not to be used after the block has ended.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.num_blocks = len(views)
        self.views = views


class TieredKV:
    """A KV cache over a chain of tiers, for one model on one event loop. Open it with ``async with``.

    All coroutines may be cancelled at any await: nothing is left behind, and once the cancellation is raised nobody
    writes to the caller's memory. A tier's fault raises nothing: it shortens a prefix, and is counted and logged.
    """

    def __init__(
        self,
        tiers: Sequence[TierSettings | Mapping[str, Any] | str | Backend | SlotBackend],
        *,
        model: ModelIdentity,
        layout: KVLayout,
        shard: Shard | tuple[Shard, ...] | None = None,
        limits: CacheLimits | None = None,
        device: Device | str | None = None,
        codec: CodecName = "none",
        emit: Emit = log_event,
    ) -> None:
        """Check the parts; nothing is allocated before opening.

        Args:
            tiers: Fastest first: settings, what makes them (a dict or URL), or backends of one's own.
            model: Which weights computed the KV.
            layout: What a block is made of.
            shard: Which part of the heads this process holds; all of them by default. A scheduler gives
                ``Shard.every(size)``: then a block is there when every rank's part is, and only the ranks move bytes.
            limits: Bounds in time, memory and work.
            device: Where the engine's tensors live, e.g. ``"cuda:1"``; the GPU if torch has one, else the CPU.
            codec: How blocks are kept: see `TieredKVSettings`.
            emit: Receives every event; logs them by default.

        Raises:
            ConfigurationError: The tiers can not make a chain, or the codec can not keep the layout's blocks.
        """
        check_identity(model, layout)
        self._parts = parts_of(tiers)
        self._given_device = device
        self._codecs = [make_codec(codec, group) for group in layout.groups]
        self._model = model
        self._core = Core(model, layout, check_shards(shard), limits or CacheLimits(), guarded(emit))
        self._pools = HostPools()
        self._swaps = SwapSpaces()
        self._pins = Pins(self._core.limits.pin_quota)
        self._subscribers = Subscribers(self._core.ledger)
        self._submissions = Submissions()
        self._core.on_close += [self._submissions.close, self._pins.close, self._subscribers.close]
        self._lifetime: AsyncExitStack | None = None

    @classmethod
    def from_settings(
        cls,
        settings: TieredKVSettings | None = None,
        *,
        model: ModelIdentity,
        layout: KVLayout,
        shard: Shard | tuple[Shard, ...] | None = None,
        device: Device | str | None = None,
    ) -> Self:
        """Make a cache of `TieredKVSettings`: given, or read from the environment."""
        settings = settings or TieredKVSettings()
        limits, codec = settings.limits, settings.codec
        return cls(settings.tiers, model=model, layout=layout, shard=shard, limits=limits, device=device, codec=codec)

    # Lifetime.

    async def __aenter__(self) -> Self:
        """Open all tiers.

        Raises:
            ConfigurationError: A tier can never work as it is set up, or the machine lacks the memory.
            BackendUnavailableError: A tier cannot be reached.
        """
        core = self._core
        if self._lifetime is not None or core.chains:
            raise ClosedError("a TieredKV is opened once; make another")
        loop = asyncio.get_running_loop()
        started = loop.time()
        kinds = [
            Kind(number, group, Naming(fingerprint(self._model, core.layout, number, name), shard), codec)
            for number, (group, codec) in enumerate(zip(core.layout.groups, self._codecs, strict=True))
            for name in [codec.name if codec else "none"]
            for shard in core.shards
        ]
        async with AsyncExitStack() as stack:
            backends = await open_backends(stack, self._parts, kinds, core.limits, core.emit)
            chains, self._device = build_chains(
                stack, self._parts, backends, kinds, core.limits, self._given_device, core.tasks, core.emit, core.ledger
            )
            self._lifetime = stack.pop_all()
        core.opened(chains)
        self._submissions.open(backends.wakeups)
        recovered = {
            tier.name: tier.index.statistics().ready
            for chain in chains
            for tier in chain.storage
            if isinstance(tier, OwnedTier)
        }
        core.emit(CacheOpened(tuple(chains[0].names), recovered, (loop.time() - started) * 1e3))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End: what is being moved ends, or is given up after `CacheLimits.close_timeout_s`. Idempotent.

        A cancellation is raised when everything has ended.
        """
        self._core.close()
        if self._lifetime is None:
            return
        lifetime, self._lifetime = self._lifetime, None
        # A task of its own, as a shield does not hold against task.cancel().
        await Handle(asyncio.create_task(self._end(lifetime), name="close"), lambda: None)

    async def _end(self, lifetime: AsyncExitStack) -> None:
        core, loop = self._core, asyncio.get_running_loop()
        started = loop.time()
        deadline = started + core.limits.close_timeout_s
        with move_on_after(core.limits.close_timeout_s):
            await core.settle()
        await core.background.aclose(0.0)
        abandoned = await core.tasks.aclose(max(0.0, deadline - loop.time()))
        unwritten = sum(cleaner.num_waiting for cleaner in core.cleaners)
        with move_on_after(core.limits.close_timeout_s):
            await removal.checkpoint(core.chains, sync=False)
        await lifetime.aclose()
        core.emit(CacheClosed(abandoned, (loop.time() - started) * 1e3, unwritten))

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
        caches = PagedCaches.bind(kv_caches, chain.group, axes=axes, device=self._device, codec=chain.codec)
        prepare(caches)
        chain.caches = caches

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
        assert self._lifetime is not None  # noqa: S101 - the cache is open
        self._pools.register(
            name, buffer, chain, self._lifetime, group=group, axes=axes, slot_bytes=slot_bytes, direct=direct
        )

    # Finding and moving blocks.

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
            needs: Each group's keys, cut to the length that `lookup_groups` found.
            into: Per group, the blocks of its ``need.at(length)``, for the length that the keys have in common.
            after: As for `start_load`.
        """
        step = check_needs(needs)
        length = min(len(need.keys) * need.keys.block_size for need in needs) // step * step
        wanted = [need.at(length) for need in needs]
        if len(into) != len(needs):
            raise ConfigurationError(f"{len(needs)} KV groups, but blocks for {len(into)}")
        for keys, spec in zip(wanted, into, strict=True):  # all are right before any is started
            chain = self._core.of_rank(keys.group)
            check_pages(chain.caches, chain.group, keys, spec)
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
        self._core.check_open()
        return self._prepare_load(keys, into, after, deadline_s, priority, layerwise=layerwise)()

    def _prepare_load(
        self,
        keys: BlockKeys,
        into: EngineBlocks,
        after: object,
        deadline_s: float | None,
        priority: Priority,
        *,
        layerwise: bool = False,
    ) -> Callable[[], LoadHandle]:
        """Check a load and enqueue its wait, in any thread; return what starts it on the event loop."""
        epoch = self._core.epoch  # before the keys are named by it: if it advances in between, the load is overtaken
        chain, batch = self._core.batch(keys, anywhere=True)
        if (pool := self._pools.find(into, keys.group)) is not None:
            chain = pool.chain
        caches, pages = check_pages(chain.caches, chain.group, keys, into)
        check_priority(priority)
        check_deadline(deadline_s)
        deadline = self._core.deadline(deadline_s)
        lane = chain.h2d.take(after)
        kind: Callable[..., Load] = LayerLoad if layerwise else Load
        if pool is not None and pool.direct is not None and not layerwise:
            kind = partial(DirectLoad, pool.direct)

        def start() -> LoadHandle:
            load = kind(chain, batch, caches, pages, lane, deadline, priority, lambda: self._core.epoch == epoch)
            return load.start_load(self._core.tasks.spawn(load.run(), f"load {len(keys)} blocks"))

        return start

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
        self._core.check_open()
        return self._prepare_store(keys, source, after, epoch, layerwise=layerwise)()

    def _prepare_store(
        self, keys: BlockKeys, source: EngineBlocks, after: object, epoch: str | None, *, layerwise: bool = False
    ) -> Callable[[], StoreHandle]:
        """Check a store and enqueue its wait, in any thread; return what starts it on the event loop."""
        chain, batch = self._core.batch(keys, epoch, anywhere=True)
        if (pool := self._pools.find(source, keys.group)) is not None:
            chain = pool.chain
        caches, pages = check_pages(chain.caches, chain.group, keys, source)
        lane = chain.d2h.take_own(after) if layerwise else chain.d2h.take(after)

        def start() -> StoreHandle:
            store = (LayerStore if layerwise else Store)(chain, batch, caches, pages, lane)
            return store.start_store(self._core.tasks.spawn(store.run(), f"store {len(keys)} blocks"))

        return start

    # Preemption.

    async def swap_out(
        self, keys: BlockKeys, source: GPULoadStoreSpec, *, after: object = None, ttl_s: float = 600.0
    ) -> StoreResult:
        """Store a preempted sequence whole, and pin it until `swap_in` or for ``ttl_s``; see `store` and `pin`.

        Args:
            keys: Of all its blocks, the partial last one too: ``keys + hash_tail(rest, parent=keys)``.
            source: Its blocks; the engine's again when this returns.
            after: As for `start_store`.
            ttl_s: How long the blocks are kept from eviction, as far as pins are allowed. Those that several sequences
                share are pinned once: the first that comes back lets them go.
        """
        check_ttl(ttl_s)
        stored = await self.start_store(keys, source, after=after)
        pinned = self.pin(keys, ttl_s=ttl_s)
        self._core.ledger.preemptions += 1
        self._core.emit(SequencePreempted(len(keys), stored.num_dropped, pinned.num_blocks))
        return stored

    async def swap_in(
        self, keys: BlockKeys, into: GPULoadStoreSpec, *, after: object = None, deadline_s: float | None = None
    ) -> LoadResult:
        """Load a sequence back, see `load`; once all of it is in place, its pins end."""
        loaded = await self.start_load(keys, into, after=after, deadline_s=deadline_s)
        if loaded.num_blocks == len(keys):
            self.unpin(keys)
        return loaded

    async def swap(
        self,
        blocks_to_swap_in: Moves = (),
        blocks_to_swap_out: Moves = (),
        blocks_to_copy: Copies = (),
        *,
        after: object = None,
        group: int = 0,
    ) -> SwapResult:
        """Move pages as a scheduler's step says, to and from slots that it numbers itself; see `start_swap`."""
        return await self.start_swap(blocks_to_swap_in, blocks_to_swap_out, blocks_to_copy, after=after, group=group)

    def start_swap(
        self,
        blocks_to_swap_in: Moves = (),
        blocks_to_swap_out: Moves = (),
        blocks_to_copy: Copies = (),
        *,
        after: object = None,
        group: int = 0,
    ) -> Handle[SwapResult]:
        """Start to move pages between the engine and the swap space, `CacheLimits.swap_space`. Await the handle.

        Pages go out, then in, then are copied within the engine: a page that leaves may be another's at once, and one
        that comes may be forked. Calls run in their order. No block is named and no tier takes part.

        Args:
            blocks_to_swap_in: ``{slot: page}``, or pairs.
            blocks_to_swap_out: ``{page: slot}``, or pairs.
            blocks_to_copy: ``{page: pages}``, or pairs.
            after: An event behind the last use of all these pages. One that never fires holds up later swaps too.
            group: The KV group.

        Raises:
            ConfigurationError: An id out of range, or two sources of one target; there is no swap space.
            ClosedError: The cache is not open.
        """
        chain = self._core.of_rank(group)
        assert self._lifetime is not None  # noqa: S101 - the cache is open
        space = self._swaps.of(group, chain, int(self._core.limits.swap_space), self._lifetime)
        maps = space.check(blocks_to_swap_in, blocks_to_swap_out, blocks_to_copy)
        if after is not None:
            chain.h2d.device.check(after)
        swap = Swap(space, *maps, after)
        return swap.start(self._core.tasks.spawn(swap.run(), "swap"))

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

        Brings to the CPU tier what is below it. Needs a CPU tier; what does not fit is not held.
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

    def planner(self) -> Planner:
        """Return the face for an engine whose workers are other processes: plan, execute, complete."""
        self._core.check_open()
        return Planner(self._core)

    # From any thread, for engines with a synchronous loop.

    def submit_load(
        self,
        keys: BlockKeys,
        into: EngineBlocks,
        *,
        after: object = None,
        deadline_s: float | None = None,
        priority: Priority = Priority.LOAD,
    ) -> LoadTicket:
        """`start_load` from any thread, which waits for nothing. Its time counts from now.

        Whatever is wrong raises here, as there. How it ends is for `poll` to say, or `Ticket.wait`.
        """
        start = self._prepare_load(keys, into, after, deadline_s, priority)
        return self._submissions.submit(start, partial(load_failed, len(keys)))

    def submit_store(
        self, keys: BlockKeys, source: EngineBlocks, *, after: object = None, epoch: str | None = None
    ) -> StoreTicket:
        """`start_store` from any thread, which waits for nothing; see `submit_load`."""
        start = self._prepare_store(keys, source, after, epoch)
        return self._submissions.submit(start, partial(store_failed, len(keys)))

    def poll(self, timeout_s: float = 0.0) -> list[tuple[LoadTicket, LoadResult] | tuple[StoreTicket, StoreResult]]:
        """Return what was submitted and has ended since the last `poll`, with its result. Any thread may call.

        Waits for the first of them, at most ``timeout_s``, and only while anything is under way. Results are kept until
        they are polled or waited for, after closing too; each is given to one caller only.
        """
        return self._submissions.poll(timeout_s)

    def lookup_nowait(self, keys: BlockKeys) -> LookupResult:
        """`lookup` over the tiers that this cache owns alone (memory and NVMe), at once and from any thread."""
        parts = self._core.batches(keys, anywhere=True)
        return lookup_result([chain for chain, _ in parts], [owned_runs(chain, batch) for chain, batch in parts])

    # Control.

    def touch(self, keys: BlockKeys) -> None:
        """Count a use of blocks in every tier that holds them: for hits in the engine's own prefix cache."""
        for chain, batch in self._core.batches(keys):
            chain.touch(batch)

    def pin(self, keys: BlockKeys, *, ttl_s: float) -> PinResult:
        """Keep the prefix that is in owned tiers from being evicted for want of room, until `unpin` or ``ttl_s`` is up.

        Each block is held where it is, in the fastest tier that has it; nothing moves. Bounded per salt by
        `CacheLimits.pin_quota`, and to half of each tier. Pinned again, a block stays for the longer of the two times.
        `evict` and `clear` go through a pin: the block is unfindable at once, and its room is free when the pin ends.
        """
        return PinResult(self._pins.pin(self._core.batches(keys), keys, check_ttl(ttl_s)))

    def unpin(self, keys: BlockKeys) -> None:
        """End the pins of these blocks, whoever took them and under whatever weights; of others it is no error."""
        self._pins.unpin(self._core.batches(keys), keys)

    async def evict(self, keys: BlockKeys, *, tier: str | None = None) -> int:
        """Make blocks unfindable at once, in one tier or in all; return how many were in an owned tier.

        Their slots are freed when nobody reads them any more; what is being filled never becomes readable. Shared tiers
        are asked to delete. A tier that does not answer within its time is not waited for.
        """
        parts = self._core.batches(keys)
        names = parts[0][0].names
        if tier is not None and tier not in names:
            raise ConfigurationError(f"no tier {tier!r} here; there are {', '.join(names)}")
        found = await asyncio.gather(*(removal.evict(chain, batch, tier) for chain, batch in parts))
        return int(np.count_nonzero(np.logical_or.reduce(found)))

    async def resize(self, tier: str, capacity: int | str) -> int:
        """Change the capacity of the CPU tier or an NVMe tier, up to its ``max_capacity``, while it is used.

        What does not fit any more is evicted, after what waits for other tiers was written. The memory or disk space is
        the system's again when this returns, but for slots in use until then, and memory page-locked for a GPU.
        Cancellation ends the wait only.

        Args:
            tier: Its name.
            capacity: Bytes, or e.g. ``"8GiB"``.

        Returns:
            How many blocks it holds now, of each KV group.

        Raises:
            ConfigurationError: The tier cannot have that capacity. Nothing has changed.
            BackendUnavailableError: The medium did not grow. Nothing has changed.
        """
        self._core.check_open()
        return await self._core.resize(tier, check_capacity(capacity))

    async def clear(self) -> None:
        """Empty every tier that this cache owns, after a restart too. Takes time in their size.

        A tier that does not answer within its time is not waited for: its blocks are unfindable here all the same.
        """
        self._core.check_open()
        await removal.clear(self._core.chains)

    def advance_epoch(self, weights: str) -> None:
        """Name the weights that are served from now on. O(1).

        Blocks of other weights are not found any more, but are again once their weights are named again. Stores in
        flight keep the epoch they began in; a load that is overtaken returns 0 blocks.
        """
        self._core.check_open()
        self._core.advance_epoch(weights)
        self._core.emit(EpochAdvanced(weights))

    async def explain(self, keys: BlockKeys, *, ask: bool = False) -> list[Explanation]:
        """Say of each block why it can be loaded, or can not, from what this cache knows. Reads, like `lookup`.

        Tells nothing of blocks of other salts.

        Args:
            keys: The blocks; those behind a hole are explained too.
            ask: Whether to ask the tiers that this cache does not own, block by block; else what they have is unknown.
        """
        return await explain(self._core, self._pins, keys, ask=ask)

    def events(self) -> Changes:
        """Return what changes in the tiers that this cache owns, in order: ``async for change in kv.events()``.

        A `Snapshot` of each place comes first. Nothing waits for a subscriber: one that falls behind by 65,536 blocks
        gets snapshots anew, each of which walks its tier on the event loop, 0.2 s a million blocks. It ends with the
        cache.
        """
        self._core.check_open()
        return self._subscribers.subscribe()

    def namespace(self, salt: str | bytes = b"", *, group: int = 0, rank: int = 0) -> Namespace:
        """Return what makes names of keys, as `events` has them: ``namespace.names(keys)``. Picklable, for a router.

        It is of one KV group, of one rank of those that this cache stands for, and of the weights served now: ask again
        after `advance_epoch`.
        """
        chains = self._core.of_group(group)
        if not 0 <= rank < len(chains):
            raise ConfigurationError(f"rank {rank!r} of {len(chains)}: this cache has no such rank")
        return chains[rank].naming.namespace(salt_digest(salt), self._core.epoch)

    async def flush(self, *, sync: bool = False) -> None:
        """Wait until every store so far is in every tier or given up, those with ``write="back"`` included.

        A tier that is bypassed is not waited for: blocks go on waiting for it.

        With ``sync`` what is written then survives a loss of power, in the order of its use. That walks the owned tiers
        on the event loop, 0.3 s a million blocks: not for every request.
        """
        self._core.check_open()
        await self._core.settle()
        if sync:
            await asyncio.wait({self._core.tasks.spawn(removal.checkpoint(self._core.chains, sync=True), "checkpoint")})

    async def drain(self, *, timeout_s: float | None = None) -> bool:
        """Take no more stores, and wait until what was stored is written and survives a loss of power.

        From now on a store drops its blocks (``"draining"``); loads and lookups go on until the cache is closed, which
        is the next thing to do: leave the ``async with`` block.

        Args:
            timeout_s: How long to wait; `CacheLimits.close_timeout_s` by default. Cancellation ends the wait only.

        Returns:
            Whether all stores were settled, and owned tiers had noted what they hold, in time.
        """
        self._core.check_open()
        return await drain(self._core, timeout_s)

    def drain_on(self, *signals: signal.Signals, timeout_s: float | None = None) -> AbstractContextManager[Draining]:
        """Drain when a signal comes: ``with kv.drain_on(signal.SIGTERM) as draining: await draining.wait()``.

        A second signal does what it does by default: it ends the process. For an event loop in the main thread. While
        the block lasts, handlers set before are not called; leaving it puts them back.
        """
        self._core.check_open()
        return draining_on(signals, lambda: self._core.tasks.spawn(drain(self._core, timeout_s), "drain on a signal"))

    def stats(self) -> CacheStatistics:
        """Count what is where now, and what has happened since opening."""
        self._core.check_open()
        return cache_statistics(self._core.chains, self._core.ledger, len(self._core.tasks))
