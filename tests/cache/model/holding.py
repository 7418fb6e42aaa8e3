"""Rules of what holds blocks where they are, or brings them up: leases, prefetches, pins, swaps, plans."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.cache.model.engine import LAST_SLOT, PROMPTS
from tests.cache.model.machine import HERE, LONG_S, SPANS, Machine
from tiered_kv import BlockKeys, JobResult, Outcomes, Planner, Worker
from tiered_kv.values.plan import Plan

CROWD = PROMPTS[2][:8]
"""What is stored to crowd others out."""


class Holding(Machine):
    """What keeps blocks where they are, or brings them up."""

    def __init__(self) -> None:
        super().__init__()
        self.swapped: dict[tuple[int, int], tuple[BlockKeys, str]] = {}
        self.planner: Planner | None = None

    @precondition(lambda self: self.shape.has("cpu"))
    @rule(keys=SPANS)
    def lease(self, keys: BlockKeys) -> None:
        """Hold blocks in memory while others are stored: they stay, byte for byte."""

        async def hold() -> None:
            async with self.cache.lease(keys) as lease:
                assert lease.num_blocks <= self.prefix(keys)
                held = [bytes(view) for view in lease.views]
                await self.keep(CROWD)
                assert self.cache.lookup_nowait(keys).num_blocks >= lease.num_blocks or self.shape.ttl_s
                assert [bytes(view) for view in lease.views] == held

        self.run(hold(), LONG_S)
        self.poison()

    @precondition(lambda self: self.shape.has("cpu"))
    @rule(keys=SPANS, cancels=st.booleans())
    def prefetch(self, keys: BlockKeys, *, cancels: bool) -> None:
        """Bring blocks up; nothing that is not there comes of it."""

        async def prefetch() -> None:
            handle = self.cache.prefetch(keys)
            if cancels:
                handle.cancel()
            assert (await handle).num_blocks <= self.prefix(keys)

        self.run(prefetch(), LONG_S)

    @rule(keys=SPANS, ttl_s=st.sampled_from([1.0, 100.0]))
    def pin(self, keys: BlockKeys, ttl_s: float) -> None:
        """Pin blocks: they stay while others are stored, unless their tier fails or their time is up."""
        self.has_pins = True

        async def pin() -> None:
            pinned = self.cache.pin(keys, ttl_s=ttl_s).num_blocks
            assert pinned <= self.prefix(keys)
            is_sure = self.is_quiet and ttl_s == 100.0 and self.shape.ttl_s is None
            await self.keep(CROWD)
            assert self.cache.lookup_nowait(keys).num_blocks >= pinned or not is_sure

        self.run(pin(), LONG_S)
        self.poison()

    @rule(keys=SPANS, is_there=st.booleans())
    def tell_what_the_engine_has(self, keys: BlockKeys, *, is_there: bool) -> None:
        """Say that the engine has blocks in its own cache, or is about to drop them: nothing is lost by that."""

        async def tell() -> None:
            before = self.cache.membership(keys, tier="cpu") if self.shape.has("cpu") else None
            self.cache.resident(keys) if is_there else self.cache.leaving(keys)
            if before is not None:
                assert (self.cache.membership(keys, tier="cpu") == before).all()

        self.run(tell(), 0.0)

    @rule(keys=SPANS, is_used=st.booleans())
    def unpin(self, keys: BlockKeys, *, is_used: bool) -> None:
        """Let go of blocks, pinned or not, or use them."""

        async def unpin() -> None:
            self.cache.touch(keys) if is_used else self.cache.unpin(keys)

        self.run(unpin(), 0.0)

    # Preemption.

    @rule(keys=SPANS)
    def swap_out_and_in(self, keys: BlockKeys) -> None:
        """Preempt a sequence while others are stored: what comes back is right."""

        async def swap() -> None:
            weights = self.weights
            self.asked["load"] += len(keys)
            self.has_pins = True
            await self.cache.swap_out(keys, self.computed(keys), ttl_s=100.0)
            self.poison()
            await self.keep(CROWD)
            self.poison()
            loaded = await self.cache.swap_in(keys, self.engine.pages(keys))
            assert self.has(keys, loaded.num_blocks, HERE, weights)

        self.run(swap(), LONG_S)
        self.poison()

    @rule(keys=SPANS, slot=st.integers(0, LAST_SLOT - 1), is_out=st.booleans())
    def swap_by_number(self, keys: BlockKeys, slot: int, *, is_out: bool) -> None:
        """Swap a page to a slot of the engine's own choosing, or what went there back into a page."""
        group, key, version = keys.group, keys[:1], self.version(keys)
        page = self.engine.first_number(group)

        async def swap() -> None:
            if is_out:
                self.engine.compute(key, version, HERE)
                swapped = await self.cache.swap(blocks_to_swap_out={page: slot}, group=group)
            else:
                swapped = await self.cache.swap(blocks_to_swap_in={slot: page}, group=group)
            if swapped.fault is not None:
                self.swapped.pop((group, slot), None)
            elif is_out:
                self.swapped[group, slot] = key, version
            else:
                assert all(self.engine.which(*self.swapped[group, slot], HERE))

        if key if is_out else (group, slot) in self.swapped:
            self.run(swap(), LONG_S)
        self.poison()

    # Plans.

    @precondition(lambda self: self.shape.has("cpu"))
    @rule(keys=SPANS, is_load=st.booleans(), fails=st.booleans())
    def plan(self, keys: BlockKeys, *, is_load: bool, fails: bool) -> None:
        """Plan a load or a store, have a worker move it or say that it did not, and complete the job."""
        result = self.run(self._plan(keys, is_load=is_load, fails=fails), LONG_S)
        if is_load:
            assert self.has(keys, result.num_blocks)
        self.poison()

    async def _plan(self, keys: BlockKeys, *, is_load: bool, fails: bool) -> JobResult:
        if self.planner is None:
            self.planner = self.cache.planner()
            self.planner.register_worker()
        if is_load:
            self.asked["load"] += len(keys)
            job = self.planner.plan_load(keys, self.engine.pages(keys))
        else:
            job = self.planner.plan_store(keys, self.computed(keys))
        plan = await job.planned()
        self.planner.complete(Outcomes(plan.job, 0, 0) if fails else await self._execute(plan))
        return await job.ended()

    async def _execute(self, plan: Plan) -> Outcomes:
        assert self.planner is not None
        with Worker(self.planner.slabs(), layout=self.engine.layout, device=self.world.device) as worker:
            for group, caches in enumerate(self.engine.caches):
                worker.register_kv_caches(caches, group=group)
            executing = worker.start(plan)
            return await asyncio.wrap_future(executing)

    def close(self, closing: Coroutine[Any, Any, None] | None = None) -> None:
        """See `Machine.close`."""
        super().close(closing)
        self.planner = None
        self.swapped.clear()
