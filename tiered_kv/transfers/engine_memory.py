"""The engine's own memory that blocks are loaded into and stored from: its registered caches, and its host pools.

To a transfer a host pool is a KV cache on a CPU. It has streams of its own, as a GPU's streams would copy host memory
in the thread that submits. Those streams reach no GPU pool tier, so a load into a host pool passes over that tier: a
block that is nowhere else ends the prefix.

`DirectSlots` is a host pool in which an id is a slot: media may fill it, and copies see it as a cache of whole blocks.
"""

from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from tiered_kv.memory.caches import PagedCaches
from tiered_kv.memory.codec import Codec
from tiered_kv.memory.copies import gather_blocks, scatter_blocks
from tiered_kv.memory.cpu import CPUDevice
from tiered_kv.memory.crossover import prepare
from tiered_kv.memory.device import After, Device
from tiered_kv.memory.host import Headers, LentBlocks
from tiered_kv.memory.lanes import Lanes
from tiered_kv.tiers.tasks import in_a_thread
from tiered_kv.tiers.tier import MemoryTier
from tiered_kv.values.errors import ClosedError, ConfigurationError, LayoutMismatchError
from tiered_kv.values.integers import Ids, as_int
from tiered_kv.values.layout import PAGE_BYTES, KVCaches, KVGroup
from tiered_kv.values.loop_calls import LoopCalls
from tiered_kv.values.specs import CPULoadStoreSpec, EngineBlocks, GPULoadStoreSpec


class DirectSlots:
    """Page-aligned slots of the engine's, whose bytes a medium may fill."""

    def __init__(self, memory: memoryview, slot_bytes: int, group: KVGroup) -> None:
        """Take ``memory`` as slots of ``slot_bytes``.

        Raises:
            ConfigurationError: They do not begin at multiples of 4096 bytes, or are not as long as whole pages.
        """
        address = np.frombuffer(memory, np.uint8).ctypes.data
        if address % PAGE_BYTES or slot_bytes % PAGE_BYTES or slot_bytes < group.stride_bytes:
            raise ConfigurationError(
                f"direct=True needs slots at multiples of {PAGE_BYTES} bytes, {group.stride_bytes} bytes or more each: "
                f"this pool is at address {address:#x} (+{address % PAGE_BYTES}), with {slot_bytes} bytes a slot"
            )
        self._memory = memory
        self._slot_bytes = slot_bytes
        self._group = group
        self._headers = Headers()

    def lend(self, slots: NDArray[np.int64]) -> LentBlocks:
        """Lend record buffers over ``slots``. The last page of a block is used whole."""
        return LentBlocks(slots, self._headers, self._padded, self._group.payload_bytes)

    def _padded(self, slot: int) -> memoryview:
        start = slot * self._slot_bytes
        return self._memory[start : start + self._group.stride_bytes]


class EngineMemory(ABC):
    """The engine's memory, wherever it is: copies between its pages and slots of rows.

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
    def to_wait_for(self, after: After | None) -> After | None:
        """Return what copies of a caller in this thread are to come after; see `Device.to_wait_for`."""

    @abstractmethod
    def gather(self, pages: Ids, rows: Tensor, slots: Ids, *, layers: slice | None = None) -> None:
        """Copy blocks out of the pages into slots, in a stream's turn; see `copies.gather_blocks`."""

    @abstractmethod
    def scatter(self, rows: Tensor, slots: Ids, pages: Ids, *, layers: slice | None = None) -> None:
        """Copy blocks out of slots into the pages, in a stream's turn; see `copies.scatter_blocks`."""


@dataclass(frozen=True)
class Binding(EngineMemory):
    """The engine's memory in this process, as registered for one KV group.

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
    @override
    def error(self) -> BaseException | None:
        return self.h2d.device.error

    @override
    def to_wait_for(self, after: After | None) -> After | None:
        return self.h2d.device.to_wait_for(after)

    @override
    def gather(self, pages: Ids, rows: Tensor, slots: Ids, *, layers: slice | None = None) -> None:
        gather_blocks(self.caches, pages, rows, slots, layers=layers)

    @override
    def scatter(self, rows: Tensor, slots: Ids, pages: Ids, *, layers: slice | None = None) -> None:
        scatter_blocks(rows, slots, self.caches, pages, layers=layers)


class Reach(Protocol):
    """A KV group with what is needed to bind memory to it.

    Attributes:
        group: Its blocks.
        codec: How they are kept.
        gpu: Its GPU pool.
        h2d: Streams into the engine's device.
        d2h: Streams out of it.
        loop_calls: Calls into the event loop.
    """

    group: KVGroup
    codec: Codec | None
    gpu: MemoryTier | None
    h2d: Lanes
    d2h: Lanes
    loop_calls: LoopCalls


class Bindings:
    """All memory that the engine has registered with one cache. Changed on the event loop, read from any thread."""

    def __init__(self) -> None:
        self._caches: dict[int, Binding] = {}
        self._pools: dict[str, Binding] = {}
        self._lanes: tuple[Lanes, Lanes] | None = None
        self._is_closed = False

    def register_caches(self, kv_caches: KVCaches, chain: Reach, *, group: int, axes: str | None) -> None:
        """Take the engine's paged tensors as what loads and stores move; errors as of `TieredKV.register_kv_caches`."""
        caches = PagedCaches.bind(kv_caches, chain.group, axes=axes, device=chain.h2d.device, codec=chain.codec)
        for lanes in (chain.h2d, chain.d2h):
            lanes.reserve(caches.staged_bytes)
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
        """Take memory of the engine's own as a pool of slots; ``stack`` ends with the cache."""
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
        """Let go of the engine's tensors once nothing moves to or from them."""
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


def slots_of(buffer: object, group: KVGroup, slot_bytes: int | None) -> tuple[memoryview, int]:
    """Return a buffer of whole blocks as bytes, and the bytes from one slot to the next."""
    memory, rows = _bytes_of(buffer)
    if slot_bytes is None:
        slot_bytes = len(memory) // rows if rows else group.payload_bytes
    slot_bytes = as_int("slot_bytes", slot_bytes)
    if slot_bytes < group.payload_bytes or slot_bytes % group.item_bytes:
        raise LayoutMismatchError(
            f"slots of {slot_bytes} bytes: a block of this KV group has {group.payload_bytes}, of {group.dtype} "
            f"with {group.item_bytes} bytes each"
        )
    if not len(memory) or len(memory) % slot_bytes:
        raise LayoutMismatchError(f"a buffer of {len(memory)} bytes is no number of slots of {slot_bytes} bytes")
    return memory, slot_bytes


def bind_slots(
    memory: memoryview, slot_bytes: int, group: KVGroup, *, device: Device, codec: Codec | None
) -> PagedCaches:
    """Bind slots of whole blocks, one every ``slot_bytes``, as a packed cache whose pages are blocks."""
    whole = group.in_one_page()
    values = torch.frombuffer(memory, dtype=getattr(torch, group.dtype))
    axes = "LP" + group.inner_axes
    shape = [whole.axis_sizes[axis] for axis in axes]
    strides = torch.empty(shape, device="meta").stride()
    num_slots = len(memory) // slot_bytes
    slots = values.as_strided((num_slots, *shape), (slot_bytes // values.itemsize, *strides))
    return PagedCaches.bind(slots, whole, axes="B" + axes, device=device, codec=codec)


def _bytes_of(buffer: object) -> tuple[memoryview, int]:
    """Return the bytes of a buffer, and its length along the first axis if there are others, else 0."""
    if isinstance(buffer, torch.Tensor):
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise LayoutMismatchError(
                f"a host pool is contiguous memory of the CPU: got a tensor on {buffer.device}, shape "
                f"{tuple(buffer.shape)} with strides {buffer.stride()}"
            )
        flat = buffer.detach().flatten().view(torch.uint8)
        return flat.numpy().data, len(buffer) if buffer.dim() > 1 else 0
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]  # who has no buffer raises
    except TypeError:
        raise ConfigurationError(
            f"a host pool is a tensor or an object with the buffer protocol, got {type(buffer).__name__}"
        ) from None
    if view.readonly or not view.c_contiguous:
        what = "read-only" if view.readonly else f"not contiguous (strides {view.strides})"
        raise ConfigurationError(
            f"the memory of a host pool must be writable and contiguous: {view.nbytes} bytes, {what}"
        )
    if not view.nbytes:  # which may not be cast
        return memoryview(b""), 0
    return view.cast("B"), view.shape[0] if view.ndim > 1 and view.shape else 0
