"""What the engines of a simulation compute: prompts of two KV groups and two tenants, and the bytes of their blocks.

The bytes of a block are told by its name, so that each block that is served can be compared with what it should be.
"""

import hashlib
import mmap
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from tiered_kv.testing.simulation.known import Name, WrongAnswer, names_of
from tiered_kv.values.keys import BlockKeys, hash_blocks
from tiered_kv.values.layout import PAGE_BYTES, KVGroup, KVLayout
from tiered_kv.values.specs import CPULoadStoreSpec, EngineBlocks, GPULoadStoreSpec

N: Final = 10
"""Blocks of a prompt."""
LAYOUT: Final = KVLayout((KVGroup(2, 1, 48, "bfloat16", 4), KVGroup(2, 1, 32, "bfloat16", 8, "MLA")))
"""Heads, and latents in blocks twice as long."""
STRIDE: Final = sum(group.stride_bytes for group in LAYOUT.groups)
"""Of a host slot of both groups: what a memory tier's capacity is counted in."""
NUM_REGIONS: Final = 10
OTHER_SALT: Final = "another tenant"
FRESH_SALT: Final = "fresh"
"""Of blocks that nobody has named before."""
_POISON: Final = 0xEE


def _prompt(n: int, seed: int, group: int = 0) -> BlockKeys:
    size = LAYOUT.groups[group].block_size
    return hash_blocks(np.arange(n * size) + seed * 1_000_000, block_size=size, group=group)


_FIRST: Final = _prompt(N, 0)
PROMPTS: Final = (
    _FIRST,
    *(_prompt(N, seed) for seed in range(1, 4)),
    BlockKeys.from_hashes(list(_FIRST), block_size=_FIRST.block_size, salt=OTHER_SALT),  # and the same hashes
    _prompt(N // 2, 0, group=1),
    _prompt(N // 2, 1, group=1),
)
BOTH_GROUPS: Final = ((PROMPTS[0], PROMPTS[5]), (PROMPTS[1], PROMPTS[6]))
"""Keys of the same tokens."""


class Memory:
    """Paged KV caches of an engine, with a region of its own for each call; and a pool of host memory, the same.

    A region that is in nobody's hands is poisoned: whoever writes to it then is caught.
    """

    def __init__(self) -> None:
        num_pages = NUM_REGIONS * N
        self.caches = [
            [torch.empty((2, num_pages, 4, 1, 48), dtype=torch.bfloat16) for _ in range(2)],
            [torch.empty((num_pages, 8, 32), dtype=torch.bfloat16) for _ in range(2)],
        ]
        self.pools = [_pages(num_pages) for _ in LAYOUT.groups]
        self._chunks = [list(self._chunks_of(region)) for region in range(NUM_REGIONS)]
        self.free = list(range(NUM_REGIONS))
        for region in self.free:
            self.poison(region)
        self._poisoned = [each.tobytes() for each in self._chunks[0]]

    def take(self) -> int | None:
        """Take a region that is nobody's."""
        return self.free.pop(0) if self.free else None

    def give(self, region: int) -> None:
        """Give a region back: it is nobody's again."""
        self.poison(region)
        self.free.append(region)

    def at(self, keys: BlockKeys, region: int, *, in_pool: bool = False) -> EngineBlocks:
        """Say where the blocks of these keys are."""
        if in_pool:
            return CPULoadStoreSpec(range(region * N, region * N + len(keys)), pool=f"pool{keys.group}")
        return self.pages(keys, region)

    def pages(self, keys: BlockKeys, region: int) -> GPULoadStoreSpec:
        """Say where they are in the paged caches."""
        return GPULoadStoreSpec(list(range(region * N, region * N + len(keys))), keys.group)

    def fill(self, keys: BlockKeys, weights: str, region: int, *, in_pool: bool = False) -> EngineBlocks:
        """Compute blocks; return where they are."""
        for i, name in enumerate(names_of(keys, weights)):
            self._write(keys.group, region * N + i, content(name), in_pool=in_pool)
        return self.at(keys, region, in_pool=in_pool)

    def are_right(self, keys: BlockKeys, weights: str, region: int, *, in_pool: bool = False) -> NDArray[np.bool_]:
        """Say of each block whether it is what its name says."""
        names = names_of(keys, weights)
        read = [self._read(keys.group, region * N + i, in_pool=in_pool) for i in range(len(names))]
        return np.array([each == content(name) for each, name in zip(read, names, strict=True)], np.bool_)

    def check(
        self, keys: BlockKeys, weights: str, region: int, mask: NDArray[np.bool_], what: str, *, in_pool: bool = False
    ) -> None:
        """Raise `WrongAnswer` unless each block that is said to be in place is right."""
        right = self.are_right(keys, weights, region, in_pool=in_pool)
        if (wrong := np.flatnonzero(mask & ~right)).size:
            raise WrongAnswer("wrong bytes", f"blocks {wrong.tolist()} of {what}")

    def poison(self, region: int) -> None:
        """Overwrite a region."""
        for chunk in self._chunks[region]:
            chunk.fill(_POISON)

    def is_poisoned(self, region: int) -> bool:
        """Say whether nobody has written to a region since it was poisoned."""
        return [each.tobytes() for each in self._chunks[region]] == self._poisoned

    def touched(self) -> list[int]:
        """Return the regions that are nobody's and that somebody has written to."""
        return [region for region in self.free if not self.is_poisoned(region)]

    def _chunks_of(self, region: int) -> Iterator[NDArray[np.uint8]]:
        """Yield a region's memory in pieces without gaps."""
        pages = slice(region * N, (region + 1) * N)
        heads = [half[pages] for layer in self.caches[0] for half in layer.view(torch.uint8)]
        for part in (
            *heads,
            *(layer[pages].view(torch.uint8) for layer in self.caches[1]),
            *(p[pages] for p in self.pools),
        ):
            yield part.numpy()

    def _places(self, group: int, page: int) -> list[torch.Tensor]:
        layers = self.caches[group]
        return [(layer[page] if group else layer[:, page]).view(torch.uint8) for layer in layers]

    def _write(self, group: int, page: int, data: bytes, *, in_pool: bool) -> None:
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if in_pool:
            self.pools[group][page, : len(data)].copy_(source)
            return
        places = self._places(group, page)
        for place, part in zip(places, source.view(len(places), -1), strict=True):
            place.copy_(part.view(place.shape))

    def _read(self, group: int, page: int, *, in_pool: bool) -> bytes:
        if in_pool:
            return self.pools[group][page, : LAYOUT.groups[group].payload_bytes].numpy().tobytes()
        return b"".join(place.contiguous().numpy().tobytes() for place in self._places(group, page))


def _pages(n: int) -> torch.Tensor:
    """Return ``(n, PAGE_BYTES)`` uint8 that begins where a page does, so that media may read straight into its rows."""
    return torch.frombuffer(mmap.mmap(-1, n * PAGE_BYTES), dtype=torch.uint8).view(n, PAGE_BYTES)


@lru_cache(maxsize=1024)
def content(name: Name) -> bytes:
    """Return the bytes of a block: random but for their exponents, so that a lossless codec can shorten them."""
    version, group, digest = name
    seed = hashlib.sha256(digest + version.encode()).digest()
    words = np.random.default_rng(list(seed)).integers(0, 1 << 16, LAYOUT.groups[group].payload_bytes // 2, np.uint16)
    return ((words & 0b1_00000111_1111111) | 0b0_01111000_0000000).astype(np.uint16).tobytes()


def fresh(number: int) -> BlockKeys:
    """Return blocks that nobody has named before."""
    return hash_blocks(np.arange(8) + 8 * number, block_size=4, salt=FRESH_SALT)


def span(numbers: Sequence[int]) -> BlockKeys:
    """Return some blocks of a prompt by three numbers: which prompt, from where, how many fewer than all."""
    prompt = PROMPTS[numbers[0] % len(PROMPTS)]
    start = (0, 0, 0, 1, 4)[numbers[1] % 5] % len(prompt)
    stop = max(start + 1, len(prompt) - numbers[2] % len(prompt))
    return prompt[start:stop]
