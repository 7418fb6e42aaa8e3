"""The tiers whose slots copies reach: the GPU pool and the host."""

import numpy as np
import torch

from tiered_kv.catalog.index import TierIndex
from tiered_kv.errors import ConfigurationError
from tiered_kv.memory.host import HostSlab
from tiered_kv.preflight import check_host_memory
from tiered_kv.specs import CPULoadStoreSpec
from tiered_kv.tiers.base import BookedTier
from tiered_kv.tiers.batch import Batch


class MemoryTier(BookedTier):
    """A tier whose slots copies reach: rows of a tensor on the host or on a device.

    Attributes:
        index: Which block is in which row.
        rows: ``(num_slots, stride / 8)`` int64.
        write_back: Whether blocks wait in the tier above for the cleaner, if there is one above.
    """

    def __init__(self, name: str, index: TierIndex, rows: torch.Tensor, *, write_back: bool = False) -> None:
        super().__init__(name)
        self.index = index
        self.rows = rows
        self.write_back = write_back

    @property
    def can_keep(self) -> bool:
        """See `Tier.can_keep`: a host tier may have bounce slots only."""
        return self.index.num_slots > 0

    @property
    def is_in_use(self) -> bool:
        """See `BookedTier.is_in_use`."""
        return True

    def slots_within(self, capacity_bytes: int, block_bytes: int) -> int:
        """See `BookedTier.slots_within`: memory of a device is taken once."""
        raise ConfigurationError(f"the capacity of tier {self.name!r} cannot be changed while it is used")

    async def grow(self, num_slots: int, more_bytes: int) -> None:
        """See `BookedTier.grow`."""

    async def shrink(self, num_slots: int) -> None:
        """See `BookedTier.shrink`: host memory goes back as it becomes free, see `HostTier.give_back`."""


class HostTier(MemoryTier):
    """The CPU tier and the bounce slots that everything else passes through: always there, if with no own slots."""

    def __init__(self, name: str, index: TierIndex, slab: HostSlab, *, write_back: bool = False) -> None:
        super().__init__(name, index, slab.rows, write_back=write_back)
        self.slab = slab

    async def locate(self, batch: Batch) -> CPULoadStoreSpec | None:
        """See `Tier.locate`: slots of the slab, payloads without headers."""
        slots = self.slots_of(batch)
        return None if slots is None else CPULoadStoreSpec(slots, self.slab.name)

    def slots_within(self, capacity_bytes: int, block_bytes: int) -> int:
        """See `BookedTier.slots_within`."""
        num_slots, most = capacity_bytes // block_bytes, self.index.max_slots
        if not 0 < num_slots <= most:
            raise ConfigurationError(
                f"tier {self.name!r} can hold 1 to {most} blocks, not {num_slots}: set max_capacity"
            )
        return num_slots

    async def grow(self, num_slots: int, more_bytes: int) -> None:
        """See `BookedTier.grow`."""
        check_host_memory(more_bytes)

    def give_back(self, start: int, stop: int) -> bool:
        """See `BookedTier.give_back`."""
        idle = self.index.idle_retired(start, stop)
        for run in np.split(idle, np.flatnonzero(np.diff(idle) > 1) + 1):
            if len(run):
                self.slab.give_back(int(run[0]), int(run[-1]) + 1)
        return len(idle) == max(0, stop - start)
