"""Ints and other numbers as callers have them, of Python, numpy or torch. An error shows what was given instead.

And what arrays are called that say of blocks where they are, or whether something is so.
"""

import math
import operator
from numbers import Real
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from tiered_kv.values.errors import ConfigurationError

Ids = NDArray[np.int64]
"""Of blocks, pages or slots; also positions."""
Mask = NDArray[np.bool_]
"""Something that is so, or not, of each block of a list."""


def as_int(name: str, value: object, *, least: int | None = 0) -> int:
    """Return an int of any library as Python's.

    Raises:
        ConfigurationError: It is none, a bool, or below ``least``, if there is one.
    """
    number = value
    if type(number) is not int:
        try:
            number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]  # is asked
        except TypeError:
            number = None
    if number is None or (least is not None and number < least):
        wanted = {None: "an int", 1: "a positive int"}.get(least, f"an int, {least} or more")
        raise ConfigurationError(f"{name} must be {wanted}, got {value!r:.80}")
    return number


def as_rank(rank: object, num_ranks: int) -> int:
    """Return the number of a rank that there is.

    Raises:
        ConfigurationError: It is none.
    """
    if (number := as_int("a rank", rank)) >= num_ranks:
        raise ConfigurationError(f"rank {number} of {num_ranks}: this cache has no such rank")
    return number


def as_ints(name: str, values: object) -> NDArray[np.integer[Any]]:
    """Return a flat sequence of ints as an array, which may be the caller's own.

    Raises:
        ConfigurationError: It is no such sequence, or a tensor that is not on the CPU.
    """
    try:
        array = np.asarray(values)
    except (RuntimeError, TypeError, ValueError) as error:  # a tensor elsewhere, lists of several lengths
        place = getattr(values, "device", None)
        got = "lists of several lengths" if place is None else f"a tensor on {place}: pass its .cpu()"
        raise ConfigurationError(f"{name} must be a flat sequence of ints, got {got}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigurationError(f"{name} must be a flat sequence of ints, got {_described(values, array)}")
    return array


def is_number(value: object) -> TypeGuard[float]:
    """Return whether it is a number that a float can hold: infinity is one, NaN and a bool are none."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
    except OverflowError:  # an int beyond all floats
        return False


def _described(values: object, array: NDArray[Any]) -> str:
    if array.ndim == 0:
        kind = type(values).__name__
        return f"{kind}: write list(...)" if kind in {"generator", "map", "set", "dict_keys"} else kind
    if array.dtype.kind != "O":
        return f"shape {array.shape} of {array.dtype}" + ": give one row of it" * (array.ndim > 1)
    wrong = ((at, each) for at, each in enumerate(array.flat) if type(each) is not int or abs(each) >> 63)
    at, first = next(wrong, (-1, None))
    return "an array of objects: pass .astype('int64')" if at < 0 else f"{first!r:.80} at position {at}"
