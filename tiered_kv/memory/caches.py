"""The engine's paged KV tensors of one group, seen as the fragments a block's payload is made of.

Whatever the tensors look like, a block is the same bytes: layer by layer, plane by plane, page by page. A *fragment* is
the part of a page that is contiguous in both places. Planes of layers are found by their axes, checked, cut to such
parts, and put together again where neighbours in a page are neighbours in a payload. Nothing is copied, no tensor is
changed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiered_kv.memory.codec import Codec
from tiered_kv.memory.device import Device
from tiered_kv.values.errors import ConfigurationError, LayoutMismatchError
from tiered_kv.values.layout import KVCaches, KVGroup, layer_tensors
from tiered_kv.values.specs import repeats

_FEW_IDS = 64
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, eq=False)
class Fragment:
    """A part of a block's bytes that lies at the same place in every page.

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


def find_fragments(
    kv_caches: KVCaches, group: KVGroup, where: torch.device, axes: str | None
) -> tuple[int, tuple[Fragment, ...]]:
    """Return the number of pages of the engine's tensors, and their fragments in the order of the payload.

    Planes and layers that lie side by side in the engine's memory too are one fragment, since few large pieces move
    faster than many small ones.

    Raises:
        LayoutMismatchError: See `PagedCaches.bind`.
    """
    if not (axes is None or isinstance(axes, str)):
        raise LayoutMismatchError(f"axes are letters, such as 'PBNHD', got {axes!r:.80}")
    layers, packed = layer_tensors(kv_caches)
    if not packed and len(layers) != group.num_layers:
        raise LayoutMismatchError(f"the KV group has {group.num_layers} layers, got the tensors of {len(layers)}")
    planes = []
    for number, tensors in enumerate(layers):
        for tensor in tensors:
            _check_tensor(tensor, group, where, number)
        planes += _planes_of(tensors, group, axes, packed=packed, layer=number)
    num_pages = planes[0].page.num_pages
    if (other := next((plane for plane in planes if plane.page.num_pages != num_pages), None)) is not None:
        raise LayoutMismatchError(
            f"layers and planes must have one number of pages: {other.name} has {other.page.num_pages}, "
            f"{planes[0].name} {num_pages}"
        )
    _check_apart(planes)
    parts = sorted((part for plane in planes for part in plane.parts()), key=lambda part: part.offset)
    if group.pages_per_block == 1:  # else the parts of two planes have other pages of the block between them
        parts = _merge_neighbours(parts)
    return num_pages, tuple(Fragment(part.as_words(), part.offset) for part in parts)


@dataclass(frozen=True, eq=False)
class _PageSpan:
    """Bytes at the same place in every page: ``num_bytes`` at ``start + page * stride`` of a storage.

    They are at ``offset`` of a payload, for the first page of a block.
    """

    storage: torch.UntypedStorage
    start: int
    num_bytes: int
    stride: int
    num_pages: int
    device: torch.device
    offset: int

    def overlaps(self, other: "_PageSpan") -> bool:
        """Say whether some page here has bytes of some page of a part with as many pages.

        Pages of several parts may take turns in memory. Parts of different strides are not compared.
        """
        if self.stride != other.stride or not self.num_pages:
            return False
        distance = other.storage.data_ptr() + other.start - self.storage.data_ptr() - self.start
        pages, after = divmod(distance, self.stride)  # the other's first page begins in, or behind, this page of ours
        last = self.num_pages - 1
        return (abs(pages) <= last and after < self.num_bytes) or (
            abs(pages + 1) <= last and self.stride - after < other.num_bytes
        )

    def as_words(self) -> Tensor:
        pages = torch.empty(0, dtype=torch.uint8, device=self.device)
        pages.set_(self.storage, self.start, (self.num_pages, self.num_bytes), (self.stride, 1))
        return _in_words(pages, self.offset)


@dataclass(frozen=True, eq=False)
class _Plane:
    """What lies in one piece in the engine's pages: a plane of a layer, or several that take turns inside a page.

    Attributes:
        name: For messages.
        page: All its bytes.
        cuts: Per part of a payload its start in a page, length, and offset in a payload, in bytes.
    """

    name: str
    page: _PageSpan
    cuts: Sequence[tuple[int, int, int]]

    def parts(self) -> list[_PageSpan]:
        """Return the plane cut into spans that lie in one piece in a payload too."""
        first = self.page.start
        return [replace(self.page, start=first + at, num_bytes=n, offset=offset) for at, n, offset in self.cuts]


def _in_words(pages: Tensor, payload_offset: int) -> Tensor:
    """View ``(num_pages, num_bytes)`` uint8 in the widest words that fit there and at ``payload_offset``."""
    facts = pages.storage_offset(), pages.shape[1], pages.stride(0), pages.data_ptr(), payload_offset
    return pages.view(next(words for size, words in _WORDS.items() if not any(fact % size for fact in facts)))


def _check_tensor(tensor: object, group: KVGroup, device: torch.device, layer: int) -> None:
    if not isinstance(tensor, Tensor):
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise LayoutMismatchError(f"layer {layer} is a {kind}, no torch tensor: torch.from_numpy() shares its memory")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype != group.dtype and group.order != "opaque":
        raise LayoutMismatchError(f"layer {layer} is of {dtype}, the KV group of {group.dtype}")
    if tensor.device != device:
        raise LayoutMismatchError(f"layer {layer} is on {tensor.device}, the cache was opened for {device}")
    if tensor.layout != torch.strided:
        raise LayoutMismatchError(f"layer {layer} is a {tensor.layout} tensor, only strided ones can be paged")


def _as_bytes(tensor: Tensor, group: KVGroup, axes: str | None, *, packed: bool, layer: int) -> Tensor:
    """See an opaque tensor as uint8, with one axis for all that is inside a page, whatever it is."""
    num_outer = len(axes) - 1 if axes else 1 + (packed and group.num_layers > 1)
    try:
        return tensor.view(torch.uint8).view(*tensor.shape[:num_outer], -1)
    except RuntimeError:  # torch's word for strides that do not allow it
        raise LayoutMismatchError(
            f"layer {layer}: the bytes of an opaque page must be contiguous, got shape {tuple(tensor.shape)} "
            f"with strides {tensor.stride()}"
        ) from None


def _check_apart(planes: list[_Plane]) -> None:
    for one, other in combinations(planes, 2):
        if one.page.overlaps(other.page):
            raise LayoutMismatchError(
                f"{one.name} and {other.name} share bytes: what is loaded into one would overwrite the other"
            )


def _planes_of(
    tensors: tuple[Tensor, ...], group: KVGroup, axes: str | None, *, packed: bool, layer: int
) -> list[_Plane]:
    """Return the planes of one layer, or of all layers if ``packed``."""
    if group.order == "opaque":
        tensors = tuple(_as_bytes(each, group, axes, packed=packed, layer=layer) for each in tensors)
    axes = _axes_of(tensors, group, axes, packed=packed, layer=layer)
    first = min(axes.index(axis) for axis in group.inner_axes)
    in_page = axes[first:].replace("B", "")
    if group.pages_per_block > 1 and set(in_page) - set(group.inner_axes):
        raise LayoutMismatchError(
            f"axes {axes!r} have layers or planes inside a page: then a block must be one page, and here it is "
            f"{group.pages_per_block} pages"
        )
    layers = range(group.num_layers) if "L" in axes[:first] else (layer,)
    planes = range(group.num_planes) if "P" in axes[:first] else (None,)
    found_planes = []
    for in_tensor, (number, tensor), plane in product(layers, enumerate(tensors), planes):
        part, rest = tensor, axes
        for axis, index in (("L", in_tensor), ("P", plane)):
            if axis in axes[:first]:
                part, rest = part.select(rest.index(axis), index or 0), rest.replace(axis, "")
        at = number if plane is None else plane
        name = "all layers" if "L" in in_page else f"layer {in_tensor}"
        name += f" ({'KV'[at]})" if group.num_planes > 1 and "P" not in in_page else ""
        found_planes.append(_Plane(name, _page_of(part, rest, layer), _cuts(group, in_page, in_tensor, at)))
    return found_planes


def _axes_of(tensors: tuple[Tensor, ...], group: KVGroup, axes: str | None, *, packed: bool, layer: int) -> str:
    """Return the axes of one layer's tensors, found or given, if these are what the group says."""
    shape = tuple(tensors[0].shape)
    try:
        has_layers = packed and (group.num_layers > 1 or group.order != "opaque")
        axes = axes or group.find_axes(shape, packed=has_layers)
    except LayoutMismatchError as error:
        raise LayoutMismatchError(
            f"{f'one tensor for all {group.num_layers} layers, no list' if packed else f'layer {layer}'}: {error}"
        ) from None
    inner = group.inner_axes
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
    return axes


def _cuts(group: KVGroup, in_page: str, layer: int, plane: int) -> list[tuple[int, int, int]]:
    """Say which bytes of a page lie in one piece in a payload too: where there, how many, and where in the payload.

    Args:
        group: Of the blocks.
        in_page: The axes of a page, the outermost first.
        layer: Which one it is, unless these axes say.
        plane: The same.
    """
    sizes = group.axis_sizes
    mixed = in_page[: max(in_page.find("L"), in_page.find("P")) + 1]  # what is inside of these is in order
    order = "LP" + "".join(axis for axis in group.inner_axes if axis in mixed)
    unit = math.prod(sizes[axis] for axis in in_page[len(mixed) :]) * group.item_bytes
    given = {"L": layer, "P": plane}
    whole = np.arange(math.prod(sizes[axis] for axis in order)).reshape([sizes[axis] for axis in order])
    in_payload = whole[tuple(slice(None) if axis in mixed else given[axis] for axis in order)].ravel()
    in_memory = np.arange(in_payload.size).reshape([sizes[axis] for axis in mixed])
    in_memory = in_memory.transpose([mixed.index(axis) for axis in order if axis in mixed]).ravel()
    ends = np.flatnonzero((np.diff(in_memory) != 1) | (np.diff(in_payload) != 1)) + 1
    starts, lengths = np.r_[0, ends], np.diff(np.r_[0, ends, in_payload.size])
    offsets = in_payload[starts] * (unit * group.pages_per_block)
    return list(zip((in_memory[starts] * unit).tolist(), (lengths * unit).tolist(), offsets.tolist(), strict=True))


def _page_of(plane: Tensor, axes: str, layer: int) -> _PageSpan:
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
    first, num_bytes, stride_bytes = (n * plane.itemsize for n in (int(plane.storage_offset()), expected, stride))
    return _PageSpan(plane.untyped_storage(), first, num_bytes, stride_bytes, num_pages, plane.device, 0)


def _merge_neighbours(parts: list[_PageSpan]) -> list[_PageSpan]:
    merged = [parts[0]]
    for part in parts[1:]:
        last = merged[-1]
        fits = last.num_bytes + part.num_bytes <= last.stride or last.num_pages == 1
        adjacent = last.storage.data_ptr() == part.storage.data_ptr() and last.start + last.num_bytes == part.start
        if adjacent and fits and (last.stride == part.stride or last.num_pages == 1):
            merged[-1] = replace(
                last,
                num_bytes=last.num_bytes + part.num_bytes,
                stride=max(last.stride, last.num_bytes + part.num_bytes),
            )
        else:
            merged.append(part)
    return merged


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
        fragments: In the order of the payload; see `find_fragments`.
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
    @torch.inference_mode(mode=False)  # else an engine that binds under it could write here nowhere else
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
        num_pages, fragments = find_fragments(kv_caches, group, where, axes)
        return cls(group, codec, where, num_pages, fragments, range(group.num_layers))

    @cached_property
    def facts(self) -> list[tuple[int, int, int, int]]:
        """Per fragment its address, stride, length and offset in a payload, in bytes."""
        return [(each.address, each.stride_bytes, each.num_bytes, each.offset_bytes) for each in self.fragments]

    @cached_property
    def table(self) -> NDArray[np.int64]:
        """The `facts` as an array, ``(num_fragments, 4)``."""
        return np.array(self.facts, dtype=np.int64).reshape(-1, 4)

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

    @cached_property
    def alone(self) -> tuple["PagedCaches", int, int]:
        """These layers in rows that hold no others: the same pages, a row's words, and the bytes of a slot left out.

        Both are whole multiples of 16 bytes: nothing is aligned less than in whole slots.
        """
        columns = self._bytes_of_layers(self.stored_bytes)
        left_out = columns.start & -16
        fragments = tuple(replace(each, offset_bytes=each.offset_bytes - left_out) for each in self.fragments)
        caches = PagedCaches(self.group, self.codec, self.torch_device, self.num_pages, fragments, self.layers)
        return caches, -(-(columns.stop - left_out) // 16) * 2, left_out

    @property
    def layer_bytes(self) -> int:
        """The most that one layer takes in rows of its own: see `alone`."""
        return self.stored_bytes // self.group.num_layers + 32

    @property
    def staged_bytes(self) -> int:
        """The least of a slot that can go through a buffer on the device: a layer; with a codec, all layers."""
        return self.stored_bytes if self.codec is not None else self.layer_bytes

    def _bytes_of_layers(self, num_bytes: int) -> slice:
        each = num_bytes // self.group.num_layers
        return slice(self.layers.start * each, (self.layers.start + len(self.layers)) * each)

    def check_ids(self, page_ids: NDArray[np.int64]) -> None:
        """Raise `ConfigurationError`, naming the first bad one, unless all ids are pages and none comes twice."""
        if not page_ids.size:
            return
        if page_ids.size < _FEW_IDS:  # of so few Python finds the ends and repeats in a fraction of numpy's time
            numbers = page_ids.tolist()
            if min(numbers) >= 0 and max(numbers) < self.num_pages and len(set(numbers)) == len(numbers):
                return
        if int(page_ids.min()) < 0 or int(page_ids.max()) >= self.num_pages:
            at = int(np.argmax((page_ids < 0) | (page_ids >= self.num_pages)))
            raise ConfigurationError(f"block id {page_ids[at]} at position {at} is not in [0, {self.num_pages})")
        if again := repeats(page_ids):
            raise ConfigurationError(f"block id {page_ids[again[0]]} at position {again[0]} is there twice")
