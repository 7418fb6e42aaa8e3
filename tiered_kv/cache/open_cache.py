"""A cache while it is open: its chains, its tasks, the weights that it serves, and what some of its calls keep.

`tiered_kv.cache.opening` makes it, complete; `tiered_kv.cache.closing` ends it. Who may call it, and when, is for
`TierCalls` to say.

Who waits for a cache in a task of the program's, and is told of its end.

What a cache has in the engine's own process while it is open, wherever its tiers are: memory, transfers, a loop.

A snapshot of a cache in numbers, added up over its KV groups and ranks.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from copy import copy
from functools import partial
from typing import Any, ClassVar, Final, TypeVar
from weakref import WeakSet

from anyio import CancelScope
from typing_extensions import override

from tiered_kv.cache.checks import LoadCall, StoreCall, check_keys, check_one_rank, check_pages
from tiered_kv.cache.parts import CacheParts
from tiered_kv.memory.device import Device
from tiered_kv.system import system
from tiered_kv.telemetry.trace_recorder import Call
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.changes import Subscribers
from tiered_kv.tiers.ledger import Ledger
from tiered_kv.tiers.pins import Pins
from tiered_kv.tiers.storage import StorageTier
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.tiers.tier import Batch
from tiered_kv.tiers.upkeep import keep_up, scrub_for_ever
from tiered_kv.transfers.engine_memory import Bindings, Reach
from tiered_kv.transfers.jobs import Jobs
from tiered_kv.transfers.requests import LoadRequest, StoreRequest
from tiered_kv.transfers.resize import GivenUp, resize, slots_within
from tiered_kv.transfers.submissions import Submissions
from tiered_kv.transfers.swap import SwapSide, SwapSpace, SwapSpaces
from tiered_kv.transfers.writedown import Cleaner, write_all
from tiered_kv.values.errors import ClosedError, ConfigurationError, TieredKVError
from tiered_kv.values.events import TierResized
from tiered_kv.values.integers import as_int
from tiered_kv.values.keys import NO_SALT, BlockKeys, Namespace, Shard, epoch_digest
from tiered_kv.values.loop_calls import LoopCalls
from tiered_kv.values.results import CacheStatistics, TierStatistics

_LAST_STEPS_S: Final = 1.0
"""What a call that is told of the closing may take to end."""


class Callers:
    """Calls that wait in the tasks of their callers: the end of the cache ends their wait.

    Transfers end by themselves, with results, and need none of this.
    """

    def __init__(self) -> None:
        self._scopes: dict[CancelScope, bool] = {}
        self._changed = asyncio.Event()

    @contextmanager
    def waiting(self, *, for_the_program: bool = False) -> Iterator[None]:
        """Wait in this block; raise `ClosedError` from it if the cache is closed before the wait is over.

        ``for_the_program``: it is not the cache that will end the wait, so closing gives it no time.
        """
        with CancelScope() as scope:
            self._scopes[scope] = for_the_program
            try:
                yield
            finally:
                del self._scopes[scope]
                self._changed.set()
        if scope.cancelled_caught:
            raise ClosedError("this TieredKV was closed before the call was done")

    async def aclose(self, timeout_s: float) -> None:
        """Give the calls so long to end; then end them."""
        for scope, is_for_the_program in self._scopes.items():
            if is_for_the_program:
                scope.cancel()
        await self._left(timeout_s)
        for scope in self._scopes:
            scope.cancel()
        await self._left(_LAST_STEPS_S)

    async def _left(self, timeout_s: float) -> None:
        """Wait until no call is under way, for a limited time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._scopes:
                    self._changed.clear()
                    await self._changed.wait()


class EngineSide(ABC):
    """All of it, for the event loop's thread.

    Attributes:
        reads_direct: Whether storage may read into the engine's memory itself.
        shards: Whose parts of the blocks it is of: one rank's, or all.
        tasks: Everything under way.
        bindings: The engine's memory.
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
        self.submissions = Submissions(loop_calls)
        self.lifetime = lifetime
        lifetime.callback(self.bindings.forget)
        self._loop_calls = loop_calls
        self.loop = asyncio.get_running_loop()
        self._thread = system().get_ident()

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

    def check_loop(self, *, anywhere: bool = False) -> None:
        """Raise unless a call comes from the event loop that opened the cache, or ``anywhere`` while that is there.

        Raises:
            ClosedError: That event loop is closed: nothing can move or end any more.
            ConfigurationError: This is another thread, or another event loop is running.
        """
        if self.loop.is_closed():
            raise ClosedError("the event loop that opened this TieredKV is closed")
        if anywhere:
            return
        try:
            is_here = asyncio.get_running_loop() is self.loop
        except RuntimeError:  # none is running: between two runs of the loop its thread may ask
            is_here = system().get_ident() == self._thread
        if not is_here:
            raise ConfigurationError(
                "a TieredKV is called on the event loop that opened it; other threads use submit_load, submit_store, "
                "poll, lookup_nowait and membership"
            )


_SLOTS = ("num_slots", "free", "ready", "evictable", "leased", "pending", "doomed", "dirty", "withheld")


def cache_statistics(chains: Sequence[Chain], ledger: Ledger, pins: Pins, num_transfers: int) -> CacheStatistics:
    """Count what is where in all chains, which share their tiers."""
    host, device = [chain.host.index.statistics() for chain in chains], chains[0].h2d.device
    return CacheStatistics(
        tiers=tuple(_tier_statistics(chains, number) for number in range(len(chains[0].names))),
        transfers=num_transfers,
        store_queue_bytes=chains[0].limits.store_queue.num_bytes,
        bounce_free=sum(each.transient_free for each in host),
        bounce_slots=sum(chain.host.index.num_transient for chain in chains),
        requested=ledger.requested,
        missed=ledger.missed,
        store_requested=ledger.store_requested,
        stored=ledger.stored,
        present=ledger.present,
        dropped=ledger.dropped,
        missed_because=dict(ledger.missed_because),
        dropped_because=dict(ledger.dropped_because),
        num_preemptions=ledger.preemptions,
        pinned_bytes=pins.num_bytes,
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
        values = {each: values.get(each, 0) + count for each, count in counts.items()}
    tier = chains[0].tiers[number]
    health = getattr(tier, "health", None)
    if isinstance(tier, StorageTier):
        calls, budget = tier.calls, tier.budget
        values |= {
            "in_flight_bytes": budget.in_flight,
            "num_calls": calls.num_underway,
            "num_waiting": calls.num_waiting + budget.room.num_waiting,
        }
    return TierStatistics(
        tier=tier.name,
        is_bypassed=health is not None and (health.is_bypassed or health.is_shedding),
        open_breakers=health.open_breakers() if health is not None else (),
        facts=tier.describe() if isinstance(tier, StorageTier) else {},
        **values,
    )


T = TypeVar("T")
_PAST_EPOCHS: Final = 8
_LOOK_AGAIN_S: Final = 1.0
"""How often, whether slots that a tier gave up are in use."""


class OpenCache(EngineSide):
    """The state of an open cache, for the event loop's thread.

    Attributes:
        layout: What blocks are made of.
        limits: Bounds.
        emit: Takes events.
        chains: By KV group, then by rank.
        model_name: Whose blocks it keeps.
        block_sizes: Tokens in a block, by KV group.
        tokens_per_block: Tokens that each block counted stands for; 0 where KV groups differ.
        device: Where the engine's tensors are.
        callers: Who waits for something that is no transfer.
        watch: Sees what the cache does, if somebody is to be shown.
        recorder: Writes down what is asked of it, if that is wanted.
        background: What runs as long as the cache is open, besides ``tasks``.
        cleaners: Of each chain.
        ledger: What became of blocks.
        epoch: Digest of the weights that are served.
        past_epochs: Digests of weights that were served before, the last one first; a few.
        pins, swaps, subscribers, jobs: What some of the calls keep.
        closing: Ends it, and lets no call in any more; None as long as it is open.
    """

    reads_direct: ClassVar = True

    def __init__(
        self,
        parts: CacheParts,
        chains: Sequence[Chain],
        device: Device,
        tasks: Tasks,
        ledger: Ledger,
        loop_calls: LoopCalls,
        lifetime: AsyncExitStack,
    ) -> None:
        """Made by `cache.opening.open_cache` only, in the thread of the event loop."""
        super().__init__(parts.shards, tasks, loop_calls, lifetime)
        self.layout = parts.layout
        self.model_name = parts.model.name
        groups = parts.layout.groups
        self.watch = parts.watch
        self.recorder = parts.recorder
        self.block_sizes = tuple(group.block_size for group in groups)
        self.tokens_per_block = groups[0].block_size / len(parts.shards) if len(groups) == 1 else 0.0
        self.limits = parts.limits
        self.emit = parts.emit
        self.chains = chains
        self.device = device
        self.callers = Callers()
        self.background = Tasks()
        self.cleaners = {chain: Cleaner(chain) for chain in chains}
        self.ledger = ledger
        self.epoch = epoch_digest(parts.model.weights)
        self.past_epochs: list[bytes] = []
        self.pins = Pins(parts.limits.pin_quota)
        self.swaps = SwapSpaces()
        self.subscribers = Subscribers(ledger)
        self.closing: asyncio.Task[None] | None = None
        self._clock = self.loop.time
        self._resizing = asyncio.Lock()
        self._planners: WeakSet[Jobs] = WeakSet()  # what is under way keeps them
        self.jobs = self.new_jobs(len(parts.shards))
        for chain, cleaner in self.cleaners.items():
            if chain.waiting:
                self.background.keep_running(cleaner.run, "cleaner")
        for chain in chains:  # each by itself: an error in one must not keep the others from their turns
            self.background.keep_running(partial(keep_up, chain), "upkeep")
            for tier in chain.owned:
                if tier.is_scrubbed:
                    self.background.keep_running(partial(scrub_for_ever, tier), f"scrub {tier.name}")

    # Which chains a call is about, and what keys are called there.

    def of_group(self, group: int) -> Sequence[Chain]:
        """Return the chains of one KV group, one per rank."""
        if (group := as_int("a KV group's number", group)) >= len(self.layout.groups):
            raise ConfigurationError(f"KV group {group} of {len(self.layout.groups)}: the layout has no such group")
        num_shards = len(self.shards)
        return self.chains[group * num_shards : (group + 1) * num_shards]

    @override
    def of_rank(self, group: int) -> Chain:
        """Return the chain of one KV group, of the one rank that this cache is of."""
        chains = self.of_group(group)
        check_one_rank(chains)
        return chains[0]

    def batches(self, keys: BlockKeys, epoch: str | None = None) -> list[tuple[Chain, Batch]]:
        """Return, per rank, the chain of the keys' KV group, and what the keys are called there. From any thread.

        Args:
            keys: An engine's.
            epoch: The weights that computed the blocks; those served now by default.
        """
        if not isinstance(keys, BlockKeys):
            raise ConfigurationError(
                f"keys must be BlockKeys, from hash_blocks() or BlockKeys.from_hashes(), got {type(keys).__name__}"
            )
        chains = self.of_group(keys.group)
        check_keys(keys, chains[0].group)
        digest = self.epoch if epoch is None else epoch_digest(epoch)
        return [(chain, chain.naming.batch(keys, digest)) for chain in chains]

    def batch(self, keys: BlockKeys, epoch: str | None = None) -> tuple[Chain, Batch]:
        """Return the same of the one rank that this cache is of."""
        batches = self.batches(keys, epoch)
        check_one_rank(batches)
        return batches[0]

    def seat(self, shards: Sequence[Shard], epoch: bytes, past_epochs: Sequence[bytes], pins: Pins) -> "OpenCache":
        """Return this cache as one of several engines sees it: tiers, tasks and books are those of all.

        Args:
            shards: Those of the cache's that the engine stands for.
            epoch: Digest of the weights that it serves.
            past_epochs: Of those before, the last one first.
            pins: Its own.
        """
        seat = copy(self)
        seat.chains = [
            self.of_group(group)[self.shards.index(shard)]
            for group in range(len(self.layout.groups))
            for shard in shards
        ]
        seat.shards, seat.epoch, seat.past_epochs, seat.pins = tuple(shards), epoch, list(past_epochs), pins
        seat.bindings, seat.swaps = Bindings(), SwapSpaces()
        return seat

    def new_jobs(self, num_ranks: int) -> Jobs:
        """Return the jobs of one more planner, of so many ranks: they end with the cache."""
        jobs = Jobs(num_ranks, self._loop_calls, self.tasks, self.emit)
        self._planners.add(jobs)
        return jobs

    def close_jobs(self) -> None:
        """End the jobs of every planner with nothing."""
        for jobs in list(self._planners):
            jobs.close()

    # Loads and stores, once each argument was looked at: from any thread, the rest is the event loop's.

    def load_request(self, call: LoadCall) -> LoadRequest:
        """Check a load and enqueue its wait."""
        epoch = self.epoch  # before the keys are named by it: if it advances in between, the load is overtaken
        chain, batch = self.batch(call.keys)
        binding = self.bindings.find(call.into, call.keys.group)
        pages = check_pages(binding, call.keys, call.into)
        deadline = self.deadline(call.deadline_s)
        self.note("load", call.keys)
        lane = binding.h2d.take(call.after)
        return LoadRequest(
            chain, batch, binding, pages, lane, deadline, call.priority, lambda: self.epoch == epoch,
            layerwise=call.layerwise, gaps=call.gaps, order=call.order,
        )  # fmt: skip

    def store_request(self, call: StoreCall) -> StoreRequest:
        """Check a store and enqueue its wait."""
        chain, batch = self.batch(call.keys, call.epoch)
        binding = self.bindings.find(call.source, call.keys.group)
        pages = check_pages(binding, call.keys, call.source)
        lane = binding.d2h.take_own(call.after) if call.layerwise else binding.d2h.take(call.after)
        self.note("store", call.keys)
        return StoreRequest(chain, batch, binding, pages, lane, layerwise=call.layerwise, hint=call.hint)

    # What some calls do.

    @override
    def swap_space(self, group: int) -> SwapSpace:
        chain, caches = self.of_rank(group), self.bindings.caches_of(group)
        side = SwapSide(chain.h2d.device, chain.loop_calls, chain.emit, chain.limits.window_bytes)
        return self.swaps.of(group, side, caches, int(self.limits.swap_space), self.lifetime)

    @override
    def deadline(self, deadline_s: float | None) -> float:
        return self._clock() + (self.limits.load_timeout_s if deadline_s is None else deadline_s)

    def statistics(self) -> CacheStatistics:
        """Count what is where now, and what has happened since opening."""
        return cache_statistics(self.chains, self.ledger, self.pins, len(self.tasks))

    def note(self, call: Call, keys: BlockKeys) -> None:
        """Have a call recorded, if that is wanted; from any thread."""
        if self.recorder is not None:
            self.recorder.note(call, keys)

    def namespace(self, salt_id: bytes, *, group: int, rank: int) -> Namespace:
        """Return what names the blocks of a tenant, by a digest of its salt; from any thread."""
        chains = self.of_group(group)
        if not 0 <= rank < len(chains):
            raise ConfigurationError(f"rank {rank!r} of {len(chains)}: this cache has no such rank")
        return chains[rank].naming.namespace(salt_id, self.epoch)

    def namespaces(self) -> list[Namespace]:
        """Return what names the blocks of a prompt without a salt, by KV group; on the first rank."""
        return [self.namespace(NO_SALT, group=group, rank=0) for group in range(len(self.layout.groups))]

    def call_soon(self, function: Callable[[], object]) -> None:
        """Have the event loop call a function, from any thread."""
        self._loop_calls.call(function)

    def advance_epoch(self, weights: str) -> None:
        """Serve other weights from now on."""
        epoch = epoch_digest(weights)
        past = [self.epoch, *self.past_epochs]
        self.past_epochs = [each for each in past if each != epoch][:_PAST_EPOCHS]
        self.epoch = epoch
        self.subscribers.start_over()

    async def finish(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Do something to its end, also if who waits for it here is cancelled.

        Raises:
            ClosedError: The cache was closed before it was done.
        """
        task = self.tasks.spawn(work, name)
        await asyncio.wait({task})
        if task.cancelled():
            raise ClosedError(f"this TieredKV was closed before this was done: {name}")
        return task.result()

    async def settle(self) -> None:
        """Wait until every store so far is in every tier or given up, and what waits for a tier is written there.

        What comes later is not waited for, and what a tier does not take now goes on waiting. Cancellation ends the
        wait only.

        Raises:
            ClosedError: The cache was closed while a worker was copying out.
        """
        marks = {chain: chain.unwritten.mark() for chain in self.chains}
        if answers := [each for jobs in list(self._planners) for each in jobs.answers()]:
            await asyncio.wait(answers)
        if any(answer.cancelled() for answer in answers):
            raise ClosedError("this TieredKV was closed before a worker had copied out what it was to store")
        await write_all(marks, self.cleaners)

    async def resize(self, name: str, capacity_bytes: int) -> int:
        """Change the capacity of a tier; see `TieredKV.resize`."""
        names = self.chains[0].names
        if name not in names:
            raise ConfigurationError(f"no tier {name!r} here; there are {', '.join(names)}")
        num_slots = slots_within(self.chains, names.index(name), capacity_bytes)
        error = await self.finish(self._resize(name, num_slots), f"resize {name}")
        if error is not None:
            raise error
        return num_slots

    async def _resize(self, name: str, num_slots: int) -> TieredKVError | None:
        """Do it, and return the error: whoever asked may have gone, and nobody else is to hear of it."""
        async with self._resizing:
            try:
                number = self.chains[0].names.index(name)
                before, num_evicted, given_up = await resize(self.chains, self.cleaners, number, num_slots)
            except TieredKVError as error:
                return error
        if given_up is not None:
            self.background.spawn(self._give_back_later(given_up), f"give back what {name} took")
        self.emit(TierResized(name, num_slots, before, num_evicted))
        return None

    async def _give_back_later(self, given_up: GivenUp) -> None:
        """Give back what is beyond a tier's capacity, whatever that is by then, once nobody uses it."""
        while True:
            await asyncio.sleep(_LOOK_AGAIN_S)
            async with self._resizing:
                if given_up.is_idle:
                    return await given_up.give_back()
