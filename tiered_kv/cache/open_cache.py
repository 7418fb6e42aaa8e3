"""A cache while it is open: its chains, its tasks, and what all who use it share.

`tiered_kv.cache.opening` makes it, complete; `tiered_kv.cache.closing` ends it. What one engine sees of it, and has of
its own, is a `Seat`.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakSet

from anyio import CancelScope

from tiered_kv.cache.parts import CacheParts
from tiered_kv.memory.device import Device
from tiered_kv.telemetry.trace_recorder import Call
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.changes import Subscribers
from tiered_kv.tiers.fates import Fates
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.tiers.upkeep import keep_up, scrub_for_ever
from tiered_kv.transfers.jobs import Jobs
from tiered_kv.transfers.resize import GivenUp, check_capacity_of, resize
from tiered_kv.transfers.writedown import Cleaner, write_all
from tiered_kv.values.errors import ClosedError, ConfigurationError, TieredKVError
from tiered_kv.values.events import TierResized
from tiered_kv.values.keys import StoredKeys
from tiered_kv.values.loop_calls import LoopCalls

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


T = TypeVar("T")
_LOOK_AGAIN_S: Final = 1.0
"""How often, whether slots that a tier gave up are in use."""


class OpenCache:
    """An open cache, with all that the engines at it share. For the event loop's thread.

    Attributes:
        layout: What blocks are made of.
        shards: Whose parts of the blocks it has: one rank's, or all.
        limits: Bounds.
        emit: Takes events.
        chains: By KV group, then by rank.
        model_name: Whose blocks it keeps.
        device: Where the engine's tensors are.
        tasks: Everything under way.
        loop: The event loop.
        loop_calls: What calls into it from other threads.
        lifetime: Closes what belongs to it.
        callers: Who waits for something that is no transfer.
        watch: Sees what the cache does, if somebody is to be shown.
        recorder: Writes down what is asked of it, if that is wanted.
        background: What runs as long as the cache is open, besides ``tasks``.
        cleaners: Of each chain.
        fates: What became of blocks.
        subscribers: Who follows what changes in the tiers.
        jobs: Those of the planner in this process.
        explaining: Held for a turn of the loop by whoever explains a few blocks.
        closing: Ends it, and lets no call in any more; None as long as it is open.
    """

    def __init__(
        self,
        parts: CacheParts,
        chains: Sequence[Chain],
        device: Device,
        tasks: Tasks,
        fates: Fates,
        loop_calls: LoopCalls,
        lifetime: AsyncExitStack,
    ) -> None:
        """Made by `cache.opening.open_cache` only, in the thread of the event loop."""
        self.layout = parts.layout
        self.shards = parts.shards
        self.model_name = parts.model.name
        self.watch = parts.watch
        self.recorder = parts.recorder
        self.limits = parts.limits
        self.emit = parts.emit
        self.chains = chains
        self.device = device
        self.tasks = tasks
        self.loop = asyncio.get_running_loop()
        self.loop_calls = loop_calls
        self.lifetime = lifetime
        self.callers = Callers()
        self.background = Tasks()
        self.cleaners = {chain: Cleaner(chain) for chain in chains}
        self.fates = fates
        self.subscribers = Subscribers(fates)
        self.closing: asyncio.Task[None] | None = None
        self.explaining = asyncio.Lock()
        self._resizing = asyncio.Lock()
        self._planners: WeakSet[Jobs] = WeakSet()  # what is under way keeps them
        self.jobs = self.new_jobs(parts.num_workers)
        for chain, cleaner in self.cleaners.items():
            if chain.waiting:
                self.background.keep_running(cleaner.run, "cleaner")
        for chain in chains:  # each by itself: an error in one must not keep the others from their turns
            self.background.keep_running(partial(keep_up, chain), "upkeep")
            for tier in chain.owned:
                if tier.is_scrubbed:
                    self.background.keep_running(partial(scrub_for_ever, tier, self.background), f"scrub {tier.name}")

    def of_group(self, group: int) -> Sequence[Chain]:
        """Return the chains of one KV group that there is, one per rank."""
        num_shards = len(self.shards)
        return self.chains[group * num_shards : (group + 1) * num_shards]

    def new_jobs(self, num_ranks: int) -> Jobs:
        """Return the jobs of one more planner, of so many ranks' workers: they end with the cache."""
        jobs = Jobs(num_ranks, self.loop_calls, self.tasks, self.emit)
        self._planners.add(jobs)
        return jobs

    def close_jobs(self) -> None:
        """End the jobs of every planner with nothing."""
        for jobs in list(self._planners):
            jobs.close()

    def note(self, call: Call, keys: StoredKeys) -> None:
        """Have a call recorded, if that is wanted; from any thread."""
        if self.recorder is not None:
            for run in keys.runs:
                self.recorder.note(call, run)

    async def finish(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Run a coroutine to its end, even if the caller that waits for it here is cancelled.

        Raises:
            ClosedError: The cache was closed before it was done.
        """
        task = self.tasks.spawn(work, name)
        await asyncio.wait({task})
        if task.cancelled():
            raise ClosedError(f"this TieredKV was closed before this was done: {name}")
        return task.result()

    async def settle(self) -> bool:
        """Wait until every store so far is in every tier or given up, and what waits for a tier is written there.

        What comes later is not waited for, and what a tier does not take now goes on waiting. Cancellation ends the
        wait only.

        Returns:
            Whether nothing that came before goes on waiting, and no write of what waited has failed meanwhile.

        Raises:
            ClosedError: The cache was closed while a worker was copying out.
        """
        marks = {chain: chain.unwritten.mark() for chain in self.chains}
        num_failed = [chain.unwritten.num_failed for chain in self.chains]
        answers = [each for jobs in list(self._planners) for each in jobs.answers()]
        await write_all(marks, self.cleaners)  # first what is here: a worker may answer too late, or never
        if answers:
            await asyncio.wait(answers)
            if any(answer.cancelled() for answer in answers):
                raise ClosedError("this TieredKV was closed before a worker had copied out what it was to store")
            await write_all(marks, self.cleaners)
        is_written = all(chain.unwritten.is_written(mark) for chain, mark in marks.items())
        return is_written and num_failed == [chain.unwritten.num_failed for chain in self.chains]

    def blocks_within(self, name: str, capacity_bytes: int) -> int:
        """Say how many blocks of prompts a tier would hold within a capacity; raises what `resize` would."""
        names = self.chains[0].names
        if name not in names:
            raise ConfigurationError(f"no tier {name!r} here; there are {', '.join(names)}")
        return check_capacity_of(self.chains, names.index(name), capacity_bytes)

    def part_used(self, name: str) -> float:
        """Return how much of a tier holds blocks, 0 to 1: of the KV group that has least to spare."""
        books = [each.index.statistics() for chain in self.chains for each in chain.booked if each.name == name]
        return max(((each.ready + each.pending) / max(1, each.num_slots) for each in books), default=0.0)

    async def resize(self, name: str, capacity_bytes: int) -> int:
        """Change the capacity of a tier; see `TieredKV.resize`."""
        num_blocks = self.blocks_within(name, capacity_bytes)
        error = await self.finish(self._resize(name, num_blocks), f"resize {name}")
        if error is not None:
            raise error
        return num_blocks

    async def _resize(self, name: str, num_blocks: int) -> TieredKVError | None:
        """Resize a tier, and return the error: whoever asked may have gone, and nobody else is to hear of it."""
        async with self._resizing:
            try:
                number = self.chains[0].names.index(name)
                before, num_evicted, given_up = await resize(self.chains, self.cleaners, number, num_blocks)
            except TieredKVError as error:
                return error
        if given_up is not None:
            self.background.spawn(self._give_back_later(given_up), f"give back what {name} took")
        self.emit(TierResized(name, num_blocks, before, num_evicted))
        return None

    def keep_memory(self) -> Callable[[], None]:
        """Give no host memory back until what this returns is called, once: see `HostSlab.keep`. Any thread may call.

        What is returned is for the event loop's thread; what is beyond the capacity by then is given back.
        """
        slabs = [chain.host.slab for chain in self.chains]
        for slab in slabs:
            slab.keep()

        def keep_no_more() -> None:
            for slab in slabs:
                slab.keep_no_more()
            if self.closing is None and not any(slab.is_kept for slab in slabs):
                given_up = GivenUp(self.chains, [chain.host for chain in self.chains])
                self.background.spawn(self._give_back_later(given_up), "give back host memory")

        return keep_no_more

    async def _give_back_later(self, given_up: GivenUp) -> None:
        """Give back what is beyond a tier's capacity, whatever that is by then, once nobody uses it."""
        while True:
            await asyncio.sleep(_LOOK_AGAIN_S)
            async with self._resizing:
                if given_up.is_idle:
                    return await given_up.give_back()
