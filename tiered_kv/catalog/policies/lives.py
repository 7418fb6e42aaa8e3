"""What became of blocks, by class and age: how many lives there were, and at which ages they ended in another use."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.policies.hit_density import NUM_AGES, Counts, age_classes

_SETTLE_AT: Final = 512
"""Blocks noted that are counted together: by the batch, each of which takes what numpy needs to begin, it is dear."""
_LARGEST_WEIGHT: Final = 1e6

Classes = NDArray[np.uint8]
_Batch = tuple[float, Classes, NDArray[np.int64] | None]


class Lives:
    """Counts lives of blocks, one from each use to the next. What was seen some time ago counts for less.

    What is noted is counted before it is looked at, and after every few hundred blocks.
    """

    def __init__(self, num_classes: int, half_life: float) -> None:
        """Make empty counts, in which what was seen ``half_life`` blocks ago counts half."""
        self._half_life = half_life
        self._weight = 1.0  # of what is seen now; it grows, so that all before it counts for less
        self._seen = np.zeros(num_classes)  # by class: blocks that came to it, by weight
        self._hits = np.zeros((num_classes, NUM_AGES))  # of these, by their age, those that were used again
        self._noted: list[_Batch] = []
        self._num_noted = 0

    def advance(self, num_blocks: int) -> None:
        """Let time go on by so many blocks."""
        self._weight *= 2.0 ** (num_blocks / self._half_life)
        if self._weight > _LARGEST_WEIGHT:
            self._settle()
            self._seen /= self._weight
            self._hits /= self._weight
            self._weight = 1.0

    def begin(self, classes: Classes, sign: int = 1) -> None:
        """Note that lives of blocks of these classes begin; with ``sign=-1``, that they were not of these."""
        self._note(sign * self._weight, classes, None)

    def end(self, classes: Classes, ages: NDArray[np.int64]) -> None:
        """Note that blocks of these classes were used again, at these ages."""
        self._note(self._weight, classes, ages)

    def of(self, classes: slice) -> tuple[Counts, Counts]:
        """Return of some classes how many lives began, ``(n,)``, and ended in a use, ``(n, NUM_AGES)``, as of now."""
        self._settle()
        return self._seen[classes] / self._weight, self._hits[classes] / self._weight

    def _note(self, weight: float, classes: Classes, ages: NDArray[np.int64] | None) -> None:
        if not len(classes):
            return  # or what is noted would grow without being counted
        self._noted.append((weight, classes, ages))
        self._num_noted += len(classes)
        if self._num_noted >= _SETTLE_AT:
            self._settle()

    def _settle(self) -> None:
        begun = [(weight, classes) for weight, classes, ages in self._noted if ages is None]
        ended = [(weight, classes, ages) for weight, classes, ages in self._noted if ages is not None]
        self._noted.clear()
        self._num_noted = 0
        if begun:
            classes = np.concatenate([each for _, each in begun])
            weights = np.repeat([weight for weight, _ in begun], [len(each) for _, each in begun])
            self._seen += np.bincount(classes, weights, minlength=len(self._seen))
        if ended:
            classes = np.concatenate([each for _, each, _ in ended])
            weights = np.repeat([weight for weight, _, _ in ended], [len(each) for _, each, _ in ended])
            ages = np.concatenate([each for _, _, each in ended])
            np.add.at(self._hits, (classes, age_classes(ages)), weights)
