"""LMCache's local disk, by its engine's ``store`` and ``retrieve``; CPU memory above it is for staging alone.

It has no checksums to switch on, and no deadline for a blocking retrieve. Tenants are kept apart where each request
carries ``lmcache.tag.*``, which is done here. What names the weights is the model's name alone. Its index is in memory.
"""

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.cache_engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.metadata import LMCacheMetadata

from driver import Driver, Setting, content

TOKENS = 16
INSTANCE = "bench"

_Some = Sequence[Any]


class Memory(MockGPUConnector):
    """An engine's memory.

    Attributes:
        blocks: Its blocks, a row each.
        first: Which of them is the first one of the prompt that is stored or loaded.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        super().__init__((4, 2, TOKENS, 2, block_bytes // (4 * 2 * TOKENS * 2 * 4)))
        self.blocks = torch.zeros(num_blocks, block_bytes, dtype=torch.uint8)
        self.first = 0

    def batched_from_gpu(self, memory_objs: _Some, starts: _Some, ends: _Some, **_: object) -> None:
        """Give the chunks."""
        for each, start in zip(memory_objs, starts, strict=True):
            each.tensor.view(torch.uint8).flatten().copy_(self.blocks[self.first + start // TOKENS])

    def batched_to_gpu(self, memory_objs: _Some, starts: _Some, ends: _Some, **_: object) -> None:
        """Take the chunks."""
        for each, start in zip(memory_objs, starts, strict=True):
            self.blocks[self.first + start // TOKENS].copy_(each.tensor.view(torch.uint8).flatten())


def opened(memory: Memory, folder: Path, **settings: object) -> LMCacheEngine:
    """Open an engine with that memory and a local disk; ``LMCacheEngineBuilder.destroy(INSTANCE)`` ends it."""
    config = LMCacheEngineConfig.from_defaults(chunk_size=TOKENS, local_cpu=False, local_disk=str(folder), **settings)
    metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.float32, memory.kv_shape, chunk_size=TOKENS)
    engine = LMCacheEngineBuilder.get_or_create(
        INSTANCE, config, metadata, memory, lambda *_: None, lambda value, *_: value
    )
    engine.post_init()
    return engine


def settle(engine: LMCacheEngine, timeout_s: float) -> None:
    """Wait until its disk's worker has nothing to do, or has had so long."""
    disk, deadline = engine.storage_manager.storage_backends["LocalDiskBackend"], time.monotonic() + timeout_s
    while disk.disk_worker.put_tasks and time.monotonic() < deadline:
        time.sleep(0.001)


class LMCacheDisk(Driver):
    """An LMCache engine with a local disk, and prompts of two chunks, the second one without a content of its own.

    Of one chunk alone LMCache reads in its caller's thread, which sees what the disk raises; of several in its own.
    """

    def __init__(self, setting: Setting) -> None:
        """Open it."""
        self._memory = Memory(2, self.block_bytes)
        disk_size = 2 * setting.room * self.block_bytes / 2**30
        self._engine = opened(self._memory, setting.folder, max_local_cpu_size=0.05, max_local_disk_size=disk_size)

    def store(self, numbers: Sequence[int], tenant: str = "a") -> None:
        """Store, and wait until its disk's worker has nothing to do, or has had 5 s."""
        for number in numbers:
            self._memory.blocks[0] = torch.frombuffer(bytearray(content(number, self.block_bytes)), dtype=torch.uint8)
            self._engine.store(tokens=_tokens(number), request_configs=_tag(tenant))
        settle(self._engine, 5.0)

    def load(self, number: int, tenant: str = "a", between: Callable[[], object] | None = None) -> bytes | None:
        """Look up, then retrieve."""
        asked = {"tokens": _tokens(number), "request_configs": _tag(tenant)}
        if not self._engine.lookup(**asked):
            return None
        if between is not None:
            between()
        self._memory.blocks[0] = 0
        return self._memory.blocks[0].numpy().tobytes() if bool(self._engine.retrieve(**asked)[0]) else None

    def forget(self) -> None:
        """Nothing of it is kept in memory."""

    def close(self) -> None:
        """End it."""
        LMCacheEngineBuilder.destroy(INSTANCE)


def _tokens(number: int) -> list[int]:
    return [number] * (2 * TOKENS)


def _tag(tenant: str) -> dict[str, str]:
    return {"lmcache.tag.tenant": tenant}


TIER = LMCacheDisk
VERSIONS = f"lmcache {version('lmcache')}"
