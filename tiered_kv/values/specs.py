"""Where the blocks of one list lie in one medium: frozen, picklable, one object per *list* of blocks.

A decision can so be made in one process and carried out in another. Of memory a spec says in which slots the blocks'
bytes are; of storage, where the *records* are that hold them: `tiered_kv.parse_record` reads one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.integers import as_int, as_ints

AnyIds = Sequence[int] | NDArray[np.integer[Any]]
"""What a spec takes as ids: ints in any flat form. It keeps them as its own read-only int64 array."""


def _as_ids(name: str, ids: AnyIds) -> NDArray[np.int64]:
    given = as_ints(name, ids)
    array = given.astype(np.int64)  # always a copy: the caller may reuse its own
    if array.size and np.minimum.reduce(array) < 0:  # uint64 beyond int64 included
        at = int(array.argmin())
        raise ConfigurationError(f"{name} must lie in [0, 2**63), got {int(given[at])} at position {at}")
    array.flags.writeable = False
    return array


_MANY_IDS: Final = 4096


def repeats(ids: NDArray[np.int64]) -> list[int]:
    """Return at which positions, in order, an id is that was there before."""
    if len(ids) > _MANY_IDS and int(ids.max()) < 2 * len(ids):  # a byte each, where to sort takes eight, and a while
        is_there = np.zeros(2 * len(ids), np.bool_)
        is_there[ids] = True
        if np.count_nonzero(is_there) == len(ids):
            return []
    ordered = np.sort(ids)
    if (ordered[1:] != ordered[:-1]).all():
        return []
    is_first = np.zeros(len(ids), np.bool_)
    is_first[np.unique(ids, return_index=True)[1]] = True
    again: list[int] = (~is_first).nonzero()[0].tolist()
    return again


@dataclass(frozen=True, eq=False, init=False)
class LoadStoreSpec:
    """Base of all specs. ``len(spec)`` counts ids; a slice is a spec of the same medium, of those blocks."""

    medium: ClassVar[str]

    ids: NDArray[np.int64]

    def __init__(self, ids: AnyIds, **place: object) -> None:
        vars(self).update(ids=_as_ids(f"{type(self).__name__} ids", ids), **place)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: slice) -> Self:
        if not isinstance(at, slice):
            raise TypeError(f"a part of a spec is a spec: write spec[{at!r:.20}:...], or spec.ids[...] for an id")
        return replace(self, **{name: value[at] for name, value in vars(self).items() if isinstance(value, np.ndarray)})

    def __reduce__(self) -> tuple[object, ...]:  # through __init__: an array is writable again once unpickled
        return type(self), tuple(vars(self).values())

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._facts() == other._facts()

    def __hash__(self) -> int:
        return hash(self._facts())

    def _facts(self) -> tuple[object, ...]:
        return tuple(value.tobytes() if isinstance(value, np.ndarray) else value for value in vars(self).values())


@dataclass(frozen=True, eq=False, init=False)
class GPULoadStoreSpec(LoadStoreSpec):
    """Blocks of the engine's own paged KV cache, as registered, wherever its tensors are (on a CPU too).

    Attributes:
        ids: The engine's block ids, ``KVGroup.pages_per_block`` a key, in key order.
        group: The KV group.
    """

    medium: ClassVar[str] = "gpu"

    group: int = 0

    def __init__(self, ids: AnyIds, group: int = 0) -> None:
        super().__init__(ids)
        vars(self).update(group=as_int("a KV group's number", group))


@dataclass(frozen=True, eq=False, init=False)
class CPULoadStoreSpec(LoadStoreSpec):
    """Slots of a pool of host memory: the cache's slab, or one bound by name.

    Attributes:
        ids: Slots.
        pool: The pool's name; ``""``, in what a look-up answers, is the cache's own slab.
    """

    medium: ClassVar[str] = "cpu"

    pool: str = ""

    def __init__(self, ids: AnyIds, pool: str = "") -> None:
        if not isinstance(pool, str):
            raise ConfigurationError(f"pool must be a pool's name, got {pool!r:.80}")
        super().__init__(ids, pool=pool)


EngineBlocks = GPULoadStoreSpec | CPULoadStoreSpec
"""Where blocks of an engine are: in its registered pages, or in a host pool of its own."""


@dataclass(frozen=True, eq=False, init=False)
class _NamedPlaces(LoadStoreSpec):
    """Base of specs whose ids number names, so that one name may hold many records."""

    names: tuple[str, ...]

    def __init__(self, ids: AnyIds, names: Sequence[str], **place: object) -> None:
        kind = type(self).__name__
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ConfigurationError(f"{kind} names must be a list of strings, got {names!r:.80}")
        super().__init__(ids, names=tuple(names), **place)
        if len(self.ids) and (largest := int(self.ids.max())) >= len(self.names):
            raise ConfigurationError(f"{kind} ids number {len(self.names)} names, got {largest}")


@dataclass(frozen=True, eq=False, init=False)
class _Ranges(_NamedPlaces):
    """Base of specs of media in which a record may be a part of what has a name."""

    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def __init__(self, ids: AnyIds, names: Sequence[str], offsets: AnyIds, lengths: AnyIds, **place: object) -> None:
        kind = type(self).__name__
        ranges = {"offsets": _as_ids(f"{kind} offsets", offsets), "lengths": _as_ids(f"{kind} lengths", lengths)}
        super().__init__(ids, names, **ranges, **place)
        if not len(self.ids) == len(self.offsets) == len(self.lengths):
            counts = f"{len(self.ids)} ids, {len(self.offsets)} offsets and {len(self.lengths)} lengths"
            raise ConfigurationError(f"{kind} takes one of each per record, got {counts}")

    def places(self) -> Iterator[tuple[str, int, int]]:
        """Yield the name, offset and length of each record, in order."""
        for number, offset, length in zip(self.ids.tolist(), self.offsets.tolist(), self.lengths.tolist(), strict=True):
            yield self.names[number], offset, length


@dataclass(frozen=True, eq=False, init=False)
class FileLoadStoreSpec(_Ranges):
    """Records in files: many in one, or one in each.

    Attributes:
        ids: Which of ``names`` each record is in.
        names: Absolute paths, as the process that made the spec sees them.
        offsets: ``(n,)`` int64, the byte of its file at which each record begins.
        lengths: ``(n,)`` int64, bytes of each record.
    """

    medium: ClassVar[str] = "file"

    def __init__(self, ids: AnyIds, names: Sequence[str], offsets: AnyIds, lengths: AnyIds) -> None:
        super().__init__(ids, names, offsets, lengths)


@dataclass(frozen=True, eq=False, init=False)
class ObjectLoadStoreSpec(_Ranges):
    """Records in objects of a store: many in one, or one in each.

    Attributes:
        ids: Which of ``names`` each record is in.
        names: Of objects, below ``url``.
        offsets: ``(n,)`` int64, the byte of its object at which each record begins.
        lengths: ``(n,)`` int64, bytes of each record.
        url: Of the store, e.g. ``s3://bucket/prefix``. Like ``endpoint``, without secrets.
        endpoint: The server's address, if settings give one.
    """

    medium: ClassVar[str] = "object"

    url: str
    endpoint: str = ""

    def __init__(
        self, ids: AnyIds, names: Sequence[str], offsets: AnyIds, lengths: AnyIds, url: str, endpoint: str = ""
    ) -> None:
        super().__init__(ids, names, offsets, lengths, url=url, endpoint=endpoint)


@dataclass(frozen=True, eq=False, init=False)
class RemoteLoadStoreSpec(_NamedPlaces):
    """Records that servers keep under keys. The whole value of a key is one record.

    Attributes:
        ids: Which of ``names`` each record is.
        names: Keys, whole as the servers know them.
        url: Of the servers, e.g. ``redis://cache.example:6379/0``; without a login.
    """

    medium: ClassVar[str] = "remote"

    url: str

    def __init__(self, ids: AnyIds, names: Sequence[str], url: str) -> None:
        super().__init__(ids, names, url=url)
