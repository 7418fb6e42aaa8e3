"""The engine of the model: prompts of two KV groups and two tenants, and memory of every kind that calls can name."""

import mmap
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from tests.support.any_layout import AnyEngine, content, prompt
from tiered_kv import BlockKeys, CPULoadStoreSpec, GPULoadStoreSpec, KVGroup, KVLayout, TieredKV
from tiered_kv.memory.codec import CodecName, make_codec
from tiered_kv.values.specs import EngineBlocks

N = 12
"""Blocks of a prompt."""
LAYOUT = KVLayout((KVGroup(2, 1, 48, "bfloat16", 4), KVGroup(2, 1, 32, "bfloat16", 8, "MLA")))
"""Heads, and latents in blocks twice as long. A slot of either is a page."""
STRIDE = sum(group.stride_bytes for group in LAYOUT.groups)
"""Of a slot of both groups: what a tier's capacity is counted in."""
PROMPTS = [
    *(prompt(N, seed=seed) for seed in range(3)),
    prompt(N, salt="another tenant"),  # the tokens of the first
    prompt(N // 2, group=1, block_size=8),  # its latents
]
"""They share nothing; so few blocks that calls meet often, and more than fit anywhere."""
NUM_REGIONS = 4
"""One for the call that is waited for, and for three that go on meanwhile."""
LAST_SLOT = 3
"""Of the swap space."""
_POISON = 0xEE
_FEW_EXPONENTS, _LEAST_EXPONENT = 0b1_00000111_1111111, 0b0_01111000_0000000
"""Of bfloat16: all signs and mantissas, and eight exponents."""


@dataclass(frozen=True)
class Place:
    """Where the blocks of one call are: in a region of the engine's pages, or of its ``pool`` or ``direct`` pool."""

    region: int = 0
    memory: str = "pages"


class Engine(AnyEngine):
    """Memory for a few calls at once, each with a region of its own."""

    def __init__(self, codec: CodecName) -> None:
        # The pages of a group are numbered after those of the one before: copies are watched by number.
        super().__init__(LAYOUT, num_blocks=len(LAYOUT.groups) * NUM_REGIONS * N)
        self.codec: CodecName = codec
        self._pools = {memory: [_slots() for _ in LAYOUT.groups] for memory in ("pool", "direct")}

    def register(self, kv: TieredKV) -> None:
        """Bind all of it to a cache."""
        for group, caches in enumerate(self.caches):
            kv.register_kv_caches(caches, group=group)
            for memory, pools in self._pools.items():
                is_direct = memory == "direct" and self.codec != "fp8"
                kv.register_host_pool(f"{memory}{group}", pools[group], group=group, direct=is_direct)

    def numbers(self, keys: BlockKeys, region: int) -> range:
        """Number the blocks of these keys in a region."""
        start = self.first_number(keys.group, region)
        return range(start, start + len(keys))

    def first_number(self, group: int, region: int = 0) -> int:
        """Return the number of a region's first block."""
        return (group * NUM_REGIONS + region) * N

    def pages(self, keys: BlockKeys, region: int = 0) -> GPULoadStoreSpec:
        """Say where the blocks of these keys are among the pages."""
        return self.spec(self.numbers(keys, region), keys.group)

    def at(self, keys: BlockKeys, place: Place) -> EngineBlocks:
        """Say where the blocks of these keys are."""
        if place.memory == "pages":
            return self.pages(keys, place.region)
        return CPULoadStoreSpec(self.numbers(keys, place.region), pool=f"{place.memory}{keys.group}")

    def compute(self, keys: BlockKeys, version: str, place: Place) -> EngineBlocks:
        """Fill them."""
        if place.memory == "pages":
            return self.fill(keys, self.numbers(keys, place.region), version)
        for slot, expected in self._slots(keys, version, place):
            slot.copy_(expected)
        return self.at(keys, place)

    def which(self, keys: BlockKeys, version: str, place: Place) -> list[bool]:
        """Say of each whether it is right."""
        if place.memory == "pages":
            return self.right(keys, self.numbers(keys, place.region), version)
        return [torch.equal(slot, expected) for slot, expected in self._slots(keys, version, place)]

    def poison(self, region: int) -> None:
        """Overwrite a region, which is nobody's now."""
        for part in self._parts(region):
            part.fill_(_POISON)

    def is_poisoned(self, region: int) -> bool:
        """Say whether nobody has written to it since."""
        return all(bool((part == _POISON).all()) for part in self._parts(region))

    def content(self, digest: bytes, group: int, version: str) -> bytes:
        """See `AnyEngine.content`: what a codec has rounded already, so that it comes back as it was."""
        return _content(digest, group, version, self.codec)

    def _slots(self, keys: BlockKeys, version: str, place: Place) -> list[tuple[Tensor, Tensor]]:
        rows, num_bytes = self._pools[place.memory][keys.group], LAYOUT.groups[keys.group].payload_bytes
        expected = [bytearray(self.content(digest, keys.group, version)) for digest in keys]
        return [
            (rows[slot, :num_bytes], torch.frombuffer(raw, dtype=torch.uint8))
            for slot, raw in zip(self.numbers(keys, place.region), expected, strict=True)
        ]

    def _parts(self, region: int) -> list[Tensor]:
        parts = []
        for group, caches in enumerate(self.caches):
            at = slice((group * NUM_REGIONS + region) * N, (group * NUM_REGIONS + region + 1) * N)
            parts += [(layer[at] if layer.dim() == 3 else layer[:, at]).view(torch.uint8) for layer in caches]
            parts += [pools[group][at] for pools in self._pools.values()]
        return parts


def _slots() -> Tensor:
    """Return slots of a page each, at whole pages."""
    num_slots = len(LAYOUT.groups) * NUM_REGIONS * N
    return torch.frombuffer(mmap.mmap(-1, num_slots * mmap.PAGESIZE), dtype=torch.uint8).view(num_slots, -1)


@lru_cache(1 << 14)
def _content(digest: bytes, group: int, version: str, codec: CodecName) -> bytes:
    raw = content(digest, LAYOUT.groups[group].payload_bytes, version)
    if codec == "exponent":  # leaves out blocks of which exponents are as random as these bytes
        return ((np.frombuffer(raw, np.uint16) & _FEW_EXPONENTS) | _LEAST_EXPONENT).tobytes()
    coder = make_codec(codec, LAYOUT.groups[group])
    if coder is None:
        return raw
    rounded = coder.decode(coder.encode(torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(1, -1)))
    return rounded.numpy().tobytes()
