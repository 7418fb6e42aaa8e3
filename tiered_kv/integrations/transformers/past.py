"""A cache for `generate` that begins with the prefixes that tiers have, and is stored when `generate` is done.

Tensors of transformers hold a token's KV in no block: ``(batch, heads, tokens, head_dim)`` a layer. So blocks pass
through a small staging pool in host memory, in the bytes that continuous batching keeps them in too: what one of the
two has stored, the other finds.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tiered_kv.cache.blocking import BlockingTieredKV
from tiered_kv.cache.groups import Mask
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.keys import BlockKeys, hash_blocks
from tiered_kv.values.layout import KVGroup
from tiered_kv.values.specs import CPULoadStoreSpec


@dataclass(frozen=True)
class LayerPart:
    """Tensors of some layers, which are kept as one KV group.

    Attributes:
        group: Shape of a block.
        number: Of the group.
        layers: Which.
        planes: Of each layer its keys and values, 0 and 1, or one of both: latents of MLA, and what lies beside them.
        window: How many tokens a layer sees, the next one included; None: all.
    """

    group: KVGroup
    number: int
    layers: tuple[int, ...]
    planes: tuple[int, ...]
    window: int | None = None

    def first(self, num_tokens: int) -> int:
        """Return the first block that is needed to go on behind so many tokens."""
        return 0 if self.window is None else max(0, num_tokens - self.window + 1) // self.group.block_size


class ModelStaging:
    """Host memory through which blocks pass between tiers and one model's tensors. Any thread may use it.

    Attributes:
        kv: The cache.
        parts: Of the model.
        block_size: Tokens a block has, of each part.
        salt: Keeps tenants apart.
    """

    def __init__(self, kv: BlockingTieredKV, parts: Sequence[LayerPart], num_bytes: int, salt: str | bytes) -> None:
        """Take ``num_bytes`` of memory, or what one block of each part needs."""
        self.kv, self.parts, self.salt = kv, tuple(parts), salt
        self.block_size = parts[0].group.block_size
        num_blocks = max(1, num_bytes // sum(part.group.payload_bytes for part in parts))
        self._blocks = []
        for part in parts:
            of = part.group
            shape = (num_blocks, of.num_layers, len(part.planes), of.block_size, of.num_kv_heads, of.head_dim)
            self._blocks.append(torch.zeros(shape, dtype=getattr(torch, of.dtype)))
            kv.register_host_pool(_pool(part), self._blocks[-1], group=part.number)
        self._lock = threading.Lock()  # of the blocks

    def keys(self, part: LayerPart, tokens: Any) -> BlockKeys:  # noqa: ANN401 - an array of numpy's
        """Name the blocks of a part."""
        return hash_blocks(tokens, block_size=self.block_size, salt=self.salt, group=part.number)

    def load(self, part: LayerPart, keys: BlockKeys) -> Iterator[tuple[int, Tensor]]:
        """Load neighbouring blocks piece by piece, up to the first that can't be had.

        Yields:
            How many blocks came before, and the next ones' KV, ``(L, planes, H, tokens, D)``: to be copied at once.
        """
        blocks = self._blocks[part.number]
        for start in range(0, len(keys), len(blocks)):
            piece = keys[start : start + len(blocks)]
            with self._lock:
                arrived = self.kv.load(piece, CPULoadStoreSpec(range(len(piece)), pool=_pool(part))).num_blocks
                if arrived:
                    yield start, blocks[:arrived].permute(1, 2, 4, 0, 3, 5).flatten(3, 4)
            if arrived < len(piece):
                return

    def store(self, part: LayerPart, keys: BlockKeys, layers: list[list[Tensor]]) -> None:
        """Store blocks.

        Args:
            part: Whose.
            keys: Of the blocks.
            layers: Each layer's planes of their tokens, ``(H, tokens, D)``. Free again when this returns.
        """
        size, into = self.block_size, self._blocks[part.number]
        for start in range(0, len(keys), len(into)):
            piece = keys[start : start + len(into)]
            tokens = slice(start * size, (start + len(piece)) * size)
            with self._lock:
                for number, planes in enumerate(layers):
                    for plane, states in enumerate(planes):
                        blocks = states[:, tokens].reshape(len(states), len(piece), size, -1)
                        into[: len(piece), number, plane].copy_(blocks.permute(1, 2, 0, 3))
                self.kv.store(piece, CPULoadStoreSpec(range(len(piece)), pool=_pool(part)))


def _pool(part: LayerPart) -> str:
    return f"transformers {part.number}"


class TieredCache(DynamicCache):
    """A `DynamicCache` that begins with what tiers have of some prompts. Made by `TieredModel.past`.

    It is of the very prompts it was made for: give ``generate`` the same ``input_ids`` and ``attention_mask``. Greedy
    search and sampling are served, one sequence a row; beams, and several sequences a prompt, are refused.

    Attributes:
        num_loaded_tokens: Per row, tokens of its prompt that were loaded and are used.
    """

    def __init__(
        self,
        staging: ModelStaging,
        config: PreTrainedConfig,
        device: torch.device,
        input_ids: Tensor,
        attention_mask: Tensor | None,
    ) -> None:
        """Made by `TieredModel.past` only."""
        super().__init__(config=config)
        for layer in self.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                # It has to keep what it leaves behind: others may go on there.
                layer.activate_past_recording()  # type: ignore[no-untyped-call]  # transformers' is not
        self._staging = staging
        self._prompts = input_ids.detach().cpu()
        self._pads = _left_pads(self._prompts, attention_mask)
        self._loaded = [0] * len(self._pads)  # blocks, per row: those before are not stored again
        self.num_loaded_tokens = [0] * len(self._pads)
        self._load(device)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,  # noqa: ANN401 - what it overrides has them
        **kwargs: Any,  # noqa: ANN401 - the same
    ) -> tuple[Tensor, Tensor]:
        """Add the KV of new tokens, ``(batch, H, n, D)``; see `DynamicCache`.

        Raises:
            ConfigurationError: They are of another number of rows, or not what the model's config says.
        """
        for part in self._staging.parts:
            if layer_idx not in part.layers:
                continue
            group = part.group
            wanted = (len(self._pads), group.num_kv_heads, group.head_dim)
            for states in [(key_states, value_states)[plane] for plane in part.planes]:
                if (states.shape[0], states.shape[1], states.shape[3]) != wanted or states.dtype != getattr(
                    torch, group.dtype
                ):
                    raise ConfigurationError(
                        f"KV of {tuple(states.shape)} and {states.dtype} in a cache of {wanted[0]} rows, {wanted[1]} "
                        f"heads of {wanted[2]} and {group.dtype}: it serves one sequence a row, without beams"
                    )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refuse: rows of beams are no longer those of the prompts."""
        raise ConfigurationError("a TieredCache serves greedy search and sampling, not beams")

    def store(self, sequences: Tensor) -> int:
        """Store what ``generate`` has computed, the prompts' blocks and those of what it generated.

        Returns when the cache's tensors are free; tiers below memory are written meanwhile, see
        `BlockingTieredKV.flush`.

        Args:
            sequences: ``(batch, width + generated)``, what ``generate`` returned: prompts first.

        Returns:
            How many blocks were given to the tiers, over all rows.

        Raises:
            ConfigurationError: They do not begin with the prompts.
        """
        sequences = sequences.detach().cpu()
        width = self._prompts.shape[1]
        if sequences.dim() != 2 or not torch.equal(sequences[:, :width], self._prompts):
            raise ConfigurationError(
                f"sequences of shape {tuple(sequences.shape)} do not begin with the prompts of this cache, "
                f"{tuple(self._prompts.shape)}: store() takes what generate() returned for them"
            )
        num_blocks = 0
        size, length = self._staging.block_size, min(self.get_seq_length(), sequences.shape[1])
        for row, pad in enumerate(self._pads):
            tokens = sequences[row, pad:length].numpy()
            for part in self._staging.parts:
                begun = max(0, self._begin(part.layers[0]) - pad)  # before it a window's layers have nothing
                first = max(self._loaded[row], -(-begun // size))
                keys = self._staging.keys(part, tokens)[first:]
                places = slice(pad + first * size, pad + (first + len(keys)) * size)
                states = [[self._states(layer, plane, row, places) for plane in part.planes] for layer in part.layers]
                self._staging.store(part, keys, states)
                num_blocks += len(keys)
            self._loaded[row] = max(self._loaded[row], len(tokens) // size)
        return num_blocks

    def _load(self, device: torch.device) -> None:
        """Load what every row needs to go on at one place, the last one at which all have that."""
        staging, width = self._staging, self._prompts.shape[1]
        keys = [
            # One token at least is left to compute: it is what the next one is sampled from.
            [staging.keys(part, tokens[pad : width - 1].numpy()) for part in staging.parts]
            for tokens, pad in zip(self._prompts, self._pads, strict=True)
        ]
        there = [[self._there(*each) for each in zip(staging.parts, of, strict=True)] for of in keys]
        found, length, states = 0, self._longest(there), list[Tensor]()
        while length:
            states = [self._empty(part, length, device) for part in staging.parts]
            for row, pad in enumerate(self._pads):
                of_row = zip(staging.parts, keys[row], there[row], states, strict=True)
                for part, each, mask, into in of_row:
                    self._load_row(part, each, mask, into[:, :, row], length - pad)
            found, length = length, self._longest(there)
            if length == found or not any(part.window for part in staging.parts):
                break  # else a window begins sooner than what was loaded: what came is at hand by now
        self._loaded = [max(0, length - pad) // staging.block_size for pad in self._pads]
        if any(self._loaded):
            self.num_loaded_tokens = [max(0, length - pad) for pad in self._pads]
            self._begin_at(length, found, states)

    def _begin_at(self, length: int, found: int, states: list[Tensor]) -> None:
        """Have all layers go on at ``length``, with each part's KV, which ends before ``found``."""
        planes: dict[int, dict[int, Tensor]] = {}
        for part, of_part in zip(self._staging.parts, states, strict=True):
            skipped = found - of_part.shape[4]  # tokens that lie before those of a window
            for layer, tensors in zip(part.layers, of_part, strict=True):
                for plane, tensor in zip(part.planes, tensors, strict=True):
                    planes.setdefault(layer, {})[plane] = tensor[:, :, : length - skipped]
        for layer, of_layer in sorted(planes.items()):
            self.update(of_layer[0], of_layer[1], layer)
            if isinstance(window := self.layers[layer], DynamicSlidingWindowLayer):
                window.cumulative_length = length

    def _there(self, part: LayerPart, keys: BlockKeys) -> Mask:
        """Say which blocks of a row's part could be loaded, ``(len(keys),)``."""
        if part.window is not None:
            return self._staging.kv.presence(keys)
        return np.arange(len(keys)) < self._staging.kv.lookup(keys).num_blocks

    def _empty(self, part: LayerPart, length: int, device: torch.device) -> Tensor:
        """Return zeros, ``(L, planes, rows, H, tokens, D)``, for the tokens that a part needs behind ``length``."""
        of = part.group
        num_tokens = length if part.window is None else min(length, part.window - 1)
        shape = (of.num_layers, len(part.planes), len(self._pads), of.num_kv_heads, num_tokens, of.head_dim)
        return torch.zeros(shape, dtype=getattr(torch, of.dtype), device=device)

    def _load_row(self, part: LayerPart, keys: BlockKeys, there: Mask, into: Tensor, num_tokens: int) -> None:
        """Load what a row needs to go on behind so many of its tokens.

        Args:
            part: Of the row.
            keys: Of the row.
            there: Which of its blocks could be loaded; of those that did not come it is taken back.
            into: ``(L, planes, H, tokens, D)``, the last of which is the one before.
            num_tokens: May be 0 or less: then nothing is needed.
        """
        size, num_tokens = self._staging.block_size, max(0, num_tokens)
        before = num_tokens - into.shape[3]  # the row's token that comes first, of which there are none below 0
        first, stop, num_arrived = part.first(num_tokens), -(-num_tokens // size), 0
        for start, piece in self._staging.load(part, keys[first:stop]):
            num_arrived = start + piece.shape[3] // size
            begin = (first + start) * size
            end = min(begin + piece.shape[3], num_tokens)
            skipped = max(0, before - begin)
            into[:, :, :, begin + skipped - before : end - before] = piece[:, :, :, skipped : end - begin]
        there[first + num_arrived : stop] = False

    def _begin(self, layer: int) -> int:
        """Return the first place of which a layer has KV."""
        of_layer = cast("DynamicLayer", self.layers[layer])
        return of_layer.get_seq_length() - (0 if of_layer.keys is None else of_layer.keys.shape[-2])

    def _states(self, layer: int, plane: int, row: int, places: slice) -> Tensor:
        of_layer = cast("DynamicLayer", self.layers[layer])
        if of_layer.keys is None or of_layer.values is None:
            raise ConfigurationError(f"layer {layer} has no KV: store() comes after generate() with this cache")
        begin = self._begin(layer)
        return (of_layer.keys, of_layer.values)[plane][row, :, places.start - begin : places.stop - begin]

    def _longest(self, there: list[list[Mask]]) -> int:
        """Return the last place at which every row has what each part needs, if these of its blocks are there."""
        size, width = self._staging.block_size, self._prompts.shape[1]
        lengths = np.arange(width)
        is_served = np.ones(width, np.bool_)
        for pad, of_row in zip(self._pads, there, strict=True):
            tokens = np.maximum(0, lengths - pad)
            for part, mask in zip(self._staging.parts, of_row, strict=True):
                stops = -(-tokens // size)
                behind_holes = np.where(mask, 0, np.arange(1, len(mask) + 1))
                begun = np.maximum.accumulate(np.append([0], behind_holes))  # of the run that ends at each stop
                firsts = np.zeros_like(tokens) if part.window is None else np.maximum(0, tokens - part.window + 1)
                is_served &= (stops <= len(mask)) & (begun[np.minimum(stops, len(mask))] <= firsts // size)
        return int(lengths[is_served][-1])


def _left_pads(input_ids: Tensor, attention_mask: Tensor | None) -> list[int]:
    """Return how many padding tokens each row begins with.

    Raises:
        ConfigurationError: No such shapes, or padding elsewhere.
    """
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ConfigurationError(f"input_ids must be (batch, width), got {tuple(input_ids.shape)}")
    if attention_mask is None:
        return [0] * len(input_ids)
    mask = attention_mask.detach().cpu().bool()
    if mask.shape != input_ids.shape:
        raise ConfigurationError(
            f"an attention_mask of {tuple(mask.shape)} for input_ids of {tuple(input_ids.shape)}: they must be equal"
        )
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()) or not bool(mask[:, -1].all()):
        raise ConfigurationError(
            "an attention_mask may hide the left end of a row only: have the tokenizer pad with padding_side='left'"
        )
    pads: list[int] = (~mask).sum(dim=1).tolist()
    return pads
