"""Keys, blocks and threads to try a backend with."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar
from weakref import WeakSet

import numpy as np

from tiered_kv.media.backend import Backend, BackendContext, Block, RecordShape, SlotBackend
from tiered_kv.media.record import encode
from tiered_kv.values.keys import BlockKey, Names, Namespace, epoch_digest
from tiered_kv.values.specs import FileLoadStoreSpec, LoadStoreSpec

T = TypeVar("T")
AnyBackend = TypeVar("AnyBackend", bound=Backend | SlotBackend)
_OPEN: WeakSet[Backend | SlotBackend] = WeakSet()

GROUPS = tuple(
    RecordShape(
        hashlib.sha256(b"a test's KV group of %d bytes" % payload_bytes).digest(),
        payload_bytes,
        slots_per_block=slots_per_block,
    )
    for payload_bytes, slots_per_block in ((4096, 1.0), (1, 0.25), (4095, 1.0), (4097, 0.5), (100_001, 1.0))
)
"""The records that the conformance tests use: KV groups of whole pages and of odd sizes, some with fewer slots."""


def block_key(n: int, group: int = 0) -> BlockKey:
    """Return the ``n``-th key of one of `GROUPS`, always the same."""
    namespace = Namespace(GROUPS[group].fingerprint, epoch_digest("a test's weights"))
    return BlockKey(namespace, hashlib.sha256(b"a test's block %d" % n).digest())


def block_names(keys: Sequence[BlockKey]) -> Names:
    """Return the names, ``(n, 4)``, that the catalog gives to keys."""
    names = [np.frombuffer(key.hash, np.uint64) ^ key.namespace.mask for key in keys]
    return np.array(names, np.uint64).reshape(-1, 4)


def make_block(content: bytes, key: BlockKey | None = None) -> Block:
    """Return a whole record, read-only as a backend gets it: a block of ``content`` with the header for ``key``."""
    block = Block.empty(len(content))
    block.payload[:] = content
    encode(key or block_key(0), block)
    return block.read_only()


def records_in_files(spec: LoadStoreSpec) -> list[bytes]:
    """Read what a `FileLoadStoreSpec` says."""
    if not isinstance(spec, FileLoadStoreSpec):
        raise NotImplementedError(f"define records_at: how {type(spec).__name__} is read is this medium's to say")
    records = []
    for path, offset, length in spec.places():
        with Path(path).open("rb") as file:
            file.seek(offset)
            records.append(file.read(length))
    return records


async def ended(*calls: "asyncio.Future[T]") -> list[T]:
    """Return what calls have returned, when all of them have ended; raise what one raised."""
    await asyncio.wait(calls)
    return [call.result() for call in calls]


class ThreadWorkers:
    """`Workers` that are threads; `close` waits for them."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads)

    def run(self, function: Callable[..., T], *args: object) -> "asyncio.Future[T]":
        """Run ``function(*args)`` in one of the threads, from now on.

        Raises:
            RuntimeError: The threads have ended.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()  # not the executor's: to cancel that may stop the call
        self._threads.submit(function, *args).add_done_callback(
            lambda call: loop.call_soon_threadsafe(_settle, future, call)
        )
        return future

    def begin_each(self, calls: Sequence[Callable[[], T]], then: Callable[[Callable[[], list[T]]], object]) -> None:
        """See `Workers.begin_each`."""
        asyncio.ensure_future(ended(*(self.run(call) for call in calls))).add_done_callback(
            lambda each: then(each.result)
        )

    def close(self) -> None:
        """End the threads after the calls they have got."""
        self._threads.shutdown()


def _settle(future: "asyncio.Future[T]", call: Future[T]) -> None:
    if future.done():  # its task was cancelled
        return
    if (error := call.exception()) is None:
        future.set_result(call.result())
    else:
        future.set_exception(error)


@contextmanager
def open_context(*groups: RecordShape) -> Iterator[BackendContext]:
    """Yield what a backend is opened with, `GROUPS` unless others are given; its threads end after it."""
    pools: list[ThreadWorkers] = []

    def workers(num_threads: int) -> ThreadWorkers:
        pools.append(ThreadWorkers(num_threads))
        return pools[-1]

    try:
        yield BackendContext(groups or GROUPS, workers, time.monotonic)
    finally:
        for pool in pools:
            pool.close()


@asynccontextmanager
async def open_backend(backend: AnyBackend, *groups: RecordShape) -> AsyncIterator[AnyBackend]:
    """Yield ``backend``, opened for `GROUPS` or the groups given; close it, if it still is open, and its threads."""
    with open_context(*groups) as context:
        await backend.open(context)
        _OPEN.add(backend)
        try:
            yield backend
        finally:
            if backend in _OPEN:
                await close_backend(backend)


async def longest_stall(call: Awaitable[object]) -> float:
    """Make a call; return for how many seconds it held up the event loop at most."""
    loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
    longest, last = 0.0, loop.time()

    async def beat() -> None:
        nonlocal longest, last
        while not has_ended.is_set():
            await asyncio.sleep(0.01)
            longest, last = max(longest, loop.time() - last), loop.time()

    beating = asyncio.ensure_future(beat())
    try:
        await call
        return max(longest, loop.time() - last)
    finally:
        has_ended.set()
        await beating


async def close_backend(backend: Backend | SlotBackend) -> None:
    """Close what `open_backend` has opened before its end: a backend is closed once."""
    _OPEN.discard(backend)
    await backend.aclose()
