"""A process with a cache of its own, for tests of several: ``store`` or ``load`` the prompts of these seeds.

    python chain_process.py '[{"medium": "redis", ...}]' store 0 1 2

It writes a line per prompt: its seed, and how many blocks every tier has (stored), or how many have the right bytes
(loaded).
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.caches import open_cache
from tests.support.engine import Engine, contents, prompt
from tiered_kv import GPULoadStoreSpec

NUM_BLOCKS = 24


async def serve(tiers: list[dict[str, Any]], doing: str, seeds: Iterable[int]) -> None:
    """Do what the module says."""
    engine = Engine()
    async with open_cache(*tiers, engine=engine) as kv:
        for seed in seeds:
            keys = prompt(NUM_BLOCKS, seed=seed)
            if doing == "store":
                settled = await (await kv.store(keys, engine.compute(keys))).settled()
                num_right = min(tier.written + tier.present for tier in settled if tier.tier != "cpu")
            else:
                engine.poison()
                loaded = await kv.load(keys, GPULoadStoreSpec(range(NUM_BLOCKS)))
                found, expected = engine.read(range(NUM_BLOCKS)), contents(keys)
                num_right = sum(found[n] == expected[n] for n in range(loaded.num_blocks))
                assert num_right == loaded.num_blocks, "wrong bytes"
            print(seed, num_right, flush=True)  # noqa: T201 - what the test reads


@contextmanager
def start(
    tiers: Sequence[Mapping[str, Any]], doing: str, seeds: Iterable[int], within: Sequence[str] = ()
) -> Iterator["subprocess.Popen[str]"]:
    """Run this file in a process of its own, after the words ``within``; it is killed at the end if need be."""
    command = [*within, sys.executable, __file__, json.dumps(tiers), doing, *map(str, seeds)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1]), sys.argv[2], map(int, sys.argv[3:])))
