"""A cache under steady traffic, in a process of its own that test_soak damages the files of, measures and kills.

Each line read is how many requests to serve before a measurement, which is made when nothing moves, and answered by a
line of JSON.
"""

import asyncio
import gc
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.support.any_layout import AnyEngine, cpu, open_any, prompt
from tiered_kv import BackendUnavailableError, TieredKV

PROMPT_BLOCKS: Final = 8
NUM_PROMPTS: Final = 200
NUM_CALLERS: Final = 4


class Traffic:
    """Requests of a few callers at once, each with memory of its own."""

    def __init__(self, kv: TieredKV, engine: AnyEngine, seed: int) -> None:
        self._kv = kv
        self._engine = engine
        self._rng = np.random.default_rng(seed)
        self._may_go = asyncio.Event()
        self._num_busy = 0
        self._left = 0
        self._is_done = asyncio.Event()
        self.num_served = 0
        self.num_wrong = 0

    async def call(self, caller: int) -> None:
        """Ask for one thing after another, for ever."""
        while True:
            await self._may_go.wait()
            self._num_busy += 1
            try:
                await self._one(caller)
            finally:
                self._num_busy -= 1
            self._left -= 1
            if self._left <= 0:
                self._may_go.clear()
                self._is_done.set()
            await asyncio.sleep(0)

    async def serve(self, num_requests: int) -> None:
        """Have callers ask so often, and wait until nothing moves."""
        self._left = num_requests
        self._is_done.clear()
        self._may_go.set()
        await self._is_done.wait()
        await self._kv.flush()
        while self._num_busy or self._kv.stats().transfers:  # noqa: ASYNC110 - a cache tells nobody that nothing moves
            await asyncio.sleep(0.01)

    async def _one(self, caller: int) -> None:
        kv, engine, rng = self._kv, self._engine, self._rng
        blocks = list(range(caller * PROMPT_BLOCKS, (caller + 1) * PROMPT_BLOCKS))
        keys = prompt(PROMPT_BLOCKS, int(rng.integers(NUM_PROMPTS)))
        what = rng.random()
        if what < 0.45:
            loaded = await kv.load(keys, engine.spec(blocks), deadline_s=None if what < 0.4 else 0.002)
            self.num_served += loaded.num_blocks
            self.num_wrong += engine.right(keys, blocks)[: loaded.num_blocks].count(False)
        elif what < 0.9:
            storing = asyncio.ensure_future(kv.store(keys, engine.fill(keys, blocks)))
            await asyncio.sleep(0)
            if what > 0.85:
                storing.cancel()
            await asyncio.wait({storing})
        elif what < 0.95:
            await kv.evict(keys)
        elif what < 0.97:
            kv.pin(keys, ttl_s=0.1)
            kv.prefetch(keys)
        elif what < 0.985:
            await kv.flush(sync=what < 0.975)
        else:
            with suppress(BackendUnavailableError):
                await kv.resize("nvme", "2MiB" if what < 0.99 else "1MiB")


def measured(kv: TieredKV, traffic: Traffic) -> dict[str, Any]:
    """Say what this process holds."""
    gc.collect()
    stats = kv.stats()
    held = sum(tier.leased + tier.pending for tier in stats.tiers) + stats.bounce_slots - stats.bounce_free
    return {
        "rss": int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "held": held,
        "served": traffic.num_served,
        "wrong": traffic.num_wrong,
    }


async def live(path: Path, seed: int) -> None:
    """Serve, until the last line was read."""
    engine = AnyEngine(num_blocks=NUM_CALLERS * PROMPT_BLOCKS)
    tier = {"medium": "nvme", "path": path, "capacity": "1MiB", "max_capacity": "2MiB", "num_threads": 2}
    async with open_any(engine, cpu(40), tier) as kv:
        traffic = Traffic(kv, engine, seed)
        callers = [asyncio.ensure_future(traffic.call(n)) for n in range(NUM_CALLERS)]
        while line := await asyncio.to_thread(sys.stdin.readline):
            await traffic.serve(int(line))
            await asyncio.sleep(0.2)  # pins end
            sys.stdout.write(json.dumps(measured(kv, traffic)) + "\n")
            sys.stdout.flush()
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)


if __name__ == "__main__":
    asyncio.run(live(Path(sys.argv[1]), int(sys.argv[2])))
