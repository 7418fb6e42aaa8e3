"""What tests of S3 run against: Ceph's gateway where it can be installed, else a mock, else nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ceph_server
from moto_server import MotoServer, find_moto, moto_server
from ports import free_port

S3Server = ceph_server.CephServer | MotoServer
BUCKET = "blocks"


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Yield a server with a bucket, the best that is there, or skip and say what is missing."""
    if ceph_server.is_installed():
        with ceph_server.ceph_server(folder) as ceph:
            ceph.make_bucket(BUCKET)
            yield ceph
    elif find_moto():
        with moto_server(folder, free_port()) as moto:
            moto.make_bucket(BUCKET)
            yield moto
    else:
        pytest.skip(f"{ceph_server.MISSING}; or pip install 'moto[s3,server]' in an environment of its own")


def is_ceph(server: S3Server) -> ceph_server.CephServer:
    """Return the server if it is the gateway, for what no mock does, or skip."""
    if isinstance(server, ceph_server.CephServer):
        return server
    pytest.skip(ceph_server.MISSING)
