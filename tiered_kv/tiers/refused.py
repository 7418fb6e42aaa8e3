"""Whole records in an owned tier that its keys do not open: not found, and kept for a start that has the key.

Their slots are withheld: no block is put there. At most an eighth of the tier is kept so, that of the first ones met;
further ones are forgotten, as broken ones are.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.table import Slots
from tiered_kv.keys import Names, rows_of

_MOST_PARTS: Final = 8


class Refused:
    """Which records those are, by name. For the event loop's thread."""

    def __init__(self) -> None:
        self._slots: dict[bytes, int] = {}
        self._being_forgotten: set[int] = set()

    def __len__(self) -> int:
        return len(self._slots)

    def keep(self, names: Names, slots: Slots, num_slots: int) -> NDArray[np.bool_]:
        """Keep records that have just been refused; say which.

        Args:
            names: ``(n, 4)``.
            slots: Where they are.
            num_slots: Of the tier.
        """
        most, kept = num_slots // _MOST_PARTS, np.zeros(len(names), np.bool_)
        for i, (name, slot) in enumerate(zip(rows_of(names), slots.tolist(), strict=True)):
            if name not in self._slots and len(self._slots) < most:
                self._slots[name] = slot
            kept[i] = self._slots.get(name) == slot
        return kept

    def take(self, names: Names) -> Slots:
        """Keep these no longer; return the slots of those that were kept, which are withheld until `forgotten`."""
        if not self._slots:
            return np.empty(0, np.int64)
        found = [slot for name in rows_of(names) if (slot := self._slots.pop(name, -1)) >= 0]
        self._being_forgotten.update(found)
        return np.array(found, np.int64)

    def forgotten(self, slots: Slots) -> None:
        """Withhold slots of `take` no longer."""
        self._being_forgotten.difference_update(slots.tolist())

    def drop_beyond(self, num_slots: int, lost: NDArray[np.bool_] | None) -> Slots:
        """Keep none in slots that the tier does not have any more, or that its medium has lost; say in which."""
        gone = [n for n, at in self._slots.items() if at >= num_slots or (lost is not None and bool(lost[at]))]
        return np.array([self._slots.pop(name) for name in gone], np.int64)

    def withheld(self, lost: NDArray[np.bool_] | None, max_slots: int) -> NDArray[np.bool_] | None:
        """Say of each slot whether no block is to be put there: where these are, or the medium has lost it.

        Takes time in the size of the tier, some 4 ms a million slots: for when the medium has lost some.

        None: blocks may be put everywhere.
        """
        if not self._slots and not self._being_forgotten:
            return lost
        is_withheld = np.zeros(max_slots, np.bool_) if lost is None else lost.copy()
        is_withheld[[*self._slots.values(), *self._being_forgotten]] = True
        return is_withheld

    def all(self) -> tuple[Names, Slots]:
        """Return the names and slots of all."""
        names = np.frombuffer(b"".join(self._slots), np.uint64).reshape(-1, 4)
        return names, np.fromiter(self._slots.values(), np.int64, len(self._slots))

    def clear(self) -> None:
        """Keep none."""
        self._slots.clear()
