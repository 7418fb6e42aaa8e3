"""Where the whole face is tried: in virtual time with backends in memory, or in real time on a real NVMe tier."""

import asyncio
import random
import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.any_layout import LIMITS, STRIDE, cpu, gpu, nvme
from tests.support.backends import Act, ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import AnyTier
from tests.support.virtual import InlineWorkers, VirtualLoop
from tests.support.watching import watched
from tiered_kv import BackendContext, BlockKey, CacheLimits
from tiered_kv.backend import OwnedTierSettings, Recovered
from tiered_kv.memory.device import Device
from tiered_kv.testing import ScriptedDevice, ScriptedEvent
from tiered_kv_backends.memory import MemoryBackend

MOST_SLOTS = 20
"""Of a tier that is resized, in blocks."""
TIMEOUT_S = 1.0
"""Of a backend in virtual time."""
OWNED_CHAINS = ("cpu, disk", "disk", "gpu, cpu, disk", "gpu, disk")
OTHER_CHAINS = ("cpu, keyed", "keyed", "cpu, disk, keyed", "cpu")


@dataclass(frozen=True)
class Shape:
    """Which tiers there are, and who writes them when."""

    chain: str
    writes_back: bool = False
    is_exclusive: bool = False
    admit_after: int = 1
    low_water: float = 0.5
    ttl_s: float | None = None

    def has(self, tier: str) -> bool:
        """Say whether there is such a tier."""
        return tier in self.chain.split(", ")

    @property
    def storage_policy(self) -> dict[str, object]:
        """When the tiers below memory are written."""
        is_back = self.writes_back and (self.has("cpu") or self.has("gpu"))
        return {"write": "back" if is_back else "through", "admit_after": self.admit_after}

    @property
    def disk_policy(self) -> dict[str, object]:
        """The same of a tier that the cache owns."""
        is_back = self.storage_policy["write"] == "back"
        return self.storage_policy | {"exclusive": self.is_exclusive and is_back and self.has("cpu")}

    def memory(self) -> Iterator[AnyTier]:
        """Make the tiers of memory."""
        if self.has("gpu"):
            yield gpu(6)
        if self.has("cpu"):
            write = "back" if self.writes_back and self.has("gpu") else "through"
            yield cpu(10) | {"max_capacity": MOST_SLOTS * STRIDE, "write": write, "ttl_s": self.ttl_s}


class World(ABC):
    """What lies outside of the cache: tiers, device, time.

    Attributes:
        chains: Which tiers there can be.
        limits: Of the cache.
        runner: Runs its event loop.
        slack_s: By how much a call may be late: nothing in virtual time, however slow the machine in real time.
        acts: What can be made to fail, by name.
        was_faulty: Whether anything did since the cache was opened.
    """

    chains: tuple[str, ...] = OWNED_CHAINS
    limits: CacheLimits
    slack_s: float
    tick_s: float
    device: Device | str

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner = runner
        self.acts: dict[str, Act] = {}
        self.was_faulty = False

    @abstractmethod
    def tiers(self, shape: Shape) -> list[AnyTier]:
        """Make the tiers, with what they held before, none of them at fault."""

    @abstractmethod
    def event(self, delay_s: float) -> object:
        """Return an event for ``after=`` that fires in a while. Called on the loop."""

    @abstractmethod
    def corrupt(self, place: int) -> None:
        """Change bytes of storage."""

    def capacity(self, tier: str, num_blocks: int) -> int:
        """Return a capacity for a tier that can be resized, larger for more blocks."""
        return num_blocks * STRIDE

    def step(self) -> None:  # noqa: B027 - threads need not be told
        """Let a copy run, where copies run when told."""

    def release(self) -> None:
        """Let what hangs go on, and nothing more go wrong."""
        for act in self.acts.values():
            act.calm()

    def close(self) -> None:
        """End it."""
        self.runner.close()


class _Slots(ScriptedSlotBackend):
    """An owned medium that can be resized."""

    def __init__(self, shape: Shape, records: dict[int, tuple[bytes, bytes]]) -> None:
        super().__init__(12, name="disk")
        given = {"medium": "slots", "name": "disk", "timeout_s": TIMEOUT_S, **shape.disk_policy}
        self.settings = OwnedTierSettings.model_validate(given)
        self.records = dict(records)

    async def open(self, context: BackendContext) -> list[Recovered]:
        """Find what is within the capacity."""
        self.records = {slot: record for slot, record in self.records.items() if slot < self.num_slots}
        (found,) = await super().open(context)
        return [Recovered(found.num_slots, found.names, found.slots, MOST_SLOTS)]

    def fit(self, capacity_bytes: int) -> int:
        """Count slots as if they were the host's, without headers: how long they are does not matter here."""
        return min(capacity_bytes // STRIDE, MOST_SLOTS)

    async def resize(self, num_slots: int) -> None:
        """Have so many."""
        self.num_slots = num_slots


class _Keyed(ScriptedBackend):
    """A medium that finds and evicts for itself, and is not this cache's alone."""

    def __init__(self, shape: Shape, before: "_Keyed | None") -> None:
        super().__init__()
        given = {"name": "keyed", "timeout_s": TIMEOUT_S, "capacity": 30 * 8192, **shape.storage_policy}
        self.settings = MemoryBackend.Settings.model_validate(given)
        if before is not None:
            self._records, self._num_bytes = before.copied()

    def copied(self) -> "tuple[OrderedDict[BlockKey, bytes], int]":
        """Return what is there."""
        return self._records.copy(), self._num_bytes


class VirtualWorld(World):
    """Virtual time and no threads: every run takes the same turns. Copies run when the loop has nothing else to do."""

    chains = OWNED_CHAINS + OTHER_CHAINS
    limits = LIMITS.model_copy(
        update={
            "load_timeout_s": 3.0,
            "store_timeout_s": 2.0,
            "close_timeout_s": 2.0,
            "swap_space": 4 * STRIDE,
            "clean_after_s": 5.0,
        }
    )
    slack_s = 0.01
    tick_s = 0.05

    def __init__(self) -> None:
        super().__init__(asyncio.Runner(loop_factory=VirtualLoop))
        self.device: ScriptedDevice = ScriptedDevice(chance=random.Random(0))
        self._stack = ExitStack()
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("tiered_kv.assembly.WorkerPool", InlineWorkers)
        patch.setattr("tiered_kv.tiers.health._JITTER", 0.0)
        self._stack.enter_context(watched(self.device))
        self._disk: _Slots | None = None
        self._keyed: _Keyed | None = None
        loop = self.runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        loop.is_busy = lambda: False
        loop.on_idle = self.device.step

    def tiers(self, shape: Shape) -> list[AnyTier]:
        """See `World.tiers`. A call that hung in the cache before touches nothing of these."""
        tiers = list(shape.memory())
        self.acts, self.was_faulty = {}, False
        if shape.has("disk"):
            self._disk = disk = _Slots(shape, self._disk.records if self._disk else {})
            names = ("read", "write", "forget", "checkpoint", "close")
            self.acts |= {f"disk {name}": getattr(disk, f"on_{name}") for name in names}
            tiers.append(disk)
        if shape.has("keyed"):
            self._keyed = keyed = _Keyed(shape, self._keyed)
            names = ("lookup", "read", "write", "delete", "close")
            self.acts |= {f"keyed {name}": getattr(keyed, f"on_{name}") for name in names}
            tiers.append(keyed)
        return tiers

    def event(self, delay_s: float) -> ScriptedEvent:
        """See `World.event`."""
        event = ScriptedEvent()
        asyncio.get_running_loop().call_later(delay_s, event.fire)
        return event

    def corrupt(self, place: int) -> None:
        """See `World.corrupt`."""
        for backend in (self._disk, self._keyed):
            if backend is not None:
                for position in range(place % 3, backend.num_records, 3):
                    backend.flip_byte(position)

    def step(self) -> None:
        """See `World.step`."""
        self.device.step()

    def close(self) -> None:
        """Check, too, that copies which met in memory were ordered."""
        super().close()
        self._stack.close()
        assert not self.device.races, "accesses that nothing orders"


class RealWorld(World):
    """Threads, files and time as they are."""

    limits = LIMITS.model_copy(update={"swap_space": 4 * STRIDE})
    slack_s = 60.0
    tick_s = 0.001
    device = "cpu"

    def __init__(self) -> None:
        super().__init__(asyncio.Runner())
        self.directory = Path(tempfile.mkdtemp())

    def tiers(self, shape: Shape) -> list[AnyTier]:
        """See `World.tiers`."""
        self.was_faulty = False
        tiers = list(shape.memory())
        if shape.has("disk"):
            room = {"name": "disk", "max_capacity": 800_000}
            tiers.append(nvme(self.directory, 400_000) | room | shape.disk_policy)
        return tiers

    def event(self, delay_s: float) -> threading.Event:
        """See `World.event`; a hundred times sooner."""
        event = threading.Event()
        asyncio.get_running_loop().call_later(delay_s / 100, event.set)
        return event

    def capacity(self, tier: str, num_blocks: int) -> int:
        """See `World.capacity`; a disk has room for its ledger too."""
        return 300_000 + 25_000 * num_blocks if tier == "disk" else super().capacity(tier, num_blocks)

    def corrupt(self, place: int) -> None:
        """See `World.corrupt`."""
        for slab in self.directory.glob("*/slab"):
            content: NDArray[np.uint8] = np.memmap(slab, np.uint8, mode="r+")
            if len(content):
                content[place * 8191 % len(content)] ^= 1

    def close(self) -> None:
        """Remove the files too."""
        super().close()
        shutil.rmtree(self.directory)
