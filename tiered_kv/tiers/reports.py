"""What a tier says of the blocks of one write."""

from dataclasses import dataclass, field

import numpy as np

from tiered_kv.tiers.base import Mask


@dataclass
class WriteReport:
    """What became of the blocks of one write, by position. Every position is in exactly one of them."""

    written: Mask
    present: Mask
    dropped: Mask
    failed: Mask = field(init=False)

    def __post_init__(self) -> None:
        self.failed = ~(self.written | self.present | self.dropped)

    @classmethod
    def nothing_of(cls, n: int) -> "WriteReport":
        """All of ``n`` blocks dropped."""
        nothing = np.zeros(n, np.bool_)
        return cls(nothing, nothing, ~nothing)

    @classmethod
    def failure_of(cls, n: int) -> "WriteReport":
        """All of ``n`` blocks failed."""
        nothing = np.zeros(n, np.bool_)
        return cls(nothing, nothing, nothing)

    def counts(self) -> dict[str, int]:
        """How many blocks, by what became of them."""
        return {name: int(np.count_nonzero(mask)) for name, mask in vars(self).items()}
