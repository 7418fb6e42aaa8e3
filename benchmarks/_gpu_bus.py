"""What the parts of ``gpu.py`` move between the engine's cache and the host, and how it is timed."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiered_kv import KVGroup
from tiered_kv.memory import Device, HostSlab, PagedCaches, Stream, crossover, gather_blocks, scatter_blocks
from tiered_kv.memory.host import PageLockState
from tiered_kv.values.loop_calls import LoopCalls

Ids = NDArray[np.int64]
Copies = Sequence[Callable[[], object]]

WINDOW_BYTES = 16 << 20
"""One call's worth, as the cache moves it."""


@dataclass(frozen=True)
class Setup:
    """A paged cache on the device and host slots for as many blocks.

    Attributes:
        group: What a block is.
        tensors: The engine's, one a layer.
        caches: Over ``tensors``.
        pinned: Host slots, page-locked where the device has that.
        pageable: As many that are not.
        windows: Blocks' pages ``(n,)`` in random order, and slots ``(n,)`` as they lie, of each call.
    """

    group: KVGroup
    tensors: list[Tensor]
    caches: PagedCaches
    pinned: Tensor
    pageable: Tensor
    windows: list[tuple[Ids, Ids]]
    is_pinned: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of all windows."""
        return len(self.pinned) * self.group.payload_bytes

    @property
    def halves(self) -> tuple[list[tuple[Ids, Ids]], list[tuple[Ids, Ids]]]:
        """Windows for two directions at once, which share no block."""
        half = len(self.windows) // 2 or 1
        return self.windows[:half], self.windows[half:] or self.windows

    def stores(self, rows: Tensor, windows: Sequence[tuple[Ids, Ids]] | None = None) -> Copies:
        """Return our copies out of the engine's cache."""
        windows = self.windows if windows is None else windows
        return [partial(gather_blocks, self.caches, pages, rows, slots) for pages, slots in windows]

    def loads(self, rows: Tensor, windows: Sequence[tuple[Ids, Ids]] | None = None) -> Copies:
        """Return our copies into the engine's cache."""
        windows = self.windows if windows is None else windows
        return [partial(scatter_blocks, rows, slots, self.caches, pages) for pages, slots in windows]

    def ways(self) -> list[crossover.Way]:
        """Return the ways there are over this device's bus; `stores` and `loads` take what was measured to be best."""
        by_kernel = crossover.kernel_way(self.caches.torch_device)
        return [crossover.STAGING, crossover.DIRECTLY, *([] if by_kernel is None else [by_kernel])]

    def stores_by(self, way: crossover.Way) -> Copies:
        """Return the copies out of the engine's cache in one way."""
        return [partial(way.gather, self.caches, pages[:, None], self.pinned, slots) for pages, slots in self.windows]

    def loads_by(self, way: crossover.Way) -> Copies:
        """Return the reverse."""
        return [partial(way.scatter, self.pinned, slots, self.caches, pages[:, None]) for pages, slots in self.windows]

    def stores_by_layer(self, way: crossover.Way | None = None) -> Copies:
        """Return copies of all blocks out of the engine's cache, a copy a layer: ours, or in one way."""
        pages, slots = self._all
        if way is None:
            return [
                partial(gather_blocks, self.caches, pages, self.pinned, slots, layers=each) for each in self._layers
            ]
        parts = [self.caches.of_layers(each) for each in self._layers]
        return [partial(way.gather, part, pages[:, None], self.pinned, slots) for part in parts]

    def loads_by_layer(self, way: crossover.Way | None = None) -> Copies:
        """Return the reverse."""
        pages, slots = self._all
        if way is None:
            return [
                partial(scatter_blocks, self.pinned, slots, self.caches, pages, layers=each) for each in self._layers
            ]
        parts = [self.caches.of_layers(each) for each in self._layers]
        return [partial(way.scatter, self.pinned, slots, part, pages[:, None]) for part in parts]

    @property
    def _all(self) -> tuple[Ids, Ids]:
        pages, slots = (np.concatenate(each) for each in zip(*self.windows, strict=True))
        return pages, slots

    @property
    def _layers(self) -> list[slice]:
        return [slice(layer, layer + 1) for layer in range(self.group.num_layers)]


def engine_tensors(group: KVGroup, num_blocks: int, where: torch.device) -> tuple[list[Tensor], str]:
    """Return an engine's tensors, one a layer, of random bytes, and the names of their axes."""
    n, h, d = group.page_size, group.num_kv_heads, group.head_dim
    is_mla = group.order == "MLA"
    shape = (num_blocks, n, d) if is_mla else (2, num_blocks, n, h, d)
    dtype = getattr(torch, group.dtype)
    chance = torch.Generator(where)  # the GPU's own is refused while another thread captures a graph
    make = partial(torch.randint, 0, 256) if dtype is torch.uint8 else torch.randn
    tensors = [make(shape, device=where, dtype=dtype, generator=chance) for _ in range(group.num_layers)]
    return tensors, "BND" if is_mla else "PBNHD"


@contextmanager
def set_up(group: KVGroup, num_blocks: int, device: Device) -> Iterator[Setup]:
    """Allocate everything, filled with random bytes, and let go of it again."""
    tensors, axes = engine_tensors(group, num_blocks, device.torch_device)
    caches = PagedCaches.bind(tensors, group, axes=axes, device=device)
    crossover.prepare(caches, device)
    slab = HostSlab(num_blocks, group.stride_bytes, group.payload_bytes, name="benchmark")
    locking = device.page_lock(slab)
    state = locking.wait()
    pageable = torch.zeros(num_blocks, group.stride_bytes // 8, dtype=torch.int64)
    chance = np.random.default_rng(0)
    pages = chance.permutation(num_blocks)
    each = max(1, WINDOW_BYTES // group.stride_bytes)
    windows = [(pages[at : at + each], np.arange(at, min(at + each, num_blocks))) for at in range(0, num_blocks, each)]
    try:
        yield Setup(group, tensors, caches, slab.rows, pageable, windows, state is PageLockState.LOCKED)
    finally:
        device.page_unlock(locking)
        slab.close()


def seconds(*queues: tuple[Stream, Copies], rounds: int = 5) -> float:
    """Return the median time in which all streams do all copies given them, at once."""
    run(*queues)  # warms up
    return median(run(*queues) for _ in range(rounds))


def recorded(where: torch.device | None = None) -> Any:  # noqa: ANN401 - an event, of whatever kind
    """Return an event of the engine's stream as it is now, on a GPU; None on a CPU, where all is done by then."""
    if not torch.cuda.is_available() or (where is not None and where.type != "cuda"):
        return None
    return torch.cuda.current_stream(where).record_event()


def run(*queues: tuple[Stream, Copies]) -> float:
    """Have all streams do all copies given them, at once; return how long it took.

    On a GPU each waits for an event first, recorded just before it, as every transfer of an engine's does.
    """
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    start = time.perf_counter()
    for stream, copies in queues:
        for copy in copies:
            if (after := recorded()) is not None:
                stream.wait(after)
            stream.submit(copy, ended.put)
    errors = [ended.get() for _, copies in queues for _ in copies]
    took_s = time.perf_counter() - start
    for error in errors:
        if error is not None:
            raise error
    return took_s


async def coroutine_latency(stream: Stream, rounds: int) -> tuple[float, float]:
    """Return the median time from an empty copy's submission to the resumed coroutine, and CPU time a copy, in us.

    What is submitted does nothing, so that the first figure is what events, waiter thread and event loop add to a copy.
    """
    loop = asyncio.get_running_loop()
    loop_calls = LoopCalls(loop)

    def submit() -> asyncio.Future[None]:
        future: asyncio.Future[None] = loop.create_future()

        def done(_: BaseException | None) -> None:
            loop_calls.call(future.set_result, None)

        stream.submit(lambda: None, done)
        return future

    spent = []
    for _ in range(rounds):
        start = time.perf_counter()
        await submit()
        spent.append(time.perf_counter() - start)
    started = time.process_time()
    await asyncio.gather(*(submit() for _ in range(rounds)))
    return 1e6 * median(spent), 1e6 * (time.process_time() - started) / rounds


def products_ms(
    where: torch.device, size: int, count: int, *queues: tuple[Stream, Copies]
) -> tuple[float, list[float]]:
    """Return how long the device takes for so many bf16 products, and each stream for its copies meanwhile, in seconds.

    The device's own clock is read. All products are enqueued before the first copy is: Python that enqueues copies has
    the interpreter's lock, and products that wait for that tell nothing of the device. Half as many come first, until
    the copies are under way.
    """
    if where.type == "cpu":
        a, b = (torch.randn(size, size, dtype=torch.bfloat16) for _ in range(2))
        with kept_busy(*queues) as rounds:
            start = time.perf_counter()
            for _ in range(count):
                torch.mm(a, b)
            took_ms = 1e3 * (time.perf_counter() - start)
        return took_ms, [median(each[:-1] or each) for each in rounds]
    stream = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]  # of torch
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # of torch
    with torch.cuda.stream(stream):
        a, b = (torch.randn(size, size, device=where, dtype=torch.bfloat16) for _ in range(2))
        out = torch.mm(a, b)
        stream.synchronize()
        for number in range(count // 2 + count):
            if number == count // 2:
                begin.record(stream)
            torch.mm(a, b, out=out)
        end.record(stream)
    with kept_busy(*queues) as rounds:
        end.synchronize()
    return begin.elapsed_time(end), [
        median(each[:-1] or each) for each in rounds
    ]  # the last round outlasts the products


@contextmanager
def kept_busy(*queues: tuple[Stream, Copies]) -> Iterator[list[list[float]]]:
    """Have the streams do their copies again and again, until the ``with`` block ends; yield the seconds of each."""
    ended = threading.Event()
    rounds: list[list[float]] = [[] for _ in queues]

    def work(stream: Stream, copies: Copies, took_s: list[float]) -> None:
        while not ended.is_set():
            took_s.append(run((stream, copies)))

    threads = [threading.Thread(target=work, args=(*queue, each)) for queue, each in zip(queues, rounds, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield rounds
    finally:
        ended.set()
        for thread in threads:
            thread.join()
