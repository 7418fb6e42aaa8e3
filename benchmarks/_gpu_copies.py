"""Scattered blocks between a GPU and the host, whole and layer by layer, over one large pinned copy in the same run."""

from functools import partial

import torch

from _gpu_bus import Copies, Setup, products_ms, seconds, set_up
from _gpu_report import Report, Run
from tiered_kv import KVGroup
from tiered_kv.memory import Stream

FRAGMENTS = {
    "72 x 28 KiB": KVGroup(72, 1, 28 << 10, "uint8", 1, "MLA"),
    "32 x 64 KiB": KVGroup(32, 1, 64 << 10, "uint8", 1, "MLA"),
    "16 x 128 KiB": KVGroup(16, 1, 128 << 10, "uint8", 1, "MLA"),
    "1 x 2 MiB": KVGroup(1, 1, 2 << 20, "uint8", 1, "MLA"),
}
MODELS = {
    "Llama-3-8B": KVGroup(32, 8, 128, "bfloat16", 16),
    "70B, one of TP8": KVGroup(80, 1, 128, "bfloat16", 16),
    "DeepSeek MLA": KVGroup(61, 1, 576, "bfloat16", 16, "MLA"),
}
SMALL = {"small": KVGroup(2, 2, 8, "bfloat16", 4), "small MLA": KVGroup(3, 1, 24, "bfloat16", 4, "MLA")}


def copies(run: Run) -> None:
    """Measure blocks of several kinds, whole."""
    h2d, d2h = run.device.stream("h2d"), run.device.stream("d2h")
    for about, group in (SMALL if run.is_small else MODELS | FRAGMENTS).items():
        with run.report.catching(about), set_up(group, num_blocks(group, run), run.device) as setup:
            run.report.note(about, "is_pinned", setup.is_pinned)
            best = ceilings(run.report, about, setup, h2d, d2h)
            found = ours(run.report, about, setup, h2d, d2h)
            for name, gbps in best.items():
                run.report.note(about, f"{name}_over_one_copy", found[name] / gbps)
            by_way(run.report, about, setup, h2d, d2h)
            if about in {**SMALL, **MODELS}:
                kept_share(run.report, about, setup, h2d, d2h, is_small=run.is_small)


def layers(run: Run) -> None:
    """Measure them layer by layer: all blocks of one layer, then of the next."""
    h2d, d2h = run.device.stream("h2d"), run.device.stream("d2h")
    for about, group in (SMALL if run.is_small else MODELS).items():
        with run.report.catching(about), set_up(group, num_blocks(group, run), run.device) as setup:
            best = ceilings(run.report, about, setup, h2d, d2h)
            rate = setup.num_bytes / 1e9
            for name, stream, of_layers in (
                ("load", h2d, setup.loads_by_layer),
                ("store", d2h, setup.stores_by_layer),
            ):
                measure = partial(_rate, rate, stream, of_layers(), 3)
                share = run.report.take(about, f"{name}_by_layer", measure) / best[name]
                run.report.note(about, f"{name}_by_layer_over_one_copy", share)
                for way in setup.ways():
                    measure = partial(_rate, rate, stream, of_layers(way), 2)
                    run.report.take(about, f"{name}_by_layer_{way.name.replace(' ', '_')}", measure)


def num_blocks(group: KVGroup, run: Run) -> int:
    """Return how many blocks are moved at once."""
    return max(4, (1 << 16 if run.is_small else 1 << 30) // group.stride_bytes)


def ceilings(report: Report, about: str, setup: Setup, h2d: Stream, d2h: Stream) -> dict[str, float]:
    """Return GB/s of one large copy each way, and of both at once, of as many bytes as ours."""
    words, where = setup.num_bytes // 8 // 2, setup.tensors[0].device
    device = torch.empty(2 * words, dtype=torch.int64, device=where)
    # Not the slots: they are page-locked in pieces, and no copy may go across two of them.
    host = torch.empty(2 * words, dtype=torch.int64, pin_memory=where.type == "cuda")
    up: Copies = [lambda: device[:words].copy_(host[:words], non_blocking=True)]
    down: Copies = [lambda: host[words : 2 * words].copy_(device[words:], non_blocking=True)]
    rate = 8 * words / 1e9
    return {
        "load": report.take(about, "load_one_copy", lambda: rate / seconds((h2d, up))),
        "store": report.take(about, "store_one_copy", lambda: rate / seconds((d2h, down))),
        "both": report.take(about, "both_one_copy", lambda: 2 * rate / seconds((h2d, up), (d2h, down))),
    }


def ours(report: Report, about: str, setup: Setup, h2d: Stream, d2h: Stream) -> dict[str, float]:
    """Return GB/s of our copies; note those of pageable memory too, and microseconds of one block."""
    low, high = setup.halves
    rate = setup.num_bytes / 1e9
    both = sum(len(slots) for _, slots in (*low, *high)) * setup.group.payload_bytes / 1e9
    pinned, pageable, one = setup.pinned, setup.pageable, [(pages[:1], slots[:1]) for pages, slots in low[:1]]
    both_ways = (h2d, setup.loads(pinned, low)), (d2h, setup.stores(pinned, high))
    found = {
        "load": report.take(about, "load", partial(_rate, rate, h2d, setup.loads(pinned), 5)),
        "store": report.take(about, "store", partial(_rate, rate, d2h, setup.stores(pinned), 5)),
        "both": report.take(about, "both", lambda: both / seconds(*both_ways)),
    }
    report.take(about, "load_pageable", partial(_rate, rate, h2d, setup.loads(pageable), 2))
    report.take(about, "store_pageable", partial(_rate, rate, d2h, setup.stores(pageable), 2))
    report.take(about, "load_one_us", lambda: 1e6 * seconds((h2d, setup.loads(pinned, one)), rounds=30))
    report.take(about, "store_one_us", lambda: 1e6 * seconds((d2h, setup.stores(pinned, one)), rounds=30))
    return found


def by_way(report: Report, about: str, setup: Setup, h2d: Stream, d2h: Stream) -> None:
    """Note GB/s of each way there is: what was chosen should be the fastest."""
    rate = setup.num_bytes / 1e9
    for way in setup.ways():
        name = way.name.replace(" ", "_")
        report.take(about, f"load_{name}", partial(_rate, rate, h2d, setup.loads_by(way), 2))
        report.take(about, f"store_{name}", partial(_rate, rate, d2h, setup.stores_by(way), 2))


def kept_share(report: Report, about: str, setup: Setup, h2d: Stream, d2h: Stream, *, is_small: bool) -> None:
    """Note what share of its speed a matrix product keeps beside loads, stores and both, and their GB/s meanwhile."""
    size, count = (64, 8) if is_small else (4096, 600)
    low, high = setup.halves
    loads, stores = (h2d, setup.loads(setup.pinned, low)), (d2h, setup.stores(setup.pinned, high))
    rates = [sum(len(slots) for _, slots in half) * setup.group.payload_bytes / 1e9 for half in (low, high)]
    where = setup.tensors[0].device
    for name, queues, num_gb in (
        ("load", [loads], rates[:1]),
        ("store", [stores], rates[1:]),
        ("both", [loads, stores], rates),
    ):
        with report.catching(f"{about}: matmul beside {name}"):
            alone_ms, _ = products_ms(where, size, count)
            beside_ms, rounds = products_ms(where, size, count, *queues)
            report.note(about, f"matmul_beside_{name}", alone_ms / beside_ms)
            gb_s = sum(each / took_s for each, took_s in zip(num_gb, rounds, strict=True))
            report.note(about, f"{name}_beside_matmul_gb_s", gb_s)


def _rate(num_gb: float, stream: Stream, copies: Copies, rounds: int) -> float:
    return num_gb / seconds((stream, copies), rounds=rounds)
