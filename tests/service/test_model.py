"""The whole facade against a dict: whatever is called in whatever order, no wrong byte is ever served."""

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.service.any_layout import LIMITS, MODEL, AnyEngine, cpu, nvme, prompt
from tests.service.conftest import Recorder, until_idle
from tiered_kv import BlockKeys, ModelIdentity, TieredKV

PROMPTS = [prompt(12, seed=seed) for seed in range(3)]
"""The third shares nothing with the first two; those share nothing either: few blocks, so that they meet often."""
SPANS = st.tuples(st.sampled_from(PROMPTS), st.integers(0, 11), st.integers(0, 12)).map(lambda at: at[0][at[1] : at[2]])
WEIGHTS = ("w0", "w1")


class TieredKVMachine(RuleBasedStateMachine):
    """A cache of 10 blocks of memory and 16 on disk, for 36 blocks of each of two epochs.

    The model is what could be there: every block stored, and not since evicted or cleared, with its weights. The cache
    may forget any of it at any time, and may know nothing else.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = tempfile.TemporaryDirectory()
        self.engine = AnyEngine(num_blocks=12)
        self.weights = "w0"
        self.stored: set[tuple[str, bytes]] = set()

    @initialize(num_blocks=st.sampled_from([0, 10]))
    def open(self, num_blocks: int) -> None:
        """Open a cache on the directory, as new or as left by the one before."""
        tiers = [cpu(num_blocks)] if num_blocks else []
        tiers.append(nvme(Path(self.directory.name), 400_000))
        model = ModelIdentity(MODEL.name, self.weights)
        self.num_memory_blocks = num_blocks
        self.kv = TieredKV(tiers, model=model, layout=self.engine.layout, limits=LIMITS, emit=Recorder())
        self.run(self.kv.__aenter__())
        self.kv.register_kv_caches(self.engine.caches[0])

    @rule(keys=SPANS, settles=st.booleans())
    def store(self, keys: BlockKeys, *, settles: bool) -> None:
        """Compute and store blocks; perhaps do not wait until they are in every tier."""
        result = self.run(self.kv.store(keys, self.engine.fill(keys, range(len(keys)), self.weights)))
        assert result.num_stored + result.num_present + result.num_dropped == len(keys)
        self.stored |= {(self.weights, digest) for digest in keys}
        if settles:
            for tier in self.run(result.settled()):
                assert tier.written + tier.present + tier.dropped + tier.failed == len(keys)

    @rule(keys=SPANS)
    def load(self, keys: BlockKeys) -> None:
        """Load what there is: all that was found, every byte right."""
        found = self.run(self.kv.lookup(keys)).num_blocks
        self.engine.wipe()
        loaded = self.run(self.kv.load(keys, self.engine.spec(range(len(keys)))))
        assert loaded.num_blocks == sum(loaded.by_tier.values()) == found
        assert found <= self.known_prefix(keys)
        assert self.engine.count_right(keys, range(len(keys)), self.weights) == found

    @rule(first=SPANS, second=SPANS)
    def load_two_at_once(self, first: BlockKeys, second: BlockKeys) -> None:
        """Two loads at once share what they wait for, and neither gets the other's bytes."""

        async def both() -> None:
            self.engine.wipe()
            half = AnyEngine(num_blocks=12)
            self.kv.register_kv_caches(half.caches[0])
            one = self.kv.start_load(first, half.spec(range(len(first))))
            self.kv.register_kv_caches(self.engine.caches[0])
            two = self.kv.start_load(second, self.engine.spec(range(len(second))))
            num_first, num_second = (await one).num_blocks, (await two).num_blocks
            assert half.count_right(first, range(len(first)), self.weights) == num_first
            assert self.engine.count_right(second, range(len(second)), self.weights) == num_second

        self.run(both())

    @rule(keys=SPANS)
    def lease(self, keys: BlockKeys) -> None:
        """Hold blocks in memory while others are stored: they stay."""
        if not self.num_memory_blocks:
            return

        async def hold() -> None:
            async with self.kv.lease(keys) as lease:
                assert lease.num_blocks <= self.known_prefix(keys)
                held = [bytes(view) for view in lease.views]
                other = PROMPTS[2][:8]
                await self.kv.store(other, self.engine.fill(other, range(8), self.weights))
                self.stored.update((self.weights, digest) for digest in other)
                assert (await self.kv.lookup(keys)).num_blocks >= lease.num_blocks
                assert [bytes(view) for view in lease.views] == held

        self.run(hold())

    @rule(keys=SPANS)
    def touch_and_prefetch(self, keys: BlockKeys) -> None:
        """Use blocks and bring them up: nothing that is not there comes of it."""

        async def use() -> None:
            self.kv.touch(keys)
            if self.num_memory_blocks:
                assert (await self.kv.prefetch(keys)).num_blocks <= self.known_prefix(keys)

        self.run(use())

    @rule(keys=SPANS, tier=st.sampled_from([None, "nvme", "cpu"]))
    def evict(self, keys: BlockKeys, tier: str | None) -> None:
        """Evict by name: from every tier, they are gone; from one, what is elsewhere stays."""
        if tier == "cpu" and not self.num_memory_blocks:
            return
        self.run(self.kv.evict(keys, tier=tier))
        if tier is None:
            self.stored -= {(self.weights, digest) for digest in keys}
            assert not keys or self.run(self.kv.lookup(keys)).num_blocks == 0

    @rule()
    def clear(self) -> None:
        """Empty the cache."""
        self.run(self.kv.clear())
        self.stored.clear()

    @rule(weights=st.sampled_from(WEIGHTS))
    def advance_epoch(self, weights: str) -> None:
        """Serve other weights, or those of before."""
        self.kv.advance_epoch(weights)
        self.weights = weights

    @rule(num_blocks=st.sampled_from([0, 10]))
    def reopen(self, num_blocks: int) -> None:
        """End, and begin again from the disk."""
        self.close()
        self.open(num_blocks)

    @invariant()
    def lookup_knows_nothing_else(self) -> None:
        """No prefix is longer than what was stored of it."""
        for keys in PROMPTS:
            assert self.run(self.kv.lookup(keys)).num_blocks <= self.known_prefix(keys)

    def teardown(self) -> None:
        """At the end nothing is held, and nothing is left behind by closing."""
        if hasattr(self, "kv"):
            self.close()
        self.runner.close()
        self.directory.cleanup()

    def close(self) -> None:
        """Check that nothing is held, and close."""

        async def drain() -> None:
            await self.kv.flush()
            await until_idle(self.kv)
            await self.kv.aclose()

        self.run(drain())

    def known_prefix(self, keys: BlockKeys) -> int:
        """Count the leading blocks that could be there."""
        return [*((self.weights, digest) in self.stored for digest in keys), False].index(False)

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401 - whatever it returns
        """Run a call on the loop of this machine; tasks of the cache go on during the next one."""
        return self.runner.run(call)


TestTieredKV = TieredKVMachine.TestCase
TestTieredKV.settings = settings(
    max_examples=30, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
