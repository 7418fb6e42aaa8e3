"""Write a checkpoint of a small Llama with random weights: ``make_llama.py FOLDER [SEED]``.

Runs in an engine's environment.
"""

import json
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main(folder: str, seed: str = "0") -> None:
    """Make it; the same seed makes the same weights."""
    torch.manual_seed(int(seed))
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,  # large enough for tokens to depend on the whole prompt
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)  # float32, as torch makes it
    print(json.dumps({"folder": folder}))


if __name__ == "__main__":
    main(*sys.argv[1:])
