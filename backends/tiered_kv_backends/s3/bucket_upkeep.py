"""Deleting what nobody will read again: old epochs, a tenant's blocks. For a job of your own, beside the caches.

Other things may lie beside the blocks: only objects whose whole path is one of ours are looked at.

What lies in a bucket, for operators: only objects whose whole path is one of ours.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore

from tiered_kv.media.backend import Found, Inventory, Place
from tiered_kv.values.keys import epoch_digest, salt_digest
from tiered_kv_backends.paths import RECORD, salt_folder
from tiered_kv_backends.s3.doomed import MARKS, is_mark, without_mark
from tiered_kv_backends.s3.s3_client import S3Settings, make_store, translate

_AT_ONCE = 1000
_MOST_EPOCHS = 1 << 16
"""Looked at by one run, however many others have put there; the next run has the rest."""
_PART_BYTES = 1 << 20
"""Of an object, at a time."""


class BucketInventory(Inventory):
    """Of one bucket and prefix."""

    def __init__(self, store: ObjectStore, settings: S3Settings) -> None:
        self._store, self._settings = store, settings

    async def found(self) -> AsyncIterator[list[Found]]:
        """List all objects, up to 1,000 at a time; a pack's name says of how many blocks it is."""
        try:
            async for objects in obstore.list(self._store, chunk_size=_AT_ONCE):
                yield [
                    Found(
                        each["path"],
                        Place.of(each["path"]),
                        each["size"],
                        int(match["size"] or 1),
                        each["last_modified"].timestamp(),
                    )
                    for each in objects
                    if (match := RECORD.fullmatch(each["path"]))
                ]
        except (BaseError, OSError, ValueError) as error:
            raise translate(error, "list blocks", self._settings) from error

    async def read(self, found: Found) -> bytes | bytearray | None:
        """Get one object, or as much of it as it was long when it was listed; nothing of one that is too long."""
        if found.is_too_long:
            return b""
        read, num_read = bytearray(found.num_bytes), 0
        try:
            async for part in (await obstore.get_async(self._store, found.where)).stream(_PART_BYTES):
                came = memoryview(part)[: found.num_bytes - num_read]
                read[num_read : num_read + len(came)] = came
                num_read += len(came)
                if num_read == found.num_bytes:
                    break
        except FileNotFoundError:
            return None
        except (BaseError, OSError, ValueError) as error:
            raise translate(error, "read a block", self._settings) from error
        del read[num_read:]
        return read

    async def delete(self, found: Sequence[Found]) -> None:
        """Delete objects, up to 1,000 by one request."""
        try:
            for start in range(0, len(found), _AT_ONCE):
                await _delete(self._store, [each.where for each in found[start : start + _AT_ONCE]])
        except (BaseError, OSError, ValueError) as error:
            raise translate(error, "delete blocks", self._settings) from error


@asynccontextmanager
async def open_inventory(settings: S3Settings) -> AsyncIterator[BucketInventory]:
    """Yield the inventory of a bucket.

    Raises:
        ConfigurationError: No client can be made of the settings.
    """
    yield BucketInventory(make_store(settings), settings)


async def collect_epochs(
    settings: S3Settings | Mapping[str, Any] | str, *, keep_weights: Collection[str], idle_s: float
) -> int:
    """Delete the blocks of old weights: of every epoch but those named, if nothing was stored in it lately.

    With them go the marks of blocks that were evicted from packs which nobody could name.

    Args:
        settings: As of the tier.
        keep_weights: `ModelIdentity.weights`, or what `advance_epoch` was given, of all that is still served. A store
            knows when blocks were written, not when they were read.
        idle_s: How long nothing must have been stored in an epoch that goes, in seconds.

    Returns:
        How many objects were deleted.

    Raises:
        ConfigurationError: No client can be made of the settings.
        BackendUnavailableError: The store failed; what was deleted until then stays deleted.
    """
    settings = S3Settings.of(settings)
    epochs = [epoch_digest(weights) for weights in keep_weights]
    kept = {(await asyncio.to_thread(settings.on_medium, epoch)).hex()[:32] for epoch in epochs}
    store, deleted = make_store(settings), 0
    before = datetime.now(UTC) - timedelta(seconds=idle_s)
    is_idle: dict[str, bool] = {}  # by epoch that may go
    try:
        async for blocks in _blocks(store):
            for path, stored in blocks.items():
                if is_mark(path):
                    continue  # an eviction is no use of an epoch
                epoch = _folder(path, 2)
                is_known = epoch in is_idle or len(is_idle) < _MOST_EPOCHS
                if is_known and epoch.rpartition("/")[2] not in kept:
                    is_idle[epoch] = is_idle.get(epoch, True) and stored <= before
        for epoch in [epoch for epoch, idle in is_idle.items() if idle]:
            for folder in (epoch, f"{MARKS}/{epoch}"):
                async for blocks in _blocks(store, folder):
                    deleted += await _delete(store, [*blocks])
    except (BaseError, OSError, ValueError) as error:
        raise translate(error, "collect epochs", settings) from error
    return deleted


async def delete_tenant(settings: S3Settings | Mapping[str, Any] | str, salt: str | bytes) -> int:
    """Delete the blocks of one salt, of every model, epoch and shard, and what was noted of their evictions.

    Returns:
        How many objects were deleted.

    Raises:
        ConfigurationError: No client can be made of the settings.
        BackendUnavailableError: The store failed; what was deleted until then stays deleted.
    """
    settings = S3Settings.of(settings)
    folder = salt_folder(await asyncio.to_thread(settings.on_medium, salt_digest(salt)))
    store, deleted = make_store(settings), 0
    try:
        async for blocks in _blocks(store):
            deleted += await _delete(store, [path for path in blocks if _folder(path, 4).rpartition("/")[2] == folder])
    except (BaseError, OSError, ValueError) as error:
        raise translate(error, "delete a tenant", settings) from error
    return deleted


def _folder(path: str, depth: int) -> str:
    """Return the folder of a block, or that a mark is about, so many levels down: ``fingerprint/epoch/shard/salt``."""
    return "/".join(without_mark(path).split("/")[:depth])


async def _blocks(store: ObjectStore, folder: str | None = None) -> AsyncIterator[dict[str, datetime]]:
    """Yield the blocks, packs and marks in a folder of ours, or all, and when each was stored, up to 1,000 at a time.

    No more is kept of a listing, which a hostile store may never end.
    """
    async for objects in obstore.list(store, folder, chunk_size=_AT_ONCE):
        yield {
            each["path"]: each["last_modified"]
            for each in objects
            if RECORD.fullmatch(each["path"]) or is_mark(each["path"])
        }


async def _delete(store: ObjectStore, paths: list[str]) -> int:
    """Delete objects, by one request where the store has such; return how many were named. What is gone is no error."""
    try:
        if paths:
            await obstore.delete_async(store, paths)
    except FileNotFoundError:  # a store without bulk deletion stops at the first that is absent
        for path in paths:
            with suppress(FileNotFoundError):
                await obstore.delete_async(store, path)
    return len(paths)
