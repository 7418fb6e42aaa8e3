"""Load or recompute: how many leading blocks of what was found to load, where computing them may be faster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from tiered_kv.errors import ConfigurationError
from tiered_kv.integers import as_int, is_number


@dataclass(frozen=True)
class LoadCost:
    """What loading from one tier takes, as seen by the reads of late.

    Attributes:
        first_s: Seconds before the first block: what the tier was asked for before comes first.
        block_s: Seconds for each block, many of them asked for at once.
        num_others: Loads and prefetches under way there, with which a load takes turns.
        others_blocks: How many blocks they are still going to ask for, all together.
    """

    first_s: float
    block_s: float
    num_others: int = 0
    others_blocks: int = 0

    def seconds(self, num_blocks: NDArray[np.int64]) -> NDArray[np.float64]:
        """Say how long so many blocks take, for each of several numbers; none take no time."""
        before = np.minimum(num_blocks * self.num_others, self.others_blocks)
        seconds: NDArray[np.float64] = (num_blocks > 0) * self.first_s + (num_blocks + before) * self.block_s
        return seconds


@dataclass(frozen=True)
class Split:
    """Which part of a prefix to load.

    Attributes:
        num_blocks: How many leading blocks to load, or with ``order="back"`` all that were found.
        order: ``"front"``: load these, and compute what is behind them then. ``"back"``: do both at once, see
            `TieredKV.start_load`.
        load_s: What loading these takes, by the estimates.
        total_s: How long until all blocks that were found are in place.
    """

    num_blocks: int
    order: Literal["front", "back"]
    load_s: float
    total_s: float


def split(
    runs: Sequence[tuple[str, int]],
    costs: Mapping[str, LoadCost],
    *,
    block_size: int,
    prefill_tokens_per_s: float,
    queue_s: float,
    chunk_tokens: int | None,
    max_storage_tokens: int | None,
) -> Split:
    """Choose how many leading blocks to load; see `LookupResult.split`.

    Args:
        runs: Blocks in prompt order: the tier, and how many. Tiers without a cost take no time.
        costs: By tier.
        block_size: Tokens a block.
        prefill_tokens_per_s: Of the engine.
        queue_s: How long the engine would not begin to compute anyway.
        chunk_tokens: How many tokens the engine computes at once, if it can load meanwhile.
        max_storage_tokens: How many tokens may come from tiers that have a cost; as many as there are if left out.
    """
    _check(prefill_tokens_per_s, queue_s, chunk_tokens)
    block_s = block_size / prefill_tokens_per_s
    n, most = sum(count for _, count in runs), _most(runs, costs, block_size, max_storage_tokens)
    load_s = _seconds(runs, costs)
    left = np.arange(n, -1, -1)
    total = (np.maximum(load_s, queue_s) + left * block_s)[: most + 1]
    best = most - int(np.argmin(total[::-1]))  # of equals the longest: it computes least
    if chunk_tokens is not None and most == n:
        chunk = max(1, chunk_tokens // block_size)
        computed = np.minimum(np.arange(0, n + chunk, chunk), n)
        have_computed = queue_s + computed * block_s
        have_loaded = _seconds(runs[::-1], costs)[n - computed]
        meets = int(np.argmax(_MARGIN * have_loaded <= have_computed))  # when all is computed, at the latest
        if have_computed[meets] < total[best]:
            return Split(n, "back", float(load_s[n]), float(have_computed[meets]))
    return Split(best, "front", float(load_s[best]), float(total[best]))


def _seconds(runs: Sequence[tuple[str, int]], costs: Mapping[str, LoadCost]) -> NDArray[np.float64]:
    """Say how long the first 0, 1, 2, ... blocks take, from one tier after another."""
    counts: dict[str, int] = {}
    steps = [np.zeros(1)]
    for tier, num_blocks in runs:
        before = counts.get(tier, 0)
        counts[tier] = before + num_blocks
        steps.append(np.diff(costs.get(tier, _NOTHING).seconds(np.arange(before, before + num_blocks + 1))))
    seconds: NDArray[np.float64] = np.cumsum(np.concatenate(steps))
    return seconds


def _most(
    runs: Sequence[tuple[str, int]], costs: Mapping[str, LoadCost], block_size: int, max_tokens: int | None
) -> int:
    """Return how many leading blocks there are of which no more than so many tokens come from tiers with a cost."""
    n = 0
    left = sum(count for _, count in runs)
    if max_tokens is not None:
        left = max(0, as_int("max_storage_tokens", max_tokens, least=None)) // block_size
    for tier, num_blocks in runs:
        taken = min(num_blocks, left) if tier in costs else num_blocks
        n += taken
        if taken < num_blocks:
            break
        left -= taken if tier in costs else 0
    return n


def _check(prefill_tokens_per_s: float, queue_s: float, chunk_tokens: int | None) -> None:
    if not (is_number(prefill_tokens_per_s) and prefill_tokens_per_s > 0):
        raise ConfigurationError(f"prefill_tokens_per_s must be a positive number, got {prefill_tokens_per_s!r:.80}")
    if not (is_number(queue_s) and queue_s >= 0):
        raise ConfigurationError(f"queue_s must be a number of seconds, 0 or more, got {queue_s!r:.80}")
    if chunk_tokens is not None:
        as_int("chunk_tokens", chunk_tokens, least=1)


_NOTHING: Final = LoadCost(0.0, 0.0)
_MARGIN: Final = 1.1
"""An estimate is not exact, and whoever misses the end of a load by a little computes a whole step more."""
