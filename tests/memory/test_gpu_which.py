"""Which device is meant where none is named."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiered_kv.memory import driver
from tiered_kv.memory.gpu import handle_of, resolve


def test_the_device_is_the_gpu_if_there_is_one() -> None:
    """Else the CPU; and a name is a name in any case."""
    meant = resolve(None)
    assert isinstance(meant, torch.device)
    assert meant.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve("cpu") == torch.device("cpu")


def test_who_only_asks_which_it_is_may_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA itself is not asked: after that no fork of this process could use it. torch can ask NVML instead."""

    def asked() -> bool:
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "is_available", asked)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [resolve(name) for name in (None, "cuda")] == [torch.device("cuda", 0)] * 2


@pytest.mark.parametrize(("said", "handle"), [((0, 7), 7), ((7, 7), 7), ((7,), 7), ((0, 0), 0), ((0,), 0)])
def test_an_event_that_was_recorded_has_a_handle(said: tuple[int, ...], handle: int) -> None:
    """Also in torch 2.6 and 2.7, where a CUDA event's `event_id` is always 0."""
    event: Any = SimpleNamespace(**dict(zip(("event_id", "cuda_event"), said, strict=False)))
    assert handle_of(event) == handle


@pytest.mark.parametrize(
    ("hip", "there"),
    [
        (None, "libcuda.so.1"),
        ("7.2", "libamdhip64.so"),
        ("7.2", "libamdhip64.so.7"),
        ("6.4", "libamdhip64.so.6"),
        (None, ""),
    ],
)
def test_the_driver_is_found_by_the_name_it_has(monkeypatch: pytest.MonkeyPatch, hip: str | None, there: str) -> None:
    """ROCm's has a version in it, unless one develops with it; without any there is no driver, and no error."""

    def load(name: str) -> str:
        if name != there:
            raise OSError(name)
        return name

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert driver.library.__wrapped__() == (there or None)
