"""Host memory of the engine's own in which an id is a slot: read as whole blocks, seen as a cache that copies reach."""

import mmap

import numpy as np
import torch
from numpy.typing import NDArray

from tiered_kv.backend import Block
from tiered_kv.errors import ConfigurationError, LayoutMismatchError
from tiered_kv.layout import PAGE_BYTES, KVGroup
from tiered_kv.memory.caches import PagedCaches
from tiered_kv.memory.codec import Codec
from tiered_kv.memory.device import Device

_HEADER_BYTES = 4096


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

    def blocks(self, slots: NDArray[np.int64]) -> list[Block]:
        """Lend record buffers over ``slots``, with headers of their own. The last page of a block is used whole."""
        headers = memoryview(mmap.mmap(-1, len(slots) * _HEADER_BYTES))
        stride, payload = self._group.stride_bytes, self._group.payload_bytes
        return [
            Block(
                headers[number * _HEADER_BYTES : (number + 1) * _HEADER_BYTES],
                self._memory[slot * self._slot_bytes : slot * self._slot_bytes + stride],
                payload,
            )
            for number, slot in enumerate(slots.tolist())
        ]


def slots_of(buffer: object, group: KVGroup, slot_bytes: int | None) -> tuple[memoryview, int]:
    """Return a buffer of whole blocks as bytes, and the bytes from one slot to the next."""
    memory, rows = _bytes_of(buffer)
    if slot_bytes is None:
        slot_bytes = len(memory) // rows if rows else group.payload_bytes
    if slot_bytes < group.payload_bytes or slot_bytes % group.item_bytes:
        raise LayoutMismatchError(
            f"slots of {slot_bytes} bytes: a block of this KV group has {group.payload_bytes}, of {group.dtype} "
            f"with {group.item_bytes} bytes each"
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


def bind_slots(
    memory: memoryview, slot_bytes: int, group: KVGroup, *, device: Device, codec: Codec | None
) -> PagedCaches:
    """See whole blocks, one every ``slot_bytes``, as a packed cache whose pages are blocks."""
    whole = group.in_one_page()
    values = torch.frombuffer(memory, dtype=getattr(torch, group.dtype))
    axes = "LP" + group.inner_axes
    shape = [whole.axis_sizes[axis] for axis in axes]
    strides = torch.empty(shape, device="meta").stride()
    num_slots = len(memory) // slot_bytes
    slots = values.as_strided((num_slots, *shape), (slot_bytes // values.itemsize, *strides))
    return PagedCaches.bind(slots, whole, axes="B" + axes, device=device, codec=codec)
