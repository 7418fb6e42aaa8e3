"""What a cache has in the engine's own process while it is open, wherever its tiers are: memory, transfers, a loop."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import ClassVar

from tiered_kv.errors import ClosedError, ConfigurationError
from tiered_kv.keys import Shard
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.system import system
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.transfers.bindings import Bindings, Reach
from tiered_kv.transfers.submissions import Submissions
from tiered_kv.transfers.swap import SwapSpace


class EngineSide(ABC):
    """All of it, for the event loop's thread.

    Attributes:
        reads_direct: Whether storage may read into the engine's memory itself.
        shards: Whose parts of the blocks it is of: one rank's, or all.
        tasks: Everything under way.
        bindings: The engine's memory.
        submissions: Transfers of other threads.
        lifetime: Closes what belongs to it.
        loop: The event loop.
    """

    reads_direct: ClassVar[bool]

    def __init__(self, shards: Sequence[Shard], tasks: Tasks, loop_calls: LoopCalls, lifetime: AsyncExitStack) -> None:
        """Begin, in the thread of the running event loop."""
        self.shards = shards
        self.tasks = tasks
        self.bindings = Bindings()
        self.submissions = Submissions(loop_calls)
        self.lifetime = lifetime
        lifetime.callback(self.bindings.forget)
        self._loop_calls = loop_calls
        self.loop = asyncio.get_running_loop()
        self._thread = system().get_ident()

    @abstractmethod
    def of_rank(self, group: int) -> Reach:
        """Return a KV group, as memory is bound to it, of the one rank that this process is of.

        Raises:
            ConfigurationError: The layout has none of this number, or there are several ranks.
        """

    @abstractmethod
    def swap_space(self, group: int) -> SwapSpace:
        """Return the slots that the engine numbers itself for pages of a KV group; made when it is first asked for.

        Raises:
            ConfigurationError: There are several ranks, no such group, no room, or no tensors to swap.
        """

    @abstractmethod
    def deadline(self, deadline_s: float | None) -> float:
        """Return when a load's time is up, on the loop's clock. From any thread."""

    def check_loop(self, *, anywhere: bool = False) -> None:
        """Raise unless a call comes from the event loop that opened the cache, or ``anywhere`` while that is there.

        Raises:
            ClosedError: That event loop is closed: nothing can move or end any more.
            ConfigurationError: This is another thread, or another event loop is running.
        """
        if self.loop.is_closed():
            raise ClosedError("the event loop that opened this TieredKV is closed")
        if anywhere:
            return
        try:
            is_here = asyncio.get_running_loop() is self.loop
        except RuntimeError:  # none is running: between two runs of the loop its thread may ask
            is_here = system().get_ident() == self._thread
        if not is_here:
            raise ConfigurationError(
                "a TieredKV is called on the event loop that opened it; other threads use submit_load, submit_store, "
                "poll, lookup_nowait and membership"
            )
