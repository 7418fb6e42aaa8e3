"""Our tiers for files, each alone below the whole library: an engine's paged memory, and `store` and `load`.

Every record is encoded and verified. Loads are submitted as a connector does, all requests at once.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from typing_extensions import override

from _peer import Peer, Row, Space
from drive_nvme import BLOCK_SIZE, VERSIONS, opened, pool_of
from tiered_kv import (
    BlockingTieredKV,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KVGroup,
    KVLayout,
    ModelIdentity,
    TieredKV,
    TieredKVSettings,
    hash_blocks,
    open_blocking,
)

_ALIGNED: Final = 4096
"""What direct I/O wants memory to begin at."""
_POOL: Final = "engine"


class NVMe(Peer):
    """The settings are the defaults, eight threads and direct I/O, but for LRU: what is measured must be there."""

    tier: ClassVar[dict[str, Any]] = {"medium": "nvme", "policy": "lru"}

    def __init__(self, folder: Path, space: Space) -> None:
        """Open it."""
        tier = {"path": str(folder / "tier"), "capacity": space.num_bytes * 5 // 4 + (8 << 20), **self.tier}
        self._opening = self._opened(tier, space)
        self._kv = self._opening.__enter__()
        self.says = f"{VERSIONS}, {self._kv.stats().tiers[-1].facts['io']}"

    def fill(self, contents: Iterable[Row], requests: Sequence[range]) -> None:
        """Fill the engine's memory."""
        self._requests = []
        for request in requests:
            tokens = [number for number in request for _ in range(BLOCK_SIZE)]
            at = [number - requests[0].start for number in request]
            self._requests.append((hash_blocks(tokens, block_size=BLOCK_SIZE), self._spec(at)))
        for number, content in enumerate(contents):
            self._put(number, content)

    def _opened(self, tier: dict[str, Any], space: Space) -> AbstractContextManager[BlockingTieredKV]:
        """Open a cache for an engine with paged memory."""
        self._pool = pool_of(space.num_blocks, space.block_bytes)
        return opened(tier, self._pool, "weights")

    def _spec(self, at: Sequence[int]) -> GPULoadStoreSpec | CPULoadStoreSpec:
        """Say where in the engine's memory blocks are."""
        return GPULoadStoreSpec(at)

    def _put(self, number: int, content: Row) -> None:
        """Have a block in the engine's memory."""
        for layer, part in zip(self._pool, np.split(content, len(self._pool)), strict=True):
            layer[:, number] = torch.from_numpy(part).view(torch.float32).view_as(layer[:, number])

    def store(self) -> None:
        """Store, and wait until it is written."""
        for keys, spec in self._requests:
            self._kv.submit_store(keys, spec)
        self._kv.flush()

    def blank(self) -> None:
        """There is no tier above it."""
        for layer in self._pool:
            layer.zero_()

    def load(self) -> None:
        """Load."""
        tickets = [self._kv.submit_load(keys, spec) for keys, spec in self._requests]
        for ticket in tickets:
            ticket.wait()

    def blocks(self) -> Iterable[Row]:
        """Put together what the layers have of each."""
        for number in range(self._pool[0].shape[1]):
            yield torch.cat([layer[:, number].flatten() for layer in self._pool]).view(torch.uint8).numpy()

    def close(self) -> None:
        """Close it."""
        self._opening.__exit__(None, None, None)


class NVMeDirect(NVMe):
    """The engine has host memory of whole blocks, which storage reads into and writes from."""

    @override
    def _opened(self, tier: dict[str, Any], space: Space) -> AbstractContextManager[BlockingTieredKV]:
        whole = np.zeros(space.num_bytes + _ALIGNED, np.uint8)
        start = -whole.ctypes.data % _ALIGNED
        self._blocks = whole[start : start + space.num_bytes].reshape(space.num_blocks, space.block_bytes)
        return self._direct(tier)

    @contextmanager
    def _direct(self, tier: dict[str, Any]) -> Iterator[BlockingTieredKV]:
        group = KVGroup.opaque(self._blocks.shape[1], tag="bench", block_size=BLOCK_SIZE)
        model, settings = ModelIdentity("bench", weights="weights"), TieredKVSettings(tiers=[tier])
        cache = TieredKV.from_settings(settings, model=model, layout=KVLayout((group,)), device="cpu")
        with open_blocking(cache) as kv:
            kv.register_host_pool(_POOL, self._blocks, direct=True)
            yield kv

    @override
    def _spec(self, at: Sequence[int]) -> CPULoadStoreSpec:
        return CPULoadStoreSpec(at, pool=_POOL)

    @override
    def _put(self, number: int, content: Row) -> None:
        self._blocks[number] = content

    @override
    def blank(self) -> None:
        self._blocks[:] = 0

    @override
    def blocks(self) -> Iterable[Row]:
        return self._blocks


class SharedFS(NVMe):
    """Sixteen threads."""

    tier: ClassVar[dict[str, Any]] = {"medium": "shared_fs", "capacity": "1TiB"}


PEERS = {"nvme": NVMe, "nvme_direct": NVMeDirect, "shared_fs": SharedFS}
