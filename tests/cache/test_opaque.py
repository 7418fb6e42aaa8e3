"""Blocks whose bytes only the engine can read: kept and given back as they are, and mixed with no others."""

from pathlib import Path

import pytest
import torch

from tests.support.caches import AnyTier, until_idle
from tests.support.engine import BLOCK_SIZE, MODEL, prompt
from tiered_kv import ConfigurationError, CPULoadStoreSpec, GPULoadStoreSpec, KVGroup, KVLayout, TieredKV

KEYS = prompt(5)
NUM_PAGES = 24
GROUP = KVGroup.opaque(1000, tag="K and V fused", block_size=BLOCK_SIZE, page_size=BLOCK_SIZE // 2, num_layers=2)
PAGES = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(7))[: 2 * len(KEYS)].tolist()


def opaque_cache(path: Path, group: KVGroup = GROUP) -> TieredKV:
    """A cache of a little CPU memory over a disk."""
    tiers: list[AnyTier] = [
        {"medium": "cpu", "capacity": "16KiB"},
        {"medium": "nvme", "path": path, "capacity": "4MiB"},
    ]
    return TieredKV(tiers, model=MODEL, layout=KVLayout((group,)), device="cpu")


def pages_of_any_dtype() -> list[torch.Tensor]:
    """One tensor a layer, of other dtypes and shapes; each page of each has 1000 bytes."""
    random = torch.Generator().manual_seed(0)
    words = torch.randint(0, 256, (2, NUM_PAGES, 1000), dtype=torch.uint8, generator=random)
    return [words[0].clone().view(torch.bfloat16).view(NUM_PAGES, 4, 125), words[1].clone()]


async def test_opaque_blocks_come_back_byte_for_byte_after_a_restart(tmp_path: Path) -> None:
    """Into tensors of other dtypes and other pages, and into rows of a host pool: layer by layer, page by page."""
    pages = pages_of_any_dtype()
    wanted = [each.view(torch.uint8).view(NUM_PAGES, 1000)[PAGES].clone() for each in pages]
    async with opaque_cache(tmp_path) as kv:
        kv.register_kv_caches(pages)
        stored = await kv.store(KEYS, GPULoadStoreSpec(PAGES))
        assert stored.num_stored == len(KEYS)
        await kv.flush()
    async with opaque_cache(tmp_path) as kv:
        packed = torch.zeros(2, NUM_PAGES, 1000, dtype=torch.int8)
        kv.register_kv_caches(packed, axes="LBD")
        rows = torch.zeros(8, GROUP.payload_bytes, dtype=torch.uint8)
        kv.register_host_pool("rows", rows)
        loading = kv.start_load(KEYS, GPULoadStoreSpec(range(2 * len(KEYS))), layerwise=True)
        assert await loading.admitted() == len(KEYS)
        assert (await loading).num_blocks == len(KEYS)
        for layer, expected in zip(packed.view(torch.uint8), wanted, strict=True):
            assert torch.equal(layer[: 2 * len(KEYS)], expected)
        assert (await kv.load(KEYS, CPULoadStoreSpec(range(len(KEYS)), pool="rows"))).num_blocks == len(KEYS)
        in_rows = rows[: len(KEYS)].view(len(KEYS), 2, 2, 1000)
        for layer, expected in enumerate(wanted):
            assert torch.equal(in_rows[:, layer].reshape(-1, 1000), expected)
        await until_idle(kv)


async def test_a_tag_keeps_blocks_of_one_size_apart(tmp_path: Path) -> None:
    """What another engine stored under the same hashes is not found."""
    async with opaque_cache(tmp_path) as kv:
        kv.register_kv_caches(pages_of_any_dtype())
        await kv.store(KEYS, GPULoadStoreSpec(PAGES))
        await kv.flush()
    other = KVGroup.opaque(1000, tag="V before K", block_size=BLOCK_SIZE, page_size=BLOCK_SIZE // 2, num_layers=2)
    async with opaque_cache(tmp_path, other) as kv:
        assert (await kv.lookup(KEYS)).num_blocks == 0
    async with opaque_cache(tmp_path) as kv:
        assert (await kv.lookup(KEYS)).num_blocks == len(KEYS)


def test_no_codec_keeps_what_it_can_not_read() -> None:
    """Said before anything opens."""
    with pytest.raises(ConfigurationError, match="an opaque KV group does not say: codec='none' keeps it as it is"):
        TieredKV(["cpu://?capacity=1MiB"], model=MODEL, layout=KVLayout((GROUP,)), codec="fp8")
