"""The cache beside its model: what is common to all rules, and what must hold after each."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from tests.cache.model.world import Shape, World
from tests.support.any_layout import MODEL, AnyEngine, prompt
from tests.support.caches import Recorder, assert_nothing_left, inside
from tiered_kv import BlockKeys, GPULoadStoreSpec, ModelIdentity, TieredKV

T = TypeVar("T")

N = 12
"""Blocks of a prompt."""
PROMPTS = [prompt(N, seed=seed) for seed in range(3)]
"""They share nothing; so few blocks that calls meet often, and more than fit anywhere."""


def span(seed: int, start: int, stop: int) -> BlockKeys:
    """Return some blocks of a prompt, perhaps none."""
    return PROMPTS[seed][start:stop]


SPANS = st.builds(span, st.integers(0, 2), st.sampled_from([0, 0, 0, 1, 4, 7]), st.integers(0, N))
WEIGHTS = st.sampled_from(["w0", "w1"])
DELAYS_S = st.sampled_from([None, None, 0.5, 10.0])
"""Of an event that a transfer waits for, if for any: soon, or later than it will wait."""
LONG_S = 60.0
"""Longer than any call takes that may wait for several others."""
_POISON = 0xEE


class Engine(AnyEngine):
    """An engine with room for one call that is waited for, region 0, and for three that go on meanwhile."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4 * N)

    def at(self, keys: BlockKeys, region: int = 0) -> GPULoadStoreSpec:
        """Say where the blocks of these keys are in a region."""
        return self.spec(self.blocks(keys, region))

    def blocks(self, keys: BlockKeys, region: int = 0) -> range:
        """Number them."""
        return range(region * N, region * N + len(keys))

    def compute(self, keys: BlockKeys, weights: str, region: int = 0) -> GPULoadStoreSpec:
        """Fill them."""
        return self.fill(keys, self.blocks(keys, region), weights)

    def has(self, keys: BlockKeys, n: int, weights: str, region: int = 0) -> bool:
        """Say whether the first ``n`` of them are right."""
        return all(self.right(keys[:n], self.blocks(keys[:n], region), weights))

    def poison(self, region: int = 0) -> None:
        """Overwrite a region, which is nobody's now."""
        for part in self._parts(region):
            part.fill_(_POISON)

    def is_poisoned(self, region: int) -> bool:
        """Say whether nobody has written to it since."""
        return all(bool((part == _POISON).all()) for part in self._parts(region))

    def _parts(self, region: int) -> list[torch.Tensor]:
        return [layer[:, region * N : (region + 1) * N].view(torch.uint8) for layer in self.caches[0]]


class Known:
    """The model: what could be there. The cache may forget any of it at any time, and may know nothing else."""

    def __init__(self) -> None:
        self.weights = "w0"
        self._stored: set[tuple[str, bytes]] = set()
        self._gone: set[tuple[str, bytes]] = set()

    def prefix(self, keys: BlockKeys) -> int:
        """Count the leading blocks that could be there."""
        return [*((self.weights, digest) in self._stored for digest in keys), False].index(False)

    def store(self, keys: BlockKeys, weights: str) -> None:
        """Blocks are being stored."""
        self._stored |= {(weights, digest) for digest in keys}

    def evict(self, keys: BlockKeys) -> None:
        """Blocks are gone: those of the weights served now."""
        self._remove({(self.weights, digest) for digest in keys})

    def clear(self) -> None:
        """All are gone."""
        self._remove(set(self._stored))

    def restore(self) -> None:
        """A medium may not have heard of what is gone, and have it after a restart."""
        self._stored |= self._gone

    def _remove(self, blocks: set[tuple[str, bytes]]) -> None:
        self._gone |= blocks & self._stored
        self._stored -= blocks


class Machine(RuleBasedStateMachine):
    """A cache of few blocks in any tiers, what is under way in it, and what could be in it."""

    make_world: ClassVar[Callable[[], World]]

    def __init__(self) -> None:
        super().__init__()
        self.world = type(self).make_world()
        self.engine = Engine()
        self.known = Known()
        self.asked = {"load": 0, "store": 0}
        self.has_pins = False
        self.kv: TieredKV | None = None

    @initialize(
        chain=st.integers(0, 11),
        writes_back=st.booleans(),
        is_exclusive=st.booleans(),
        admit_after=st.sampled_from([1, 1, 2]),
        low_water=st.sampled_from([0.0, 0.5, 1.0]),
        ttl_s=st.sampled_from([None, None, 20.0]),
        stored=st.lists(SPANS, max_size=2),
    )
    def begin(self, chain: int, stored: list[BlockKeys], **policies: Any) -> None:  # noqa: ANN401 - fields of `Shape`
        """Open a cache of any shape, and store something."""
        self.shape = Shape(self.world.chains[chain % len(self.world.chains)], **policies)
        self.open()
        for keys in stored:
            self.run(self.keep(keys), LONG_S)
        self.engine.poison()

    def open(self) -> None:
        """Open a cache, on what the one before left behind."""
        model = ModelIdentity(MODEL.name, self.known.weights)
        limits = self.world.limits.model_copy(update={"low_water": self.shape.low_water})
        self.kv = TieredKV(
            self.world.tiers(self.shape),
            model=model,
            layout=self.engine.layout,
            limits=limits,
            device=self.world.device,
            emit=Recorder(),
        )
        self.run(self.kv.__aenter__(), LONG_S)
        self.kv.register_kv_caches(self.engine.caches[0])
        self.asked = {"load": 0, "store": 0}

    async def keep(self, keys: BlockKeys) -> None:
        """Compute and store blocks."""
        self.known.store(keys, self.known.weights)
        self.asked["store"] += len(keys)
        await self.cache.store(keys, self.engine.compute(keys, self.known.weights))

    def close(self) -> None:
        """Close the cache: it ends in its time, whatever hangs, and so does all that was under way in it."""
        self.run(self.cache.aclose(), 5 * inside(self.cache).limits.close_timeout_s)
        self.kv, self.has_pins = None, False
        if self.world.was_faulty:
            self.known.restore()

    @property
    def cache(self) -> TieredKV:
        """The cache, which is open."""
        assert self.kv is not None
        return self.kv

    @property
    def is_quiet(self) -> bool:
        """Whether nothing moves or is at fault, so that the cache has no reason to forget or refuse anything."""
        return not self.cache.stats().transfers and not self.num_underway and not self.world.was_faulty

    @property
    def num_underway(self) -> int:
        """Transfers begun and not finished."""
        return 0

    def settle(self) -> None:
        """Let everything end and hold nothing: then the cache holds nothing either."""
        self.world.release()
        self.has_pins = False

        async def end() -> None:
            for keys in PROMPTS:
                self.cache.unpin(keys)
            await self.cache.flush()
            while any(tier.dirty for tier in self.cache.stats().tiers):  # a tier that failed is tried again later
                await asyncio.sleep(5.0)
                await self.cache.flush()
            await self.idle()

        self.run(end(), LONG_S)
        assert_nothing_left(self.cache)

    async def idle(self) -> None:
        """Wait until nothing moves."""
        while self.cache.stats().transfers:  # noqa: ASYNC110 - the cache tells nobody
            await asyncio.sleep(self.world.tick_s)
        await _turns()

    def run(self, call: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Make a call, and assert that it ends in time; tasks of the cache go on during the next one."""

        async def bounded() -> T:
            task = asyncio.ensure_future(call)
            await asyncio.wait({task}, timeout=limit_s + self.world.slack_s)
            assert task.done(), f"not ended after {limit_s} s: {task}"
            return task.result()

        return self.world.runner.run(bounded())

    @invariant()
    def lookup_knows_nothing_else(self) -> None:
        """No prefix is longer than what was stored of it and has not gone, however it is asked for."""

        async def look(keys: BlockKeys) -> tuple[int, int]:
            return self.cache.lookup_nowait(keys).num_blocks, (await self.cache.lookup(keys)).num_blocks

        for keys in PROMPTS if self.kv else ():
            owned, found = self.run(look(keys), 2 * LONG_S)
            assert owned <= self.known.prefix(keys)
            assert found <= self.known.prefix(keys)
            assert owned == found or self.shape.has("keyed")
            for place in range(N):
                one = keys[place : place + 1]
                assert self.cache.lookup_nowait(one).num_blocks <= self.known.prefix(one)

    @invariant()
    def statistics_add_up(self) -> None:
        """Each block asked for was counted once; where nothing moves, all that was asked for, and nothing is held."""
        if self.kv is None:
            return
        self.run(_turns(), 0.0)
        stats = self.kv.stats()
        assert sum(tier.hits for tier in stats.tiers) + stats.missed == stats.requested
        assert stats.stored + stats.present + stats.dropped == stats.store_requested
        if stats.transfers or self.num_underway:
            return
        assert (stats.requested, stats.store_requested) == (self.asked["load"], self.asked["store"])
        if not self.has_pins and not any(tier.dirty for tier in stats.tiers):
            assert_nothing_left(self.kv)

    @invariant()
    def nobody_writes_to_memory_of_the_engine(self) -> None:
        """A call that has ended touches nothing any more."""
        assert self.engine.is_poisoned(0)

    def teardown(self) -> None:
        """End; unless something is wrong already, check that nothing is left."""
        if sys.exc_info()[0] is not None:
            with suppress(BaseException):
                self.world.release()
                self.run(self.cache.aclose(), LONG_S)
            with suppress(BaseException):
                self.world.close()
            with suppress(RuntimeError):
                self.world.runner.get_loop().close()
            return
        if self.kv is not None:
            self.settle()
            self.close()
        self.world.close()


async def _turns() -> None:
    """Let callbacks of what has ended run."""
    for _ in range(5):
        await asyncio.sleep(0)
