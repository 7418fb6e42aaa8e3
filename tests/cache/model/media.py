"""The media of the model in virtual time: what they hold outlives the cache, and their calls do as a rule says."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from tests.cache.model.engine import STRIDE
from tests.support.backends import Act, ScriptedBackend, ScriptedSlotBackend
from tiered_kv import BackendContext, BlockKey
from tiered_kv.media.backend import Recovered

MOST_SLOTS = 20
"""Of a tier that is resized, of each KV group."""
_FIRST_SLOTS = 12
_SHARED_BYTES = 30 * 8192


@dataclass
class Image:
    """What media hold at one moment.

    Attributes:
        owned: By rank: each has a medium of its own.
        shared: Of all ranks, and how many bytes that is.
    """

    owned: dict[int, dict[tuple[int, int], tuple[bytes, bytes]]] = field(default_factory=dict)
    shared: "OrderedDict[BlockKey, bytes]" = field(default_factory=OrderedDict)
    shared_bytes: int = 0


class Disk(ScriptedSlotBackend):
    """An owned medium that can be resized."""

    def __init__(self, image: Image, rank: int, **settings: Any) -> None:  # noqa: ANN401 - fields of its settings
        super().__init__(_FIRST_SLOTS, name="disk", **settings)
        found = image.owned.get(rank, {})
        self.records = {at: record for at, record in found.items() if at[1] < _FIRST_SLOTS}

    async def open(self, context: BackendContext) -> list[Recovered]:
        """Say how large it may become."""
        found = await super().open(context)
        return [Recovered(each.num_slots, each.names, each.slots, MOST_SLOTS) for each in found]

    def fit(self, capacity_bytes: int) -> int:
        """Count slots as if they were the host's, without headers: how long they are does not matter here."""
        return min(capacity_bytes // STRIDE, MOST_SLOTS)

    @property
    def acts(self) -> dict[str, Act]:
        """Its calls, by name."""
        names = ("open", "read", "write", "forget", "checkpoint", "resize", "close")
        return {f"disk {name}": getattr(self, f"on_{name}") for name in names}


class Keyed(ScriptedBackend):
    """A medium that finds and evicts for itself, and is not this cache's alone."""

    def __init__(self, image: Image, **settings: Any) -> None:  # noqa: ANN401 - fields of its settings
        super().__init__(name="keyed", capacity=_SHARED_BYTES, **settings)
        self._records, self._num_bytes = image.shared.copy(), image.shared_bytes

    @property
    def acts(self) -> dict[str, Act]:
        """Its calls, by name."""
        names = ("open", "lookup", "read", "write", "delete", "close")
        return {f"keyed {name}": getattr(self, f"on_{name}") for name in names}

    def copy_to(self, image: Image) -> None:
        """Note what is there."""
        image.shared, image.shared_bytes = self._records.copy(), self._num_bytes
