"""On a GPU: every layout comes through pinned memory and back bit for bit, by every way there is."""

import queue
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch import Tensor

from tests.memory.engines import NUM_SLOTS, Engine, engines, places
from tiered_kv.memory import (
    CUDADevice,
    HostSlab,
    PagedCaches,
    PageLockState,
    Stream,
    crossover,
    device_copies,
    gather_blocks,
    scatter_blocks,
    staging,
)
from tiered_kv.memory.codec import FP8Codec
from tiered_kv.values.layout import KVGroup

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> Iterator[CUDADevice]:
    """The first GPU."""
    device = CUDADevice()
    yield device
    assert device.close(60)


@pytest.fixture(scope="module")
def stream(device: CUDADevice) -> Stream:
    """A side stream."""
    return device.stream("test")


def through(stream: Stream, copy: Callable[[], object]) -> None:
    """Have the stream do ``copy``, and wait until the GPU has."""
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    torch.cuda.synchronize()  # what the test computed on its own stream
    stream.submit(copy, ended.put)
    assert ended.get(timeout=60) is None


def page_locked_rows(device: CUDADevice, stride_bytes: int, num_slots: int = NUM_SLOTS) -> Tensor:
    """Return page-locked slots. The device keeps them until it is closed."""
    slab = HostSlab(num_slots, stride_bytes, stride_bytes, name="test")
    assert device.page_lock(slab).wait() is PageLockState.LOCKED
    return slab.rows


@pytest.mark.parametrize("where", ["pinned", "pageable", "pool"])
@settings(max_examples=60)
@given(data=st.data())
def test_any_layout_comes_back_as_it_was(device: CUDADevice, stream: Stream, where: str, data: st.DataObject) -> None:
    """Through slots on the host, pinned or not, or on the GPU; at once or layer by layer; nothing beside it changes."""
    engine: Engine = data.draw(engines(device=device))
    caches, group = engine.bind(), engine.group
    pages, slots = data.draw(places(group))
    if where == "pinned":
        rows = page_locked_rows(device, group.stride_bytes)
    else:
        rows = torch.zeros(NUM_SLOTS, group.stride_bytes // 8, dtype=torch.int64)
        rows = rows.to(device.torch_device) if where == "pool" else rows
    layers: list[slice | None] = [None]
    if data.draw(st.booleans()):
        layers = [slice(layer, layer + 1) for layer in range(group.num_layers)]
    memory = [each.clone() for each in engine.memory]
    for part in layers:
        through(stream, partial(gather_blocks, caches, pages, rows, slots, layers=part))
    for slot, page_ids in zip(slots.tolist(), pages.reshape(-1, group.pages_per_block).tolist(), strict=True):
        payload = rows[slot].view(torch.uint8)[: group.payload_bytes]
        assert payload.cpu().numpy().tobytes() == engine.block(page_ids)
    engine.wipe(pages)
    for part in layers:
        through(stream, partial(scatter_blocks, rows, slots, caches, pages, layers=part))
    assert all(torch.equal(*pair) for pair in zip(engine.memory, memory, strict=True))


@pytest.mark.parametrize("order", ["NHD", "HND", "MLA"])
def test_all_ways_over_the_bus_move_the_same_bytes(
    device: CUDADevice, stream: Stream, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By staging in several pieces, with Triton's kernel or torch's, fragment by fragment, and by a kernel."""
    group, caches = large(device, order)
    pages = np.random.default_rng(0).permutation(64)[:, None]
    slots = np.random.default_rng(1).permutation(64)
    monkeypatch.setattr(staging, "PIECE_BYTES", 4 * group.stride_bytes)
    found = [page_locked_rows(device, group.stride_bytes, 64) for _ in range(4)]
    by_kernel = crossover.kernel_way(device.torch_device) or crossover.STAGING
    through(stream, lambda: device_copies.gather_through_staging(caches, pages, found[0], slots))
    through(
        stream,
        lambda: device_copies.gather_through_staging(caches, pages, found[1], slots, device_copies.gather_by_torch),
    )
    through(stream, lambda: device_copies.gather_directly(caches, pages, found[2], slots))
    through(stream, lambda: by_kernel.gather(caches, pages, found[3], slots))
    payloads = [rows.view(torch.uint8)[:, : group.payload_bytes] for rows in found]
    assert all(torch.equal(payloads[0], other) for other in payloads[1:])
    before = [fragment.pages.clone() for fragment in caches.fragments]
    for scatter in (
        lambda: device_copies.scatter_through_staging(found[0], slots, caches, pages),
        lambda: device_copies.scatter_through_staging(found[0], slots, caches, pages, device_copies.scatter_by_torch),
        lambda: device_copies.scatter_directly(found[0], slots, caches, pages),
        lambda: by_kernel.scatter(found[0], slots, caches, pages),
    ):
        for fragment in caches.fragments:
            fragment.pages.zero_()
        through(stream, scatter)
        assert all(torch.equal(each.pages, was) for each, was in zip(caches.fragments, before, strict=True))


def test_triton_is_used_and_the_ways_are_measured(device: CUDADevice) -> None:
    """Where Triton is installed its kernel compiles and runs; which way is the faster one is known after `prepare`."""
    pytest.importorskip("triton", reason="Triton: pip install 'tiered-kv[cuda]'")
    assert device_copies.kernels_for(device.torch_device) is not None
    _, caches = large(device, "NHD")
    with capture_logs() as logs:
        crossover.prepare(caches, device)
    assert not [entry for entry in logs if entry["log_level"] != "debug"]
    assert crossover.measured()


@pytest.mark.parametrize("order", ["NHD", "HND", "MLA"])
def test_the_codec_gives_the_same_bytes_as_on_a_cpu(device: CUDADevice, stream: Stream, order: str) -> None:
    """A block encoded on a GPU can be decoded on any machine, into the same values."""
    group, plain = large(device, order)
    codec = FP8Codec(group)
    caches = PagedCaches(group, codec, plain.torch_device, plain.num_pages, plain.fragments, plain.layers)
    pages = slots = np.arange(64)
    raw = page_locked_rows(device, group.stride_bytes, 64)
    rows = page_locked_rows(device, -(-caches.stored_bytes // 4096) * 4096, 64)
    through(stream, lambda: gather_blocks(plain, pages, raw, slots))
    through(stream, lambda: gather_blocks(caches, pages, rows, slots))
    stored = rows[:, : caches.stored_bytes // 8]
    assert torch.equal(stored, codec.encode(raw.view(torch.uint8)[:, : group.payload_bytes].contiguous()))
    through(stream, lambda: scatter_blocks(rows, slots, caches, pages))
    through(stream, lambda: gather_blocks(plain, pages, raw, slots))
    assert torch.equal(raw.view(torch.uint8)[:, : group.payload_bytes], codec.decode(stored))


def large(device: CUDADevice, order: str) -> tuple[KVGroup, PagedCaches]:
    """Return a cache of 64 blocks of 256 KiB."""
    shapes: dict[str, tuple[KVGroup, str, tuple[int, ...]]] = {
        "NHD": (KVGroup(8, 8, 64, "bfloat16", 16), "PBNHD", (2, 64, 16, 8, 64)),
        "HND": (KVGroup(8, 8, 64, "bfloat16", 16, "HND"), "BPHND", (64, 2, 8, 16, 64)),
        "MLA": (KVGroup(8, 1, 1024, "bfloat16", 16, "MLA"), "BND", (64, 16, 1024)),
    }
    group, axes, shape = shapes[order]
    tensors = [torch.randn(shape, device=device.torch_device).bfloat16() for _ in range(8)]
    return group, PagedCaches.bind(tensors, group, axes=axes, device=device)
