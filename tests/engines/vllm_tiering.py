"""vLLM's tiering manager over one of its secondary tiers, without an engine: for tests and benchmarks.

Runs in vLLM's environment. vLLM's CPU tier is its own, in shared memory; chunks are filled and read here by hand.
"""

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

OURS = {"type": "TieredKVTier", "module_path": "tiered_kv.integrations.vllm.offload_tier", "weights": "w"}
_NUMBERS = itertools.count()


class Tiering:
    """A tiering manager of ``num_chunks`` chunks of ``chunk_bytes`` in its CPU tier, and one tier below it.

    Attributes:
        manager: vLLM's.
        tier: The one below.
        rows: vLLM's CPU tier, ``(num_chunks, chunk_bytes)``.
        region: Its memory.
        scheduler_s: Processor time of calls of the manager, which in vLLM is the scheduler's thread's.
        tier_s: The tier's part of it.
    """

    def __init__(self, tier: dict[str, Any], *, num_chunks: int, chunk_bytes: int, num_groups: int = 1) -> None:
        number = next(_NUMBERS)
        parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=True)
        config = OffloadingConfig(
            groups=tuple(OffloadingGroupConfig(32, (f"layer{each}",), each) for each in range(num_groups)),
            worker_kv_bytes_per_block=chunk_bytes,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id=f"test{os.getpid()}-{number}",
            model=OffloadingModelConfig("model", "float32"),
            cache=OffloadingCacheConfig(32, 1),
            parallel=parallel,
        )
        spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)
        region = SharedOffloadRegion(config.engine_id, num_chunks, None, chunk_bytes, chunk_bytes)
        self.region = region
        primary = CPUPrimaryTierOffloadingManager(num_chunks, region)
        view = primary.get_kv_memoryview()
        self.tier = SecondaryTierFactory.create_secondary_tier(dict(tier), view, spec)
        self.manager = TieringOffloadingManager(primary, [self.tier])
        self.rows = np.frombuffer(view, np.uint8).reshape(num_chunks, chunk_bytes)
        self.scheduler_s = self.tier_s = 0.0
        for name in ("lookup", "submit_store", "submit_load", "get_finished_jobs", "on_schedule_end"):
            setattr(self.tier, name, self._timed(getattr(self.tier, name)))
        self._requests = itertools.count()

    def request(self) -> Any:
        """Begin a request."""
        context = ReqContext(req_id=f"r{next(self._requests)}")
        self.call(self.manager.on_new_request, context)
        return context

    def store(self, keys: Sequence[bytes], fill: Iterator[int] | Sequence[int], context: Any = None) -> int:
        """Store chunks, each filled with one value, as vLLM's workers do; return how many were not there yet."""
        context = context or self.request()
        prepared = self.call(self.manager.prepare_store, keys, context)
        if prepared is None:
            return 0
        values = dict(zip(keys, fill, strict=False))
        for key, row in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
            self.rows[int(row)] = values[key]
        self.call(self.manager.complete_store, prepared.keys_to_store, context)
        return len(prepared.keys_to_store)

    def find(self, keys: Sequence[bytes], context: Any, timeout_s: float = 30.0) -> int:
        """Look a prefix up, step by step as vLLM's scheduler does, until the answer is final; return its length."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            num_hits, is_final = 0, True
            for key in keys:
                answer = self.call(self.manager.lookup, key, context)
                if answer in {LookupResult.HIT, LookupResult.MISS}:
                    if answer is LookupResult.MISS:
                        break
                    num_hits += 1
                else:
                    is_final = False  # vLLM asks for the keys behind it all the same
            self.step(context)
            if is_final:
                return num_hits
            time.sleep(0)
        raise TimeoutError(f"no final answer within {timeout_s} s")

    def read(self, keys: Sequence[bytes], context: Any) -> list[int]:
        """Return what chunks that were found hold: the value that each is filled with, or -1."""
        prepared = self.call(self.manager.prepare_load, keys, context)
        rows = [self.rows[int(row)] for row in prepared.chunk_ids]
        values = [int(row[0]) if (row == row[0]).all() else -1 for row in rows]
        self.call(self.manager.complete_load, keys, context)
        return values

    def step(self, *contexts: Any) -> None:
        """End a step of the scheduler."""
        self.call(self.manager.on_schedule_end, ScheduleEndContext([each.req_id for each in contexts], ()))

    def settle(self, timeout_s: float = 60.0) -> None:
        """Step until nothing moves between the tiers."""
        deadline = time.monotonic() + timeout_s
        while self.manager.has_pending_work():
            if time.monotonic() > deadline:
                raise TimeoutError(f"work was left after {timeout_s} s")
            self.step()
            time.sleep(0.0005)

    def empty_primary(self) -> None:
        """Forget what vLLM's CPU tier has, as a restart does."""
        self.settle()
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # since 0.33 nothing comes up before workers have heard of it
            self.manager.on_reset_flushed()

    def call(self, call: Any, *arguments: Any) -> Any:
        """Make a call of the manager on the scheduler's time."""
        started = time.thread_time()
        try:
            return call(*arguments)
        finally:
            self.scheduler_s += time.thread_time() - started

    def _timed(self, call: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*arguments)
            finally:
                self.tier_s += time.thread_time() - started

        return timed

    def close(self) -> None:
        """End, as vLLM does."""
        del self.rows
        self.manager.shutdown()


def keys_of(count: int, *, start: int = 0, group: int = 0) -> list[bytes]:
    """Return chunks' keys as vLLM makes them."""
    return [make_offload_key(b"%032d" % number, group) for number in range(start, start + count)]
