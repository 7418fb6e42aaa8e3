"""The cache beside its model: what is common to all rules, and what must hold after each."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant
from numpy.typing import NDArray

from tests.cache.model.engine import PROMPTS, Engine, Place
from tests.cache.model.world import Shape, World
from tests.support.any_layout import MODEL
from tests.support.caches import Recorder, assert_nothing_left, inside
from tiered_kv import BackendUnavailableError, BlockKeys, BlockState, ModelIdentity, TieredKV

T = TypeVar("T")
Block = tuple[str, int, bytes]
"""Its version, KV group and hash."""


def span(which: int, start: int, stop: int) -> BlockKeys:
    """Return some blocks of a prompt, perhaps none."""
    return PROMPTS[which][start:stop]


SPANS = st.builds(
    span, st.integers(0, len(PROMPTS) - 1), st.sampled_from([0, 0, 0, 1, 4, 7]), st.integers(0, len(PROMPTS[0]))
)
PLACES = st.sampled_from(["pages", "pages", "pool", "direct"])
WEIGHTS = st.sampled_from(["w0", "w1"])
DELAYS_S = st.sampled_from([None, None, 0.5, 10.0])
"""Of an event that a transfer waits for, if for any: soon, or later than it will wait."""
OPENINGS = st.sampled_from(["well", "well", "fails", "hangs"])
LONG_S = 60.0
"""Longer than any call takes that may wait for several others."""
HERE = Place()


class Known:
    """The model: what could be there. The cache may forget any of it at any time, and may know nothing else."""

    def __init__(self) -> None:
        self._stored: set[Block] = set()
        self._gone: set[Block] = set()

    def prefix(self, keys: BlockKeys, version: str) -> int:
        """Count the leading blocks that could be there."""
        return [*((version, keys.group, digest) in self._stored for digest in keys), False].index(False)

    def store(self, keys: BlockKeys, version: str) -> None:
        """Blocks are being stored."""
        self._stored |= _blocks(keys, version)

    def evict(self, keys: BlockKeys, version: str) -> None:
        """Blocks are gone."""
        self._remove(_blocks(keys, version))

    def clear(self) -> None:
        """All are gone."""
        self._remove(set(self._stored))

    def restore(self) -> None:
        """A medium may not have heard of what is gone, and have it after a restart."""
        self._stored |= self._gone

    def _remove(self, blocks: set[Block]) -> None:
        self._gone |= blocks & self._stored
        self._stored -= blocks


def _blocks(keys: BlockKeys, version: str) -> set[Block]:
    return {(version, keys.group, digest) for digest in keys}


class Machine(RuleBasedStateMachine):
    """A cache of few blocks in any tiers, what is under way in it, and what could be in it."""

    make_world: ClassVar[Callable[[], World]]

    def __init__(self) -> None:
        super().__init__()
        self.world = type(self).make_world()
        self.known = Known()
        self.weights, self.rank = "w0", 0
        self.asked = {"load": 0, "store": 0}
        self.has_pins = False
        self.num_looks = 0
        self.kv: TieredKV | None = None

    @initialize(
        chain=st.integers(0, 11),
        writes_back=st.booleans(),
        is_required=st.booleans(),
        codec=st.sampled_from(["none", "none", "fp8", "exponent"]),
        cipher=st.sampled_from(["", "", "aes-256-gcm", "aes-256-gmac"]),
        ranks=st.sampled_from(["one", "one", "parts", "replicas"]),
        admit_after=st.sampled_from([1, 1, 2]),
        low_water=st.sampled_from([0.0, 0.5, 1.0]),
        ttl_s=st.sampled_from([None, None, 20.0]),
        stored=st.lists(SPANS, max_size=2),
    )
    def begin(self, chain: int, stored: list[BlockKeys], **policies: Any) -> None:  # noqa: ANN401 - fields of `Shape`
        """Open a cache of any shape, and store something."""
        self.shape = Shape(self.world.chains[chain % len(self.world.chains)], **policies)
        self.engine = Engine(self.shape.codec)
        self.engine.wipe()
        self.open()
        for keys in stored:
            self.run(self.keep(keys), LONG_S)
        self.poison()

    def open(self, how: str = "well") -> None:
        """Open a cache, on what the one before left behind; where a tier is not there yet, without it or again."""
        self.kv = self._made()
        for name, act in self.world.acts.items() if how != "well" else ():
            if name.endswith("open"):
                self.world.was_faulty = True
                act.hold() if how == "hangs" else act.fail_next(BackendUnavailableError("not yet"))
        try:
            self.run(self.kv.__aenter__(), LONG_S)
        except BackendUnavailableError:
            assert self.world.was_faulty
            assert self.shape.is_required
            self.world.release()
            self.kv = self._made()
            self.run(self.kv.__aenter__(), LONG_S)
        self.engine.register(self.kv)
        self.asked = {"load": 0, "store": 0}

    def _made(self) -> TieredKV:
        return TieredKV(
            self.world.tiers(self.shape, self.rank),
            model=ModelIdentity(MODEL.name, self.weights),
            layout=self.engine.layout,
            shard=self.shape.shard(self.rank),
            limits=self.world.limits.model_copy(update={"low_water": self.shape.low_water}),
            device=self.world.device,
            codec=self.shape.codec,
            emit=Recorder(),
        )

    def version(self, keys: BlockKeys, weights: str | None = None) -> str:
        """Say which blocks of these hashes are meant: by whom they were computed, for whom, and whose part they are."""
        part = self.rank if self.shape.ranks == "parts" else ""
        return f"{weights or self.weights} {keys.salt_id.hex()} {part}"

    def prefix(self, keys: BlockKeys) -> int:
        """Count the leading blocks that could be there now."""
        return self.known.prefix(keys, self.version(keys))

    def has(self, keys: BlockKeys, num_blocks: int, place: Place = HERE, weights: str | None = None) -> bool:
        """Say whether the leading blocks at a place are right."""
        return all(self.engine.which(keys[:num_blocks], self.version(keys, weights), place))

    def has_all_of(self, keys: BlockKeys, mask: NDArray[np.bool_], place: Place, weights: str | None = None) -> bool:
        """Say whether the blocks of a mask are right."""
        which = self.engine.which(keys, self.version(keys, weights), place)
        return bool(np.all(np.array(which, np.bool_)[mask]))

    def poison(self, region: int = 0) -> None:
        """Take a region of the engine's memory for nobody's."""
        self.engine.poison(region)

    def computed(self, keys: BlockKeys, place: Place = HERE, weights: str | None = None) -> Any:  # noqa: ANN401
        """Compute blocks that are to be stored; return where they are."""
        self.known.store(keys, self.version(keys, weights))
        self.asked["store"] += len(keys)
        return self.engine.compute(keys, self.version(keys, weights), place)

    async def keep(self, keys: BlockKeys) -> None:
        """Compute and store blocks."""
        await self.cache.store(keys, self.computed(keys))

    def close(self, closing: Coroutine[Any, Any, None] | None = None) -> None:
        """Close the cache: it ends in its time, whatever hangs, and so does all that was under way in it."""
        self.run(closing or self.cache.aclose(), 5 * inside(self.cache).cache.limits.close_timeout_s)
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
        await turns()

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

        async def found() -> list[tuple[int, int]]:
            # At one moment each: in real time a store goes on meanwhile.
            kv = self.cache
            return [((await kv.lookup(keys)).num_blocks, kv.lookup_nowait(keys).num_blocks) for keys in PROMPTS]

        self.num_looks += 1
        for keys, (num_found, owned) in zip(PROMPTS, self.run(found(), 10 * LONG_S), strict=True) if self.kv else ():
            assert owned <= self.prefix(keys)
            assert num_found <= self.prefix(keys)
            assert owned == num_found or self.shape.has("keyed")
            place = self.num_looks % len(keys)
            one = keys[place : place + 1]
            assert self.cache.lookup_nowait(one).num_blocks <= self.prefix(one)
            assert self.cache.membership(one)[0] != BlockState.HIT or self.prefix(one)

    @invariant()
    def statistics_add_up(self) -> None:
        """Each block asked for was counted once; where nothing moves, all that was asked for, and nothing is held."""
        if self.kv is None:
            return
        self.run(turns(), 0.0)
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

    @invariant()
    def nothing_crashes(self) -> None:
        """No task of the cache ends by an error, whatever others' code does; and media are used as they should be."""
        self.world.check()

    def teardown(self) -> None:
        """End; unless something is wrong already, check that nothing is left."""
        if sys.exc_info()[0] is not None:
            self._give_up()
            return
        try:
            if self.kv is not None:
                self.settle()
                self.close()
            self.world.close()
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """End as far as that goes, of what is broken, and leave nothing to the tests that follow."""
        with suppress(BaseException):
            self.world.release()
            self.run(self.cache.aclose(), LONG_S)
        with suppress(BaseException):
            self.world.close()
        with suppress(RuntimeError):
            self.world.runner.get_loop().close()


async def turns() -> None:
    """Let callbacks of what has ended run."""
    for _ in range(5):
        await asyncio.sleep(0)
