"""How blocks are kept below the engine's cache, where not as the engine has them. Off unless a setting asks for it.

What a codec makes of a block is the same bytes on every tier, and its name is part of every fingerprint: nothing stored
under one is served under another.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from tiered_kv.errors import ConfigurationError
from tiered_kv.layout import KVGroup

CODEC_NAMES = ("none", "fp8")


class Codec(ABC):
    """Encodes and decodes blocks layer by layer, so that each layer can be decoded alone.

    Works on the tensors' device, in the current stream.
    """

    name: str
    """At most 16 bytes of ASCII: in fingerprints and in records' headers."""

    @abstractmethod
    def stored_bytes(self, group: KVGroup) -> int:
        """Return the bytes of one encoded block: ``num_layers`` equal parts, each a multiple of 8.

        Raises:
            ConfigurationError: This codec cannot keep blocks of this group.
        """

    @abstractmethod
    def encode(self, payloads: Tensor, group: KVGroup) -> Tensor:
        """Encode some layers of some blocks.

        Args:
            payloads: ``(n, num_layers * layer_bytes)`` uint8, contiguous: payloads, or consecutive layers of them.
            group: What the blocks are.

        Returns:
            ``(n, words)`` int64, the layers one after another.
        """

    @abstractmethod
    def decode(self, stored: Tensor, group: KVGroup) -> Tensor:
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

    def stored_bytes(self, group: KVGroup) -> int:
        """Return the bytes of one encoded block."""
        if group.dtype not in ("bfloat16", "float16"):
            raise ConfigurationError(f"the codec fp8 keeps KV of bfloat16 or float16, not of {group.dtype}")
        scales, values = _sizes(group)
        return group.num_layers * (scales + values)

    def encode(self, payloads: Tensor, group: KVGroup) -> Tensor:
        """Encode some layers of some blocks."""
        values = payloads.view(getattr(torch, group.dtype)).view(len(payloads), -1, *_axes(group)).float()
        magnitudes = values.abs()
        largest = magnitudes.where(magnitudes.isfinite(), 0).amax(_covered(group), keepdim=True)
        scales = (largest / _LARGEST).clamp_min_(_SMALLEST_SCALE)
        kept = values.div_(scales).where(magnitudes.isfinite(), torch.nan).clamp_(-_LARGEST, _LARGEST)
        parts = scales, kept.to(torch.float8_e4m3fn)
        n, num_layers = values.shape[:2]
        padded = [_padded(part.reshape(n, num_layers, -1).view(torch.uint8)) for part in parts]
        return torch.cat(padded, dim=2).view(n, -1).view(torch.int64)

    def decode(self, stored: Tensor, group: KVGroup) -> Tensor:
        """Undo `encode`."""
        scale_bytes, value_bytes = _sizes(group)
        layers = stored.contiguous().view(torch.uint8).view(len(stored), -1, scale_bytes + value_bytes)
        shape = _axes(group)
        num_values = group.payload_bytes // group.num_layers // 2
        values = layers[..., scale_bytes : scale_bytes + num_values].contiguous().view(torch.float8_e4m3fn)
        values = values.view(*layers.shape[:2], *shape).float()
        of_scales = [1 if axis - len(shape) in _covered(group) else size for axis, size in enumerate(shape)]
        num_scales = torch.Size(of_scales).numel()
        scales = layers[..., : 4 * num_scales].contiguous().view(torch.float32).view(*layers.shape[:2], *of_scales)
        return values.mul_(scales).to(getattr(torch, group.dtype)).view(len(stored), -1).view(torch.uint8)


def make_codec(name: str) -> Codec | None:
    """Return the codec of this name; None is for ``"none"``: bytes are kept as they are.

    Raises:
        ConfigurationError: There is no codec of this name.
    """
    if name not in CODEC_NAMES:
        raise ConfigurationError(f"codec must be one of {', '.join(CODEC_NAMES)}, got {name!r}")
    return FP8Codec() if name == "fp8" else None


_LARGEST = 448.0
_SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: below, a scale has no precision, and a GPU may flush it to zero."""


def _axes(group: KVGroup) -> tuple[int, ...]:
    """Return the axes of one layer in a payload: planes, pages of the block, then those of a page."""
    n, h, d = group.page_size, group.num_kv_heads, group.head_dim
    inner = {"NHD": (n, h, d), "HND": (h, n, d), "MLA": (n, d)}[group.order]
    return group.num_planes, group.pages_per_block, *inner


def _covered(group: KVGroup) -> tuple[int, ...]:
    """Return which of these axes one scale covers, from the end."""
    return {"NHD": (-4, -3, -1), "HND": (-4, -2, -1), "MLA": (-1,)}[group.order]


def _sizes(group: KVGroup) -> tuple[int, int]:
    """Return the bytes of one layer's scales and of its values, padding and all."""
    num_scales = group.block_size if group.order == "MLA" else 2 * group.num_kv_heads
    num_values = group.payload_bytes // group.num_layers // 2
    return -(-4 * num_scales // 8) * 8, -(-num_values // 8) * 8


def _padded(part: Tensor) -> Tensor:
    """Append zeros along the last axis up to a multiple of 8."""
    missing = -part.shape[-1] % 8
    return torch.nn.functional.pad(part, (0, missing)) if missing else part
