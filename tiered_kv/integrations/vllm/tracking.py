"""What the scheduler's side of the connector knows of a request, and of its loads and stores that are under way."""

from dataclasses import dataclass, field
from typing import Any

from tiered_kv.transfers.job import Job


@dataclass
class Tracked:
    """One request of vLLM's, from its first look-up to its end.

    Attributes:
        request: vLLM's.
        first_asked_s: When it first looked for blocks; None before, and once it was preempted.
        is_counted: Whether its look-up is in the metrics.
        num_here: Blocks that vLLM's own cache had of it. The tiers have not heard yet that they are used.
        num_found: Blocks found behind those that are in place.
        by_tier: Tokens found, by the tier that had them, of tiers that no other cache uses.
        num_stored: How many of its first blocks are in place, and stored or being stored or not to be.
        may_load: False once a load brought less than was found: it would find the same again, and again.
        stores: Its stores that the workers have not been told of.
        is_storing: Whether the workers were told of a store of it since it got its blocks.
    """

    request: Any
    first_asked_s: float | None = None
    is_counted: bool = False
    num_here: int = 0
    num_found: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    num_stored: int = 0
    may_load: bool = True
    stores: set[Job] = field(default_factory=set)
    is_storing: bool = False


@dataclass
class Load:
    """What is to be loaded for a request into ``block_ids``, of which ``first`` blocks come before."""

    job: Job
    tracked: Tracked
    first: int
    block_ids: tuple[int, ...]
    begun_s: float
    is_given_up: bool = False

    def fall_short(self) -> None:
        """The request computes what did not come; that is stored, like all that it computes."""
        self.tracked.may_load = False
        self.tracked.num_stored = min(self.tracked.num_stored, self.first)


@dataclass(frozen=True)
class Store:
    """A store of so many blocks of a request."""

    tracked: Tracked
    num_blocks: int
