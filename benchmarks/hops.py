"""Count the files that one load and one store pass, and the calls from one file of the library to another.

A figure of how the house is built, not of its speed: whoever follows a block through the code goes the same way.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import tiered_kv
import tiered_kv_backends
from tiered_kv import GPULoadStoreSpec, KVLayout, ModelIdentity, TieredKV, TieredKVSettings, hash_blocks

ROOTS = tuple(str(Path(package.__path__[0])) for package in (tiered_kv, tiered_kv_backends))


class Hops:
    """Watches which functions of the library the event loop's thread enters."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.num_crossings = 0
        self.num_calls = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Note one step of the interpreter."""
        if event != "call" or not frame.f_code.co_filename.startswith(ROOTS):
            return
        here, caller = frame.f_code.co_filename, frame.f_back.f_code.co_filename if frame.f_back else ""
        self.files.add(here)
        self.num_calls += 1
        self.num_crossings += caller != here and caller.startswith(ROOTS)

    async def watch(self, call: Callable[[], Awaitable[object]]) -> None:
        """Watch one call, with what it leaves to do, from its beginning to its end."""
        sys.setprofile(self)
        try:
            await call()
        finally:
            sys.setprofile(None)


async def count(tiers: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Return, for a store and a load of four blocks, the files passed and the calls between files and in all."""
    kv_caches = [torch.zeros(2, 16, 16, 2, 32) for _layer in range(2)]
    layout = KVLayout.from_tensors(kv_caches, block_size=16)
    settings, model = TieredKVSettings(tiers=tiers), ModelIdentity("m", weights="w")
    keys, other = hash_blocks(range(64), block_size=16), hash_blocks(range(64, 128), block_size=16)
    found = {}
    async with TieredKV.from_settings(settings, model=model, layout=layout) as kv:
        kv.register_kv_caches(kv_caches)

        async def store() -> None:
            await (await kv.store(keys, GPULoadStoreSpec(range(4)))).settled()

        async def load() -> None:
            assert (await kv.load(keys, GPULoadStoreSpec(range(4, 8)))).num_blocks == len(keys)  # noqa: S101 - a benchmark of nothing otherwise

        await (await kv.store(other, GPULoadStoreSpec(range(8, 12)))).settled()  # what is imported and made once
        await kv.load(other, GPULoadStoreSpec(range(8, 12)))
        for name, call in (("store", store), ("load", load)):
            hops = Hops()
            await hops.watch(call)
            found[name] = [len(hops.files), hops.num_crossings, hops.num_calls]
    return found


def main() -> None:
    """Print a table, and last one line of JSON."""
    cpu = {"medium": "cpu", "capacity": "16MiB"}
    rows: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        nvme = {"medium": "nvme", "path": folder, "capacity": "64MiB"}
        chains: dict[str, list[dict[str, Any]]] = {
            "cpu": [cpu],
            "nvme": [{"medium": "cpu", "capacity": 0}, nvme],
            "cpu, nvme": [cpu, nvme],
        }
        for name, tiers in chains.items():
            for call, figures in asyncio.run(count(tiers)).items():
                rows[f"{call}: {name}"] = figures
    print(f"{'call: tiers':24} {'files':>8} {'calls between files':>22} {'calls':>8}")
    for name, (files, crossings, calls) in rows.items():
        print(f"{name:24} {files:8} {crossings:22} {calls:8}")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
