"""Which model a vLLM serves: what other weights computed, or these in another way, must never be served."""

import hashlib
import json
import os
from typing import Any, Final

from tiered_kv.errors import ConfigurationError
from tiered_kv.integrations.identity import checkpoint_weights
from tiered_kv.keys import ModelIdentity

_NO_FACTS: Final = {"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype"}


def model_identity(vllm_config: Any, weights: str | None) -> ModelIdentity:
    """Return what to name a model's blocks by.

    Args:
        vllm_config: vLLM's.
        weights: The user's own name of the weights; else the checkpoint's files say it.

    Raises:
        ConfigurationError: There are no files to tell by.
    """
    model = vllm_config.model_config
    facts = {
        "config": {key: value for key, value in model.hf_config.to_dict().items() if key not in _NO_FACTS},
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    name = "+".join(model.hf_config.architectures or ["unknown"])
    load_format = str(vllm_config.load_config.load_format)
    weights = weights or weights_of(model.model, model.revision, load_format=load_format)
    return ModelIdentity(name, weights, (("vllm config", digest),))


def weights_of(model: str, revision: str | None = None, *, load_format: str = "auto") -> str:
    """Name the weights of a model's checkpoint, a folder or what is in the cache of Hugging Face.

    Raises:
        ConfigurationError: There are no files to tell by.
    """
    folder = _folder_of(model, revision)
    if folder is None or load_format == "dummy":
        raise ConfigurationError(
            f"no files of weights of {model!r} are on this machine to tell them by: name them, e.g. "
            '"weights": "llama-3-8b, revision 5206a32", beside "tiers", by a name that changes when they do'
        )
    return checkpoint_weights(folder)


def _folder_of(model: str, revision: str | None) -> str | None:
    if os.path.isdir(model):  # noqa: PTH112 - the name of a model is no path, and may be too long for one
        return model
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - vLLM brings it, and not every model comes from it

    try:
        return str(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, ValueError):  # not there, or no name of a model there
        return None
