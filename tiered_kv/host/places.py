"""Where blocks are, as it passes between processes: the specs of a run, each of the kinds that this library knows."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from tiered_kv.host import wire
from tiered_kv.specs import (
    CPULoadStoreSpec,
    FileLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    ObjectLoadStoreSpec,
    RemoteLoadStoreSpec,
)

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
        """Return it; None of one that is not known here."""
        if (kind := _KINDS.get(self.medium)) is None:
            return None
        numbers = {name: wire.as_ids(each) for name, each in self.numbers.items()}
        return kind(**numbers, **self.others)  # type: ignore[arg-type]  # as the other side had them
