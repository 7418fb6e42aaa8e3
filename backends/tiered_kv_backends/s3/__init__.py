"""Records as objects of an S3-compatible store, or of what else obstore speaks. Read ``media/backend.py`` first."""

try:
    import obstore  # noqa: F401 - before what needs it
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{__name__} needs obstore: pip install 'tiered-kv[s3]'", name=error.name) from error

from tiered_kv_backends.s3.bucket_upkeep import collect_epochs
from tiered_kv_backends.s3.s3_backend import S3Backend
from tiered_kv_backends.s3.s3_client import S3Settings

__all__ = ["S3Backend", "S3Settings", "collect_epochs"]
