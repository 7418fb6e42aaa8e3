"""What one KV block is made of, whatever the engine's tensors look like.

A block's *payload* is the same bytes everywhere: layer by layer, plane by plane (K then V, or one MLA latent), page by
page, each page's tokens as the engine keeps them (NHD or HND), or bytes that only the engine can read. How an engine
lays pages out (one tensor a layer or one for all, K and V apart or together) is found again at `register_kv_caches` and
is no part of a block's identity.

Axes are written as letters: ``L`` layers, ``P`` planes, ``B`` pages (the engine's block ids), ``N`` tokens of a page,
``H`` KV heads, ``D`` head dimension. vLLM's FlashAttention cache is ``PBNHD``, FlashInfer's ``BPNHD`` or ``BPHND``;
SGLang's host pool ``page_first``, whose tokens hold all layers, is ``PBNLHD``.
"""

import hashlib
import json
import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import permutations
from typing import Any, Literal

from tiered_kv.values.errors import ConfigurationError, LayoutMismatchError
from tiered_kv.values.integers import as_int, is_number
from tiered_kv.values.keys import ModelIdentity, as_utf8

FORMAT_VERSION = 1
"""Of payloads and records together: part of every fingerprint."""

Order = Literal["NHD", "HND", "MLA", "opaque"]
KVCaches = Any
"""Tensors of one KV group: one packed tensor, or per layer, in layer order, a tensor or (K, V) pair (list or dict)."""

_ITEM_BYTES = {
    "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "int8": 1, "uint8": 1,
}  # fmt: skip
_INNER: dict[Order, str] = {"NHD": "NHD", "HND": "HND", "MLA": "ND", "opaque": "D"}
_OTHER_NAMES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
_AXES = {"L": "layers", "P": "planes (K and V)", "N": "tokens a page", "H": "KV heads", "D": "elements a head"}
PAGE_BYTES = 4096
_EVEN = 64
"""Blocks of prompts: of so few each KV group has a slot for each, so that what engines keep at once finds room."""


@dataclass(frozen=True)
class KVGroup:
    """Layers that share one block table and one shape of block.

    Attributes:
        num_layers: Layers in the group.
        num_kv_heads: KV heads that this process holds; 1 for MLA.
        head_dim: Dimension of a head, or of the latent row for MLA.
        dtype: The torch dtype's name, e.g. ``"bfloat16"``; made of a torch dtype too.
        order: ``"NHD"`` or ``"HND"`` for K and V planes, ``"MLA"`` for one latent row per token, ``"opaque"`` for bytes
            that only the engine can read, see `opaque`.
        block_size: Tokens a key names.
        page_size: Tokens of one of the engine's pages; divides ``block_size``. 0 means ``block_size``.
        opaque_bytes: Of one page of one layer, where it is opaque; else 0.
        tag: What those bytes are, in the engine's words; else empty.
        slots_per_block: Slots that it has in each tier of the cache's own, for each block of the prompts that the tier
            is to hold: 1 for all of them, 1 / 32 for states that are kept at one block in 32, but for 64 blocks at
            least. In a layout the largest counts as 1. Whoever has other numbers shares blocks all the same.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    order: Order = "NHD"
    page_size: int = 0
    opaque_bytes: int = 0
    tag: str = ""
    slots_per_block: float = field(default=1.0, compare=False)

    def __post_init__(self) -> None:
        may_be_0 = (
            {"page_size", "opaque_bytes"} if self.order != "opaque" else {"page_size", "num_kv_heads", "head_dim"}
        )
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "page_size", "opaque_bytes"):
            value = as_int(f"KVGroup.{name}", getattr(self, name), least=int(name not in may_be_0))
            object.__setattr__(self, name, value)
        dtype = str(self.dtype).removeprefix("torch.")
        if dtype not in _ITEM_BYTES:
            meant = (
                f": write {_OTHER_NAMES[dtype]!r}" if dtype in _OTHER_NAMES else f": one of {', '.join(_ITEM_BYTES)}"
            )
            raise ConfigurationError(f"dtype {self.dtype!r} is not kept as KV here{meant}")
        object.__setattr__(self, "dtype", dtype)
        if self.order not in _INNER:
            raise ConfigurationError(f"order must be 'NHD', 'HND', 'MLA' or 'opaque', got {self.order!r}")
        self._check_opaque()
        if not (is_number(self.slots_per_block) and 0 < self.slots_per_block <= 1):
            raise ConfigurationError(f"slots_per_block must be above 0 and at most 1, got {self.slots_per_block!r:.80}")
        if self.order == "MLA" and self.num_kv_heads != 1:
            raise ConfigurationError(f"an MLA latent has no head axis: num_kv_heads must be 1, got {self.num_kv_heads}")
        if not self.page_size:
            object.__setattr__(self, "page_size", self.block_size)
        if self.block_size % self.page_size:
            raise ConfigurationError(
                f"block_size {self.block_size} is not a multiple of the engine's page_size {self.page_size}"
            )

    def _check_opaque(self) -> None:
        if self.order != "opaque":
            if self.opaque_bytes or self.tag:
                raise ConfigurationError(
                    f"opaque_bytes and tag are for opaque groups, this one is {self.order}: KVGroup.opaque() makes them"
                )
        elif self.num_kv_heads or self.head_dim or self.dtype != "uint8":
            raise ConfigurationError("of an opaque KV group no heads and no dtype are known: write KVGroup.opaque(...)")
        elif not isinstance(self.tag, str) or not self.tag:
            raise ConfigurationError(
                "an opaque KV group needs a tag that says what its bytes are: engine, version, kernel, dtype, order. "
                f"Groups that differ in it share nothing; got {self.tag!r}"
            )
        else:
            as_utf8("tag", self.tag)

    @classmethod
    def opaque(
        cls,
        num_bytes: int,
        *,
        tag: str,
        block_size: int,
        page_size: int = 0,
        num_layers: int = 1,
        slots_per_block: float = 1.0,
    ) -> "KVGroup":
        """Make a group whose pages are bytes that only the engine can read: K and V fused, of several ranks, packed.

        Heads, dtype and order of the bytes are unknown, so the fingerprint has ``tag`` in their place, and no codec
        keeps such blocks. A tensor of any dtype is bound by its bytes: one a layer, pages first and contiguous inside,
        or one for all layers, with the layers' axis before or behind the pages' (``axes="LBD"`` or ``"BLD"``).

        Args:
            num_bytes: Of one page of one layer.
            tag: What the bytes are, e.g. ``"vllm 0.32, CPU_ATTN, bfloat16, BHN(2D)"``: all that two processes must
                agree on to read each other's. Those with another tag share nothing.
            block_size: Tokens a key names.
            page_size: Tokens of one of the engine's pages, where smaller.
            num_layers: Layers that can be loaded one after another; 1 for pages that hold them all.
            slots_per_block: See `KVGroup`.
        """
        return cls(
            num_layers, 0, 0, "uint8", block_size, "opaque", page_size=page_size, opaque_bytes=num_bytes, tag=tag,
            slots_per_block=slots_per_block,
        )  # fmt: skip

    @property
    def num_planes(self) -> int:
        """2 for K and V, 1 for a latent or opaque bytes."""
        return 2 if "H" in self.inner_axes else 1

    @property
    def pages_per_block(self) -> int:
        """Engine block ids per key."""
        return self.block_size // self.page_size

    @property
    def inner_axes(self) -> str:
        """The axes of one page of one plane of one layer, as a payload has them."""
        return _INNER[self.order]

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self.dtype]

    @property
    def fragment_bytes(self) -> int:
        """Bytes of one page of one plane of one layer."""
        return self.opaque_bytes or self.page_size * self.num_kv_heads * self.head_dim * self.item_bytes

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of one block."""
        return self.fragment_bytes * self.num_layers * self.num_planes * self.pages_per_block

    @property
    def stride_bytes(self) -> int:
        """Bytes of one slot: the payload rounded up to a memory page."""
        return -(-self.payload_bytes // PAGE_BYTES) * PAGE_BYTES

    def num_slots(self, num_blocks: int) -> int:
        """Return how many slots it has in a tier of the cache's own that is to hold so many blocks of prompts."""
        return slots_of(num_blocks, self.slots_per_block)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Size of each axis letter but ``B``."""
        inner = {"N": self.page_size, "H": self.num_kv_heads, "D": self.head_dim or self.opaque_bytes}
        return {"L": self.num_layers, "P": self.num_planes, **inner}

    @property
    def facts(self) -> dict[str, int | str]:
        """What a fingerprint says of it. What only opaque groups have is in theirs alone: others' stay as they were."""
        facts = {name: value for name, value in asdict(self).items() if value or self.order == "opaque"}
        del facts["slots_per_block"]  # of one process's tiers, and no part of a block
        return facts

    def in_one_page(self) -> "KVGroup":
        """Return the group whose pages are these blocks, of as many bytes."""
        return replace(self, page_size=self.block_size, opaque_bytes=self.opaque_bytes * self.pages_per_block)

    def check_axes(self, axes: str, shape: Sequence[int]) -> None:
        """Raise `LayoutMismatchError` unless a tensor of ``shape`` has these ``axes`` with this group's sizes."""
        if wrong := self._differences(axes, shape):
            raise LayoutMismatchError(f"a tensor of shape {tuple(shape)}, read as {axes}, has {' and '.join(wrong)}")

    def _differences(self, axes: str, shape: Sequence[int]) -> list[str]:
        """Say in words what a tensor of ``shape`` has otherwise than this group."""
        if len(shape) != len(axes):
            return [f"{len(shape)} axes, not {len(axes)}"]
        sizes = self.axis_sizes
        names = _AXES | ({"D": "bytes a page"} if self.order == "opaque" else {})
        return [
            f"{got} {names[axis]} instead of {sizes[axis]}"
            for axis, got in zip(axes, shape, strict=True)
            if sizes.get(axis, got) != got
        ]

    def find_axes(self, shape: Sequence[int], *, packed: bool) -> str:
        """Infer the axes of one tensor; ``packed`` says that it holds all layers.

        Raises:
            LayoutMismatchError: No order of axes fits, or more than one does: then ``axes=`` must say.
        """
        inner = self.inner_axes
        heads = ("L" if packed else "") + ("P" if len(shape) == len(inner) + 2 + packed else "") + "B"
        arrangements = [outer + inner for outer in sorted({"".join(each) for each in permutations(heads)})]
        differences = {axes: self._differences(axes, shape) for axes in arrangements}
        fits = [axes for axes, wrong in differences.items() if not wrong]
        if len(fits) == 1:
            return fits[0]
        if fits:
            raise LayoutMismatchError(
                f"a tensor of shape {tuple(shape)} fits any of {', '.join(fits)}: pass axes= to say which"
            )
        axes, wrong = min(differences.items(), key=lambda each: len(each[1]))
        raise LayoutMismatchError(
            f"a tensor of shape {tuple(shape)} is not of this layout: read as {axes}, it has {' and '.join(wrong)}"
        )


@dataclass(frozen=True)
class KVLayout:
    """The KV groups of a model: most have one; sliding-window and hybrid models have several."""

    groups: tuple[KVGroup, ...]

    def __post_init__(self) -> None:
        groups = (self.groups,) if isinstance(self.groups, KVGroup) else self.groups
        if not isinstance(groups, list | tuple) or not groups or not all(isinstance(each, KVGroup) for each in groups):
            raise ConfigurationError(f"KVLayout.groups must be a non-empty tuple of KVGroup, got {groups!r:.200}")
        if (most := max(each.slots_per_block for each in groups)) < 1:  # a tier holds what the largest has slots for
            groups = tuple(replace(each, slots_per_block=each.slots_per_block / most) for each in groups)
        object.__setattr__(self, "groups", tuple(groups))

    @classmethod
    def from_tensors(
        cls, kv_caches: KVCaches, *, block_size: int, page_size: int | None = None, axes: str | None = None
    ) -> "KVLayout":
        """Read the layout of a model with one KV group off the engine's paged tensors.

        Args:
            kv_caches: One packed tensor, or per layer, in layer order, a tensor or a ``(K, V)`` pair. Only shapes and
                dtypes are read.
            block_size: Tokens a key names.
            page_size: Tokens of one of the engine's pages, where smaller.
            axes: Letters for the axes, e.g. ``"PBNHD"``, where shapes alone do not tell.

        Raises:
            LayoutMismatchError: The tensors differ in shape or dtype, or their axes cannot be told.
        """
        return cls((read_group(kv_caches, block_size=block_size, page_size=page_size, axes=axes),))

    @classmethod
    def from_groups(
        cls,
        groups: Sequence[KVCaches],
        *,
        block_size: int,
        axes: str | None = None,
        slots_per_block: Sequence[float] | None = None,
    ) -> "KVLayout":
        """Read the layout of a model with several KV groups, given as one set of tensors each.

        Args:
            groups: The tensors of each.
            block_size: Tokens a key names.
            axes: As for `from_tensors`.
            slots_per_block: Of each group, see `KVGroup`; 1 by default.

        Raises:
            LayoutMismatchError, ConfigurationError: As by `from_tensors`; or there are not as many ``slots_per_block``.
        """
        read = [read_group(group, block_size=block_size, axes=axes) for group in groups]
        if slots_per_block is None:
            return cls(tuple(read))
        if len(slots_per_block) != len(read):
            raise ConfigurationError(f"{len(slots_per_block)} slots_per_block for {len(read)} KV groups")
        both = zip(read, slots_per_block, strict=True)
        return cls(tuple(replace(group, slots_per_block=slots) for group, slots in both))

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of one block of every group."""
        return sum(group.payload_bytes for group in self.groups)

    def __reduce__(self) -> tuple[object, ...]:
        return KVLayout, (self.groups,)


def slots_of(num_blocks: int, slots_per_block: float) -> int:
    """Return how many slots a KV group has in a tier that is to hold so many blocks of prompts."""
    return min(num_blocks, max(_EVEN, math.ceil(num_blocks * slots_per_block)))


def blocks_within(capacity_bytes: int, needed: Callable[[int], int]) -> int:
    """Return how many blocks of prompts a tier can hold; n of them, above 0, need ``needed(n)`` bytes, a page each."""
    most = min(capacity_bytes, sys.maxsize) // PAGE_BYTES  # a range has no more, and no machine so much
    return bisect_right(range(1, most + 1), capacity_bytes, key=needed)


def fingerprint(model: ModelIdentity, layout: KVLayout, group: int, codec: str = "none") -> bytes:
    """Digest everything but the weights that two processes must agree on to share bytes of one group: 32 bytes.

    A canonical JSON of format version, model, the whole layout, the group's index and the codec. It names no rank: a
    `Shard` does.
    """
    facts = {
        "format": FORMAT_VERSION,
        "model": model.name,
        "extra": sorted(model.extra),
        "groups": [each.facts for each in layout.groups],
        "group": group,
        "codec": codec,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).digest()


def layer_tensors(kv_caches: KVCaches) -> tuple[list[tuple[Any, ...]], bool]:
    """Return each layer's tensors in canonical order, ``[(K, V), ..]`` or ``[(KV,), ..]``, and if one holds all."""
    if hasattr(kv_caches, "shape"):
        return [(kv_caches,)], True
    given = kv_caches.values() if isinstance(kv_caches, Mapping) else kv_caches
    layers = [
        (layer,) if hasattr(layer, "shape") else tuple(layer) if isinstance(layer, Sequence) else ()
        for layer in (given if isinstance(given, Iterable) else ())
    ]
    if not layers or not all(layer and all(hasattr(each, "shape") for each in layer) for layer in layers):
        raise LayoutMismatchError(
            f"kv_caches holds no tensors, or not one or a (K, V) pair for each layer: got {kv_caches!r:.200}"
        )
    return layers, False


def read_group(
    kv_caches: KVCaches, *, block_size: int, page_size: int | None = None, axes: str | None = None
) -> KVGroup:
    """Read one KV group off its tensors; see `KVLayout.from_tensors`."""
    layers, packed = layer_tensors(kv_caches)
    first = layers[0][0]
    shape, dtype = tuple(first.shape), str(first.dtype).removeprefix("torch.")
    for number, layer in enumerate(layers):
        for tensor in layer:
            found = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            if found != (shape, dtype) or len(layer) != len(layers[0]):
                raise LayoutMismatchError(
                    f"layer {number} is {found[0]} of {found[1]}, layer 0 is {shape} of {dtype}; "
                    "groups of layers that differ go to KVLayout.from_groups"
                )
    block_size = as_int("block_size", block_size, least=1)
    page = as_int("page_size", page_size, least=1) if page_size is not None else block_size
    axes = axes or _guess_axes(shape, page, packed=packed, split=len(layers[0]) > 1)
    if len(axes) != len(shape) or len(set(axes)) != len(axes) or not set("BND") <= set(axes) <= set("LPBNHD"):
        raise LayoutMismatchError(
            f"axes {axes!r} do not name each axis of {shape} once, by letters of LPBNHD (capitals), B, N and D included"
        )
    if "L" in axes and not packed:
        raise LayoutMismatchError(
            f"axes {axes!r} name layers, but there is a tensor for each layer already: leave out L"
        )
    sizes = dict(zip(axes, shape, strict=True))
    order: Order = "MLA" if "H" not in axes else ("NHD" if axes.index("N") < axes.index("H") else "HND")
    group = KVGroup(
        num_layers=sizes.get("L", len(layers)),
        num_kv_heads=sizes.get("H", 1),
        head_dim=sizes["D"],
        dtype=dtype,
        block_size=block_size,
        order=order,
        page_size=page,
    )
    group.check_axes(axes, shape)
    num_planes = len(layers[0]) * sizes.get("P", 1)
    if num_planes != group.num_planes:  # or a plane would be left behind without a word
        raise LayoutMismatchError(
            f"tensors of axes {axes!r}, {len(layers[0])} a layer, make {num_planes} planes, not {group.num_planes}"
        )
    return group


_MOST_OF_A_HEAD = 256
"""Elements that a head has at most in models that there are. A latent has more: DeepSeek's 576."""


def _guess_axes(shape: tuple[int, ...], page_size: int, *, packed: bool, split: bool) -> str:
    """Name the axes of a tensor from its shape alone, or say which readings are open."""
    outers = ["LPB", "LBP", "BLP"] if packed else (["B"] if split else ["PB", "BP"])
    candidates = [outer + inner for outer in outers for inner in ("NHD", "HND")]
    candidates += [("LB" if packed else "B") + "ND", *(["BLND"] if packed else [])]
    fits = []
    for axes in candidates:
        if len(axes) != len(shape):
            continue
        sizes = dict(zip(axes, shape, strict=True))
        if sizes["N"] == page_size and sizes.get("P", 2) == 2:
            fits.append(axes)
    whose = "one KV tensor for all layers (those of single layers go into a list)" if packed else "a KV tensor"
    what = f"{whose} of shape {shape} with pages of {page_size} tokens"
    if fits == ["BND"] and page_size > 1 and shape[0] % page_size == 0 and shape[2] <= _MOST_OF_A_HEAD:
        raise LayoutMismatchError(
            f"{what} may be read as BND, pages of MLA latents, or as {shape[0]} tokens of {page_size} heads: pass "
            "axes='BND' for latents; tokens without pages go in as (K, V) pairs of views (pages, tokens, heads, D)"
        )
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise LayoutMismatchError(f"{what} may be read as {' or '.join(fits)}: pass axes=, e.g. axes='PBNHD'")
    raise LayoutMismatchError(
        f"{what} is no arrangement known here: no axis that may be a page's tokens has {page_size} elements. Pass the "
        "right block_size=, or page_size= if the engine's pages are smaller; if both are right, axes=, e.g. "
        "axes='PBNHD'"
    )
