"""What neither `stats` nor the ledger counts: lookups, how often a tier's calls went wrong, and tenants one by one.

Plain numbers, for the event loop's thread.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Self

from tiered_kv.events import Event, RecordsRefused, TierFailed, TierStalled, TierTripped
from tiered_kv.keys import salt_digest


@dataclass(frozen=True)
class Lookups:
    """Blocks that lookups asked for, and those of them that were nowhere: by what befell the first of each lookup."""

    requested: int
    missed: int
    missed_because: Mapping[str, int]


@dataclass
class SaltCounts:
    """Blocks of one tenant's loads and lookups."""

    requested: int = 0
    hits: int = 0
    looked_up: int = 0
    not_found: int = 0


class Tallies:
    """Takes events and lookups, and adds them up.

    Attributes:
        failures: Calls that went wrong, by tier and what they were doing.
        stalls: Calls that were late, by the same.
        trips: How often a breaker opened, by the same.
        refused: Records not served for their seal, by tier.
        salts: Of the tenants that are counted each for itself.
    """

    def __init__(self) -> None:
        self.failures, self.stalls, self.trips = (Counter[tuple[str, str]]() for _ in range(3))
        self.refused = Counter[str]()
        self.salts: dict[str, SaltCounts] = {}
        self._of_salt: dict[bytes, SaltCounts] = {}
        self._looked_up = 0
        self._not_found = Counter[str]()

    def __call__(self, event: Event) -> None:
        """Take one event."""
        match event:
            case TierFailed():
                self.failures[event.tier, event.doing] += 1
            case TierStalled():
                self.stalls[event.tier, event.doing] += 1
            case TierTripped():
                self.trips[event.tier, event.doing] += 1
            case RecordsRefused():
                self.refused[event.tier] += event.blocks
            case _:
                pass

    def count_salts(self, salts: Iterable[str]) -> None:
        """Count these tenants each for itself from now on."""
        self.salts = {salt: SaltCounts() for salt in salts}
        self._of_salt = {salt_digest(salt): counts for salt, counts in self.salts.items()}

    def loaded(self, salt_id: bytes, requested: int, num_blocks: int) -> None:
        """Count a load for its tenant."""
        if (counts := self._of_salt.get(salt_id)) is not None:
            counts.requested += requested
            counts.hits += num_blocks

    def looked_up(self, salt_id: bytes, requested: int, found: int, because: str) -> None:
        """Count a lookup; ``because`` says what befell the first block that was not found, if one was not."""
        self._looked_up += requested
        if found < requested:
            self._not_found[because] += requested - found
        if (counts := self._of_salt.get(salt_id)) is not None:
            counts.looked_up += requested
            counts.not_found += requested - found

    def lookups(self) -> Lookups:
        """Return what was looked up so far, for another thread."""
        return Lookups(self._looked_up, self._not_found.total(), dict(self._not_found))

    def copy(self) -> Self:
        """Return what was added up so far, for another thread."""
        copied = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Counter):
                setattr(copied, name, value.copy())
        copied.salts = {salt: replace(counts) for salt, counts in self.salts.items()}
        return copied
