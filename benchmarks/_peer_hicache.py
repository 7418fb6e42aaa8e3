"""HiCache's ``file`` backend below SGLang's own controller and host pool, whose memory is taken for the engine's.

The host pool has a page in one piece of K and one of V, and the backend remembers which files there are: both are
settings of theirs. One thread writes and one reads, which no setting changes. It has no checksums.
"""

from drive_hicache_file import VERSIONS  # first: it imports what SGLang needs before it

# isort: split
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from sglang.srt.mem_cache.utils import get_hash_str

from _peer import Peer, Row, Space
from sglang_controller import HEADS, LAYERS, PAGE, controller

TIMEOUT_S = 120.0


class File(Peer):
    """SGLang's controller with files."""

    says = f"{VERSIONS}, page cache"

    def __init__(self, folder: Path, space: Space) -> None:
        """Open it."""
        files, group = folder / "files", folder / "group"
        group.mkdir()
        self._hicache, self._host = controller(
            "page_first",
            {"file_storage_path": str(files), "enable_metadata_cache": True},
            str(group),
            is_mla=False,
            backend="file",
            dim=space.block_bytes // (2 * LAYERS * PAGE * HEADS * 4),
            tokens=space.num_blocks * PAGE // 2,
        )
        self._places = [self._host.alloc(len(request) * PAGE) for request in space.requests(0)]

    def fill(self, contents: Iterable[Row], requests: Sequence[range]) -> None:
        """Fill the host pool."""
        self._requests = [[number for number in request for _ in range(PAGE)] for request in requests]
        for at, content in zip(self._pages(), contents, strict=True):
            self._host.set_from_flat_data_page(at, torch.from_numpy(content).view(torch.float32))

    def store(self) -> None:
        """By the controller's thread."""
        for tokens, places in zip(self._requests, self._places, strict=True):
            self._hicache.write_storage(places, tokens, get_hash_str(tokens, None, page_size=PAGE))
        for _ in self._requests:
            self._hicache.ack_backup_queue.get(timeout=TIMEOUT_S)

    def blank(self) -> None:
        """Fill the host pool with zeros."""
        self._host.kv_buffer.zero_()

    def load(self) -> None:
        """Prefetch to the host pool, to the same places again."""
        for number, tokens in enumerate(self._requests):
            self._hicache.prefetch(f"request {number}", tokens)
        for places in self._places:
            operation = self._hicache.prefetch_hit_queue.get(timeout=TIMEOUT_S)
            operation.host_indices = places[: operation.storage_hit_count]
            self._hicache.prefetch_buffer.put(operation)
        num_over = 0
        while num_over < len(self._requests):
            num_over += bool(self._hicache.ack_prefetch_queue.get(timeout=TIMEOUT_S).completed_req)

    def blocks(self) -> Iterable[Row]:
        """Give the pages."""
        return (self._host.get_data_page(at).view(torch.uint8).numpy() for at in self._pages())

    def close(self) -> None:
        """Detach, as a server that stops does."""
        self._hicache.detach_storage_backend()

    def _pages(self) -> Sequence[int]:
        return [at for places in self._places for at in places[::PAGE].tolist()]


PEERS = {"hicache": File}
