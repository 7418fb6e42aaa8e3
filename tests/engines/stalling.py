"""A medium that stalls, or is full, when a test says so."""

import asyncio
from collections.abc import Sequence

from tiered_kv import BackendUnavailableError, Block, BlockKey, Outcome
from tiered_kv_backends.shared_fs import SharedFSBackend


class StallingBackend(SharedFSBackend):
    """Never reads once there is a file ``stall`` beside it, never writes at ``stall-writes``, fails to at ``full``."""

    class Settings(SharedFSBackend.Settings):
        """As the medium that it is otherwise."""

        medium: str = "stalling:StallingBackend"

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Read, or never end."""
        if self.settings.path.with_name("stall").exists():
            await asyncio.Event().wait()
        return await super().read(keys, into)

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Write, or never end, or fail."""
        if self.settings.path.with_name("stall-writes").exists():
            await asyncio.Event().wait()
        if self.settings.path.with_name("full").exists():
            raise BackendUnavailableError("no space is left")
        return await super().write(keys, blocks)
