"""Copies where at least one side is on a GPU, enqueued in the current stream.

Between a GPU and the host there are three ways. *Staging*: fragments are gathered into a buffer on the GPU and cross
the bus as whole runs of slots. *Directly*: each fragment is a DMA, all of them one call where the driver takes batches.
*By kernel*: one launch whose programs read or write the host's memory over the bus, which must be page-locked.
`crossover` knows which is the fastest when. All of them move the same bytes to the same places.

Within one device blocks are copied by kernels of ours, or by torch's own where Triton cannot serve or is missing:
nothing in these is particular to CUDA.
"""

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tiered_kv.memory import driver, staging
from tiered_kv.memory.caches import Fragment, PagedCaches
from tiered_kv.memory.host import is_page_locked, slots_per_piece
from tiered_kv.values.integers import Ids

Gather = Callable[[PagedCaches, Ids, Tensor, Ids], None]
Scatter = Callable[[Tensor, Ids, PagedCaches, Ids], None]


def gather_blocks(caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids) -> None:
    """Copy blocks of pages ``(n, pages_per_block)`` into slots of the same device."""
    kernels = kernels_for(rows.device)
    (gather_by_torch if kernels is None else kernels.gather_blocks)(caches, pages, rows, slots)


def scatter_blocks(rows: Tensor, slots: Ids, caches: PagedCaches, pages: Ids) -> None:
    """Copy slots into blocks of pages ``(n, pages_per_block)`` of the same device."""
    kernels = kernels_for(rows.device)
    (scatter_by_torch if kernels is None else kernels.scatter_blocks)(rows, slots, caches, pages)


@cache
def kernels_for(device: torch.device) -> Any:  # noqa: ANN401 - a module
    """Return `kernels` if Triton is here and they work on ``device``, else None."""
    if find_spec("triton") is None:
        return None
    from tiered_kv.memory import kernels  # noqa: PLC0415 - Triton takes long to import, and only a GPU has a use for it

    return kernels if kernels.can_copy(device) else None


def gather_by_torch(caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids) -> None:
    """Copy blocks of pages into slots of the same device by torch's own kernels, one launch or two a fragment."""
    sources, targets = on_device(pages, rows), on_device(slots, rows)
    for fragment in caches.fragments:
        for page in range(pages.shape[1]):
            _columns_of(rows, fragment, page).index_copy_(0, targets, fragment.pages.index_select(0, sources[:, page]))
    _count_launches(caches, pages)


def scatter_by_torch(rows: Tensor, slots: Ids, caches: PagedCaches, pages: Ids) -> None:
    """Copy slots into blocks of pages of the same device by torch's own kernels, one launch a fragment and page."""
    sources, targets = on_device(slots, rows), on_device(pages, rows)
    for fragment in caches.fragments:
        for page in range(pages.shape[1]):
            fragment.pages.index_copy_(0, targets[:, page], _columns_of(rows, fragment, page).index_select(0, sources))
    _count_launches(caches, pages)


def on_device(ids: Ids, rows: Tensor) -> Tensor:
    """Put ids where ``rows`` are."""
    return staging.upload(ids, rows.device)


def _count_launches(caches: PagedCaches, pages: Ids) -> None:
    staging.current(caches.torch_device).num_operations += 2 + 2 * len(caches.fragments) * pages.shape[1]


def _columns_of(rows: Tensor, fragment: Fragment, page: int) -> Tensor:
    """Return the columns of ``rows`` that hold one page of a fragment, in its words: ``(num_slots, words)``."""
    words = fragment.pages.shape[1]
    start = fragment.offset_bytes // fragment.pages.itemsize + page * words
    return rows.view(fragment.pages.dtype)[:, start : start + words]


def gather_through_staging(
    caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids, gather: Gather = gather_blocks
) -> None:
    """Copy blocks of pages into slots on the host, by way of rows on the engine's device that ``gather`` fills."""
    for part, staged, row_words, left_out in _staged(caches, rows):

        def fill(piece: slice, buffer: Tensor, part: PagedCaches = part, staged: PagedCaches = staged) -> None:
            if part.columns is None and part.stored_bytes < buffer.shape[1] * 8:
                buffer[:, part.stored_bytes // 8 :] = 0  # whatever lay there before must not reach a disk
            gather(staged, pages[piece], buffer, _first(slots[piece]))

        def empty(piece: slice, buffer: Tensor, part: PagedCaches = part, left_out: int = left_out) -> None:
            copy_runs(buffer, _first(slots[piece]), rows, slots[piece], part.columns, left_out=(left_out, 0))

        _in_two_steps("gather", caches, row_words, slots, fill, empty)


def scatter_through_staging(
    rows: Tensor, slots: Ids, caches: PagedCaches, pages: Ids, scatter: Scatter = scatter_blocks
) -> None:
    """Copy slots on the host into blocks of pages, by way of rows on the engine's device that ``scatter`` empties."""
    for part, staged, row_words, left_out in _staged(caches, rows):

        def fill(piece: slice, buffer: Tensor, part: PagedCaches = part, left_out: int = left_out) -> None:
            copy_runs(rows, slots[piece], buffer, _first(slots[piece]), part.columns, left_out=(0, left_out))

        def empty(piece: slice, buffer: Tensor, staged: PagedCaches = staged) -> None:
            scatter(buffer, _first(slots[piece]), staged, pages[piece])

        _in_two_steps("scatter", caches, row_words, slots, fill, empty)


def _staged(caches: PagedCaches, rows: Tensor) -> Iterator[tuple[PagedCaches, PagedCaches, int, int]]:
    """Yield layers that fit a staging buffer, the caches as they are in one, its words a row, and what it leaves out.

    Whole slots if they fit, and where a codec takes layers out of these.
    """
    row_words, num_layers = rows.shape[1], len(caches.layers)
    room = staging.current(caches.torch_device).buffer_bytes
    is_whole = caches.columns is None and (row_words * 8 <= room or num_layers == 1)
    if is_whole or caches.codec is not None:
        yield caches, caches, row_words, 0
        return
    num_parts = -(-num_layers // max(1, room // caches.layer_bytes))
    if caches.columns is None:
        num_parts = max(2, num_parts)  # all layers are whole slots, which do not fit
    for at in range(num_parts):
        first, last = (caches.layers.start + num_layers * end // num_parts for end in (at, at + 1))
        part = caches.of_layers(slice(first, last))
        yield part, *part.alone


def gather_directly(caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids) -> None:
    """Copy blocks of pages into slots on the host, one DMA a fragment."""
    _copy_directly(caches, pages, rows, slots, to_rows=True)


def scatter_directly(rows: Tensor, slots: Ids, caches: PagedCaches, pages: Ids) -> None:
    """Copy slots on the host into blocks of pages, one DMA a fragment."""
    _copy_directly(caches, pages, rows, slots, to_rows=False)


def _copy_directly(caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids, *, to_rows: bool) -> None:
    if may_batch(rows, slots, caches.torch_device):
        in_engine, in_rows, sizes = _addresses(caches, pages, rows, slots)
        targets, sources = (in_rows, in_engine) if to_rows else (in_engine, in_rows)
        _copy_batch(targets, sources, sizes, caches.torch_device)
        return
    for in_cache, in_row in _fragments(caches, pages, rows, slots):
        target, source = (in_row, in_cache) if to_rows else (in_cache, in_row)
        target.copy_(source, non_blocking=True)
    staging.current(caches.torch_device).num_operations += pages.size * len(caches.fragments)


def copy_rows(source: Tensor, source_slots: Ids, target: Tensor, target_slots: Ids) -> None:
    """Copy whole slots within one device."""
    moved = source.index_select(0, on_device(source_slots, source))
    target.index_copy_(0, on_device(target_slots, target), moved)
    staging.current(source.device).num_operations += 4


def copy_runs(
    source: Tensor,
    source_slots: Ids,
    target: Tensor,
    target_slots: Ids,
    columns: slice | None = None,
    *,
    left_out: tuple[int, int] = (0, 0),
) -> None:
    """Copy slots between host and device, one DMA for each run of slots that are neighbours on both sides.

    With ``columns``, these bytes of each slot alone, one DMA a slot: torch would take a part of several rows through
    pageable memory, and wait for it. ``left_out`` says how many bytes of a slot rows of either side have not, in front.
    """
    row_bytes, their_row_bytes = source.shape[1] * 8, target.shape[1] * 8
    start, num_bytes = (0, row_bytes) if columns is None else (columns.start, columns.stop - columns.start)
    if columns is None:
        runs = list(_runs(source_slots, target_slots, slots_per_piece(row_bytes)))
    else:
        runs = [(at, at + 1) for at in range(len(source_slots))]
    device = source.device if target.device.type == "cpu" else target.device
    on_host = (source, source_slots) if source.device.type == "cpu" else (target, target_slots)
    source_start, target_start = start - left_out[0], start - left_out[1]
    if len(runs) > 1 and may_batch(*on_host, device):
        at = np.array([first for first, _ in runs])
        sizes = np.array([(stop - first - 1) * row_bytes + num_bytes for first, stop in runs])
        sources = source.data_ptr() + source_slots[at] * row_bytes + source_start
        targets = target.data_ptr() + target_slots[at] * their_row_bytes + target_start
        _copy_batch(targets, sources, sizes, device)
        return
    if columns is not None:
        source = source.view(torch.uint8)[:, source_start : source_start + num_bytes]
        target = target.view(torch.uint8)[:, target_start : target_start + num_bytes]
    for first, stop in runs:
        source_at, target_at, n = int(source_slots[first]), int(target_slots[first]), stop - first
        target[target_at : target_at + n].copy_(source[source_at : source_at + n], non_blocking=True)
    staging.current(device).num_operations += len(runs)


def _in_two_steps(
    kind: str, caches: PagedCaches, row_words: int, slots: Ids, fill: staging.Step, empty: staging.Step
) -> None:
    if len(slots):
        here = caches.torch_device
        through = staging.current(here)
        pieces = staging.pieces_of(len(slots), row_words * 8, through.buffer_bytes)
        through.run(kind, pieces, row_words, here, fill, empty)


def are_page_locked(rows: Tensor, slots: Ids) -> bool:
    """Say whether these slots on the host are page-locked, all of them: others of the same slab may not be."""
    if not len(slots):
        return False
    start, row_bytes = rows.data_ptr(), rows.shape[1] * 8
    return is_page_locked(start + int(slots.min()) * row_bytes, start + (int(slots.max()) + 1) * row_bytes)


def may_batch(rows: Tensor, slots: Ids, device: torch.device) -> bool:
    """Say whether copies between these slots and a GPU can be one operation: a batch, of page-locked memory."""
    return driver.has_batches(device.index or 0) and are_page_locked(rows, slots)


def _copy_batch(targets: Ids, sources: Ids, sizes: Ids, device: torch.device) -> None:
    """Enqueue copies by address in torch's current stream, as one operation or a few."""
    driver.copy_batch(targets, sources, sizes, torch.cuda.current_stream(device).cuda_stream)
    staging.current(device).num_operations += -(-len(sizes) // driver.MOST_AT_ONCE)


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


def _addresses(caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids) -> tuple[Ids, Ids, Ids]:
    """Return what is in one piece on both sides: where it is in the engine's memory, where in a row, how many bytes.

    None crosses from slots that were page-locked together to others.
    """
    address, stride, num_bytes, offset = (column[:, None, None] for column in caches.table.T)
    in_engine = address + pages * stride
    slot_addresses = rows.data_ptr() + slots * (rows.shape[1] * 8)
    in_rows = slot_addresses[:, None] + offset + np.arange(pages.shape[1]) * num_bytes
    apart = np.broadcast_to(slots[:, None] % slots_per_piece(rows.shape[1] * 8) == 0, in_rows.shape).ravel()
    in_engine, in_rows, sizes = in_engine.ravel(), in_rows.ravel(), np.broadcast_to(num_bytes, in_rows.shape).ravel()
    goes_on = (in_engine[1:] - in_engine[:-1] == sizes[:-1]) & (in_rows[1:] - in_rows[:-1] == sizes[:-1]) & ~apart[1:]
    first = np.flatnonzero(np.r_[True, ~goes_on])
    return in_engine[first], in_rows[first], np.add.reduceat(sizes, first)


def _fragments(caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each fragment in pages and in slots, as tensors of uint8."""
    row_bytes = rows.view(torch.uint8)
    for fragment in caches.fragments:
        page_bytes = fragment.pages.view(torch.uint8)
        for slot, page_ids in zip(slots.tolist(), pages.tolist(), strict=True):
            for number, page_id in enumerate(page_ids):
                start = fragment.offset_bytes + number * fragment.num_bytes
                yield page_bytes[page_id], row_bytes[slot, start : start + fragment.num_bytes]
