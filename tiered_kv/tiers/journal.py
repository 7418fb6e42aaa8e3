"""What an owned medium is told to remember: which slots were forgotten, and now and then all that it holds.

One such call at a time: what is forgotten before a checkpoint must not come back by it.
"""

import asyncio
from collections.abc import Awaitable, Callable

from tiered_kv.backend import SlotBackend
from tiered_kv.catalog.table import Slots
from tiered_kv.events import TierFailed
from tiered_kv.keys import Names
from tiered_kv.tiers.storage import TierParts


class Journal:
    """Makes these calls for the slots of one tier. Never raises for the medium.

    Attributes:
        owes_checkpoint: Whether the medium remembers what it should not, until a checkpoint goes well: a restart could
            bring that back.
    """

    def __init__(self, parts: TierParts, backend: SlotBackend) -> None:
        self.owes_checkpoint = False
        self._backend = backend
        self._calls = parts.calls
        self._group = parts.group
        self._health = parts.health
        self._tasks = parts.tasks
        self._turn = asyncio.Lock()

    async def forget(self, slots: Slots, on_late: Callable[[], None] | None = None) -> None:
        """Have the medium forget what is in some slots, which nobody uses until this returns."""
        if len(slots) and not await self._note(
            "forget", len(slots), lambda: self._backend.forget(self._group, slots), on_late
        ):
            self.owes_checkpoint = True  # which makes up for it

    async def checkpoint(self, held: Callable[[], tuple[Names, Slots]], num_blocks: int, *, sync: bool) -> None:
        """Have the medium remember what ``held`` says when its turn has come.

        Nobody waits for a call that is late, or whose wait is cancelled: it goes on in a task of the cache.
        """
        late = asyncio.get_running_loop().create_future()

        async def checkpoint() -> None:
            owed, self.owes_checkpoint = self.owes_checkpoint, False
            if not await self._note(
                "checkpoint",
                num_blocks,
                lambda: self._backend.checkpoint(self._group, *held(), sync=sync),
                lambda: late.set_result(None),
            ):
                self.owes_checkpoint |= owed

        noting = self._tasks.spawn(checkpoint(), f"checkpoint {self._health.name}")
        await asyncio.wait({noting, late}, return_when=asyncio.FIRST_COMPLETED)

    async def _note(
        self, doing: str, num_blocks: int, call: Callable[[], Awaitable[None]], on_late: Callable[[], None] | None
    ) -> bool:
        """Make a call when its turn has come; say whether it went well. It is given up if its turn is late."""
        timeout_s = self._health.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            error = f"its turn has not come within {timeout_s:g} s: another call hangs"
            self._health.emit(TierFailed(self._health.name, doing, error, num_blocks))
            return False
        try:
            answer = await self._calls.make(doing, call, num_blocks=num_blocks, on_late=on_late)
        finally:
            self._turn.release()
        return answer.is_well
