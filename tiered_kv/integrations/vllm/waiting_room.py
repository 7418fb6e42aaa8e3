"""Room in vLLM's pool for requests that have blocks and wait: nobody can make them give these back.

A request whose load has ended goes on once all is free that its next step fills. vLLM reserves that for those that
wait, but of windows it counts what a load has passed over as blocks that the request has. So it may let several have
blocks of which each lacks what the others have: none would ever go on, nor would any that comes behind them.
"""

from collections.abc import Sequence
from typing import Any


class WaitingRoom:
    """Has a request have blocks and wait, beside others that do, only where all of them can be computed at once."""

    def __init__(self, tables: Sequence[tuple[int, int]]) -> None:
        """Begin with nobody.

        Args:
            tables: By vLLM's block table, tokens of a block, and how many blocks a request has at once at most.
        """
        self._tables = tables
        self._pool: Any = None
        self._lacking: dict[str, int] = {}  # what each of those that wait may come to need beside what it has
        self._is_full = False

    def use_pool(self, pool: Any) -> None:
        """Take vLLM's pool of blocks."""
        self._pool = pool

    def begin_step(self) -> None:
        """Look anew, for whoever is asked for first."""
        self._is_full = False

    def has_for(self, request: Any) -> bool:
        """Say whether a request may have blocks and wait. If not, who comes behind may not either, in this step."""
        others = [lacking for name, lacking in self._lacking.items() if name != request.request_id]
        if not others or self._pool is None:
            return True
        wanted = sum(others) + self._most(request)
        self._is_full = self._is_full or wanted > self._pool.get_num_free_blocks()
        return not self._is_full

    def wait(self, request: Any, tables: Sequence[Sequence[int]]) -> None:
        """Take note that a request waits, and has these blocks, by block table; number 0 is none."""
        num_held = sum(1 for table in tables for block in table if block)
        self._lacking[request.request_id] = max(0, self._most(request) - num_held)

    def ask(self, request: Any) -> None:
        """Take note that vLLM asks for a request: if it waited, its load has failed, and it has no blocks any more."""
        if request.request_id in self._lacking:
            self.wait(request, ())

    def leave(self, name: str) -> None:
        """Take note that a request does not wait any more."""
        self._lacking.pop(name, None)

    def _most(self, request: Any) -> int:
        """Count the blocks that a request has at once at most until its tokens are computed: one more for drafts'."""
        return sum(min(-(-request.num_tokens // size), most) + 1 for size, most in self._tables)
