"""Rules of what is held, moved and removed: leases, pins, swaps, plans, evictions, weights, capacities, restarts."""

import asyncio

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.cache.model.machine import LONG_S, PROMPTS, SPANS, Machine
from tests.cache.model.world import MOST_SLOTS, TIMEOUT_S
from tiered_kv import BlockKeys, JobResult, Outcomes, Planner, Worker
from tiered_kv.plan import Plan

CROWD = PROMPTS[2][:8]
"""What is stored to crowd others out."""


class Holding(Machine):
    """What keeps blocks where they are, or brings them up."""

    def __init__(self) -> None:
        super().__init__()
        self.swapped: dict[int, tuple[BlockKeys, str]] = {}
        self.planner: Planner | None = None

    @precondition(lambda self: self.shape.has("cpu"))
    @rule(keys=SPANS)
    def lease(self, keys: BlockKeys) -> None:
        """Hold blocks in memory while others are stored: they stay, byte for byte."""

        async def hold() -> None:
            async with self.cache.lease(keys) as lease:
                assert lease.num_blocks <= self.known.prefix(keys)
                held = [bytes(view) for view in lease.views]
                await self.keep(CROWD)
                assert self.cache.lookup_nowait(keys).num_blocks >= lease.num_blocks or self.shape.ttl_s
                assert [bytes(view) for view in lease.views] == held

        self.run(hold(), LONG_S)
        self.engine.poison()

    @precondition(lambda self: self.shape.has("cpu"))
    @rule(keys=SPANS, cancels=st.booleans())
    def prefetch(self, keys: BlockKeys, *, cancels: bool) -> None:
        """Bring blocks up; nothing that is not there comes of it."""

        async def prefetch() -> None:
            handle = self.cache.prefetch(keys)
            if cancels:
                handle.cancel()
            assert (await handle).num_blocks <= self.known.prefix(keys)

        self.run(prefetch(), LONG_S)

    @rule(keys=SPANS, ttl_s=st.sampled_from([1.0, 100.0]))
    def pin(self, keys: BlockKeys, ttl_s: float) -> None:
        """Pin blocks: they stay while others are stored, unless their tier fails or their time is up."""
        self.has_pins = True

        async def pin() -> None:
            pinned = self.cache.pin(keys, ttl_s=ttl_s).num_blocks
            assert pinned <= self.known.prefix(keys)
            is_sure = self.is_quiet and ttl_s == 100.0 and self.shape.ttl_s is None
            await self.keep(CROWD)
            assert self.cache.lookup_nowait(keys).num_blocks >= pinned or not is_sure

        self.run(pin(), LONG_S)
        self.engine.poison()

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
            weights = self.known.weights
            self.known.store(keys, weights)
            self.asked["store"] += len(keys)
            self.asked["load"] += len(keys)
            self.has_pins = True
            await self.cache.swap_out(keys, self.engine.compute(keys, weights), ttl_s=100.0)
            self.engine.poison()
            await self.keep(CROWD)
            self.engine.poison()
            loaded = await self.cache.swap_in(keys, self.engine.at(keys))
            assert self.engine.has(keys, loaded.num_blocks, weights)

        self.run(swap(), LONG_S)
        self.engine.poison()

    @rule(which=st.integers(0, 11), slot=st.integers(0, 3), is_out=st.booleans())
    def swap_by_number(self, which: int, slot: int, *, is_out: bool) -> None:
        """Swap a page to a slot of the engine's own choosing, or what went there back into a page."""
        key, weights = PROMPTS[0][which : which + 1], self.known.weights

        async def swap() -> None:
            if is_out:
                self.engine.compute(key, weights)
                swapped = await self.cache.swap(blocks_to_swap_out={0: slot})
            else:
                swapped = await self.cache.swap(blocks_to_swap_in={slot: 0})
            if swapped.fault is not None:
                self.swapped.pop(slot, None)
            elif is_out:
                self.swapped[slot] = key, weights
            else:
                before, of = self.swapped[slot]
                assert self.engine.has(before, 1, of)

        if is_out or slot in self.swapped:
            self.run(swap(), LONG_S)
        self.engine.poison()

    # Plans.

    @precondition(lambda self: self.shape.has("cpu"))
    @rule(keys=SPANS, is_load=st.booleans(), fails=st.booleans())
    def plan(self, keys: BlockKeys, *, is_load: bool, fails: bool) -> None:
        """Plan a load or a store, have a worker move it or say that it did not, and complete the job."""
        result = self.run(self._plan(keys, is_load=is_load, fails=fails), LONG_S)
        assert result is not None
        if is_load:
            assert self.engine.has(keys, result.num_blocks, self.known.weights)
        self.engine.poison()

    async def _plan(self, keys: BlockKeys, *, is_load: bool, fails: bool) -> JobResult | None:
        if self.planner is None:
            self.planner = self.cache.planner()
            self.planner.register_worker()
        self.asked["load" if is_load else "store"] += len(keys)
        if is_load:
            plan = await self.planner.plan_load(keys, self.engine.at(keys))
        else:
            self.known.store(keys, self.known.weights)
            plan = self.planner.plan_store(keys, self.engine.compute(keys, self.known.weights))
        return self.planner.complete(Outcomes(plan.job, 0, 0) if fails else await self._execute(plan))

    async def _execute(self, plan: Plan) -> Outcomes:
        assert self.planner is not None
        with Worker(self.planner.slabs(), layout=self.engine.layout, device=self.world.device) as worker:
            worker.register_kv_caches(self.engine.caches[0])
            executing = worker.start(plan)
            return await asyncio.wrap_future(executing)

    def close(self) -> None:
        """See `Machine.close`."""
        super().close()
        self.planner = None
        self.swapped.clear()


class Changing(Machine):
    """What takes blocks out, or changes what the cache is."""

    @rule(keys=SPANS, tier=st.sampled_from([None, None, None, "disk", "keyed", "cpu", "cpu", "gpu"]))
    def evict(self, keys: BlockKeys, tier: str | None) -> None:
        """Evict by name: from every tier, they are gone at once; from one, what is elsewhere stays."""
        if tier is not None and not self.shape.has(tier):
            return
        may_fail = self.shape.has("keyed") and self.world.was_faulty
        self.run(self.cache.evict(keys, tier=tier), TIMEOUT_S)
        if tier is None and not may_fail:
            self.known.evict(keys)

    @rule(is_meant=st.integers(0, 2))
    def clear(self, is_meant: int) -> None:
        """Empty the tiers that the cache owns; less often than all else."""
        if is_meant:
            return
        self.run(self.cache.clear(), TIMEOUT_S)
        if not self.shape.has("keyed"):
            self.known.clear()

    @rule(tier=st.sampled_from(["cpu", "disk"]), num_blocks=st.integers(1, MOST_SLOTS))
    def resize(self, tier: str, num_blocks: int) -> None:
        """Have another capacity."""
        if self.shape.has(tier):
            self.run(self.cache.resize(tier, self.world.capacity(tier, num_blocks)), LONG_S)

    @rule(ends=st.booleans())
    def flush(self, *, ends: bool) -> None:
        """Write what waits: nothing does afterwards, unless a tier is at fault. Or let everything end."""
        if ends:
            self.settle()
            return
        self.run(self.cache.flush(), LONG_S)
        assert self.world.was_faulty or not any(tier.dirty for tier in self.cache.stats().tiers)

    @rule()
    def reopen(self) -> None:
        """Close, whatever is under way, and begin again with what the tiers have kept."""
        self.close()
        self.open()
