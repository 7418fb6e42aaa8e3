"""The beginning of a connection: who a client is and what it wants, and what the server lets it have."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final

from tiered_kv.errors import ConfigurationError
from tiered_kv.host.wire import Field, Message, decoder
from tiered_kv.keys import ModelIdentity, Shard
from tiered_kv.layout import KVGroup, KVLayout

MOST_SLABS: Final = 253
"""Descriptors that Linux passes with one message."""
_LONGEST_MODEL: Final = 1000


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
        groups = tuple(asdict(group) for group in layout.groups)
        return cls(
            name, model.name, model.weights, model.extra, groups,
            tuple((each.rank, each.size, each.replicated) for each in shards), is_read_only,
        )  # fmt: skip

    def parts(self) -> tuple[ModelIdentity, KVLayout, tuple[Shard, ...]]:
        """Return the model, the layout and the shards.

        Raises:
            ConfigurationError: They cannot be.
        """
        if len(self.model) > _LONGEST_MODEL:
            raise ConfigurationError(f"the name of a model has {_LONGEST_MODEL} characters at most")
        num_slabs = len(self.groups) * max((size for _, size, _ in self.shards), default=1)
        if num_slabs > MOST_SLABS:
            raise ConfigurationError(f"{num_slabs} KV groups of ranks, {MOST_SLABS} at most: each has memory to pass")
        try:
            layout = KVLayout(tuple(KVGroup(**group) for group in self.groups))
        except TypeError as error:  # a field that this version does not know
            raise ConfigurationError(f"a KV group as no KVGroup is: {error}") from None
        shards = tuple(Shard(*each) for each in self.shards)
        return ModelIdentity(self.model, self.weights, self.extra), layout, shards


class Join(Message, frozen=True, tag="join"):
    """A second connection of a client that is attached: for calls that wait in a thread."""

    token: bytes


class Introduce(Message, frozen=True, tag="introduce"):
    """Watch the processes that work for ranks of a client's planner: ``(rank, pid)``, the number that the client knows.

    The connection is for this alone. Once it is answered, one byte comes with a `pidfd` of each, in the same order.
    """

    token: bytes
    ranks: tuple[tuple[int, int], ...]


class MapSlab(Message, frozen=True, tag="map_slab"):
    """Give a worker of a client a descriptor of a slab; the connection is for this alone."""

    token: bytes
    name: str


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


class Joined(Message, frozen=True, tag="joined"):
    """The second connection is open; or the server watches what was introduced to it, or waits for it to come."""


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


Opening = Attach | Join | Introduce | MapSlab | Health
Opened = Attached | Joined | Mapped | Refused | Healthy

opening_from: Final[Callable[[bytes | memoryview], Opening]] = decoder(Opening)
"""Decode the first message of a client."""
opened_from: Final[Callable[[bytes | memoryview], Opened]] = decoder(Opened)
"""Decode the first message of a server."""
