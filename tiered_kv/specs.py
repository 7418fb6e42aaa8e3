"""Where the blocks of one list lie in one medium: frozen, picklable, one object per *list* of blocks.

Decisions make specs and motion consumes them, so a decision can be made in one process and moved in another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from tiered_kv.errors import ConfigurationError
from tiered_kv.integers import as_int, as_ints

Ids = Sequence[int] | NDArray[np.integer[Any]]
"""What a spec takes as ids: ints in any flat form. It keeps them as its own read-only int64 array."""


def _as_ids(name: str, ids: Ids) -> NDArray[np.int64]:
    given = as_ints(name, ids)
    array = given.astype(np.int64)  # always a copy: the caller may reuse its own
    if array.size and int(array.min()) < 0:  # uint64 beyond int64 included
        at = int(array.argmin())
        raise ConfigurationError(f"{name} must lie in [0, 2**63), got {int(given[at])} at position {at}")
    array.flags.writeable = False
    return array


@dataclass(frozen=True, eq=False, init=False)
class LoadStoreSpec:
    """Base of all specs. ``len(spec)`` counts ids; a slice is a spec of the same medium."""

    medium: ClassVar[str]

    ids: NDArray[np.int64]

    def __init__(self, ids: Ids, **place: object) -> None:
        vars(self).update(ids=_as_ids(f"{type(self).__name__} ids", ids), **place)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: slice) -> Self:
        if not isinstance(at, slice):
            raise TypeError(f"a part of a spec is a spec: write spec[{at!r:.20}:...], or spec.ids[...] for an id")
        return replace(self, ids=self.ids[at])

    def __reduce__(self) -> tuple[object, ...]:  # through __init__: an array is writable again once unpickled
        return type(self), tuple(vars(self).values())

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._facts() == other._facts()

    def __hash__(self) -> int:
        return hash(self._facts())

    def _facts(self) -> tuple[object, ...]:
        return self.ids.tobytes(), *(value for name, value in vars(self).items() if name != "ids")


@dataclass(frozen=True, eq=False, init=False)
class GPULoadStoreSpec(LoadStoreSpec):
    """Blocks of the engine's own paged KV cache, as registered, wherever its tensors are (on a CPU too).

    Attributes:
        ids: The engine's block ids, ``KVGroup.pages_per_block`` a key, in key order.
        group: The KV group.
    """

    medium: ClassVar[str] = "gpu"

    group: int = 0

    def __init__(self, ids: Ids, group: int = 0) -> None:
        super().__init__(ids, group=as_int("a KV group's number", group))


@dataclass(frozen=True, eq=False, init=False)
class CPULoadStoreSpec(LoadStoreSpec):
    """Slots of a pool of host memory: the cache's slab, or one bound by name.

    Attributes:
        ids: Slots.
        pool: The pool's name; ``""`` is the cache's own slab.
    """

    medium: ClassVar[str] = "cpu"

    pool: str = ""

    def __init__(self, ids: Ids, pool: str = "") -> None:
        if not isinstance(pool, str):
            raise ConfigurationError(f"pool must be a pool's name, got {pool!r:.80}")
        super().__init__(ids, pool=pool)


EngineBlocks = GPULoadStoreSpec | CPULoadStoreSpec
"""Where blocks of an engine are: in its registered pages, or in a host pool of its own."""


@dataclass(frozen=True, eq=False, init=False)
class FileLoadStoreSpec(LoadStoreSpec):
    """Slots of a preallocated slab file."""

    medium: ClassVar[str] = "file"

    path: str = ""

    def __init__(self, ids: Ids, path: str = "") -> None:
        super().__init__(ids, path=path)


@dataclass(frozen=True, eq=False, init=False)
class ObjectLoadStoreSpec(LoadStoreSpec):
    """Objects under a prefix: ``ids`` number ``names``."""

    medium: ClassVar[str] = "object"

    prefix: str = ""
    names: tuple[str, ...] = ()

    def __init__(self, ids: Ids, prefix: str = "", names: tuple[str, ...] = ()) -> None:
        super().__init__(ids, prefix=prefix, names=names)


@dataclass(frozen=True, eq=False, init=False)
class RemoteLoadStoreSpec(LoadStoreSpec):
    """Keys of a server: ``ids`` number ``names``."""

    medium: ClassVar[str] = "remote"

    endpoint: str = ""
    names: tuple[str, ...] = ()

    def __init__(self, ids: Ids, endpoint: str = "", names: tuple[str, ...] = ()) -> None:
        super().__init__(ids, endpoint=endpoint, names=names)
