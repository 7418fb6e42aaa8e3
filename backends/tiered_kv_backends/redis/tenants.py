"""What lies in Redis or Valkey, for operators: only keys with the tier's prefix whose name is one of ours."""

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import cast

from redis.exceptions import ConnectionError as LostError
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from tiered_kv.media.backend import Block, Outcome
from tiered_kv.media.inventory import Found, Inventory, Place
from tiered_kv.media.record import HEADER_BYTES
from tiered_kv.values.errors import BackendUnavailableError
from tiered_kv_backends.paths import RECORD
from tiered_kv_backends.redis.resp import command
from tiered_kv_backends.redis.servers import MOVING, RedisSettings, Server, Servers

_LOOKED_AT_ONCE = 1000
_WALKS = 3
_GLOB = re.compile(rb"([][*?\\])")


class PassingError(BackendUnavailableError):
    """Slots of a cluster are moving, or a connection was lost: who looks again may find all."""


@dataclass(frozen=True)
class _Value(Found):
    """A value, and which server it was found on."""

    server: Server | None = None


class RedisInventory(Inventory):
    """The inventory of one server, or of a cluster's nodes: where one fails, the others are listed and deleted from."""

    def __init__(self, servers: Servers, prefix: str) -> None:
        self._servers, self._prefix = servers, prefix.encode()

    async def found(self, salt: str = "") -> AsyncIterator[list[Found]]:
        """Walk all keys, about a thousand at a time, and ask how long their values are: 0 of what is no string."""
        pattern = _GLOB.sub(rb"\\\1", self._prefix) + (f"*/{salt}/*" if salt else "*").encode()
        failed: BackendUnavailableError | None = None
        with self._doing("list blocks"):
            servers = await self._servers.all()
            holders = self._servers.holders
        for server in servers:
            try:
                async for some, is_moving in self._on(server, pattern):
                    yield some
                    if is_moving:
                        failed = failed or self._moving()
            except BackendUnavailableError as error:
                failed = _graver(failed, error)
        if failed is not None:
            raise failed
        with self._doing("list blocks"):
            await self._servers.all()
            if self._servers.holders != holders or await self._servers.are_moving(self._prefix):
                raise self._moving()

    async def _on(self, server: Server, pattern: bytes) -> AsyncIterator[tuple[list[Found], bool]]:
        """Yield what one server has, and whether it named another for some of it."""
        cursor = -1
        while cursor:
            with self._doing("list blocks"):
                cursor, names = await server.client.scan(max(0, cursor), match=pattern, count=_LOOKED_AT_ONCE)
                paths = [bytes(name)[len(self._prefix) :].decode("latin-1") for name in names]  # type: ignore[arg-type]  # bytes: nothing is decoded
                paths = [path for path in paths if RECORD.fullmatch(path)]
                questions = [command(b"STRLEN", self._prefix + path.encode()) for path in paths]
                lengths = await self._count(server, questions) if questions else []
                here = [(path, _length(n)) for path, n in zip(paths, lengths, strict=True) if n and not _is_moving(n)]
            yield [_Value(path, Place.of(path), n, server=server) for path, n in here], any(map(_is_moving, lengths))

    async def read(self, found: Found) -> bytes | bytearray | None:
        """Get one value, if it is still as long as it was; nothing of one that can be no record."""
        if found.is_too_long or not found.num_bytes:
            return b""
        name, value = self._prefix + found.where.encode(), bytearray(found.num_bytes)
        header, payload = memoryview(value)[:HEADER_BYTES], memoryview(value)[HEADER_BYTES:]
        into = Block(header, payload, len(payload))
        with self._doing("read a block"):
            async with self._servers.in_time(), _server_of(found).bodies.connection() as connection:
                (answer,) = await connection.get([command(b"GET", name)], [into])
            if isinstance(answer, str):
                raise ResponseError(answer)
        return value if answer is Outcome.HIT else None

    async def delete(self, found: Sequence[Found]) -> None:
        """Unlink keys, in one round trip per server."""
        _, failed = await self.delete_some(found)
        if failed is not None:
            raise failed

    async def delete_of(self, salt: str) -> int:
        """Delete what is of one salt, and look again where slots have moved, or a connection was lost."""
        num_deleted, failed = 0, None
        for _ in range(_WALKS):
            failed = None
            try:
                async for some in self.found(salt):
                    num_gone, problem = await self.delete_some([each for each in some if each.place.salt == salt])
                    num_deleted += num_gone
                    failed = _graver(failed, problem)
            except BackendUnavailableError as error:
                failed = _graver(failed, error)
            if not isinstance(failed, PassingError):
                break
        if failed is not None:
            raise failed
        return num_deleted

    async def delete_some(self, found: Sequence[Found]) -> tuple[int, BackendUnavailableError | None]:
        """Unlink keys, in one round trip per server; return how many were there still, and why some may be left."""
        num_gone = 0
        failed: BackendUnavailableError | None = None
        for server in {id(_server_of(each)): _server_of(each) for each in found}.values():
            names = [each.where for each in found if _server_of(each) is server]
            try:
                with self._doing("delete blocks"):
                    unlinks = [command(b"UNLINK", self._prefix + name.encode()) for name in names]
                    answers = await self._count(server, unlinks)
                    num_gone += sum(answer for answer in answers if isinstance(answer, int))
                    for answer in answers:
                        if _is_moving(answer):
                            failed = failed or self._moving()
                        elif isinstance(answer, str):
                            raise ResponseError(answer)
            except BackendUnavailableError as error:
                failed = _graver(failed, error)
        return num_gone, failed

    async def _count(self, server: Server, commands: Sequence[bytes]) -> list[int | str]:
        async with self._servers.in_time():
            return await server.count(commands)

    def _moving(self) -> PassingError:
        return PassingError(f"{self._servers}: its slots are moving, and what moved may not be listed")

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, RedisError, RedisClusterException) as error:
            self._servers.scrub(error)
            why = str(error) or "no answer in time"  # of a time limit, which says nothing
            kind = PassingError if isinstance(error, ConnectionError | LostError) else BackendUnavailableError
            raise kind(f"{self._servers}: could not {what}: {why}") from error


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


def _server_of(found: Found) -> Server:
    server = cast("_Value", found).server
    assert server is not None  # noqa: S101 - all that is found here has one
    return server


def _graver(
    one: BackendUnavailableError | None, other: BackendUnavailableError | None
) -> BackendUnavailableError | None:
    """Return which of two problems is the reason to give up, rather than one for which it is tried again."""
    return other if one is None or (isinstance(one, PassingError) and other is not None) else one


def _is_moving(answer: int | str) -> bool:
    """Say whether an answer names another node, or says that the key may be on either."""
    return isinstance(answer, str) and answer.partition(" ")[0] in MOVING


def _length(answer: int | str) -> int:
    """Return how long a value is, as STRLEN says; others may have put what is no string under a block's name."""
    if isinstance(answer, int):
        return answer
    if answer.startswith("WRONGTYPE"):
        return 0
    raise ResponseError(answer)
