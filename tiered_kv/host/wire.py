"""What a server and its clients say to each other: MessagePack in frames, by msgspec; see ``docs/format.md``.

Each side begins with a greeting that no version changes, so that two versions can at least name each other. Ids and
names of a whole batch pass as bytes. Nothing that arrives is trusted: a frame has a bound, and each message is checked
against its type when it is decoded.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiered_kv.errors import (
    BackendUnavailableError,
    CapacityError,
    ClosedError,
    ConfigurationError,
    LayoutMismatchError,
    TieredKVError,
)
from tiered_kv.explain import Explanation
from tiered_kv.keys import DIGEST_BYTES, BlockKeys, ModelIdentity, Shard
from tiered_kv.layout import KVGroup, KVLayout
from tiered_kv.load_costs import LoadCost
from tiered_kv.results import CacheStatistics, TierFault, TierStore

try:
    import msgspec
    from msgspec import Struct
except ModuleNotFoundError as missing:
    raise ConfigurationError("a cache for a host needs msgspec: pip install 'tiered-kv[host]'") from missing

VERSION: Final = 1
"""Of all that follows the greeting. Both sides must have the same."""
MOST_FRAME_BYTES: Final = 32 << 20
"""A batch of half a million keys; what is longer ends the connection."""
_GREETING: Final = struct.Struct("<6sH")
_MAGIC: Final = b"KVHOST"
GREETING_BYTES: Final = _GREETING.size
LENGTH: Final = struct.Struct("<I")

Ids = NDArray[np.int64]
T = TypeVar("T")


class Message(Struct, frozen=True, array_like=True):
    """Base of all messages: an array of its tag and its fields."""


class Keys(Struct, frozen=True, array_like=True):
    """A batch of block keys, with the digest of the weights that they are of."""

    digests: bytes
    start: int
    block_size: int
    group: int
    salt_id: bytes
    epoch: bytes

    @classmethod
    def of(cls, keys: BlockKeys, epoch: bytes) -> "Keys":
        """Say keys of an engine's."""
        return cls(keys.words.tobytes(), keys.start, keys.block_size, keys.group, keys.salt_id, epoch)

    def block_keys(self) -> BlockKeys:
        """Return them.

        Raises:
            ConfigurationError: They are none.
        """
        if len(self.salt_id) != DIGEST_BYTES or len(self.epoch) != DIGEST_BYTES:
            raise ConfigurationError("a salt's and an epoch's digest have 32 bytes each")
        return BlockKeys(
            self.digests, block_size=self.block_size, start=self.start, group=self.group, salt_id=self.salt_id
        )


# The beginning of a connection.


class Attach(Message, frozen=True, tag="attach"):
    """A client, its model, and what it stands for. ``groups`` are fields of `KVGroup`."""

    name: str
    model: str
    weights: str
    extra: tuple[tuple[str, str], ...]
    groups: tuple[dict[str, Any], ...]
    shards: tuple[tuple[int, int, bool], ...]
    is_read_only: bool

    @classmethod
    def of(
        cls, name: str, model: ModelIdentity, layout: KVLayout, shards: Sequence[Shard], *, is_read_only: bool
    ) -> "Attach":
        """Say who attaches."""
        groups = tuple(vars(group) for group in layout.groups)
        return cls(
            name, model.name, model.weights, model.extra, groups,
            tuple((each.rank, each.size, each.replicated) for each in shards), is_read_only,
        )  # fmt: skip

    def parts(self) -> tuple[ModelIdentity, KVLayout, tuple[Shard, ...]]:
        """Return the model, the layout and the shards.

        Raises:
            ConfigurationError: They cannot be.
        """
        try:
            layout = KVLayout(tuple(KVGroup(**group) for group in self.groups))
        except TypeError as error:  # a field that this version does not know
            raise ConfigurationError(f"a KV group as no KVGroup is: {error}") from None
        shards = tuple(Shard(*each) for each in self.shards)
        return ModelIdentity(self.model, self.weights, self.extra), layout, shards


class Join(Message, frozen=True, tag="join"):
    """A second connection of a client that is attached: for calls that wait in a thread."""

    token: bytes


class Health(Message, frozen=True, tag="health"):
    """Ask how the server is; the connection is for this alone."""


class Slab(Struct, frozen=True, array_like=True):
    """A slab of host memory; its descriptor comes with the message, in the same place."""

    name: str
    num_slots: int
    stride_bytes: int
    payload_bytes: int
    group: int
    rank: int


class Attached(Message, frozen=True, tag="attached"):
    """The client may begin. Descriptors of ``slabs`` come with it."""

    token: bytes
    slabs: tuple[Slab, ...]
    codec: str
    tiers: tuple[str, ...]
    load_timeout_s: float
    store_timeout_s: float
    is_read_only: bool


class Joined(Message, frozen=True, tag="joined"):
    """The second connection is open."""


class Refused(Message, frozen=True, tag="refused"):
    """The client may not begin. ``kind`` is the class of the error."""

    kind: str
    why: str


class Healthy(Message, frozen=True, tag="healthy"):
    """How the server is; see `tiered_kv.host.health`."""

    facts: dict[str, Any]


Opening = Attach | Join | Health
Opened = Attached | Joined | Refused | Healthy


# Transfers. ``id`` names one of the client's transfers, in all messages about it.


class Load(Message, frozen=True, tag="load"):
    """Start a load."""

    id: int
    keys: Keys
    deadline_s: float
    priority: int
    layerwise: bool
    gaps: bool


class Store(Message, frozen=True, tag="store"):
    """Start a store."""

    id: int
    keys: Keys
    layerwise: bool


class StoreLayer(Message, frozen=True, tag="store_layer"):
    """A layer of a layer-wise store is computed."""

    id: int
    layer: int


class Cancel(Message, frozen=True, tag="cancel"):
    """Stop. Of a transfer that has ended it is passed over."""

    id: int


class Part(Struct, frozen=True, array_like=True):
    """What one copy moves: ``slots`` of a slab, for the keys at ``positions``; both are int64, little-endian."""

    pool: str
    slots: bytes
    positions: bytes
    layers: tuple[int, int] | None = None


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

    Said of layer-wise loads, and of those that are in memory. Once its copies have ended well the load has ended so.
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
    """The longest prefix that could be loaded; ``owned``: in the server's own tiers, at once."""

    id: int
    keys: Keys
    owned: bool = False


class Membership(Message, frozen=True, tag="membership"):
    """What is known of each block."""

    id: int
    keys: Keys


class Touch(Message, frozen=True, tag="touch"):
    """Count a use; nothing is answered."""

    keys: Keys


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
Request = Load | Store | StoreLayer | Cancel | Copied | Touch | Unpin | Release | After | Bye | Question


class Found(Message, frozen=True, tag="found"):
    """Answers `Lookup`: runs of ``(tier, start, stop)``."""

    id: int
    num_blocks: int
    runs: tuple[tuple[str, int, int], ...]
    num_bytes: int
    costs: dict[str, LoadCost]
    num_pending: int


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
Reply = Copy | Admitted | Loaded | Stored | Settled | Answer

_encoder: Final = msgspec.msgpack.Encoder(enc_hook=str)  # what a backend says of itself may be anything
_opening: Final["msgspec.msgpack.Decoder[Opening]"] = msgspec.msgpack.Decoder(Opening)
_opened: Final["msgspec.msgpack.Decoder[Opened]"] = msgspec.msgpack.Decoder(Opened)
_request: Final["msgspec.msgpack.Decoder[Request]"] = msgspec.msgpack.Decoder(Request)
_reply: Final["msgspec.msgpack.Decoder[Reply]"] = msgspec.msgpack.Decoder(Reply)


class WireError(Exception):
    """What came is none of ours: whoever reads it ends the connection."""


def greeting() -> bytes:
    """Return what each side sends first."""
    return _GREETING.pack(_MAGIC, VERSION)


def version_in(greeting: bytes) -> int:
    """Return the version that the other side has.

    Raises:
        WireError: It is something else than a server or client of ours.
    """
    magic, version = _GREETING.unpack(greeting)
    if magic != _MAGIC:
        raise WireError(f"the other side is no tiered_kv: it began with {greeting!r}")
    return int(version)


def frame(message: Message) -> bytes:
    """Encode a message, with its length before it.

    Raises:
        ConfigurationError: It is longer than the other side would take.
    """
    body = _encoder.encode(message)
    if len(body) > MOST_FRAME_BYTES:
        raise ConfigurationError(
            f"a message of {len(body)} bytes, {MOST_FRAME_BYTES} at most: give fewer keys to a call"
        )
    return LENGTH.pack(len(body)) + body


def opening_from(body: bytes) -> Opening:
    """Decode the first message of a client."""
    return _decoded(_opening, body)


def opened_from(body: bytes) -> Opened:
    """Decode the first message of a server."""
    return _decoded(_opened, body)


def request_from(body: bytes | memoryview) -> Request:
    """Decode a message of a client."""
    return _decoded(_request, body)


def reply_from(body: bytes | memoryview) -> Reply:
    """Decode a message of a server."""
    return _decoded(_reply, body)


def _decoded(decoder: "msgspec.msgpack.Decoder[T]", body: bytes | memoryview) -> T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:  # one that does not fit its type included
        raise WireError(f"a message that cannot be: {error}") from error


def as_bytes(ids: Ids) -> bytes:
    """Encode ids."""
    return ids.astype("<i8", copy=False).tobytes()


def as_ids(encoded: bytes) -> Ids:
    """Decode ids; read-only.

    Raises:
        WireError: It is no number of ids.
    """
    if len(encoded) % 8:
        raise WireError(f"{len(encoded)} bytes are no number of ids")
    return np.frombuffer(encoded, "<i8").astype(np.int64, copy=False)


_ERRORS: Final[Mapping[str, type[TieredKVError]]] = {
    each.__name__: each
    for each in (ConfigurationError, LayoutMismatchError, CapacityError, ClosedError, BackendUnavailableError)
}


def kind_of(error: TieredKVError) -> str:
    """Name an error's class as the other side knows it."""
    return next(name for kind in type(error).__mro__ for name in [kind.__name__] if name in (*_ERRORS, "TieredKVError"))


def error_of(kind: str, why: str) -> TieredKVError:
    """Make the error again."""
    return _ERRORS.get(kind, TieredKVError)(why)
