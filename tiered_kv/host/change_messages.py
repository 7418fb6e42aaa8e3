"""What a client is told of changes in the server's tiers. ``id`` names a stream of them, as a transfer.

A server sends as many messages ahead as the client has room for; meanwhile it queues, as for a subscriber of its own,
and begins again with snapshots where that is too much.
"""

from typing import Final, Literal

from tiered_kv.host.wire import Message

AHEAD: Final = 32
"""Messages of a stream that the client has not taken."""
NAMES_A_MESSAGE: Final = 8192

Kind = Literal["snapshot", "added", "removed", "cleared"]


class Follow(Message, frozen=True, tag="follow"):
    """Begin a stream; `Cancel` ends it."""

    id: int


class Taken(Message, frozen=True, tag="taken"):
    """The client has taken so many messages more of a stream."""

    id: int
    num_messages: int


class Changed(Message, frozen=True, tag="changed"):
    """A `TierChange`, or a part of it; ``is_last`` of its parts. ``names`` are 32 bytes each."""

    id: int
    kind: Kind
    tier: str
    group: int
    rank: int
    names: bytes
    why: str
    is_last: bool
    num_overflows: int


AboutChanges = Follow | Taken
