"""What lies in a bucket, for operators: only objects whose whole path is one of ours, whatever lies beside them.

Deleting what nobody will read again, the blocks of old epochs, is a job of your own, beside the caches.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore

from tiered_kv.media.inventory import Found, Inventory, Place
from tiered_kv.values.keys import epoch_digest
from tiered_kv_backends.paths import RECORD
from tiered_kv_backends.s3.doomed import MARKS, is_mark, without_mark
from tiered_kv_backends.s3.s3_client import S3Settings, make_store, translate

if TYPE_CHECKING:  # a type only
    from obstore import ObjectMeta

_AT_ONCE = 1000
_MOST_EPOCHS = 1 << 16
"""Looked at by one run, however many others have put there; the next run has the rest."""
_PART_BYTES = 1 << 20
"""Of an object, at a time."""


class BucketInventory(Inventory):
    """The inventory of one bucket and prefix."""

    def __init__(self, store: ObjectStore, settings: S3Settings) -> None:
        self._store, self._settings = store, settings

    async def found(self, salt: str = "", folder: str | None = None) -> AsyncIterator[list[Found]]:
        """List all objects, or those in a folder of ours, up to 1,000 at a time, whatever their salt.

        A pack's name says of how many blocks it is; a mark, of the place of its block, is none. No more is kept of a
        listing, which a hostile store may never end.
        """
        try:
            async for objects in obstore.list(self._store, folder, chunk_size=_AT_ONCE):
                yield [found for each in objects if (found := _found(each)) is not None]
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
        failed: BaseError | OSError | ValueError | None = None
        for start in range(0, len(found), _AT_ONCE):
            try:
                await _delete(self._store, [each.where for each in found[start : start + _AT_ONCE]])
            except (BaseError, OSError, ValueError) as error:  # of one request: the others may go well
                failed = error
        if failed is not None:
            raise translate(failed, "delete blocks", self._settings) from failed


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
    deleted, before = 0, datetime.now(UTC).timestamp() - idle_s
    is_idle: dict[str, bool] = {}  # by folder of an epoch that may go
    async with open_inventory(settings) as inventory:
        async for some in inventory.found():
            for each in some:
                if not each.num_blocks:
                    continue  # an eviction is no use of an epoch
                folder = f"{each.place.fingerprint}/{each.place.epoch}"
                is_known = folder in is_idle or len(is_idle) < _MOST_EPOCHS
                if is_known and each.place.epoch not in kept:
                    is_idle[folder] = is_idle.get(folder, True) and (each.written_at or 0.0) <= before
        for epoch in [epoch for epoch, idle in is_idle.items() if idle]:
            for folder in (epoch, f"{MARKS}/{epoch}"):
                async for some in inventory.found(folder=folder):
                    await inventory.delete(some)
                    deleted += len(some)
    return deleted


def _found(listed: "ObjectMeta") -> Found | None:
    """Return what an object is: a block, a pack or a mark; None of what is not ours."""
    path, stored = listed["path"], listed["last_modified"].timestamp()
    if match := RECORD.fullmatch(path):
        return Found(path, Place.of(path), listed["size"], int(match["size"] or 1), stored)
    return Found(path, Place.of(without_mark(path)), listed["size"], 0, stored) if is_mark(path) else None


async def _delete(store: ObjectStore, paths: list[str]) -> None:
    """Delete objects, by one request where the store has such. What is gone is no error."""
    try:
        if paths:
            await obstore.delete_async(store, paths)
    except FileNotFoundError:  # a store without bulk deletion stops at the first that is absent
        for path in paths:
            with suppress(FileNotFoundError):
                await obstore.delete_async(store, path)
