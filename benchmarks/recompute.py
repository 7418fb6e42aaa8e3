"""Load or recompute: how long a request waits for its prefix, over a grid of media and engines, in virtual time.

A prompt lies in one tier below CPU memory, a pipe with a latency and a bandwidth; an engine computes so many tokens a
second. Four ways to have the prefix, each with the real cache on an event loop whose clock jumps:

- load all of it; compute all of it: the better of the two is what a perfect choice between them gives;
- ``split``: load as many leading blocks as `LookupResult.split` says, compute the others after that;
- ``ours``: the same of an engine that can load while it computes: both at once where `split` says so, the engine from
  the front and the load from the back, until the two meet.

Before a split the tier is known by three loads of other prompts. The grid is also gone through beside another request
that is loading a long prompt at the same time. Last comes one line of JSON: the worst ratio to the better of the two.
"""

import asyncio
import itertools
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parent.parent))

from tests.support.engine import BLOCK_SIZE, MODEL, PAYLOAD_BYTES, Engine, prompt, small_layout
from tests.support.virtual import CountingDevice, pools_of, run, watch
from tiered_kv import Block, BlockKey, CacheLimits, Outcome, TieredKV
from tiered_kv_backends.memory import MemoryBackend

NUM_BLOCKS: Final = 256
CHUNK: Final = 8
"""Blocks that the engine computes at once."""
LIMITS: Final = CacheLimits(window=32 * PAYLOAD_BYTES, bounce=512 * PAYLOAD_BYTES)
BLOCK_S: Final = (0.03e-3, 0.1e-3, 0.3e-3, 1e-3, 3e-3, 10e-3)
"""What a tier needs for a block: of 2 MiB, 70 GB/s down to 0.2."""
LATENCY_S: Final = (0.0, 1e-3, 10e-3, 50e-3)
PREFILL: Final = (2_000, 8_000, 32_000)
"""Tokens a second."""


class Pipe(MemoryBackend):
    """A medium that brings one block after another, each read after a latency."""

    def __init__(self, latency_s: float, block_s: float) -> None:
        super().__init__(MemoryBackend.Settings(name="pipe", capacity=1 << 40, timeout_s=1e6))
        self._latency_s = latency_s
        self._block_s = block_s
        self._free_at = 0.0

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Bring blocks when those that were asked for before have come."""
        loop = asyncio.get_running_loop()
        self._free_at = max(loop.time(), self._free_at) + len(keys) * self._block_s
        await asyncio.sleep(self._free_at - loop.time() + self._latency_s)
        return await super().read(keys, into)


@dataclass(frozen=True)
class Cell:
    """One point of the grid: seconds that each way took."""

    latency_s: float
    block_s: float
    prefill: int
    load: float
    compute: float
    split: float
    ours: float

    def over_best(self, way: str) -> float:
        """Return how long a way took, relative to the better of loading and computing all."""
        return float(getattr(self, way)) / min(self.load, self.compute)


class Request:
    """One request of an engine that computes so many tokens a second, for blocks of the prompt with this seed."""

    def __init__(self, kv: TieredKV, engine: Engine, prefill: int, seed: int) -> None:
        self.kv = kv
        self.prefill = prefill
        self.keys = prompt(NUM_BLOCKS, seed=seed)
        self.pages = engine.compute(self.keys)

    async def compute(self, start: int, stop: int) -> None:
        """Compute blocks."""
        await asyncio.sleep((stop - start) * BLOCK_SIZE / self.prefill)

    async def load(self) -> None:
        """Load all."""
        _check((await self.kv.load(self.keys, self.pages)).num_blocks == NUM_BLOCKS)

    async def split(self) -> None:
        """Load as much as pays, and compute the rest."""
        found = await self.kv.lookup(self.keys)
        n = found.split(prefill_tokens_per_s=self.prefill).num_blocks
        _check((await self.kv.load(self.keys[:n], self.pages[:n])).num_blocks == n)
        await self.compute(n, NUM_BLOCKS)

    async def ours(self) -> None:
        """Do what pays."""
        found = await self.kv.lookup(self.keys)
        if found.split(prefill_tokens_per_s=self.prefill, chunk_tokens=CHUNK * BLOCK_SIZE).order == "front":
            return await self.split()
        handle = self.kv.start_load(self.keys, self.pages, order="back")
        at = 0
        while (mine := handle.stop_before(min(at + CHUNK, NUM_BLOCKS))) > at:
            await self.compute(at, mine)
            at = mine
        _check(bool((await handle).mask[at:].all()))
        return None


def _check(is_there: bool) -> None:  # noqa: FBT001 - what is checked
    if not is_there:
        sys.exit("not all blocks are in place: nothing can be compared")


async def measure(latency_s: float, block_s: float, prefill: int, *, is_busy: bool) -> Cell:
    """Go through all ways, with one medium and one engine."""
    engine, device, loop = Engine(NUM_BLOCKS), CountingDevice(), asyncio.get_running_loop()
    cache = TieredKV([Pipe(latency_s, block_s)], model=MODEL, layout=small_layout(), limits=LIMITS, device=device)
    async with cache as kv:
        kv.register_kv_caches(engine.caches)
        watch(device, pools_of(kv))
        requests = [Request(kv, engine, prefill, seed) for seed in range(8)]
        for request in requests:
            await (await kv.store(request.keys, request.pages)).settled()
        for request, n in zip(requests[:3], (NUM_BLOCKS, NUM_BLOCKS // 8, NUM_BLOCKS // 2), strict=True):
            await kv.load(request.keys[:n], request.pages[:n])

        async def timed(way: Callable[[], Awaitable[None]]) -> float:
            other = asyncio.ensure_future(requests[7].load()) if is_busy else None
            await asyncio.sleep(0.001)
            started = loop.time()
            await way()
            seconds = loop.time() - started
            if other is not None:
                await other
            return seconds

        load, split, ours = [await timed(way) for way in (requests[3].load, requests[4].split, requests[5].ours)]
        return Cell(latency_s, block_s, prefill, load, NUM_BLOCKS * BLOCK_SIZE / prefill, split, ours)


def draw(cells: Sequence[Cell], title: str) -> None:
    """Print the cells of one prefill rate a table."""
    table = Table(title=title)
    for name in (
        "first ms",
        "block ms",
        "tokens/s",
        "load s",
        "compute s",
        "split s",
        "ours s",
        "split/best",
        "ours/best",
    ):
        table.add_column(name, justify="right")
    for cell in cells:
        table.add_row(
            f"{cell.latency_s * 1e3:g}", f"{cell.block_s * 1e3:g}", f"{cell.prefill}",
            *(f"{each:.3f}" for each in (cell.load, cell.compute, cell.split, cell.ours)),
            f"{cell.over_best('split'):.2f}", f"{cell.over_best('ours'):.2f}",
        )  # fmt: skip
    Console().print(table)


def main() -> None:
    """Go through the grid, on an idle medium and beside another load."""
    results: dict[str, Any] = {}
    for is_busy in (False, True):
        cells = [
            run(partial(measure, *point, is_busy=is_busy)) for point in itertools.product(LATENCY_S, BLOCK_S, PREFILL)
        ]
        name = "beside a load" if is_busy else "alone"
        draw(cells, name)
        for way in ("split", "ours"):
            ratios = [cell.over_best(way) for cell in cells]
            key = f"{way}_{'busy' if is_busy else 'alone'}"
            results[key] = {
                "worst": round(max(ratios), 3),
                "median": round(median(ratios), 3),
                "best": round(min(ratios), 3),
            }
    worst = max(each["worst"] for each in results.values())
    print(json.dumps({"worst_over_best": worst, **results}))


if __name__ == "__main__":
    main()
