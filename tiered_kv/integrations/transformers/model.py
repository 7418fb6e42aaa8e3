"""A cache for one model of transformers: who it is, what its blocks are, and that it can be served at all."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from inspect import signature
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from torch.nn import Module, ModuleDict, Parameter, ParameterDict
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from tiered_kv.cache.blocking import open_blocking
from tiered_kv.integrations.identity import Below, checkpoint_weights, code_of, commit_in, digest_of
from tiered_kv.integrations.transformers.batching import BEGIN, tiered_batches
from tiered_kv.integrations.transformers.model_parts import (
    VERSION,
    Layer,
    LayerPart,
    ModelParts,
    StatePart,
    StateTensor,
    version,
)
from tiered_kv.integrations.transformers.past import ModelStaging, TieredCache, check_is_tensor
from tiered_kv.integrations.transformers.tensor_parallel import Ranks
from tiered_kv.settings.settings import TieredKVSettings
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.keys import ModelIdentity, salt_digest
from tiered_kv.values.layout import PAGE_BYTES, KVGroup, KVLayout, Order

_STAGING_BYTES: Final = 32 * 1024 * 1024
"""Host memory through which blocks of `TieredCache` pass; one block at least."""
_SERVED: Final = (
    DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer, DummyLayer
)  # fmt: skip
"""Kinds of layers, each exactly: one derived from them keeps more."""
_NOT_TEXT: Final = ("image", "video", "audio")
_OF_ROWS: Final = frozenset({"adapter_names", "alora_offsets"})
"""By which PEFT gives rows of a batch adapters of their own, whichever are active: arguments that hooks of its layers
add for one ``generate``."""
_OWN_CODE: Final = "transformers_modules"
"""Where a model's class is that is not of transformers: of its checkpoint, or of another that its config names."""
_NOT_OF_THE_MODEL: Final = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")
"""Entries of a config that change no KV, or are said elsewhere, and differ between one loaded and one made."""


class TieredModel:
    """A model whose prefixes are kept in tiers. Made by `open_tiered`.

    Attributes:
        kv: The cache below, for `BlockingTieredKV.stats`, `BlockingTieredKV.evict` and the like.
        block_size: Tokens a block has.
    """

    def __init__(self, model: PreTrainedModel, staging: ModelStaging, check_adapters: Callable[[], None]) -> None:
        """Made by `open_tiered` only."""
        self._check_adapters = check_adapters
        self.kv = staging.kv
        self.block_size = staging.block_size
        self._model = model
        self._staging = staging

    def past(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> TieredCache:
        """Return a cache that begins with what the tiers have of these prompts, for one ``model.generate``.

        It takes what steps of this model compute, as a whole, until the block of `open_tiered` ends; nothing else.

        Args:
            input_ids: ``(batch, width)``, what ``generate`` is going to get. Prompts that are shorter are padded on the
                left, as ``generate`` wants them.
            attention_mask: ``(batch, width)``, 0 where ``input_ids`` is padding; none is by default. Give ``generate``
                the same. Without one it hides each token that is its ``pad_token_id``, unless that ends answers too,
                and is refused where ``past`` was not told that these are hidden.

        Raises:
            ConfigurationError: The shapes differ, or the mask hides anything but the left end of a row, or anything
                where the model has states; or tokens stand for images, videos or sound; or the model has got other
                adapters since `open_tiered`, or lost them.
        """
        self._check_adapters()
        check_is_tensor("input_ids", input_ids)
        if attention_mask is not None:
            check_is_tensor("attention_mask", attention_mask)
        for kind in _NOT_TEXT:
            token = getattr(self._model.config, f"{kind}_token_id", None)
            if token is not None and bool((input_ids == token).any()):
                raise ConfigurationError(
                    f"a prompt has {kind} tokens, which are the same whatever they stand for, and blocks are named "
                    "by tokens alone: generate this one without a TieredCache"
                )
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
        model: As ``from_pretrained`` returned it, with full attention, windows or states in its layers. Of a tensor
            parallel model every rank opens its own at the same time, with tiers of its own or a server's, and gives the
            same prompts to `TieredModel.past`.
        settings: Tiers and limits; from the environment by default. Or ``{"connect": "unix:///..."}``: blocks are kept
            by the server of this host that listens there.
        weights: Names the weights. By default it is told from the checkpoint that the model was loaded from (its files,
            or the hub's commit) and, without ranks, some of each plain tensor, so weights changed since, or adapters,
            must be named.
        salt: Keeps tenants apart: what is stored with one is not found with another.
        block_size: Tokens a block has. Continuous batching needs a ``page_size`` of as many; 256 is its default.

    Raises:
        ConfigurationError: The settings, a model that can't be served so or has a cache open, or weights that nobody
            named.
        BackendUnavailableError: A tier cannot be reached.
    """
    if version() < VERSION:
        raise ConfigurationError(
            f"open_tiered needs transformers {VERSION[0]}.{VERSION[1]} or newer, this is {transformers.__version__}"
        )
    _check(model)
    check_adapters = _Adapters(model).check
    check_adapters()
    salt_digest(salt)  # refuses what is none
    ranks = Ranks.of(model)
    parts = _parts_of(model, block_size)
    layout = KVLayout(tuple(part.group for part in parts.all))
    identity = identity_of(model, weights)
    cache = Below.of(settings).cache(model=identity, layout=layout, shard=ranks.shard, device=model.device)
    with open_blocking(cache) as kv, tiered_batches(model, kv, parts, salt, check_adapters):
        tiered = TieredModel(model, ModelStaging(kv, parts, _STAGING_BYTES, salt, ranks), check_adapters)
        with (
            _steps_seen(model, check_adapters),
            nullcontext() if parts.state is None else _by_blocks(model, block_size),
        ):
            yield tiered


@contextmanager
def _steps_seen(model: PreTrainedModel, check: Callable[[], None]) -> Iterator[None]:
    """Have a `TieredCache` see which tokens a step computes into it, where, and what is hidden from them.

    What ``check`` raises is raised by the step.
    """
    arguments = signature(model.forward).parameters.values()
    names = [each.name for each in arguments if each.kind is each.POSITIONAL_OR_KEYWORD]

    def begin(_model: Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401 - any model's
        named = dict(zip(names, args, strict=False)) | given
        if (past := _cache_of(named)) is None:
            return args, given
        check()
        named = past.rest(named)
        past.begin_step(named)
        return args[len(names) :], named

    def end(_model: Module, _args: Any, given: dict[str, Any], output: Any) -> None:  # noqa: ANN401 - any model's
        if (past := _cache_of(given)) is not None:
            past.end_step(is_whole=output is not None)

    hooks = (
        model.register_forward_pre_hook(begin, with_kwargs=True),
        model.register_forward_hook(end, with_kwargs=True, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _by_blocks(model: PreTrainedModel, block_size: int) -> Iterator[None]:
    """Have `generate` compute prompts block by block into a `TieredCache`, which keeps the states after each."""
    config: Any = model.generation_config
    plain: Any = model.generate

    def generate(*args: Any, **given: Any) -> Any:  # noqa: ANN401 - what it wraps
        is_ours = config.prefill_chunk_size is None and _cache_of(given) is not None
        if is_ours:
            config.prefill_chunk_size = block_size
        try:
            return plain(*args, **given)
        finally:
            if is_ours:  # else another thread's call has set it, and takes it back
                config.prefill_chunk_size = None

    vars(model)["generate"] = generate  # of this one model; its class stays as it is
    try:
        yield
    finally:
        del vars(model)["generate"]


def _cache_of(given: Mapping[str, Any]) -> TieredCache | None:
    """Return the cache of a step, whatever its argument is called: it had other names, which are still taken."""
    return next((each for each in given.values() if isinstance(each, TieredCache)), None)


@torch.no_grad()
def _parts_of(model: PreTrainedModel, block_size: int) -> ModelParts:
    """Return what a model keeps of its tokens, as some that it computes show it.

    Raises:
        ConfigurationError: It keeps nothing of one, or keys and values of several heads that differ in size, or states
            that it does not go on from.
    """
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), cache=cache)
    layers: list[Layer] = cache.layers
    alike: dict[tuple[int | None, tuple[int, int], tuple[int, int], torch.dtype], list[int]] = {}
    for number, layer in enumerate(layers):
        if type(layer) in (LinearAttentionLayer, DummyLayer):
            continue
        if layer.keys is None or layer.values is None:
            raise ConfigurationError(f"layer {number} of {type(model).__name__} keeps no KV of a token: not served")
        heads, others = ((states.shape[1], states.shape[3]) for states in (layer.keys, layer.values))
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        alike.setdefault((window, heads, others, layer.keys.dtype), []).append(number)
    parts: list[LayerPart] = []
    for (window, heads, others, dtype), numbers in alike.items():
        if heads != others and (heads[0], others[0]) != (1, 1):
            raise ConfigurationError(
                f"{type(model).__name__} keeps keys of {heads[0]} heads of {heads[1]} and values of {others[0]} of "
                f"{others[1]}: not served"
            )
        order: Order = "NHD" if heads == others else "MLA"
        kept = [((0, 1), heads)] if heads == others else [((0,), heads), ((1,), others)]
        for planes, (num_heads, dim) in kept:
            group = KVGroup(len(numbers), num_heads, dim, str(dtype).removeprefix("torch."), block_size, order)
            parts.append(LayerPart(group, len(parts), tuple(numbers), planes, window))
    states = StateTensor.all_of(layers)
    recurrent = next((state for state in states if state.kind == "recurrent"), None)
    if recurrent is not None and not _goes_on_from(model, recurrent):
        raise ConfigurationError(
            f"{type(model).__name__} of transformers forgets its states when several tokens come at once, so that a "
            "prompt's rest can't follow what a tier has of it: not served"
        )
    return ModelParts(tuple(parts), StatePart.of(states, len(parts), block_size) if states else None)


def _goes_on_from(model: PreTrainedModel, state: StateTensor) -> bool:
    """Say whether two tokens that follow a state are computed from it.

    Those of transformers' Mamba 1 (Jamba) are not: its scan of several tokens begins with zeros.
    """
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    left = []
    for value in (0, torch.finfo(state.dtype).max ** 0.5):  # so much that some is left, however fast it is forgotten
        cache = DynamicCache(config=model.config)
        model(input_ids=token, cache=cache)
        state.find(cache.layers).fill_(value)
        model(input_ids=token.expand(1, 2), cache=cache)
        left.append(state.find(cache.layers).float())
    return not bool(((left[0] - left[1]).abs() <= left[0].abs().max()).all())


def identity_of(model: PreTrainedModel, weights: str | None = None) -> ModelIdentity:
    """Say which weights compute a model's KV.

    Raises:
        ConfigurationError: There is no telling from a checkpoint, and ``weights`` names none.
    """
    if weights is None:
        path, commit = model.config.name_or_path, getattr(model.config, "_commit_hash", None)
        if _has_adapters(model):
            raise ConfigurationError(
                "this model has adapters, which its checkpoint does not tell: pass weights=, a name that says which"
            )
        if path and Path(path).is_dir():
            weights = f"{checkpoint_weights(path)}, {_held(model)}"
        elif commit:
            weights = f"hub:{path}@{commit}, {_held(model)}"
        else:
            raise ConfigurationError(
                "this model was not loaded from a checkpoint, so what computes its KV is not known: pass weights=, any "
                "name that changes when the weights do"
            )
    facts = model.config.get_text_config(decoder=True).to_dict()
    kept = {name: value for name, value in facts.items() if name not in _NOT_OF_THE_MODEL}
    kept["quantization_config"] = model.config.to_dict().get("quantization_config")  # of a model with images too
    module, folder = type(model).__module__.split("."), model.config.name_or_path
    if module[0] == _OWN_CODE:  # of the hub, whose commit is in its name, or of the folder
        kept["code"] = commit_in(module[2:]) or (code_of(folder) if folder and Path(folder).is_dir() else "")
    return ModelIdentity(str(facts.get("model_type")), weights, extra=(("config", digest_of(kept)),))


def _held(model: PreTrainedModel) -> str:
    """Digest some of each tensor that a model has: which variant, subfolder or GGUF file of a checkpoint was loaded.

    Nothing says that. Of what ranks have parts of, or is quantized into classes of tensors of its own, nothing is read.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters() if Ranks.of(model).group is None else ():
        if type(parameter) is Parameter and parameter.numel():
            row = parameter.detach()
            while row.dim() > 1:
                row = row[len(row) // 2]
            some = row.reshape(-1)[: PAGE_BYTES // row.element_size()].contiguous().cpu()
            digest.update(f"{name} {some.dtype} {len(some)} ".encode() + some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _has_adapters(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False)) or hasattr(model, "peft_config")


class _Adapters:
    """The adapters that a model computes with as its cache is opened, to which all that is stored belongs."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # PEFT's layers, which say which of their adapters are active, and which are merged into their weights, then
        # whatever is active; a model of transformers has a method for that.
        self._layers: list[Any] = [
            layer for layer in model.modules() if isinstance(getattr(type(layer), "active_adapters", None), property)
        ]
        self._parts = [_adapters_of(layer) for layer in self._layers]
        self._active = self._now()
        # Held, so that what comes in their place has no address of theirs.
        self._held = [dict(each) for parts in self._parts for each in parts]

    def check(self) -> None:
        """Raise `ConfigurationError` if the model has got other ones since, or lost them, or rows have their own."""
        hooks = (hook for layer in self._layers for hook in layer._forward_pre_hooks.values())  # noqa: SLF001 - there is no other way to ask
        if any(_OF_ROWS & {*getattr(hook, "keywords", ())} for hook in hooks):
            raise ConfigurationError(
                "PEFT has this model compute by adapter_names= or alora_offsets=, of which no block's name tells: "
                "generate without a TieredCache then; after a generate that failed so PEFT goes on with them: load the "
                "model anew"
            )
        if self._now() != self._active:
            raise ConfigurationError(
                "this model has got other adapters since open_tiered, or more or less of them, and what was stored "
                "before is of another: open another cache, with weights=, a name that says which adapters"
            )

    def _now(self) -> object:
        return _has_adapters(self._model), [
            not layer.disable_adapters and _added(layer, parts)
            for layer, parts in zip(self._layers, self._parts, strict=True)
        ]


def _adapters_of(layer: Module) -> list[dict[str, Any]]:
    """Return the dictionaries in which a layer of PEFT's has what its adapters are made of, by their names."""
    children = [*layer.children()]
    modules = [vars(each)["_modules"] for each in children if isinstance(each, ModuleDict)]
    return modules + [vars(each)["_parameters"] for each in children if isinstance(each, ParameterDict)]


def _added(layer: Any, parts: Sequence[Mapping[str, Any]]) -> list[tuple[str, float | None, list[int]]]:  # noqa: ANN401 - PEFT's
    """Return which adapters a layer adds, how much of each, if it says that itself and not for what it wraps, and what.

    One that was loaded in the place of another has its name, and other parts.
    """
    scales = vars(layer).get("scaling", {})
    names = layer.merged_adapters or layer.active_adapters
    return [(name, scales.get(name), [id(each[name]) for each in parts if name in each]) for name in names]


def _check(model: PreTrainedModel) -> None:
    """Raise `ConfigurationError` if this model keeps anything that is not served, or not all of it here."""
    if not isinstance(model, PreTrainedModel):
        raise ConfigurationError(f"a model is what from_pretrained returns, not {type(model).__name__}")
    if BEGIN in vars(model):
        raise ConfigurationError(
            "open_tiered has a cache open for this model, and generate_batch could not tell which of two is meant: "
            "close that one first, or load the model once more"
        )
    kinds = [type(layer) for layer in DynamicCache(config=model.config).layers]
    if others := {kind.__name__ for kind in kinds if kind not in _SERVED}:
        raise ConfigurationError(
            f"{type(model).__name__} has layers that keep {', '.join(sorted(others))}: served are full attention, "
            "windows and states, and no more than that (an index, a state beside a window)"
        )
    text = model.config.get_text_config(decoder=True)
    ropes = getattr(text, "rope_parameters", None) or {}
    types = {str(each.get("rope_type")) for each in (ropes, *ropes.values()) if isinstance(each, Mapping)}
    if by_length := types & {"dynamic", "longrope"}:
        raise ConfigurationError(
            f"{type(model).__name__} has rope of type {', '.join(sorted(by_length))}: transformers rotates all keys of "
            "a prompt by how long that is, so a longer one can't go on with what a shorter one has stored"
        )
    if "reuse" in (getattr(text, "kv_sharing_modes", None) or ()):
        raise ConfigurationError(f"{type(model).__name__} has layers that share others' KV: not served")
    if all(kind in (LinearAttentionLayer, DummyLayer) for kind in kinds):
        raise ConfigurationError(
            f"{type(model).__name__} has states alone: of a model without attention generate computes all of the "
            "prompt again, whatever its cache has"
        )
    if model.config.is_encoder_decoder:
        raise ConfigurationError(
            f"{type(model).__name__} is an encoder and a decoder: its KV is not of its prompt alone"
        )
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) != 1 or "meta" in devices:
        raise ConfigurationError(
            f"what a process has of a model must be on one device, it is on {', '.join(sorted(devices))}"
        )
    if model.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigurationError(f"KV of {model.dtype} is not served")
