"""What a model of transformers keeps of its tokens, each kind of it as one KV group.

Keys and values have an entry for each token: ``(batch, heads, tokens, head_dim)`` a layer. Of a recurrent layer or a
convolution there is only the last state, which holds all before it: its block is a copy, taken at the block's end.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from tiered_kv.values.layout import KVGroup

VERSION: Final = 5, 24
"""Of transformers, that the adapter was tried with: older ones call a cache otherwise."""
Layer: TypeAlias = Any  # of transformers' cache: kinds of layers have no attribute in common


def version() -> tuple[int, ...]:
    """Return the first two numbers of the version of transformers that is installed."""
    return tuple(map(int, transformers.__version__.split(".")[:2]))


@dataclass(frozen=True)
class Part(ABC):
    """Tensors that are kept as one KV group.

    Attributes:
        group: Shape of a block.
        number: Of the group.
    """

    group: KVGroup
    number: int

    @property
    def is_whole(self) -> bool:
        """Whether every block is needed, from the first one on."""
        return False

    @abstractmethod
    def firsts(self, num_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for some numbers of tokens the first block that is needed to go on behind them."""

    @abstractmethod
    def slots(self, num_blocks: int) -> Tensor:
        """Return host memory for so many blocks, or for fewer if no more are ever moved at once."""

    @abstractmethod
    def empty(self, num_rows: int, num_tokens: int, device: torch.device) -> Tensor:
        """Return zeros for what so many rows need to go on behind ``num_tokens``."""

    @abstractmethod
    def fill(self, into: Tensor, row: int, num_tokens: int, pieces: Iterable[Tensor]) -> int:
        """Copy loaded blocks to their place.

        Args:
            into: What `empty` has made.
            row: Whose blocks.
            num_tokens: Of the row, behind which it goes on.
            pieces: Some slots each, each to be copied before the next is asked for.

        Returns:
            How many blocks there were.
        """

    def first(self, num_tokens: int) -> int:
        """Return the first block that is needed to go on behind so many tokens."""
        return int(self.firsts(np.array([num_tokens]))[0])


@dataclass(frozen=True)
class LayerPart(Part):
    """Keys and values of some layers.

    Attributes:
        layers: Which.
        planes: Of each layer its keys and values, 0 and 1, or one of both: latents of MLA, and what lies beside them.
        window: How many tokens a layer sees, the next one included; None: all.
    """

    layers: tuple[int, ...]
    planes: tuple[int, ...]
    window: int | None = None

    @property
    @override
    def is_whole(self) -> bool:
        return self.window is None

    @override
    def firsts(self, num_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.window is None:
            return np.zeros_like(num_tokens)
        return np.maximum(0, num_tokens - self.window + 1) // self.group.block_size

    @override
    def slots(self, num_blocks: int) -> Tensor:
        of = self.group
        shape = (num_blocks, of.num_layers, len(self.planes), of.block_size, of.num_kv_heads, of.head_dim)
        return torch.zeros(shape, dtype=getattr(torch, of.dtype))

    @override
    def empty(self, num_rows: int, num_tokens: int, device: torch.device) -> Tensor:
        """Return zeros, ``(L, planes, rows, H, tokens, D)``: the tokens that are needed, the last of them last."""
        of = self.group
        needed = num_tokens if self.window is None else min(num_tokens, self.window - 1)
        shape = (of.num_layers, len(self.planes), num_rows, of.num_kv_heads, needed, of.head_dim)
        return torch.zeros(shape, dtype=getattr(torch, of.dtype), device=device)

    @override
    def fill(self, into: Tensor, row: int, num_tokens: int, pieces: Iterable[Tensor]) -> int:
        before = num_tokens - into.shape[4]  # the row's token that comes first, of which there are none below 0
        first, num_blocks, size = self.first(num_tokens), 0, self.group.block_size
        for piece in pieces:
            tokens = piece.permute(1, 2, 4, 0, 3, 5).flatten(3, 4)
            begin = (first + num_blocks) * size
            end = min(begin + tokens.shape[3], num_tokens)
            skipped = max(0, before - begin)
            into[:, :, row, :, begin + skipped - before : end - before] = tokens[:, :, :, skipped : end - begin]
            num_blocks += len(piece)
        return num_blocks

    def pack(self, layers: list[list[Tensor]], blocks: slice, into: Tensor) -> None:
        """Copy some blocks of each layer's planes, ``(H, tokens, D)``, into as many slots."""
        size = self.group.block_size
        for number, planes in enumerate(layers):
            for plane, states in enumerate(planes):
                tokens = states[:, blocks.start * size : blocks.stop * size]
                in_blocks = tokens.reshape(len(states), len(into), size, into.shape[-1])
                into[:, number, plane].copy_(in_blocks.permute(1, 2, 0, 3))


class StateTensor(NamedTuple):
    """One state of one layer.

    Attributes:
        layer: Whose.
        kind: ``"conv"`` or ``"recurrent"``.
        position: Which of those that the layer has of this kind.
        shape: Of one row.
        dtype: Of its elements.
    """

    layer: int
    kind: str
    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def find(self, layers: Sequence[Layer]) -> Tensor:
        """Return the state's tensor as it is now, ``(rows, *shape)``."""
        state: Tensor = getattr(layers[self.layer], f"{self.kind}_states")[self.position]
        return state

    @classmethod
    def all_of(cls, layers: Sequence[Layer]) -> list["StateTensor"]:
        """Return what a model keeps, as its layers show it after a token."""
        return [
            cls(number, kind, position, tuple(state.shape[1:]), state.dtype)
            for number, layer in enumerate(layers)
            for kind in ("conv", "recurrent")
            for position, state in getattr(layer, f"{kind}_states", {}).items()
            if state is not None
        ]


@dataclass(frozen=True)
class StatePart(Part):
    """States of recurrent layers and convolutions, all of them in one block of bytes.

    Attributes:
        tensors: In the order in which they lie in a block.
    """

    tensors: tuple[StateTensor, ...]

    @classmethod
    def of(cls, tensors: list[StateTensor], number: int, block_size: int) -> "StatePart":
        """Make the part of these states. Other versions of transformers, whose states may differ, do not read it."""
        states = [(kind, shape, str(dtype)) for _, kind, _, shape, dtype in tensors]
        tag = f"transformers {'.'.join(map(str, version()))}, states: {states}"
        num_bytes = sum(tensor.num_bytes for tensor in tensors)
        return cls(KVGroup.opaque(num_bytes, tag=tag, block_size=block_size), number, tuple(tensors))

    @override
    def firsts(self, num_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.maximum(0, num_tokens // self.group.block_size - 1)

    @override
    def slots(self, num_blocks: int) -> Tensor:
        return torch.zeros((1, self.group.payload_bytes), dtype=torch.uint8)

    @override
    def empty(self, num_rows: int, num_tokens: int, device: torch.device) -> Tensor:
        """Return zeros, ``(rows, bytes)``."""
        return torch.zeros((num_rows, self.group.payload_bytes), dtype=torch.uint8, device=device)

    @override
    def fill(self, into: Tensor, row: int, num_tokens: int, pieces: Iterable[Tensor]) -> int:
        num_blocks = 0
        for piece in pieces:
            into[row] = piece[0]
            num_blocks += 1
        return num_blocks

    def read(self, layers: Sequence[Layer]) -> Tensor:
        """Return a copy in host memory of what layers have now, ``(rows, bytes)``."""
        states = [each.find(layers).contiguous().flatten(1) for each in self.tensors]
        return torch.cat([state.view(torch.uint8).cpu() for state in states], dim=1)

    def pack(self, state: Tensor, blocks: slice, into: Tensor) -> None:
        """Copy a row of what `read` returned into a slot."""
        into.copy_(state[None])

    def begin(self, layers: Sequence[Layer], states: Tensor) -> None:
        """Have layers that have seen no token go on from ``states``, ``(rows, bytes)``."""
        sizes = [each.num_bytes for each in self.tensors]
        for each, packed in zip(self.tensors, torch.split(states, sizes, 1), strict=True):
            state = packed.clone().view(each.dtype).view(-1, *each.shape)  # a copy begins where any dtype may
            getattr(layers[each.layer], f"update_{each.kind}_state")(state, each.position)


@dataclass(frozen=True)
class ModelParts:
    """All parts that a model keeps.

    Attributes:
        layers: Keys and values.
        state: States, if it has any.
    """

    layers: tuple[LayerPart, ...]
    state: StatePart | None = None

    @property
    def all(self) -> tuple[Part, ...]:
        """All parts, in the order of their groups' numbers."""
        return self.layers if self.state is None else (*self.layers, self.state)

    @property
    def block_size(self) -> int:
        """Tokens a block has, of each part."""
        return self.layers[0].group.block_size
