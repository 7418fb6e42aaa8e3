"""Where the whole face is tried: in virtual time with media in memory, or in real time on a real NVMe tier."""

import asyncio
import logging
import random
import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import uvloop
from numpy.typing import NDArray

from tests.cache.model.engine import LAST_SLOT, STRIDE
from tests.cache.model.media import MOST_SLOTS, Disk, Image, Keyed
from tests.support.any_layout import cpu, gpu, nvme
from tests.support.backends import Act
from tests.support.caches import AnyTier
from tests.support.virtual import InlineWorkers, VirtualLoop
from tests.support.watching import watched
from tiered_kv import CacheLimits, Shard
from tiered_kv.memory.codec import CodecName
from tiered_kv.memory.device import Device
from tiered_kv.testing import ScriptedDevice, ScriptedEvent

TIMEOUT_S = 1.0
"""Of a backend in virtual time."""
OWNED_CHAINS = ("cpu, disk", "disk", "gpu, cpu, disk", "gpu, disk")
OTHER_CHAINS = ("cpu, keyed", "keyed", "cpu, disk, keyed", "cpu")
LIMITS = CacheLimits(window=2 * STRIDE, bounce=16 * STRIDE, swap_space=(LAST_SLOT + 1) * STRIDE)
"""Windows of four blocks of a group: everything longer passes through in pieces."""


@dataclass(frozen=True)
class Shape:
    """Which tiers there are, who writes them when, and whose blocks they hold."""

    chain: str
    writes_back: bool = False
    is_required: bool = True
    admit_after: int = 1
    low_water: float = 0.5
    ttl_s: float | None = None
    codec: CodecName = "none"
    cipher: str = ""
    """Of storage tiers, if they are sealed."""
    ranks: str = "one"
    """``"one"``; or two, of which it is now the one and now the other: ``"parts"`` of the heads, or ``"replicas"``."""

    def has(self, tier: str) -> bool:
        """Say whether there is such a tier."""
        return tier in self.chain.split(", ")

    def shard(self, rank: int) -> Shard:
        """Return what a rank holds."""
        return Shard() if self.ranks == "one" else Shard(rank, 2, replicated=self.ranks == "replicas")

    @property
    def storage_policy(self) -> dict[str, object]:
        """When the tiers below memory are written."""
        is_back = self.writes_back and (self.has("cpu") or self.has("gpu"))
        write = "back" if is_back else "through"
        sealed = {"encryption": {"keys": ["01" * 32], "cipher": self.cipher}} if self.cipher else {}
        return {"write": write, "admit_after": self.admit_after, "required": self.is_required, **sealed}

    def memory(self) -> Iterator[AnyTier]:
        """Make the tiers of memory."""
        if self.has("gpu"):
            yield gpu(6, STRIDE)
        if self.has("cpu"):
            write = "back" if self.writes_back and self.has("gpu") else "through"
            yield cpu(10, STRIDE) | {"max_capacity": MOST_SLOTS * STRIDE, "write": write, "ttl_s": self.ttl_s}


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
        self._problems: list[str] = []
        self._handler = _Handler(self._problems)
        logging.getLogger("tiered_kv").addHandler(self._handler)
        runner.get_loop().set_exception_handler(lambda _, context: self._problems.append(str(context)))

    @abstractmethod
    def tiers(self, shape: Shape, rank: int) -> list[AnyTier]:
        """Make the tiers, with what they held before, none of them at fault."""

    @abstractmethod
    def die(self) -> None:
        """Let the media hold, from the next `tiers` on, what they hold at this moment."""

    @abstractmethod
    def event(self, delay_s: float) -> object:
        """Return an event for ``after=`` that fires in a while. Called on the loop."""

    @abstractmethod
    def corrupt(self, place: int) -> None:
        """Change bytes of storage."""

    def check(self) -> None:
        """Assert that nothing was reported that no rule has made, and that media were used as they should be."""
        assert not self._problems

    def capacity(self, tier: str, num_blocks: int) -> int:
        """Return a capacity for a tier that can be resized, larger for more blocks."""
        return num_blocks * STRIDE

    def step(self) -> None:  # noqa: B027 - threads need not be told
        """Let a copy run, where copies run when told."""

    async def pass_turns(self, num_turns: int, steps: int) -> None:
        """Let the loop take turns; of copies that run when told, more the fewer ``steps`` there are, but none for 0."""
        for turn in range(num_turns):
            await asyncio.sleep(0)
            if steps and turn % (3 * steps) == 0:
                self.step()

    def release(self) -> None:
        """Let what hangs go on, and nothing more go wrong."""
        for act in self.acts.values():
            act.calm()

    def close(self) -> None:
        """End it."""
        logging.getLogger("tiered_kv").removeHandler(self._handler)
        self.runner.close()


class _Handler(logging.Handler):
    """Notes errors. All else that a cache says are events, which go elsewhere."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._problems = problems

    def emit(self, record: logging.LogRecord) -> None:
        """Note one."""
        self._problems.append(self.format(record))


class VirtualWorld(World):
    """Virtual time and no threads: every run takes the same turns. Copies run when the loop has nothing else to do."""

    chains = OWNED_CHAINS + OTHER_CHAINS
    limits = LIMITS.model_copy(
        update={
            "load_timeout_s": 3.0,
            "store_timeout_s": 2.0,
            "open_timeout_s": 1.0,
            "close_timeout_s": 2.0,
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
        for module in ("cache.opening", "tiers.tasks"):
            patch.setattr(f"tiered_kv.{module}.WorkerPool", InlineWorkers)
        patch.setattr("tiered_kv.tiers.health._JITTER", 0.0)
        self._stack.enter_context(watched(self.device))
        self._disk: Disk | None = None
        self._keyed: Keyed | None = None
        self._rank = 0
        self._image = Image()
        self._is_dead = False
        loop = self.runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        loop.is_busy = lambda: False
        loop.on_idle = self.device.step

    def tiers(self, shape: Shape, rank: int) -> list[AnyTier]:
        """See `World.tiers`. A call that hung in the cache before touches nothing of these."""
        if not self._is_dead:
            self._remember()
        tiers = list(shape.memory())
        self.acts, self.was_faulty, self._is_dead, self._rank = {}, False, False, rank
        if shape.has("disk"):
            self._disk = Disk(self._image, rank, timeout_s=TIMEOUT_S, **shape.storage_policy)
            self.acts |= self._disk.acts
            tiers.append(self._disk)
        if shape.has("keyed"):
            self._keyed = Keyed(self._image, timeout_s=TIMEOUT_S, **shape.storage_policy)
            self.acts |= self._keyed.acts
            tiers.append(self._keyed)
        return tiers

    def shared(self) -> AnyTier:
        """Return the shared medium as another process sees it now."""
        image = Image()
        assert self._keyed is not None
        self._keyed.copy_to(image)
        return Keyed(image)

    def die(self) -> None:
        """See `World.die`."""
        self._remember()
        self._is_dead = True

    def _remember(self) -> None:
        if self._disk is not None:
            self._image.owned[self._rank] = dict(self._disk.records)
        if self._keyed is not None:
            self._keyed.copy_to(self._image)

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

    def check(self) -> None:
        """See `World.check`."""
        super().check()
        assert self._disk is None or not self._disk.clashes, "a slot that is written is in no other call"

    def step(self) -> None:
        """See `World.step`."""
        self.device.step()

    def close(self) -> None:
        """Check, too, that copies which met in memory were ordered."""
        try:
            super().close()
        finally:  # else what is patched here stays so for all tests to come
            self._stack.close()
        assert not self.device.races, "accesses that nothing orders"


class RealWorld(World):
    """Threads, files and time as they are."""

    limits = LIMITS
    slack_s = 60.0
    tick_s = 0.001
    device = "cpu"

    def __init__(self) -> None:
        super().__init__(self.make_runner())
        self._root = Path(tempfile.mkdtemp())
        self._num_deaths = 0

    @staticmethod
    def make_runner() -> asyncio.Runner:
        """Make what runs the loop."""
        return asyncio.Runner()

    @property
    def directory(self) -> Path:
        """Where the tier is, since the last death."""
        return self._root / str(self._num_deaths)

    def tiers(self, shape: Shape, rank: int) -> list[AnyTier]:
        """See `World.tiers`."""
        self.was_faulty = False
        tiers = list(shape.memory())
        if shape.has("disk"):
            room = {"name": "disk", "max_capacity": 1_200_000}
            tiers.append(nvme(self.directory / str(rank), 600_000) | room | shape.storage_policy)
        return tiers

    def die(self) -> None:
        """See `World.die`: what is written later is written elsewhere."""
        before = self.directory
        self._num_deaths += 1
        if before.exists():
            shutil.copytree(before, self.directory)

    def event(self, delay_s: float) -> threading.Event:
        """See `World.event`; a hundred times sooner."""
        event = threading.Event()
        asyncio.get_running_loop().call_later(delay_s / 100, event.set)
        return event

    def capacity(self, tier: str, num_blocks: int) -> int:
        """See `World.capacity`; a disk has room for its ledger too."""
        return 450_000 + 37_500 * num_blocks if tier == "disk" else super().capacity(tier, num_blocks)

    def corrupt(self, place: int) -> None:
        """See `World.corrupt`."""
        for slab in self.directory.rglob("slab"):
            content: NDArray[np.uint8] = np.memmap(slab, np.uint8, mode="r+")
            if len(content):
                content[place * 8191 % len(content)] ^= 1

    def close(self) -> None:
        """Remove the files too."""
        super().close()
        shutil.rmtree(self._root)


class UvloopWorld(RealWorld):
    """The same on uvloop."""

    @staticmethod
    def make_runner() -> asyncio.Runner:
        """See `RealWorld.make_runner`."""
        return asyncio.Runner(loop_factory=uvloop.new_event_loop)
