"""What a shared tier has said of blocks lately, for engines that ask key by key, every step, and cannot wait.

Any thread may look: what is not known is to be asked, by whoever is told so first. An answer is forgotten after a
second, and as soon as something happens that it does not know of.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.keys import Names, rows_of
from tiered_kv.results import BlockState
from tiered_kv.system import system
from tiered_kv.tiers.base import Mask

_KEPT_S: Final = 1.0
_MOST_NAMES: Final = 1 << 16
_MISS, _ASKING, _HIT = int(BlockState.MISS), int(BlockState.ASKING), int(BlockState.HIT)


class Answers:
    """What one tier has said, of at most ``most_names`` blocks: the oldest answers go first."""

    def __init__(self, clock: Callable[[], float], asking_s: float, *, most_names: int = _MOST_NAMES) -> None:
        """Know nothing; what whoever looked has not begun to ask after ``asking_s``, the next one is to ask."""
        self._clock = clock
        self._asking_s = asking_s
        self._most_names = most_names
        self._said: OrderedDict[bytes, tuple[int, float, object]] = OrderedDict()  # the state, until when, the question
        self._lock = system().rlock()  # re-entrant: a signal's handler may look while its thread does

    def look(self, names: Names) -> tuple[NDArray[np.int8], Mask]:
        """Say what is known, a `BlockState` each (MISS, ASKING or HIT), and which blocks the caller is to ask for."""
        states, to_ask = np.full(len(names), _ASKING, np.int8), np.zeros(len(names), np.bool_)
        now = self._clock()
        with self._lock:
            for i, name in enumerate(rows_of(names)):
                state, until, _ = self._said.get(name, (_ASKING, now, None))
                if until > now:
                    states[i] = state
                else:
                    to_ask[i] = True
                    self._say(name, _ASKING, now + self._asking_s, None)
        return states, to_ask

    def ask(self, names: Names) -> object:
        """Note that these are being asked for, however long it takes; return the question, for `take`."""
        question = object()
        with self._lock:
            for name in rows_of(names):
                self._say(name, _ASKING, math.inf, question)
        return question

    def take(self, names: Names, is_there: Mask, question: object) -> None:
        """Keep what was said to a question, but of blocks of which something has happened since it was asked."""
        until = self._clock() + _KEPT_S
        with self._lock:
            for name, there in zip(rows_of(names), is_there.tolist(), strict=True):
                if name in self._said and self._said[name][2] is question:
                    self._say(name, _HIT if there else _MISS, until, None)

    def forget(self, names: Names) -> None:
        """Believe no older answer."""
        with self._lock:
            for name in rows_of(names) if self._said else ():
                self._said.pop(name, None)

    def doubt(self, names: Names) -> None:
        """Believe no longer that these are there; who asks for them goes on."""
        with self._lock:
            for name in rows_of(names) if self._said else ():
                if name in self._said and self._said[name][0] == _HIT:
                    del self._said[name]

    def _say(self, name: bytes, state: int, until: float, question: object) -> None:
        self._said[name] = state, until, question
        self._said.move_to_end(name)
        if len(self._said) > self._most_names:
            self._said.popitem(last=False)
