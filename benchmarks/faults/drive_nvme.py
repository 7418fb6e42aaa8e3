"""Our NVMe tier alone, by the whole library: no tier above it, and an engine's memory on the CPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, ClassVar

import torch

from driver import Driver, Setting, content
from tiered_kv import (
    BlockingTieredKV,
    GPULoadStoreSpec,
    KVLayout,
    ModelIdentity,
    TieredKV,
    TieredKVSettings,
    hash_blocks,
    open_blocking,
)
from tiered_kv.values.keys import BlockKeys

BLOCK_SIZE, LAYERS = 16, 4


def pool_of(num_blocks: int, block_bytes: int) -> list[torch.Tensor]:
    """Return an engine's memory: of each of four layers K and V of all blocks."""
    return [
        torch.zeros(2, num_blocks, BLOCK_SIZE, 2, block_bytes // (LAYERS * 2 * BLOCK_SIZE * 2 * 4))
        for _ in range(LAYERS)
    ]


@contextmanager
def opened(tier: dict[str, Any], pool: list[torch.Tensor], weights: str) -> Iterator[BlockingTieredKV]:
    """Open a cache of one tier for an engine with that memory."""
    cache = TieredKV.from_settings(
        TieredKVSettings(tiers=[tier]),
        model=ModelIdentity("bench", weights=weights),
        layout=KVLayout.from_tensors(pool, block_size=BLOCK_SIZE),
    )
    with open_blocking(cache) as kv:
        kv.register_kv_caches(pool)
        yield kv


class Ours(Driver):
    """A cache of one storage tier."""

    header_bytes = 4096
    medium: ClassVar[str] = "nvme"
    own: ClassVar[dict[str, Any]] = {}

    def __init__(self, setting: Setting) -> None:
        """Open it."""
        self._pool = pool_of(64, self.block_bytes)
        capacity = setting.room * (self.header_bytes + self.block_bytes + 1024)
        tier = {"medium": self.medium, "path": str(setting.folder), "capacity": capacity, **self.own}
        self._opening = opened(tier, self._pool, setting.weights)
        self._kv = self._opening.__enter__()

    def store(self, numbers: Sequence[int], tenant: str = "a") -> None:
        """Store, and wait until it is written."""
        for number in numbers:
            self._fill(number)
            self._kv.store(_key(number, tenant), GPULoadStoreSpec([number]))
        self._kv.flush()

    def load(self, number: int, tenant: str = "a", between: Callable[[], object] | None = None) -> bytes | None:
        """Load into the engine's memory."""
        key = _key(number, tenant)
        if between is not None and self._kv.lookup(key).num_blocks:
            between()
        for layer in self._pool:
            layer[:, 0] = 0
        return self._bytes(0) if self._kv.load(key, GPULoadStoreSpec([0])).num_blocks else None

    def forget(self) -> None:
        """There is nothing above it."""

    def evict(self, number: int) -> None:
        """Drop a block."""
        self._kv.evict(_key(number, "a"))

    def late(self, number: int, other: int) -> tuple[int, bytes]:
        """With a deadline of 0.2 s, and then its engine's block for another."""
        loaded = self._kv.load(_key(number, "a"), GPULoadStoreSpec([0]), deadline_s=0.2)
        if loaded.num_blocks:
            return number, self._bytes(0)
        self._fill(other, at=0)
        self._kv.flush()
        self._kv.load(_key(number, "a"), GPULoadStoreSpec([1]))  # waits for the read that was late, or its tier's time
        return other, self._bytes(0)

    def cancelled(self, number: int, other: int, release: Callable[[], object]) -> bytes:
        """By a ticket."""
        ticket = self._kv.submit_load(_key(number, "a"), GPULoadStoreSpec([0]))
        ticket.cancel()
        ticket.wait()
        self._fill(other, at=0)
        release()
        self._kv.load(_key(number, "a"), GPULoadStoreSpec([1]))
        return self._bytes(0)

    def close(self) -> None:
        """Close."""
        self._opening.__exit__(None, None, None)

    def _fill(self, number: int, at: int | None = None) -> None:
        values = torch.frombuffer(bytearray(content(number, self.block_bytes)), dtype=torch.float32)
        for layer, part in zip(self._pool, values.chunk(len(self._pool)), strict=True):
            layer[:, number if at is None else at] = part.view(2, BLOCK_SIZE, 2, -1)

    def _bytes(self, at: int) -> bytes:
        return b"".join(layer[:, at].contiguous().numpy().tobytes() for layer in self._pool)


def _key(number: int, tenant: str) -> BlockKeys:
    return hash_blocks([number] * BLOCK_SIZE, block_size=BLOCK_SIZE, salt=tenant)


TIER = Ours
VERSIONS = f"tiered_kv {version('tiered-kv')}"
