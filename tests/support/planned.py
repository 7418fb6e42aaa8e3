"""Planned transfers of a small prompt by two ranks, whose workers are in this process."""

import mmap
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.any_layout import SMALL, STRIDE, AnyEngine, cpu, prompt
from tiered_kv import Plan, Planner, SlabHandle, TieredKV, Worker

N = 6
KEYS = prompt(N)
CPU = cpu(32, 2 * STRIDE)  # 32 slots for each of two ranks
HEADER = 4096
PAYLOAD = SMALL.groups[0].payload_bytes
WAIT_S = 30.0
"""For what comes at once unless something is broken."""


def spread(plan: Plan) -> Plan:
    """Send a plan to another process, and have it back."""
    sent: Plan = pickle.loads(pickle.dumps(plan))
    return sent


@contextmanager
def mapped(slab: SlabHandle) -> Iterator[mmap.mmap]:
    """Map a slab past the cache."""
    fd, _ = slab.descriptor()
    try:
        with mmap.mmap(fd, slab.num_slots * slab.stride_bytes) as memory:
            yield memory
    finally:
        os.close(fd)


class Ranks:
    """Two ranks' workers in this process, each with an engine of its own; or some, of which several hold the same."""

    def __init__(self, planner: Planner, num: int = 2, *, copies: int = 1) -> None:
        self.engines = [AnyEngine() for _ in range(num)]
        self._computed = [f"rank {rank // copies}" for rank in range(num)]
        slabs = pickle.loads(pickle.dumps(planner.slabs()))
        self.workers = [Worker(slabs, layout=SMALL, rank=rank, device="cpu") for rank in range(num)]
        for rank, (worker, engine) in enumerate(zip(self.workers, self.engines, strict=True)):
            worker.register_kv_caches(engine.caches[0])
            planner.register_worker(rank=rank)

    def compute(self) -> None:
        """Have all ranks compute their parts of the prompt."""
        for engine, computed in zip(self.engines, self._computed, strict=True):
            engine.fill(KEYS, range(N), computed)

    def num_right(self) -> list[int]:
        """Count, per rank, the leading blocks that are that rank's own."""
        both = zip(self.engines, self._computed, strict=True)
        return [engine.count_right(KEYS, range(N), computed) for engine, computed in both]

    def wipe(self) -> None:
        """Overwrite all engines' blocks."""
        for engine in self.engines:
            engine.wipe()

    def close(self) -> None:
        """End all."""
        for worker in self.workers:
            worker.close()


async def store(kv: TieredKV, planner: Planner, ranks: Ranks) -> None:
    """Keep the whole prompt of both ranks."""
    ranks.compute()
    job = planner.plan_store(KEYS, ranks.engines[0].spec(range(N)))
    plan = await job.planned()
    for worker in ranks.workers:
        assert job.result is None
        planner.complete(worker.execute(spread(plan)))
    assert (await job.ended()).num_blocks == N
    await kv.flush()
