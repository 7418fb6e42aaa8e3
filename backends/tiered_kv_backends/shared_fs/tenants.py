"""Jobs on a shared directory, beside the caches: deleting a tenant's blocks, and sweeping."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError
from tiered_kv.values.keys import salt_digest
from tiered_kv_backends.paths import salt_folder
from tiered_kv_backends.shared_fs.backend import SharedFSBackend
from tiered_kv_backends.shared_fs.ledger import Ledger
from tiered_kv_backends.shared_fs.sweeper import Sweeper, Swept, delete_folders


async def delete_tenant(settings: SharedFSBackend.Settings | Mapping[str, Any] | str, salt: str | bytes) -> int:
    """Delete the blocks of one salt, of every model, epoch and shard. What is being written meanwhile may stay.

    Returns:
        How many blocks were deleted.

    Raises:
        ConfigurationError: No settings of this medium.
        BackendUnavailableError: The filesystem failed, is not mounted, or no cache has used the directory yet; what was
            deleted until then stays deleted.
    """
    settings = SharedFSBackend.Settings.of(settings)
    root = str(settings.path)
    folder = salt_folder(await asyncio.to_thread(settings.on_medium, salt_digest(salt)))
    try:
        return await asyncio.to_thread(delete_folders, root, folder)
    except OSError as error:
        raise BackendUnavailableError(
            f"{error.filename or root}: could not delete a tenant: {error.strerror}"
        ) from error


async def sweep(settings: SharedFSBackend.Settings | Mapping[str, Any] | str) -> Swept | None:
    """Delete what is over the limit, and what dead writers have left, at once: each process does it now and then.

    Returns:
        What was done; None if another process is at it.

    Raises:
        ConfigurationError: No settings of this medium, or ``read_only``.
        BackendUnavailableError: No cache has used the directory yet, or the filesystem failed.
    """
    settings = SharedFSBackend.Settings.of(settings)
    if settings.read_only:
        raise ConfigurationError(f"the tier at {settings.path} is read_only: another process sweeps")
    root = str(settings.path.absolute())
    capacity, clock_ns = settings.capacity, time.time_ns
    ledger = Ledger(root, capacity, clock_ns)
    sweeper = Sweeper(root, ledger, lambda: 0, capacity, 0, settings.min_free_fraction, clock_ns, settings.salt_quota)
    try:
        return await asyncio.to_thread(sweeper.sweep)
    except OSError as error:
        raise BackendUnavailableError(f"cannot sweep {root}: {error.strerror}") from error
