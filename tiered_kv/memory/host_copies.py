"""Copies where the engine's pages and the rows are both in host memory, in the calling thread alone.

Not by torch: it splits ``index_select`` over its OpenMP threads, which fight the engine's for the same cores (measured
on 2 busy cores: 0.1 GB/s instead of 3), and its ``index_copy_`` runs at 0.6 of memmove. There are two ways instead:

- Large pieces by memmove, one by one: as fast as memory goes. Python makes the addresses as it goes along: numpy, gone
  from the processor's caches after every window, took longer for so few (4 % of a window of 32 MiB).
- Small pieces, and pieces read from neighbouring rows, by one numpy assignment a fragment, whose loop is in C.
  Scattered large ones would go through a temporary.
- Few small pieces by memmove too: what numpy needs to begin would be most of it.

The first two release the GIL, the first once in `_FEW_BYTES`: a busy engine thread may keep it for long. Loads, which
somebody waits for, mostly go the second way, and take it back only once a fragment.
"""

import ctypes
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from tiered_kv.memory.caches import PagedCaches
from tiered_kv.values.integers import Ids

Words = NDArray[Any]

_move_with_gil = ctypes.PyDLL(None).memmove
_move_with_gil.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_FEW_PIECES = 256
_FEW_BYTES = 256 << 10
"""So little is copied without releasing the GIL: to get it back may take a thread 5 ms, and this 50 us."""
_ONE_BY_ONE_BYTES = 16 << 10
"""Below, a call a piece costs more than the temporary."""


def gather_blocks(caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids) -> None:
    """Copy blocks of pages ``(n, pages_per_block)`` into slots."""
    if not _are_few(caches, pages):
        _copy_many(caches, pages, rows, slots, to_rows=True)
        return
    for slot, page_ids in zip(_addresses(rows, slots), pages.tolist(), strict=True):
        for address, stride, num_bytes, offset in caches.facts:
            for page, page_id in enumerate(page_ids):
                _move_with_gil(slot + offset + page * num_bytes, address + page_id * stride, num_bytes)


def scatter_blocks(rows: Tensor, slots: Ids, caches: PagedCaches, pages: Ids) -> None:
    """Copy slots into blocks of pages ``(n, pages_per_block)``."""
    if not _are_few(caches, pages):
        _copy_many(caches, pages, rows, slots, to_rows=False)
        return
    for slot, page_ids in zip(_addresses(rows, slots), pages.tolist(), strict=True):
        for address, stride, num_bytes, offset in caches.facts:
            for page, page_id in enumerate(page_ids):
                _move_with_gil(address + page_id * stride, slot + offset + page * num_bytes, num_bytes)


def _copy_many(caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids, *, to_rows: bool) -> None:
    """Copy blocks of pages into slots, or slots into these."""
    slot_addresses = _addresses(rows, slots)
    for page, page_ids in enumerate(pages.T):
        if caches.fragments[0].num_bytes < _ONE_BY_ONE_BYTES or _as_slice(page_ids if to_rows else slots) is not None:
            in_pages, in_slots = _index(page_ids), _index(slots)
            for in_engine, in_rows in _parts(caches, page, rows):
                if to_rows:
                    in_rows[in_slots] = in_engine[in_pages]
                else:
                    in_engine[in_pages] = in_rows[in_slots]
            continue
        places = list(zip(page_ids.tolist(), slot_addresses, strict=True))
        for each in caches.fragments:
            base, stride, num_bytes = each.address, each.stride_bytes, each.num_bytes
            offset = each.offset_bytes + page * num_bytes
            for (page_id, slot), move in zip(places, _moves(num_bytes), strict=False):
                in_page, in_slot = base + page_id * stride, slot + offset
                if to_rows:
                    move(in_slot, in_page, num_bytes)
                else:
                    move(in_page, in_slot, num_bytes)


def _are_few(caches: PagedCaches, pages: Ids) -> bool:
    num_pieces = pages.size * len(caches.fragments)
    return num_pieces <= _FEW_PIECES and num_pieces * caches.fragments[0].num_bytes <= _FEW_BYTES


def copy_rows(source: Tensor, source_slots: Ids, target: Tensor, target_slots: Ids) -> None:
    """Copy whole slots."""
    num_bytes = source.shape[1] * 8
    if num_bytes < _ONE_BY_ONE_BYTES or _as_slice(source_slots) is not None:
        target.numpy()[_index(target_slots)] = source.numpy()[_index(source_slots)]
    else:
        places = zip(_addresses(source, source_slots), _addresses(target, target_slots), strict=True)
        for (at, to), move in zip(places, _moves(num_bytes), strict=False):
            move(to, at, num_bytes)


def _moves(num_bytes: int) -> Iterator[Callable[[int, int, int], object]]:
    """Yield what moves a piece each, without end: one in `_FEW_BYTES` lets go of the GIL meanwhile."""
    return cycle([_move_with_gil] * (_FEW_BYTES // num_bytes - 1) + [ctypes.memmove])


def _addresses(rows: Tensor, slots: Ids) -> list[int]:
    base, stride_bytes = rows.data_ptr(), rows.stride(0) * 8
    return [base + slot * stride_bytes for slot in slots.tolist()]


def _as_slice(ids: Ids) -> slice | None:
    """Return the slice that ``ids`` are, if they are neighbours in ascending order."""
    if not len(ids) or ids[-1] - ids[0] != len(ids) - 1 or (ids[1:] - ids[:-1] != 1).any():
        return None
    return slice(int(ids[0]), int(ids[-1]) + 1)


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
