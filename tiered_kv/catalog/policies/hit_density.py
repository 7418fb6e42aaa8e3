"""How many hits a block promises for the time that it has to be kept, by its class and its age.

Pure functions of what was counted.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

NUM_AGES: Final = 48
_YOUNGEST: Final = 16
_AGES_AN_OCTAVE: Final = 2

Counts = NDArray[np.float64]

_STARTS: Final[Counts] = np.concatenate(([0.0], _YOUNGEST * 2.0 ** (np.arange(NUM_AGES) / _AGES_AN_OCTAVE)))
_BOUNDS: Final = np.ceil(_STARTS[1:NUM_AGES]).astype(np.int64)
_LENGTHS: Final[Counts] = np.diff(_STARTS)
_IS_LATER: Final = np.triu(np.ones((NUM_AGES, NUM_AGES), np.bool_))
_MOST_CERTAIN: Final = 0.999
_TOLD_COUNTS: Final = 16.0


def age_classes(ages: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the class of each age, two an octave from 16 on: ``(n,)``, below `NUM_AGES`."""
    return _BOUNDS.searchsorted(ages, side="right")


def told_hazards(probability: float, mean_age: float) -> Counts:
    """Return what to expect of blocks that come back with so much probability, in an exponential time of this mean.

    Returns:
        ``(NUM_AGES,)``: the part that is used at each age, of what was not used before.

    Source: the reuse times of "KVCache Cache in the Wild", USENIX ATC 2025, which are exponential by category.
    """
    gone = probability * -np.expm1(-_STARTS / mean_age)
    hazards: Counts = np.diff(gone) / np.maximum(1 - gone[:-1], 1 - _MOST_CERTAIN)
    return hazards


def hit_densities(seen: Counts, hits: Counts, told: Counts) -> Counts:
    """Return the hit density of blocks of each class at the beginning of each age.

    A block is kept for as long as pays best: its density is the largest, over all ages at which one might give it up,
    of the hits until then over the time spent until then. A class of which little is known passes for all together.

    Args:
        seen: ``(n,)``, how many blocks there were of each class.
        hits: ``(n, NUM_AGES)``, how many of them were used again, by their ages then.
        told: ``(n, NUM_AGES)``, the hazards that a caller told of, NaN where nobody did. They count as much as 16
            blocks seen.

    Returns:
        ``(n, NUM_AGES)``, in hits for each block used.
    """
    shared = _hazards(seen.sum(keepdims=True), hits.sum(axis=0, keepdims=True), np.zeros((1, NUM_AGES)), np.ones(1))
    is_told = ~np.isnan(told[:, 0])
    priors = np.where(is_told[:, None], told, shared)
    hazards = _hazards(seen, hits, priors, np.where(is_told, _TOLD_COUNTS, 1.0))
    zero = np.zeros((len(seen), 1))
    living = np.concatenate((zero + 1, np.cumprod(1 - hazards, axis=1)), axis=1)
    spent = np.concatenate((zero, np.cumsum(_LENGTHS * living[:, :-1] * (1 - hazards / 2), axis=1)), axis=1)
    num_hits = living[:, :-1, None] - living[:, None, 1:]
    time = spent[:, None, 1:] - spent[:, :-1, None]
    ratios = np.divide(num_hits, time, out=np.zeros_like(time), where=_IS_LATER & (time > 0))
    densities: Counts = ratios.max(axis=2)
    return densities


def _hazards(seen: Counts, hits: Counts, priors: Counts, counts: Counts) -> Counts:
    """Return, by class and age, the part that was used then of what was not used before.

    A class's prior counts as so many blocks seen.
    """
    left = np.maximum(seen[:, None] - (np.cumsum(hits, axis=1) - hits), hits)
    hazards: Counts = np.minimum((hits + priors * counts[:, None]) / (left + counts[:, None]), _MOST_CERTAIN)
    return hazards
