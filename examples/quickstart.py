"""Keep the KV of a prompt in host memory and on disk, and load it back after a restart."""

import asyncio
import tempfile

import torch

from tiered_kv import GPULoadStoreSpec, KVLayout, ModelIdentity, TieredKV, TieredKVSettings, hash_blocks


async def main(path: str) -> None:
    """Store the blocks of a prompt with one cache, load them with the next."""
    kv_caches = [torch.randn(2, 64, 16, 4, 32) for _layer in range(4)]  # K and V, blocks, tokens, heads, dimension
    layout = KVLayout.from_tensors(kv_caches, block_size=16)
    model = ModelIdentity("my-model", weights="sha256:1f6b...")
    tiers = [{"medium": "cpu", "capacity": "64MiB"}, {"medium": "nvme", "path": path, "capacity": "256MiB"}]
    settings = TieredKVSettings(tiers=tiers)
    keys = hash_blocks(range(500), block_size=16, salt="tenant-7")  # 31 full blocks

    async with TieredKV.from_settings(settings, model=model, layout=layout) as kv:
        kv.register_kv_caches(kv_caches)
        stored = await kv.store(keys, GPULoadStoreSpec(range(31)))  # the engine's blocks 0 to 30
        print(f"stored {stored.num_stored} blocks")

    async with TieredKV.from_settings(settings, model=model, layout=layout) as kv:  # as after a restart
        kv.register_kv_caches(kv_caches)
        found = await kv.lookup(keys)
        n = found.num_blocks
        loaded = await kv.load(keys[:n], GPULoadStoreSpec(range(31, 31 + n)))
        print(f"found {found.by_tier}, loaded {loaded.num_blocks} blocks")
        print(f"the same bytes: {all(torch.equal(layer[:, :31], layer[:, 31:62]) for layer in kv_caches)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as path:
        asyncio.run(main(path))
