"""Copies between the engine's pages and slots of rows, and between rows: bit for bit, whatever dtype the pages have.

*Rows* are ``(num_slots, stride_bytes // 8)`` int64, on the host (`HostSlab.rows`) or the device (`Device.empty_pool`).
These functions run inside a stream's turn. On a CPU they return when the bytes are there; on a GPU when the work is
enqueued in the current stream. No slot or page is in two copies at once unless both only read it: the catalog's leases
and reservations, and `PagedCaches.check_ids`, have seen to that.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from tiered_kv.memory import crossover, device_copies, host_copies, staging
from tiered_kv.memory.caches import PagedCaches
from tiered_kv.memory.device_copies import on_device
from tiered_kv.memory.staging import pieces_of
from tiered_kv.values.errors import ConfigurationError, LayoutMismatchError
from tiered_kv.values.integers import Ids

_MANY_IDS = 64


def gather_blocks(caches: PagedCaches, page_ids: Ids, rows: Tensor, slots: Ids, *, layers: slice | None = None) -> None:
    """Copy blocks out of the engine's pages into slots.

    Args:
        caches: The engine's cache.
        page_ids: ``(n * pages_per_block,)``, block by block.
        rows: The slots' memory. Bytes of a slot past the payload may be zeroed.
        slots: ``(n,)``, each once.
        layers: Consecutive layers, to copy these alone: the rest of the slots stays as it is. None copies all.

    Raises:
        LayoutMismatchError: Numbers of ids that do not fit, or rows too short for a block.
        ConfigurationError: An id out of range.
    """
    pages = _pages_of(caches, page_ids, rows, slots)
    part = caches if layers is None else caches.of_layers(layers)
    if not part.layers or not len(slots):
        return
    if rows.device == caches.torch_device:
        _gather(part, pages, rows, slots)
    elif part.codec is not None:
        device_copies.gather_through_staging(part, pages, rows, slots, _gather)
    else:
        crossover.way_of(part, rows, slots, to_rows=True).gather(part, pages, rows, slots)


def scatter_blocks(
    rows: Tensor, slots: Ids, caches: PagedCaches, page_ids: Ids, *, layers: slice | None = None
) -> None:
    """Copy blocks out of slots into the engine's pages: the reverse of `gather_blocks`; a slot may come twice."""
    pages = _pages_of(caches, page_ids, rows, slots)
    part = caches if layers is None else caches.of_layers(layers)
    if not part.layers or not len(slots):
        return
    if rows.device == caches.torch_device:
        _scatter(rows, slots, part, pages)
    elif part.codec is not None:
        device_copies.scatter_through_staging(rows, slots, part, pages, _scatter)
    else:
        crossover.way_of(part, rows, slots, to_rows=False).scatter(rows, slots, part, pages)


def copy_rows(source: Tensor, source_slots: Ids, target: Tensor, target_slots: Ids) -> None:
    """Copy whole slots from one pool of rows to another, or within one if no slot is both source and target.

    Raises:
        LayoutMismatchError: Numbers of slots or strides that differ.
        ConfigurationError: A slot out of range.
    """
    if len(source_slots) != len(target_slots) or source.shape[1] != target.shape[1]:
        raise LayoutMismatchError(
            f"{len(source_slots)} slots of {source.shape[1] * 8} bytes do not fit "
            f"{len(target_slots)} slots of {target.shape[1] * 8} bytes"
        )
    _check_range("slot", source_slots, len(source))
    _check_range("slot", target_slots, len(target))
    if source.device != target.device:
        device_copies.copy_runs(source, source_slots, target, target_slots)
    elif source.device.type == "cpu":
        host_copies.copy_rows(source, source_slots, target, target_slots)
    else:
        device_copies.copy_rows(source, source_slots, target, target_slots)


def _gather(caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids) -> None:
    """Copy blocks within one device, encoded if there is a codec."""
    ways = host_copies if caches.torch_device.type == "cpu" else device_copies
    if caches.codec is None:
        ways.gather_blocks(caches, pages, rows, slots)
        return
    for piece, payloads, of_layers, words in _payloads(caches, rows, slots):
        ways.gather_blocks(caches, pages[piece], payloads, np.arange(len(payloads)))
        stored = caches.codec.encode(of_layers.contiguous())
        words.index_copy_(0, on_device(slots[piece], rows), stored)


def _scatter(rows: Tensor, slots: Ids, caches: PagedCaches, pages: Ids) -> None:
    """Copy blocks within one device, decoded if there is a codec."""
    ways = host_copies if caches.torch_device.type == "cpu" else device_copies
    if caches.codec is None:
        ways.scatter_blocks(rows, slots, caches, pages)
        return
    for piece, payloads, of_layers, words in _payloads(caches, rows, slots):
        stored = words.index_select(0, on_device(slots[piece], rows))
        of_layers.copy_(caches.codec.decode(stored))
        ways.scatter_blocks(payloads, np.arange(len(payloads)), caches, pages[piece])


def _payloads(caches: PagedCaches, rows: Tensor, slots: Ids) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield pieces of the slots, each with payloads to be filled, these layers' bytes of them, and of all rows."""
    words_per_payload = -(-caches.payload_bytes // 8)
    columns = caches.columns or slice(0, caches.stored_bytes)
    words = rows[:, columns.start // 8 : columns.stop // 8]
    for piece in pieces_of(len(slots), words_per_payload * 8, staging.PIECE_BYTES):
        payloads = torch.empty(piece.stop - piece.start, words_per_payload, dtype=torch.int64, device=rows.device)
        yield piece, payloads, payloads.view(torch.uint8)[:, caches.payload_columns], words


def _pages_of(caches: PagedCaches, page_ids: Ids, rows: Tensor, slots: Ids) -> Ids:
    """Return the ids as ``(n, pages_per_block)``."""
    each, stored_bytes = caches.pages_per_block, caches.stored_bytes
    if len(page_ids) != len(slots) * each:
        raise LayoutMismatchError(f"{len(slots)} slots need {len(slots) * each} block ids, got {len(page_ids)}")
    if rows.shape[1] * 8 < stored_bytes:
        raise LayoutMismatchError(f"a block of {stored_bytes} bytes does not fit a slot of {rows.shape[1] * 8}")
    _check_range("block id", page_ids, caches.num_pages)
    _check_range("slot", slots, rows.shape[0])
    return page_ids.reshape(-1, each)


def _check_range(name: str, ids: Ids, end: int) -> None:
    """Check once more: on the host an id out of range would write over foreign memory, on a GPU it ends the process."""
    if not len(ids):
        return
    # Of a few ids Python finds the ends in a fraction of numpy's time, of many it is the other way round.
    numbers = ids.tolist() if len(ids) < _MANY_IDS else (ids.min(), ids.max())
    if min(numbers) < 0 or max(numbers) >= end:
        raise ConfigurationError(f"{name}s from {min(numbers)} to {max(numbers)} are not all in [0, {end})")
