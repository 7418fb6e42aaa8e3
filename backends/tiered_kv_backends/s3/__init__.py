"""Records as objects of an S3-compatible store, or of what else obstore speaks. Read ``media/backend.py`` first."""

from tiered_kv_backends.s3.backend import S3Backend
from tiered_kv_backends.s3.client import S3Settings
from tiered_kv_backends.s3.upkeep import collect_epochs, delete_tenant

__all__ = ["S3Backend", "S3Settings", "collect_epochs", "delete_tenant"]
