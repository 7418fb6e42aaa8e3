"""What a server and its clients say to each other once a connection has begun; see ``docs/format.md``.

Ids and names of a whole batch pass as bytes: no message is about one block of a batch.
"""

from collections.abc import Callable
from typing import Final

from tiered_kv.hints import ReuseHint
from tiered_kv.host.change_messages import AboutChanges, Changed
from tiered_kv.host.fields import Keys, Part
from tiered_kv.host.job_messages import AboutJob, JobEnded, JobPlanned
from tiered_kv.host.questions import Answer, Noting, Question
from tiered_kv.host.wire import Message, decoder
from tiered_kv.results import TierFault, TierStore

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
    """Stop, or give a lease back. Of what has ended it is passed over."""

    id: int


class Copy(Message, frozen=True, tag="copy"):
    """Do copy ``number`` of a transfer; the slots are held until `Copied` says that it has ended, or the client has.

    ``by_tier``: of a load of what is in memory. If this copy ends well the load has ended so, and nothing more is said,
    unless it is from the back.
    """

    id: int
    number: int
    parts: tuple[Part, ...]
    by_tier: dict[str, int]


class Copied(Message, frozen=True, tag="copied"):
    """A copy touches no memory any more. ``error`` is empty if all of it was done; "revoked": nothing of it."""

    id: int
    number: int
    error: str


class Admitted(Message, frozen=True, tag="admitted"):
    """So many blocks of a layer-wise load will be in place, and all their copies have been asked for."""

    id: int
    num_blocks: int


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


# Of a connection.


class After(Message, frozen=True, tag="after"):
    """On the second connection: what comes next comes after so many messages of the first, ``attach`` not counted."""

    num_messages: int


class Bye(Message, frozen=True, tag="bye"):
    """No copy of this client touches the slabs any more, nor will."""


Steering = StopBefore | StoreLayer
"""About a load or store that is under way."""
Moving = Load | Store | Steering | Cancel | Copied
Request = Moving | Noting | After | Bye | Question | AboutJob | AboutChanges
Reply = Copy | Admitted | Loaded | Stored | Settled | JobPlanned | JobEnded | Changed | Answer

request_from: Final[Callable[[bytes | memoryview], Request]] = decoder(Request)
"""Decode a message of a client."""
reply_from: Final[Callable[[bytes | memoryview], Reply]] = decoder(Reply)
"""Decode a message of a server."""
