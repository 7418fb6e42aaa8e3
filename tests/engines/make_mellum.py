"""Write a checkpoint of a small Mellum, which SGLang keeps in two pools: ``make_mellum.py FOLDER``.

Runs in SGLang's environment. Every other layer has a window, shorter than prompts; the weights are random. It is one of
few such models that SGLang runs on a CPU.
"""

import json
import sys

import torch
from transformers import MellumConfig, MellumForCausalLM

WINDOW, FULL = "sliding_attention", "full_attention"


def main(folder: str) -> None:
    """Write it, and say where."""
    torch.manual_seed(0)
    config = MellumConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, tie_word_embeddings=False, sliding_window=64, layer_types=[WINDOW, FULL] * 2,
        initializer_range=0.2,  # large enough for tokens to depend on the whole prompt
        mlp_layer_types=["dense"] * 4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        rope_parameters={
            WINDOW: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "default", "rope_theta": 1e6},
        },
    )  # fmt: skip
    MellumForCausalLM(config).save_pretrained(folder)
    print(json.dumps({"folder": folder}))


if __name__ == "__main__":
    main(*sys.argv[1:])
