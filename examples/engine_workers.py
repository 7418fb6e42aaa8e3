"""A scheduler process and two tensor-parallel workers: it plans, they move bytes, through host memory that all share.

The scheduler has the cache and no tensors. Each worker has its half of the KV heads in tensors of its own, attaches the
scheduler's memory, and does what plans say. A block counts once both halves of it are there.
"""

import asyncio
import multiprocessing as mp
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from tiered_kv import (
    GPULoadStoreSpec,
    Job,
    KVGroup,
    KVLayout,
    ModelIdentity,
    Outcomes,
    Planner,
    Shard,
    SlabHandle,
    TieredKV,
    Worker,
    hash_blocks,
)

RANKS = 2
LAYOUT = KVLayout((KVGroup(num_layers=4, num_kv_heads=2, head_dim=32, dtype="float32", block_size=16),))
"""Of one rank: 2 of the model's 4 KV heads."""
KEYS = hash_blocks(range(500), block_size=16)  # 31 full blocks
BLOCKS = GPULoadStoreSpec(range(31))  # of the engine, the same on every rank


def work(rank: int, slabs: Sequence[SlabHandle], pipe: Connection) -> None:
    """Be a worker: compute the blocks, then execute each plan that comes, and answer."""
    kv_caches = [torch.randn(2, 64, 16, 2, 32) for _layer in range(4)]  # K and V, blocks, tokens, heads, dimension
    computed = [layer[:, :31].clone() for layer in kv_caches]
    with Worker(slabs, layout=LAYOUT, rank=rank) as worker:
        worker.register_kv_caches(kv_caches)
        while (plan := pipe.recv()) is not None:
            outcomes = worker.execute(plan)  # from here on the plan's blocks are the engine's again
            is_right = all(torch.equal(layer[:, :31], new) for layer, new in zip(kv_caches, computed, strict=True))
            pipe.send((outcomes, is_right))
            for layer in kv_caches:
                layer.zero_()  # what the next load brings is not what was there before


async def execute(planner: Planner, pipes: Sequence[Connection], job: Job) -> int:
    """Send a job's plan to every worker, complete it with their answers, and return how many blocks it came to."""
    plan = await job.planned()
    for pipe in pipes:
        with suppress(BrokenPipeError):  # of a worker that has died, which is heard of below
            pipe.send(plan)
    for rank, pipe in enumerate(pipes):
        try:
            outcomes, is_right = await received(pipe)
        except (EOFError, ConnectionError):
            print(f"rank {rank} has died")
            continue
        planner.complete(outcomes)
        print(f"rank {outcomes.rank}: {plan.direction} of {outcomes.num_moved} blocks, the right bytes: {is_right}")
    return (await job.ended()).num_blocks  # comes too if a worker dies instead of answering


async def received(pipe: Connection) -> tuple[Outcomes, bool]:
    """Return what a worker says; EOFError once it is dead. Cancelled, by Ctrl-C say, it leaves no thread waiting."""
    loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe.fileno(), is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(pipe.fileno())
    answer: tuple[Outcomes, bool] = pipe.recv()
    return answer


async def main(path: str) -> None:
    """Store a prompt's blocks from two processes and load them again."""
    tiers = [{"medium": "cpu", "capacity": "64MiB"}, {"medium": "nvme", "path": path, "capacity": "256MiB"}]
    model = ModelIdentity("my-model", weights="sha256:1f6b...")
    async with TieredKV(tiers, model=model, layout=LAYOUT, shard=Shard.every(RANKS)) as kv:
        planner, pipes = kv.planner(), []
        for rank in range(RANKS):
            ours, theirs = mp.get_context("spawn").Pipe()
            process = mp.get_context("spawn").Process(target=work, args=(rank, planner.slabs(), theirs), daemon=True)
            process.start()
            theirs.close()  # else its end would never be heard of: this process would hold the other side open
            planner.register_worker(rank=rank, pid=process.pid)
            pipes.append(ours)

        stored = await execute(planner, pipes, planner.plan_store(KEYS, BLOCKS))
        print(f"stored {stored} blocks")
        await kv.flush()  # as far as the disk
        print(f"found {(await kv.lookup(KEYS)).by_tier}")
        loaded = await execute(planner, pipes, planner.plan_load(KEYS, BLOCKS))
        print(f"loaded {loaded} blocks")
        for pipe in pipes:
            with suppress(BrokenPipeError):
                pipe.send(None)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as path:
        asyncio.run(main(path))
