"""What a caller knows of the future of blocks: how likely they come back, and when; and when it is to store them."""

import math
from dataclasses import dataclass
from typing import Final, Literal

from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.integers import is_number


@dataclass(frozen=True, slots=True)
class ReuseHint:
    """How likely blocks are to be asked for again, and when: for `TieredKV.store` and `TieredKV.touch`.

    A hint holds until the blocks are used again. It decides which blocks go first when there is no room, and nothing
    else: what is hinted at wrongly is still served.

    Attributes:
        probability: From 0 to 1. Blocks of probability 0, a closed conversation's, go first under every policy; of
            other hints only ``"lhd"`` makes use.
        within_s: In how many seconds, on average, if they do come back. By default as soon as others do.
        category: What they have in common, e.g. ``"tool call"``: what is expected of a category is corrected by what
            becomes of its blocks. A tier tells seven apart, counting different probabilities and times; of more it
            learns as if there were no hint.

    Raises:
        ConfigurationError: A value that cannot be.
    """

    probability: float
    within_s: float | None = None
    category: str = ""

    def __post_init__(self) -> None:
        if not is_number(self.probability) or not 0 <= self.probability <= 1:
            raise ConfigurationError(f"a hint's probability must be a number from 0 to 1, got {self.probability!r:.80}")
        if self.within_s is not None and not (is_number(self.within_s) and 0 < self.within_s < math.inf):
            raise ConfigurationError(f"a hint's within_s must be a positive number or None, got {self.within_s!r:.80}")
        if not isinstance(self.category, str):
            raise ConfigurationError(f"a hint's category must be a str, got {type(self.category).__name__}")


StoreWhen = Literal["computed", "evicted", "auto"]
"""When an engine stores a block: as soon as it is computed, or when its own cache is about to drop it; see `evicts`."""
_MIRRORED: Final = 4
"""Where memory below holds so many times what the engine does, little is gained by not having the same there twice."""


def evicts(when: StoreWhen, *, engine_blocks: int, memory_blocks: int) -> bool:
    """Say whether blocks are to be stored when the engine is about to drop them, rather than when it computes them.

    Memory below then has what the engine has not, and so more of all; each block that leaves is copied, and what only
    the engine has is lost with it.

    Args:
        when: What is wanted; ``"auto"`` goes by the rest.
        engine_blocks: How many the engine's own cache holds.
        memory_blocks: How many the memory tiers hold; 0 if there are none.
    """
    if when != "auto":
        return when == "evicted"
    return 0 < memory_blocks < _MIRRORED * engine_blocks


def check_hint(hint: object) -> ReuseHint | None:
    """Return it.

    Raises:
        ConfigurationError: It is neither a hint nor None.
    """
    if hint is None or isinstance(hint, ReuseHint):
        return hint
    raise ConfigurationError(f"hint must be a ReuseHint or None, got {type(hint).__name__}")
