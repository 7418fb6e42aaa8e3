"""What the GPU benchmark's figures stand for, on a driver of our own."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.caches import inside
from tests.support.fake_cuda import fake_cuda
from tests.support.fake_driver import FakeDriver, Marker
from tests.support.gpu_engine import capturing

pytest.importorskip("triton", reason="Triton: pip install 'tiered-kv[cuda]'")

import _gpu_serving
from _gpu_bus import engine_tensors, run, set_up
from _gpu_copies import SMALL, copies, kept_share, layers
from _gpu_report import Report, Run
from _gpu_serving import cache, graphs, opened, soak
from tiered_kv.memory import CUDADevice, crossover, host
from tiered_kv.memory import copies as copies_module
from tiered_kv.memory.gpu import AcceleratorStream
from tiered_kv.memory.lanes import Lane, Lanes

GPU = "cuda:0"


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    """Some GPUs."""
    with fake_cuda() as fake:
        yield fake


def _passes_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AcceleratorStream, "wait", lambda *_: None)


def test_products_beside_copies_are_timed_by_the_gpu(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver) -> None:
    """And enqueued before any copy: the host's clock does not matter, nor which thread has the interpreter's lock."""
    device, order, ms = CUDADevice(GPU), list[str](), iter([10.0, 12.5, 10.0, 20.0, 10.0, 10.0])
    multiply, submit = torch.mm, AcceleratorStream.submit
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda *_: next(ms))

    def product(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        order.append("product")
        return multiply(*args, **kwargs)

    def submitted(self: AcceleratorStream, *args: Any) -> object:  # noqa: ANN401 - of a stream
        order.append("copy")
        return submit(self, *args)

    h2d, d2h = device.stream("h2d"), device.stream("d2h")
    with set_up(SMALL["small"], 4, device) as setup:
        monkeypatch.setattr(torch, "mm", product)
        monkeypatch.setattr(AcceleratorStream, "submit", submitted)
        report = Report("copies", None)
        kept_share(report, "small", setup, h2d, d2h, is_small=True)
        assert device.close(60)
    found = report.figures["small"]
    shares = [found.pop(f"matmul_beside_{name}") for name in ("load", "store", "both")]
    assert shares == [0.8, 0.5, 1.0]
    assert found.keys() == {f"{name}_beside_matmul_gb_s" for name in ("load", "store", "both")}
    assert [kind for kind, _ in groupby(order)] == ["product", "copy"] * 3


@pytest.mark.parametrize("plant", [None, _passes_no_event])
def test_every_transfer_waits_for_the_engines_stream(
    monkeypatch: pytest.MonkeyPatch, fake: FakeDriver, plant: Callable[[pytest.MonkeyPatch], None] | None
) -> None:
    """Else what is measured leaves out an operation that each transfer of an engine has; planted, it shows."""
    if plant is not None:
        plant(monkeypatch)
    device, fake.held = CUDADevice(GPU), True
    h2d, begun, submitted, order = device.stream("h2d"), Marker(), threading.Event(), list[str]()

    def copy() -> None:
        queue = torch.cuda.current_stream(GPU).queue  # type: ignore[attr-defined]  # the fake's
        fake.enqueue(queue, lambda: order.append("copy"))

    engines = torch.cuda.current_stream(GPU).queue  # type: ignore[attr-defined]  # the fake's
    fake.enqueue(engines, lambda: order.append("engine"), after=begun)
    running = threading.Thread(target=run, args=[(h2d, [copy, copy, submitted.set])])
    running.start()
    assert submitted.wait(60)
    fake.run()  # all that does not wait for the engine
    begun.fired = True
    fake.release()
    running.join()
    assert device.close(60)
    assert (order == ["engine", "copy", "copy"]) == (plant is None)


def run_on(device: CUDADevice, path: Path) -> Run:
    """Return how a part is run on a GPU, small."""
    return Run(Report("part", path), device, is_small=True, path=path, soak_s=0.0)


def test_so_does_a_whole_cache(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver, tmp_path: Path) -> None:
    """It stores after the blocks are computed, and loads after their pages are free."""
    events, take = list[object](), Lanes.take

    def noted(self: Lanes, after: object = None) -> Lane:
        events.append(after)
        return take(self, after)

    monkeypatch.setattr(Lanes, "take", noted)
    monkeypatch.setattr(_gpu_serving, "CHAINS", ("nvme",))  # between two tiers of memory nothing has to be waited for
    device = CUDADevice(GPU)
    cache(there := run_on(device, tmp_path))
    assert device.close(60)
    assert not there.report.errors
    assert there.report.figures["nvme"].keys() == {"store_gb_s", "store_settled_gb_s", "load_gb_s"}
    assert there.report.figures["page-locking"]["state"] == "locked"
    assert events
    assert None not in events


async def test_no_deadline_drops_what_a_slow_disk_is_given(fake: FakeDriver, tmp_path: Path) -> None:
    """1 GiB may take it two minutes: then the figure is small, and no block is missing."""
    device, group = CUDADevice(GPU), SMALL["small"]
    tensors, axes = engine_tensors(group, 4, device.torch_device)
    async with opened(run_on(device, tmp_path), group, tensors, axes, "nvme", 1 << 20) as kv:
        assert inside(kv).chains[0].limits.store_timeout_s >= 120
    assert device.close(60)


def test_only_ours_is_tried_beside_captures(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver, tmp_path: Path) -> None:
    """Not what the benchmark does to compare bytes, which would spoil a graph, and be taken for a fault of ours."""

    @contextmanager
    def beside(*_: object) -> Iterator[Counter[str]]:
        with capturing(fake):
            yield Counter(captured=1)

    monkeypatch.setattr(_gpu_serving, "_capturing", beside)
    device = CUDADevice(GPU)
    graphs(there := run_on(device, tmp_path))
    assert device.close(60)
    assert not there.report.errors
    assert not fake.spoilt
    assert there.report.figures["graphs"] == {"captured": 1}


@pytest.mark.parametrize("part", [copies, layers])
def test_a_part_gives_all_its_figures(
    monkeypatch: pytest.MonkeyPatch, fake: FakeDriver, tmp_path: Path, part: Callable[[Run], None]
) -> None:
    """Of each kind of block and each way there is; and nothing goes wrong, though slots are locked in many pieces."""
    monkeypatch.setattr(host, "PIECE_BYTES", 8192)
    device = CUDADevice(GPU)
    part(there := run_on(device, tmp_path))
    assert device.close(60)
    assert not there.report.errors
    names = "load_staging load_directly load_by_kernel" if part is copies else "store_by_layer_by_kernel load_by_layer"
    for found in there.report.figures.values():
        assert {*names.split(), "load_one_copy", "store_one_copy", "both_one_copy"} <= found.keys()


def _loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossover, "way_of", lambda *_, **__: crossover.Way("none", _nothing, _nothing))
    monkeypatch.setattr(copies_module, "_scatter", _nothing)


def _nothing(*_: object) -> None:
    pass


@pytest.mark.parametrize("plant", [None, _loads_nothing])
def test_a_soak_compares_bytes(
    monkeypatch: pytest.MonkeyPatch,
    fake: FakeDriver,
    tmp_path: Path,
    plant: Callable[[pytest.MonkeyPatch], None] | None,
) -> None:
    """Blocks whose bytes do not come are counted, planted; else there are none."""
    if plant is not None:
        plant(monkeypatch)
    device = CUDADevice(GPU)
    soak(there := run_on(device, tmp_path))
    assert device.close(60)
    assert not there.report.errors
    found = there.report.figures["soak"]
    assert found["loaded"]
    assert bool(found["wrong"]) == (plant is not None)


def test_an_error_ends_no_more_than_its_figure(tmp_path: Path) -> None:
    """The file has it, and what was found before and behind it; what is no number is left out."""
    report = Report("part", tmp_path)
    report.note("a", "first", 1)
    share = report.take("a", "second", lambda: 1 / 0) / 2
    report.note("a", "of it", share)
    report.note("b", "third", 0.123456)
    assert json.loads((tmp_path / "part.json").read_text()) == {
        "figures": {"a": {"first": 1}, "b": {"third": 0.1235}},
        "errors": {"a: second": "ZeroDivisionError: division by zero"},
    }
