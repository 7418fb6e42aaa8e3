"""What a client asks beside its transfers, and what a server answers. ``id`` names a question, as a transfer.

Each question has one `Answer`. What is said here without a number has none.
"""

from tiered_kv.explain import Explanation
from tiered_kv.hints import ReuseHint
from tiered_kv.host.fields import Keys
from tiered_kv.host.places import Place
from tiered_kv.host.wire import Message
from tiered_kv.load_costs import LoadCost
from tiered_kv.results import CacheStatistics, TierFault


class Lookup(Message, frozen=True, tag="lookup"):
    """The longest prefix that could be loaded.

    ``is_owned``: in the server's own tiers, at once. ``where``: with the place of each block, as far as it is known.
    """

    id: int
    keys: Keys
    is_owned: bool = False
    where: bool = False


class Membership(Message, frozen=True, tag="membership"):
    """What is known of each block."""

    id: int
    keys: Keys


class Pin(Message, frozen=True, tag="pin"):
    """Pin a prefix."""

    id: int
    keys: Keys
    ttl_s: float


class Prefetch(Message, frozen=True, tag="prefetch"):
    """Copy a prefix up."""

    id: int
    keys: Keys
    to: str


class Lease(Message, frozen=True, tag="lease"):
    """Hold a prefix in host memory, until `messages.Cancel`."""

    id: int
    keys: Keys


class Evict(Message, frozen=True, tag="evict"):
    """Make blocks unfindable."""

    id: int
    keys: Keys
    tier: str | None


class Explain(Message, frozen=True, tag="explain"):
    """Say why each block is there, or not. ``before``: digests of weights that the client served before."""

    id: int
    keys: Keys
    ask: bool
    before: tuple[bytes, ...]


class Flush(Message, frozen=True, tag="flush"):
    """Wait until every store so far is settled."""

    id: int
    sync: bool


class Clear(Message, frozen=True, tag="clear"):
    """Empty the tiers that the server owns, of this model's blocks."""

    id: int


class Stats(Message, frozen=True, tag="stats"):
    """Count what is where."""

    id: int


Asking = Lookup | Membership | Pin | Prefetch | Evict | Explain
"""About keys."""
Question = Asking | Lease | Flush | Clear | Stats


class Touch(Message, frozen=True, tag="touch"):
    """Count a use, or take note of a hint; nothing is answered."""

    keys: Keys
    hint: ReuseHint | None


class CountLookup(Message, frozen=True, tag="count_lookup"):
    """Count what `Membership` has answered; nothing is answered. ``found`` is one byte a block, 0 for a miss."""

    keys: Keys
    found: bytes


class Unpin(Message, frozen=True, tag="unpin"):
    """End this client's pins; nothing is answered."""

    keys: Keys


Noting = Touch | CountLookup | Unpin


class Found(Message, frozen=True, tag="found"):
    """Answers `Lookup`: runs of ``(tier, start, stop)``, and where each is if that was asked."""

    id: int
    num_blocks: int
    runs: tuple[tuple[str, int, int], ...]
    num_bytes: int
    costs: dict[str, LoadCost]
    num_pending: int
    places: tuple[Place | None, ...] = ()


class States(Message, frozen=True, tag="states"):
    """Answers `Membership`: one `BlockState` a byte."""

    id: int
    states: bytes


class Number(Message, frozen=True, tag="number"):
    """Answers `Pin`, `Evict`, `Flush` and `Clear`."""

    id: int
    number: int


class Prefetched(Message, frozen=True, tag="prefetched"):
    """Answers `Prefetch`."""

    id: int
    num_blocks: int
    num_moved: int
    faults: tuple[TierFault, ...]


class Leased(Message, frozen=True, tag="leased"):
    """Answers `Lease`: the slots of the prefix that is held."""

    id: int
    pool: str
    slots: bytes


class Explained(Message, frozen=True, tag="explained"):
    """Answers `Explain`."""

    id: int
    blocks: tuple[Explanation, ...]


class Counted(Message, frozen=True, tag="counted"):
    """Answers `Stats`."""

    id: int
    stats: CacheStatistics


class Failed(Message, frozen=True, tag="failed"):
    """A question or a transfer that the server could not take: an error, by its class."""

    id: int
    kind: str
    why: str


Answer = Found | States | Number | Prefetched | Leased | Explained | Counted | Failed
