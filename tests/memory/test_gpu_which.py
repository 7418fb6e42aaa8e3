"""Which device is meant where none is named."""

import torch

from tiered_kv.memory.gpu import resolve


def test_the_device_is_the_gpu_if_there_is_one() -> None:
    """Else the CPU; and a name is a name in any case."""
    meant = resolve(None)
    assert isinstance(meant, torch.device)
    assert meant.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve("cpu") == torch.device("cpu")
