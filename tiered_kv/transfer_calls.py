"""The calls that move blocks between an engine's memory and a cache. They are the same wherever its tiers are.

Each checks what it is given, and starts a transfer over the `EngineSide` of this process. What a cache adds is how a
load or store begins there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from tiered_kv.engine_side import EngineSide
from tiered_kv.groups import GroupNeed, GroupsLoad, check_needs, length_in_place
from tiered_kv.hints import ReuseHint
from tiered_kv.keys import BlockKeys
from tiered_kv.layout import KVCaches
from tiered_kv.results import LoadResult, StoreResult, SwapResult
from tiered_kv.specs import EngineBlocks, GPULoadStoreSpec
from tiered_kv.tiers.budget import Priority
from tiered_kv.transfers.handles import Handle, LoadHandle, cancel_each, each_of
from tiered_kv.transfers.requests import Order
from tiered_kv.transfers.store import StoreHandle
from tiered_kv.transfers.submissions import LoadTicket, StoreTicket, load_failed, store_failed
from tiered_kv.transfers.swap import Copies, Moves, Swap
from tiered_kv.validation import LoadCall, StoreCall, check_seconds, check_specs


class TransferCalls(ABC):
    """Loads, stores and swaps of one cache, for its event loop and from any thread; a part of every `BlockCache`.

    All coroutines may be cancelled at any await: nothing is left behind, and once the cancellation is raised nobody
    writes to the caller's memory. A tier's fault raises nothing: it shortens a prefix, and is counted and logged.
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
                returns. A GPU event, or on a CPU anything with ``synchronize()`` or ``wait()``.
            deadline_s: How long it may take; `CacheLimits.load_timeout_s` by default.
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
        return self._prepare_load(LoadCall(keys, into, after, deadline_s, priority, layerwise, gaps, order))()

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

        Args:
            keys: What to store, in prompt order.
            source: ``pages_per_block`` block ids per key. They must not change until the handle has ended.
            after: An event after the blocks' computation: nothing is read before it.
            epoch: The weights that computed the blocks, where they are not the current ones any more.
            layerwise: Copy each layer when `StoreHandle.store_layer` says that it is computed. Slots are reserved now,
                without waiting for any; a store of which some layer is still missing at its deadline, after
                `CacheLimits.store_timeout_s`, is dropped.
            hint: What is known of the future of those blocks that are new; it reaches the tier that they are copied to.

        Raises:
            ConfigurationError, LayoutMismatchError: Arguments that cannot be right. Nothing has moved.
            ClosedError: The cache is not open.
        """
        return self._prepare_store(StoreCall(keys, source, after, epoch, layerwise, hint))()

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
        submissions = self._open(anywhere=True).submissions
        start = self._prepare_load(LoadCall(keys, into, after, deadline_s, priority, gaps=gaps), anywhere=True)
        return submissions.submit(start, partial(load_failed, len(keys)))

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
        submissions = self._open(anywhere=True).submissions
        start = self._prepare_store(StoreCall(keys, source, after, epoch, hint=hint), anywhere=True)
        return submissions.submit(start, partial(store_failed, len(keys)))

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
        side, step = self._open(), check_needs(needs)
        length = min(len(need.keys) * need.keys.block_size for need in needs) // step * step
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
            after: An event after the last use of all these pages. Later swaps come after it too, and end at
                their own deadlines.
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
        if after is not None:
            space.side.device.check(after)
        swap = Swap(space, *maps, after, side.deadline(deadline_s))
        return swap.start(side.tasks.spawn(swap.run(), "swap"))

    # The memory of the engine's own.

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
        side = self._open()
        side.bindings.register_caches(kv_caches, side.of_rank(group), group=group, axes=axes)

    def unregister_kv_caches(self, *, group: int = 0) -> None:
        """Let go of the engine's tensors of one KV group: before it sleeps, or unmaps them. Idempotent.

        Loads and stores that are under way use them to their end: wait for these first. Those that come later are
        refused with ConfigurationError, until tensors are registered again. Blocks in the tiers stay.
        """
        side = self._open()
        side.of_rank(group)
        side.bindings.unregister_caches(group)

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
                ends only when the medium has let go of them, whatever its deadline. Storage of a host's server never
                does: blocks come by way of its memory.

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

    @abstractmethod
    def _prepare_load(self, call: LoadCall, *, anywhere: bool = False) -> Callable[[], LoadHandle]:
        """Check a load and enqueue its wait; return what starts it on the event loop.

        Raises:
            ClosedError, ConfigurationError, LayoutMismatchError: See `start_load`, and `_open`.
        """

    @abstractmethod
    def _prepare_store(self, call: StoreCall, *, anywhere: bool = False) -> Callable[[], StoreHandle]:
        """The same of a store."""
