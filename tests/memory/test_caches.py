"""Binding the engine's tensors: what is accepted, how it is seen, and what is refused before anything moves."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.memory import CPUDevice, PagedCaches
from tiered_kv.values.errors import ConfigurationError, LayoutMismatchError
from tiered_kv.values.layout import KVCaches, KVGroup

GROUP = KVGroup(num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16", block_size=16)
B = 10


def bind(kv_caches: KVCaches, group: KVGroup = GROUP, axes: str | None = None) -> PagedCaches:
    """Bind tensors on the CPU."""
    return PagedCaches.bind(kv_caches, group, axes=axes, device=CPUDevice())


def tensors(*shape: int, layers: int = 3, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Return one tensor a layer."""
    return [torch.zeros(shape, dtype=dtype) for _ in range(layers)]


def shifted(num_values: int, by: int) -> list[torch.Tensor]:
    """Return layers of two planes of ``num_values`` in one memory, ``by`` values apart."""
    step = 2 * num_values + by
    memory = torch.zeros(2 * abs(step) + 2 * num_values, dtype=torch.bfloat16)
    return [memory[at : at + 2 * num_values].view(2, B, 16, 2, 8) for at in range(0, 3 * step, step)]


@pytest.mark.parametrize(
    ("kv_caches", "axes", "num_fragments"),
    [
        (tensors(2, B, 16, 2, 8), None, 6),
        (tensors(B, 2, 16, 2, 8), None, 3),
        ([tuple(tensors(B, 16, 2, 8, layers=2)) for _ in range(3)], None, 6),
        (torch.zeros(3, 2, B, 16, 2, 8).bfloat16(), "LPBNHD", 6),
        (torch.zeros(3, B, 2, 16, 2, 8).bfloat16(), "LBPNHD", 3),
        (torch.zeros(B, 3, 2, 16, 2, 8).bfloat16(), "BLPNHD", 1),
        (torch.zeros(2, B, 16, 3, 2, 8).bfloat16(), "PBNLHD", 2 * 16 * 3),
        (torch.zeros(B, 2, 16, 3, 2, 8).bfloat16(), "BPNLHD", 2 * 16 * 3),
        (torch.zeros(B, 3, 16, 2, 2, 8).bfloat16(), "BLNPHD", 2 * 16 * 3 - 2),
    ],
)
def test_what_lies_side_by_side_is_one_fragment(kv_caches: KVCaches, axes: str | None, num_fragments: int) -> None:
    """Few large pieces move faster than many small ones: K and V, or all layers, where the engine's memory allows."""
    caches = bind(kv_caches, axes=axes)
    assert caches.num_pages == B
    assert len(caches.fragments) == num_fragments
    assert sum(fragment.num_bytes for fragment in caches.fragments) == GROUP.payload_bytes


def test_fragments_of_blocks_of_several_pages_stay_apart() -> None:
    """In a payload all pages of K come before V: where a block has several, K and V of a page are no neighbours."""
    group = KVGroup(3, 2, 8, "bfloat16", block_size=32, page_size=16)
    assert len(bind(tensors(B, 2, 16, 2, 8), group).fragments) == 6


def test_layers_inside_tokens_are_of_blocks_of_one_page() -> None:
    """SGLang's page_first, whose pages are its blocks: several pages a block are refused, and so is K over V."""
    group = KVGroup(3, 2, 8, "bfloat16", block_size=32, page_size=16)
    with pytest.raises(LayoutMismatchError, match="a block must be one page, and here it is 2 pages"):
        bind(torch.zeros(2, B, 16, 3, 2, 8).bfloat16(), group, axes="PBNLHD")
    with pytest.raises(LayoutMismatchError, match=r"all layers \(K\) and all layers \(V\) share bytes"):
        bind(torch.zeros(1, B, 16, 3, 2, 8).bfloat16().expand(2, -1, -1, -1, -1, -1), axes="PBNLHD")


def test_the_engines_memory_is_seen_not_copied() -> None:
    """What the engine writes later is what a fragment shows."""
    kv = tensors(2, B, 16, 2, 8)
    caches = bind(kv)
    kv[1][1, 7] = 1.5
    assert caches.fragments[3].pages[7].view(torch.bfloat16).eq(1.5).all()
    assert not caches.fragments[3].pages[6].any()


def test_layers_may_lie_in_one_memory_as_long_as_they_share_no_byte() -> None:
    """End to end, or with pages that take turns, whichever comes first."""
    assert len(bind(shifted(B * 256, 0)).fragments) == 6
    turns = torch.zeros(B, 3, 2, 16, 2, 8).bfloat16()
    assert len(bind([turns[:, layer] for layer in (2, 0, 1)], axes="BPNHD").fragments) == 2


def test_layers_of_different_strides_are_not_compared() -> None:
    """Pages of one lie further apart than those of another, as where an engine pads some: they are bound."""
    kv = tensors(2, B, 16, 2, 8)
    padded = torch.zeros(2, B, 24, 2, 8).bfloat16()[:, :, :16]
    assert len(bind([kv[0], padded, kv[2]]).fragments) == 6


@given(st.integers(1, 4), st.integers(32, 80), st.tuples(st.integers(0, 260), st.integers(0, 260)))
def test_layers_are_refused_exactly_if_they_share_a_byte(num_pages: int, stride: int, starts: tuple[int, int]) -> None:
    """Wherever the pages of one layer lie among those of the other: before them, behind them, between them."""
    group = KVGroup(num_layers=2, num_kv_heads=1, head_dim=8, dtype="bfloat16", block_size=4, order="MLA")
    memory = torch.zeros(600, dtype=torch.bfloat16)
    layers = [memory.as_strided((num_pages, 4, 8), (stride, 8, 1), start) for start in starts]
    first, second = ({start + page * stride + i for page in range(num_pages) for i in range(32)} for start in starts)
    if first & second:
        with pytest.raises(LayoutMismatchError, match="layer 0 and layer 1 share bytes"):
            bind(layers, group)
    else:
        bind(layers, group)


def test_tensors_made_for_inference_can_be_written() -> None:
    """Engines allocate under inference mode, whose tensors torch lets nobody else write in place."""
    with torch.inference_mode():
        kv = tensors(2, B, 16, 2, 8)
    bind(kv).fragments[0].pages[0].fill_(0)


@pytest.mark.parametrize(
    ("make", "axes", "says"),
    [
        (lambda: tensors(2, B, 16, 2, 8, layers=2), None, "3 layers, got the tensors of 2"),
        (lambda: tensors(2, B, 16, 2, 8, dtype=torch.float16), None, "layer 0 is of float16, the KV group of bfloat16"),
        (lambda: tensors(2, B, 16, 4, 8), None, "(2, 10, 16, 4, 8)"),
        (lambda: tensors(B, 16, 2, 8), None, "1 tensor(s) of axes BNHD are not the 2 plane(s)"),
        (lambda: [[*tensors(B, 16, 2, 8)]] * 3, None, "3 tensor(s) of axes BNHD are not the 2 plane(s)"),
        (lambda: tensors(2, 2, 16, 2, 8), None, "pass axes="),
        (lambda: tensors(2, B, 16, 2, 8), "PBNH", "must name each of BNHD once"),
        (lambda: tensors(2, B, 16, 2, 8), "LBNHD", "must name each of BNHD once"),
        (lambda: tensors(2, B, 16, 2, 8), 5, "axes are letters, such as 'PBNHD', got 5"),
        (lambda: tensors(2, B, 2, 16, 8), "PBHND", "another order than the KV group's NHD"),
        (
            lambda: [*tensors(2, B, 16, 2, 8)[:2], *tensors(2, B + 1, 16, 2, 8, layers=1)],
            None,
            "layer 2 (K) has 11, layer 0 (K) 10",
        ),
        (lambda: [each[..., :8] for each in tensors(2, B, 16, 2, 9)], None, "must be contiguous"),
        (lambda: [each.expand(2, B, 16, 2, 8) for each in tensors(2, 1, 16, 2, 8)], None, "overlap"),
        (lambda: tensors(2, B, 16, 2, 8, layers=1) * 3, None, "layer 0 (K) and layer 1 (K) share bytes"),
        (lambda: [tensors(B, 16, 2, 8, layers=1) * 2 for _ in range(3)], None, "layer 0 (K) and layer 0 (V) share"),
        (lambda: shifted(B * 256, -256), None, "layer 0 (V) and layer 1 (K) share bytes"),
        (lambda: shifted(B * 256, -1), None, "layer 0 (V) and layer 1 (K) share bytes"),
        (lambda: shifted(B * 256, 1 - 2 * B * 256), None, "layer 0 (K) and layer 1 (K) share bytes"),
        (lambda: [each.numpy() for each in tensors(2, B, 16, 2, 8, dtype=torch.float16)], None, "no torch tensor"),
        (lambda: [each.to("meta") for each in tensors(2, B, 16, 2, 8)], None, "layer 0 is on meta"),
        (lambda: [each.to_sparse() for each in tensors(2, B, 16, 2, 8)], None, "sparse"),
        (list, None, "no tensors"),
    ],
)
def test_other_tensors_are_refused(make: Callable[[], Any], axes: str | None, says: str) -> None:
    """Wrong layers, dtype, shape, planes, axes, pages, strides or device: an error that gives the numbers."""
    with pytest.raises(LayoutMismatchError, match=re.escape(says)):
        bind(make(), axes=axes)


OPAQUE = KVGroup.opaque(96, tag="test", block_size=16, num_layers=3)
ALL = KVGroup.opaque(3 * 96, tag="test", block_size=16)


@pytest.mark.parametrize(
    ("kv_caches", "group", "axes", "num_fragments"),
    [
        (tensors(B, 96, dtype=torch.uint8), OPAQUE, None, 3),
        (tensors(B, 2, 3, 8), OPAQUE, None, 3),
        ({f"layer{n}": torch.zeros(B, 24) for n in range(3)}, OPAQUE, "BD", 3),
        (torch.zeros(3, B, 96, dtype=torch.int8), OPAQUE, None, 3),
        (torch.zeros(B, 3, 4, 12).half(), OPAQUE, None, 1),
        (torch.zeros(3, 3, 96, dtype=torch.int8), OPAQUE, "LBD", 3),
        (torch.zeros(B, 288, dtype=torch.uint8), ALL, None, 1),
        (torch.zeros(B, 300, dtype=torch.uint8)[:, 5:293], ALL, None, 1),
        ([torch.zeros(B, 2, 72, dtype=torch.bfloat16)], ALL, None, 1),
    ],
)
def test_opaque_pages_are_bound_by_their_bytes(
    kv_caches: KVCaches, group: KVGroup, axes: str | None, num_fragments: int
) -> None:
    """Tensors of any dtype and shape, one a layer or one for all, as long as a page is one piece of so many bytes."""
    caches = bind(kv_caches, group, axes)
    assert len(caches.fragments) == num_fragments
    assert sum(fragment.num_bytes for fragment in caches.fragments) == group.payload_bytes


@pytest.mark.parametrize(
    ("make", "axes", "says"),
    [
        (lambda: tensors(B, 95, dtype=torch.uint8), None, "read as BD, it has 95 bytes a page instead of 96"),
        (lambda: tensors(B, 48, layers=2), None, "3 layers, got the tensors of 2"),
        (lambda: torch.zeros(3, 3, 96, dtype=torch.uint8), None, "fits any of BLD, LBD: pass axes="),
        (lambda: tensors(B, 8, 6, 2, layers=3), "BND", "must name each of BD once"),
        (lambda: [each.transpose(1, 2) for each in tensors(B, 8, 6)], None, "opaque page must be contiguous"),
        (lambda: [tensors(B, 48, layers=2)] * 3, None, "2 tensor(s) of axes BD are not the 1 plane(s)"),
        (lambda: tensors(B, 48, layers=1) * 3, None, "layer 0 and layer 1 share bytes"),
        (lambda: torch.zeros(B * 288, dtype=torch.uint8), None, "axes, not 3"),
    ],
)
def test_other_opaque_tensors_are_refused(make: Callable[[], Any], axes: str | None, says: str) -> None:
    """Other sizes, layers or strides: an error that gives the numbers."""
    with pytest.raises(LayoutMismatchError, match=re.escape(says)):
        bind(make(), OPAQUE, axes)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([0, 10, 11], "block id 10 at position 1 is not in [0, 10)"),
        ([3, 4, -1], "block id -1 at position 2 is not in [0, 10)"),
        ([5, 3, 4, 3, 5], "block id 3 at position 3 is there twice"),
    ],
)
def test_bad_block_ids_are_named(ids: list[int], says: str) -> None:
    """Out of range or repeated: the first bad one, and where it is."""
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        bind(tensors(2, B, 16, 2, 8)).check_ids(np.array(ids))


def test_good_block_ids_pass() -> None:
    """Any order, the ends of the range, none at all."""
    caches = bind(tensors(2, B, 16, 2, 8))
    caches.check_ids(np.array([9, 0, 4]))
    caches.check_ids(np.array([], dtype=np.int64))
