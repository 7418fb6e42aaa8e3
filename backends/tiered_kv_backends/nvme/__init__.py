"""A tier on a local disk: ``{"medium": "nvme", "path": "/mnt/kv", "capacity": "1TiB"}``."""

from tiered_kv_backends.nvme.nvme_backend import NVMeBackend

__all__ = ["NVMeBackend"]
