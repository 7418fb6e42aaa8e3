"""The engine's paged KV tensors of one group, seen as the fragments a block's payload is made of.

Whatever the tensors look like, a block is the same bytes: layer by layer, plane by plane, page by page. A *fragment* is
the part of a page that is contiguous in both places. Nothing is copied here and nothing of the tensors is changed.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from tiered_kv.errors import ConfigurationError
from tiered_kv.layout import KVCaches, KVGroup
from tiered_kv.memory.codec import Codec
from tiered_kv.memory.device import Device
from tiered_kv.memory.fragments import Fragment, find_fragments


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
        """The same as an array, ``(num_fragments, 4)``."""
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
