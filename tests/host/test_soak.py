"""A server for hours, while clients come, die, hang and go, and its disk is damaged: what it has does not grow.

`make soak` takes an hour, a test run seconds.
"""

import asyncio
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.cache.test_soak import damage
from tests.host.processes import MOST_UNHEARD, Started, prompt_of, server, started, storing_client
from tests.host.test_deaths import attached_at, facts, until_clean
from tests.host.test_kills import MODELS, MOST_GROWTH_BYTES, memory_of
from tests.support.any_layout import AnyEngine
from tests.support.caches import until

ENDS = ("killed", "killed while they hung", "killed after they hung")
"""Of the clients that are at work."""
LEAST_ROUNDS = 6


async def come_and_go(path: Path, number: int, how: str) -> None:
    """Have two clients at work and a third that says goodbye; whatever is loaded is right, byte by byte."""
    first, second, third = (MODELS[(number + at) % len(MODELS)] for at in range(3))
    with ExitStack() as stack:
        clients: list[Started] = []
        for at, model in enumerate((first, second)):
            work = path / "kv.sock", (2 * number + at + 1) << 12, model, MOST_UNHEARD
            clients.append(stack.enter_context(started(storing_client, *work)))
        for each in clients:
            await asyncio.to_thread(each.hear)  # raises if it has ended, as it does where a byte is wrong
            if how != "killed":
                each.send(signal.SIGSTOP)
        engine, keys = AnyEngine(), prompt_of(number)
        async with attached_at(path, engine, model=third, timeout_s=60.0) as kv:
            await (await kv.store(keys, engine.fill(keys, range(8)))).settled()
            kv.pin(keys, ttl_s=600.0)
            async with kv.lease(keys):
                engine.wipe()
                loaded = await kv.load(keys, engine.spec(range(8)))
            assert loaded.num_blocks <= engine.count_right(keys, range(8))
        if how == "killed after they hung":
            for each in clients:
                each.send(signal.SIGCONT)
                await asyncio.to_thread(each.hear)


async def measured(serving: Started, path: Path) -> dict[str, int]:
    """Say what a server has once nobody is attached: whatever is held for anyone is held for nobody."""
    for model in MODELS:
        async with attached_at(path, AnyEngine(), model=model, timeout_s=60.0) as kv:
            await until(lambda: kv.stats()["cpu"].doomed == 0)
            assert kv.stats().bounce_free == kv.stats().bounce_slots
            assert kv.stats().pinned_bytes == 0
    await until_clean(path)
    anonymous, shared, num_slabs = memory_of(serving.pid)
    threads, descriptors = num_threads(serving.pid), facts(path)["num_descriptors"]
    return {"rss": anonymous + shared, "slabs": num_slabs, "threads": threads, "descriptors": descriptors}


def num_threads(pid: int) -> int:
    """Count a process's threads."""
    return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(0)
async def test_a_server_has_no_more_however_long_it_serves(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Threads, descriptors, slabs, leases and slots are as many as before, memory is about as much."""
    rng, ends, told = np.random.default_rng(1), Counter[str](), list[dict[str, int]]()
    with started(server, tmp_path, num_blocks=256) as serving:
        assert await asyncio.to_thread(serving.hear) == "ready"
        end = time.monotonic() + request.config.getoption("--soak")
        while time.monotonic() < end or len(told) < LEAST_ROUNDS:
            how = ENDS[int(rng.integers(len(ENDS)))]
            await come_and_go(tmp_path, len(told), how)
            ends[how] += 2
            damage(tmp_path / "disk", rng)
            told.append(await measured(serving, tmp_path))
    first, last = told[len(told) // 4], told[-1]
    sys.stdout.write(f"{len(told)} rounds, clients {dict(ends)}; from {first} to {last}\n")
    assert {**last, "rss": 0} == {**first, "rss": 0}
    assert last["rss"] - first["rss"] < MOST_GROWTH_BYTES
