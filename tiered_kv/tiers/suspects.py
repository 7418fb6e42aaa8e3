"""Blocks of a shared tier that are said to be there and could not be read: absent for a while, each time for longer.

So a block that is broken or lost costs one load now and then, not every load. A store in that while finds it absent and
writes it anew, which is how it is repaired; only what is broken a second time is to be deleted, for the bytes may be
right on the medium and others may read them. Decides at once, never waits; all time comes from ``clock``.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.backend import Outcome
from tiered_kv.keys import Names

_MOST_KEYS: Final = 1024
_FAILURES: Final = 3
"""In a row, before a block that is neither read nor broken is taken for absent."""
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 4.0
"""So that what can be read again is in use again within five seconds, as a tier is."""
_REPAIR_S: Final = 60.0
"""How long a broken block is absent: an engine that misses it has computed and stored it by then."""
_MEMORY_S: Final = 60.0


@dataclass(slots=True)
class _Suspect:
    num_failures: int = 0
    is_corrupt: bool = False
    pause_s: float = 0.0
    absent_until: float = 0.0
    seen_at: float = 0.0


class Suspects:
    """The blocks of one tier that did not go well lately, at most ``most_keys`` of them: the oldest go first."""

    def __init__(self, clock: Callable[[], float], *, most_keys: int = _MOST_KEYS) -> None:
        self._clock = clock
        self._most_keys = most_keys
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()

    def __len__(self) -> int:
        return len(self._suspects)

    def absent(self, names: Names) -> NDArray[np.bool_]:
        """Say which blocks to take for absent now, whatever the medium says."""
        if not self._suspects:
            return np.zeros(len(names), np.bool_)
        now = self._clock()
        found = (self._suspects.get(name.tobytes()) for name in names)
        return np.array([each is not None and now < each.absent_until for each in found], np.bool_)

    def broken(self, names: Names) -> NDArray[np.bool_]:
        """Say which of these are absent because their bytes were not what they should be."""
        is_broken = self.absent(names)
        for n in np.flatnonzero(is_broken):
            is_broken[n] = self._suspects[names[n].tobytes()].is_corrupt
        return is_broken

    def saw(self, names: Names, outcomes: Sequence[Outcome]) -> NDArray[np.bool_]:
        """Take into account how reads of blocks went that the medium had said it has.

        Returns:
            Which blocks were broken before, too, with no write in between: delete them.
        """
        delete = np.zeros(len(names), np.bool_)
        if outcomes.count(Outcome.FAILED) == len(outcomes) > 1:
            return delete  # the medium's trouble, not these blocks': the breaker's to count
        for n, outcome in enumerate(outcomes):
            if outcome is Outcome.HIT:
                if self._suspects:
                    self._suspects.pop(names[n].tobytes(), None)
            else:
                delete[n] = self._went_badly(names[n].tobytes(), is_corrupt=outcome is Outcome.CORRUPT)
        return delete

    def wrote(self, names: Names) -> None:
        """Trust blocks again that were written anew."""
        if self._suspects:
            for name in names:
                self._suspects.pop(name.tobytes(), None)

    def _went_badly(self, name: bytes, *, is_corrupt: bool) -> bool:
        now = self._clock()
        suspect = self._suspects.pop(name, None)
        if suspect is None or (now - suspect.seen_at > _MEMORY_S and not suspect.is_corrupt):
            suspect = _Suspect()
        self._suspects[name] = suspect
        if len(self._suspects) > self._most_keys:
            self._suspects.popitem(last=False)
        suspect.num_failures += 1
        suspect.seen_at = now
        was_corrupt = suspect.is_corrupt
        if is_corrupt:
            suspect.is_corrupt = True
            suspect.absent_until = now + _REPAIR_S
        elif suspect.num_failures >= _FAILURES:
            suspect.pause_s = min(max(_FIRST_PAUSE_S, 2 * suspect.pause_s), _LONGEST_PAUSE_S)
            suspect.absent_until = max(suspect.absent_until, now + suspect.pause_s)
        return is_corrupt and was_corrupt
