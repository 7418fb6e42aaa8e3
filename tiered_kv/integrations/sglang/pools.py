"""SGLang's host pools seen as KV groups: which memory each has, and what a page of it is made of.

A model with one kind of layer has one host pool. Others have more, each with pages of its own: sliding windows, states
of Mamba and of linear attention, an index of sparse attention, DeepSeek V4's compressed forms, a draft model. SGLang
names the pages of all of them by the same hashes. A page of a pool is a block of each of its groups: one for K and V or
for latents, so that all layouts share them, and else one for each of its buffers, whose bytes only SGLang can read.

What a pool's memory looks like is known by its class. A subclass may keep more beside it, scales for one, so it is
another kind, and refused until it is known here.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from tiered_kv.integrations.identity import TOKENS_PER_STATE, state_slots
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.keys import BlockKeys
from tiered_kv.values.layout import KVGroup
from tiered_kv.values.specs import CPULoadStoreSpec

VERSION: Final = "0.5.23"
KV: Final = "kv"
"""SGLang's name of the pool that decides how many pages a prompt has."""
_LAYOUTS: Final = ("layer_first", "page_first", "page_first_direct")


@dataclass(frozen=True)
class Part:
    """The memory of one KV group.

    Attributes:
        group: What its blocks are.
        buffer: A tensor, or one a layer, as `BlockCache.register_host_pool` takes them.
        axes: Letters for their axes.
    """

    group: KVGroup
    buffer: Any
    axes: str


@dataclass(frozen=True)
class HostPool:
    """One of SGLang's host pools.

    Attributes:
        name: SGLang's.
        page_slots: Of SGLang's slots a page has so many: its tokens, or 1 for a state.
        parts: Its memory; none, where it only numbers pages that others hold.
        first_group: The KV group of the first part; the others follow.
        rank: Where each rank has a part of its own of what this pool holds, and of the main pool all have the same:
            which rank this is. Else empty.
    """

    name: str
    page_slots: int
    parts: tuple[Part, ...]
    first_group: int
    rank: str = ""

    @property
    def spots(self) -> list[str]:
        """Names for the memory of each part."""
        return [f"{self.name} {number}" for number in range(len(self.parts))]

    def keys(self, hashes: Sequence[str], start: int) -> list[BlockKeys]:
        """Name pages in each part, by SGLang's hashes in hexadecimal, of which ``start`` others come before."""
        digests = [bytes.fromhex(each) for each in hashes]
        if self.rank:
            digests = [hashlib.sha256(each + self.rank.encode()).digest() for each in digests]
        return [
            BlockKeys.from_hashes(
                digests, block_size=part.group.block_size, start=start, group=self.first_group + number
            )
            for number, part in enumerate(self.parts)
        ]

    def places(self, host_indices: Any, num_pages: int) -> list[CPULoadStoreSpec] | None:  # noqa: ANN401 - a tensor
        """Say where pages are in each part, by SGLang's slots of them; None where these are not of so many pages."""
        if host_indices is None or len(host_indices) != num_pages * self.page_slots:
            return None
        ids = (host_indices[:: self.page_slots] // self.page_slots).tolist()
        return [CPULoadStoreSpec(ids, pool=spot) for spot in self.spots]


def host_pool(
    pool: Any,  # noqa: ANN401 - SGLang's
    name: str,
    *,
    block_size: int,
    first_group: int,
    platform: str,
    rank: str = "",
    tokens_per_state: int = TOKENS_PER_STATE,
) -> HostPool:
    """See one of SGLang's host pools as KV groups. Copies nothing.

    Args:
        pool: SGLang's.
        name: SGLang's, too.
        block_size: Tokens that one of SGLang's hashes names.
        first_group: The number that its first KV group is to have.
        platform: What computes here, as bytes that only SGLang can read may differ by it.
        rank: See `HostPool`.
        tokens_per_state: See `state_slots`.

    Raises:
        ConfigurationError: Pages of a kind that is not known here, with the reason.
    """
    kind = type(pool).__name__
    if (read := _READERS.get(kind)) is None:
        raise ConfigurationError(
            f"SGLang's host pool {name!r} is a {kind}, whose pages are not known here: use another storage backend. "
            f"Known are {', '.join(_READERS)}"
        )
    if pool.layout not in _LAYOUTS:
        raise ConfigurationError(f"hicache_mem_layout={pool.layout!r} is not served; these are: {', '.join(_LAYOUTS)}")
    if (dcp_size := getattr(pool, "dcp_size", 1)) > 1:
        raise ConfigurationError(f"the host pool {name!r} has 1/{dcp_size} of each page: it is not served")
    parts = tuple(read(pool, block_size, f"SGLang {VERSION} on {platform}, {kind}"))
    if read is _states:
        slots = state_slots(block_size, tokens_per_state)
        parts = tuple(replace(part, group=replace(part.group, slots_per_block=slots)) for part in parts)
    return HostPool(name, pool.page_size, parts, first_group, rank)


def is_split(pool: Any) -> bool:  # noqa: ANN401 - SGLang's
    """Say whether each rank of tensor parallelism has a part of its own of what a pool holds: some of the heads."""
    return type(pool).__name__ in _SPLIT


_Parts = Iterator[Part]


def _kv(pool: Any, block_size: int, _: str) -> _Parts:  # noqa: ANN401 - SGLang's
    """K and V of as many elements."""
    axes = {"layer_first": "PLBNHD", "page_first": "PBNLHD", "page_first_direct": "PBLNHD"}[pool.layout]
    sizes = {"P": 2, "L": pool.layer_num, "B": pool.page_num, "N": pool.page_size, "H": pool.head_num}
    yield _readable(pool, block_size, "NHD", axes, sizes | {"D": pool.head_dim})


def _latents(pool: Any, block_size: int, _: str) -> _Parts:  # noqa: ANN401 - SGLang's
    """MLA's rows."""
    axes = {"layer_first": "LBND", "page_first": "BNLD", "page_first_direct": "BLND"}[pool.layout]
    sizes = {"L": pool.layer_num, "B": pool.page_num, "N": pool.page_size, "D": pool.kv_cache_dim}
    yield _readable(pool, block_size, "MLA", axes, sizes)


def _readable(pool: Any, block_size: int, order: Any, axes: str, sizes: dict[str, int]) -> Part:  # noqa: ANN401 - SGLang's
    buffer = _memory(pool, pool.kv_buffer)
    dtype = str(pool.dtype).removeprefix("torch.")
    group = KVGroup(sizes["L"], sizes.get("H", 1), sizes["D"], dtype, block_size, order, page_size=pool.page_size)
    return Part(group, buffer.view([sizes[axis] for axis in axes]), axes)


def _uneven_kv(pool: Any, block_size: int, tag: str) -> _Parts:  # noqa: ANN401 - SGLang's
    """K and V of different sizes, each with a buffer."""
    yield _of_tokens(pool, pool.k_buffer, block_size, f"{tag}, K")
    yield _of_tokens(pool, pool.v_buffer, block_size, f"{tag}, V")


def _k_only(pool: Any, block_size: int, tag: str) -> _Parts:  # noqa: ANN401 - SGLang's
    """K alone: the index of MiniMax's sparse attention."""
    yield _of_tokens(pool, pool.k_buffer, block_size, f"{tag}, K")


def _index(pool: Any, block_size: int, tag: str) -> _Parts:  # noqa: ANN401 - SGLang's
    """Keys of the index of DeepSeek's sparse attention, with their scales: a row a page."""
    buffer = _memory(pool, pool.index_k_with_scale_buffer)
    yield _opaque(buffer, "LBD" if pool.layout == "layer_first" else "BLD", block_size, tag)


def _rows(pool: Any, block_size: int, tag: str) -> _Parts:  # noqa: ANN401 - SGLang's
    """A row a page, in one buffer or in one a layer."""
    if isinstance(pool.kv_buffer, list):
        yield _opaque(pool.kv_buffer, "BD", block_size, f"{tag}, {pool.pool_name}")
    else:
        yield _opaque(_memory(pool, pool.kv_buffer), "BLD", block_size, f"{tag}, {pool.pool_name}")


def _states(pool: Any, block_size: int, tag: str) -> _Parts:  # noqa: ANN401 - SGLang's
    """A state after a page, of all layers: recurrent, convolutions', and what else goes with them."""
    yield from (
        _opaque(buffer, "BLD", block_size, f"{tag}, {what}")
        for what, buffer in (
            ("recurrent", pool.temporal_buffer),
            *((f"convolution {number}", buffer) for number, buffer in enumerate(pool.conv_buffer)),
        )
        if buffer.numel()  # a model of convolutions alone has no other state
    )
    for number, buffer in enumerate(pool.slot_state_buffers):
        yield _opaque(buffer, "BD", block_size, f"{tag}, beside them {number}")


def _nothing(*_: object) -> _Parts:
    """Only numbers: what belongs to these pages is in other pools."""
    return iter(())


_READERS: Final[dict[str, Callable[[Any, int, str], _Parts]]] = {
    "MHATokenToKVPoolHost": _kv,
    "MLATokenToKVPoolHost": _latents,
    "AsymmetricMHATokenToKVPoolHost": _uneven_kv,
    "MHATokenToKOnlyPoolHost": _k_only,
    "DSAIndexerPoolHost": _index,
    "QSAIndexerPoolHost": _rows,
    "MambaPoolHost": _states,
    "DeepSeekV4PagedHostPool": _rows,
    "DeepSeekV4StateHostPool": _rows,
    "LogicalHostPool": _nothing,
}
_SPLIT: Final = {
    "MHATokenToKVPoolHost",
    "AsymmetricMHATokenToKVPoolHost",
    "MHATokenToKOnlyPoolHost",
    "MambaPoolHost",
}


def _memory(pool: Any, buffer: Any) -> Any:  # noqa: ANN401 - SGLang's, a tensor
    if buffer is None or not hasattr(buffer, "data_ptr"):
        raise ConfigurationError(f"{type(pool).__name__} has no memory of one tensor: it is not served")
    return buffer


def _of_tokens(pool: Any, buffer: Any, block_size: int, tag: str) -> Part:  # noqa: ANN401 - SGLang's
    """See a buffer whose tokens may follow each other over pages."""
    buffer = _memory(pool, buffer)
    if pool.layout == "layer_first":
        return _opaque(buffer.view(pool.layer_num, pool.page_num, -1), "LBD", block_size, tag)
    if pool.layout == "page_first_direct":
        return _opaque(buffer, "BLD", block_size, tag)
    # Layers are inside tokens: a page is one piece, of another order than the others'.
    return _opaque(buffer.view(pool.page_num, -1), "BD", block_size, f"{tag}, {pool.layer_num} layers in each token")


def _opaque(buffer: Any, axes: str, block_size: int, tag: str) -> Part:  # noqa: ANN401 - a tensor, or some
    """Take a page as bytes that only SGLang can read: in one tensor, or in one a layer."""
    first = buffer[0] if isinstance(buffer, list) else buffer
    inner = tuple(first.shape[len(axes) - 1 :])
    num_layers = len(buffer) if isinstance(buffer, list) else first.shape[axes.index("L")] if "L" in axes else 1
    group = KVGroup.opaque(
        math.prod(inner) * first.element_size(),
        tag=f"{tag}, {first.dtype}",
        block_size=block_size,
        num_layers=num_layers,
    )
    return Part(group, buffer, axes)
