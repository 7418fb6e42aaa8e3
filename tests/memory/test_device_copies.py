"""Copies between a GPU and the host: by way of staging, or fragment by fragment, and which of the two."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.memory.engines import NUM_SLOTS, Engine, engines, places
from tiered_kv.layout import KVGroup
from tiered_kv.memory import CPUDevice, PagedCaches, crossover, device_copies, gather_blocks, torch_copies

Copy = Callable[..., None]
WAYS: dict[str, tuple[Copy, Copy]] = {
    "staging": (
        partial(device_copies.gather_through_staging, gather=torch_copies.gather_blocks),
        partial(device_copies.scatter_through_staging, scatter=torch_copies.scatter_blocks),
    ),
    "directly": (device_copies.gather_directly, device_copies.scatter_directly),
}


@pytest.fixture(autouse=True, scope="module")
def _small_pieces() -> Iterator[None]:
    """Cut into pieces what is small enough for a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_copies, "PIECE_BYTES", 8192)
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


def test_pieces_are_bounded_and_leave_nothing_out() -> None:
    """Each fits a staging buffer, unless one block does not; together they are all positions in order."""
    for num_blocks, block_bytes in product((0, 1, 2, 7), (1, 4096, 8192, 100_000)):
        pieces = device_copies.pieces_of(num_blocks, block_bytes)
        assert [i for piece in pieces for i in range(piece.start, piece.stop)] == list(range(num_blocks))
        assert all(
            piece.stop - piece.start == 1 or (piece.stop - piece.start) * block_bytes <= 8192 for piece in pieces
        )


def test_slots_that_are_neighbours_cross_in_one_copy() -> None:
    """A run ends where either side has a gap, and at the end of a piece that was page-locked apart."""
    runs = partial(device_copies._runs, piece=4)  # noqa: SLF001 - what it decides is seen by no other means on a CPU
    assert list(runs(np.array([0, 1, 2, 3, 4, 5]), np.array([8, 9, 10, 11, 12, 13]))) == [(0, 4), (4, 6)]
    assert list(runs(np.array([0, 1, 2]), np.array([1, 2, 0]))) == [(0, 2), (2, 3)]
    assert list(runs(np.array([], dtype=np.int64), np.array([], dtype=np.int64))) == []


class TestCrossover:
    """Where a DMA a fragment begins to be the faster way."""

    def caches(self, fragment_bytes: int) -> PagedCaches:
        """Return a cache of one fragment."""
        group = KVGroup(1, 1, fragment_bytes, "uint8", 1, "MLA")
        tensors = [torch.zeros(2, 1, fragment_bytes, dtype=torch.uint8)]
        return PagedCaches.bind(tensors, group, device=CPUDevice())

    def test_until_measured_only_large_fragments_go_directly(self) -> None:
        """A stated size decides, the same one everywhere."""
        assert not crossover.is_direct(self.caches(crossover.DIRECT_FROM_BYTES - 1))
        assert crossover.is_direct(self.caches(crossover.DIRECT_FROM_BYTES))

    @pytest.mark.parametrize(("staged_s", "direct_s"), [(1.0, 2.0), (2.0, 1.0)])
    def test_the_faster_way_is_taken(self, staged_s: float, direct_s: float) -> None:
        """Both ways are timed there and back, in turn; the one that took less time wins."""
        ticks = iter(_ticks([staged_s] * 4 + [direct_s] * 4))
        chosen = crossover.measure(torch.device("cpu"), 100, sample_bytes=4096, clock=lambda: next(ticks), pinned=False)
        assert chosen == (direct_s < staged_s)
        assert next(ticks, None) is None

    def test_a_cpu_is_not_measured(self) -> None:
        """There nothing crosses a bus."""
        crossover.prepare(self.caches(64))
        assert not crossover.is_direct(self.caches(64))

    def test_what_cannot_be_measured_is_said_and_harms_nothing(self) -> None:
        """Memory may be short, or torch know nothing of the device: the stated size goes on to decide."""
        here = self.caches(64)
        caches = PagedCaches(here.group, None, torch.device("meta"), 2, here.fragments, here.layers)
        with capture_logs() as logs:
            crossover.prepare(caches)
        assert [entry["event"] for entry in logs] == ["copies.unmeasured"]


def _ticks(seconds: list[float]) -> list[float]:
    return [tick for each in seconds for tick in (0.0, each)]
