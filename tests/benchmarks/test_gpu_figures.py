"""What the GPU benchmark's figures stand for, on a driver of our own."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.fake_cuda import fake_cuda
from tests.support.fake_driver import FakeDriver, Marker

pytest.importorskip("triton", reason="Triton: pip install 'tiered-kv[cuda]'")

from _gpu_bus import run, set_up
from gpu import SMALL, kept_share, through_nvme
from tiered_kv.memory import CUDADevice
from tiered_kv.memory.gpu import AcceleratorStream
from tiered_kv.memory.lanes import Lane, Lanes

GPU = "cuda:0"


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    """Some GPUs."""
    with fake_cuda() as fake:
        yield fake


def _waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda self: torch.cuda.synchronize(self.device))


def _waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda _: None)


def _passes_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AcceleratorStream, "wait", lambda *_: None)


@pytest.mark.parametrize("plant", [None, _waits_for_the_device, _waits_for_nothing])
def test_products_beside_copies_wait_for_their_own_stream(
    monkeypatch: pytest.MonkeyPatch, fake: FakeDriver, plant: Callable[[pytest.MonkeyPatch], None] | None
) -> None:
    """Of all of the device's they would measure the copies too, and of none the time to enqueue; planted, it shows."""
    device = CUDADevice(GPU)
    multiply, ran = torch.mm, list[object]()

    def noted(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        ran.append(torch.cuda.current_stream(GPU).queue)  # type: ignore[attr-defined]  # the fake's
        return multiply(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", noted)
    h2d, d2h = device.stream("h2d"), device.stream("d2h")
    with set_up(SMALL["small"], 4, device) as setup:
        fake.waits.clear()
        if plant is not None:
            plant(monkeypatch)
        shares = kept_share(setup, h2d, d2h, small=True)
        here = threading.current_thread().name
        waited = {id(queue) for thread, queue in fake.waits if thread == here}
        assert device.close(60)
    assert shares.keys() == {"matmul_beside_load", "matmul_beside_store", "matmul_beside_both"}
    assert (waited == {id(queue) for queue in ran}) == (plant is None)


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


async def test_so_does_a_whole_cache(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver, tmp_path: Path) -> None:
    """The way to NVMe and back is stored after the blocks are computed, and loaded after their pages are free."""
    events, take = list[object](), Lanes.take

    def noted(self: Lanes, after: object = None) -> Lane:
        events.append(after)
        return take(self, after)

    monkeypatch.setattr(Lanes, "take", noted)
    await through_nvme(SMALL["small"], 4, GPU, tmp_path)
    assert events
    assert None not in events
