"""What a server and its clients say to each other once a connection has begun; see ``docs/format.md``.

Ids and names of a whole batch pass as bytes: no message is about one block of a batch.
"""

from collections.abc import Callable
from typing import Final

from tiered_kv.explain import Explanation
from tiered_kv.hints import ReuseHint
from tiered_kv.host.change_messages import AboutChanges, Changed
from tiered_kv.host.fields import Keys, Part
from tiered_kv.host.job_messages import AboutJob, JobEnded, JobPlanned
from tiered_kv.host.places import Place
from tiered_kv.host.wire import Message, decoder
from tiered_kv.load_costs import LoadCost
from tiered_kv.results import CacheStatistics, TierFault, TierStore

# Transfers. ``id`` names one of the client's transfers, in all messages about it.


class Load(Message, frozen=True, tag="load"):
    """Start a load."""

    id: int
    keys: Keys
    deadline_s: float
    priority: int
    layerwise: bool
    gaps: bool
    is_from_back: bool = False


class StopBefore(Message, frozen=True, tag="stop_before"):
    """The engine computes the blocks before this one of a load from the back: nothing is copied to them any more."""

    id: int
    block: int


class Store(Message, frozen=True, tag="store"):
    """Start a store."""

    id: int
    keys: Keys
    layerwise: bool
    hint: ReuseHint | None


class StoreLayer(Message, frozen=True, tag="store_layer"):
    """A layer of a layer-wise store is computed."""

    id: int
    layer: int


class Cancel(Message, frozen=True, tag="cancel"):
    """Stop. Of a transfer that has ended it is passed over."""

    id: int


class Copy(Message, frozen=True, tag="copy"):
    """Do copy ``number`` of a transfer; the slots are held until `Copied` says that it has ended, or the client has."""

    id: int
    number: int
    parts: tuple[Part, ...]


class Copied(Message, frozen=True, tag="copied"):
    """A copy touches no memory any more. ``error`` is empty if all of it was done; "revoked": nothing of it."""

    id: int
    number: int
    error: str


class Admitted(Message, frozen=True, tag="admitted"):
    """So many blocks of a load will be in place, from these tiers, and all their copies have been asked for.

    Said of layer-wise loads, and of those that are in memory: these have ended so once their copies have ended well,
    and then nothing more is said, unless they are from the back.
    """

    id: int
    num_blocks: int
    by_tier: dict[str, int]


class Loaded(Message, frozen=True, tag="loaded"):
    """How a load ended: a `LoadResult`. ``mask`` is one byte a block, of a load with gaps."""

    id: int
    num_blocks: int
    by_tier: dict[str, int]
    num_bytes: int
    seconds: float
    faults: tuple[TierFault, ...]
    mask: bytes | None


class Stored(Message, frozen=True, tag="stored"):
    """How a store ended: a `StoreResult`."""

    id: int
    num_stored: int
    num_present: int
    dropped: dict[str, int]
    num_bytes: int
    seconds: float


class Settled(Message, frozen=True, tag="settled"):
    """What became of a store's blocks in each tier."""

    id: int
    tiers: tuple[TierStore, ...]


# Questions: each has one `Answer`.


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


class Touch(Message, frozen=True, tag="touch"):
    """Count a use, or take note of a hint; nothing is answered."""

    keys: Keys
    hint: ReuseHint | None


class CountLookup(Message, frozen=True, tag="count_lookup"):
    """Count what `Membership` has answered; nothing is answered. ``found`` is one byte a block, 0 for a miss."""

    keys: Keys
    found: bytes


class Pin(Message, frozen=True, tag="pin"):
    """Pin a prefix."""

    id: int
    keys: Keys
    ttl_s: float


class Unpin(Message, frozen=True, tag="unpin"):
    """End this client's pins; nothing is answered."""

    keys: Keys


class Prefetch(Message, frozen=True, tag="prefetch"):
    """Copy a prefix up."""

    id: int
    keys: Keys
    to: str


class Lease(Message, frozen=True, tag="lease"):
    """Hold a prefix in host memory, until `Release`."""

    id: int
    keys: Keys


class Release(Message, frozen=True, tag="release"):
    """End the lease that was asked for as ``id``."""

    id: int


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


class After(Message, frozen=True, tag="after"):
    """On the second connection: what comes next comes after so many messages of the first, ``attach`` not counted."""

    num_messages: int


class Bye(Message, frozen=True, tag="bye"):
    """No copy of this client touches the slabs any more, nor will."""


Asking = Lookup | Membership | Pin | Prefetch | Evict | Explain
"""About keys."""
Question = Asking | Lease | Flush | Clear | Stats
Steering = StopBefore | StoreLayer
"""About a load or store that is under way."""
Noting = Touch | CountLookup | Unpin
"""What has no answer."""
Moving = Load | Store | Steering | Cancel | Copied
Request = Moving | Noting | Release | After | Bye | Question | AboutJob | AboutChanges


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
Reply = Copy | Admitted | Loaded | Stored | Settled | JobPlanned | JobEnded | Changed | Answer

request_from: Final[Callable[[bytes | memoryview], Request]] = decoder(Request)
"""Decode a message of a client."""
reply_from: Final[Callable[[bytes | memoryview], Reply]] = decoder(Reply)
"""Decode a message of a server."""
