"""What every backend promises, on Redis 7, on Valkey 9 and on a cluster with TLS and ACL."""

import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis, RedisCluster

from redis_server import RedisServer, find_binary, make_certificates, run_cluster, run_redis
from tiered_kv.testing import BackendTests, open_backend
from tiered_kv.values.specs import LoadStoreSpec, RemoteLoadStoreSpec
from tiered_kv_backends.redis.redis_backend import RedisBackend
from tiered_kv_backends.redis.servers import RedisSettings, Servers

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


async def values_at(spec: LoadStoreSpec, login: Mapping[str, str] | None = None) -> list[bytes]:
    """Read what a spec says with a client of our own."""
    assert isinstance(spec, RemoteLoadStoreSpec)
    parts = urlsplit(spec.url)
    one = parts._replace(netloc=parts.netloc.split(",")[0], query="").geturl()
    make: Any = RedisCluster if "cluster=true" in parts.query else Redis
    client = make.from_url(one, **(login or {}))
    try:
        return [await client.get(spec.names[number]) for number in spec.ids]
    finally:
        await client.aclose()


class TestRedis(BackendTests):
    capacity_bytes = None  # the server's maxmemory is its limit
    survives_reopening = True

    @pytest.fixture
    async def backend(self, redis: RedisServer) -> AsyncIterator[RedisBackend]:
        """With an expiry, which makes reads GETEX."""
        async with open_backend(backend_of(redis)) as backend:
            yield backend

    async def records_at(self, spec: LoadStoreSpec) -> list[bytes]:
        """The URL is enough."""
        return await values_at(spec)


class TestValkey(BackendTests):
    capacity_bytes = None  # the server's maxmemory is its limit
    survives_reopening = True

    @pytest.fixture
    async def backend(self, valkey: RedisServer) -> AsyncIterator[RedisBackend]:
        """Without an expiry."""
        async with open_backend(backend_of(valkey, ttl_s=None)) as backend:
            yield backend

    async def records_at(self, spec: LoadStoreSpec) -> list[bytes]:
        """The URL is enough."""
        return await values_at(spec)


class TestClusterWithTLSAndACL(BackendTests):
    capacity_bytes = None  # the server's maxmemory is its limit
    survives_reopening = True

    @pytest.fixture
    async def backend(self, cluster: list[RedisServer], certificates: Path) -> AsyncIterator[RedisBackend]:
        """Logged in as a user who may do no more than it needs."""
        self.certificates = certificates
        async with open_backend(cluster_backend(cluster, certificates)) as backend:
            yield backend

    async def records_at(self, spec: LoadStoreSpec) -> list[bytes]:
        """Log in; who holds which key the client finds out."""
        ca_file = str(self.certificates / "ca.pem")
        return await values_at(spec, {"username": "kv", "password": "correct-horse", "ssl_ca_certs": ca_file})


async def test_a_place_has_no_login(redis: RedisServer) -> None:
    """Where blocks are is told without whatever lets one in, and settings take it as it is."""
    url = f"redis://kv:correct-horse@127.0.0.1:{redis.port}/3"
    servers = Servers(RedisSettings.model_validate({"url": url}))
    assert servers.url == f"redis://127.0.0.1:{redis.port}/3"
    many = {"url": "rediss://kv:secret@a,[::1]:7000", "sentinel_master": "my master"}
    assert Servers(RedisSettings.model_validate(many)).url == "rediss://a:26379,[::1]:7000/0?sentinel_master=my+master"
    settings = RedisSettings.of("redis://a:6379,b:6379/0?cluster=true")
    assert settings.cluster
    assert Servers(settings).url == "redis://a:6379,b:6379/0?cluster=true"
