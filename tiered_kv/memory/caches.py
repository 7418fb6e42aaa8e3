"""The engine's paged KV tensors of one group, seen as the fragments a block's payload is made of.

Whatever the tensors look like, a block is the same bytes: layer by layer, plane by plane, page by page. A *fragment* is
the part of a page that is contiguous in both places. Nothing is copied here and nothing of the tensors is changed.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiered_kv.errors import ConfigurationError, LayoutMismatchError
from tiered_kv.layout import KVCaches, KVGroup, layer_tensors
from tiered_kv.memory.codec import Codec
from tiered_kv.memory.device import Device

_INNER = {"NHD": "NHD", "HND": "HND", "MLA": "ND"}
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, eq=False)
class Fragment:
    """The same part of every page.

    Attributes:
        pages: ``(num_pages, words)`` over the engine's memory, of the widest int dtype that sizes and addresses allow:
            copying ints is exact for every dtype, and wide ones are fast.
        offset_bytes: Where it lies in a payload, for the first page of a block.
    """

    pages: Tensor
    offset_bytes: int

    def cut(self, start: int, stop: int) -> "Fragment":
        """Return the bytes ``start`` to ``stop`` of every page's part as a fragment of its own."""
        at = self.offset_bytes + start
        return Fragment(_in_words(self.pages.view(torch.uint8)[:, start:stop], at), at)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of one page's part."""
        return self.pages.shape[1] * self.pages.itemsize

    @cached_property
    def address(self) -> int:
        """Where the first page's part is."""
        return self.pages.data_ptr()

    @cached_property
    def stride_bytes(self) -> int:
        """Bytes from one page's part to the next's."""
        return int(self.pages.stride(0)) * self.pages.itemsize


class PagedCaches:
    """One KV group of the engine's cache, made by `bind`. The memory stays the engine's.

    Attributes:
        group: The shape of its blocks.
        codec: How blocks are kept in slots, if not as they are.
        layers: Those whose fragments are here: all, but for `of_layers`.
        pages_per_block: From the group, like ``payload_bytes``.
        stored_bytes: What a block has in a slot: its payload, or what the codec makes of it.
        torch_device: Where it is.
        num_pages: How many pages the engine has; its block ids lie in ``[0, num_pages)``.
        fragments: In the order of the payload. Planes and layers that lie side by side in the engine's memory too are
            one fragment, since few large pieces move faster than many small ones.
        arrays: Their ``pages`` as numpy has them, if they are on the host.
    """

    def __init__(
        self,
        group: KVGroup,
        codec: Codec | None,
        torch_device: torch.device,
        num_pages: int,
        fragments: tuple[Fragment, ...],
        layers: range,
    ) -> None:
        self.group = group
        self.codec = codec
        self.layers = layers
        self.pages_per_block = group.pages_per_block
        self.payload_bytes = group.payload_bytes
        self.stored_bytes = group.payload_bytes if codec is None else codec.stored_bytes
        self.torch_device = torch_device
        self.num_pages = num_pages
        self.fragments = fragments
        self.arrays = [fragment.pages.numpy() for fragment in fragments] if torch_device.type == "cpu" else []
        self._of_layers: dict[range, PagedCaches] = {}

    @classmethod
    def bind(
        cls,
        kv_caches: KVCaches,
        group: KVGroup,
        *,
        axes: str | None = None,
        device: Device,
        codec: Codec | None = None,
    ) -> "PagedCaches":
        """Take the engine's tensors as they are.

        Args:
            kv_caches: One packed tensor, or per layer, in layer order, a tensor or a ``(K, V)`` pair (list or dict).
            group: What their pages must be.
            axes: Letters for a tensor's axes, e.g. ``"PBNHD"``, where its shape alone does not tell.
            device: The one they must be on.
            codec: How blocks are kept in slots, if not as they are.

        Raises:
            LayoutMismatchError: No torch tensors; another dtype, shape, device, number of layers or planes; pages that
                are not contiguous inside, or layers that share bytes. Nothing has been touched.
        """
        where = device.torch_device
        layers, packed = layer_tensors(kv_caches)
        if not packed and len(layers) != group.num_layers:
            raise LayoutMismatchError(f"the KV group has {group.num_layers} layers, got the tensors of {len(layers)}")
        planes = []
        for number, tensors in enumerate(layers):
            for tensor in tensors:
                _check_tensor(tensor, group, where, number)
            planes += _planes_of(tensors, group, axes, packed=packed, layer=number)
        num_pages = {plane.num_pages for plane in planes}
        if len(num_pages) > 1:
            raise LayoutMismatchError(f"layers and planes must have one number of pages, got {sorted(num_pages)}")
        _check_apart(planes, group)
        if group.pages_per_block == 1:  # else the parts of two planes have other pages of the block between them
            planes = _merge_neighbours(planes)
        fragments, offset = [], 0
        for plane in planes:
            fragments.append(Fragment(plane.as_words(offset), offset))
            offset += plane.num_bytes * group.pages_per_block
        return cls(group, codec, where, num_pages.pop(), tuple(fragments), range(group.num_layers))

    @cached_property
    def table(self) -> NDArray[np.int64]:
        """Per fragment its address, stride, length and offset in a payload, in bytes: ``(num_fragments, 4)``."""
        facts = [(each.address, each.stride_bytes, each.num_bytes, each.offset_bytes) for each in self.fragments]
        return np.array(facts, dtype=np.int64).reshape(-1, 4)

    @property
    def columns(self) -> slice | None:
        """The bytes of a slot that these layers are; None is the whole slot, padding too."""
        return None if len(self.layers) == self.group.num_layers else self._bytes_of_layers(self.stored_bytes)

    @property
    def payload_columns(self) -> slice:
        """The bytes of a payload that these layers are."""
        return self._bytes_of_layers(self.payload_bytes)

    def by_page(self) -> "PagedCaches":
        """Return the same pages as blocks of one page each, without codec: for slots that an engine numbers itself."""
        group = replace(self.group, block_size=self.group.page_size)
        fragments = tuple(
            replace(each, offset_bytes=each.offset_bytes // self.pages_per_block) for each in self.fragments
        )
        return PagedCaches(group, None, self.torch_device, self.num_pages, fragments, self.layers)

    def of_layers(self, layers: slice | None) -> "PagedCaches":
        """Return the same pages with the fragments of consecutive layers alone, at the same places in a payload.

        A fragment of several layers is cut. What was asked for once is kept. None is all layers.
        """
        wanted = range(self.group.num_layers)[layers or slice(None)]
        if wanted == self.layers:
            return self
        if wanted not in self._of_layers:
            part = PagedCaches(self.group, self.codec, self.torch_device, self.num_pages, (), wanted)
            start, stop = part.payload_columns.start, part.payload_columns.stop
            fragments = []
            for each in self.fragments:
                first, last = each.offset_bytes, each.offset_bytes + each.num_bytes * self.pages_per_block
                if start <= first and last <= stop:
                    fragments.append(each)
                elif start < last and first < stop:  # of several layers: then a block has one page, see `bind`
                    fragments.append(each.cut(max(start, first) - first, min(stop, last) - first))
            self._of_layers[wanted] = PagedCaches(
                self.group, self.codec, self.torch_device, self.num_pages, tuple(fragments), wanted
            )
        return self._of_layers[wanted]

    def _bytes_of_layers(self, num_bytes: int) -> slice:
        each = num_bytes // self.group.num_layers
        return slice(self.layers.start * each, (self.layers.start + len(self.layers)) * each)

    def check_ids(self, page_ids: NDArray[np.int64]) -> None:
        """Raise `ConfigurationError`, naming the first bad one, unless all ids are pages and none comes twice."""
        if not page_ids.size:
            return
        if int(page_ids.min()) < 0 or int(page_ids.max()) >= self.num_pages:
            at = int(np.argmax((page_ids < 0) | (page_ids >= self.num_pages)))
            raise ConfigurationError(f"block id {page_ids[at]} at position {at} is not in [0, {self.num_pages})")
        ordered = np.sort(page_ids)
        if (ordered[1:] == ordered[:-1]).any():
            first = np.zeros(len(page_ids), dtype=bool)
            first[np.unique(page_ids, return_index=True)[1]] = True
            at = int(np.argmin(first))
            raise ConfigurationError(f"block id {page_ids[at]} at position {at} is there twice")


@dataclass(frozen=True, eq=False)
class _Plane:
    """Bytes of every page: ``num_bytes`` at ``start + page * stride`` of a storage."""

    storage: torch.UntypedStorage
    start: int
    num_bytes: int
    stride: int
    num_pages: int
    device: torch.device

    def overlaps(self, other: "_Plane") -> bool:
        """Say whether some page here has bytes of some page of a plane with as many pages.

        Pages of several planes may take turns in memory. Planes of different strides are not compared.
        """
        if self.stride != other.stride or not self.num_pages:
            return False
        distance = other.storage.data_ptr() + other.start - self.storage.data_ptr() - self.start
        pages, after = divmod(distance, self.stride)  # the other's first page begins in, or behind, this page of ours
        last = self.num_pages - 1
        return (abs(pages) <= last and after < self.num_bytes) or (
            abs(pages + 1) <= last and self.stride - after < other.num_bytes
        )

    def as_words(self, payload_offset: int) -> Tensor:
        pages = torch.empty(0, dtype=torch.uint8, device=self.device)
        pages.set_(self.storage, self.start, (self.num_pages, self.num_bytes), (self.stride, 1))
        return _in_words(pages, payload_offset)


def _in_words(pages: Tensor, payload_offset: int) -> Tensor:
    """View ``(num_pages, num_bytes)`` uint8 in the widest words that fit there and at ``payload_offset``."""
    facts = pages.storage_offset(), pages.shape[1], pages.stride(0), pages.data_ptr(), payload_offset
    return pages.view(next(words for size, words in _WORDS.items() if not any(fact % size for fact in facts)))


def _check_tensor(tensor: object, group: KVGroup, device: torch.device, layer: int) -> None:
    if not isinstance(tensor, Tensor):
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise LayoutMismatchError(f"layer {layer} is a {kind}, no torch tensor: torch.from_numpy() shares its memory")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype != group.dtype:
        raise LayoutMismatchError(f"layer {layer} is of {dtype}, the KV group of {group.dtype}")
    if tensor.device != device:
        raise LayoutMismatchError(f"layer {layer} is on {tensor.device}, the cache was opened for {device}")
    if tensor.layout != torch.strided:
        raise LayoutMismatchError(f"layer {layer} is a {tensor.layout} tensor, only strided ones can be paged")


def _check_apart(planes: list[_Plane], group: KVGroup) -> None:
    for (i, one), (j, other) in combinations(enumerate(planes), 2):
        if one.overlaps(other):
            names = [
                f"layer {number // group.num_planes}" + ("" if group.num_planes == 1 else f" ({'KV'[number % 2]})")
                for number in (i, j)
            ]
            raise LayoutMismatchError(
                f"{names[0]} and {names[1]} share bytes: what is loaded into one would overwrite the other"
            )


def _planes_of(
    tensors: tuple[Tensor, ...], group: KVGroup, axes: str | None, *, packed: bool, layer: int
) -> list[_Plane]:
    """Return the planes of one layer, or of all layers if ``packed``, in canonical order."""
    shape = tuple(tensors[0].shape)
    try:
        axes = axes or group.find_axes(shape, packed=packed)
    except LayoutMismatchError as error:
        raise LayoutMismatchError(
            f"{f'one tensor for all {group.num_layers} layers, no list' if packed else f'layer {layer}'}: {error}"
        ) from None
    inner = _INNER[group.order]
    outer = "LPB" if packed else "PB"
    if len(set(axes)) != len(axes) or set(inner + "B") - set(axes) or set(axes) - set(outer + inner):
        raise LayoutMismatchError(
            f"axes {axes!r} must name each of {'B' + inner} once, in capitals, and may name {outer[:-1]}"
        )
    if "".join(axis for axis in axes if axis in inner) != inner:
        raise LayoutMismatchError(f"axes {axes!r} have another order than the KV group's {group.order}")
    found = len(tensors) * (group.num_planes if "P" in axes else 1)
    if found != group.num_planes or (packed and "L" not in axes and group.num_layers > 1):
        raise LayoutMismatchError(
            f"layer {layer}: {len(tensors)} tensor(s) of axes {axes} are not the {group.num_planes} plane(s) "
            f"of {group.num_layers} layer(s) of the KV group"
        )
    for tensor in tensors:
        group.check_axes(axes, tensor.shape)
    return [
        _plane_of(_at(_at(tensor, axes, "L", in_tensor), axes.replace("L", ""), "P", plane), axes, group, layer)
        for in_tensor in range(group.num_layers if packed else 1)
        for tensor in tensors
        for plane in range(group.num_planes if "P" in axes else 1)
    ]


def _at(tensor: Tensor, axes: str, axis: str, index: int) -> Tensor:
    return tensor.select(axes.index(axis), index) if axis in axes else tensor


def _plane_of(plane: Tensor, axes: str, group: KVGroup, layer: int) -> _Plane:
    axes = axes.replace("L", "").replace("P", "")
    plane = plane.movedim(axes.index("B"), 0)
    expected = 1
    for size, stride in zip(reversed(plane.shape[1:]), reversed(plane.stride()[1:]), strict=True):
        if size > 1 and stride != expected:
            raise LayoutMismatchError(
                f"layer {layer}: the tokens of a page must be contiguous, got shape {tuple(plane.shape)} "
                f"with strides {plane.stride()}"
            )
        expected *= size
    num_pages = plane.shape[0]
    stride = int(plane.stride(0)) if num_pages > 1 else expected
    if stride < expected:
        raise LayoutMismatchError(f"layer {layer}: pages of {expected} elements overlap, their stride is {stride}")
    return _Plane(
        plane.untyped_storage(),
        int(plane.storage_offset()) * plane.itemsize,
        group.fragment_bytes,
        stride * plane.itemsize,
        num_pages,
        plane.device,
    )


def _merge_neighbours(planes: list[_Plane]) -> list[_Plane]:
    merged = [planes[0]]
    for plane in planes[1:]:
        last = merged[-1]
        fits = last.num_bytes + plane.num_bytes <= last.stride or last.num_pages == 1
        adjacent = last.storage.data_ptr() == plane.storage.data_ptr() and last.start + last.num_bytes == plane.start
        if adjacent and fits and (last.stride == plane.stride or last.num_pages == 1):
            merged[-1] = replace(
                last,
                num_bytes=last.num_bytes + plane.num_bytes,
                stride=max(last.stride, last.num_bytes + plane.num_bytes),
            )
        else:
            merged.append(plane)
    return merged
