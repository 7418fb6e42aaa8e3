"""The scheduler's side of the connector: it finds prefixes, plans loads and stores, and says which blocks are held.

All methods are called by the scheduler's thread, and none waits: not for storage, nor for the cache's event loop.
"""

import asyncio
import time
import uuid
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tiered_kv.cache.blocking import BlockingTieredKV, open_blocking
from tiered_kv.cache.planner import Planner
from tiered_kv.integrations.vllm.configuration import Configuration
from tiered_kv.integrations.vllm.events import TierEvents
from tiered_kv.integrations.vllm.messages import Hello, Load, LoadOrder, Report, Step, Tracked
from tiered_kv.integrations.vllm.metrics import Counts, hit_sources
from tiered_kv.integrations.vllm.storing import Storing
from tiered_kv.values.errors import ClosedError, ConfigurationError
from tiered_kv.values.keys import BlockKeys, Shard
from tiered_kv.values.loop_calls import LoopCalls
from tiered_kv.values.plan import SlabHandle
from tiered_kv.values.results import BlockState
from tiered_kv.values.specs import GPULoadStoreSpec


class SchedulingSide:
    """The cache of all ranks, and what its scheduler asks of it."""

    def __init__(self, configuration: Configuration) -> None:
        self.counts = Counts()
        self._configuration = configuration
        self._stack = ExitStack()
        self._kv: BlockingTieredKV | None = None
        self._planner: Planner | None = None
        self._loop_calls: LoopCalls  # once it is open
        self._events: TierEvents | None = None
        self._slabs: tuple[SlabHandle, ...] | None = None
        self._step = Step()
        self._tracked: dict[str, Tracked] = {}
        self._loads: dict[str, Load] = {}
        self._moving: dict[int, Load] = {}
        self._storing: Storing  # likewise

    @property
    def kv(self) -> BlockingTieredKV:
        """The open cache.

        Raises:
            ConfigurationError: It is not open yet, or not any more.
        """
        if self._kv is None:
            raise ConfigurationError("the workers of this vLLM have not said what tensors they have: no cache is open")
        return self._kv

    def open(self, hellos: Collection[Hello]) -> None:
        """Open the cache, now that the workers have their tensors.

        Raises:
            ConfigurationError, BackendUnavailableError: As opening a `TieredKV` does; or the ranks do not agree.
        """
        wanted = self._configuration
        layouts = {hello.layout for hello in hellos}
        if len(layouts) != 1 or sorted(hello.rank for hello in hellos) != list(range(wanted.num_ranks)):
            raise ConfigurationError(
                f"{wanted.num_ranks} ranks of one layout are wanted, got {sorted(hellos, key=lambda each: each.rank)!r}"
            )
        shard = Shard.every(wanted.num_ranks)
        cache = wanted.below.cache(model=wanted.model, layout=layouts.pop(), shard=shard, device="cpu")
        self._kv = self._stack.enter_context(open_blocking(cache))
        planner = self._planner = cache.planner()
        self._storing = Storing(planner, wanted, self.counts, hear=self._hear_of_jobs, describe=self._describe)
        self._loop_calls = LoopCalls(self._kv.call(asyncio.get_running_loop))
        if wanted.tells_events:
            self._events = self._kv.call(TierEvents.open, cache)
            self._stack.callback(self._kv.call, self._events.aclose)
        for hello in hellos:
            planner.register_worker(rank=hello.rank, pid=hello.pid)

    def find(self, request: Any, num_computed_tokens: int) -> int | None:
        """Return how many tokens can be loaded behind those that are computed; None to be asked again later."""
        wanted = self._configuration
        tracked = self._tracked.setdefault(request.request_id, Tracked(request))
        first = tracked.num_here = tracked.num_stored = num_computed_tokens // wanted.block_size
        tracked.num_found = 0
        tracked.may_store = True
        if request.skip_reading_prefix_cache or not wanted.loads or not tracked.may_load:
            return 0
        keys = self._configuration.keys(request, first, (request.num_tokens - 1) // wanted.block_size)
        if not keys:
            return 0
        now = time.monotonic()
        if tracked.first_asked_s is None:
            tracked.first_asked_s = now
        states = self.kv.membership(keys)
        num_hits = int(np.argmin(np.append(states == BlockState.HIT, [False])))
        is_asking = num_hits < len(keys) and states[num_hits] == BlockState.ASKING
        if is_asking and now - tracked.first_asked_s < wanted.connector.lookup_timeout_s:
            return None
        if not tracked.is_counted:
            tracked.is_counted = True
            self.kv.count_lookup(keys, np.arange(len(keys)) < num_hits)
        tracked.num_found = num_hits
        return num_hits * wanted.block_size

    def begin(self, request: Any, block_ids: list[int], num_external_tokens: int) -> None:
        """Plan to load what was found, now that a request has its blocks."""
        if not num_external_tokens:
            return
        tracked = self._tracked[request.request_id]
        first = tracked.num_stored
        stop = first + min(tracked.num_found, num_external_tokens // self._configuration.block_size)
        ids, keys = tuple(block_ids[first:stop]), self._configuration.keys(request, first, stop)
        self._describe(request, keys)
        by_tier = self.kv.lookup_nowait(keys).by_tier
        tracked.by_tier = {tier: n * self._configuration.block_size for tier, n in by_tier.items()}
        job = self._open_planner().plan_load(keys, GPULoadStoreSpec(ids))
        self._loads[request.request_id] = Load(job, tracked, first, ids, time.monotonic())
        tracked.num_stored = stop

    def hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Say where what `begin` has planned to load was, in vLLM's words."""
        return hit_sources(self.kv.cache.media, self._tracked[request.request_id].by_tier, num_external_tokens)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return what has changed in the tiers since the last time, where vLLM publishes that."""
        return self._events.take() if self._events is not None else ()

    def next_step(self, scheduled: Any) -> Step:
        """Return what the workers are to do in the step that vLLM has scheduled."""
        step, self._step = self._step, Step()
        if self._planner is not None:
            if (slabs := self._planner.slabs()) is not self._slabs:  # a server's are others once it has restarted
                step.slabs = self._slabs = slabs
            self._hear_of_jobs()
            self._deliver_loads(step)
            self._deliver_stores(step, set(scheduled.preempted_req_ids or ()))
            if self._configuration.stores:
                self._gather(scheduled)
                self._storing.plan_if_due(is_idle=not scheduled.num_scheduled_tokens)
        return step

    def take(self, report: Report, freed: AbstractSet[str] = frozenset()) -> None:
        """Take what ended on the workers, and whose blocks vLLM has back since."""
        for outcomes in report.outcomes:
            load = self._moving.get(outcomes.job)
            if load is not None and outcomes.num_moved < len(load.block_ids):
                load.fall_short()
            self.counts.copied(outcomes.error)
            self._storing.take(outcomes)
            self._open_planner().complete(outcomes)
        if freed:
            self._storing.freed(freed)

    @property
    def frees_soon(self) -> bool:
        """Whether blocks of requests that have ended will be vLLM's again in a few steps."""
        return self._planner is not None and self._storing.frees_soon

    def end(self, request: Any) -> bool:
        """Take note that a request has ended; return whether vLLM has to keep its blocks until the workers say so."""
        tracked = self._tracked.pop(request.request_id, None)
        return tracked is not None and self._planner is not None and self._storing.end(tracked)

    def forget(self) -> None:
        """Serve nothing of what is stored: other weights are loaded, and nobody says which.

        Requests that go on have begun with the old ones: what they fill from now on is nobody's.
        """
        if self._kv is not None:
            self._storing.forget()
            for tracked in self._tracked.values():
                tracked.may_store = False
            self._kv.advance_epoch(f"{self._configuration.model.weights}, changed: {uuid.uuid4()}")

    def close(self) -> None:
        """Write what has been stored, within a time, and end. Nothing depends on it: an engine may be killed."""
        kv, self._kv, self._planner = self._kv, None, None
        with suppress(ClosedError):  # the program has ended, and the cache with it
            if kv is not None:
                kv.drain()
        with suppress(ClosedError):
            self._stack.close()

    def _hear_of_jobs(self, timeout_s: float = 0.0) -> bool:
        """Take the news of jobs; say whether there was any."""
        jobs = self._open_planner().poll(timeout_s)
        for job in jobs:
            if job.result is None:
                continue
            self._moving.pop(job.number, None)
            if job.plan is not None and job.plan.direction == "load":
                self.counts.load_ended(job.result.num_blocks * self._configuration.block_size, job.result.by_tier)
            self._storing.ended(job)
        return bool(jobs)

    def _deliver_loads(self, step: Step) -> None:
        now = time.monotonic()
        for name, load in list(self._loads.items()):
            plan, waited_s = load.job.plan, now - load.begun_s
            if plan is None and waited_s > self._configuration.connector.load_timeout_s and not load.is_given_up:
                load.is_given_up = True
                load.job.cancel()
            if plan is None or (load.is_given_up and load.job.result is None):
                continue  # what was given up comes back with nothing, soon; a plan that came before that is void
            del self._loads[name]
            num_blocks = 0 if load.job.result is not None else plan.num_blocks
            step.loads.append(LoadOrder(name, load.block_ids, plan if num_blocks else None))
            if num_blocks:
                self._moving[plan.job] = load
            else:
                load.job.cancel(undelivered=True)  # a server may hold slots for its plan yet
            if num_blocks < len(load.block_ids):
                load.fall_short()
            self.counts.load(len(load.block_ids), num_blocks, waited_s)

    def _deliver_stores(self, step: Step, preempted: AbstractSet[str]) -> None:
        self._storing.deliver(step, preempted)
        for name in preempted:
            if (tracked := self._tracked.get(name)) is not None:
                tracked.first_asked_s = None
                self._storing.give_up(tracked)

    def _gather(self, scheduled: Any) -> None:
        """Have blocks stored that are full after the step, of tokens that are known.

        So are those that vLLM's own cache had, and the tiers have lost.
        """
        size, each = self._configuration.block_size, self._configuration.hashes_per_block
        for name, num_tokens in scheduled.num_scheduled_tokens.items():
            if (tracked := self._tracked.get(name)) is None:
                continue
            request = tracked.request
            num_here, tracked.num_here = min(tracked.num_here, request.num_computed_tokens // size), 0
            num_full = min((request.num_computed_tokens + num_tokens) // size, len(request.block_hashes) // each)
            if num_here or (num_full > tracked.num_stored and tracked.may_store):  # else there is nothing to compute
                first = self._use(request, num_here) if num_here else 0
                block_ids = scheduled.kv_connector_block_state.get_block_ids(name)[0]
                if tracked.may_store:
                    self._storing.gather(tracked, first, block_ids[first:num_here])
                    self._storing.gather(tracked, tracked.num_stored, block_ids[tracked.num_stored : num_full])
                    tracked.num_stored = max(tracked.num_stored, num_full)

    def _use(self, request: Any, num_blocks: int) -> int:
        """Have the tiers know that vLLM's own cache has served these; return how many of the first they have.

        They are not stored anew: a store holds its blocks until vLLM's next step, and vLLM resets no cache meanwhile.
        """
        if not (keys := self._configuration.keys(request, 0, num_blocks)):
            return 0
        self._describe(request, keys)
        num_kept = int(np.argmin(np.append(self.kv.membership(keys) == BlockState.HIT, [False])))
        self._loop_calls.call(self.kv.cache.touch, keys[:num_kept])  # a step waits for no event loop
        return num_kept

    def _describe(self, request: Any, keys: BlockKeys) -> None:
        """Say what blocks are, to routers."""
        if self._events is not None and len(keys):
            each = self._configuration.hashes_per_block
            self._events.describe(request, keys, request.block_hashes[each - 1 :: each])

    def _open_planner(self) -> Planner:
        if self._planner is None:
            raise ConfigurationError("no cache is open")
        return self._planner
