"""The ``shared_fs`` medium and a bare loop over files, in a directory of this machine, without a network."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from _remote_common import Bare, Sides, counted, share
from tiered_kv.media.backend import Block
from tiered_kv_backends.shared_fs.shared_fs_backend import SharedFSBackend

NUM_THREADS = 32
Move = Callable[[str, Block], None]


@asynccontextmanager
async def serve() -> AsyncIterator[Sides]:
    """Yield both sides. The bare one opens, moves, closes and renames a file per block, each in a thread."""
    with (
        tempfile.TemporaryDirectory(prefix="shared-fs-benchmark-") as folder,
        ThreadPoolExecutor(NUM_THREADS) as threads,
    ):
        root, bare = Path(folder) / "ours", Path(folder) / "bare"
        bare.mkdir()

        def path_of(name: str) -> str:
            return f"{bare}/{name.rpartition('/')[2]}"

        def put(name: str, block: Block) -> None:
            path = path_of(name)
            file = os.open(f"{path}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                for segment in block.segments:
                    os.write(file, segment)
            finally:
                os.close(file)
            os.replace(f"{path}.tmp", path)  # noqa: PTH105 - the bare loop makes no Path

        def get(name: str, block: Block) -> None:
            file = os.open(path_of(name), os.O_RDONLY)
            try:
                os.readv(file, block.segments)
            finally:
                os.close(file)

        def all_of(move: Move) -> Bare:
            async def in_thread(name: str, block: Block) -> None:
                await asyncio.get_running_loop().run_in_executor(threads, move, name, block)

            return lambda names, blocks, concurrency: share([in_thread] * concurrency, names, blocks)

        async def count_present(names: Sequence[str]) -> int:
            paths = [path_of(name) for name in names]
            count = asyncio.get_running_loop().run_in_executor(threads, lambda: sum(map(os.path.exists, paths)))
            return await count

        settings = {"path": root, "capacity": "4GiB", "min_free_fraction": 0.0, "timeout_s": 60}
        backend = SharedFSBackend(SharedFSBackend.Settings.model_validate(settings))
        with counted(SharedFSBackend, "lookup") as num_rounds:
            yield Sides(backend, "loop", all_of(put), all_of(get), count_present, num_rounds)
