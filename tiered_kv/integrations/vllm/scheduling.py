"""The scheduler's side of the connector: it finds prefixes, plans loads and stores, and says which blocks are held.

All methods are called by the scheduler's thread, and none waits for storage, nor for the cache's event loop, but for a
moment for plans of loads from memory.
"""

import asyncio
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tiered_kv.cache.blocking import BlockingTieredKV, open_blocking
from tiered_kv.cache.groups import GroupNeed, find_longest
from tiered_kv.cache.hinted import Hints
from tiered_kv.cache.planner import Planner
from tiered_kv.catalog.copy_budget import CopyBudget
from tiered_kv.integrations.vllm.configuration import STAGES_ARE_EQUAL, Configuration, EngineGroup
from tiered_kv.integrations.vllm.counts import Counts, hit_sources
from tiered_kv.integrations.vllm.evicting import Evicting
from tiered_kv.integrations.vllm.hinting import Hinting
from tiered_kv.integrations.vllm.messages import Hello, Load, LoadOrder, Report, Step, Tracked
from tiered_kv.integrations.vllm.naming import RequestNaming
from tiered_kv.integrations.vllm.paying import Paying
from tiered_kv.integrations.vllm.storing import PendingStores
from tiered_kv.integrations.vllm.tier_events import TierEvents
from tiered_kv.settings.registry import OWN_MEDIA
from tiered_kv.transfers.jobs import Job
from tiered_kv.values.errors import ClosedError, ConfigurationError
from tiered_kv.values.hints import evicts
from tiered_kv.values.keys import BlockKeys, Shard
from tiered_kv.values.loop_calls import LoopCalls
from tiered_kv.values.plan import JobResult, SlabHandle
from tiered_kv.values.results import BlockState
from tiered_kv.values.specs import GPULoadStoreSpec

_HIT: Final = bytes([BlockState.HIT])
_ASKING: Final = bytes([BlockState.ASKING])
_PLANNED_S: Final = 0.002
"""A step waits so long at most for the plans of loads that begin in it: those from memory take less."""
_FIRST_BYTES: Final = 64 << 20
"""A step loads so much of a rank's at most before it computes: that takes some milliseconds, computing it longer."""


class SchedulingSide:
    """The cache of all ranks, and what its scheduler asks of it."""

    def __init__(self, configuration: Configuration) -> None:
        self.counts = Counts()
        self._configuration = configuration
        self.naming = RequestNaming()
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
        self._storing: PendingStores  # likewise
        self._pool: Any = None
        self._known: object = None  # which blocks vLLM's prefix cache has
        self._evicting: Evicting | None = None
        self._hinting: Hinting | None = None
        self._paying: Paying  # likewise
        self._most_bringing = 0  # blocks that memory holds at once for requests that wait
        self._memory: list[str] = []  # tiers whose blocks are planned at once
        self._beginning: list[Job] = []  # in this step, of what these have
        self._hurrying: dict[str, Job] = {}  # planned for the requests that this step may compute
        self._patience_s, self._num_first_bytes = _PLANNED_S, _FIRST_BYTES  # what is left of them in this step

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
        """Open the cache, now that the workers have their tensors; done again when they wake up it changes nothing.

        Raises:
            ConfigurationError, BackendUnavailableError: As opening a `TieredKV` does; or the ranks do not agree.
        """
        if self._kv is not None:
            return
        wanted = self._configuration
        layouts = {hello.layout for hello in hellos}
        if len(layouts) > 1 and wanted.num_stages > 1:
            layers = [[len(group.layer_names) for group in hello.groups] for hello in hellos]
            raise ConfigurationError(
                f"ranks have {layers} layers of each KV group, or pages of different sizes: {STAGES_ARE_EQUAL}"
            )
        if len(layouts) != 1 or sorted(hello.rank for hello in hellos) != list(range(wanted.num_ranks)):
            raise ConfigurationError(
                f"{wanted.num_ranks} ranks of one layout are wanted, got {sorted(hellos, key=lambda each: each.rank)!r}"
            )
        wanted = self._configuration = replace(wanted, groups=next(iter(hellos)).groups)
        shard = Shard.every(wanted.num_ranks)
        cache = wanted.below.cache(model=wanted.model, layout=layouts.pop(), shard=shard, device="cpu")
        self._kv = self._stack.enter_context(open_blocking(cache))
        planner = self._planner = cache.planner()
        self._storing = PendingStores(
            planner, wanted, self.counts, self.naming, hear=self._hear_of_jobs, describe=self._describe
        )
        self._storing.use_pool(self._pool)
        self._loop_calls = LoopCalls(self._kv.call(asyncio.get_running_loop))
        if wanted.tells_events:
            self._events = self._kv.call(TierEvents.open, cache)
            self._stack.callback(self._kv.call, self._events.aclose)
        for hello in hellos:
            planner.register_worker(rank=hello.rank, pid=hello.pid)
        self._watch_pool()
        self._hear_hints()
        tiers = {each.tier: each.num_slots for each in self.kv.stats().tiers}
        memory = [name for name, medium in cache.media.items() if medium in OWN_MEDIA]
        num_slots = sum(tiers.get(name, 0) for name in memory)
        self._memory = memory if wanted.below.settings is not None else []  # a server's answers come later
        self._most_bringing = num_slots // 2
        self._paying = Paying(self._kv, wanted, self.counts, num_memory_slots=num_slots)

    def use_pool(self, pool: Any) -> None:
        """Take vLLM's pool of blocks, in which those that requests leave behind are held until they are copied."""
        self._pool = pool
        if self._planner is not None:
            self._storing.use_pool(pool)
            self._watch_pool()

    def _watch_pool(self) -> None:
        """Store what vLLM is about to drop, and not what it computes, if that is wanted here and can be done."""
        wanted, tiers = self._configuration, {each.tier: each for each in self.kv.stats().tiers}
        media = {name: medium for name, medium in self.kv.cache.media.items() if name in tiers}
        memory = [name for name, medium in media.items() if medium in OWN_MEDIA]
        host = next((name for name in memory if media[name] == "cpu"), None)
        is_able = wanted.loads_parts and wanted.main.hashes_per_block == 1 and host is not None
        if not (wanted.stores and is_able and hasattr(self._pool, "free_block_queue")):
            return
        # What a restart is to find is not left to vLLM alone, nor do others' hits depend on what this one has.
        is_for_more = len(tiers) > len(memory) or wanted.below.settings is None
        num_blocks = 0 if is_for_more else sum(tiers[name].num_slots for name in memory)
        when = wanted.connector.store_when
        if host is not None and evicts(when, engine_blocks=wanted.num_engine_blocks, memory_blocks=num_blocks):
            call, num_slots = self._loop_calls.call, tiers[host].num_slots
            budget = CopyBudget(engine_blocks=wanted.num_engine_blocks, memory_blocks=num_slots)
            self._evicting = Evicting(self._storing, wanted, self.counts, self.kv.cache, call, host, budget)

    def _hear_hints(self) -> None:
        """Act on KV hints, if that is wanted and there is memory to bound them by."""
        share = self._configuration.connector.hint_share
        make = partial(Hints.of, self.kv.cache, each=share, together=0.5, favoured=self.counts.favoured)
        if not share or (hints := self.kv.call(make)) is None:
            return
        groups, call = self._configuration.groups, self._loop_calls.call
        self._hinting = Hinting(hints, groups, self.counts, self.naming, call=call)
        self._stack.callback(self.kv.call, hints.aclose)

    def come(self, request: Any) -> None:
        """Take note of a request that will have its turn later."""
        if self._hinting is not None:
            self._hinting.come(request)

    def find(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded behind those that are computed; None to be asked again later.

        And whether the request is to wait for that, while others compute: else the step that it is in loads them first.
        """
        num_found = self._find(request, num_computed_tokens)
        if not num_found:
            return num_found, False
        return num_found, not self._plan_first(self._tracked[request.request_id], num_found)

    def _find(self, request: Any, num_computed_tokens: int) -> int | None:
        wanted = self._configuration
        tracked = self._tracked.setdefault(request.request_id, Tracked(request))
        first = tracked.num_here = tracked.num_stored = num_computed_tokens
        tracked.num_found = tracked.num_noted = 0
        tracked.may_store = can_name = self.naming.can_name(request)
        if not can_name or request.skip_reading_prefix_cache or not wanted.loads or not tracked.may_load:
            return 0
        most = (request.num_tokens - 1) // wanted.step * wanted.step
        if most <= first and not wanted.tail_tokens:
            self._want(tracked, first)
            return 0
        needs = [self.naming.need(group, request, first, most) for group in wanted.groups]
        num_found, may_be_more = self._longest(needs)
        if wanted.tail_tokens and not may_be_more:
            num_more, may_be_more = self._tail(request, first + num_found)
            num_found += num_more
        if self._waits(tracked, most - first - num_found if may_be_more else 0):
            return None
        if not tracked.is_counted:
            tracked.is_counted = True
            main = needs[wanted.main.number].keys
            self.kv.count_lookup(main, np.arange(len(main)) < num_found // main.block_size)
            self._want(tracked, first + num_found)
        if not num_found:
            return 0
        if (decided := tracked.is_worth) is None or decided[:2] != (first, num_found):
            needs = [self.naming.need(group, request, first, first + num_found) for group in wanted.groups]
            decided = tracked.is_worth = first, num_found, self._paying.num_worth(needs, num_found)
        if (num_found := decided[2]) and self._brings_enough(num_found):
            return None
        tracked.num_found = num_found
        return num_found

    def _waits(self, tracked: Tracked, num_more: int) -> bool:
        """Say whether a request goes on waiting for shared tiers, which may yet say that they have so many tokens."""
        now = time.monotonic()
        if num_more and tracked.patience_s is None:  # it may have been in the queue for long, and is asked for anew
            tracked.waits_since_s, tracked.patience_s = now, self._paying.lookup_patience_s(num_more)
        if not tracked.patience_s:
            return False
        waited_s = now - tracked.waits_since_s
        if num_more and waited_s < tracked.patience_s:
            return True
        self._paying.answered(min(waited_s, tracked.patience_s), is_late=bool(num_more))
        tracked.patience_s = 0.0
        return False

    def _want(self, tracked: Tracked, num_known: int) -> None:
        if tracked.is_wanted is None:
            tracked.is_wanted = self._paying.wants(tracked.request, num_known)

    def _plan_first(self, tracked: Tracked, num_found: int) -> bool:
        """Plan a load that the step itself begins with, if it is small and in memory; return whether that is done.

        Its plan is there before vLLM has chosen blocks. Where there are none vLLM asks again in the next step, and
        so on: then the request waits for its load as any other does.
        """
        wanted, request, first = self._configuration, tracked.request, tracked.num_stored
        if not (self._memory and wanted.loads_parts and tracked.may_hurry and self._patience_s > 0):
            return False
        keys = self.naming.need(wanted.main, request, first, first + num_found).needed
        num_bytes = len(keys) * wanted.main.page_bytes * len(wanted.main.layer_names)
        if num_bytes > self._num_first_bytes or not self._is_in_memory(tracked, keys, num_found):
            return False
        tracked.may_hurry = False
        job = self._open_planner().plan_load(keys)
        self._wait_planned([job])
        if job.result is not None or (plan := job.plan) is None or plan.num_blocks < len(keys):
            job.cancel(undelivered=True)
            return False
        self._hurrying[request.request_id] = job
        self._num_first_bytes -= num_bytes
        return True

    def _is_in_memory(self, tracked: Tracked, keys: BlockKeys, num_tokens: int) -> bool:
        """Take note of which tiers have the blocks, and say whether it is those whose blocks are planned at once."""
        by_tier, size = self.kv.lookup_nowait(keys).by_tier, self._configuration.main.block_size
        tracked.by_tier = {tier: num_blocks * size for tier, num_blocks in by_tier.items()}
        return sum(tracked.by_tier.get(tier, 0) for tier in self._memory) >= num_tokens

    def _wait_planned(self, jobs: list[Job]) -> None:
        """Wait for plans for what is left of this step's patience: what is late comes in the next one."""
        if jobs and self._patience_s > 0:
            began_s = time.monotonic()
            self._open_planner().wait_planned(jobs, self._patience_s)
            self._patience_s -= time.monotonic() - began_s

    def _brings_enough(self, num_found: int) -> bool:
        """Say whether so much is in memory for loads that a request more would take its room from the others."""
        num_coming, wanted = self.num_bringing, self._configuration
        num_more = -(-num_found // wanted.main.block_size) * len(wanted.groups)
        return bool(num_coming) and num_coming + num_more > self._most_bringing

    @property
    def num_bringing(self) -> int:
        """Blocks that memory holds, or is to hold, for requests that wait for them."""
        loads = {id(load): load for load in chain(self._loads.values(), self._moving.values())}
        return sum(len(ids) for load in loads.values() for _, ids in load.parts)

    def _longest(self, needs: list[GroupNeed]) -> tuple[int, bool]:
        """Return for how many tokens every group has what it needs, and whether shared tiers may yet say of more."""
        if self._configuration.loads_parts:  # as most models: asked for each request, and again and again
            states = self.kv.membership(needs[0].keys, prefix_only=True).tobytes()
            num_blocks = len(states) - len(states.lstrip(_HIT))
            return num_blocks * self._configuration.main.block_size, states[num_blocks : num_blocks + 1] == _ASKING
        is_asking = False

        def has(need: GroupNeed, *, hopes: bool) -> NDArray[np.bool_]:
            nonlocal is_asking
            states = self.kv.membership(need.keys)
            asking = states == BlockState.ASKING
            is_asking = is_asking or bool(asking.any())
            there: NDArray[np.bool_] = (states == BlockState.HIT) | (asking & hopes)
            return there

        def longest(*, hopes: bool) -> int:
            search = find_longest(needs)
            try:
                asked = next(search)
                while True:
                    asked = search.send([has(need, hopes=hopes) for need in asked])
            except StopIteration as found:
                return int(found.value)

        num_found = longest(hopes=False)
        return num_found, is_asking and longest(hopes=True) > num_found

    def _tail(self, request: Any, num_whole: int) -> tuple[int, bool]:
        """Return how many tokens of the block behind so many every group has, and whether that may yet be more.

        States are asked for first: they are at few places, and the others are asked for these alone.
        """
        wanted, size, is_asking = self._configuration, self._configuration.tail_tokens, False
        most = min(request.num_tokens - 1, num_whole + wanted.step - 1, len(request.block_hashes) * size)
        ends: Sequence[int] = range(num_whole + size, most + 1, size)
        for group in sorted(wanted.groups, key=lambda group: group.is_whole):
            states = self.kv.membership(self.naming.tails(group, request, ends))
            is_asking = is_asking or bool((states == BlockState.ASKING).any())
            ends = [end for end, state in zip(ends, states, strict=True) if state == BlockState.HIT]
        return max(ends, default=num_whole) - num_whole, is_asking

    def begin(self, request: Any, tables: Sequence[list[int]], num_external_tokens: int) -> None:
        """Plan to load what was found, now that a request has its blocks; by block table, these."""
        if not num_external_tokens:
            return
        tracked, wanted = self._tracked[request.request_id], self._configuration
        first, num_tokens = tracked.num_stored, min(tracked.num_found, num_external_tokens)
        parts, is_in_memory = [], False
        planned = self._hurrying.pop(request.request_id, None)
        for group in wanted.groups:
            keys = self.naming.need(group, request, first, first + num_tokens).needed
            if not len(keys):
                continue
            ids = tuple(tables[group.table][keys.start : keys.start + len(keys)])
            self._describe(request, group, keys[: (first + num_tokens) // group.block_size - keys.start])
            blocks = GPULoadStoreSpec(ids, group.number)
            if planned is not None:
                planned.bind(blocks)
            elif group is wanted.main:
                is_in_memory = self._is_in_memory(tracked, keys, num_tokens)
            parts.append((planned or self._open_planner().plan_load(keys, blocks), ids))
        jobs = [job for job, _ in parts]
        self._loads[request.request_id] = Load(
            tuple(parts), tracked, first, num_tokens, time.monotonic(), comes_first=planned is not None,
            not_ended={job.number for job in jobs},
        )  # fmt: skip
        self._beginning += jobs if is_in_memory else []
        tracked.num_stored = first + num_tokens

    def hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Say where what `begin` has planned to load was, in vLLM's words."""
        return hit_sources(self.kv.cache.media, self._tracked[request.request_id].by_tier, num_external_tokens)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return what has changed in the tiers since the last time, where vLLM publishes that.

        vLLM puts it behind its own. Where that is the reset of its prefix cache, routers may think that all has ended.
        """
        if self._events is None:
            return ()
        if self._pool is not None and self._pool.cached_block_hash_to_block is not self._known:
            if self._known is not None:
                self._events.tell_again()
            self._known = self._pool.cached_block_hash_to_block  # another one from each reset on
        return self._events.take()

    def next_step(self, scheduled: Any) -> Step:
        """Return what the workers are to do in the step that vLLM has scheduled."""
        step, self._step = self._step, Step()
        if self._planner is not None:
            if (slabs := self._planner.slabs()) is not self._slabs:  # a server's are others once it has restarted
                step.slabs = self._slabs = slabs
            self._wait_planned(self._beginning)
            self._hear_of_jobs()
            self._begin_step()
            self._deliver_loads(step)
            self._deliver_stores(step, scheduled)
            self._paying.step((new.req_id for new in scheduled.scheduled_new_reqs), self._tracked)
            if self._configuration.stores:
                self._gather(scheduled)
                if self._evicting is not None:
                    self._evicting.step(self._pool, _num_taken(scheduled), self._paying.copy_cost)
                self._storing.plan_if_due(is_idle=not scheduled.num_scheduled_tokens)
            if self._hinting is not None:
                self._hinting.step(self._storing)
        return step

    def take(self, report: Report, freed: AbstractSet[str] = frozenset()) -> None:
        """Take what ended on the workers, and whose blocks vLLM has back since."""
        for outcomes in report.outcomes:
            load = self._moving.get(outcomes.job)
            if load is not None and outcomes.num_moved < load.num_blocks_of(outcomes.job):
                load.fall_short()
            self.counts.copied(outcomes.error)
            self._open_planner().complete(self._storing.take(outcomes))
        if freed:
            self._storing.freed(freed)

    @property
    def frees_soon(self) -> bool:
        """Whether blocks of requests that have ended will be vLLM's again in a few steps."""
        return self._planner is not None and self._storing.frees_soon

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks of vLLM's are held that no request may have any more, until a step to come."""
        return self._planner is not None and self._storing.holds_blocks

    def end(self, request: Any) -> bool:
        """Take note that a request has ended; return whether vLLM has to keep its blocks until the workers say so."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            self._paying.end(request.request_id)
        is_kept = tracked is not None and self._planner is not None and self._storing.end(tracked)
        if self._hinting is not None:
            self._hinting.end(tracked, request)
            self._hinting.step(self._storing)
        return is_kept

    def forget(self) -> None:
        """Serve nothing of what is stored: other weights are loaded, and nobody says which.

        Requests that go on have begun with the old ones: what they fill from now on is nobody's.
        """
        if self._kv is not None:
            self._storing.forget()
            if self._evicting is not None:
                self._evicting.forget()
            if self._hinting is not None:
                self._hinting.forget()
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
            if (load := self._moving.pop(job.number, None)) is not None:
                self._count_loaded(load, job, job.result)
            if job.direction == "store":
                self._paying.stored(job.result.num_blocks)
                self._paying.copied(job.result.num_blocks, job.result.moved_s)
            self._storing.ended(job)
        return bool(jobs)

    def _begin_step(self) -> None:
        """Let go of what was planned for this step and has no blocks of vLLM's, and forget what the step has taken."""
        for job in self._hurrying.values():
            job.cancel(undelivered=True)
        self._hurrying, self._beginning = {}, []
        self._patience_s, self._num_first_bytes = _PLANNED_S, _FIRST_BYTES

    def _count_loaded(self, load: Load, job: Job, result: JobResult) -> None:
        """Count a part of a load that has ended: tokens with the last one, as they need all parts."""
        load.not_ended.discard(job.number)
        num_tokens = 0
        if self._configuration.loads_parts:
            num_tokens = result.num_blocks * self._configuration.main.block_size
        elif not load.not_ended and not load.is_short:
            num_tokens = load.num_tokens
        self.counts.load_ended(num_tokens, result.by_tier)

    def _deliver_loads(self, step: Step) -> None:
        now = time.monotonic()
        for name, load in list(self._loads.items()):
            jobs, waited_s = [job for job, _ in load.parts], now - load.begun_s
            is_late = waited_s > self._paying.patience_s(load.num_tokens)
            if is_late and not load.is_given_up and any(job.plan is None for job in jobs):
                load.is_given_up = True
                for job in jobs:
                    job.cancel(undelivered=True)
            if any(job.plan is None or (load.is_given_up and job.result is None) for job in jobs):
                continue  # what was given up comes back with nothing, soon; a plan that came before that is void
            del self._loads[name]
            held = [0 if job.result is not None or job.plan is None else job.plan.num_blocks for job in jobs]
            wanted = [len(ids) for _, ids in load.parts]
            if (
                held != wanted and not self._configuration.loads_parts
            ):  # a window without its prefix is of no use, nor the other way round
                held = [0 for _ in jobs]
            parts = []
            for (job, ids), num_blocks in zip(load.parts, held, strict=True):
                parts.append((ids, job.plan if num_blocks else None))
                if num_blocks:
                    self._moving[job.number] = load
                else:
                    job.cancel(undelivered=True)  # a server may hold slots for its plan yet
            step.loads.append(LoadOrder(name, tuple(parts), load.comes_first))
            if held != wanted:
                load.fall_short()
            self.counts.load(sum(wanted), sum(held), waited_s)

    def _deliver_stores(self, step: Step, scheduled: Any) -> None:
        self._storing.deliver(step, scheduled)
        for name in step.preempted:
            if (tracked := self._tracked.get(name)) is not None:
                tracked.patience_s = None
                self._paying.give_up(name)
                self._storing.give_up(tracked)

    def _gather(self, scheduled: Any) -> None:
        """Have blocks stored that are full after the step, of tokens that are known.

        So are those that vLLM's own cache had, and the tiers have lost. States are handed over by vLLM.
        """
        wanted, blocks = self._configuration, scheduled.kv_connector_block_state
        hash_size = wanted.groups[0].block_size // wanted.groups[0].hashes_per_block
        finest = wanted.finest
        for name, num_tokens in scheduled.num_scheduled_tokens.items():
            if (tracked := self._tracked.get(name)) is None:
                continue
            num_known, done = tracked.request.num_computed_tokens + num_tokens, tracked.num_stored
            if self._evicting is not None:
                done = min(done, tracked.num_noted)
            if num_known >= done - done % finest + finest or tracked.num_here:  # else no block more is full
                self._gather_of(tracked, min(num_known, len(tracked.request.block_hashes) * hash_size), blocks)
        if any(group.is_handed_over for group in wanted.groups):
            offered = blocks.boundary_state_offloads
            computed = {name: offered[name] for name in offered if name in scheduled.num_scheduled_tokens}
            # Of others no step fills the blocks: they may be another's by now.
            self._gather_states(computed, blocks, hash_size)
        if all(group.is_whole for group in wanted.groups):
            return
        for name, num_tokens in scheduled.num_scheduled_tokens.items():
            if (tracked := self._tracked.get(name)) is not None and tracked.leaving:
                self._storing.hold(tracked, tracked.request.num_computed_tokens + num_tokens)

    def _gather_of(self, tracked: Tracked, num_known: int, tables: Any) -> None:
        """Have those of a request stored that are full with so many of its first tokens, by vLLM's block tables."""
        request, may_store = tracked.request, tracked.may_store and tracked.is_wanted is not False
        num_here, tracked.num_here = min(tracked.num_here, request.num_computed_tokens), 0
        before, tracked.num_stored = tracked.num_stored, max(tracked.num_stored, num_known)
        for group in self._configuration.groups:
            size = group.block_size
            first, stop = before // size, num_known // size
            if self._evicting is not None and stop * size > tracked.num_noted:
                noted, tracked.num_noted = tracked.num_noted // size, stop * size
                if may_store:
                    table = tables.get_block_ids(request.request_id)[group.table]
                    self._evicting.note(self.naming.keys(group, request, noted, stop), table[noted:stop])
            if not num_here and (stop <= first or not may_store):  # then there is nothing to compute
                continue
            here = self._use(request, group, num_here) if num_here else range(0)
            if not may_store or group.is_handed_over or self._evicting is not None:
                continue
            table = tables.get_block_ids(request.request_id)[group.table]
            self._storing.gather(tracked, group, here.start, table[here.start : here.stop])
            self._storing.gather(tracked, group, first, table[first:stop])

    def _gather_states(
        self, handed_over: Mapping[str, Iterable[tuple[int, int, int]]], tables: Any, hash_size: int
    ) -> None:
        """Have the states stored that vLLM hands over: which request's, which table, which block, at which token.

        With a state inside of a block goes what attention has of that block: the request's own, which it goes on to
        fill.
        """
        groups = {group.table: group for group in self._configuration.groups if group.is_handed_over}
        others = [group for group in self._configuration.groups if not group.is_handed_over]
        for name, states in handed_over.items():
            tracked = self._tracked.get(name)
            if tracked is None or not tracked.may_store or tracked.is_wanted is False:
                continue
            ends = set()
            for table, block, at in states:
                group, num_known = groups[table], len(tracked.request.block_hashes) * hash_size
                if at % group.block_size == 0 and at <= num_known:
                    self._storing.gather(tracked, group, at // group.block_size - 1, [block])
                elif self._configuration.tail_tokens and at <= num_known:
                    self._storing.gather(tracked, group, at // group.block_size, [block], end=at)
                    ends.add(at)
            for at in ends:
                for group in others:
                    number = at // group.block_size
                    block = tables.get_block_ids(name)[group.table][number]
                    self._storing.gather(tracked, group, number, [block], end=at)

    def _use(self, request: Any, group: EngineGroup, num_tokens: int) -> range:
        """Have the tiers know that vLLM's own cache has served these; return which blocks they lack from where on.

        What they have is not stored anew: a store holds its blocks until vLLM's next step, and vLLM resets no cache
        meanwhile.
        """
        keys = self.naming.need(group, request, 0, num_tokens).needed
        if not keys:
            return range(0)
        self._describe(request, group, keys)
        num_kept = int(np.argmin(np.append(self.kv.membership(keys) == BlockState.HIT, [False])))
        self._loop_calls.call(self.kv.cache.touch, keys[:num_kept])  # a step waits for no event loop
        return range(keys.start + num_kept, keys.start + len(keys))

    def _describe(self, request: Any, group: EngineGroup, keys: BlockKeys) -> None:
        """Say what blocks are, to routers."""
        if self._events is not None and len(keys):
            each = group.hashes_per_block
            self._events.describe(request, keys, request.block_hashes[each - 1 :: each])

    def _open_planner(self) -> Planner:
        if self._planner is None:
            raise ConfigurationError("no cache is open")
        return self._planner


def _num_taken(scheduled: Any) -> int:
    """Count the blocks that vLLM has given to requests for a step, from its pool's free queue or other requests'."""
    new = [each.block_ids for each in scheduled.scheduled_new_reqs]
    more = [ids for ids in scheduled.scheduled_cached_reqs.new_block_ids if ids]
    return sum(len(ids[0]) for ids in (*new, *more))
