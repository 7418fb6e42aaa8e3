"""A medium that stalls, or is full, when a test says so."""

import asyncio
from collections.abc import Sequence

from tiered_kv import BackendUnavailableError, Block, BlockKey, Outcome
from tiered_kv_backends.shared_fs.shared_fs_backend import SharedFSBackend


class StallingBackend(SharedFSBackend):
    """Reads nothing while there is a file ``stall`` beside it, for the seconds in it; ``stall-writes``; ``full``.

    From then on there is a file ``stalled``. At ``stall-writes`` it never writes, at ``full`` it fails to.
    """

    class Settings(SharedFSBackend.Settings):
        """As the medium that it is otherwise."""

        medium: str = "stalling:StallingBackend"

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Read, perhaps much later."""
        if (stall := self.settings.path.with_name("stall")).exists():
            seconds = float(stall.read_text())
            stall.with_name("stalled").touch()
            await asyncio.sleep(seconds)
        return await super().read(keys, into)

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Write, or never end, or fail."""
        if self.settings.path.with_name("stall-writes").exists():
            await asyncio.Event().wait()
        if self.settings.path.with_name("full").exists():
            raise BackendUnavailableError("no space is left")
        return await super().write(keys, blocks)
