"""Rules of sudden ends, whatever is under way: the cache is closed, or the process is killed."""

import asyncio

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.cache.model.calls import CALLS
from tests.cache.model.engine import Place
from tests.cache.model.machine import OPENINGS, PLACES, SPANS, turns
from tests.cache.model.transfers import Transfers
from tiered_kv import BlockKeys, ClosedError

Call = tuple[str, BlockKeys]
TURNS = st.tuples(st.integers(0, 60), st.integers(0, 3))
"""Of the loop, and how many of them there are to a copy."""


class Ending(Transfers):
    """Closing at any moment, and dying."""

    @rule(
        what=st.lists(st.tuples(st.sampled_from(CALLS), SPANS), min_size=1, max_size=3),
        memory=PLACES,
        after=TURNS,
        num_closers=st.integers(1, 2),
        how=OPENINGS,
    )
    def close_during(self, what: list[Call], memory: str, after: tuple[int, int], num_closers: int, how: str) -> None:
        """Close while calls are under way: each is answered, or told that the cache is closed. Open it again."""

        async def close() -> None:
            calls = self._begin(what, memory)
            await self.world.pass_turns(*after)
            await self._end(calls, num_closers)

        self.close(close())
        self.open(how)

    @rule(what=st.sampled_from(CALLS), keys=SPANS, evicted=SPANS, after=TURNS, how=OPENINGS)
    def die(self, what: str, keys: BlockKeys, evicted: BlockKeys, after: tuple[int, int], how: str) -> None:
        """Kill the process while blocks are moved, and others evicted: these stay away, if their eviction ended."""

        async def die() -> "list[asyncio.Task[None]]":
            calls = self._begin([(what, keys), ("evict", evicted)], "pages")
            await self.world.pass_turns(*after)
            self.world.die()
            was_evicted = len(calls) > 1 and calls[1].done()  # else no region was free, or it is under way
            if was_evicted and not {*keys} & {*evicted}:
                self.known.evict(evicted, self.version(evicted))
            return calls

        calls = self.run(die(), 0.0)
        self.close(self._end(calls))  # what is dead does this to nothing that lives
        self.open(how)

    def _begin(self, what: list[Call], memory: str) -> "list[asyncio.Task[None]]":
        """Begin calls, each in a region of its own, as far as there are free ones."""
        places = [Place(region, memory) for region in (0, *self.free_regions())]
        return [asyncio.ensure_future(self.call(*each, place)) for each, place in zip(what, places, strict=False)]

    async def _end(self, calls: "list[asyncio.Task[None]]", num_closers: int = 1) -> None:
        """Close the cache: when the first who closes it hears of it, all calls have ended."""
        closing = {asyncio.ensure_future(self.cache.aclose()) for _ in range(num_closers)}
        await asyncio.wait(closing, return_when=asyncio.FIRST_COMPLETED)
        await turns()
        for region in (0, *self.free_regions()):
            self.poison(region)
        for call in calls:
            assert call.done(), f"under way when the cache was closed: {call}"
            assert not call.cancelled(), f"nobody has cancelled {call}"
            if not isinstance(call.exception(), ClosedError):
                call.result()
        await asyncio.gather(*closing)
