"""What a caller knows of the future of blocks: how likely they come back, and when."""

import math
from dataclasses import dataclass

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


def check_hint(hint: object) -> ReuseHint | None:
    """Return it.

    Raises:
        ConfigurationError: It is neither a hint nor None.
    """
    if hint is None or isinstance(hint, ReuseHint):
        return hint
    raise ConfigurationError(f"hint must be a ReuseHint or None, got {type(hint).__name__}")
