"""Engines of any layout, as Hypothesis draws them, and what their blocks' bytes should be."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tiered_kv.memory import CPUDevice, Device, PagedCaches
from tiered_kv.memory.codec import Codec
from tiered_kv.values.layout import KVGroup, Order

ORDERS: tuple[Order, ...] = ("NHD", "HND", "MLA")
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
_INSIDE = {
    "NHD": ("PBNLHD", "BNLPHD", "BPNLHD", "BNHPLD", "BLNPHD", "BNPLHD"),
    "HND": ("PBHLND", "BLHPND", "BPHNLD"),
    "MLA": ("BNLD",),
}
Ids = NDArray[np.int64]
NUM_PAGES = 13
NUM_SLOTS = 7
_CPU = CPUDevice()


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
    device: Device

    def bind(self, codec: Codec | None = None) -> PagedCaches:
        """Bind the tensors."""
        return PagedCaches.bind(self.kv_caches, self.group, axes=self.axes, device=self.device, codec=codec)

    def block(self, page_ids: list[int]) -> bytes:
        """Return the payload of a block, put together the slow and plain way."""
        return b"".join(bytes_of(plane[page]) for plane in self.planes for page in page_ids)

    def wipe(self, pages: Ids) -> None:
        """Overwrite these pages."""
        for plane in self.planes:
            for page in pages.tolist():
                plane[page].view(torch.uint8).fill_(0xA5)


@st.composite
def engines(
    draw: st.DrawFn, *, device: Device = _CPU, dtypes: tuple[str, ...] = DTYPES, max_head_dim: int = 9
) -> Engine:
    """Draw a group, an arrangement of its tensors, and gaps around and between them."""
    order = draw(st.sampled_from(ORDERS))
    page_size, pages_per_block = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    group = KVGroup(
        num_layers=draw(st.integers(1, 3)),
        num_kv_heads=1 if order == "MLA" else draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, max_head_dim)),
        dtype=draw(st.sampled_from(dtypes)),
        block_size=page_size * pages_per_block,
        order=order,
        page_size=page_size,
    )
    inner = "ND" if order == "MLA" else order
    outers = ("B", "LB", "BL") if order == "MLA" else ("pair", "PB", "BP", "LPB", "LBP", "BLP", "PLB", "BPL")
    outer = draw(st.sampled_from(outers))
    axes = ("B" if outer == "pair" else outer) + inner
    if pages_per_block == 1 and outer in ("B", "pair") and draw(st.booleans()):  # layers inside tokens, or planes too
        axes, outer = draw(st.sampled_from(_INSIDE[order])), "inside"
    gap = draw(st.integers(0, 5))  # elements in front of each tensor, so that addresses are odd
    num_tensors = 1 if "L" in axes else group.num_layers * (2 if outer == "pair" else 1)
    shape = [{**group.axis_sizes, "B": NUM_PAGES}[axis] for axis in axes]
    dtype = getattr(torch, group.dtype)
    memory, tensors = [], []
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    for _ in range(num_tensors):
        count = gap + int(np.prod(shape))
        random = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        memory.append(random.to(device.torch_device))
        tensors.append(memory[-1].view(dtype)[gap:].view(shape))
    if "L" in axes:
        kv_caches: Any = tensors[0]
    elif outer == "pair":
        kv_caches = _pairs(tensors)
    else:
        kv_caches = _as_dict(tensors) if draw(st.booleans()) else tensors
    return Engine(group, axes, kv_caches, memory, _planes(tensors, axes), device)


@st.composite
def places(draw: st.DrawFn, group: KVGroup) -> tuple[Ids, Ids]:
    """Draw pages of some blocks and as many slots, in ascending order or in none."""
    each = group.pages_per_block
    pages = np.array(draw(st.permutations(range(NUM_PAGES))), dtype=np.int64)
    if draw(st.booleans()):
        pages.sort()
    n = draw(st.integers(0, min(NUM_SLOTS, NUM_PAGES // each)))
    slots = np.array(draw(st.permutations(range(NUM_SLOTS)))[:n], dtype=np.int64)
    if draw(st.booleans()):
        slots.sort()
    return pages[: n * each], slots


def bytes_of(tensor: Tensor) -> bytes:
    """Return what is in a tensor, byte for byte."""
    return _as_uint8(tensor.contiguous()).cpu().numpy().tobytes()


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
