"""Where a prefix is: the longest prefix that the owned tiers can read, each block from the fastest that has it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.books import Books
from tiered_kv.catalog.table import names_at
from tiered_kv.values.keys import Names
from tiered_kv.values.results import TierRun

T = TypeVar("T")
_CHUNK: Final = 1024  # names looked up at once, after the first: large enough that the fixed cost of a batch vanishes
_LONG_RUN: Final = 64  # names of one tier that make it worth to look for another such run


def locate(tiers: Mapping[str, Books], names: Names) -> list[TierRun]:
    """Find the longest prefix in which every block is ready in some tier; ``tiers`` come fastest first.

    A tier is asked only for blocks that no faster one has, and nothing is asked past the chunk that ends the prefix.
    Changes nothing, recency included.

    Returns:
        Runs that follow one another, from block 0 on.
    """
    start = 0
    runs: list[TierRun] = []
    while start < len(names):
        tier, num_blocks = _leading_run(tiers, names[start:])
        if not num_blocks:
            break
        if num_blocks >= _LONG_RUN or start + num_blocks == len(names):
            _append_run(runs, tier, start, start + num_blocks)
        else:  # perhaps the tiers have a few each in turn
            numbers = _tiers(list(tiers.values()), names[start : start + _CHUNK])
            absent = (numbers < 0).nonzero()[0]
            num_blocks = int(absent[0]) if len(absent) else len(numbers)
            append_runs(runs, list(tiers), numbers[:num_blocks], start)
        start += num_blocks
    return runs


def locate_from_any_thread(tiers: Mapping[str, Books], names: Names) -> list[TierRun]:
    """`locate`, for threads that do not own the books, while the one that does goes on changing them.

    Each 1,024 names are looked up at one moment in all tiers, so a block that moves from tier to tier is not missed.
    The owner waits for no more than that, and only if it has something to change meanwhile.
    """
    runs: list[TierRun] = []
    for start in range(0, len(names), _CHUNK):
        part = names[start : start + _CHUNK]
        for run in (found := _at_one_moment(list(tiers.values()), partial(locate, tiers, part))):
            _append_run(runs, run.tier, start + run.start, start + run.stop)
        if not found or found[-1].stop < len(part):
            break
    return runs


def states_from_any_thread(books: Sequence[Books], names: Names, *, prefix_only: bool = False) -> NDArray[np.uint8]:
    """Return each name's `SlotState`: READY if some tier has it, else PENDING if one will, else FREE.

    As `locate_from_any_thread` looks: each 1,024 names at one moment in all tiers. If only a prefix matters, nothing is
    looked for behind a first name that is nowhere.
    """
    states = np.zeros(len(names), np.uint8)
    for start in range(0, len(names), _CHUNK):
        part = names[start : start + _CHUNK]
        if not _at_one_moment(books, partial(_see, books, part, states[start:], prefix_only=prefix_only)):
            break
    return states


def is_anywhere(books: Sequence[Books], name: bytes) -> bool:
    """Say whether some tier has a name, or will; as `locate_from_any_thread` looks."""
    return _at_one_moment(books, lambda: any(each.state_of(name) for each in books))


def _see(indexes: Sequence[Books], names: Names, states: NDArray[np.uint8], *, prefix_only: bool) -> bool:
    """Write down the states of the names, and return True; or False as only a prefix matters, and there is none."""
    if prefix_only and not any(index.state_of(names[0].tobytes()) for index in indexes):
        return False
    for index in indexes:
        np.maximum(states[: len(names)], index.find(names)[1], out=states[: len(names)])
    return True


def _at_one_moment(books: Sequence[Books], look: Callable[[], T]) -> T:
    """Look while no owner changes anything in any of the books.

    They are always taken in this order, and the owner holds one at a time: no two wait for each other.
    """
    if not books:
        return look()
    with books[0].lock:
        return _at_one_moment(books[1:], look)


def _leading_run(tiers: Mapping[str, Books], names: Names) -> tuple[str, int]:
    """Return the first tier that has the first name ready, and how many names from there on are read from it."""
    faster: list[Books] = []
    for tier, books in tiers.items():
        num_blocks = books.ready_prefix(names[:_CHUNK] if faster else names)
        if num_blocks:
            for each in faster:
                num_blocks = each.unready_prefix(names[:num_blocks])
            return tier, num_blocks
        faster.append(books)
    return "", 0


def _tiers(indexes: Sequence[Books], names: Names) -> NDArray[np.int64]:
    """Return for each name the first tier that has it ready, or -1."""
    tiers = np.full(len(names), -1, dtype=np.int64)
    left = np.arange(len(names))
    for tier, index in enumerate(indexes):
        ready = index.ready(names if len(left) == len(names) else names_at(names, left))
        tiers[left[ready]] = tier
        left = left[~ready]
        if not len(left):
            break
    return tiers


def append_runs(
    runs: list[TierRun], tiers: Sequence[str], numbers: NDArray[np.signedinteger[Any]], start: int = 0
) -> None:
    """Add the blocks from ``start`` on, by the number of the tier of each, to ``runs``; neighbours of one are one."""
    edges = [0, *((numbers[1:] != numbers[:-1]).nonzero()[0] + 1).tolist(), len(numbers)] if len(numbers) else []
    for left, right in pairwise(edges):
        _append_run(runs, tiers[numbers[left]], start + left, start + right)


def _append_run(runs: list[TierRun], tier: str, start: int, stop: int) -> None:
    if runs and runs[-1].tier == tier:
        start = runs.pop().start
    runs.append(TierRun(tier, start, stop))
