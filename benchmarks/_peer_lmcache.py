"""LMCache's local disk, by its engine's ``store`` and ``retrieve``, with memory of an engine on the CPU.

It has eight threads each way, as ours has; its default are four. Its own CPU memory is for staging alone, with room for
all requests: what finds no room there is not stored. It has no checksums. Between memories a block is one copy.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder

from _peer import Peer, Row, Space
from drive_lmcache_disk import INSTANCE, TOKENS, VERSIONS, Memory, opened, settle

LIMIT_S = 120.0


class LocalDisk(Peer):
    """As its defaults have it: through the page cache."""

    says = f"{VERSIONS}, page cache"
    extra: ClassVar[dict[str, Any]] = {"disk_io_threads": 8}

    def __init__(self, folder: Path, space: Space) -> None:
        """Open it."""
        self._memory = Memory(space.num_blocks, space.block_bytes)
        cpu_size = space.num_bytes / 2**30 * 1.25 + 0.05
        self._engine = opened(
            self._memory, folder, max_local_cpu_size=cpu_size, max_local_disk_size=1024.0, extra_config=self.extra
        )

    def fill(self, contents: Iterable[Row], requests: Sequence[range]) -> None:
        """Fill the engine's memory."""
        for block, content in zip(self._memory.blocks, contents, strict=True):
            block.copy_(torch.from_numpy(content))
        self._requests = [
            (request[0] % len(self._memory.blocks), [number for number in request for _ in range(TOKENS)])
            for request in requests
        ]

    def store(self) -> None:
        """Store, and wait until its disk's worker has nothing to do."""
        for first, tokens in self._requests:
            self._memory.first = first
            self._engine.store(tokens=tokens)
        settle(self._engine, LIMIT_S)

    def blank(self) -> None:
        """Nothing of it is kept in memory."""
        self._memory.blocks.zero_()

    def load(self) -> None:
        """Look each request up, then retrieve it."""
        for first, tokens in self._requests:
            self._memory.first = first
            if self._engine.lookup(tokens=tokens) == len(tokens):
                self._engine.retrieve(tokens=tokens)

    def blocks(self) -> Iterable[Row]:
        """Give the rows of the memory."""
        blocks: Iterable[Row] = self._memory.blocks.numpy()
        return blocks

    def close(self) -> None:
        """End it."""
        LMCacheEngineBuilder.destroy(INSTANCE)


class DirectLocalDisk(LocalDisk):
    """With ``use_odirect``."""

    says = f"{VERSIONS}, direct"
    extra: ClassVar[dict[str, Any]] = {**LocalDisk.extra, "use_odirect": True}


PEERS = {"lmcache": LocalDisk, "lmcache_direct": DirectLocalDisk}
