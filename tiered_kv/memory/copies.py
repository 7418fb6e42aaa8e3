"""Copies between the engine's pages and slots of rows, and between rows: bit for bit, whatever dtype the pages have.

*Rows* are ``(num_slots, stride_bytes // 8)`` int64, on the host (`HostSlab.rows`) or the device (`Device.empty_pool`).
These functions run inside a stream's turn. On a CPU they return when the bytes are there; on a GPU when the work is
enqueued in the current stream. No slot or page is in two copies at once unless both only read it: the catalog's leases
and reservations, and `PagedCaches.check_ids`, have seen to that.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiered_kv.errors import ConfigurationError, LayoutMismatchError
from tiered_kv.memory import device_copies, host_copies
from tiered_kv.memory.caches import PagedCaches

Ids = NDArray[np.int64]


def gather_blocks(caches: PagedCaches, page_ids: Ids, rows: Tensor, slots: Ids, *, layers: slice | None = None) -> None:
    """Copy blocks out of the engine's pages into slots.

    Args:
        caches: The engine's cache.
        page_ids: ``(n * pages_per_block,)``, block by block.
        rows: The slots' memory. Bytes of a slot behind the payload may be zeroed.
        slots: ``(n,)``, each once.
        layers: Consecutive layers, to copy these alone: the rest of the slots stays as it is. None copies all.

    Raises:
        LayoutMismatchError: Numbers of ids that do not fit, or rows too short for a block.
        ConfigurationError: An id out of range.
    """
    pages = _pages_of(caches, page_ids, rows, slots)
    part = caches.of_layers(layers)
    if not part.fragments or not len(slots):
        return
    if caches.torch_device.type == "cpu":
        host_copies.gather_blocks(part, pages, rows, slots)
    elif rows.device == caches.torch_device:
        device_copies.gather_blocks(part, pages, rows, slots)
    else:
        # One staging row a block, so that the bus sees whole runs of slots instead of a fragment at a time.
        staging = _staging(caches, rows, len(slots))
        device_copies.gather_blocks(part, pages, staging, np.arange(len(slots)))
        device_copies.copy_runs(staging, np.arange(len(slots)), rows, slots, _columns(caches, layers))


def scatter_blocks(
    rows: Tensor, slots: Ids, caches: PagedCaches, page_ids: Ids, *, layers: slice | None = None
) -> None:
    """Copy blocks out of slots into the engine's pages: the reverse of `gather_blocks`; a slot may come twice."""
    pages = _pages_of(caches, page_ids, rows, slots)
    part = caches.of_layers(layers)
    if not part.fragments or not len(slots):
        return
    if caches.torch_device.type == "cpu":
        host_copies.scatter_blocks(rows, slots, part, pages)
    elif rows.device == caches.torch_device:
        device_copies.scatter_blocks(rows, slots, part, pages)
    else:
        staging = _staging(caches, rows, len(slots))
        device_copies.copy_runs(rows, slots, staging, np.arange(len(slots)), _columns(caches, layers))
        device_copies.scatter_blocks(staging, np.arange(len(slots)), part, pages)


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


def _pages_of(caches: PagedCaches, page_ids: Ids, rows: Tensor, slots: Ids) -> Ids:
    """Return the ids as ``(n, pages_per_block)``."""
    each, payload_bytes = caches.pages_per_block, caches.payload_bytes
    if len(page_ids) != len(slots) * each:
        raise LayoutMismatchError(f"{len(slots)} slots need {len(slots) * each} block ids, got {len(page_ids)}")
    if rows.shape[1] * 8 < payload_bytes:
        raise LayoutMismatchError(f"a block of {payload_bytes} bytes does not fit a slot of {rows.shape[1] * 8}")
    _check_range("block id", page_ids, caches.num_pages)
    _check_range("slot", slots, len(rows))
    return page_ids.reshape(-1, each)


def _check_range(name: str, ids: Ids, end: int) -> None:
    """Check once more: on the host an id out of range would write over foreign memory, on a GPU it ends the process."""
    numbers = ids.tolist()  # of a window's few ids Python finds the ends in a tenth of numpy's time
    if numbers and (min(numbers) < 0 or max(numbers) >= end):
        raise ConfigurationError(f"{name}s from {min(numbers)} to {max(numbers)} are not all in [0, {end})")


def _columns(caches: PagedCaches, layers: slice | None) -> slice | None:
    """Return the bytes of a row that these layers are; None is the whole row, padding too."""
    start, stop = caches.layer_bytes(layers)
    return None if (start, stop) == (0, caches.payload_bytes) else slice(start, stop)


def _staging(caches: PagedCaches, rows: Tensor, n: int) -> Tensor:
    """Allocate rows on the engine's device. Its memory is the current stream's, and is reused only behind this copy."""
    staging = torch.empty(n, rows.shape[1], dtype=torch.int64, device=caches.torch_device)
    staging[:, caches.payload_bytes // 8 :] = 0  # whatever lay there before must not reach a disk
    return staging
