"""What became of the blocks of one store, in each tier that can keep any."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from tiered_kv.tiers.tier import Tier
from tiered_kv.values.errors import Reason
from tiered_kv.values.results import TierStore

_NONE: Final[Mapping[Reason, int]] = {}


class Tally:
    """What became of a store's blocks, tier by tier, counted for the store and for the tier at once.

    Covers the tiers that can keep blocks: a host tier with bounce slots only is passed over.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        """Count nothing yet in ``tiers``, fastest first."""
        self._tiers = tiers
        self._counts = {tier.name: [0] * 5 for tier in tiers if tier.can_keep}

    def add(
        self,
        tier: Tier,
        *,
        written: int = 0,
        present: int = 0,
        deferred: int = 0,
        dropped: Mapping[Reason, int] = _NONE,
        failed: int = 0,
    ) -> None:
        """Count blocks in one tier; the dropped ones by reason."""
        if tier.name not in self._counts:
            return
        counts, num_dropped = self._counts[tier.name], sum(dropped.values())
        for place, count in enumerate((written, present, deferred, num_dropped, failed)):
            counts[place] += count
        tier.counters.written += written
        if num_dropped:
            tier.counters.dropped += num_dropped
            tier.counters.dropped_because += Counter(dropped)
        tier.counters.failed += failed

    def add_all(self, *, present: int = 0, dropped: Mapping[Reason, int] = _NONE) -> None:
        """Count blocks in every tier."""
        for tier in self._tiers:
            self.add(tier, present=present, dropped=dropped)

    def add_above(self, tier: Tier, *, dropped: Mapping[Reason, int]) -> None:
        """Count blocks in every tier above one."""
        for each in self._tiers[: self._tiers.index(tier)]:
            self.add(each, dropped=dropped)

    def add_below(self, tier: Tier, *, dropped: Mapping[Reason, int]) -> None:
        """Count blocks in every tier below one."""
        for each in self._tiers[self._tiers.index(tier) + 1 :]:
            self.add(each, dropped=dropped)

    def results(self) -> tuple[TierStore, ...]:
        """What became of the blocks, fastest tier first."""
        return tuple([TierStore(tier, *counts) for tier, counts in self._counts.items()])
