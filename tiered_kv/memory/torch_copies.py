"""Copies within one device by torch's own kernels: one launch or two a fragment, enqueued in the current stream.

For devices that Triton cannot serve, and where it is not installed. Nothing here is particular to CUDA.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tiered_kv.memory import staging
from tiered_kv.memory.caches import Fragment, PagedCaches

Ids = NDArray[np.int64]


def gather_blocks(caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids) -> None:
    """Copy blocks of pages ``(n, pages_per_block)`` into slots of the same device."""
    sources, targets = on_device(pages, rows), on_device(slots, rows)
    for fragment in caches.fragments:
        for page in range(pages.shape[1]):
            _part(rows, fragment, page).index_copy_(0, targets, fragment.pages.index_select(0, sources[:, page]))
    _count(caches, pages)


def scatter_blocks(rows: Tensor, slots: Ids, caches: PagedCaches, pages: Ids) -> None:
    """Copy slots into blocks of pages ``(n, pages_per_block)`` of the same device."""
    sources, targets = on_device(slots, rows), on_device(pages, rows)
    for fragment in caches.fragments:
        for page in range(pages.shape[1]):
            fragment.pages.index_copy_(0, targets[:, page], _part(rows, fragment, page).index_select(0, sources))
    _count(caches, pages)


def on_device(ids: Ids, rows: Tensor) -> Tensor:
    """Put ids where ``rows`` are."""
    return staging.upload(ids, rows.device)


def _count(caches: PagedCaches, pages: Ids) -> None:
    staging.current(caches.torch_device).num_operations += 2 + 2 * len(caches.fragments) * pages.shape[1]


def _part(rows: Tensor, fragment: Fragment, page: int) -> Tensor:
    """Return the columns of ``rows`` that hold one page of a fragment, in its words: ``(num_slots, words)``."""
    words = fragment.pages.shape[1]
    start = fragment.offset_bytes // fragment.pages.itemsize + page * words
    return rows.view(fragment.pages.dtype)[:, start : start + words]
