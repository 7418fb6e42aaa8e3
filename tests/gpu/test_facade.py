"""On a GPU, by the facade: what was stored is loaded bit for bit, from every tier, after what the GPU computes."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiered_kv import (
    ConfigurationError,
    GPULoadStoreSpec,
    KVGroup,
    KVLayout,
    ModelIdentity,
    TieredKV,
    hash_blocks,
)
from tiered_kv.memory import CUDADevice
from tiered_kv.memory.lanes import Lanes

pytestmark = pytest.mark.gpu
NUM_BLOCKS = 48
GROUPS = {
    "NHD": (KVGroup(4, 8, 64, "bfloat16", 16), "PBNHD"),
    "HND": (KVGroup(4, 8, 64, "float16", 16, "HND"), "BPHND"),
    "MLA": (KVGroup(5, 1, 576, "bfloat16", 16, "MLA"), "BND"),
    "fp8": (KVGroup(4, 2, 64, "float8_e4m3fn", 16), "BPNHD"),
    "odd sizes": (KVGroup(3, 1, 7, "int8", 5), "PBNHD"),
    "3 pages a block": (KVGroup(3, 2, 16, "float32", 12, page_size=4), "BPNHD"),
}


def tiers_of(chain: str, path: Path) -> list[dict[str, Any]]:
    """Return the tiers of a chain."""
    tiers: dict[str, dict[str, Any]] = {
        "gpu": {"medium": "gpu", "capacity": "64MiB"},
        "cpu": {"medium": "cpu", "capacity": "64MiB"},
        "nvme": {"medium": "nvme", "path": path, "capacity": "64MiB"},
    }
    return [tiers[name] for name in chain.split()]


def caches_of(group: KVGroup, axes: str) -> list[Tensor]:
    """Return an engine's tensors full of random bits, one a layer."""
    sizes = {**group.axis_sizes, "B": NUM_BLOCKS * group.pages_per_block}
    dtype = getattr(torch, group.dtype)
    shape = [sizes[axis] for axis in axes]
    shape[-1] *= dtype.itemsize
    return [torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda").view(dtype) for _ in range(group.num_layers)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Compare bit for bit."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("chain", ["cpu", "gpu cpu", "nvme", "gpu cpu nvme"])
@pytest.mark.parametrize("layout", GROUPS)
async def test_what_was_stored_is_loaded(layout: str, chain: str, tmp_path: Path) -> None:
    """Every layout through every chain."""
    group, axes = GROUPS[layout]
    caches = caches_of(group, axes)
    expected = [tensor.clone() for tensor in caches]
    keys = hash_blocks(range(NUM_BLOCKS * group.block_size), block_size=group.block_size)
    pages = torch.randperm(NUM_BLOCKS * group.pages_per_block, generator=torch.Generator().manual_seed(0)).tolist()
    model = ModelIdentity("model", weights="w0")
    async with TieredKV(tiers_of(chain, tmp_path), model=model, layout=KVLayout((group,)), device="cuda") as kv:
        kv.register_kv_caches(caches, axes=axes)
        stored = await kv.store(keys, GPULoadStoreSpec(pages))
        await stored.settled()
        for tensor in caches:
            tensor.view(torch.uint8).zero_()
        torch.cuda.synchronize()
        loaded = await kv.load(keys, GPULoadStoreSpec(pages))
        assert loaded.num_blocks == NUM_BLOCKS
        assert same(caches, expected)


@pytest.mark.parametrize("gives_events", [True, False])
async def test_a_store_waits_for_what_the_gpu_still_computes(gives_events: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    """The blocks are read only when their kernels are done, and a load writes only then: by ``after``, or without."""
    group, axes = GROUPS["NHD"]
    caches = caches_of(group, axes)
    expected = caches_of(group, axes)
    keys = hash_blocks(range(NUM_BLOCKS * group.block_size), block_size=group.block_size)
    spec = GPULoadStoreSpec(list(range(NUM_BLOCKS)))
    busy = torch.randn(4096, 4096, device="cuda")
    async with TieredKV(
        tiers_of("cpu", Path()), model=ModelIdentity("model", weights="w0"), layout=KVLayout((group,)), device="cuda"
    ) as kv:
        kv.register_kv_caches(caches, axes=axes)
        for _ in range(50):
            busy = (busy @ busy).clamp_(-1, 1)
        for tensor, wanted in zip(caches, expected, strict=True):
            tensor.copy_(wanted)
        computed = torch.cuda.current_stream().record_event()
        assert not computed.query()
        await kv.store(keys, spec, after=computed if gives_events else None)
        for _ in range(50):
            busy = (busy @ busy).clamp_(-1, 1)
        for tensor in caches:
            tensor.view(torch.uint8).zero_()
        wiped = torch.cuda.current_stream().record_event()
        loaded = await kv.load(keys, spec, after=wiped if gives_events else None)
        assert loaded.num_blocks == NUM_BLOCKS
        assert same(caches, expected)


async def test_an_event_of_a_capture_is_refused_and_costs_no_device() -> None:
    """The driver knows it from one that has yet to happen; the next store and load go well."""
    group, axes = GROUPS["NHD"]
    caches = caches_of(group, axes)
    expected = [tensor.clone() for tensor in caches]
    keys = hash_blocks(range(NUM_BLOCKS * group.block_size), block_size=group.block_size)
    spec, graph, numbers = GPULoadStoreSpec(list(range(NUM_BLOCKS))), torch.cuda.CUDAGraph(), torch.zeros(8).cuda()
    async with TieredKV(
        tiers_of("cpu", Path()), model=ModelIdentity("model", weights="w0"), layout=KVLayout((group,)), device="cuda"
    ) as kv:
        kv.register_kv_caches(caches, axes=axes)
        with torch.cuda.graph(graph):
            numbers += 1
            captured = torch.cuda.current_stream().record_event()
        with pytest.raises(ConfigurationError, match="recorded in the capture"):
            kv.start_store(keys, spec, after=captured)
        graph.replay()
        await kv.store(keys, spec)
        for tensor in caches:
            tensor.view(torch.uint8).zero_()
        assert (await kv.load(keys, spec)).num_blocks == NUM_BLOCKS
        assert same(caches, expected)
        assert numbers.eq(1).all()


def test_copies_have_the_memory_that_the_documentation_says() -> None:
    """When tensors are bound, and no more than that stays."""
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        pytest.skip("torch's count of its memory: unset PYTORCH_NO_CUDA_MEMORY_CACHING")
    device, lanes = CUDADevice(), []
    gc.collect()  # what tests before this one have left in cycles would go in between
    before = torch.cuda.memory_allocated()
    for name in ("h2d", "d2h"):
        lanes.append(Lanes(device, name))
        lanes[-1].reserve(1 << 20)
    assert torch.cuda.memory_allocated() - before == 128 << 20
    assert device.close(60)
    assert torch.cuda.memory_allocated() == before
