"""What every backend promises, on Redis 7, on Valkey 9 and on a cluster with TLS and ACL."""

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from redis_server import RedisServer, find_binary, make_certificates, run_cluster, run_redis
from tiered_kv.testing import BackendTests, open_backend
from tiered_kv_backends.redis import RedisBackend
from tiered_kv_backends.redis_servers import RedisSettings

ACL = """
user default off
user admin on >admin ~* &* +@all
user kv on >correct-horse ~kv/* +@read +@write +cluster|slots +command
user reader on >reader ~kv/* +@read +cluster|slots +command
"""
_prefixes = (f"kv/{n}/" for n in itertools.count())


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server, without TLS or passwords."""
    with run_redis(find_binary("redis-server"), tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Valkey, which answers as Redis does."""
    with run_redis(find_binary("valkey-server"), tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority and a certificate for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[list[RedisServer]]:
    """Three masters that speak TLS only."""
    folder = tmp_path_factory.mktemp("cluster")
    acl = folder / "users.acl"
    acl.write_text(ACL)
    with run_cluster(find_binary("redis-server"), folder, certificates, acl) as nodes:
        yield nodes


def backend_of(server: RedisServer, **settings: object) -> RedisBackend:
    """Return a backend that no other test's keys are in."""
    return RedisBackend(RedisSettings(**{"url": server.url, "prefix": next(_prefixes), **settings}))


def cluster_backend(cluster: list[RedisServer], certificates: Path, **settings: object) -> RedisBackend:
    """Return a backend on the cluster, logged in as the user of blocks."""
    url = "rediss://" + ",".join(f"127.0.0.1:{node.port}" for node in cluster[:2])
    login = {"username": "kv", "password": "correct-horse", "ca_file": certificates / "ca.pem", "cluster": True}
    return backend_of(cluster[0], **{"url": url, **login, **settings})


class TestRedis(BackendTests):
    capacity_bytes = None  # the server's maxmemory is its limit
    survives_reopening = True

    @pytest.fixture
    async def backend(self, redis: RedisServer) -> AsyncIterator[RedisBackend]:
        """With an expiry, which makes reads GETEX."""
        async with open_backend(backend_of(redis)) as backend:
            yield backend


class TestValkey(BackendTests):
    capacity_bytes = None  # the server's maxmemory is its limit
    survives_reopening = True

    @pytest.fixture
    async def backend(self, valkey: RedisServer) -> AsyncIterator[RedisBackend]:
        """Without an expiry."""
        async with open_backend(backend_of(valkey, ttl_s=None)) as backend:
            yield backend


class TestClusterWithTLSAndACL(BackendTests):
    capacity_bytes = None  # the server's maxmemory is its limit
    survives_reopening = True

    @pytest.fixture
    async def backend(self, cluster: list[RedisServer], certificates: Path) -> AsyncIterator[RedisBackend]:
        """Logged in as a user who may do no more than it needs."""
        async with open_backend(cluster_backend(cluster, certificates)) as backend:
            yield backend
