"""The scheduler's side of the connector: it finds prefixes, plans loads and stores, and says which blocks are held.

All methods are called by the scheduler's thread, and none waits for storage, nor for the cache's event loop, but for a
moment for plans of loads from memory.
"""

import asyncio
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tiered_kv.cache.block_cache import BlockCache
from tiered_kv.cache.blocking import BlockingTieredKV, open_blocking
from tiered_kv.cache.hinted import Hints
from tiered_kv.cache.planner import Planner
from tiered_kv.catalog.copy_budget import CopyBudget
from tiered_kv.integrations.vllm.configuration import STAGES_ARE_EQUAL, Configuration, EngineGroup
from tiered_kv.integrations.vllm.counts import Counts, hit_sources
from tiered_kv.integrations.vllm.evicting import Evicting
from tiered_kv.integrations.vllm.hinting import Hinting
from tiered_kv.integrations.vllm.loading import PendingLoads, num_hits
from tiered_kv.integrations.vllm.messages import Hello, Report, Step, Tracked
from tiered_kv.integrations.vllm.naming import RequestNaming
from tiered_kv.integrations.vllm.paying import Paying
from tiered_kv.integrations.vllm.storing import PendingStores
from tiered_kv.integrations.vllm.tier_events import TierEvents
from tiered_kv.integrations.vllm.waiting_room import WaitingRoom
from tiered_kv.settings.registry import OWN_MEDIA
from tiered_kv.values.errors import ClosedError, ConfigurationError
from tiered_kv.values.hints import evicts
from tiered_kv.values.keys import BlockKeys, Shard
from tiered_kv.values.layout import KVLayout
from tiered_kv.values.log import Seldom
from tiered_kv.values.loop_calls import LoopCalls
from tiered_kv.values.plan import SlabHandle

_MOST_USED: Final = 4
"""Requests that wait for the tiers to hear that they are used. The first of several costs as much as the other three:
a step leaves nothing of this code in a processor's caches."""


class SchedulingSide:
    """The connector's scheduler side: it has the cache of all ranks, and plans loads and stores."""

    def __init__(self, configuration: Configuration) -> None:
        self.counts = Counts()
        self._configuration = configuration
        self.naming = RequestNaming()
        self._stack = ExitStack()
        self._kv: BlockingTieredKV | None = None
        self._planner: Planner | None = None
        self._loop_calls: LoopCalls  # once it is open
        self._events: TierEvents | None = None
        self._seldom = Seldom()
        self._slabs: tuple[SlabHandle, ...] | None = None
        self._step = Step()
        self._coming: dict[str, Tracked] = {}  # those that have not had their turn
        self._tracked: dict[str, Tracked] = {}
        self._used: dict[str, Tracked] = {}  # those of which the tiers do not know what vLLM's own cache had
        self._loads: PendingLoads  # once it is open
        self._storing: PendingStores  # likewise
        self._lacks_blocks = False  # whether vLLM has had none for a request that was told what is there
        self._pool: Any = None
        self._room = WaitingRoom(configuration.tables)
        self._known: object = None  # which blocks vLLM's prefix cache has
        self._evicting: Evicting | None = None
        self._hinting: Hinting | None = None
        self._paying: Paying  # likewise

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
            ConfigurationError, BackendUnavailableError: As opening a `TieredKV` does; or the ranks do not agree. Then
                nothing is open, and it may be tried again.
        """
        if self._kv is not None:
            return
        try:
            self._open(hellos)
        except BaseException:
            self._kv = self._planner = self._events = self._evicting = self._hinting = None
            self._stack.close()
            raise

    def _open(self, hellos: Collection[Hello]) -> None:
        wanted = self._configuration
        if others := sorted({type(hello).__name__ for hello in hellos if not isinstance(hello, Hello)}):
            raise ConfigurationError(
                f"the workers of this vLLM have said {', '.join(others)} of another connector: MultiConnector hands on "
                "what one of its connectors has to say, so that no two that have something can be in it"
            )
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
        shard = Shard.every(wanted.num_parts, copies=wanted.num_ranks // wanted.num_parts)
        layout = layouts.pop()
        cache = wanted.below.cache(model=wanted.model, layout=layout, shard=shard, device="cpu")
        self._kv = self._stack.enter_context(open_blocking(cache))
        planner = self._planner = cache.planner()
        self._storing = PendingStores(
            planner, wanted, self.counts, self.naming, hear=self._hear_of_jobs, describe=self._describe
        )
        self._storing.use_pool(self._pool)
        self._loop_calls = LoopCalls(self._kv.call(asyncio.get_running_loop))
        if wanted.tells_events:
            self._events = self._kv.call(TierEvents, cache)
            self._stack.callback(self._kv.call, self._events.aclose)
        for hello in hellos:
            planner.register_worker(rank=hello.rank, pid=hello.pid)
        self._watch_pool()
        self._hear_hints(layout)
        memory = self._memory()
        self._paying = Paying(self._kv, wanted, self.counts, num_memory_blocks=sum(memory.values()))
        parts = wanted, self.counts, self.naming, self._paying, self._room
        self._loads = PendingLoads(self._kv, planner, *parts, memory=memory, describe=self._describe)

    def _memory(self) -> dict[str, int]:
        """Return what the cache's own memory tiers hold, by name; nothing where a host's server is away."""
        tiers = self._blocks_by_tier()
        return {name: tiers.get(name, 0) for name, medium in self.kv.cache.media.items() if medium in OWN_MEDIA}

    def _blocks_by_tier(self) -> dict[str, int]:
        """Return how many blocks of vLLM's each tier holds: each takes a slot for every part."""
        return {each.tier: each.num_slots // self._configuration.num_parts for each in self.kv.stats().tiers}

    def use_pool(self, pool: Any) -> None:
        """Take vLLM's pool of blocks, in which those that requests leave behind are held until they are copied."""
        self._pool = pool
        if not self._configuration.loads_parts:  # of full attention vLLM reserves what is needed
            self._room.use_pool(pool)
        if self._planner is not None:
            self._storing.use_pool(pool)
            self._watch_pool()

    def _watch_pool(self) -> None:
        """Store what vLLM is about to drop, and not what it computes, if that is wanted here and can be done."""
        wanted, tiers = self._configuration, self._blocks_by_tier()
        media = {name: medium for name, medium in self.kv.cache.media.items() if name in tiers}
        memory = [name for name, medium in media.items() if medium in OWN_MEDIA]
        host = next((name for name in memory if media[name] == "cpu"), None)
        is_able = wanted.loads_parts and wanted.main.hashes_per_block == 1 and host is not None
        if not (wanted.stores and is_able and hasattr(self._pool, "free_block_queue")):
            return
        # What a restart is to find is not left to vLLM alone, nor do others' hits depend on what this one has.
        is_for_more = len(tiers) > len(memory) or wanted.below.settings is None
        num_blocks = 0 if is_for_more else sum(tiers[name] for name in memory)
        when = wanted.connector.store_when
        if host is not None and evicts(when, engine_blocks=wanted.num_engine_blocks, memory_blocks=num_blocks):
            budget = CopyBudget(engine_blocks=wanted.num_engine_blocks, memory_blocks=tiers[host])
            call = self._loop_calls.call
            self._evicting = Evicting(self._storing, wanted, self.counts, self.kv.cache, call, host, budget)

    def _hear_hints(self, layout: KVLayout) -> None:
        """Act on KV hints, if that is wanted and there is memory to bound them by."""
        share = self._configuration.connector.hint_share
        of_layout = partial(Hints.of, layout=layout, num_ranks=self._configuration.num_parts)
        make = partial(of_layout, self.kv.cache, each=share, together=0.5, favoured=self.counts.favoured)
        if not share or (hints := self.kv.call(make)) is None:
            return
        groups, call = self._configuration.groups, self._loop_calls.call
        self._hinting = Hinting(hints, groups, self.counts, self.naming, call=call)
        self._stack.callback(self.kv.call, hints.aclose)

    def come(self, request: Any) -> None:
        """Take note of a request that will have its turn later."""
        if self._hinting is not None:
            self._hinting.come(request)
        if self._planner is not None and self.naming.can_name(request) and not request.skip_reading_prefix_cache:
            tracked = self._coming[request.request_id] = Tracked(request)
            self._loads.come(tracked)

    def find(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded behind those that are computed; None to be asked again later.

        And whether the request is to wait for that, while others compute: else the step that it is in loads them first.
        """
        self._open_planner()
        name = request.request_id
        if (tracked := self._tracked.get(name)) is None:
            tracked = self._tracked[name] = self._coming.pop(name) if name in self._coming else Tracked(request)
        tracked.may_store = can_name = self.naming.can_name(request)
        can_load = can_name and not request.skip_reading_prefix_cache
        found = self._loads.find(tracked, num_computed_tokens, can_load=can_load)
        self._lacks_blocks = found[0] is not None  # until `begin`, which vLLM calls once it has some
        return found

    def begin(self, request: Any, tables: Sequence[list[int]], num_external_tokens: int) -> None:
        """Plan to load what was found, now that a request has its blocks; by block table, these."""
        self._lacks_blocks = False
        self._room.leave(request.request_id)  # it computes, unless it is to wait for this load
        if num_external_tokens:
            self._loads.begin(self._tracked[request.request_id], tables, num_external_tokens)

    @property
    def num_bringing(self) -> int:
        """Blocks that memory holds, or is to hold, for requests that wait for them."""
        return self._loads.num_bringing

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
                if slabs:  # a server may have been away until now
                    memory = self._memory()
                    self._loads.know(memory)
                    self._paying.know(sum(memory.values()))
            self._loads.wait_planned(is_idle=not scheduled.num_scheduled_tokens)
            self._hear_of_jobs()
            self._loads.begin_step()
            self._loads.deliver(step)
            self._deliver_stores(step, scheduled)
            self._paying.step((new.req_id for new in scheduled.scheduled_new_reqs), self._tracked)
            if self._lacks_blocks:
                self._storing.hurry()
            self._lacks_blocks = False
            if self._configuration.stores:
                self._gather(scheduled)
                if self._evicting is not None:
                    self._evicting.step(self._pool, _num_taken(scheduled), self._paying.copy_cost)
                is_due = self._storing.is_due(len(scheduled.num_scheduled_tokens))
                if is_due or len(self._used) >= _MOST_USED:
                    self._gather_used(scheduled)
                self._hold_leaving(scheduled)
                if is_due:
                    self._storing.plan()
            if self._hinting is not None:
                self._hinting.step(self._storing)
        return step

    def take(self, report: Report, freed: AbstractSet[str] = frozenset()) -> None:
        """Take what ended on the workers, and whose blocks vLLM has back since."""
        for outcomes in report.outcomes:
            self._loads.took(outcomes)
            if outcomes.error:  # what was cancelled, or found no server, is no error of a copy
                self.counts.add(errors=1)
            self._open_planner().complete(self._storing.take(outcomes))
        if report.is_wrong:
            self._pass_over()
        if freed:
            self._storing.freed(freed)

    def frees_soon(self) -> bool:
        """Say whether blocks of requests that have ended will be vLLM's again in a few steps."""
        if self._planner is None or not self._storing.frees_soon:
            return False
        self._storing.hurry()  # vLLM asks when it lacks blocks for a request that it computes
        return True

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks of vLLM's are held that no request may have any more, until a step to come."""
        return self._planner is not None and self._storing.holds_blocks

    def end(self, request: Any, tables: Sequence[list[int]]) -> bool:
        """Take note that a request has ended; return whether vLLM has to keep its blocks until the workers say so.

        Args:
            request: vLLM's.
            tables: Its blocks.
        """
        self._coming.pop(request.request_id, None)
        self._room.leave(request.request_id)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            self._paying.end(request.request_id)
            self._loads.let_go(tracked)
            if self._used.pop(request.request_id, None) is not None and self._kv is not None:
                self._tell_used(self._gather_here(tracked, tables))
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
            self._loads.forget()
            self._storing.forget()
            if self._evicting is not None:
                self._evicting.forget()
            if self._hinting is not None:
                self._hinting.forget()
            for tracked in self._tracked.values():
                tracked.may_store, tracked.said = False, None
            self._kv.advance_epoch(f"{self._configuration.model.weights}, changed: {uuid.uuid4()}")

    def _pass_over(self) -> None:
        """Store nothing of what is due, being copied or noted: a step has computed with blocks that had not come.

        And the next one with what that step computed, where it was scheduled before. Others that were found in vLLM's
        own cache meanwhile have the same blocks.
        """
        self._storing.pass_over()
        self._used.clear()
        if self._evicting is not None:
            self._evicting.forget()
            for tracked in self._tracked.values():
                tracked.num_noted = 0  # what its next step leaves it with is right

    def close(self) -> None:
        """Write what has been stored, within a time, and end. Nothing depends on it: an engine may be killed."""
        kv, self._kv = self._kv, None
        planner, self._planner = self._planner, None
        # ClosedError if the program has ended, and the cache with it. Whatever is raised here, nothing stays open.
        with suppress(ClosedError), self._stack:
            if kv is not None and planner is not None and self._configuration.below.settings is not None:
                planner.close()  # no step comes that would bring its workers' answers
                kv.drain()  # a host's server goes on, and writes what it has

    def _hear_of_jobs(self, timeout_s: float = 0.0) -> bool:
        """Take the news of jobs; say whether there was any."""
        jobs = self._open_planner().poll(timeout_s)
        for job in jobs:
            if job.result is None:
                continue
            self._loads.ended(job, job.result)
            if job.direction == "store":
                self._paying.stored(job.result.num_blocks)
                self._paying.copied(job.result.num_blocks, job.result.moved_s)
            self._storing.ended(job)
        return bool(jobs)

    def _deliver_stores(self, step: Step, scheduled: Any) -> None:
        self._storing.deliver(step, scheduled)
        for name in step.preempted:
            self._used.pop(name, None)  # what it finds in vLLM's cache next is told once it computes behind that
            if (tracked := self._tracked.get(name)) is not None:
                tracked.patience_s = tracked.said = None
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
            num_known = self._num_wanted(tracked.request, tracked.request.num_computed_tokens + num_tokens)
            done = tracked.num_stored
            if self._evicting is not None and tracked.num_noted < done:
                done = tracked.num_noted
            if tracked.num_here:
                self._used[name] = tracked
            if num_known >= done - done % finest + finest:  # else no block more is full
                self._gather_of(tracked, min(num_known, len(tracked.request.block_hashes) * hash_size), blocks)
        if wanted.has_states:
            offered = blocks.boundary_state_offloads
            computed = {name: offered[name] for name in offered if name in scheduled.num_scheduled_tokens}
            # Of others no step fills the blocks: they may be another's by now.
            self._gather_states(computed, blocks, hash_size)

    def _gather_of(self, tracked: Tracked, num_known: int, tables: Any) -> None:
        """Have those of a request stored that are full with so many of its first tokens, by vLLM's block tables."""
        request, may_store = tracked.request, self._may_store(tracked)
        ends = tracked.ends if self._configuration.has_ends else ()
        before, tracked.num_stored = tracked.num_stored, max(tracked.num_stored, num_known)
        for group in self._configuration.groups:
            size = group.block_size
            first, stop = before // size, num_known // size
            if self._evicting is not None and stop * size > tracked.num_noted:
                noted, tracked.num_noted = tracked.num_noted // size, stop * size
                if may_store:
                    table = tables.get_block_ids(request.request_id)[group.table]
                    keys = self.naming.keys(group, request, noted, stop)
                    self._evicting.note(keys, table[noted:stop], self.naming.hashes(group, request, noted, stop))
            if stop > first and may_store and not group.is_handed_over and self._evicting is None:
                table = tables.get_block_ids(request.request_id)[group.table]
                for run in self._configuration.stored_of(group, range(first, stop), ends):
                    self._storing.gather(tracked, group, run.start, table[run.start : run.stop])

    def _num_wanted(self, request: Any, num_tokens: int) -> int:
        """Return of how many of a request's first tokens blocks are to be stored."""
        if self._configuration.connector.store_generated:
            return num_tokens
        return min(num_tokens, int(request.num_prompt_tokens))

    def _may_store(self, tracked: Tracked) -> bool:
        """Say whether to store what a request has computed, and what that is can be said: see `RequestNaming`."""
        return tracked.may_store and tracked.is_wanted is not False and self.naming.can_name(tracked.request)

    def _gather_used(self, scheduled: Any) -> None:
        """Do as `_gather_here` for the requests of the step whose turn has not come yet."""
        told: list[BlockKeys] = []
        for name in [name for name in self._used if name in scheduled.num_scheduled_tokens]:
            told += self._gather_here(self._used.pop(name), scheduled.kv_connector_block_state.get_block_ids(name))
        self._tell_used(told)

    def _hold_leaving(self, scheduled: Any) -> None:
        """Hold what is due or being stored of requests that give it back in their next step."""
        if self._configuration.is_whole:
            return
        for name, num_tokens in scheduled.num_scheduled_tokens.items():
            if (tracked := self._tracked.get(name)) is not None and tracked.leaving:
                self._storing.hold(tracked, tracked.request.num_computed_tokens + num_tokens)

    def _gather_here(self, tracked: Tracked, tables: Sequence[list[int]]) -> list[BlockKeys]:
        """Have those stored that vLLM's own cache had of a request and the tiers lack; return what they have."""
        request, may_store = tracked.request, self._may_store(tracked)
        num_here, tracked.num_here = min(tracked.num_here, request.num_computed_tokens), 0
        used: list[BlockKeys] = []
        for group in self._configuration.groups:
            keys = self.naming.needed(group, request, 0, num_here)
            if not keys:
                continue
            self._describe(request, group, keys)
            num_kept = num_hits(self.kv.membership(keys).tobytes())
            if num_kept:
                used.append(keys[:num_kept])
            if may_store and not group.is_handed_over and self._evicting is None:
                most = self._num_wanted(request, num_here) // group.block_size
                first, stop = keys.start + num_kept, min(keys.start + len(keys), most)
                self._storing.gather(tracked, group, first, tables[group.table][first:stop])
        return used

    def _tell_used(self, used: list[BlockKeys]) -> None:
        """Have the tiers know that vLLM's own cache has served what they have as well; a step waits for no loop."""
        if used:
            self._loop_calls.call(_touch_each, self.kv.cache, used)

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
            if tracked is None or not self._may_store(tracked):
                continue
            ends = set()
            for table, block, at in states:
                group = groups[table]
                num_known = self._num_wanted(tracked.request, len(tracked.request.block_hashes) * hash_size)
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

    def _describe(self, request: Any, group: EngineGroup, keys: BlockKeys) -> None:
        """Say what blocks are, to routers; those that cannot be described they do not hear of."""
        if self._events is None or not len(keys):
            return
        each = group.hashes_per_block
        try:
            self._events.describe(request, keys, request.block_hashes[each - 1 :: each])
        except Exception as error:  # noqa: BLE001 - a step is under way, and needs none of this
            self._seldom.failed("KV events", error)

    def _open_planner(self) -> Planner:
        if self._planner is None:
            raise ConfigurationError("no cache is open")
        return self._planner


def _touch_each(kv: BlockCache, used: list[BlockKeys]) -> None:
    for keys in used:
        kv.touch(keys)


def _num_taken(scheduled: Any) -> int:
    """Count the blocks that vLLM has given to requests for a step, from its pool's free queue or other requests'."""
    new = [each.block_ids for each in scheduled.scheduled_new_reqs]
    more = [ids for ids in scheduled.scheduled_cached_reqs.new_block_ids if ids]
    return sum(len(ids[0]) for ids in (*new, *more))
