"""Shared media against their bare clients, in the same run, on a server that the benchmark starts.

Ours is a backend as the cache calls it: two calls under way, which together hold as many blocks as the bare side moves
at once, one a task. Rounds of store and load, ours and bare, alternate, and a ratio is the median over rounds: the
server shares the cores, and figures drift. Checksums are made elsewhere and are no part of it (``nvme.py`` has them).

Each medium is a module of its own beside this one, ``_remote_<medium>.py``, with a function ``serve()`` that yields the
`Sides` of ``_remote_common.py`` while a server runs. Prints a table, then a line of JSON.
"""

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from _remote_common import MissingError, Sides
from tiered_kv.media.backend import Backend, Block, Outcome, RecordShape
from tiered_kv.testing import open_backend
from tiered_kv.values.keys import BlockKey, Namespace

MEDIA = ("redis", "s3", "mooncake", "shared_fs")
SIZES = {"2MiB": 2 << 20, "256KiB": 256 << 10}
CONCURRENCY = (1, 8, 32)
JUDGED = "2MiB", 8
NUM_BYTES = 128 << 20
"""Of one round; at most so much is on the server twice."""
NUM_ASKED = 1000
NUM_STORED = 1000, 617, 0
"""Of the keys asked for; the first is the one that is timed."""
MOST_QUESTIONS = 12
BARS = {"redis": (0.95, 0.90), "s3": (0.95, 0.95), "mooncake": (0.95, 0.95), "shared_fs": (0.95, 0.95)}

Serve = Callable[[], AbstractAsyncContextManager[Sides]]


@dataclass(frozen=True)
class Measured:
    """Of one direction: seconds and CPU seconds of each round, as (ours, bare)."""

    wall: list[tuple[float, float]]
    cpu: list[tuple[float, float]]

    @property
    def ratio(self) -> float:
        """How fast ours is, the bare one being 1."""
        return statistics.median(bare / ours for ours, bare in self.wall)

    def each(self, of: list[tuple[float, float]]) -> tuple[float, float]:
        """Medians of ours and of the bare one."""
        return statistics.median(ours for ours, _ in of), statistics.median(bare for _, bare in of)


@dataclass(frozen=True)
class Work:
    """Blocks of one size, and their names on both sides."""

    keys: list[BlockKey]
    blocks: list[Block]

    @classmethod
    def of(cls, shape: RecordShape) -> "Work":
        """Make blocks of random bytes."""
        space, chance = Namespace(shape.fingerprint, epoch=bytes(32)), np.random.default_rng(1)
        blocks = [Block.empty(shape.payload_bytes) for _ in range(NUM_BYTES // shape.stride_bytes)]
        for block in blocks:
            block.payload[:] = chance.bytes(shape.payload_bytes)
        return cls([BlockKey(space, i.to_bytes(32, "little"), i) for i in range(len(blocks))], blocks)

    @property
    def num_bytes(self) -> int:
        """Of all records."""
        return sum(block.num_bytes for block in self.blocks)

    async def ours(self, backend: Backend, concurrency: int, *, is_store: bool) -> None:
        """Move every block by calls of half of ``concurrency``, two under way."""
        size = max(1, concurrency // 2)
        starts = iter(range(0, len(self.keys), size))

        async def caller() -> None:
            for start in starts:
                part = slice(start, start + size)
                move = backend.write if is_store else backend.read
                outcomes = await move(self.keys[part], self.blocks[part])
                if set(outcomes) - {Outcome.STORED, Outcome.HIT}:
                    raise OSError(f"a block was {set(outcomes)}")

        await asyncio.gather(*(caller() for _ in range(min(2, concurrency))))


async def measure(work: Work, sides: Sides, concurrency: int, num_rounds: int) -> dict[str, Measured]:
    """Time both directions of both sides in turns. The first round warms up and is not counted."""
    names = [f"bare/{key.path}" for key in work.keys]
    found = {way: Measured([], []) for way in ("store", "load")}
    for round_ in range(num_rounds + 1):
        sides.reset()
        for way, measured in found.items():
            is_store = way == "store"
            bare = sides.store if is_store else sides.load
            ours_s = await timed(work.ours(sides.backend, concurrency, is_store=is_store))
            bare_s = await timed(bare(names, work.blocks, concurrency))
            if round_:
                measured.wall.append((ours_s[0], bare_s[0]))
                measured.cpu.append((ours_s[1], bare_s[1]))
    return found


async def measure_presence(sides: Sides, work: Work, num_rounds: int) -> tuple[Measured, int]:
    """Time the question for a prefix of `NUM_ASKED` blocks that are all there; count what prefixes cost at most."""
    space, measured, most = work.keys[0].namespace, Measured([], []), 0
    for seed, num_stored in enumerate(NUM_STORED):
        keys = [BlockKey(space, b"asked%d" % seed + i.to_bytes(26, "little"), i) for i in range(NUM_ASKED)]
        small = [Block.empty(1) for _ in range(num_stored)]
        await sides.backend.write(keys[:num_stored], small)
        before = sides.num_questions()
        await check(sides.backend.lookup_prefix(keys), num_stored)
        most = max(most, sides.num_questions() - before)
        if num_stored < NUM_ASKED:
            continue
        names = [f"bare/{key.path}" for key in keys]
        await sides.store(names, small, 8)
        for _ in range(num_rounds):
            ours_s = await timed(check(sides.backend.lookup_prefix(keys), NUM_ASKED))
            bare_s = await timed(check(sides.count_present(names), NUM_ASKED))
            measured.wall.append((ours_s[0], bare_s[0]))
            measured.cpu.append((ours_s[1], bare_s[1]))
    return measured, most


async def check(question: Awaitable[int], expected: int) -> None:
    """Ask, and fail where another number of keys is there."""
    if (num_found := await question) != expected:
        raise OSError(f"{num_found} keys found, not {expected}")


async def timed(what: Coroutine[Any, Any, None]) -> tuple[float, float]:
    """Return the seconds that it took, and those of this process's CPUs."""
    wall, cpu = time.perf_counter(), time.process_time()
    await what
    return time.perf_counter() - wall, time.process_time() - cpu


async def compare(medium: str, num_rounds: int) -> dict[str, float]:
    """Measure one medium, print its rows, and return what goes into the JSON."""
    serve: Serve = import_module(f"_remote_{medium}").serve
    results: dict[str, float] = {}
    shapes = {name: RecordShape(name.encode().ljust(32, b"."), num_bytes) for name, num_bytes in SIZES.items()}
    async with serve() as sides, open_backend(sides.backend, *shapes.values()):
        for name, shape in shapes.items():
            work = Work.of(shape)
            for concurrency in CONCURRENCY:
                found = await measure(work, sides, concurrency, num_rounds)
                for way, measured in found.items():
                    print_row(medium, name, concurrency, way, measured, work)
                    if (name, concurrency) == JUDGED:
                        results[f"{medium}_{way}_over_{sides.bare}"] = round(measured.ratio, 3)
            await sides.backend.delete(work.keys)
        presence, num_questions = await measure_presence(sides, work, 3 * num_rounds)
    ours_s, bare_s = presence.each(presence.wall)
    results[f"{medium}_presence_1000_ms"] = round(1e3 * ours_s, 2)
    results[f"{medium}_presence_over_client"] = round(1 / presence.ratio, 3)
    results[f"{medium}_presence_round_trips"] = num_questions
    print(
        f"{medium}: {NUM_ASKED} keys in {1e3 * ours_s:.1f} ms (client {1e3 * bare_s:.1f}), "
        f"questions: {num_questions} (bar {MOST_QUESTIONS})"
    )
    return results


def print_row(medium: str, size: str, concurrency: int, way: str, measured: Measured, work: Work) -> None:
    """Print one direction of one size and concurrency."""
    speeds = " ".join(f"{work.num_bytes / 1e9 / seconds:6.2f}" for seconds in measured.each(measured.wall))
    costs = " ".join(f"{1e3 * seconds / len(work.keys):6.2f}" for seconds in measured.each(measured.cpu))
    bar = f"{BARS[medium][way == 'load']:5.2f}" if (size, concurrency) == JUDGED else ""
    print(f"{medium:<10}{size:>7}{concurrency:>4}  {way:<6}{speeds}{measured.ratio:7.2f}{bar:>6}   {costs}")


def main() -> None:
    """Compare the media asked for, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("media", nargs="*", help=f"of {', '.join(MEDIA)}; all if left out")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through every `finally`, which ends the servers
    print(f"{'':<27}{'ours':>6} {'bare':>6} ratio   bar   CPU ms a block, ours and bare (GB/s before)")
    results: dict[str, float] = {}
    for medium in options.media or MEDIA:
        try:
            results |= asyncio.run(compare(medium, options.rounds))
        except MissingError as missing:
            print(f"{medium}: skipped, {missing}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
