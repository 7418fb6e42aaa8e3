"""What lies in Redis or Valkey, for operators: only keys with the tier's prefix whose name is one of ours."""

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from redis.exceptions import RedisClusterException, RedisError, ResponseError

from tiered_kv.media.backend import Block, Found, Inventory, Outcome, Place
from tiered_kv.media.record import HEADER_BYTES
from tiered_kv.values.errors import BackendUnavailableError
from tiered_kv_backends.paths import RECORD
from tiered_kv_backends.redis.resp import command
from tiered_kv_backends.redis.servers import MOVING, RedisSettings, Server, Servers

_LOOKED_AT_ONCE = 1000
_WALKS = 3
_GLOB = re.compile(rb"([][*?\\])")


class SlotsMovingError(BackendUnavailableError):
    """What lies in a cluster cannot be told from what is on its way."""


class RedisInventory(Inventory):
    """Of one server, or of all nodes of a cluster."""

    def __init__(self, servers: Servers, prefix: str) -> None:
        self._servers, self._prefix = servers, prefix.encode()
        self._holders: dict[str, Server] = {}

    async def found(self, salt: str = "") -> AsyncIterator[list[Found]]:
        """Walk all keys, about a thousand at a time, and ask how long their values are: 0 of what is no string."""
        pattern = _GLOB.sub(rb"\\\1", self._prefix) + (f"*/{salt}/*" if salt else "*").encode()
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
            await self._servers.all()
            if self._servers.holders != holders or await self._servers.are_moving(self._prefix):
                raise SlotsMovingError(f"{self._servers}: its slots are moving, and what moved may not be listed")

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
        await self.delete_some(found)

    async def delete_of(self, salt: str) -> int:
        """Delete what is of one salt, and look again if slots have moved: to where was looked, from where was not."""
        num_deleted = 0
        for left in reversed(range(_WALKS)):
            try:
                async for some in self.found(salt):
                    num_deleted += await self.delete_some([each for each in some if each.place.salt == salt])
                break
            except SlotsMovingError:
                if not left:
                    raise
        return num_deleted

    async def delete_some(self, found: Sequence[Found]) -> int:
        """Unlink keys, in one round trip per server; return how many of them were there still."""
        num_gone = 0
        with self._doing("delete blocks"):
            for server in {id(each): each for each in self._holders.values()}.values():
                names = [each.where for each in found if self._holders[each.where] is server]
                unlinks = [command(b"UNLINK", self._prefix + name.encode()) for name in names]
                num_gone += sum(map(_number, await server.count(unlinks) if unlinks else ()))
        return num_gone

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
    if isinstance(answer, str) and answer.startswith("WRONGTYPE"):
        return 0
    return _number(answer)


def _number(answer: int | str) -> int:
    if isinstance(answer, int):
        return answer
    if answer.partition(" ")[0] in MOVING:
        raise SlotsMovingError(f"slots of the cluster are moving: {answer}")
    raise ResponseError(answer)
