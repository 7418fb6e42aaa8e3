"""Copies where at least one side is on a GPU, enqueued in the current stream.

Between a GPU and the host there are two ways. Many small fragments are gathered on the GPU into a staging buffer and
cross the bus as whole runs of slots. Fragments so large that the bus is busy with each cross one by one, and save the
GPU the staging. `crossover` knows where one way begins to be the faster one.
"""

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiered_kv.memory import pipeline, torch_copies
from tiered_kv.memory.caches import PagedCaches
from tiered_kv.memory.host import slots_per_piece
from tiered_kv.memory.torch_copies import on_device

Ids = NDArray[np.int64]
Gather = Callable[[PagedCaches, Ids, Tensor, Ids], None]
Scatter = Callable[[Tensor, Ids, PagedCaches, Ids], None]

PIECE_BYTES = 8 << 20
"""Of a staging buffer: its DMA takes longer than Python needs to enqueue the next one, some 0.1 ms, and the first one
of a window starts soon."""


def gather_blocks(caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids) -> None:
    """Copy blocks of pages ``(n, pages_per_block)`` into slots of the same device."""
    ways(rows.device).gather_blocks(caches, pages, rows, slots)


def scatter_blocks(rows: Tensor, slots: Ids, caches: PagedCaches, pages: Ids) -> None:
    """Copy slots into blocks of pages ``(n, pages_per_block)`` of the same device."""
    ways(rows.device).scatter_blocks(rows, slots, caches, pages)


@cache
def ways(device: torch.device) -> Any:  # noqa: ANN401 - either module, of the same two functions
    """Return what copies within ``device``: `kernels`, or `torch_copies` where Triton is missing or does not work."""
    if find_spec("triton") is None:
        return torch_copies
    from tiered_kv.memory import kernels  # noqa: PLC0415 - Triton takes long to import, and only a GPU has a use for it

    return kernels if kernels.can_copy(device) else torch_copies


def gather_through_staging(
    caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids, gather: Gather = gather_blocks
) -> None:
    """Copy blocks of pages into slots on the host, by way of rows on the engine's device that ``gather`` fills."""

    def fill(piece: slice, staging: Tensor) -> None:
        if caches.columns is None and caches.stored_bytes < staging.shape[1] * 8:
            staging[:, caches.stored_bytes // 8 :] = 0  # whatever lay there before must not reach a disk
        gather(caches, pages[piece], staging, _first(slots[piece]))

    def empty(piece: slice, staging: Tensor) -> None:
        copy_runs(staging, _first(slots[piece]), rows, slots[piece], caches.columns)

    pieces = pieces_of(len(slots), rows.shape[1] * 8)
    pipeline.run(pieces, _staging(caches, pieces, rows), fill, empty)


def scatter_through_staging(
    rows: Tensor, slots: Ids, caches: PagedCaches, pages: Ids, scatter: Scatter = scatter_blocks
) -> None:
    """Copy slots on the host into blocks of pages, by way of rows on the engine's device that ``scatter`` empties."""

    def fill(piece: slice, staging: Tensor) -> None:
        copy_runs(rows, slots[piece], staging, _first(slots[piece]), caches.columns)

    def empty(piece: slice, staging: Tensor) -> None:
        scatter(staging, _first(slots[piece]), caches, pages[piece])

    pieces = pieces_of(len(slots), rows.shape[1] * 8)
    pipeline.run(pieces, _staging(caches, pieces, rows), fill, empty)


def gather_directly(caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids) -> None:
    """Copy blocks of pages into slots on the host, one DMA a fragment."""
    for in_engine, in_row in _fragments(caches, pages, rows, slots):
        in_row.copy_(in_engine, non_blocking=True)


def scatter_directly(rows: Tensor, slots: Ids, caches: PagedCaches, pages: Ids) -> None:
    """Copy slots on the host into blocks of pages, one DMA a fragment."""
    for in_engine, in_row in _fragments(caches, pages, rows, slots):
        in_engine.copy_(in_row, non_blocking=True)


def copy_rows(source: Tensor, source_slots: Ids, target: Tensor, target_slots: Ids) -> None:
    """Copy whole slots within one device."""
    moved = source.index_select(0, on_device(source_slots, source))
    target.index_copy_(0, on_device(target_slots, target), moved)


def copy_runs(
    source: Tensor, source_slots: Ids, target: Tensor, target_slots: Ids, columns: slice | None = None
) -> None:
    """Copy slots between host and device, one DMA for each run of slots that are neighbours on both sides.

    With ``columns``, these bytes of each slot alone, one DMA a slot: torch would take a part of several rows through
    pageable memory, and wait for it.
    """
    if columns is not None:
        sources, targets = source.view(torch.uint8)[:, columns], target.view(torch.uint8)[:, columns]
        for at, to in zip(source_slots.tolist(), target_slots.tolist(), strict=True):
            targets[to].copy_(sources[at], non_blocking=True)
        return
    for start, stop in _runs(source_slots, target_slots, slots_per_piece(source.shape[1] * 8)):
        source_at, target_at, n = int(source_slots[start]), int(target_slots[start]), stop - start
        target[target_at : target_at + n].copy_(source[source_at : source_at + n], non_blocking=True)


def pieces_of(num_blocks: int, block_bytes: int) -> list[slice]:
    """Cut positions into pieces of blocks that fit a staging buffer together, at least one block each."""
    each = max(1, PIECE_BYTES // block_bytes)
    return [slice(start, min(start + each, num_blocks)) for start in range(0, num_blocks, each)]


def _staging(caches: PagedCaches, pieces: list[slice], rows: Tensor) -> list[Tensor]:
    """Allocate one buffer a piece, at most two: one is filled while the other is emptied."""
    shape = pieces[0].stop if pieces else 0, rows.shape[1]
    return [torch.empty(shape, dtype=torch.int64, device=caches.torch_device) for _ in pieces[:2]]


def _first(slots: Ids) -> Ids:
    """Return the first slots of a staging buffer, as many as ``slots``."""
    return np.arange(len(slots))


def _runs(a: Ids, b: Ids, piece: int) -> Iterator[tuple[int, int]]:
    """Yield the positions at which runs start and stop. None crosses a multiple of ``piece``: see `slots_per_piece`."""
    places = list(zip(a.tolist(), b.tolist(), strict=True))
    start = 0
    for at, ((before, b_before), (here, b_here)) in enumerate(pairwise(places), start=1):
        if here - before != 1 or b_here - b_before != 1 or not here % piece or not b_here % piece:
            yield start, at
            start = at
    if places:
        yield start, len(places)


def _fragments(caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each page's part of each block, uint8: in the engine's memory, and in its row."""
    row_bytes = rows.view(torch.uint8)
    for fragment in caches.fragments:
        page_bytes = fragment.pages.view(torch.uint8)
        for slot, page_ids in zip(slots.tolist(), pages.tolist(), strict=True):
            for number, page_id in enumerate(page_ids):
                start = fragment.offset_bytes + number * fragment.num_bytes
                yield page_bytes[page_id], row_bytes[slot, start : start + fragment.num_bytes]
