"""Rules of what a serving engine does: finding, loading and storing blocks, waited for or not, and cancelled."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.cache.model.calls import CALLS, Calls
from tests.cache.model.engine import NUM_REGIONS, N, Place
from tests.cache.model.machine import DELAYS_S, LONG_S, PLACES, SPANS, WEIGHTS
from tiered_kv import BlockKeys, LoadHandle, LoadResult, LoadTicket, Priority, StoreHandle, StoreResult, StoreTicket
from tiered_kv.tiers.tier import prefix_of

AnyHandle = LoadHandle | StoreHandle | LoadTicket | StoreTicket
PRIORITIES = st.sampled_from(Priority)
WAYS = st.sampled_from(["start", "start", "gaps", "back", "back", "layers", "submit"])
ORDERS = st.sampled_from([(0, 1), (1, 0), (0,), ()])
"""In which a layer-wise store gets its layers; some never come."""
_LAST_COPIES_S = 0.1
"""What is at hand when a transfer's time is up is still copied."""
_CLAIMED = "computed while it was loaded"


@dataclass(eq=False)
class Underway:
    """A transfer that nobody waits for yet."""

    keys: BlockKeys
    place: Place
    weights: str
    ends_by: float
    handle: AnyHandle
    claimed: int = 0
    is_back: bool = False
    was_overtaken: bool = False
    result: LoadResult | StoreResult | None = field(default=None)

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        if isinstance(self.handle, LoadHandle | StoreHandle):
            return self.handle.done
        return self.handle.result is not None


class Transfers(Calls):
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

    def loaded(self, keys: BlockKeys, result: LoadResult, place: Place, weights: str | None = None) -> None:
        """Check a result: every byte of what is in place is right; what is elsewhere is nobody's."""
        assert result.num_blocks == prefix_of(result.mask) <= result.num_requested == len(keys) == len(result.mask)
        assert np.count_nonzero(result.mask) == sum(result.by_tier.values())
        assert self.has_all_of(keys, result.mask, place, weights)

    # Waited for.

    @rule(keys=SPANS, weights=WEIGHTS, memory=PLACES, delay_s=DELAYS_S, settles=st.booleans())
    def store(self, keys: BlockKeys, weights: str, memory: str, delay_s: float | None, *, settles: bool) -> None:
        """Compute and store blocks; perhaps do not wait until they are in every tier."""

        async def store() -> StoreResult:
            after = None if delay_s is None else self.world.event(delay_s)
            source = self.computed(keys, Place(0, memory), weights)
            return await self.cache.store(keys, source, after=after, epoch=weights)

        result = self.run(store(), self.world.limits.store_timeout_s + _LAST_COPIES_S)
        self.poison()
        self.stored(keys, result)
        for tier in self.run(result.settled(), LONG_S) if settles else ():
            assert tier.written + tier.present + tier.deferred + tier.dropped + tier.failed == len(keys)

    @rule(
        keys=SPANS,
        memory=PLACES,
        delay_s=DELAYS_S,
        deadline_s=st.sampled_from([None, None, 0.0, 1.0]),
        how=st.fixed_dictionaries({"priority": PRIORITIES, "gaps": st.booleans()}),
    )
    def load(
        self, keys: BlockKeys, memory: str, delay_s: float | None, deadline_s: float | None, how: dict[str, Any]
    ) -> None:
        """Load blocks: where nothing is in the way, all that are found."""
        in_time = delay_s is None and deadline_s is None and self.is_quiet
        limit_s = self.world.limits.load_timeout_s if deadline_s is None else deadline_s
        place = Place(0, memory)
        self.asked["load"] += len(keys)

        async def load() -> LoadResult:
            after = None if delay_s is None else self.world.event(delay_s)
            if memory == "direct":  # a medium that hangs has the engine's memory, for as long as it does
                asyncio.get_running_loop().call_later(limit_s, self.world.release)
            into = self.engine.at(keys, place)
            return await self.cache.load(keys, into, after=after, deadline_s=deadline_s, **how)

        found = self.run(self.cache.lookup(keys), LONG_S).num_blocks
        result = self.run(load(), limit_s + _LAST_COPIES_S)
        self.loaded(keys, result, place)
        assert result.num_blocks <= self.prefix(keys)
        is_in_reach = memory == "pages" or not self.shape.has("gpu")  # no copy goes from the pool to host memory
        assert result.num_blocks == found or not (in_time and is_in_reach)
        self.poison()

    # Not waited for.

    @precondition(lambda self: self.num_underway < NUM_REGIONS - 1)
    @rule(
        keys=SPANS,
        way=WAYS,
        memory=PLACES,
        is_load=st.booleans(),
        delay_s=DELAYS_S,
        priority=PRIORITIES,
        order=ORDERS,
    )
    def start(self, keys: BlockKeys, way: str, memory: str, *, is_load: bool, **how: Any) -> None:  # noqa: ANN401
        """Begin a transfer, and go on."""
        place = Place(self.free_regions()[0], memory)
        start = self._start_load if is_load else self._start_store
        self.run(start(keys, place, way, **how), 0.0)

    def free_regions(self) -> list[int]:
        """Return those that no transfer under way has."""
        taken = [one.place.region for one in self.underway]
        return [region for region in range(1, NUM_REGIONS) if region not in taken]

    async def _start_load(
        self, keys: BlockKeys, place: Place, way: str, delay_s: float | None, priority: Priority, **_: object
    ) -> None:
        after = None if delay_s is None else self.world.event(delay_s)
        into, kv = self.engine.at(keys, place), self.cache
        if way == "submit":
            handle: LoadHandle | LoadTicket = kv.submit_load(keys, into, after=after, priority=priority)
        else:
            handle = kv.start_load(
                keys,
                into,
                after=after,
                priority=priority,
                layerwise=way == "layers",
                gaps=way == "gaps",
                order="back" if way == "back" else "front",
            )
        self.asked["load"] += len(keys)
        self._add(keys, place, handle, self.world.limits.load_timeout_s, is_back=way == "back")

    async def _start_store(
        self, keys: BlockKeys, place: Place, way: str, delay_s: float | None, order: tuple[int, ...], **_: object
    ) -> None:
        after = None if delay_s is None else self.world.event(delay_s)
        source, kv = self.computed(keys, place), self.cache
        if way == "submit":
            self._add(keys, place, kv.submit_store(keys, source, after=after), self.world.limits.store_timeout_s)
            return
        handle = kv.start_store(keys, source, after=after, layerwise=way == "layers")
        for layer in order if way == "layers" else ():
            handle.store_layer(layer)
        self._add(keys, place, handle, self.world.limits.store_timeout_s)

    def _add(self, keys: BlockKeys, place: Place, handle: AnyHandle, limit_s: float, *, is_back: bool = False) -> None:
        ends_by = asyncio.get_running_loop().time() + limit_s + _LAST_COPIES_S
        self.underway.append(Underway(keys, place, self.weights, ends_by, handle, is_back=is_back))

    @precondition(lambda self: any(one.is_back for one in self.underway))
    @rule(which=st.integers(0, 2), block=st.integers(0, N))
    def claim(self, which: int, block: int) -> None:
        """Compute blocks that a load from the back is loading, too."""
        backs = [one for one in self.underway if one.is_back]
        one = backs[which % len(backs)]
        self.run(self._claim(one, min(block, len(one.keys))), 0.0)

    async def _claim(self, one: Underway, block: int) -> None:
        assert isinstance(one.handle, LoadHandle)
        if one.handle.done:
            return
        before, one.claimed = one.claimed, one.handle.stop_before(block)
        assert before <= one.claimed <= max(before, block)
        self.asked["load"] -= one.claimed - before
        if one.claimed:
            self.engine.compute(one.keys[: one.claimed], _CLAIMED, one.place)

    @precondition(lambda self: self.num_underway)
    @rule(which=st.integers(0, 2), cancels=st.booleans())
    def finish(self, which: int, *, cancels: bool) -> None:
        """Wait for one of them, and check what it says; perhaps stop it before."""
        one = self.underway[which % self.num_underway]
        if cancels:
            self.run(self._cancel(one), 0.0)
        if one.place.memory == "direct":
            self.world.release()  # a medium that hangs has the engine's memory, for as long as it does
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
            assert not one.result.mask[: one.claimed].any()
            assert all(self.engine.which(one.keys[: one.claimed], _CLAIMED, one.place))
            self.loaded(one.keys, one.result, one.place, one.weights)
            assert not (one.was_overtaken and one.result.num_blocks)
        else:
            assert one.result is not None
            self.stored(one.keys, one.result)
        self.poison(one.place.region)

    # Cancelled.

    @rule(what=st.sampled_from(CALLS), keys=SPANS, memory=PLACES, turns=st.integers(1, 60), steps=st.integers(0, 3))
    def cancel(self, what: str, keys: BlockKeys, memory: str, turns: int, steps: int) -> None:
        """Cancel a call at any turn of the loop: from that moment on the engine's blocks are the engine's."""
        if memory == "direct":
            self.world.release()
        self.run(self._cancelled_after(turns, steps, self.call(what, keys, Place(0, memory))), LONG_S)

    async def _cancelled_after(self, turns: int, steps: int, call: Coroutine[Any, Any, None]) -> None:
        async def called() -> None:
            try:
                await call
            finally:
                self.poison()

        task = asyncio.create_task(called())
        await self.world.pass_turns(turns, steps)
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
        self.weights = weights
        for one in self.underway:
            one.was_overtaken = (one.was_overtaken or not one.done) and one.weights != weights

    def settle(self) -> None:
        """See `Machine.settle`."""
        self.world.release()
        while self.underway:
            self.finish(0, cancels=False)
        super().settle()

    def close(self, closing: Coroutine[Any, Any, None] | None = None) -> None:
        """See `Machine.close`."""
        kv = self.cache
        super().close(closing)
        while self.underway:
            one = self.underway[0]
            assert one.done
            if isinstance(one.handle, LoadHandle | StoreHandle):
                self.run(self._ended(one), 0.0)
            else:
                one.result = one.handle.result
            self._check(one)
        kv.poll()
