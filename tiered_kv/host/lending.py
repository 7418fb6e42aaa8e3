"""How the capacity of one tier is divided between models: what each has a right to, and what is lent meanwhile.

A model that stores nothing for a while, or has no client, lends what it does not use to those whose part is full. Once
it stores again it has its own back, and those who had borrowed it evict.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tiered_kv.values.errors import ConfigurationError

_FULL: Final = 7 / 8
_ROOM: Final = 5 / 4
"""Of what a lender uses it keeps so much."""
KEPT: Final = 1 / 8
"""Of its right a lender keeps so much at least: what comes first has a place until it has its own back."""


@dataclass(frozen=True)
class Claim:
    """What one model claims of a tier, in bytes.

    Attributes:
        right: What it has a right to; those of all models fit into the tier.
        given: What it has now.
        used: How much of that holds blocks.
        weight: Beside others that want more.
        is_idle: Whether nothing was stored for it lately.
        lends: Whether it would have room for a block yet in the least that a lender keeps.
    """

    right: int
    given: int
    used: int
    weight: float
    is_idle: bool
    lends: bool = True

    @property
    def is_wanting(self) -> bool:
        """Whether the model would use more than it has."""
        return not self.is_idle and self.used >= _FULL * self.given


def rights(tier: str, capacity: int, fixed: Sequence[int | None], weights: Sequence[float]) -> list[int]:
    """Return what each has a right to: what is fixed for it, or its weight in what that leaves.

    Raises:
        ConfigurationError: More is fixed than ``tier`` has.
    """
    left = capacity - sum(each for each in fixed if each is not None)
    if left < 0:
        raise ConfigurationError(f"{capacity - left} bytes of tier {tier!r} are fixed for models, it has {capacity}")
    together = sum(weight for weight, each in zip(weights, fixed, strict=True) if each is None)
    return [
        int(left * weight / together) if each is None else each for weight, each in zip(weights, fixed, strict=True)
    ]


def divided(capacity: int, claims: Sequence[Claim]) -> list[int]:
    """Return what each is to have from now on; together they have no more than ``capacity``.

    Whoever is not idle has at least its right. While nobody wants more than it has, nothing changes for those who have
    at least theirs.
    """
    least = [_room(claim) if claim.is_idle else claim.right for claim in claims]
    wanting = [at for at, claim in enumerate(claims) if claim.is_wanting]
    if not wanting:
        had = [claim.given if claim.is_idle else max(claim.given, claim.right) for claim in claims]
        if sum(had) <= capacity:
            return had
        return _lent(capacity, claims, [at for at, claim in enumerate(claims) if claim.given > claim.right], least)
    return _lent(capacity, claims, wanting, least)


def _room(claim: Claim) -> int:
    kept = max(int(claim.used * _ROOM), int(claim.right * KEPT)) if claim.lends else claim.right
    return min(claim.right, kept)


def _lent(capacity: int, claims: Sequence[Claim], borrowing: Sequence[int], least: list[int]) -> list[int]:
    """Give what is left of ``least`` to those who borrow, by their weights."""
    spare = capacity - sum(least)
    weights = sum(claims[at].weight for at in borrowing)
    for at in borrowing:
        least[at] += int(spare * claims[at].weight / weights)
    return least
