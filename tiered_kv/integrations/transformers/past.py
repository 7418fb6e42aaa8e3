"""A cache for `generate` that begins with the prefixes that tiers have, and is stored when `generate` is done.

Tensors of transformers hold a token's KV in no block: ``(batch, heads, tokens, head_dim)`` a layer. So blocks pass
through a small staging pool in host memory, in the bytes that continuous batching keeps them in too: what one of the
two has stored, the other finds.
"""

import threading
from collections.abc import Iterator
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from tiered_kv.cache.blocking import BlockingTieredKV
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.keys import BlockKeys, hash_blocks
from tiered_kv.values.layout import KVGroup
from tiered_kv.values.specs import CPULoadStoreSpec

_POOL: Final = "transformers"


class Staging:
    """Host memory through which blocks pass between tiers and one model's tensors. Any thread may use it.

    Attributes:
        kv: The cache.
        group: Shape of a block, NHD.
        salt: Keeps tenants apart.
    """

    def __init__(self, kv: BlockingTieredKV, group: KVGroup, num_blocks: int, salt: str | bytes) -> None:
        """Take ``num_blocks`` of memory."""
        self.kv, self.group, self.salt = kv, group, salt
        shape = (num_blocks, group.num_layers, 2, group.block_size, group.num_kv_heads, group.head_dim)
        self._blocks = torch.zeros(shape, dtype=getattr(torch, group.dtype))
        self._lock = threading.Lock()  # of the blocks
        kv.register_host_pool(_POOL, self._blocks)

    def load(self, keys: BlockKeys) -> Iterator[tuple[int, Tensor]]:
        """Load a prefix piece by piece, up to the first block that can't be had.

        Yields:
            How many blocks came before, and the next ones' KV, ``(L, 2, H, tokens, D)``: to be copied at once.
        """
        for start in range(0, len(keys), len(self._blocks)):
            piece = keys[start : start + len(self._blocks)]
            with self._lock:
                arrived = self.kv.load(piece, CPULoadStoreSpec(range(len(piece)), pool=_POOL)).num_blocks
                if arrived:
                    yield start, self._blocks[:arrived].permute(1, 2, 4, 0, 3, 5).flatten(3, 4)
            if arrived < len(piece):
                return

    def store(self, keys: BlockKeys, layers: list[tuple[Tensor, Tensor]]) -> None:
        """Store blocks.

        Args:
            keys: Of the blocks.
            layers: Each layer's K and V of their tokens, ``(H, tokens, D)``. Free again when this returns.
        """
        size = self.group.block_size
        for start in range(0, len(keys), len(self._blocks)):
            piece = keys[start : start + len(self._blocks)]
            tokens = slice(start * size, (start + len(piece)) * size)
            with self._lock:
                for number, planes in enumerate(layers):
                    for plane, states in enumerate(planes):
                        blocks = states[:, tokens].reshape(len(states), len(piece), size, -1)
                        self._blocks[: len(piece), number, plane].copy_(blocks.permute(1, 2, 0, 3))
                self.kv.store(piece, CPULoadStoreSpec(range(len(piece)), pool=_POOL))


class TieredCache(DynamicCache):
    """A `DynamicCache` that begins with what tiers have of some prompts. Made by `TieredModel.past`.

    It is of the very prompts it was made for: give ``generate`` the same ``input_ids`` and ``attention_mask``. Greedy
    search and sampling are served, one sequence a row; beams, and several sequences a prompt, are refused.

    Attributes:
        num_loaded_tokens: Per row, tokens of its prompt that were loaded and are used.
    """

    def __init__(
        self,
        staging: Staging,
        config: PreTrainedConfig,
        device: torch.device,
        input_ids: Tensor,
        attention_mask: Tensor | None,
    ) -> None:
        """Made by `TieredModel.past` only."""
        super().__init__(config=config)
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
        group = self._staging.group
        wanted = (len(self._pads), group.num_kv_heads, group.head_dim)
        for states in (key_states, value_states):
            if (states.shape[0], states.shape[1], states.shape[3]) != wanted or states.dtype != getattr(
                torch, group.dtype
            ):
                raise ConfigurationError(
                    f"KV of {tuple(states.shape)} and {states.dtype} in a cache of {wanted[0]} rows, {wanted[1]} heads "
                    f"of {wanted[2]} and {group.dtype}: it serves one sequence a row, without beams"
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
        length = min(self.get_seq_length(), sequences.shape[1])
        for row, pad in enumerate(self._pads):
            tokens = sequences[row, pad:length].numpy()
            loaded, size = self._loaded[row], self._staging.group.block_size
            keys = hash_blocks(tokens, block_size=size, salt=self._staging.salt)[loaded:]
            first, last = pad + loaded * size, pad + (loaded + len(keys)) * size
            self._staging.store(keys, [self._states(number, row, first, last) for number in range(len(self.layers))])
            self._loaded[row] += len(keys)
            num_blocks += len(keys)
        return num_blocks

    def _load(self, device: torch.device) -> None:
        """Load as much as every row has from its first token on: all rows go on at the same place."""
        size, width = self._staging.group.block_size, self._prompts.shape[1]
        keys = [
            # One token at least is left to compute: it is what the next one is sampled from.
            hash_blocks(tokens[pad : width - 1].numpy(), block_size=size, salt=self._staging.salt)
            for tokens, pad in zip(self._prompts, self._pads, strict=True)
        ]
        found = [self._staging.kv.lookup(each).num_blocks for each in keys]
        length = self._common(found)
        rows = [each[: -(-max(0, length - pad) // size)] for each, pad in zip(keys, self._pads, strict=True)]
        if not any(rows):
            return
        group = self._staging.group
        shape = (group.num_layers, 2, len(rows), group.num_kv_heads, length, group.head_dim)
        states = torch.zeros(shape, dtype=getattr(torch, group.dtype), device=device)  # zeros where rows are padded
        for row, (wanted, pad) in enumerate(zip(rows, self._pads, strict=True)):
            for start, piece in self._staging.load(wanted):
                first = pad + start * size
                last = min(first + piece.shape[3], length)
                states[:, :, row, :, first:last] = piece[:, :, :, : last - first]
                self._loaded[row] = start + piece.shape[3] // size
        length = min(length, self._common(self._loaded))
        self._loaded = [max(0, length - pad) // size for pad in self._pads]
        if not any(self._loaded):
            return
        self.num_loaded_tokens = [max(0, length - pad) for pad in self._pads]
        for number, (keys_of_layer, values_of_layer) in enumerate(states[..., :length, :]):
            self.update(keys_of_layer, values_of_layer, number)

    def _states(self, layer: int, row: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        of_layer = cast("DynamicLayer", self.layers[layer])
        if of_layer.keys is None or of_layer.values is None:
            raise ConfigurationError(f"layer {layer} has no KV: store() comes after generate() with this cache")
        return of_layer.keys[row, :, first:last], of_layer.values[row, :, first:last]

    def _common(self, num_blocks: list[int]) -> int:
        """Return the position up to which every row has its KV, if each has so many blocks."""
        ends = zip(self._pads, num_blocks, strict=True)
        return min(pad + each * self._staging.group.block_size for pad, each in ends)


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
