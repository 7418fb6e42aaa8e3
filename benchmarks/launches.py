"""What one launch of a copy costs the thread that enqueues it, in Python: no GPU is needed, none is used.

Triton's launcher runs up to where it would call the driver, with a driver that takes everything and does nothing. The
event loop pays this for every window of a load or store, and for every layer of one that goes layer by layer: of these
it enqueues several in one of its turns, and the rest in later ones.

    python benchmarks/launches.py

Exits with 1 if a launch, or a turn, costs more than it may.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.backends.compiler import GPUTarget

from tiered_kv import KVGroup
from tiered_kv.memory import CPUDevice, PagedCaches, copies, kernels
from tiered_kv.transfers.layerwise import layers_a_turn

Ids = NDArray[np.int64]

MOST_US = 50.0
"""For one layer of 1,024 blocks."""
MOST_A_TURN_US = 1000.0
"""For the layers that are enqueued in one turn of the event loop, with all that copies do around the launch."""
LAYERS, BLOCKS = 32, 1024
NUM_CALLS = 300
"""Of each kind."""


class IdleDriver:
    """Stands in for Triton's driver of a GPU."""

    def __init__(self) -> None:
        self.utils = self

    def get_current_device(self) -> int:
        """Return the first one."""
        return 0

    def get_current_stream(self, _: int) -> int:
        """Return a handle."""
        return 1

    def get_current_target(self) -> GPUTarget:
        """Return an H100."""
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, _: int) -> dict[str, int]:
        """Return what is checked before a launch."""
        return {"max_shared_mem": 1 << 17}

    def load_binary(self, *_: object) -> tuple[int, ...]:
        """Return handles, registers and spills, and how many threads there may be."""
        return 1, 1, 32, 0, 1024

    def launcher_cls(self, *_: object) -> Callable[..., None]:
        """Return what launches."""
        return lambda *_: None


def took_us(call: Callable[[], object]) -> float:
    """Return the median of a call."""
    call()
    spent = []
    for _ in range(NUM_CALLS):
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    return 1e6 * median(spent)


def measure() -> dict[str, float]:
    """Return microseconds a launch, by what is launched."""
    driver: Any = triton.runtime.driver
    driver.set_active(IdleDriver())
    group = KVGroup(LAYERS, 8, 128, "bfloat16", 16)
    tensors = [torch.empty(2, BLOCKS, 16, 8, 128, dtype=torch.bfloat16) for _ in range(LAYERS)]
    caches = PagedCaches.bind(tensors, group, axes="PBNHD", device=CPUDevice())
    layer = caches.of_layers(slice(0, 1))
    rows = torch.empty(BLOCKS, group.stride_bytes // 8, dtype=torch.int64, device="cpu")
    kernels.prepare(caches, rows)
    pages = np.random.default_rng(0).permutation(BLOCKS)[:, None]
    slots = np.arange(BLOCKS)
    ids = torch.zeros(8, dtype=torch.int64)
    constants = kernels.constants_of(16, to_rows=True)
    return {
        "Triton's part": took_us(lambda: kernels._copy[(16,)](ids, ids, ids, 0, 1, 1, 1, 1 << 40, 8, **constants)),  # noqa: SLF001 - the kernel itself
        "one block, all layers": took_us(lambda: kernels.scatter_blocks(rows, slots[:1], caches, pages[:1])),
        "8 blocks, all layers": took_us(lambda: kernels.scatter_blocks(rows, slots[:8], caches, pages[:8])),
        "1,024 blocks, one layer": took_us(lambda: kernels.scatter_blocks(rows, slots, layer, pages)),
        f"1,024 blocks, {layers_a_turn(BLOCKS)} layers: one turn": took_us(partial(turn, rows, slots, caches, pages)),
    }


def turn(rows: Tensor, slots: Ids, caches: PagedCaches, pages: Ids) -> None:
    """Enqueue the layers of one turn as a layer-wise load does: choose the slots, check the ids, launch."""
    for number in range(layers_a_turn(len(slots))):
        at = np.flatnonzero(slots >= 0)
        checked = copies._pages_of(caches, pages[at].ravel(), rows, slots[at])  # noqa: SLF001 - what each copy begins with
        kernels.scatter_blocks(rows, slots[at], caches.of_layers(slice(number, number + 1)), checked)


def main() -> int:
    """Measure, print the table and the line of JSON."""
    figures = measure()
    table = Table("launch of", "us")
    for name, value in figures.items():
        table.add_row(name, f"{value:.1f}")
    Console().print(table)
    print(json.dumps({name: round(value, 1) for name, value in figures.items()}))
    *_, one_layer, one_turn = figures.values()
    return int(one_layer > MOST_US or one_turn > MOST_A_TURN_US)


if __name__ == "__main__":
    sys.exit(main())
