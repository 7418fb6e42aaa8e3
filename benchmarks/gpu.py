"""Scattered blocks between a GPU and the host, over one large pinned copy in the same run.

For blocks of three models: GB/s of store and load, alone and both at once, by our copies, layer by layer, in each of
the ways there are, and to pageable memory; the time of one block; the speed that a loop of bf16 matrix products keeps
beside them. Then what lies between an event and the coroutine that waits for it, and blocks by way of NVMe and back.
The last lines are ready for RESULTS.md, and one of JSON.

    python benchmarks/gpu.py [--path DIR]

Without a GPU nothing is measured. ``--device cpu --small`` runs the same code on a CPU, whose figures mean nothing.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import structlog
import torch
from rich.console import Console
from rich.table import Table

from _gpu_bus import Copies, Setup, coroutine_latency, kept_busy, matmul_rate, recorded, seconds, set_up
from tiered_kv import GPULoadStoreSpec, KVGroup, KVLayout, ModelIdentity, TieredKV, hash_blocks
from tiered_kv.memory import Device, Stream, make_device
from tiered_kv.memory.driver import has_batches

MODELS = {
    "Llama-3-8B": KVGroup(32, 8, 128, "bfloat16", 16),
    "70B, one of TP8": KVGroup(80, 1, 128, "bfloat16", 16),
    "DeepSeek MLA": KVGroup(61, 1, 576, "bfloat16", 16, "MLA"),
}
SMALL = {"small": KVGroup(2, 2, 8, "bfloat16", 4), "small MLA": KVGroup(3, 1, 24, "bfloat16", 4, "MLA")}
Figures = dict[str, float]


def ceilings(setup: Setup, h2d: Stream, d2h: Stream) -> Figures:
    """Return GB/s of one large copy each way, and of both at once, of as many bytes as ours."""
    words = setup.num_bytes // 8 // 2
    host, device = setup.pinned.view(-1), torch.empty(2 * words, dtype=torch.int64, device=setup.tensors[0].device)
    up: Copies = [lambda: device[:words].copy_(host[:words], non_blocking=True)]
    down: Copies = [lambda: host[words : 2 * words].copy_(device[words:], non_blocking=True)]
    num_bytes = 8 * words
    return {
        "load": num_bytes / seconds((h2d, up)) / 1e9,
        "store": num_bytes / seconds((d2h, down)) / 1e9,
        "both": 2 * num_bytes / seconds((h2d, up), (d2h, down)) / 1e9,
    }


def ours(setup: Setup, h2d: Stream, d2h: Stream) -> Figures:
    """Return GB/s of our copies, of the ways they are compared with, and microseconds of one block."""
    half = len(setup.windows) // 2 or 1
    low, high = setup.windows[:half], setup.windows[half:] or setup.windows
    both = sum(len(slots) for _, slots in (*low, *high)) * setup.group.payload_bytes
    one = [(pages[:1], slots[:1]) for pages, slots in setup.windows[:1]]
    rate = setup.num_bytes / 1e9
    by_way = {
        f"{what}_{way.name.replace(' ', '_')}": rate / seconds((stream, copies(way)), rounds=2)
        for way in setup.ways()
        for what, stream, copies in (("load", h2d, setup.loads_by), ("store", d2h, setup.stores_by))
    }
    return {
        "load": rate / seconds((h2d, setup.loads(setup.pinned))),
        "store": rate / seconds((d2h, setup.stores(setup.pinned))),
        "both": both / 1e9 / seconds((h2d, setup.loads(setup.pinned, low)), (d2h, setup.stores(setup.pinned, high))),
        "load_by_layer": rate / seconds((h2d, setup.loads_by_layer()), rounds=2),
        "store_by_layer": rate / seconds((d2h, setup.stores_by_layer()), rounds=2),
        **by_way,
        "load_pageable": rate / seconds((h2d, setup.loads(setup.pageable)), rounds=2),
        "store_pageable": rate / seconds((d2h, setup.stores(setup.pageable)), rounds=2),
        "load_one_us": 1e6 * seconds((h2d, setup.loads(setup.pinned, one)), rounds=30),
        "store_one_us": 1e6 * seconds((d2h, setup.stores(setup.pinned, one)), rounds=30),
    }


def kept_share(setup: Setup, h2d: Stream, d2h: Stream, *, small: bool) -> Figures:
    """Return the share of its speed that a matrix product keeps beside loads, stores and both."""
    size, duration_s = (64, 0.02) if small else (4096, 1.0)
    half = len(setup.windows) // 2 or 1
    low, high = setup.windows[:half], setup.windows[half:] or setup.windows
    loads, stores = (h2d, setup.loads(setup.pinned, low)), (d2h, setup.stores(setup.pinned, high))
    where = setup.tensors[0].device
    shares = {}
    for name, queues in {"load": [loads], "store": [stores], "both": [loads, stores]}.items():
        alone = matmul_rate(where, size, duration_s)
        with kept_busy(*queues):
            shares[f"matmul_beside_{name}"] = matmul_rate(where, size, duration_s) / alone
    return shares


async def through_nvme(group: KVGroup, num_blocks: int, device: str, folder: Path) -> Figures:
    """Return GB/s of awaited stores until they are on NVMe, and of loads from there: GPU -> NVMe -> GPU."""
    mla = group.order == "MLA"
    n, h, d = group.page_size, group.num_kv_heads, group.head_dim
    shape = (num_blocks, n, d) if mla else (2, num_blocks, n, h, d)
    tensors = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(group.num_layers)]
    expected = [tensor.clone() for tensor in tensors]
    tier = {"medium": "nvme", "path": str(folder), "capacity": max(1 << 24, 2 * num_blocks * group.stride_bytes)}
    async with TieredKV(
        [tier], model=ModelIdentity("bench", weights="none"), layout=KVLayout((group,)), device=device
    ) as kv:
        kv.register_kv_caches(tensors, axes="BND" if mla else "PBNHD")
        keys = hash_blocks(range(num_blocks * group.block_size), block_size=group.block_size)
        spec = GPULoadStoreSpec(torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist())
        start = time.perf_counter()
        stored = await kv.store(keys, spec, after=recorded(tensors[0].device))
        await stored.settled()
        stored_s = time.perf_counter() - start
        for tensor in tensors:
            tensor.zero_()
        start = time.perf_counter()
        loaded = await kv.load(keys, spec, after=recorded(tensors[0].device))
        loaded_s = time.perf_counter() - start
        same = all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))
    if loaded.num_blocks != num_blocks or not same:
        raise SystemExit(f"{loaded.num_blocks} of {num_blocks} blocks came back, the same bytes: {same}")
    num_bytes = num_blocks * group.payload_bytes
    return {"nvme_store": num_bytes / stored_s / 1e9, "nvme_load": num_bytes / loaded_s / 1e9}


def measure(device: Device, models: dict[str, KVGroup], num_bytes: int, *, small: bool) -> dict[str, Figures]:
    """Return the figures of each model's blocks."""
    h2d, d2h = device.stream("h2d"), device.stream("d2h")
    figures = {}
    for name, group in models.items():
        with set_up(group, max(4, num_bytes // group.stride_bytes), device) as setup:
            found = ours(setup, h2d, d2h)
            best = ceilings(setup, h2d, d2h)
            found |= {f"{way}_one_copy": gbps for way, gbps in best.items()}
            found |= {f"{way}_over_one_copy": found[way] / best[way] for way in best}
            found |= kept_share(setup, h2d, d2h, small=small)
            found["is_pinned"] = float(setup.is_pinned)
        figures[name] = found
    latency_us, cpu_us = asyncio.run(coroutine_latency(d2h, 20 if small else 2000))
    figures["event to coroutine"] = {"latency_us": latency_us, "cpu_us": cpu_us}
    return figures


def main() -> None:
    """Measure, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="where the engine's cache is (default: cuda)")
    parser.add_argument("--small", action="store_true", help="tiny sizes: to see that it runs")
    parser.add_argument("--path", type=Path, default=Path(), help="a folder on NVMe (default: the current one)")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("no GPU: nothing measured")
        print(json.dumps({}))
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    models, num_bytes = (SMALL, 1 << 16) if options.small else (MODELS, 1 << 30)
    device = make_device(options.device)
    figures = measure(device, models, num_bytes, small=options.small)
    device.close(10)
    name, group = next(iter(models.items()))
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        num_blocks = max(4, num_bytes // group.stride_bytes)
        figures[name] |= asyncio.run(through_nvme(group, num_blocks, options.device, Path(folder)))
    show(figures, _name_of(device))
    print(as_markdown(figures, device))
    print(json.dumps({"device": _name_of(device), **_rounded(figures)}))


def show(figures: dict[str, Figures], name: str) -> None:
    """Print what was measured: a column a model, a row a figure."""
    table = Table("GB/s where nothing else is said", title=name)
    models = [each for each in figures if each != "event to coroutine"]
    for model in models:
        table.add_column(model, justify="right")
    rows = dict.fromkeys(row for model in models for row in figures[model])
    for row in rows:
        table.add_row(row.replace("_", " "), *(_cell(figures[model].get(row)) for model in models))
    Console().print(table)
    latency = figures["event to coroutine"]
    print(f"event to coroutine: {latency['latency_us']:.0f} us, {latency['cpu_us']:.0f} us of CPU an event")


def as_markdown(figures: dict[str, Figures], device: Device) -> str:
    """Return what was measured as a section of RESULTS.md."""
    models = [each for each in figures if each != "event to coroutine"]
    rows = dict.fromkeys(row for model in models for row in figures[model])
    latency = figures["event to coroutine"]
    batches = "with" if has_batches() else "without"
    lines = [
        f"## {_name_of(device)}",
        "",
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, {batches} batches of DMAs. GB/s unless said otherwise.",
        f"From an event to the coroutine that waits: {latency['latency_us']:.0f} us.",
        "",
        "| | " + " | ".join(models) + " |",
        "|---|" + "---:|" * len(models),
    ]
    for row in rows:
        cells = (_cell(figures[model].get(row)) for model in models)
        lines.append(f"| {row.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _cell(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.2f}"


def _rounded(figures: dict[str, Figures]) -> dict[str, Figures]:
    return {model: {name: round(value, 3) for name, value in row.items()} for model, row in figures.items()}


def _name_of(device: Device) -> str:
    where = device.torch_device
    return "CPU" if where.type == "cpu" else str(torch.get_device_module(where).get_device_name(where))


if __name__ == "__main__":
    main()
