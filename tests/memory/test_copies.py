"""Gather and scatter: a block is the same bytes whatever the engine's tensors look like."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.memory.engines import NUM_SLOTS, Engine, Ids, bytes_of, engines, places
from tiered_kv.memory import (
    CPUDevice,
    PagedCaches,
    copy_rows,
    device_copies,
    gather_blocks,
    scatter_blocks,
)
from tiered_kv.values.errors import ConfigurationError, LayoutMismatchError
from tiered_kv.values.layout import KVGroup


@given(engine=engines(), data=st.data())
def test_a_block_is_gathered_and_scattered_bit_for_bit(engine: Engine, data: st.DataObject) -> None:
    """Slots hold the canonical payload, the way back restores it, and no byte beside the blocks changes either way."""
    caches, each = engine.bind(), engine.group.pages_per_block
    pages, slots = data.draw(places(engine.group))
    blocks = pages.reshape(len(slots), each)
    payload_bytes = engine.group.payload_bytes
    rows = torch.full((NUM_SLOTS, engine.group.stride_bytes // 8), 0x5A5A, dtype=torch.int64)
    untouched = rows.clone()
    memory = [each.clone() for each in engine.memory]
    by_device_code = rows.clone()

    gather_blocks(caches, pages, rows, slots)
    device_copies.gather_by_torch(caches, blocks, by_device_code, slots)

    assert torch.equal(rows, by_device_code)
    for slot, page_ids in zip(slots.tolist(), blocks.tolist(), strict=True):
        assert bytes_of(rows[slot])[:payload_bytes] == engine.block(page_ids)
        assert bytes_of(rows[slot])[payload_bytes:] == bytes_of(untouched[slot])[payload_bytes:]
        untouched[slot] = rows[slot]
    assert torch.equal(rows, untouched)

    for scatter in (scatter_blocks, _scatter_by_device_code):
        engine.wipe(pages)
        scatter(rows, slots, caches, pages)
        assert all(torch.equal(*pair) for pair in zip(engine.memory, memory, strict=True))


@given(engine=engines(), data=st.data())
def test_layers_copied_one_after_another_are_the_block(engine: Engine, data: st.DataObject) -> None:
    """In any order: after some layers the rest is untouched, after the last one all is as if copied at once."""
    caches, num_layers = engine.bind(), engine.group.num_layers
    pages, slots = data.draw(places(engine.group))
    cut = data.draw(st.integers(0, num_layers))
    parts = data.draw(st.permutations([slice(cut, None), *(slice(layer, layer + 1) for layer in range(cut))]))
    at_once = torch.full((NUM_SLOTS, engine.group.stride_bytes // 8), 0x5A5A, dtype=torch.int64)
    memory = [each.clone() for each in engine.memory]
    rows, by_device_code, by_runs = at_once.clone(), at_once.clone(), at_once.clone()
    gather_blocks(caches, pages, at_once, slots)
    blocks = pages.reshape(len(slots), -1 if len(slots) else 1)
    expected = rows.clone()

    for part in parts:
        gather_blocks(caches, pages, rows, slots, layers=part)
        device_copies.gather_by_torch(caches.of_layers(part), blocks, by_device_code, slots)
        columns = caches.of_layers(part).payload_columns
        device_copies.copy_runs(at_once, slots, by_runs, slots, columns)
        expected.view(torch.uint8)[slots, columns] = at_once.view(torch.uint8)[slots, columns]
        assert torch.equal(rows, expected)
    assert torch.equal(rows, at_once)
    assert torch.equal(by_device_code, at_once)
    assert torch.equal(by_runs, at_once)

    for scatter in (scatter_blocks, _scatter_by_device_code):
        engine.wipe(pages)
        for part in parts:
            scatter(at_once, slots, caches, pages, layers=part)
        assert all(torch.equal(*pair) for pair in zip(engine.memory, memory, strict=True))


@pytest.mark.parametrize("are_neighbours", [False, True])
@pytest.mark.parametrize(("num_blocks", "num_heads", "page_size"), [(6, 16, 8), (6, 16, 4), (80, 1, 4), (80, 1, 8)])
def test_many_pieces_are_copied_as_the_device_s_code_does(
    num_blocks: int, num_heads: int, page_size: int, *, are_neighbours: bool
) -> None:
    """Large ones and small, far from each other and side by side: all are too many for a copy that holds the GIL."""
    group = KVGroup(2, num_heads, 128, "float32", block_size=8, page_size=page_size)
    num_pages = 2 * num_blocks * group.pages_per_block
    ids = np.random.default_rng(0).permutation(num_pages)[: num_pages // 2]
    slots = np.random.default_rng(1).permutation(num_blocks)
    if are_neighbours:
        ids, slots = np.arange(3, 3 + num_pages // 2), np.arange(num_blocks)
    kv = [torch.randn(2, num_pages, page_size, num_heads, 128) for _layer in range(2)]
    caches, memory = PagedCaches.bind(kv, group, device=CPUDevice()), [each.clone() for each in kv]
    rows = torch.zeros(num_blocks, group.stride_bytes // 8, dtype=torch.int64)
    by_device_code = rows.clone()
    gather_blocks(caches, ids, rows, slots)
    device_copies.gather_by_torch(caches, ids.reshape(num_blocks, -1), by_device_code, slots)
    assert torch.equal(rows, by_device_code)
    for each in kv:
        each[:, torch.from_numpy(ids)] = 0
    scatter_blocks(rows, slots, caches, ids)
    assert all(torch.equal(*pair) for pair in zip(kv, memory, strict=True))


def test_no_layers_are_no_copy() -> None:
    """An empty range is taken, and changes nothing."""
    kv = [torch.ones(2, 4, 2, 1, 8)]
    caches = PagedCaches.bind(kv, KVGroup(1, 1, 8, "float32", 2), axes="PBNHD", device=CPUDevice())
    rows = torch.zeros(1, 512, dtype=torch.int64)
    gather_blocks(caches, np.array([0]), rows, np.array([0]), layers=slice(1, 1))
    scatter_blocks(rows, np.array([0]), caches, np.array([0]), layers=slice(1, 1))
    assert not rows.any()
    assert kv[0].all()


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


def _scatter_by_device_code(
    rows: Tensor, slots: Ids, caches: PagedCaches, pages: Ids, *, layers: slice | None = None
) -> None:
    blocks = pages.reshape(-1, caches.group.pages_per_block)
    device_copies.scatter_by_torch(rows, slots, caches.of_layers(layers), blocks)
