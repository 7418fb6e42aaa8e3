"""A directory that many hosts share."""

from tiered_kv_backends.shared_fs.backend import SharedFSBackend

__all__ = ["SharedFSBackend"]
