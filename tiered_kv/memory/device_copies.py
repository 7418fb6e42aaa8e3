"""Copies where at least one side is on a GPU, enqueued in the current stream.

By torch's own kernels, one launch or two a fragment. The Triton kernels, one launch a window, take the place of
`gather_blocks` and `scatter_blocks` here. Nothing below is particular to CUDA: on CPU tensors it does the same.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiered_kv.memory.caches import Fragment, PagedCaches
from tiered_kv.memory.host import slots_per_piece

Ids = NDArray[np.int64]


def gather_blocks(caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids) -> None:
    """Copy blocks of pages ``(n, pages_per_block)`` into slots of the same device."""
    sources, targets = _on_device(pages, rows), _on_device(slots, rows)
    for fragment in caches.fragments:
        for page in range(pages.shape[1]):
            _part(rows, fragment, page).index_copy_(0, targets, fragment.pages.index_select(0, sources[:, page]))


def scatter_blocks(rows: Tensor, slots: Ids, caches: PagedCaches, pages: Ids) -> None:
    """Copy slots into blocks of pages ``(n, pages_per_block)`` of the same device."""
    sources, targets = _on_device(slots, rows), _on_device(pages, rows)
    for fragment in caches.fragments:
        for page in range(pages.shape[1]):
            fragment.pages.index_copy_(0, targets[:, page], _part(rows, fragment, page).index_select(0, sources))


def copy_rows(source: Tensor, source_slots: Ids, target: Tensor, target_slots: Ids) -> None:
    """Copy whole slots within one device."""
    moved = source.index_select(0, _on_device(source_slots, source))
    target.index_copy_(0, _on_device(target_slots, target), moved)


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


def _runs(a: Ids, b: Ids, piece: int) -> Iterator[tuple[int, int]]:
    """Yield the positions at which runs start and stop. None crosses a multiple of ``piece``: see `slots_per_piece`."""
    if not len(a):
        return
    ends = np.zeros(len(a) - 1, dtype=bool)
    for ids in (a, b):
        ends |= (ids[1:] - ids[:-1] != 1) | (ids[1:] // piece != ids[:-1] // piece)
    cuts = [0, *(np.flatnonzero(ends) + 1).tolist(), len(a)]
    yield from pairwise(cuts)


def _on_device(ids: Ids, rows: Tensor) -> Tensor:
    """Put ids where the kernels read them. The driver takes a copy of so few pageable bytes before it returns."""
    return torch.tensor(ids).to(rows.device, non_blocking=True)


def _part(rows: Tensor, fragment: Fragment, page: int) -> Tensor:
    """Return the columns of ``rows`` that hold one page of a fragment, in its words: ``(num_slots, words)``."""
    words = fragment.pages.shape[1]
    start = fragment.offset_bytes // fragment.pages.itemsize + page * words
    return rows.view(fragment.pages.dtype)[:, start : start + words]
