"""Copies where the engine's pages and the rows are both in host memory, in the calling thread alone.

Not by torch: it splits ``index_select`` over its OpenMP threads, which fight the engine's for the same cores (measured
on 2 busy cores: 0.1 GB/s instead of 3), and its ``index_copy_`` runs at 0.6 of memmove. There are two ways instead:

- Large pieces by memmove, one by one, all addresses worked out beforehand: as fast as memory goes.
- Small pieces, and pieces read from neighbouring rows, by one numpy assignment a fragment, whose loop is in C.
  Scattered large ones would go through a temporary.

Both release the GIL. Loads, which somebody waits for, mostly go the second way, and take it back only once a fragment:
a busy engine thread may keep it for long.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tiered_kv.memory.caches import PagedCaches

Ids = NDArray[np.int64]
Words = NDArray[Any]

_ONE_BY_ONE_BYTES = 16 << 10
"""Below, a call a piece costs more than the temporary."""


def gather_blocks(caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids) -> None:
    """Copy blocks of pages ``(n, pages_per_block)`` into slots."""
    for page, page_ids in enumerate(pages.T):
        if _is_large(caches.fragments[0].num_bytes) and _as_slice(page_ids) is None:
            sources, targets = _addresses(caches, page, page_ids, rows, slots)
            _move(sources, targets, caches.fragment_table["num_bytes"])
            continue
        at, to = _index(page_ids), _index(slots)
        for in_engine, in_rows in _parts(caches, page, rows):
            in_rows[to] = in_engine[at]


def scatter_blocks(rows: Tensor, slots: Ids, caches: PagedCaches, pages: Ids) -> None:
    """Copy slots into blocks of pages ``(n, pages_per_block)``."""
    for page, page_ids in enumerate(pages.T):
        if _is_large(caches.fragments[0].num_bytes) and _as_slice(slots) is None:
            targets, sources = _addresses(caches, page, page_ids, rows, slots)
            _move(sources, targets, caches.fragment_table["num_bytes"])
            continue
        at, to = _index(slots), _index(page_ids)
        for in_engine, in_rows in _parts(caches, page, rows):
            in_engine[to] = in_rows[at]


def copy_rows(source: Tensor, source_slots: Ids, target: Tensor, target_slots: Ids) -> None:
    """Copy whole slots."""
    if _is_large(source.shape[1] * 8) and _as_slice(source_slots) is None:
        stride_bytes = source.shape[1] * 8
        at = source_slots * stride_bytes + source.data_ptr()
        to = target_slots * stride_bytes + target.data_ptr()
        _move(at[None], to[None], np.array([stride_bytes]))
    else:
        target.numpy()[_index(target_slots)] = source.numpy()[_index(source_slots)]


def _is_large(num_bytes: int) -> bool:
    return num_bytes >= _ONE_BY_ONE_BYTES


def _as_slice(ids: Ids) -> slice | None:
    """Return the slice that ``ids`` are, if they are neighbours in ascending order."""
    if len(ids) and (ids[1:] - ids[:-1] == 1).all():
        return slice(int(ids[0]), int(ids[-1]) + 1)
    return None


def _index(ids: Ids) -> slice | Ids:
    """Return what numpy reads without a temporary, if it can be."""
    return ids if (neighbours := _as_slice(ids)) is None else neighbours


def _parts(caches: PagedCaches, page: int, rows: Tensor) -> Iterator[tuple[Words, Words]]:
    """Yield each fragment in the engine's memory, and the columns of ``rows`` that hold it for one page of a block."""
    all_words = {dtype: rows.view(dtype).numpy() for dtype in {fragment.pages.dtype for fragment in caches.fragments}}
    for fragment, in_engine in zip(caches.fragments, caches.arrays, strict=True):
        words = in_engine.shape[1]
        start = fragment.offset_bytes // in_engine.itemsize + page * words
        yield in_engine, all_words[fragment.pages.dtype][:, start : start + words]


def _addresses(caches: PagedCaches, page: int, page_ids: Ids, rows: Tensor, slots: Ids) -> tuple[Ids, Ids]:
    """Return the addresses of one page of each block in the engine and in the rows, ``(num_fragments, n)`` each."""
    table = caches.fragment_table[:, None]
    in_engine = table["address"] + table["stride_bytes"] * page_ids
    in_rows = rows.data_ptr() + slots * (rows.stride(0) * 8) + table["offset_bytes"] + table["num_bytes"] * page
    return in_engine, in_rows


def _move(sources: Ids, targets: Ids, num_bytes: Ids) -> None:
    """Copy ``num_bytes[i]`` from each of ``sources[i]`` to each of ``targets[i]``."""
    memmove = ctypes.memmove
    for at, to, size in zip(sources.tolist(), targets.tolist(), num_bytes.tolist(), strict=True):
        for source, target in zip(at, to, strict=True):
            memmove(target, source, size)
