"""What lies in a bucket, for operators: only objects whose whole path is one of ours."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore

from tiered_kv.inventory import Found, Inventory, Place
from tiered_kv_backends.paths import RECORD
from tiered_kv_backends.s3.client import S3Settings, make_store, translate

_AT_ONCE = 1000


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

    async def read(self, found: Found) -> bytes | None:
        """Get one object."""
        try:
            return bytes(await (await obstore.get_async(self._store, found.where)).bytes_async())
        except FileNotFoundError:
            return None
        except (BaseError, OSError, ValueError) as error:
            raise translate(error, "read a block", self._settings) from error

    async def delete(self, found: Sequence[Found]) -> None:
        """Delete objects, up to 1,000 by one request."""
        try:
            for start in range(0, len(found), _AT_ONCE):
                await obstore.delete_async(self._store, [each.where for each in found[start : start + _AT_ONCE]])
        except FileNotFoundError:
            pass
        except (BaseError, OSError, ValueError) as error:
            raise translate(error, "delete blocks", self._settings) from error


@asynccontextmanager
async def open_inventory(settings: S3Settings) -> AsyncIterator[BucketInventory]:
    """Yield the inventory of a bucket.

    Raises:
        ConfigurationError: No client can be made of the settings.
    """
    yield BucketInventory(make_store(settings), settings)
