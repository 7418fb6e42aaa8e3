"""Count what one load, store or lookup of four blocks passes on the event loop's thread.

Files of the library, switches from one to another, calls of its functions, and all calls of Python functions. Figures
of how the house is built, not of its speed, and the same on any machine: whoever follows a block through the code goes
the same way, and the loop's thread is the engine's.

    python benchmarks/hops.py [--show load_nvme]
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
import torch
from rich.console import Console
from rich.table import Table

import tiered_kv
import tiered_kv_backends
from tiered_kv import GPULoadStoreSpec, KVLayout, ModelIdentity, TieredKV, TieredKVSettings, hash_blocks

ROOTS = tuple(str(Path(package.__path__[0])) for package in (tiered_kv, tiered_kv_backends))
N = 4
"""Blocks of each call."""


class Hops:
    """Watches which functions the event loop's thread enters."""

    def __init__(self) -> None:
        self.entered: Counter[tuple[str, str]] = Counter()
        self.num_switches = 0
        self.num_python_calls = 0
        self._last = ""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Note one step of the interpreter."""
        if event != "call":
            return
        self.num_python_calls += 1
        code = frame.f_code
        if code.co_filename.startswith(ROOTS):
            self.entered[code.co_filename, code.co_qualname] += 1
            self.num_switches += code.co_filename != self._last
            self._last = code.co_filename

    async def watch(self, call: Callable[[], Awaitable[object]]) -> None:
        """Watch one call, with what it leaves to do, from its beginning to its end."""
        sys.setprofile(self)
        try:
            await call()
        finally:
            sys.setprofile(None)

    def figures(self) -> dict[str, int]:
        """Return what was counted."""
        return {
            "files": len({file for file, _ in self.entered}),
            "switches": max(0, self.num_switches - 1),
            "calls": self.entered.total(),
            "python_calls": self.num_python_calls,
        }


async def count(name: str, tiers: list[dict[str, Any]]) -> dict[str, Hops]:
    """Watch a store, a load and a lookup of blocks in some tiers, after others have made what is made once."""
    kv_caches = [torch.zeros(2, 16, 16, 2, 32) for _layer in range(2)]
    layout = KVLayout.from_tensors(kv_caches, block_size=16)
    settings, model = TieredKVSettings(tiers=tiers), ModelIdentity("m", weights="w")
    keys, other = (hash_blocks(range(i * 16 * N, (i + 1) * 16 * N), block_size=16) for i in range(2))
    watched = {f"{call}_{name}": Hops() for call in ("store", "load", "lookup")}
    async with TieredKV.from_settings(settings, model=model, layout=layout) as kv:
        kv.register_kv_caches(kv_caches)

        async def store() -> None:
            await (await kv.store(keys, GPULoadStoreSpec(range(N)))).settled()

        async def load() -> None:
            assert (await kv.load(keys, GPULoadStoreSpec(range(N, 2 * N)))).num_blocks == N  # noqa: S101 - else it measures nothing

        async def lookup() -> None:
            await kv.lookup(keys)

        await (await kv.store(other, GPULoadStoreSpec(range(2 * N, 3 * N)))).settled()
        await kv.load(other, GPULoadStoreSpec(range(2 * N, 3 * N)))
        for hops, call in zip(watched.values(), (store, load, lookup), strict=True):
            await hops.watch(call)
    return watched


def show(hops: Hops) -> None:
    """Print what was entered, file by file."""
    by_file: dict[str, Counter[str]] = {}
    for (file, function), times in hops.entered.items():
        by_file.setdefault(file, Counter())[function] += times
    for file, functions in sorted(by_file.items(), key=lambda item: -item[1].total()):
        short = next(Path(file).relative_to(root).as_posix() for root in ROOTS if file.startswith(root))
        print(
            f"{functions.total():5} {short}: "
            + ", ".join(f"{name} {times}" for name, times in functions.most_common(8))
        )


def main() -> None:
    """Print a table, and last one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", default="", help="what to list function by function, for example load_nvme")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    watched: dict[str, Hops] = {}
    with tempfile.TemporaryDirectory() as folder:
        nvme = {"medium": "nvme", "path": folder, "capacity": "64MiB"}
        watched |= asyncio.run(count("cpu", [{"medium": "cpu", "capacity": "16MiB"}]))
        watched |= asyncio.run(count("nvme", [{"medium": "cpu", "capacity": 0}, nvme]))
    table = Table(f"{N} blocks", "files", "switches", "calls", "all Python calls")
    for name, hops in watched.items():
        table.add_row(name, *map(str, hops.figures().values()))
    Console().print(table)
    if options.show:
        show(watched[options.show])
    print(json.dumps({name: hops.figures() for name, hops in watched.items()}))


if __name__ == "__main__":
    main()
