"""Lives of a cache that end by kill -9: started by test_kills, which says when, and looks at what is left.

Each line read is JSON: ``kind`` and ``path`` of a tier, ``life``, a number, ``prompts`` of former lives, and
``after_s``, when to kill it, counted ``from`` its first "open" or "done". It is answered by all that the life has said,
as one line of JSON: ``[step, prompt]`` when a step begins and ``[step, prompt, "done"]`` when it has ended.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.any_layout import AnyEngine, cpu, open_any, prompt
from tiered_kv import TieredKV

KINDS = ("nvme", "nvme encrypted", "two disks", "two disks encrypted", "shared_fs")
PROMPT_BLOCKS = 8
MOST_PROMPTS = 30
"""That a life stores, beside those of former lives."""
SIZES = {1: ("6MiB", "9MiB"), 2: ("3MiB", "5MiB")}
"""Of each directory, by how many there are: all that is remembered fits, so that nothing has to go."""


def tier_of(kind: str, path: Path) -> dict[str, Any]:
    """Return the tier of a cache that is killed."""
    keys = {"encryption": {"keys": ["01" * 32]}} if "encrypted" in kind else {}
    if kind == "shared_fs":
        return {"medium": "shared_fs", "path": path / "shared", "capacity": "64MiB", "sweep_interval_s": 0.02, **keys}
    paths = [path / "a", path / "b"] if "two" in kind else [path / "a"]
    small, large = SIZES[len(paths)]
    more = {"capacity": small, "max_capacity": large, "num_threads": 2, "scrub_bandwidth": "1GiB", "erase": True}
    return {"medium": "nvme", "path": paths, **more, **keys}


class Life:
    """What one cache does until it is killed. Says each step before and after it."""

    def __init__(self, order: dict[str, Any], pipe: int) -> None:
        self._tier = tier_of(order["kind"], Path(order["path"]))
        self._pipe = pipe
        self._rng = np.random.default_rng(order["life"])
        self._engine = AnyEngine(num_blocks=PROMPT_BLOCKS)
        self._known: list[int] = order["prompts"]
        self._fresh: Iterator[int] = iter(range(MOST_PROMPTS * order["life"], MOST_PROMPTS * (order["life"] + 1)))

    async def live(self) -> None:
        """Open, do this and that, close, and begin anew."""
        steps = {"store": self._store, "more": self._store, "sync": self._sync, "evict": self._evict}
        if self._tier["medium"] == "nvme":
            steps["resize"] = self._resize
        while True:
            self._say("open", 0)
            async with open_any(self._engine, cpu(12), self._tier) as kv:
                self._say("open", 0, "done")
                for step in self._rng.choice(list(steps), int(self._rng.integers(1, 30))).tolist():
                    await steps[step](kv)
                self._say("close", 0)
            self._say("close", 0, "done")

    async def _store(self, kv: TieredKV) -> None:
        seed = next(self._fresh, -1)
        if seed < 0 or self._rng.random() < 0.2:
            seed = int(self._rng.choice([*self._known, max(seed, 0)]))
        self._known += [] if seed in self._known else [seed]
        keys = prompt(PROMPT_BLOCKS, seed)
        self._say("store", seed)
        result = await kv.store(keys, self._engine.fill(keys, range(PROMPT_BLOCKS)))
        settled = (await result.settled())[-1]
        if settled.written + settled.present == PROMPT_BLOCKS:
            self._say("store", seed, "done")

    async def _sync(self, kv: TieredKV) -> None:
        self._say("sync", 0)
        await kv.flush(sync=True)
        self._say("sync", 0, "done")

    async def _evict(self, kv: TieredKV) -> None:
        if self._known:
            seed = int(self._rng.choice(self._known))
            self._say("evict", seed)
            await kv.evict(prompt(PROMPT_BLOCKS, seed))
            await kv.flush()
            self._say("evict", seed, "done")

    async def _resize(self, kv: TieredKV) -> None:
        self._say("resize", 0)
        await kv.resize("nvme", str(self._rng.choice(SIZES[len(self._tier["path"])])))
        self._say("resize", 0, "done")

    def _say(self, *words: object) -> None:
        os.write(self._pipe, json.dumps(words).encode() + b"\n")


def main() -> None:
    """Start a life for each line, and kill it."""
    for line in sys.stdin:
        order = json.loads(line)
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reader)
            asyncio.run(Life(order, writer).live())
        os.close(writer)
        said = b""
        while order["from"].encode() not in said:
            said += os.read(reader, 65536)
        time.sleep(order["after_s"])  # the moment of death: nothing waits for it
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reader, 65536):
            said += more
        os.close(reader)
        sys.stdout.write(json.dumps([json.loads(each) for each in said.splitlines()]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
