"""Write-back, exclusive tiers, admission and resizing against a dict: no wrong byte, no leak, in whatever order."""

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.service.any_layout import LIMITS, MODEL, STRIDE, AnyEngine, cpu, gpu, nvme, prompt
from tests.service.conftest import Recorder, until_idle
from tiered_kv import BlockKeys, ModelIdentity, TieredKV

PROMPTS = [prompt(12, seed=seed) for seed in range(3)]
SPANS = st.tuples(st.sampled_from(PROMPTS), st.integers(0, 11), st.integers(0, 12)).map(lambda at: at[0][at[1] : at[2]])


class WriteBackMachine(RuleBasedStateMachine):
    """A cache of few blocks in up to three tiers, with any policies; the model is what was stored and not evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = tempfile.TemporaryDirectory()
        self.engine = AnyEngine(num_blocks=12)
        self.weights = "w0"
        self.stored: set[tuple[str, bytes]] = set()

    @initialize(
        shape=st.sampled_from(["cpu", "gpu", "both"]),
        is_exclusive=st.booleans(),
        admit_after=st.sampled_from([1, 1, 2]),
        low_water=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def open(self, *, shape: str, is_exclusive: bool, admit_after: int, low_water: float) -> None:
        """Open a cache on the directory, as new or as left by the one before."""
        self.shape = {"shape": shape, "is_exclusive": is_exclusive, "admit_after": admit_after, "low_water": low_water}
        self.has_cpu = shape != "gpu"
        tiers = [] if shape == "cpu" else [gpu(6)]
        if self.has_cpu:
            write = "through" if shape == "cpu" else "back"
            tiers.append(cpu(10) | {"write": write, "max_capacity": 20 * STRIDE})
        disk = {"write": "back", "exclusive": is_exclusive and self.has_cpu, "admit_after": admit_after}
        tiers.append(nvme(Path(self.directory.name), 400_000) | disk | {"max_capacity": 800_000})
        limits = LIMITS.model_copy(update={"low_water": low_water, "clean_after_s": 1000.0})
        model = ModelIdentity(MODEL.name, self.weights)
        self.kv = TieredKV(tiers, model=model, layout=self.engine.layout, limits=limits, emit=Recorder())
        self.run(self.kv.__aenter__())
        self.kv.register_kv_caches(self.engine.caches[0])

    @rule(keys=SPANS, settles=st.booleans())
    def store(self, keys: BlockKeys, *, settles: bool) -> None:
        """Compute and store blocks: each is counted once in each tier."""
        result = self.run(self.kv.store(keys, self.engine.fill(keys, range(len(keys)), self.weights)))
        assert result.num_stored + result.num_present + result.num_dropped == len(keys)
        self.stored |= {(self.weights, digest) for digest in keys}
        if settles:
            for tier in self.run(result.settled()):
                counted = tier.written + tier.present + tier.deferred + tier.dropped + tier.failed
                assert counted == len(keys), tier

    @rule(keys=SPANS)
    def load(self, keys: BlockKeys) -> None:
        """Load: every byte of the prefix is right."""
        self.engine.wipe()
        loaded = self.run(self.kv.load(keys, self.engine.spec(range(len(keys)))))
        assert loaded.num_blocks <= self.known_prefix(keys)
        assert self.engine.count_right(keys, range(len(keys)), self.weights) == loaded.num_blocks

    @rule(keys=SPANS, tier=st.sampled_from([None, "nvme", "cpu", "gpu"]))
    def evict(self, keys: BlockKeys, tier: str | None) -> None:
        """Evict by name: from every tier, they are gone, whether they waited or not."""
        if tier is not None and tier not in [each.tier for each in self.kv.stats().tiers]:
            return
        self.run(self.kv.evict(keys, tier=tier))
        if tier is None:
            self.stored -= {(self.weights, digest) for digest in keys}
            assert not keys or self.run(self.kv.lookup(keys)).num_blocks == 0

    @rule(keys=SPANS)
    def touch(self, keys: BlockKeys) -> None:
        """Use blocks."""
        self.kv.touch(keys)

    @rule(num_blocks=st.integers(1, 20))
    def resize_memory(self, num_blocks: int) -> None:
        """Have another number of blocks in memory."""
        if self.has_cpu:
            assert self.run(self.kv.resize("cpu", num_blocks * STRIDE)) == num_blocks

    @rule(capacity=st.sampled_from([300_000, 400_000, 800_000]))
    def resize_disk(self, capacity: int) -> None:
        """Have another capacity of the disk."""
        self.run(self.kv.resize("nvme", capacity))

    @rule()
    def flush(self) -> None:
        """Write what waits: nothing does afterwards."""
        self.run(self.kv.flush())
        assert not any(tier.dirty for tier in self.kv.stats().tiers)

    @rule()
    def clear(self) -> None:
        """Empty the cache."""
        self.run(self.kv.clear())
        self.stored.clear()

    @rule(weights=st.sampled_from(["w0", "w1"]))
    def advance_epoch(self, weights: str) -> None:
        """Serve other weights, or those of before."""
        self.kv.advance_epoch(weights)
        self.weights = weights

    @rule()
    def reopen(self) -> None:
        """End, and begin again from the disk."""
        self.close()
        self.open(**self.shape)

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


TestWriteBack = WriteBackMachine.TestCase
TestWriteBack.settings = settings(
    max_examples=30, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
