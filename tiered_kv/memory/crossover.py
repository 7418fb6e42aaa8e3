"""Which way blocks cross the bus: measured when an engine's caches are bound, and kept for the process.

A DMA has a price, whatever its length; a gather in front of one long DMA has another; a kernel that reaches over the
bus has none to speak of, but keeps a part of the GPU busy. Which is the fastest depends on direction, on the size and
number of fragments, on how many blocks go at once, and on the GPU, the bus and the processor that enqueues.
"""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from tiered_kv.memory import device_copies, driver
from tiered_kv.memory.caches import Fragment, PagedCaches
from tiered_kv.memory.device import Device
from tiered_kv.memory.device_copies import Gather, Scatter
from tiered_kv.memory.host import known_as_locked
from tiered_kv.values.errors import in_words
from tiered_kv.values.integers import Ids
from tiered_kv.values.layout import KVGroup
from tiered_kv.values.log import log

DIRECT_FROM_BYTES: Final = 1 << 20
"""Until measured: a DMA of this length keeps the bus busy for longer than it takes to enqueue the next one."""
BATCH_FROM_BYTES: Final = 64 << 10
"""Until measured, where the driver takes batches: the same without Python between two DMAs."""
MOST_OPERATIONS: Final = 256
"""Single DMAs that one copy may enqueue: more would fill a stream's queue, and then whoever enqueues waits."""
_COUNTS: Final = (1, 16, 256)
"""Blocks at once that are measured, as far as they fit a sample. Between two, the smaller one decides."""
_SAMPLE_BYTES: Final = 32 << 20
_ROUNDS: Final = 3


@dataclass(frozen=True)
class Way:
    """A way to copy between a GPU and the host, in both directions."""

    name: str
    gather: Gather
    scatter: Scatter


STAGING: Final = Way("staging", device_copies.gather_through_staging, device_copies.scatter_through_staging)
DIRECTLY: Final = Way("directly", device_copies.gather_directly, device_copies.scatter_directly)

Shape = tuple[str, int, int, int, bool]
_measured: dict[Shape, tuple[tuple[int, Way], ...]] = {}
"""By device, bytes and number of fragments, how many parts of a slot like these there are, and direction: from how many
blocks on which way is the fastest. Entries are only ever added, so any thread may read."""


def way_of(caches: PagedCaches, rows: Tensor, slots: Ids, *, to_rows: bool) -> Way:
    """Return the way for blocks of these layers, between these caches and slots of ``rows`` on the host."""
    num_blocks = len(slots)
    by_kernel = kernel_way(caches.torch_device)
    known = _measured.get(_shape_of(caches, to_rows=to_rows), ())
    way = next((each for count, each in reversed(known) if count <= num_blocks), None)
    if way is None:
        is_small = caches.columns is not None or not to_rows
        direct_from = BATCH_FROM_BYTES if driver.has_batches(caches.torch_device.index or 0) else DIRECT_FROM_BYTES
        way = DIRECTLY if _fragment_bytes(caches) >= direct_from else by_kernel if is_small else None
    num_operations = num_blocks * (caches.pages_per_block * len(caches.fragments) if way is DIRECTLY else 1)
    is_many = way is not by_kernel and num_operations > MOST_OPERATIONS
    if is_many and not device_copies.may_batch(rows, slots, caches.torch_device):
        way = by_kernel
    if way is None or (way is by_kernel and not device_copies.are_page_locked(rows, slots)):
        return STAGING
    return way


def measured() -> dict[Shape, tuple[tuple[int, Way], ...]]:
    """Return what has been measured in this process: see `_measured`."""
    return dict(_measured)


@cache
def kernel_way(device: torch.device) -> Way | None:
    """Return the way whose kernel reaches over the bus, if there is one on a device."""
    kernels = device_copies.kernels_for(device)
    if kernels is None or not driver.can_reach_host_memory(device.index or 0):
        return None
    return Way("by kernel", kernels.gather_blocks, kernels.scatter_blocks)


def prepare(caches: PagedCaches, device: Device) -> None:
    """Compile what copies of these caches need, and measure the ways; nothing on a CPU, or the second time.

    Blocks for some tenths of a second, and longer where a kernel is compiled: for the time before the first request.
    Where it fails, as on a GPU whose memory the engine has taken to the last, stated sizes go on to decide.
    """
    if caches.torch_device.type == "cpu":
        return
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    stream = device.stream("measure")
    stream.submit(partial(_prepare, caches), ended.put)
    stream.close()
    if (error := ended.get()) is not None:
        log("warning", "copies.unmeasured", device=str(caches.torch_device), error=in_words(error))


def _prepare(caches: PagedCaches) -> None:
    """Compile and measure what copies of these caches may use; in a stream's turn."""
    here, group = caches.torch_device, caches.group
    if (kernels := device_copies.kernels_for(here)) is not None:
        row_bytes = [group.stride_bytes] if caches.codec is None else [group.stride_bytes, caches.payload_bytes]
        for each in (caches, caches.by_page()):
            for num_bytes in row_bytes:
                kernels.prepare(each, torch.empty(1, -(-num_bytes // 8), dtype=torch.int64, device=here))
    if caches.codec is not None:
        return
    ways = [way for way in (STAGING, DIRECTLY, kernel_way(here)) if way is not None]
    for part in (caches, caches.of_layers(slice(0, 1))):
        if part.fragments and _shape_of(part, to_rows=True) not in _measured:
            num_fragments = len(part.fragments) * part.pages_per_block
            found = measure(here, _fragment_bytes(part), num_fragments, ways, num_parts=_num_parts(part))
            for to_rows, fastest in found.items():
                _measured[_shape_of(part, to_rows=to_rows)] = fastest
                log(
                    "debug",
                    "copies.measured",
                    fragment_bytes=_fragment_bytes(part),
                    direction="d2h" if to_rows else "h2d",
                    ways={count: way.name for count, way in fastest},
                )


def measure(
    device: torch.device,
    fragment_bytes: int,
    num_fragments: int,
    ways: Sequence[Way],
    *,
    num_parts: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[bool, tuple[tuple[int, Way], ...]]:
    """Return the fastest way out of the pages (True) and into them (False), each from how many blocks on.

    Args:
        device: Where pages would be; its current stream is that of the copies.
        fragment_bytes: Of each fragment.
        num_fragments: Of what is copied of a block.
        ways: To choose from.
        num_parts: How many of that a slot holds, one of which is copied: as many as layers for one layer, 1 for blocks.
        clock: Seconds.
    """
    words = -(-fragment_bytes // 8)
    group = KVGroup(num_parts * num_fragments, 1, words * 8, "uint8", block_size=1, order="MLA")
    counts = [count for count in _COUNTS if count == 1 or count * num_fragments * words * 8 <= _SAMPLE_BYTES]
    fragments = [
        Fragment(torch.zeros(counts[-1], words, dtype=torch.int64, device=device), number * words * 8)
        for number in range(num_fragments)
    ]
    caches = PagedCaches(group, None, device, counts[-1], tuple(fragments), range(num_fragments))
    if (kernels := device_copies.kernels_for(device)) is not None:
        kernels.send_table(caches)  # as those of an engine are
    has_batches = driver.has_batches(device.index or 0)
    num_rows = max(1, min(counts[-1], _SAMPLE_BYTES // group.stride_bytes))
    rows = torch.zeros(num_rows, group.stride_bytes // 8, dtype=torch.int64, pin_memory=True)
    fastest: dict[bool, tuple[tuple[int, Way], ...]] = {True: (), False: ()}
    for to_rows, count in ((to_rows, count) for to_rows in (True, False) for count in counts):
        slots = np.arange(count) % num_rows  # of a part, more blocks than slots: what arrives does not matter here
        pages = np.arange(count)[::-1].reshape(-1, 1).copy()
        took_s = {}
        for way in ways:
            if way is DIRECTLY and count * num_fragments > MOST_OPERATIONS and not has_batches:
                continue
            copy = (
                partial(way.gather, caches, pages, rows, slots)
                if to_rows
                else partial(way.scatter, rows, slots, caches, pages)
            )
            with known_as_locked(rows):
                took_s[way] = min(_seconds(copy, device, clock) for _ in range(1 + _ROUNDS))  # the first one allocates
        fastest[to_rows] += ((count, min(took_s, key=took_s.__getitem__)),)
    return fastest


def _seconds(copy: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    stream = torch.get_device_module(device).current_stream(device)
    start = clock()
    copy()
    stream.synchronize()
    return clock() - start


def _shape_of(caches: PagedCaches, *, to_rows: bool) -> Shape:
    num_fragments = len(caches.fragments) * caches.pages_per_block
    return _device_name(caches.torch_device), _fragment_bytes(caches), num_fragments, _num_parts(caches), to_rows


def _num_parts(caches: PagedCaches) -> int:
    return caches.group.num_layers // len(caches.layers)


def _fragment_bytes(caches: PagedCaches) -> int:
    return min((each.num_bytes for each in caches.fragments), default=0)


@cache
def _device_name(device: torch.device) -> str:
    name_of = getattr(torch.get_device_module(device), "get_device_name", str)  # a CPU has none
    return str(name_of(device))
