"""The ``s3`` medium and obstore alone, on a Ceph gateway of its own."""

import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import obstore

from _remote_common import Bare, MissingError, Sides, counted, share
from tiered_kv.media.backend import Block
from tiered_kv_backends.s3 import S3Backend, S3Settings
from tiered_kv_backends.s3.s3_client import make_store

sys.path.append(str(Path(__file__).parent.parent / "tests" / "servers"))
import ceph_server

_ASKED_AT_ONCE = 32


@asynccontextmanager
async def serve() -> AsyncIterator[Sides]:
    """Yield both sides while a gateway runs. Each side has requests for one block under way at a time, as many tasks.

    Raises:
        MissingError: There is no Ceph.
    """
    if not ceph_server.is_installed():
        raise MissingError(ceph_server.MISSING)
    with (
        tempfile.TemporaryDirectory(prefix="ceph-benchmark-") as folder,
        ceph_server.ceph_server(Path(folder) / "ceph") as server,
    ):
        server.make_bucket("blocks")
        settings = S3Settings.model_validate(
            {
                "url": "s3://blocks/benchmark",
                "endpoint": server.endpoint,
                "access_key_id": ceph_server.ACCESS_KEY,
                "secret_access_key": ceph_server.SECRET_KEY,
                "timeout_s": 60,
                "answer_ttl_s": 0,  # every question is asked
            }
        )
        store = make_store(settings)

        async def put(name: str, block: Block) -> None:
            await obstore.put_async(store, name, list(block.segments), use_multipart=False)

        async def get(name: str, _: Block) -> None:
            await (await obstore.get_async(store, name)).bytes_async()

        async def count_present(names: Sequence[str]) -> int:
            found = 0

            async def head(name: str, _: object) -> None:
                nonlocal found
                await obstore.head_async(store, name)
                found += 1

            await share([head] * _ASKED_AT_ONCE, names, names)
            return found

        with counted(S3Backend, "_exists") as num_heads:
            yield Sides(S3Backend(settings), "client", _all_of(put), _all_of(get), count_present, num_heads)


def _all_of(move: Callable[[str, Block], Awaitable[object]]) -> Bare:
    return lambda names, blocks, concurrency: share([move] * concurrency, names, blocks)
