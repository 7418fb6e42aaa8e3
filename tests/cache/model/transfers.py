"""Rules of what a serving engine does: finding, loading and storing blocks, waited for or not, and cancelled."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.cache.model.machine import DELAYS_S, LONG_S, SPANS, WEIGHTS, Machine
from tests.support.caches import inside
from tiered_kv import BlockKeys, LoadHandle, LoadResult, LoadTicket, StoreHandle, StoreResult, StoreTicket

WAYS = st.sampled_from(["start", "start", "layers", "submit"])
ORDERS = st.sampled_from([(0, 1), (1, 0), (0,), ()])
"""In which a layer-wise store gets its layers; some never come."""
_LAST_COPIES_S = 0.1
"""What is at hand when a transfer's time is up is still copied."""


@dataclass(eq=False)
class Underway:
    """A transfer that nobody waits for yet."""

    keys: BlockKeys
    region: int
    weights: str
    is_load: bool
    ends_by: float
    handle: LoadHandle | StoreHandle | LoadTicket | StoreTicket
    was_overtaken: bool = False
    result: LoadResult | StoreResult | None = field(default=None)

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        if isinstance(self.handle, LoadHandle | StoreHandle):
            return self.handle.done
        return self.handle.result is not None


class Transfers(Machine):
    """Loads and stores."""

    def __init__(self) -> None:
        super().__init__()
        self.underway: list[Underway] = []

    @property
    def num_underway(self) -> int:
        """See `Machine.num_underway`."""
        return len(self.underway)

    def stored(self, keys: BlockKeys, result: StoreResult) -> None:
        """Check a result: each block is counted once."""
        assert result.num_stored + result.num_present + result.num_dropped == result.num_requested == len(keys)
        assert sum(result.drop_reasons.values()) == result.num_dropped

    def loaded(self, keys: BlockKeys, result: LoadResult, weights: str, region: int = 0) -> None:
        """Check a result: every byte of the prefix is right; what is behind it is nobody's."""
        assert result.num_blocks == sum(result.by_tier.values()) <= result.num_requested == len(keys)
        assert self.engine.has(keys, result.num_blocks, weights, region)

    # Waited for.

    @rule(keys=SPANS, weights=WEIGHTS, delay_s=DELAYS_S, settles=st.booleans())
    def store(self, keys: BlockKeys, weights: str, delay_s: float | None, *, settles: bool) -> None:
        """Compute and store blocks; perhaps do not wait until they are in every tier."""
        limits = inside(self.cache).limits  # no public call tells it
        self.known.store(keys, weights)
        self.asked["store"] += len(keys)

        async def store() -> StoreResult:
            after = None if delay_s is None else self.world.event(delay_s)
            source = self.engine.compute(keys, weights)
            return await self.cache.store(keys, source, after=after, epoch=weights)

        result = self.run(store(), limits.store_timeout_s + _LAST_COPIES_S)
        self.engine.poison()
        self.stored(keys, result)
        for tier in self.run(result.settled(), LONG_S) if settles else ():
            assert tier.written + tier.present + tier.deferred + tier.dropped + tier.failed == len(keys)

    @rule(keys=SPANS, delay_s=DELAYS_S, deadline_s=st.sampled_from([None, None, 0.0, 1.0]))
    def load(self, keys: BlockKeys, delay_s: float | None, deadline_s: float | None) -> None:
        """Load blocks: where nothing is in the way, all that are found."""
        in_time = delay_s is None and deadline_s is None and self.is_quiet
        limit_s = inside(self.cache).limits.load_timeout_s if deadline_s is None else deadline_s
        self.asked["load"] += len(keys)

        async def load() -> LoadResult:
            after = None if delay_s is None else self.world.event(delay_s)
            return await self.cache.load(keys, self.engine.at(keys), after=after, deadline_s=deadline_s)

        found = self.run(self.cache.lookup(keys), LONG_S).num_blocks
        result = self.run(load(), limit_s + _LAST_COPIES_S)
        self.loaded(keys, result, self.known.weights)
        assert result.num_blocks <= self.known.prefix(keys)
        assert result.num_blocks == found or not in_time
        self.engine.poison()

    # Not waited for.

    @precondition(lambda self: self.num_underway < 3)
    @rule(keys=SPANS, way=WAYS, is_load=st.booleans(), delay_s=DELAYS_S, order=ORDERS)
    def start(self, keys: BlockKeys, way: str, delay_s: float | None, order: tuple[int, ...], *, is_load: bool) -> None:
        """Begin a transfer, and go on."""
        self.run(self._start(keys, way, delay_s, order, is_load=is_load), 0.0)

    async def _start(
        self, keys: BlockKeys, way: str, delay_s: float | None, order: tuple[int, ...], *, is_load: bool
    ) -> None:
        region = next(each for each in (1, 2, 3) if each not in [other.region for other in self.underway])
        kv, weights, limits = self.cache, self.known.weights, inside(self.cache).limits
        after = None if delay_s is None else self.world.event(delay_s)
        handle: LoadHandle | StoreHandle | LoadTicket | StoreTicket
        if is_load:
            into = self.engine.at(keys, region)
            if way == "submit":
                handle = kv.submit_load(keys, into, after=after)
            else:
                handle = kv.start_load(keys, into, after=after, layerwise=way == "layers")
        else:
            self.known.store(keys, weights)
            source = self.engine.compute(keys, weights, region)
            if way == "submit":
                handle = kv.submit_store(keys, source, after=after)
            else:
                handle = kv.start_store(keys, source, after=after, layerwise=way == "layers")
        for layer in order if way == "layers" and not is_load else ():
            handle.store_layer(layer)  # type: ignore[union-attr]  # of a store
        self.asked["load" if is_load else "store"] += len(keys)
        limit_s = limits.load_timeout_s if is_load else limits.store_timeout_s
        ends_by = asyncio.get_running_loop().time() + limit_s + _LAST_COPIES_S
        self.underway.append(Underway(keys, region, weights, is_load, ends_by, handle))

    @precondition(lambda self: self.num_underway)
    @rule(which=st.integers(0, 2), cancels=st.booleans())
    def finish(self, which: int, *, cancels: bool) -> None:
        """Wait for one of them, and check what it says; perhaps stop it before."""
        one = self.underway[which % self.num_underway]
        if cancels:
            self.run(self._cancel(one), 0.0)
        self.run(self._ended(one), max(0.0, one.ends_by - self.world.runner.get_loop().time()))
        self._check(one)

    async def _cancel(self, one: Underway) -> None:
        one.handle.cancel()

    async def _ended(self, one: Underway) -> None:
        if isinstance(one.handle, LoadHandle | StoreHandle):
            one.result = await one.handle
        while one.result is None:
            await asyncio.sleep(0 if one.done else self.world.tick_s / 100)
            self._poll()

    def _poll(self) -> None:
        for ticket, result in self.cache.poll():
            (of,) = [each for each in self.underway if each.handle is ticket]
            of.result = result

    def _check(self, one: Underway) -> None:
        self.underway.remove(one)
        if isinstance(one.result, LoadResult):
            self.loaded(one.keys, one.result, one.weights, one.region)
            assert not (one.was_overtaken and one.result.num_blocks)
        else:
            assert one.result is not None
            self.stored(one.keys, one.result)
        self.engine.poison(one.region)

    # Cancelled.

    @rule(
        what=st.sampled_from(["load", "store", "layers", "lookup", "lease", "prefetch", "swap_out", "evict", "clear"]),
        keys=SPANS,
        turns=st.integers(1, 60),
        steps=st.integers(0, 3),
    )
    def cancel(self, what: str, keys: BlockKeys, turns: int, steps: int) -> None:
        """Cancel a call at any turn of the loop: from that moment on the engine's blocks are the engine's."""
        if what in ("lease", "prefetch") and not self.shape.has("cpu"):
            return
        self.run(self._cancelled_after(turns, steps, self._call(what, keys)), LONG_S)

    async def _call(self, what: str, keys: BlockKeys) -> None:
        kv, weights = self.cache, self.known.weights
        if what in ("store", "layers", "swap_out"):
            self.known.store(keys, weights)
            self.asked["store"] += len(keys)
        if what == "load":
            self.asked["load"] += len(keys)
            result = await kv.load(keys, self.engine.at(keys))
            self.loaded(keys, result, weights)
        elif what == "store":
            await kv.store(keys, self.engine.compute(keys, weights))
        elif what == "layers":
            handle = kv.start_store(keys, self.engine.compute(keys, weights), layerwise=True)
            handle.store_layer(1)
            await asyncio.sleep(0)
            handle.store_layer(0)
            await handle
        elif what == "swap_out":
            self.has_pins = True
            await kv.swap_out(keys, self.engine.compute(keys, weights))
        elif what == "lease":
            async with kv.lease(keys) as lease:
                assert lease.num_blocks <= self.known.prefix(keys)
        elif what == "lookup":
            await kv.lookup(keys)
        elif what == "prefetch":
            await kv.prefetch(keys)
        elif what == "evict":
            await kv.evict(keys)
        else:
            await kv.clear()

    async def _cancelled_after(self, turns: int, steps: int, call: Coroutine[Any, Any, None]) -> None:
        async def called() -> None:
            try:
                await call
            finally:
                self.engine.poison()

        task = asyncio.create_task(called())
        for turn in range(turns):
            await asyncio.sleep(0)
            if steps and turn % (3 * steps) == 0:
                self.world.step()
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    # What is under way is overtaken, or ends with the cache.

    @rule(weights=WEIGHTS)
    def advance_epoch(self, weights: str) -> None:
        """Serve other weights, or those of before; a load that this overtakes is to bring nothing."""

        async def advance() -> None:
            self.cache.advance_epoch(weights)

        self.run(advance(), 0.0)
        self.known.weights = weights
        for one in self.underway:
            one.was_overtaken = (one.was_overtaken or not one.done) and one.weights != weights

    def settle(self) -> None:
        """See `Machine.settle`."""
        self.world.release()
        while self.underway:
            self.finish(0, cancels=False)
        super().settle()

    def close(self) -> None:
        """See `Machine.close`."""
        kv = self.cache
        super().close()
        while self.underway:
            one = self.underway[0]
            assert one.done
            if isinstance(one.handle, LoadHandle | StoreHandle):
                self.run(self._ended(one), 0.0)
            else:
                one.result = one.handle.result
            self._check(one)
        kv.poll()
