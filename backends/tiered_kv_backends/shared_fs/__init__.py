"""A directory that many hosts share."""

from tiered_kv_backends.shared_fs.shared_fs_backend import SharedFSBackend, sweep

__all__ = ["SharedFSBackend", "sweep"]
