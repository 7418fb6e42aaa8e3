"""An open NVMe tier of one model, with blocks by number: what the tests of this backend are written with."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiered_kv.media.backend import BackendContext, Block, Outcome, RecordShape, Recovered
from tiered_kv.media.record import verify
from tiered_kv.testing import block_names, make_block, open_context
from tiered_kv.testing.helpers import ended
from tiered_kv.values.keys import BlockKey, Namespace
from tiered_kv_backends.nvme import NVMeBackend
from tiered_kv_backends.nvme.disks import Member, look_into

T = TypeVar("T")
PAYLOAD = 60_000
STRIDE = RecordShape(b"", PAYLOAD).stride_bytes
MIB = 1 << 20


def shape_of(model: str) -> RecordShape:
    """Return the records of a model."""
    return RecordShape(hashlib.sha256(model.encode()).digest(), PAYLOAD)


def key_of(n: int, model: str = "a") -> BlockKey:
    """Return the ``n``-th key of a model."""
    return BlockKey(Namespace(shape_of(model).fingerprint, bytes(32)), hashlib.sha256(b"%d" % n).digest())


def content_of(n: int) -> bytes:
    """Return what block ``n`` holds."""
    return np.random.default_rng(n).bytes(PAYLOAD)


def backend_at(path: Path | tuple[Path, ...], **settings: object) -> NVMeBackend:
    """Return a tier of 4 MiB, unless settings say otherwise."""
    return NVMeBackend(NVMeBackend.Settings.model_validate({"path": path, "capacity": 4 * MIB, **settings}))


class Tier:
    """An open tier of one model, and blocks of it by number."""

    def __init__(self, backend: NVMeBackend, found: Recovered, model: str) -> None:
        self.backend = backend
        self.found = found
        self.model = model

    async def write(self, blocks: dict[int, int]) -> list[Outcome]:
        """Write ``{slot: n}``."""
        keys = [key_of(n, self.model) for n in blocks.values()]
        records = [make_block(content_of(n), key) for n, key in zip(blocks.values(), keys, strict=True)]
        return await self.backend.write(0, slots_of(blocks), block_names(keys), records)

    async def verified(self, blocks: dict[int, int]) -> list[Outcome]:
        """Read ``{slot: n}`` and verify each as the cache does; check that no other bytes pass."""
        into = [Block.empty(PAYLOAD) for _ in blocks]
        outcomes = await self.backend.read(0, slots_of(blocks), into)
        for i, (n, block) in enumerate(zip(blocks.values(), into, strict=True)):
            if outcomes[i] is Outcome.HIT:
                outcomes[i] = verify(key_of(n, self.model), block)
            assert outcomes[i] is not Outcome.HIT or bytes(block.payload) == content_of(n)
        return outcomes

    def recovered(self, num_blocks: int) -> dict[int, int]:
        """Return ``{slot: n}`` of what was there when it was opened, if it is among the first so many."""
        numbers = {block_names([key_of(n, self.model)]).tobytes(): n for n in range(num_blocks)}
        slots = self.found.slots.tolist()
        return {slot: numbers[name.tobytes()] for name, slot in zip(self.found.names, slots, strict=True)}


def slots_of(slots: dict[int, int]) -> NDArray[np.int64]:
    """Return the slots of ``{slot: n}``."""
    return np.array(list(slots), np.int64)


@asynccontextmanager
async def open_tier(path: Path | tuple[Path, ...], model: str = "a", **settings: object) -> AsyncIterator[Tier]:
    """Yield a tier of one model."""
    backend = backend_at(path, **settings)
    with open_context(shape_of(model)) as context:
        (found,) = await backend.open(context)
        try:
            yield Tier(backend, found, model)
        finally:
            await backend.aclose()


def slab_of(path: Path, model: str = "a") -> Path:
    """Return where a model's records are."""
    return path / shape_of(model).fingerprint.hex() / "slab"


def read_member(path: Path) -> Member:
    """Return what a directory says of itself; one that says nothing readable is new."""
    return look_into(path)[0] or Member()


def disk_usage(path: Path) -> int:
    """Return what ``du`` says, in bytes."""
    return sum(file.lstat().st_blocks * 512 for file in (path, *path.rglob("*")))


def count_up(num_blocks: int) -> dict[int, int]:
    """Return block ``n`` in slot ``n``."""
    return {n: n for n in range(num_blocks)}


def ledger_of(path: Path, model: str = "a") -> Path:
    """Return where it is written down which record is where."""
    return slab_of(path, model).with_name("ledger")


class AdverseThreads:
    """`Workers` that run calls when the test says so: of several threads' calls the last one first."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self.calls: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []

    def run(self, function: Callable[..., T], *args: object) -> "asyncio.Future[T]":
        """Remember the call."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.calls.append((lambda: function(*args), future))
        return future

    def begin_each(self, calls: Sequence[Callable[[], T]], then: Callable[[Callable[[], list[T]]], object]) -> None:
        """Remember the calls."""
        asyncio.ensure_future(ended(*[self.run(call) for call in calls])).add_done_callback(
            lambda each: then(each.result)
        )

    def step(self) -> None:
        """Make one call, if there is one."""
        if self.calls:
            call, future = self.calls.pop(0 if self._num_threads == 1 else -1)
            future.set_result(call())


class AdversePools:
    """All threads of a tier."""

    def __init__(self) -> None:
        self._pools: list[AdverseThreads] = []

    def context(self) -> BackendContext:
        """Return what to open a tier with."""

        def workers(num_threads: int) -> AdverseThreads:
            self._pools.append(AdverseThreads(num_threads))
            return self._pools[-1]

        return BackendContext((shape_of("a"),), workers, time.monotonic)

    async def begin(self, call: Coroutine[Any, Any, T]) -> "tuple[asyncio.Task[T], int]":
        """Begin a call; return it, and how many calls threads have to make for it."""
        before = self._num_calls()
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0)
        return task, self._num_calls() - before

    async def end(self, *calls: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> list[Any]:
        """Begin calls in this order, and make those of threads until all have ended."""
        tasks = []
        for call in calls:
            tasks.append(asyncio.ensure_future(call))
            await asyncio.sleep(0)
        while not all(task.done() for task in tasks):
            for pool in self._pools:
                pool.step()
            await asyncio.sleep(0)
        return [task.result() for task in tasks]

    def _num_calls(self) -> int:
        return sum(len(pool.calls) for pool in self._pools)
