"""Where copying fragment by fragment begins to outrun staging: measured once per device, and kept for the process.

A DMA has a price, whatever its length; a gather in front of one long DMA has another. Which is smaller depends on the
GPU, the bus and the processor that enqueues.
"""

import time
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch

from tiered_kv.layout import KVGroup
from tiered_kv.log import log
from tiered_kv.memory import device_copies
from tiered_kv.memory.caches import Fragment, PagedCaches

DIRECT_FROM_BYTES = 1 << 20
"""Until measured: a DMA of this length keeps the bus busy for longer than it takes to enqueue the next one."""
_ROUNDS = 3

_is_direct: dict[tuple[str, int], bool] = {}
"""By the device's name and fragment bytes. Entries are only ever added, so any thread may read."""


def is_direct(caches: PagedCaches) -> bool:
    """Say whether these fragments cross the bus one by one."""
    if caches.codec is not None:
        return False
    size = _fragment_bytes(caches)
    return _is_direct.get((_device_name(caches.torch_device), size), size >= DIRECT_FROM_BYTES)


def prepare(caches: PagedCaches) -> None:
    """Measure both ways for fragments of this size, and compile what they need; nothing on a CPU, or the second time.

    Blocks for some milliseconds, or a second where a kernel is compiled: for the time before the first request. Where
    it fails, as on a GPU whose memory the engine has taken to the last, the stated size goes on to decide.
    """
    device, size = caches.torch_device, _fragment_bytes(caches)
    if device.type == "cpu":
        return
    try:
        name = _device_name(device)
        if (name, size) not in _is_direct:
            with torch.get_device_module(device).device(device):
                _is_direct[name, size] = measure(device, size)
    except RuntimeError as error:  # torch's for all that a driver says, want of memory included
        log("warning", "copies.unmeasured", device=str(device), error=f"{type(error).__name__}: {error}")


def measure(
    device: torch.device,
    fragment_bytes: int,
    *,
    sample_bytes: int = 16 << 20,
    clock: Callable[[], float] = time.perf_counter,
    pinned: bool = True,
) -> bool:
    """Say whether ``fragment_bytes`` one by one take less time there and back than by way of staging.

    Args:
        device: Where pages would be.
        fragment_bytes: Of each of several fragments a block.
        sample_bytes: About how much to copy.
        clock: Seconds.
        pinned: Whether the host's side is page-locked, as the host slab's is.
    """
    words = -(-fragment_bytes // 8)
    num_fragments = max(1, min(64, sample_bytes // 4 // fragment_bytes))
    group = KVGroup(num_fragments, 1, words * 8, "uint8", block_size=1, order="MLA")
    num_blocks = max(1, min(64, sample_bytes // group.payload_bytes))
    fragments = [
        Fragment(torch.zeros(num_blocks, words, dtype=torch.int64, device=device), number * words * 8)
        for number in range(num_fragments)
    ]
    caches = PagedCaches(group, None, device, num_blocks, tuple(fragments), range(num_fragments))
    rows = torch.zeros(num_blocks, group.stride_bytes // 8, dtype=torch.int64, pin_memory=pinned)
    slots = np.arange(num_blocks)
    pages = slots[::-1].reshape(-1, 1).copy()
    seconds = []
    for gather, scatter in (
        (device_copies.gather_through_staging, device_copies.scatter_through_staging),
        (device_copies.gather_directly, device_copies.scatter_directly),
    ):
        there_and_back = [partial(gather, caches, pages, rows, slots), partial(scatter, rows, slots, caches, pages)]
        rounds = []
        for _ in range(1 + _ROUNDS):  # the first one compiles and allocates
            torch.get_device_module(device).synchronize(device)
            start = clock()
            for copy in there_and_back:
                copy()
            torch.get_device_module(device).synchronize(device)
            rounds.append(clock() - start)
        seconds.append(min(rounds[1:]))
    staged_s, direct_s = seconds
    return direct_s < staged_s


def _fragment_bytes(caches: PagedCaches) -> int:
    return min((each.num_bytes for each in caches.fragments), default=0)


@cache
def _device_name(device: torch.device) -> str:
    name_of = getattr(torch.get_device_module(device), "get_device_name", str)  # a CPU has none
    return str(name_of(device))
