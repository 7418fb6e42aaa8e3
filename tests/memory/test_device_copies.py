"""Copies between a GPU and the host: by way of staging, or fragment by fragment, and which of the two."""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from structlog.testing import capture_logs

from tests.memory.engines import NUM_SLOTS, Engine, engines, places
from tests.support.fake_cuda import fake_cuda
from tiered_kv.memory import (
    CPUDevice,
    CUDADevice,
    PagedCaches,
    crossover,
    device_copies,
    driver,
    gather_blocks,
    host,
    staging,
)
from tiered_kv.memory.host import known_as_locked
from tiered_kv.values.layout import KVGroup

Copy = Callable[..., None]
Ids = NDArray[np.int64]
WAYS: dict[str, tuple[Copy, Copy]] = {
    "staging": (
        partial(device_copies.gather_through_staging, gather=device_copies.gather_by_torch),
        partial(device_copies.scatter_through_staging, scatter=device_copies.scatter_by_torch),
    ),
    "directly": (device_copies.gather_directly, device_copies.scatter_directly),
}


def _has(value: Any, *_: int) -> int:  # noqa: ANN401 - a reference of C
    value._obj.value = 1  # noqa: SLF001 - how ctypes names what it refers to
    return 0


DRIVERS = {
    "no batches": None,
    "batches": SimpleNamespace(cuMemcpyBatchAsync=lambda *_: 0, cuDeviceGetAttribute=_has),
}
"""What `driver.library` may find on the machine of a test, whatever is there: CUDA 12.8 brought batches."""


@pytest.fixture(autouse=True, params=DRIVERS, scope="module")
def libcuda(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run all of these on both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "library", lambda: DRIVERS[request.param])
        yield request.param


@pytest.fixture(autouse=True, scope="module")
def _small_pieces() -> Iterator[None]:
    """Cut into pieces what is small enough for a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "PIECE_BYTES", 8192)
        yield


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=50)
@given(engine=engines(), data=st.data())
def test_both_ways_move_the_same_bytes(way: str, engine: Engine, data: st.DataObject) -> None:
    """In pieces, of all layers or some: what arrives is what the host's own copies bring."""
    gather, scatter = WAYS[way]
    caches = engine.bind()
    first = data.draw(st.integers(0, engine.group.num_layers - 1))
    layers = data.draw(st.sampled_from([None, slice(first, None), slice(first, first + 1)]))
    part = caches.of_layers(layers)
    pages, slots = data.draw(places(engine.group))
    blocks = pages.reshape(len(slots), engine.group.pages_per_block)
    rows = torch.zeros(NUM_SLOTS, engine.group.stride_bytes // 8, dtype=torch.int64)
    expected = rows.clone()
    gather(part, blocks, rows, slots)
    gather_blocks(caches, pages, expected, slots, layers=layers)
    assert torch.equal(rows, expected)

    memory = [each.clone() for each in engine.memory]
    for fragment in part.fragments:
        fragment.pages[torch.from_numpy(pages)] = 0
    scatter(rows, slots, part, blocks)
    assert all(torch.equal(*pair) for pair in zip(engine.memory, memory, strict=True))


def test_padding_of_staged_slots_is_zero() -> None:
    """What lay in a staging buffer before never reaches a slot, and from there a disk."""
    group = KVGroup(1, 1, 9, "uint8", 1, "MLA")
    caches = PagedCaches.bind([torch.ones(4, 1, 9, dtype=torch.uint8)], group, device=CPUDevice())
    rows = torch.full((4, 512), -1)
    WAYS["staging"][0](caches, np.arange(4)[:, None], rows, np.arange(4))
    assert rows.view(torch.uint8)[:, :9].eq(1).all()
    assert not rows.view(torch.uint8)[:, 9:].any()


def test_staged_layers_take_no_more_room_than_they_have() -> None:
    """A staging buffer holds so many blocks of one layer as it has bytes, however long whole blocks are."""
    group = KVGroup(8, 1, 512, "uint8", 1, "MLA")
    tensors = [torch.full((32, 1, 512), layer, dtype=torch.uint8) for layer in range(8)]
    caches = PagedCaches.bind(tensors, group, device=CPUDevice())
    part, rows = caches.of_layers(slice(5, 6)), torch.zeros(32, 512, dtype=torch.int64)
    seen = list[tuple[int, ...]]()

    def gather(caches: PagedCaches, pages: Ids, buffer: torch.Tensor, slots: Ids) -> None:
        seen.append(tuple(buffer.shape))
        device_copies.gather_by_torch(caches, pages, buffer, slots)

    device_copies.gather_through_staging(part, np.arange(32)[:, None], rows, np.arange(32), gather)
    assert seen == [(16, 64)] * 2  # of 8 KiB each
    found = rows.view(torch.uint8)
    assert found[:, 5 * 512 : 6 * 512].eq(5).all()
    assert not found[:, : 5 * 512].any()
    assert not found[:, 6 * 512 :].any()


@pytest.mark.parametrize("num_layers", [1, 5])
def test_blocks_larger_than_a_buffer_go_through_in_layers(num_layers: int) -> None:
    """A few at a time, in buffers of the size there is; what is one layer alone gets a larger one."""
    group = KVGroup(5, 1, 4000, "uint8", 1, "MLA")
    tensors = [torch.full((4, 1, 4000), layer, dtype=torch.uint8) for layer in range(1, 6)]
    caches = PagedCaches.bind(tensors, group, device=CPUDevice()).of_layers(slice(num_layers))
    rows, seen = torch.zeros(4, group.stride_bytes // 8, dtype=torch.int64), list[tuple[int, ...]]()

    def gather(caches: PagedCaches, pages: Ids, buffer: torch.Tensor, slots: Ids) -> None:
        seen.append(tuple(buffer.shape))
        device_copies.gather_by_torch(caches, pages, buffer, slots)

    pages = slots = np.arange(4)
    device_copies.gather_through_staging(caches, pages[:, None], rows, slots, gather)
    assert all(8 * n * words <= 8192 for n, words in seen)
    assert len(seen) == (2 if num_layers == 1 else 10)  # 2 of one layer, twice 4 of two
    expected = torch.arange(1, 1 + num_layers, dtype=torch.uint8).repeat_interleave(4000)
    assert (rows.view(torch.uint8)[:, : len(expected)] == expected).all()
    for tensor in tensors:
        tensor.zero_()
    WAYS["staging"][1](rows, slots, caches, pages[:, None])
    assert [int(tensor.min()) for tensor in tensors] == [*range(1, 1 + num_layers), *[0] * (5 - num_layers)]


def test_slots_that_only_their_padding_makes_too_large_go_through_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers would fit a buffer, but not as whole slots: they go in two parts."""
    monkeypatch.setattr(staging, "PIECE_BYTES", 9008)
    group = KVGroup(2, 1, 4400, "uint8", 1, "MLA")
    tensors = [torch.full((3, 1, 4400), layer, dtype=torch.uint8) for layer in (1, 2)]
    caches = PagedCaches.bind(tensors, group, device=CPUDevice())
    rows, ids = torch.zeros(3, group.stride_bytes // 8, dtype=torch.int64), np.arange(3)
    WAYS["staging"][0](caches, ids[:, None], rows, ids)
    found = rows.view(torch.uint8)
    assert found[:, :4400].eq(1).all()
    assert found[:, 4400:8800].eq(2).all()
    assert not found[:, 8800:].any()


def test_slots_that_are_neighbours_cross_in_one_copy() -> None:
    """A run ends where either side has a gap, and at the end of a piece that was page-locked apart."""
    runs = partial(device_copies._runs, piece=4)  # noqa: SLF001 - what it decides is seen by no other means on a CPU
    assert list(runs(np.array([0, 1, 2, 3, 4, 5]), np.array([8, 9, 10, 11, 12, 13]))) == [(0, 4), (4, 6)]
    assert list(runs(np.array([0, 1, 2]), np.array([1, 2, 0]))) == [(0, 2), (2, 3)]
    assert list(runs(np.array([], dtype=np.int64), np.array([], dtype=np.int64))) == []


@pytest.mark.parametrize("libcuda", ["batches"], indirect=True)
def test_what_is_in_one_piece_on_both_sides_is_one_copy(monkeypatch: pytest.MonkeyPatch, libcuda: str) -> None:
    """Of a batch: neighbours of an engine whose page is a whole block cross as one, up to the end of a locked piece."""
    monkeypatch.setattr(host, "PIECE_BYTES", 4 * 8192)
    group = KVGroup(2, 1, 4096, "uint8", 1, "MLA")
    engine = torch.randint(0, 256, (16, 2, 1, 4096), dtype=torch.uint8)
    with fake_cuda() as fake:
        fake.keep(engine.data_ptr(), engine.nbytes, 0, engine)
        device = CUDADevice("cuda:0")
        caches = PagedCaches.bind(engine, group, axes="BLND", device=device)
        rows = torch.zeros(16, 1024, dtype=torch.int64, pin_memory=True)
        stream = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]  # of torch
        pages, slots = np.array([3, 4, 5, 9, 10, 11, 1]), np.array([0, 1, 2, 5, 6, 8, 9])
        copies = (
            partial(device_copies.gather_directly, caches, pages[:, None], rows, slots),
            partial(device_copies.scatter_directly, rows, slots, caches, pages[:, None]),
        )
        expected = engine[pages].clone()
        for copy in copies:
            with device.here(), torch.cuda.stream(stream), known_as_locked(rows):
                copy()
            fake.run()
            assert torch.equal(rows[slots].view(torch.uint8), expected.view(7, 8192))
            assert torch.equal(engine[pages], expected)
            engine[:] = 0
        assert [[size // 8192 for size in batch] for batch in fake.batches] == [[3, 2, 1, 1]] * 2


@pytest.mark.parametrize("libcuda", ["batches"], indirect=True)
def test_a_batch_of_very_many_copies_is_cut(libcuda: str) -> None:
    """Drivers have ended the process over tens of thousands at once, as small fragments of one window may be."""
    group = KVGroup(1, 1, 8, "uint8", 1, "MLA")
    engine = torch.randint(0, 256, (9000, 1, 8), dtype=torch.uint8)
    with fake_cuda() as fake:
        fake.keep(engine.data_ptr(), engine.nbytes, 0, engine)
        device = CUDADevice("cuda:0")
        caches = PagedCaches.bind([engine], group, device=device)
        rows = torch.zeros(9000, 1, dtype=torch.int64, pin_memory=True)
        stream = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]  # of torch
        slots = np.arange(9000)
        with device.here(), torch.cuda.stream(stream), known_as_locked(rows):
            device_copies.gather_directly(caches, slots[::-1, None], rows, slots)
        fake.run()
        assert torch.equal(rows.view(torch.uint8), engine.view(9000, 8).flip(0))
        assert [len(batch) for batch in fake.batches] == [4096, 4096, 808]


WAYS_AND_SECONDS = [("slow", (3,), (3,)), ("quick out", (1,), (2,)), ("quick back", (2,), (1,))]
"""Names of ways, and how long they take out of the pages and into them."""


class TestCrossover:
    """Which way is taken."""

    def caches(self, fragment_bytes: int) -> PagedCaches:
        """Return a cache of one fragment."""
        group = KVGroup(1, 1, fragment_bytes, "uint8", 1, "MLA")
        tensors = [torch.zeros(2, 1, fragment_bytes, dtype=torch.uint8)]
        return PagedCaches.bind(tensors, group, device=CPUDevice())

    def way(
        self, caches: PagedCaches, num_blocks: int = 1, *, to_rows: bool = True, rows: torch.Tensor | None = None
    ) -> str:
        """Return the name of the way for so many blocks."""
        slots, rows = np.zeros(num_blocks, np.int64), torch.zeros(1, 512, dtype=torch.int64) if rows is None else rows
        return crossover.way_of(caches, rows, slots, to_rows=to_rows).name

    def test_until_measured_only_large_fragments_go_directly(self, libcuda: str) -> None:
        """A stated size decides, the same one everywhere; what a batch begins costs less."""
        size = crossover.BATCH_FROM_BYTES if libcuda == "batches" else crossover.DIRECT_FROM_BYTES
        assert self.way(self.caches(size - 1)) == "staging"
        assert self.way(self.caches(size)) == "directly"

    def test_single_copies_are_bounded_in_number(self, libcuda: str) -> None:
        """More would fill a stream's queue, and the event loop would wait; a batch is one operation, however long."""
        large = self.caches(crossover.DIRECT_FROM_BYTES)
        assert self.way(large, crossover.MOST_OPERATIONS) == "directly"
        rows = torch.zeros(1, 512, dtype=torch.int64)
        with known_as_locked(rows):
            many = self.way(large, crossover.MOST_OPERATIONS + 1, rows=rows)
        assert many == ("directly" if libcuda == "batches" else "staging")

    def test_pageable_memory_takes_no_batch(self) -> None:
        """There each copy is one operation, wherever the driver takes batches of what is page-locked."""
        assert self.way(self.caches(crossover.DIRECT_FROM_BYTES), crossover.MOST_OPERATIONS + 1) == "staging"

    def test_the_fastest_way_is_taken_by_direction_and_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """All ways are timed for each; between two numbers of blocks the smaller one decides."""
        ways = [crossover.STAGING, crossover.DIRECTLY]
        staged_wins = [True, False, True, False, False, True]  # out of the pages, then into them
        rounds = [[1.0] * 4 + [2.0] * 4 if wins else [2.0] * 4 + [1.0] * 4 for wins in staged_wins]
        ticks = iter([tick for each in rounds for seconds in each for tick in (0.0, seconds)])
        monkeypatch.setattr(crossover, "_COUNTS", (1, 2, 4))
        with fake_cuda(), CUDADevice("cuda:0").here(), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # of torch
            found = crossover.measure(torch.device("cuda", 0), 100, 1, ways, clock=lambda: next(ticks))
        assert next(ticks, None) is None
        assert [way.name for _, way in found[True]] == ["staging", "directly", "staging"]
        assert [way.name for _, way in found[False]] == ["directly", "directly", "staging"]
        assert [count for count, _ in found[True]] == [1, 2, 4]
        caches = self.caches(100)
        for to_rows in (True, False):
            shape = crossover._shape_of(caches, to_rows=to_rows)  # noqa: SLF001 - what a bind would measure
            monkeypatch.setitem(crossover._measured, shape, found[to_rows])  # noqa: SLF001 - as if measured
        names = [self.way(caches, n) for n in (1, 2, 3, 4, 99)]
        assert names == ["staging", "directly", "directly", "staging", "staging"]
        assert self.way(caches, 1, to_rows=False) == "directly"

    def test_what_is_timed_is_the_copy(self) -> None:
        """Of each way and direction, until all of it has arrived."""
        now = [0.0]

        def copy(seconds: float, *_: object) -> None:
            now[0] += seconds

        ways = [crossover.Way(name, partial(copy, *out), partial(copy, *back)) for name, out, back in WAYS_AND_SECONDS]
        with fake_cuda(), CUDADevice("cuda:0").here(), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # of torch
            found = crossover.measure(torch.device("cuda", 0), 100, 1, ways, clock=lambda: now[0])
        assert {way.name for _, way in found[True]} == {"quick out"}
        assert {way.name for _, way in found[False]} == {"quick back"}

    def test_what_was_measured_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """By direction: d2h is out of the engine's pages."""
        found = {True: ((1, crossover.STAGING),), False: ((1, crossover.DIRECTLY), (16, crossover.STAGING))}
        monkeypatch.setattr(crossover, "measure", lambda *_, **__: found)
        here = self.caches(64)
        with fake_cuda(), capture_logs() as logs:
            caches = PagedCaches(here.group, None, torch.device("cuda", 0), 2, here.fragments, here.layers)
            crossover.prepare(caches, CUDADevice("cuda:0"))
            crossover.prepare(caches, CUDADevice("cuda:0"))
            assert len(crossover.measured()) == 2
        said = [(each["direction"], each["fragment_bytes"], each["ways"]) for each in logs]
        assert said == [("d2h", 64, {1: "staging"}), ("h2d", 64, {1: "directly", 16: "staging"})]

    def test_one_layer_is_measured_out_of_whole_slots(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As it is served: its bytes lie apart on the host, a slot from one block to the next, in each way timed."""
        group = KVGroup(4, 1, 4096, "uint8", 1, "MLA")
        tensors = [torch.zeros(64, 1, 4096, dtype=torch.uint8) for _ in range(4)]
        seen = set[tuple[Any, int]]()

        def gather(caches: PagedCaches, pages: Ids, rows: torch.Tensor, slots: Ids) -> None:
            assert slots.max() < len(rows)
            seen.add((caches.columns and (caches.columns.start, caches.columns.stop), rows.shape[1] * 8))

        def scatter(rows: torch.Tensor, slots: Ids, caches: PagedCaches, pages: Ids) -> None:
            gather(caches, pages, rows, slots)

        spy = crossover.Way("spy", gather, scatter)
        monkeypatch.setattr(crossover, "STAGING", spy)
        monkeypatch.setattr(crossover, "DIRECTLY", spy)
        monkeypatch.setattr(crossover, "_SAMPLE_BYTES", 1 << 20)  # 64 slots, for 256 blocks of one layer
        with fake_cuda() as fake:
            for tensor in tensors:
                fake.keep(tensor.data_ptr(), tensor.nbytes, 0, tensor)
            crossover.kernel_way.cache_clear()
            monkeypatch.setattr(crossover, "kernel_way", lambda _: spy)
            device = CUDADevice("cuda:0")
            crossover.prepare(PagedCaches.bind(tensors, group, device=device), device)
            assert len(crossover.measured()) == 4
        assert seen == {(None, 16384), ((0, 4096), 16384)}

    def test_a_cpu_is_not_measured(self) -> None:
        """There nothing crosses a bus."""
        crossover.prepare(self.caches(64), CPUDevice())
        assert self.way(self.caches(64)) == "staging"

    def test_what_cannot_be_measured_is_said_and_harms_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Memory may be short, or torch know nothing of the device: the stated size goes on to decide."""
        monkeypatch.setattr(device_copies, "kernels_for", lambda _: None)  # beside a GPU one is tried, and says so
        here = self.caches(64)
        caches = PagedCaches(here.group, None, torch.device("meta"), 2, here.fragments, here.layers)
        with capture_logs() as logs:
            crossover.prepare(caches, CPUDevice())
        assert [entry["event"] for entry in logs] == ["copies.unmeasured"]
