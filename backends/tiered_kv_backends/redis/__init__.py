"""Redis and Valkey."""

try:
    import redis.asyncio  # noqa: F401 - before what needs it
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{__name__} needs redis: pip install 'tiered-kv[redis]'", name=error.name) from error

from tiered_kv_backends.redis.redis_backend import RedisBackend

__all__ = ["RedisBackend"]
