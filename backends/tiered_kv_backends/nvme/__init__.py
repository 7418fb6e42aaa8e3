"""A tier on a local disk: ``{"medium": "nvme", "path": "/mnt/kv", "capacity": "1TiB"}``."""

from tiered_kv_backends.nvme.backend import NVMeBackend
from tiered_kv_backends.nvme.upkeep import delete_tenant

__all__ = ["NVMeBackend", "delete_tenant"]
