"""What a server of a host and its clients say to each other, message by message; see ``docs/format.md``.

In this order: changes in the tiers, batches of keys, a planner's jobs, how a connection begins, where blocks are, calls
of the face, loads and stores. ``id`` names a question, a transfer, a job or a stream of changes. Ids and names of a
whole batch pass as bytes: no message is about one block of a batch.

Of a planner's job the server holds the slots; which blocks of the engine they are for the client alone knows, and what
workers have moved they say to whoever plans, who says it here. Of changes a server sends as many messages ahead as the
client has room for; meanwhile it queues, as for a subscriber of its own, and begins again with snapshots where that is
too much.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, Literal

import numpy as np

from tiered_kv.host import wire
from tiered_kv.host.wire import Digest, Field, Message, as_bytes, as_ids, decoder
from tiered_kv.values.errors import ConfigurationError, Reason, TierFault
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.keys import DIGEST_BYTES, BlockKeys, ModelIdentity, Shard
from tiered_kv.values.layout import KVGroup, KVLayout
from tiered_kv.values.plan import TierShare
from tiered_kv.values.results import LoadCost, LookupResult, TierRun, TierStore
from tiered_kv.values.specs import (
    CPULoadStoreSpec,
    FileLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    ObjectLoadStoreSpec,
    RemoteLoadStoreSpec,
)

AHEAD: Final = 32
"""Messages of a stream that the client has not taken."""
NAMES_A_MESSAGE: Final = 8192

Kind = Literal["snapshot", "added", "removed", "cleared"]


class Follow(Message, frozen=True, tag="follow"):
    """Begin a stream; `Cancel` ends it."""

    id: int


class Taken(Message, frozen=True, tag="taken"):
    """The client has taken so many more messages of a stream of changes."""

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


class Keys(Field, frozen=True):
    """A batch of block keys, with the digest of the weights that they are of."""

    digests: bytes
    start: int
    block_size: int
    group: int
    salt_id: Digest
    epoch: Digest

    @classmethod
    def of(cls, keys: BlockKeys, epoch: bytes) -> "Keys":
        """Say keys of an engine's."""
        return cls(keys.digests, keys.start, keys.block_size, keys.group, keys.salt_id, epoch)

    def __len__(self) -> int:
        return len(self.digests) // DIGEST_BYTES

    def block_keys(self) -> BlockKeys:
        """Return the keys as the library has them.

        Raises:
            ConfigurationError: They are none.
        """
        return BlockKeys(
            self.digests, block_size=self.block_size, start=self.start, group=self.group, salt_id=self.salt_id
        )


MOST_BLOCKS: Final = 1 << 18
"""Of one load, store, lease or plan, with those of each rank: to begin it takes up to a third of a second, in one turn
of the server's loop."""


class Part(Field, frozen=True):
    """What is copied together: ``slots`` of a slab, for the keys at ``positions``; both are int64, little-endian."""

    pool: str
    slots: bytes
    positions: bytes
    layers: tuple[int, int] | None = None

    def from_position(self, first: int) -> "Part | None":
        """Return what it has of ``first`` and all behind it; None if that is nothing."""
        wanted = as_ids(self.positions) >= first
        if wanted.all():
            return self
        slots, positions = as_ids(self.slots)[wanted], as_ids(self.positions)[wanted]
        return Part(self.pool, as_bytes(slots), as_bytes(positions), self.layers) if len(slots) else None


class PlanJob(Message, frozen=True, tag="plan_job"):
    """Plan a load or store. ``is_bound``: the client knows the engine's blocks, so that its plan goes to workers.

    What is stored may be of ``more`` prompts, of the same weights, block size and KV group.
    """

    id: int
    direction: Literal["load", "store"]
    keys: Keys
    more: tuple[Keys, ...]
    gaps: bool
    is_bound: bool
    hint: ReuseHint | None


class BindJob(Message, frozen=True, tag="bind_job"):
    """The client knows the engine's blocks for so many keys, from ``start`` on; the rest is not wanted."""

    id: int
    start: int
    num_blocks: int


class JobMoved(Message, frozen=True, tag="job_moved"):
    """A rank's worker has moved the first slots of its part, and touches none any more: `Outcomes`."""

    id: int
    rank: int
    num_moved: int
    error: str
    seconds: float


class JobMovedKeys(Message, frozen=True, tag="job_moved_keys"):
    """A rank's worker has moved the keys at ``positions``, int64, or is not to: `JobMoved`, by key."""

    id: int
    rank: int
    positions: bytes
    moved: bool


class LeaveJobs(Message, frozen=True, tag="leave_jobs"):
    """The client's planner has ended: see `Planner.close`."""


AboutJob = BindJob | JobMoved | JobMovedKeys


class JobPlan(Field, frozen=True):
    """A `Plan`: by rank, the process that moves a part, and the part."""

    num_blocks: int
    pids: tuple[int, ...]
    parts: tuple[Part, ...]


class JobPlanned(Message, frozen=True, tag="job_planned"):
    """What is held for a job, until `JobEnded`."""

    id: int
    plan: JobPlan


class JobEnded(Message, frozen=True, tag="job_ended"):
    """How a job ended: a `JobResult`. ``plan`` is there if it was not said before; ``mask`` is one byte a key."""

    id: int
    plan: JobPlan | None
    num_blocks: int
    errors: tuple[str, ...]
    num_bytes: int
    moved_s: float
    by_tier: dict[str, TierShare]
    mask: bytes
    faults: tuple[TierFault, ...]


MOST_SLABS: Final = 253
"""Descriptors that Linux passes with one message."""
_LONGEST_MODEL: Final = 1000
LONGEST_NAME: Final = 200
"""Characters of what a client calls itself, in logs."""


class Attach(Message, frozen=True, tag="attach"):
    """A client, its model, and what it stands for. ``groups`` are fields of `KVGroup`.

    ``page_locks``: It may page-lock the memory that it maps, for a GPU: see `HostSlab.keep`.
    """

    name: str
    model: str
    weights: str
    extra: tuple[tuple[str, str], ...]
    groups: tuple[dict[str, Any], ...]
    shards: tuple[tuple[int, int, bool], ...]
    is_read_only: bool
    page_locks: bool

    @classmethod
    def of(
        cls,
        name: str,
        model: ModelIdentity,
        layout: KVLayout,
        shards: Sequence[Shard],
        *,
        is_read_only: bool = False,
        page_locks: bool = False,
    ) -> "Attach":
        """Say who attaches."""
        groups = tuple(asdict(group) for group in layout.groups)
        return cls(
            name[:LONGEST_NAME], model.name, model.weights, model.extra, groups,
            tuple((each.rank, each.size, each.replicated) for each in shards), is_read_only, page_locks,
        )  # fmt: skip

    def parts(self) -> tuple[ModelIdentity, KVLayout, tuple[Shard, ...]]:
        """Return the model, the layout and the shards.

        Raises:
            ConfigurationError: They cannot be.
        """
        if len(self.model) > _LONGEST_MODEL:
            raise ConfigurationError(f"the name of a model has {_LONGEST_MODEL} characters at most")
        if (num_workers := len(self.shards)) > MOST_SLABS:
            raise ConfigurationError(f"{num_workers} workers, {MOST_SLABS} at most: each has a process to watch")
        shards = tuple(Shard(*each) for each in self.shards)
        parts = {each.part for each in shards}  # those who hold the same have one slab
        num_slabs = len(self.groups) * max((each.size for each in parts), default=1)
        if num_slabs > MOST_SLABS:
            raise ConfigurationError(f"{num_slabs} KV groups of ranks, {MOST_SLABS} at most: each has memory to pass")
        try:
            layout = KVLayout(tuple(KVGroup(**group) for group in self.groups))
        except TypeError as error:  # a field that this version does not know
            raise ConfigurationError(f"a KV group as no KVGroup is: {error}") from None
        return ModelIdentity(self.model, self.weights, self.extra), layout, shards


class Introduce(Message, frozen=True, tag="introduce"):
    """Watch the processes that work for ranks of a client's planner: ``(rank, pid)``, the number that the client knows.

    The connection is for this alone. One byte comes after it, with a `pidfd` of each, in the same order.
    """

    token: bytes
    ranks: tuple[tuple[int, int], ...]


class MapSlab(Message, frozen=True, tag="map_slab"):
    """Give a worker of a client a descriptor of a slab; the connection is for this alone.

    ``page_locks``: As of a client that attaches.
    """

    token: bytes
    name: str
    page_locks: bool


class Health(Message, frozen=True, tag="health"):
    """Ask how the server is; the connection is for this alone."""


class Slab(Field, frozen=True):
    """A slab of host memory; its descriptor comes with the message, in the same place."""

    name: str
    num_slots: int
    stride_bytes: int
    payload_bytes: int
    group: int
    rank: int


class Tier(Field, frozen=True):
    """A tier of the server's; ``is_owned``: by it alone."""

    name: str
    medium: str
    is_owned: bool


class Attached(Message, frozen=True, tag="attached"):
    """The client may begin. Descriptors of ``slabs`` come with it.

    ``places`` are what changes are told of: tier, KV group and rank, as the client numbers its own.
    """

    token: bytes
    slabs: tuple[Slab, ...]
    codec: str
    tiers: tuple[Tier, ...]
    places: tuple[tuple[str, int, int], ...]
    load_timeout_s: float
    store_timeout_s: float
    swap_space_bytes: int
    window_bytes: int
    is_read_only: bool


class Introduced(Message, frozen=True, tag="introduced"):
    """The server watches what was introduced to it."""


class Mapped(Message, frozen=True, tag="mapped"):
    """A slab's descriptor comes with it."""

    is_read_only: bool


class Refused(Message, frozen=True, tag="refused"):
    """The client may not begin. ``kind`` is the class of the error."""

    kind: str
    why: str


class Healthy(Message, frozen=True, tag="healthy"):
    """How the server is; see `TieredKVServer.health`."""

    facts: dict[str, Any]


Opening = Attach | Introduce | MapSlab | Health
Opened = Attached | Introduced | Mapped | Refused | Healthy

opening_from: Final[Callable[[bytes | memoryview], Opening]] = decoder(Opening)
"""Decode the first message of a client."""
opened_from: Final[Callable[[bytes | memoryview], Opened]] = decoder(Opened)
"""Decode the first message of a server."""


_KINDS: Final[Mapping[str, type[LoadStoreSpec]]] = {
    kind.medium: kind
    for kind in (GPULoadStoreSpec, CPULoadStoreSpec, FileLoadStoreSpec, ObjectLoadStoreSpec, RemoteLoadStoreSpec)
}


class Place(wire.Field, frozen=True):
    """A spec: its medium, and its fields by name; arrays of numbers as bytes."""

    medium: str
    numbers: dict[str, bytes]
    others: dict[str, int | str | tuple[str, ...]]

    @classmethod
    def of(cls, spec: LoadStoreSpec | None) -> "Place | None":
        """Say a spec; None of one of another kind, which the other side could not make."""
        if spec is None or type(spec) is not _KINDS.get(spec.medium):
            return None
        values = vars(spec)
        numbers = {name: wire.as_bytes(each) for name, each in values.items() if isinstance(each, np.ndarray)}
        return cls(spec.medium, numbers, {name: each for name, each in values.items() if name not in numbers})

    def spec(self) -> LoadStoreSpec | None:
        """Return the spec; None of a medium that is not known here."""
        if (kind := _KINDS.get(self.medium)) is None:
            return None
        numbers = {name: wire.as_ids(each) for name, each in self.numbers.items()}
        return kind(**numbers, **self.others)  # type: ignore[arg-type]  # as the other side had them


class Call(Message, frozen=True, tag="call"):
    """Call a method of the face, one of `asked_calls.CALLS`. ``id`` 0: nothing is to be answered.

    ``args`` are encoded by themselves, as the method's signature has them. ``before``: digests of weights that the
    client served before, if the answer depends on them.
    """

    id: int
    name: str
    args: bytes
    before: tuple[Digest, ...] = ()


class Lease(Message, frozen=True, tag="lease"):
    """Hold a prefix in host memory until `Cancel`."""

    id: int
    keys: Keys


class Ping(Message, frozen=True, tag="ping"):
    """Say something: the server answers with nothing."""

    id: int


class Found(Field, frozen=True):
    """A `LookupResult`: runs of ``(tier, start, stop)``, and where each is if that was asked."""

    num_blocks: int
    runs: tuple[tuple[str, int, int], ...]
    num_bytes: int
    block_size: int
    costs: dict[str, LoadCost]
    num_pending: int
    places: tuple[Place | None, ...] = ()

    @classmethod
    def of(cls, result: LookupResult) -> "Found":
        """Say what was found."""
        runs = tuple((run.tier, run.start, run.stop) for run in result.runs)
        places = tuple(Place.of(run.spec) for run in result.runs) if any(run.spec for run in result.runs) else ()
        return cls(
            result.num_blocks, runs, result.num_bytes, result.block_size, dict(result.costs), result.num_pending, places
        )

    def result(self) -> LookupResult:
        """Return the lookup's result."""
        specs = [place.spec() if place else None for place in self.places] or [None] * len(self.runs)
        runs = tuple(TierRun(*run, spec) for run, spec in zip(self.runs, specs, strict=True))
        return LookupResult(self.num_blocks, runs, self.num_bytes, self.block_size, self.costs, self.num_pending)


class Answered(Message, frozen=True, tag="answered"):
    """What a `Call` has come to: ``value`` is encoded by itself, as the method's signature has it."""

    id: int
    value: bytes


class Leased(Message, frozen=True, tag="leased"):
    """Answers `Lease`: the slots of the prefix that is held."""

    id: int
    pool: str
    slots: bytes


class Failed(Message, frozen=True, tag="failed"):
    """A question or a transfer that the server could not take: an error, by its class."""

    id: int
    kind: str
    why: str


Answer = Answered | Leased | Failed


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
    """Stop a transfer or job, or give a lease back. If it has ended, this is passed over."""

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


REVOKED: Final = "revoked"
"""What a client answers that has not begun a copy."""


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
    missed_because: str
    mask: bytes | None


class Stored(Message, frozen=True, tag="stored"):
    """How a store ended: a `StoreResult`."""

    id: int
    num_stored: int
    num_present: int
    dropped: dict[Reason, int]
    num_bytes: int
    seconds: float


class Settled(Message, frozen=True, tag="settled"):
    """What became of a store's blocks in each tier."""

    id: int
    tiers: tuple[TierStore, ...]


class Closing(Message, frozen=True, tag="closing"):
    """The client has closed, and has nothing but leases, whose ends it says; then `Bye`."""


class Bye(Message, frozen=True, tag="bye"):
    """No copy of this client touches the slabs any more, nor will."""


class Preempted(Message, frozen=True, tag="preempted"):
    """The client has swapped out a sequence: it is counted."""


class Advanced(Message, frozen=True, tag="advanced"):
    """The client serves these weights from now on: a load of others that has not ended brings it nothing."""

    epoch: Digest


Steering = StopBefore | StoreLayer
"""About a load or store that is under way."""
Answerable = Ping | Call | Lease | Load | Store | Steering | PlanJob | AboutJob | Follow | Taken
"""What has a number, and may be answered by `Failed`."""
Request = Answerable | Cancel | Copied | LeaveJobs | Preempted | Advanced | Closing | Bye
Reply = Copy | Admitted | Loaded | Stored | Settled | JobPlanned | JobEnded | Changed | Answer

request_from: Final[Callable[[bytes | memoryview], Request]] = decoder(Request)
"""Decode a message of a client."""
reply_from: Final[Callable[[bytes | memoryview], Reply]] = decoder(Reply)
"""Decode a message of a server."""
