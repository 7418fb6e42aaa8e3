"""Gather and scatter: a block is the same bytes whatever the engine's tensors look like."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tiered_kv.errors import ConfigurationError, LayoutMismatchError
from tiered_kv.layout import KVGroup, Order
from tiered_kv.memory import CPUDevice, PagedCaches, copy_rows, device_copies, gather_blocks, scatter_blocks

ORDERS: tuple[Order, ...] = ("NHD", "HND", "MLA")
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
Ids = NDArray[np.int64]
NUM_PAGES = 13
NUM_SLOTS = 7


@dataclass
class Engine:
    """Paged tensors as some engine would have them, full of random bits.

    Attributes:
        memory: All of its memory, including what lies between and around the pages, as bytes.
        planes: Per layer and plane, a view ``(num_pages, ...)``.
    """

    group: KVGroup
    axes: str
    kv_caches: Any
    memory: list[Tensor]
    planes: list[Tensor]

    def block(self, page_ids: list[int]) -> bytes:
        """Return the payload of a block, put together the slow and plain way."""
        return b"".join(_bytes(plane[page]) for plane in self.planes for page in page_ids)


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    """Draw a group, an arrangement of its tensors, and gaps around and between them."""
    order = draw(st.sampled_from(ORDERS))
    page_size, pages_per_block = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    group = KVGroup(
        num_layers=draw(st.integers(1, 3)),
        num_kv_heads=1 if order == "MLA" else draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 9)),
        dtype=draw(st.sampled_from(DTYPES)),
        block_size=page_size * pages_per_block,
        order=order,
        page_size=page_size,
    )
    inner = "ND" if order == "MLA" else order
    outers = ("B", "LB", "BL") if order == "MLA" else ("pair", "PB", "BP", "LPB", "LBP", "BLP", "PLB", "BPL")
    outer = draw(st.sampled_from(outers))
    axes = ("B" if outer == "pair" else outer) + inner
    gap = draw(st.integers(0, 5))  # elements in front of each tensor, so that addresses are odd
    num_tensors = 1 if "L" in outer else group.num_layers * (2 if outer == "pair" else 1)
    shape = [{**group.axis_sizes, "B": NUM_PAGES}[axis] for axis in axes]
    dtype = getattr(torch, group.dtype)
    memory, tensors = [], []
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    for _ in range(num_tensors):
        count = gap + int(np.prod(shape))
        memory.append(torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator))
        tensors.append(memory[-1].view(dtype)[gap:].view(shape))
    if "L" in outer:
        kv_caches: Any = tensors[0]
    elif outer == "pair":
        kv_caches = _pairs(tensors)
    else:
        kv_caches = _as_dict(tensors) if draw(st.booleans()) else tensors
    return Engine(group, axes, kv_caches, memory, _planes(tensors, axes))


@given(engine=engines(), data=st.data())
def test_a_block_is_gathered_and_scattered_bit_for_bit(engine: Engine, data: st.DataObject) -> None:
    """Slots hold the canonical payload, the way back restores it, and no byte beside the blocks changes either way."""
    caches = PagedCaches.bind(engine.kv_caches, engine.group, axes=engine.axes, device=CPUDevice())
    each = engine.group.pages_per_block
    pages = np.array(data.draw(st.permutations(range(NUM_PAGES))), dtype=np.int64)
    n = data.draw(st.integers(0, NUM_PAGES // each))
    if data.draw(st.booleans()):
        pages.sort()
    pages = pages[: n * each]
    slots = np.array(data.draw(st.permutations(range(NUM_SLOTS)))[:n], dtype=np.int64)
    if data.draw(st.booleans()):
        slots.sort()
    n, pages = len(slots), pages[: len(slots) * each]
    payload_bytes = engine.group.payload_bytes
    rows = torch.full((NUM_SLOTS, engine.group.stride_bytes // 8), 0x5A5A, dtype=torch.int64)
    untouched = rows.clone()
    memory = [each.clone() for each in engine.memory]
    by_device_code = rows.clone()

    gather_blocks(caches, pages, rows, slots)
    device_copies.gather_blocks(caches, pages.reshape(n, each), by_device_code, slots)

    assert torch.equal(rows, by_device_code)
    for slot, page_ids in zip(slots.tolist(), pages.reshape(n, each).tolist(), strict=True):
        assert _bytes(rows[slot])[:payload_bytes] == engine.block(page_ids)
        assert _bytes(rows[slot])[payload_bytes:] == _bytes(untouched[slot])[payload_bytes:]
        untouched[slot] = rows[slot]
    assert torch.equal(rows, untouched)

    for scatter in (scatter_blocks, _scatter_by_device_code):
        for plane in engine.planes:
            for page in pages.tolist():
                _as_uint8(plane[page]).fill_(0xA5)
        scatter(rows, slots, caches, pages)
        assert all(torch.equal(*pair) for pair in zip(engine.memory, memory, strict=True))


def test_one_slot_may_fill_several_blocks() -> None:
    """A key that comes twice in a load is one slot and two places."""
    kv = [torch.zeros(2, 4, 2, 1, 8)]
    caches = PagedCaches.bind(kv, KVGroup(1, 1, 8, "float32", 2), axes="PBNHD", device=CPUDevice())
    rows = torch.arange(512).view(1, 512)
    scatter_blocks(rows, np.array([0, 0]), caches, np.array([1, 3]))
    assert torch.equal(kv[0][:, 1], kv[0][:, 3])
    assert kv[0][:, 1].any()
    assert not kv[0][:, [0, 2]].any()


@pytest.mark.parametrize("copy", [copy_rows, device_copies.copy_rows, device_copies.copy_runs])
@pytest.mark.parametrize("words", [8, 1 << 14])
def test_rows_are_copied_whole(copy: Callable[..., None], words: int) -> None:
    """Slots arrive where they were sent, scattered or side by side, and their neighbours stay."""
    source = torch.arange(8 * words).view(8, words)
    target = torch.full((10, words), -1)
    expected = target.clone()
    expected[[9, 2, 3, 4, 0]] = source[[1, 5, 6, 7, 3]]
    copy(source, np.array([1, 5, 6, 7, 3]), target, np.array([9, 2, 3, 4, 0]))
    copy(source, np.array([], dtype=np.int64), target, np.array([], dtype=np.int64))
    assert torch.equal(target, expected)


def test_ids_that_do_not_fit_are_refused() -> None:
    """Too few block ids, rows too short for a block, or rows of another stride: an error with the numbers, no copy."""
    kv = [torch.ones(2, 4, 512, 1, 8)]
    caches = PagedCaches.bind(kv, KVGroup(1, 1, 8, "float32", 1024, page_size=512), axes="PBNHD", device=CPUDevice())
    rows = torch.zeros(3, 8192, dtype=torch.int64)
    with pytest.raises(LayoutMismatchError, match="2 slots need 4 block ids, got 3"):
        gather_blocks(caches, np.array([0, 1, 2]), rows, np.array([0, 1]))
    with pytest.raises(LayoutMismatchError, match="65536 bytes does not fit a slot of 4096"):
        scatter_blocks(rows[:, :512], np.array([0]), caches, np.array([0, 1]))
    with pytest.raises(LayoutMismatchError, match="1 slots of 65536 bytes do not fit 1 slots of 4096"):
        copy_rows(rows, np.array([0]), rows[:, :512], np.array([0]))
    with pytest.raises(ConfigurationError, match=r"block ids from 0 to 4 are not all in \[0, 4\)"):
        scatter_blocks(rows, np.array([0]), caches, np.array([4, 0]))
    with pytest.raises(ConfigurationError, match=r"slots from -1 to 1 are not all in \[0, 3\)"):
        gather_blocks(caches, np.array([0, 1, 2, 3]), rows, np.array([1, -1]))
    with pytest.raises(ConfigurationError, match=r"slots from 3 to 3 are not all in \[0, 3\)"):
        copy_rows(rows, np.array([0]), rows, np.array([3]))
    assert not rows.any()


def _scatter_by_device_code(rows: Tensor, slots: Ids, caches: PagedCaches, pages: Ids) -> None:
    device_copies.scatter_blocks(rows, slots, caches, pages.reshape(-1, caches.group.pages_per_block))


def _planes(tensors: list[Tensor], axes: str) -> list[Tensor]:
    """Return each layer's planes in canonical order, pages first, as torch would index them."""
    planes = tensors
    for axis in "LP":
        if axis in axes:
            planes = [each for plane in planes for each in plane.unbind(axes.index(axis))]
            axes = axes.replace(axis, "")
    return planes


def _pairs(tensors: list[Tensor]) -> list[tuple[Tensor, ...]]:
    return [tuple(tensors[at : at + 2]) for at in range(0, len(tensors), 2)]


def _as_dict(tensors: list[Tensor]) -> dict[str, Tensor]:
    return {f"layer.{number}": tensor for number, tensor in enumerate(tensors)}


def _as_uint8(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    return _as_uint8(tensor.contiguous()).numpy().tobytes()
