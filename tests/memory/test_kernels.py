"""The Triton kernel moves what torch's own kernels move: on a GPU, or else under Triton's interpreter."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.memory.engines import DTYPES, NUM_SLOTS, Engine, bytes_of, engines, places
from tiered_kv.memory import CPUDevice, CUDADevice, Device, PagedCaches, device_copies
from tiered_kv.values.layout import KVGroup, Order

triton = pytest.importorskip("triton", reason="Triton: pip install 'tiered-kv[cuda]'")
tl = pytest.importorskip("triton.language", reason="Triton: pip install 'tiered-kv[cuda]'")
kernels = pytest.importorskip("tiered_kv.memory.kernels", reason="Triton: pip install 'tiered-kv[cuda]'")


@pytest.fixture(autouse=True, scope="module")
def _interpreter() -> None:
    """Skip where the kernels would be interpreted and Triton 3.6 can't: it needs NumPy before 2.4 to count to 1."""
    if not kernels.INTERPRETED:
        return
    try:
        _count[1,](1)
    except triton.runtime.errors.InterpreterError:
        pytest.skip("a NumPy that Triton's interpreter does not know: pip install -c constraints.txt triton numpy")


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _count(n) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001 - types are Triton's
    for _ in range(tl.program_id(0), n):
        pass


DEVICE: Device = CUDADevice() if torch.cuda.is_available() else CPUDevice()
HERE = DEVICE.torch_device


def rows_for(group: KVGroup, num_slots: int = NUM_SLOTS) -> Tensor:
    """Return slots full of a pattern."""
    return torch.full((num_slots, group.stride_bytes // 8), 0x5A5A, dtype=torch.int64, device=HERE)


@settings(max_examples=40)
@given(engine=engines(device=DEVICE), data=st.data())
def test_any_layout_is_copied_bit_for_bit(engine: Engine, data: st.DataObject) -> None:
    """Odd sizes and addresses, blocks of several pages, single layers: exact both ways, and nothing beside changes."""
    caches, each = engine.bind(), engine.group.pages_per_block
    first = data.draw(st.integers(0, engine.group.num_layers - 1))
    part = caches.of_layers(data.draw(st.sampled_from([None, slice(first, None), slice(first, first + 1)])))
    pages, slots = data.draw(places(engine.group))
    blocks = pages.reshape(len(slots), each)
    rows, expected = rows_for(engine.group), rows_for(engine.group)
    memory = [each.clone() for each in engine.memory]

    kernels.gather_blocks(part, blocks, rows, slots)
    device_copies.gather_by_torch(part, blocks, expected, slots)
    assert torch.equal(rows, expected)

    engine.wipe(pages)
    device_copies.scatter_by_torch(rows, slots, part, blocks)
    expected_memory = [each.clone() for each in engine.memory]
    engine.wipe(pages)
    kernels.scatter_blocks(rows, slots, part, blocks)
    assert all(torch.equal(*pair) for pair in zip(engine.memory, expected_memory, strict=True))
    if len(part.layers) == engine.group.num_layers:
        assert all(torch.equal(*pair) for pair in zip(engine.memory, memory, strict=True))


def split(group: KVGroup, pages: int) -> list[tuple[Tensor, Tensor]]:
    """K and V of each layer apart."""
    shape = _page(group)
    return [(_random(group.dtype, pages, *shape), _random(group.dtype, pages, *shape)) for _ in range(group.num_layers)]


def fused(group: KVGroup, pages: int) -> list[Tensor]:
    """One tensor a layer, K and V of a page side by side; for MLA the latent."""
    planes = () if group.order == "MLA" else (2,)
    return [_random(group.dtype, pages, *planes, *_page(group)) for _ in range(group.num_layers)]


def packed(group: KVGroup, pages: int) -> Tensor:
    """One tensor for all layers of a page: one fragment."""
    planes = () if group.order == "MLA" else (2,)
    return _random(group.dtype, pages, group.num_layers, *planes, *_page(group))


CASES = [
    *product(DTYPES, ("NHD", "HND"), (split, fused, packed), (1, 3)),
    *product(DTYPES, ("MLA",), (fused, packed), (1, 3)),
]


@pytest.mark.parametrize(("dtype", "order", "arrange", "pages_per_block"), CASES)
def test_every_layout_and_dtype_goes_there_and_back(
    dtype: str, order: Order, arrange: Callable[[KVGroup, int], object], pages_per_block: int
) -> None:
    """Each of those that engines use, in the shapes they use, only smaller."""
    heads = 1 if order == "MLA" else 2
    group = KVGroup(2, heads, 24, dtype, 4 * pages_per_block, order, page_size=4)
    kv_caches = arrange(group, 4 * pages_per_block)
    axes = ("BL" if arrange is packed else "B") + ("" if order == "MLA" or arrange is split else "P")
    axes += "ND" if order == "MLA" else order
    caches = PagedCaches.bind(kv_caches, group, axes=axes, device=DEVICE)
    pages = np.random.default_rng(0).permutation(4 * pages_per_block)[: 3 * pages_per_block].reshape(3, -1)
    slots = np.array([4, 0, 2])
    rows = rows_for(group)
    kernels.gather_blocks(caches, pages, rows, slots)
    expected = rows_for(group)
    device_copies.gather_by_torch(caches, pages, expected, slots)
    assert torch.equal(rows, expected)
    before = [bytes_of(each.pages) for each in caches.fragments]
    for fragment in caches.fragments:
        fragment.pages[torch.from_numpy(pages.ravel()).to(HERE)] = 0
    kernels.scatter_blocks(rows, slots, caches, pages)
    assert [bytes_of(each.pages) for each in caches.fragments] == before


@pytest.mark.parametrize("num_bytes", [8192 + 8, 3 * 8192, 2 * 8192 + 5, 8191])
def test_fragments_longer_than_a_piece_arrive_whole(num_bytes: int) -> None:
    """Cut into pieces, the last one of any length, by words of any width."""
    group = KVGroup(2, 1, num_bytes, "uint8", 1, "MLA")
    caches = PagedCaches.bind([_random("uint8", 4, 1, num_bytes) for _ in range(2)], group, device=DEVICE)
    rows, pages = rows_for(group, 3), np.array([[3], [1]])
    kernels.gather_blocks(caches, pages, rows, np.array([2, 0]))
    for number, slot in enumerate((2, 0)):
        kept = rows[slot].view(torch.uint8)[: 2 * num_bytes].view(2, num_bytes)
        assert torch.equal(kept[0], caches.fragments[0].pages.view(torch.uint8)[pages[number, 0]])
        assert torch.equal(kept[1], caches.fragments[1].pages.view(torch.uint8)[pages[number, 0]])
    assert rows[1].eq(0x5A5A).all()


def test_more_work_than_programs_is_shared_out() -> None:
    """The number of programs is bounded; a window of many fragments is done by as many, in turns."""
    group = KVGroup(5, 1, 16, "uint8", 1, "MLA")
    caches = PagedCaches.bind([_random("uint8", 64, 1, 16) for _ in range(5)], group, device=DEVICE)
    rows, expected, pages = rows_for(group, 64), rows_for(group, 64), np.arange(64)[::-1].reshape(-1, 1).copy()
    kernels.gather_blocks(caches, pages, rows, np.arange(64))
    device_copies.gather_by_torch(caches, pages, expected, np.arange(64))
    assert torch.equal(rows, expected)


def _page(group: KVGroup) -> tuple[int, ...]:
    n, h, d = group.page_size, group.num_kv_heads, group.head_dim
    return {"NHD": (n, h, d), "HND": (h, n, d), "MLA": (n, d)}[group.order]


def _random(dtype_name: str, *shape: int) -> Tensor:
    """Return random bits."""
    dtype = getattr(torch, dtype_name)
    num_bytes = shape[-1] * dtype.itemsize
    return torch.randint(0, 256, (*shape[:-1], num_bytes), dtype=torch.uint8, device=HERE).view(dtype)
