"""A cache for one model of transformers: who it is, what its blocks are, and that it can be served at all."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tiered_kv.cache.blocking import BlockingTieredKV, open_blocking
from tiered_kv.integrations.identity import Below, checkpoint_weights
from tiered_kv.integrations.transformers.batching import tiered_batches
from tiered_kv.integrations.transformers.past import LayerPart, ModelStaging, TieredCache
from tiered_kv.settings.settings import TieredKVSettings
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.keys import ModelIdentity
from tiered_kv.values.layout import KVGroup, KVLayout, Order

_STAGING_BYTES: Final = 32 * 1024 * 1024
"""Host memory through which blocks of `TieredCache` pass; one block at least."""
_NOT_OF_THE_MODEL: Final = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")
"""Entries of a config that change no KV, or are said elsewhere, and differ between one loaded and one made."""


class TieredModel:
    """A model whose prefixes are kept in tiers. Made by `open_tiered`.

    Attributes:
        kv: The cache below, for `BlockingTieredKV.stats`, `BlockingTieredKV.evict` and the like.
        block_size: Tokens a block has.
    """

    def __init__(self, model: PreTrainedModel, kv: BlockingTieredKV, parts: list[LayerPart], salt: str | bytes) -> None:
        """Made by `open_tiered` only."""
        self.kv = kv
        self.block_size = parts[0].group.block_size
        self._model = model
        self._staging = ModelStaging(kv, parts, _STAGING_BYTES, salt)

    def past(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> TieredCache:
        """Return a cache that begins with what the tiers have of these prompts, for one ``model.generate``.

        Args:
            input_ids: ``(batch, width)``, what ``generate`` is going to get. Prompts that are shorter are padded on the
                left, as ``generate`` wants them.
            attention_mask: ``(batch, width)``, 0 where ``input_ids`` is padding; none is by default.

        Raises:
            ConfigurationError: The shapes differ, or the mask hides anything but the left end of a row.
        """
        return TieredCache(self._staging, self._model.config, self._model.device, input_ids, attention_mask)


@contextmanager
def open_tiered(
    model: PreTrainedModel,
    settings: TieredKVSettings | Mapping[str, Any] | None = None,
    *,
    weights: str | None = None,
    salt: str | bytes = b"",
    block_size: int = 256,
) -> Iterator[TieredModel]:
    """Open a cache for a model, for a ``with`` block.

    Inside, `generate_batch` and the other ways into continuous batching load the prefixes that tiers have and store the
    blocks that they complete. Nothing of transformers is changed but this one model, and that until the block ends.

    Args:
        model: As ``from_pretrained`` returned it, in one process, with full attention or windows in its layers.
        settings: Tiers and limits; from the environment by default. Or ``{"connect": "unix:///..."}``: blocks are kept
            by the server of this host that listens there.
        weights: Names the weights. By default it is told from the checkpoint that the model was loaded from (its files,
            or the hub's commit), so weights changed since, or adapters, must be named.
        salt: Keeps tenants apart: what is stored with one is not found with another.
        block_size: Tokens a block has. Continuous batching needs a ``page_size`` of as many; 256 is its default.

    Raises:
        ConfigurationError: The settings, a model that can't be served so, or weights that nobody named.
        BackendUnavailableError: A tier cannot be reached.
    """
    _check(model)
    parts = _parts_of(model, block_size)
    layout = KVLayout(tuple(part.group for part in parts))
    cache = Below.of(settings).cache(model=identity_of(model, weights), layout=layout, device=model.device)
    with open_blocking(cache) as kv, tiered_batches(model, kv, parts, salt):
        yield TieredModel(model, kv, parts, salt)


def _parts_of(model: PreTrainedModel, block_size: int) -> list[LayerPart]:
    """Return what a model keeps of a token, as one computed token shows it.

    Raises:
        ConfigurationError: It keeps nothing, or keys and values of several heads that differ in size.
    """
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), past_key_values=cache)
    alike: dict[tuple[int | None, tuple[int, int], tuple[int, int], torch.dtype], list[int]] = {}
    for number, layer in enumerate(cast("list[DynamicLayer]", cache.layers)):  # as `_check` has seen
        if layer.keys is None or layer.values is None:
            raise ConfigurationError(f"layer {number} of {type(model).__name__} keeps no KV of a token: not served")
        heads, others = ((states.shape[1], states.shape[3]) for states in (layer.keys, layer.values))
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        alike.setdefault((window, heads, others, layer.keys.dtype), []).append(number)
    parts: list[LayerPart] = []
    for (window, heads, others, dtype), layers in alike.items():
        if heads != others and (heads[0], others[0]) != (1, 1):
            raise ConfigurationError(
                f"{type(model).__name__} keeps keys of {heads[0]} heads of {heads[1]} and values of {others[0]} of "
                f"{others[1]}: not served"
            )
        order: Order = "NHD" if heads == others else "MLA"
        kept = [((0, 1), heads)] if heads == others else [((0,), heads), ((1,), others)]
        for planes, (num_heads, dim) in kept:
            group = KVGroup(len(layers), num_heads, dim, str(dtype).removeprefix("torch."), block_size, order)
            parts.append(LayerPart(group, len(parts), tuple(layers), planes, window))
    return parts


def identity_of(model: PreTrainedModel, weights: str | None = None) -> ModelIdentity:
    """Say which weights compute a model's KV.

    Raises:
        ConfigurationError: There is no telling from a checkpoint, and ``weights`` names none.
    """
    if weights is None:
        path, commit = model.config.name_or_path, getattr(model.config, "_commit_hash", None)
        if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
            raise ConfigurationError(
                "this model has adapters, which its checkpoint does not tell: pass weights=, a name that says which"
            )
        if path and Path(path).is_dir():
            weights = checkpoint_weights(path)
        elif commit:
            weights = f"hub:{path}@{commit}"
        else:
            raise ConfigurationError(
                "this model was not loaded from a checkpoint, so what computes its KV is not known: pass weights=, any "
                "name that changes when the weights do"
            )
    facts = model.config.get_text_config(decoder=True).to_dict()
    kept = {name: value for name, value in facts.items() if name not in _NOT_OF_THE_MODEL}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
    return ModelIdentity(str(facts.get("model_type")), weights, extra=(("config", digest),))


def _check(model: PreTrainedModel) -> None:
    """Raise `ConfigurationError` if this model keeps anything but K and V, or latents, of tokens; or not all here."""
    kinds = [type(layer) for layer in DynamicCache(config=model.config).layers]
    if others := {kind.__name__ for kind in kinds if kind not in (DynamicLayer, DynamicSlidingWindowLayer)}:
        raise ConfigurationError(
            f"models with full attention and windows are served: {type(model).__name__} has layers that keep "
            f"{', '.join(sorted(others))}: no KV of each token, or more than that (a state, an index)"
        )
    if model.config.is_encoder_decoder:
        raise ConfigurationError(
            f"{type(model).__name__} is an encoder and a decoder: its KV is not of its prompt alone"
        )
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) != 1 or "meta" in devices or (getattr(model, "_tp_size", None) or 1) > 1:
        raise ConfigurationError(
            f"the whole model must be on one device of this process, it is on {', '.join(sorted(devices))}; "
            "tensor parallel models are not served"
        )
    if model.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigurationError(f"KV of {model.dtype} is not served")
