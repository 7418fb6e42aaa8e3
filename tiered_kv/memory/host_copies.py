"""Copies where the engine's pages and the rows are both in host memory, in the calling thread alone.

numpy rather than torch: torch splits ``index_select`` over its OpenMP threads, which fight the engine's for the same
cores (measured on 2 busy cores: 0.1 GB/s instead of 3), and its ``index_copy_`` runs at 0.6 of memmove. numpy's copies
release the GIL as torch's do.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tiered_kv.memory.caches import PagedCaches

Ids = NDArray[np.int64]
Words = NDArray[Any]

_ONE_BY_ONE_BYTES = 16 << 10
"""From here on, scattered rows are read one by one: numpy's temporary for reading them together costs more."""


def gather_blocks(caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids) -> None:
    """Copy blocks of pages ``(n, pages_per_block)`` into slots."""
    to = _Rows(slots)
    for page, page_ids in enumerate(pages.T):
        at = _Rows(page_ids)
        for in_engine, in_rows in _parts(caches, page, rows):
            _copy(in_engine, at, in_rows, to)


def scatter_blocks(rows: Tensor, slots: Ids, caches: PagedCaches, pages: Ids) -> None:
    """Copy slots into blocks of pages ``(n, pages_per_block)``."""
    at = _Rows(slots)
    for page, page_ids in enumerate(pages.T):
        to = _Rows(page_ids)
        for in_engine, in_rows in _parts(caches, page, rows):
            _copy(in_rows, at, in_engine, to)


def copy_rows(source: Tensor, source_slots: Ids, target: Tensor, target_slots: Ids) -> None:
    """Copy whole slots."""
    _copy(source.numpy(), _Rows(source_slots), target.numpy(), _Rows(target_slots))


def _parts(caches: PagedCaches, page: int, rows: Tensor) -> Iterator[tuple[Words, Words]]:
    """Yield each fragment in the engine's memory, and the columns of ``rows`` that hold it for one page of a block."""
    views = {dtype: rows.view(dtype).numpy() for dtype in {fragment.pages.dtype for fragment in caches.fragments}}
    for fragment in caches.fragments:
        width = fragment.pages.shape[1]
        start = fragment.offset_bytes // fragment.pages.itemsize + page * width
        yield fragment.pages.numpy(), views[fragment.pages.dtype][:, start : start + width]


class _Rows:
    """Which rows: as ``ids``, and as ``index``, a slice if they are neighbours in ascending order."""

    def __init__(self, ids: Ids) -> None:
        self.ids = ids
        self.neighbours = len(ids) > 0 and bool((ids[1:] - ids[:-1] == 1).all())
        self.index = slice(int(ids[0]), int(ids[-1]) + 1) if self.neighbours else ids


def _copy(source: Words, at: _Rows, target: Words, to: _Rows) -> None:
    if at.neighbours or source.shape[1] * source.itemsize < _ONE_BY_ONE_BYTES:
        target[to.index] = source[at.index]  # neighbours are a view, and read without a temporary
    else:
        for source_id, target_id in zip(at.ids.tolist(), to.ids.tolist(), strict=True):
            target[target_id] = source[source_id]
