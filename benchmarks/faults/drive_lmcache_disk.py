"""LMCache's local disk, by its engine's ``store`` and ``retrieve``; CPU memory above it is for staging alone.

It has no checksums to switch on, and no deadline for a blocking retrieve. Tenants are kept apart where each request
carries ``lmcache.tag.*``, which is done here. What names the weights is the model's name alone. Its index is in memory.
"""

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.metadata import LMCacheMetadata

from driver import Driver, Setting, content

TOKENS = 16
SHAPE = (4, 2, TOKENS, 2, 64)


_Some = Sequence[Any]


class _Memory(MockGPUConnector):
    """An engine's memory of a prompt of two chunks, the second one without a content of its own.

    Of one chunk alone LMCache reads in its caller's thread, which sees what the disk raises; of several in its own.
    """

    def __init__(self) -> None:
        super().__init__(SHAPE)
        self.blocks = [bytearray(LMCacheDisk.block_bytes) for _ in range(2)]

    def batched_from_gpu(self, memory_objs: _Some, starts: _Some, ends: _Some, **_: object) -> None:
        """Give the chunks."""
        for each, start in zip(memory_objs, starts, strict=True):
            block = torch.frombuffer(self.blocks[start // TOKENS], dtype=torch.uint8)
            each.tensor.view(torch.uint8).flatten().copy_(block)

    def batched_to_gpu(self, memory_objs: _Some, starts: _Some, ends: _Some, **_: object) -> None:
        """Take the chunks."""
        for each, start in zip(memory_objs, starts, strict=True):
            block = torch.frombuffer(self.blocks[start // TOKENS], dtype=torch.uint8)
            block.copy_(each.tensor.view(torch.uint8).flatten())


class LMCacheDisk(Driver):
    """An LMCache engine with a local disk."""

    def __init__(self, setting: Setting) -> None:
        """Open it."""
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS,
            local_cpu=False,
            max_local_cpu_size=0.05,
            local_disk=str(setting.folder),
            max_local_disk_size=2 * setting.room * self.block_bytes / 2**30,
        )
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.float32, SHAPE, chunk_size=TOKENS)
        self._memory = _Memory()
        self._engine = LMCacheEngineBuilder.get_or_create(
            "bench", config, metadata, self._memory, lambda *_: None, lambda value, *_: value
        )
        self._engine.post_init()

    def store(self, numbers: Sequence[int], tenant: str = "a") -> None:
        """Store, and wait until its disk's worker has nothing to do, or has had 5 s."""
        disk = self._engine.storage_manager.storage_backends["LocalDiskBackend"]
        for number in numbers:
            self._memory.blocks[0][:] = content(number, self.block_bytes)
            self._engine.store(tokens=_tokens(number), request_configs=_tag(tenant))
        deadline = time.monotonic() + 5.0
        while disk.disk_worker.put_tasks and time.monotonic() < deadline:
            time.sleep(0.001)

    def load(self, number: int, tenant: str = "a", between: Callable[[], object] | None = None) -> bytes | None:
        """Look up, then retrieve."""
        asked = {"tokens": _tokens(number), "request_configs": _tag(tenant)}
        if not self._engine.lookup(**asked):
            return None
        if between is not None:
            between()
        self._memory.blocks[0][:] = bytes(self.block_bytes)
        return bytes(self._memory.blocks[0]) if bool(self._engine.retrieve(**asked)[0]) else None

    def forget(self) -> None:
        """Nothing of it is kept in memory."""

    def close(self) -> None:
        """End it."""
        LMCacheEngineBuilder.destroy("bench")


def _tokens(number: int) -> list[int]:
    return [number] * (2 * TOKENS)


def _tag(tenant: str) -> dict[str, str]:
    return {"lmcache.tag.tenant": tenant}


TIER = LMCacheDisk
VERSIONS = f"lmcache {version('lmcache')}"
