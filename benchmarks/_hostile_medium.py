"""A shared directory that is far away, hangs, is full or fails, as its settings say: for `_engines_hostile`."""

import asyncio
import errno
from collections.abc import Sequence
from typing import Literal

from tiered_kv import BackendUnavailableError, Block, BlockKey, Outcome
from tiered_kv_backends.shared_fs.shared_fs_backend import SharedFSBackend


class HostileBackend(SharedFSBackend):
    """As its settings say, from the first call on."""

    class Settings(SharedFSBackend.Settings):
        """As the medium that it is otherwise."""

        medium: str = "_hostile_medium:HostileBackend"
        delay_s: float = 0.0
        """How much longer each call takes."""
        hangs: Literal["", "lookups", "reads", "writes"] = ""
        """Which calls never end."""
        fails: Literal["", "writes", "all"] = ""
        """Which calls fail: writes as on a full disk, or all of them as on a broken one."""

    settings: Settings

    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Say which are there."""
        await self._suffer("lookups")
        return await super().lookup(keys)

    async def lookup_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Count the first that are there."""
        await self._suffer("lookups")
        return await super().lookup_prefix(keys)

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Read."""
        await self._suffer("reads")
        return await super().read(keys, into)

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Write."""
        await self._suffer("writes")
        return await super().write(keys, blocks)

    async def _suffer(self, calls: str) -> None:
        await asyncio.sleep(self.settings.delay_s)
        if self.settings.hangs == calls:
            await asyncio.Event().wait()
        if self.settings.fails in {calls, "all"}:
            raise BackendUnavailableError("planned") from OSError(
                errno.ENOSPC if self.settings.fails == "writes" else errno.EIO, "planned"
            )
