"""Sequences that must leave the engine for a while, by name or by number."""

from tiered_kv.events import SequencePreempted
from tiered_kv.faces.control import Control
from tiered_kv.faces.transfers import Transfers
from tiered_kv.keys import BlockKeys
from tiered_kv.results import LoadResult, SwapOutResult, SwapResult
from tiered_kv.specs import GPULoadStoreSpec
from tiered_kv.transfers.handles import Handle
from tiered_kv.transfers.swap import Copies, Moves, Swap
from tiered_kv.validation import check_ttl


class Preemption(Transfers, Control):
    """Swapping out and in."""

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
        check_ttl(ttl_s)
        stored = await self.start_store(keys, source, after=after)
        pinned = self.pin(keys, ttl_s=ttl_s)
        self._core.ledger.preemptions += 1
        self._core.emit(SequencePreempted(len(keys), stored.num_dropped, pinned.num_blocks))
        return SwapOutResult(**vars(stored), num_pinned=pinned.num_blocks)

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
        that comes may be forked. Calls run in their order. No block is named and no tier takes part. A page
        that fails to move ends the swap: what is behind it does not begin, and the result says which part failed.

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
        assert self._core.lifetime is not None  # noqa: S101 - the cache is open
        caches = self._core.bindings.caches_of(group)
        space = self._core.swaps.of(group, chain, caches, int(self._core.limits.swap_space), self._core.lifetime)
        maps = space.check(blocks_to_swap_in, blocks_to_swap_out, blocks_to_copy)
        if after is not None:
            chain.h2d.device.check(after)
        swap = Swap(space, *maps, after)
        return swap.start(self._core.tasks.spawn(swap.run(), "swap"))
