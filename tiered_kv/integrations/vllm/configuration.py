"""What is wanted of the connector, checked at start: what cannot work is refused before a request comes.

Which model a vLLM serves: what other weights computed, or these in another way, must never be served.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

from tiered_kv.integrations.identity import CONNECT, Below, checkpoint_weights
from tiered_kv.settings.registry import OWN_MEDIA
from tiered_kv.settings.setting_errors import Checked
from tiered_kv.settings.settings import Seconds
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.keys import BlockKeys, ModelIdentity

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


GATHERED_S: Final = 1.0
"""For how long blocks gather in host memory before they are written to storage, where it has room for them."""
CACHE_SETTINGS: Final = {"tiers", "limits", "codec", CONNECT}
"""What of the settings is the cache's, and not the adapter's."""


class ConnectorSettings(Checked):
    """What ``kv_connector_extra_config`` may say, beside ``tiers``, ``limits`` and ``codec`` of `TieredKVSettings`.

    Or beside ``connect``, the address of a host's server that has them.
    """

    weights: str | None = None
    """Names the weights; read off the checkpoint's files if left out."""
    lookup_timeout_s: Seconds = 1.0
    """How long a request waits for tiers shared with others to say what they have; then it goes on without them."""
    load_timeout_s: Seconds = 5.0
    """How long a request waits for its blocks to be in host memory; then they are computed."""


@dataclass(frozen=True)
class Configuration:
    """What both sides of the connector go by.

    Attributes:
        connector: How it behaves.
        below: What the cache is made of, or whose it is.
        model: Whose blocks these are.
        num_ranks: Of tensor parallelism.
        block_size: Tokens of one of vLLM's blocks, which are ours.
        hashes_per_block: vLLM's hashes a block.
        layer_names: Of the KV group.
        page_bytes: Of one layer's part of a block.
        num_engine_blocks: In vLLM's cache.
        loads: Whether anything is loaded.
        stores: Whether anything is stored.
        tells_events: Whether vLLM publishes KV events.
    """

    connector: ConnectorSettings
    below: Below
    model: ModelIdentity
    num_ranks: int
    block_size: int
    hashes_per_block: int
    layer_names: tuple[str, ...]
    page_bytes: int
    num_engine_blocks: int
    loads: bool
    stores: bool
    tells_events: bool

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> Self:
        """Read vLLM's configuration.

        Raises:
            ConfigurationError: Something in it cannot work, or would give wrong answers.
        """
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise ConfigurationError(
                f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: then vLLM answers a request with "
                'nothing where a block is gone between its lookup and its load. Set it to "recompute"'
            )
        _check_parallel(vllm_config.parallel_config)
        _check_hashes(vllm_config.cache_config)
        _check_prefixes(vllm_config)
        group = _only_group(kv_cache_config)
        extra = with_rank(dict(transfer.kv_connector_extra_config), vllm_config.parallel_config.data_parallel_index)
        connector = ConnectorSettings(**{key: extra[key] for key in extra if key not in CACHE_SETTINGS})
        block_size = group.kv_cache_spec.block_size
        return cls(
            connector=connector,
            below=below_of({key: extra[key] for key in extra if key in CACHE_SETTINGS}),
            model=model_identity(vllm_config, connector.weights),
            num_ranks=vllm_config.parallel_config.tensor_parallel_size,
            block_size=block_size,
            hashes_per_block=block_size // (kv_cache_config.hash_block_size or block_size),
            layer_names=tuple(group.layer_names),
            page_bytes=_page_bytes(group),
            num_engine_blocks=kv_cache_config.num_blocks,
            loads=transfer.is_kv_consumer,
            stores=transfer.is_kv_producer,
            tells_events=bool(getattr(vllm_config.kv_events_config, "enable_kv_cache_events", False)),
        )

    def keys(self, request: Any, first: int, stop: int) -> BlockKeys:
        """Name a request's blocks, as far as its tokens are known. Its LoRA and images are in vLLM's hashes."""
        each = self.hashes_per_block
        hashes = request.block_hashes[(first + 1) * each - 1 : max(0, stop) * each : each]
        return BlockKeys.from_hashes(hashes, block_size=self.block_size, start=first, salt=request.cache_salt or "")


def below_of(given: Mapping[str, Any]) -> Below:
    """Return what is below a vLLM. Where nobody says when storage is written, that is by windows, once a second.

    Each write tells the event loop, which takes the interpreter from vLLM's own thread; blocks that steps fill are few.

    Raises:
        ConfigurationError: Settings that cannot work, or some beside ``connect``.
    """
    below = Below.of(given)
    settings = below.settings
    if settings is None or "clean_after_s" in settings.limits.model_fields_set:
        return below
    if any("write" in tier.model_fields_set for tier in settings.tiers):
        return below
    tiers = tuple(
        tier if tier.medium in OWN_MEDIA or tier.read_only else tier.model_copy(update={"write": "back"})
        for tier in settings.tiers
    )
    limits = settings.limits.model_copy(update={"clean_after_s": GATHERED_S})
    return replace(below, settings=settings.model_copy(update={"tiers": tiers, "limits": limits}))


def _check_parallel(parallel: Any) -> None:
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise ConfigurationError(f"{name} is {size}: tiered_kv keeps blocks of tensor and data parallel ranks only")


def _check_hashes(cache: Any) -> None:
    algorithm = str(cache.prefix_caching_hash_algo)
    if not algorithm.startswith("sha256") and "PYTHONHASHSEED" not in os.environ:
        raise ConfigurationError(
            f"prefix_caching_hash_algo is {algorithm!r}: without PYTHONHASHSEED it names blocks anew in each process, "
            'so that nothing is found after a restart. Set it to "sha256"'
        )


def _check_prefixes(vllm_config: Any) -> None:
    if not vllm_config.cache_config.enable_prefix_caching and not vllm_config.scheduler_config.enable_chunked_prefill:
        raise ConfigurationError(
            "prefix caching and chunked prefill are both off: vLLM turns them off where it computes a prompt in one "
            "piece only (MLA on a CPU, layers that are not causal), and would answer wrongly after a prefix that was "
            "loaded. If it was you, turn one of them on; else serve this model without this connector"
        )


def _only_group(kv_cache_config: Any) -> Any:
    groups = kv_cache_config.kv_cache_groups
    kinds = dict.fromkeys(type(spec) for group in groups for spec in _specs(group))
    named = ", ".join(kind.__name__ for kind in kinds)
    refusal = f"this model has {len(groups)} KV groups ({named}), and tiered_kv keeps one of full attention or MLA: "
    if len(groups) > 1:
        raise ConfigurationError(
            f"{refusal}vLLM gives and takes the blocks of each at times of its own. With "
            "--disable-hybrid-kv-cache-manager, which it sets by itself for this connector, full attention and sliding "
            "windows are one; a model with state spaces is served without this connector"
        )
    if not kinds.keys() <= {FullAttentionSpec, MLAAttentionSpec}:  # others that derive from them free blocks as they go
        raise ConfigurationError(
            f"{refusal}of all others vLLM keeps no block for each token of a prefix. Serve this model without this "
            "connector"
        )
    return groups[0]


def _specs(group: Any) -> list[Any]:
    """Return what is said of a group's layers, once where all are alike."""
    spec = group.kv_cache_spec
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def _page_bytes(group: Any) -> int:
    each = {layer.page_size_bytes for layer in _specs(group)}
    if len(each) > 1:
        raise ConfigurationError(
            f"layers of this model have pages of {sorted(each)} bytes, and tiered_kv keeps equal ones"
        )
    return int(each.pop())


def with_rank(value: Any, rank: int) -> Any:
    """Put the data parallel rank into texts that ask for it: each replica has tiers of its own on one machine."""
    if isinstance(value, str):
        return value.replace("{dp_rank}", str(rank))
    if isinstance(value, Mapping):
        return {key: with_rank(each, rank) for key, each in value.items()}
    return [with_rank(each, rank) for each in value] if isinstance(value, list | tuple) else value
