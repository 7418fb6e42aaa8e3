"""What was evicted while its medium could not be told: absent, whatever the medium says, until it has been told.

Pure data; for the event loop's thread.
"""

from collections import OrderedDict
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.keys import Names, Namespace
from tiered_kv.tiers.batch import Batch

_MOST_NAMES: Final = 1 << 16


class Tombstones:
    """The blocks of one tier that were evicted: those evicted last, and ``most_names`` in all if that is more.

    Attributes:
        serial: Counts evictions, so that what lifts a tombstone lifts none that came after it.
        num_lost: How many went for want of room: they may be found again if their medium never heard of them.
        is_cleared: All that was there before is evicted.
    """

    def __init__(self, *, most_names: int = _MOST_NAMES) -> None:
        self.serial = 0
        self.num_lost = 0
        self.is_cleared = False
        self._most_names = most_names
        self._places: OrderedDict[bytes, tuple[Namespace, int, int]] = OrderedDict()

    def __bool__(self) -> bool:
        return self.is_cleared or bool(self._places)

    def add(self, batch: Batch) -> None:
        """Take blocks for absent from now on."""
        self.serial += 1
        for name, position in zip(batch.names, batch.positions.tolist(), strict=True):
            self._places[name.tobytes()] = batch.namespace, position, self.serial
            self._places.move_to_end(name.tobytes())
        while len(self._places) > max(self._most_names, len(batch)):
            self._places.popitem(last=False)
            self.num_lost += 1

    def add_all(self) -> None:
        """Take everything that was there before for absent."""
        self.serial += 1
        self.is_cleared = True
        self._places.clear()

    def lift(self, batch: Batch, serial: int) -> None:
        """Believe the medium again: it has forgotten these blocks, or has them anew, since eviction ``serial``."""
        for name in (each.tobytes() for each in batch.names if self._places):
            if name in self._places and self._places[name][2] <= serial:
                del self._places[name]

    def holds(self, batch: Batch) -> NDArray[np.bool_]:
        """Say which blocks are to be taken for absent."""
        if not self._places:
            return np.zeros(len(batch), np.bool_)
        return np.array([name.tobytes() in self._places for name in batch.names], np.bool_)

    def names(self) -> Names | None:
        """Return the names of all these blocks; None if there are none."""
        return np.frombuffer(b"".join(self._places), np.uint64).reshape(-1, 4) if self._places else None

    def oldest(self, most: int) -> Batch | None:
        """Return up to ``most`` of the blocks that wait longest, of one namespace; None if there are none."""
        if not self._places:
            return None
        namespace = next(iter(self._places.values()))[0]
        taken = [(n, at) for n, (space, at, _) in islice(self._places.items(), most) if space == namespace]
        names = np.frombuffer(b"".join(name for name, _ in taken), np.uint64).reshape(-1, 4)
        return Batch(namespace, names, np.array([at for _, at in taken], np.int64))
