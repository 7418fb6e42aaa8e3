"""Processes that the tests of dying start and kill: forked from one that has imported all there is, so in no time."""

import asyncio
import multiprocessing as mp
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

import tiered_kv.cache.worker
from tests.support.any_layout import MODEL, SMALL, STRIDE, AnyEngine, prompt
from tiered_kv import (
    BackendUnavailableError,
    BlockCache,
    BlockKeys,
    Job,
    JobResult,
    Outcomes,
    SlabHandle,
    TieredKV,
    TieredKVError,
    TieredKVSettings,
    Worker,
)
from tiered_kv.host.serve import run
from tiered_kv.memory.caches import PagedCaches
from tiered_kv.transfers import engine_memory

_starting = mp.get_context("forkserver")
_starting.set_forkserver_preload([__name__])


class Started:
    """A process, and what it says."""

    def __init__(self, process: Any, said: Connection) -> None:  # noqa: ANN401 - of the context's class
        self._process = process
        self._said = said

    def hear(self) -> Any:  # noqa: ANN401 - whatever it says
        """Wait for the next thing that it says."""
        return self._said.recv()

    def say(self, what: object) -> None:
        """Tell it something."""
        self._said.send(what)

    @property
    def pid(self) -> int:
        """Its number."""
        pid: int = self._process.pid
        return pid

    def heard(self) -> list[Any]:
        """Return what it has said and nobody has heard yet, also after its end."""
        said = []
        with suppress(EOFError):
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
    ours, theirs = _starting.Pipe()
    process = _starting.Process(target=work, args=(theirs, *args), kwargs=how, daemon=True)
    process.start()
    theirs.close()
    one = Started(process, ours)
    try:
        yield one
    finally:
        one.kill()
        ours.close()


def server(tell: Connection, path: Path) -> None:
    """Serve a CPU tier and a disk at ``path``; say when it is ready."""
    settings = TieredKVSettings(
        tiers=[
            {"medium": "cpu", "capacity": 64 * STRIDE},
            {"medium": "nvme", "path": path / "disk", "capacity": "8MiB", "num_threads": 2},
        ],
        limits={"window": 4 * STRIDE, "bounce": 16 * STRIDE},
        host={"socket": path / "kv.sock"},
    )
    is_written = run(settings, ready=lambda: tell.send("ready"))
    os._exit(not is_written)  # as a command does, which has no threads of a test's to wait for


def storing_client(tell: Connection, path: Path, seed: int) -> None:
    """Store and load prompts without end, by plans every other one; say the seed of each that is on the disk."""
    asyncio.run(_store_for_ever(tell, path, seed))


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
    """Connect to a server so often, without a word; say when that is done, and stay."""
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


async def _store_for_ever(tell: Connection, path: Path, seed: int) -> None:
    engine = AnyEngine()
    async with TieredKV.connect(f"unix://{path}", model=MODEL, layout=SMALL, device="cpu") as kv:
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
            loaded = await planned.load(keys) if seed % 2 else await kv.load(keys, engine.spec(range(8, 16)))
            assert loaded.num_blocks <= engine.count_right(keys, range(8, 16))
            seed += 1


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
