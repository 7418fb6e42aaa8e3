"""vLLM's ``fs`` tier below vLLM's own manager and CPU tier, whose memory is taken for the engine's.

Its blocks are written and read without a copy, by direct I/O, a request's in one of its sixteen threads each way: the
default. It has no checksums, and never deletes.
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from vllm.v1.kv_offload.base import LookupResult

from _peer import Peer, Row, Space
from drive_vllm_fs import VERSIONS, key_of
from vllm_tiering import Tiering

FOUND = {LookupResult.HIT, LookupResult.HIT_PENDING}
STEP_S = 0.0005


class FileSystem(Peer):
    """vLLM's manager, step by step as its scheduler calls it."""

    def __init__(self, folder: Path, space: Space) -> None:
        """Open it."""
        tier = {"type": "fs", "root_dir": str(folder)}
        self._tiering = Tiering(tier, num_chunks=space.num_blocks, chunk_bytes=space.block_bytes)
        io = "direct" if self._tiering.tier._use_o_direct else "page cache"  # noqa: SLF001 - vLLM says it nowhere else
        self.says = f"{VERSIONS}, {io}"

    def fill(self, contents: Iterable[Row], requests: Sequence[range]) -> None:
        """Have each request's blocks in vLLM's CPU tier, not yet completed."""
        self._tiering.empty_primary()
        self._requests = [[key_of(number, "a") for number in request] for request in requests]
        self._stores, numbers = [], iter(contents)
        for keys in self._requests:
            context = self._tiering.request()
            prepared = self._tiering.manager.prepare_store(keys, context)
            for row in prepared.store_spec.chunk_ids:
                self._tiering.rows[int(row)] = next(numbers)
            self._stores.append((prepared.keys_to_store, context))

    def store(self) -> None:
        """Complete them, which has the tier write them."""
        for keys, context in self._stores:
            self._tiering.manager.complete_store(keys, context)
            self._tiering.step(context)
        self._tiering.settle()

    def blank(self) -> None:
        """Empty vLLM's CPU tier."""
        self._tiering.empty_primary()
        self._tiering.rows[:] = 0

    def load(self) -> None:
        """Look up until nothing is missing, which promotes, and wait for that."""
        manager = self._tiering.manager
        self._loads = [(keys, self._tiering.request()) for keys in self._requests]
        waiting = self._loads
        while waiting:
            answers = [{manager.lookup(key, context) for key in keys} for keys, context in waiting]
            self._tiering.step()
            if any(LookupResult.MISS in found for found in answers):
                return
            waiting = [each for each, found in zip(waiting, answers, strict=True) if not found <= FOUND]
            time.sleep(STEP_S)
        self._tiering.settle()

    def blocks(self) -> Iterable[Row]:
        """Give the rows of vLLM's CPU tier."""
        manager = self._tiering.manager
        for keys, context in self._loads:
            yield from (self._tiering.rows[int(row)] for row in manager.prepare_load(keys, context).chunk_ids)
            manager.complete_load(keys, context)
            manager.on_request_finished(context)

    def close(self) -> None:
        """End it."""
        self._tiering.close()


PEERS = {"vllm_fs": FileSystem}
