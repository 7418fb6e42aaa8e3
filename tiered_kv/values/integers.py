"""Ints and other numbers as callers have them, of Python, numpy or torch.

What is no int is refused in words, with what was given.

Taking the URLs of tiers apart. They may hold passwords, so no error shows any of what may be one.
"""

import math
import operator
from numbers import Real
from typing import Any, TypeGuard
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from tiered_kv.values.errors import ConfigurationError


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
    at, first = next((at, each) for at, each in enumerate(array.flat) if type(each) is not int or abs(each) >> 63)
    return f"{first!r:.80} at position {at}"


def split_url(url: str) -> SplitResult:
    """Take a URL apart.

    Raises:
        ConfigurationError: It is none.
    """
    try:
        return urlsplit(url)
    except ValueError:
        pass  # nothing is raised in here: its context would be an error that shows the URL
    raise ConfigurationError("this URL cannot be read: percent-encode what is special in a user's name or password")


def split_tier_url(url: str) -> tuple[SplitResult, list[tuple[str, str]]]:
    """Take a tier's URL apart, with the names and values of its query.

    Raises:
        ConfigurationError: It is none.
    """
    parts = split_url(url)
    scheme, is_url, _ = url.partition("://")
    if is_url and "_" in scheme and scheme.isidentifier():
        raise ConfigurationError(f"a URL's scheme has no underscores: write {scheme.replace('_', '-')}://")
    if not parts.scheme or "://" not in url:
        raise ConfigurationError("a tier's URL looks like 'cpu://?capacity=32GiB' or 'file:///mnt/kv?capacity=1TiB'")
    if parts.fragment:  # where a part of a password may be, which messages would show
        raise ConfigurationError("what is behind the '#' of a tier's URL would be lost: write %23")
    return parts, parse_qsl(parts.query, keep_blank_values=True)


def path_of(parts: SplitResult) -> str:
    """Return the path that a URL names, of the home directory too: ``file://~/kv``.

    Raises:
        ConfigurationError: It names a host, or has lost a slash.
    """
    path = unquote(parts.path)
    if parts.netloc == "~":
        return "~" + path
    if parts.netloc:
        place = "mnt/kv" if "@" in parts.netloc else f"{parts.netloc}{parts.path}"
        raise ConfigurationError(
            f"three slashes begin a path: write {parts.scheme}:///{place}, or, of a relative one, a dict with "
            f"'path': '{place}'"
        )
    return path[1:] if path.startswith("/~/") else path
