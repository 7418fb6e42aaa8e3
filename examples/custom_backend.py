"""A storage medium of one's own, here an SQLite database, as the last tier of a cache.

    python examples/custom_backend.py [database]

Keys come in and bytes go out, in batches, with one outcome per key. It passes `tiered_kv.testing.BackendTests`:
``tests/examples/test_custom_backend.py`` is all it takes.
"""

import asyncio
import sqlite3
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from tiered_kv import (
    Backend,
    BackendContext,
    BackendUnavailableError,
    Block,
    BlockKey,
    ConfigurationError,
    CPUTier,
    GPULoadStoreSpec,
    KVLayout,
    ModelIdentity,
    Outcome,
    StorageTierSettings,
    TieredKV,
    check_lengths,
    hash_blocks,
)


class SQLiteBackend(Backend):
    """Records in a table, the oldest deleted when there are too many."""

    class Settings(StorageTierSettings):
        """``{"medium": "custom_backend:SQLiteBackend", "path": "kv.sqlite"}``."""

        medium: str = "custom_backend:SQLiteBackend"
        path: Path
        max_blocks: int = 10_000

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    async def open(self, context: BackendContext) -> None:
        """Open the database, in the one thread that will use it."""
        self._thread = context.workers(1)
        try:
            self._database = await self._thread.run(self._connect)
        except sqlite3.Error as error:
            raise ConfigurationError(f"{self.settings.path}: {error}") from error

    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Say HIT or MISS for each key."""
        found = await self._for_each("SELECT 1 FROM records WHERE name = ?", [(key.path,) for key in keys])
        return [Outcome.HIT if rows else Outcome.MISS for rows in found]

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Copy the records out; `Block.fill` refuses those of another length."""
        check_lengths(keys, into)
        found = await self._for_each("SELECT record FROM records WHERE name = ?", [(key.path,) for key in keys])
        hit = {True: Outcome.HIT, False: Outcome.CORRUPT}
        return [hit[into[i].fill(rows[0][0])] if rows else Outcome.MISS for i, rows in enumerate(found)]

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Copy the records in; a replaced one is the newest again."""
        check_lengths(keys, blocks)
        records = [(key.path, bytes(block)) for key, block in zip(keys, blocks, strict=True)]
        await self._for_each("REPLACE INTO records VALUES (?, ?)", records)
        oldest = "DELETE FROM records WHERE rowid <= (SELECT max(rowid) FROM records) - ?"
        await self._for_each(oldest, [(self.settings.max_blocks,)])
        return [Outcome.STORED] * len(keys)

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Forget the keys."""
        await self._for_each("DELETE FROM records WHERE name = ?", [(key.path,) for key in keys])

    async def aclose(self) -> None:
        """Close the database."""
        await self._thread.run(self._database.close)

    async def _for_each(self, statement: str, rows: Sequence[tuple[object, ...]]) -> list[list[tuple[bytes]]]:
        """Run a statement once per row of parameters, in one transaction; return what each found."""

        def run() -> list[list[tuple[bytes]]]:
            with self._database:
                return [self._database.execute(statement, row).fetchall() for row in rows]

        try:
            return await self._thread.run(run)
        except sqlite3.Error as error:
            raise BackendUnavailableError(f"{self.settings.path}: {error}") from error

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.settings.path)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE IF NOT EXISTS records (name TEXT PRIMARY KEY, record BLOB)")
        return database


async def serve(path: Path, kv_caches: list[torch.Tensor], prompt: Sequence[int]) -> int:
    """Load a prompt's blocks, if a cache before this one stored them, and store them; return how many were loaded."""
    tiers: list[CPUTier | Backend] = [CPUTier(capacity="16MiB"), SQLiteBackend(SQLiteBackend.Settings(path=path))]
    layout = KVLayout.from_tensors(kv_caches, block_size=16)
    async with TieredKV(tiers, model=ModelIdentity("example", weights="random"), layout=layout) as kv:
        kv.register_kv_caches(kv_caches)
        keys = hash_blocks(prompt, block_size=16)
        loaded = await kv.load(keys, GPULoadStoreSpec(range(len(keys))))
        stored = await kv.store(keys[loaded.num_blocks :], GPULoadStoreSpec(range(loaded.num_blocks, len(keys))))
        await stored.settled()
        return loaded.num_blocks


async def main(path: Path) -> None:
    """Store the KV of a prompt in one cache, and load it into another engine's tensors by the next."""
    prompt = list(range(160))
    torch.manual_seed(0)  # another run finds the same KV in the same file
    computed = [torch.randn(2, 10, 16, 2, 64) for _layer in range(4)]  # K and V, blocks, tokens, heads, dimension
    print("first cache, blocks loaded: ", await serve(path, computed, prompt))
    fresh = [torch.zeros_like(layer) for layer in computed]
    print("second cache, blocks loaded:", await serve(path, fresh, prompt))
    print("the same bytes:", all(torch.equal(a, b) for a, b in zip(computed, fresh, strict=True)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else f"{scratch}/kv.sqlite")))
