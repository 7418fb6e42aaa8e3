"""Deleting a tenant's blocks from a shared directory. For a job of your own, beside the caches."""

import asyncio
from collections.abc import Mapping
from typing import Any

from tiered_kv.errors import BackendUnavailableError
from tiered_kv.keys import salt_digest
from tiered_kv_backends.shared_fs import SharedFSBackend
from tiered_kv_backends.shared_fs_sweeper import delete_folders


async def delete_tenant(settings: SharedFSBackend.Settings | Mapping[str, Any] | str, salt: str | bytes) -> int:
    """Delete the blocks of one salt, of every model, epoch and shard. What is being written meanwhile may stay.

    Returns:
        How many blocks were deleted.

    Raises:
        ConfigurationError: No settings of this medium.
        BackendUnavailableError: The filesystem failed; what was deleted until then stays deleted.
    """
    root = str(SharedFSBackend.Settings.of(settings).path)
    try:
        return await asyncio.to_thread(delete_folders, root, salt_digest(salt).hex()[:32])
    except OSError as error:
        raise BackendUnavailableError(f"{root}: could not delete a tenant: {error.strerror}") from error
