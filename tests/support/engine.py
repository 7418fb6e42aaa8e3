"""A small serving engine of known bytes: prompts, their keys, and what each block consists of."""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tiered_kv import BlockKeys, CacheLimits, GPULoadStoreSpec, KVLayout, ModelIdentity, hash_blocks

BLOCK_SIZE = 16
PAYLOAD_BYTES = 4096
"""Of one block of `small_layout`: one page of memory, so that it is the stride of a slot as well."""
POISON = 0x5A
MODEL = ModelIdentity("a test's model", weights="w0")
SMALL_LIMITS = CacheLimits(window=4 * PAYLOAD_BYTES, bounce=16 * PAYLOAD_BYTES)
"""Windows of 4 blocks, so that a prompt is several of them."""


def small_layout() -> KVLayout:
    """Return a layout of two layers whose blocks are `PAYLOAD_BYTES` long."""
    return KVLayout.from_tensors(Engine(num_pages=1).caches, block_size=BLOCK_SIZE)


def prompt(num_blocks: int, *, seed: int = 0) -> BlockKeys:
    """Return the keys of a prompt; prompts of different seeds share no block."""
    return hash_blocks(np.arange(num_blocks * BLOCK_SIZE) + 1_000_000 * seed, block_size=BLOCK_SIZE)


def contents(keys: BlockKeys) -> list[bytes]:
    """Return what `Engine.compute` puts into each block: other bytes for every key."""
    return [hashlib.shake_128(key).digest(PAYLOAD_BYTES) for key in keys]


class Engine:
    """A serving engine's paged KV cache.

    Attributes:
        caches: What is registered, per layer ``(num_pages, 2, 16, 2, 16)`` int16-wide values.
    """

    def __init__(self, num_pages: int = 64, *, shift_bytes: int = 0) -> None:
        shape = (num_pages, 2, BLOCK_SIZE, 2, 16)
        shifts = (2 * shift_bytes, shift_bytes // 2)  # of 2 bytes each: the layers are aligned in different ways
        memory = [torch.zeros(shift + math.prod(shape), dtype=torch.bfloat16) for shift in shifts]
        self.caches = {f"layer{at}": memory[at][shift:].view(shape) for at, shift in enumerate(shifts)}
        self._layers = [cache.view(torch.uint8).numpy().reshape(num_pages, -1) for cache in self.caches.values()]
        self.num_pages = num_pages

    def compute(self, keys: BlockKeys, pages: Sequence[int] | None = None) -> GPULoadStoreSpec:
        """Fill pages, the first ones if not said, with what the keys stand for; return where that is."""
        at = list(range(len(keys)) if pages is None else pages)
        for page, content in zip(at, contents(keys), strict=True):
            halves = np.split(np.frombuffer(content, np.uint8), len(self._layers))
            for layer, half in zip(self._layers, halves, strict=True):
                layer[page] = half
        return GPULoadStoreSpec(at)

    def poison(self) -> None:
        """Overwrite every page with a byte that no block consists of."""
        for layer in self._layers:
            layer.fill(POISON)

    def is_poisoned(self) -> bool:
        """Whether nobody has written since `poison`."""
        return all(bool((layer == POISON).all()) for layer in self._layers)

    def read(self, pages: Sequence[int] | NDArray[np.int64] | GPULoadStoreSpec) -> list[bytes]:
        """Return what is in the pages."""
        at = pages.ids if isinstance(pages, GPULoadStoreSpec) else pages
        return [b"".join(layer[int(page)].tobytes() for layer in self._layers) for page in at]
