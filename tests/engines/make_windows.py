"""Write a checkpoint of a small model whose layers are of several kinds: ``make_windows.py FOLDER SHAPE``.

Runs in vLLM's environment. Its weights are random, and windows are shorter than prompts.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # large enough for tokens to depend on the whole prompt
    "tie_word_embeddings": False,
}
WINDOW, FULL = "sliding_attention", "full_attention"


def olmo3() -> Any:
    """A window in every other layer, which is the first."""
    config = {**SMALL, "num_hidden_layers": 2, "sliding_window": 64, "layer_types": [WINDOW, FULL]}
    del config["head_dim"]
    return Olmo3ForCausalLM(Olmo3Config(**config))


def gemma3() -> Any:
    """Five layers with windows to one without."""
    layers = [WINDOW] * 5 + [FULL]
    config = Gemma3TextConfig(**SMALL, num_hidden_layers=12, sliding_window=64, layer_types=layers * 2)
    return Gemma3ForCausalLM(config)


def gpt_oss() -> Any:
    """A window in every other layer, sinks, and experts."""
    config = GptOssConfig(
        **SMALL, num_hidden_layers=4, sliding_window=64, layer_types=[WINDOW, FULL] * 2, num_local_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    return GptOssForCausalLM(config)


def qwen3_next() -> Any:
    """Three layers with a recurrent state to one with full attention, and experts."""
    config = Qwen3NextConfig(
        **SMALL, num_hidden_layers=4, layer_types=["linear_attention"] * 3 + [FULL], num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config)


def deepseek_v3() -> Any:
    """Latents in all layers, of the one size that vLLM's kernels for CPUs have, which want bfloat16."""
    config = {**SMALL, "num_hidden_layers": 3, "first_k_dense_replace": 3, "q_lora_rank": 64, "kv_lora_rank": 512}
    config |= {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_key_value_heads": 4}
    del config["head_dim"]
    return DeepseekV3ForCausalLM(DeepseekV3Config(**config)).bfloat16()


SHAPES: dict[str, Callable[[], Any]] = {
    "deepseek_v3": deepseek_v3,
    "olmo3": olmo3,
    "gemma3": gemma3,
    "gpt_oss": gpt_oss,
    "qwen3_next": qwen3_next,
}


def main(folder: str, shape: str) -> None:
    """Make it."""
    torch.manual_seed(0)
    SHAPES[shape]().save_pretrained(folder)
    print(json.dumps({"folder": folder}))


if __name__ == "__main__":
    main(*sys.argv[1:])
