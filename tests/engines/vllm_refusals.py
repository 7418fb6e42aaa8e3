"""What the connector says to configurations that cannot work: ``vllm_refusals.py MODEL``.

Runs in vLLM's environment. No engine is started.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from vllm.config import KVTransferConfig, MultiModalConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tiered_kv import ConfigurationError
from tiered_kv.integrations.vllm.compatibility import check_version
from tiered_kv.integrations.vllm.configuration import Configuration

TRANSFER = {
    "kv_connector": "TieredKVConnector",
    "kv_connector_module_path": "tiered_kv.integrations.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"tiers": [{"medium": "nvme", "path": "/kv/{dp_rank}", "capacity": "1GiB"}]},
}
FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
WIDE = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.float32)
WINDOW = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64)

MLA = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=48, dtype=torch.float32)
UNEQUAL = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"layer0": FULL, "layer1": WIDE})
FREEING = RSWASpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, rswa_window=64)
HIDDEN = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"layer0": FULL, "layer1": FREEING})
STATES = MambaSpec(block_size=32, shapes=((4, 8),), dtypes=(torch.float32,))
KEPT_STATES = MambaSpec(block_size=32, shapes=((4, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")
CHUNKS = ChunkedLocalAttentionSpec(
    block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, attention_chunk_size=64
)
LATENT_WINDOW = SlidingWindowMLASpec(
    block_size=32, num_kv_heads=1, head_size=48, dtype=torch.float32, sliding_window=64
)
REPLAYED = replace(LATENT_WINDOW, bounded_replay=True)
RING = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=48, dtype=torch.float32)


def kv_cache(*specs: Any) -> Any:
    """Return the configuration of a KV cache with groups of these specs."""
    groups = [
        KVCacheGroupSpec(list(getattr(spec, "kv_cache_specs", [f"layer{number}"])), spec)
        for number, spec in enumerate(specs)
    ]
    tensors = [KVCacheTensor(size=0, layers=["layer0"], layer_stride=0, block_stride=0)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=tensors, kv_cache_groups=groups)


def said(call: Callable[[], Any]) -> str:
    """Return what is said against it."""
    try:
        call()
    except ConfigurationError as error:
        return str(error)
    return "nothing"


def main(model: str) -> None:
    """Print what is said to each."""
    sizes: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 512}

    def config(*, transfer: dict[str, Any] | None = None, **arguments: Any) -> Any:
        kv_transfer = KVTransferConfig(**{**TRANSFER, **(transfer or {})})
        return EngineArgs(model=model, kv_transfer_config=kv_transfer, **sizes, **arguments).create_engine_config()

    right = config()
    hashed = config(prefix_caching_hash_algo="xxhash")
    in_one_piece, in_chunks = config(enable_prefix_caching=False), config(enable_prefix_caching=False)
    in_one_piece.scheduler_config.enable_chunked_prefill = False  # as vLLM does it, whatever was asked for
    elsewhere = config()
    elsewhere.model_config.model = "nobody/has-this"
    in_stages, in_pieces = config(), config()
    in_stages.parallel_config.pipeline_parallel_size = 2
    in_pieces.parallel_config.decode_context_parallel_size = 2
    empty = KVCacheConfig(
        num_blocks=8, kv_cache_tensors=kv_cache(FULL).kv_cache_tensors, kv_cache_groups=[KVCacheGroupSpec([], FULL)]
    )
    asleep = config()
    asleep.model_config.enable_sleep_mode = True  # which no CPU has
    counting, hashing, of_text, of_embeddings = (
        config(enable_prefix_caching=is_on) for is_on in (False, True, False, False)
    )
    for each in (counting, hashing, of_text, of_embeddings):
        each.model_config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=0)
    of_text.model_config.multimodal_config.language_model_only = True
    of_embeddings.model_config.multimodal_config.language_model_only = True
    of_embeddings.model_config.multimodal_config.enable_mm_embeds = True
    os.environ.pop("PYTHONHASHSEED", None)

    def by_runner_v2() -> Configuration:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        try:
            return Configuration.of(right, kv_cache(FULL, KEPT_STATES))
        finally:
            del os.environ["VLLM_USE_V2_MODEL_RUNNER"]

    cases = {
        "right": lambda: Configuration.of(right, kv_cache(FULL)),
        "latents": lambda: Configuration.of(right, kv_cache(MLA)),
        "hybrid": lambda: Configuration.of(right, kv_cache(FULL, KEPT_STATES)),
        "no states": lambda: Configuration.of(right, kv_cache(FULL, STATES)),
        "chunks": lambda: Configuration.of(right, kv_cache(FULL, CHUNKS)),
        "latent window": lambda: Configuration.of(right, kv_cache(MLA, LATENT_WINDOW)),
        "made anew": lambda: Configuration.of(right, kv_cache(MLA, REPLAYED, RING)),
        "nothing kept": lambda: Configuration.of(right, kv_cache(REPLAYED)),
        "policy": lambda: Configuration.of(config(transfer={"kv_load_failure_policy": "fail"}), kv_cache(FULL)),
        "groups": lambda: Configuration.of(right, kv_cache(FULL, WINDOW)),
        "window": lambda: Configuration.of(right, kv_cache(WINDOW)),
        "subclass": lambda: Configuration.of(right, kv_cache(FREEING)),
        "one of them": lambda: Configuration.of(right, kv_cache(HIDDEN)),
        "states": lambda: Configuration.of(right, kv_cache(STATES)),
        "sizes": lambda: Configuration.of(right, kv_cache(UNEQUAL)),
        "stages": lambda: Configuration.of(in_stages, kv_cache(FULL)),
        "an empty stage": lambda: Configuration.of(in_stages, empty),
        "pieces": lambda: Configuration.of(in_pieces, kv_cache(FULL)),
        "sleep": lambda: Configuration.of(asleep, kv_cache(FULL)),
        "hash": lambda: Configuration.of(hashed, kv_cache(FULL)),
        "in one piece": lambda: Configuration.of(in_one_piece, kv_cache(MLA)),
        "in chunks": lambda: Configuration.of(in_chunks, kv_cache(FULL)),
        "images by number": lambda: Configuration.of(counting, kv_cache(FULL)),
        "images by hash": lambda: Configuration.of(hashing, kv_cache(FULL)),
        "embeddings by number": lambda: Configuration.of(of_embeddings, kv_cache(FULL)),
        "no images": lambda: Configuration.of(of_text, kv_cache(FULL)),
        "weights": lambda: Configuration.of(elsewhere, kv_cache(FULL)),
        "unknown": lambda: Configuration.of(
            config(transfer={"kv_connector_extra_config": {"load_timeout": 3}}), kv_cache(FULL)
        ),
        "both": lambda: Configuration.of(
            config(transfer={"kv_connector_extra_config": {"connect": "unix:///run/kv.sock", "tiers": ["cpu"]}}),
            kv_cache(FULL),
        ),
        "runner": by_runner_v2,
        "version": lambda: check_version("0.40.1"),
    }
    answers: dict[str, Any] = {name: said(call) for name, call in cases.items()}
    right.parallel_config.data_parallel_index = 3  # of a dense model every replica has data_parallel_rank 0
    replica: Any = Configuration.of(right, kv_cache(FULL)).below.settings
    layout: Any = Configuration.of(right, kv_cache(FULL, WINDOW, UNEQUAL, KEPT_STATES, CHUNKS))
    answers["groups of ours"] = [
        [group.table, group.num_blocks, group.chunk_tokens, group.page_bytes, list(group.layer_names)]
        for group in layout.groups
    ]
    answers["path"] = str(replica.tiers[0].path)
    print(json.dumps(answers))


if __name__ == "__main__":
    os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})
    main(sys.argv[1])
