"""An engine of any layout, whose blocks' bytes are told by their keys: `engine.Engine` is the one for all else."""

import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.caches import AnyTier, Recorder
from tiered_kv import (
    BlockKeys,
    CacheLimits,
    GPULoadStoreSpec,
    KVGroup,
    KVLayout,
    ModelIdentity,
    Shard,
    TieredKV,
    hash_blocks,
)
from tiered_kv.values.events import Emit

MODEL = ModelIdentity("model", weights="w0")
BLOCK_SIZE = 4
SMALL = KVLayout((KVGroup(2, 1, 48, "bfloat16", BLOCK_SIZE),))
"""One group; a block is 1536 bytes, so that a slot has padding."""
STRIDE = SMALL.groups[0].stride_bytes
"""Of a host slot, in bytes."""
LIMITS = CacheLimits(window=4 * STRIDE, bounce=16 * STRIDE)
"""Four windows of four blocks: everything longer passes through in pieces."""


def prompt(n: int, seed: int = 0, *, group: int = 0, salt: str = "", block_size: int = BLOCK_SIZE) -> BlockKeys:
    """Return the keys of a prompt of ``n`` blocks; those of two seeds have nothing in common."""
    tokens = np.arange(n * block_size) + seed * 1_000_000
    return hash_blocks(tokens, block_size=block_size, group=group, salt=salt)


def cpu(num_blocks: int, stride_bytes: int = STRIDE) -> dict[str, Any]:
    """A CPU tier of so many blocks."""
    return {"medium": "cpu", "capacity": num_blocks * stride_bytes}


def gpu(num_blocks: int, stride_bytes: int = STRIDE) -> dict[str, Any]:
    """A GPU pool of so many blocks."""
    return {"medium": "gpu", "capacity": num_blocks * stride_bytes}


def nvme(path: Path, capacity: int | str = "8MiB") -> dict[str, Any]:
    """An NVMe tier."""
    return {"medium": "nvme", "path": path, "capacity": capacity, "num_threads": 2}


def memory(capacity: str = "8MiB") -> dict[str, Any]:
    """A tier of the kind that finds and evicts for itself."""
    return {"medium": "memory", "capacity": capacity}


def content(digest: bytes, num_bytes: int, version: str = "") -> bytes:
    """Return what a block of this key holds, as computed by these weights: no two blocks are alike."""
    seed = hashlib.sha256(digest + version.encode()).digest()
    return np.random.default_rng(list(seed)).bytes(num_bytes)


class AnyEngine:
    """Paged KV caches of every group, one tensor ``(P, B, N, H, D)`` a layer, or ``(B, N, D)`` for MLA.

    What a block holds is random, told by its key and a version; each is compared byte for byte with what it should be.
    """

    def __init__(self, layout: KVLayout = SMALL, num_blocks: int = 64) -> None:
        self.layout = layout
        self.caches = [_caches(group, num_blocks * group.pages_per_block) for group in layout.groups]
        self.wipe()

    def spec(self, blocks: Sequence[int], group: int = 0) -> GPULoadStoreSpec:
        """Say where these blocks are, ``pages_per_block`` page ids each."""
        return GPULoadStoreSpec(self._pages(blocks, group), group)

    def wipe(self, value: int = 0xEE) -> None:
        """Overwrite everything."""
        for caches in self.caches:
            for layer in caches:
                layer.view(torch.uint8).fill_(value)

    def fill(self, keys: BlockKeys, blocks: Sequence[int], version: str = "") -> GPULoadStoreSpec:
        """Compute the blocks of ``keys``; return where they are."""
        for digest, block in zip(keys, blocks, strict=True):
            for page, expected in self._pairs(digest, block, keys.group, version):
                page.copy_(expected)
        return self.spec(blocks, keys.group)

    def right(self, keys: BlockKeys, blocks: Sequence[int], version: str = "") -> list[bool]:
        """Say of each block whether it is what its key says, byte for byte."""
        return [
            all(torch.equal(page, expected) for page, expected in self._pairs(digest, block, keys.group, version))
            for digest, block in zip(keys, blocks, strict=True)
        ]

    def count_right(self, keys: BlockKeys, blocks: Sequence[int], version: str = "") -> int:
        """Count the leading blocks that are what their keys say."""
        return [*self.right(keys, blocks, version), False].index(False)

    def content(self, digest: bytes, group: int, version: str) -> bytes:
        """Return what a block of this key holds."""
        return content(digest, self.layout.groups[group].payload_bytes, version)

    def _pages(self, blocks: Sequence[int], group: int) -> list[int]:
        # Pages of a block lie apart and in no order, as an engine's do.
        per_block = self.layout.groups[group].pages_per_block
        num_blocks = len(self._first(group)) // per_block
        return [page * num_blocks + block for block in blocks for page in reversed(range(per_block))]

    def _first(self, group: int) -> Tensor:
        first = self.caches[group][0]
        return first if self.layout.groups[group].order == "MLA" else first[0]

    def _pairs(self, digest: bytes, block: int, group: int, version: str) -> list[tuple[Tensor, Tensor]]:
        """Return each part of a block, as bytes in place, beside the bytes that should be there."""
        mla = self.layout.groups[group].order == "MLA"
        pages = self._pages([block], group)
        parts = [
            (layer[page] if mla else layer[:, page]).view(torch.uint8) for layer in self.caches[group] for page in pages
        ]
        raw = bytearray(self.content(digest, group, version))
        return list(zip(parts, torch.frombuffer(raw, dtype=torch.uint8).view(len(parts), *parts[0].shape), strict=True))


@asynccontextmanager
async def open_any(
    engine: AnyEngine,
    *tiers: AnyTier,
    model: ModelIdentity = MODEL,
    limits: CacheLimits = LIMITS,
    shard: Shard | tuple[Shard, ...] | None = None,
    emit: Emit | None = None,
) -> AsyncGenerator[TieredKV]:
    """Open a cache with an engine's tensors registered, unless it stands for several ranks."""
    async with TieredKV(
        tiers, model=model, layout=engine.layout, limits=limits, shard=shard, emit=emit or Recorder()
    ) as kv:
        for group, caches in enumerate(() if isinstance(shard, tuple) else engine.caches):
            kv.register_kv_caches(caches, group=group)
        yield kv


def _caches(group: KVGroup, num_pages: int) -> list[Tensor]:
    n, h, d = group.page_size, group.num_kv_heads, group.head_dim
    inner = {"NHD": (n, h, d), "HND": (h, n, d), "MLA": (n, d)}[group.order]
    shape = (num_pages, *inner) if group.order == "MLA" else (2, num_pages, *inner)
    return [torch.empty(shape, dtype=getattr(torch, group.dtype)) for _ in range(group.num_layers)]
