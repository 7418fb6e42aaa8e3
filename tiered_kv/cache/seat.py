"""One engine's place at an open cache, in its own process: memory, weights, pins and transfers.

`EngineSide` is what a process has wherever the tiers are: memory, transfers, a loop. `Seat` adds the tiers of a cache
in this process. The program that opens a cache has its first seat. A host's server has one more for each client, and
for each of the weights that a client serves: all seats share the tiers, and nothing that is listed here.

`cache_statistics` counts what a cache has, over its KV groups and ranks.
"""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.cache.checks import (
    LoadCall,
    StoreCall,
    check_are_keys,
    check_group,
    check_keys,
    check_one_rank,
    check_pages,
)
from tiered_kv.cache.open_cache import OpenCache
from tiered_kv.catalog.locate import is_anywhere
from tiered_kv.memory.lanes import Lane
from tiered_kv.system import system
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.fates import Fates
from tiered_kv.tiers.pins import Pins
from tiered_kv.tiers.storage import StorageTier
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.tiers.tier import Batch
from tiered_kv.transfers.engine_memory import Binding, Bindings, Reach
from tiered_kv.transfers.submissions import Submissions
from tiered_kv.transfers.swap import SwapSide, SwapSpace, SwapSpaces
from tiered_kv.transfers.transfer_requests import LoadRequest, StoreRequest
from tiered_kv.values.errors import ClosedError, ConfigurationError
from tiered_kv.values.integers import as_int, as_rank
from tiered_kv.values.keys import NO_SALT, BlockKeys, Namespace, Shard, StoredKeys, epoch_digest
from tiered_kv.values.loop_calls import LoopCalls
from tiered_kv.values.results import CacheStatistics, TierStatistics

PAST_EPOCHS: Final = 8
"""Digests of weights that are remembered once others are served."""
parents: Final[list[int]] = []
"""Processes that this one was forked from since: looked at by each call, where the kernel is not asked for a number."""
os.register_at_fork(after_in_child=lambda: parents.append(os.getppid()))
_SLOTS = ("num_slots", "free", "ready", "evictable", "leased", "pending", "doomed", "dirty", "withheld")


class EngineSide(ABC):
    """What an engine's own process has of an open cache, wherever the tiers are; for the event loop's thread.

    Attributes:
        reads_direct: Whether storage may read into the engine's memory itself.
        shards: Whose parts of the blocks it is of: one rank's, or all.
        tasks: Everything under way.
        bindings: The engine's memory.
        swaps: What the engine numbers itself.
        submissions: Transfers of other threads.
        lifetime: Closes what belongs to it.
        loop: The event loop.
    """

    reads_direct: ClassVar[bool]

    def __init__(self, shards: Sequence[Shard], tasks: Tasks, loop_calls: LoopCalls, lifetime: AsyncExitStack) -> None:
        """Begin, in the thread of the running event loop."""
        self.shards = shards
        self.tasks = tasks
        self.bindings = Bindings()
        self.swaps = SwapSpaces()
        self.submissions = Submissions(loop_calls)
        self.lifetime = lifetime
        self._loop_calls = loop_calls
        self.loop = asyncio.get_running_loop()
        self._thread = system().get_ident()
        self._num_parents = len(parents)

    @abstractmethod
    def of_rank(self, group: int) -> Reach:
        """Return a KV group, as memory is bound to it, of the one rank that this process is of.

        Raises:
            ConfigurationError: The layout has none of this number, or there are several ranks.
        """

    @abstractmethod
    def swap_space(self, group: int) -> SwapSpace:
        """Return the slots that the engine numbers itself for pages of a KV group; made when it is first asked for.

        Raises:
            ConfigurationError: There are several ranks, no such group, no room, or no tensors to swap.
        """

    @abstractmethod
    def deadline(self, deadline_s: float | None) -> float:
        """Return when a load's time is up, on the loop's clock. From any thread."""

    def into(self, call: LoadCall) -> tuple[Binding, NDArray[np.int64], Lane]:
        """Check what memory of the engine a load is into, and return it, its pages, and a lane behind their last use.

        From any thread. The lane is to be released.
        """
        binding = self.bindings.find(call.into, call.keys.group)
        pages = check_pages(binding, call.keys, call.into)
        return binding, pages, binding.h2d.take(binding.to_wait_for(call.after))

    def source(self, call: StoreCall) -> tuple[Binding, NDArray[np.int64], Lane]:
        """Check what memory of the engine a store is out of, and return as much; see `into`."""
        binding = self.bindings.find(call.source, call.keys.group)
        pages = check_pages(binding, call.keys, call.source)
        after = binding.to_wait_for(call.after)
        return binding, pages, binding.d2h.take_own(after) if call.layerwise else binding.d2h.take(after)

    def unregister_caches(self, group: int) -> None:
        """Let go of the engine's tensors of one KV group once nothing moves to or from them."""
        self.of_rank(group)
        self.bindings.unregister_caches(group)
        self.swaps.forget(group)

    def check_loop(self, *, anywhere: bool = False) -> None:
        """Raise unless a call comes from the event loop that opened the cache, or ``anywhere`` while that is there.

        Raises:
            ClosedError: That event loop is closed: nothing can move or end any more.
            ConfigurationError: This is another thread or process, or another event loop is running.
        """
        if len(parents) != self._num_parents:
            check_process(self._num_parents)
        if anywhere and not self.loop.is_closed():
            return  # as all of an engine's other threads ask, in each of its steps
        try:
            if asyncio.get_running_loop() is self.loop:
                return
            is_here = False
        except RuntimeError:  # none is running: between two runs of the loop its thread may ask
            is_here = system().get_ident() == self._thread
        if self.loop.is_closed():
            raise ClosedError("the event loop that opened this TieredKV is closed")
        if not is_here:
            raise ConfigurationError(
                "a TieredKV is called on the event loop that opened it; other threads use submit_load, submit_store, "
                "poll, lookup_nowait, membership and count_lookup, or open_blocking for all of it"
            )


class Seat(EngineSide):
    """One engine's place at an open cache in this process. For the event loop's thread, but for what says otherwise.

    Attributes:
        cache: What all engines share.
        model_name, emit, fates: The cache's.
        chains: Those of the engine's shards: by KV group, then by rank.
        block_sizes: Tokens in a block, by KV group.
        tokens_per_block: Tokens that each block counted stands for; 0 where KV groups differ.
        epoch: Digest of the weights that the engine serves.
        past_epochs: Digests of weights that it served before, the last one first; a few.
        pins: Its own.
    """

    reads_direct: ClassVar = True

    def __init__(self, cache: OpenCache, shards: Sequence[Shard], epoch: bytes, pins: Pins) -> None:
        """Take a seat at an open cache, in the thread of the event loop.

        Args:
            cache: Open.
            shards: Those of the cache's that the engine stands for.
            epoch: Digest of the weights that it serves.
            pins: For whoever made them to end.
        """
        super().__init__(shards, cache.tasks, cache.loop_calls, cache.lifetime)
        groups = cache.layout.groups
        self.cache = cache
        self.model_name, self.emit, self.fates = cache.model_name, cache.emit, cache.fates
        self._of_group = [
            [cache.of_group(group)[cache.shards.index(shard)] for shard in shards] for group in range(len(groups))
        ]
        self.chains = [chain for chains in self._of_group for chain in chains]
        self.block_sizes = tuple(group.block_size for group in groups)
        self.tokens_per_block = groups[0].block_size / len(shards) if len(groups) == 1 else 0.0
        self.epoch = epoch
        self.past_epochs: list[bytes] = []
        self.pins = pins

    # Which chains a call is about, and what keys are called there.

    def of_group(self, group: int) -> Sequence[Chain]:
        """Return the chains of one KV group, one per rank."""
        check_group(group := as_int("a KV group's number", group), len(self._of_group))
        return self._of_group[group]

    @override
    def of_rank(self, group: int) -> Chain:
        """Return the chain of one KV group, of the one rank that this cache is of."""
        chains = self.of_group(group)
        check_one_rank(chains)
        return chains[0]

    def batches(self, keys: StoredKeys, epoch: str | None = None) -> list[tuple[Chain, Batch]]:
        """Return, per rank, the chain of the keys' KV group, and what the keys are called there. From any thread.

        Args:
            keys: An engine's.
            epoch: The weights that computed the blocks; those served now by default.
        """
        digest = self.epoch if epoch is None else epoch_digest(epoch)
        return [(chain, chain.naming.batch(keys, digest)) for chain in self._chains_of(keys)]

    def may_have_prefix(self, keys: BlockKeys) -> bool:
        """Say whether tiers may have the first of some keys: else they have no prefix. From any thread.

        The others are not named for that: an engine asks it of each prompt, and a call of numpy takes ten times as long
        there as behind others of its kind, for the engine's products leave nothing of it in a processor's caches.
        """
        epoch = self.epoch
        for chain in self._chains_of(keys):
            name = chain.naming.namespace(keys.salt_id, epoch).first_name(keys)
            if not chain.shared and not is_anywhere(chain.books_in_use(), name):
                return False
        return True

    def batch(self, keys: BlockKeys, epoch: str | None = None) -> tuple[Chain, Batch]:
        """Return the chain of the keys' KV group, and what keys are called there, for a cache of one rank."""
        chains = self._chains_of(keys)
        check_one_rank(chains)
        return chains[0], chains[0].naming.batch(keys, self.epoch if epoch is None else epoch_digest(epoch))

    def _chains_of(self, keys: StoredKeys) -> Sequence[Chain]:
        """Return the chains of the keys' KV group, one per rank, having looked at the keys."""
        if not isinstance(keys, StoredKeys):  # asked here, too: each load and store comes by, and a call costs more
            check_are_keys(keys)
        check_group(keys.group, len(self._of_group))
        chains = self._of_group[keys.group]
        check_keys(keys, chains[0].group)
        return chains

    # Loads and stores, once each argument was looked at: from any thread, the rest is the event loop's.

    def load_request(self, call: LoadCall) -> LoadRequest:
        """Check a load and enqueue its wait."""
        epoch = self.epoch  # before the keys are named by it: if it advances in between, the load is overtaken
        chain, batch = self.batch(call.keys)
        binding, pages, lane = self.into(call)
        if self.cache.recorder is not None:
            self.cache.note("load", call.keys)
        return LoadRequest(
            chain=chain, batch=batch, binding=binding, pages=pages, lane=lane, deadline=self.deadline(call.deadline_s),
            priority=call.priority, is_current=lambda: self.epoch == epoch, layerwise=call.layerwise, gaps=call.gaps,
            order=call.order,
        )  # fmt: skip

    def store_request(self, call: StoreCall) -> StoreRequest:
        """Check a store and enqueue its wait."""
        chain, batch = self.batch(call.keys, call.epoch)
        binding, pages, lane = self.source(call)
        if self.cache.recorder is not None:
            self.cache.note("store", call.keys)
        return StoreRequest(
            chain=chain, batch=batch, binding=binding, pages=pages, lane=lane, layerwise=call.layerwise, hint=call.hint
        )

    # What some calls do.

    @override
    def swap_space(self, group: int) -> SwapSpace:
        chain, caches = self.of_rank(group), self.bindings.caches_of(group)
        side = SwapSide(chain.h2d.device, chain.loop_calls, chain.emit, chain.limits.window)
        return self.swaps.of(group, side, caches, int(self.cache.limits.swap_space), self.lifetime)

    @override
    def deadline(self, deadline_s: float | None) -> float:
        return self.loop.time() + (self.cache.limits.load_timeout_s if deadline_s is None else deadline_s)

    def statistics(self) -> CacheStatistics:
        """Count what is where now, and what has happened since opening."""
        return cache_statistics(self.chains, self.fates, self.pins, len(self.tasks))

    def namespace(self, salt_id: bytes, *, group: int, rank: int) -> Namespace:
        """Return what names the blocks of a tenant, by a digest of its salt; from any thread."""
        chains = self.of_group(group)
        return chains[as_rank(rank, len(chains))].naming.namespace(salt_id, self.epoch)

    def namespaces(self) -> list[Namespace]:
        """Return what names the blocks of a prompt without a salt, by KV group; on the first rank."""
        return [self.namespace(NO_SALT, group=group, rank=0) for group in range(len(self.cache.layout.groups))]

    def call_soon(self, function: Callable[[], object]) -> None:
        """Have the event loop call a function, from any thread."""
        self._loop_calls.call(function)

    def advance_epoch(self, weights: str) -> None:
        """Serve other weights from now on."""
        epoch = epoch_digest(weights)
        self.past_epochs = past_epochs(self.epoch, self.past_epochs, epoch)
        self.epoch = epoch
        self.cache.subscribers.start_over()


def past_epochs(epoch: bytes, before: Sequence[bytes], now: bytes) -> list[bytes]:
    """Return what is remembered of ``epoch``, and of those ``before`` it, once other weights are served ``now``."""
    return [each for each in (epoch, *before) if each != now][:PAST_EPOCHS]


def check_process(num_parents: int) -> None:
    """Raise `ConfigurationError` if this process was forked since it had so many `parents`: no event loop runs here."""
    if len(parents) != num_parents:
        raise ConfigurationError(
            f"this TieredKV was opened in process {parents[num_parents]}, and this is {os.getpid()}: each opens its own"
        )


def cache_statistics(chains: Sequence[Chain], fates: Fates, pins: Pins, num_transfers: int) -> CacheStatistics:
    """Count what is where in all chains, which share their tiers."""
    host, device = [chain.host.index.statistics() for chain in chains], chains[0].h2d.device
    return CacheStatistics(
        tiers=tuple(_tier_statistics(chains, number) for number in range(len(chains[0].names))),
        transfers=num_transfers,
        store_queue_bytes=chains[0].quotas.store_queue.in_flight,
        bounce_free=sum(each.bounce_free for each in host),
        bounce_slots=sum(chain.host.index.num_bounce for chain in chains),
        requested=fates.requested,
        missed=fates.missed,
        store_requested=fates.store_requested,
        stored=fates.stored,
        present=fates.present,
        dropped=fates.dropped,
        missed_because=dict(fates.missed_because),
        dropped_because=dict(fates.dropped_because),
        num_preemptions=fates.preemptions,
        pinned_bytes=pins.pinned_bytes(chains),
        page_locked_bytes=device.page_locked_bytes,
        is_pageable=device.is_pageable,
        is_device_usable=device.error is None,
    )


def _tier_statistics(chains: Sequence[Chain], number: int) -> TierStatistics:
    values: dict[str, Any] = {}
    for chain in chains:
        tier = chain.tiers[number]
        counts = dict(vars(tier.counters))
        if (index := getattr(tier, "index", None)) is not None:
            books = index.statistics()
            counts |= {each: getattr(books, each) for each in _SLOTS}
            counts |= {
                "capacity_bytes": books.num_slots * chain.stride_bytes,
                "used_bytes": books.ready * chain.stride_bytes,
            }
        values = {each: values[each] + count if each in values else count for each, count in counts.items()}
    tier = chains[0].tiers[number]
    health, values["dropped_because"] = getattr(tier, "health", None), dict(values["dropped_because"])
    facts: Mapping[str, object] = {}
    if isinstance(tier, StorageTier):
        calls = tier.calls
        facts = tier.describe() if tier.health.is_open else {"last_error": tier.health.why_not_open}
        values |= {
            "in_flight_bytes": calls.budget.in_flight,
            "num_calls": calls.num_underway,
            "num_waiting": calls.num_waiting,
        }
    return TierStatistics(
        tier=tier.name,
        is_bypassed=health is not None and (health.is_bypassed or health.is_shedding),
        open_breakers=health.open_breakers() if health is not None else (),
        facts=facts,
        **values,
    )
