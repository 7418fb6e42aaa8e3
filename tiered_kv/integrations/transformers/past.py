"""A cache for `generate` that begins with the prefixes that tiers have, and is stored when `generate` is done.

Tensors of transformers hold a token's KV in no block: ``(batch, heads, tokens, head_dim)`` a layer. So blocks pass
through a small staging pool in host memory, in the bytes that continuous batching keeps them in too: what one of the
two has stored, the other finds.
"""

import copy
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, Final, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from tiered_kv.cache.blocking import BlockingTieredKV
from tiered_kv.integrations.transformers.model_parts import ModelParts, Part
from tiered_kv.integrations.transformers.tensor_parallel import Ranks
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.integers import Mask
from tiered_kv.values.keys import BlockKeys, hash_blocks
from tiered_kv.values.specs import CPULoadStoreSpec

_PER_TOKEN: Final = (
    "input_ids", "position_ids", "cache_position", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"
)  # fmt: skip
"""Arguments of a model whose last axis is the tokens that it is to compute."""
_ROWS_STAY: Final = "a TieredCache serves greedy search and sampling, one sequence a row: not beams, nor other rows"


class ModelStaging:
    """Host memory through which blocks pass between tiers and one model's tensors. Any thread may use it.

    Attributes:
        kv: The cache.
        parts: Of the model.
        block_size: Tokens a block has, of each part.
        salt: Keeps tenants apart.
        ranks: Which of the model's processes this is.
    """

    def __init__(
        self, kv: BlockingTieredKV, parts: ModelParts, num_bytes: int, salt: str | bytes, ranks: Ranks
    ) -> None:
        """Take ``num_bytes`` of memory for keys and values, or what one block needs; and one state's."""
        self.kv, self.parts, self.salt, self.ranks = kv, parts, salt, ranks
        self.block_size = parts.block_size
        num_blocks = max(1, num_bytes // sum(part.group.payload_bytes for part in parts.layers))
        self._slots = [part.slots(num_blocks) for part in parts.all]
        for part, slots in zip(parts.all, self._slots, strict=True):
            kv.register_host_pool(_pool(part), slots, group=part.number)
        self._lock = threading.Lock()  # of the slots

    def keys(self, part: Part, tokens: Any) -> BlockKeys:  # noqa: ANN401 - an array of numpy's
        """Name the blocks of a part."""
        return hash_blocks(tokens, block_size=self.block_size, salt=self.salt, group=part.number)

    def load(self, part: Part, keys: BlockKeys) -> Generator[Tensor, None, None]:
        """Load neighbouring blocks piece by piece, up to the first that can't be had.

        Yields:
            Slots with the next blocks: to be copied at once. Nobody else has them until the next piece, or ``close()``.
        """
        slots = self._slots[part.number]
        for start in range(0, len(keys), len(slots)):
            piece = keys[start : start + len(slots)]
            with self._lock:
                arrived = self.kv.load(piece, CPULoadStoreSpec(range(len(piece)), pool=_pool(part))).num_blocks
                if arrived:
                    yield slots[:arrived]
            if arrived < len(piece):
                return

    def store(self, part: Part, keys: BlockKeys, pack: Callable[[slice, Tensor], None]) -> None:
        """Store blocks piece by piece; ``pack`` copies those of a slice of them into as many slots."""
        slots = self._slots[part.number]
        for start in range(0, len(keys), len(slots)):
            piece = keys[start : start + len(slots)]
            with self._lock:
                pack(slice(start, start + len(piece)), slots[: len(piece)])
                self.kv.store(piece, CPULoadStoreSpec(range(len(piece)), pool=_pool(part)))


def _pool(part: Part) -> str:
    return f"transformers {part.number}"


class TieredCache(DynamicCache):
    """A `DynamicCache` that begins with what tiers have of some prompts. Made by `TieredModel.past`.

    It is of the very prompts it was made for: give ``generate`` the same ``input_ids`` and ``attention_mask``. Greedy
    search and sampling are served, one sequence a row; beams, and several sequences a prompt, are refused. After a step
    that was interrupted in a layer it takes no other until `reset`, and has what was computed before that stored.
    ``copy.deepcopy`` makes another of what it has.

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
        self._states_at: dict[int, Tensor] = {}  # by number of tokens, `StatePart.read` there: not stored yet
        self.num_loaded_tokens = [0] * len(self._pads)
        self._computed = self._prompts.clone()  # (batch, n): the tokens that layers have, and more behind them
        self._step: int | None = None  # how many tokens there were before the step that goes on, or did not end
        self._begins = [0] * len(staging.parts.layers)  # of each part, where its layers' KV began before that step
        if staging.parts.state is not None and any(self._pads):
            raise ConfigurationError(
                "prompts of a model with states must be of one length, or each by itself: in padded rows blocks end at "
                "other places, and states are kept where they end in all"
            )
        self._load(device)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TieredCache":
        """Return a copy that shares nothing but the staging memory."""
        memo[id(self._staging)] = self._staging
        memo[id(self)] = twin = type(self).__new__(type(self))
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def begin_step(self, given: Mapping[str, Any]) -> None:
        """See that a step computes tokens, one behind the other, and of the prompts what they are named by.

        A mask that says which token sees which is its maker's own, and so are positions beside one.

        Args:
            given: What the model was given: ``input_ids``, ``(batch, n)``; an ``attention_mask``, ``(batch, n)``, of
                the first tokens, to the last that the step computes; ``position_ids`` of those that it computes.
                Without them all is as usual.

        Raises:
            ConfigurationError: Others are hidden, or tokens are elsewhere or not the prompts', or embeddings come in
                their place; or some layers have tokens of a step that was interrupted.
        """
        self._check_is_whole()
        length = self.get_seq_length()
        if not _is_of_tokens(tokens := given.get("input_ids")):
            raise ConfigurationError(
                "blocks are named by tokens, which do not tell embeddings: generate from input_ids, or without a "
                "TieredCache"
            )
        if len(tokens) == len(self._pads):  # other rows are refused with their KV
            tokens = tokens.detach().cpu()
            self._check_prompts(length, tokens)
            mask, positions = given.get("attention_mask"), given.get("position_ids")
            if mask is None or (_is_of_tokens(mask) and len(mask) == len(self._pads)):
                self._check_mask(mask)
                if isinstance(positions, Tensor):
                    self._check_positions(positions.detach().cpu())
            self._note(length, tokens)
        self._begins = [self._begin(part.layers[0]) for part in self._staging.parts.layers]
        self._step = length

    def _check_prompts(self, length: int, tokens: Tensor) -> None:
        wanted = self._prompts[:, length : length + tokens.shape[1]]
        is_padding = torch.arange(length, length + wanted.shape[1]) < torch.tensor(self._pads)[:, None]
        if not bool(((tokens[:, : wanted.shape[1]] == wanted) | is_padding).all()):
            raise ConfigurationError(
                f"a step computes other tokens behind the first {length} than the prompts have that past() was given, "
                "and goes on from theirs: give generate() the same input_ids, or make another by past()"
            )

    def _check_is_whole(self) -> None:
        """Raise `ConfigurationError` unless all layers are known to have the same tokens."""
        if (length := self._step) is None:
            return
        parts = self._staging.parts
        layers = [cast("DynamicLayer", self.layers[number]) for part in parts.layers for number in part.layers]
        if parts.state is not None or any(layer.get_seq_length() != length for layer in layers):
            raise ConfigurationError(
                f"a step of this cache was interrupted behind {length} tokens, and not all layers have gone back: what "
                "it has can be stored; go on with a new one of past(), or reset() this one"
            )

    def _note(self, length: int, tokens: Tensor) -> None:
        """Note which tokens are computed behind so many; what was noted of others there is over."""
        if (end := length + tokens.shape[1]) > self._computed.shape[1]:
            room = self._computed.new_zeros((len(self._pads), 2 * end))
            room[:, :length] = self._computed[:, :length]
            self._computed = room
        self._computed[:, length:end] = tokens
        there = [max(0, length - pad) // self._staging.block_size for pad in self._pads]
        self._loaded = [min(each) for each in zip(self._loaded, there, strict=True)]
        self._states_at = {end: states for end, states in self._states_at.items() if end <= length}

    def _check_mask(self, attention_mask: Tensor | None) -> None:
        pads = torch.tensor(self._pads)[:, None]
        if attention_mask is None:
            is_same = not any(self._pads)
        else:  # where it is: of a long prompt it is long, at each token
            places = torch.arange(attention_mask.shape[1], device=attention_mask.device)
            is_same = torch.equal(attention_mask.bool(), places >= pads.to(attention_mask.device))
        if not is_same:
            raise ConfigurationError(
                "tokens are hidden that were not from past(), or the other way round: give both the same "
                "attention_mask, with ones behind it. Without one generate() hides what equals pad_token_id: pass one "
                "of ones if it stands for itself"
            )

    def _check_positions(self, positions: Tensor) -> None:
        """See that tokens are where they are counted, ``(..., batch or 1, n)``; where padding is does not matter."""
        if positions.dim() > 1 and positions.shape[-2] not in {1, len(self._pads)}:
            return  # as above
        length = self.get_seq_length()
        wanted = torch.arange(length, length + positions.shape[-1]) - torch.tensor(self._pads)[:, None]
        if bool(((positions != wanted) & (wanted >= 0)).any()):
            raise ConfigurationError(
                f"position_ids of these tokens begin with {int(positions.flatten()[0])}, and are not {length}, "
                f"{length + 1} and so on, though the cache has {length} tokens and blocks are named by tokens alone: "
                "leave them out. Another answer to the same prompts begins from another past(), or a copy.deepcopy of "
                "one"
            )

    def rest(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return what a step was given, without the tokens that the cache has if it was given all of them.

        Assisted decoding begins so, whatever its cache has: these would be added again.
        """
        tokens, mask, positions = (given.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        length = self.get_seq_length()
        if not _is_of_tokens(tokens) or tokens.shape[1] == 1 or not length:
            return given
        if _is_of_tokens(mask):
            num_left = mask.shape[1] - length
        elif isinstance(positions, Tensor):  # which say nothing of padding
            num_left = int(positions[..., -1].max()) + 1 + min(self._pads) - length
        else:
            return given
        if not 0 < num_left < tokens.shape[1]:
            return given
        per_token = {name: value for name in _PER_TOKEN if isinstance(value := given.get(name), Tensor)}
        return given | {name: value[..., -num_left:] for name, value in per_token.items()}

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
            ConfigurationError: They are of another number of rows, or not what the model's config says, or no step of
                the model was seen to compute them.
        """
        self._check_in_step()
        for part in self._staging.parts.layers:
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

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - as above
        """Add what a convolution needs of new tokens, ``(batch, channels, n)``; see `DynamicCache`.

        Raises:
            ConfigurationError: They are of another number of rows, or no step of the model was seen to compute them.
        """
        self._check_in_step()
        if len(conv_states) != len(self._pads):
            raise ConfigurationError(
                f"{len(conv_states)} rows in a cache of {len(self._pads)}: it serves one sequence a row, without beams"
            )
        return super().update_conv_state(conv_states, *args, **kwargs)

    def end_step(self, *, is_whole: bool) -> None:
        """Keep a copy of the states, if what has been computed ends where a block does, and is not to be taken back."""
        if is_whole:
            self._step = None
            self._keep_states()

    def _check_in_step(self) -> None:
        if self._step is None:
            raise ConfigurationError(
                "no step of the model that open_tiered was given computes this: a TieredCache serves that model as a "
                "whole, not a part of it nor another, and until the block of open_tiered ends"
            )

    def _keep_states(self) -> None:
        state, length = self._staging.parts.state, self.get_seq_length()
        if state is None or length % self._staging.block_size:
            return
        if any(cast("LinearAttentionLayer", self.layers[each.layer]).record_past for each in state.tensors):
            return  # assisted decoding computes guesses
        self._states_at[length] = state.read(self.layers)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, a negative number of them; see `DynamicCache`.

        Raises:
            ConfigurationError: A step was interrupted: some layers have more of them than others. Or it is positive.
        """
        if tokens_to_remove > 0:
            raise ConfigurationError(f"crop() takes back so many tokens, as a negative number; got {tokens_to_remove}")
        self._check_is_whole()
        self._step = 0  # who is interrupted leaves layers of different lengths: nothing of them is known
        super().crop(tokens_to_remove)
        self._step = None

    def reset(self) -> None:
        """Forget everything, what was loaded too: the prompts can be computed anew."""
        self._step = 0
        super().reset()  # type: ignore[no-untyped-call]  # transformers' is not
        self._step = None
        self.num_loaded_tokens = [0] * len(self._pads)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refuse: rows of beams are no longer those of the prompts."""
        raise ConfigurationError(_ROWS_STAY)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Refuse, likewise."""
        raise ConfigurationError(_ROWS_STAY)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse, likewise."""
        raise ConfigurationError(_ROWS_STAY)

    def store(self, sequences: Tensor) -> int:
        """Store what ``generate`` has computed, the prompts' blocks and those of what it generated.

        Of each row, up to the first token that is not what was computed. Returns when the cache's tensors are free;
        tiers below memory are written meanwhile, see `BlockingTieredKV.flush`.

        Args:
            sequences: ``(batch, width + generated)``, what ``generate`` returned: prompts first.

        Returns:
            How many blocks were given to the tiers, over all rows.

        Raises:
            ConfigurationError: They do not begin with the prompts, or nothing was computed yet.
        """
        check_is_tensor("sequences", sequences)
        sequences = sequences.detach().cpu()
        width = self._prompts.shape[1]
        if sequences.dim() != 2 or not torch.equal(sequences[:, :width], self._prompts):
            raise ConfigurationError(
                f"sequences of shape {tuple(sequences.shape)} do not begin with the prompts of this cache, "
                f"{tuple(self._prompts.shape)}: store() takes what generate() returned for them"
            )
        num_blocks, size, parts = 0, self._staging.block_size, self._staging.parts.layers
        length, begins = self._step, self._begins
        if length is None:
            length, begins = self.get_seq_length(), [self._begin(part.layers[0]) for part in parts]
            if not length:
                raise ConfigurationError("nothing is computed yet: store() comes after generate() with this cache")
        length = min(length, sequences.shape[1])
        is_other = sequences[:, :length] != self._computed[:, :length]
        for row, pad in enumerate(self._pads):
            tokens = sequences[row, pad : pad + _num_before(is_other[row, pad:])].numpy()
            for part, begin in zip(parts, begins, strict=True):
                # Before it a window's layers have nothing.
                first = max(self._loaded[row], -(-max(0, begin - pad) // size))
                keys = self._staging.keys(part, tokens)[first:]
                if not len(keys):
                    continue
                places = slice(pad + first * size - begin, pad + (first + len(keys)) * size - begin)
                layers = [[self._states(layer, plane, row, places) for plane in part.planes] for layer in part.layers]
                self._staging.store(part, keys, partial(part.pack, layers))
                num_blocks += len(keys)
            if (state := self._staging.parts.state) is not None:
                keys = self._staging.keys(state, tokens)
                for end, states in self._states_at.items():
                    key = keys[end // size - 1 : end // size]
                    self._staging.store(state, key, partial(state.pack, states[row]))
                    num_blocks += len(key)
            self._loaded[row] = max(self._loaded[row], len(tokens) // size)
        self._states_at.clear()
        return num_blocks

    def _load(self, device: torch.device) -> None:
        """Load what every row needs to go on at one place, the last one at which all have that."""
        staging, width, parts = self._staging, self._prompts.shape[1], self._staging.parts.all
        keys = [
            # One token at least is left to compute: it is what the next one is sampled from.
            [staging.keys(part, tokens[pad : width - 1].numpy()) for part in parts]
            for tokens, pad in zip(self._prompts, self._pads, strict=True)
        ]
        there = [[np.zeros(len(each), np.bool_) for each in of_row] for of_row in keys]
        with staging.ranks.before_agreeing(there):
            there = [[self._there(*each) for each in zip(parts, of_row, strict=True)] for of_row in keys]
        there = staging.ranks.agree(there)
        found, length, arrived = 0, self._longest(there), list[Tensor]()
        while length:
            with staging.ranks.before_agreeing(there):
                arrived = [part.empty(len(self._pads), length, device) for part in parts]
                for row, pad in enumerate(self._pads):
                    for part, each, mask, into in zip(parts, keys[row], there[row], arrived, strict=True):
                        num_tokens = max(0, length - pad)
                        first, stop = part.first(num_tokens), -(-num_tokens // staging.block_size)
                        with closing(staging.load(part, each[first:stop])) as pieces:  # lets go where a copy fails
                            num_blocks = part.fill(into, row, num_tokens, pieces)
                        mask[first + num_blocks : stop] = False  # these did not come
            there = staging.ranks.agree(there)
            found, length = length, self._longest(there)
            if length == found or all(part.is_whole for part in parts):
                break  # else something begins sooner than what was loaded: what came is at hand by now
        self._loaded = [max(0, length - pad) // staging.block_size for pad in self._pads]
        if any(self._loaded):
            self.num_loaded_tokens = [max(0, length - pad) for pad in self._pads]
            self._begin_at(length, found, arrived)

    def _begin_at(self, length: int, found: int, arrived: list[Tensor]) -> None:
        """Have all layers go on at ``length``, with what each part has of the tokens before ``found``."""
        planes: dict[int, dict[int, Tensor]] = {}
        parts = self._staging.parts
        for part, of_part in zip(parts.layers, arrived, strict=False):
            skipped = found - of_part.shape[4]  # tokens that lie before those of a window
            for layer, tensors in zip(part.layers, of_part, strict=True):
                for plane, tensor in zip(part.planes, tensors, strict=True):
                    planes.setdefault(layer, {})[plane] = tensor[:, :, : length - skipped]
        for layer, of_layer in sorted(planes.items()):
            super().update(of_layer[0], of_layer[1], layer)
            if isinstance(window := self.layers[layer], DynamicSlidingWindowLayer):
                window.cumulative_length = length
        if parts.state is not None:
            parts.state.begin(self.layers, arrived[parts.state.number])

    def _there(self, part: Part, keys: BlockKeys) -> Mask:
        """Say which blocks of a row's part could be loaded, ``(len(keys),)``."""
        if part.is_whole:
            return np.arange(len(keys)) < self._staging.kv.lookup(keys).num_blocks
        return self._staging.kv.presence(keys)

    def _begin(self, layer: int) -> int:
        """Return the first place of which a layer has KV."""
        of_layer = cast("DynamicLayer", self.layers[layer])
        return of_layer.get_seq_length() - (0 if of_layer.keys is None else of_layer.keys.shape[-2])

    def _states(self, layer: int, plane: int, row: int, places: slice) -> Tensor:
        of_layer = cast("DynamicLayer", self.layers[layer])
        states = cast("Tensor", (of_layer.keys, of_layer.values)[plane])
        return states[row, :, places]

    def _longest(self, there: list[list[Mask]]) -> int:
        """Return the last place at which every row has what each part needs, if these of its blocks are there."""
        size, width, parts = self._staging.block_size, self._prompts.shape[1], self._staging.parts
        lengths = np.arange(0, width, 1 if parts.state is None else size)  # states are at ends of blocks only
        is_served = np.ones(len(lengths), np.bool_)
        for pad, of_row in zip(self._pads, there, strict=True):
            tokens = np.maximum(0, lengths - pad)
            for part, mask in zip(parts.all, of_row, strict=True):
                stops = -(-tokens // size)
                behind_holes = np.where(mask, 0, np.arange(1, len(mask) + 1))
                begun = np.maximum.accumulate(np.append([0], behind_holes))  # of the run that ends at each stop
                is_served &= (stops <= len(mask)) & (begun[np.minimum(stops, len(mask))] <= part.firsts(tokens))
        return int(lengths[is_served][-1])


def _num_before(is_other: Tensor) -> int:
    """Return how many elements are before the first that is True."""
    return int(is_other.logical_not().long().cumprod(0).sum())


def _is_of_tokens(given: object) -> TypeGuard[Tensor]:
    """Say whether this is ``(batch, n)``, an element a token."""
    return isinstance(given, Tensor) and given.dim() == 2


def check_is_tensor(name: str, given: object) -> None:
    """Raise `ConfigurationError` unless it is one: a tokenizer returns a dict of them, or lists."""
    if not isinstance(given, Tensor):
        raise ConfigurationError(
            f"{name} must be a tensor, (batch, width), got {type(given).__name__}: a tokenizer's return_tensors='pt' "
            "makes a dict of such"
        )


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
