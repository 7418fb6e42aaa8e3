"""Redis and Valkey."""

from tiered_kv_backends.redis.backend import RedisBackend

__all__ = ["RedisBackend"]
