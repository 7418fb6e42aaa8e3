"""Host memory near a GPU: on a machine of several NUMA nodes, copies from the far one run at a fraction of the bus.

Linux only, by what the kernel says and does itself; elsewhere, and where it says nothing, memory is where it falls.
"""

import ctypes
import os
import platform
from pathlib import Path
from typing import Final

_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}
_MPOL_PREFERRED: Final = 1
_SYSFS: Final = Path("/sys")


def node_of_gpu(pci_address: str, *, sysfs: Path = _SYSFS) -> int | None:
    """Return the NUMA node a GPU hangs on.

    Args:
        pci_address: ``domain:bus:device.function`` in hexadecimal, e.g. ``"0000:3b:00.0"``.
        sysfs: Where sysfs is mounted.

    Returns:
        None where there is one node only, or the machine does not tell.
    """
    try:
        nodes = list((sysfs / "devices/system/node").glob("node[0-9]*"))
        node = int((sysfs / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if len(nodes) > 1 and node >= 0 else None


def prefer_node(node: int) -> bool:
    """Have memory that this thread touches first come from ``node`` while that has any; say whether the system will."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or os.name != "posix":
        return False
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[node // 64] = 1 << node % 64
    # The kernel takes one bit less than it is told there are.
    return bool(ctypes.CDLL(None, use_errno=True).syscall(number, _MPOL_PREFERRED, words, len(words) * 64 + 1) == 0)
