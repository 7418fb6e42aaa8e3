"""Which blocks a storage tier takes, where it wants them used a few times first (`TierSettings.admit_after`)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.uses import UseCounts
from tiered_kv.keys import Names
from tiered_kv.tiers.base import Mask, Tier
from tiered_kv.tiers.storage import StorageTier


class Admission:
    """Counts uses of the blocks of one chain, in memory that does not grow. For the event loop's thread."""

    def __init__(self, tiers: Sequence[StorageTier], window: int) -> None:
        """Count for ``tiers``, over about the last ``window`` uses."""
        self._tiers = [tier for tier in tiers if tier.settings.admit_after > 1]
        self._counts = UseCounts(window if self._tiers else 1)

    def admits(self, tier: Tier, names: Names) -> Mask:
        """Say of which blocks a tier is to have a copy."""
        least = next((each.settings.admit_after for each in self._tiers if each is tier), 0)
        if not least:
            return np.ones(len(names), np.bool_)
        admitted: Mask = self._counts.estimate(names) >= least
        return admitted

    def use(self, names: Names) -> list[tuple[StorageTier, Mask]]:
        """Count one use of each block; return which are enough for a tier by this one."""
        if not self._tiers or not len(names):
            return []
        before: NDArray[np.uint8] = self._counts.estimate(names)
        self._counts.add(names)
        after = self._counts.estimate(names)
        least = [(tier, tier.settings.admit_after) for tier in self._tiers]
        return [(tier, (before < n) & (after >= n)) for tier, n in least]
