"""The planner of a client: plans are made by the server, and carried out by workers that map its memory as we do."""

import os

from typing_extensions import override

from tiered_kv.hints import ReuseHint, check_hint
from tiered_kv.host.connection import Connection
from tiered_kv.host.far_job import FarRequest
from tiered_kv.host.far_jobs import FarJobs
from tiered_kv.host.for_workers import ServedSlab
from tiered_kv.host.starts import Starts
from tiered_kv.keys import BlockKeys, epoch_digest
from tiered_kv.plan import SlabHandle
from tiered_kv.planner import Planner
from tiered_kv.specs import GPULoadStoreSpec
from tiered_kv.transfers.job import Job
from tiered_kv.validation import check_count, check_engine_blocks


class FarPlanner(Planner):
    """Made by `ConnectedKV`. While no server is there jobs end at once, as ``"server away"``."""

    def __init__(self, connection: Connection, starts: Starts, jobs: FarJobs) -> None:
        super().__init__(jobs)
        self._connection = connection
        self._starts = starts
        self._far_jobs = jobs
        self._slabs: tuple[bytes, tuple[SlabHandle, ...]] = b"", ()

    @override
    def slabs(self) -> tuple[SlabHandle, ...]:
        here, there = self._connection.here(anywhere=True), self._connection.there
        if there is None:
            return ()
        token = there.attached.token
        if self._slabs[0] != token:
            self._slabs = token, tuple(
                ServedSlab(
                    slab.num_slots, slab.stride_bytes, slab.payload_bytes, there.pool_of(slab.name), slab.group,
                    slab.rank, here.attached.codec, there.path, token, slab.name,
                )
                for slab in there.attached.slabs
            )  # fmt: skip
        return self._slabs[1]

    @override
    def register_worker(self, *, rank: int = 0, pid: int | None = None) -> None:
        self._connection.here(anywhere=True)
        self._far_jobs.register(rank, os.getpid() if pid is None else pid)

    @override
    def plan_load(self, keys: BlockKeys, into: GPULoadStoreSpec | None = None, *, gaps: bool = False) -> Job:
        epoch = self._starts.epoch  # before the keys are named by it: if it advances in between, the load is overtaken
        said = self._starts.said(keys, epoch=epoch, anywhere=True)
        per_block = self._check(keys, into)
        return self._far_jobs.begin(
            FarRequest("load", keys, said, into, per_block, lambda: self._starts.epoch == epoch, gaps)
        )

    @override
    def plan_store(
        self,
        keys: BlockKeys,
        source: GPULoadStoreSpec | None = None,
        *,
        epoch: str | None = None,
        hint: ReuseHint | None = None,
    ) -> Job:
        said = self._starts.said(keys, epoch=None if epoch is None else epoch_digest(epoch), anywhere=True)
        per_block = self._check(keys, source)
        refused = "draining" if self._starts.is_draining else ""
        return self._far_jobs.begin(
            FarRequest("store", keys, said, source, per_block, lambda: True, hint=check_hint(hint), refused=refused)
        )

    def _check(self, keys: BlockKeys, blocks: GPULoadStoreSpec | None) -> int:
        """Raise unless blocks of the engine are as many as the keys need; return how many a key needs."""
        group = self._connection.here(anywhere=True).group(keys.group).group
        if blocks is not None:
            check_engine_blocks(keys, blocks)
            check_count(group, keys, blocks)
        return group.pages_per_block
