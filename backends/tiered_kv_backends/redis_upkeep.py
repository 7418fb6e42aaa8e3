"""Deleting a tenant's blocks from Redis or Valkey. For a job of your own, beside the caches."""

import re
from collections.abc import Mapping
from typing import Any

from redis.exceptions import RedisClusterException, RedisError, ResponseError

from tiered_kv.errors import BackendUnavailableError
from tiered_kv.keys import salt_digest
from tiered_kv_backends.redis_servers import RedisSettings, Server, Servers
from tiered_kv_backends.resp import command

_LOOKED_AT_ONCE = 1000
_GLOB = re.compile(rb"([][*?\\])")


async def delete_tenant(settings: RedisSettings | Mapping[str, Any] | str, salt: str | bytes) -> int:
    """Delete the blocks of one salt, of every model, epoch and shard. Walks all keys, a thousand at a time.

    Returns:
        How many blocks were deleted.

    Raises:
        ConfigurationError: No settings of this medium, or a certificate's file cannot be used.
        BackendUnavailableError: A server failed; what was deleted until then stays deleted.
    """
    settings = RedisSettings.of(settings)
    prefix = _GLOB.sub(rb"\\\1", settings.prefix.encode())
    pattern = b"%b*/%b/*" % (prefix, salt_digest(salt).hex()[:32].encode())
    servers = Servers(settings)
    try:
        return sum([await _delete(server, pattern) for server in await servers.all()])
    except (OSError, RedisError, RedisClusterException) as error:
        servers.scrub(error)
        raise BackendUnavailableError(f"{servers}: could not delete a tenant: {error}") from error
    finally:
        await servers.aclose()


async def _delete(server: Server, pattern: bytes) -> int:
    cursor, num_deleted = 0, 0
    while True:
        cursor, names = await server.client.scan(cursor, match=pattern, count=_LOOKED_AT_ONCE)
        unlinks = [command(b"UNLINK", bytes(name)) for name in names]  # type: ignore[arg-type]  # bytes: nothing is decoded
        for deleted in await server.count(unlinks) if unlinks else ():
            if isinstance(deleted, str):
                raise ResponseError(deleted)
            num_deleted += deleted
        if not cursor:
            return num_deleted
