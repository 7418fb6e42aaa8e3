"""Hints are heard whatever way they come: by a cache of one's own, and by a host's server from its clients."""

import asyncio
import pickle
from pathlib import Path

import pytest

from tests.support.any_layout import SMALL, AnyEngine, cpu, open_any, prompt
from tests.support.serving import attached, serving
from tiered_kv import ConfigurationError, ConnectedKV, ReuseHint, TieredKV, Worker

CLOSED = ReuseHint(0.0)
WAIT_S = 60.0
"""For what comes at once unless something is broken."""


async def assert_every_way_is_heard(kv: TieredKV | ConnectedKV, engine: AnyEngine) -> None:
    """Fill a tier of 20 blocks by every call that takes a hint, then overfill it: what was not hinted at stays."""
    kept, stored, submitted, planned, touched = (prompt(4, seed=seed) for seed in range(5))
    blocks = range(4)
    await kv.store(kept, engine.fill(kept, blocks))
    await kv.store(stored, engine.fill(stored, blocks), hint=CLOSED)
    ticket = kv.submit_store(submitted, engine.fill(submitted, blocks), hint=CLOSED)
    await asyncio.to_thread(ticket.wait, WAIT_S)
    planner = kv.planner()
    worker = Worker(pickle.loads(pickle.dumps(planner.slabs())), layout=SMALL, device="cpu")
    try:
        worker.register_kv_caches(engine.caches[0])
        planner.register_worker()
        with pytest.raises(ConfigurationError, match="hint must be a ReuseHint or None"):
            planner.plan_store(planned, hint=0.0)  # type: ignore[arg-type] # is what is refused
        job = planner.plan_store(planned, engine.fill(planned, blocks), hint=CLOSED)
        planner.complete(worker.execute(await job.planned()))
        assert (await job.ended()).num_blocks == 4
    finally:
        worker.close()
    await kv.store(touched, engine.fill(touched, blocks))
    kv.touch(touched, hint=CLOSED)
    await kv.flush()
    assert [(await kv.lookup(keys)).num_blocks for keys in (kept, stored, submitted, planned, touched)] == [4] * 5
    await kv.store(prompt(16, seed=9), engine.fill(prompt(16, seed=9), range(16)))
    found = [(await kv.lookup(keys)).num_blocks for keys in (kept, stored, submitted, planned, touched)]
    assert found == [4, 0, 0, 0, 0]


async def test_a_cache_of_ones_own() -> None:
    """Stored, submitted, planned, touched."""
    engine = AnyEngine()
    async with open_any(engine, cpu(20)) as kv:
        await assert_every_way_is_heard(kv, engine)


async def test_a_client_of_a_server(tmp_path: Path) -> None:
    """The same, by another process's cache; what is no hint does not get there."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(20)) as server:
        async with attached(server, engine) as kv:
            await assert_every_way_is_heard(kv, engine)
            with pytest.raises(ConfigurationError, match="hint must be a ReuseHint or None"):
                kv.touch(prompt(4), hint="closed")  # type: ignore[arg-type] # is what is refused
