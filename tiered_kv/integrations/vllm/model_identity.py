"""Which model a vLLM serves: what other weights computed, or these in another way, must never be served.

`tests/engines/judged.py` has all that vLLM's configuration says, and why the rest of it changes no name.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from tiered_kv.integrations.identity import (
    checkpoint_weights,
    code_of,
    digest_of,
    file_digest,
    file_digests,
    folder_of,
)
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.keys import ModelIdentity

_NO_FACTS: Final = {"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype"}

_KINDS: Final = ("model_type", "rope_type", "type")
_BY_LENGTH: Final = ("longrope", "su", "dynamic", "llama4_text")
"""Kinds of rope whose frequencies vLLM takes by ``max_model_len``, and models whose attention it tunes by that, or as
their generation config says."""

_WHERE_SAID: Final = {
    "attention_config": ("use_prefill_query_quantization", "disable_flashinfer_q_quantization"),
    "lora_config": ("enable_moe_shared_loras", "enable_mixed_moe_lora_format"),
}
"""Of vLLM's configurations what is in a name where it is on: narrower queries, and how adapters of experts are read."""

_ENVIRONMENT: Final = {
    "VLLM_SSM_CONV_STATE_LAYOUT": "SD", "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "0", "VLLM_MARLIN_INPUT_DTYPE": "",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": "", "VLLM_HUMMING_INPUT_QUANT_CONFIG": "",
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT": "", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "NONE", "VLLM_CPU_INT4_W4A8": "1",
    "VLLM_B12X_MOE_FP4_FORCE_A16": "0", "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": "0",
}  # fmt: skip
"""What in vLLM's environment lays out states or pages otherwise, of which their form tells nothing, or computes in
other numbers; and what it is where nobody says anything."""

_OF_IMAGES: Final = (
    "mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method", "mm_encoder_attn_dtype"
)  # fmt: skip
"""How the engine prepares images, videos and sounds: vLLM names them by their bytes and by what a request says."""
_PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Of a checkpoint: how it has them prepared."""
_TOKENIZER_FILE: Final = "tekken.json"
"""Mistral's, of many megabytes, which says that too: beside the tokenizer, which may be in a folder of its own."""

_ELSEWHERE: Final = ("dummy", "ipc_cache", "modelexpress", "tensorizer")
"""Formats to load weights by that may be others than those in the checkpoint's files: by chance, out of the memory of
another process, or of a path of their own."""
_TOWERS: Final = ("text_model_id", "audio_model_id")
"""Of a config: other models whose weights this one is made of (Ultravox), by a path, or their newest revision."""


def model_identity(vllm_config: Any, weights: str | None) -> ModelIdentity:
    """Return what to name a model's blocks by. What is not said in a start that says nothing is in no name.

    Args:
        vllm_config: vLLM's.
        weights: The user's own name of the weights; else the checkpoint's files say it.

    Raises:
        ConfigurationError: There are no files to tell by.
    """
    model, load, speculative = vllm_config.model_config, vllm_config.load_config, vllm_config.speculative_config
    config, load_format = _config_of(model), str(load.load_format)
    facts = _how(vllm_config, config) | _of_adapters(vllm_config.lora_config, model) | _of_images(model)
    for of, names in _WHERE_SAID.items():
        facts |= {name: True for name in names if getattr(getattr(vllm_config, of), name, False)}
    facts |= {name: value for name, usual in _ENVIRONMENT.items() if (value := _said(name, usual)) != usual}
    if speculative is not None and speculative.uses_draft_kv_cache():
        facts["draft"] = _draft_of(speculative.draft_model_config, model)
    if load_format != "auto":  # of files of a kind some take a part
        facts["load"] = [load_format, load.model_loader_extra_config]
    if not weights:
        weights = weights_of(model.model, model.revision, load_format=load_format)
        if towers := [weights_of(path) for key in _TOWERS if (path := config.get(key))]:
            facts["towers"] = towers
    name = "+".join(model.hf_config.architectures or ["unknown"])
    return ModelIdentity(name, weights, (("vllm config", digest_of(facts)),))


def weights_of(model: str, revision: str | None = None, *, load_format: str = "auto") -> str:
    """Name the weights of a model's checkpoint, a folder or what is in the cache of Hugging Face.

    Raises:
        ConfigurationError: There are no files to tell by.
    """
    folder = folder_of(model, revision)
    if folder is None or load_format in _ELSEWHERE:
        why = f", which load_format {load_format!r} loads," if load_format in _ELSEWHERE else ""
        raise ConfigurationError(
            f"no files of weights of {model!r}{why} are on this machine to tell them by: name them, e.g. "
            '"weights": "llama-3-8b, revision 5206a32", beside "tiers", by a name that changes when they do'
        )
    return checkpoint_weights(folder, load_format)


def _said(name: str, usual: str) -> str:
    """Return what a variable of vLLM's environment says, however it is spelled, or in the file that it names."""
    value = os.environ.get(name, usual)
    if name.endswith("_CONFIG") and os.path.isfile(value):  # noqa: PTH113 - JSON may be too long for a path
        return file_digest(value, f"{name}, {value!r},")
    return {"false": "0", "true": "1"}.get(value.lower(), value)


def _how(vllm_config: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a model computes KV, and keeps it."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    facts: dict[str, Any] = {
        "config": config,
        "dtype": str(model.dtype),
        # All that vLLM quantizes as it loads is "online": how, and which layers are left out, is said beside it.
        "quantization": [str(model.quantization), str(getattr(model, "quantization_config", None))],
        "classes": getattr(model, "model_class_overrides", {}),
        # Layers that are left out have another dtype, and which ones these are no page tells.
        "kv_cache_dtype": " ".join([str(cache.cache_dtype), *sorted(cache.kv_cache_dtype_skip_layers)]),
        "state_dtypes": [str(getattr(cache, f"mamba_{what}cache_dtype", None)) for what in ("", "ssm_")],
    }
    if _goes_by_length(config):
        said = {**model.try_get_generation_config(), **model.override_generation_config}
        facts["length"] = [model.max_model_len, said.get("attn_temperature_tuning")]
    if model.model_impl not in {"auto", "vllm"}:
        facts["model_impl"] = model.model_impl  # that of transformers scales a dynamic rope otherwise
    if model.trust_remote_code:
        folder = folder_of(model.model, model.revision)
        facts["code"] = [model.code_revision, {} if folder is None else code_of(folder, model.code_revision)]
    return facts


def _of_adapters(lora: Any, model: Any) -> dict[str, Any]:
    """Return how adapters are applied. Which ones is in the names of requests' blocks."""
    facts: dict[str, Any] = {}
    if lora is not None and lora.target_modules:
        facts["lora_target_modules"] = sorted(lora.target_modules)  # of adapters vLLM leaves out the others
    if lora is not None and str(lora.lora_dtype) not in {"auto", str(model.dtype)}:
        facts["lora_dtype"] = str(lora.lora_dtype)
    return facts


def _of_images(model: Any) -> dict[str, Any]:
    """Return how images, videos and sounds are prepared, by the engine and as the files on this machine say."""
    images = getattr(model, "multimodal_config", None)
    if images is None:
        return {}
    facts: dict[str, Any] = {
        "images": {name: getattr(images, name, None) for name in _OF_IMAGES},
        "processor": {
            **_files_of(model.model, model.revision, *_PROCESSOR_FILES),
            **_files_of(model.tokenizer, model.tokenizer_revision, _TOKENIZER_FILE),
        },
    }
    if scales := getattr(images, "mm_encoder_fp8_scale_path", None):
        facts["scales"] = file_digest(scales, f"the scales of the encoder in {scales!r}")
    return facts


def _draft_of(draft: Any, target: Any) -> list[Any]:
    """Return what tells a draft whose KV is in blocks, beside the target's or in a group of its own."""
    weights = f"{draft.model}, {draft.revision}"
    if draft.model == target.model:  # a part of its own checkpoint
        weights = ""
    else:  # of another place, as with --download-dir, by its name alone: drafts that are not right cost time
        with suppress(ConfigurationError):
            weights = weights_of(draft.model, draft.revision)
    config = _config_of(draft)
    if isinstance(own := config.get("model"), Mapping):  # within vLLM's config of EAGLE, and with a path too
        config["model"] = _facts_of(own)
    return [config, str(draft.quantization), weights]


def _config_of(model: Any) -> dict[str, Any]:
    """Return what a model's config says of what it computes."""
    return _facts_of(model.hf_config.to_dict())


def _facts_of(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _NO_FACTS}


def _files_of(model: str, revision: str | None, *patterns: str) -> dict[str, str]:
    """Digest some files of a checkpoint, by name, if it is on this machine."""
    folder = folder_of(model, revision)
    return {} if folder is None else file_digests(folder, *patterns)


def _goes_by_length(config: Mapping[str, Any]) -> bool:
    """Say whether a model's config, or one in it, has vLLM compute KV by how long a prompt may be."""
    return any(
        _goes_by_length(value) if isinstance(value, Mapping) else key in _KINDS and value in _BY_LENGTH
        for key, value in config.items()
    )
