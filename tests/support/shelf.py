"""A shared tier in this process: what one cache has put there others find, a rank or a later one; it can stall."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tiered_kv import Block, BlockKey, Outcome
from tiered_kv_backends.memory import MemoryBackend


class Shelf(MemoryBackend):
    """``{"medium": "tests.support.shelf:Shelf", "capacity": "4MiB"}``. Empty it first: all of a process share it.

    Attributes:
        shelf: What is there.
        stalled: Keys of blocks whose reads never end, by the first bytes of their hashes.
    """

    shelf: ClassVar[OrderedDict[BlockKey, bytes]] = OrderedDict()
    stalled: ClassVar[set[bytes]] = set()

    class Settings(MemoryBackend.Settings):
        """Any ``medium``: it is named by its path."""

        name: str = "shelf"

    def __init__(self, settings: Settings | Mapping[str, Any] | str) -> None:
        super().__init__(settings)
        self._records = self.shelf

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Copy the records out, or hang."""
        if any(key.hash[:8] in self.stalled for key in keys):
            await asyncio.Event().wait()
        return await super().read(keys, into)
