"""Memory of the engine's own that blocks are loaded into and stored from: its registered caches, and its host pools.

To a transfer a host pool is a KV cache on a CPU, and moves over streams of its own: a GPU's would copy host memory in
whichever thread submits. No such stream reaches a GPU pool tier, so for a host pool there is none: a block that is
nowhere else ends the prefix.
"""

from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tiered_kv.errors import ClosedError, ConfigurationError, LayoutMismatchError
from tiered_kv.layout import KVCaches, KVGroup
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.memory.caches import PagedCaches
from tiered_kv.memory.codec import Codec
from tiered_kv.memory.copies import gather_blocks, scatter_blocks
from tiered_kv.memory.cpu import CPUDevice
from tiered_kv.memory.crossover import prepare
from tiered_kv.memory.device import After
from tiered_kv.memory.lanes import Lanes
from tiered_kv.specs import CPULoadStoreSpec, EngineBlocks, GPULoadStoreSpec
from tiered_kv.tiers.memory import MemoryTier
from tiered_kv.tiers.tasks import in_a_thread
from tiered_kv.transfers.host_pools import DirectSlots, bind_slots, slots_of

Ids = NDArray[np.int64]


class EngineMemory(ABC):
    """What a transfer asks of the engine's memory, wherever that is: to copy between its pages and slots of rows.

    Attributes:
        gpu: The GPU pool tier that its copies reach too, if any.
        direct: Its slots, if a medium may read into them.
    """

    gpu: MemoryTier | None
    direct: DirectSlots | None

    @property
    @abstractmethod
    def error(self) -> BaseException | None:
        """What made its device unusable, if anything did."""

    @abstractmethod
    def check(self, after: After) -> None:
        """Raise `ConfigurationError` unless its copies can wait for ``after``."""

    @abstractmethod
    def gather(self, pages: Ids, rows: Tensor, slots: Ids, *, layers: slice | None = None) -> None:
        """Copy blocks out of the pages into slots, in a stream's turn; see `copies.gather_blocks`."""

    @abstractmethod
    def scatter(self, rows: Tensor, slots: Ids, pages: Ids, *, layers: slice | None = None) -> None:
        """Copy blocks out of slots into the pages, in a stream's turn; see `copies.scatter_blocks`."""


@dataclass(frozen=True)
class Binding(EngineMemory):
    """Memory of the engine's in this process.

    Attributes:
        group: The KV group of its blocks.
        caches: The memory.
        h2d: Streams that copy into it.
        d2h: Streams that copy out of it.
        gpu: The GPU pool tier that these streams reach too, if any.
        direct: Its slots, if a medium may read into them.
    """

    group: int
    caches: PagedCaches
    h2d: Lanes
    d2h: Lanes
    gpu: MemoryTier | None
    direct: DirectSlots | None = None

    @property
    def error(self) -> BaseException | None:
        """See `EngineMemory.error`."""
        return self.h2d.device.error

    def check(self, after: After) -> None:
        """See `EngineMemory.check`."""
        self.h2d.device.check(after)

    def gather(self, pages: Ids, rows: Tensor, slots: Ids, *, layers: slice | None = None) -> None:
        """See `EngineMemory.gather`."""
        gather_blocks(self.caches, pages, rows, slots, layers=layers)

    def scatter(self, rows: Tensor, slots: Ids, pages: Ids, *, layers: slice | None = None) -> None:
        """See `EngineMemory.scatter`."""
        scatter_blocks(rows, slots, self.caches, pages, layers=layers)


class Reach(Protocol):
    """What of a KV group is asked for to bind memory to it."""

    @property
    def group(self) -> KVGroup:
        """Its blocks."""

    @property
    def codec(self) -> Codec | None:
        """How they are kept."""

    @property
    def gpu(self) -> MemoryTier | None:
        """Its GPU pool."""

    @property
    def h2d(self) -> Lanes:
        """Streams into the engine's device."""

    @property
    def d2h(self) -> Lanes:
        """Streams out of it."""

    @property
    def loop_calls(self) -> LoopCalls:
        """Calls into the event loop."""


class Bindings:
    """All memory that the engine has registered with one cache. Changed on the event loop, read from any thread."""

    def __init__(self) -> None:
        self._caches: dict[int, Binding] = {}
        self._pools: dict[str, Binding] = {}
        self._lanes: tuple[Lanes, Lanes] | None = None
        self._is_closed = False

    def register_caches(self, kv_caches: KVCaches, chain: Reach, *, group: int, axes: str | None) -> None:
        """See `TieredKV.register_kv_caches`."""
        caches = PagedCaches.bind(kv_caches, chain.group, axes=axes, device=chain.h2d.device, codec=chain.codec)
        prepare(caches, chain.h2d.device)
        self._caches[group] = Binding(group, caches, chain.h2d, chain.d2h, chain.gpu)

    def caches_of(self, group: int) -> PagedCaches | None:
        """Return the registered caches of a KV group."""
        return binding.caches if (binding := self._caches.get(group)) is not None else None

    def register_pool(
        self,
        name: str,
        buffer: KVCaches,
        chain: Reach,
        stack: AsyncExitStack,
        *,
        group: int,
        axes: str | None,
        slot_bytes: int | None,
        direct: bool,
    ) -> None:
        """See `TieredKV.register_host_pool`; ``stack`` ends with the cache."""
        if not isinstance(name, str) or not name or name in self._pools:
            taken = ", ".join(self._pools) or "none"
            raise ConfigurationError(f"a host pool needs a name of its own, got {name!r}; taken: {taken}")
        if direct and chain.codec is not None:
            raise ConfigurationError(f"direct=True reads blocks as they are kept, which is as {chain.codec.name} here")
        device = chain.h2d.device if chain.h2d.device.torch_device.type == "cpu" else CPUDevice()
        slots = None
        if axes is None and not isinstance(buffer, dict | list | tuple):
            memory, stride_bytes = slots_of(buffer, chain.group, slot_bytes)
            caches = bind_slots(memory, stride_bytes, chain.group, device=device, codec=chain.codec)
            slots = DirectSlots(memory, stride_bytes, chain.group) if direct else None
        elif slot_bytes is not None or direct:
            raise ConfigurationError("slot_bytes and direct=True are for one buffer of whole blocks, not for fragments")
        else:
            caches = PagedCaches.bind(buffer, chain.group, axes=axes, device=device, codec=chain.codec)
        if self._lanes is None:
            self._lanes = Lanes(device, "pools-in"), Lanes(device, "pools-out")
            if device is not chain.h2d.device:
                stack.push_async_callback(in_a_thread, chain.loop_calls, device.close, 1.0)  # it joins threads
            for lanes in self._lanes:
                stack.callback(lanes.close)
        self._pools[name] = Binding(group, caches, *self._lanes, gpu=None, direct=slots)

    def unregister_caches(self, group: int) -> None:
        """See `TieredKV.unregister_kv_caches`."""
        self._caches.pop(group, None)

    def forget(self) -> None:
        """Let go of all of it: the cache is closed, and the engine may unmap it."""
        self._is_closed = True  # first: a thread that finds nothing asks why
        self._caches.clear()
        self._pools.clear()

    def find(self, spec: EngineBlocks, group: int) -> Binding:
        """Return the memory that a spec is of, for blocks of one KV group.

        Raises:
            ConfigurationError: It is no spec, there is no such pool, or no caches are registered yet.
            LayoutMismatchError: It is one of another KV group.
            ClosedError: The cache was closed meanwhile.
        """
        if isinstance(spec, CPULoadStoreSpec):
            pool = self._pools.get(spec.pool)
            if pool is None:
                self._check_open()
                known = ", ".join(map(repr, self._pools)) or "none"
                advice = "" if spec.pool else "; tensors that were registered are GPULoadStoreSpec, on a CPU too"
                raise ConfigurationError(
                    f"no host pool {spec.pool!r}: register_host_pool() comes first; there are {known}{advice}"
                )
            if pool.group != group:
                raise LayoutMismatchError(
                    f"keys of KV group {group}, but the host pool {spec.pool!r} is of {pool.group}"
                )
            return pool
        if not isinstance(spec, GPULoadStoreSpec):
            raise ConfigurationError(
                "blocks of the engine are given as GPULoadStoreSpec or CPULoadStoreSpec, got "
                f"{type(spec).__name__}: write GPULoadStoreSpec(block_ids)"
            )
        if spec.group != group:
            raise LayoutMismatchError(f"keys of KV group {group}, block ids of group {spec.group}")
        binding = self._caches.get(group)
        if binding is None:
            self._check_open()
            raise ConfigurationError("register_kv_caches() comes before load and store: the cache has no tensors yet")
        return binding

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this TieredKV is closed")
