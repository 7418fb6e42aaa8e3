"""How blocks are kept below the engine's cache, where not as the engine has them. Off unless a setting asks for it.

What a codec of slots makes of a block is the same bytes on every tier; ``exponent`` is one of records, see
`tiered_kv.tiers.records`. The name of either is part of every fingerprint: nothing stored under one is served under
another.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.layout import KVGroup

CodecName = Literal["none", "fp8", "exponent"]


class Codec(ABC):
    """Encodes and decodes blocks of one group, layer by layer, so that each layer can be decoded alone.

    Works on the tensors' device, in the current stream.
    """

    name: ClassVar[str]
    """At most 16 bytes of ASCII: in fingerprints and in records' headers."""
    stored_bytes: int
    """Of one encoded block: ``num_layers`` equal parts, each a multiple of 8."""

    @abstractmethod
    def encode(self, payloads: Tensor) -> Tensor:
        """Encode some layers of some blocks.

        Args:
            payloads: ``(n, num_layers * layer_bytes)`` uint8, contiguous: payloads, or consecutive layers of them.

        Returns:
            ``(n, words)`` int64, the layers one after another.
        """

    @abstractmethod
    def decode(self, stored: Tensor) -> Tensor:
        """Undo `encode`: from ``(n, words)`` int64 to ``(n, num_layers * layer_bytes)`` uint8, contiguous."""


class FP8Codec(Codec):
    """Keeps bf16 and fp16 as float8_e4m3fn with a float32 scale for each head: half the bytes, and a bounded error.

    A layer is its scales, then its values in the payload's order, each part padded with zeros to a multiple of 8. There
    is a scale for each plane and head of a block, or, of an MLA latent, for each token's row. It is the largest finite
    magnitude it covers over 448, the largest float8_e4m3fn, but at least 2^-126; a value is kept as the float8 nearest
    to value / scale.

    A value x comes back as x' with ``|x' - x| <= |x| / 14 + largest / 2^18 + tiny / 2``. ``largest`` is the largest
    finite magnitude under the same scale (and at least 2^-117), ``tiny`` the smallest positive value of x's dtype:
    float8_e4m3fn keeps 4 significant bits, so that rounding to it adds at most |x| / 17, or half a step of 2^-9 scales
    near zero; rounding to bf16 adds at most 2^-8 of the result, or half of ``tiny``. No error is above a thirteenth of
    ``largest``.

    Zeros come back as they were. NaN comes back as NaN, and so do infinities: float8_e4m3fn has none, and a number in
    their place would hide that something is wrong. What came back once takes no further error (values of subnormal
    bf16 or fp16 aside): encoding it again gives the same bytes.
    """

    name = "fp8"

    def __init__(self, group: KVGroup) -> None:
        """Prepare for blocks of ``group``.

        Raises:
            ConfigurationError: It is neither of bf16 nor of fp16, or opaque.
        """
        if group.order == "opaque":
            raise ConfigurationError(
                "the codec fp8 has to know which bytes are numbers, and an opaque KV group does not say: codec='none' "
                "keeps it as it is"
            )
        if group.dtype not in ("bfloat16", "float16"):
            raise ConfigurationError(f"the codec fp8 keeps KV of bfloat16 or float16, not of {group.dtype}")
        self._dtype: torch.dtype = getattr(torch, group.dtype)
        n, h, d = group.page_size, group.num_kv_heads, group.head_dim
        # One layer of a payload, and which of its axes a scale covers: pages of the block, tokens, head dimension.
        inner, covered = {
            "NHD": ((n, h, d), (-4, -3, -1)),
            "HND": ((h, n, d), (-4, -2, -1)),
            "MLA": ((n, d), (-1,)),
        }[group.order]
        self._shape = torch.Size((group.num_planes, group.pages_per_block, *inner))
        self._covered = covered
        self._scales_shape = torch.Size(
            1 if axis - len(self._shape) in covered else size for axis, size in enumerate(self._shape)
        )
        self._scale_bytes = _rounded_up(4 * self._scales_shape.numel())
        self._layer_bytes = self._scale_bytes + _rounded_up(self._shape.numel())
        self.stored_bytes = group.num_layers * self._layer_bytes

    def encode(self, payloads: Tensor) -> Tensor:
        """Encode some layers of some blocks."""
        values = payloads.view(self._dtype).view(len(payloads), -1, *self._shape).float()
        is_finite = values.isfinite()
        largest = values.abs().where(is_finite, 0).amax(self._covered, keepdim=True)
        # A GPU divides by a number as by its reciprocal, a bit off: by a tensor it divides as a CPU does.
        scales = (largest / largest.new_full((), _LARGEST)).clamp_min_(_SMALLEST_SCALE)
        kept = values.div_(scales).where(is_finite, torch.nan).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        parts = [part.reshape(*values.shape[:2], -1).view(torch.uint8) for part in (scales, kept)]
        padded = [torch.nn.functional.pad(part, (0, -part.shape[-1] % 8)) for part in parts]
        return torch.cat(padded, dim=2).view(len(payloads), -1).view(torch.int64)

    def decode(self, stored: Tensor) -> Tensor:
        """Undo `encode`."""
        layers = stored.contiguous().view(torch.uint8).view(len(stored), -1, self._layer_bytes)
        scales = layers[..., : 4 * self._scales_shape.numel()].contiguous().view(torch.float32)
        kept = layers[..., self._scale_bytes : self._scale_bytes + self._shape.numel()].contiguous()
        values = kept.view(torch.float8_e4m3fn).view(*layers.shape[:2], *self._shape).float()
        values.mul_(scales.view(*layers.shape[:2], *self._scales_shape))
        return values.to(self._dtype).view(len(stored), -1).view(torch.uint8)


def make_codec(name: str, group: KVGroup) -> Codec | None:
    """Return the codec of this name for blocks of a group; None is for those that leave slots as the engine has them.

    Raises:
        ConfigurationError: There is no codec of this name, or it cannot keep such blocks.
    """
    names = get_args(CodecName)
    if name not in names:
        raise ConfigurationError(f"codec must be one of {', '.join(names)}, got {name!r}")
    return FP8Codec(group) if name == "fp8" else None


_LARGEST = 448.0
_SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: below, a scale has no precision, and a GPU may flush it to zero."""


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8
