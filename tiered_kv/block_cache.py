"""What every cache of blocks answers, wherever its tiers are: what to call, and what is promised.

`TieredKV` is the one whose tiers are this process's own. The calls come in the order of their use: what a serving
engine does for every request, then what threads, schedulers and operators ask for. Those that move blocks between the
engine's memory and the cache are in `TransferCalls`.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tiered_kv.changes import Changes
from tiered_kv.errors import ClosedError
from tiered_kv.explain import Explanation
from tiered_kv.groups import GroupNeed, GroupsLookup, longest
from tiered_kv.hints import ReuseHint
from tiered_kv.keys import BlockKeys, Namespace
from tiered_kv.planner import Planner
from tiered_kv.results import CacheStatistics, LoadResult, LookupResult, PinResult, SwapOutResult
from tiered_kv.specs import GPULoadStoreSpec
from tiered_kv.transfer_calls import TransferCalls
from tiered_kv.transfers.prefetch import HostLease, PrefetchHandle


class BlockCache(TransferCalls):
    """A KV cache for one model, called on one event loop.

    All coroutines may be cancelled at any await: nothing is left behind, and once the cancellation is raised nobody
    writes to the caller's memory. A tier's fault raises nothing: it shortens a prefix, and is counted and logged.
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

        A hole outside every window costs nothing; a block that some group lacks does not count. Reads, like `lookup`.
        """

        async def count(keys: BlockKeys) -> int:
            return (await self.lookup(keys)).num_blocks

        num_tokens = await longest(needs, count)
        return GroupsLookup(num_tokens, tuple(need.at(num_tokens) for need in needs))

    @abstractmethod
    def lookup_nowait(self, keys: BlockKeys) -> LookupResult:
        """`lookup` over the tiers that this cache owns alone (memory and NVMe), at once and from any thread."""

    @abstractmethod
    def membership(self, keys: BlockKeys) -> NDArray[np.int8]:
        """Say of each block whether it is there, at once and from any thread: a `BlockState` each, ``(len(keys),)``.

        For engines that ask key by key, and take "later" for an answer. Blocks behind a hole count too. Tiers that this
        cache owns answer now; shared ones are asked in the background for what is nowhere above them, and until they
        have answered it is ``ASKING``. Their answers are used for a second, unless a store, an eviction or a failed
        read here says otherwise sooner; one that does not answer in time, or is bypassed, has nothing. Reads, like
        `lookup`; a load decides.
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
            ConfigurationError: They are not as many.
        """

    # What is done ahead.

    @abstractmethod
    def prefetch(self, keys: BlockKeys, *, to: str = "cpu") -> PrefetchHandle:
        """Start to copy blocks up to a memory tier (its name), before anyone waits for them.

        Bounded by `CacheLimits.prefetch_quota`, and by what the tier can take beside what is leased. Await the handle
        for a `PrefetchResult`, or cancel it, or leave it alone.
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
    async def evict(self, keys: BlockKeys, *, tier: str | None = None) -> int:
        """Make blocks unfindable at once, in one tier or in all; return how many were in an owned tier.

        Their slots are freed when nobody reads them any more; what is being filled never becomes readable. Shared tiers
        are asked to delete. A tier that does not answer within its time is not waited for.
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
            How many blocks it holds now, of each KV group.

        Raises:
            ConfigurationError: The tier cannot have that capacity. Nothing has changed.
            BackendUnavailableError: The medium did not grow. Nothing has changed.
        """

    @abstractmethod
    async def clear(self) -> None:
        """Empty every tier that this cache owns, after a restart too. Takes time in their size.

        A tier that does not answer within its time is not waited for: its blocks are unfindable here all the same.
        """

    @abstractmethod
    def advance_epoch(self, weights: str) -> None:
        """Name the weights that are served from now on. O(1).

        Blocks of other weights are not found any more, but are again once their weights are named again. Stores in
        flight keep the epoch they began in; a load that is overtaken returns 0 blocks.
        """

    @abstractmethod
    async def flush(self, *, sync: bool = False) -> None:
        """Wait until every store so far is in every tier or given up, those with ``write="back"`` included.

        A planned store is one from when somebody was handed its plan for a worker, and is waited for until that has
        answered, or has ended.

        What uses so far have brought to tiers with ``admit_after`` is waited for too; what comes later is not.

        A tier that is bypassed is not waited for: blocks go on waiting for it.

        With ``sync`` what is written then survives a loss of power, in the order of its use. That walks the owned tiers
        on the event loop, 0.3 s a million blocks: not for every request.
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
            owned tiers had noted what they hold. False if blocks wait for a tier that does not take them now:
            drain again to try again. False also, from then on, if a tier below was to get a block and did not, because
            that was dropped or failed on its way (``settled()`` of its store and `stats` count it), or was lost as it
            waited in memory that was given up. What was evicted by name, cleared or expired before is not missed, nor
            what a tier has evicted since it was written there.
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

    @property
    @abstractmethod
    def media(self) -> Mapping[str, str]:
        """The medium of each tier that the cache, or its server, owns: ``{"cpu": "cpu", "disk": "nvme"}``.

        The fastest comes first. Any thread may look, before it is opened too; of a server nothing is known before.
        """

    @abstractmethod
    def namespace(self, salt: str | bytes = b"", *, group: int = 0, rank: int = 0) -> Namespace:
        """Return what makes names of keys, as `events` has them: ``namespace.names(keys)``. Picklable, for a router.

        It is of one KV group, of one rank of those that this cache stands for, and of the weights served now: ask again
        after `advance_epoch`. Any thread may ask.
        """

    @abstractmethod
    def planner(self) -> Planner:
        """Return the face for an engine whose workers are other processes: plan, execute, complete. There is one.

        Any thread may ask for it, and call it.
        """

    # Opening and closing.

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Open it, once.

        Raises:
            ConfigurationError: It can never work as it is set up.
            BackendUnavailableError: Something that it needs cannot be reached.
        """

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @abstractmethod
    async def aclose(self) -> None:
        """End: what is being moved ends, or is given up after a while. Idempotent.

        A cancellation is raised when everything has ended.

        Raises:
            ConfigurationError: Called elsewhere than on the event loop that opened it. Nothing has ended.
        """
