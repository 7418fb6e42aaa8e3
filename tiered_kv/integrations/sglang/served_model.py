"""Which model an SGLang serves: what other weights computed, or these in another way, must never be served.

`tests/engines/judged.py` has all that SGLang's arguments say, and why the rest of it changes no name.
"""

import hashlib
import os
from pathlib import Path
from typing import Any, Final

from tiered_kv.integrations.identity import (
    adapter_weights,
    checkpoint_weights,
    code_of,
    digest_of,
    file_digest,
    folder_of,
)
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.keys import ModelIdentity

_ARGUMENTS: Final = (
    "quantization", "modelopt_quant", "quantize_and_serve", "rl_quant_profile", "json_model_override_args",
    "speculative_draft_model_path", "kv_cache_dtype",
)  # fmt: skip
"""SGLang's, which change what its weights compute or how that is kept."""
_WHERE_SAID: Final[dict[str, object]] = {
    "dtype": "auto", "model_impl": "auto", "model_config_parser": "auto", "forward_hooks": None,
    "enable_precise_embedding_interpolation": False, "decrypted_config_file": None,
    "enable_decoder_swa_bounded_replay": None, "enable_encoder_swa_bounded_replay": False,
    "flashinfer_mxfp4_moe_precision": "default", "enable_w4a4_mxfp4_megamoe": False,
    "deepep_dispatcher_output_dtype": "auto", "flashinfer_a2a_dispatch_type": None,
    "enable_quant_communications": False, "kt_method": "AMXINT4", "kt_num_gpu_experts": None,
    "kt_max_deferred_experts_per_token": None, "speculative_draft_model_revision": None,
    "speculative_draft_model_quantization": None, "uno_lora_path": None,
}  # fmt: skip
"""Others that do, and what they are where nobody says anything: that is in no name."""
_ELSEWHERE: Final = ("dummy", "expert_pack", "presharded", "private", "remote", "remote_instance")
"""Formats to load weights by that may be others than those in the checkpoint's files: by chance, kept from an earlier
start, or of a place of their own."""
_BESIDE: Final = ("modelopt_checkpoint_restore_path", "kt_weight_path")
"""Paths of weights that are loaded beside, or in the place of, the checkpoint's."""
_FILES: Final = ("rl_quant_profile", "decrypted_config_file")
"""Arguments that are paths of files: these may change under the same path."""


def model_identity(config: Any, pool: Any, weights: str | None) -> ModelIdentity:  # noqa: ANN401 - SGLang's
    """Say which weights, and which part of them, compute the pages.

    Raises:
        ConfigurationError: There is no telling, and nobody named them.
    """
    from sglang.srt.runtime_context import get_lora, get_server_args  # noqa: PLC0415 - by now the engine has begun

    facts = {"pp": f"{config.pp_rank}/{config.pp_size}", "cp": f"{config.attn_cp_rank}/{config.attn_cp_size}"}
    facts["format"] = str(pool.storage_format_tag)
    try:
        arguments, lora = get_server_args(), get_lora()
    except Exception:  # noqa: BLE001 - there is no engine, only its controller
        arguments = lora = None
    facts |= {name: str(getattr(arguments, name, None)) for name in _ARGUMENTS}
    said = {name: getattr(arguments, name, default) for name, default in _WHERE_SAID.items()}
    facts |= {name: str(value) for name, value in said.items() if value != _WHERE_SAID[name]}
    if scales := getattr(arguments, "quantization_param_path", None):
        facts["scales"] = file_digest(scales, f"the scales of the KV cache in {scales!r}")
    if lora is not None and lora.enable_lora and lora.lora_paths:
        facts["adapters"] = _adapters(lora)
    path = str(getattr(arguments, "model_path", None) or config.model_name or "")
    revision = getattr(arguments, "revision", None)
    if getattr(arguments, "trust_remote_code", False):
        folder = folder_of(path, revision)
        facts["code"] = "" if folder is None else digest_of({"code": code_of(folder)})
    for name in _FILES:
        if file := getattr(arguments, name, None):
            given = Path(path, file)  # if it is not absolute, in the checkpoint's folder
            facts[f"in {name}"] = file_digest(given, str(given)) if given.is_file() else ""
    if (load_format := str(getattr(arguments, "load_format", "auto"))) != "auto":  # of a kind some take a part
        facts["load"] = f"{load_format} {getattr(arguments, 'model_loader_extra_config', None)}"
    if weights is None:
        by_name = 'name its weights by "tiered_kv": {"weights": ...}'
        if why := _elsewhere(arguments, path):
            raise ConfigurationError(f"weights by {why} are in no file of the checkpoint: {by_name}")
        weights = checkpoint_weights(_folder_of(path, revision, by_name), load_format)
    return ModelIdentity(Path(path).name or "model", weights, extra=tuple(sorted(facts.items())))


def _elsewhere(arguments: Any, path: str) -> str:  # noqa: ANN401 - SGLang's
    """Say what has SGLang load weights that need not be those in the checkpoint's files here, if anything does."""
    load_format = getattr(arguments, "load_format", None)
    if load_format in _ELSEWHERE:
        return f"load_format {load_format!r}"
    if getattr(arguments, "weight_cache_mode", None) == "client":  # whose daemon may have loaded older ones
        return "weight_cache_mode 'client'"
    if getattr(arguments, "download_dir", None) and not os.path.isdir(path):  # noqa: PTH112 - the name of a model
        return "download_dir"
    return next((name for name in _BESIDE if getattr(arguments, name, None)), "")


def _adapters(lora: Any) -> str:  # noqa: ANN401 - SGLang's
    """Say what the LoRA adapters that SGLang starts with compute.

    Its hashes have their names and paths alone, and are the same once one of them is trained anew. An adapter that is
    loaded later has a name by chance.

    Raises:
        ConfigurationError: The files of one can't be read.
    """
    told = [
        (each.lora_id, adapter_weights(_folder_of(each.lora_path, None, "have its files there before SGLang starts")))
        for each in lora.lora_paths
    ]
    how = sorted(lora.lora_target_modules or ()), lora.experts_shared_outer_loras
    return hashlib.sha256(repr((sorted(told), how)).encode()).hexdigest()


def _folder_of(path: str, revision: str | None, otherwise: str) -> str:
    """Return the folder of a checkpoint, or an adapter: its path, or where the hub's client keeps it.

    Raises:
        ConfigurationError: It is nowhere on this host; what to do then is said by ``otherwise``.
    """
    if (folder := folder_of(path, revision)) is None:
        raise ConfigurationError(f"{path!r} is no folder here, nor in the cache of Hugging Face: {otherwise}")
    return folder
