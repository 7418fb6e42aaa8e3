"""Our tiers for files, each alone below the whole library: an engine's paged memory, and `store` and `load`.

Every record is encoded and verified. Loads are submitted as a connector does, all requests at once.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from _peer import Peer, Row, Space
from drive_nvme import BLOCK_SIZE, VERSIONS, opened, pool_of
from tiered_kv import GPULoadStoreSpec, hash_blocks


class NVMe(Peer):
    """The settings are the defaults, eight threads and direct I/O, but for LRU: what is measured must be there."""

    tier: ClassVar[dict[str, Any]] = {"medium": "nvme", "policy": "lru"}

    def __init__(self, folder: Path, space: Space) -> None:
        """Open it."""
        self._pool = pool_of(space.num_blocks, space.block_bytes)
        tier = {"path": str(folder / "tier"), "capacity": space.num_bytes * 5 // 4 + (8 << 20), **self.tier}
        self._opening = opened(tier, self._pool, "weights")
        self._kv = self._opening.__enter__()
        self.says = f"{VERSIONS}, {self._kv.stats().tiers[-1].facts.get('io', 'page cache')}"

    def fill(self, contents: Iterable[Row], requests: Sequence[range]) -> None:
        """Fill the engine's memory."""
        self._requests = []
        for request in requests:
            tokens = [number for number in request for _ in range(BLOCK_SIZE)]
            at = [number % self._pool[0].shape[1] for number in request]
            self._requests.append((hash_blocks(tokens, block_size=BLOCK_SIZE), at))
        for number, content in enumerate(contents):
            for layer, part in zip(self._pool, np.split(content, len(self._pool)), strict=True):
                layer[:, number] = torch.from_numpy(part).view(torch.float32).view_as(layer[:, number])

    def store(self) -> None:
        """Store, and wait until it is written."""
        for keys, block_ids in self._requests:
            self._kv.submit_store(keys, GPULoadStoreSpec(block_ids))
        self._kv.flush()

    def blank(self) -> None:
        """There is no tier above it."""
        for layer in self._pool:
            layer.zero_()

    def load(self) -> None:
        """Load."""
        tickets = [self._kv.submit_load(keys, GPULoadStoreSpec(block_ids)) for keys, block_ids in self._requests]
        for ticket in tickets:
            ticket.wait()

    def blocks(self) -> Iterable[Row]:
        """Put together what the layers have of each."""
        for number in range(self._pool[0].shape[1]):
            yield torch.cat([layer[:, number].flatten() for layer in self._pool]).view(torch.uint8).numpy()

    def close(self) -> None:
        """Close it."""
        self._opening.__exit__(None, None, None)


class SharedFS(NVMe):
    """Sixteen threads, and the page cache."""

    tier: ClassVar[dict[str, Any]] = {"medium": "shared_fs", "capacity": "1TiB"}


PEERS = {"nvme": NVMe, "shared_fs": SharedFS}
