"""What became of the blocks of one store, in each tier."""

from collections.abc import Sequence

from tiered_kv.results import TierStore
from tiered_kv.tiers.base import Tier


class Tally:
    """What became of a store's blocks, tier by tier, counted for the store and for the tier at once.

    Covers the tiers that can keep blocks: a host tier with bounce slots only is passed over.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        """Count nothing yet in ``tiers``, fastest first."""
        self._tiers: list[Tier] = [tier for tier in tiers if tier.can_keep]
        self._order = {tier.name: place for place, tier in enumerate(tiers)}
        self._counts = {tier.name: [0] * 5 for tier in self._tiers}

    def add(
        self, tier: Tier, *, written: int = 0, present: int = 0, deferred: int = 0, dropped: int = 0, failed: int = 0
    ) -> None:
        """Count blocks in one tier."""
        if tier.name not in self._counts:
            return
        counts = self._counts[tier.name]
        for place, count in enumerate((written, present, deferred, dropped, failed)):
            counts[place] += count
        tier.counters.written += written
        tier.counters.dropped += dropped
        tier.counters.failed += failed

    def add_all(self, *, present: int = 0, dropped: int = 0) -> None:
        """Count blocks in every tier."""
        for tier in self._tiers:
            self.add(tier, present=present, dropped=dropped)

    def add_above(self, tier: Tier, *, dropped: int) -> None:
        """Count blocks in every tier above one."""
        for each in self._tiers:
            if self._order[each.name] < self._order[tier.name]:
                self.add(each, dropped=dropped)

    def add_below(self, tier: Tier, *, dropped: int = 0, failed: int = 0) -> None:
        """Count blocks in every tier below one."""
        for each in self._tiers:
            if self._order[each.name] > self._order[tier.name]:
                self.add(each, dropped=dropped, failed=failed)

    def results(self) -> tuple[TierStore, ...]:
        """What became of the blocks, fastest tier first."""
        return tuple(TierStore(tier, *counts) for tier, counts in self._counts.items())
