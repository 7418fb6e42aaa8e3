"""Redis and Valkey."""

from tiered_kv_backends.redis.redis_backend import RedisBackend
from tiered_kv_backends.redis.tenants import delete_tenant

__all__ = ["RedisBackend", "delete_tenant"]
