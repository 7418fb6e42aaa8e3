"""The ``mooncake`` medium and Mooncake's own client, on a master and a process that gives memory."""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from _remote_common import Bare, MissingError, Sides, counted
from tiered_kv.media.backend import Block

sys.path.append(str(Path(__file__).parent.parent / "tests" / "servers"))
from mooncake_server import mooncake_server

SEGMENT_BYTES = 768 << 20
LEASE_MS = 10_000
"""The master's own default: no batch outlives it."""
_BUFFER_BYTES = 16 << 20
Move = Callable[[list[str], list[list[int]], list[list[int]]], list[int]]


@asynccontextmanager
async def serve() -> AsyncIterator[Sides]:
    """Yield both sides while a store runs. The bare client moves all blocks that are under way by one call.

    Raises:
        MissingError: Its client or libibverbs is missing.
    """
    with (
        tempfile.TemporaryDirectory(prefix="mooncake-benchmark-") as folder,
        ThreadPoolExecutor(1) as thread,
    ):
        running = mooncake_server(Path(folder), SEGMENT_BYTES, LEASE_MS)
        try:
            server = running.__enter__()
        except pytest.skip.Exception as missing:
            raise MissingError(str(missing)) from None
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # noqa: PLC0415 - it is there now

            from tiered_kv_backends.mooncake import MooncakeBackend  # noqa: PLC0415 - it may not be installed

            loop, store, config = asyncio.get_running_loop(), MooncakeDistributedStore(), ReplicateConfig()
            master = server.url.removeprefix("mooncake://")
            code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, _BUFFER_BYTES, "tcp", "", master)
            if code:
                raise MissingError(f"the client cannot join the store: {code}")

            def all_of(move: Move) -> Bare:
                async def batches(names: Sequence[str], blocks: Sequence[Block], concurrency: int) -> None:
                    for start in range(0, len(names), concurrency):
                        part = [block.segments for block in blocks[start : start + concurrency]]
                        pointers = [[np.frombuffer(each, np.uint8).ctypes.data for each in pair] for pair in part]
                        sizes = [[len(each) for each in pair] for pair in part]
                        some = list(names[start : start + concurrency])
                        codes = await loop.run_in_executor(thread, move, some, pointers, sizes)
                        if min(codes) < 0:
                            raise OSError(f"the client says {min(codes)}")

                return batches

            async def count_present(names: Sequence[str]) -> int:
                return sum(await loop.run_in_executor(thread, store.batch_is_exist, list(names)))

            def put(names: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
                codes: list[int] = store.batch_put_from_multi_buffers(names, pointers, sizes, config)
                return codes

            backend = MooncakeBackend(MooncakeBackend.Settings(url=server.url, timeout_s=60))
            with counted(MooncakeBackend, "_call") as num_calls:
                yield Sides(
                    backend,
                    "client",
                    all_of(put),
                    all_of(store.batch_get_into_multi_buffers),
                    count_present,
                    num_calls,
                    reset=server.clear,  # a key that is there, and was read lately, would not be written again
                )
            store.close()
        finally:
            running.__exit__(None, None, None)
