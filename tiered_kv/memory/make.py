"""The device for a set of tensors."""

import torch

from tiered_kv.errors import ConfigurationError
from tiered_kv.memory.accelerator import AcceleratorDevice
from tiered_kv.memory.cuda import CUDADevice
from tiered_kv.memory.device import CPUDevice, Device


def make_device(device: torch.device | str) -> Device:
    """Return the device the engine's tensors are on, ``"cpu"`` or ``"cuda:0"``; the caller closes it.

    Raises:
        ConfigurationError: There is no such device, or none of a kind known here.
    """
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(f"there is no device {device!r}: write e.g. 'cpu', 'cuda' or 'cuda:0'") from error
    if wanted.type == "cpu":
        return CPUDevice()
    if wanted.type == "cuda":
        return CUDADevice(wanted)
    if wanted.type == "xpu":
        return AcceleratorDevice(wanted)
    raise ConfigurationError(f"KV on {wanted} is not supported: tensors must be on a CPU, a CUDA or an XPU device")


def default_device() -> str:
    """Name the device an engine's tensors are on as a rule: the GPU if torch has one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"
