"""What lies in Redis or Valkey, for operators: only keys with the tier's prefix whose name is one of ours.

Deleting a tenant's blocks from Redis or Valkey. For a job of your own, beside the caches.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from redis.exceptions import RedisClusterException, RedisError, ResponseError

from tiered_kv.media.backend import Block, Found, Inventory, Outcome, Place
from tiered_kv.media.record import HEADER_BYTES
from tiered_kv.values.errors import BackendUnavailableError
from tiered_kv.values.keys import salt_digest
from tiered_kv_backends.connecting import Address
from tiered_kv_backends.paths import RECORD, salt_folder
from tiered_kv_backends.redis.resp import command
from tiered_kv_backends.redis.servers import MOVING, RedisSettings, Server, Servers

_LOOKED_AT_ONCE = 1000
_WALKS = 3
_GLOB = re.compile(rb"([][*?\\])")


class RedisInventory(Inventory):
    """Of one server, or of all nodes of a cluster."""

    def __init__(self, servers: Servers, prefix: str) -> None:
        self._servers, self._prefix = servers, prefix.encode()
        self._holders: dict[str, Server] = {}

    async def found(self) -> AsyncIterator[list[Found]]:
        """Walk all keys, about a thousand at a time, and ask how long their values are: 0 of what is no string."""
        pattern = _GLOB.sub(rb"\\\1", self._prefix) + b"*"
        with self._doing("list blocks"):
            servers = await self._servers.all()
            holders = self._servers.holders
            for server in servers:
                cursor = -1
                while cursor:
                    cursor, names = await server.client.scan(max(0, cursor), match=pattern, count=_LOOKED_AT_ONCE)
                    paths = [bytes(name)[len(self._prefix) :].decode("latin-1") for name in names]  # type: ignore[arg-type]  # bytes: nothing is decoded
                    paths = [path for path in paths if RECORD.fullmatch(path)]
                    questions = [command(b"STRLEN", self._prefix + path.encode()) for path in paths]
                    lengths = await server.count(questions) if questions else []
                    self._holders |= dict.fromkeys(paths, server)
                    found = zip(paths, lengths, strict=True)
                    yield [Found(path, Place.of(path), _length(n)) for path, n in found if n != 0]
            if await _have_moved(self._servers, holders, self._prefix):
                raise BackendUnavailableError(
                    f"{self._servers}: its slots are moving, and what moved may not be listed"
                )

    async def read(self, found: Found) -> bytes | bytearray | None:
        """Get one value, if it is still as long as it was; nothing of one that can be no record."""
        if found.is_too_long or not found.num_bytes:
            return b""
        name, value = self._prefix + found.where.encode(), bytearray(found.num_bytes)
        header, payload = memoryview(value)[:HEADER_BYTES], memoryview(value)[HEADER_BYTES:]
        into = Block(header, payload, len(payload))
        with self._doing("read a block"):
            async with self._holders[found.where].bodies.connection() as connection:
                (answer,) = await connection.get([command(b"GET", name)], [into])
            if isinstance(answer, str):
                raise ResponseError(answer)
        return value if answer is Outcome.HIT else None

    async def delete(self, found: Sequence[Found]) -> None:
        """Unlink keys, in one round trip per server."""
        with self._doing("delete blocks"):
            for server in {id(each): each for each in self._holders.values()}.values():
                names = [each.where for each in found if self._holders[each.where] is server]
                await _counts(server, [command(b"UNLINK", self._prefix + name.encode()) for name in names])

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, RedisError, RedisClusterException) as error:
            self._servers.scrub(error)
            raise BackendUnavailableError(f"{self._servers}: could not {what}: {error}") from error


@asynccontextmanager
async def open_inventory(settings: RedisSettings) -> AsyncIterator[RedisInventory]:
    """Yield the inventory of the tier's servers; they are connected to when they are asked.

    Raises:
        ConfigurationError: A certificate's file cannot be used.
    """
    servers = Servers(settings)
    try:
        yield RedisInventory(servers, settings.prefix)
    finally:
        await servers.aclose()


def _length(answer: int | str) -> int:
    """Return how long a value is, as STRLEN says; others may have put what is no string under a block's name."""
    if isinstance(answer, int):
        return answer
    if answer.startswith("WRONGTYPE"):
        return 0
    raise ResponseError(answer)


async def _counts(server: Server, commands: Sequence[bytes]) -> list[int]:
    counts = []
    for count in await server.count(commands) if commands else ():
        if isinstance(count, str):
            raise ResponseError(count)
        counts.append(count)
    return counts


async def delete_tenant(settings: RedisSettings | Mapping[str, Any] | str, salt: str | bytes) -> int:
    """Delete the blocks of one salt, of every model, epoch and shard. Walks all keys, a thousand at a time.

    Nothing else goes that happens to have the prefix: another deployment's may begin with it.

    Returns:
        How many blocks were deleted.

    Raises:
        ConfigurationError: No settings of this medium, or a certificate's file cannot be used.
        BackendUnavailableError: A server failed, or slots of a cluster go on moving; what was deleted until then stays
            deleted.
    """
    settings = RedisSettings.of(settings)
    folder = salt_folder(await asyncio.to_thread(settings.on_medium, salt_digest(salt)))
    servers = Servers(settings)
    try:
        return await _delete_everywhere(servers, settings.prefix.encode(), folder)
    except (OSError, RedisError, RedisClusterException) as error:
        servers.scrub(error)
        raise BackendUnavailableError(f"{servers}: could not delete a tenant: {error}") from error
    finally:
        await servers.aclose()


async def _delete_everywhere(servers: Servers, prefix: bytes, folder: str) -> int:
    """Look at each node, and again if slots have moved meanwhile: to where was looked, from where was not."""
    num_deleted = 0
    for _ in range(_WALKS):
        to_look_at = await servers.all()
        holders, is_whole = servers.holders, True
        for server in to_look_at:
            num_gone, are_all_gone = await _delete(server, prefix, folder)
            num_deleted += num_gone
            is_whole &= are_all_gone
        if not await _have_moved(servers, holders, prefix) and is_whole:
            return num_deleted
    raise BackendUnavailableError(f"{servers}: its slots are moving: delete the tenant again once they do not")


async def _have_moved(servers: Servers, holders: Mapping[int, Address], prefix: bytes) -> bool:
    """Say whether a slot is not where it was before, or on its way."""
    await servers.all()
    return servers.holders != holders or await servers.are_moving(prefix)


async def _delete(server: Server, prefix: bytes, folder: str) -> tuple[int, bool]:
    """Return how many blocks were deleted, and whether none was left that another node has, or gets."""
    pattern = b"%b*/%b/*" % (_GLOB.sub(rb"\\\1", prefix), folder.encode())
    cursor, num_deleted, is_whole = 0, 0, True
    while True:
        cursor, names = await server.client.scan(cursor, match=pattern, count=_LOOKED_AT_ONCE)
        found = [bytes(name) for name in names]  # type: ignore[arg-type]  # bytes: nothing is decoded
        paths = [(name, name[len(prefix) :].decode("latin-1")) for name in found]
        mine = [name for name, path in paths if RECORD.fullmatch(path) and Place.of(path).salt == folder]
        unlinks = [command(b"UNLINK", name) for name in mine]
        for deleted in await server.count(unlinks) if unlinks else ():
            if not isinstance(deleted, str):
                num_deleted += deleted
            elif deleted.partition(" ")[0] in MOVING:
                is_whole = False
            else:
                raise ResponseError(deleted)
        if not cursor:
            return num_deleted, is_whole
