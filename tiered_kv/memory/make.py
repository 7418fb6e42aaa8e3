"""The device for a set of tensors."""

import torch

from tiered_kv.errors import ConfigurationError
from tiered_kv.memory.accelerator import AcceleratorDevice
from tiered_kv.memory.cuda import CUDADevice
from tiered_kv.memory.device import CPUDevice, Device

DeviceLike = Device | torch.device | str
"""A device of ours, torch's, or the name of one."""


def make_device(device: torch.device | str | None = None) -> Device:
    """Return the device the engine's tensors are on, ``"cpu"`` or ``"cuda:0"``; the caller closes it.

    Without a name it is the GPU if torch has one, else the CPU.

    Raises:
        ConfigurationError: There is no such device, or none of a kind known here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(f"there is no device {device!r:.80}: write e.g. 'cpu', 'cuda' or 'cuda:0'") from error
    if wanted.type == "cpu":
        return CPUDevice()
    if wanted.type == "cuda":
        return CUDADevice(wanted)
    if wanted.type == "xpu":
        return AcceleratorDevice(wanted)
    raise ConfigurationError(f"KV on {wanted} is not supported: tensors must be on a CPU, a CUDA or an XPU device")
