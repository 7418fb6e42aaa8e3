"""Memory a GPU can reach: the host slab, the engine's paged caches, devices with their streams, and copies."""

from tiered_kv.memory.caches import PagedCaches
from tiered_kv.memory.copies import copy_rows, gather_blocks, scatter_blocks
from tiered_kv.memory.cpu import CPUDevice
from tiered_kv.memory.device import Device, Stream
from tiered_kv.memory.gpu import CUDADevice, make_device
from tiered_kv.memory.host import HostSlab, PageLocking, PageLockState

__all__ = [
    "CPUDevice",
    "CUDADevice",
    "Device",
    "HostSlab",
    "PageLockState",
    "PageLocking",
    "PagedCaches",
    "Stream",
    "copy_rows",
    "gather_blocks",
    "make_device",
    "scatter_blocks",
]
