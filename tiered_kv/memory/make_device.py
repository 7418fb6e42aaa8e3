"""The device for a set of tensors."""

import torch

from tiered_kv.memory.cpu import CPUDevice
from tiered_kv.memory.device import Device
from tiered_kv.memory.gpu import AcceleratorDevice, CUDADevice
from tiered_kv.values.errors import ConfigurationError

DeviceLike = Device | torch.device | str
"""A device of ours, torch's, or the name of one."""


def resolve(device: DeviceLike | None) -> DeviceLike:
    """Return a device, or say which one is meant *here*: ``"cuda"`` is this thread's current GPU, not another's.

    None is the GPU if torch has one, else the CPU.

    Raises:
        ConfigurationError: There is no device of this name.
    """
    if isinstance(device, Device):
        return device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(f"there is no device {device!r:.80}: write e.g. 'cpu', 'cuda' or 'cuda:0'") from error
    if wanted.type == "cuda" and wanted.index is None and torch.cuda.is_available():
        # Before CUDA is initialised no thread can have chosen one; and asking would initialise it, for forks to fail.
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)
    return wanted


def make_device(device: torch.device | str | None = None) -> Device:
    """Return the device the engine's tensors are on, ``"cpu"`` or ``"cuda:0"``; the caller closes it.

    Without a name it is the GPU if torch has one, else the CPU.

    Raises:
        ConfigurationError: There is no such device, or none of a kind known here.
    """
    wanted = resolve(device)
    if isinstance(wanted, Device):
        return wanted
    wanted = torch.device(wanted)
    if wanted.type == "cpu":
        return CPUDevice()
    if wanted.type == "cuda":
        return CUDADevice(wanted)
    if wanted.type == "xpu":
        return AcceleratorDevice(wanted)
    raise ConfigurationError(f"KV on {wanted} is not supported: tensors must be on a CPU, a CUDA or an XPU device")
