"""Copies by Triton, within a GPU or between it and page-locked host memory: one launch, whatever the number of blocks.

A table tells the kernel where each fragment is, in memory and in a payload: it is on the device since the binding. Ids
tell which pages and slots; they go up in front of the launch. Imported only where Triton is, by
`device_copies.kernels_for`.

Nothing is compiled while serving: no argument is specialised on its value or alignment, and `prepare` compiles what one
binding can need.

With ``TRITON_INTERPRET=1`` in the environment before this module is imported, the same kernel runs on host memory.
"""

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tiered_kv.memory import driver, staging
from tiered_kv.memory.caches import Fragment, PagedCaches
from tiered_kv.values.errors import in_words
from tiered_kv.values.integers import Ids
from tiered_kv.values.layout import KVGroup
from tiered_kv.values.log import log

_PIECE_BYTES = 8 << 10
"""What a program moves at a time: large enough to keep many reads in flight, small enough for fragments of one page."""
_NUM_PROGRAMS = 64
"""At most, in one launch: enough to outrun the bus several times, few enough to leave the engine's kernels room."""
_BYTES_OVER_PCIE, _BYTES_OVER_C2C = 128 << 10, 512 << 10
"""In flight where one side is host memory: what PCIe 5, or NVLink-C2C, carries in a round trip of 2 us, or 1 us. More
programs would only wait."""
_WIDEST = 16
"""Bytes that one thread can move at once."""


@triton.jit(  # type: ignore[untyped-decorator]  # Triton has no types
    do_not_specialize=["num_units", "num_fragments", "pieces", "pages_per_block", "rows", "row_stride"],
    do_not_specialize_on_alignment=["table", "pages", "slots"],
)
def _copy(  # type: ignore[no-untyped-def]  # noqa: ANN202 - types are Triton's
    table, pages, slots, num_units, num_fragments, pieces, pages_per_block, rows, row_stride,  # noqa: ANN001 - types are Triton's
    ALIGNMENT: tl.constexpr, WORD: tl.constexpr, PIECE: tl.constexpr, TO_ROWS: tl.constexpr,  # noqa: N803 - constants
):  # fmt: skip
    """Move units: a piece of a fragment of a page each. Every program takes its share of them."""
    if WORD == 8:
        words = tl.pointer_type(tl.int64)
    elif WORD == 4:
        words = tl.pointer_type(tl.int32)
    elif WORD == 2:
        words = tl.pointer_type(tl.int16)
    else:
        words = tl.pointer_type(tl.int8)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        place = unit // pieces // num_fragments
        entry = table + unit // pieces % num_fragments * 4
        num_bytes = tl.load(entry + 2)
        in_payload = tl.load(entry + 3) + place % pages_per_block * num_bytes
        in_engine = tl.load(entry) + tl.load(pages + place) * tl.load(entry + 1)
        in_row = rows + tl.load(slots + place // pages_per_block) * row_stride + in_payload
        at = unit % pieces * PIECE + tl.arange(0, PIECE)
        # The compiler cannot see what divides a loaded number, and would move a word at a time.
        mask = at < tl.multiple_of(num_bytes, ALIGNMENT) // WORD
        engine_words = tl.multiple_of(in_engine.to(words), ALIGNMENT) + at
        row_words = tl.multiple_of(in_row.to(words), ALIGNMENT) + at
        if TO_ROWS:
            tl.store(row_words, tl.load(engine_words, mask=mask), mask=mask)
        else:
            tl.store(engine_words, tl.load(row_words, mask=mask), mask=mask)


INTERPRETED = not isinstance(_copy, triton.JITFunction)
"""Whether the kernel runs on the CPU."""


_tables: WeakKeyDictionary[PagedCaches, Tensor] = WeakKeyDictionary()
"""Those that are on their devices. Entries are only added, so any thread may read."""


def can_copy(device: torch.device) -> bool:
    """Say whether these copies work there; on a GPU, by trying one, for which Triton needs a C compiler.

    What it says no to is logged, since it costs speed.
    """
    if INTERPRETED or device.type == "cpu":
        return INTERPRETED and device.type == "cpu"
    try:
        _try(device)
    except Exception as error:  # noqa: BLE001 - whatever a compiler or a driver raises
        log("warning", "kernels.unavailable", device=str(device), error=in_words(error))
        return False
    return True


def gather_blocks(caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids) -> None:
    """Copy blocks of pages ``(n, pages_per_block)`` into slots of the same device, or of page-locked host memory."""
    _launch(caches, pages, rows, slots, to_rows=True)


def scatter_blocks(rows: Tensor, slots: Ids, caches: PagedCaches, pages: Ids) -> None:
    """Copy slots of the same device, or of page-locked host memory, into blocks of pages ``(n, pages_per_block)``."""
    _launch(caches, pages, rows, slots, to_rows=False)


def prepare(caches: PagedCaches, rows: Tensor) -> None:
    """Compile what copies between these caches, all layers or one, and rows like these can need; moves nothing.

    Their tables go to the device, for any of its streams once the current one has done it.
    """
    none = np.empty((0, caches.pages_per_block), np.int64)
    layers = [caches.of_layers(slice(layer, layer + 1)) for layer in range(caches.group.num_layers)]
    alignments = {alignment_of(part, rows): part for part in (caches, *layers)}
    for part in alignments.values():
        for to_rows in (True, False):
            _launch(part, none, rows, none[:, 0], to_rows=to_rows)
    for part in (caches, *layers, *(layer.alone[0] for layer in layers)):
        send_table(part)


def send_table(caches: PagedCaches) -> None:
    """Have the device know where these fragments are, once the current stream has done it."""
    _tables[caches] = staging.upload(caches.table.ravel(), caches.torch_device)


def alignment_of(caches: PagedCaches, rows: Tensor) -> int:
    """Return what divides all addresses and lengths of copies between them: a power of two, at most 16."""
    facts = int(np.bitwise_or.reduce(caches.table, axis=None)) | rows.data_ptr() | rows.stride(0) * rows.itemsize
    return min(facts & -facts, _WIDEST)


def constants_of(alignment: int, *, to_rows: bool) -> dict[str, int | bool]:
    """Return what the kernel is compiled for, one binary for each."""
    word = min(alignment, 8)
    return {"ALIGNMENT": alignment, "WORD": word, "PIECE": _PIECE_BYTES // word, "TO_ROWS": to_rows}


def _launch(caches: PagedCaches, pages: Ids, rows: Tensor, slots: Ids, *, to_rows: bool) -> None:
    if not caches.fragments:
        return
    table, here = caches.table, caches.torch_device
    constants = constants_of(alignment_of(caches, rows), to_rows=to_rows)
    pieces = -(-int(table[:, 2].max()) // _PIECE_BYTES)
    num_units = pages.size * len(table) * pieces
    ids = staging.current(here).ids(np.concatenate([pages, slots], axis=None), here)
    known = _tables.get(caches)
    on_device = staging.upload(table.ravel(), here) if known is None else known
    most = _NUM_PROGRAMS
    if rows.device != here:
        most = min(most, _bytes_over_bus(here) // min(int(table[:, 2].max()), _PIECE_BYTES))
    grid: Any = (max(1, min(num_units, most)),)
    _copy[grid](
        on_device, ids, ids[pages.size :],
        num_units, len(table), pieces, pages.shape[1], rows.data_ptr(), rows.stride(0) * rows.itemsize,
        **constants,
    )  # fmt: skip
    staging.current(here).num_operations += 1 if known is not None else 2


@cache
def _bytes_over_bus(device: torch.device) -> int:
    return _BYTES_OVER_C2C if driver.is_one_memory_with_the_host(device.index or 0) else _BYTES_OVER_PCIE


def _try(device: torch.device) -> None:
    """Compile both ways as they are mostly used, and run them: 16 bytes there and back."""
    words = torch.zeros(1, 2, dtype=torch.int64, device=device)
    group = KVGroup(1, 1, 16, "uint8", block_size=1, order="MLA")
    caches = PagedCaches(group, None, device, 1, (Fragment(words, 0),), range(1))
    none = np.zeros(1, dtype=np.int64)
    gather_blocks(caches, none[:, None], torch.zeros_like(words), none)
    scatter_blocks(torch.zeros_like(words), none, caches, none[:, None])
    torch.get_device_module(device).current_stream(device).synchronize()
