"""The S3 medium on a Ceph gateway, on files and in memory, and what it does when the gateway fails."""

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import ceph_server
from ceph_server import CephServer
from tiered_kv.testing import BackendTests, open_backend
from tiered_kv_backends.s3 import S3Backend, S3Settings

_PREFIXES = itertools.count()


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephServer]:
    """One gateway with a bucket for all tests."""
    if not ceph_server.is_installed():
        pytest.skip(ceph_server.MISSING)
    with ceph_server.ceph_server(tmp_path_factory.mktemp("ceph")) as server:
        server.make_bucket("blocks")
        yield server


def settings_of(ceph: CephServer, **changes: object) -> S3Settings:
    """Return settings for a prefix that nobody else uses."""
    return S3Settings.model_validate(
        {
            "url": f"s3://blocks/test/{next(_PREFIXES)}",
            "endpoint": ceph.endpoint,
            "access_key_id": ceph_server.ACCESS_KEY,
            "secret_access_key": ceph_server.SECRET_KEY,
            **changes,
        }
    )


class TestOnCeph(BackendTests):
    survives_reopening = True

    @pytest.fixture
    async def backend(self, ceph: CephServer) -> AsyncIterator[S3Backend]:
        """One with a prefix of its own."""
        async with open_backend(S3Backend(settings_of(ceph))) as backend:
            yield backend


class TestOnFiles(BackendTests):
    survives_reopening = True

    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[S3Backend]:
        """One in the test's folder."""
        async with open_backend(S3Backend(S3Settings(url=f"file://{tmp_path}/objects"))) as backend:
            yield backend


class TestInMemory(BackendTests):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[S3Backend]:
        """One that starts empty."""
        async with open_backend(S3Backend(S3Settings(url="memory:///"))) as backend:
            yield backend
