"""Processes that the tests of dying start and kill: forked from one that has imported all there is, so in no time."""

import asyncio
import multiprocessing as mp
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

import tiered_kv.cache.worker
from tests.support.any_layout import MODEL, SMALL, STRIDE, AnyEngine, prompt
from tests.support.caches import a_while
from tiered_kv import (
    BackendUnavailableError,
    BlockCache,
    BlockKeys,
    ConfigurationError,
    GPULoadStoreSpec,
    Job,
    JobResult,
    ModelIdentity,
    Outcomes,
    Plan,
    Shard,
    SlabHandle,
    TieredKV,
    TieredKVError,
    TieredKVSettings,
    Worker,
)
from tiered_kv.host.serve import run
from tiered_kv.memory.caches import PagedCaches
from tiered_kv.transfers import engine_memory

RANKS = (Shard(0, 2), Shard(1, 2))
"""Of an engine whose workers are processes of their own."""
MOST_UNHEARD = 16
"""Prompts that a process has settled and nobody has heard of: the disk has room for them all."""
Said = tuple[int, int, Path]
"""A worker: its rank, its process, and where it listens."""

FORKING = mp.get_context("forkserver")
"""Starts processes in no time; there is one for all tests."""
FORKING.set_forkserver_preload([__name__])


class Started:
    """A process, and what it says."""

    def __init__(self, process: Any, said: Connection) -> None:  # noqa: ANN401 - of the context's class
        self._process = process
        self._said = said

    def hear(self) -> Any:  # noqa: ANN401 - whatever it says
        """Wait for the next thing that it says."""
        return self._said.recv()

    def say(self, what: object) -> None:
        """Tell it something, if it is there."""
        with suppress(OSError):
            self._said.send(what)

    @property
    def pid(self) -> int:
        """Its number."""
        pid: int = self._process.pid
        return pid

    def heard(self) -> list[Any]:
        """Return what it has said and nobody has heard yet, also after its end."""
        said = []
        with suppress(EOFError, ConnectionResetError):
            while self._said.poll():
                said.append(self._said.recv())
        return said

    def send(self, which: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self._process.pid, which)

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self._process.kill()
        self._process.join()

    def join(self) -> int | None:
        """Wait for its end; return its exit code."""
        self._process.join()
        code: int | None = self._process.exitcode
        return code


@contextmanager
def started(work: Callable[..., None], *args: object, **how: object) -> Iterator[Started]:
    """Have a process do ``work(connection, *args, **how)``; it is killed in the end."""
    ours, theirs = FORKING.Pipe()
    process = FORKING.Process(target=work, args=(theirs, *args), kwargs=how, daemon=True)
    process.start()
    theirs.close()
    one = Started(process, ours)
    try:
        yield one
    finally:
        one.kill()
        ours.close()


def server(tell: Connection, path: Path, *, disk: str = "8MiB", num_blocks: int = 64, **host: object) -> None:
    """Serve a CPU tier and a disk at ``path``; say when it is ready."""
    settings = TieredKVSettings(
        tiers=[
            {"medium": "cpu", "capacity": num_blocks * STRIDE},
            # What was stored last is there: other policies know better.
            {"medium": "nvme", "path": path / "disk", "capacity": disk, "num_threads": 2, "policy": "lru"},
        ],
        limits={"window": 4 * STRIDE, "bounce": 16 * STRIDE},
        host={"socket": path / "kv.sock", **host},
    )
    is_written = run(settings, ready=lambda: tell.send("ready"))
    os._exit(not is_written)  # as a command does, which has no threads of a test's to wait for


def storing_client(
    tell: Connection, path: Path, seed: int, model: ModelIdentity = MODEL, most_unheard: int = sys.maxsize
) -> None:
    """Store and load prompts without end, by plans every other one; say the seed of each that is on the disk.

    It goes on while fewer are ``most_unheard``, as it is said how many were heard.
    """
    asyncio.run(_store_for_ever(tell, path, seed, model, most_unheard))


def planning_client(
    tell: Connection, path: Path, seed: int, model: ModelIdentity, settled: Sequence[int], crew: Sequence[Said]
) -> None:
    """Load the prompts that are ``settled``, then store and load without end; say the seed of each that is on the disk.

    Plans are carried out by `rank_worker`s. This process is told how many seeds were heard, and goes on; and who takes
    the place of a worker that has ended.
    """
    asyncio.run(_plan_for_ever(tell, path, seed, model, settled, crew))


def rank_worker(tell: Connection, path: Path, rank: int) -> None:
    """Carry out plans of whichever planner connects at ``path``, one after the other; say when that can be."""
    engine, moving = AnyEngine(), None
    pools: set[str] = set()
    with Listener(os.fspath(path)) as listener:
        tell.send("ready")
        while True:
            with listener.accept() as line, suppress(EOFError, ConnectionError):
                while True:
                    slabs, plan, keys = line.recv()
                    blocks = range(8) if plan.direction == "store" else range(8, 16)
                    if plan.direction == "store":
                        engine.fill(keys, blocks, f"rank {rank}")
                    else:
                        engine.wipe()
                    try:
                        if moving is None:
                            moving = Worker(slabs, layout=SMALL, rank=rank, device="cpu")
                            moving.register_kv_caches(engine.caches[0])
                        elif pools != {slab.pool for slab in slabs}:
                            moving.attach(slabs)
                        pools = {slab.pool for slab in slabs}
                        outcomes = moving.execute(plan)
                    except TieredKVError as error:  # the server has gone, or another is there
                        outcomes = Outcomes(plan.job, rank, 0, str(error))
                    line.send((outcomes, engine.count_right(keys, blocks, f"rank {rank}")))


def prompt_of(seed: int) -> BlockKeys:
    """Return the keys of a prompt of 8 blocks: of as many prompts as there are numbers."""
    return prompt(8, seed=seed % 4096, salt=str(seed // 4096))


def stuck_client(tell: Connection, path: Path, keys: BlockKeys) -> None:
    """Store, say when half of a slot is written, and get no further."""

    def gather_blocks(caches: PagedCaches, pages: object, rows: Tensor, slots: NDArray[np.int64], **_: object) -> None:
        rows[int(slots[0]), : rows.shape[1] // 2] = -1
        tell.send("stuck")
        threading.Event().wait()

    async def store() -> None:
        engine = AnyEngine()
        async with TieredKV.connect(f"unix://{path}", model=MODEL, layout=SMALL, device="cpu") as kv:
            kv.register_kv_caches(engine.caches[0])
            await kv.store(keys, engine.fill(keys, range(len(keys))))

    vars(engine_memory)["gather_blocks"] = gather_blocks
    asyncio.run(store())


def planner(tell: Connection, path: Path, worker_pid: int, keys: BlockKeys, *, binds: bool) -> None:
    """Plan a store that a worker in another process carries out; say what memory it needs and the plan, then wait.

    If it ``binds`` the plan once that is there, the server does not come to know: what tells it has no turn any more.
    """

    async def plan() -> None:
        engine = AnyEngine()
        async with TieredKV.connect(f"unix://{path}", model=MODEL, layout=SMALL, device="cpu") as kv:
            kv.planner().register_worker(pid=worker_pid)
            blocks = engine.spec(range(len(keys)))
            job = kv.planner().plan_store(keys, None if binds else blocks)
            plan = await job.planned()
            tell.send((kv.planner().slabs(), job.bind(blocks) if binds else plan))
            threading.Event().wait()

    asyncio.run(plan())


def flooding(tell: Connection, path: Path, num_connections: int) -> None:
    """Once it is told to, connect to a server so often, without a word; say when that is done, and stay."""
    tell.send("ready")
    tell.recv()
    connections = [socket.socket(socket.AF_UNIX) for _ in range(num_connections)]
    for each in connections:
        each.connect(os.fspath(path))
    tell.send("connected")
    threading.Event().wait()


def worker(tell: Connection, keys: BlockKeys, *, gets_stuck: bool) -> None:
    """Compute a prompt's blocks, and carry out plans; or say when half of a slot is written, and get no further."""

    def gather_blocks(caches: PagedCaches, pages: object, rows: Tensor, slots: NDArray[np.int64]) -> None:
        rows[int(slots[0]), : rows.shape[1] // 2] = -1
        tell.send("stuck")
        threading.Event().wait()

    if gets_stuck:
        vars(tiered_kv.cache.worker)["gather_blocks"] = gather_blocks
    engine = AnyEngine()
    engine.fill(keys, range(len(keys)))
    slabs, plan = tell.recv()
    with Worker(slabs, layout=SMALL, device="cpu") as moving:
        moving.register_kv_caches(engine.caches[0])
        while True:
            tell.send(moving.execute(plan))
            slabs, plan = tell.recv()
            moving.attach(slabs)


async def _store_for_ever(tell: Connection, path: Path, seed: int, model: ModelIdentity, most_unheard: int) -> None:
    engine, num_unheard = AnyEngine(), 0
    async with TieredKV.connect(f"unix://{path}", model=model, layout=SMALL, device="cpu", timeout_s=3.0) as kv:
        kv.register_kv_caches(engine.caches[0])
        planned = _Planned(kv, engine)
        while True:
            keys = prompt_of(seed)
            if seed % 2:
                await planned.store(keys)
            else:
                await kv.store(keys, engine.fill(keys, range(8)))
            with suppress(BackendUnavailableError):
                await kv.flush()
                if all("nvme" in block.in_tiers for block in await kv.explain(keys)):
                    tell.send(seed)
                    num_unheard += 1
            while num_unheard >= most_unheard:
                num_unheard -= await asyncio.to_thread(tell.recv)
            loaded = await planned.load(keys) if seed % 2 else await kv.load(keys, engine.spec(range(8, 16)))
            assert loaded.num_blocks <= engine.count_right(keys, range(8, 16))
            seed += 1


async def _plan_for_ever(
    tell: Connection, path: Path, seed: int, model: ModelIdentity, settled: Sequence[int], crew: Sequence[Said]
) -> None:
    async with TieredKV.connect(
        f"unix://{path}", model=model, layout=SMALL, shard=RANKS, device="cpu", timeout_s=3.0
    ) as kv:
        ranks = _Ranks(kv, tell, crew)
        for old in settled:
            while await ranks.load(prompt_of(old)) < 8:  # a worker may have ended, or the server
                await a_while()
        with suppress(BackendUnavailableError):
            await kv.clear()  # what is said is there from here on
        while True:
            keys = prompt_of(seed)
            await ranks.store(keys)
            with suppress(BackendUnavailableError):
                await kv.flush()
                if all("nvme" in block.in_tiers for block in await kv.explain(keys)):
                    await ranks.say(seed)
            await ranks.load(keys)
            with suppress(BackendUnavailableError):
                await kv.evict(prompt_of(seed - 2 * MOST_UNHEARD))
            seed += 1


class _Ranks:
    """The workers of a planner, each at the end of a line."""

    def __init__(self, kv: BlockCache, tell: Connection, crew: Sequence[Said]) -> None:
        self._planner = kv.planner()
        self._tell = tell
        self._lines: dict[int, Connection] = {}
        self._num_unheard = 0
        for each in crew:
            self._take(each)

    async def store(self, keys: BlockKeys) -> int:
        """Store a prompt from the first blocks of each."""
        return await self._carry_out(self._planner.plan_store, keys, range(8))

    async def load(self, keys: BlockKeys) -> int:
        """Load a prompt into the blocks after these; return how many blocks there are."""
        return await self._carry_out(self._planner.plan_load, keys, range(8, 16))

    async def say(self, seed: int) -> None:
        """Say what is on the disk, and wait while too little of that was heard."""
        self._tell.send(seed)
        self._num_unheard += 1
        while self._num_unheard >= MOST_UNHEARD:
            self._take(await asyncio.to_thread(self._tell.recv))

    async def _carry_out(self, begin: Callable[..., Job], keys: BlockKeys, blocks: range) -> int:
        while self._tell.poll():
            self._take(self._tell.recv())
        try:
            job = begin(keys, GPULoadStoreSpec(blocks))
        except ConfigurationError:  # a worker has ended: who takes its place comes to be said
            self._take(await asyncio.to_thread(self._tell.recv))
            return 0
        plan = await job.planned()
        right = [8]
        if plan.moves:
            asked = (asyncio.to_thread(self._ask, rank, plan, keys) for rank in self._lines)
            right += await asyncio.gather(*asked)
        result = await job.ended()
        assert plan.direction == "store" or result.num_blocks <= min(right)
        return result.num_blocks

    def _ask(self, rank: int, plan: Plan, keys: BlockKeys) -> int:
        """Have one carry out its part, and say so; return how many blocks are right there."""
        try:
            self._lines[rank].send((self._planner.slabs(), plan, keys))
            outcomes, num_right = self._lines[rank].recv()
        except (EOFError, ConnectionError):  # it has ended, which the job notices by itself
            return 8
        self._planner.complete(outcomes)
        return int(num_right)

    def _take(self, said: Said | int) -> None:
        if isinstance(said, int):
            self._num_unheard -= said
            return
        rank, pid, path = said
        self._lines[rank] = Client(os.fspath(path))
        self._planner.register_worker(rank=rank, pid=pid)


class _Planned:
    """Stores and loads by plans, which a worker in this process carries out; the next server's memory is attached."""

    def __init__(self, kv: BlockCache, engine: AnyEngine) -> None:
        self._planner = kv.planner()
        self._planner.register_worker()
        self._engine = engine
        self._slabs: Sequence[SlabHandle] = ()
        self._worker: Worker | None = None

    async def store(self, keys: BlockKeys) -> JobResult:
        """Store a prompt from the first blocks on."""
        return await self._carry_out(self._planner.plan_store(keys, self._engine.fill(keys, range(8))))

    async def load(self, keys: BlockKeys) -> JobResult:
        """Load a prompt into the blocks after these."""
        return await self._carry_out(self._planner.plan_load(keys, self._engine.spec(range(8, 16))))

    async def _carry_out(self, job: Job) -> JobResult:
        plan = await job.planned()
        if plan.moves:
            try:
                outcomes = self._attached().execute(plan)
            except TieredKVError as error:  # the server has gone, or another is there
                outcomes = Outcomes(plan.job, 0, 0, str(error))
            self._planner.complete(outcomes)
        return await job.ended()

    def _attached(self) -> Worker:
        slabs = self._planner.slabs()
        if self._worker is None:
            self._worker = Worker(slabs, layout=SMALL, device="cpu")
            self._worker.register_kv_caches(self._engine.caches[0])
        elif slabs is not self._slabs:
            self._worker.attach(slabs)
        self._slabs = slabs
        return self._worker
