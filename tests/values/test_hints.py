"""Hints: what can be said, and that it is heard wherever blocks are kept."""

from typing import Any

import numpy as np
import pytest

from tests.support.caches import keep, open_cache, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, contents, prompt
from tiered_kv import ConfigurationError, GPULoadStoreSpec, ReuseHint
from tiered_kv.catalog.policies.make_policy import POLICIES

CLOSED = ReuseHint(0.0)
STRIDE = PAYLOAD_BYTES
A, B, C, D = (prompt(4, seed=seed) for seed in range(4))


@pytest.mark.parametrize(
    "said",
    [
        {"probability": 1.1},
        {"probability": float("nan")},
        {"probability": "0.5"},
        {"probability": True},
        {"probability": 10**400},
        {"probability": 0.5, "within_s": 0},
        {"probability": 0.5, "within_s": np.longdouble("1e-4000")},  # of which a float is 0
        {"probability": 0.5, "category": 7},
        {"probability": 0.5, "category": "x" * 1001},
    ],
)
def test_what_cannot_be_is_refused(said: dict[str, Any]) -> None:
    """A hint that means nothing is refused where it is made, with what was given."""
    with pytest.raises(ConfigurationError, match=r"a hint's .* got "):
        ReuseHint(**said)


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_closed_conversation_goes_first(policy: str) -> None:
    """Under every policy, although it is the last that was stored; unless somebody asks for it again."""
    cpu, engine = {"medium": "cpu", "capacity": 12 * STRIDE, "policy": policy}, Engine()
    for is_asked_again in (False, True):
        async with open_cache(cpu, engine=engine) as kv:
            for keys in (A, B, C):
                await keep(kv, engine, keys)
            kv.touch(C, hint=CLOSED)
            if is_asked_again:
                await kv.load(C, GPULoadStoreSpec(range(4)))
            await keep(kv, engine, D)
            found = [(await kv.lookup(keys)).num_blocks for keys in (A, B, C)]
            assert (found == [4, 4, 0]) is not is_asked_again
            await until_idle(kv)


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_store_can_say_that_nobody_will_ask(policy: str) -> None:
    """Such blocks go first, and what is stored is served all the same."""
    cpu, engine = {"medium": "cpu", "capacity": 12 * STRIDE, "policy": policy}, Engine()
    async with open_cache(cpu, engine=engine) as kv:
        for keys, hint in ((A, None), (B, CLOSED), (C, ReuseHint(0.9, within_s=5.0))):
            await (await kv.store(keys, engine.compute(keys), hint=hint)).settled()
        await keep(kv, engine, D)
        assert [(await kv.lookup(keys)).num_blocks for keys in (A, B, C, D)] == [4, 0, 4, 4]
        engine.poison()
        assert (await kv.load(C, GPULoadStoreSpec(range(4)))).num_blocks == 4
        assert engine.read(range(4)) == contents(C)


async def test_a_hint_is_no_other_thing() -> None:
    """What is no `ReuseHint` is refused, and nothing has changed."""
    engine = Engine()
    async with open_cache({"medium": "cpu", "capacity": 12 * STRIDE}, engine=engine) as kv:
        with pytest.raises(ConfigurationError, match="hint must be a ReuseHint or None, got float"):
            kv.touch(A, hint=0.5)  # type: ignore[arg-type] # is what is refused
        with pytest.raises(ConfigurationError, match="hint must be a ReuseHint or None, got str"):
            await kv.store(A, engine.compute(A), hint="closed")  # type: ignore[arg-type] # is what is refused
        assert (await kv.lookup(A)).num_blocks == 0
