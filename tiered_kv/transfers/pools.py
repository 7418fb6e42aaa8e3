"""Host memory of the engine's own that blocks are loaded into and stored from: its pools.

To a transfer a pool is a KV cache on a CPU, and moves over streams of its own: a GPU's would copy host memory in
whichever thread submits. No such stream reaches a GPU pool tier, so for a pool that tier is empty: a block that is
nowhere else ends the prefix.
"""

import copy
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import torch

from tiered_kv.catalog.index import TierIndex
from tiered_kv.errors import ConfigurationError, LayoutMismatchError
from tiered_kv.layout import KVCaches, KVGroup
from tiered_kv.memory.caches import PagedCaches
from tiered_kv.memory.device import CPUDevice, Device
from tiered_kv.memory.lanes import Lanes
from tiered_kv.specs import CPULoadStoreSpec, LoadStoreSpec
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.memory import MemoryTier
from tiered_kv.transfers.direct import DirectSlots

_INNER = {"NHD": "NHD", "HND": "HND", "MLA": "ND"}


@dataclass(frozen=True)
class HostPool:
    """One pool.

    Attributes:
        group: The KV group of its blocks.
        chain: The group's chain as copies to and from the pool see it; its ``caches`` are the pool.
        direct: Its slots, if a medium may read into them.
    """

    group: int
    chain: Chain
    direct: DirectSlots | None


class HostPools:
    """The pools of one cache, by name. Changed on the event loop, read from any thread."""

    def __init__(self) -> None:
        self._pools: dict[str, HostPool] = {}
        self._lanes: tuple[Lanes, Lanes] | None = None

    def register(
        self,
        name: str,
        buffer: KVCaches,
        chain: Chain,
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
            memory, stride_bytes = _slots_of(buffer, chain.group, slot_bytes)
            caches = _bind_slots(memory, stride_bytes, chain, device)
            slots = DirectSlots(memory, stride_bytes, chain.group) if direct else None
        elif slot_bytes is not None or direct:
            raise ConfigurationError("slot_bytes and direct=True are for one buffer of whole blocks, not for fragments")
        else:
            caches = PagedCaches.bind(buffer, chain.group, axes=axes, device=device, codec=chain.codec)
        if self._lanes is None:
            self._lanes = Lanes(device, "pools-in"), Lanes(device, "pools-out")
            if device is not chain.h2d.device:
                stack.callback(device.close, 1.0)
            for lanes in self._lanes:
                stack.callback(lanes.close)
        self._pools[name] = HostPool(group, _seen_from_host(chain, caches, *self._lanes), slots)

    def find(self, spec: LoadStoreSpec, group: int) -> HostPool | None:
        """Return the pool that a spec is of, for blocks of one KV group; None for the engine's registered pages.

        Raises:
            ConfigurationError: There is no such pool.
            LayoutMismatchError: It is one of another KV group.
        """
        if not isinstance(spec, CPULoadStoreSpec):
            return None
        pool = self._pools.get(spec.pool)
        if pool is None:
            known = ", ".join(map(repr, self._pools)) or "none"
            raise ConfigurationError(f"no host pool {spec.pool!r}: register_host_pool() comes first; there are {known}")
        if pool.group != group:
            raise LayoutMismatchError(f"keys of KV group {group}, but the host pool {spec.pool!r} is of {pool.group}")
        return pool


def _slots_of(buffer: object, group: KVGroup, slot_bytes: int | None) -> tuple[memoryview, int]:
    """Return a buffer of whole blocks as bytes, and the bytes from one slot to the next."""
    memory, rows = _bytes_of(buffer)
    if slot_bytes is None:
        slot_bytes = len(memory) // rows if rows else group.payload_bytes
    item_bytes = group.fragment_bytes // (group.page_size * group.num_kv_heads * group.head_dim)
    if slot_bytes < group.payload_bytes or slot_bytes % item_bytes:
        raise LayoutMismatchError(
            f"slots of {slot_bytes} bytes: a block of this KV group has {group.payload_bytes}, of {group.dtype} "
            f"with {item_bytes} bytes each"
        )
    if not len(memory) or len(memory) % slot_bytes:
        raise LayoutMismatchError(f"a buffer of {len(memory)} bytes is no number of slots of {slot_bytes} bytes")
    return memory, slot_bytes


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
    return view.cast("B"), view.shape[0] if view.ndim > 1 and view.shape else 0


def _bind_slots(memory: memoryview, slot_bytes: int, chain: Chain, device: Device) -> PagedCaches:
    """See whole blocks, one every ``slot_bytes``, as a packed cache whose pages are blocks."""
    group = chain.group
    whole = replace(group, page_size=group.block_size)
    values = torch.frombuffer(memory, dtype=getattr(torch, group.dtype))
    axes = "LP" + _INNER[group.order]
    shape = [whole.axis_sizes[axis] for axis in axes]
    strides = torch.empty(shape, device="meta").stride()
    num_slots = len(memory) // slot_bytes
    slots = values.as_strided((num_slots, *shape), (slot_bytes // values.itemsize, *strides))
    return PagedCaches.bind(slots, whole, axes="B" + axes, device=device, codec=chain.codec)


def _seen_from_host(chain: Chain, caches: PagedCaches, h2d: Lanes, d2h: Lanes) -> Chain:
    """Return the same chain for transfers of a pool. All that is counted, waited for and found in it is shared."""
    seen = copy.copy(chain)
    seen.group, seen.caches, seen.h2d, seen.d2h = caches.group, caches, h2d, d2h
    if chain.gpu is not None:
        nothing = torch.empty(0, chain.host.rows.shape[1], dtype=torch.int64)
        seen.gpu = MemoryTier(chain.gpu.name, TierIndex(0), nothing)
        seen.memory = [seen.gpu, *chain.memory[1:]]
        seen.tiers = [seen.gpu, *chain.tiers[1:]]
    return seen
