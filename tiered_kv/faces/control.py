"""Control: what stays, what goes, why, and what is written."""

import asyncio
import signal
from contextlib import AbstractContextManager

import numpy as np

from tiered_kv.changes import Changes
from tiered_kv.core import Core
from tiered_kv.drain import Draining, drain, draining_on
from tiered_kv.errors import ConfigurationError
from tiered_kv.events import EpochAdvanced
from tiered_kv.explain import Explanation, explain
from tiered_kv.keys import BlockKeys, Namespace, salt_digest
from tiered_kv.results import CacheStatistics, PinResult
from tiered_kv.statistics import cache_statistics
from tiered_kv.tiers import upkeep
from tiered_kv.validation import check_capacity, check_seconds, check_ttl


class Control:
    """Calls that an operator or a scheduler makes now and then."""

    _core: Core

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
        return PinResult(self._core.pins.pin(self._core.batches(keys), keys, check_ttl(ttl_s)))

    def unpin(self, keys: BlockKeys) -> None:
        """End the pins of these blocks, whoever took them and under whatever weights; of others it is no error."""
        self._core.pins.unpin(self._core.batches(keys), keys)

    async def evict(self, keys: BlockKeys, *, tier: str | None = None) -> int:
        """Make blocks unfindable at once, in one tier or in all; return how many were in an owned tier.

        Their slots are freed when nobody reads them any more; what is being filled never becomes readable. Shared tiers
        are asked to delete. A tier that does not answer within its time is not waited for.
        """
        parts = self._core.batches(keys)
        names = parts[0][0].names
        if tier is not None and tier not in names:
            raise ConfigurationError(f"no tier {tier!r} here; there are {', '.join(names)}")
        found = await asyncio.gather(*(upkeep.evict(chain, batch, tier) for chain, batch in parts))
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
        await upkeep.clear(self._core.chains)

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
        return await explain(self._core, self._core.pins, keys, ask=ask)

    def events(self) -> Changes:
        """Return what changes in the tiers that this cache owns, in order: ``async for change in kv.events()``.

        A `Snapshot` of each place comes first. Nothing waits for a subscriber: one that falls behind by 65,536 blocks
        gets snapshots anew, each of which walks its tier on the event loop, 0.2 s a million blocks. It ends with the
        cache.
        """
        self._core.check_open()
        return self._core.subscribers.subscribe()

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
            await asyncio.wait({self._core.tasks.spawn(upkeep.checkpoint(self._core.chains, sync=True), "checkpoint")})

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
        check_seconds("timeout_s", timeout_s)
        return await drain(self._core, timeout_s)

    def drain_on(self, *signals: signal.Signals, timeout_s: float | None = None) -> AbstractContextManager[Draining]:
        """Drain when a signal comes: ``with kv.drain_on(signal.SIGTERM) as draining: await draining.wait()``.

        A second signal does what it does by default: it ends the process. For an event loop in the main thread. While
        the block lasts, handlers set before are not called; leaving it puts them back.
        """
        self._core.check_open()
        check_seconds("timeout_s", timeout_s)
        return draining_on(signals, lambda: self._core.tasks.spawn(drain(self._core, timeout_s), "drain on a signal"))

    def stats(self) -> CacheStatistics:
        """Count what is where now, and what has happened since opening."""
        self._core.check_open()
        return cache_statistics(self._core.chains, self._core.ledger, len(self._core.tasks))
