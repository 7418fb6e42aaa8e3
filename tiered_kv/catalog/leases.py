"""Rights to slots: a lease to read blocks in place, a reservation to fill slots. Both are ``with`` blocks."""

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.table import Slots
from tiered_kv.values.errors import ClosedError
from tiered_kv.values.keys import Names


class _ReleaseSlots(Protocol):
    def __call__(self, held: Slots, *, is_use: bool) -> None: ...


class Lease:
    """The right to read some blocks where they are: until the release none of them moves or is overwritten.

    Attributes:
        slots: ``(n,)`` int64, the slot of each name of the batch, or -1 where there is nothing to read.
    """

    __slots__ = ("_held", "_release", "slots")

    def __init__(self, slots: Slots, held: Slots, release: _ReleaseSlots) -> None:
        """Made by `TierIndex` only. ``held`` are the slots that count this lease, each once, in batch order."""
        self.slots = slots
        self._held: Slots | None = held
        self._release = release

    @property
    def num_prefix(self) -> int:
        """How many leading names of the batch are leased."""
        holes = (self.slots < 0).nonzero()[0]
        return int(holes[0]) if len(holes) else len(self.slots)

    @property
    def is_released(self) -> bool:
        """Whether the right was given back."""
        return self._held is None

    def release(self, *, is_use: bool = False) -> None:
        """Give the right back; a second call does nothing.

        Args:
            is_use: They were asked for, and have been served: as `TierIndex.touch`, for less. To be written down, moved
                or looked at is no use of a block, nor is to be filled.
        """
        if self._held is not None:
            held, self._held = self._held, None
            if len(held):
                self._release(held, is_use=is_use)

    def split(self) -> Callable[[Slots], None]:
        """Trade this lease for a right to each of its slots.

        Returns:
            What gives some of them back; to be called with each slot once.

        Raises:
            ClosedError: It was released already.
        """
        if self._held is None:
            raise ClosedError("split() of a lease that is released: its slots may be another's by now")
        self._held = None
        return partial(self._release, is_use=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Reservation:
    """The sole right to fill some slots. Leaving the ``with`` block gives back every slot that was not committed.

    Attributes:
        slots: ``(n,)`` int64, the slot to fill for each name of the batch, or -1 where there is nothing to do.
        evicted: ``(m, 4)`` names of the blocks that had to go.
    """

    __slots__ = ("_commit", "_give_back", "_is_closed", "_is_open", "_keep", "evicted", "slots")

    def __init__(
        self,
        slots: Slots,
        evicted: Names,
        *,
        commit: Callable[[Slots], Lease],
        keep: Callable[[Slots], Slots],
        give_back: Callable[[Slots], None],
    ) -> None:
        """Made by `TierIndex` only."""
        self.slots = slots
        self.evicted = evicted
        self._is_open = slots >= 0  # reserved, and neither committed nor given back
        self._is_closed = False
        self._commit = commit
        self._keep = keep
        self._give_back = give_back

    def commit(self, ok: NDArray[np.bool_] | None = None) -> Lease:
        """Make filled slots readable and lease them, with no gap between the two.

        May be called again for others. A block that was removed meanwhile is doomed: it is not committed.

        Args:
            ok: ``(n,)``, which blocks of the batch have arrived; all by default. Those without a slot are passed over.

        Returns:
            A lease over the blocks that this call committed. Blocks in bounce slots live as long as the lease does.

        Raises:
            ClosedError: The slots were given back already.
        """
        lease = self._commit(self._chosen(ok))
        self._is_open &= lease.slots < 0
        return lease

    def keep(self, ok: NDArray[np.bool_] | None = None) -> Slots:
        """Make filled slots readable, as `commit` does, and hold none of them: any may be evicted from now on.

        Args:
            ok: As for `commit`.

        Returns:
            ``(n,)`` int64, the slots that are readable now, or -1. Bounce slots are free again: nobody had them.

        Raises:
            ClosedError: As by `commit`.
        """
        slots = self._keep(self._chosen(ok))
        self._is_open &= slots < 0
        return slots

    def _chosen(self, ok: NDArray[np.bool_] | None) -> Slots:
        if self._is_closed:
            raise ClosedError("a reservation that is closed: its slots may be another's by now")
        chosen = self.slots.copy()
        chosen[~(self._is_open if ok is None else self._is_open & ok)] = -1
        return chosen

    def close(self) -> None:
        """Give back what was not committed; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._give_back(self.slots[self._is_open])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
