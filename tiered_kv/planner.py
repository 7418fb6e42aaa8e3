"""A planner: the face of a cache whose bytes are moved by other processes. Plan here, execute there, complete here.

A scheduler decides and has no tensors; its workers have tensors and decide nothing (`tiered_kv.worker.Worker`). What is
planned is held under a job until every rank's worker has answered, or has ended.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable

from tiered_kv.keys import BlockKeys
from tiered_kv.open_cache import OpenCache
from tiered_kv.plan import JobResult, Outcomes, Plan, SlabHandle
from tiered_kv.specs import GPULoadStoreSpec
from tiered_kv.transfers.jobs import LoadPart, pages_of, reserve_parts
from tiered_kv.transfers.prefetch import bring_to_host, lease_prefix
from tiered_kv.validation import check_planned


class Planner:
    """Made by `TieredKV.planner`; for the event loop's thread, as the cache is. Ends with the cache."""

    def __init__(self, opened: Callable[[], OpenCache]) -> None:
        """Made by `TieredKV` only; ``opened`` returns the cache, or raises when it may not be called."""
        self._opened = opened

    def slabs(self) -> tuple[SlabHandle, ...]:
        """Return what a `Worker` in another process attaches: the host memory of every KV group and rank. Picklable."""
        cache = self._opened()
        num_ranks, pid = len(cache.shards), os.getpid()
        return tuple(
            SlabHandle(
                pid, slab.fd, os.fstat(slab.fd).st_ino,
                slab.num_slots, slab.stride_bytes, slab.payload_bytes, slab.name,
                group=number // num_ranks, rank=number % num_ranks, codec=codec.name if codec else "none",
            )
            for number, (slab, codec) in enumerate((chain.host.slab, chain.codec) for chain in cache.chains)
        )  # fmt: skip

    def register_worker(self, *, rank: int = 0, pid: int | None = None) -> None:
        """Say which process executes the plans of a rank: this one by default. Its end ends its part of every job.

        Raises:
            ConfigurationError: No such process or rank, or the rank has a worker that is alive, and may be writing.
        """
        self._opened().jobs.register(rank, os.getpid() if pid is None else pid)

    async def plan_load(self, keys: BlockKeys, into: GPULoadStoreSpec) -> Plan:
        """Bring a prefix to host memory and hold it there, for workers to copy into the engine's blocks.

        Args:
            keys: What to load, in prompt order.
            into: ``pages_per_block`` block ids per key, the same on every rank.

        Returns:
            A picklable plan; its ``num_blocks`` is the prefix that is held for every rank.

        Raises:
            ConfigurationError, LayoutMismatchError: Arguments that cannot be right, no CPU tier, or a rank whose
                worker is missing, or has ended meanwhile. Nothing is held.
            ClosedError: The cache is not open any more.
        """
        cache = self._opened()
        parts = cache.batches(keys)
        group = check_planned(parts[0][0], keys, into)
        cache.jobs.check_workers()
        epoch = cache.epoch
        sources = await bring_to_host(parts)
        self._opened()  # what held the bytes may be gone by now, and whoever was to move them
        cache.jobs.check_workers()
        held = [
            LoadPart(chain, lease, source)
            for (chain, _), lease, source in zip(parts, lease_prefix(parts), sources, strict=True)
        ]
        n = len(held[0].slots)
        pages = [into[: n * group.pages_per_block]] * len(held)
        return cache.jobs.begin("load", held, pages, n, lambda: cache.epoch == epoch)

    def plan_store(self, keys: BlockKeys, source: GPULoadStoreSpec, *, epoch: str | None = None) -> Plan:
        """Reserve host slots for workers to copy the engine's blocks to. Waits for nothing.

        What is there already is left out, rank by rank. Where the CPU tier has no room for all the plan is empty.

        Args:
            keys: What to store, in prompt order.
            source: ``pages_per_block`` block ids per key, the same on every rank.
            epoch: The weights that computed the blocks, where they are not the current ones any more.

        Raises:
            ConfigurationError, LayoutMismatchError: As for `plan_load`.
        """
        cache = self._opened()
        parts = cache.batches(keys, epoch)
        group = check_planned(parts[0][0], keys, source)
        cache.jobs.check_workers()
        held = reserve_parts(parts)
        pages = [pages_of(source, group.pages_per_block, part) for part in held]
        return cache.jobs.begin("store", held, pages, len(keys), lambda: True)

    def complete(self, outcomes: Outcomes) -> JobResult | None:
        """Take one rank's answer, in any order; return how the job ended if it was the last, else None.

        Only what every rank has copied out becomes readable; it is then written to the tiers below. Answers to jobs
        that have ended are passed over.

        Raises:
            ConfigurationError: They are no `Outcomes` of a rank here.
        """
        return self._opened().jobs.complete(outcomes)

    def ended(self, plan: Plan) -> Awaitable[JobResult]:
        """Return what to await for the end of a job: every rank has answered, or its worker has ended.

        Of a job that is over it is there at once. Cancelling the wait does not end the job.

        Raises:
            ConfigurationError: No job of this cache, or one that ended 4,096 jobs ago.
        """
        return asyncio.shield(self._opened().jobs.ended(plan))
