"""What every cache of blocks answers, wherever its tiers are: what to call, and what is promised.

`TieredKV` is the one whose tiers are this process's own. The calls that move blocks between the engine's memory and the
cache come first, and are the same wherever its tiers are: each checks what it is given, and starts a transfer over the
`EngineSide` of this process; what a cache adds is how a load or store begins there. The others come in the order of
their use: what a serving engine does for every request, then what threads, schedulers and operators ask for.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tiered_kv.cache.answers import Explanation
from tiered_kv.cache.checks import LoadCall, StoreCall, check_seconds, check_specs
from tiered_kv.cache.groups import GroupNeed, GroupsLoad, GroupsLookup, find_longest, length_in_place, lengths_of
from tiered_kv.cache.planner import Planner
from tiered_kv.cache.seat import EngineSide
from tiered_kv.tiers.changes import Changes
from tiered_kv.tiers.gate import Priority
from tiered_kv.transfers.handles import Handle, LoadHandle, cancel_each, each_of
from tiered_kv.transfers.prefetch import HostLease, PrefetchHandle
from tiered_kv.transfers.store import StoreHandle
from tiered_kv.transfers.submissions import LoadTicket, StoreTicket, load_failed, store_failed
from tiered_kv.transfers.swap import Copies, Moves, Swap
from tiered_kv.transfers.transfer_requests import Order
from tiered_kv.values.errors import ClosedError
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.keys import BlockKeys, Namespace
from tiered_kv.values.layout import KVCaches
from tiered_kv.values.results import (
    CacheStatistics,
    LoadResult,
    LookupResult,
    PinResult,
    RemovalResult,
    StoreResult,
    SwapOutResult,
    SwapResult,
)
from tiered_kv.values.specs import EngineBlocks, GPULoadStoreSpec


class BlockCache(ABC):
    """A KV cache for one model, called on one event loop.

    All coroutines may be cancelled at any await: nothing is left behind, and once the cancellation is raised nobody
    writes to the caller's memory. A tier's fault raises nothing: it shortens a prefix, and is counted and logged.

    Raises:
        ClosedError: By every call but `poll` and `aclose`, of a cache that is not open.
        ConfigurationError: By every call with an argument that cannot be right, in a process that was forked since, and
            in another thread or on another event loop unless it says that any thread may call. By loads, stores and
            swaps of a cache that stands for several ranks: only each rank's own moves its bytes.
        LayoutMismatchError: By every call with keys, if these name blocks of another size.
    """

    # For every request.

    async def load(
        self,
        keys: BlockKeys,
        into: EngineBlocks,
        *,
        after: object = None,
        deadline_s: float | None = None,
        priority: Priority = Priority.LOAD,
        gaps: bool = False,
    ) -> LoadResult:
        """Fill the engine's blocks with the longest prefix that can be had; see `start_load`."""
        return await self.start_load(keys, into, after=after, deadline_s=deadline_s, priority=priority, gaps=gaps)

    async def store(
        self,
        keys: BlockKeys,
        source: EngineBlocks,
        *,
        after: object = None,
        epoch: str | None = None,
        hint: ReuseHint | None = None,
    ) -> StoreResult:
        """Keep the engine's blocks; returns as soon as they may be reused. See `start_store`."""
        return await self.start_store(keys, source, after=after, epoch=epoch, hint=hint)

    def start_load(
        self,
        keys: BlockKeys,
        into: EngineBlocks,
        *,
        after: object = None,
        deadline_s: float | None = None,
        priority: Priority = Priority.LOAD,
        layerwise: bool = False,
        gaps: bool = False,
        order: Order = "front",
    ) -> LoadHandle:
        """Start to fill the engine's blocks. Await the handle for the `LoadResult`.

        Args:
            keys: What to load, in prompt order. Shared: the cache only reads them.
            into: ``pages_per_block`` block ids per key. They belong to the load until the handle has ended; past the
                prefix that it reports they may hold anything.
            after: An event after the blocks' last use: nothing is written before it. The wait is enqueued before this
                returns. A GPU event, or on a CPU anything with ``synchronize()`` or ``wait()``. None on a GPU is all
                that the calling thread's current stream was given by now; an earlier event lets it begin earlier.
            deadline_s: How long it may take; `CacheLimits.load_timeout_s` by default. What is at hand by then is still
                copied: it ends later by the copy of a `CacheLimits.window`, or by 0.1 s where copies wait for an event,
                and on a GPU not before ``after`` has happened.
            priority: `Priority.LOAD`, or a lower one.
            layerwise: Copy layer by layer, so that attention of the first can start while the others are on their way:
                see `LoadHandle.wait_layer`. All blocks are brought to memory first; those that do not fit there at once
                are not loaded.
            gaps: Load what is there, block by block, also behind a hole: `LoadResult.mask` says what is in place, and
                elsewhere the blocks may hold anything. Shared tiers are asked for each block then. Not with
                ``layerwise``.
            order: ``"back"`` loads the last blocks first, while the engine computes the first ones and says so by
                `LoadHandle.stop_before`: `LoadResult.mask` then says what is in place at the end. Give it blocks that
                `lookup` found: it ends at the first that is lost. Not with ``layerwise`` or ``gaps``.

        Raises:
            ConfigurationError, LayoutMismatchError: Arguments that cannot be right. Nothing has moved.
            ClosedError: The cache is not open.
        """
        call = LoadCall(
            keys=keys, into=into, after=after, deadline_s=deadline_s, priority=priority, layerwise=layerwise,
            gaps=gaps, order=order,
        )  # fmt: skip
        return self._load(call)()

    def start_store(
        self,
        keys: BlockKeys,
        source: EngineBlocks,
        *,
        after: object = None,
        epoch: str | None = None,
        layerwise: bool = False,
        hint: ReuseHint | None = None,
    ) -> StoreHandle:
        """Start to copy blocks out of the engine. Await the handle for the `StoreResult`.

        When it ends the blocks are in memory, and are being written to the tiers below: ``await result.settled()``, or
        `flush`, before they are evicted from memory and looked for below.

        Args:
            keys: What to store, in prompt order.
            source: ``pages_per_block`` block ids per key. They must not change until the handle has ended.
            after: An event after the blocks' computation: nothing is read before it. None is as for `start_load`.
            epoch: The weights that computed the blocks, where they are not the current ones any more.
            layerwise: Copy each layer when `StoreHandle.store_layer` says that it is computed. Slots are reserved now,
                without waiting for any; a store of which some layer is still missing at its deadline, after
                `CacheLimits.store_timeout_s`, is dropped.
            hint: What is known of the future of those blocks that are new; it reaches the tier that they are copied to.

        Raises:
            ConfigurationError, LayoutMismatchError: Arguments that cannot be right. Nothing has moved.
            ClosedError: The cache is not open.
        """
        call = StoreCall(keys=keys, source=source, after=after, epoch=epoch, layerwise=layerwise, hint=hint)
        return self._store(call)()

    # From any thread, for engines with a synchronous loop: nothing waits for the event loop.

    def submit_load(
        self,
        keys: BlockKeys,
        into: EngineBlocks,
        *,
        after: object = None,
        deadline_s: float | None = None,
        priority: Priority = Priority.LOAD,
        gaps: bool = False,
    ) -> LoadTicket:
        """`start_load` from any thread, which waits for nothing. Its time counts from now.

        Whatever is wrong raises here, as there. How it ends is for `poll` to say, or `Ticket.wait`.
        """
        return self._submit_load(
            LoadCall(keys=keys, into=into, after=after, deadline_s=deadline_s, priority=priority, gaps=gaps)
        )

    def submit_store(
        self,
        keys: BlockKeys,
        source: EngineBlocks,
        *,
        after: object = None,
        epoch: str | None = None,
        hint: ReuseHint | None = None,
    ) -> StoreTicket:
        """`start_store` from any thread, which waits for nothing; see `submit_load`."""
        return self._submit_store(StoreCall(keys=keys, source=source, after=after, epoch=epoch, hint=hint))

    @abstractmethod
    def poll(self, timeout_s: float = 0.0) -> list[tuple[LoadTicket, LoadResult] | tuple[StoreTicket, StoreResult]]:
        """Return what was submitted and has ended since the last `poll`, with its result. Any thread may call.

        Waits for the first of them, at most ``timeout_s``, and only while anything is under way. Results are kept until
        they are polled or waited for, after closing too; each is given to one caller only. Of results that nobody asks
        for, the newest 65,536 are kept here; each is in its ticket all the same.
        """

    # Models with several KV groups.

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
        side, length = self._open(), lengths_of(needs)[-1]
        wanted = [need.at(length) for need in needs]
        check_specs(side.bindings, wanted, into)  # all are right before any is started
        handles = [self.start_load(keys, spec, after=after) for keys, spec in zip(wanted, into, strict=True)]
        task = side.tasks.spawn(each_of(handles), f"load {len(needs)} KV groups")
        results = await Handle(task, partial(cancel_each, handles))
        return GroupsLoad(length_in_place(needs, wanted, results), tuple(results))

    # Pages that the engine numbers itself.

    async def swap(
        self,
        blocks_to_swap_in: Moves = (),
        blocks_to_swap_out: Moves = (),
        blocks_to_copy: Copies = (),
        *,
        after: object = None,
        group: int = 0,
        deadline_s: float | None = None,
    ) -> SwapResult:
        """Move pages as a scheduler's step says, to and from slots that it numbers itself; see `start_swap`."""
        maps = blocks_to_swap_in, blocks_to_swap_out, blocks_to_copy
        return await self.start_swap(*maps, after=after, group=group, deadline_s=deadline_s)

    def start_swap(
        self,
        blocks_to_swap_in: Moves = (),
        blocks_to_swap_out: Moves = (),
        blocks_to_copy: Copies = (),
        *,
        after: object = None,
        group: int = 0,
        deadline_s: float | None = None,
    ) -> Handle[SwapResult]:
        """Start to move pages between the engine and the swap space, `CacheLimits.swap_space`. Await the handle.

        Pages go out, then in, then are copied within the engine: a page that leaves may be another's at once, and one
        that comes may be forked. Calls run in their order. No block is named and no tier takes part. A page
        that fails to move ends the swap: what comes after it does not begin, and the result says which part failed.

        Args:
            blocks_to_swap_in: ``{slot: page}``, or pairs.
            blocks_to_swap_out: ``{page: slot}``, or pairs.
            blocks_to_copy: ``{page: pages}``, or pairs.
            after: An event after the last use of all these pages; None is as for `start_load`. Later swaps come after
                it too, and end at their own deadlines.
            group: The KV group.
            deadline_s: When what has not begun is given up; after `CacheLimits.load_timeout_s` by default.

        Raises:
            ConfigurationError: An id out of range, or two sources of one target; there is no swap space.
            ClosedError: The cache is not open.
        """
        side = self._open()
        check_seconds("deadline_s", deadline_s)
        space = side.swap_space(group)
        maps = space.check(blocks_to_swap_in, blocks_to_swap_out, blocks_to_copy)
        swap = Swap(space, *maps, space.side.device.to_wait_for(after), side.deadline(deadline_s))
        return swap.start(side.tasks.spawn(swap.run(), "swap"))

    # The memory of the engine's own.

    def register_kv_caches(self, kv_caches: KVCaches, *, group: int = 0, axes: str | None = None) -> None:
        """Bind the engine's paged tensors of one KV group. A process that only stores bytes skips this.

        The first time on a GPU it takes a second or so: kernels are compiled, and ways to copy are compared. From then
        on copies have 128 MiB of the GPU's memory, until the cache is closed.

        Args:
            kv_caches: As for `KVLayout.from_tensors`. Kept by reference until the cache is closed.
            group: The KV group.
            axes: Letters for the axes, where shapes alone do not tell.

        Raises:
            LayoutMismatchError: They are not what the layout says.
            ConfigurationError: The GPU does not have that much left.
        """
        side = self._open()
        side.bindings.register_caches(kv_caches, side.of_rank(group), group=group, axes=axes)

    def unregister_kv_caches(self, *, group: int = 0) -> None:
        """Let go of the engine's tensors of one KV group: before it sleeps, or unmaps them. Idempotent.

        Loads and stores that are under way use them to their end: wait for these first. Those that come later are
        refused with ConfigurationError, until tensors are registered again. Blocks in the tiers stay.
        """
        self._open().unregister_caches(group)

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
            direct: Let storage read straight into slots, which must be page-aligned, taking no host slots, and write
                straight out of them where it alone is to have what is stored: one tier of this cache's own that takes
                it at once, with no memory tier above. A transfer then ends only when the medium has let go of them,
                whatever its deadline. Storage of a host's server never does: blocks come by way of its memory.

        Raises:
            ConfigurationError: Memory that cannot be used so, or a name that is taken.
            LayoutMismatchError: Blocks of this group do not fit.
        """
        side = self._open()
        side.bindings.register_pool(
            name, buffer, side.of_rank(group), side.lifetime,
            group=group, axes=axes, slot_bytes=slot_bytes, direct=direct and side.reads_direct,
        )  # fmt: skip

    # What differs by where the tiers are.

    @abstractmethod
    def _open(self, *, anywhere: bool = False) -> EngineSide:
        """Return what the cache has in this process, to a call on its event loop, or from ``anywhere``.

        Raises:
            ClosedError: It is not open yet, or not any more.
            ConfigurationError: This is another thread or event loop.
        """

    def _submit_load(self, call: LoadCall) -> LoadTicket:
        submissions = self._open(anywhere=True).submissions
        return submissions.submit(self._load(call, anywhere=True), partial(load_failed, len(call.keys)), call.whose)

    def _submit_store(self, call: StoreCall) -> StoreTicket:
        submissions = self._open(anywhere=True).submissions
        return submissions.submit(self._store(call, anywhere=True), partial(store_failed, len(call.keys)), call.whose)

    @abstractmethod
    def _load(self, call: LoadCall, *, anywhere: bool = False) -> Callable[[], LoadHandle]:
        """Check a load and enqueue its wait, as `_open` says where; return what begins it on the event loop.

        Raises:
            ClosedError, ConfigurationError, LayoutMismatchError: As `start_load` and `_open` say.
        """

    @abstractmethod
    def _store(self, call: StoreCall, *, anywhere: bool = False) -> Callable[[], StoreHandle]:
        """Check a store and enqueue its wait, as `_open` says where; return what begins it on the event loop.

        Raises:
            ClosedError, ConfigurationError, LayoutMismatchError: As `start_store` and `_open` say.
        """

    # Finding blocks, for every request.

    @abstractmethod
    async def lookup(self, keys: BlockKeys, *, where: bool = False) -> LookupResult:
        """Find the longest prefix that could be loaded now. Reads, never moves, never pins.

        Exact for the tiers that this cache owns; for others an estimate, which `load` decides.

        Args:
            keys: The blocks, in prompt order.
            where: Whether to say where they are, too: each run's `TierRun.spec`. The GPU pool's blocks are nobody
                else's, and a medium that cannot tell says None. Costs a store with packs a question for each.

        Raises:
            ConfigurationError: With ``where``, in a cache that stands for several ranks: they have parts of their own.
        """

    async def lookup_groups(self, needs: Sequence[GroupNeed]) -> GroupsLookup:
        """Find the longest length at which every KV group has what it needs: ``[full(keys), window(others, 4096)]``.

        A hole outside every window costs nothing; a block that some group lacks does not count. Reads, like `lookup`:
        all groups are asked at once, and those with a window again where theirs is not whole at that length. Where
        new weights overtake it there is nothing.
        """
        asked_of = self.namespace()

        async def there(need: GroupNeed) -> NDArray[np.bool_]:
            if not need.is_whole:
                return await self.presence(need.keys)
            return np.arange(len(need.keys)) < (await self.lookup(need.keys)).num_blocks

        search = find_longest(needs)
        try:
            asked = next(search)
            while True:
                found_there = await asyncio.gather(*map(there, asked))
                if self.namespace() != asked_of:
                    return GroupsLookup(0, tuple(need.at(0) for need in needs))
                asked = search.send(found_there)
        except StopIteration as found:
            num_tokens: int = found.value
        return GroupsLookup(num_tokens, tuple(need.at(num_tokens) for need in needs))

    @abstractmethod
    async def presence(self, keys: BlockKeys) -> NDArray[np.bool_]:
        """Say of each block whether it could be loaded now, ``(len(keys),)``: of those behind a hole too.

        As `lookup`, which says it of a prefix, and costs shared tiers a few questions; this may cost one a block.
        """

    @abstractmethod
    def lookup_nowait(self, keys: BlockKeys) -> LookupResult:
        """`lookup` over the tiers that this cache owns alone (memory and NVMe), at once and from any thread."""

    @abstractmethod
    def membership(self, keys: BlockKeys, *, tier: str | None = None, prefix_only: bool = False) -> NDArray[np.int8]:
        """Say of each block whether it is there, at once and from any thread: a `BlockState` each, ``(len(keys),)``.

        For engines that ask key by key, and take "later" for an answer. Blocks behind a hole count too. Tiers that this
        cache owns answer now; shared ones are asked in the background for what is nowhere above them, and until they
        have answered it is ``ASKING``. Their answers are used for a second, unless a store, an eviction or a failed
        read here says otherwise sooner; one that does not answer in time, or is bypassed, has nothing. Reads, like
        `lookup`; a load decides.

        Args:
            keys: The blocks.
            tier: Only what this one has, by its name, one of those that this cache owns; or in all tiers.
            prefix_only: Behind the first block that is in no tier, others may be ``MISS`` though they are there: nobody
                looks for them, nor are shared tiers asked, and a prompt that nobody has stored costs little.

        Raises:
            ConfigurationError: There is no such tier, or it is shared with others.
        """

    @abstractmethod
    def count_lookup(self, keys: BlockKeys, found: NDArray[np.bool_]) -> None:
        """Count in the metrics what `membership` has answered: once for each request, when the answer is final.

        `membership` is asked again and again for one request, so only its caller knows when. Any thread may call, and
        waits for nothing.

        Args:
            keys: What was asked for, in prompt order.
            found: Which of them the request may count on, ``(len(keys),)``.

        Raises:
            ConfigurationError: They are not as many, or ``found`` are no bools.
        """

    # What is done ahead.

    @abstractmethod
    def prefetch(self, keys: BlockKeys, *, to: str = "cpu") -> PrefetchHandle:
        """Start to copy blocks up to a memory tier (its name), those of each rank, before anyone waits for them.

        Bounded by `CacheLimits.prefetch_quota`, and by what the tier can take beside what is leased. Await the handle
        for a `PrefetchResult`, or cancel it, or leave it alone.

        Raises:
            ConfigurationError: There is no such memory tier that keeps blocks.
        """

    @abstractmethod
    def lease(self, keys: BlockKeys) -> AbstractAsyncContextManager[HostLease]:
        """Hold a prefix in host memory: ``async with kv.lease(keys) as lease``. Inside, it cannot be evicted.

        Brings to the CPU tier what is below it. Needs a CPU tier; what does not fit is not held. With a codec its views
        are of encoded bytes; to have the engine's, load into a host pool.
        """

    # What stays, and what must leave the engine for a while.

    @abstractmethod
    def touch(self, keys: BlockKeys, *, hint: ReuseHint | None = None) -> None:
        """Count a use of blocks in every tier that holds them: for hits in the engine's own prefix cache.

        Args:
            keys: What was used, in prompt order.
            hint: What is known of their future; with a probability of 0 no use is counted. Leave out what other prompts
                share.
        """

    @abstractmethod
    def resident(self, keys: BlockKeys) -> None:
        """Take note that the engine has blocks in its own cache: for every prompt, all that is kept of it there.

        Memory here is worth most with what the engine has not: so these go first here, until they are `leaving`, or
        are loaded, touched or stored again. Is no use of what is here, which a load or `touch` counts; those that are
        not here were used now, and a policy that counts uses knows so when they come. Storage tiers go on as they were.
        """

    @abstractmethod
    def leaving(self, keys: BlockKeys) -> None:
        """Take note that the engine is about to drop blocks: what is here of them stays like others from now on.

        Store the others before they are dropped: what ``membership(keys, tier=...)`` misses in the memory tier, if its
        name is given, so that memory has what only storage has too. To store so, rather than as blocks are computed,
        pays where memory tiers hold less than four times what the engine does.
        """

    @abstractmethod
    def pin(self, keys: BlockKeys, *, ttl_s: float) -> PinResult:
        """Keep the prefix that is in owned tiers from being evicted for want of room, until `unpin` or ``ttl_s`` is up.

        Each block is held where it is, in the fastest tier that has it; nothing moves. Bounded per salt by
        `CacheLimits.pin_quota`, and to half of each tier. Pinned again, a block stays for the longer of the two times.
        `evict` and `clear` go through a pin: the block is unfindable at once, and its room is free when the pin ends.
        """

    @abstractmethod
    def unpin(self, keys: BlockKeys) -> None:
        """End the pins of these blocks, whoever took them and under whatever weights; of others it is no error."""

    @abstractmethod
    async def swap_out(
        self, keys: BlockKeys, source: GPULoadStoreSpec, *, after: object = None, ttl_s: float = 600.0
    ) -> SwapOutResult:
        """Store a preempted sequence whole, and pin it until `swap_in` or for ``ttl_s``; see `store` and `pin`.

        Pins hold at most half of a tier, and at most `CacheLimits.pin_quota` for a salt. Where ``num_pinned`` is less
        than the number of keys, the rest is kept like any other block, and may have to be computed again.

        Args:
            keys: Of all its blocks, the partial last one too: ``keys + hash_tail(rest, parent=keys)``.
            source: Its blocks; the engine's again when this returns.
            after: As for `start_store`.
            ttl_s: How long the blocks are kept from eviction, as far as pins are allowed. Those that several sequences
                share are pinned once: the first that comes back lets them go.
        """

    async def swap_in(
        self, keys: BlockKeys, into: GPULoadStoreSpec, *, after: object = None, deadline_s: float | None = None
    ) -> LoadResult:
        """Load a sequence back, see `load`; once all of it is in place, its pins end."""
        loaded = await self.start_load(keys, into, after=after, deadline_s=deadline_s)
        if loaded.num_blocks == len(keys):
            with suppress(ClosedError):  # which ended the pins
                self.unpin(keys)
        return loaded

    # What goes, what is written, and why: for operators and schedulers, now and then.

    @abstractmethod
    async def evict(self, keys: BlockKeys, *, tier: str | None = None) -> RemovalResult:
        """Make blocks unfindable at once, in one tier or in all.

        Their slots are freed when nobody reads them any more; what is being filled never becomes readable. Shared tiers
        are asked to delete. A tier that does not answer within its time is not waited for: the result names it.

        What is evicted from memory while a storage tier is being given it can be loaded once that has it, and meanwhile
        is in no tier; what only waits there to go down, or is copied to the host, goes no further. ``await flush()``,
        or ``settled()`` of its store, comes first where it is to be found.

        Args:
            keys: The blocks, in any order; those that are nowhere are no error.
            tier: The only one to evict them from, by its name in `stats`; all of them if left out. Of one tier, what
                others have is still found, and what is on its way down to it from them does not arrive there.

        Raises:
            ConfigurationError: There is no such tier.
            BackendUnavailableError: A host's server has not answered: it may not have been done.
        """

    @abstractmethod
    async def resize(self, tier: str, capacity: int | str) -> int:
        """Change the capacity of the CPU tier or an NVMe tier, up to its ``max_capacity``, while it is used.

        What does not fit any more is evicted, after what waits for other tiers was written. The memory or disk space is
        the system's again when this returns, but for memory page-locked for a GPU; where slots that go are in use for
        long, soon after they are not. Cancellation ends the wait only.

        Args:
            tier: Its name.
            capacity: Bytes, or e.g. ``"8GiB"``.

        Returns:
            How many blocks of prompts it holds now: of each KV group its `KVGroup.num_slots`.

        Raises:
            ConfigurationError: The tier cannot have that capacity. Nothing has changed.
            BackendUnavailableError: The medium did not grow. Nothing has changed.
        """

    @abstractmethod
    async def clear(self) -> RemovalResult:
        """Empty every tier that this cache owns of its blocks, after a restart too. Takes time in their size.

        What a directory has of other models, of this one as it was before a change, or under another names key stays.

        A tier that does not answer within its time is not waited for: its blocks are unfindable here all the same, and
        the result names it.

        Raises:
            BackendUnavailableError: A host's server has not answered: it may not have been done.
        """

    @abstractmethod
    def advance_epoch(self, weights: str) -> None:
        """Name the weights that are served from now on. O(1).

        Blocks of other weights are not found any more, but are again once their weights are named again. Stores in
        flight keep the epoch they began in; a load that is overtaken returns 0 blocks.
        """

    @abstractmethod
    async def flush(self, *, sync: bool = False) -> bool:
        """Wait until every store so far is in every tier or given up, those with ``write="back"`` included.

        A planned store is one from when somebody was handed its plan for a worker, and is waited for until that has
        answered, or has ended, or nobody is there any more who would say so.

        What uses so far have brought to tiers with ``admit_after`` is waited for too; what comes later is not.

        A tier that is bypassed is not waited for: blocks go on waiting for it. Nor is a store for longer than its
        ``store_timeout_s``, though a copy for it hangs, or a direct one's medium: what it keeps then is the next's.

        With ``sync`` what is written then survives a loss of power, in the order of its use. That walks the owned tiers
        on the event loop, 0.3 s a million blocks: not for every request.

        Returns:
            Whether nothing of it goes on waiting, no write of what waited has failed meanwhile, and, with ``sync``,
            every owned tier that is open has noted what it holds. What was dropped or failed before, ``settled()`` of
            its store counts.

        Raises:
            BackendUnavailableError: A host's server has not answered.
        """

    @abstractmethod
    async def drain(self, *, timeout_s: float | None = None) -> bool:
        """Take no more stores, and wait until what was stored is written and survives a loss of power.

        From now on a store drops its blocks (``"draining"``); loads and lookups go on until the cache is closed, which
        is the next thing to do: leave the ``async with`` block.

        Args:
            timeout_s: How long to wait; `CacheLimits.close_timeout_s` by default. Cancellation ends the wait only.

        Returns:
            Whether, in time, every block stored since the cache was opened was written in each tier that wants it, and
            owned tiers had noted what they hold. False if blocks wait for a tier that does not take them now: drain
            again to try again. False also, from then on, if a tier below was to get a block and did not, because that
            was dropped or failed on its way (``settled()`` of its store and `stats` count it), or was lost as it waited
            in memory that was given up, or with a directory that has failed since. What was evicted by name, cleared or
            expired before is not missed, nor what a tier has evicted since it was written there. False also while a
            medium has what was evicted, as it failed to remove it, or may have it: another start could serve that.
        """

    @abstractmethod
    async def explain(self, keys: BlockKeys, *, ask: bool = False) -> list[Explanation]:
        """Say of each block why it can be loaded, or cannot, from what this cache knows. Reads, like `lookup`.

        Tells nothing of blocks of other salts.

        Args:
            keys: The blocks; those behind a hole are explained too.
            ask: Whether to ask the tiers that this cache does not own, block by block; else what they have is unknown.
                Then a few blocks of its own storage tiers are read too: for other weights that have these blocks.
        """

    @abstractmethod
    def stats(self) -> CacheStatistics:
        """Count what is where now, and what has happened since opening."""

    @abstractmethod
    def events(self) -> Changes:
        """Return what changes in the tiers that this cache owns, in order: ``async for change in kv.events()``.

        A `Snapshot` of each place comes first. Nothing waits for a subscriber: one that falls behind by 65,536 blocks
        gets snapshots anew, each of which walks its tier on the event loop, 0.2 s a million blocks; so do all after
        `advance_epoch`. It ends with the cache.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.media)})"

    @property
    @abstractmethod
    def media(self) -> Mapping[str, str]:
        """The medium of each tier that the cache, or its server, owns: ``{"cpu": "cpu", "disk": "nvme"}``.

        Shared tiers are not among them, nor is host memory that blocks only pass through: `CacheStatistics.tiers` has
        both. The fastest comes first. Any thread may look, before it is opened too; of a server nothing is known
        before.
        """

    @property
    @abstractmethod
    def is_attached(self) -> bool:
        """Whether the cache is open; of one that a host's server keeps, also whether that server is there and answers.

        Any thread may look. While it is not attached, calls of a client find nothing.
        """

    @abstractmethod
    def namespace(self, salt: str | bytes = b"", *, group: int = 0, rank: int = 0) -> Namespace:
        """Return what makes names of keys, as `events` has them: ``namespace.names(keys)``. Picklable, for a router.

        It is of one KV group, of one rank of those that this cache stands for, and of the weights served now: ask again
        after `advance_epoch`. Workers that hold the same are one rank here, and in `events`. Any thread may ask.
        """

    @abstractmethod
    def planner(self) -> Planner:
        """Return the face for an engine whose workers are other processes: plan, execute, complete. There is one.

        Any thread may ask for it, and call it.
        """

    # Opening and closing.

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Open the cache, once.

        Raises:
            ConfigurationError: It can never work as it is set up.
            BackendUnavailableError: Something that it needs cannot be reached.
        """

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @abstractmethod
    async def aclose(self) -> None:
        """End: what is being moved ends, or is given up after a while. Idempotent.

        A cancellation is raised when everything has ended.

        Raises:
            ConfigurationError: Called elsewhere than on the event loop that opened it. Nothing has ended.
        """
